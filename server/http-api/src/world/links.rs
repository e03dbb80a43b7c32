//! What a node tells of its ways to others, found by number.

use std::collections::BTreeMap;

use permafrost_scheduling::NodeId;
use permafrost_scheduling::estimator::SizedRates;

/// Bandwidths of one node's links.
#[derive(Clone, Debug, Default)]
pub(crate) struct Links {
    /// By name.
    named: Vec<(String, SizedRates)>,
    /// Places of those among them that are nodes of the snapshot and have been measured, by number.
    numbered: Vec<(NodeId, usize)>,
}

impl Links {
    /// `number` knows the nodes of the snapshot.
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

    /// To one node, if that was measured. O(log links).
    pub(super) fn to(&self, node: NodeId) -> Option<&SizedRates> {
        let by_number = |(number, _): &(NodeId, usize)| *number;
        let found = self.numbered.binary_search_by_key(&node, by_number).ok()?;
        let (_, place) = self.numbered.get(found)?;
        self.named.get(*place).map(|(_, rates)| rates)
    }

    /// All, by name.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&str, &SizedRates)> {
        self.named
            .iter()
            .map(|(name, rates)| (name.as_str(), rates))
    }
}
