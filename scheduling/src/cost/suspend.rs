//! Suspending: to a medium, to a medium and another node, in memory.

use super::node::{NodeFigures, Replica, SwapFigures, moved};
use super::{Copies, Dump, NoCost, Part, Tally, TaskCost, TaskFigures, TimeSpread};
use crate::figure::{Estimate, Missing};
use crate::quantity::{Bytes, BytesPerSecond, Ratio, Seconds};

/// Rounds of a pre-copy: a task that dirties at half the rate of writing has 3 % left by then, and each further round
/// delays the preempting party.
const ROUNDS: u32 = 5;

/// Returns the cost of dumping `task` on `node`, and of restoring it there later (paper 000, §4.1):
///
/// queue_time + write/bw_write + size/bw_read
///
/// where `write` is the whole size or the difference, and the restore reads the whole. `write` counts bytes that are
/// moved to the node: an incremental dump without the kernel's dirty pages moves the whole memory, the node compares
/// it, and stores the difference. Its `incremental` size is then near the full one and its bandwidth that of
/// comparing; the paper's formula is the case of a kernel that counts dirty pages, in which as much is stored as is
/// moved. A copy on `replica` is written at the same time, and counts with the time that it takes longer. Fixed times
/// are added where they were measured.
///
/// # Errors
///
/// [`NoCost`] if a figure is missing, for an incremental dump without a checkpoint, and for a pre-copied one of a
/// task that dirties memory as fast as it is written.
pub fn checkpoint(
    task: &TaskFigures,
    dump: Dump,
    copies: Copies,
    node: &NodeFigures,
    replica: Option<&Replica<'_>>,
) -> Result<TaskCost, NoCost> {
    let wait = DumpWait::behind(Bytes::ZERO, node, replica);
    Dumps::new(task, copies, node, replica, &wait)?.cost(dump)
}

/// The wait of a dump for those before it, on a node and on the replica: the same for all tasks of the node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DumpWait {
    here: Result<Estimate<Seconds>, Missing>,
    there: Option<Result<Estimate<Seconds>, Missing>>,
}

impl DumpWait {
    /// Returns the wait behind `ahead` more bytes than the figures of the node's and the replica's queues hold.
    pub(crate) fn behind(ahead: Bytes, node: &NodeFigures, replica: Option<&Replica<'_>>) -> Self {
        Self {
            here: node.write_wait(ahead),
            there: replica.map(|replica| replica.node.write_wait(ahead)),
        }
    }
}

/// The dumps of a task, with the parts of the cost that all of them have.
#[derive(Clone, Copy)]
pub(crate) struct Dumps<'a, T> {
    task: &'a TaskFigures,
    node: &'a NodeFigures,
    copy: Option<OnReplica<'a>>,
    full: Estimate<Bytes>,
    queue: Estimate<Seconds>,
    /// Cost before the pages are written.
    before: T,
}

/// The copy of a dump on another node.
#[derive(Clone, Copy)]
struct OnReplica<'a> {
    replica: &'a Replica<'a>,
    wait: Result<Estimate<Seconds>, Missing>,
}

impl<'a, T: Tally + Clone> Dumps<'a, T> {
    /// Adds up what the dumps of a task have in common.
    ///
    /// # Errors
    ///
    /// [`NoCost`] if no dump has a cost: without the size of the task, the wait, the bandwidth of restores, or, if a
    /// copy is wanted, a replica.
    pub(crate) fn new(
        task: &'a TaskFigures,
        copies: Copies,
        node: &'a NodeFigures,
        replica: Option<&'a Replica<'a>>,
        wait: &DumpWait,
    ) -> Result<Self, NoCost> {
        let full = task.full.known()?;
        let copy = match (copies, replica, wait.there) {
            (Copies::Local, ..) => None,
            (Copies::Replicated, Some(replica), Some(wait)) => Some(OnReplica { replica, wait }),
            (Copies::Replicated, ..) => return Err(NoCost::NoReplica),
        };
        let queue = wait.here?;
        let before = T::nothing()
            .with(Part::WriteQueue, queue)
            .with_fixed(Part::DumpStart, node.dump_start.known())
            .with_fixed(Part::RestoreStart, node.restore_start.known())
            .with(Part::Read, moved(&full, &node.read)?);
        Ok(Self {
            task,
            node,
            copy,
            full,
            queue,
            before,
        })
    }

