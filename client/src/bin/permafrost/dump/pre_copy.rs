//! `permafrost dump --pre-copy`: rounds that copy the memory while the process runs, then the dump.
//!
//! ```text
//! round 1 ─▶ round 2 ─▶ … ─▶ dump        each is compared with the one before, and CRIU sends only the pages that
//! all pages   modified        modified   were modified since (soft-dirty bits)
//!             since 1         since the last
//! ```
//!
//! A round is a checkpoint of its own, which nobody restores. It lasts as long as the connection that it was made
//! over: this command removes it once the next one is sealed, and permafrostd does when this command ends without
//! having done so.

use std::time::{Duration, Instant};

use permafrost_criu::rounds::{self, MOST_ROUNDS, NextStep, PreCopy, PreCopyRound, Round};
use permafrost_criu::{Criu, memory, processes, tracking};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control::{Checkpoint, request};
use permafrost_protocol::images::DumpStats;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::name_of;
use permafrost_transport::control::Connection;

use super::report::Report;
use super::{DumpArguments, take_part};

/// Longest wait for the removal of a round: permafrostd removes it anyway when the connection ends.
const PATIENCE: Duration = Duration::from_secs(5);

/// Part of a dump with `--pre-copy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Part {
    /// A dump without rounds.
    #[default]
    Whole,
    /// Round with this number, from 1.
    Round(u32),
    /// Dump that follows the rounds.
    Last,
}

impl Part {
    /// Returns true for a round.
    pub(super) fn is_round(self) -> bool {
        matches!(self, Self::Round(_))
    }

    /// Returns true for a part that another one came before.
    pub(super) fn is_later(self) -> bool {
        match self {
            Self::Whole => false,
            Self::Round(number) => number > 1,
            Self::Last => true,
        }
    }

    /// Returns the label of the part's progress.
    pub(super) fn label(self, job: &str) -> String {
        match self {
            Self::Whole | Self::Last => format!("dump {job}"),
            Self::Round(number) => format!("dump {job}, round {number}"),
        }
    }
}

/// Parses the limit of rounds.
pub(super) fn parse_limit(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(limit) if (1..=MOST_ROUNDS).contains(&limit) => Ok(limit),
        _ => Err(format!("name a number of rounds from 1 to {MOST_ROUNDS}")),
    }
}

/// Takes a dump after at most `limit` rounds; without rounds where the kernel cannot tell which pages were modified.
pub(super) fn take(
    context: &Context,
    arguments: &DumpArguments,
    limit: u32,
    interrupts: impl FnOnce() -> Result<Interrupts, Failure>,
) -> Result<Report, Failure> {
    let started = Instant::now();
    if let Some(why) = unavailable(arguments)? {
        context.remark(&format!("no pre-copy: {why}"));
        let (mut report, _) = take_part(context, arguments, interrupts)?;
        report.pre_copy = Some(PreCopy {
            rounds: Vec::new(),
            ended: None,
            not_done: Some(why.to_owned()),
        });
        return Ok(report);
    }
    let interrupts = interrupts()?;
    let mut done = Vec::new();
    let mut sizes: Vec<Round> = Vec::new();
    let mut held: Option<HeldRound> = None;
    let mut number = 0;
    let ended = loop {
        match rounds::next(&sizes, limit) {
            NextStep::Freeze(ended) => break ended,
            NextStep::Round => number += 1,
        }
        let part = arguments.part_of_pre_copy(Part::Round(number));
        let (report, connection) = take_part(context, &part, || Ok(interrupts.clone()))
            .map_err(|failure| failure.during(format!("round {number} of the pre-copy")))?;
        // The one before goes now: this one refers to the pages that it shares with that.
        drop(held.replace(HeldRound {
            name: name_of(&report.checkpoint),
            connection,
        }));
        let size = Round {
            pages: sent_pages(report.stats.as_ref(), &report.checkpoint),
            modified_pages: memory::dirty_pages(&processes::tree(arguments.pid)),
        };
        context.remark(&describe(number, size, report.total_us));
        sizes.push(size);
        done.push(PreCopyRound {
            pages: size.pages,
            modified_pages: size.modified_pages,
            total_us: report.total_us,
            frozen_us: report.stats.as_ref().map(|stats| stats.frozen_time.into()),
        });
    };
    context.remark(&format!("{}: freezing the process", ended.describe()));
    let last = arguments.part_of_pre_copy(Part::Last);
    let (mut report, _) = take_part(context, &last, || Ok(interrupts.clone()))?;
    drop(held);
    report.total_us = human::whole_micros(started.elapsed());
    report.pre_copy = Some(PreCopy {
        rounds: done,
        ended: Some(ended),
        not_done: None,
    });
    Ok(report)
}

