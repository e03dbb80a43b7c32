//! Search for the nodes that would restore soonest, without visiting all nodes.

use std::collections::HashMap;

use crate::NodeId;
use crate::cost::NodeFigures;
use crate::figure::Missing;
use crate::place::tree::{Line, Tree};
use crate::quantity::{Bytes, Seconds};

/// Index of nodes by the time that a restore takes there.
///
/// The time does not include the transfer of pages that a node lacks, as it differs for each image and node: a caller
/// that ranks nodes takes a few more than it wants, and those that hold the image.
#[derive(Clone, Debug, Default)]
pub struct Readers {
    tree: Tree,
    unknown: HashMap<NodeId, Missing>,
}

impl Readers {
    /// Replaces the figures of a node. O(log n), on the average over many.
    ///
    /// # Errors
    ///
    /// [`Missing`] if its bandwidth for reading or its queue is not known: it is then not among the quickest.
    pub fn update(&mut self, figures: &NodeFigures) -> Result<(), Missing> {
        match line(figures) {
            Ok(line) => {
                self.unknown.remove(&line.node);
                self.tree.put(line);
                Ok(())
            }
            Err(missing) => {
                self.tree.remove(figures.node);
                self.unknown.insert(figures.node, missing);
                Err(missing)
            }
        }
    }

    /// Forgets a node.
    pub fn remove(&mut self, node: NodeId) {
        self.tree.remove(node);
        self.unknown.remove(&node);
    }

    /// Nodes and the time until an image of `size` that they have would run there, the quickest first.
    pub fn quickest(&self, size: Bytes) -> impl Iterator<Item = (NodeId, Seconds)> {
        self.tree.quickest(size)
    }

    /// Returns the number of nodes that are left out, as too little is known of them.
    #[must_use]
    pub fn unknown(&self) -> usize {
        self.unknown.len()
    }
}

fn line(figures: &NodeFigures) -> Result<Line, Missing> {
    let queue = figures.read_wait()?;
    let rate = figures.read.sustained().known()?;
    // A fixed time that was never measured counts as 0 on every node.
    let fixed = figures.restore_start.known().map_or(0.0, |t| t.p50.value());
    Ok(Line {
        node: figures.node,
        start: queue.p50.value() + fixed,
        per_byte: 1.0 / rate.p50.value(),
        // A restore needs no room.
        free: Bytes::new(u64::MAX),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimator::SizedRates;
    use crate::figure::{Figure, What};
    use crate::quantity::BytesPerSecond;

    const GB: u64 = 1_000_000_000;

    fn node(id: u32, gb_per_s: f64, queued_gb: u64) -> NodeFigures {
        let rate = BytesPerSecond::new(gb_per_s * 1e9).unwrap();
        NodeFigures {
            read: SizedRates::uniform(Figure::given(rate)),
            read_queue: Figure::given(Bytes::new(queued_gb * GB)),
            ..NodeFigures::unknown(NodeId(id))
        }
    }

    fn order(readers: &Readers, gb: u64) -> Vec<(u32, f64)> {
        let quickest = readers.quickest(Bytes::new(gb * GB));
        quickest
            .map(|(node, time)| (node.0, time.value()))
            .collect()
    }

    #[test]
    fn small_images_go_past_queues_and_large_ones_to_fast_media() {
        let mut readers = Readers::default();
        readers.update(&node(1, 1.0, 0)).unwrap();
        readers.update(&node(2, 4.0, 12)).unwrap();
        assert_eq!(order(&readers, 1), [(1, 1.0), (2, 3.25)]);
        assert_eq!(order(&readers, 8), [(2, 5.0), (1, 8.0)]);
        readers.remove(NodeId(2));
        assert_eq!(order(&readers, 8), [(1, 8.0)]);
    }

    #[test]
    fn who_stops_to_report_is_left_out_and_counted() {
        let mut readers = Readers::default();
        readers.update(&node(1, 1.0, 0)).unwrap();
        let unknown = readers.update(&NodeFigures::unknown(NodeId(1)));
        assert_eq!(unknown, Err(Missing::NotGiven { what: What::Queue }));
        assert_eq!((order(&readers, 1).len(), readers.unknown()), (0, 1));
        readers.update(&node(1, 1.0, 0)).unwrap();
        assert_eq!(readers.unknown(), 0);
    }
}
