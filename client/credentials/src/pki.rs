//! `permafrost pki`: a private CA, and the certificates of nodes, agents and people.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use permafrost_identity::{
    self, Authority, CertificateOrder, DEFAULT_DAYS, Identity, IdentityError, Issued, Namespaces,
    Role, Subject,
};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::table::facts;
use serde::Serialize;

use crate::deny::{self, DenyArguments, ListArguments};

/// Arguments of `permafrost pki`.
#[derive(Debug, Args)]
pub struct PkiArguments {
    #[command(subcommand)]
    command: PkiCommand,
}

#[derive(Debug, Subcommand)]
enum PkiCommand {
    /// Make a private CA.
    Init(InitArguments),
    /// Issue a certificate with its key.
    Issue(IssueArguments),
    /// Issue a certificate anew, with a new key; or change the CA.
    Rotate(RotateArguments),
    /// Show what a certificate allows and when it is over, or which CAs there are.
    Show(ShowArguments),
    /// Refuse certificates from now on, on every node of the cluster, and end their connections.
    Deny(DenyArguments),
    /// Take denials back on the node that is asked.
    Undeny(DenyArguments),
    /// List who is denied.
    Denied(ListArguments),
}

#[derive(Debug, Args)]
struct InitArguments {
    /// Where the CA is kept; not on a node.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Name of the cluster.
    #[arg(long, value_name = "CLUSTER", default_value = "permafrost")]
    name: String,
    /// In place of a CA that is there. Nothing that it issued is trusted any more.
    #[arg(long, short)]
    force: bool,
}

#[derive(Debug, Args)]
struct IssueArguments {
    /// The CA.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Name of the node, agent or person.
    #[arg(long)]
    name: String,
    /// node, agent, reader or operator.
    #[arg(long)]
    role: String,
    /// What an agent, a reader or an operator may touch: jobs named NS/…; `default` are those without a slash, `*` all.
    /// Repeatable.
    #[arg(long = "namespace", value_name = "NS")]
    namespaces: Vec<String>,
    /// It may also remove checkpoints in its namespaces: `rm`, and `abort` of parked sessions. For agents and
    /// operators.
    #[arg(long)]
    delete: bool,
    /// An address of it, which CRIU compares with its --address. Repeatable.
    #[arg(long = "host", value_name = "NAME_OR_IP")]
    hosts: Vec<String>,
    /// Days from now that it is valid.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_DAYS)]
    days: u32,
    /// Where ca.pem, cert.pem and key.pem go; `issued/NAME` beside the CA otherwise.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// In place of one that is there.
    #[arg(long, short)]
    force: bool,
}

#[derive(Debug, Args)]
struct RotateArguments {
    /// The CA.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// The certificate to issue anew, in the same place and for the same holder.
    #[arg(long, value_name = "DIR", required_unless_present_any = ["ca", "retire"])]
    out: Option<PathBuf>,
    /// Days from now that it is valid; as many as before otherwise.
    #[arg(long, value_name = "N", requires = "out")]
    days: Option<u32>,
    /// Add a new CA, which issues from here on. Those before stay trusted.
    #[arg(long, conflicts_with = "out")]
    ca: bool,
    /// Name of the cluster, for the new CA.
    #[arg(
        long,
        value_name = "CLUSTER",
        requires = "ca",
        default_value = "permafrost"
    )]
    name: String,
    /// Drop the CAs before the newest, once everything was issued anew.
    #[arg(long, conflicts_with_all = ["out", "ca"])]
    retire: bool,
}

#[derive(Debug, Args)]
struct ShowArguments {
    /// A directory that `pki issue` or `pki init` wrote.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Contents of a certificate, for scripts.
#[derive(Debug, Serialize)]
struct Certificate {
    /// Directory of the certificate and its key.
    directory: PathBuf,
    /// Serial number, hexadecimal.
    serial: String,
    /// Name of the holder.
    name: String,
    /// Role of the holder: `node`, `agent`, `reader` or `operator`.
    role: &'static str,
    /// Namespaces whose jobs the holder may use; `*` stands for all.
    namespaces: Vec<String>,
    /// True if the holder may delete checkpoints.
    delete: bool,
    /// Hosts of URLs for which the certificate is valid.
    hosts: Vec<String>,
    /// Beginning of its validity, milliseconds since the Unix epoch.
    valid_from_unix_ms: u64,
    /// End of its validity, milliseconds since the Unix epoch.
    expires_unix_ms: u64,
    /// CAs that the holder trusts.
    authorities: Vec<Ca>,
}

/// A certification authority.
#[derive(Debug, Serialize)]
struct Ca {
    /// Name of the CA.
    name: String,
    /// End of its validity, milliseconds since the Unix epoch.
    expires_unix_ms: u64,
}

/// CAs of a directory without a certificate; the newest first.
#[derive(Debug, Serialize)]
struct Authorities {
    /// Directory of the CAs.
    directory: PathBuf,
    /// The CAs; the first issues certificates.
    authorities: Vec<Ca>,
}

/// Runs `permafrost pki`.
///
/// # Errors
/// The failure of the command.
pub fn pki(context: &Context, arguments: &PkiArguments) -> Result<(), Failure> {
    match &arguments.command {
        PkiCommand::Init(arguments) => init(context, arguments),
        PkiCommand::Issue(arguments) => issue(context, arguments),
        PkiCommand::Rotate(arguments) => rotate(context, arguments),
        PkiCommand::Show(arguments) => show(context, arguments),
        PkiCommand::Deny(arguments) => deny::deny(context, arguments),
        PkiCommand::Undeny(arguments) => deny::undeny(context, arguments),
        PkiCommand::Denied(arguments) => deny::denied(context, arguments),
    }
}

fn init(context: &Context, arguments: &InitArguments) -> Result<(), Failure> {
    Authority::create(&arguments.dir, &arguments.name, arguments.force)?;
    context.remark("whoever has ca-key.pem can be anybody: keep it where no node can read it");
    print_authorities(context, &arguments.dir)
}

fn issue(context: &Context, arguments: &IssueArguments) -> Result<(), Failure> {
    let order = CertificateOrder {
        name: arguments.name.clone(),
        role: arguments.role.parse::<Role>()?,
        namespaces: Namespaces::new(arguments.namespaces.iter().map(String::as_str))?,
        delete: arguments.delete,
        hosts: arguments.hosts.clone(),
        days: arguments.days,
    };
    let authority = open(&arguments.dir)?;
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| authority.default_place(&order.name));
    let issued = authority.issue(&order, &out, arguments.force)?;
    if order.namespaces.is_empty() && matches!(order.role, Role::Agent | Role::Reader) {
        context.remark("without --namespace it may use no job at all");
    }
    print_issued(context, &issued)
}

