//! The control socket: one thread a connection, one request after another.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_client::framing;
use permafrost_protocol::control::{self, ErrorCode, Reply, Request, reply, request};
use tokio::net::UnixListener;

use super::{Shared, endpoints};
use crate::store::{SessionRequest, StoreError};

/// A peer that does not read its replies for so long is given up.
const REPLY_PATIENCE: Duration = Duration::from_secs(30);

/// Progress is sent at most so often.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);

pub(super) async fn accept(shared: Arc<Shared>, listener: UnixListener) {
    loop {
        match endpoints::accept_owner(&listener).await {
            Ok(stream) => {
                let shared = Arc::clone(&shared);
                let spawned = std::thread::Builder::new()
                    .name("control".to_owned())
                    .spawn(move || serve(&shared, &stream));
                if let Err(error) = spawned {
                    tracing::error!(%error, "no thread for a control connection");
                }
            }
            Err(error) => endpoints::accept_failed(&error).await,
        }
    }
}

fn serve(shared: &Arc<Shared>, stream: &UnixStream) {
    let prepared = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_write_timeout(Some(REPLY_PATIENCE)));
    if let Err(error) = prepared {
        tracing::warn!(%error, "control connection");
        return;
    }
    // Sessions that end with this connection.
    let mut bound = Vec::new();
    loop {
        match framing::recv::<Request>(stream) {
            Ok(Some((request, fds))) => {
                let handler = Handler {
                    shared,
                    stream,
                    bound: &mut bound,
                };
                let body = handler.answer(request, fds.into_iter().next());
                if let Err(error) = framing::send(stream, &Reply { body: Some(body) }, &[]) {
                    tracing::debug!(%error, "reply not sent");
                    break;
                }
            }
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "control connection");
                break;
            }
        }
    }
    for session in bound {
        // Sealed ones are gone already.
        shared.store.drop_session(&session);
    }
}

struct Handler<'a> {
    shared: &'a Arc<Shared>,
    stream: &'a UnixStream,
    bound: &'a mut Vec<String>,
}

