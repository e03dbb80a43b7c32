//! Handles the result of a check: a damaged checkpoint is quarantined, reported and healed.

use permafrost_protocol::control;
use permafrost_store::{Checked, ColdPages, HeldCheckpoint, PagesRead};

use super::Scrubber;

/// Way in which a damaged checkpoint was healed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// This scrub rewrote its damaged pages.
    Pages,
    /// This scrub had a fresh copy sealed in its place.
    Copy,
    /// Another thread healed it in the meantime.
    Another,
}

/// Reason why a checkpoint does not count as whole.
enum NotWhole {
    /// It is damaged.
    Damaged(String),
    /// Pages of it are in a cold tier that is away: they may be intact.
    Away(String),
    /// It was not read to its end.
    Stopped,
}

impl std::fmt::Display for NotWhole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Damaged(reason) | Self::Away(reason) => f.write_str(reason),
            Self::Stopped => f.write_str("it was not read to its end"),
        }
    }
}

impl Scrubber {
    /// Acts on the result of a check, in which the pages `read` were found intact.
    pub(super) fn conclude(
        &self,
        held: &HeldCheckpoint,
        checked: Checked,
        read: Option<&mut PagesRead>,
    ) -> Option<control::DamagedCheckpoint> {
        let name = held.name();
        let Some(first) = checked.damage.first() else {
            // Pages that were not verified may be those that were damaged.
            if checked.unverified_pages == 0 && self.store.lift(&held.id) {
                tracing::info!(
                    event = "damage-gone",
                    checkpoint = name,
                    "whole: no longer set aside"
                );
                self.list_damage(held, false);
            }
            return None;
        };
        // Before it is healed: no dump may be compared with it meanwhile, and no other copy dropped in reliance on
        // it.
        if self.store.set_aside(&held.id, first) {
            self.counters.damaged.add(1);
            let places = checked.damage.len();
            tracing::error!(event = "damage-found", checkpoint = name, id = %held.id, places, damage = first, "damaged");
            self.list_damage(held, true);
            self.suspect_others_of(held);
        }
        let healed = self.healed(held, &checked, read);
        let reason = match &healed {
            Ok(by) => {
                if *by != By::Another {
                    self.counters.mended.add(1);
                }
                self.store.lift(&held.id);
                self.list_damage(held, false);
                match by {
                    By::Pages => {
                        tracing::info!(
                            event = "damage-healed",
                            checkpoint = name,
                            "healed: its damaged pages are written anew"
                        );
                        self.suspect_damaged_of(held);
                    }
                    By::Copy | By::Another => {
                        tracing::info!(
                            event = "damage-healed-by-copy",
                            checkpoint = name,
                            "healed: a fresh copy has its place"
                        );
                    }
                }
                String::new()
            }
            Err(reason) => {
                tracing::warn!(
                    event = "damage-not-healed",
                    checkpoint = name,
                    reason,
                    "not healed: it stays set aside"
                );
                reason.clone()
            }
        };
        Some(control::DamagedCheckpoint {
            checkpoint: name,
            id: held.id.clone(),
            damage: checked.damage,
            mended: healed.is_ok(),
            reason,
            node: String::new(),
        })
    }

