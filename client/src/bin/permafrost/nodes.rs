//! `permafrost nodes`: shows the figures of the nodes that keep images, for schedulers and operators.

use clap::Args;
use permafrost_api_types::figure::Figure;
use permafrost_api_types::nodes::{
    ListedNode, NodeMemory, NodeState, NodeTier, NodesAnswer, Queue,
};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::table::{Align, Table};
use permafrost_transport::api::ApiClient;
use serde_json::Value;

use crate::api::{self, ApiArguments};

pub(crate) const NODES_EXAMPLES: &str = "\
WRITE and READ are the bandwidths that were measured of dumps and restores, with how long ago the newest was; \
QUEUED is what waits before a new one, and how long that takes. Where a machine has swap, a line below has its free \
memory and swap, and how fast it has paged within the last hour: suspension in memory goes by them. `-` is not known: \
--json says why.

Any node answers for all, out of its memory; `permafrost node` is for their operation (drain, remove).

Examples:
    permafrost nodes
    permafrost nodes n2 --json
    permafrost nodes --api https://n1:7119 --api-token-file token --api-ca ca.pem
";

#[derive(Debug, Args)]
pub(crate) struct NodesArguments {
    /// Only this node.
    name: Option<String>,
    #[command(flatten)]
    api: ApiArguments,
}

pub(crate) fn nodes(context: &Context, arguments: &NodesArguments) -> Result<(), Failure> {
    let client = arguments.api.client(context)?;
    let Some(name) = &arguments.name else {
        return all(context, &client);
    };
    let answer = client.get("/v1/nodes", &[("name", name.as_str())])?;
    let nodes: NodesAnswer = answer.read()?;
    if nodes.nodes.is_empty() {
        let message = format!("no node is called {name}");
        return Err(Failure::new(Code::NotFound, message).hint("`permafrost nodes` lists them"));
    }
    api::print(context, &answer, || human_nodes(&nodes))
}

/// Requests all pages of the list. One page is printed as received, several as one object.
fn all(context: &Context, client: &ApiClient) -> Result<(), Failure> {
    let first = client.get("/v1/nodes", &[])?;
    let mut nodes: NodesAnswer = first.read()?;
    if nodes.next.is_none() {
        return api::print(context, &first, || human_nodes(&nodes));
    }
    let mut json: Value = first.read()?;
    while let Some(after) = nodes.next.take() {
        let page = client.get("/v1/nodes", &[("after", after.as_str())])?;
        let more: NodesAnswer = page.read()?;
        nodes.nodes.extend(more.nodes);
        nodes.next = more.next;
        let more: Value = page.read()?;
        if let (Some(Value::Array(all)), Some(Value::Array(more))) =
            (json.get_mut("nodes"), more.get("nodes"))
        {
            all.extend(more.iter().cloned());
        }
    }
    if let Value::Object(json) = &mut json {
        json.remove("next");
    }
    if context.json {
        context.print(&json, |_| String::new())
    } else {
        context.write_text(&human_nodes(&nodes))
    }
}

fn human_nodes(answer: &NodesAnswer) -> String {
    let mut table = Table::new([
        ("NODE", Align::Left),
        ("STATE", Align::Left),
        ("CLASS", Align::Left),
        ("TIER", Align::Left),
        ("DOMAIN", Align::Left),
        ("SIZE", Align::Right),
        ("FREE", Align::Right),
        ("WRITE", Align::Right),
        ("READ", Align::Right),
        ("LAZY", Align::Right),
        ("WRITES QUEUED", Align::Right),
        ("READS QUEUED", Align::Right),
        ("SEEN", Align::Right),
    ]);
    for node in &answer.nodes {
        let head = [
            node.name.clone(),
            state(node).to_owned(),
            node.class.word().to_owned(),
        ];
        let domain = domain(node);
        let seen = node.age_s.map_or_else(|| "-".to_owned(), human::age_s);
        let [name, state, class] = head;
        if node.tiers.is_empty() {
            let nothing = || "-".to_owned();
            table.row([
                name,
                state,
                class,
                nothing(),
                domain,
                nothing(),
                nothing(),
                nothing(),
                nothing(),
                nothing(),
                nothing(),
                nothing(),
                seen,
            ]);
            continue;
        }
        for tier in &node.tiers {
            table.row([
                name.clone(),
                state.clone(),
                class.clone(),
                tier_name(tier),
                domain.clone(),
                human::bytes(tier.capacity_bytes),
                human::bytes(tier.free_bytes),
                rate(&tier.write_bytes_per_s),
                rate(&tier.read_bytes_per_s),
                rate(&tier.lazy_bytes_per_s),
                queue(&tier.write_queue),
                queue(&tier.read_queue),
                seen.clone(),
            ]);
        }
    }
    let mut text = table.render();
    for node in &answer.nodes {
        if let Some(memory) = &node.memory {
            text.push_str(&format!("{}: {}\n", node.name, human_memory(memory)));
        }
        for doubt in &node.doubts {
            text.push_str(&format!("{}: not believed: {doubt}\n", node.name));
        }
    }
    text.push_str(&as_of(&answer.answered_by, answer.age_s));
    text
}

