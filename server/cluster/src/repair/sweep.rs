//! Each node's own part: compares its checkpoints with the listing.
//!
//! The sweep reads this node's checkpoints first and the list afterwards, so that it sees earlier publications.
//! It acts only on differences found in two sweeps in a row, because other nodes change both in between; but
//! removed checkpoints are dropped at once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use permafrost_clustered::{ClusteredStore, Registered, Registry};
use permafrost_protocol::control::Checkpoint;
use permafrost_store::{Store, StoreError};

use super::plan::wanted_copies;
use super::thread::{Stop, Worker};

/// Maximum number of checkpoints of which a sweep lists what is in the object store.
const MOST_TIERED: usize = 256;

/// Facts that the daemon knows and the sweep needs. Queried at every sweep.
pub trait Standing: Send + Sync {
    /// Returns true if this node may be listed as a holder. A drained node may, because the leader moves only
    /// listed copies away; a removed one may not.
    fn may_hold(&self) -> bool;

    /// Returns true if the registry has the data that this node knows. Only then is it certain that an unlisted
    /// copy, not known to be published, was never listed.
    fn knows_registry(&self) -> bool;

    /// Called when all checkpoints published here are listed: from now on, this node can rely on the registry's
    /// current data.
    fn all_listed(&self) {}
}

/// Intervals of the sweep.
#[derive(Clone, Copy, Debug)]
pub struct SweepTiming {
    /// Interval between two sweeps. Default 30 s.
    pub interval: Duration,
    /// Time from a failed sweep to the next. Default 5 s.
    pub again: Duration,
    /// Age from which on a provisional checkpoint is settled: longer than the deadline of a dump and the lease of a
    /// node together. Default 2 min.
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

/// Result of a sweep, as ids of checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Listed checkpoints that were marked as published here only now.
    pub published: Vec<String>,
    /// Checkpoints that were sealed, never listed, and dropped.
    pub left_over: Vec<String>,
    /// Listed checkpoints that are here: this node is now listed as a holder.
    pub claimed: Vec<String>,
    /// Checkpoints that were listed as held here, and are not here: they are no longer listed so.
    pub disclaimed: Vec<String>,
    /// Checkpoints that were listed once, are no longer listed, and were dropped.
    pub dropped: Vec<String>,
    /// Checkpoints that were listed once, are no longer listed, and were left alone: the registry may have lost
    /// them.
    pub in_doubt: Vec<String>,
    /// Checkpoints that are damaged here, and were marked as such in the listing only now.
    pub damaged: Vec<String>,
    /// Checkpoints of which more or less than was listed is in this node's object store.
    pub tiered: Vec<String>,
    /// Checkpoints that are listed as damaged here, and not known to be: they were quarantined and will be read
    /// again.
    pub suspected: Vec<String>,
}

/// Differences found in a sweep, which the next one has to find again.
#[derive(Default)]
struct Found {
    unclaimed: HashSet<String>,
    missing: HashSet<String>,
    unlisted: HashSet<String>,
    /// Checkpoints that are listed as damaged here, and not quarantined.
    forgotten: HashSet<String>,
}

/// Periodically compares a node's checkpoints with the listing.
pub struct Sweep {
    store: Arc<ClusteredStore>,
    registry: Arc<dyn Registry>,
    node: String,
    standing: Arc<dyn Standing>,
    timing: SweepTiming,
    before: Found,
    /// Checkpoints in doubt that were already reported.
    told: HashSet<String>,
}

impl Sweep {
    /// Creates the sweep of the node `node`, over its store and the registry that it joined with.
    #[must_use]
    pub fn new(
        store: Arc<ClusteredStore>,
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

    /// Starts the sweep on a thread of its own: first disclaims missing checkpoints, and sweeps for the first time
    /// after one interval.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(mut self) -> std::io::Result<Worker> {
        let stop = Stop::default();
        Worker::start("sweep", stop.clone(), move || {
            if let Err(error) = self.disclaim_missing() {
                tracing::warn!(event = "repair-sweep-comparison-failed", %error, "not compared with what is listed");
            }
            if let Err(error) = self.remember_damage() {
                tracing::warn!(event = "repair-damage-unknown", %error, "not known yet which copies were damaged");
            }
            let mut pause = self.timing.interval;
            while !stop.after(pause) {
                pause = self.timing.interval;
                if let Err(error) = self.once() {
                    tracing::warn!(event = "repair-sweep-failed", %error, "sweep not done");
                    // When nodes die, etcd elects: that is over soon, and space is waiting to be freed.
                    pause = self.timing.again;
                }
            }
        })
    }

