//! Decides how long a pre-copy goes on: rounds copy the memory while the task runs, and the freeze copies the rest.
//!
//! Each round copies the pages that were modified since the one before began, and the task modifies others meanwhile.
//! Another round pays as long as that set shrinks (Clark et al., NSDI '05): a task that modifies pages faster than they
//! can be stored is frozen no shorter after ten rounds than after one.

use serde::Serialize;

/// Largest number of rounds, and the limit where the user names none.
pub const MOST_ROUNDS: u32 = 10;

/// Number of pages that are left to the freeze: CRIU sends 4 MiB within the milliseconds that any freeze takes.
pub const FEW_PAGES: u64 = 1024;

/// Share of the last set that the next one may have at most, percent. A set that shrinks by less is near the number of
/// pages that the task keeps modifying.
const SHRINKS_TO_PERCENT: u64 = 90;

/// A round that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Number of pages that CRIU sent.
    pub pages: u64,
    /// Number of pages modified since the round began; `None` if unknown.
    pub modified_pages: Option<u64>,
}

/// Rounds of a dump with `--pre-copy`.
#[derive(Debug, Serialize)]
pub struct PreCopy {
    /// The rounds, in order; empty if the dump was taken without them.
    pub rounds: Vec<PreCopyRound>,
    /// Reason why the dump followed the last round.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<RoundsEnd>,
    /// Reason why there were no rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_done: Option<String>,
}

/// Round of a pre-copy.
#[derive(Debug, Serialize)]
pub struct PreCopyRound {
    /// Number of pages that CRIU sent.
    pub pages: u64,
    /// Number of pages that the processes modified from the beginning of the round to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modified_pages: Option<u64>,
    /// Duration of the round.
    pub total_us: u64,
    /// Time for which the processes were frozen, so that CRIU could find their pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frozen_us: Option<u64>,
}

/// Next step of a pre-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// Another round, while the task runs.
    Round,
    /// The dump, with the task frozen.
    Freeze(RoundsEnd),
}

/// Reason why no further round follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoundsEnd {
    /// At most [`FEW_PAGES`] are left.
    FewModified,
    /// The set of modified pages stopped shrinking.
    NotShrinking,
    /// The limit of rounds was reached.
    Limit,
}

impl RoundsEnd {
    /// Describes the reason for a message.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::FewModified => "few modified pages are left",
            Self::NotShrinking => "the modified pages stopped becoming fewer",
            Self::Limit => "the limit of rounds is reached",
        }
    }
}

/// Returns the step that follows these rounds, of at most `limit`.
#[must_use]
pub fn next(rounds: &[Round], limit: u32) -> NextStep {
    let Some(last) = rounds.last() else {
        return NextStep::Round;
    };
    // The set that the next round would copy, and the one before it.
    let (set, before) = match last.modified_pages {
        Some(modified) => (modified, Some(last.pages)),
        None => {
            let before = rounds.len().checked_sub(2).map(|at| rounds[at].pages);
            (last.pages, before)
        }
    };
    let shrinks =
        |before: u64| u128::from(set) * 100 <= u128::from(before) * u128::from(SHRINKS_TO_PERCENT);
    if set <= FEW_PAGES {
        NextStep::Freeze(RoundsEnd::FewModified)
    } else if before.is_some_and(|before| !shrinks(before)) {
        NextStep::Freeze(RoundsEnd::NotShrinking)
    } else if u32::try_from(rounds.len()).is_ok_and(|rounds| rounds < limit) {
        NextStep::Round
    } else {
        NextStep::Freeze(RoundsEnd::Limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a pre-copy of a task with `pages` pages that modifies `rate` different pages while `per_round` are copied;
    /// returns the sets that were copied and the reason of the end.
    fn run(
        pages: u64,
        limit: u32,
        known: bool,
        modified: impl Fn(u64) -> u64,
    ) -> (Vec<u64>, RoundsEnd) {
        let (mut rounds, mut set) = (Vec::new(), pages);
        loop {
            match next(&rounds, limit) {
                NextStep::Freeze(end) => {
                    return (rounds.iter().map(|round| round.pages).collect(), end);
                }
                NextStep::Round => {
                    let meanwhile = modified(set).min(pages);
                    rounds.push(Round {
                        pages: set,
                        modified_pages: known.then_some(meanwhile),
                    });
                    set = meanwhile;
                }
            }
            assert!(rounds.len() < 1000, "it never ends");
        }
    }

    #[test]
    fn rounds_go_on_while_the_modified_set_shrinks() {
        // A twentieth of what is copied is modified meanwhile: 131,072, 6,553, 327.
        let (copied, end) = run(131_072, MOST_ROUNDS, true, |set| set / 20);
        assert_eq!(
            (copied, end),
            (vec![131_072, 6_553], RoundsEnd::FewModified)
        );
        // Without the kernel's count the set is known one round later.
        let (copied, end) = run(131_072, MOST_ROUNDS, false, |set| set / 20);
        assert_eq!(
            (copied, end),
            (vec![131_072, 6_553, 327], RoundsEnd::FewModified)
        );
    }

    #[test]
    fn a_set_that_no_longer_shrinks_ends_the_rounds() {
        for modifies_always in [1_025, 20_000, 131_072] {
            let (copied, end) = run(131_072, MOST_ROUNDS, true, |_| modifies_always);
            assert_eq!(end, RoundsEnd::NotShrinking);
            assert!(copied.len() <= 2, "{copied:?}");
        }
        let (copied, end) = run(131_072, MOST_ROUNDS, false, |_| 20_000);
        assert_eq!(
            (copied, end),
            (vec![131_072, 20_000, 20_000], RoundsEnd::NotShrinking)
        );
        // Nine tenths still count as smaller, a page more does not.
        let of = |modified| Round {
            pages: 100_000,
            modified_pages: Some(modified),
        };
        assert_eq!(next(&[of(90_000)], 2), NextStep::Round);
        assert_eq!(
            next(&[of(90_001)], 2),
            NextStep::Freeze(RoundsEnd::NotShrinking)
        );
        // The set can grow beyond what a round sent: nothing overflows.
        let huge = Round {
            pages: u64::MAX,
            modified_pages: Some(u64::MAX),
        };
        assert_eq!(next(&[huge], 2), NextStep::Freeze(RoundsEnd::NotShrinking));
    }

    #[test]
    fn no_pre_copy_has_more_rounds_than_its_limit() {
        for limit in 1..=MOST_ROUNDS {
            let (copied, end) = run(u64::MAX / 2, limit, true, |set| set / 10 * 8);
            assert_eq!(
                (copied.len(), end),
                (usize::try_from(limit).unwrap(), RoundsEnd::Limit)
            );
        }
        assert_eq!(next(&[], 1), NextStep::Round);
    }

    #[test]
    fn few_pages_are_left_to_the_freeze() {
        let of = |modified| Round {
            pages: 5_000,
            modified_pages: Some(modified),
        };
        assert_eq!(
            next(&[of(FEW_PAGES)], 9),
            NextStep::Freeze(RoundsEnd::FewModified)
        );
        assert_eq!(next(&[of(FEW_PAGES + 1)], 9), NextStep::Round);
        // A small process has one round.
        let (copied, end) = run(900, 9, true, |set| set);
        assert_eq!((copied, end), (vec![900], RoundsEnd::FewModified));
    }
}
