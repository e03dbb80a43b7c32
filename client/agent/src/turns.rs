//! Admission to the queues of nodes, and reservations.

use std::time::{Duration, Instant};

use permafrost_protocol::control::{self, reply, request};

use super::backend::Remote;
use super::nodes::odd_answer;
use crate::error::NodesError;
use crate::host::Waits;

/// Shortest pause between two requests for a dump's admission.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

impl Remote {
    /// Opens a session on a node. A request that has others before it keeps its place under a token, with which
    /// it is repeated: it waits for that node's queue, so it stays with that node.
    pub(super) fn await_turn(
        &self,
        mut open: request::Open,
        waits: &mut dyn Waits,
    ) -> Result<(String, control::SessionOpened), control::Error> {
        let mut next = SHORTEST_PAUSE;
        let (node, mut answer) = self.nodes.ask_any(&request::Body::Open(open.clone()))?;
        loop {
            let waiting = match answer {
                reply::Body::SessionOpened(opened) => return Ok((node, opened)),
                reply::Body::Progress(control::Progress {
                    waiting: Some(waiting),
                    ..
                }) => waiting,
                _ => return Err(odd_answer(&node)),
            };
            open.reservation.clone_from(&waiting.token);
            waits.waits(&control::Waiting {
                token: String::new(),
                ..waiting.clone()
            });
            std::thread::sleep(next);
            if waits.is_gone() {
                let cancel = request::CancelReservation {
                    token: waiting.token,
                    node: String::new(),
                };
                let body = request::Body::CancelReservation(cancel);
                // The place also lapses by itself.
                let _ = self.nodes.ask(&node, body, self.nodes.until());
                return Err(NodesError::CallerGone.into());
            }
            let body = request::Body::Open(open.clone());
            let asked = Instant::now();
            answer = self.nodes.ask(&node, body, self.nodes.until())?;
            next = pause(asked.elapsed());
        }
    }

    /// Reserves a place; a node that this agent does not know is asked through one that it does.
    pub(super) fn reserve_on_node(
        &self,
        reserve: &request::Reserve,
    ) -> Result<control::Reserved, control::Error> {
        let (node, answer) = if self.nodes.knows(&reserve.node) {
            // A node that is in no cluster does not know its name.
            let own = request::Reserve {
                node: String::new(),
                ..reserve.clone()
            };
            let body = request::Body::Reserve(own);
            let answer = self.nodes.ask(&reserve.node, body, self.nodes.until())?;
            (reserve.node.clone(), answer)
        } else {
            self.nodes
                .ask_any(&request::Body::Reserve(reserve.clone()))?
        };
        match answer {
            reply::Body::Reserved(reserved) => Ok(control::Reserved {
                node: if reserved.node.is_empty() {
                    node
                } else {
                    reserved.node
                },
                ..reserved
            }),
            _ => Err(odd_answer(&node)),
        }
    }

    /// Gives up a place on the node that has it.
    pub(super) fn cancel_on_node(
        &self,
        cancel: &request::CancelReservation,
    ) -> Result<(), control::Error> {
        let mut refused = control::Error::from(NodesError::NoNode);
        for node in self.nodes.in_order() {
            if self.nodes.knows(&cancel.node) && node != cancel.node {
                continue;
            }
            let named = if node == cancel.node {
                ""
            } else {
                &cancel.node
            };
            let body = request::Body::CancelReservation(request::CancelReservation {
                token: cancel.token.clone(),
                node: named.to_owned(),
            });
            match (self.nodes).ask_if_reachable(&node, body, self.nodes.until()) {
                Ok(reply::Body::Done(_)) => return Ok(()),
                Ok(_) => return Err(odd_answer(&node)),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }
}

/// Returns the pause until the node is asked again. A node that held the request for a while does so again; a
/// node that holds too many is to be spared.
fn pause(held: Duration) -> Duration {
    if held >= LONGEST_PAUSE {
        SHORTEST_PAUSE
    } else {
        LONGEST_PAUSE
    }
}
