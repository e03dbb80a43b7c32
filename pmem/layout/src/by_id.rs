//! A map by checkpoint id that never stops to move all of its entries, as a growing hash table does: with a million
//! entries that takes half a second, for which every seal would wait.

use std::collections::BTreeMap;

use crate::ids::CheckpointId;

/// Number of parts. A million entries are some 250 in each.
const PARTS: usize = 4096;

/// Map from ids to values. Ids are random, so the parts are of about one size; whatever the ids, no operation takes
/// more than O(log n).
pub struct ById<V> {
    parts: Vec<BTreeMap<CheckpointId, V>>,
    len: usize,
}

impl<V> Default for ById<V> {
    fn default() -> Self {
        Self {
            parts: (0..PARTS).map(|_| BTreeMap::new()).collect(),
            len: 0,
        }
    }
}

impl<V> ById<V> {
    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the value of an id.
    #[must_use]
    pub fn get(&self, id: &CheckpointId) -> Option<&V> {
        self.parts[part_of(id)].get(id)
    }

    /// Returns the value of an id, to be changed.
    pub fn get_mut(&mut self, id: &CheckpointId) -> Option<&mut V> {
        self.parts[part_of(id)].get_mut(id)
    }

    /// Returns true if there is an entry of that id.
    #[must_use]
    pub fn contains_key(&self, id: &CheckpointId) -> bool {
        self.get(id).is_some()
    }

    /// Adds an entry; returns the value that it replaces.
    pub fn insert(&mut self, id: CheckpointId, value: V) -> Option<V> {
        let before = self.parts[part_of(&id)].insert(id, value);
        self.len += usize::from(before.is_none());
        before
    }

    /// Removes an entry, and returns its value.
    pub fn remove(&mut self, id: &CheckpointId) -> Option<V> {
        let removed = self.parts[part_of(id)].remove(id);
        self.len -= usize::from(removed.is_some());
        removed
    }

    /// Returns the entries, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&CheckpointId, &V)> {
        self.parts.iter().flatten()
    }
}

fn part_of(id: &CheckpointId) -> usize {
    let [low, high, ..] = id.to_bytes();
    usize::from(u16::from_le_bytes([low, high])) % PARTS
}

impl<V> FromIterator<(CheckpointId, V)> for ById<V> {
    fn from_iter<I: IntoIterator<Item = (CheckpointId, V)>>(entries: I) -> Self {
        let mut all = Self::default();
        for (id, value) in entries {
            all.insert(id, value);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_counted_and_replaced() {
        let id = |n: u32| CheckpointId::new(u128::from(n) << 7);
        let mut map: ById<u32> = (0..10_000).map(|n| (id(n), n)).collect();
        assert_eq!((map.insert(id(5), 50), map.len()), (Some(5), 10_000));
        assert_eq!((map.remove(&id(7)), map.remove(&id(7))), (Some(7), None));
        if let Some(value) = map.get_mut(&id(9)) {
            *value = 90;
        }
        assert_eq!(map.len(), map.iter().count());
        assert_eq!(
            [5, 7, 9, 11].map(|n| map.get(&id(n)).copied()),
            [Some(50), None, Some(90), Some(11)]
        );
        assert!(!map.contains_key(&id(7)));
    }
}
