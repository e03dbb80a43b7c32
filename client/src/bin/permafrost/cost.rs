//! `permafrost cost`: what each way of preempting a task would cost now.

use std::path::PathBuf;

use clap::Args;
use permafrost_api_types::cost::{Copies, Mechanism, ReplyDetail};
use permafrost_api_types::estimate::{EstimateAnswer, EstimateRequest, Estimated};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::table::{Align, Table};
use permafrost_transport::api::ApiClient;
use serde_json::Value;

use crate::api::{self, ApiArguments};
use crate::candidate::{self, Known};
use crate::nodes::as_of;
use permafrost_terminal::words::{self, CopiesWord};

pub(crate) const COST_EXAMPLES: &str = "\
COSTS is what the task loses: the time without progress, and work done again. FREE IN is how long it takes until \
its resources are free, and RUNS IN how long it does not run, once it is resumed. Each with its 95th percentile.

The memory and the processor time of --pid are read from /proc, with all its descendants. FILE holds tasks as the \
API takes them (docs/api.md): an array of tasks, or a whole request.

Exit code 11 when nothing at all could be said.

Examples:
    permafrost cost --pid 4242 --job train
    permafrost cost --pid 4242 --job train --mechanism full-dump --mechanism kill --node n1 --node n2
    echo '[{\"id\":\"a\",\"node\":\"n1\",\"job\":\"train\",\"resident_bytes\":5e9,\"progress_s\":600}]' | permafrost cost --tasks -
";

#[derive(Debug, Args)]
pub(crate) struct CostArguments {
    /// Root of a process tree of this machine.
    #[arg(long, short, required_unless_present = "tasks")]
    pid: Option<u32>,
    /// Job that its dumps belong to.
    #[arg(long, short, requires = "pid")]
    job: Option<String>,
    /// Tasks as the API takes them; `-` is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "pid")]
    tasks: Option<PathBuf>,
    /// A node that would take the dump [default: the one that answers, or each task's own]. Repeatable.
    #[arg(long = "node", value_name = "NODE")]
    nodes: Vec<String>,
    /// kill, wait, rollback, suspend-in-memory, incremental-dump, full-dump or pre-copied-dump [default: all].
    /// Repeatable.
    #[arg(long = "mechanism", value_name = "WAY", value_parser = words::parse_mechanism)]
    mechanisms: Vec<Mechanism>,
    /// Where a dump has to be before the task may go [default: local].
    #[arg(long, value_enum)]
    copies: Option<CopiesWord>,
    /// Sums only, without their parts and reasons.
    #[arg(long)]
    totals: bool,
    #[command(flatten)]
    known: Known,
    #[command(flatten)]
    api: ApiArguments,
}

pub(crate) fn cost(context: &Context, arguments: &CostArguments) -> Result<(), Failure> {
    let client = arguments.api.client(context)?;
    let answer = match (&arguments.tasks, arguments.pid) {
        (Some(path), _) => client.post("/v1/estimate", &of_file(path, arguments)?)?,
        (None, Some(pid)) => client.post("/v1/estimate", &of_pid(&client, pid, arguments)?)?,
        // clap has seen to that.
        (None, None) => return Err(Failure::new(Code::Invalid, "--pid or --tasks is missing")),
    };
    let estimates: EstimateAnswer<'_> = answer.read()?;
    api::print(context, &answer, || human_costs(&estimates))?;
    if estimates.answers.iter().any(|answer| answer.cost.is_some()) {
        return Ok(());
    }
    let why = estimates
        .answers
        .iter()
        .find_map(|one| one.unknown.as_deref());
    let why = why.unwrap_or("there is nothing to ask about");
    Err(Failure::new(
        Code::Unavailable,
        format!("no cost is known: {why}"),
    ))
}

fn of_pid(
    client: &ApiClient,
    pid: u32,
    arguments: &CostArguments,
) -> Result<EstimateRequest<'static>, Failure> {
    let own = api::own_node(client)?;
    let task = candidate::task(pid, arguments.job.as_deref(), &own, &arguments.known)?;
    let nodes = arguments.nodes.iter().cloned().map(Into::into).collect();
    Ok(EstimateRequest {
        tasks: vec![task],
        mechanisms: some(&arguments.mechanisms),
        nodes: some(&arguments.nodes).map(|_| nodes),
        copies: arguments.copies.map_or(Copies::Local, Into::into),
        detail: if arguments.totals {
            ReplyDetail::Totals
        } else {
            ReplyDetail::Full
        },
        ..EstimateRequest::default()
    })
}

