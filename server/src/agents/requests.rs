//! Requests of agents, readers and operators: the requests of `permafrost`, restricted to the rights of the peer.

use permafrost_catalog::ListPart;
use permafrost_cluster::{Operate, no_cluster};
use permafrost_clustered::Durability;
use permafrost_identity::{Peer, Role};
use permafrost_metering::queues::{Admission, expected_bytes};
use permafrost_protocol::access::Access;
use permafrost_protocol::control::{self, Reply, Request, reply, request};
use permafrost_protocol::manifest::JobName;
use permafrost_protocol::versions::{self, RELEASE};
use permafrost_store::MissingObject;
use permafrost_store::{SessionRequest, StoreError};

use super::rights::{authorize, check_delete, check_delete_parked, job_of, reads};
use super::turns::Admitted;
use super::{Agents, name_of};
use crate::denials::{DenialLists, no_certificates};
use crate::error::RequestError;

impl Agents {
    /// Answers a control request that came by QUIC.
    #[must_use]
    pub fn call(&self, peer: &Peer, request: Request) -> Reply {
        let answered = match request.known("the node", versions::own()) {
            Ok(body) => self.answer(peer, body.clone()),
            Err(unknown) => Err(unknown.into()),
        };
        Reply {
            body: Some(answered.unwrap_or_else(|error| {
                tracing::info!(
                    event = "peer-request-refused",
                    peer = peer.name(),
                    error = error.message,
                    "request refused"
                );
                reply::Body::Error(error)
            })),
        }
    }

    fn answer(&self, peer: &Peer, body: request::Body) -> Result<reply::Body, control::Error> {
        authorize(peer, &Access::of_control(&body)?)?;
        Ok(match body {
            request::Body::Open(open) => self.open(peer, open)?,
            request::Body::Reserve(reserve) => reply::Body::Reserved(self.reserve(peer, &reserve)?),
            request::Body::CancelReservation(cancel) => {
                self.cancel_reservation(&cancel)?;
                reply::Body::Done(control::Done { count: 1 })
            }
            request::Body::Abort(abort) => {
                if abort.freeze_limit_reached && peer.role() == Role::Agent {
                    // The session may have ended with its conversation by now.
                    let counters = self.store.local().counters();
                    counters.freeze_limits_reached.add(1);
                }
                self.abort(peer, &abort.session)?;
                reply::Body::Done(control::Done { count: 1 })
            }
            request::Body::List(list) => reply::Body::Checkpoints(self.list_part(peer, &list)?),
            request::Body::Show(show) => {
                let shown = self.store.show(&show.checkpoint);
                reply::Body::Detail(shown?)
            }
            request::Body::Describe(contents) => {
                reply::Body::Contents(self.store.contents(&contents)?)
            }
            request::Body::Remove(remove) => {
                let count = self.store.remove(&remove)?;
                reply::Body::Done(control::Done { count })
            }
            request::Body::SetRetention(set) => {
                reply::Body::Retention(self.store.set_retention(&set)?)
            }
            request::Body::ShowRetention(show) => {
                let mut all = self.store.retention_rules(&show.namespace)?;
                all.rules
                    .retain(|rule| reads(peer, &format!("{}/any", rule.namespace)));
                reply::Body::Retention(all)
            }
            request::Body::Prune(prune) => {
                let mut pruned = self.store.prune(&prune)?;
                pruned.generations.retain(|one| reads(peer, &one.job));
                reply::Body::Pruned(pruned)
            }
            request::Body::Pin(pin) => {
                let pinned = self.store.pin(&pin.checkpoint, pin.pinned);
                reply::Body::Checkpoint(pinned?)
            }
            request::Body::Verify(verify) => reply::Body::Verified(self.verify(peer, &verify)?),
            request::Body::Status(_) => reply::Body::Status(self.status(peer)?),
            request::Body::Nodes(nodes) => {
                let answer = self.operator()?.nodes(&nodes);
                reply::Body::Nodes(visible(peer, answer?))
            }
            request::Body::SetNode(set) => {
                tracing::info!(
                    event = "node-state-changed-by-peer",
                    peer = peer.name(),
                    node = set.name,
                    state = set.state,
                    force = set.force,
                    "node is set"
                );
                let answer = self.operator()?.set_node(&set);
                reply::Body::Nodes(visible(peer, answer?))
            }
            request::Body::Rebuild(rebuild) => {
                let answer = self.operator()?.rebuild(&rebuild);
                let rebuilt = answer?;
                if let (Some(denials), false) = (&self.denials, rebuild.dry_run) {
                    denials.list_again()?;
                }
                reply::Body::Rebuilt(rebuilt)
            }
            request::Body::SetLevel(set) => {
                tracing::info!(
                    event = "registry-level-changed-by-peer",
                    peer = peer.name(),
                    registry = set.registry,
                    "level is set"
                );
                let answer = self.operator()?.set_level(&set);
                reply::Body::Nodes(visible(peer, answer?))
            }
            request::Body::Scrub(scrub) => {
                let scrubbed =
                    self.scrubber("scrubs")?
                        .scrub(&scrub.checkpoint, scrub.cold, &mut |_, _| {});
                reply::Body::Scrubbed(scrubbed?)
            }
            request::Body::Gc(gc) => {
                reply::Body::GcReport(self.store.local().gc(gc.dry_run, &mut |_, _| {})?)
            }
            // The others name files of the node's host.
            request::Body::Media(media) if media.action == "ls" => {
                reply::Body::RegionMedia(self.store.local().media(&media, &mut |_, _| {})?)
            }
            request::Body::Media(_) | request::Body::Keys(_) => {
                return Err(RequestError::OnTheNode.into());
            }
            request::Body::Deny(deny) => {
                let answer = self.denials().and_then(|denials| denials.answer(&deny));
                reply::Body::Denials(answer?)
            }
            request::Body::Took(_) => {
                return Err(RequestError::MeasuredHere.into());
            }
            request::Body::Seal(_)
            | request::Body::Adopt(_)
            | request::Body::Export(_)
            | request::Body::Import(_)
            | request::Body::Stream(_)
            | request::Body::Lend(_)
            | request::Body::Thaw(_)
            | request::Body::TakeSpace(_)
            | request::Body::EndPages(_)
            | request::Body::Place(_) => {
                return Err(RequestError::NeedsDescriptor.into());
            }
        })
    }

