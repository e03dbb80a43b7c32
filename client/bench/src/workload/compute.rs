//! One-dimensional k-means over the memory, after the paper's job: it reads all of the memory again and again.

/// Bytes that a step processes, in some tens of microseconds.
const STEP_BYTES: usize = 64 << 10;
/// Number of cluster centres.
const K: usize = 4;

pub(super) struct Compute {
    centres: [f64; K],
    /// Sums of whole numbers, which are exact: the result does not depend on the order of addition.
    sums: [(f64, u32); K],
    steps: u64,
}

impl Compute {
    pub(super) fn new() -> Self {
        Self {
            centres: [8192.0, 24576.0, 40960.0, 57344.0],
            sums: [(0.0, 0); K],
            steps: 0,
        }
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns a number that stands for the whole computation.
    pub(super) fn result(&self) -> u64 {
        self.centres.iter().fold(self.steps, |sum, centre| {
            sum.rotate_left(13) ^ centre.to_bits()
        })
    }

    /// Assigns the points of the next piece of memory; after the last piece the centres move.
    pub(super) fn step(&mut self, memory: &[u8]) {
        let pieces = (memory.len() / STEP_BYTES).max(1);
        let piece = usize::try_from(self.steps % pieces as u64).unwrap_or_default();
        let at = piece * STEP_BYTES;
        let points = memory
            .get(at..(at + STEP_BYTES).min(memory.len()))
            .unwrap_or_default();
        for &bytes in points.as_chunks::<2>().0 {
            let point = f64::from(u16::from_le_bytes(bytes));
            let mut nearest = (f64::MAX, 0);
            for (which, centre) in self.centres.iter().enumerate() {
                let distance = (point - centre).abs();
                if distance < nearest.0 {
                    nearest = (distance, which);
                }
            }
            if let Some((sum, count)) = self.sums.get_mut(nearest.1) {
                *sum += point;
                *count = count.wrapping_add(1);
            }
        }
        self.steps += 1;
        if piece + 1 == pieces {
            for (centre, (sum, count)) in self.centres.iter_mut().zip(&mut self.sums) {
                if *count > 0 {
                    *centre = *sum / f64::from(*count);
                }
                (*sum, *count) = (0.0, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn centres_move_to_where_the_points_are() {
        // Two heaps of points, at 1000 and at 60000.
        let mut memory = Vec::new();
        for index in 0..STEP_BYTES {
            let point: u16 = if index % 2 == 0 { 1000 } else { 60_000 };
            memory.extend(point.to_le_bytes());
        }
        let mut compute = Compute::new();
        for _ in 0..8 {
            compute.step(&memory);
        }
        assert_eq!(compute.centres[0], 1000.0);
        assert_eq!(compute.centres[3], 60_000.0);
        let mut same = Compute::new();
        for _ in 0..8 {
            same.step(&memory);
        }
        assert_eq!(same.result(), compute.result());
        same.step(&memory);
        assert_ne!(same.result(), compute.result());
    }
}
