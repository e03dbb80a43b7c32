//! Restores of checkpoints, which keep these on a fast tier.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Restores after which a checkpoint is moved back to the fastest tier with room.
const OFTEN: u32 = 2;

/// Longest time between these restores.
const OFTEN_WITHIN: Duration = Duration::from_secs(24 * 3600);

/// Restores of checkpoints, by id.
#[derive(Clone, Debug, Default)]
pub struct Restores(HashMap<String, Restored>);

#[derive(Clone, Copy, Debug)]
struct Restored {
    last: Instant,
    /// Restores of which each came within [`OFTEN_WITHIN`] of the one before.
    count: u32,
}

impl Restores {
    /// Records that a checkpoint is restored.
    pub fn record(&mut self, id: &str, now: Instant) {
        let before = self.0.get(id);
        let recent = before.filter(|r| now.saturating_duration_since(r.last) <= OFTEN_WITHIN);
        let count = recent.map_or(0, |r| r.count).saturating_add(1);
        self.0.insert(id.to_owned(), Restored { last: now, count });
    }

    /// Records that a restore of a checkpoint begins: it is in use from now on, and counts when it has ended.
    pub fn begin(&mut self, id: &str, now: Instant) {
        let restored = self.0.entry(id.to_owned());
        let restored = restored.or_insert(Restored {
            last: now,
            count: 0,
        });
        // One long after the one before begins anew.
        if now.saturating_duration_since(restored.last) > OFTEN_WITHIN {
            restored.count = 0;
        }
        restored.last = now;
    }

    /// Returns the time since a checkpoint was restored last; `None` if that is not known.
    #[must_use]
    pub fn idle(&self, id: &str, now: Instant) -> Option<Duration> {
        let restored = self.0.get(id)?;
        Some(now.saturating_duration_since(restored.last))
    }

    /// Returns the checkpoints that are often restored; their restores are counted anew from then on.
    pub fn take_often(&mut self) -> Vec<String> {
        let often = self.0.iter_mut().filter(|(_, r)| r.count >= OFTEN);
        let taken = often.map(|(id, restored)| {
            restored.count = 0;
            id.clone()
        });
        taken.collect()
    }

    /// Forgets other checkpoints.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.0.retain(|id, _| keep(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_often_restored_if_restores_follow_each_other() {
        let (mut restores, now) = (Restores::default(), Instant::now());
        restores.record("a", now);
        restores.record("b", now);
        assert!(restores.take_often().is_empty());
        restores.record("a", now + OFTEN_WITHIN);
        let late = now + OFTEN_WITHIN + Duration::from_secs(1);
        restores.record("b", late);
        assert_eq!(restores.take_often(), ["a"]);
        assert!(restores.take_often().is_empty(), "counted anew");
        assert_eq!(restores.idle("a", late), Some(Duration::from_secs(1)));
        restores.retain(|id| id == "b");
        assert_eq!(restores.idle("a", late), None);
        // A restore is used when it begins, and counts once.
        restores.begin("c", now);
        assert_eq!(restores.idle("c", now), Some(Duration::ZERO));
        restores.record("c", now);
        assert!(restores.take_often().is_empty());
        restores.begin("c", late + OFTEN_WITHIN);
        restores.record("c", late + OFTEN_WITHIN);
        assert!(
            restores.take_often().is_empty(),
            "the one before is too long ago"
        );
    }
}