    fn operator(&self) -> Result<&dyn Operate, control::Error> {
        self.operator.as_deref().ok_or_else(|| no_cluster().into())
    }

    fn denials(&self) -> Result<&DenialLists, StoreError> {
        self.denials.as_deref().ok_or_else(no_certificates)
    }

    fn open(&self, peer: &Peer, open: request::Open) -> Result<reply::Body, control::Error> {
        self.discard_late();
        let durability = Durability::parse(&open.durability)?;
        let admission = Admission::new(
            expected_bytes(&open),
            open.priority,
            open.deadline_ms,
            &open.reservation,
        );
        let admission = admission?;
        let priority = self.store.local().check_priority(&open.job, open.priority);
        priority?;
        // Checked before the request waits, so that a caller without the right to dump does not wait in vain.
        if !open.job.is_empty() {
            let bytes = expected_bytes(&open);
            self.store.make_room(&open.job, bytes, open.no_parent)?;
        }
        let may_open = self.store.local().check_may_open(&open.job);
        may_open?;
        let frozen = open.job.is_empty();
        let request = SessionRequest {
            job: open.job,
            pre_dump: open.pre_dump,
            pre_copy: open.pre_copy,
            seal_follows: open.seal_follows,
            origin: open.origin,
            no_parent: open.no_parent,
            parent_images: open.parent_images,
            from_here: false,
            taken_by: name_of(peer),
        };
        let turn = if frozen {
            self.runs(admission.bytes)
        } else {
            // The job is locked when it has its turn: agents ask time and again, and the registry would have to.
            let free = self.store.local().check_free(&request.job);
            let admitted = free.and_then(|()| self.admit(&admission));
            match admitted? {
                Admitted::Begins(turn) => turn,
                Admitted::Later(waiting) => {
                    return Ok(reply::Body::Progress(control::Progress {
                        waiting: Some(waiting),
                        ..control::Progress::default()
                    }));
                }
            }
        };
        let opened = self.store.open_session_after(request, durability, || {
            Ok(turn.map(|turn| Box::new(turn) as Box<dyn permafrost_store::TransferSlot>))
        });
        let session = opened?;
        self.expect(peer, &session);
        Ok(reply::Body::SessionOpened(control::SessionOpened {
            session: session.id.clone(),
            parent_generation: session.parent_generation,
            parent_origin: session.parent_origin.clone(),
            ..control::SessionOpened::default()
        }))
    }

