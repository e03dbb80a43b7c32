//! `permafrost suspend` and `permafrost resume`: suspension in memory.

use std::time::Duration;

use clap::Args;
use permafrost_preempt::record::{RecordKind, Records};
use permafrost_preempt::{
    HeldBy, PreemptError, ResumeOutcome, SuspendOptions, SuspendOutcome, SuspendedProcess, Target,
};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::table::{Align, Table};
use serde::Serialize;

use crate::targets::{self, RecordedArguments, TargetArguments, failure};
use permafrost_agent::host::arguments::parse_time;

pub(crate) const SUSPEND_EXAMPLES: &str = "\
Every process gets SIGTSTP, so that its handlers run. Those that still run after --grace are frozen by the freezer of \
control groups (v1 or v2), in their own group if only the tree is in it, else in one that is made; where that is not \
allowed they get SIGSTOP. (The kernel ignores SIGTSTP in orphaned process groups: most tasks of schedulers are frozen.) \
Processes that start or end meanwhile are handled. The memory stays; the kernel pages it out if others need it.

The owner of all the processes may do it, or root; the freezer is root's unless it is delegated. What is done is \
recorded first, in /run/permafrost-preempted (other users: /var/tmp/permafrost-preempted-UID-BOOT_ID), so that \
`permafrost resume` undoes it even if this command was killed. Ctrl-C puts everything back; what an earlier command has \
suspended stays suspended.

Examples:
    permafrost suspend --pid 4242
    permafrost suspend --pid 4242 --freeze                          no signal: no handler runs
    permafrost suspend --cgroup /sys/fs/cgroup/freezer/batch/job7
";

pub(crate) const RESUME_EXAMPLES: &str = "\
Thaws what was frozen and continues what was stopped; processes that were stopped before stay so. Repeating it does \
nothing.

Examples:
    permafrost resume --pid 4242
    permafrost resume --list          what this user has suspended
    permafrost resume --all
";