    /// Returns the cost of one of them.
    ///
    /// # Errors
    ///
    /// [`NoCost`] as of [`checkpoint`].
    pub(crate) fn cost(&self, dump: Dump) -> Result<T, NoCost> {
        let Self { task, node, .. } = self;
        let mut cost = self.before.clone();
        let written = match dump {
            Dump::Full => self.full,
            Dump::Incremental if task.has_checkpoint => task.incremental.known()?,
            Dump::Incremental => return Err(NoCost::NoCheckpoint),
            Dump::PreCopied => {
                let mut rate = node.write.of(self.full.p50).known()?;
                if let Some(copy) = self.copy {
                    rate = slower(rate, rate_to(copy.replica, self.full.p50)?);
                }
                let rounds = pre_copy(&self.full, &rate, &task.dirty_rate.known()?)?;
                cost = cost.with(Part::PreCopy, rounds.running);
                rounds.left
            }
        };
        let rate = match dump {
            Dump::Incremental => node.incremental(written.p50).known()?,
            Dump::Full | Dump::PreCopied => node.write.of(written.p50).known()?,
        };
        let write = written.at(&rate);
        cost = cost.with(Part::Write, write);
        if let Some(OnReplica { replica, wait }) = self.copy {
            let here = TimeSpread::of(&self.queue).plus(TimeSpread::of(&write));
            let queue = wait?;
            let write = written.at(&rate_to(replica, written.p50)?);
            cost.aged(queue.age.max(write.age));
            let there = TimeSpread::of(&queue).plus(TimeSpread::of(&write));
            cost.add(Part::Replicate, there.beyond(here));
        }
        Ok(cost)
    }
}

/// Returns the rate of a stream to a replica: the slower of its medium's and the link's.
fn rate_to(replica: &Replica<'_>, size: Bytes) -> Result<Estimate<BytesPerSecond>, Missing> {
    let medium = replica.node.write.of(size).known()?;
    Ok(slower(medium, replica.link.of(size).known()?))
}

fn slower(a: Estimate<BytesPerSecond>, b: Estimate<BytesPerSecond>) -> Estimate<BytesPerSecond> {
    Estimate {
        p50: a.p50.slower(b.p50),
        p95: a.p95.slower(b.p95),
        age: a.age.max(b.age),
        samples: a.samples.min(b.samples),
    }
}

struct PreCopy {
    /// Time of the rounds, in which the task runs.
    running: Estimate<Seconds>,
    /// Bytes that are still to be written when the task is frozen.
    left: Estimate<Bytes>,
}

/// Simulates rounds of writing the memory that was dirtied during the previous round: each takes (dirty rate ÷ write
/// rate) of the last (pre-copy as in Clark et al., NSDI '05). The 95th percentile dirties fast and writes slowly;
/// both must converge.
fn pre_copy(
    size: &Estimate<Bytes>,
    write: &Estimate<BytesPerSecond>,
    dirty: &Estimate<BytesPerSecond>,
) -> Result<PreCopy, NoCost> {
    let rounds = |size: Bytes, write: BytesPerSecond, dirty: BytesPerSecond| {
        if dirty >= write {
            return Err(NoCost::DirtiesTooFast);
        }
        let shrink = Ratio::clamped(dirty.value() / write.value());
        let (mut running, mut left) = (Seconds::ZERO, size);
        for _ in 0..ROUNDS {
            running = running.plus(left.at(write));
            left = left.times(shrink);
        }
        Ok((running, left))
    };
    // A dirty rate is given as "no slower than", so its p95 is below its median; take the faster of the two.
    let fastest = if dirty.p95 > dirty.p50 {
        dirty.p95
    } else {
        dirty.p50
    };
    let (running, left) = rounds(size.p50, write.p50, dirty.p50)?;
    let (long_running, much_left) = rounds(size.p95, write.p95, fastest)?;
    let age = size.age.max(write.age).max(dirty.age);
    let samples = size.samples.min(write.samples).min(dirty.samples);
    Ok(PreCopy {
        running: Estimate {
            p50: running,
            p95: long_running,
            age,
            samples,
        },
        left: Estimate {
            p50: left,
            p95: much_left,
            age,
            samples,
        },
    })
}