/// Reads the request in the file, and sets the fields that the command line gives.
fn of_file(path: &std::path::Path, arguments: &CostArguments) -> Result<Value, Failure> {
    let mut request = api::request_of(path, "tasks")?;
    api::set(&mut request, "mechanisms", some(&arguments.mechanisms));
    api::set(&mut request, "nodes", some(&arguments.nodes));
    api::set(&mut request, "copies", arguments.copies.map(Copies::from));
    api::set(
        &mut request,
        "detail",
        arguments.totals.then_some(ReplyDetail::Totals),
    );
    Ok(request)
}

fn some<T: Clone>(list: &[T]) -> Option<Vec<T>> {
    (!list.is_empty()).then(|| list.to_vec())
}

fn human_costs(estimates: &EstimateAnswer<'_>) -> String {
    let mut table = Table::new([
        ("TASK", Align::Left),
        ("NODE", Align::Left),
        ("WAY", Align::Left),
        ("COSTS", Align::Right),
        ("FREE IN", Align::Right),
        ("RUNS IN", Align::Right),
        ("OF THAT", Align::Left),
    ]);
    for one in &estimates.answers {
        let head = [
            one.task.to_string(),
            one.node.as_deref().unwrap_or("-").to_owned(),
            words::name(one.mechanism).to_owned(),
        ];
        let [task, node, way] = head;
        match &one.cost {
            Some(cost) => table.row([
                task,
                node,
                way,
                words::spread(cost.overhead_s),
                words::spread(cost.delay_s),
                words::spread(cost.until_running_s),
                words::parts(cost),
            ]),
            None => {
                let why = one.unknown.as_deref().unwrap_or("not known").to_owned();
                let nothing = || "-".to_owned();
                table.row([task, node, way, nothing(), nothing(), nothing(), why]);
            }
        }
    }
    let mut text = table.render();
    for one in &estimates.answers {
        text.push_str(&reason(one));
    }
    text.push_str(&as_of(&estimates.answered_by, estimates.age_s));
    text
}

fn reason(one: &Estimated<'_>) -> String {
    let Some(cost) = &one.cost else {
        return String::new();
    };
    let said = match (&cost.reason, &cost.omits) {
        (Some(reason), _) => reason.clone(),
        (None, Some(omits)) => format!("not counted: {omits}"),
        (None, None) => return String::new(),
    };
    format!("{} {}: {said}\n", one.task, words::name(one.mechanism))
}

#[cfg(test)]
mod tests {
    use permafrost_api_types::cost::{Cost, Part, PartOfCost, Spread};

    use super::*;

    #[test]
    fn costs_are_listed_with_their_parts_and_what_is_unknown_with_why() {
        let spread = |p50, p95| Spread { p50, p95 };
        let part = |part, p50_s| PartOfCost {
            part,
            p50_s,
            p95_s: p50_s,
        };
        let cost = Cost {
            overhead_s: spread(2.0, 3.0),
            delay_s: spread(1.2, 1.2),
            until_running_s: spread(0.8, 1.0),
            parts: Some(vec![
                part(Part::WriteQueue, 0.0),
                part(Part::Write, 1.2),
                part(Part::Read, 0.8),
            ]),
            age_s: 4.0,
            omits: Some("the start of a restore was not measured".to_owned()),
            reason: Some("1.2 GiB at 1.0 GiB/s".to_owned()),
        };
        let total = Cost {
            parts: None,
            reason: None,
            ..cost.clone()
        };
        let one = |mechanism, cost: Option<Cost>, unknown: Option<&'static str>| Estimated {
            task: "4242".into(),
            node: Some("n1".into()),
            mechanism,
            cost,
            unknown: unknown.map(Into::into),
        };
        let text = human_costs(&EstimateAnswer {
            answered_by: "n1".into(),
            age_s: 0.1,
            answers: vec![
                one(Mechanism::FullDump, Some(cost), None),
                one(Mechanism::Rollback, None, Some("it has no checkpoint")),
                one(Mechanism::PreCopiedDump, Some(total), None),
            ],
        });
        let line = |word: &str| {
            let line = text.lines().find(|line| line.contains(word)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            line("n1 "),
            "4242 n1 full_dump 2.00 s (to 3.00 s) 1.20 s 800.0 ms (to 1.00 s) write 1.20 s + read 800.0 ms"
        );
        assert_eq!(
            line("rollback"),
            "4242 n1 rollback - - - it has no checkpoint"
        );
        assert!(text.contains("4242 full_dump: 1.2 GiB at 1.0 GiB/s\n"));
        let omitted =
            "4242 pre_copied_dump: not counted: the start of a restore was not measured\n";
        assert!(text.contains(omitted), "{text}");
    }
}
