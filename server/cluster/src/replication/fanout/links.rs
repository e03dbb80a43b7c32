//! Measures the links to other nodes: from the copies of dumps, and by probes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_metering::costs::{self, Costs, LINK_PROBE_BYTES};
use permafrost_protocol::manifest::SpaceType;
use permafrost_protocol::wire::message::request;
use permafrost_transport::peer::{DumpSender, PeerError};

use super::{FanOut, OPENING, Shared};
use crate::MemberState;

/// Divisor for the share of a dump's time spent waiting for a link from which on the link was the bottleneck: a
/// quarter.
const LINK_SHARE: u32 = 4;

/// Longest time of a probe: a gigabit link needs a tenth of a second.
const PROBE: Duration = Duration::from_secs(10);

/// Bytes of a probe's pages that are sent at once.
const STEP: usize = 1 << 20;

/// Divisor for the free part of a node's region below which it is not probed: an eighth.
const ROOM: u64 = 8;

/// Measurements of the links of one dump.
#[derive(Clone)]
pub(super) struct Links {
    pub(super) costs: Arc<Costs>,
    pub(super) bytes: u64,
    /// Time from the first byte to CLOSE.
    pub(super) elapsed: Duration,
    /// Nodes, and the time that the dump waited for each.
    pub(super) waited: Arc<Vec<(String, Duration)>>,
}

impl Links {
    /// Records that the copy on `node` became durable `closing` after CLOSE was sent.
    pub(super) fn closed(&self, node: &str, closing: Duration) {
        let waited = self.waited.iter().find(|(other, _)| other == node);
        let held_up = waited.map_or(Duration::ZERO, |(_, waited)| *waited) + closing;
        let elapsed = self.elapsed + closing;
        if held_up * LINK_SHARE >= elapsed {
            self.costs.copied(node, self.bytes, elapsed);
        } else {
            // CRIU was slower than the link.
            self.costs.copied_at_least(node, self.bytes, elapsed);
        }
    }
}

/// Probes a link with a dump that is given up: its pages are written durably into the other node's region, and
/// are free again.
impl costs::Links for FanOut {
    fn peers(&self) -> Vec<String> {
        let shared = &self.shared;
        let live = shared.view.live().into_iter();
        live.filter(|node| {
            let facts = &node.facts;
            facts.name != shared.node
                && node.state == MemberState::Active
                && facts.takes_copies()
                && facts.queued_bytes == 0
                && facts.free_bytes > facts.capacity_bytes / ROOM
        })
        .map(|node| node.facts.name)
        .collect()
    }

    fn probe(&self, peer: &str) -> Result<Duration, String> {
        self.shared.probe(peer).map_err(|error| error.to_string())
    }
}

impl Shared {
    fn probe(&self, node: &str) -> Result<Duration, PeerError> {
        let dump = request::Dump {
            session: uuid::Uuid::new_v4().as_bytes().to_vec(),
            ..request::Dump::default()
        };
        let mut sender = DumpSender::open(&self.network, node, dump, Instant::now() + OPENING)?;
        let pages = costs::noise(STEP);
        let process = u16::try_from(i32::from(SpaceType::Process)).unwrap_or_default();
        let since = Instant::now();
        sender.space(process, 1, 1)?;
        for step in 0..LINK_PROBE_BYTES / STEP as u64 {
            sender.pages(step * (STEP as u64 / 4096), 0, &pages)?;
        }
        sender.close(since + PROBE)?;
        Ok(since.elapsed())
    }
}
