//! The newest of many checkpoints: figures are learned from these at the start.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use permafrost_protocol::control::Checkpoint;

/// Number of them: what is older says little about the next dump.
const COUNT: usize = 10_000;

/// Keeps the newest of many checkpoints.
#[derive(Debug, Default)]
pub struct Newest {
    /// The oldest of these first: time of the seal, and place in `records`.
    oldest: BinaryHeap<Reverse<(u64, usize)>>,
    records: Vec<Checkpoint>,
}

impl Newest {
    /// Takes a checkpoint, unless so many newer ones have come.
    pub fn add(&mut self, record: &Checkpoint) {
        let time = record.created_unix_ms;
        if self.records.len() < COUNT {
            self.oldest.push(Reverse((time, self.records.len())));
            self.records.push(record.clone());
            return;
        }
        if let Some(mut oldest) = self.oldest.peek_mut()
            && oldest.0.0 < time
        {
            let place = oldest.0.1;
            *oldest = Reverse((time, place));
            self.records[place] = record.clone();
        }
    }

    /// Returns the newest ones, in no order.
    #[must_use]
    pub fn into_records(self) -> Vec<Checkpoint> {
        self.records
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept_in_whatever_order_they_come() {
        let mut newest = Newest::default();
        let count = COUNT as u64;
        let times = (0..3 * count).map(|n| n * 7919 % (3 * count));
        for created_unix_ms in times {
            newest.add(&Checkpoint {
                created_unix_ms,
                ..Checkpoint::default()
            });
        }
        let records = newest.into_records();
        assert_eq!(records.len(), COUNT);
        assert!(
            records
                .iter()
                .all(|record| record.created_unix_ms >= 2 * count)
        );
    }
}