/// Returns the cost of stopping `task` and leaving it in memory (paper 001): the memory that the preempting party
/// `needs` beyond the free memory is paged out now and paged in later.
///
/// The whole task has to fit free swap: later arrivals may push out the rest of it, too (paper 001, §III).
///
/// # Errors
///
/// [`NoCost`] if its memory or swap's bandwidth is not known, or it would not fit.
pub fn in_memory(task: &TaskFigures, needs: Bytes, swap: &SwapFigures) -> Result<TaskCost, NoCost> {
    in_memory_as(task, needs, swap)
}

pub(crate) fn in_memory_as<T: Tally>(
    task: &TaskFigures,
    needs: Bytes,
    swap: &SwapFigures,
) -> Result<T, NoCost> {
    let resident = task.resident.known()?;
    let largest = resident.p50.max(resident.p95);
    if largest > swap.free_swap {
        return Err(NoCost::Swap {
            needed: largest,
            free: swap.free_swap,
        });
    }
    let short = needs.less(swap.free_memory);
    let paged = Estimate {
        p50: short.min(resident.p50),
        p95: short.min(largest),
        ..resident
    };
    if paged.p95 == Bytes::ZERO {
        return Ok(T::nothing());
    }
    Ok(T::nothing()
        .with(Part::PageOut, paged.at(&swap.write.known()?))
        .with(Part::PageIn, paged.at(&swap.read.known()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimator::SizedRates;
    use crate::figure::{Figure, What};
    use crate::{NodeId, TaskId, cost::TaskResources};

    fn gb(n: u64) -> Bytes {
        Bytes::new(n * 1_000_000_000)
    }

    fn rate(gb_per_s: f64) -> Figure<BytesPerSecond> {
        Figure::given(BytesPerSecond::new(gb_per_s * 1e9).unwrap())
    }

    fn seconds(n: u64) -> Figure<Seconds> {
        Figure::given(Seconds::from_millis(n * 1000))
    }

    /// Writes 1 GB/s, reads 2 GB/s, 3 GB wait.
    fn node() -> NodeFigures {
        NodeFigures {
            write: SizedRates::uniform(rate(1.0)),
            read: SizedRates::uniform(rate(2.0)),
            write_queue: Figure::given(gb(3)),
            ..NodeFigures::unknown(NodeId(1))
        }
    }

    /// Makes a task of 10 GB, of which 1 GB is new.
    fn task() -> TaskFigures {
        TaskFigures {
            full: Figure::given(gb(10)),
            incremental: Figure::given(gb(1)),
            has_checkpoint: true,
            resident: Figure::given(gb(10)),
            ..TaskFigures::unknown(TaskId(1), TaskResources::ZERO)
        }
    }

    fn close(time: Seconds, expected: f64) {
        assert!(
            (time.value() - expected).abs() < 1e-6,
            "{time:?} is not {expected}"
        );
    }

    #[test]
    fn a_full_dump_costs_what_the_paper_says() {
        let cost = checkpoint(&task(), Dump::Full, Copies::Local, &node(), None).unwrap();
        // 3 s of queue, 10 s to write, 5 s to read.
        close(cost.overhead().p50, 18.0);
        close(cost.delay().p50, 13.0);
        assert!(matches!(
            cost.omits(),
            Some(Missing::NotGiven {
                what: What::Latency
            })
        ));
    }

    #[test]
    fn an_incremental_dump_writes_the_difference_and_reads_the_whole() {
        let cost = checkpoint(&task(), Dump::Incremental, Copies::Local, &node(), None).unwrap();
        close(cost.overhead().p50, 3.0 + 1.0 + 5.0);
        let first = TaskFigures {
            has_checkpoint: false,
            ..task()
        };
        let refused = checkpoint(&first, Dump::Incremental, Copies::Local, &node(), None);
        assert_eq!(refused, Err(NoCost::NoCheckpoint));
    }

    #[test]
    fn an_incremental_dump_goes_by_the_bandwidth_of_comparing_where_that_is_known() {
        let node = NodeFigures {
            compare: SizedRates::uniform(rate(4.0)),
            ..node()
        };
        // Without dirty pages all of the 10 GB are moved, and compared at 4 GB/s.
        let whole = TaskFigures {
            incremental: Figure::given(gb(10)),
            ..task()
        };
        let cost = checkpoint(&whole, Dump::Incremental, Copies::Local, &node, None).unwrap();
        close(cost.overhead().p50, 3.0 + 2.5 + 5.0);
        let full = checkpoint(&whole, Dump::Full, Copies::Local, &node, None).unwrap();
        close(full.overhead().p50, 18.0);
    }

    #[test]
    fn fixed_times_are_added_when_they_are_known() {
        let node = NodeFigures {
            dump_start: seconds(1),
            restore_start: seconds(2),
            ..node()
        };
        let cost = checkpoint(&task(), Dump::Full, Copies::Local, &node, None).unwrap();
        close(cost.overhead().p50, 21.0);
        assert_eq!(cost.omits(), None);
    }

    #[test]
    fn a_copy_costs_what_it_takes_longer() {
        let cost = |link: f64, queued: u64| {
            let other = NodeFigures {
                write_queue: Figure::given(gb(queued)),
                ..node()
            };
            let replica = Replica {
                link: &SizedRates::uniform(rate(link)),
                node: &other,
            };
            checkpoint(
                &task(),
                Dump::Full,
                Copies::Replicated,
                &node(),
                Some(&replica),
            )
            .unwrap()
        };
        // As fast as this node: nothing.
        close(cost(5.0, 3).delay().p50, 13.0);
        // 20 s over the link, 3 s of queue there, against 13 s here.
        close(cost(0.5, 3).delay().p50, 23.0);
        close(cost(5.0, 30).delay().p50, 40.0);
        let alone = checkpoint(&task(), Dump::Full, Copies::Replicated, &node(), None);
        assert_eq!(alone, Err(NoCost::NoReplica));
    }

    #[test]
    fn a_pre_copied_dump_freezes_for_what_was_dirtied_last() {
        let task = TaskFigures {
            dirty_rate: rate(0.1),
            ..task()
        };
        let cost = checkpoint(&task, Dump::PreCopied, Copies::Local, &node(), None).unwrap();
        // Rounds of 10, 1, 0.1, 0.01, 0.001 s; 100 kB are left for the freeze.
        close(cost.delay().p50, 3.0 + 11.111 + 0.0001);
        close(cost.overhead().p50, 3.0 + 0.0001 + 5.0);
        let fast = TaskFigures {
            dirty_rate: rate(1.0),
            ..task
        };
        let refused = checkpoint(&fast, Dump::PreCopied, Copies::Local, &node(), None);
        assert_eq!(refused, Err(NoCost::DirtiesTooFast));
    }

    #[test]
    fn suspending_in_memory_pages_out_what_is_short() {
        let swap = SwapFigures {
            free_memory: gb(2),
            free_swap: gb(20),
            write: rate(0.5),
            read: rate(1.0),
        };
        let cost = in_memory(&task(), gb(6), &swap).unwrap();
        close(cost.delay().p50, 8.0);
        close(cost.overhead().p50, 12.0);
        assert_eq!(in_memory(&task(), gb(2), &swap).unwrap().parts().count(), 0);
        // Never more than the task has.
        close(in_memory(&task(), gb(90), &swap).unwrap().delay().p50, 20.0);
        let little = SwapFigures {
            free_swap: gb(9),
            ..swap
        };
        assert!(matches!(
            in_memory(&task(), gb(2), &little),
            Err(NoCost::Swap { .. })
        ));
    }

    #[test]
    fn what_is_missing_is_named() {
        let unknown = NodeFigures {
            write_queue: Figure::not_given(What::Queue),
            ..node()
        };
        let none = checkpoint(&task(), Dump::Full, Copies::Local, &unknown, None).unwrap_err();
        assert_eq!(none.to_string(), "the length of the queue was not given");
    }
}
