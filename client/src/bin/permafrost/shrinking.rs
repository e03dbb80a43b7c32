//! `permafrost shrink` and `permafrost grow`: takes resources of a process tree that goes on, and gives them back.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use permafrost_agent::host::arguments::parse_size;
use permafrost_criu::{Criu, tracking};
use permafrost_preempt::record::RecordKind;
use permafrost_preempt::{Grown, ShrinkEnd, ShrinkOptions, ShrinkStep};
use permafrost_scheduling::bigc::{GRACEFUL_STEP, MINIMAL_FOOTPRINT};
use permafrost_scheduling::cost::TaskResources;
use permafrost_scheduling::quantity::Bytes;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::{job_name, name_of};
use permafrost_terminal::table::{Align, Table};
use serde::Serialize;

use crate::arguments::parse;
use crate::dump::{self, DumpArguments};
use crate::plan::preempt::parse_cpus;
use crate::targets::{self, RecordedArguments, TargetArguments, failure};
use permafrost_agent::host::arguments::parse_time;
use permafrost_terminal::words;

pub(crate) const SHRINK_EXAMPLES: &str = "\
Takes processors first (cpu.cfs_quota_us, cpu.max), so that the memory is not dirtied while it is reclaimed, then memory \
(memory.limit_in_bytes, memory.high), a step every --interval. A target that begins to swap keeps the rest of its \
memory and 1 % of a processor. With neither --cpu nor --memory everything is taken but 1 % of a processor and 64 MiB; \
with one of them, the other is left alone. --cpu and --memory say what is left, so a repeated command takes nothing more.

Memory is limited in the target's own memory group: the kernel does not move what is charged to a group that others \
share. Without swap only page cache can be reclaimed; the command says what was reached. No process is killed for a \
limit: with v1 the OOM killer of the group is off meanwhile, with v2 memory.high slows it down.

With --job the memory is put into a checkpoint before it is reclaimed, while the task goes on, so that a later dump \
stores what has changed since. That needs soft-dirty bits in the kernel; without them the whole task is dumped and \
frozen meanwhile.

Exit codes: 12 when less was taken than requested.

Examples:
    permafrost shrink --pid 4242 --cpu 0.5
    permafrost shrink --cgroup /batch/job7 --memory 2G --step 1,512M --interval 1s
    permafrost shrink --cgroup /batch/job7 --immediate
    permafrost shrink --pid 4242 --job train && permafrost grow --pid 4242
";

pub(crate) const GROW_EXAMPLES: &str = "\
Puts the settings back as they were, or with --cpu or --memory raises the limits to these. Repeating it does nothing.

Examples:
    permafrost grow --pid 4242
    permafrost grow --cgroup /batch/job7 --memory 4G
    permafrost grow --list            what this user has shrunk
    permafrost grow --all
";

