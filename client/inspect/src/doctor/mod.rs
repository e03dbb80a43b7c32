//! `permafrost doctor`: checks what Permafrost needs of a machine, of its daemon and of its cluster.
//!
//! Each area has a file. A check never ends the others: what could not be looked at is a check of its own that says so.

mod api;
mod certificates;
mod cluster;
mod criu;
mod daemon;
mod files;
mod kernel;
mod limits;
mod place;
mod report;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use permafrost_criu::Criu;
use permafrost_protocol::control::{ServerStatus, request};
use permafrost_terminal::api::ApiArguments;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};

use report::Findings;
pub use report::{DoctorCheck, DoctorReport, DoctorStatus};

/// Help of `permafrost doctor`.
pub const DOCTOR_EXAMPLES: &str = "\
Checks the kernel, CRIU, limits, memory, the region, ports, permissions, certificates and, through permafrostd, \
the cluster: the clocks of its nodes, and etcd. Nothing is changed, and no region is opened. Each check ends as ok, as a \
warning (it works, and something may surprise you), as an error (something does not work), or as skipped; warnings and \
errors say what to do.

With --api only what the node answers over HTTP, and the credentials for it, are checked: for machines without CRIU.

Exit codes: 0 no errors (there may be warnings), 1 errors; the report is printed in both cases.

Examples:
    permafrost doctor
    permafrost doctor --json | jq '.checks[] | select(.status != \"ok\")'
    permafrost doctor --data-dir /mnt/pmem0/permafrost      before permafrostd is started there
    permafrost doctor --api https://n1:7119 --api-token-file token --api-ca ca.pem
";

/// Arguments of `permafrost doctor`.
#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// Path of the CRIU program.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_CRIU")]
    criu: Option<PathBuf>,
    /// Data directory of a permafrostd that does not run yet: that it does not run is then no error [default:
    /// /var/lib/permafrost].
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Region of a permafrostd that does not run yet [default: DATA_DIR/region].
    #[arg(long, value_name = "PATH")]
    region: Option<PathBuf>,
    /// Directory of certificates to check besides those of a running permafrostd. Repeatable.
    #[arg(long, value_name = "DIR")]
    certificates: Vec<PathBuf>,
    /// File that only its owner may read, such as a file of tokens, to check besides those of a running permafrostd.
    /// Repeatable.
    #[arg(long, value_name = "FILE")]
    secret: Vec<PathBuf>,
    /// TCP address that is to be free for a permafrostd that does not run. Repeatable.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7117")]
    port: Vec<std::net::SocketAddr>,
    #[command(flatten)]
    api: ApiArguments,
}

impl DoctorArguments {
    pub(crate) fn criu(&self) -> Option<&PathBuf> {
        self.criu.as_ref()
    }

    pub(crate) fn api(&self) -> &ApiArguments {
        &self.api
    }

    /// Returns the secret files that were named.
    pub(crate) fn secrets(&self) -> &[PathBuf] {
        &self.secret
    }
}

/// Runs `permafrost doctor`. The exit code is 1 if a check has found an error.
///
/// # Errors
/// The report cannot be printed.
pub fn doctor(context: &Context, arguments: &DoctorArguments) -> Result<ExitCode, Failure> {
    let report = examine(context, arguments);
    context.print(&report, DoctorReport::human)?;
    Ok(match report.errors {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(Code::Internal as u8),
    })
}

/// Makes all checks.
pub(crate) fn examine(context: &Context, arguments: &DoctorArguments) -> DoctorReport {
    let mut findings = Findings::default();
    if arguments.api.api.is_some() {
        api::check(&mut findings, context, &arguments.api);
        return findings.report();
    }
    let criu = Criu::new(arguments.criu.clone());
    kernel::check(&mut findings);
    criu::check(&mut findings, &criu);
    let is_before = arguments.data_dir.is_some() || arguments.region.is_some();
    let status = daemon::ask(&mut findings, context, is_before);
    limits::check(&mut findings, status.as_ref());
    match &status {
        Some(status) => {
            daemon::check(&mut findings, status);
            cluster::check(&mut findings, context, status);
        }
        None => {
            let data_dir = arguments.data_dir.as_deref();
            place::check(
                &mut findings,
                data_dir.unwrap_or(Path::new("/var/lib/permafrost")),
                arguments.region.as_deref(),
            );
            place::ports(&mut findings, &arguments.port);
        }
    }
    files::check(&mut findings, context, status.as_ref(), &arguments.secret);
    let of_daemon = status.iter().flat_map(|status| &status.files);
    let of_daemon = of_daemon
        .filter(|file| file.purpose == "identity")
        .map(|file| PathBuf::from(&file.path));
    for directory in of_daemon.chain(arguments.certificates.iter().cloned()) {
        certificates::check(&mut findings, &directory);
    }
    findings.report()
}

/// Asks the daemon for its state.
pub(crate) fn status(context: &Context) -> Result<ServerStatus, Failure> {
    Ok(context.connect()?.call(request::Status {})?)
}
