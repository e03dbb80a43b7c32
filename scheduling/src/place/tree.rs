//! Nodes sorted by the time that a dump takes there, for any size, without visiting all of them.
//!
//! The time on a node is a line over the size: start + size × seconds a byte. A binary tree over the nodes keeps in
//! each place the least start, the least seconds a byte and the most free room of all nodes below, from which follows
//! a lower bound of their times. The search visits the place with the lowest bound first, so nodes come out in the
//! order of their times. Bounds hold wherever the nodes are; similar nodes lie next to each other (as in a k-d tree)
//! to make the bounds tight, and the tree is sorted anew when half of the nodes have changed.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BinaryHeap, HashMap};

use crate::NodeId;
use crate::quantity::{Bytes, Seconds};

/// Line of one node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Line {
    pub(crate) node: NodeId,
    /// Time before the first byte, seconds.
    pub(crate) start: f64,
    /// Seconds a byte.
    pub(crate) per_byte: f64,
    pub(crate) free: Bytes,
}

impl Line {
    /// Returns the time of a dump of `size`; `None` if it has no room.
    pub(crate) fn time(&self, size: Bytes) -> Option<Seconds> {
        Bound::of(Some(self)).time(size)
    }
}

/// Lower bound that holds for all lines below a place.
#[derive(Clone, Copy, Debug)]
struct Bound {
    start: f64,
    per_byte: f64,
    /// Most free room below; `None` if there is no line.
    free: Option<Bytes>,
}

impl Bound {
    const NOTHING: Self = Self {
        start: f64::MAX,
        per_byte: f64::MAX,
        free: None,
    };

    fn of(line: Option<&Line>) -> Self {
        line.map_or(Self::NOTHING, |line| Self {
            start: line.start,
            per_byte: line.per_byte,
            free: Some(line.free),
        })
    }

    fn joined(self, other: Self) -> Self {
        Self {
            start: self.start.min(other.start),
            per_byte: self.per_byte.min(other.per_byte),
            free: self.free.max(other.free),
        }
    }

    /// Returns the least time; `None` if no node below has room.
    fn time(&self, size: Bytes) -> Option<Seconds> {
        let free = self.free?;
        (free >= size).then(|| Seconds::clamped(self.start + self.per_byte * size.count() as f64))
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    /// Lines in slots; the number of slots is a power of two, or 0.
    leaves: Vec<Option<Line>>,
    /// Bounds by place: place 1 is the root, those below place n are 2n and 2n + 1; the leaves' bounds are the second
    /// half.
    bounds: Vec<Bound>,
    slots: HashMap<NodeId, usize>,
    vacant: Vec<usize>,
    /// Since it was sorted.
    changes: usize,
}

impl Tree {
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Puts a line in, in place of the node's old one. O(log n), on the average over many.
    pub(crate) fn put(&mut self, line: Line) {
        self.changes += 1;
        if self.changes > 16 + self.len() / 2 {
            self.remove(line.node);
            self.sort(Some(line));
            return;
        }
        let slot = self.slots.get(&line.node).copied();
        match slot.or_else(|| self.vacant.pop()) {
            Some(slot) => {
                self.slots.insert(line.node, slot);
                self.set(slot, Some(line));
            }
            None => self.sort(Some(line)),
        }
    }

    pub(crate) fn remove(&mut self, node: NodeId) {
        if let Some(slot) = self.slots.remove(&node) {
            self.set(slot, None);
            self.vacant.push(slot);
        }
    }

    fn set(&mut self, slot: usize, line: Option<Line>) {
        if let Some(leaf) = self.leaves.get_mut(slot) {
            *leaf = line;
        }
        let mut place = self.leaves.len() + slot;
        if let Some(bound) = self.bounds.get_mut(place) {
            *bound = Bound::of(line.as_ref());
        }
        while place > 1 {
            place /= 2;
            self.join(place);
        }
    }

    fn join(&mut self, place: usize) {
        let below = |place| self.bounds.get(place).copied().unwrap_or(Bound::NOTHING);
        let joined = below(2 * place).joined(below(2 * place + 1));
        if let Some(bound) = self.bounds.get_mut(place) {
            *bound = joined;
        }
    }

    /// Rebuilds the tree, with room for as many lines again.
    fn sort(&mut self, more: Option<Line>) {
        let mut lines: Vec<Line> = self.leaves.drain(..).flatten().chain(more).collect();
        let capacity = (2 * lines.len()).next_power_of_two();
        self.leaves = vec![None; capacity];
        spread(&mut lines, &mut self.leaves, true);
        self.bounds = vec![Bound::NOTHING; 2 * capacity];
        self.slots.clear();
        self.vacant.clear();
        for (slot, line) in self.leaves.iter().enumerate() {
            match line {
                Some(line) => {
                    self.slots.insert(line.node, slot);
                }
                None => self.vacant.push(slot),
            }
            if let Some(bound) = self.bounds.get_mut(capacity + slot) {
                *bound = Bound::of(line.as_ref());
            }
        }
        for place in (1..capacity).rev() {
            self.join(place);
        }
        self.changes = 0;
    }

    /// Nodes with room for `size`, the quickest first. Of equals any may be first.
    pub(crate) fn quickest(&self, size: Bytes) -> Quickest<'_> {
        let mut quickest = Quickest {
            tree: self,
            size,
            next: None,
            heap: BinaryHeap::with_capacity(USUALLY_LATER),
            visited: 0,
        };
        quickest.next = quickest.bound(1);
        quickest
    }
}

