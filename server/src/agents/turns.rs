//! Admission of agents' dumps, and places in the queues that peers reserve.
//!
//! A request by QUIC has one reply, and the node does not notice when the caller disconnects. So an agent whose dump
//! cannot begin is answered at once, with the state of the queue and a token under which its place is kept until it
//! asks again. That request is answered when the dump is admitted, or within [`HOLD`].

use std::sync::atomic::Ordering;
use std::time::Duration;

use permafrost_identity::{Peer, Role};
use permafrost_metering::queues::{
    Admission, AdmittedTransfer, Direction, Entered, Owner, Reservations,
};
use permafrost_protocol::control::{self, request};
use permafrost_store::StoreError;

use super::{Agents, name_of};
use crate::error::RequestError;

/// Longest time for which a request of an agent is held before it is answered.
const HOLD: Duration = Duration::from_secs(1);

/// Number of agents that wait for an answer at most: each takes a conversation and a thread. Others are answered at
/// once, and pause before they ask again.
const MAX_HELD: usize = 64;

/// Result of a request for admission of an agent's dump.
pub(super) enum Admitted {
    /// The dump may begin.
    Begins(Option<AdmittedTransfer>),
    /// The agent has to ask again.
    Later(control::Waiting),
}

impl Agents {
    /// Waits for the admission of an agent's dump, within bounds.
    pub(super) fn admit(&self, admission: &Admission) -> Result<Admitted, StoreError> {
        let Some((queues, _)) = &self.queues else {
            return Ok(Admitted::Begins(None));
        };
        let held = self.held.fetch_add(1, Ordering::Relaxed);
        let comes_again = admission.token.is_some();
        let patience = if comes_again && held < MAX_HELD {
            HOLD
        } else {
            Duration::ZERO
        };
        let entered = queues.enter_within(Direction::Write, admission, patience);
        self.held.fetch_sub(1, Ordering::Relaxed);
        match entered? {
            Entered::Turn(turn) => Ok(Admitted::Begins(Some(turn))),
            Entered::Later(waiting) => Ok(Admitted::Later(waiting)),
        }
    }

    /// Takes a slot for a dump whose task is frozen already.
    pub(super) fn runs(&self, bytes: u64) -> Option<AdmittedTransfer> {
        let (queues, _) = self.queues.as_ref()?;
        Some(queues.run(Direction::Write, bytes))
    }

    /// Returns the status of this node's queues, or an empty list if it has none.
    pub(super) fn queues_status(&self) -> Vec<control::QueueStatus> {
        let queues = self.queues.as_ref();
        queues.map_or_else(Vec::new, |(queues, _)| queues.status())
    }

    /// Reserves a place in this node's queue. A node asks on behalf of its own caller.
    pub(super) fn reserve(
        &self,
        peer: &Peer,
        reserve: &request::Reserve,
    ) -> Result<control::Reserved, control::Error> {
        let reservations = self.reservations()?;
        if peer.role() == Role::Node {
            // So a request never goes round in circles.
            return reservations.reserve_here(Owner::trusted(), reserve);
        }
        let reserve = request::Reserve {
            namespace: charged(peer, reserve)?,
            ..reserve.clone()
        };
        reservations.reserve(Owner::named(&name_of(peer)), &reserve)
    }

    /// Cancels a reservation. Any caller that has its token may do so.
    pub(super) fn cancel_reservation(
        &self,
        cancel: &request::CancelReservation,
    ) -> Result<(), control::Error> {
        self.reservations()?.cancel(cancel)
    }

    fn reservations(&self) -> Result<&Reservations, control::Error> {
        let queues = self.queues.as_ref();
        queues
            .map(|(_, reservations)| &**reservations)
            .ok_or_else(|| RequestError::NoQueues.into())
    }
}

/// Returns the namespace whose quota a peer's reservation counts in: the one that the request names, or the peer's
/// only one. A peer of all namespaces need not name any.
fn charged(peer: &Peer, reserve: &request::Reserve) -> Result<String, control::Error> {
    let own = peer.namespaces();
    if !reserve.namespace.is_empty() || own.is_all() {
        return Ok(reserve.namespace.clone());
    }
    own.only().map(str::to_owned).ok_or_else(|| {
        RequestError::NoNamespace {
            role: peer.role(),
            peer: peer.name().to_owned(),
        }
        .into()
    })
}
