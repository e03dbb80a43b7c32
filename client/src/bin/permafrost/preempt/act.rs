//! Does to a victim what the plan says.

use std::ffi::OsString;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use permafrost_api_types::cost::Mechanism;
use permafrost_criu::handles::{ProcessHandle, TreeHandles};
use permafrost_preempt::cgroup::Hierarchies;
use permafrost_preempt::record::{RecordKind, Records};
use permafrost_preempt::{SuspendOptions, SuspendOutcome, Target};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::name_of;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, test_kill_process};

use super::victims::Planned;
use super::{DumpOptions, Outcome, PreemptArguments, PreemptedVictim};
use crate::arguments::{Durability, parse};
use crate::dump::{self, DumpArguments};
use crate::suspension::{refused, resume_line};
use crate::targets::{self, failure};

/// Interval at which the end of processes is polled.
const TICK: Duration = Duration::from_millis(20);

/// Longest wait for the end of killed processes: freeing a large memory takes a while.
const END_PATIENCE: Duration = Duration::from_secs(30);

/// Executor of a plan's decisions.
pub(super) struct Actor<'a> {
    context: &'a Context,
    arguments: &'a PreemptArguments,
    interrupts: &'a Interrupts,
    hierarchies: Hierarchies,
    records: Records,
    began: Instant,
}

/// Reason why a victim was not preempted, and the way to go on with it.
struct NotDone {
    why: String,
    next: Option<String>,
}

impl NotDone {
    fn new(failure: Failure, next: impl Into<String>) -> Self {
        Self {
            next: Some(next.into()),
            ..failure.into()
        }
    }
}

impl From<Failure> for NotDone {
    fn from(failure: Failure) -> Self {
        let why = match failure.hint.is_empty() {
            true => failure.message,
            false => format!("{} ({})", failure.message, failure.hint),
        };
        Self { why, next: None }
    }
}

/// A victim that was preempted.
#[derive(Default)]
struct Done {
    finished: bool,
    checkpoint: Option<String>,
}

impl<'a> Actor<'a> {
    pub(super) fn new(
        context: &'a Context,
        arguments: &'a PreemptArguments,
        interrupts: &'a Interrupts,
    ) -> Result<Self, Failure> {
        let (hierarchies, records) = targets::open()?;
        Ok(Self {
            context,
            arguments,
            interrupts,
            hierarchies,
            records,
            began: Instant::now(),
        })
    }

    /// Preempts a victim, and reports it.
    pub(super) fn act(&self, planned: &Planned) -> PreemptedVictim {
        let started = Instant::now();
        let mut report = match &planned.pid {
            Err(why) => planned.report(Outcome::NotBegun, Some(why.clone())),
            Ok(pid) => match self.preempt(planned, *pid) {
                Ok(done) => {
                    let outcome = if done.finished {
                        Outcome::Finished
                    } else {
                        Outcome::Done
                    };
                    let mut report = planned.report(outcome, None);
                    report.checkpoint = done.checkpoint;
                    report
                }
                Err(not_done) => {
                    let mut report = planned.report(Outcome::Failed, Some(not_done.why));
                    report.next = not_done.next;
                    report
                }
            },
        };
        report.elapsed_us = human::whole_micros(started.elapsed());
        self.context.remark(&format!(
            "{}: {} {}",
            planned.task,
            report.mechanism,
            match report.outcome {
                Outcome::Done => "done",
                Outcome::Finished => "had ended",
                Outcome::Failed => "failed",
                Outcome::NotBegun => "not begun",
            }
        ));
        report
    }

    fn preempt(&self, planned: &Planned, pid: u32) -> Result<Done, NotDone> {
        // Other victims were acted on since the plan was read: it may have ended, and its pid may be another's.
        let Some(root) = planned.open(pid)? else {
            return Ok(finished());
        };
        let target = Target::tree(pid);
        // As long as it lives, the pid is its own: the target is of this process.
        if root.has_ended() {
            return Ok(finished());
        }
        let target = target.map_err(failure)?;
        match planned.mechanism {
            Mechanism::Wait => self.wait(pid, handles(root)),
            Mechanism::Kill | Mechanism::Rollback => self.kill(pid, handles(root), &target),
            Mechanism::SuspendInMemory => self.suspend(pid, &target),
            Mechanism::IncrementalDump | Mechanism::FullDump | Mechanism::PreCopiedDump => {
                self.dump(planned, &handles(root), pid, &target)
            }
        }
    }

    fn wait(&self, pid: u32, mut tree: TreeHandles) -> Result<Done, NotDone> {
        loop {
            tree.add_descendants();
            tree.remove_ended();
            if tree.living_count() == 0 {
                return Ok(Done::default());
            }
            let too_long =
                (self.arguments.longest_wait).is_some_and(|most| self.began.elapsed() >= most);
            if too_long || self.interrupts.came() {
                let why = match too_long {
                    true => Failure::new(Code::NotEnough, "it has not ended within --longest-wait"),
                    false => Failure::interrupted("interrupted while it was waited for"),
                };
                let next =
                    format!("it runs on: wait for process {pid}, or permafrost preempt again");
                return Err(NotDone::new(why, next));
            }
            thread::sleep(TICK);
        }
    }

