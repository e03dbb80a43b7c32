//! `permafrost dump`.
//!
//! ```text
//! Open ─▶ session ─▶ criu dump ──pages──▶ permafrostd ─▶ CLOSE answered: pages are safe
//!                        │ post-dump script (tasks frozen): permafrost-action ─▶ Seal ─▶ sealed
//!                        └ exits 0: tasks end or go on            exits 1: CRIU rolls back, they go on
//! ```
//!
//! The control connection stays open for the whole dump, and the session is bound to it: however this
//! command ends, no half-done session stays behind.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use permafrost_client::control::{Connection, ControlError, SOCKET_VARIABLE};
use permafrost_client::criu::options::{Operation, PassedOn};
use permafrost_client::criu::{Criu, Finished, Run};
use permafrost_client::origin::{self, ProcessStat};
use permafrost_client::scratch::{self, Scratch};
use permafrost_client::tracking::Marker;
use permafrost_client::verdict::{self, Verdict};
use permafrost_protocol::control::{Checkpoint, Detail, ErrorCode, SessionOpened, request};
use permafrost_protocol::images::DumpStats;
use permafrost_protocol::manifest::Origin;
use serde::Serialize;

use crate::cli::DumpArguments;
use crate::context::Context;
use crate::failure::{Code, Failure};
use crate::human;
use crate::interrupt::Interrupts;
use crate::progress::Progress;
use crate::table::facts;

/// Memory for the images of a dump: everything but the pages. Ghost files may add to it.
const IMAGES_BYTES: u64 = 32 << 20;

/// How often progress is looked at while CRIU runs.
const TICK: Duration = Duration::from_millis(250);

/// Name of the action script's program, next to this one.
const ACTION_PROGRAM: &str = "permafrost-action";

/// What a dump prints with `--json`.
#[derive(Debug, Serialize)]
struct Report {
    checkpoint: Checkpoint,
    /// From start to end of this command.
    total_us: u64,
    /// CRIU's own run.
    criu_us: u64,
    /// The seal, with the tasks frozen (with a pre-dump: running).
    seal_us: u64,
    /// CRIU's own measurements.
    #[serde(skip_serializing_if = "Option::is_none")]
    stats: Option<DumpStats>,
    /// Whether clean pages were left out by soft-dirty bits.
    incremental: bool,
    /// Options whose counterpart a restore must be given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    restore_needs: Vec<String>,
    /// CRIU's log, with `--work-dir`.
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<PathBuf>,
}

/// The checkpoint that this dump leaves clean pages to.
struct Parent {
    name: String,
    generation: u64,
}

/// Everything that is settled before a session is opened.
struct Plan<'a> {
    context: &'a Context,
    arguments: &'a DumpArguments,
    criu: Criu,
    passed_on: PassedOn,
    leave_running: bool,
    origin: Origin,
    action: PathBuf,
    marker: Option<Marker>,
    parent: Option<Parent>,
}

/// Where CRIU reads and writes.
struct Places {
    scratch: Scratch,
    images: PathBuf,
    work: PathBuf,
    verdict: PathBuf,
}

/// How CRIU's run and the seal went.
struct Sealed {
    finished: Finished,
    checkpoint: Checkpoint,
    seal_us: u64,
}