    /// Takes this node off the holders of checkpoints that it does not have. A node whose region is new under its
    /// old name would count as a holder until its second sweep, and other nodes could be drained or removed
    /// meanwhile. Returns the ids.
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

    /// Quarantines checkpoints that are listed as damaged here, because the damage was found before this start of
    /// the daemon, and has them read. Returns the ids.
    ///
    /// # Errors
    /// The registry does not answer.
    pub fn remember_damage(&self) -> Result<Vec<String>, StoreError> {
        let listed = self.registry.list("")?;
        let forgotten = listed.iter().filter(|entry| self.is_forgotten(entry));
        Ok(forgotten.map(|entry| self.suspect(entry)).collect())
    }

    fn local(&self) -> &Store {
        self.store.local()
    }

    /// Returns true if a checkpoint is listed as damaged here, and not known to be.
    fn is_forgotten(&self, entry: &Registered) -> bool {
        let id = &entry.checkpoint.id;
        entry.is_damaged_on(&self.node)
            && self.local().damage(id).is_none()
            && self.local().holds(id)
    }

    fn suspect(&self, entry: &Registered) -> String {
        let id = entry.checkpoint.id.clone();
        // In this order: the scrub ignores a checkpoint that is already in quarantine.
        self.store.suspect(&id);
        self.local()
            .set_aside(&id, "it was found damaged before, and was not read since");
        id
    }

    /// Makes one sweep.
    ///
    /// # Errors
    /// The registry does not answer, or refuses this node; the journal cannot be written. Changes made before the
    /// error stay.
    pub fn once(&mut self) -> Result<Swept, StoreError> {
        // Before the list, see above.
        let provisional = self.store.unpublished(self.timing.settle);
        let marks = self.local().marks();
        let listed = self.registry.list("")?;
        let mut swept = Swept::default();
        // A checkpoint sealed before etcd lost its data may have been listed in it.
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
        let (mut damaged, mut tiered) = (Vec::new(), Vec::new());
        for entry in listed.iter().filter(|e| e.nodes.contains(&self.node)) {
            let id = &entry.checkpoint.id;
            if !here.contains(id.as_str()) {
                found.missing.insert(id.clone());
            } else if self.is_forgotten(entry) {
                found.forgotten.insert(id.clone());
            } else if !entry.is_damaged_on(&self.node) && self.local().damage(id).is_some() {
                damaged.push(entry);
            } else {
                tiered.push(entry);
            }
        }
        for entry in damaged {
            unless_removed(
                self.registry
                    .set_damaged(&entry.checkpoint, &self.node, true),
            )?;
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
                } else if self.is_spare(entry) && self.local().roll_back(&id, true)? {
                    tracing::info!(event = "repair-damaged-copy-dropped", %id, "damaged, and listed on others: dropped here");
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
            // The removal is recorded, and never undone: no second sweep is needed before its space is freed.
            if self.registry.is_withdrawn(&self.local().line_of(&id))? {
                if self.local().roll_back(&id, true)? {
                    tracing::info!(event = "removed-copy-dropped", %id, "removed from the cluster's list: dropped here");
                    swept.dropped.push(id);
                }
                continue;
            }
            if !before.unlisted.contains(&id) {
                continue;
            }
            if self.told.insert(id.clone()) {
                tracing::error!(event = "unlisted-copy-kept", %id, "not listed any more, and nobody has removed it: kept. If etcd's data was lost, `permafrost node rebuild` lists it again");
            }
            swept.in_doubt.push(id);
        }
        self.told.retain(|id| swept.in_doubt.contains(id));
        swept.tiered = self.list_cold(&tiered);
        Ok(swept)
    }

