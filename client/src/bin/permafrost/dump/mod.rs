//! `permafrost dump`.
//!
//! ```text
//! Open ─▶ session ─▶ criu dump ──pages──▶ permafrostd ─▶ CLOSE answered: pages are safe
//!                        │ post-dump script (tasks frozen): permafrost-action ─▶ Seal ─▶ sealed
//!                        └ exits 0: tasks end or go on            exits 1: CRIU rolls back, they go on
//! ```
//!
//! A guard (`permafrost freeze-guard`) runs between this command and CRIU, and ends a freeze that reaches its
//! limit, whatever has happened to permafrostd and to this command by then.
//!
//! A pre-dump calls no scripts, and ends no task: this command seals it after CRIU has ended.
//!
//! With `--pre-copy`, pre-dumps come before the dump: `pre_copy`.
//!
//! The control connection stays open for the whole dump, and the session is bound to it: however this command
//! ends, no unfinished session is left.

mod arguments;
mod conclude;
mod dependencies;
mod guard;
mod incomplete;
mod pre_copy;
mod report;
mod run;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use permafrost_criu::options::{Operation, PassedOn};
use permafrost_criu::processes::{self, Patience};
use permafrost_criu::scratch::Scratch;
use permafrost_criu::tracking::{self, Locked, Markers};
use permafrost_criu::way::ChosenWay;
use permafrost_criu::{Criu, Finished, FreezeLimit, handover, origin};
use permafrost_protocol::control::{Checkpoint, Detail, ErrorCode, request};
use permafrost_protocol::manifest::Origin;
use permafrost_terminal::names::name_of;
use permafrost_transport::control::{Connection, ControlError};

pub(crate) use self::arguments::{DUMP_EXAMPLES, DumpArguments};
pub(crate) use self::guard::{GuardArguments, guard};
pub(crate) use self::report::Report;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;

/// Memory for the images of a dump, bytes: everything but the pages. Ghost files may add to it.
const IMAGES_BYTES: u64 = 32 << 20;

/// Characters of a job's name in the name of its dump's directory.
const NAMED_CHARS: usize = 20;

/// Time limits of the wait for killed tasks. Restores wait for those that are left.
const PATIENCE: Patience = Patience {
    to_end: Duration::from_secs(30),
    to_be_reaped: Duration::from_secs(1),
};

/// Checkpoint that already holds the clean pages, which this dump leaves out.
struct Parent {
    name: String,
    generation: u64,
}

/// Parameters of a dump, complete before a session is opened.
struct Plan<'a> {
    context: &'a Context,
    arguments: &'a DumpArguments,
    criu: Criu,
    passed_on: PassedOn,
    leave_running: bool,
    origin: Origin,
    freeze_limit: FreezeLimit,
    /// True if the tree has no pid namespace of its own: the pids in the images are those of this namespace.
    same_pids: bool,
    action: PathBuf,
    /// Locked markers of a dump with soft-dirty bits: no other dump resets the bits meanwhile.
    tracking: Option<Locked>,
    parent: Option<Parent>,
}

/// Directories and files that CRIU reads and writes.
struct Places {
    scratch: Scratch,
    images: PathBuf,
    work: PathBuf,
    verdict: PathBuf,
    /// Path of the guard's report.
    report: PathBuf,
}

/// Results of CRIU's run and of the seal.
struct Sealed {
    finished: Finished,
    checkpoint: Checkpoint,
    seal_us: u64,
}

/// A dump that was taken.
struct Taken {
    sealed: Sealed,
    way: ChosenWay,
    /// Time in the queue.
    waited: Duration,
}

pub(crate) fn dump(context: &Context, arguments: &DumpArguments) -> Result<(), Failure> {
    let report = take(context, arguments, Interrupts::install)?;
    context.print(&report, report::human_report)
}

/// Takes a dump and prints nothing; `interrupts` is called once the arguments were checked.
pub(crate) fn take(
    context: &Context,
    arguments: &DumpArguments,
    interrupts: impl FnOnce() -> Result<Interrupts, Failure>,
) -> Result<Report, Failure> {
    match arguments.pre_copy {
        Some(limit) => pre_copy::take(context, arguments, limit, interrupts),
        None => take_part(context, arguments, interrupts).map(|(report, _)| report),
    }
}