    /// Discards a session that the peer has opened, or a parked one. A parked session is stored, so the peer needs
    /// the right to delete: in the session's job, or, for a session without a job, as the peer that sent it.
    fn abort(&self, peer: &Peer, id: &str) -> Result<(), control::Error> {
        if self.take(peer, id).is_err() {
            let listed = self.store.list(None)?;
            let parked = listed
                .into_iter()
                .find(|record| record.generation == 0 && record.session == id);
            match parked {
                Some(parked) if !parked.job.is_empty() => {
                    check_delete(peer, &job_of(&parked.job)?)?;
                }
                Some(_) if self.owns(peer, id) => check_delete_parked(peer)?,
                _ => {
                    return Err(StoreError::NotFound(MissingObject::Session(id.to_owned())).into());
                }
            }
        }
        let aborted = self.store.abort_session(id);
        aborted?;
        Ok(())
    }

    /// Lists those checkpoints of a part of the list that the peer may read.
    fn list_part(
        &self,
        peer: &Peer,
        list: &request::List,
    ) -> Result<control::Checkpoints, control::Error> {
        let mut part = self.store.list_part(&ListPart::new(list)?)?;
        part.checkpoints.retain(|record| self.may_see(peer, record));
        Ok(part)
    }

    fn may_see(&self, peer: &Peer, record: &control::Checkpoint) -> bool {
        match record.job.as_str() {
            "" => self.owns(peer, &record.session),
            job => reads(peer, job),
        }
    }

    /// Lists the checkpoints that the peer may read; of parked sessions without a job, only its own.
    fn list(&self, peer: &Peer, job: &str) -> Result<Vec<control::Checkpoint>, control::Error> {
        let job: Option<JobName> = match job {
            "" => None,
            job => Some(job_of(job)?),
        };
        let listed = self.store.list(job.as_ref());
        let mut listed = listed?;
        listed.retain(|record| self.may_see(peer, record));
        Ok(listed)
    }

    fn verify(
        &self,
        peer: &Peer,
        verify: &request::Verify,
    ) -> Result<control::Verified, control::Error> {
        let reference = verify.checkpoint.as_str();
        let everything = reference.is_empty();
        let references = if everything {
            self.list(peer, "")?
                .into_iter()
                .filter(|record| record.generation > 0)
                .map(|record| format!("{}@{}", record.job, record.generation))
                .collect()
        } else {
            vec![reference.to_owned()]
        };
        let mut all = control::Verified::default();
        for reference in references {
            // Each of everything is named here, and counts as such.
            let cold = verify.cold || !everything;
            let verified = match self.store.verify_named(&reference, cold, &mut |_, _| {}) {
                // Removed since it was listed, or held by others only.
                Err(StoreError::NotFound { .. }) if everything => continue,
                verified => verified?,
            };
            all.checkpoints += verified.checkpoints;
            all.pages += verified.pages;
            all.damage.extend(verified.damage);
            all.unverified_pages += verified.unverified_pages;
            if all.away.is_empty() {
                all.away = verified.away;
            }
        }
        Ok(all)
    }

    fn status(&self, peer: &Peer) -> Result<control::ServerStatus, control::Error> {
        let listed = self.list(peer, "")?;
        let parked = listed
            .iter()
            .filter(|record| record.generation == 0)
            .count() as u64;
        Ok(control::ServerStatus {
            version: RELEASE.to_owned(),
            speaks: Some(versions::own().clone()),
            regions: vec![self.store.local().region_status()],
            checkpoints: listed.len() as u64 - parked,
            parked,
            queues: self.queues_status(),
            namespaces: self.namespaces_of(peer),
            ..control::ServerStatus::default()
        })
    }
}

impl Agents {
    /// Returns the usage of those namespaces that the peer may read.
    fn namespaces_of(&self, peer: &Peer) -> Vec<control::NamespaceUsage> {
        let kept = self.queues.as_ref().map(|(_, kept)| kept);
        let reserved = |namespace: &str| kept.map_or(0, |kept| kept.kept_for(namespace));
        let mut namespaces = self.store.local().namespace_usage(&reserved);
        namespaces.retain(|one| reads(peer, &format!("{}/any", one.namespace)));
        namespaces
    }
}

/// Removes the names of jobs that `peer` may not read from the list. The jobs are still counted.
fn visible(peer: &Peer, mut list: control::NodeList) -> control::NodeList {
    for node in &mut list.nodes {
        node.only_here_names.retain(|name| {
            let job = name.split_once('@').map_or(name.as_str(), |(job, _)| job);
            reads(peer, job)
        });
    }
    list
}
