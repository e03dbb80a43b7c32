//! Dumps and restores on the medium of a node, one after the other (paper 000, §5.2.2).

use std::collections::BTreeMap;

use permafrost_scheduling::TaskId;
use permafrost_scheduling::quantity::{Bytes, Moment, Ratio, Seconds};
use permafrost_scheduling::queue::{
    Priority, QueueConfig, QueueError, QueueEvent, QueueTicket, TransferQueue, TransferRequest,
};

/// A transfer that runs.
#[derive(Clone, Copy, Debug)]
struct Active {
    began: Moment,
    takes: Seconds,
    bytes: Bytes,
}

/// The dumps of a node, or its restores.
#[derive(Debug)]
pub(super) struct Transfers {
    queue: TransferQueue,
    tasks: BTreeMap<QueueTicket, TaskId>,
    active: BTreeMap<QueueTicket, Active>,
}

impl Transfers {
    /// Makes an empty queue of which `at_once` run at once.
    pub(super) fn new(at_once: usize) -> Self {
        Self {
            queue: TransferQueue::new(QueueConfig {
                running: at_once,
                ..QueueConfig::default()
            }),
            tasks: BTreeMap::new(),
            active: BTreeMap::new(),
        }
    }

    /// Queues a transfer of a task.
    pub(super) fn submit(
        &mut self,
        now: Moment,
        task: TaskId,
        bytes: Bytes,
        priority: u8,
    ) -> Result<QueueTicket, QueueError> {
        let request = TransferRequest {
            bytes,
            priority: Priority::new(priority),
            start_by: None,
        };
        let ticket = self.queue.submit(now, request)?;
        self.tasks.insert(ticket, task);
        Ok(ticket)
    }

    /// Returns the next transfer that may start now, with its task.
    pub(super) fn next(&mut self, now: Moment) -> Option<(QueueTicket, TaskId)> {
        while let Some(event) = self.queue.poll(now) {
            if let QueueEvent::Start(ticket) = event
                && let Some(task) = self.tasks.get(&ticket)
            {
                return Some((ticket, *task));
            }
        }
        None
    }

    /// Records that a transfer has begun, and how long it takes.
    pub(super) fn begun(&mut self, now: Moment, ticket: QueueTicket, takes: Seconds) {
        let bytes = self.queue.bytes(ticket).unwrap_or(Bytes::ZERO);
        let active = Active {
            began: now,
            takes,
            bytes,
        };
        self.active.insert(ticket, active);
    }

    /// Removes a transfer, whether it ran or waited; returns the time for which it ran, and the bytes that it moved.
    pub(super) fn finish(&mut self, now: Moment, ticket: QueueTicket) -> (Seconds, Bytes) {
        // Unknown if the node was lost meanwhile.
        let _ = self.queue.finish(ticket);
        self.tasks.remove(&ticket);
        let Some(active) = self.active.remove(&ticket) else {
            return (Seconds::ZERO, Bytes::ZERO);
        };
        let ran = now.since(active.began);
        let share = (ran.value() / active.takes.value().max(1e-9)).min(1.0);
        (ran, active.bytes.times(Ratio::clamped(share)))
    }

    /// Records how much the running transfers still have to move, and returns the bytes of the queue.
    pub(super) fn report(&mut self, now: Moment) -> Bytes {
        for (ticket, active) in &self.active {
            let ran = now.since(active.began).value();
            let left = (1.0 - ran / active.takes.value().max(1e-9)).max(0.0);
            let left = active.bytes.times(Ratio::clamped(left));
            // It is in the queue until it is finished.
            let _ = self.queue.progressed(*ticket, left);
        }
        self.queue.queued_bytes()
    }

    /// Returns true if a transfer runs.
    pub(super) fn is_busy(&self) -> bool {
        !self.active.is_empty()
    }
}
