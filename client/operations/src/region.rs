//! `permafrost region`: the files that a region is on. `check` and `salvage` run `permafrostd region`, as only the
//! daemon can read regions.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, Subcommand};
use permafrost_agent::host::arguments::parse_size;
use permafrost_protocol::control::{MediumStatus, RegionMedia, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::checkpoint_name;
use permafrost_terminal::progress::ProgressDisplay;
use permafrost_terminal::table::{Align, Table};

/// Help text behind the options of `permafrost region`.
pub const REGION_EXAMPLES: &str = "\
A region is on one file (permafrostd --region) and on up to 15 more. New dumps go to the fastest tier with room: nvm, \
ssd, hdd, then names of your own. A MEDIUM is a number, a UUID or a path as `ls` prints them; 0 is the first file.

Examples:
    permafrost region ls
    permafrost region add /srv/hdd/more --size 2T --tier hdd
    permafrost region add /var/lib/permafrost/cold --size 4T --store s3://bucket/node1
    permafrost region grow 0 64G
    permafrost region drain 1 && permafrost region rm 1
    permafrost region cool --dry-run         would move by the node's rules (permafrostd --cool-after, --cool-above)
    permafrost region warm train@7           its pages move to the fastest tier with room
    permafrost region rm 1 --lost --yes      its file is gone for good
    permafrost region check /var/lib/permafrost/region      no daemon has it open
";

/// Arguments of `permafrost region`.
#[derive(Debug, Args)]
pub struct RegionArguments {
    #[command(subcommand)]
    command: RegionCommand,
}

#[derive(Debug, Subcommand)]
enum RegionCommand {
    /// List the files that the region is on, and the room on each.
    Ls,
    /// Add a file to the region, or bring one back that was missing.
    Add {
        /// Path of the file, on the node's host. It is made, or is empty, or was part of this region.
        #[arg(value_name = "PATH")]
        path: PathBuf,
        /// Size to make the file with, such as 512M or 2T.
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        size: Option<u64>,
        /// Name of its tier: nvm, ssd, hdd or one of your own [default: nvm for persistent memory and memory, else
        /// ssd].
        #[arg(long, value_name = "TIER")]
        tier: Option<String>,
        /// Object store for a cold tier: s3://, gs://, az:// or file:///DIRECTORY. PATH gets the size of the tier and
        /// takes little room: pages are moved to the store, compressed. Credentials come from permafrostd's
        /// environment (AWS_ACCESS_KEY_ID, …).
        #[arg(long, value_name = "URL", requires = "size")]
        store: Option<String>,
    },
    /// Let a file of the region grow.
    Grow {
        #[arg(value_name = "MEDIUM")]
        medium: String,
        /// Size that it shall have, such as 64G.
        #[arg(value_name = "SIZE", value_parser = parse_size)]
        size: u64,
    },
    /// Move everything on a file to the others. Dumps and restores go on meanwhile.
    Drain {
        #[arg(value_name = "MEDIUM")]
        medium: String,
        /// Stop draining it: dumps may go there again.
        #[arg(long)]
        undo: bool,
    },
    /// Move parts of checkpoints to slower tiers: what the rules of the node say, or one checkpoint.
    Cool {
        /// Checkpoint to move to the next slower tier, whatever the rules say.
        #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
        checkpoint: Option<String>,
        /// Only print how much would move.
        #[arg(long)]
        dry_run: bool,
    },
    /// Move a checkpoint to the fastest tier with room.
    Warm {
        #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
        checkpoint: String,
        /// Only print how much would move.
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove a file that is drained from the region. The file itself stays.
    Rm {
        #[arg(value_name = "MEDIUM")]
        medium: String,
        /// Remove a missing file: what is on it is lost, unless another node has it.
        #[arg(long, requires = "yes")]
        lost: bool,
        /// Confirm that data is lost.
        #[arg(long)]
        yes: bool,
    },
    /// Read everything in a region that no daemon has open, and name what is damaged.
    #[command(disable_help_flag = true)]
    Check(PassedOn),
    /// Save what can be read of a region that no daemon has open.
    #[command(disable_help_flag = true)]
    Salvage(PassedOn),
}

/// Arguments for `permafrostd region`.
#[derive(Debug, Args)]
struct PassedOn {
    /// Arguments of `permafrostd region check` and `salvage`: REGION, and --to DIR.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    arguments: Vec<std::ffi::OsString>,
}

/// Runs `permafrost region`.
///
/// # Errors
/// The failure of the command.
pub fn region(context: &Context, arguments: RegionArguments) -> Result<(), Failure> {
    let request = match arguments.command {
        RegionCommand::Check(passed) => return run_daemon("check", &passed),
        RegionCommand::Salvage(passed) => return run_daemon("salvage", &passed),
        RegionCommand::Ls => change("ls", String::new()),
        RegionCommand::Add {
            path,
            size,
            tier,
            store,
        } => request::Media {
            store: store.unwrap_or_default(),
            tier: tier.unwrap_or_default(),
            size_bytes: size.unwrap_or(0),
            ..change("add", absolute(&path)?)
        },
        RegionCommand::Grow { medium, size } => request::Media {
            size_bytes: size,
            ..change("grow", named(&medium)?)
        },
        RegionCommand::Drain { medium, undo } => {
            change(if undo { "undrain" } else { "drain" }, named(&medium)?)
        }
        RegionCommand::Cool {
            checkpoint,
            dry_run,
        } => request::Media {
            checkpoint: checkpoint.unwrap_or_default(),
            dry_run,
            ..change("cool", String::new())
        },
        RegionCommand::Warm {
            checkpoint,
            dry_run,
        } => request::Media {
            checkpoint,
            dry_run,
            ..change("warm", String::new())
        },
        RegionCommand::Rm { medium, lost, .. } => {
            change(if lost { "give-up" } else { "remove" }, named(&medium)?)
        }
    };
    let moves = matches!(request.action.as_str(), "cool" | "warm").then_some(request.dry_run);
    let drained = (request.action == "drain").then(|| request.medium.clone());
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    let mut progress = ProgressDisplay::new(context, "region");
    let media = connection
        .call_with(request, None, &mut |so_far| {
            progress.update(so_far.done_bytes, so_far.total_bytes);
        })
        .map_err(|error| interrupts.explain(error.into()))?;
    drop(progress);
    context.print(&media, |media| {
        let mut text = table(media);
        if let Some(medium) = &drained {
            text.push_str(&format!("{} moved; ", human::bytes(media.moved_bytes)));
            text.push_str(&left(media, medium));
            for part in &media.not_moved {
                text.push_str("\n    ");
                text.push_str(part);
            }
        }
        if let Some(dry_run) = moves {
            let moved = human::bytes(media.moved_bytes);
            let verb = if dry_run { "would move" } else { "moved" };
            text.push_str(&format!("{moved} {verb} between tiers"));
        }
        text
    })?;
    match media.not_moved.len() {
        0 => Ok(()),
        parts => Err(Failure::new(
            Code::Corrupt,
            format!("{} not moved", human::count(parts as u64, "part is", "parts are")),
        )
        .hint(
            "`permafrost scrub --cold` heals what another node has; `permafrost rm` removes checkpoints that cannot be \
             healed",
        )),
    }
}

fn change(action: &str, medium: String) -> request::Media {
    request::Media {
        action: action.to_owned(),
        medium,
        ..request::Media::default()
    }
}

/// Returns a path as the daemon understands it, which has another working directory.
fn absolute(path: &Path) -> Result<String, Failure> {
    let invalid = |message| Failure::new(Code::Invalid, message);
    let absolute = std::path::absolute(path)
        .map_err(|error| invalid(format!("{}: {error}", path.display())))?;
    let text = absolute.into_os_string().into_string();
    text.map_err(|path| invalid(format!("{} is not UTF-8", path.display())))
}

/// Returns a medium's number or UUID as it is, and its path as the daemon understands it.
fn named(medium: &str) -> Result<String, Failure> {
    if medium.contains('/') || Path::new(medium).exists() && medium.parse::<u32>().is_err() {
        return absolute(Path::new(medium));
    }
    Ok(medium.to_owned())
}

fn table(media: &RegionMedia) -> String {
    let mut table = Table::new([
        ("MEDIUM", Align::Left),
        ("TIER", Align::Left),
        ("STATE", Align::Left),
        ("SIZE", Align::Right),
        ("USED", Align::Right),
        ("FREE", Align::Right),
        ("FILE", Align::Left),
    ]);
    for medium in &media.media {
        table.row(row(medium));
    }
    table.render()
}

fn row(medium: &MediumStatus) -> [String; 7] {
    let number = medium.number.to_string();
    [
        match medium.node.as_str() {
            "" => number,
            node => format!("{node}: {number}"),
        },
        medium.tier.clone(),
        match medium.problem.as_str() {
            "" => medium.state.clone(),
            problem => format!("{}: {problem}", medium.state),
        },
        human::bytes(medium.size_bytes),
        human::bytes(medium.used_bytes),
        human::bytes(medium.free_bytes),
        match medium.store.as_str() {
            "" => medium.path.clone(),
            store => format!("{} ({store})", medium.path),
        },
    ]
}

/// Says what is left on a medium that was to be drained.
fn left(media: &RegionMedia, name: &str) -> String {
    let medium = media
        .media
        .iter()
        .find(|m| m.number.to_string() == name || m.uuid == name || m.path == name);
    match medium {
        Some(_) if !media.not_moved.is_empty() => "these cannot be moved:".to_owned(),
        Some(medium) if medium.used_bytes > 0 => format!(
            "{} are left, which dumps or readers have: permafrostd moves them when these have ended",
            human::bytes(medium.used_bytes)
        ),
        _ => "empty: `permafrost region rm` removes it".to_owned(),
    }
}

/// Becomes `permafrostd region`, with its output and exit code.
fn run_daemon(what: &str, passed: &PassedOn) -> Result<(), Failure> {
    let program = daemon();
    let error = Command::new(&program)
        .arg("region")
        .arg(what)
        .args(&passed.arguments)
        .exec();
    let failure = Failure::new(
        Code::Internal,
        format!("run {}: {error}", program.display()),
    );
    Err(failure.hint("install permafrostd beside permafrost, or on PATH"))
}

/// Returns the daemon beside this program, or else the one on PATH.
fn daemon() -> PathBuf {
    let name = "permafrostd";
    let beside = std::env::current_exe().map(|own| own.with_file_name(name));
    beside
        .ok()
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PathBuf::from(name))
}