/// Distributes lines over slots, halving both by one coordinate and then the other. There are no more lines than slots.
fn spread(lines: &mut [Line], slots: &mut [Option<Line>], by_start: bool) {
    if let [line] = lines
        && let [slot, ..] = slots
    {
        *slot = Some(*line);
        return;
    }
    if lines.is_empty() || slots.len() < 2 {
        return;
    }
    let middle = lines.len() / 2;
    let key = |line: &Line| {
        if by_start { line.start } else { line.per_byte }
    };
    lines.select_nth_unstable_by(middle, |a, b| key(a).total_cmp(&key(b)));
    let (low, high) = lines.split_at_mut(middle);
    let (low_slots, high_slots) = slots.split_at_mut(slots.len() / 2);
    spread(low, low_slots, !by_start);
    spread(high, high_slots, !by_start);
}

/// Places that a search for some nodes usually leaves for later: room is made for them at once.
const USUALLY_LATER: usize = 64;

/// Place with the least time below it. Of equal ones the higher place is greater, which is a leaf sooner: so not all
/// of many similar nodes are visited.
type Bounded = (Reverse<Seconds>, usize);

/// Iterates over nodes and their times, the least first.
pub(crate) struct Quickest<'a> {
    tree: &'a Tree,
    size: Bytes,
    /// Place that comes next. Kept out of the heap: the way down to a leaf mostly goes on with one of the two places
    /// below.
    next: Option<Bounded>,
    /// Places that come later.
    heap: BinaryHeap<Bounded>,
    /// Number of places visited.
    pub(crate) visited: usize,
}

impl Quickest<'_> {
    fn bound(&mut self, place: usize) -> Option<Bounded> {
        self.visited += 1;
        let time = self.tree.bounds.get(place)?.time(self.size)?;
        Some((Reverse(time), place))
    }

    /// Returns the better of the two places below and of the remaining ones; the others are left for later.
    fn below(&mut self, place: usize) -> Option<Bounded> {
        let (one, other) = (self.bound(2 * place), self.bound(2 * place + 1));
        if let Some(later) = one.min(other) {
            self.heap.push(later);
        }
        match (one.max(other), self.heap.peek_mut()) {
            // Takes the greatest place out of the heap, and puts the lesser one in.
            (Some(better), Some(mut later)) if *later > better => {
                Some(std::mem::replace(&mut *later, better))
            }
            (None, Some(later)) => Some(PeekMut::pop(later)),
            (better, _) => better,
        }
    }
}

impl Iterator for Quickest<'_> {
    type Item = (NodeId, Seconds);

    fn next(&mut self) -> Option<Self::Item> {
        while let Some((Reverse(time), place)) = self.next {
            match place.checked_sub(self.tree.leaves.len()) {
                Some(slot) => {
                    self.next = self.heap.pop();
                    let line = self.tree.leaves.get(slot).copied().flatten()?;
                    return Some((line.node, time));
                }
                None => self.next = self.below(place),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(node: u32, start: f64, mb_per_s: f64, free: u64) -> Line {
        Line {
            node: NodeId(node),
            start,
            per_byte: 1e-6 / mb_per_s,
            free: Bytes::new(free),
        }
    }

    /// Returns numbers that look random and are deterministic.
    fn scattered(n: u32) -> f64 {
        f64::from(n.wrapping_mul(2_654_435_761) % 10_007) / 10_007.0
    }

    #[test]
    fn ten_thousand_nodes_are_not_looked_at_for_three() {
        let mut tree = Tree::default();
        for n in 0..10_000 {
            let (start, rate) = (scattered(n) * 20.0, 100.0 + scattered(n + 77) * 4000.0);
            tree.put(line(n, start, rate, 1 << 40));
        }
        for size in [1_u64 << 20, 1 << 30, 1 << 36] {
            let mut quickest = tree.quickest(Bytes::new(size));
            assert_eq!(quickest.by_ref().take(3).count(), 3);
            assert!(quickest.visited < 1000, "{size}: {}", quickest.visited);
        }
    }

    #[test]
    fn ten_thousand_equal_nodes_are_not_looked_at_either() {
        let mut tree = Tree::default();
        for n in 0..10_000 {
            tree.put(line(n, 1.0, 500.0, 1 << 40));
        }
        let mut quickest = tree.quickest(Bytes::mib(1));
        assert_eq!(quickest.by_ref().take(3).count(), 3);
        assert!(quickest.visited < 200, "{}", quickest.visited);
        assert_eq!(tree.quickest(Bytes::new(1 << 41)).count(), 0);
    }

    proptest! {
        /// Compares the order with sorting all nodes, after any sequence of insertions, replacements and removals.
        #[test]
        fn the_order_is_that_of_the_times(
            puts in prop::collection::vec((0_u32..40, 0.0..9.0, 1.0..900.0, 0_u64..100, any::<bool>()), 0..150),
            size in 0_u64..100,
        ) {
            let mut tree = Tree::default();
            let mut model = HashMap::new();
            for (node, start, rate, free, keep) in puts {
                if keep {
                    let line = line(node, start, rate, free);
                    tree.put(line);
                    model.insert(node, line);
                } else {
                    tree.remove(NodeId(node));
                    model.remove(&node);
                }
            }
            prop_assert_eq!(tree.len(), model.len());
            let size = Bytes::new(size);
            let mut expected: Vec<Seconds> = model
                .values()
                .filter_map(|line| Bound::of(Some(line)).time(size))
                .collect();
            expected.sort_unstable();
            let found: Vec<Seconds> = tree.quickest(size).map(|(_, time)| time).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
