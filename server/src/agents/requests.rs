//! Requests of agents, readers and operators: those of `permafrost`, as far as the peer may.

use permafrost_client::identity::{Action, Peer};
use permafrost_protocol::control::{self, ErrorCode, Reply, Request, reply, request};
use permafrost_protocol::manifest::CheckpointRef;

use super::turns::Admitted;
use super::{Agents, check_read, check_write, denied, refusal};
use crate::cluster::{Operate, no_cluster};
use crate::denials::{Denials, no_certificates};
use crate::queues::{Admission, expected_bytes};
use crate::replication::Durability;
use crate::store::{SessionRequest, StoreError};

impl Agents {
    /// Answers a control request that came by QUIC.
    #[must_use]
    pub fn call(&self, peer: &Peer, request: Request) -> Reply {
        let answered = if request.version == control::VERSION {
            match request.body {
                Some(body) => self.answer(peer, body),
                None => Err(invalid("a request that asks for nothing this node knows")),
            }
        } else {
            Err(invalid(
                "another version of the control protocol than this node's",
            ))
        };
        Reply {
            body: Some(answered.unwrap_or_else(|error| {
                tracing::info!(peer = peer.name(), error = error.message, "request refused");
                reply::Body::Error(error)
            })),
        }
    }

    fn answer(&self, peer: &Peer, body: request::Body) -> Result<reply::Body, control::Error> {
        Ok(match body {
            request::Body::Open(open) => self.open(peer, open)?,
            request::Body::Reserve(reserve) => reply::Body::Reserved(self.reserve(peer, &reserve)?),
            request::Body::CancelReservation(cancel) => {
                self.cancel_reservation(peer, &cancel)?;
                reply::Body::Done(control::Done { count: 1 })
            }
            request::Body::Abort(abort) => {
                self.abort(peer, &abort.session)?;
                reply::Body::Done(control::Done { count: 1 })
            }
            request::Body::List(list) => reply::Body::Checkpoints(control::Checkpoints {
                checkpoints: self.list(peer, &list.job)?,
            }),
            request::Body::Show(show) => {
                check_read(peer, &job_of(&show.checkpoint)?)?;
                let shown = self.store.show(&show.checkpoint);
                reply::Body::Detail(shown.map_err(|error| refusal(&error))?)
            }
            request::Body::Remove(remove) => {
                let job = if remove.all_generations {
                    remove.checkpoint.clone()
                } else {
                    job_of(&remove.checkpoint)?
                };
                check_write(peer, &job)?;
                let removed =
                    self.store
                        .remove(&remove.checkpoint, remove.all_generations, remove.force);
                let count = removed.map_err(|error| refusal(&error))?;
                reply::Body::Done(control::Done { count })
            }
            request::Body::Pin(pin) => {
                check_write(peer, &job_of(&pin.checkpoint)?)?;
                let pinned = self.store.pin(&pin.checkpoint, pin.pinned);
                reply::Body::Checkpoint(pinned.map_err(|error| refusal(&error))?)
            }
            request::Body::Verify(verify) => {
                reply::Body::Verified(self.verify(peer, &verify.checkpoint)?)
            }
            request::Body::Status(_) => reply::Body::Status(self.status(peer)?),
            request::Body::Nodes(nodes) => {
                if !peer.may(Action::List) {
                    return Err(denied(peer, "see the nodes"));
                }
                let answer = self.operator()?.nodes(&nodes);
                reply::Body::Nodes(answer.map_err(|error| refusal(&error))?)
            }
            request::Body::SetNode(set) => {
                check_operate(peer, "drain or remove nodes")?;
                tracing::info!(
                    peer = peer.name(),
                    node = set.name,
                    state = set.state,
                    force = set.force,
                    "node is set"
                );
                let answer = self.operator()?.set_node(&set);
                reply::Body::Nodes(answer.map_err(|error| refusal(&error))?)
            }
            request::Body::Rebuild(rebuild) => {
                check_operate(peer, "rebuild the registry")?;
                let answer = self.operator()?.rebuild(&rebuild);
                let rebuilt = answer.map_err(|error| refusal(&error))?;
                if let (Some(denials), false) = (&self.denials, rebuild.dry_run) {
                    denials.list_again().map_err(|error| refusal(&error))?;
                }
                reply::Body::Rebuilt(rebuilt)
            }
            request::Body::Scrub(scrub) => {
                check_operate(peer, "have a node scrubbed")?;
                let scrubbed = self.store.scrub_now(&scrub.checkpoint, &mut |_, _| {});
                reply::Body::Scrubbed(scrubbed.map_err(|error| refusal(&error))?)
            }
            request::Body::Deny(deny) => {
                check_operate(peer, "deny certificates")?;
                let answer = self.denials().and_then(|denials| denials.answer(&deny));
                reply::Body::Denials(answer.map_err(|error| refusal(&error))?)
            }
            request::Body::Took(_) => {
                return Err(invalid(
                    "an agent's dumps are measured as the node sees them",
                ));
            }
            request::Body::Seal(_)
            | request::Body::Adopt(_)
            | request::Body::Export(_)
            | request::Body::Import(_)
            | request::Body::Stream(_) => {
                return Err(invalid("a request that needs a descriptor, by QUIC"));
            }
        })
    }

    fn operator(&self) -> Result<&dyn Operate, control::Error> {
        self.operator
            .as_deref()
            .ok_or_else(|| refusal(&no_cluster()))
    }

    fn denials(&self) -> Result<&Denials, StoreError> {
        self.denials.as_deref().ok_or_else(no_certificates)
    }

