//! The session, and CRIU in it.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use permafrost_client::control::{Connection, SOCKET_VARIABLE};
use permafrost_client::criu::Run;
use permafrost_client::handover;
use permafrost_client::memory;
use permafrost_client::scratch;
use permafrost_client::verdict;
use permafrost_protocol::control::{SessionOpened, request};
use permafrost_protocol::manifest::Origin;

use super::{Parent, Places, Plan, Sealed};
use crate::cli::Durability;
use crate::context::Context;
use crate::failure::{Code, Failure};
use crate::interrupt::Interrupts;
use crate::progress::{Progress, Queue};
use crate::transfer::open_directory;

/// How often progress is looked at while CRIU runs.
const TICK: Duration = Duration::from_millis(250);

impl Plan<'_> {
    /// Opens the session, runs CRIU, and returns the sealed checkpoint, and how long it waited for its turn.
    pub(super) fn run(
        &self,
        connection: &mut Connection,
        places: &Places,
        interrupts: &Interrupts,
    ) -> Result<(Sealed, Duration), Failure> {
        let (opened, waited) = self.open(connection)?;
        let previous = match &self.parent {
            Some(parent) => Some(export_parent(connection, parent, places)?),
            None => None,
        };
        let socket = UnixStream::connect(&opened.socket)
            .map_err(|error| Failure::io("connect to", Path::new(&opened.socket), &error))?;

        if let Some(tracking) = &self.tracking {
            // From here on nobody knows what the soft-dirty bits refer to, until the seal.
            tracking.forget(self.arguments.pid).map_err(|error| {
                Failure::new(
                    Code::Internal,
                    format!("forget the last tracked dump: {error}"),
                )
            })?;
        }
        handover::write(places.scratch.path(), &opened.session, &self.context.socket)
            .map_err(|error| Failure::io("write into", places.scratch.path(), &error))?;
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
        let sealed = self.conclude(connection, places, &opened, finished, interrupts)?;
        Ok((sealed, waited))
    }

    /// The session, and how long it waited for its turn.
    fn open(&self, connection: &mut Connection) -> Result<(SessionOpened, Duration), Failure> {
        let turn = &self.arguments.turn;
        let open = request::Open {
            job: self.arguments.job.clone(),
            pre_dump: self.arguments.pre_dump,
            // After a pre-dump too: nothing dies of one, and its pages are never left parked.
            seal_follows: true,
            origin: Some(self.origin_now()),
            no_parent: self.arguments.full,
            bound_to_connection: true,
            parent_images: self.parent.is_some(),
            durability: Durability::word(self.arguments.durability),
            priority: turn.priority,
            deadline_ms: turn.deadline_ms(),
            reservation: turn.reservation.token()?,
            ..request::Open::default()
        };
        let mut queue = Queue::new(
            self.context,
            format!("dump {}", self.arguments.job),
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

    /// The origin, with what the processes have in memory now: the dump's size and time are predicted by it.
    fn origin_now(&self) -> Origin {
        let pid = self.arguments.pid;
        Origin {
            resident_bytes: memory::resident_bytes(pid),
            // Only those since the parent say what CRIU will leave out.
            dirty_pages: self.parent.as_ref().and_then(|_| memory::dirty_pages(pid)),
            ..self.origin.clone()
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
