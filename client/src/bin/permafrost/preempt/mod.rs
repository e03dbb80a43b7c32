//! `permafrost preempt`: carries out a plan on process trees of this machine.
//!
//! ```text
//!  --plan FILE ──────────────────┐
//!  --pid, --candidates ─▶ /v1/preempt ─▶ victims, in the order of the plan ─▶ act ─▶ report, exit code
//! ```
//!
//! Victims that are waited for come last, all together: the others do not depend on their ends.

mod act;
mod victims;

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args};
use permafrost_api_types::preempt::{PreemptAnswer, Total};
use permafrost_api_types::task::Resources;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::table::{Align, Table};
use serde::Serialize;
use serde_json::Value;

use self::act::Actor;
use self::victims::{Known, Planned};
use crate::api;
use crate::arguments::Durability;
use crate::plan::preempt as plan;
use permafrost_agent::host::arguments::parse_time;
use permafrost_terminal::words;

pub(crate) const PREEMPT_EXAMPLES: &str = "\
Asks the API what `permafrost plan preempt` asks, or reads a plan of it, and does to each victim what the plan says, in \
its order: wait for its end; kill (SIGTERM, and SIGKILL after --grace); rollback (the same: its last checkpoint stays); \
suspend in memory (as `permafrost suspend`); dump (as `permafrost dump`). Victims that are waited for come last. A victim \
that is suspended or shrunk goes on, and has its resources back, before it is killed or dumped.

In a plan that is read, the id of a task is its pid; --candidates with the request of the plan tells ids from pids, and \
names the jobs of dumps, as --pid does. Only victims of this machine's node are touched (--node; default: the node that \
the API answers for).

The caller may do to a process what it may do by hand: kill and suspend its own, as root all; dumps need what `permafrost \
dump` needs.

Exit codes: 0 when everything that was wanted is free, 12 when less is, 130 after Ctrl-C. The report names what was not \
done, and how to go on with what was begun.

Examples:
    permafrost preempt --cpu 2 --memory 8G --pid 4242:train --pid 4711:build
    permafrost plan preempt --memory 8G --pid 4242:train --json | permafrost preempt --plan - --pid 4242:train
    permafrost preempt --candidates tasks.json --memory 8G --longest-delay 30s --json
";

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true).args(["pids", "candidates", "plan"]))]
pub(crate) struct PreemptArguments {
    #[command(flatten)]
    question: plan::PreemptQuestion,
    /// Answer of /v1/preempt, as `permafrost plan preempt --json` prints it; `-` is standard input.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Name of this machine's node in the plan [default: the node that the API answers for].
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// Time between SIGTERM and SIGKILL, and between SIGTSTP and the freezer.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "10s")]
    grace: Duration,
    /// Longest wait for victims whose end is waited for [default: until they end].
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    longest_wait: Option<Duration>,
    #[command(flatten)]
    dump: DumpOptions,
}

/// Options of the dumps of a plan.
#[derive(Debug, Args)]
#[command(next_help_heading = "Dumps")]
struct DumpOptions {
    /// Keep established TCP connections.
    #[arg(long)]
    tcp_established: bool,
    /// The processes belong to a shell's session, or to a terminal.
    #[arg(long)]
    shell_job: bool,
    /// On how many nodes a dump must be durable before the process may end [default: the node's].
    #[arg(long, value_enum)]
    durability: Option<Durability>,
    /// CRIU program, for dumps.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_CRIU")]
    criu: Option<PathBuf>,
    /// Options for CRIU.
    #[arg(last = true, value_name = "CRIU ARGS")]
    criu_arguments: Vec<String>,
}

/// Result of acting on a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    /// The plan was carried out: its resources are free.
    Done,
    /// It had ended by itself.
    Finished,
    /// Its resources are not free.
    Failed,
    /// It is of another node, or nothing was done for an interrupt before it.
    NotBegun,
}