fn rotate(context: &Context, arguments: &RotateArguments) -> Result<(), Failure> {
    let authority = open(&arguments.dir)?;
    if arguments.ca {
        authority.succeed(&arguments.name)?;
        context
            .remark("now issue every certificate anew, and then drop the CA before with --retire");
        return print_authorities(context, &arguments.dir);
    }
    if arguments.retire {
        authority.retire()?;
        context.remark("now issue every certificate anew, so that its holder drops the CA, too");
        return print_authorities(context, &arguments.dir);
    }
    // clap has seen to that.
    let Some(out) = &arguments.out else {
        return Err(Failure::new(Code::Invalid, "--out is missing"));
    };
    let issued = authority.reissue(out, arguments.days)?;
    print_issued(context, &issued)
}

/// Opens a CA; a directory without one gets a clearer message than a missing file.
fn open(directory: &Path) -> Result<Authority, Failure> {
    Authority::open(directory).map_err(|error| match error {
        IdentityError::Io { ref source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            Failure::new(
                Code::NotFound,
                format!("there is no CA in {}", directory.display()),
            )
            .hint("make one with permafrost pki init")
        }
        error => error.into(),
    })
}

fn show(context: &Context, arguments: &ShowArguments) -> Result<(), Failure> {
    let directory = &arguments.directory;
    let subject = match Subject::in_directory(directory) {
        Ok(subject) => subject,
        Err(IdentityError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::NotFound && directory.is_dir() =>
        {
            return print_authorities(context, directory);
        }
        Err(error) => return Err(error.into()),
    };
    print_issued(
        context,
        &Issued {
            directory: directory.clone(),
            subject,
        },
    )?;
    // A certificate that cannot be used is shown too; the exit code reports the error.
    Identity::load(directory)?;
    Ok(())
}

fn print_issued(context: &Context, issued: &Issued) -> Result<(), Failure> {
    let subject = &issued.subject;
    let certificate = Certificate {
        directory: issued.directory.clone(),
        serial: subject.serial.clone(),
        name: subject.name.clone(),
        role: subject.role.name(),
        namespaces: subject.namespaces.iter().map(str::to_owned).collect(),
        delete: subject.delete,
        hosts: subject.hosts.clone(),
        valid_from_unix_ms: unix_ms(subject.not_before),
        expires_unix_ms: unix_ms(subject.not_after),
        authorities: authorities(&issued.directory)?,
    };
    context.print(&certificate, |certificate| {
        facts(
            &format!("{} {}", certificate.role, certificate.name),
            &[
                ("directory", certificate.directory.display().to_string()),
                ("serial", certificate.serial.clone()),
                ("namespaces", certificate.namespaces.join(", ")),
                (
                    "may delete",
                    if certificate.delete { "yes" } else { "" }.to_owned(),
                ),
                ("hosts", certificate.hosts.join(", ")),
                ("expires", human::expiry(certificate.expires_unix_ms)),
                ("trusts", names(&certificate.authorities)),
            ],
        )
    })
}

fn print_authorities(context: &Context, directory: &Path) -> Result<(), Failure> {
    let value = Authorities {
        directory: directory.to_owned(),
        authorities: authorities(directory)?,
    };
    context.print(&value, |value| {
        let mut text = String::new();
        for (index, ca) in value.authorities.iter().enumerate() {
            let state = if index == 0 { "issues" } else { "is trusted" };
            text.push_str(&facts(
                &format!("{} {state}", ca.name),
                &[("expires", human::expiry(ca.expires_unix_ms))],
            ));
        }
        text
    })
}

fn authorities(directory: &Path) -> Result<Vec<Ca>, Failure> {
    Ok(permafrost_identity::trusted(directory)?
        .into_iter()
        .map(|ca| Ca {
            name: ca.name,
            expires_unix_ms: unix_ms(ca.not_after),
        })
        .collect())
}

fn names(authorities: &[Ca]) -> String {
    let names: Vec<&str> = authorities.iter().map(|ca| ca.name.as_str()).collect();
    names.join(", ")
}

fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