#[derive(Debug, Args)]
pub(crate) struct SuspendArguments {
    #[command(flatten)]
    target: TargetArguments,
    /// Freeze at once, without SIGTSTP.
    #[arg(long)]
    freeze: bool,
    /// Time to stop after SIGTSTP, such as 500ms or 10s.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "5s", conflicts_with = "freeze")]
    grace: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct ResumeArguments {
    #[command(flatten)]
    recorded: RecordedArguments,
}

/// Report of `permafrost suspend`.
#[derive(Debug, Serialize)]
struct Suspension {
    /// The process or the control group.
    target: String,
    /// `suspended`; or `ended`: all its processes ended meanwhile.
    state: &'static str,
    /// Its processes, parents before their children.
    processes: Vec<SuspendedProcess>,
    /// Reason why a control group could not be frozen, where processes got SIGSTOP instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    freezer_error: Option<String>,
    /// Time until nothing ran any more.
    elapsed_us: u64,
}

/// Report of `permafrost resume`.
#[derive(Debug, Serialize)]
struct Resumption {
    /// The targets that were meant.
    targets: Vec<ResumedTarget>,
}

/// A target of `permafrost resume`.
#[derive(Debug, Serialize)]
struct ResumedTarget {
    /// The process or the control group.
    target: String,
    /// `suspended` (with `--list`), `resumed`, `ended` while it was suspended, or `not_suspended`.
    state: &'static str,
    /// Number of processes that go on.
    processes: usize,
}

pub(crate) fn suspend(context: &Context, arguments: &SuspendArguments) -> Result<(), Failure> {
    let (hierarchies, records) = targets::open()?;
    let target = arguments.target.target(&hierarchies)?;
    let interrupts = Interrupts::install()?;
    let options = SuspendOptions {
        grace: arguments.grace,
        freeze_at_once: arguments.freeze,
    };
    let came = || interrupts.came();
    let outcome = permafrost_preempt::suspend(&hierarchies, &records, &target, options, &came)
        .map_err(|error| refused(&records, &target, error))?;
    let report = match outcome {
        SuspendOutcome::Ended => Suspension {
            target: target.to_string(),
            state: "ended",
            processes: Vec::new(),
            freezer_error: None,
            elapsed_us: 0,
        },
        SuspendOutcome::Suspended {
            processes,
            freezer_error,
            elapsed,
        } => Suspension {
            target: target.to_string(),
            state: "suspended",
            processes,
            freezer_error,
            elapsed_us: human::whole_micros(elapsed),
        },
    };
    context.print(&report, human_suspension)
}

/// Returns the failure of a suspension. It says what is suspended now: an earlier command may have done that.
pub(crate) fn refused(records: &Records, target: &Target, error: PreemptError) -> Failure {
    // Another command may be at work on the record, or there is none: what it holds is not known.
    if matches!(error, PreemptError::Record(_)) {
        return failure(error);
    }
    let is_interrupted = matches!(error, PreemptError::Interrupted);
    let mut failure = failure(error);
    let recorded = records.targets(RecordKind::Suspended).unwrap_or_default();
    if recorded.contains(target) {
        let words = format!("; what is suspended stays so until {}", resume_line(target));
        failure.message.push_str(&words);
    } else if is_interrupted {
        failure.message.push_str("; everything is as it was");
    }
    failure
}

/// Returns the command that resumes a target.
pub(crate) fn resume_line(target: &Target) -> String {
    match target {
        Target::Tree { pid, .. } => format!("permafrost resume --pid {pid}"),
        Target::Group { path, .. } => format!("permafrost resume --cgroup {}", path.display()),
    }
}

fn human_suspension(report: &Suspension) -> String {
    if report.state == "ended" {
        return format!("{} has ended\n", report.target);
    }
    let mut table = Table::new([
        ("PID", Align::Right),
        ("NAME", Align::Left),
        ("", Align::Left),
    ]);
    for process in &report.processes {
        let held = match process.held {
            HeldBy::Stopped => "stopped",
            HeldBy::StoppedBefore => "was stopped before",
            HeldBy::Frozen => "frozen",
            HeldBy::StoppedHard => "stopped by SIGSTOP",
        };
        table.row([
            process.pid.to_string(),
            process.name.clone(),
            held.to_owned(),
        ]);
    }
    let mut text = table.render();
    if let Some(error) = &report.freezer_error {
        text.push_str(&format!("not frozen: {error}\n"));
    }
    let elapsed = human::micros(report.elapsed_us);
    text.push_str(&format!("{} is suspended, in {elapsed}\n", report.target));
    text
}

pub(crate) fn resume(context: &Context, arguments: &ResumeArguments) -> Result<(), Failure> {
    let (hierarchies, records) = targets::open()?;
    let kind = RecordKind::Suspended;
    let mut resumed = Vec::new();
    let mut failed = None;
    for target in arguments.recorded.targets(&hierarchies, &records, kind)? {
        let (state, processes) = if arguments.recorded.list {
            ("suspended", 0)
        } else {
            match permafrost_preempt::resume(&records, &target) {
                Ok(ResumeOutcome::Resumed { processes }) => ("resumed", processes),
                Ok(ResumeOutcome::Ended) => ("ended", 0),
                Ok(ResumeOutcome::NotSuspended) => ("not_suspended", 0),
                // The others are resumed all the same.
                Err(error) => {
                    failed = failed.or(Some(failure(error).during(&target)));
                    continue;
                }
            }
        };
        resumed.push(ResumedTarget {
            target: target.to_string(),
            state,
            processes,
        });
    }
    let report = Resumption { targets: resumed };
    context.print(&report, human_resumption)?;
    failed.map_or(Ok(()), Err)
}

fn human_resumption(report: &Resumption) -> String {
    let line = |one: &ResumedTarget| match one.state {
        "suspended" => format!("{} is suspended\n", one.target),
        "resumed" => {
            let count = human::count(one.processes as u64, "process", "processes");
            format!("{} is resumed: {count}\n", one.target)
        }
        "ended" => format!("{} ended while it was suspended\n", one.target),
        _ => format!("{} was not suspended\n", one.target),
    };
    match report.targets.is_empty() {
        true => "nothing is suspended\n".to_owned(),
        false => report.targets.iter().map(line).collect(),
    }
}
