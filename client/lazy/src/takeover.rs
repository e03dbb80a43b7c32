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

/// Most ranges of missing pages of all processes together: a log from elsewhere must not take all memory.
const MAX_RANGES: usize = 1 << 20;

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
        let mut userfaults = self.receive_kept(keeper)?;
        let memories = replay(self.source, takeover, &past.events)?;
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
        if userfaults.is_empty() {
            self.set_restored();
            return Ok(());
        }
        Err(LazyError::Protocol {
            what: "processes that the log does not know".to_owned(),
        })
    }

    /// Receives the processes that have not ended, by their numbers.
    fn receive_kept(&self, keeper: &UnixStream) -> Result<BTreeMap<u64, Userfault>, LazyError> {
        let mut userfaults = BTreeMap::new();
        if self.next_word(keeper)? != Some(TAKEOVER) {
            let what = "no beginning of a takeover".to_owned();
            return Err(LazyError::Protocol { what });
        }
        while let Some(word) = self.next_word(keeper)? {
            if word == RESTORE_FINISHED {
                return Ok(userfaults);
            }
            let number = u64::try_from(word).map_err(|_| LazyError::Protocol {
                what: format!("{word}, which is no number of a process,"),
            })?;
            let fd = framing::recv_fd(keeper).map_err(LazyError::io("receive a process"))?;
            let userfault = Userfault::new(fd).map_err(LazyError::io("take a userfaultfd"))?;
            userfaults.insert(number, userfault);
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
    let foreign = |_| LazyError::OtherRestore;
    if takeover.pids.len() > source.manifest().spaces.len() {
        return Err(LazyError::OtherRestore);
    }
    let originals = takeover.pids.iter();
    let mut memories = originals
        .map(|pid| LackingMemory::of(source, *pid))
        .collect::<Result<Vec<_>, _>>()?;
    let mut ranges: usize = memories.iter().map(|memory| memory.missing.len()).sum();
    let mut forks = 0;
    for event in events {
        let number = usize::try_from(event.process).map_err(foreign)?;
        let memory = memories.get_mut(number).ok_or(LazyError::OtherRestore)?;
        let Some(change) = event.change else {
            forks += 1;
            ranges += memory.missing.len();
            let child = memory.fork();
            memories.push(child);
            if ranges > MAX_RANGES {
                return Err(LazyError::ManyChanges);
            }
            continue;
        };
        memory.missing.change(change);
    }
    // The event of a fork was read, and the daemon has ended before it could pass the child's userfaultfd on.
    match forks == takeover.forks {
        true => Ok(memories),
        false => Err(LazyError::LostFork),
    }
}