    /// Ends a tree: SIGTERM, and after the grace time SIGKILL.
    fn kill(&self, pid: u32, mut tree: TreeHandles, target: &Target) -> Result<Done, NotDone> {
        self.refuse_held(&tree, target)?;
        // A process of another user cannot be signalled: nothing of the tree is, then.
        let root = i32::try_from(pid).ok().and_then(Pid::from_raw);
        if root.map(test_kill_process) == Some(Err(Errno::PERM)) {
            let message = format!("signal process {pid}: {}", io::Error::from(Errno::PERM));
            return Err(Failure::new(Code::Denied, message).into());
        }
        tree.signal(Signal::TERM);
        // Neither a stopped nor a frozen process acts on SIGTERM.
        self.go_on(target)?;
        let until = Instant::now() + self.arguments.grace;
        loop {
            tree.add_descendants();
            tree.remove_ended();
            if tree.living_count() == 0 || Instant::now() >= until {
                break;
            }
            if self.interrupts.came() {
                return Err(NotDone::new(
                    Failure::interrupted("interrupted after SIGTERM"),
                    format!("it was told to end: kill -KILL {pid} if it does not"),
                ));
            }
            thread::sleep(TICK);
        }
        match tree.end(END_PATIENCE) {
            0 => Ok(Done::default()),
            left => {
                let left = human::count(left as u64, "process has", "processes have");
                let failure = Failure::new(Code::Unavailable, format!("{left} not ended"));
                let hint = "a process in the kernel (state D in ps) ends when it comes back";
                Err(failure.hint(hint).into())
            }
        }
    }

    fn suspend(&self, pid: u32, target: &Target) -> Result<Done, NotDone> {
        let options = SuspendOptions {
            grace: self.arguments.grace,
            ..SuspendOptions::default()
        };
        let came = || self.interrupts.came();
        let (hierarchies, records) = (&self.hierarchies, &self.records);
        match permafrost_preempt::suspend(hierarchies, records, target, options, &came) {
            Ok(SuspendOutcome::Suspended { .. }) => Ok(Done::default()),
            Ok(SuspendOutcome::Ended) => Ok(finished()),
            Err(error) => Err(NotDone::new(
                refused(records, target, error),
                format!(
                    "permafrost suspend --pid {pid} tries again, permafrost resume --pid {pid} undoes it"
                ),
            )),
        }
    }

    fn dump(
        &self,
        planned: &Planned,
        tree: &TreeHandles,
        pid: u32,
        target: &Target,
    ) -> Result<Done, NotDone> {
        let job = planned.job.as_deref().ok_or_else(|| {
            Failure::new(Code::Invalid, "a dump belongs to a job, and none is named")
                .hint(format!("name it: --pid {pid}:JOB"))
        })?;
        // CRIU cannot seize what is frozen, and its parasite runs with the task's own processors.
        self.refuse_held(tree, target)?;
        self.go_on(target)?;
        let arguments = dump_arguments(&self.arguments.dump, planned.mechanism, pid, job)?;
        let taken = dump::take(self.context, &arguments, || Ok(self.interrupts.clone()));
        self.interrupts.leave_alone();
        match taken {
            Ok(report) => Ok(Done {
                finished: false,
                checkpoint: Some(name_of(&report.checkpoint)),
            }),
            Err(failure) => Err(NotDone::new(
                failure,
                format!("it goes on: permafrost dump --pid {pid} --job {job} tries again"),
            )),
        }
    }

    /// Refuses a tree with a process that was suspended as a part of another target, a control group or a larger tree:
    /// it would neither act on a signal nor let itself be dumped, and the others of that target are not victims.
    fn refuse_held(&self, tree: &TreeHandles, target: &Target) -> Result<(), NotDone> {
        let kind = RecordKind::Suspended;
        let holder = (self.records.other_holder(kind, target, &tree.pids())).map_err(failure)?;
        let Some(holder) = holder else {
            return Ok(());
        };
        let message = format!("a process of it is suspended with {holder}");
        let next = format!(
            "{} first, and permafrost preempt again",
            resume_line(&holder)
        );
        Err(NotDone::new(Failure::new(Code::Conflict, message), next))
    }

    /// Undoes a suspension and a shrinkage.
    fn go_on(&self, target: &Target) -> Result<(), Failure> {
        permafrost_preempt::resume(&self.records, target).map_err(failure)?;
        permafrost_preempt::grow(&self.hierarchies, &self.records, target, None)
            .map_err(failure)?;
        Ok(())
    }
}

/// Returns handles of a tree.
fn handles(root: ProcessHandle) -> TreeHandles {
    let mut tree = TreeHandles::default();
    tree.push(root);
    tree.add_descendants();
    tree
}

fn finished() -> Done {
    Done {
        finished: true,
        checkpoint: None,
    }
}

fn dump_arguments(
    options: &DumpOptions,
    mechanism: Mechanism,
    pid: u32,
    job: &str,
) -> Result<DumpArguments, Failure> {
    let mut line: Vec<OsString> = ["dump", "--job", job, "--pid"].map(Into::into).into();
    line.push(pid.to_string().into());
    match mechanism {
        Mechanism::FullDump => line.push("--full".into()),
        Mechanism::PreCopiedDump => line.push("--pre-copy".into()),
        _ => {}
    }
    for (wanted, option) in [
        (options.tcp_established, "--tcp-established"),
        (options.shell_job, "--shell-job"),
    ] {
        if wanted {
            line.push(option.into());
        }
    }
    let durability = Durability::word(options.durability);
    if !durability.is_empty() {
        line.extend(["--durability".into(), durability.into()]);
    }
    if let Some(criu) = &options.criu {
        line.extend(["--criu".into(), criu.into()]);
    }
    line.push("--".into());
    line.extend(options.criu_arguments.iter().map(OsString::from));
    parse(line)
}
