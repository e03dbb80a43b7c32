//! Measures transfers and keeps the measurements as figures.
//!
//! A dump's time, as its client sees it, is divided: from the first byte to CLOSE answered is its *transfer*,
//! which depends on the bytes moved; the rest, from the opening of the session (CRIU starts, finds and stops
//! the task) to the first byte and from CLOSE to the seal (small images, the seal), is the fixed time of a
//! dump, whatever its size. So
//!
//! dump_start + moved / bandwidth
//!
//! is the expected duration of the next dump. Bytes *moved*, not stored: an incremental dump without dirty
//! pages brings the whole memory and stores little of it. Its bandwidth is that of comparing, which has figures
//! of its own.

use std::time::{Duration, Instant};

use permafrost_protocol::control;
use permafrost_scheduling::estimator::{Channel, Direction, Estimator, Transfer};
use permafrost_scheduling::quantity::{Bytes, Moment, Seconds};
use permafrost_scheduling::size::{DumpKind, Dumped, Memory};
use permafrost_store::clock::unix_ms;
use permafrost_store::{DumpDone, Expected, RestoreDone, StoreEvent};

use super::channels::Lane;
use super::ended::Whole;
use super::seconds;
use super::state::{Comparisons, Costs, OUTCOMES_KEPT, State, TransferOutcome};

/// Share of all bytes of its time from which on a transfer counts as having had the node to itself: 4/5.
const ALONE: (u64, u64) = (4, 5);

/// Minimum bytes for a bandwidth sample of a link: below, its latency is measured.
const LINK_LEAST_BYTES: u64 = 1 << 20;

/// A completed verification read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubDone {
    /// Number of bytes read.
    pub bytes: u64,
    /// Duration of the read, without a pause.
    pub elapsed: Duration,
}

impl Costs {
    /// Records a completed dump.
    pub fn dumped(&self, done: &DumpDone<'_>) {
        let elapsed = done.whole.unwrap_or(done.transferred.elapsed);
        let now = self.now();
        self.look_at_tiers();
        let mut state = self.state();
        self.learn_size(&mut state, done, now);
        self.learn_time(&mut state, done, now);
        if let Some(expected) = &done.expected {
            state.comparisons.dumped(expected, done);
        }
        let expected = done.expected.as_ref();
        state.comparisons.remember(TransferOutcome {
            direction: Direction::Write,
            job: done.job.to_owned(),
            generation: done.generation,
            bytes: done.moved_bytes,
            predicted_s: expected
                .and_then(|expected| match done.whole {
                    Some(_) => expected.whole,
                    None => expected.transfer,
                })
                .map(Seconds::value),
            took: elapsed,
            ended: Instant::now(),
        });
        drop(state);
        self.tell(|| StoreEvent::Dumped {
            job: done.job.to_owned(),
            generation: done.generation,
            id: done.id.to_owned(),
            bytes: done.moved_bytes,
            elapsed,
        });
    }

    fn learn_size(&self, state: &mut State, done: &DumpDone<'_>, now: Moment) {
        if done.job.is_empty() {
            return;
        }
        let moved = Bytes::new(done.moved_bytes);
        // If the task's memory was not measured, the bytes of its full dump are the next best measure.
        let resident = done.memory.resident.unwrap_or(moved);
        let State { jobs, sizes, .. } = state;
        let (job, kind) = jobs.dumped(done.job, done.program, now, resident, sizes);
        let dumped = Dumped {
            at: now,
            kind: done.kind,
            memory: Memory {
                resident: Some(resident),
                ..done.memory
            },
            moved,
            stored: Bytes::new(done.stored_bytes),
        };
        if let Err(error) = sizes.dumped(job, kind, &dumped) {
            tracing::debug!(job = done.job, %error, "nothing learnt of the size of a dump");
        }
    }

    fn learn_time(&self, state: &mut State, done: &DumpDone<'_>, now: Moment) {
        let way = done.transferred;
        let (moved, all) = (done.moved_bytes, way.all_bytes.max(done.moved_bytes));
        let compared = done.kind == DumpKind::Incremental;
        let here = way.elapsed.saturating_sub(way.waited);
        let tier = state.tiers.current();
        if done.tier != tier {
            // The tier filled up meanwhile, or has room again: the dump went to both.
            return;
        }
        let mut sample = |lane: Lane, elapsed: Duration| {
            let channel = lane.channel(Direction::Write, tier);
            self.sample(&mut state.estimator, channel, now, moved, elapsed);
        };
        if is_alone(moved, all) {
            sample(Lane::of_dump(compared, false), here);
            if done.copied {
                sample(Lane::of_dump(compared, true), way.elapsed);
            }
        } else {
            sample(Lane::Together, share(here, moved, all));
        }
        if let Some(whole) = done.whole {
            let start = seconds(whole.saturating_sub(way.elapsed));
            for lane in [Lane::of_dump(compared, done.copied), Lane::Together] {
                let channel = state.channel(Direction::Write, lane);
                self.judged(state.estimator.answered(channel, now, now, start));
            }
            // Dumps with copies have figures of their own.
            self.learn_whole(
                state,
                Lane::of_dump(compared, false),
                now,
                &Whole {
                    id: done.id,
                    restored: false,
                    bytes: moved,
                    elapsed: whole,
                    apart: way.waited,
                },
            );
        }
    }