/// Takes a dump without rounds before it, or one part of a dump with them. Returns the connection, too: a round lasts as
/// long as that.
fn take_part(
    context: &Context,
    arguments: &DumpArguments,
    interrupts: impl FnOnce() -> Result<Interrupts, Failure>,
) -> Result<(Report, Connection), Failure> {
    let started = Instant::now();
    let mut plan = Plan::new(context, arguments)?;
    let interrupts = interrupts()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    dependencies::refuse_daemon(arguments.pid, &connection)?;
    if plan.origin.tracked {
        plan.track(&interrupts)?;
    }
    plan.choose_parent(&mut connection, &interrupts)?;

    let places = plan.places()?;
    let result = plan
        .run(&mut connection, &places, &interrupts)
        .map_err(|failure| interrupts.explain(failure));
    let Taken {
        sealed,
        way,
        waited,
    } = match result {
        Ok(taken) => taken,
        Err(failure) => return Err(plan.keep_log(failure, places)),
    };

    if let Some(tracking) = plan.tracking.take()
        && let Err(error) = tracking.record(&plan.origin, &sealed.checkpoint.id)
    {
        context.remark(&format!(
            "the next dump will not leave clean pages out: {error}"
        ));
    }
    let elapsed = started.elapsed();
    if !arguments.part.is_round() {
        context.tell_took(&request::Took {
            checkpoint: sealed.checkpoint.id.clone(),
            restored: false,
            elapsed_us: human::whole_micros(elapsed.saturating_sub(waited)),
            lazy: false,
        });
    }
    let report = Report {
        stats: report::read_stats(&sealed.finished.work_dir),
        total_us: human::whole_micros(elapsed),
        criu_us: human::whole_micros(sealed.finished.elapsed),
        seal_us: sealed.seal_us,
        incremental: sealed.checkpoint.parent_generation > 0,
        clean_pages_left_out: plan.parent.is_some(),
        checkpoint: sealed.checkpoint,
        way: way.way,
        way_reason: way.reason,
        pre_copy: None,
        restore_needs: plan.passed_on.with_counterpart(),
        log: arguments.work_dir.is_some().then_some(sealed.finished.log),
    };
    if !plan.leave_running && !arguments.pre_dump {
        plan.wait_for_the_end(&places);
    }
    drop(places.scratch);
    Ok((report, connection))
}

/// Refuses a tree that is too large for a checkpoint, while it still runs.
pub(crate) fn check_fits(pid: u32) -> Result<(), Failure> {
    processes::check_fits(pid).map_err(|error| {
        Failure::new(Code::Invalid, error.to_string())
            .hint("dump subtrees as jobs of their own; nothing was frozen")
    })
}

impl<'a> Plan<'a> {
    fn new(context: &'a Context, arguments: &'a DumpArguments) -> Result<Self, Failure> {
        let mut passed_on = PassedOn::parse(&arguments.criu_arguments, Operation::Dump)?;
        let leave_running = passed_on.take("leave-running") | arguments.leave_running;
        if arguments.shell_job {
            passed_on.add("shell-job");
        }
        if arguments.tcp_established {
            passed_on.add("tcp-established");
        }
        if arguments.stream && passed_on.has("track-mem") {
            return Err(Failure::new(
                Code::Invalid,
                "CRIU does not track memory in a dump with --stream",
            )
            .hint("leave --stream or --track-mem out"));
        }
        let tracked = passed_on.take("track-mem") | arguments.pre_dump | arguments.part.is_later();
        let criu = Criu::new(arguments.criu.clone());
        let mut origin = origin::collect(arguments.pid)?;
        let usage = processes::usage(&processes::tree(arguments.pid))?;
        check_fits(arguments.pid)?;
        origin.criu_version = criu.version()?;
        origin.tracked = tracked;
        origin.restore_options = passed_on.restore_options();
        if tracked && !tracking::permitted() {
            return Err(Failure::new(
                Code::Denied,
                "only root may dump with soft-dirty bits: root's next dump of the process would trust what this one resets",
            )
            .hint("leave --pre-dump and --track-mem out: a dump does not store pages equal to the last checkpoint's anyway"));
        }
        if tracked && !criu.has_feature("mem_dirty_track")? {
            return Err(Failure::new(
                Code::CriuFailed,
                "this kernel cannot tell which pages a process has written (no CONFIG_MEM_SOFT_DIRTY)",
            )
            .hint(
                "leave --pre-dump and --track-mem out: a dump does not store pages equal to the last checkpoint's, on every kernel",
            ));
        }
        let action = if arguments.pre_dump {
            PathBuf::new()
        } else {
            permafrost_terminal::action::program(arguments.action.as_deref())?
        };
        Ok(Self {
            context,
            arguments,
            criu,
            passed_on,
            leave_running,
            tracking: None,
            origin,
            same_pids: processes::innermost_pid(arguments.pid) == Some(arguments.pid),
            freeze_limit: arguments
                .freeze_limit
                .unwrap_or_else(|| FreezeLimit::for_memory(usage.resident_bytes)),
            action,
            parent: None,
        })
    }

    /// Locks the markers; waits for a tracked dump that is under way.
    fn track(&mut self, interrupts: &Interrupts) -> Result<(), Failure> {
        let failed = |error: std::io::Error| {
            Failure::new(
                Code::Internal,
                format!("lock the markers of tracked dumps: {error}"),
            )
        };
        let mut told = false;
        let locked = Markers::of_this_machine()
            .map_err(failed)?
            .lock(|| {
                if !told {
                    told = true;
                    self.context
                        .remark("waiting for another dump with soft-dirty bits");
                }
                !interrupts.came()
            })
            .map_err(failed)?;
        self.tracking = Some(locked.ok_or_else(|| Failure::interrupted("interrupted"))?);
        Ok(())
    }

