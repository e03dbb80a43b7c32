//! `permafrost node`: shows the nodes of a cluster, and lets an operator drain, return or remove them.

mod show;

use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use permafrost_protocol::control::{NodeList, NodeStatus, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::progress::ProgressDisplay;
use permafrost_transport::control::Connection;

use show::{human_level, human_list, human_nodes, human_rebuilt, indented};

/// Help text behind the options of `permafrost node`.
pub const NODE_EXAMPLES: &str = "\
Asks the permafrostd of this machine, or through a `permafrost agent` with an operator's certificate one of its \
nodes; any node of the cluster will do.

Examples:
    permafrost node ls
    permafrost node drain n2 --wait && permafrost node remove n2   take a node out for good
    permafrost node remove n2                                      its disk is lost
    permafrost node undrain n2                                     after maintenance
    permafrost node rebuild                                        etcd's data was lost
    permafrost node level                                          before and after an upgrade
";

/// Time without progress after which a drain gives up: other nodes free space, or heal damaged copies, within
/// seconds or not soon.
const STUCK: Duration = Duration::from_secs(15);

/// Interval at which a drain is polled; polling takes at most a fifth of the time.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Arguments of `permafrost node`.
#[derive(Debug, Args)]
pub struct NodeArguments {
    #[command(subcommand)]
    command: NodeCommand,
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// List the nodes.
    #[command(visible_alias = "list")]
    Ls,
    /// Show a node in full.
    Show(OneNode),
    /// Put no new copies on a node, and have those that are there copied elsewhere.
    Drain(DrainArguments),
    /// Let a node that was drained or removed take part again.
    Undrain(OneNode),
    /// Take a node out of the cluster: drained before, or dead.
    #[command(visible_alias = "rm")]
    Remove(RemoveArguments),
    /// List again what the nodes hold, after etcd's data was lost.
    Rebuild(RebuildArguments),
    /// Show what the nodes speak, or set the version of the registry that the cluster uses.
    Level(LevelArguments),
}

#[derive(Debug, Args)]
struct LevelArguments {
    /// Version to use, which every node that was not removed must speak. Nodes that do not speak it cannot register: to
    /// return to an older release, set the older version first.
    version: Option<u32>,
}

#[derive(Debug, Args)]
struct OneNode {
    /// Name of the node.
    name: String,
}

#[derive(Debug, Args)]
struct DrainArguments {
    /// Name of the node.
    name: String,
    /// Wait until everything that it holds is held elsewhere, in copies that were read lately. Fails when no other
    /// node has room for it, or may hold it.
    #[arg(long, short)]
    wait: bool,
}

#[derive(Debug, Args)]
struct RemoveArguments {
    /// Name of the node.
    name: String,
    /// Although it is alive and not drained, or alone holds something undamaged, or the other copies were not read
    /// lately: what it alone holds stays listed, and cannot be read until the node is taken back with `permafrost
    /// node undrain`.
    #[arg(long, short)]
    force: bool,
}

#[derive(Debug, Args)]
struct RebuildArguments {
    /// Only say what would be listed again.
    #[arg(long)]
    dry_run: bool,
    /// Have the nodes drop their copies of this checkpoint (its id), which is in doubt and not listed. Repeatable.
    #[arg(long, value_name = "ID", conflicts_with = "dry_run")]
    discard: Vec<String>,
}

/// Runs `permafrost node`.
///
/// # Errors
/// The failure of the command.
pub fn node(context: &Context, arguments: &NodeArguments) -> Result<(), Failure> {
    match &arguments.command {
        NodeCommand::Ls => {
            let list = context.connect()?.call(request::Nodes::default())?;
            context.print(&list, human_list)?;
            check_counted(&list)
        }
        NodeCommand::Show(one) => {
            let list = look(&mut context.connect()?, &one.name)?;
            context.print(&list, human_nodes)
        }
        NodeCommand::Drain(drain) => self::drain(context, drain),
        NodeCommand::Undrain(one) => {
            let list = set(&mut context.connect()?, &one.name, "active", false)?;
            context.print(&list, |_| format!("{} takes part again", one.name))
        }
        NodeCommand::Remove(remove) => self::remove(context, remove),
        NodeCommand::Rebuild(rebuild) => self::rebuild(context, rebuild),
        NodeCommand::Level(level) => {
            let mut connection = context.connect()?;
            let list = match level.version {
                None => connection.call(request::Nodes::default())?,
                Some(registry) => connection.call(request::SetLevel { registry })?,
            };
            context.print(&list, human_level)?;
            check_counted(&list)
        }
    }
}

/// Fails, by the exit code, if the printed list is an old one.
fn check_counted(list: &NodeList) -> Result<(), Failure> {
    if list.checkpoints.is_some() {
        return Ok(());
    }
    Err(Failure::new(
        Code::Unavailable,
        "the registry does not answer: the nodes are those that were known before",
    )
    .hint("see that most members of etcd run and can be reached"))
}

fn look(connection: &mut Connection, name: &str) -> Result<NodeList, Failure> {
    let name = name.to_owned();
    Ok(connection.call(request::Nodes {
        name,
        ..request::Nodes::default()
    })?)
}

fn set(
    connection: &mut Connection,
    name: &str,
    state: &str,
    force: bool,
) -> Result<NodeList, Failure> {
    Ok(connection.call(request::SetNode {
        name: name.to_owned(),
        state: state.to_owned(),
        force,
    })?)
}

/// Returns the requested node.
fn only(list: &NodeList) -> Result<&NodeStatus, Failure> {
    match list.nodes.as_slice() {
        [node] => Ok(node),
        _ => Err(Failure::new(
            Code::Internal,
            "the answer is not about one node",
        )),
    }
}

fn drain(context: &Context, arguments: &DrainArguments) -> Result<(), Failure> {
    let name = &arguments.name;
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    let mut list = set(&mut connection, name, "drained", false)?;
    interrupts.end(&connection)?;
    if arguments.wait {
        list = wait(context, &interrupts, &mut connection, name, list)
            .map_err(|failure| interrupts.explain(failure))
            .map_err(|failure| match failure.code {
                Code::Interrupted => Failure::interrupted(format!(
                    "interrupted; {name} stays drained, and its checkpoints are copied on"
                )),
                _ => failure,
            })?;
    }
    context.print(&list, |list| {
        let node = list.nodes.first();
        let needed = node.and_then(|node| node.needed);
        let unverified = node.and_then(|node| node.unverified).unwrap_or_default();
        match needed {
            Some(0) if unverified > 0 => format!(
                "{name} is drained; the other copies of {} are being read: `permafrost node show {name}` tells how far that is",
                human::count(unverified, "checkpoint", "checkpoints")
            ),
            Some(0) => format!(
                "{name} is drained, and everything that it holds is held elsewhere: it can be stopped, or removed with `permafrost node remove {name}`"
            ),
            Some(needed) => format!(
                "{name} is drained; {} to be copied elsewhere: `permafrost node show {name}` tells how far that is",
                human::count(needed, "checkpoint is", "checkpoints are")
            ),
            None => format!("{name} is drained"),
        }
    })
}

/// Waits until everything that the node holds is held by other nodes.
fn wait(
    context: &Context,
    interrupts: &Interrupts,
    connection: &mut Connection,
    name: &str,
    mut list: NodeList,
) -> Result<NodeList, Failure> {
    let mut progress = ProgressDisplay::new(context, format!("drain {name}"));
    let mut most_bytes = 0;
    let mut moved_at = Instant::now();
    loop {
        let node = only(&list)?;
        // If nothing was counted, the registry cannot be reached at present.
        if let (Some(needed), Some(needed_bytes)) = (node.needed, node.needed_bytes) {
            let unverified = node.unverified.unwrap_or_default();
            if needed == 0 && unverified == 0 {
                return Ok(list);
            }
            if node.state != "drained" {
                return Err(Failure::new(
                    Code::Conflict,
                    format!("{name} is {} now: somebody else has set it", node.state),
                ));
            }
            let only_here = node.only_here.unwrap_or_default();
            if !node.live && only_here > 0 {
                return Err(Failure::new(
                    Code::Unavailable,
                    format!(
                        "{name} is not alive, and no other node has {} of what it holds",
                        human::count(only_here, "checkpoint", "checkpoints")
                    ),
                )
                .hint(format!("`permafrost node show {name}` names them; start the node again, or give them up with `permafrost node remove --force {name}`")));
            }
            if needed == 0 || node.stuck.unwrap_or_default() < needed {
                moved_at = Instant::now();
            } else if moved_at.elapsed() >= STUCK {
                return Err(stuck(node, needed));
            }
            most_bytes = most_bytes.max(needed_bytes);
            progress.update(most_bytes - needed_bytes, most_bytes);
        }
        let begun = Instant::now();
        while begun.elapsed() < LOOK_EVERY {
            interrupts.check()?;
            thread::sleep(Duration::from_millis(50));
        }
        let asked = Instant::now();
        list = look(connection, name)?;
        // A registry of millions takes its time.
        thread::sleep((asked.elapsed() * 4).saturating_sub(LOOK_EVERY));
    }
}

/// Returns the failure for a drain in which nothing that is left can be copied.
fn stuck(node: &NodeStatus, needed: u64) -> Failure {
    let name = &node.name;
    let message = format!(
        "{name} stays drained, and is still needed for {} ({}): no other node has room for another copy, or may hold one",
        human::count(needed, "checkpoint", "checkpoints"),
        human::bytes(node.needed_bytes.unwrap_or_default())
    );
    Failure::new(Code::NoSpace, message).hint(format!("free space (`permafrost rm`, a larger region), add a node or heal damaged copies (`permafrost scrub` on the nodes that `permafrost node ls` shows with some), and drain again; or `permafrost node undrain {name}`"))
}

fn remove(context: &Context, arguments: &RemoveArguments) -> Result<(), Failure> {
    let name = &arguments.name;
    let list = set(&mut context.connect()?, name, "removed", arguments.force)?;
    context.print(&list, |list| {
        let node = list.nodes.first().cloned().unwrap_or_default();
        let mut text = format!("{name} is removed");
        match node.only_here {
            None | Some(0) => {}
            Some(only_here) => {
                text += &format!(
                    ", and {} of which no other node has a good copy cannot be read:\n",
                    human::count(only_here, "checkpoint", "checkpoints")
                );
                text += &indented(&node.only_here_names, only_here);
                text += &format!("`permafrost node undrain {name}` takes the node back, while it has its disk; `permafrost rm` gives them up");
            }
        }
        text
    })
}

fn rebuild(context: &Context, arguments: &RebuildArguments) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    context.remark("asking the nodes what they hold");
    let rebuilt = connection
        .call(request::Rebuild {
            dry_run: arguments.dry_run,
            discard: arguments.discard.clone(),
        })
        .map_err(|error| interrupts.explain(error.into()))?;
    context.print(&rebuilt, human_rebuilt)?;
    match (rebuilt.doubts.len(), rebuilt.busy.len()) {
        (0, 0) => Ok(()),
        (0, busy) => Err(Failure::new(
            Code::Conflict,
            format!("{busy} not listed yet: their jobs are being dumped"),
        )
        .hint("run it again when those dumps are done")),
        (doubts, _) => Err(Failure::new(
            Code::Conflict,
            format!("{doubts} in doubt, and left as they are"),
        )
        .hint("docs/cluster.md, \"After etcd's data is lost\", says what can be done about them")),
    }
}