/// A victim of `permafrost preempt`.
#[derive(Debug, Serialize)]
struct PreemptedVictim {
    /// Id of the task in the plan.
    task: String,
    /// Node of the task.
    node: String,
    /// Root of its process tree, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    /// Mechanism of the plan.
    mechanism: &'static str,
    /// `done`, `finished` (it had ended by itself), `failed` or `not_begun`.
    outcome: Outcome,
    /// Processors that became free, thousandths.
    cpu_millis: u64,
    /// Memory that became free, bytes; of a suspended task, what the kernel can page out.
    memory_bytes: u64,
    /// Checkpoint that was taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<String>,
    /// Reason why it was not done.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Command that goes on with what was begun, or undoes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
    /// Time that it took.
    elapsed_us: u64,
}

/// Report of `permafrost preempt`.
#[derive(Debug, Serialize)]
struct Preemption {
    /// Victims in the order in which the plan has them.
    victims: Vec<PreemptedVictim>,
    /// Processors that became free, thousandths.
    cpu_millis: u64,
    /// Memory that became free, bytes.
    memory_bytes: u64,
    /// True if everything that was wanted is free.
    enough: bool,
}

pub(crate) fn preempt(context: &Context, arguments: &PreemptArguments) -> Result<(), Failure> {
    let question = &arguments.question;
    let interrupts = Interrupts::install()?;
    let client = question.api.client(context)?;
    let own_node = match &arguments.node {
        Some(node) => node.clone(),
        None => api::own_node(&client).map_err(|failure| match arguments.plan {
            Some(_) => failure.hint("name this machine's node with --node"),
            None => failure,
        })?,
    };
    let mut known = Known::default();
    known.add_pids(&question.pids);
    let answer: Value = match &arguments.plan {
        Some(path) => {
            if let Some(candidates) = &question.candidates {
                known.add_request(&api::request_of(candidates, "candidates")?)?;
            }
            api::request_of(path, "victims")?
        }
        None => {
            let request = plan::request(&client, question)?;
            known.add_request(&request)?;
            let answer = client.post("/v1/preempt", &request)?;
            let answer: PreemptAnswer<'_> = answer.read()?;
            serde_json::to_value(&answer)
                .map_err(|error| Failure::new(Code::Internal, format!("read the plan: {error}")))?
        }
    };
    interrupts.check()?;
    let plan = victims::read(&answer)?;
    let wanted = question.wanted()?;
    let is_answer = arguments.plan.is_none();
    let planned = known.planned(&plan, &own_node, is_answer)?;
    let actor = Actor::new(context, arguments, &interrupts)?;
    let victims = carry_out(&actor, &planned, &interrupts);
    let report = conclude(victims, plan.enough, wanted);
    context.print(&report, human_report)?;
    judge(&report, &interrupts)
}

/// Acts on each victim: first on those that are not waited for. Returns reports in the order of the plan.
fn carry_out(
    actor: &Actor<'_>,
    planned: &[Planned],
    interrupts: &Interrupts,
) -> Vec<PreemptedVictim> {
    let mut reports: Vec<Option<PreemptedVictim>> = planned.iter().map(|_| None).collect();
    for waits in [false, true] {
        for (planned, report) in planned.iter().zip(&mut reports) {
            if planned.is_waited_for() != waits {
                continue;
            }
            *report = Some(match interrupts.came() {
                true => planned.report(Outcome::NotBegun, Some("interrupted before".to_owned())),
                false => actor.act(planned),
            });
        }
    }
    reports.into_iter().flatten().collect()
}

fn conclude(
    victims: Vec<PreemptedVictim>,
    plan_is_enough: bool,
    wanted: Option<Resources>,
) -> Preemption {
    let sum =
        |of: fn(&PreemptedVictim) -> u64| victims.iter().map(of).fold(0_u64, u64::saturating_add);
    let free = Total {
        cpu_millis: sum(|one| one.cpu_millis),
        memory_bytes: sum(|one| one.memory_bytes),
    };
    let is_free = |one: &PreemptedVictim| matches!(one.outcome, Outcome::Done | Outcome::Finished);
    let enough = match wanted {
        Some(wanted) => {
            free.cpu_millis >= wanted.cpu_millis.value()
                && free.memory_bytes >= wanted.memory_bytes.count()
        }
        // The plan does not say what was wanted: all of it is.
        None => plan_is_enough && victims.iter().all(is_free),
    };
    Preemption {
        cpu_millis: free.cpu_millis,
        memory_bytes: free.memory_bytes,
        enough,
        victims,
    }
}