    fn open(&self, peer: &Peer, open: request::Open) -> Result<reply::Body, control::Error> {
        check_write(peer, &open.job)?;
        self.discard_late();
        let durability = Durability::parse(&open.durability).map_err(|error| refusal(&error))?;
        let admission = Admission::new(
            expected_bytes(&open),
            open.priority,
            open.deadline_ms,
            &open.reservation,
        );
        let admission = admission.map_err(|error| error.to_reply())?;
        let frozen = open.job.is_empty();
        let request = SessionRequest {
            job: open.job,
            pre_dump: open.pre_dump,
            seal_follows: open.seal_follows,
            origin: open.origin,
            no_parent: open.no_parent,
            parent_images: open.parent_images,
            durability,
        };
        let turn = if frozen {
            self.runs(admission.bytes)
        } else {
            // The job is locked when it has its turn: agents ask time and again, and the registry would have to.
            let free = self.store.check_free(&request.job);
            let admitted = free.and_then(|()| self.admit(&admission));
            match admitted.map_err(|error| refusal(&error))? {
                Admitted::Begins(turn) => turn,
                Admitted::Later(waiting) => {
                    return Ok(reply::Body::Progress(control::Progress {
                        waiting: Some(waiting),
                        ..control::Progress::default()
                    }));
                }
            }
        };
        let opened = self.store.open_session_after(request, || Ok(turn));
        let session = opened.map_err(|error| refusal(&error))?;
        self.expect(peer, &session);
        Ok(reply::Body::SessionOpened(control::SessionOpened {
            session: session.id.clone(),
            parent_generation: session.parent_generation,
            parent_origin: session.parent_origin.clone(),
            ..control::SessionOpened::default()
        }))
    }

    /// A session of the peer's own, or a parked one of a job that it may dump into.
    fn abort(&self, peer: &Peer, id: &str) -> Result<(), control::Error> {
        let own = self.take(peer, id).is_ok() || self.owns(peer, id);
        if !own {
            let listed = self.store.list("").map_err(|error| refusal(&error))?;
            let parked = listed
                .into_iter()
                .find(|record| record.generation == 0 && record.session == id);
            match parked {
                Some(parked) if !parked.job.is_empty() => check_write(peer, &parked.job)?,
                _ => {
                    return Err(control::Error {
                        code: ErrorCode::NotFound.into(),
                        message: format!("session {id} not found"),
                        hint: String::new(),
                    });
                }
            }
        }
        let aborted = self.store.abort_session(id);
        aborted.map_err(|error| refusal(&error))?;
        self.owned().remove(id);
        Ok(())
    }

    /// What the peer may read; of parked sessions without a job, its own.
    fn list(&self, peer: &Peer, job: &str) -> Result<Vec<control::Checkpoint>, control::Error> {
        if !job.is_empty() {
            check_read(peer, job)?;
        }
        let mut listed = self.store.list(job).map_err(|error| refusal(&error))?;
        listed.retain(|record| match record.job.as_str() {
            "" => self.owns(peer, &record.session),
            job => check_read(peer, job).is_ok(),
        });
        Ok(listed)
    }

    fn verify(&self, peer: &Peer, reference: &str) -> Result<control::Verified, control::Error> {
        let everything = reference.is_empty();
        let references = if everything {
            self.list(peer, "")?
                .into_iter()
                .filter(|record| record.generation > 0)
                .map(|record| format!("{}@{}", record.job, record.generation))
                .collect()
        } else {
            check_read(peer, &job_of(reference)?)?;
            vec![reference.to_owned()]
        };
        let mut all = control::Verified::default();
        for reference in references {
            let verified = match self.store.verify(&reference, &mut |_, _| {}) {
                // Removed since it was listed, or held by others only.
                Err(StoreError::NotFound { .. }) if everything => continue,
                verified => verified.map_err(|error| refusal(&error))?,
            };
            all.checkpoints += verified.checkpoints;
            all.pages += verified.pages;
            all.damage.extend(verified.damage);
        }
        Ok(all)
    }

    fn status(&self, peer: &Peer) -> Result<control::ServerStatus, control::Error> {
        if !peer.may(Action::List) {
            return Err(denied(peer, "see the state of the node"));
        }
        let listed = self.list(peer, "")?;
        let parked = listed
            .iter()
            .filter(|record| record.generation == 0)
            .count() as u64;
        Ok(control::ServerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            regions: vec![self.store.region_status()],
            checkpoints: listed.len() as u64 - parked,
            parked,
            queues: self.queues_status(),
            ..control::ServerStatus::default()
        })
    }
}

/// Whether `peer` looks after the cluster.
fn check_operate(peer: &Peer, what: &str) -> Result<(), control::Error> {
    if peer.may(Action::Operate) {
        return Ok(());
    }
    Err(control::Error {
        hint: "ask with a certificate of role operator (`permafrost agent --identity`), or as root on a storage node"
            .to_owned(),
        ..denied(peer, what)
    })
}

/// The job that a reference names.
fn job_of(reference: &str) -> Result<String, control::Error> {
    let parsed: Result<CheckpointRef, _> = reference.parse();
    match parsed {
        Ok(parsed) => Ok(parsed.job),
        Err(error) => Err(invalid(&format!(
            "{reference:?} names no checkpoint: {error}"
        ))),
    }
}

fn invalid(message: &str) -> control::Error {
    control::Error {
        code: ErrorCode::Invalid.into(),
        message: message.to_owned(),
        hint: "use the same version of Permafrost everywhere".to_owned(),
    }
}
