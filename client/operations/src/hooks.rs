//! `permafrost install-criu-hooks`: has every CRIU of the machine store its dumps, by a line in CRIU's own configuration.

use std::path::{Path, PathBuf};

use clap::Args;
use permafrost_criu::hooks::{CriuHooks, HooksError};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use serde::Serialize;

/// Help text behind the options of `permafrost install-criu-hooks`.
pub const HOOKS_EXAMPLES: &str = "\
Afterwards CRIU runs permafrost-action at the end of each dump, while the processes are frozen. It stores the images, and \
if it cannot, the dump fails and the processes go on: no dump succeeds while permafrostd does not run. The job is the one \
that PERMAFROST_JOB names, or the container's id, or HOST.pid-PID. PERMAFROST_JOB=none leaves a dump alone: a live \
migration to another machine's page server fails without it.

Examples:
    permafrost install-criu-hooks --dry-run
    permafrost install-criu-hooks
    runc checkpoint --image-path D web                  stored as web@1
    permafrost install-criu-hooks --undo
";

/// Directory of CRIU's configuration.
const DIRECTORY: &str = "/etc/criu";

/// Arguments of `permafrost install-criu-hooks`.
#[derive(Debug, Args)]
pub struct HooksArguments {
    /// Remove what an earlier call has added.
    #[arg(long)]
    undo: bool,
    /// Only say what would be changed.
    #[arg(long)]
    dry_run: bool,
    /// Directory of CRIU's configuration.
    #[arg(long, value_name = "DIR", default_value = DIRECTORY)]
    dir: PathBuf,
    /// Program that CRIU calls to seal [default: permafrost-action next to this program].
    #[arg(long, value_name = "PATH", env = "PERMAFROST_ACTION", hide = true)]
    action: Option<PathBuf>,
}

/// Changes to CRIU's configuration, which `install-criu-hooks` prints with `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct HookChanges {
    /// True if CRIU stores its dumps afterwards.
    installed: bool,
    /// True if nothing was changed, because of `--dry-run`.
    dry_run: bool,
    /// Files that were changed, each with the change; none if all was as it should be.
    changes: Vec<HookChange>,
}

/// Change of a file.
#[derive(Debug, Serialize)]
pub(crate) struct HookChange {
    /// Path of the file.
    path: PathBuf,
    /// Change: `link to PROGRAM`, `add LINE`, `create with LINE`, `remove LINE` or `remove`.
    change: String,
}

/// Runs `permafrost install-criu-hooks`.
///
/// # Errors
/// The failure of the command.
pub fn install(context: &Context, arguments: &HooksArguments) -> Result<(), Failure> {
    let directory = std::path::absolute(&arguments.dir)
        .map_err(|error| Failure::io("use", &arguments.dir, &error))?;
    if directory == Path::new(DIRECTORY) && !rustix::process::geteuid().is_root() {
        let message = format!("only root may change {DIRECTORY}");
        return Err(Failure::new(Code::Denied, message).hint("run it with sudo"));
    }
    let hooks = CriuHooks::in_directory(&directory).map_err(failure)?;
    let due = if arguments.undo {
        hooks.to_remove()
    } else {
        hooks.to_install(&action(arguments.action.as_deref()))
    };
    let mut changes = Vec::new();
    for change in due.map_err(failure)? {
        if !arguments.dry_run {
            change.apply().map_err(failure)?;
        }
        changes.push(HookChange {
            path: change.path,
            change: change.description,
        });
    }
    let changes = HookChanges {
        installed: if arguments.dry_run {
            arguments.undo != changes.is_empty()
        } else {
            !arguments.undo
        },
        dry_run: arguments.dry_run,
        changes,
    };
    context.print(&changes, human_changes)
}

fn human_changes(changes: &HookChanges) -> String {
    if changes.changes.is_empty() {
        return "nothing to change".to_owned();
    }
    let prefix = if changes.dry_run { "would " } else { "" };
    let lines = changes.changes.iter();
    let lines = lines.map(|change| format!("{}: {prefix}{}", change.path.display(), change.change));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the path of the program that seals.
fn action(chosen: Option<&Path>) -> PathBuf {
    let beside = || std::env::current_exe().ok();
    chosen
        .map(Path::to_owned)
        .or_else(|| Some(beside()?.with_file_name("permafrost-action")))
        .unwrap_or_default()
}

fn failure(error: HooksError) -> Failure {
    let message = error.to_string();
    match error {
        HooksError::Foreign { .. } => Failure::new(Code::Conflict, message)
            .hint("it is not this program's to change: remove it by hand, and run this again"),
        HooksError::Unnameable { .. } => {
            Failure::new(Code::Invalid, message).hint("name a directory without blanks and quotes")
        }
        HooksError::Untrusted { .. } => Failure::new(Code::Denied, message)
            .hint("root's CRIU would run what others put there: have it belong to root, mode 0755"),
        HooksError::Io {
            action,
            path,
            source,
        } => Failure::io(action, &path, &source)
            .hint("permafrost-action has to be next to permafrost, or named by PERMAFROST_ACTION"),
    }
}
