//! What has just ended: whoever ran it may still say how long it took in all.

use std::collections::VecDeque;
use std::time::Duration;

use permafrost_scheduling::estimator::{Channel, Transfer};

use super::measure::seconds;

/// How many are remembered: the word comes within milliseconds.
const REMEMBERED: usize = 64;

/// Nobody takes so much longer than the daemon saw. Processes of terabytes are killed in less.
const LONGEST_MORE: Duration = Duration::from_secs(60);

/// A dump or a restore from its first preparation to its end, as the daemon saw it.
pub(super) struct Whole<'a> {
    /// Checkpoint id.
    pub(super) id: &'a str,
    pub(super) restored: bool,
    pub(super) bytes: u64,
    pub(super) elapsed: Duration,
    /// Of that, what does not count: it has figures of its own.
    pub(super) apart: Duration,
}

#[derive(Debug)]
struct One {
    id: String,
    restored: bool,
    channel: Channel,
    /// As it was taken in.
    transfer: Transfer,
    elapsed: Duration,
    apart: Duration,
}

/// The last ones.
#[derive(Debug, Default)]
pub(super) struct Ended(VecDeque<One>);

impl Ended {
    pub(super) fn remember(&mut self, channel: Channel, transfer: Transfer, whole: &Whole<'_>) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(One {
            id: whole.id.to_owned(),
            restored: whole.restored,
            channel,
            transfer,
            elapsed: whole.elapsed,
            apart: whole.apart,
        });
    }

    /// What is to stand in the place of what was taken in; once. Nothing of one that is not known, or of a time that
    /// cannot be: the daemon saw a part of it.
    pub(super) fn corrected(
        &mut self,
        id: &str,
        restored: bool,
        elapsed: Duration,
    ) -> Option<(Channel, Transfer)> {
        let is_it = |one: &One| one.restored == restored && one.id == id;
        let place = self.0.iter().rposition(is_it)?;
        let one = self.0.remove(place)?;
        let possible = one.elapsed..=one.elapsed.saturating_add(LONGEST_MORE);
        let corrected = Transfer {
            elapsed: seconds(elapsed.saturating_sub(one.apart)),
            ..one.transfer
        };
        possible
            .contains(&elapsed)
            .then_some((one.channel, corrected))
    }
}