    /// Returns true if this node's copy has the content that is listed under its id.
    fn is_same(&self, entry: &Registered) -> bool {
        let id = &entry.checkpoint.id;
        if self.local().damage(id).is_some() {
            return false;
        }
        match self.local().open_fetch(id, "") {
            Ok(held) if held.content_digest() == entry.content_digest => true,
            Ok(_) => {
                tracing::error!(event = "copy-differs-from-listed", %id, "what is here is not what is listed under its id");
                false
            }
            // A damaged copy does not count.
            Err(_) => false,
        }
    }

    /// Returns true if an unlisted copy is damaged, and there are enough others: the leader has taken it off the
    /// list, and the request to drop it was lost.
    fn is_spare(&self, entry: &Registered) -> bool {
        self.local().damage(&entry.checkpoint.id).is_some()
            && entry.good().count() >= wanted_copies(entry)
    }

    /// Lists this node as a holder, unless the leader has had the copy dropped meanwhile.
    fn claim(&self, entry: &Registered) -> Result<bool, StoreError> {
        let id = &entry.checkpoint.id;
        if !self.set_holder(&entry.checkpoint, true)? {
            return Ok(false);
        }
        if !self.local().holds(id) {
            self.set_holder(&entry.checkpoint, false)?;
            return Ok(false);
        }
        tracing::info!(event = "copy-listed", %id, "found here, and listed as held here");
        Ok(true)
    }

    /// Takes this node off the list of holders, unless it is the last one, which at least shows where the
    /// checkpoint was.
    fn disclaim(&self, entry: &Registered) -> Result<bool, StoreError> {
        let id = &entry.checkpoint.id;
        if self.local().holds(id) {
            return Ok(false);
        }
        if entry.nodes.len() < 2 {
            tracing::error!(event = "only-copy-missing", %id, "listed as held here alone, and not here");
            return Ok(false);
        }
        tracing::error!(event = "copy-missing", %id, "listed as held here, and not here: taken off the list");
        self.set_holder(&entry.checkpoint, false)
    }

    /// Lists how much of this node's copies is in its object store, where that has changed; of no more copies in a
    /// sweep than the others can wait for. Returns their ids. It matters to costs alone: an error is logged.
    fn list_cold(&self, entries: &[&Registered]) -> Vec<String> {
        let mut listed = Vec::new();
        for entry in entries {
            match self.set_cold(entry) {
                Ok(false) => continue,
                Ok(true) => listed.push(entry.checkpoint.id.clone()),
                Err(error) => {
                    tracing::warn!(event = "objects-not-listed", %error, "not listed what is in the object store");
                    break;
                }
            }
            if listed.len() >= MOST_TIERED {
                break;
            }
        }
        listed
    }

    /// Lists how much of this node's copy is in its object store, if that has changed by a tenth, or from or to none.
    fn set_cold(&self, entry: &Registered) -> Result<bool, StoreError> {
        let bytes = self.local().cold_bytes(&entry.checkpoint.id);
        let before = entry.cold_bytes_on(&self.node);
        let is_news = (bytes == 0) != (before == 0) || bytes.abs_diff(before) > before / 10;
        if !is_news {
            return Ok(false);
        }
        unless_removed(self.registry.set_cold(&entry.checkpoint, &self.node, bytes))
    }

    /// Sets or clears this node as a holder. Returns false if the checkpoint has been removed meanwhile.
    fn set_holder(&self, checkpoint: &Checkpoint, holds: bool) -> Result<bool, StoreError> {
        unless_removed(self.registry.set_holder(checkpoint, &self.node, holds))
    }
}

/// Returns true if a change of the listing was made, false if the checkpoint has been removed meanwhile.
fn unless_removed(changed: Result<(), StoreError>) -> Result<bool, StoreError> {
    match changed {
        Ok(()) => Ok(true),
        Err(StoreError::NotFound { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}