impl Handler<'_> {
    fn answer(self, request: Request, fd: Option<OwnedFd>) -> reply::Body {
        if request.version != control::VERSION {
            return reply::Body::Error(control::Error {
                code: ErrorCode::Invalid.into(),
                message: format!(
                    "control protocol version {} is not spoken here",
                    request.version
                ),
                hint: format!(
                    "use the permafrost that belongs to permafrostd {}",
                    env!("CARGO_PKG_VERSION")
                ),
            });
        }
        let Some(body) = request.body else {
            return reply::Body::Error(control::Error {
                code: ErrorCode::Invalid.into(),
                message: "a request that asks for nothing this daemon knows".to_owned(),
                hint: "use the permafrost that belongs to this permafrostd".to_owned(),
            });
        };
        match self.dispatch(body, fd) {
            Ok(body) => body,
            Err(error) => {
                tracing::info!(%error, "request refused");
                reply::Body::Error(error.to_reply())
            }
        }
    }

    fn dispatch(self, body: request::Body, fd: Option<OwnedFd>) -> Result<reply::Body, StoreError> {
        let store = &self.shared.store;
        let directory = || {
            fd.ok_or(StoreError::Invalid {
                message: "the request came without the descriptor it needs".to_owned(),
                hint: "",
            })
        };
        Ok(match body {
            request::Body::Open(open) => reply::Body::SessionOpened(self.open(open)?),
            request::Body::Seal(seal) => {
                reply::Body::Checkpoint(store.seal_session(&seal.session, directory()?)?)
            }
            request::Body::Abort(abort) => {
                store.abort_session(&abort.session)?;
                reply::Body::Done(control::Done { count: 1 })
            }
            request::Body::Adopt(adopt) => reply::Body::Checkpoint(store.adopt(
                &adopt.session,
                &adopt.job,
                adopt.origin,
                directory()?,
            )?),
            request::Body::List(list) => reply::Body::Checkpoints(control::Checkpoints {
                checkpoints: store.list(&list.job)?,
            }),
            request::Body::Show(show) => reply::Body::Detail(store.show(&show.checkpoint)?),
            request::Body::Remove(remove) => reply::Body::Done(control::Done {
                count: store.remove(&remove.checkpoint, remove.all_generations, remove.force)?,
            }),
            request::Body::Pin(pin) => {
                reply::Body::Checkpoint(store.pin(&pin.checkpoint, pin.pinned)?)
            }
            request::Body::Verify(verify) => {
                reply::Body::Verified(store.verify(&verify.checkpoint, &mut self.progress())?)
            }
            request::Body::Export(export) => reply::Body::Exported(store.export(
                &export.checkpoint,
                export.small_images_only,
                directory()?,
                &mut self.progress(),
            )?),
            request::Body::Import(import) => reply::Body::Checkpoint(store.import(
                &import.job,
                import.no_parent,
                directory()?,
                &mut self.progress(),
            )?),
            request::Body::Stream(stream) => reply::Body::Exported(store.stream(
                &stream.checkpoint,
                directory()?,
                self.stream,
                &mut self.progress(),
            )?),
            request::Body::Status(_) => reply::Body::Status(self.status()?),
        })
    }

    fn open(self, open: request::Open) -> Result<control::SessionOpened, StoreError> {
        if open.job.is_empty() {
            return Err(StoreError::Invalid {
                message: "the job name is empty".to_owned(),
                hint: "use letters, digits and . _ : / + - (at most 200 bytes, no leading . - /)",
            });
        }
        let store = &self.shared.store;
        let session = store.open_session(SessionRequest {
            job: open.job,
            pre_dump: open.pre_dump,
            seal_follows: open.seal_follows,
            origin: open.origin,
            no_parent: open.no_parent,
            parent_images: open.parent_images,
        })?;
        // Whoever is bound to its connection is on this host, and needs no port.
        let tcp = !open.bound_to_connection;
        let endpoints = match endpoints::listen_for(self.shared, &session, tcp) {
            Ok(endpoints) => endpoints,
            Err(error) => {
                store.drop_session(&session.id);
                return Err(StoreError::io("listen for the session")(error));
            }
        };
        if open.bound_to_connection {
            self.bound.push(session.id.clone());
        }
        Ok(control::SessionOpened {
            session: session.id.clone(),
            socket: endpoints.socket.to_string_lossy().into_owned(),
            address: endpoints
                .address
                .map_or_else(String::new, |address| address.to_string()),
            parent_generation: session.parent_generation,
            parent_origin: session.parent_origin.clone(),
        })
    }

    fn status(&self) -> Result<control::ServerStatus, StoreError> {
        let store = &self.shared.store;
        let listed = store.list("")?;
        let parked = listed
            .iter()
            .filter(|record| record.generation == 0)
            .count() as u64;
        Ok(control::ServerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.shared.started.elapsed().as_secs(),
            address: self
                .shared
                .address
                .map_or_else(String::new, |address| address.to_string()),
            socket: self
                .shared
                .page_server_socket()
                .to_string_lossy()
                .into_owned(),
            regions: vec![store.region_status()],
            sessions: store.session_states(),
            checkpoints: listed.len() as u64 - parked,
            parked,
            park_ttl_s: self.shared.config.retention.parked.as_secs(),
            catalog: self.shared.catalog_origin.clone(),
        })
    }

    /// Sends progress now and then; a peer that is gone is noticed at the final reply.
    fn progress(&self) -> impl FnMut(u64, u64) + use<> {
        let mut stream = self.stream.try_clone().ok();
        let mut last = Instant::now();
        move |done_bytes, total_bytes| {
            let Some(peer) = stream
                .as_ref()
                .filter(|_| last.elapsed() >= PROGRESS_PERIOD)
            else {
                return;
            };
            last = Instant::now();
            let body = reply::Body::Progress(control::Progress {
                done_bytes,
                total_bytes,
            });
            if let Err(error) = framing::send(peer, &Reply { body: Some(body) }, &[]) {
                tracing::debug!(%error, "progress not sent");
                stream = None;
            }
        }
    }
}
