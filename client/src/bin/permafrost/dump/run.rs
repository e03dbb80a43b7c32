//! Runs CRIU within a session.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use permafrost_criu::frontend::StreamReceiver;
use permafrost_criu::handover::{self, SealOrder};
use permafrost_criu::verdict::{self, SealBy};
use permafrost_criu::way::{Way, WayConditions};
use permafrost_criu::{CriuRun, Guarded, memory, processes, scratch, tree};
use permafrost_protocol::control::{SessionOpened, request};
use permafrost_protocol::manifest::Origin;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::progress::{ProgressDisplay, QueueDisplay};
use permafrost_transport::control::{Connection, SOCKET_VARIABLE};
use rustix::process::Signal;

use super::{Parent, Places, Plan, Taken, dependencies, guard, incomplete};
use crate::arguments::Durability;
use crate::transfer::open_directory;

/// Interval at which progress is polled while CRIU runs.
const TICK: Duration = Duration::from_millis(250);

/// Longest wait for a progress reply: the end of CRIU is not noticed meanwhile.
const PROGRESS_PATIENCE: Duration = Duration::from_secs(1);

impl Plan<'_> {
    /// Opens the session and runs CRIU.
    pub(super) fn run(
        &self,
        connection: &mut Connection,
        places: &Places,
        interrupts: &Interrupts,
    ) -> Result<Taken, Failure> {
        let (opened, waited) = self.open(connection, places)?;
        // Now: the process may have grown while the dump waited for its turn.
        let way = self.way_conditions(opened.pipe_bytes, places)?.choose();
        let previous = match &self.parent {
            Some(parent) => Some(export_parent(connection, parent, places)?),
            None => None,
        };
        if let Some(tracking) = &self.tracking {
            // From here until the seal, it is unknown which checkpoint the soft-dirty bits refer to.
            tracking.forget(self.arguments.pid).map_err(|error| {
                Failure::new(
                    Code::Internal,
                    format!("forget the last tracked dump: {error}"),
                )
            })?;
        }
        dependencies::refuse_endpoints(self.arguments.pid, &opened.depends_on)?;
        incomplete::refuse_incomplete(self.arguments.pid)?;
        let guarded = self.guarded(places);
        let order = SealOrder {
            session: &opened.session,
            socket: &self.context.socket,
            seal_by: Some(SealBy::after(guarded.limit.until_rollback())),
        };
        handover::write(places.scratch.path(), &order)
            .map_err(|error| Failure::io("write into", places.scratch.path(), &error))?;
        let mut run = self.criu_run(&order, places, &guarded, previous.as_deref())?;
        let stream = if way.way == Way::Stream {
            let scratch = places.scratch.path();
            let pages = self.context.connect()?;
            let (stream, held) =
                StreamReceiver::start(&places.images, scratch, &opened.session, pages)
                    .map_err(|error| Failure::io("listen in", scratch, &error))?;
            run.stream(held)
                .env(verdict::STREAM_VARIABLE, &stream.outcome);
            Some(stream)
        } else {
            let socket = UnixStream::connect(&opened.socket)
                .map_err(|error| Failure::io("connect to", Path::new(&opened.socket), &error))?;
            run.page_socket(socket.into());
            None
        };
        let running = run.start(&self.criu)?;
        let guard = running.pid();
        let mut watch = Watch::new(
            self.context,
            &opened.session,
            self.arguments.part.label(&self.arguments.job),
        );
        let mut passed_on = 0;
        let finished = running.wait(TICK, || {
            let came = interrupts.count();
            if came == 0 {
                watch.tick();
            } else if came > passed_on {
                self.context.remark(if passed_on == 0 {
                    "interrupted: the session is discarded, waiting for CRIU to roll back"
                } else {
                    "interrupted again: a seal that has begun is given up"
                });
                passed_on = came;
                processes::signal(guard, Signal::TERM);
            }
        })?;
        drop(watch);
        let streamed = stream.map_or(Ok(()), StreamReceiver::finish);
        let sealed = self
            .conclude(connection, places, &opened, finished, interrupts)
            .map_err(|failure| match streamed {
                // CRIU sees a closed pipe, and knows no more.
                Err(why) if failure.code == Code::CriuFailed => {
                    failure.during(format!("images by --stream: {why}"))
                }
                _ => failure,
            })?;
        Ok(Taken {
            sealed,
            way,
            waited,
        })
    }

    /// Returns the conditions for the way of the dump as they are now, where the daemon has room in pipes for so many
    /// bytes.
    fn way_conditions(
        &self,
        pipe_bytes: u64,
        places: &Places,
    ) -> Result<WayConditions<'_>, Failure> {
        let fits = StreamReceiver::fits(&places.images);
        let requested = match (self.arguments.stream, self.arguments.page_server) {
            (true, _) if !fits => {
                let images = places.images.display();
                let message = format!("no socket can be made in {images}: its path is too long");
                return Err(Failure::new(Code::Invalid, message)
                    .hint("set XDG_RUNTIME_DIR to a shorter path, or leave --stream out"));
            }
            (true, _) => Some(Way::Stream),
            (false, true) => Some(Way::PageServer),
            (false, false) => None,
        };
        let usage = processes::usage(&processes::tree(self.arguments.pid))?;
        Ok(WayConditions {
            requested,
            soft_dirty: self.origin.tracked,
            criu_version: &self.origin.criu_version,
            resident_bytes: usage.resident_bytes,
            pipe_bytes,
            fits,
        })
    }

    /// Opens the session. Returns it and the time in the queue.
    fn open(
        &self,
        connection: &mut Connection,
        places: &Places,
    ) -> Result<(SessionOpened, Duration), Failure> {
        let turn = &self.arguments.turn;
        let open = request::Open {
            job: self.arguments.job.clone(),
            pre_dump: self.arguments.pre_dump,
            pre_copy: self.arguments.part.is_round(),
            // After a pre-dump too: nothing dies of one, and its pages are never left parked.
            seal_follows: true,
            origin: Some(self.origin_now()),
            no_parent: self.arguments.full,
            bound_to_connection: true,
            parent_images: self.parent.is_some(),
            durability: Durability::word(self.arguments.durability),
            priority: turn.priority,
            deadline_ms: turn.deadline_ms(),
            // A reservation is used up by the first round, which brings the most.
            reservation: match self.arguments.part.is_later() {
                true => String::new(),
                false => turn.reservation.token()?,
            },
            pipe_bytes: self.way_conditions(0, places)?.wanted_pipe_bytes(),
            ..request::Open::default()
        };
        let mut queue = QueueDisplay::new(
            self.context,
            self.arguments.part.label(&self.arguments.job),
            "dumps",
            "; the process runs on",
        );
        let opened = connection.call_with(open, None, &mut |progress| queue.update(progress))?;
        let waited = queue.waited();
        drop(queue);
        match &self.parent {
            Some(parent) if parent.generation != opened.parent_generation => Err(Failure::new(
                Code::Conflict,
                format!(
                    "{} was followed by another checkpoint this moment",
                    parent.name
                ),
            )
            .hint("try again")),
            _ => Ok((opened, waited)),
        }
    }

    /// Returns the origin, with the current memory sizes of the processes, from which the dump's size and time
    /// are predicted.
    fn origin_now(&self) -> Origin {
        let pid = self.arguments.pid;
        let tree = processes::tree(pid);
        let usage = processes::usage(&tree).ok();
        let worked = usage.map_or(Duration::ZERO, |usage| usage.progress());
        let carried_us = self.origin.carried_us;
        Origin {
            worked_us: carried_us.saturating_add(human::whole_micros(worked)),
            resident_bytes: usage.map_or(0, |usage| usage.resident_bytes),
            // Only the pages written since the parent show how much CRIU will leave out.
            dirty_pages: self
                .parent
                .as_ref()
                .and_then(|_| memory::dirty_pages(&tree)),
            processes: tree::of(&tree),
            ..self.origin.clone()
        }
    }

    fn guarded(&self, places: &Places) -> Guarded {
        Guarded {
            pid: self.arguments.pid,
            limit: self.freeze_limit,
            pre_dump: self.arguments.pre_dump,
            report: places.report.clone(),
        }
    }

    fn criu_run(
        &self,
        order: &SealOrder<'_>,
        places: &Places,
        guarded: &Guarded,
        previous: Option<&str>,
    ) -> Result<CriuRun, Failure> {
        let command = if self.arguments.pre_dump {
            "pre-dump"
        } else {
            "dump"
        };
        let guard = guard::command(guarded)?;
        let directories = (places.images.as_path(), places.work.as_path());
        let mut run = CriuRun::guarded(guard, guarded, &self.criu, command, directories);
        run.args(["--tree", &self.arguments.pid.to_string()]);
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
                .env(verdict::SESSION_VARIABLE, order.session)
                .env(SOCKET_VARIABLE, order.socket)
                .env(verdict::VARIABLE, &places.verdict);
            if let Some(seal_by) = order.seal_by {
                run.env(verdict::SEAL_BY_VARIABLE, seal_by.to_string());
            }
        }
        run.args(self.passed_on.arguments());
        Ok(run)
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
        ..request::Export::default()
    };
    connection.call_with(export, Some(directory.as_fd()), &mut |_| {})?;
    // CRIU makes it a symbolic link in the images directory, relative to that.
    Ok("../prev".to_owned())
}

/// Poller of the session's progress on a connection of its own, while CRIU runs.
struct Watch<'a> {
    context: &'a Context,
    session: &'a str,
    progress: ProgressDisplay,
    connection: Option<Connection>,
    /// True if the daemon did not reply in time: no more requests are sent to it.
    given_up: bool,
    ticks: u32,
}

impl<'a> Watch<'a> {
    fn new(context: &'a Context, session: &'a str, label: String) -> Self {
        Self {
            context,
            session,
            progress: ProgressDisplay::new(context, label),
            connection: None,
            given_up: false,
            ticks: 0,
        }
    }

    fn tick(&mut self) {
        // No progress is requested in the first second: it would not be displayed.
        self.ticks += 1;
        if self.context.quiet || self.context.json || self.ticks < 4 || self.given_up {
            return;
        }
        if self.connection.is_none() {
            self.connection = self.context.connect().ok();
            if let Some(connection) = &self.connection {
                self.given_up = connection.limit_waits(PROGRESS_PATIENCE).is_err();
            }
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
            None => self.given_up = true,
        }
    }
}
