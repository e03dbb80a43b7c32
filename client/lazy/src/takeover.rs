//! Lazy restores whose daemon has ended, and that another one takes over.
//!
//! The keeper hands over the processes again, and the log of the events that the first daemon had read. Each process's
//! missing pages are those of its images, changed as the log says. Pages that the first daemon has placed still count as
//! missing: the kernel refuses them, as they are there.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use permafrost_criu::source::LazySource;
use permafrost_transport::framing;
use permafrost_userfault::{EventLog, PastEvent, PastEvents, Userfault};

use super::tasks::{LackingMemory, MAKE_LOG, Shared, Task, subject};
use super::{LazyError, RESTORE_FINISHED, TAKEOVER};

/// Most ranges of missing pages of all forked processes together, some 100 MB: a log from elsewhere must not take all
/// memory.
const MAX_FORKED_RANGES: usize = 1 << 21;

/// Most ranges of missing pages that the events of a log move, some 10 s: one from elsewhere must not take all processor
/// time.
const MAX_MOVED_RANGES: usize = 1 << 25;

/// State of a lazy restore whose daemon has ended.
#[derive(Debug)]
pub struct OrphanedRestore<'a> {
    /// Pids of the processes that CRIU handed over, as they were dumped, in that order.
    pub pids: &'a [u32],
    /// Number of forked processes whose userfaultfds the keeper has received.
    pub forks: u64,
    /// Log of the events.
    pub log: OwnedFd,
}

impl Shared<'_> {
    /// Takes over the processes that a keeper hands over on `keeper`, and has their faults reported again.
    ///
    /// # Errors
    /// The log is of another restore, lacks events, or does not fit the checkpoint; the keeper breaks the protocol; the
    /// process of a fork is not with the keeper.
    pub(super) fn take_over(
        &mut self,
        keeper: &UnixStream,
        takeover: &OrphanedRestore<'_>,
    ) -> Result<(), LazyError> {
        let past = PastEvents::read(takeover.log.as_fd())
            .map_err(LazyError::io("read the log of the daemon that has ended"))?;
        if past.subject != subject(self.source) {
            return Err(LazyError::OtherRestore);
        }
        if past.is_incomplete {
            return Err(LazyError::ManyChanges);
        }
        let memories = replay(self.source, takeover, &past.events)?;
        let mut userfaults = self.receive_kept(keeper, memories.len())?;
        let log = EventLog::create(past.subject, &past.events);
        *self.log.lock() = log.map_err(LazyError::io(MAKE_LOG))?;
        self.is_taken_over = true;
        for (number, memory) in (0..).zip(memories) {
            let Some(userfault) = userfaults.remove(&number) else {
                // It has ended.
                continue;
            };
            let task = Task::new(memory, userfault);
            let userfault = task.userfault.clone();
            self.add_numbered(number, task)?;
            let woken = userfault.wake_all();
            woken.map_err(LazyError::io("wake a process"))?;
        }
        self.set_next(takeover.pids.len() as u64 + takeover.forks);
        self.set_restored();
        Ok(())
    }

    /// Receives those of `processes` that have not ended, by their numbers.
    fn receive_kept(
        &self,
        keeper: &UnixStream,
        processes: usize,
    ) -> Result<BTreeMap<u64, Userfault>, LazyError> {
        let mut userfaults = BTreeMap::new();
        if self.next_word(keeper)? != Some(TAKEOVER) {
            let what = "no beginning of a takeover".to_owned();
            return Err(LazyError::Protocol { what });
        }
        while let Some(word) = self.next_word(keeper)? {
            if word == RESTORE_FINISHED {
                return Ok(userfaults);
            }
            let number = usize::try_from(word).ok();
            let number = number.filter(|number| *number < processes);
            let number = number.ok_or_else(|| LazyError::Protocol {
                what: format!("{word}, which is no number of a process,"),
            })?;
            let fd = framing::recv_fd(keeper).map_err(LazyError::io("receive a process"))?;
            let userfault = Userfault::new(fd).map_err(LazyError::io("take a userfaultfd"))?;
            userfaults.insert(number as u64, userfault);
        }
        Err(LazyError::GivenUp)
    }
}

/// Returns the memory of all processes, also of those that have ended, by their numbers.
fn replay(
    source: &dyn LazySource,
    takeover: &OrphanedRestore<'_>,
    events: &[PastEvent],
) -> Result<Vec<LackingMemory>, LazyError> {
    if takeover.pids.len() > source.manifest().spaces.len() {
        return Err(LazyError::OtherRestore);
    }
    let originals = takeover.pids.iter();
    let memories = originals
        .map(|pid| LackingMemory::of(source, *pid))
        .collect::<Result<Vec<_>, _>>()?;
    let originals = memories.len();
    let memories = apply(memories, events)?;
    // The event of a fork was read, and the daemon has ended before it could pass the child's userfaultfd on.
    match (memories.len() - originals) as u64 == takeover.forks {
        true => Ok(memories),
        false => Err(LazyError::LostFork),
    }
}

/// Applies events to the memory of processes, and adds those that they fork.
fn apply(
    mut memories: Vec<LackingMemory>,
    events: &[PastEvent],
) -> Result<Vec<LackingMemory>, LazyError> {
    let (mut moved_ranges, mut forked_ranges) = (0, 0);
    for event in events {
        let number = usize::try_from(event.process).map_err(|_| LazyError::OtherRestore)?;
        let memory = memories.get_mut(number).ok_or(LazyError::OtherRestore)?;
        match event.change {
            Some(change) => moved_ranges += memory.missing.change(change),
            None => {
                forked_ranges += memory.missing.len();
                let child = memory.fork();
                memories.push(child);
            }
        }
        if moved_ranges > MAX_MOVED_RANGES || forked_ranges > MAX_FORKED_RANGES {
            return Err(LazyError::ManyChanges);
        }
    }
    Ok(memories)
}