/// Returns the reason why pages modified by the process cannot be told from others; `None` if they can. CRIU is asked:
/// a pre-dump on a kernel without soft-dirty bits is never begun.
fn unavailable(arguments: &DumpArguments) -> Result<Option<&'static str>, Failure> {
    if !tracking::permitted() {
        return Ok(Some("only root may use soft-dirty bits"));
    }
    let criu = Criu::new(arguments.criu.clone());
    // The version first: a program that is not CRIU has an error of its own.
    criu.version()?;
    Ok(match criu.has_feature("mem_dirty_track")? {
        true => None,
        false => Some(
            "this kernel cannot tell which pages a process has written (no CONFIG_MEM_SOFT_DIRTY)",
        ),
    })
}

/// Returns the number of pages that CRIU sent; as the store counted them, if CRIU left no statistics.
fn sent_pages(stats: Option<&DumpStats>, checkpoint: &Checkpoint) -> u64 {
    match stats {
        Some(stats) => stats
            .pages_written
            .saturating_add(stats.shpages_written.unwrap_or(0)),
        None => {
            checkpoint
                .memory_bytes
                .saturating_sub(checkpoint.parent_bytes)
                / PAGE_BYTES
        }
    }
}

fn describe(number: u32, round: Round, total_us: u64) -> String {
    let mut text = format!(
        "round {number}: {} pages ({}) in {}",
        round.pages,
        human::bytes(round.pages.saturating_mul(PAGE_BYTES)),
        human::micros(total_us),
    );
    if let Some(modified) = round.modified_pages {
        text += &format!(", {modified} modified meanwhile");
    }
    text
}

/// A sealed round. Dropped, it is removed.
struct HeldRound {
    /// Name of its checkpoint.
    name: String,
    /// Connection that it was made over.
    connection: Connection,
}

impl Drop for HeldRound {
    fn drop(&mut self) {
        let remove = request::Remove {
            checkpoint: self.name.clone(),
            // What is restored never depends on it.
            last: true,
            ..request::Remove::default()
        };
        let removed = self
            .connection
            .limit_waits(PATIENCE)
            .map_err(|error| error.to_string())
            .and_then(|()| {
                let removed = self.connection.call(remove);
                removed.map_err(|error| error.to_string())
            });
        if let Err(error) = removed {
            tracing::debug!(round = self.name, error, "left to permafrostd to remove");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_number_of_rounds() {
        assert_eq!(parse_limit("1"), Ok(1));
        assert_eq!(parse_limit("10"), Ok(10));
        for wrong in ["0", "11", "-1", "", "all", "1.5"] {
            assert!(
                parse_limit(wrong).unwrap_err().contains("1 to 10"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn the_pages_of_a_round_are_those_that_were_sent() {
        let checkpoint = Checkpoint {
            memory_bytes: 10 * PAGE_BYTES,
            parent_bytes: 7 * PAGE_BYTES,
            ..Checkpoint::default()
        };
        assert_eq!(sent_pages(None, &checkpoint), 3);
        let stats = DumpStats {
            pages_written: 4,
            shpages_written: Some(2),
            ..DumpStats::default()
        };
        assert_eq!(sent_pages(Some(&stats), &checkpoint), 6);
    }
}
