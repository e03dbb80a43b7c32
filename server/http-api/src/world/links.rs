//! Bandwidths of a node's links to others, looked up by the other node's number.

use std::collections::BTreeMap;

use permafrost_scheduling::NodeId;
use permafrost_scheduling::estimator::SizedRates;

/// Bandwidths of one node's links.
#[derive(Clone, Debug, Default)]
pub(crate) struct Links {
    /// Bandwidths, sorted by the other node's name.
    named: Vec<(String, SizedRates)>,
    /// Node numbers and indexes into `named` of the links to nodes of the snapshot that have been measured, sorted
    /// by number.
    numbered: Vec<(NodeId, usize)>,
}

impl Links {
    /// Creates the links; `number` returns the number of a node of the snapshot.
    pub(super) fn new(
        links: BTreeMap<String, SizedRates>,
        number: impl Fn(&str) -> Option<NodeId>,
    ) -> Self {
        let named: Vec<_> = links.into_iter().collect();
        let measured =
            (named.iter().enumerate()).filter(|(_, (_, rates))| rates.sustained().known().is_ok());
        let mut numbered: Vec<_> = measured
            .filter_map(|(place, (name, _))| Some((number(name)?, place)))
            .collect();
        numbered.sort_unstable();
        Self { named, numbered }
    }

    /// Returns the bandwidth to one node, if it was measured. O(log links).
    pub(super) fn to(&self, node: NodeId) -> Option<&SizedRates> {
        let by_number = |(number, _): &(NodeId, usize)| *number;
        let found = self.numbered.binary_search_by_key(&node, by_number).ok()?;
        let (_, place) = self.numbered.get(found)?;
        self.named.get(*place).map(|(_, rates)| rates)
    }

    /// Returns all links, by name.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&str, &SizedRates)> {
        self.named
            .iter()
            .map(|(name, rates)| (name.as_str(), rates))
    }
}
