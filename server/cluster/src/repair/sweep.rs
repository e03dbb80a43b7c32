//! Each node's own part: what it holds, compared with what is listed.
//!
//! What this node holds is read first, the list after: what was published before is seen. And nothing is done that
//! was not found in two sweeps in a row, as the two are changed by others in between; but what somebody has removed goes at
//! once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use permafrost_protocol::control::Checkpoint;
use permafrost_store::{Registered, Registry, Store, StoreError};

use super::plan::wanted_copies;
use super::thread::{Stop, Worker};

/// What the daemon knows and the sweep does not. Asked at every sweep.
pub trait Standing: Send + Sync {
    /// Whether what this node holds may be listed as held by it. A drained one may, as the leader moves away only
    /// what is listed; one that was removed may not.
    fn may_hold(&self) -> bool;

    /// Whether the registry is the one that this node has always known. Only then was a copy that is not known to be
    /// published, and is not listed, never listed.
    fn knows_registry(&self) -> bool;

    /// Everything that was published here is listed: whatever data the registry has, this node can rely on it from
    /// now on.
    fn all_listed(&self) {}
}

/// When the sweep does what.
#[derive(Clone, Copy, Debug)]
pub struct SweepTiming {
    /// Between two sweeps. Default 30 s.
    pub interval: Duration,
    /// From a sweep that failed to the next. Default 5 s.
    pub again: Duration,
    /// What has been provisional for so long is settled: longer than the deadline of a dump and the lease of a node
    /// together. Default 2 min.
    pub settle: Duration,
}

impl Default for SweepTiming {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(30),
            again: Duration::from_secs(5),
            settle: Duration::from_secs(120),
        }
    }
}

/// What a sweep did, by id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Listed, and marked so here only now.
    pub published: Vec<String>,
    /// Sealed, never listed, and dropped.
    pub left_over: Vec<String>,
    /// Here and listed: this node is listed as a holder now.
    pub claimed: Vec<String>,
    /// Listed as held here, and not here: no longer listed so.
    pub disclaimed: Vec<String>,
    /// Once listed, not listed any more, and dropped.
    pub dropped: Vec<String>,
    /// Once listed, not listed any more, and left alone: the registry may have lost it.
    pub in_doubt: Vec<String>,
    /// Damaged here, and listed as such only now.
    pub damaged: Vec<String>,
    /// Listed as damaged here, and not known to be here: set aside and looked at again.
    pub suspected: Vec<String>,
}

/// What was found in a sweep, to be found again in the next.
#[derive(Default)]
struct Found {
    unclaimed: HashSet<String>,
    missing: HashSet<String>,
    unlisted: HashSet<String>,
    /// Listed as damaged here, and not set aside.
    forgotten: HashSet<String>,
}

/// Compares what a node holds with what is listed, now and then.
pub struct Sweep {
    store: Arc<Store>,
    registry: Arc<dyn Registry>,
    node: String,
    standing: Arc<dyn Standing>,
    timing: SweepTiming,
    before: Found,
    /// Those in doubt that were told of.
    told: HashSet<String>,
}

