//! Channels that a node measures of itself, as the estimator numbers them.

use std::collections::BTreeMap;

use permafrost_scheduling::NodeId;
use permafrost_scheduling::estimator::{Channel, Direction, MediumTier};

/// Class of transfers whose speed has the same limits. Transfers of different lanes are not compared with each
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Lane {
    /// A transfer that runs alone: a restore, or a dump that stores everything it moves, limited by the medium.
    Whole,
    /// A dump that runs alone and is compared with the checkpoint before it.
    Compared,
    /// Transfers of `Whole` with copies on other nodes, measured until the copies were durable, too.
    WholeCopied,
    /// Transfers of `Compared` with copies on other nodes, measured until the copies were durable, too.
    ComparedCopied,
    /// The sum of all transfers that ran at the same time: the maximum rate of the node.
    Together,
    /// The medium alone: bytes that a probe wrote, or a scrub read. Used where no dump or restore was measured.
    Probed,
    /// Pages that come back from an object store before a restore.
    Recalled,
    /// Pages that follow to the processes of a lazy restore.
    Lazy,
}

impl Lane {
    /// Lanes of dumps.
    #[cfg(test)]
    pub(super) const WRITE: [Self; 6] = [
        Self::Whole,
        Self::Compared,
        Self::WholeCopied,
        Self::ComparedCopied,
        Self::Together,
        Self::Probed,
    ];
    /// Lanes of restores.
    #[cfg(test)]
    pub(super) const READ: [Self; 5] = [
        Self::Whole,
        Self::Together,
        Self::Probed,
        Self::Recalled,
        Self::Lazy,
    ];

    /// Returns the lane of a dump of this kind.
    pub(super) const fn of_dump(compared: bool, copied: bool) -> Self {
        match (compared, copied) {
            (false, false) => Self::Whole,
            (true, false) => Self::Compared,
            (false, true) => Self::WholeCopied,
            (true, true) => Self::ComparedCopied,
        }
    }

    /// Returns the estimator's channel, of dumps that of a tier. Within this node the estimator's number of the node
    /// distinguishes the lanes.
    pub(super) const fn channel(self, direction: Direction, tier: u16) -> Channel {
        let number = match self {
            Self::Whole => 0,
            Self::Compared => 1,
            Self::WholeCopied => 2,
            Self::ComparedCopied => 3,
            Self::Together => 4,
            Self::Probed => 5,
            Self::Recalled => 6,
            Self::Lazy => return Channel::Lazy { node: NodeId(0) },
        };
        Channel::Medium {
            node: NodeId(number),
            tier: match (direction, self) {
                (_, Self::Recalled) => MediumTier::ObjectStore,
                (Direction::Write, _) => MediumTier::Named(tier),
                // Restores read from all tiers.
                (Direction::Read, _) => MediumTier::Named(0),
            },
            direction,
        }
    }
}

/// Maximum number of peers whose links are measured: a cluster has fewer nodes.
const MAX_PEERS: usize = 1024;

/// Numbers of peers.
#[derive(Clone, Debug, Default)]
pub(super) struct Peers {
    by_name: BTreeMap<String, NodeId>,
}

impl Peers {
    /// Returns the link between this node and a peer, for both directions; `None` when there are too many.
    pub(super) fn link(&mut self, peer: &str) -> Option<Channel> {
        if let Some(number) = self.by_name.get(peer) {
            return Some(link_to(*number));
        }
        if self.by_name.len() >= MAX_PEERS {
            return None;
        }
        let number = NodeId(u32::try_from(self.by_name.len()).ok()?.saturating_add(100));
        self.by_name.insert(peer.to_owned(), number);
        Some(link_to(number))
    }

    /// Returns all links that were ever measured, by the peer's name.
    pub(super) fn links(&self) -> impl Iterator<Item = (&str, Channel)> {
        let links = self.by_name.iter();
        links.map(|(name, number)| (name.as_str(), link_to(*number)))
    }

    /// Returns the link to a peer, if it was ever measured.
    pub(super) fn known(&self, peer: &str) -> Option<Channel> {
        self.by_name.get(peer).map(|number| link_to(*number))
    }
}

const fn link_to(number: NodeId) -> Channel {
    Channel::Link {
        // Numbers of peers begin at 100.
        from: NodeId(0),
        to: number,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_lanes_or_links_share_a_channel() {
        let mut peers = Peers::default();
        let mut channels: Vec<_> = Lane::WRITE
            .map(|lane| lane.channel(Direction::Write, 0))
            .into();
        channels.extend(Lane::READ.map(|lane| lane.channel(Direction::Read, 0)));
        for peer in ["a", "b", "c"] {
            channels.extend(peers.link(peer));
        }
        let different: HashSet<_> = channels.iter().collect();
        assert_eq!((different.len(), channels.len()), (14, 14));
        assert_eq!(peers.link("b"), peers.known("b"));
        assert_eq!(peers.known("d"), None);
        assert_eq!(peers.links().count(), 3);
    }

    #[test]
    fn the_number_of_peers_is_bounded() {
        let mut peers = Peers::default();
        for peer in 0..MAX_PEERS {
            assert!(peers.link(&peer.to_string()).is_some());
        }
        assert!(peers.link("one more").is_none());
        assert!(peers.link("7").is_some());
    }
}