    /// Reads the job's newest checkpoint, which records the work that the process had done before it was
    /// restored.
    ///
    /// That checkpoint is the parent of clean pages if it was the last to reset this process's soft-dirty bits.
    /// (Equal pages are found by comparison with it in any case.)
    fn choose_parent(
        &mut self,
        connection: &mut Connection,
        interrupts: &Interrupts,
    ) -> Result<(), Failure> {
        let detail = match connection.call(request::Show {
            checkpoint: self.arguments.job.clone(),
        }) {
            Err(ControlError::Refused {
                // An invalid job name is refused by Open, with a better message.
                code: ErrorCode::NotFound | ErrorCode::Invalid,
                ..
            }) => return Ok(()),
            detail => detail?,
        };
        let Detail {
            checkpoint: Some(checkpoint),
            manifest: Some(manifest),
            ..
        } = detail
        else {
            return Ok(());
        };
        self.origin.carried_us = checkpoint
            .work
            .as_ref()
            .map_or(0, |work| work.before(&self.origin.process()));
        // A streaming CRIU knows no parents: equal pages are found by comparison alone.
        if self.arguments.full || self.arguments.stream {
            return Ok(());
        }
        let same = manifest
            .origin
            .is_some_and(|parent| parent.tracked && origin::same_process(&parent, &self.origin));
        if !same {
            return Ok(());
        }
        let id = &checkpoint.id;
        if self.tracking.is_none()
            && Markers::of_this_machine().is_ok_and(|markers| markers.names(&self.origin, id))
        {
            self.track(interrupts)?;
        }
        // Once more, now that it stays as it is.
        if self
            .tracking
            .as_ref()
            .is_some_and(|tracking| tracking.names(&self.origin, id))
        {
            self.origin.tracked = true;
            self.parent = Some(Parent {
                name: name_of(&checkpoint),
                generation: checkpoint.generation,
            });
        } else if !self.origin.tracked {
            self.tracking = None;
        }
        Ok(())
    }

    fn places(&self) -> Result<Places, Failure> {
        // The path of a stream's socket must not become too long.
        let job: String = self.arguments.job.chars().take(NAMED_CHARS).collect();
        let purpose = format!("dump-{job}");
        let scratch = Scratch::in_memory(&purpose, IMAGES_BYTES)?;
        let private = |name: &str| {
            scratch
                .subdirectory(name)
                .map_err(|error| Failure::io("create", &scratch.path().join(name), &error))
        };
        let images = private("images")?;
        let work = match &self.arguments.work_dir {
            None => private("work")?,
            Some(work) => fs::create_dir_all(work)
                .and_then(|()| fs::canonicalize(work))
                .map_err(|error| Failure::io("use", work, &error))?,
        };
        Ok(Places {
            verdict: handover::make_verdict(scratch.path())
                .map_err(|error| Failure::io("create files in", scratch.path(), &error))?,
            report: scratch.path().join("guard"),
            images,
            work,
            scratch,
        })
    }

    /// Waits until the tasks that CRIU has killed are gone: a restore right after the dump needs their pids.
    fn wait_for_the_end(&self, places: &Places) {
        let mut pids = vec![self.arguments.pid];
        if self.same_pids {
            pids.extend(tasks_of_images(&places.images));
        }
        let left = processes::wait_until_gone(&pids, PATIENCE);
        if let Some(pid) = left.first() {
            self.context.remark(&format!(
                "process {pid} has not ended yet; a restore may have to wait for its pid"
            ));
        }
    }

    /// Keeps CRIU's log, and nothing else, for the user.
    fn keep_log(&self, mut failure: Failure, places: Places) -> Failure {
        if failure.keep_images {
            // Better than nothing: registers, files, mounts; the pages are lost with the session.
            let images = places.scratch.keep().join("images");
            failure.message = format!(
                "{}; images are left in {}",
                failure.message,
                images.display()
            );
            return failure;
        }
        if failure.code == Code::Interrupted {
            return failure;
        }
        let command = if self.arguments.pre_dump {
            "pre-dump"
        } else {
            "dump"
        };
        let written = [
            places.work.join(format!("{command}.log")),
            places.work.join("criu.out"),
        ]
        .into_iter()
        .find(|path| fs::metadata(path).is_ok_and(|metadata| metadata.len() > 0));
        failure.log = match written {
            Some(log) if self.arguments.work_dir.is_some() => Some(log),
            Some(log) => places.scratch.keep_only(&log).ok(),
            None => None,
        };
        failure
    }
}

/// Returns the tasks and threads of a dump, as its images name them.
fn tasks_of_images(images: &Path) -> Vec<u32> {
    let entries = fs::read_dir(images).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter_map(|name| {
            let number = name.strip_prefix("core-")?.strip_suffix(".img")?;
            number.parse().ok()
        })
        .collect()
}