    /// Heals a checkpoint from another copy, and reads it again.
    ///
    /// First its damaged pages are rewritten in their places: that takes no room, and heals them for every
    /// checkpoint that shares them. Where that is not enough (the medium takes no write there; the damage is in a
    /// map, which every copy has of its own), a fresh copy replaces it.
    ///
    /// # Errors
    ///
    /// The reason why it was not healed.
    fn healed(
        &self,
        held: &HeldCheckpoint,
        checked: &Checked,
        read: Option<&mut PagesRead>,
    ) -> Result<By, String> {
        let alone = || "no other node has a copy".to_owned();
        let found = self.clustered.other_holders(held);
        let (record, holders) = found
            .map_err(|error| format!("other holders are not known: {error}"))?
            .ok_or_else(alone)?;
        if holders.is_empty() {
            return Err(alone());
        }
        let mend = self
            .mend
            .as_ref()
            .ok_or("this node fetches nothing from others")?;
        let _one = self.mending.lock();
        // A request and the background thread may have found the same damage.
        let now = self.store.held_copy(&held.id);
        if now.is_some_and(|now| now.copy != held.copy) && self.is_whole(held, None).is_ok() {
            return Ok(By::Another);
        }
        let mut why = String::new();
        if !checked.pages_damaged.is_empty() && !checked.damaged_beyond {
            let pages = mend.heal(&record, &holders, &checked.pages_damaged);
            match pages.map_err(|error| error.to_string()) {
                Ok(pages) => {
                    self.counters.pages_healed.add(pages);
                    match self.is_whole(held, read) {
                        Ok(()) if pages == 0 => return Ok(By::Another),
                        Ok(()) => return Ok(By::Pages),
                        // A fresh copy would be of all its pages, and nothing says that it needs one.
                        Err(NotWhole::Away(away)) => {
                            let done = match pages {
                                0 => "others have written its damaged pages anew",
                                _ => "its damaged pages are written anew",
                            };
                            return Err(format!("{done}, and more cannot be read: {away}"));
                        }
                        Err(again) => why = format!("damaged again: {again}"),
                    }
                }
                Err(error) => why = error,
            }
            tracing::warn!(
                event = "damage-heal-needs-copy",
                checkpoint = held.name(),
                why,
                "pages not written anew: a fresh copy is fetched"
            );
        }
        let fresh = mend.mend(&record, &holders).map_err(|e| e.to_string());
        let fresh = fresh.and_then(|()| {
            self.is_whole(held, None)
                .map_err(|damage| format!("the fresh copy is damaged, too: {damage}"))
        });
        fresh.map(|()| By::Copy).map_err(|error| {
            self.counters.mends_failed.add(1);
            match why.is_empty() {
                true => error,
                false => format!("{error} (and its pages were not written anew: {why})"),
            }
        })
    }

    /// Reads a checkpoint once more.
    ///
    /// # Errors
    /// The reason why it does not count as whole.
    fn is_whole(
        &self,
        held: &HeldCheckpoint,
        read: Option<&mut PagesRead>,
    ) -> Result<(), NotWhole> {
        let again = self.read(held, read, ColdPages::Fetch, &mut |_| {});
        let again = again.ok_or(NotWhole::Stopped)?;
        match again.damage.into_iter().next() {
            Some(damage) => Err(NotWhole::Damaged(damage)),
            None if again.unverified_pages > 0 => Err(NotWhole::Away(again.away)),
            None => Ok(()),
        }
    }

    /// Marks this node's copy in the registry as damaged, or as whole.
    fn list_damage(&self, held: &HeldCheckpoint, damaged: bool) {
        match &held.record {
            Some(record) => self.clustered.list_damage(record, damaged),
            // No manifest or catalog record here names the checkpoint.
            None => {
                if let Ok(Some((record, _))) = self.clustered.other_holders(held) {
                    self.clustered.list_damage(&record, damaged);
                }
            }
        }
    }

    /// Makes all other generations of the job suspects, because they share pages: each job's are queued once, as
    /// long as any of them waits.
    fn suspect_others_of(&self, held: &HeldCheckpoint) {
        let job = held.job();
        if job.is_empty() || !self.state().suspected_jobs.insert(job.to_owned()) {
            return;
        }
        let Ok(ids) = self.store.ids_of(job) else {
            return;
        };
        for id in ids.iter().filter(|id| **id != held.id) {
            self.suspect_quietly(id);
        }
        self.queue.woken.notify_all();
    }

    /// Makes the job's damaged generations suspects: pages that were damaged in one generation may be whole in the
    /// others now.
    fn suspect_damaged_of(&self, held: &HeldCheckpoint) {
        let Ok(ids) = self.store.ids_of(held.job()) else {
            return;
        };
        for id in ids.iter().filter(|id| **id != held.id) {
            if self.store.damage(id).is_some() {
                self.state().schedule.suspect(id);
            }
        }
        self.queue.woken.notify_all();
    }
}