pub(crate) fn dump(context: &Context, arguments: &DumpArguments) -> Result<(), Failure> {
    let started = Instant::now();
    let mut plan = Plan::new(context, arguments)?;
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    plan.choose_parent(&mut connection)?;

    let places = plan.places()?;
    let result = plan
        .run(&mut connection, &places, &interrupts)
        .map_err(|failure| interrupts.explain(failure));
    let sealed = match result {
        Ok(sealed) => sealed,
        Err(failure) => return Err(plan.keep_log(failure, places)),
    };

    if let (Some(marker), true) = (&plan.marker, plan.origin.tracked) {
        if let Err(error) = marker.record(&sealed.checkpoint.id) {
            context.remark(&format!(
                "the next dump will not leave clean pages out: {error}"
            ));
        }
    }
    let report = Report {
        stats: read_stats(&sealed.finished.work_dir),
        total_us: micros(started.elapsed()),
        criu_us: micros(sealed.finished.elapsed),
        seal_us: sealed.seal_us,
        checkpoint: sealed.checkpoint,
        incremental: plan.parent.is_some(),
        restore_needs: plan.passed_on.with_counterpart(),
        log: arguments.work_dir.is_some().then_some(sealed.finished.log),
    };
    drop(places.scratch);
    context.print(&report, human_report)
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
        let tracked = passed_on.take("track-mem") | arguments.pre_dump;
        let criu = Criu::new(arguments.criu.clone());
        let mut origin = origin::collect(arguments.pid)?;
        origin.criu_version = criu.version()?;
        origin.tracked = tracked;
        origin.restore_options = passed_on.restore_options();
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
            action_program(arguments)?
        };
        Ok(Self {
            context,
            arguments,
            criu,
            passed_on,
            leave_running,
            marker: Marker::of(&origin),
            origin,
            action,
            parent: None,
        })
    }

    /// The job's newest checkpoint is the parent of clean pages if it was the last to reset this
    /// process's soft-dirty bits. (Equal pages are found by comparison with it in any case.)
    fn choose_parent(&mut self, connection: &mut Connection) -> Result<(), Failure> {
        if self.arguments.full {
            return Ok(());
        }
        let detail = match connection.call(request::Show {
            checkpoint: self.arguments.job.clone(),
        }) {
            Err(ControlError::Refused {
                // A job name that is none is refused by Open, in better words.
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
        let same = manifest
            .origin
            .is_some_and(|parent| parent.tracked && origin::same_process(&parent, &self.origin));
        if same
            && self
                .marker
                .as_ref()
                .is_some_and(|marker| marker.names(&checkpoint.id))
        {
            self.origin.tracked = true;
            self.parent = Some(Parent {
                name: name_of(&checkpoint),
                generation: checkpoint.generation,
            });
        }
        Ok(())
    }

    fn places(&self) -> Result<Places, Failure> {
        let scratch = Scratch::in_memory(&format!("dump-{}", self.arguments.job), IMAGES_BYTES)?;
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
            verdict: scratch.path().join("verdict"),
            images,
            work,
            scratch,
        })
    }

    /// Opens the session, runs CRIU, and returns the sealed checkpoint.
    fn run(
        &self,
        connection: &mut Connection,
        places: &Places,
        interrupts: &Interrupts,
    ) -> Result<Sealed, Failure> {
        let opened = self.open(connection)?;
        let previous = match &self.parent {
            Some(parent) => Some(export_parent(connection, parent, places)?),
            None => None,
        };
        let socket = UnixStream::connect(&opened.socket)
            .map_err(|error| Failure::io("connect to", Path::new(&opened.socket), &error))?;

        if self.origin.tracked {
            // From here on nobody knows what the soft-dirty bits refer to, until the seal.
            if let Some(marker) = &self.marker {
                marker.forget().map_err(|error| {
                    Failure::new(
                        Code::Internal,
                        format!("forget the last tracked dump: {error}"),
                    )
                })?;
            }
        }
        let run = self.criu_run(&opened, places, previous.as_deref(), socket);
        let running = run.start(&self.criu)?;
        let mut watch = Watch::new(self.context, &opened.session, &self.arguments.job);
        let mut told = false;
        let finished = running.wait(TICK, || {
            if !interrupts.came() {
                watch.tick();
            } else if !told {
                told = true;
                self.context
                    .remark("interrupted: the session is discarded, waiting for CRIU to roll back");
            }
        })?;
        drop(watch);
        self.conclude(connection, places, &opened, finished, interrupts)
    }

    fn open(&self, connection: &mut Connection) -> Result<SessionOpened, Failure> {
        let opened = connection.call(request::Open {
            job: self.arguments.job.clone(),
            pre_dump: self.arguments.pre_dump,
            seal_follows: !self.arguments.pre_dump,
            origin: Some(self.origin.clone()),
            no_parent: self.arguments.full,
            bound_to_connection: true,
            parent_images: self.parent.is_some(),
        })?;
        match &self.parent {
            Some(parent) if parent.generation != opened.parent_generation => Err(Failure::new(
                Code::Conflict,
                format!(
                    "{} was followed by another checkpoint this moment",
                    parent.name
                ),
            )
            .hint("try again")),
            _ => Ok(opened),
        }
    }

    fn criu_run(
        &self,
        opened: &SessionOpened,
        places: &Places,
        previous: Option<&str>,
        socket: UnixStream,
    ) -> Run {
        let command = if self.arguments.pre_dump {
            "pre-dump"
        } else {
            "dump"
        };
        let mut run = Run::new(&self.criu, command, &places.images, &places.work);
        run.args(["--tree", &self.arguments.pid.to_string()])
            .page_socket(socket.into())
            .own_process_group();
        if self.origin.tracked {
            run.arg("--track-mem");
        }
        if let Some(previous) = previous {
            run.args(["--prev-images-dir", previous]);
        }
        if !self.arguments.pre_dump {
            if self.leave_running {
                run.arg("--leave-running");
            }
            run.arg("--action-script")
                .arg(&self.action)
                .env(verdict::SESSION_VARIABLE, &opened.session)
                .env(SOCKET_VARIABLE, &self.context.socket)
                .env(verdict::VARIABLE, &places.verdict);
        }
        run.args(self.passed_on.arguments());
        run
    }

    /// Puts together what CRIU's exit status and the action script's verdict say.
    fn conclude(
        &self,
        connection: &mut Connection,
        places: &Places,
        opened: &SessionOpened,
        finished: Finished,
        interrupts: &Interrupts,
    ) -> Result<Sealed, Failure> {
        let verdict = fs::read_to_string(&places.verdict)
            .ok()
            .and_then(|text| text.parse::<Verdict>().ok());
        match (finished.status.success(), verdict) {
            (true, Some(Verdict::Sealed { name, elapsed, .. })) => {
                // An interrupt may have ended the first connection after the seal.
                let checkpoint = self.sealed_checkpoint(&name)?;
                Ok(Sealed {
                    finished,
                    checkpoint,
                    seal_us: micros(elapsed),
                })
            }
            // A pre-dump calls no scripts; a wrapper around CRIU may have dropped the environment.
            (true, _) => {
                let start = Instant::now();
                let images = open_directory(&places.images)?;
                let seal = request::Seal {
                    session: opened.session.clone(),
                };
                let checkpoint = connection
                    .call_with(seal, Some(images.as_fd()), &mut |_| {})
                    .map_err(|error| interrupts.explain(error.into()).during("seal"))?;
                Ok(Sealed {
                    finished,
                    checkpoint,
                    seal_us: micros(start.elapsed()),
                })
            }
            (false, Some(Verdict::Sealed { name, .. })) => {
                let what = format!("{name} is sealed, but CRIU failed afterwards");
                let mut failure = Failure::criu(what, finished.digest());
                failure.hint = format!(
                    "{}; {name} can be restored or removed (permafrost rm {name})",
                    self.fate()
                );
                Err(failure)
            }
            (
                false,
                Some(Verdict::Refused {
                    code,
                    message,
                    hint,
                }),
            ) => {
                let code = ErrorCode::try_from(code).map_or(Code::Unreachable, Code::from);
                let failure = Failure::new(code, format!("seal: {message}")).hint(hint);
                self.abort(connection, opened);
                Err(self.rolled_back(interrupts.explain(failure)))
            }
            (false, None) => {
                let failure = if interrupts.came() {
                    Failure::interrupted("interrupted")
                } else {
                    let digest = finished.digest();
                    let blamed = digest.blames_page_server;
                    blamed
                        .then(|| session_failure(connection, places, &opened.session))
                        .flatten()
                        .unwrap_or_else(|| Failure::criu("CRIU", digest))
                };
                self.abort(connection, opened);
                Err(self.rolled_back(failure))
            }
        }
    }

    /// Discards the session now, so that the next dump of the job finds the way free as soon as this
    /// command has ended. The end of the connection does it too, a moment later.
    fn abort(&self, connection: &mut Connection, opened: &SessionOpened) {
        let session = opened.session.clone();
        let _ = connection.call(request::Abort { session });
    }

    fn sealed_checkpoint(&self, name: &str) -> Result<Checkpoint, Failure> {
        self.context
            .connect()?
            .call(request::Show {
                checkpoint: name.to_owned(),
            })?
            .checkpoint
            .ok_or_else(|| Failure::new(Code::Internal, format!("{name} has no description")))
    }

    fn rolled_back(&self, failure: Failure) -> Failure {
        let mut failure = failure.during(format!(
            "dump of process {} as {} failed, {}",
            self.arguments.pid,
            self.arguments.job,
            self.fate(),
        ));
        if failure.code == Code::NoSpace && failure.hint.is_empty() {
            failure.hint = "remove checkpoints: permafrost ls, permafrost rm".to_owned();
        }
        failure
    }

    /// What became of the process.
    fn fate(&self) -> &'static str {
        match ProcessStat::read(self.arguments.pid) {
            Ok(stat) if stat.start_ticks == self.origin.start_ticks && stat.state != 'Z' => {
                "the process goes on"
            }
            _ => "the process is gone",
        }
    }

    /// Keeps CRIU's log, and nothing else, for the user to read.
    fn keep_log(&self, mut failure: Failure, places: Places) -> Failure {
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

/// Exports the parent's small images beside the images directory: CRIU reads its inventory there.
fn export_parent(
    connection: &mut Connection,
    parent: &Parent,
    places: &Places,
) -> Result<String, Failure> {
    let previous = places.scratch.path().join("prev");
    scratch::create_private(&previous).map_err(|error| Failure::io("create", &previous, &error))?;
    let directory = open_directory(&previous)?;
    let export = request::Export {
        checkpoint: parent.name.clone(),
        small_images_only: true,
    };
    connection.call_with(export, Some(directory.as_fd()), &mut |_| {})?;
    // CRIU makes it a symbolic link in the images directory, relative to that.
    Ok("../prev".to_owned())
}

/// Why the daemon gave the session up, if it did: CRIU only sees a closed socket or a number.
fn session_failure(connection: &mut Connection, places: &Places, session: &str) -> Option<Failure> {
    let status = match connection.call(request::Status {}) {
        Ok(status) => status,
        Err(ControlError::Refused { .. }) => return None,
        Err(error) => return Some(error.into()),
    };
    let state = status
        .sessions
        .into_iter()
        .find(|state| state.session == session)?;
    if state.error.is_empty() {
        return None;
    }
    // A failed session refuses its seal with the number that says what kind of failure it was.
    let images = open_directory(&places.images).ok()?;
    let seal = request::Seal {
        session: session.to_owned(),
    };
    match connection.call_with(seal, Some(images.as_fd()), &mut |_| {}) {
        Err(error @ ControlError::Refused { .. }) => Some(error.into()),
        _ => Some(Failure::new(Code::SessionFailed, state.error)),
    }
}

/// Progress of the session, asked for on a connection of its own while CRIU runs.
struct Watch<'a> {
    context: &'a Context,
    session: &'a str,
    progress: Progress,
    connection: Option<Connection>,
    ticks: u32,
}