/// Formats memory and swap: `3.0 GiB of memory and 2.0 GiB of swap free, pages out 100.0 MiB/s (3s) and in -`.
fn human_memory(memory: &NodeMemory) -> String {
    format!(
        "{} of memory and {} of swap free, pages out {} and in {}",
        human::bytes(memory.free_bytes),
        human::bytes(memory.free_swap_bytes),
        rate(&memory.page_out_bytes_per_s),
        rate(&memory.page_in_bytes_per_s),
    )
}

/// Formats the name of the node that answered, and the age of its snapshot.
pub(crate) fn as_of(answered_by: &str, age_s: f64) -> String {
    format!(
        "\nas of {} ago, asked {answered_by}\n",
        human::seconds(age_s)
    )
}

fn state(node: &ListedNode) -> &'static str {
    match (node.state, node.live) {
        (NodeState::Active, true) if node.stopping => "stopping",
        (NodeState::Active, true) => "up",
        (NodeState::Active, false) => "down",
        (NodeState::Drained, true) => "drained",
        (NodeState::Drained, false) => "drained, down",
        (NodeState::Removed, _) => "removed",
    }
}

/// Formats the tier: `file`, or `file as hdd` for an emulated one.
fn tier_name(tier: &NodeTier) -> String {
    let name = if tier.tier.is_empty() {
        "-"
    } else {
        &tier.tier
    };
    match &tier.emulated {
        Some(emulated) => format!("{name} as {emulated}"),
        None => name.to_owned(),
    }
}

/// Formats `zone/rack/host`; unknown parts are `-`.
fn domain(node: &ListedNode) -> String {
    let parts = [&node.zone, &node.rack, &node.host];
    if parts.iter().all(|part| part.is_empty()) {
        return "-".to_owned();
    }
    let parts = parts.map(|part| if part.is_empty() { "-" } else { part });
    parts.join("/")
}

/// Formats `1.2 GiB/s (3s)`: the median, and the age of its newest sample; a configured figure has no age.
fn rate(figure: &Figure<f64>) -> String {
    match figure.known() {
        None => "-".to_owned(),
        Some(known) => {
            let rate = format!("{}/s", human::bytes(human::whole(known.p50)));
            match known.samples {
                0 => format!("{rate} (given)"),
                _ => format!("{rate} ({})", human::age_s(known.age_s)),
            }
        }
    }
}

