//! Places in the queues of this node, and those it has got for others in the queues of other nodes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use permafrost_protocol::control::{self, ErrorCode, reply, request};

use super::{Direction, Queues, QueuesError};

/// The way to the other nodes of a cluster.
pub trait Others: Send + Sync {
    /// Asks a node. Blocks.
    ///
    /// # Errors
    /// It is not there, or refuses.
    fn ask(&self, node: &str, body: request::Body) -> Result<reply::Body, control::Error>;
}

/// Keeps places.
pub struct Reservations {
    queues: Arc<Queues>,
    /// This node's name; empty on a single machine.
    node: String,
    others: Option<Box<dyn Others>>,
    /// Size of this node's region, bytes: no larger dump fits.
    capacity_bytes: u64,
    /// Where a token is from, and until when, so that it can be given up by itself.
    elsewhere: Mutex<HashMap<String, (String, Instant)>>,
}

impl Reservations {
    /// On a single machine.
    #[must_use]
    pub fn here(queues: Arc<Queues>, capacity_bytes: u64) -> Self {
        Self {
            queues,
            capacity_bytes,
            node: String::new(),
            others: None,
            elsewhere: Mutex::default(),
        }
    }

    /// On a node of a cluster.
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

    /// Keeps a place, here or on the node that is named.
    ///
    /// # Errors
    /// No such node; it is not there; too many places are kept there.
    pub fn reserve(&self, reserve: &request::Reserve) -> Result<control::Reserved, control::Error> {
        if self.is_here(&reserve.node) {
            return self.reserve_here(reserve);
        }
        let others = self.others(&reserve.node)?;
        let body = request::Body::Reserve(reserve.clone());
        let reply::Body::Reserved(reserved) = others.ask(&reserve.node, body)? else {
            return Err(odd(&reserve.node));
        };
        let now = Instant::now();
        let lapses = now.checked_add(Duration::from_millis(reserved.lapses_in_ms));
        let mut elsewhere = self.elsewhere();
        elsewhere.retain(|_, (_, lapses)| *lapses > now);
        elsewhere.insert(
            reserved.token.clone(),
            (reserve.node.clone(), lapses.unwrap_or(now)),
        );
        Ok(reserved)
    }

    /// Keeps a place in this node's own queue, whoever asks.
    ///
    /// # Errors
    /// The request names another node; no such queue; more than the region holds; too many places are kept.
    pub fn reserve_here(
        &self,
        reserve: &request::Reserve,
    ) -> Result<control::Reserved, control::Error> {
        if !self.is_here(&reserve.node) {
            return Err(no_node(&reserve.node));
        }
        let kept = self.check_size(reserve);
        let kept = kept.and_then(|()| self.queues.reserve(reserve));
        let reserved = kept.map_err(|error| error.to_reply())?;
        tracing::debug!(direction = reserved.direction, "a place is reserved");
        Ok(control::Reserved {
            node: self.node.clone(),
            ..reserved
        })
    }

    /// Gives a place up, here or where it is.
    ///
    /// # Errors
    /// There is none with that token; its node is not there.
    pub fn cancel(&self, cancel: &request::CancelReservation) -> Result<(), control::Error> {
        let known = self.elsewhere().remove(&cancel.token);
        let node = match known {
            Some((node, _)) if cancel.node.is_empty() => node,
            _ => cancel.node.clone(),
        };
        if self.is_here(&node) {
            let cancelled = self.queues.cancel(&cancel.token);
            return cancelled.map_err(|error| error.to_reply());
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
        // What is read may well be more: zero pages take no room.
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

    fn elsewhere(&self) -> MutexGuard<'_, HashMap<String, (String, Instant)>> {
        let locked = self.elsewhere.lock();
        locked.unwrap_or_else(PoisonError::into_inner)
    }
}

fn no_node(node: &str) -> control::Error {
    control::Error {
        code: ErrorCode::NotFound.into(),
        message: format!("node {node} not found"),
        hint: "`permafrost node ls` lists the nodes".to_owned(),
    }
}

fn odd(node: &str) -> control::Error {
    control::Error {
        code: ErrorCode::Internal.into(),
        message: format!("{node} answers something else than it was asked"),
        hint: "use the same version of Permafrost everywhere".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queues::QueuesOptions;

    #[test]
    fn nothing_is_reserved_that_the_region_does_not_hold() {
        let queues = Queues::new(QueuesOptions::default());
        let reservations = Reservations::here(queues, 1 << 30);
        let reserve = |bytes| {
            reservations.reserve(&request::Reserve {
                direction: "write".to_owned(),
                bytes,
                ..request::Reserve::default()
            })
        };
        reserve(1 << 30).unwrap();
        let refused = reserve(4 << 30).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::NoSpace);
        assert!(refused.message.contains("1073741824"), "{refused:?}");
    }
}
