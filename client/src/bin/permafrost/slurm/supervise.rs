//! Supervises the task: handles signals, periodic checkpoints, and the task's end.

use std::ffi::OsString;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use permafrost_protocol::control::{ErrorCode, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::name_of;
use permafrost_transport::control::ControlError;

use super::advice::{Advice, Measured, Situation, advise};
use super::inside::{Begun, Event};
use super::job::Job;
use super::meaning::{Meaning, depends, meaning};
use super::policy::until;
use super::task::{End, Task, code_of_signal};
use super::{REQUEUE, RunArguments};
use crate::arguments::parse;
use crate::dump::{self, DumpArguments};

/// Longest wait for an event when no checkpoint is due.
const LONG: Duration = Duration::from_secs(3600);

/// Exit codes of a command that could not be started: those of setsid(1), as of env(1).
const NOT_STARTED: [u8; 2] = [126, 127];

/// Reason for which the task is ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// This command ended it, because another job needs the node.
    Preempted,
    /// Slurm ends the job, and has signalled the task.
    Over,
}

/// Supervisor of a task.
pub(super) struct Supervisor<'a> {
    context: &'a Context,
    arguments: &'a RunArguments,
    job: Job,
    task: Task,
    has_checkpoint: bool,
    measured: Measured,
    /// Work that the task had done before this run.
    worked: Duration,
    /// Start of this run.
    begun: Instant,
    /// Time at which the task's work was last safe: started, resumed or checkpointed.
    safe: Instant,
    /// Time at which the next periodic checkpoint is due.
    due: Option<Instant>,
    ending: Option<Ending>,
    /// Time to the deadline of the job, when its state was last read.
    deadline: Option<Duration>,
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(
        context: &'a Context,
        arguments: &'a RunArguments,
        job: Job,
        begun: Begun,
    ) -> Self {
        let now = Instant::now();
        Self {
            context,
            arguments,
            job,
            task: begun.task,
            has_checkpoint: begun.has_checkpoint,
            measured: begun.measured,
            worked: begun.worked,
            begun: now,
            safe: now,
            due: arguments.every.and_then(|every| now.checked_add(every)),
            ending: None,
            deadline: None,
        }
    }

    /// Runs until the task has ended, or is to continue in a later run. Returns the exit code.
    pub(super) fn run(mut self, events: &Receiver<Event>) -> Result<u8, Failure> {
        loop {
            let wait = self.due.map_or(LONG, |due| {
                due.saturating_duration_since(Instant::now()).min(LONG)
            });
            let left = match events.recv_timeout(wait) {
                Ok(Event::Signal(signal)) => self.signal(signal),
                Ok(Event::Child) => None,
                Err(RecvTimeoutError::Timeout) => {
                    self.periodic();
                    None
                }
                // The end of process 1 ends the whole namespace.
                Ok(Event::Alone) | Err(RecvTimeoutError::Disconnected) => Some(code_of_signal(9)),
            };
            if let Some(code) = left {
                return Ok(code);
            }
            self.task.reap_strays();
            if let Some(end) = self.task.ended()? {
                return Ok(self.conclude(end));
            }
        }
    }

    fn say(&self, what: &str) {
        self.context
            .remark(&format!("{}: {what}", self.job.lineage));
    }

    /// Handles a signal. Returns the exit code, if the task is to continue in a later run.
    fn signal(&mut self, signal: i32) -> Option<u8> {
        if self.ending.is_some() {
            // The task was already told to end.
            return None;
        }
        let state = if depends(signal) {
            self.job
                .state()
                .inspect_err(|why| self.say(&format!("its state is not known: {why}")))
                .ok()
        } else {
            None
        };
        let deadline = state.as_ref().and_then(|state| state.deadline_unix_s);
        self.deadline = deadline.map(until);
        match meaning(signal, state.as_ref()) {
            Meaning::Leave { preempted, within } => self.leave(preempted, within),
            Meaning::HandOn => {
                self.task.signal(signal);
                None
            }
            Meaning::Over => {
                self.ending = Some(Ending::Over);
                None
            }
        }
    }

    /// Checkpoints the task and requeues the job. If another job needs the node and the checkpoint is not worth
    /// it or fails, ends the task. Returns the exit code after a checkpoint.
    fn leave(&mut self, preempted: bool, within: Option<Duration>) -> Option<u8> {
        if preempted {
            let advice = advise(self.context, &self.situation(within));
            self.say(&format!("preempted; {advice}"));
            match advice {
                Advice::Checkpoint(_) => {}
                Advice::RunOn(_) => return None,
                Advice::End(_) => {
                    self.end();
                    return None;
                }
            }
        }
        let failure = match self.dump(false) {
            Ok(()) => return Some(self.requeue()),
            Err(failure) => failure,
        };
        self.tell(&failure);
        if !self.task.is_running() {
            // The task's end is handled by the caller; nothing more can be done for the task.
            return None;
        }
        if preempted {
            self.say("it is ended without a checkpoint");
            self.end();
        } else {
            self.say("it goes on");
        }
        None
    }

    fn situation(&self, within: Option<Duration>) -> Situation {
        Situation {
            pid: self.task.pid(),
            job: self.job.lineage.clone(),
            progress: self.begun.elapsed(),
            resident_bytes: self.task.resident_bytes(),
            since_checkpoint: self.safe.elapsed(),
            has_checkpoint: self.has_checkpoint,
            within,
            min_progress: self.arguments.min_progress.unwrap_or_default(),
            measured: self.measured,
            policy: self.arguments.policy,
            remaining: self.arguments.work.map(|work| {
                let done = self.worked.saturating_add(self.begun.elapsed());
                work.saturating_sub(done)
            }),
            deadline: self.deadline,
        }
    }

    fn end(&mut self) {
        self.ending = Some(Ending::Preempted);
        self.task.end();
    }

    /// Takes a checkpoint of a task that goes on.
    fn periodic(&mut self) {
        let Some(every) = self.arguments.every else {
            return;
        };
        if self.due.is_some_and(|due| Instant::now() < due) {
            return;
        }
        if self.ending.is_none()
            && let Err(failure) = self.dump(true)
        {
            self.tell(&failure);
        }
        self.due = Instant::now().checked_add(every);
    }

    fn dump(&mut self, leave_running: bool) -> Result<(), Failure> {
        let strays = self.task.strays();
        if !strays.is_empty() {
            let pids: Vec<String> = strays.iter().map(u32::to_string).collect();
            return Err(Failure::new(
                Code::Invalid,
                format!(
                    "no checkpoint: processes {} have left the tree of COMMAND, and would be lost",
                    pids.join(", ")
                ),
            )
            .hint("COMMAND must not end before what it starts in the background"));
        }
        let arguments = self.dump_arguments(leave_running)?;
        let report = dump::take(self.context, &arguments, || Ok(Interrupts::none()))?;
        let elapsed = Duration::from_micros(report.total_us);
        let checkpoint = &report.checkpoint;
        self.say(&format!(
            "{} is sealed, {} in {:.1} s",
            name_of(checkpoint),
            human::bytes(checkpoint.memory_bytes),
            elapsed.as_secs_f64()
        ));
        self.measured.dump = Some((checkpoint.memory_bytes, elapsed));
        self.has_checkpoint = true;
        self.safe = Instant::now();
        // The last but one stays, in case the last cannot be read one day.
        if let Some(old) = checkpoint.generation.checked_sub(2).filter(|old| *old > 0) {
            self.remove(&format!("{}@{old}", self.job.lineage), false);
        }
        Ok(())
    }

    fn dump_arguments(&self, leave_running: bool) -> Result<DumpArguments, Failure> {
        let mut line: Vec<OsString> = vec!["dump".into(), "--pid".into()];
        line.push(self.task.pid().to_string().into());
        line.extend(["--job".into(), self.job.lineage.clone().into()]);
        if leave_running {
            line.push("--leave-running".into());
        }
        if self.arguments.tcp_established {
            line.push("--tcp-established".into());
        }
        if let Some(criu) = &self.arguments.criu {
            line.extend(["--criu".into(), criu.into()]);
        }
        line.push("--".into());
        for (wanted, option) in [
            (self.arguments.tcp_close, "--tcp-close"),
            (self.arguments.file_locks, "--file-locks"),
        ] {
            if wanted {
                line.push(option.into());
            }
        }
        line.extend(self.arguments.criu_option.iter().map(OsString::from));
        parse(line)
    }

    fn tell(&self, failure: &Failure) {
        // The failure's exit code is not used: the job goes on, or is requeued.
        let _ = failure.report(self.context.json);
    }

    /// Requeues the job, and returns the exit code of a task that is to continue in a later run. Requeued at
    /// once, so that the job that waits for the node need not wait for the end of the grace time.
    fn requeue(&self) -> u8 {
        if let Err(why) = self.job.requeue() {
            self.say(&format!(
                "not requeued: {why}; it goes on when a job with --job {} starts",
                self.job.lineage
            ));
        }
        REQUEUE
    }

    /// Returns the exit code of a task that has ended, and removes its checkpoints or requeues the job.
    fn conclude(&self, end: End) -> u8 {
        if self.ending == Some(Ending::Preempted) {
            // This includes an exit with 0: a task that was told to end has not completed its work.
            self.say("ended for the preemption, to be started again");
            return self.requeue();
        }
        if self.is_done(end) && !self.arguments.keep {
            self.remove(&self.job.lineage, true);
        } else if self.has_checkpoint {
            self.say("its checkpoints are kept");
        }
        end.code()
    }

    /// Returns true if no later run will continue from the task's checkpoints.
    fn is_done(&self, end: End) -> bool {
        match end {
            End::Exited(code) if self.ending.is_none() => {
                return !NOT_STARTED.contains(&code);
            }
            _ => {}
        }
        // A job that was cancelled is not started again. One that was requeued is; one that has reached its limit, or
        // whose task was killed (for the memory it took), may be, by its user.
        match self.job.state() {
            Ok(state) => {
                !state.is_running
                    && state.restarts <= self.job.restarts
                    && !state.timed_out
                    && !self.job.named
            }
            Err(why) => {
                self.say(&format!("its state is not known: {why}"));
                false
            }
        }
    }

    /// Removes checkpoints. A failure is only reported: the task's result must not depend on it.
    fn remove(&self, checkpoint: &str, all_generations: bool) {
        if !self.has_checkpoint {
            return;
        }
        let request = request::Remove {
            checkpoint: checkpoint.to_owned(),
            all_generations,
            force: false,
            last: false,
        };
        let failure: Failure = match self
            .context
            .connect()
            .map(|mut daemon| daemon.call(request))
        {
            Ok(Ok(_))
            | Ok(Err(ControlError::Refused {
                code: ErrorCode::NotFound,
                ..
            })) => return,
            Ok(Err(error)) => error.into(),
            Err(failure) => failure,
        };
        self.say(&format!("{checkpoint} is not removed: {}", failure.message));
    }
}
