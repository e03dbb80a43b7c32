//! `permafrost node`: the nodes of a cluster, and what an operator does with them.

use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use permafrost_client::control::Connection;
use permafrost_protocol::control::{NodeList, NodeStatus, Rebuilt, request};

use crate::context::Context;
use crate::dump::name_of;
use crate::failure::{Code, Failure};
use crate::human;
use crate::interrupt::Interrupts;
use crate::progress::Progress;
use crate::table::{Align, Table, facts};

pub(crate) const NODE_EXAMPLES: &str = "\
Asks the permafrostd of this machine, or through a `permafrost agent` with an operator's certificate one of its \
nodes; any node of the cluster will do.

Examples:
    permafrost node ls
    permafrost node drain n2 --wait && permafrost node remove n2   take a node out for good
    permafrost node remove n2                                      its disk is lost
    permafrost node undrain n2                                     after maintenance
    permafrost node rebuild                                        etcd's data was lost
";

/// How often a drain is looked at; at most a fifth of the time goes into looking.
const LOOK_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(crate) struct NodeArguments {
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
    /// Wait until everything that it holds is held elsewhere.
    #[arg(long, short)]
    wait: bool,
}

#[derive(Debug, Args)]
struct RemoveArguments {
    /// Name of the node.
    name: String,
    /// Although it is alive and not drained, or alone holds something: that stays listed, and cannot be read until
    /// the node is taken back with `permafrost node undrain`.
    #[arg(long, short)]
    force: bool,
}

