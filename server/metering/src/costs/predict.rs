//! Predicts the size of a task's next dump, and the duration of a transfer.

use permafrost_scheduling::estimator::{Direction, SizedRates};
use permafrost_scheduling::figure::{Figure, Missing};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use permafrost_scheduling::size::{DumpKind, Memory, Prediction};
use permafrost_store::Expected;

use super::channels::Lane;
use super::running::Running;
use super::state::{Costs, State};

impl Costs {
    /// Predicts the bytes that the next dump of `job` moves and stores. Memory that is not given is taken to be
    /// that of the job's last dump.
    ///
    /// # Errors
    /// [`Missing`] when neither is known.
    pub fn predict(
        &self,
        job: &str,
        program: &str,
        dump: DumpKind,
        memory: &Memory,
    ) -> Result<Prediction, Missing> {
        let now = self.now();
        let state = self.state();
        let (known, job, kind) = state.jobs.known(job, program);
        let memory = Memory {
            resident: memory.resident.or(known.and_then(|job| job.resident)),
            ..*memory
        };
        state.sizes.predict(job, kind, dump, &memory, now)
    }

    /// Returns the expected size and duration of a transfer that begins now, beside the transfers that are running.
    pub(super) fn expected(
        &self,
        direction: Direction,
        lane: Lane,
        stored: Bytes,
        moved: Bytes,
    ) -> Expected {
        let now = self.now();
        let state = self.state();
        let ahead = ahead(&state.running, direction, moved);
        let transfer = state.time(direction, lane, moved, ahead, now).ok();
        let start = state.start(direction, lane, now).known().ok();
        Expected {
            stored,
            moved,
            transfer,
            whole: transfer
                .zip(start)
                .map(|(transfer, start)| transfer.plus(start.p50)),
        }
    }
}

/// Returns the bytes that other transfers move while a transfer of `own` bytes lasts. Transfers share a node
/// evenly: each other one counts with its remaining bytes, but at most with as many as `own`.
fn ahead(running: &[Running], direction: Direction, own: Bytes) -> Bytes {
    let others = running.iter().filter(|other| other.direction == direction);
    Bytes::new(
        others
            .map(|other| other.left().min(own.count()))
            .fold(0, u64::saturating_add),
    )
}

impl State {
    /// Returns the duration of a transfer of `own` bytes with `ahead` bytes beside them: no less than alone, and no
    /// less than all of them take at the combined rate.
    fn time(
        &self,
        direction: Direction,
        lane: Lane,
        own: Bytes,
        ahead: Bytes,
        now: Moment,
    ) -> Result<Seconds, Missing> {
        let alone = self.rate(direction, lane, own, now).known()?.p50;
        let by_itself = own.at(alone);
        if ahead == Bytes::ZERO {
            return Ok(by_itself);
        }
        let together = self
            .rates(direction, Lane::Together, now)
            .of(own)
            .known()
            .map_or(alone, |together| together.p50);
        Ok(by_itself.max(own.plus(ahead).at(together)))
    }

    /// Returns the bandwidth of a lane; for one that was never used, that of the nearest measured lane.
    fn rate(
        &self,
        direction: Direction,
        lane: Lane,
        own: Bytes,
        now: Moment,
    ) -> Figure<BytesPerSecond> {
        let of = |lane| self.rates(direction, lane, now).of(own);
        let own = of(lane);
        let others: &[Lane] = match lane {
            Lane::WholeCopied | Lane::Compared => &[Lane::Whole, Lane::Together, Lane::Probed],
            Lane::ComparedCopied => &[Lane::WholeCopied, Lane::Whole, Lane::Together, Lane::Probed],
            Lane::Whole => &[Lane::Together, Lane::Probed],
            Lane::Together | Lane::Probed | Lane::Recalled | Lane::Lazy => &[],
        };
        others.iter().fold(own, |found, &lane| match found {
            Figure::Unknown { .. } => first_known(found, of(lane)),
            Figure::Known(_) => found,
        })
    }

    pub(super) fn rates(&self, direction: Direction, lane: Lane, now: Moment) -> SizedRates {
        self.estimator.rates(self.channel(direction, lane), now)
    }

    /// Returns the fixed time of a transfer, which does not depend on its size.
    pub(super) fn start(&self, direction: Direction, lane: Lane, now: Moment) -> Figure<Seconds> {
        let of = |lane| {
            let channel = self.channel(direction, lane);
            self.estimator.latency(channel, now)
        };
        first_known(of(lane), of(Lane::Together))
    }
}

/// Returns the first figure, unless only the other is known.
pub(super) fn first_known<T: Copy>(one: Figure<T>, other: Figure<T>) -> Figure<T> {
    match (one, other) {
        (Figure::Unknown { .. }, Figure::Known(_)) => other,
        _ => one,
    }
}
