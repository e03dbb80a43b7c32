//! Reservations in the queues of this node, and those made through it in the queues of other nodes.
//!
//! One caller holds at most a share of the reservations of a queue, and a namespace as many as its quota
//! allows.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use permafrost_agent::remote::OtherAnswer;
use permafrost_protocol::control::{self, reply, request};
use permafrost_quotas::{QuotaUsage, Quotas};

use super::{Direction, Queues, QueuesError};

/// Maximum number of reservations of one caller: a quarter of a queue's default maximum.
const MAX_OF_ONE: usize = 64;

/// Connection to the other nodes of a cluster.
pub trait Others: Send + Sync {
    /// Sends a request to a node. Blocks.
    ///
    /// # Errors
    /// The node cannot be reached, or refuses.
    fn ask(&self, node: &str, body: request::Body) -> Result<reply::Body, control::Error>;
}

/// Makes and cancels reservations.
pub struct Reservations {
    queues: Arc<Queues>,
    /// Name of this node; empty on a single machine.
    node: String,
    others: Option<Box<dyn Others>>,
    /// Size of this node's region, bytes: no larger dump fits.
    capacity_bytes: u64,
    /// Reservations that were made through this node, by token.
    kept: Mutex<HashMap<String, Kept>>,
    quotas: Arc<Quotas>,
}

/// A reservation that was made through this node.
struct Kept {
    /// Node with the queue; empty for this one.
    node: String,
    lapses: Instant,
    owner: Option<String>,
    namespace: String,
}

/// Caller that makes a reservation.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a>(Option<&'a str>);

impl<'a> Owner<'a> {
    /// Returns an owner whose reservations are limited; two owners with one name are the same.
    #[must_use]
    pub const fn named(name: &'a str) -> Self {
        Self(Some(name))
    }

    /// Returns an owner without a limit: root on this node, or another node, which limits its own callers.
    #[must_use]
    pub const fn trusted() -> Self {
        Self(None)
    }
}

impl Reservations {
    /// Creates the reservations of a single machine.
    #[must_use]
    pub fn here(queues: Arc<Queues>, capacity_bytes: u64) -> Self {
        Self {
            queues,
            capacity_bytes,
            node: String::new(),
            others: None,
            kept: Mutex::default(),
            quotas: Arc::default(),
        }
    }

    /// Sets the quotas that limit the reservations of namespaces.
    #[must_use]
    pub fn within(self, quotas: Arc<Quotas>) -> Self {
        Self { quotas, ..self }
    }

    /// Returns the number of reservations of a namespace.
    #[must_use]
    pub fn kept_for(&self, namespace: &str) -> u64 {
        let kept = self.kept();
        let own = kept.values().filter(|kept| kept.namespace == namespace);
        own.count() as u64
    }

    /// Creates the reservations of a node of a cluster.
    #[must_use]
    pub fn of_cluster(
        queues: Arc<Queues>,
        capacity_bytes: u64,
        node: &str,
        others: Box<dyn Others>,
    ) -> Self {
        Self {
            node: node.to_owned(),
            others: Some(others),
            ..Self::here(queues, capacity_bytes)
        }
    }

    /// Makes a reservation, here or on the named node.
    ///
    /// # Errors
    /// No such node; it is not there; too many places are kept there, or for this caller or namespace.
    pub fn reserve(
        &self,
        owner: Owner<'_>,
        reserve: &request::Reserve,
    ) -> Result<control::Reserved, control::Error> {
        if self.is_here(&reserve.node) {
            return self.reserve_here(owner, reserve);
        }
        self.check(owner, reserve)?;
        let others = self.others(&reserve.node)?;
        let body = request::Body::Reserve(reserve.clone());
        let reply::Body::Reserved(reserved) = others.ask(&reserve.node, body)? else {
            return Err(odd(&reserve.node));
        };
        self.keep(owner, reserve, &reserve.node, &reserved);
        Ok(reserved)
    }

    /// Checks that this caller and this namespace may have one more reservation.
    fn check(&self, owner: Owner<'_>, reserve: &request::Reserve) -> Result<(), control::Error> {
        let kept = self.kept();
        if let Some(name) = owner.0 {
            let own = kept
                .values()
                .filter(|kept| kept.owner.as_deref() == Some(name));
            if own.count() >= MAX_OF_ONE {
                return Err(QueuesError::TooManyOfOwner {
                    owner: name.to_owned(),
                    limit: MAX_OF_ONE,
                }
                .into());
            }
        }
        drop(kept);
        if reserve.namespace.is_empty() {
            return Ok(());
        }
        let namespace = &reserve.namespace;
        let quota = self.quotas.of(namespace);
        let used = QuotaUsage {
            reservations: self.kept_for(namespace),
            ..QuotaUsage::default()
        };
        let more = QuotaUsage {
            reservations: 1,
            ..QuotaUsage::default()
        };
        quota
            .check_priority(namespace, reserve.priority)
            .and_then(|()| quota.check(namespace, &used, &more))
            .map_err(control::Error::from)
    }