fn judge(report: &Preemption, interrupts: &Interrupts) -> Result<(), Failure> {
    if interrupts.came() {
        return Err(Failure::interrupted("interrupted")
            .hint("the same command goes on: what has ended counts as free"));
    }
    if report.enough {
        return Ok(());
    }
    let undone = report
        .victims
        .iter()
        .filter(|one| one.error.is_some())
        .count() as u64;
    let free = words::resources(report.cpu_millis, report.memory_bytes);
    Err(
        Failure::new(Code::NotEnough, format!("not enough: {free} became free")).hint(
            match undone {
                0 => "name more candidates".to_owned(),
                undone => format!(
                    "{} not preempted; the report says why",
                    human::count(undone, "victim was", "victims were")
                ),
            },
        ),
    )
}

fn human_report(report: &Preemption) -> String {
    let mut table = Table::new([
        ("TASK", Align::Left),
        ("WAY", Align::Left),
        ("", Align::Left),
        ("FREES", Align::Right),
        ("IN", Align::Right),
    ]);
    for one in &report.victims {
        let outcome = match one.outcome {
            Outcome::Done => one.checkpoint.clone().unwrap_or_else(|| "done".to_owned()),
            Outcome::Finished => "had ended".to_owned(),
            Outcome::Failed => "failed".to_owned(),
            Outcome::NotBegun => "not begun".to_owned(),
        };
        table.row([
            one.task.clone(),
            one.mechanism.to_owned(),
            outcome,
            words::resources(one.cpu_millis, one.memory_bytes),
            human::micros(one.elapsed_us),
        ]);
    }
    let mut text = table.render();
    for one in &report.victims {
        if let Some(error) = &one.error {
            text.push_str(&format!("{}: {error}\n", one.task));
        }
        if let Some(next) = &one.next {
            text.push_str(&format!("{}: {next}\n", one.task));
        }
    }
    let free = words::resources(report.cpu_millis, report.memory_bytes);
    text.push_str(&format!("\nfreed {free}\n"));
    text
}

#[cfg(test)]
mod tests {
    use permafrost_api_types::quantity::{Bytes, Count};

    use super::*;

    fn victim(outcome: Outcome) -> PreemptedVictim {
        let is_free = matches!(outcome, Outcome::Done | Outcome::Finished);
        PreemptedVictim {
            task: "7".to_owned(),
            node: "n1".to_owned(),
            pid: Some(7),
            mechanism: "kill",
            outcome,
            cpu_millis: if is_free { 1_000 } else { 0 },
            memory_bytes: if is_free { 1 << 30 } else { 0 },
            checkpoint: None,
            error: (!is_free).then(|| "it is not there".to_owned()),
            next: None,
            elapsed_us: 5,
        }
    }

    #[test]
    fn what_is_free_decides_and_not_how_many_were_preempted() {
        let wanted = |gib: u64| {
            Some(Resources {
                cpu_millis: Count::default(),
                memory_bytes: Bytes::new(gib << 30),
            })
        };
        let both = || vec![victim(Outcome::Done), victim(Outcome::Failed)];
        assert!(conclude(both(), true, wanted(1)).enough);
        assert!(!conclude(both(), true, wanted(2)).enough);
        assert!(
            !conclude(both(), true, None).enough,
            "all of the plan is wanted"
        );
        let ended = || vec![victim(Outcome::Done), victim(Outcome::Finished)];
        assert!(conclude(ended(), true, None).enough);
        assert!(
            !conclude(ended(), false, None).enough,
            "the plan was not enough"
        );
        let failed = judge(&conclude(both(), true, None), &Interrupts::none()).unwrap_err();
        assert_eq!(failed.code, Code::NotEnough);
        assert!(failed.hint.contains("1 victim"), "{}", failed.hint);
        let text = human_report(&conclude(both(), true, None));
        assert!(text.contains("7: it is not there\n"), "{text}");
        assert!(text.ends_with("freed 1 cpus, 1.0 GiB\n"), "{text}");
    }
}
