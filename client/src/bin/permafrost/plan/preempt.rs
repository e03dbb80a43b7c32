//! `permafrost plan preempt`: chooses tasks to preempt, and the way for each.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgGroup, Args};
use permafrost_agent::host::arguments::{parse_duration, parse_size};
use permafrost_api_types::cost::{By, Copies, ReplyDetail};
use permafrost_api_types::preempt::{Preempt, PreemptAnswer, Victim};
use permafrost_api_types::quantity::{Bytes, Count, Seconds};
use permafrost_api_types::task::Resources;
use permafrost_scheduling::policy::Name;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::table::{Align, Table};
use permafrost_transport::api::{ApiClient, ApiReply};
use serde_json::Value;

use crate::api::{self, ApiArguments, seconds};
use crate::candidate::{self, Known, PidOfJob, parse_pid};
use crate::nodes::as_of;
use crate::plan::decisions;
use permafrost_terminal::words::{self, ByWord, CopiesWord};

pub(super) const EXAMPLES: &str = "\
Without --cpu and --memory it says how each candidate would be preempted. The memory and the processor time of a \
--pid are read from /proc, with all its descendants; what it frees is its memory, and the processors it kept busy. \
FILE holds candidates as the API takes them (docs/api.md): an array of tasks, or a whole request.

Exit codes: 0 when enough becomes free, 12 when all candidates together are not enough, 11 when nothing can be said \
of any of them.

Examples:
    permafrost plan preempt --cpu 2 --memory 8G --pid 4242:train --pid 4711:build
    permafrost plan preempt --memory 8G --candidates tasks.json --longest-delay 30s --by p95 --json
    permafrost plan preempt --cpu 4 --candidates tasks.json --policy mr+srt
    permafrost plan preempt --cpu 4 --candidates tasks.json --policy pr+random --seed 7
    case $(permafrost plan preempt --pid 4242:train --verdict) in
        checkpoint) permafrost dump --pid 4242 --job train ;;
        rollback|kill) kill 4242 ;;
    esac
";

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("whom").required(true).args(["pids", "candidates"]))]
pub(super) struct PlanPreemptArguments {
    #[command(flatten)]
    question: PreemptQuestion,
    /// Print one word, for scripts: checkpoint, kill, rollback, suspend or wait. For a single --pid.
    #[arg(long, requires = "pids", conflicts_with_all = ["json", "cpu", "memory", "policy"])]
    verdict: bool,
}

/// The resources that are wanted, and the tasks that they may be taken from.
#[derive(Debug, Args)]
pub(crate) struct PreemptQuestion {
    /// Processors that are wanted, such as 2 or 0.5.
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    pub(crate) cpu: Option<u64>,
    /// Memory that is wanted, such as 512M or 16G.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) memory: Option<u64>,
    /// A process tree of this machine, and the job that its dumps belong to. Repeatable.
    #[arg(long = "pid", value_name = "PID[:JOB]", value_parser = parse_pid)]
    pub(crate) pids: Vec<PidOfJob>,
    /// Tasks as the API takes them; `-` is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "pids")]
    pub(crate) candidates: Option<PathBuf>,
    /// Policy that decides what is done to whom.
    #[arg(long, value_name = "POLICY", help = decisions::policy_help())]
    policy: Option<Name>,
    /// Seed of what the policy draws: the same question with the same seed has the same answer [default: another one
    /// each time].
    #[arg(long, value_name = "N", requires = "policy", value_parser = parse_seed)]
    seed: Option<Count>,
    /// Longest delay that is allowed at the 95th percentile, such as 30s.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    longest_delay: Option<Duration>,
    /// Values that decide: medians or 95th percentiles [default: p50].
    #[arg(long, value_enum)]
    by: Option<ByWord>,
    /// Where a dump has to be before the task may go [default: local].
    #[arg(long, value_enum)]
    copies: Option<CopiesWord>,
    /// Waiting for a task's end is an answer, too.
    #[arg(long)]
    may_wait: bool,
    #[command(flatten)]
    known: Known,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

impl PreemptQuestion {
    pub(crate) fn wanted(&self) -> Result<Option<Resources>, Failure> {
        if self.cpu.is_none() && self.memory.is_none() {
            return Ok(None);
        }
        let invalid =
            |error: &dyn std::error::Error| Failure::new(Code::Invalid, error.to_string());
        Ok(Some(Resources {
            cpu_millis: Count::try_from(self.cpu.unwrap_or_default()).map_err(|e| invalid(&e))?,
            memory_bytes: Bytes::try_from(self.memory.unwrap_or_default())
                .map_err(|e| invalid(&e))?,
        }))
    }

