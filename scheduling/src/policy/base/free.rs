//! Free room of the nodes, searched without visiting all of them.

use crate::NodeId;
use crate::cost::TaskResources;
use crate::quantity::Bytes;

/// The most room of each resource in a part of the nodes; none if all of them are lost.
type Most = Option<TaskResources>;

/// Binary tree over the nodes: place 1 is the root, those below place n are 2n and 2n + 1; the second half are the
/// nodes. A place has the most room of each resource of the nodes below.
#[derive(Clone, Debug, Default)]
pub(in crate::policy) struct Free {
    places: Vec<Most>,
}

impl Free {
    fn leaves(&self) -> usize {
        self.places.len() / 2
    }

    fn index(node: NodeId) -> usize {
        usize::try_from(node.0).unwrap_or(usize::MAX)
    }

    /// Returns the room of a node; none if it is lost.
    pub(in crate::policy) fn of(&self, node: NodeId) -> Option<TaskResources> {
        let leaf = self.leaves().checked_add(Self::index(node))?;
        self.places.get(leaf).copied().flatten()
    }

    /// Sets the room of a node; none if it is lost. O(log n).
    pub(in crate::policy) fn set(&mut self, node: NodeId, room: Option<TaskResources>) {
        let index = Self::index(node);
        if index >= self.leaves() {
            self.grow(index);
        }
        let mut place = self.leaves() + index;
        if self.places.get(place) == Some(&room) {
            return;
        }
        self.write(place, room);
        while place > 1 {
            place /= 2;
            let joined = joined(self.at(2 * place), self.at(2 * place + 1));
            if self.at(place) == joined {
                return;
            }
            self.write(place, joined);
        }
    }

    fn at(&self, place: usize) -> Most {
        self.places.get(place).copied().flatten()
    }

    fn write(&mut self, place: usize, room: Most) {
        if let Some(at) = self.places.get_mut(place) {
            *at = room;
        }
    }

    fn grow(&mut self, index: usize) {
        let leaves = (index + 1).next_power_of_two().max(2);
        let mut places = vec![None; 2 * leaves];
        let old = self.places.iter().skip(self.leaves());
        for (to, from) in places.iter_mut().skip(leaves).zip(old) {
            *to = *from;
        }
        self.places = places;
        for place in (1..leaves).rev() {
            let joined = joined(self.at(2 * place), self.at(2 * place + 1));
            self.write(place, joined);
        }
    }

    /// Returns the first node with room, not before `from`. Visits the few places that have the room of each resource.
    pub(in crate::policy) fn first(&self, asks: TaskResources, from: NodeId) -> Option<NodeId> {
        self.search(1, 0, self.leaves(), asks, Self::index(from))
    }

    fn search(
        &self,
        place: usize,
        first: usize,
        leaves: usize,
        asks: TaskResources,
        from: usize,
    ) -> Option<NodeId> {
        if leaves == 0 || first + leaves <= from || !self.at(place)?.covers(asks) {
            return None;
        }
        if leaves == 1 {
            return u32::try_from(first).ok().map(NodeId);
        }
        let half = leaves / 2;
        self.search(2 * place, first, half, asks, from)
            .or_else(|| self.search(2 * place + 1, first + half, half, asks, from))
    }
}

fn joined(a: Most, b: Most) -> Most {
    match (a, b) {
        (Some(a), Some(b)) => Some(TaskResources {
            cpu_millis: a.cpu_millis.max(b.cpu_millis),
            memory: Bytes::max(a.memory, b.memory),
        }),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn room(cpu_millis: u64, memory: u64) -> TaskResources {
        TaskResources {
            cpu_millis,
            memory: Bytes::new(memory),
        }
    }

    proptest! {
        #[test]
        fn it_finds_the_node_that_a_visit_of_all_finds(
            rooms in prop::collection::vec(prop::option::of((0_u64..9, 0_u64..9)), 0..40),
            asks in (0_u64..10, 0_u64..10),
            from in 0_u32..45,
        ) {
            let mut free = Free::default();
            for (node, given) in (0..).zip(&rooms) {
                free.set(NodeId(node), given.map(|(cpu, memory)| room(cpu, memory)));
            }
            let asks = room(asks.0, asks.1);
            let fits = |given: &Option<(u64, u64)>| given.is_some_and(|(cpu, memory)| room(cpu, memory).covers(asks));
            let expected = (0..).zip(&rooms).find(|(node, given)| *node >= from && fits(given));
            prop_assert_eq!(free.first(asks, NodeId(from)), expected.map(|(node, _)| NodeId(node)));
        }
    }
}