impl Sweep {
    /// Of the node called `node`, over its store and the registry that it joined with.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        registry: Arc<dyn Registry>,
        node: &str,
        standing: Arc<dyn Standing>,
        timing: SweepTiming,
    ) -> Self {
        Self {
            store,
            registry,
            node: node.to_owned(),
            standing,
            timing,
            before: Found::default(),
            told: HashSet::new(),
        }
    }

    /// Begins, on a thread of its own: says what it has not, and sweeps for the first time after one interval.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(mut self) -> std::io::Result<Worker> {
        let stop = Stop::default();
        Worker::start("sweep", stop.clone(), move || {
            if let Err(error) = self.disclaim_missing() {
                tracing::warn!(%error, "not compared with what is listed");
            }
            if let Err(error) = self.remember_damage() {
                tracing::warn!(%error, "not known yet which copies were damaged");
            }
            let mut pause = self.timing.interval;
            while !stop.after(pause) {
                pause = self.timing.interval;
                if let Err(error) = self.once() {
                    tracing::warn!(%error, "sweep not done");
                    // Where nodes die, etcd elects: that is over soon, and space waits.
                    pause = self.timing.again;
                }
            }
        })
    }

    /// Takes this node off the holders of what it has not. A node whose region is new under its old name would count
    /// as a copy until its second sweep, and others be drained or removed meanwhile. Their ids.
    ///
    /// # Errors
    /// The registry does not answer, or refuses this node.
    pub fn disclaim_missing(&self) -> Result<Vec<String>, StoreError> {
        let mut disclaimed = Vec::new();
        for entry in self.registry.list("")? {
            if entry.nodes.contains(&self.node) && self.disclaim(&entry)? {
                disclaimed.push(entry.checkpoint.id);
            }
        }
        Ok(disclaimed)
    }

    /// Sets aside what is listed as damaged here, as it was found before this start of the daemon, and has it read. Their
    /// ids.
    ///
    /// # Errors
    /// The registry does not answer.
    pub fn remember_damage(&self) -> Result<Vec<String>, StoreError> {
        let listed = self.registry.list("")?;
        let forgotten = listed.iter().filter(|entry| self.is_forgotten(entry));
        Ok(forgotten.map(|entry| self.suspect(entry)).collect())
    }

    /// Listed as damaged here, and not known to be.
    fn is_forgotten(&self, entry: &Registered) -> bool {
        let id = &entry.checkpoint.id;
        entry.is_damaged_on(&self.node) && self.store.damage(id).is_none() && self.store.holds(id)
    }

    fn suspect(&self, entry: &Registered) -> String {
        let id = entry.checkpoint.id.clone();
        // In this order: what is set aside is no news to the scrub.
        self.store.suspect(&id);
        self.store
            .set_aside(&id, "it was found damaged before, and was not read since");
        id
    }

    /// One sweep.
    ///
    /// # Errors
    /// The registry does not answer, or refuses this node; the journal cannot be written. What was done is done.
    pub fn once(&mut self) -> Result<Swept, StoreError> {
        // Not after the list, see above.
        let provisional = self.store.unpublished(self.timing.settle);
        let marks = self.store.marks();
        let listed = self.registry.list("")?;
        let mut swept = Swept::default();
        // What was sealed before etcd lost its data may have been listed in it.
        if self.standing.knows_registry() {
            let settled = self.store.settle_against(provisional, &listed)?;
            swept.published = settled.published;
            swept.left_over = settled.dropped;
        }
        let by_id: HashMap<&str, &Registered> = listed
            .iter()
            .map(|entry| (entry.checkpoint.id.as_str(), entry))
            .collect();
        let mut found = Found::default();
        for mark in marks.iter().filter(|mark| mark.published) {
            match by_id.get(mark.id.as_str()) {
                Some(entry) if !entry.nodes.contains(&self.node) => {
                    found.unclaimed.insert(mark.id.clone());
                }
                Some(_) => {}
                None => {
                    found.unlisted.insert(mark.id.clone());
                }
            }
        }
        if found.unlisted.is_empty() {
            self.standing.all_listed();
        }
        let here: HashSet<&str> = marks.iter().map(|mark| mark.id.as_str()).collect();
        let mut damaged = Vec::new();
        for entry in listed.iter().filter(|e| e.nodes.contains(&self.node)) {
            let id = &entry.checkpoint.id;
            if !here.contains(id.as_str()) {
                found.missing.insert(id.clone());
            } else if self.is_forgotten(entry) {
                found.forgotten.insert(id.clone());
            } else if !entry.is_damaged_on(&self.node) && self.store.damage(id).is_some() {
                damaged.push(entry);
            }
        }
        for entry in damaged {
            self.registry
                .set_damaged(&entry.checkpoint, &self.node, true)
                .or_else(|error| match error {
                    StoreError::NotFound { .. } => Ok(()),
                    error => Err(error),
                })?;
            swept.damaged.push(entry.checkpoint.id.clone());
        }
        let before = std::mem::replace(&mut self.before, found);
        let again = |now: &HashSet<String>, then: &HashSet<String>| {
            let mut both: Vec<String> = now.intersection(then).cloned().collect();
            both.sort_unstable();
            both
        };

        if self.standing.may_hold() {
            for id in again(&self.before.unclaimed, &before.unclaimed) {
                let Some(entry) = by_id.get(id.as_str()) else {
                    continue;
                };
                if self.is_same(entry) && self.claim(entry)? {
                    swept.claimed.push(id);
                } else if self.is_spare(entry) && self.store.roll_back(&id, true)? {
                    tracing::info!(%id, "damaged, and listed on others: dropped here");
                    swept.dropped.push(id);
                }
            }
        }
        for id in again(&self.before.forgotten, &before.forgotten) {
            if let Some(entry) = by_id.get(id.as_str()) {
                swept.suspected.push(self.suspect(entry));
            }
        }
        for id in again(&self.before.missing, &before.missing) {
            let Some(entry) = by_id.get(id.as_str()) else {
                continue;
            };
            if self.disclaim(entry)? {
                swept.disclaimed.push(id);
            }
        }
        let mut unlisted: Vec<String> = self.before.unlisted.iter().cloned().collect();
        unlisted.sort_unstable();
        for id in unlisted {
            // Somebody has said so, which nobody takes back: its space is not kept for a second look.
            if self.registry.is_withdrawn(&self.store.line_of(&id))? {
                if self.store.roll_back(&id, true)? {
                    tracing::info!(%id, "removed from the cluster's list: dropped here");
                    swept.dropped.push(id);
                }
                continue;
            }
            if !before.unlisted.contains(&id) {
                continue;
            }
            if self.told.insert(id.clone()) {
                tracing::error!(%id, "not listed any more, and nobody has removed it: kept. If etcd's data was lost, `permafrost node rebuild` lists it again");
            }
            swept.in_doubt.push(id);
        }
        self.told.retain(|id| swept.in_doubt.contains(id));
        Ok(swept)
    }

    /// Whether what is here is what is listed under its id.
    fn is_same(&self, entry: &Registered) -> bool {
        let id = &entry.checkpoint.id;
        if self.store.damage(id).is_some() {
            return false;
        }
        match self.store.open_fetch(id, "") {
            Ok(held) if held.content_digest() == entry.content_digest => true,
            Ok(_) => {
                tracing::error!(%id, "what is here is not what is listed under its id");
                false
            }
            // A damaged one is no copy.
            Err(_) => false,
        }
    }

    /// Whether a copy that is not listed is damaged, and others are enough without it: the leader has taken it off the list,
    /// and its word to drop it was lost.
    fn is_spare(&self, entry: &Registered) -> bool {
        self.store.damage(&entry.checkpoint.id).is_some()
            && entry.good().count() >= wanted_copies(entry)
    }

    /// Lists this node as a holder. The leader may have had the copy dropped at this moment: then not.
    fn claim(&self, entry: &Registered) -> Result<bool, StoreError> {
        let id = &entry.checkpoint.id;
        if !self.set_holder(&entry.checkpoint, true)? {
            return Ok(false);
        }
        if !self.store.holds(id) {
            self.set_holder(&entry.checkpoint, false)?;
            return Ok(false);
        }
        tracing::info!(%id, "found here, and listed as held here");
        Ok(true)
    }

    /// Takes this node off the list of holders; never the last one, which at least says who had it.
    fn disclaim(&self, entry: &Registered) -> Result<bool, StoreError> {
        let id = &entry.checkpoint.id;
        if self.store.holds(id) {
            return Ok(false);
        }
        if entry.nodes.len() < 2 {
            tracing::error!(%id, "listed as held here alone, and not here");
            return Ok(false);
        }
        tracing::error!(%id, "listed as held here, and not here: taken off the list");
        self.set_holder(&entry.checkpoint, false)
    }

    /// False: it has been removed meanwhile.
    fn set_holder(&self, checkpoint: &Checkpoint, holds: bool) -> Result<bool, StoreError> {
        match self.registry.set_holder(checkpoint, &self.node, holds) {
            Ok(()) => Ok(true),
            Err(StoreError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