    fn longest_delay(&self) -> Result<Option<Seconds>, Failure> {
        let delay = self.longest_delay.map(|delay| Seconds::new(seconds(delay)));
        let delay = delay.transpose();
        delay.map_err(|error| Failure::new(Code::Invalid, error.to_string()))
    }
}

pub(super) fn preempt(context: &Context, arguments: &PlanPreemptArguments) -> Result<(), Failure> {
    let question = &arguments.question;
    if arguments.verdict && question.pids.len() != 1 {
        return Err(Failure::new(
            Code::Invalid,
            "--verdict is for a single --pid",
        ));
    }
    let client = question.api.client(context)?;
    let answer = client.post("/v1/preempt", &request(&client, question)?)?;
    let plan: PreemptAnswer<'_> = answer.read()?;
    print(context, arguments, &answer, &plan)?;
    judge(&plan)
}

/// Returns the request: with the candidates of a file, or with process trees of this machine.
pub(crate) fn request(client: &ApiClient, arguments: &PreemptQuestion) -> Result<Value, Failure> {
    match &arguments.candidates {
        Some(path) => of_file(path, arguments),
        None => serde_json::to_value(of_pids(client, arguments)?)
            .map_err(|error| Failure::new(Code::Internal, format!("write JSON: {error}"))),
    }
}

fn print(
    context: &Context,
    arguments: &PlanPreemptArguments,
    answer: &ApiReply,
    plan: &PreemptAnswer<'_>,
) -> Result<(), Failure> {
    if !arguments.verdict {
        return api::print(context, answer, || human_plan(plan));
    }
    match plan.victims.first() {
        Some(victim) => context.write_text(words::verdict(victim.mechanism)),
        // No output means no decision; the exit code reports it.
        None => Ok(()),
    }
}

/// Returns the failure for the exit code, if the plan frees too little or nothing is known.
fn judge(plan: &PreemptAnswer<'_>) -> Result<(), Failure> {
    let decided = plan.decisions.as_ref().map_or(0, Vec::len);
    if plan.victims.is_empty()
        && decided == 0
        && let Some(why) = nothing_said(plan)
    {
        return Err(Failure::new(
            Code::Unavailable,
            format!("nothing can be said of any candidate: {why}"),
        ));
    }
    if plan.enough {
        return Ok(());
    }
    let lacking = words::resources(plan.lacking.cpu_millis, plan.lacking.memory_bytes);
    let left_out = plan.undecided.len() + plan.unknown_node.len();
    let failure = Failure::new(
        Code::NotEnough,
        format!("not enough: {lacking} are lacking"),
    );
    Err(match left_out {
        0 => failure,
        left_out => failure.hint(format!("nothing could be said of {left_out} candidates")),
    })
}

/// Returns the reason for which nothing was decided, if there was a candidate.
fn nothing_said(plan: &PreemptAnswer<'_>) -> Option<String> {
    let undecided = plan.undecided.first();
    let undecided = undecided.map(|one| format!("{}: {}", one.task, one.reason));
    undecided.or_else(|| plan.unknown_node.first().map(on_unknown))
}

fn on_unknown(one: &permafrost_api_types::preempt::OnUnknownNode<'_>) -> String {
    match &one.node {
        Some(node) => format!("{}: no node is called {node}", one.task),
        None => format!("{}: it names no node", one.task),
    }
}

fn of_pids(client: &ApiClient, arguments: &PreemptQuestion) -> Result<Preempt<'static>, Failure> {
    let own = api::own_node(client)?;
    let alone = arguments.pids.len() == 1;
    let known = &arguments.known;
    if !alone && (known.progress.is_some() || known.remaining.is_some()) {
        return Err(Failure::new(
            Code::Invalid,
            "--progress and --remaining are of a single --pid",
        )
        .hint("tell more of several with --candidates"));
    }
    let candidates = arguments
        .pids
        .iter()
        .map(|one| candidate::task(one.pid, one.job.as_deref(), &own, known))
        .collect::<Result<_, _>>()?;
    Ok(Preempt {
        wanted: arguments.wanted()?,
        candidates,
        policy: arguments.policy.map(|policy| policy.as_str().into()),
        seed: arguments.seed,
        copies: arguments.copies.map_or(Copies::Local, Into::into),
        by: arguments.by.map_or(By::P50, Into::into),
        longest_delay_s: arguments.longest_delay()?,
        may_wait: arguments.may_wait,
        detail: ReplyDetail::Full,
        ..Preempt::default()
    })
}