    fn learn_whole(&self, state: &mut State, lane: Lane, now: Moment, whole: &Whole<'_>) {
        if whole.bytes == 0 {
            return;
        }
        let direction = if whole.restored {
            Direction::Read
        } else {
            Direction::Write
        };
        let channel = state.channel(direction, lane);
        let transfer = Transfer {
            at: now,
            bytes: Bytes::new(whole.bytes),
            elapsed: seconds(whole.elapsed.saturating_sub(whole.apart)),
        };
        self.judged(state.estimator.took(channel, now, transfer));
        state.ended.remember(channel, transfer, whole);
    }

    /// Records the total duration of a dump or a restore, as its client measured it. Returns true if it was
    /// measured here a moment ago, and the duration is possible.
    pub fn took(&self, id: &str, restored: bool, elapsed: Duration) -> bool {
        let mut state = self.state();
        let Some((channel, corrected)) = state.ended.corrected(id, restored, elapsed) else {
            return false;
        };
        state.estimator.correct(channel, corrected)
    }

    /// Records a restore that was served.
    pub fn restored(&self, done: &RestoreDone<'_>) {
        let now = self.now();
        let mut state = self.state();
        let all = done.all_bytes.max(done.bytes);
        if done.here {
            let (lane, elapsed) = if is_alone(done.bytes, all) {
                (Lane::Whole, done.elapsed)
            } else {
                (Lane::Together, share(done.elapsed, done.bytes, all))
            };
            let channel = state.channel(Direction::Read, lane);
            self.sample(&mut state.estimator, channel, now, done.bytes, elapsed);
            if let Some(start) = done.start {
                let channel = state.channel(Direction::Read, Lane::Whole);
                let answered = state.estimator.answered(channel, now, now, seconds(start));
                self.judged(answered);
                self.learn_whole(
                    &mut state,
                    Lane::Whole,
                    now,
                    &Whole {
                        id: &done.checkpoint.id,
                        restored: true,
                        bytes: done.bytes,
                        elapsed: start + done.elapsed,
                        apart: Duration::ZERO,
                    },
                );
            }
        }
        let whole = done.start.unwrap_or_default() + done.elapsed;
        let expected = done.expected.as_ref().and_then(|expected| expected.whole);
        state.comparisons.remember(TransferOutcome {
            direction: Direction::Read,
            job: done.checkpoint.job.clone(),
            generation: done.checkpoint.generation,
            bytes: done.bytes,
            predicted_s: expected.map(Seconds::value),
            took: whole,
            ended: Instant::now(),
        });
        if let Some(expected) = done.expected.and_then(|expected| expected.whole) {
            let accuracy = &mut state.comparisons.restore_time;
            accuracy.compare(expected.value(), whole.as_secs_f64());
        }
        drop(state);
        self.tell(|| StoreEvent::Restored {
            job: done.checkpoint.job.clone(),
            generation: done.checkpoint.generation,
            id: done.checkpoint.id.clone(),
            bytes: done.bytes,
            elapsed: whole,
        });
    }

    /// Records that `bytes` of pages were sent over the link between this node and `peer`, limited by the link.
    pub fn copied(&self, peer: &str, bytes: u64, elapsed: Duration) {
        if bytes < LINK_LEAST_BYTES {
            return;
        }
        let now = self.now();
        let mut state = self.state();
        if let Some(link) = state.peers.link(peer) {
            self.sample(&mut state.estimator, link, now, bytes, elapsed);
        }
    }

    /// Records a lower bound for the link's bandwidth: the sender, not the link, was the bottleneck. Used where
    /// nothing better is known.
    pub fn copied_at_least(&self, peer: &str, bytes: u64, elapsed: Duration) {
        let now = self.now();
        let size = Bytes::new(bytes);
        let known = {
            let state = self.state();
            let link = state.peers.known(peer);
            link.and_then(|link| state.estimator.rates(link, now).of(size).known().ok())
        };
        let is_news = known.is_none_or(|known| size.at(known.p50).value() > elapsed.as_secs_f64());
        if is_news {
            self.copied(peer, bytes, elapsed);
        }
    }