#[derive(Debug, Args)]
pub(crate) struct ShrinkArguments {
    #[command(flatten)]
    target: TargetArguments,
    /// Processors that are left, such as 2 or 0.5; at least 0.01.
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    cpu: Option<u64>,
    /// Memory that is left, such as 512M; at least 64M.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// Processors and memory that are taken in a step [default: 2,4G].
    #[arg(long, value_name = "CPUS,SIZE", value_parser = parse_step)]
    step: Option<Step>,
    /// Time between two steps, in which the target shows whether it swaps.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "3s")]
    interval: Duration,
    /// Take everything in one step, and do not mind that it swaps.
    #[arg(long, conflicts_with_all = ["step", "interval"])]
    immediate: bool,
    /// Job of a checkpoint that is taken before, while the task goes on. For a --pid.
    #[arg(long, value_name = "JOB", value_parser = job_name)]
    job: Option<String>,
    /// CRIU program, with --job.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_CRIU")]
    criu: Option<PathBuf>,
    /// Options for CRIU, with --job.
    #[arg(last = true, value_name = "CRIU ARGS")]
    criu_arguments: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct GrowArguments {
    #[command(flatten)]
    recorded: RecordedArguments,
    /// Raise the quota to this many processors.
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    cpu: Option<u64>,
    /// Raise the memory limit to this.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
}

/// A step of `--step`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step(TaskResources);

fn parse_step(text: &str) -> Result<Step, String> {
    let (cpu, memory) = (text.split_once(','))
        .ok_or_else(|| format!("{text:?} is no step such as 2,4G: processors, then memory"))?;
    let (cpu_millis, memory) = (parse_cpus(cpu.trim())?, parse_size(memory)?);
    if cpu_millis < MINIMAL_FOOTPRINT.cpu_millis || memory < 1 << 20 {
        return Err("a step takes at least 0.01 processors and 1 MiB".to_owned());
    }
    Ok(Step(TaskResources {
        cpu_millis,
        memory: Bytes::new(memory),
    }))
}

/// Report of `permafrost shrink`.
#[derive(Debug, Serialize)]
struct Shrinkage {
    /// The process or the control group.
    target: String,
    /// State before the first step.
    before: ShrinkStep,
    /// State after each step.
    steps: Vec<ShrinkStep>,
    /// Reason why no more was taken: `reached`, `swapping`, `not_reclaimable`, `no_memory_group` or `interrupted`.
    end: ShrinkEnd,
    /// Explanation where less was taken than requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    /// Checkpoint that was taken before, with `--job`.
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<String>,
    /// Reason why the checkpoint could not be taken without a freeze.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_pre_dump: Option<String>,
}

/// Report of `permafrost grow`.
#[derive(Debug, Serialize)]
struct Growth {
    /// The targets that were meant.
    targets: Vec<GrownTarget>,
}

/// A target of `permafrost grow`.
#[derive(Debug, Serialize)]
struct GrownTarget {
    /// The process or the control group.
    target: String,
    /// `shrunk` (with `--list`), `grown`, `grown_in_part` (with `--cpu` or `--memory`), or `not_shrunk`.
    state: &'static str,
}

pub(crate) fn shrink(context: &Context, arguments: &ShrinkArguments) -> Result<(), Failure> {
    if arguments.job.is_some() && arguments.target.pid.is_none() {
        return Err(Failure::new(Code::Invalid, "--job is for a --pid"));
    }
    let (hierarchies, records) = targets::open()?;
    let target = arguments.target.target(&hierarchies)?;
    let interrupts = Interrupts::install()?;
    let (checkpoint, no_pre_dump) = match (&arguments.job, arguments.target.pid) {
        (Some(job), Some(pid)) => pre_dump(context, arguments, pid, job, &interrupts)?,
        _ => (None, None),
    };
    let came = || interrupts.came();
    let mut report = |step: &ShrinkStep| context.remark(&line(step));
    let shrunk = permafrost_preempt::shrink(
        &hierarchies,
        &records,
        &target,
        options(arguments),
        &came,
        &mut report,
    )
    .map_err(|error| failure(error).during(&target))?;
    let requested_memory = arguments.memory.is_some() || arguments.cpu.is_none();
    let report = Shrinkage {
        target: target.to_string(),
        before: shrunk.before,
        steps: shrunk.steps,
        end: shrunk.end,
        why: shrunk.why,
        checkpoint,
        no_pre_dump,
    };
    context.print(&report, human_shrinkage)?;
    match report.end {
        ShrinkEnd::Reached => Ok(()),
        ShrinkEnd::NoMemoryGroup if !requested_memory => Ok(()),
        ShrinkEnd::Interrupted => Err(Failure::interrupted(format!(
            "interrupted; {} keeps what it has now",
            report.target
        ))
        .hint("permafrost shrink again takes the rest, permafrost grow gives everything back")),
        _ => Err(Failure::new(
            Code::NotEnough,
            format!("less was taken: {}", report.why.unwrap_or_default()),
        )
        .hint("permafrost dump frees all of it; permafrost grow gives everything back")),
    }
}

fn options(arguments: &ShrinkArguments) -> ShrinkOptions {
    let to = match (arguments.cpu, arguments.memory) {
        (None, None) => MINIMAL_FOOTPRINT,
        (cpu, memory) => TaskResources {
            cpu_millis: cpu.unwrap_or(u64::MAX),
            memory: Bytes::new(memory.unwrap_or(u64::MAX)),
        },
    };
    ShrinkOptions {
        to,
        step: arguments.step.map_or(GRACEFUL_STEP, |step| step.0),
        interval: arguments.interval,
        immediate: arguments.immediate,
    }
}

/// Takes a checkpoint of a task that goes on. Returns its name, and the reason why it was a whole dump with a freeze.
///
/// It comes before the first step: CRIU's parasite runs with the task's processors, and reading pages that were
/// reclaimed would bring them back.
fn pre_dump(
    context: &Context,
    arguments: &ShrinkArguments,
    pid: u32,
    job: &str,
    interrupts: &Interrupts,
) -> Result<(Option<String>, Option<String>), Failure> {
    let impossible = if !tracking::permitted() {
        Some("only root may reset soft-dirty bits")
    } else if !Criu::new(arguments.criu.clone()).has_feature("mem_dirty_track")? {
        Some("this kernel does not keep soft-dirty bits (CONFIG_MEM_SOFT_DIRTY)")
    } else {
        None
    };
    let way = match impossible {
        None => "--pre-dump",
        Some(why) => {
            context.remark(&format!(
                "{why}: the task is dumped whole, and frozen meanwhile"
            ));
            "--leave-running"
        }
    };
    let mut line: Vec<OsString> = ["dump", way, "--job", job, "--pid"].map(Into::into).into();
    line.push(pid.to_string().into());
    if let Some(criu) = &arguments.criu {
        line.extend(["--criu".into(), criu.into()]);
    }
    line.push("--".into());
    line.extend(arguments.criu_arguments.iter().map(OsString::from));
    let arguments: DumpArguments = parse(line)?;
    let taken = dump::take(context, &arguments, || Ok(interrupts.clone()))
        .map_err(|failure| failure.during("nothing was taken: the checkpoint before failed"))?;
    interrupts.leave_alone();
    let name = name_of(&taken.checkpoint);
    context.remark(&format!("{name} is sealed"));
    Ok((Some(name), impossible.map(str::to_owned)))
}

fn line(step: &ShrinkStep) -> String {
    let used = words::resources(step.cpu_millis, step.memory_bytes);
    match step.swapped_bytes {
        0 => used,
        swapped => format!("{used}, {} in swap", human::bytes(swapped)),
    }
}

fn human_shrinkage(report: &Shrinkage) -> String {
    let mut table = Table::new([
        ("AFTER", Align::Right),
        ("CPUS", Align::Right),
        ("MEMORY", Align::Right),
        ("SWAP", Align::Right),
    ]);
    for step in std::iter::once(&report.before).chain(&report.steps) {
        table.row([
            human::micros(step.elapsed_us),
            format!("{}.{:03}", step.cpu_millis / 1_000, step.cpu_millis % 1_000),
            human::bytes(step.memory_bytes),
            human::bytes(step.swapped_bytes),
        ]);
    }
    let mut text = table.render();
    if let Some(checkpoint) = &report.checkpoint {
        text.push_str(&format!("{checkpoint} holds its memory\n"));
    }
    if let Some(why) = &report.why {
        text.push_str(&format!("{}: {why}\n", report.target));
    }
    text
}

pub(crate) fn grow(context: &Context, arguments: &GrowArguments) -> Result<(), Failure> {
    let (hierarchies, records) = targets::open()?;
    let to = match (arguments.cpu, arguments.memory) {
        (None, None) => None,
        (cpu, memory) => Some(TaskResources {
            cpu_millis: cpu.unwrap_or(0),
            memory: Bytes::new(memory.unwrap_or(0)),
        }),
    };
    let mut grown = Vec::new();
    let mut failed = None;
    let kind = RecordKind::Shrunk;
    for target in arguments.recorded.targets(&hierarchies, &records, kind)? {
        let state = if arguments.recorded.list {
            "shrunk"
        } else {
            match permafrost_preempt::grow(&hierarchies, &records, &target, to) {
                Ok(Grown::Whole) => "grown",
                Ok(Grown::Part) => "grown_in_part",
                Ok(Grown::NotShrunk) => "not_shrunk",
                // The others are grown all the same.
                Err(error) => {
                    failed = failed.or(Some(failure(error).during(&target)));
                    continue;
                }
            }
        };
        grown.push(GrownTarget {
            target: target.to_string(),
            state,
        });
    }
    let report = Growth { targets: grown };
    context.print(&report, human_growth)?;
    failed.map_or(Ok(()), Err)
}

fn human_growth(report: &Growth) -> String {
    let line = |one: &GrownTarget| match one.state {
        "shrunk" => format!("{} is shrunk\n", one.target),
        "grown" => format!("{} has everything back\n", one.target),
        "grown_in_part" => format!("{} has a part back\n", one.target),
        _ => format!("{} was not shrunk\n", one.target),
    };
    match report.targets.is_empty() {
        true => "nothing is shrunk\n".to_owned(),
        false => report.targets.iter().map(line).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_processors_and_memory() {
        let step = |cpu_millis, mib| {
            Ok(Step(TaskResources {
                cpu_millis,
                memory: Bytes::mib(mib),
            }))
        };
        assert_eq!(parse_step("2,4G"), step(2_000, 4096));
        assert_eq!(parse_step("0.5, 64M"), step(500, 64));
        for bad in [
            "", "2", "2;4G", "0,4G", "2,0", "2,1K", "x,4G", "2,4X", "-1,1G",
        ] {
            assert!(parse_step(bad).is_err(), "{bad}");
        }
    }
}