#[derive(Debug, Args)]
struct RebuildArguments {
    /// Only say what would be listed again.
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn node(context: &Context, arguments: &NodeArguments) -> Result<(), Failure> {
    match &arguments.command {
        NodeCommand::Ls => {
            let list = context.connect()?.call(request::Nodes::default())?;
            context.print(&list, human_list)
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
    }
}

fn look(connection: &mut Connection, name: &str) -> Result<NodeList, Failure> {
    let name = name.to_owned();
    Ok(connection.call(request::Nodes { name })?)
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

/// The node that was asked for.
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
        let needed = list.nodes.first().and_then(|node| node.needed);
        match needed {
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

/// Until everything that the node holds is held elsewhere.
fn wait(
    context: &Context,
    interrupts: &Interrupts,
    connection: &mut Connection,
    name: &str,
    mut list: NodeList,
) -> Result<NodeList, Failure> {
    let mut progress = Progress::new(context, format!("drain {name}"));
    let mut most_bytes = 0;
    loop {
        let node = only(&list)?;
        // Nothing counted: the registry is away for the moment.
        if let (Some(needed), Some(needed_bytes)) = (node.needed, node.needed_bytes) {
            if needed == 0 {
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
                    ", and {} that no other node has cannot be read:\n",
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

fn human_list(list: &NodeList) -> String {
    let mut table = Table::new([
        ("NODE", Align::Left),
        ("STATE", Align::Left),
        ("CLASS", Align::Left),
        ("TIER", Align::Left),
        ("DOMAIN", Align::Left),
        ("ADDRESS", Align::Left),
        ("SIZE", Align::Right),
        ("FREE", Align::Right),
        ("HOLDS", Align::Right),
        ("ONLY HERE", Align::Right),
        ("", Align::Left),
    ]);
    for node in &list.nodes {
        let of_live = |text: String| if node.live { text } else { "-".to_owned() };
        table.row([
            node.name.clone(),
            state(node),
            of_live(node.class.clone()),
            of_live(node.tier.clone()),
            of_live(domain(node)),
            of_live(node.address.clone()),
            of_live(human::bytes(node.capacity_bytes)),
            of_live(human::bytes(node.free_bytes)),
            counted(node.checkpoints),
            counted(node.only_here),
            (if node.name == list.leader {
                "leads"
            } else {
                ""
            })
            .to_owned(),
        ]);
    }
    let mut text = table.render();
    text.push('\n');
    text.push_str(&summary(list));
    text
}

fn summary(list: &NodeList) -> String {
    let checkpoints = match (list.checkpoints, list.under_replicated, list.stranded) {
        (Some(checkpoints), Some(few), Some(stranded)) => format!(
            "{checkpoints} listed, {few} with too few copies{}",
            match stranded {
                0 => String::new(),
                stranded => format!(", {stranded} on no node that is alive"),
            }
        ),
        _ => "not counted: the registry does not answer".to_owned(),
    };
    let seen = match list.age_ms {
        None => "never confirmed by the registry".to_owned(),
        Some(age_ms) if age_ms < 5_000 => String::new(),
        Some(age_ms) => format!("as of {} ago", human::span(age_ms / 1_000)),
    };
    facts(
        "",
        &[
            ("checkpoints", checkpoints),
            ("seen", seen),
            ("cluster", list.cluster.clone()),
            ("asked", list.answered_by.clone()),
        ],
    )
}

fn human_nodes(list: &NodeList) -> String {
    let mut text = String::new();
    for node in &list.nodes {
        text.push_str(&human_node(node, node.name == list.leader));
    }
    text
}

fn human_node(node: &NodeStatus, leads: bool) -> String {
    let of = |count: Option<u64>, what: &str| match count {
        None | Some(0) => String::new(),
        Some(count) => format!("{count} {what}"),
    };
    let mut text = facts(
        &format!("node {}", node.name),
        &[
            ("state", state(node)),
            ("leads", (if leads { "yes" } else { "" }).to_owned()),
            ("address", node.address.clone()),
            ("class", node.class.clone()),
            ("tier", node.tier.clone()),
            (
                "domain",
                if node.live {
                    domain(node)
                } else {
                    String::new()
                },
            ),
            ("region", node.region.clone()),
            (
                "first seen",
                match node.first_seen_unix_ms {
                    0 => String::new(),
                    seen => human::date(seen),
                },
            ),
            ("version", node.version.clone()),
            (
                "space",
                if node.live {
                    format!(
                        "{} of {} free",
                        human::bytes(node.free_bytes),
                        human::bytes(node.capacity_bytes)
                    )
                } else {
                    String::new()
                },
            ),
            ("holds", counted(node.checkpoints)),
            (
                "needed",
                match node.needed {
                    None | Some(0) => String::new(),
                    Some(needed) => format!(
                        "{needed} ({}) have too few copies without it",
                        human::bytes(node.needed_bytes.unwrap_or_default())
                    ),
                },
            ),
            (
                "only here",
                of(node.only_here, "on no other node that is alive"),
            ),
        ],
    );
    text.push_str(&indented(
        &node.only_here_names,
        node.only_here.unwrap_or_default(),
    ));
    text
}

/// Names, one a line, and how many more there are.
fn indented(names: &[String], all: u64) -> String {
    let mut text = String::new();
    for name in names {
        text.push_str(&format!("    {name}\n"));
    }
    let told = u64::try_from(names.len()).unwrap_or(u64::MAX);
    if all > told {
        text.push_str(&format!("    and {} more\n", all - told));
    }
    text
}

fn human_rebuilt(rebuilt: &Rebuilt) -> String {
    let (listed, added) = if rebuilt.dry_run {
        ("would be listed again", "would be added")
    } else {
        ("listed again", "added")
    };
    let mut text = String::new();
    if !rebuilt.listed.is_empty() {
        let mut table = Table::new([
            ("CHECKPOINT", Align::Left),
            ("AGE", Align::Right),
            ("MEMORY", Align::Right),
            ("ON", Align::Left),
        ]);
        for checkpoint in &rebuilt.listed {
            table.row([
                match checkpoint.generation {
                    0 => format!("parked session {}", checkpoint.session),
                    _ => name_of(checkpoint),
                },
                human::age(human::seconds_since(checkpoint.created_unix_ms)),
                human::bytes(checkpoint.memory_bytes),
                checkpoint.nodes.join(", "),
            ]);
        }
        text.push_str(&table.render());
        text.push('\n');
    }
    text.push_str(&facts(
        "",
        &[
            (listed, rebuilt.listed.len().to_string()),
            (
                "copies of listed ones",
                match rebuilt.copies_added {
                    0 => String::new(),
                    copies => format!("{copies} {added}"),
                },
            ),
            ("asked", rebuilt.nodes.join(", ")),
            ("cluster", rebuilt.cluster.clone()),
        ],
    ));
    for node in &rebuilt.missing {
        text.push_str(&format!("without {}: {}\n", node.name, node.why));
    }
    for name in &rebuilt.busy {
        text.push_str(&format!("put off {name}: its job is being dumped\n"));
    }
    for doubt in &rebuilt.doubts {
        text.push_str(&format!(
            "in doubt {} on {}: {} ({})\n",
            doubt.checkpoint, doubt.node, doubt.why, doubt.id
        ));
    }
    text
}

/// What an operator has said and what is so, in a word or two.
fn state(node: &NodeStatus) -> String {
    match (node.state.as_str(), node.live) {
        ("active", true) if node.stopping => "stopping".to_owned(),
        ("active", true) => "up".to_owned(),
        ("active", false) => "down".to_owned(),
        ("drained", true) => match node.needed {
            None | Some(0) => "drained".to_owned(),
            Some(needed) => format!("draining, {needed} left"),
        },
        ("drained", false) => "drained, down".to_owned(),
        (state, _) => state.to_owned(),
    }
}

/// `zone/rack/host`; what is not known is `-`.
fn domain(node: &NodeStatus) -> String {
    let parts = [&node.zone, &node.rack, &node.host];
    if parts.iter().all(|part| part.is_empty()) {
        return "-".to_owned();
    }
    let parts = parts.map(|part| if part.is_empty() { "-" } else { part });
    parts.join("/")
}

fn counted(count: Option<u64>) -> String {
    count.map_or_else(|| "?".to_owned(), |count| count.to_string())
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::{Checkpoint, Doubt};

    use super::*;

    fn status(name: &str, state: &str, live: bool) -> NodeStatus {
        NodeStatus {
            name: name.to_owned(),
            state: state.to_owned(),
            live,
            ..NodeStatus::default()
        }
    }

    #[test]
    fn nodes_are_listed_with_what_is_known_of_them() {
        let list = NodeList {
            nodes: vec![
                NodeStatus {
                    class: "reserved".to_owned(),
                    tier: "pmem".to_owned(),
                    zone: "z1".to_owned(),
                    address: "10.0.0.1:7118".to_owned(),
                    capacity_bytes: 4 << 30,
                    free_bytes: 1 << 30,
                    checkpoints: Some(7),
                    needed: Some(3),
                    only_here: Some(0),
                    ..status("n1", "drained", true)
                },
                status("n2", "active", false),
            ],
            leader: "n1".to_owned(),
            age_ms: Some(200),
            cluster: "c".to_owned(),
            answered_by: "n1".to_owned(),
            ..NodeList::default()
        };
        let text = human_list(&list);
        let line = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.unwrap_or_default()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            line("n1"),
            "n1 draining, 3 left reserved pmem z1/-/- 10.0.0.1:7118 4.0 GiB 1.0 GiB 7 0 leads"
        );
        assert_eq!(line("n2"), "n2 down - - - - - - ? ?");
        assert!(text.contains("not counted"), "{text}");
        assert!(!text.contains("ago"), "{text}");
    }

    #[test]
    fn states_are_words_that_tell_both_what_was_said_and_what_is() {
        for (said, live, word) in [
            ("active", true, "up"),
            ("active", false, "down"),
            ("drained", true, "drained"),
            ("drained", false, "drained, down"),
            ("removed", false, "removed"),
        ] {
            assert_eq!(state(&status("n", said, live)), word);
        }
    }

    #[test]
    fn a_rebuild_tells_what_it_left_alone() {
        let text = human_rebuilt(&Rebuilt {
            listed: vec![Checkpoint {
                job: "j".to_owned(),
                generation: 3,
                nodes: vec!["n1".to_owned(), "n2".to_owned()],
                ..Checkpoint::default()
            }],
            doubts: vec![Doubt {
                node: "n3".to_owned(),
                checkpoint: "j@4".to_owned(),
                id: "x".to_owned(),
                why: "its content is not what is listed".to_owned(),
            }],
            ..Rebuilt::default()
        });
        assert!(text.contains("j@3") && text.contains("n1, n2"), "{text}");
        assert!(text.contains("in doubt j@4 on n3: its content"), "{text}");
    }

    #[test]
    fn long_lists_say_how_many_more_there_are() {
        assert_eq!(
            indented(&["a@1".to_owned()], 3),
            "    a@1\n    and 2 more\n"
        );
    }
}
