//! Sends dumps to the nodes, and has them sealed.

use std::os::fd::OwnedFd;

use permafrost_criu::directory::ImagesDir;
use permafrost_protocol::control::{self, reply, request};
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::message;
use permafrost_transport::peer::{DumpSender, PeerError};

use super::images::{self, Served};
use super::nodes::{odd_answer, refusal};
use crate::backend::Remote;
use crate::error::{DumpError, NodesError};
use crate::host::Backend;

impl Remote {
    /// Returns the address spaces that CRIU may be told the parent has.
    pub(super) fn parent_spaces(&self, node: &str, job: &str, generation: u64) -> Vec<SpaceId> {
        let show = request::Body::Show(request::Show {
            checkpoint: format!("{job}@{generation}"),
        });
        match self.nodes.ask(node, show, self.nodes.until()) {
            Ok(reply::Body::Detail(detail)) => detail
                .manifest
                .iter()
                .flat_map(|manifest| &manifest.spaces)
                .filter_map(|space| space.space_id().ok())
                .collect(),
            // Without a known parent CRIU sends everything, and the node compares.
            _ => Vec::new(),
        }
    }

    pub(super) fn sender(
        &self,
        node: &str,
        session: &[u8; 16],
        job: &str,
        adopt: Option<request::Adopt>,
    ) -> Result<DumpSender, control::Error> {
        let dump = message::request::Dump {
            session: session.to_vec(),
            job: job.to_owned(),
            adopt,
            ..message::request::Dump::default()
        };
        DumpSender::open(&self.nodes.network, node, dump, self.nodes.until())
            .map_err(|error| refusal(&error))
    }

    /// Sends the small images and has the node seal the session, if `may_commit` lets it.
    pub(super) fn conclude(
        &self,
        mut sender: DumpSender,
        session: &str,
        images: &ImagesDir,
        served: &Served,
        may_commit: impl FnOnce() -> Result<(), control::Error>,
    ) -> Result<control::Checkpoint, control::Error> {
        let own_stats = images.has_own_stats()?;
        let names = images.small_images(|name| served.has(name))?;
        images::check_count(names.len())?;
        for name in names {
            if name == "stats-dump" && !own_stats {
                continue;
            }
            images::send(images, &name, &mut sender)?;
        }
        let until = self.nodes.until();
        sender.prepare(until).map_err(|error| refusal(&error))?;
        may_commit()?;
        // The node decides everything else.
        let commit = message::Commit {
            session: session.to_owned(),
            ..message::Commit::default()
        };
        match sender.commit(&commit, self.nodes.until()) {
            Ok(committed) => committed
                .checkpoint
                .ok_or_else(|| odd_answer(sender.node())),
            Err(PeerError::Refused { error, .. }) => Err(error),
            // Only the answer may be lost: then it is listed.
            Err(error) => match self.listed(session) {
                Ok(Some(record)) if record.generation > 0 => Ok(record),
                _ => Err(NodesError::SealUnanswered(error).into()),
            },
        }
    }

    /// Returns the checkpoint of a session, as the nodes list it.
    fn listed(&self, session: &str) -> Result<Option<control::Checkpoint>, control::Error> {
        let mut list = request::List::default();
        loop {
            let listed = self.list(&list)?;
            let mut records = listed.checkpoints.into_iter();
            let found = records.find(|record| record.session == session && !session.is_empty());
            if found.is_some() || listed.next.is_empty() {
                return Ok(found);
            }
            list.after = listed.next;
        }
    }

    /// Seals a session that is not under way here: it may be sealed already, or parked.
    pub(super) fn seal_again(
        &self,
        id: &str,
        images: OwnedFd,
    ) -> Result<control::Checkpoint, control::Error> {
        let Some(found) = self.listed(id)? else {
            return Err(DumpError::NotFound {
                session: id.to_owned(),
            }
            .into());
        };
        if found.generation > 0 {
            return Ok(found);
        }
        let adopt = request::Adopt {
            session: id.to_owned(),
            job: found.job,
            ..request::Adopt::default()
        };
        self.adopt(adopt, images)
    }
}