impl<'a> Watch<'a> {
    fn new(context: &'a Context, session: &'a str, job: &str) -> Self {
        Self {
            context,
            session,
            progress: Progress::new(context, format!("dump {job}")),
            connection: None,
            ticks: 0,
        }
    }

    fn tick(&mut self) {
        // The first second costs the daemon nothing: nobody would see it.
        self.ticks += 1;
        if self.context.quiet || self.context.json || self.ticks < 4 {
            return;
        }
        if self.connection.is_none() {
            self.connection = self.context.connect().ok();
        }
        let status = self
            .connection
            .as_mut()
            .and_then(|c| c.call(request::Status {}).ok());
        match status {
            Some(status) => {
                let ours = status
                    .sessions
                    .iter()
                    .find(|state| state.session == self.session);
                self.progress
                    .update(ours.map_or(0, |state| state.received_bytes), 0);
            }
            None => self.connection = None,
        }
    }
}

fn action_program(arguments: &DumpArguments) -> Result<PathBuf, Failure> {
    let path = match &arguments.action {
        Some(path) => path.clone(),
        None => std::env::current_exe()
            .map(|program| program.with_file_name(ACTION_PROGRAM))
            .map_err(|error| Failure::new(Code::Internal, format!("find this program: {error}")))?,
    };
    let path = std::path::absolute(&path).unwrap_or(path);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 => Ok(path),
        Ok(_) => Err(Failure::new(
            Code::Invalid,
            format!("{} is not a program", path.display()),
        )),
        Err(error) => Err(Failure::io("find", &path, &error)
            .hint("CRIU runs it to seal the checkpoint; install permafrost-action next to permafrost, or name it with PERMAFROST_ACTION")),
    }
}

