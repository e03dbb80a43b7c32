//! One run: a process that is dumped and restored on one tier.

use permafrost_terminal::failure::Failure;
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use serde::{Deserialize, Serialize};

use super::arguments::Copies;
use super::plan::{Case, Plan};
use super::progress::Progress;
use super::site::Site;
use crate::cycle::{self, How, Suspended, Target};
use crate::machine::Machine;
use crate::task::{Task, Work};

/// One suspend and the resume after it. A line of results.csv.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measurement {
    pub(super) tier: String,
    /// True if the tier's speed is emulated.
    pub(super) emulated: bool,
    /// Guarantee of the medium as the node reports it.
    pub(super) medium: String,
    pub(super) size_bytes: u64,
    pub(super) copies: Copies,
    /// Part of the memory written since the last dump; `None` for the first dump, which is full.
    pub(super) dirty_percent: Option<u64>,
    /// Number of the run, from 1.
    pub(super) run: u32,
    /// Duration of `permafrost dump`, from its start to its end.
    pub(super) suspend_s: f64,
    /// Part of that time for which the task was frozen.
    pub(super) frozen_s: f64,
    /// Duration of `permafrost restore`, from its start to its end.
    pub(super) resume_s: f64,
    /// Memory in the dump, including the program's own.
    pub(super) memory_bytes: u64,
    /// Bytes of that memory that were stored.
    pub(super) stored_bytes: u64,
    /// True if the medium has a page cache, and it had dropped the dump before the resume.
    pub(super) cold: bool,
    /// True if CRIU left clean pages out; otherwise they were compared with the last dump's.
    pub(super) soft_dirty: bool,
    /// True if the process has checked every page after the resume. A run with a wrong page is not recorded.
    pub(super) verified: bool,
}

impl Measurement {
    /// Returns the name of the dump: `full`, or the percentage written before it.
    pub(super) fn dump(&self) -> String {
        dump(self.dirty_percent)
    }
}

/// Returns the name of a dump with this percentage of written memory.
pub(super) fn dump(dirty_percent: Option<u64>) -> String {
    match dirty_percent {
        None => "full".to_owned(),
        Some(percent) => format!("{percent} % dirty"),
    }
}

/// Measures a case.
pub(super) fn run(
    plan: &Plan,
    machine: &Machine,
    site: &mut Site,
    case: &Case,
    interrupts: &Interrupts,
    progress: &mut Progress<'_>,
) -> Result<Vec<Measurement>, Failure> {
    progress.doing(&format!("{case}: filling memory"));
    let seed = u64::from(case.run);
    let work = Work::idle(case.size_bytes, plan.contents, seed);
    let mut task = Task::start(&site.workload_dir(), &work)?;
    task.await_report(interrupts)?;
    let job = format!("bench-{}", case.run);
    let mut measured = Vec::new();
    let shares = std::iter::once(None).chain(plan.dirty.iter().copied().map(Some));
    for dirty_percent in shares {
        progress.doing(&format!("{case}, {}", dump(dirty_percent)));
        if let Some(percent) = dirty_percent {
            task.dirty(percent, interrupts)?;
        }
        let how = How {
            durability: (case.copies == Copies::Replicated).then_some("all"),
            track: machine.soft_dirty,
        };
        let criu = plan.criu.as_deref();
        let control = site.control().to_owned();
        let target = Target {
            socket: &control,
            job: &job,
            criu,
        };
        let suspended = cycle::suspend(&target, task.pid(), how, interrupts)?;
        task.await_gone()?;
        let cold = site.is_cached() && !plan.warm;
        if cold {
            site.forget(interrupts)?;
        }
        let resumed = cycle::resume(&target, interrupts)?;
        task.check(interrupts)?;
        let Suspended {
            total,
            frozen,
            memory_bytes,
            stored_bytes,
        } = suspended;
        let measurement = Measurement {
            tier: case.tier.clone(),
            emulated: plan.tier(&case.tier)?.emulate.is_some(),
            medium: site.guarantee().to_owned(),
            size_bytes: case.size_bytes,
            copies: case.copies,
            dirty_percent,
            run: case.run,
            suspend_s: total.as_secs_f64(),
            frozen_s: frozen.as_secs_f64(),
            resume_s: resumed.as_secs_f64(),
            memory_bytes,
            stored_bytes,
            cold,
            soft_dirty: how.track && dirty_percent.is_some(),
            verified: true,
        };
        let emulated = if measurement.emulated {
            " (emulated)"
        } else {
            ""
        };
        let line = format!(
            "{case}{emulated}, {}: suspend {}, resume {}",
            measurement.dump(),
            human::duration(total),
            human::duration(resumed)
        );
        progress.measured(&line, case.size_bytes);
        measured.push(measurement);
    }
    task.kill();
    let control = site.control().to_owned();
    let target = Target {
        socket: &control,
        job: &job,
        criu: None,
    };
    cycle::remove(&target, interrupts)?;
    site.await_freed(interrupts)?;
    Ok(measured)
}