/// Reads the request in the file, and sets the fields that the command line gives.
fn of_file(path: &Path, arguments: &PreemptQuestion) -> Result<Value, Failure> {
    let mut request = api::request_of(path, "candidates")?;
    api::set(&mut request, "wanted", arguments.wanted()?);
    api::set(&mut request, "policy", arguments.policy);
    api::set(&mut request, "seed", arguments.seed);
    api::set(&mut request, "copies", arguments.copies.map(Copies::from));
    api::set(&mut request, "by", arguments.by.map(By::from));
    api::set(&mut request, "longest_delay_s", arguments.longest_delay()?);
    api::set(&mut request, "may_wait", arguments.may_wait.then_some(true));
    Ok(request)
}

fn human_plan(plan: &PreemptAnswer<'_>) -> String {
    let mut text = match &plan.decisions {
        Some(decided) => decisions::human(decided),
        None => human_victims(&plan.victims),
    };
    for one in &plan.undecided {
        text.push_str(&format!("{}: undecided: {}\n", one.task, one.reason));
    }
    for one in &plan.unknown_node {
        text.push_str(&format!("{}\n", on_unknown(one)));
    }
    let frees = words::resources(plan.frees.cpu_millis, plan.frees.memory_bytes);
    text.push_str(&format!("\nfrees {frees}"));
    if !plan.enough {
        let lacking = words::resources(plan.lacking.cpu_millis, plan.lacking.memory_bytes);
        text.push_str(&format!("; {lacking} are lacking"));
    }
    text.push_str(&as_of(&plan.answered_by, plan.age_s));
    text
}

