//! Asks other nodes for their clocks, for people to see: nothing is decided by a wall clock.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_protocol::control::{NodeProbe, RegistryMember};
use permafrost_protocol::wire::message::{reply, request};
use permafrost_store::clock::unix_ms;
use permafrost_transport::peer::Network;

use super::inventory::Inventories;
use super::nodes::LiveNode;
use super::registry::EtcdRegistry;

/// Longest time for one node to answer: it does so from memory.
const ANSWER: Duration = Duration::from_secs(2);

/// Longest time for all nodes together.
const ALL: Duration = Duration::from_secs(10);

/// Maximum number of nodes that are asked at once.
const AT_ONCE: usize = 32;

/// Time for which the answers are given to further callers: however many ask, each node is asked once in it.
const KEPT: Duration = Duration::from_secs(3);

/// Answers of the nodes and of the registry's members.
#[derive(Clone, Debug, Default)]
pub(crate) struct Probed {
    /// Nodes by name.
    pub(crate) nodes: Vec<(String, NodeProbe)>,
    pub(crate) registry: Vec<RegistryMember>,
}

/// The last answers. Callers that come while nodes are asked wait for those answers.
#[derive(Debug, Default)]
pub(crate) struct LastProbe(Mutex<Option<(Instant, Probed)>>);

impl LastProbe {
    /// Asks the nodes and the members of the registry, or returns answers that are a moment old. Blocks.
    pub(crate) fn get(
        &self,
        nodes: &[LiveNode],
        inventories: &dyn Inventories,
        registry: &EtcdRegistry,
    ) -> Probed {
        let mut last = self.0.lock();
        if let Some((at, probed)) = &*last
            && at.elapsed() < KEPT
        {
            return probed.clone();
        }
        let probed = Probed {
            nodes: ask_all(nodes, inventories),
            registry: registry.members().unwrap_or_else(|error| {
                vec![RegistryMember {
                    error: error.to_string(),
                    ..RegistryMember::default()
                }]
            }),
        };
        *last = Some((Instant::now(), probed.clone()));
        probed
    }
}

fn ask_all(nodes: &[LiveNode], inventories: &dyn Inventories) -> Vec<(String, NodeProbe)> {
    let begun = Instant::now();
    let failed = |why: &str| NodeProbe {
        error: why.to_owned(),
        ..NodeProbe::default()
    };
    let mut all = Vec::with_capacity(nodes.len());
    for some in nodes.chunks(AT_ONCE) {
        let names = some.iter().map(|node| node.facts.name.clone());
        if begun.elapsed() > ALL {
            all.extend(names.map(|name| (name, failed("not asked: others took too long"))));
            continue;
        }
        let answers: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = some
                .iter()
                .map(|node| scope.spawn(|| inventories.probe(&node.facts.name)))
                .collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        });
        all.extend(names.zip(answers).map(|(name, answer)| {
            let answer = answer.unwrap_or_else(|_| failed("asking it failed"));
            (name, answer)
        }));
    }
    all
}

/// Asks a node for its time. The moment at which it read its clock is taken to be the middle of the round trip.
pub(crate) fn of_peer(network: &Network, node: &str) -> NodeProbe {
    // The first question may have to wait for the connection.
    let ping = || request::Body::Ping(request::Ping {});
    if let Err(error) = network.call(node, ping(), Instant::now() + ANSWER) {
        return NodeProbe {
            error: error.to_string(),
            ..NodeProbe::default()
        };
    }
    let (asked, asked_ms) = (Instant::now(), unix_ms());
    let answer = network.call(node, ping(), Instant::now() + ANSWER);
    let round_trip = asked.elapsed();
    let round_trip_us = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
    match answer {
        Ok(reply::Body::Done(done)) => NodeProbe {
            clock_ahead_ms: ahead(done.unix_ms, asked_ms, round_trip),
            round_trip_us,
            error: String::new(),
        },
        Ok(_) => NodeProbe {
            error: "it answers something else than it was asked".to_owned(),
            ..NodeProbe::default()
        },
        Err(error) => NodeProbe {
            error: error.to_string(),
            ..NodeProbe::default()
        },
    }
}

fn ahead(there_ms: u64, asked_ms: u64, round_trip: Duration) -> Option<i64> {
    let half_ms = i64::try_from(round_trip.as_millis() / 2).ok()?;
    let there = i64::try_from(there_ms).ok().filter(|there| *there > 0)?;
    let here = i64::try_from(asked_ms).ok()?.checked_add(half_ms)?;
    there.checked_sub(here)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_the_round_trip_counts() {
        let trip = Duration::from_millis(10);
        assert_eq!(ahead(1_005, 1_000, trip), Some(0));
        assert_eq!(ahead(8_005, 1_000, trip), Some(7_000));
        assert_eq!(ahead(505, 1_000, trip), Some(-500));
        // An older version does not say.
        assert_eq!(ahead(0, 1_000, trip), None);
    }
}