    /// Records a verification read at full speed. It measures the medium alone, with one thread, and is used only
    /// where no restore was measured.
    pub fn scrubbed(&self, done: &ScrubDone) {
        let now = self.now();
        let mut state = self.state();
        let channel = state.channel(Direction::Read, Lane::Probed);
        self.sample(&mut state.estimator, channel, now, done.bytes, done.elapsed);
    }

    /// Records that `bytes` came back from an object store, in `elapsed`.
    pub fn recalled(&self, bytes: u64, elapsed: Duration) {
        let now = self.now();
        let mut state = self.state();
        let channel = state.channel(Direction::Read, Lane::Recalled);
        self.sample(&mut state.estimator, channel, now, bytes, elapsed);
    }

    /// Records that a lazy restore brought `bytes` of this node's pages in `elapsed`, while the processes ran.
    pub fn brought(&self, bytes: u64, elapsed: Duration) {
        let now = self.now();
        let mut state = self.state();
        let channel = state.channel(Direction::Read, Lane::Lazy);
        self.sample(&mut state.estimator, channel, now, bytes, elapsed);
    }

    /// Records the time until the processes of a lazy restore ran, as its client measured it.
    pub fn ran_lazily(&self, start: Duration) {
        let now = self.now();
        let mut state = self.state();
        let channel = state.channel(Direction::Read, Lane::Lazy);
        self.judged(state.estimator.answered(channel, now, now, seconds(start)));
    }

    /// Records the sizes of dumps that were made before the start, from their lines of the listing. The memory of
    /// their tasks is no longer known: the bytes that each dump moved stand for it.
    pub fn learn_history(&self, records: &[control::Checkpoint]) {
        let (now, today) = (self.now(), unix_ms());
        let mut state = self.state();
        let State { jobs, sizes, .. } = &mut *state;
        let mut records: Vec<_> = records
            .iter()
            .filter(|record| record.generation > 0 && record.memory_bytes > 0)
            .collect();
        records.sort_by_key(|record| record.created_unix_ms);
        for record in records {
            let age = Seconds::from_millis(today.saturating_sub(record.created_unix_ms));
            let (at, memory) = (now.before(age), Bytes::new(record.memory_bytes));
            let (job, kind) = jobs.dumped(&record.job, "", at, memory, sizes);
            let kind_of_dump = match record.parent_generation {
                0 => DumpKind::Full,
                _ => DumpKind::Incremental,
            };
            let dumped = Dumped {
                at,
                kind: kind_of_dump,
                memory: Memory {
                    resident: Some(memory),
                    dirty: None,
                },
                moved: memory,
                stored: Bytes::new(record.added_bytes),
            };
            if let Err(error) = sizes.dumped(job, kind, &dumped) {
                tracing::debug!(job = record.job, %error, "nothing learnt of an earlier dump");
            }
        }
    }

    pub(super) fn sample(
        &self,
        estimator: &mut Estimator,
        channel: Channel,
        now: Moment,
        bytes: u64,
        elapsed: Duration,
    ) {
        if bytes == 0 {
            // A dump without moved bytes says nothing about a bandwidth.
            return;
        }
        let transfer = Transfer {
            at: now,
            bytes: Bytes::new(bytes),
            elapsed: seconds(elapsed),
        };
        self.judged(estimator.transferred(channel, now, transfer));
    }
}

impl Comparisons {
    fn remember(&mut self, outcome: TransferOutcome) {
        if self.recent.len() == OUTCOMES_KEPT {
            self.recent.pop_front();
        }
        self.recent.push_back(outcome);
    }

    fn dumped(&mut self, expected: &Expected, done: &DumpDone<'_>) {
        let (stored, moved) = (done.stored_bytes as f64, done.moved_bytes as f64);
        self.stored.compare(expected.stored.count() as f64, stored);
        self.moved.compare(expected.moved.count() as f64, moved);
        let (predicted, took) = match done.whole {
            Some(whole) => (expected.whole, whole),
            None => (expected.transfer, done.transferred.elapsed),
        };
        if let Some(predicted) = predicted {
            self.dump_time
                .compare(predicted.value(), took.as_secs_f64());
        }
    }
}

/// Returns true if a transfer had the node to itself, or nearly so.
fn is_alone(own_bytes: u64, all_bytes: u64) -> bool {
    let (part, whole) = ALONE;
    u128::from(own_bytes) * u128::from(whole) >= u128::from(all_bytes) * u128::from(part)
}

/// Returns the part of `elapsed` in which `own` of `all` bytes move, at the rate of all.
fn share(elapsed: Duration, own: u64, all: u64) -> Duration {
    if all == 0 {
        return elapsed;
    }
    elapsed.mul_f64((own as f64 / all as f64).min(1.0))
}
