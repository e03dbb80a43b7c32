//! Tasks that wait for room, in the order in which they are to get it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::cost::TaskResources;
use crate::quantity::{Bytes, Moment};
use crate::{NodeId, TaskId};

/// Place of a task in the order; the least goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::policy) struct Key {
    /// Rank that counts most: a priority, a deadline.
    pub(in crate::policy) rank: i64,
    pub(in crate::policy) submitted: Moment,
    pub(in crate::policy) task: TaskId,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: Key,
    asks: TaskResources,
    bound: Option<NodeId>,
}

/// Waiting tasks, by what they ask for: there are few different requests, so that the first task of all that fit a
/// node is found among the first of each.
#[derive(Clone, Debug, Default)]
pub(in crate::policy) struct Waiting {
    entries: HashMap<TaskId, Entry>,
    shapes: BTreeMap<(u64, Bytes), BTreeSet<Key>>,
    bound: BTreeMap<NodeId, BTreeSet<Key>>,
    all: BTreeSet<Key>,
}

impl Waiting {
    /// Puts a task in; one that is `bound` fits that node alone.
    pub(in crate::policy) fn put(&mut self, key: Key, asks: TaskResources, bound: Option<NodeId>) {
        self.remove(key.task);
        match bound {
            Some(node) => self.bound.entry(node).or_default().insert(key),
            None => (self.shapes.entry((asks.cpu_millis, asks.memory)))
                .or_default()
                .insert(key),
        };
        self.all.insert(key);
        self.entries.insert(key.task, Entry { key, asks, bound });
    }

    pub(in crate::policy) fn remove(&mut self, task: TaskId) -> bool {
        let Some(entry) = self.entries.remove(&task) else {
            return false;
        };
        self.all.remove(&entry.key);
        match entry.bound {
            Some(node) => {
                if let Some(keys) = self.bound.get_mut(&node) {
                    keys.remove(&entry.key);
                    if keys.is_empty() {
                        self.bound.remove(&node);
                    }
                }
            }
            None => {
                let shape = (entry.asks.cpu_millis, entry.asks.memory);
                if let Some(keys) = self.shapes.get_mut(&shape) {
                    keys.remove(&entry.key);
                    if keys.is_empty() {
                        self.shapes.remove(&shape);
                    }
                }
            }
        }
        true
    }

    pub(in crate::policy) fn contains(&self, task: TaskId) -> bool {
        self.entries.contains_key(&task)
    }

    /// Returns the place of a waiting task.
    pub(in crate::policy) fn key(&self, task: TaskId) -> Option<Key> {
        Some(self.entries.get(&task)?.key)
    }

    /// Returns the node that a waiting task is bound to.
    pub(in crate::policy) fn bound(&self, task: TaskId) -> Option<NodeId> {
        self.entries.get(&task)?.bound
    }

    /// Returns all tasks in order.
    pub(in crate::policy) fn all(&self) -> impl DoubleEndedIterator<Item = Key> {
        self.all.iter().copied()
    }

    /// Returns the first task after `after` that `room` on `node` is enough for and that `admits`, which may refuse a
    /// task only if it refuses all that ask for as much and come later.
    pub(in crate::policy) fn first(
        &self,
        node: NodeId,
        room: TaskResources,
        after: Option<Key>,
        admits: impl Fn(TaskId) -> bool,
    ) -> Option<Key> {
        use std::ops::Bound::{Excluded, Unbounded};
        let start = after.map_or(Unbounded, Excluded);
        let mut best: Option<Key> = None;
        for (&(cpu_millis, memory), keys) in &self.shapes {
            if cpu_millis > room.cpu_millis {
                break;
            }
            if memory > room.memory {
                continue;
            }
            let first = match after {
                None => keys.first(),
                Some(_) => keys.range((start, Unbounded)).next(),
            };
            if let Some(first) = first.filter(|first| best.is_none_or(|best| **first < best))
                && admits(first.task)
            {
                best = Some(*first);
            }
        }
        let bound = self.bound.get(&node).into_iter();
        let bound = bound.flat_map(|keys| keys.range((start, Unbounded)));
        let fits = |key: &&Key| {
            let entry = self.entries.get(&key.task);
            entry.is_some_and(|entry| room.covers(entry.asks)) && admits(key.task)
        };
        let bound = { bound }.find(fits).copied();
        match (best, bound) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(rank: i64, task: u64) -> Key {
        Key {
            rank,
            submitted: Moment::from_micros(task),
            task: TaskId(task),
        }
    }

    fn cpus(count: u64) -> TaskResources {
        TaskResources {
            cpu_millis: count * 1000,
            memory: Bytes::mib(1),
        }
    }

    #[test]
    fn the_first_that_fits_comes_first_and_bound_ones_only_on_their_node() {
        let mut waiting = Waiting::default();
        waiting.put(key(0, 1), cpus(4), None);
        waiting.put(key(0, 2), cpus(2), None);
        waiting.put(key(-1, 3), cpus(2), Some(NodeId(7)));
        let first = |waiting: &Waiting, node, room| {
            let key = waiting.first(NodeId(node), cpus(room), None, |_| true);
            key.map(|key| key.task.0)
        };
        assert_eq!(first(&waiting, 1, 4), Some(1));
        assert_eq!(first(&waiting, 1, 3), Some(2));
        assert_eq!(first(&waiting, 7, 3), Some(3));
        assert_eq!(first(&waiting, 1, 1), None);
        let second = waiting.first(NodeId(7), cpus(4), Some(key(-1, 3)), |_| true);
        assert_eq!(second, Some(key(0, 1)));
        assert_eq!(
            waiting.all().map(|key| key.task.0).collect::<Vec<_>>(),
            [3, 1, 2]
        );
        assert!(waiting.remove(TaskId(3)) && !waiting.remove(TaskId(3)));
        assert_eq!(first(&waiting, 7, 3), Some(2));
    }
}