    fn keep(
        &self,
        owner: Owner<'_>,
        reserve: &request::Reserve,
        node: &str,
        reserved: &control::Reserved,
    ) {
        let now = Instant::now();
        let lapses = now.checked_add(Duration::from_millis(reserved.lapses_in_ms));
        let kept = Kept {
            node: node.to_owned(),
            lapses: lapses.unwrap_or(now),
            owner: owner.0.map(str::to_owned),
            namespace: reserve.namespace.clone(),
        };
        self.kept().insert(reserved.token.clone(), kept);
    }

    /// Makes a reservation in this node's own queue, for any caller.
    ///
    /// # Errors
    /// The request names another node; no such queue; more than the region holds; too many places are kept.
    pub fn reserve_here(
        &self,
        owner: Owner<'_>,
        reserve: &request::Reserve,
    ) -> Result<control::Reserved, control::Error> {
        if !self.is_here(&reserve.node) {
            return Err(no_node(&reserve.node));
        }
        self.check(owner, reserve)?;
        let kept = self.check_size(reserve);
        let kept = kept.and_then(|()| self.queues.reserve(reserve));
        let reserved = kept?;
        tracing::debug!(direction = reserved.direction, "a place is reserved");
        self.keep(owner, reserve, "", &reserved);
        Ok(control::Reserved {
            node: self.node.clone(),
            ..reserved
        })
    }

    /// Cancels a reservation, here or on its node.
    ///
    /// # Errors
    /// There is no reservation with that token; its node cannot be reached.
    pub fn cancel(&self, cancel: &request::CancelReservation) -> Result<(), control::Error> {
        let known = self.kept().remove(&cancel.token);
        let node = match known {
            Some(kept) if cancel.node.is_empty() => kept.node,
            _ => cancel.node.clone(),
        };
        if self.is_here(&node) {
            return Ok(self.queues.cancel(&cancel.token)?);
        }
        let there = request::CancelReservation {
            token: cancel.token.clone(),
            node: node.clone(),
        };
        let body = request::Body::CancelReservation(there);
        match self.others(&node)?.ask(&node, body)? {
            reply::Body::Done(_) => Ok(()),
            _ => Err(odd(&node)),
        }
    }

    fn check_size(&self, reserve: &request::Reserve) -> Result<(), QueuesError> {
        // A restore may well be larger: zero pages take no room.
        if reserve.bytes <= self.capacity_bytes || reserve.direction != Direction::Write.name() {
            return Ok(());
        }
        Err(QueuesError::TooLarge {
            bytes: reserve.bytes,
            capacity_bytes: self.capacity_bytes,
        })
    }

    fn is_here(&self, node: &str) -> bool {
        node.is_empty() || node == self.node
    }

    fn others(&self, node: &str) -> Result<&dyn Others, control::Error> {
        self.others.as_deref().ok_or_else(|| no_node(node))
    }

    /// Returns the current reservations: those that have lapsed, and on this node those that were taken up, are
    /// forgotten.
    fn kept(&self) -> MutexGuard<'_, HashMap<String, Kept>> {
        let mut kept = self.kept.lock();
        let now = Instant::now();
        kept.retain(|token, place| {
            place.lapses > now && (!place.node.is_empty() || self.queues.holds(token))
        });
        kept
    }
}

fn no_node(node: &str) -> control::Error {
    let node = node.to_owned();
    QueuesError::NoNode { node }.into()
}

fn odd(node: &str) -> control::Error {
    let node = node.to_owned();
    OtherAnswer { node }.into()
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::ErrorCode;

    use super::*;
    use crate::queues::QueuesOptions;

    #[test]
    fn nothing_is_reserved_that_the_region_does_not_hold() {
        let queues = Queues::new(QueuesOptions::default());
        let reservations = Reservations::here(queues, 1 << 30);
        let reserve = |bytes| {
            let reserve = request::Reserve {
                direction: "write".to_owned(),
                bytes,
                ..request::Reserve::default()
            };
            reservations.reserve(Owner::trusted(), &reserve)
        };
        reserve(1 << 30).unwrap();
        let refused = reserve(4 << 30).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::NoSpace);
        assert!(refused.message.contains("1073741824"), "{refused:?}");
    }
}