fn open_directory(path: &Path) -> Result<File, Failure> {
    File::open(path).map_err(|error| Failure::io("open", path, &error))
}

fn read_stats(work: &Path) -> Option<DumpStats> {
    DumpStats::read(&fs::read(work.join("stats-dump")).ok()?).ok()
}

pub(crate) fn name_of(checkpoint: &Checkpoint) -> String {
    format!("{}@{}", checkpoint.job, checkpoint.generation)
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn human_report(report: &Report) -> String {
    let checkpoint = &report.checkpoint;
    let stats = report.stats.as_ref();
    let us = |pick: fn(&DumpStats) -> u32| {
        stats
            .map(|stats| human::micros(pick(stats).into()))
            .unwrap_or_default()
    };
    let equal = if checkpoint.parent_bytes == 0 {
        String::new()
    } else {
        format!(
            "{} to {}@{}{}",
            human::bytes(checkpoint.parent_bytes),
            checkpoint.job,
            checkpoint.parent_generation,
            if report.incremental {
                ", clean pages left out by CRIU"
            } else {
                ""
            },
        )
    };
    facts(
        &format!("{} is sealed", name_of(checkpoint)),
        &[
            ("memory", human::bytes(checkpoint.memory_bytes)),
            ("stored", human::bytes(checkpoint.added_bytes)),
            ("equal", equal),
            (
                "zero",
                match checkpoint.zero_bytes {
                    0 => String::new(),
                    zero => human::bytes(zero),
                },
            ),
            ("frozen", us(|stats| stats.frozen_time)),
            (
                "of that",
                match stats {
                    Some(_) => format!(
                        "memory {} ({} of it sending), sealing {}",
                        us(|stats| stats.memdump_time),
                        us(|stats| stats.memwrite_time),
                        human::micros(report.seal_us),
                    ),
                    None => String::new(),
                },
            ),
            (
                "in all",
                format!(
                    "{}, CRIU {}",
                    human::micros(report.total_us),
                    human::micros(report.criu_us)
                ),
            ),
            ("restore needs", report.restore_needs.join(" ")),
            (
                "log",
                report
                    .log
                    .as_ref()
                    .map(|log| log.display().to_string())
                    .unwrap_or_default(),
            ),
        ],
    )
}
