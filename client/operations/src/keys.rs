//! `permafrost keys`: the keys for encryption at rest.

use clap::{Args, Subcommand};
use permafrost_protocol::control::{KeyList, KeyStatus, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::progress::ProgressDisplay;

/// Help text behind the options of `permafrost keys`.
pub const KEYS_EXAMPLES: &str = "\
A node that was started with --key-file or --key-command encrypts what it stores, with a key of its own for each \
namespace. These commands are for the node itself; in a cluster run them on each.

Examples:
    permafrost keys ls
    permafrost keys rotate team         a new key for the namespace `team`; what it has is encrypted anew
    permafrost keys destroy team --yes  its checkpoints are gone for good (docs/security.md says what is not)
";

/// Arguments of `permafrost keys`.
#[derive(Debug, Args)]
pub struct KeysArguments {
    #[command(subcommand)]
    what: KeysCommand,
}

#[derive(Debug, Subcommand)]
enum KeysCommand {
    /// List the keys of all namespaces, without the keys themselves.
    Ls,
    /// Give a namespace a new key, and encrypt its checkpoints anew. The old key is erased when nothing is encrypted
    /// with it any more.
    Rotate {
        /// The namespace; an empty one for dumps that have no job yet.
        namespace: String,
    },
    /// Remove a namespace's checkpoints from this node and erase its keys: nobody can read them any more, not even from
    /// a copy of the region. The key of dumps without a job, with which adopted ones were encrypted, is changed and
    /// erased, too. A copy of DATA_DIR/keys from before still has the keys.
    Destroy {
        /// Namespace whose keys are erased.
        namespace: String,
        /// Destroy them: without it nothing is done.
        #[arg(long)]
        yes: bool,
    },
}

/// Runs `permafrost keys`.
///
/// # Errors
/// The failure of the command.
pub fn keys(context: &Context, arguments: &KeysArguments) -> Result<(), Failure> {
    let (action, namespace) = match &arguments.what {
        KeysCommand::Ls => ("ls", String::new()),
        KeysCommand::Rotate { namespace } => ("rotate", namespace.clone()),
        KeysCommand::Destroy { namespace, yes } => {
            if !yes {
                let message = format!("the checkpoints of {namespace:?} would be gone for good");
                return Err(Failure::new(Code::Invalid, message).hint("to destroy them: --yes"));
            }
            ("destroy", namespace.clone())
        }
    };
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    let mut progress = ProgressDisplay::new(context, "keys");
    let request = request::Keys {
        action: action.to_owned(),
        namespace,
    };
    let list = connection
        .call_with(request, None, &mut |so_far| {
            progress.update(so_far.done_bytes, so_far.total_bytes);
        })
        .map_err(|error| interrupts.explain(error.into()))?;
    drop(progress);
    context.print(&list, human_list)
}

fn human_list(list: &KeyList) -> String {
    let mut lines: Vec<String> = list.keys.iter().map(line).collect();
    if list.keys.is_empty() {
        lines.push("no keys".to_owned());
    }
    if list.moved_segments > 0 {
        let moved = human::count(list.moved_segments, "segment", "segments");
        lines.push(format!("{moved} encrypted anew"));
    }
    if list.removed_checkpoints > 0 {
        let removed = human::count(list.removed_checkpoints, "checkpoint", "checkpoints");
        lines.push(format!("{removed} destroyed"));
    }
    lines.join("\n")
}

fn line(key: &KeyStatus) -> String {
    let namespace = match key.namespace.as_str() {
        "" => "(no job yet)",
        namespace => namespace,
    };
    let state = if key.current { "current" } else { "old" };
    let segments = human::count(key.segments, "segment", "segments");
    format!("{namespace}  {}  {state}  {segments}", key.id)
}
