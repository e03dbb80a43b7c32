//! Names of nodes and their numbers.

use std::collections::HashMap;
use std::sync::Arc;

use permafrost_scheduling::NodeId;

/// The nodes of a snapshot.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    ids: HashMap<Arc<str>, NodeId>,
    /// Names and numbers, sorted by name.
    order: Vec<(Arc<str>, NodeId)>,
}

impl Names {
    pub(super) fn new(ids: impl Iterator<Item = (Arc<str>, NodeId)>) -> Self {
        let ids: HashMap<Arc<str>, NodeId> = ids.collect();
        let mut order: Vec<_> = (ids.iter())
            .map(|(name, id)| (Arc::clone(name), *id))
            .collect();
        order.sort_unstable();
        Self { ids, order }
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn id(&self, name: &str) -> Option<NodeId> {
        self.ids.get(name).copied()
    }

    pub(crate) fn in_order(&self) -> impl Iterator<Item = (&str, NodeId)> {
        self.order.iter().map(|(name, id)| (name.as_ref(), *id))
    }

    /// Returns the nodes whose names come after this one.
    pub(crate) fn after(&self, name: &str) -> impl Iterator<Item = (&str, NodeId)> {
        let first = self
            .order
            .partition_point(|(other, _)| other.as_ref() <= name);
        self.in_order().skip(first)
    }
}

/// Numbers for names: a name keeps its number as long as it exists, from one snapshot to the next.
#[derive(Debug)]
pub(super) struct Numbers<K> {
    of: HashMap<K, u32>,
}

impl<K> Default for Numbers<K> {
    fn default() -> Self {
        Self { of: HashMap::new() }
    }
}

impl<K: std::hash::Hash + Eq + Clone> Numbers<K> {
    pub(super) fn number<Q>(&mut self, name: &Q) -> u32
    where
        K: std::borrow::Borrow<Q>,
        Q: std::hash::Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if let Some(number) = self.of.get(name) {
            return *number;
        }
        // Numbers are consecutive, and never reused: `Builder` decides when to begin anew.
        let number = u32::try_from(self.of.len()).unwrap_or(u32::MAX);
        self.of.insert(name.to_owned(), number);
        number
    }

    /// Returns the number of a name that has one.
    pub(super) fn get<Q>(&self, name: &Q) -> Option<u32>
    where
        K: std::borrow::Borrow<Q>,
        Q: std::hash::Hash + Eq + ?Sized,
    {
        self.of.get(name).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.of.len()
    }
}