/// Formats victims as a table, followed by the reasons.
fn human_victims(victims: &[Victim<'_>]) -> String {
    let mut table = Table::new([
        ("TASK", Align::Left),
        ("NODE", Align::Left),
        ("WAY", Align::Left),
        ("COSTS", Align::Right),
        ("FREE IN", Align::Right),
        ("FREES", Align::Right),
        ("ELSE", Align::Left),
    ]);
    for victim in victims {
        table.row([
            victim.task.to_string(),
            victim.node.to_string(),
            words::name(victim.mechanism).to_owned(),
            words::spread(victim.cost.overhead_s),
            words::spread(victim.cost.delay_s),
            words::resources(
                victim.frees.cpu_millis.value(),
                victim.frees.memory_bytes.count(),
            ),
            second_best(victim),
        ]);
    }
    let mut text = table.render();
    for victim in victims {
        if let Some(reason) = victim.reason.as_ref().or(victim.cost.reason.as_ref()) {
            text.push_str(&format!("{}: {reason}\n", victim.task));
        }
    }
    text
}

/// Formats the second best way and its score: `kill 12.0 s`.
fn second_best(victim: &Victim<'_>) -> String {
    victim.next.map_or_else(String::new, |next| {
        let score = permafrost_terminal::human::seconds(next.score_s);
        format!("{} {score}", words::name(next.mechanism))
    })
}

/// Parses a seed of policies.
fn parse_seed(text: &str) -> Result<Count, String> {
    let wrong = || {
        let most = Count::MAX.value();
        format!("{text:?} is no seed: a number from 0 to {most} is")
    };
    let seed: u64 = text.parse().map_err(|_| wrong())?;
    Count::try_from(seed).map_err(|_| wrong())
}

/// Parses a number of processors into thousandths.
pub(crate) fn parse_cpus(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no number of processors such as 2 or 0.5");
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || part.len() > 3 || !digits(whole) || !digits(part) {
        return Err(wrong());
    }
    let whole: u64 = whole.parse().map_err(|_| wrong())?;
    let thousandths: u64 = format!("{part:0<3}").parse().map_err(|_| wrong())?;
    whole
        .checked_mul(1_000)
        .and_then(|whole| whole.checked_add(thousandths))
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use permafrost_api_types::cost::{Cost, Mechanism, Spread};
    use permafrost_api_types::preempt::{Next, OnUnknownNode, Total, Undecided};

    use super::*;

    fn plan() -> PreemptAnswer<'static> {
        let spread = |p50| Spread { p50, p95: p50 };
        let victim = Victim {
            task: "4242".into(),
            node: "n1".into(),
            mechanism: Mechanism::IncrementalDump,
            frees: Resources {
                cpu_millis: Count::try_from(1_500).unwrap(),
                memory_bytes: Bytes::new(4 << 30),
            },
            score_s: 2.0,
            cost: Cost {
                overhead_s: spread(2.0),
                delay_s: spread(1.0),
                until_running_s: spread(1.0),
                parts: None,
                age_s: 1.0,
                omits: None,
                reason: None,
            },
            next: Some(Next {
                mechanism: Mechanism::Kill,
                score_s: 600.0,
            }),
            reason: Some("a dump costs 2 s, a kill 600 s".to_owned()),
        };
        PreemptAnswer {
            answered_by: "n1".into(),
            age_s: 0.5,
            victims: vec![victim],
            frees: Total {
                cpu_millis: 1_500,
                memory_bytes: 4 << 30,
            },
            lacking: Total::default(),
            enough: true,
            decisions: None,
            undecided: Vec::new(),
            unknown_node: Vec::new(),
        }
    }

    #[test]
    fn the_exit_code_says_whether_it_is_enough() {
        assert!(judge(&plan()).is_ok());
        let mut few = plan();
        few.enough = false;
        few.lacking.memory_bytes = 1 << 30;
        let failure = judge(&few).unwrap_err();
        assert_eq!(failure.code, Code::NotEnough);
        assert!(failure.message.contains("1.0 GiB"), "{}", failure.message);
        let mut nothing = plan();
        nothing.victims.clear();
        nothing.undecided.push(Undecided {
            task: "4242".into(),
            reason: "no bandwidth is known".to_owned(),
        });
        // The same holds for a request without requirements, for which nothing is always enough.
        let failure = judge(&nothing).unwrap_err();
        assert_eq!(failure.code, Code::Unavailable);
        assert!(failure.message.contains("no bandwidth is known"));
        nothing.undecided.clear();
        nothing.unknown_node.push(OnUnknownNode {
            task: "4242".into(),
            node: Some("n9".into()),
        });
        assert!(judge(&nothing).unwrap_err().message.contains("n9"));
    }

    #[test]
    fn a_plan_names_victims_and_what_they_free() {
        let text = human_plan(&plan());
        let line = text.lines().find(|line| line.starts_with("4242 ")).unwrap();
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            line,
            "4242 n1 incremental_dump 2.00 s 1.00 s 1.5 cpus, 4.0 GiB kill 10 m"
        );
        assert!(text.contains("4242: a dump costs 2 s, a kill 600 s\n"));
        assert!(text.contains("frees 1.5 cpus, 4.0 GiB\n"), "{text}");
    }

    #[test]
    fn seeds_are_counts() {
        assert_eq!(parse_seed("7").map(Count::value), Ok(7));
        for bad in ["", "-1", "1.5", "x", "1125899906842625"] {
            assert!(parse_seed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn processors_have_thousandths() {
        for (text, millis) in [("2", 2_000), ("0.5", 500), ("1.125", 1_125), ("3.", 3_000)] {
            assert_eq!(parse_cpus(text), Ok(millis), "{text}");
        }
        for bad in ["", ".5", "-1", "1.0001", "x", "1e3", "99999999999999999999"] {
            assert!(parse_cpus(bad).is_err(), "{bad}");
        }
    }
}
