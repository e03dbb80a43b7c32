//! Output of a dump.

use std::fs;
use std::path::{Path, PathBuf};

use permafrost_criu::rounds::PreCopy;
use permafrost_criu::way::{ChosenWay, Way, WayReason};
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::images::DumpStats;
use permafrost_terminal::human;
use permafrost_terminal::names::name_of;
use permafrost_terminal::table::facts;
use serde::Serialize;

use crate::inspect::copies;

/// Report that a dump prints with `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// The new checkpoint.
    pub(crate) checkpoint: Checkpoint,
    /// Duration of this command, from start to end.
    pub(crate) total_us: u64,
    /// Duration of CRIU's own run.
    pub(super) criu_us: u64,
    /// Duration of the seal, with the tasks frozen (with a pre-dump: running).
    pub(super) seal_us: u64,
    /// Statistics that CRIU measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stats: Option<DumpStats>,
    /// True if the pages were compared with the job's previous checkpoint: equal pages are not stored.
    pub(super) incremental: bool,
    /// True if clean pages were not even sent, by soft-dirty bits.
    pub(super) clean_pages_left_out: bool,
    /// Way by which CRIU sent the pages.
    pub(super) way: Way,
    /// Reason for that way.
    pub(super) way_reason: WayReason,
    /// Rounds while the processes ran, with `--pre-copy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pre_copy: Option<PreCopy>,
    /// Options for which a restore has to be given a counterpart.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) restore_needs: Vec<String>,
    /// Path of CRIU's log, with `--work-dir`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) log: Option<PathBuf>,
}

pub(super) fn read_stats(work: &Path) -> Option<DumpStats> {
    DumpStats::read(&fs::read(work.join("stats-dump")).ok()?).ok()
}

pub(super) fn human_report(report: &Report) -> String {
    let checkpoint = &report.checkpoint;
    let stats = report.stats.as_ref();
    let us = |pick: fn(&DumpStats) -> u32| {
        stats
            .map(|stats| human::micros(pick(stats).into()))
            .unwrap_or_default()
    };
    let equal = if checkpoint.parent_bytes == 0 {
        String::new()
    } else {
        format!(
            "{} to {}@{}{}",
            human::bytes(checkpoint.parent_bytes),
            checkpoint.job,
            checkpoint.parent_generation,
            if report.clean_pages_left_out {
                ", clean pages left out by CRIU"
            } else {
                ""
            },
        )
    };
    facts(
        &format!("{} is sealed", name_of(checkpoint)),
        &[
            ("memory", human::bytes(checkpoint.memory_bytes)),
            ("stored", human::bytes(checkpoint.added_bytes)),
            ("equal", equal),
            (
                "zero",
                match checkpoint.zero_bytes {
                    0 => String::new(),
                    zero => human::bytes(zero),
                },
            ),
            ("copies", copies(checkpoint)),
            (
                "sent",
                ChosenWay {
                    way: report.way,
                    reason: report.way_reason,
                }
                .describe(),
            ),
            (
                "pre-copy",
                report.pre_copy.as_ref().map(rounds).unwrap_or_default(),
            ),
            ("frozen", us(|stats| stats.frozen_time)),
            (
                "of that",
                match stats {
                    Some(_) => format!(
                        "memory {} ({} of it sending), sealing {}",
                        us(|stats| stats.memdump_time),
                        us(|stats| stats.memwrite_time),
                        human::micros(report.seal_us),
                    ),
                    None => String::new(),
                },
            ),
            (
                "in all",
                format!(
                    "{}, CRIU {}",
                    human::micros(report.total_us),
                    human::micros(report.criu_us)
                ),
            ),
            ("restore needs", report.restore_needs.join(" ")),
            (
                "log",
                report
                    .log
                    .as_ref()
                    .map(|log| log.display().to_string())
                    .unwrap_or_default(),
            ),
        ],
    )
}

fn rounds(pre_copy: &PreCopy) -> String {
    match (&pre_copy.not_done, pre_copy.ended) {
        (None, Some(ended)) => format!(
            "{} in {} while the process ran; {}",
            human::count(
                pre_copy.rounds.len().try_into().unwrap_or(u64::MAX),
                "round",
                "rounds"
            ),
            human::micros(pre_copy.rounds.iter().map(|round| round.total_us).sum()),
            ended.describe(),
        ),
        (why, _) => format!("not done: {}", why.as_deref().unwrap_or_default()),
    }
}