/// Formats a queue: `2 run, 1 waits, 3.0 GiB, 2.50 s`, or `none`.
fn queue(queue: &Queue) -> String {
    let mut parts = Vec::new();
    for (count, what) in [
        (queue.running, "run"),
        (queue.waiting, "wait"),
        (queue.reserved, "reserved"),
    ] {
        if let Some(count) = count.filter(|count| *count > 0) {
            parts.push(format!("{count} {what}"));
        }
    }
    match queue.bytes.known() {
        Some(bytes) if bytes.p50 > 0 => parts.push(human::bytes(bytes.p50)),
        Some(_) => {}
        None if parts.is_empty() => return "-".to_owned(),
        None => {}
    }
    if let Some(time) = queue.time_s.known().filter(|time| time.p50 > 0.0) {
        parts.push(human::seconds(time.p50));
    }
    if parts.is_empty() {
        return "none".to_owned();
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use permafrost_api_types::figure::Known;

    use permafrost_api_types::nodes::NodeClass;

    use super::*;

    fn known<T>(p50: T, p95: T, samples: u32) -> Figure<T> {
        Figure::Known(Known {
            p50,
            p95,
            age_s: 3.2,
            samples,
        })
    }

    fn idle() -> Queue {
        Queue {
            bytes: known(0, 0, 1),
            bytes_per_s: Figure::unknown("not measured"),
            running: Some(0),
            waiting: Some(0),
            reserved: Some(0),
            slots: Some(2),
            time_s: known(0.0, 0.0, 1),
        }
    }

    fn node(name: &str, tiers: Vec<NodeTier>) -> ListedNode {
        ListedNode {
            name: name.to_owned(),
            address: "10.0.0.1:7118".to_owned(),
            state: NodeState::Active,
            live: !tiers.is_empty(),
            stopping: false,
            class: NodeClass::Reserved,
            zone: String::new(),
            rack: "r1".to_owned(),
            host: "h1".to_owned(),
            version: "1".to_owned(),
            speaks: Vec::new(),
            age_s: (!tiers.is_empty()).then_some(0.4),
            memory: (!tiers.is_empty()).then(|| NodeMemory {
                free_bytes: 3 << 30,
                free_swap_bytes: 2 << 30,
                page_out_bytes_per_s: known(f64::from(100 << 20), 1e8, 2),
                page_in_bytes_per_s: Figure::unknown("not measured"),
            }),
            tiers,
            links: Vec::new(),
            doubts: vec!["its write bandwidth is 0".to_owned()],
        }
    }

    #[test]
    fn what_is_known_is_shown_with_its_age_and_what_is_not_is_a_dash() {
        let tier = NodeTier {
            tier: "file".to_owned(),
            emulated: Some("hdd".to_owned()),
            capacity_bytes: 4 << 30,
            free_bytes: 1 << 30,
            write_bytes_per_s: known(f64::from(1 << 30), 1e8, 7),
            read_bytes_per_s: Figure::unknown("not measured"),
            write_by_size: Vec::new(),
            read_by_size: Vec::new(),
            dump_start_s: Figure::unknown("not measured"),
            restore_start_s: Figure::unknown("not measured"),
            lazy_bytes_per_s: known(f64::from(1 << 29), 1e8, 2),
            lazy_start_s: Figure::unknown("not measured"),
            write_queue: Queue {
                bytes: known(3 << 30, 3 << 30, 1),
                running: Some(2),
                waiting: Some(1),
                time_s: known(2.5, 3.0, 1),
                ..idle()
            },
            read_queue: idle(),
        };
        let answer = NodesAnswer {
            answered_by: "n1".to_owned(),
            age_s: 0.25,
            nodes: vec![node("n1", vec![tier]), node("n2", Vec::new())],
            next: None,
        };
        let text = human_nodes(&answer);
        let line = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            line("n1 "),
            "n1 up reserved file as hdd -/r1/h1 4.0 GiB 1.0 GiB 1.0 GiB/s (3s) - 512.0 MiB/s (3s) 2 run, 1 wait, 3.0 GiB, 2.50 s none 0s"
        );
        assert_eq!(line("n2 "), "n2 down reserved - -/r1/h1 - - - - - - - -");
        let memory =
            "n1: 3.0 GiB of memory and 2.0 GiB of swap free, pages out 100.0 MiB/s (3s) and in -";
        assert!(text.contains(memory), "{text}");
        let of_n2: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with("n2: "))
            .collect();
        assert_eq!(of_n2, ["n2: not believed: its write bandwidth is 0"]);
        assert!(text.contains("n1: not believed: its write bandwidth is 0"));
        assert!(text.contains("as of 250.0 ms ago, asked n1"), "{text}");
    }

    #[test]
    fn a_figure_that_was_given_says_so() {
        assert_eq!(rate(&known(2048.0, 1024.0, 0)), "2.0 KiB/s (given)");
        let unknown = Queue {
            bytes: Figure::unknown("not reported"),
            bytes_per_s: Figure::unknown("not reported"),
            running: None,
            waiting: None,
            reserved: None,
            slots: None,
            time_s: Figure::unknown("not reported"),
        };
        assert_eq!(queue(&unknown), "-");
    }
}
