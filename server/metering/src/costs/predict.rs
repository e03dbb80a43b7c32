//! The size of a task's next dump, and the time that a transfer takes.

use permafrost_scheduling::estimator::{Direction, SizedRates};
use permafrost_scheduling::figure::{Figure, Missing};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use permafrost_scheduling::size::{DumpKind, Memory, Prediction};
use permafrost_store::Expected;

use super::begin::Running;
use super::channels::Lane;
use super::measure::{Costs, State};

impl Costs {
    /// What the next dump of `job` moves and stores. Memory that is not given is taken to be what it was at the job's
    /// last dump.
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

    /// What is expected of a transfer that begins now, beside what is running.
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

/// Bytes that come in beside a transfer of `own`, while it lasts. Transfers share a node evenly: of each other one that
/// is left to do counts as far as the transfer lasts, so at most as much as its own.
fn ahead(running: &[Running], direction: Direction, own: Bytes) -> Bytes {
    let others = running.iter().filter(|other| other.direction == direction);
    Bytes::new(
        others
            .map(|other| other.left().min(own.count()))
            .fold(0, u64::saturating_add),
    )
}

impl State {
    /// How long `own` bytes take with `ahead` beside them: no less than alone, no less than all of them at the rate of
    /// all together.
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

    /// Bandwidth of a lane; of one that was never used that of the nearest that was.
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
            Lane::Together | Lane::Probed => &[],
        };
        others.iter().fold(own, |found, &lane| match found {
            Figure::Unknown { .. } => first_known(found, of(lane)),
            Figure::Known(_) => found,
        })
    }

    pub(super) fn rates(&self, direction: Direction, lane: Lane, now: Moment) -> SizedRates {
        self.estimator.rates(lane.channel(direction), now)
    }

    /// What a transfer takes whatever its size.
    pub(super) fn start(&self, direction: Direction, lane: Lane, now: Moment) -> Figure<Seconds> {
        let of = |lane: Lane| self.estimator.latency(lane.channel(direction), now);
        first_known(of(lane), of(Lane::Together))
    }
}

/// The first, unless only the other is known.
pub(super) fn first_known<T: Copy>(one: Figure<T>, other: Figure<T>) -> Figure<T> {
    match (one, other) {
        (Figure::Unknown { .. }, Figure::Known(_)) => other,
        _ => one,
    }
}
