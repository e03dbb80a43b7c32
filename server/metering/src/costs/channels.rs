//! The channels that a node measures of itself, as the estimator numbers them.

use std::collections::BTreeMap;

use permafrost_scheduling::NodeId;
use permafrost_scheduling::estimator::{Channel, Direction, Tier};

/// Transfers that are not compared with each other, as other things rule their speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Lane {
    /// By itself: a restore, or a dump that stores what it moves, as the medium takes it.
    Whole,
    /// By itself: a dump that is compared with the checkpoint before it.
    Compared,
    /// As `Whole`, until the copies on other nodes were durable, too.
    WholeCopied,
    /// As `Compared`, until the copies were durable, too.
    ComparedCopied,
    /// What all transfers came to that ran at the same time: what the node can do at most.
    Together,
    /// The medium alone: what a probe wrote, what a scrub read. Counts where no dump or restore does.
    Probed,
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
    pub(super) const READ: [Self; 3] = [Self::Whole, Self::Together, Self::Probed];

    /// Of dumps of this kind.
    pub(super) const fn of_dump(compared: bool, copied: bool) -> Self {
        match (compared, copied) {
            (false, false) => Self::Whole,
            (true, false) => Self::Compared,
            (false, true) => Self::WholeCopied,
            (true, true) => Self::ComparedCopied,
        }
    }

    /// The channel. Within this node the estimator's number of the node tells the lanes apart.
    pub(super) const fn channel(self, direction: Direction) -> Channel {
        let number = match self {
            Self::Whole => 0,
            Self::Compared => 1,
            Self::WholeCopied => 2,
            Self::ComparedCopied => 3,
            Self::Together => 4,
            Self::Probed => 5,
        };
        Channel::Medium {
            node: NodeId(number),
            tier: Tier::Named(0),
            direction,
        }
    }
}

/// Most peers whose links are measured: a cluster has fewer nodes.
const MAX_PEERS: usize = 1024;

/// Numbers of peers.
#[derive(Clone, Debug, Default)]
pub(super) struct Peers {
    by_name: BTreeMap<String, NodeId>,
}

impl Peers {
    /// The link between this node and a peer, either way; `None` when there are too many.
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

    /// All that were ever measured, by name.
    pub(super) fn links(&self) -> impl Iterator<Item = (&str, Channel)> {
        let links = self.by_name.iter();
        links.map(|(name, number)| (name.as_str(), link_to(*number)))
    }

    /// The link, if it was ever measured.
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
            .map(|lane| lane.channel(Direction::Write))
            .into();
        channels.extend(Lane::READ.map(|lane| lane.channel(Direction::Read)));
        for peer in ["a", "b", "c"] {
            channels.extend(peers.link(peer));
        }
        let different: HashSet<_> = channels.iter().collect();
        assert_eq!((different.len(), channels.len()), (12, 12));
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
