//! Inside the namespace: process 1, which starts or resumes the task.

use std::ffi::OsString;
use std::io::Read as _;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use permafrost_protocol::control::{Detail, ErrorCode, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::name_of;
use permafrost_transport::control::ControlError;
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::Signals;

use super::advice::Measured;
use super::job::Job;
use super::streams::Streams;
use super::supervise::Supervisor;
use super::task::Task;
use super::{RunArguments, pids};
use crate::arguments::parse;
use crate::restore::{self, RestoreArguments};

/// Environment variable that distinguishes the inside from the outside: both have the same command line.
pub(super) const VARIABLE: &str = "PERMAFROST_SLURM_INSIDE";

/// Time for which a requeued job waits for `permafrostd`, which may start after slurmd.
const PATIENCE: Duration = Duration::from_secs(60);

/// Interval of the attempts meanwhile.
const TICK: Duration = Duration::from_millis(250);

/// An event for the supervisor of the task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A signal that the outside received.
    Signal(i32),
    /// A child process has ended.
    Child,
    /// The outside is gone: Slurm has killed it.
    Alone,
}

/// A running task, and the way in which it began.
pub(super) struct Begun {
    pub(super) task: Task,
    /// True if Permafrost holds a checkpoint of the job.
    pub(super) has_checkpoint: bool,
    pub(super) measured: Measured,
    /// Work that the task had done before this run.
    pub(super) worked: Duration,
}

/// Returns true if this process is the inside.
pub(super) fn is_inside() -> bool {
    std::env::var_os(VARIABLE).is_some() && std::process::id() == 1
}

/// Runs the task to its end, or until it is checkpointed. Returns the exit code.
pub(super) fn run(context: &Context, arguments: &RunArguments) -> Result<u8, Failure> {
    let job = Job::of_environment(|name| std::env::var(name).ok(), arguments.job.as_deref())?;
    let events = listen()?;
    let streams = Streams::open(arguments)?;
    let begun = begin(context, arguments, &job, streams)?;
    Supervisor::new(context, arguments, job, begun).run(&events)
}

/// Receives the outside's signals, one byte each on standard input, and the ends of children. Both threads are
/// started before anything else, so that no task can have had their ids.
fn listen() -> Result<Receiver<Event>, Failure> {
    let (tell, events) = mpsc::channel();
    let mut children = Signals::new([SIGCHLD])
        .map_err(|error| Failure::new(Code::Internal, format!("catch signals: {error}")))?;
    let told: Sender<Event> = tell.clone();
    thread::spawn(move || {
        for _ in children.forever() {
            if told.send(Event::Child).is_err() {
                return;
            }
        }
    });
    thread::spawn(move || {
        let mut byte = [0];
        loop {
            let event = match std::io::stdin().read(&mut byte) {
                Ok(1..) => Event::Signal(byte[0].into()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => Event::Alone,
            };
            if tell.send(event).is_err() || event == Event::Alone {
                return;
            }
        }
    });
    Ok(events)
}

/// Resumes the task from the job's newest checkpoint, or starts it where there is none.
fn begin(
    context: &Context,
    arguments: &RunArguments,
    job: &Job,
    streams: Streams,
) -> Result<Begun, Failure> {
    let found = if arguments.fresh {
        None
    } else {
        find(context, job)?
    };
    pids::begin_behind(found.as_ref().and_then(|found| found.manifest.as_ref()))?;
    let Some(checkpoint) = found.and_then(|found| found.checkpoint) else {
        return Ok(Begun {
            task: Task::start(&arguments.command, streams)?,
            // With --fresh, no checkpoint was looked for, so there may be one.
            has_checkpoint: arguments.fresh,
            measured: Measured::default(),
            worked: Duration::ZERO,
        });
    };
    let name = name_of(&checkpoint);
    let report = restore::bring_back(
        context,
        &restore_arguments(arguments, &name)?,
        &Interrupts::none(),
    )
    .map_err(|failure| {
        let hint = if failure.hint.is_empty() {
            String::new()
        } else {
            format!("{}; ", failure.hint)
        };
        failure.hint(format!("{hint}--fresh starts COMMAND anew"))
    })?;
    let elapsed = Duration::from_micros(report.total_us);
    context.remark(&format!(
        "resumed from {name} in {:.1} s, {} restarts so far",
        elapsed.as_secs_f64(),
        job.restarts
    ));
    let work = report.checkpoint.work.as_ref();
    Ok(Begun {
        task: Task::of(report.pid)?,
        has_checkpoint: true,
        worked: work.map_or(Duration::ZERO, |work| Duration::from_micros(work.worked_us)),
        measured: Measured {
            dump: None,
            restore: Some((report.checkpoint.memory_bytes, elapsed)),
        },
    })
}

/// Returns the job's newest checkpoint.
///
/// # Errors
/// The daemon cannot be asked although there may be a checkpoint: a task must not start anew, as if nothing had
/// been saved.
fn find(context: &Context, job: &Job) -> Result<Option<Detail>, Failure> {
    let asked = Instant::now();
    loop {
        let show = request::Show {
            checkpoint: job.lineage.clone(),
        };
        let failure: Failure = match context.connect().map(|mut daemon| daemon.call(show)) {
            Ok(Ok(detail)) => return Ok(Some(detail)),
            Ok(Err(ControlError::Refused {
                code: ErrorCode::NotFound,
                ..
            })) => return Ok(None),
            Ok(Err(error)) => error.into(),
            Err(failure) => failure,
        };
        if job.restarts == 0 && !job.named {
            context.remark(&format!(
                "{}: the job is started, but cannot be checkpointed before permafrostd is there",
                failure.message
            ));
            return Ok(None);
        }
        if asked.elapsed() > PATIENCE {
            return Err(failure.during(format!("there may be a checkpoint of {}", job.lineage)));
        }
        thread::sleep(TICK);
    }
}

/// Returns the parsed arguments of `permafrost restore --foreground`.
fn restore_arguments(arguments: &RunArguments, name: &str) -> Result<RestoreArguments, Failure> {
    let mut line: Vec<OsString> = ["restore", "--foreground"].map(OsString::from).to_vec();
    if let Some(criu) = &arguments.criu {
        line.extend(["--criu".into(), criu.into()]);
    }
    line.push(name.into());
    parse(line)
}
