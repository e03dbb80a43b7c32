//! Recently ended dumps and restores: the client that ran one may still report its total duration.

use std::collections::VecDeque;
use std::time::Duration;

use permafrost_scheduling::estimator::{Channel, Transfer};

use super::seconds;

/// Number of ended operations that are remembered: a client reports within milliseconds.
const REMEMBERED: usize = 64;

/// Maximum by which a client's duration may exceed the daemon's. Processes of terabytes are killed in less.
const LONGEST_MORE: Duration = Duration::from_secs(60);

/// A dump or a restore from its first preparation to its end, as the daemon saw it.
pub(super) struct Whole<'a> {
    /// Id of the checkpoint.
    pub(super) id: &'a str,
    pub(super) restored: bool,
    pub(super) bytes: u64,
    pub(super) elapsed: Duration,
    /// Part of the duration that does not count, because other figures measure it.
    pub(super) apart: Duration,
}

#[derive(Debug)]
struct One {
    id: String,
    restored: bool,
    channel: Channel,
    /// Sample as it was recorded.
    transfer: Transfer,
    elapsed: Duration,
    apart: Duration,
}

/// The last dumps and restores that ended.
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

    /// Returns the corrected sample that replaces the recorded one; at most once. Returns `None` if the operation
    /// is unknown, or if the time is impossible: the daemon saw a part of it.
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
