//! Formats costs and decisions for `cost` and `plan`, as text.

use crate::human;
use clap::ValueEnum;
use permafrost_api_types::cost::{By, Copies, Cost, Mechanism, Part, Spread};

/// Nodes on which a dump must be durable before the task is ended.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum CopiesWord {
    /// On the task's node
    Local,
    /// On the task's node and another
    Replicated,
}

impl From<CopiesWord> for Copies {
    fn from(word: CopiesWord) -> Self {
        match word {
            CopiesWord::Local => Self::Local,
            CopiesWord::Replicated => Self::Replicated,
        }
    }
}

/// Percentile of a distribution that decides.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ByWord {
    /// The median
    P50,
    /// The 95th percentile
    P95,
}

impl From<ByWord> for By {
    fn from(word: ByWord) -> Self {
        match word {
            ByWord::P50 => Self::P50,
            ByWord::P95 => Self::P95,
        }
    }
}

/// Parses a way to preempt, as the API names it; hyphens are accepted too.
pub fn parse_mechanism(text: &str) -> Result<Mechanism, String> {
    let word = text.replace('-', "_");
    let known = Mechanism::ALL;
    known
        .into_iter()
        .find(|mechanism| name(*mechanism) == word)
        .ok_or_else(|| {
            let names: Vec<&str> = known.into_iter().map(name).collect();
            format!("{text:?} is none of {}", names.join(", "))
        })
}

/// Returns the API's name of a mechanism.
pub const fn name(mechanism: Mechanism) -> &'static str {
    match mechanism {
        Mechanism::Wait => "wait",
        Mechanism::Kill => "kill",
        Mechanism::Rollback => "rollback",
        Mechanism::SuspendInMemory => "suspend_in_memory",
        Mechanism::IncrementalDump => "incremental_dump",
        Mechanism::FullDump => "full_dump",
        Mechanism::PreCopiedDump => "pre_copied_dump",
    }
}

/// Returns the single word for a decision, which scripts test.
pub const fn verdict(mechanism: Mechanism) -> &'static str {
    match mechanism {
        Mechanism::Wait => "wait",
        Mechanism::Kill => "kill",
        Mechanism::Rollback => "rollback",
        Mechanism::SuspendInMemory => "suspend",
        Mechanism::IncrementalDump | Mechanism::FullDump | Mechanism::PreCopiedDump => "checkpoint",
    }
}

const fn part(part: Part) -> &'static str {
    match part {
        Part::WriteQueue => "write queue",
        Part::DumpStart => "dump start",
        Part::PreCopy => "pre-copy",
        Part::Write => "write",
        Part::Replicate => "replicate",
        Part::PageOut => "page out",
        Part::Wait => "wait",
        Part::LostWork => "lost work",
        Part::Start => "start",
        Part::ReadQueue => "read queue",
        Part::RestoreStart => "restore start",
        Part::Transfer => "transfer",
        Part::Read => "read",
        Part::PageIn => "page in",
        Part::Recall => "recall",
        Part::Faults => "faults",
    }
}

/// Formats a distribution: `1.20 s (to 1.90 s)`.
pub fn spread(spread: Spread) -> String {
    let (p50, p95) = (human::seconds(spread.p50), human::seconds(spread.p95));
    if p50 == p95 {
        return p50;
    }
    format!("{p50} (to {p95})")
}

/// Formats the parts of a cost: `write 1.20 s + read 0.80 s`; empty if they were not requested.
pub fn parts(cost: &Cost) -> String {
    let parts = cost.parts.iter().flatten();
    let parts: Vec<String> = parts
        .filter(|part| part.p95_s > 0.0)
        .map(|one| format!("{} {}", part(one.part), human::seconds(one.p50_s)))
        .collect();
    parts.join(" + ")
}

/// Formats processors and memory: `2.5 cpus, 4.0 GiB`.
pub fn resources(cpu_millis: u64, memory_bytes: u64) -> String {
    let (whole, rest) = (cpu_millis / 1_000, cpu_millis % 1_000);
    let cpus = format!("{whole}.{rest:03}");
    let cpus = cpus.trim_end_matches('0').trim_end_matches('.');
    format!("{cpus} cpus, {}", human::bytes(memory_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mechanism_has_the_name_that_the_api_gives_it() {
        for mechanism in Mechanism::ALL {
            let json = serde_json::to_value(mechanism).unwrap();
            assert_eq!(json, name(mechanism));
            assert_eq!(parse_mechanism(name(mechanism)), Ok(mechanism));
        }
        assert_eq!(parse_mechanism("full-dump"), Ok(Mechanism::FullDump));
        assert!(parse_mechanism("dump").unwrap_err().contains("full_dump"));
    }

    #[test]
    fn resources_have_no_zeros_to_spare() {
        assert_eq!(resources(2_500, 1 << 30), "2.5 cpus, 1.0 GiB");
        assert_eq!(resources(20_000, 0), "20 cpus, 0 B");
        assert_eq!(resources(7, 0), "0.007 cpus, 0 B");
    }

    #[test]
    fn a_spread_of_nothing_is_one_number() {
        let of = |p50, p95| spread(Spread { p50, p95 });
        assert_eq!(of(1.2, 1.9), "1.20 s (to 1.90 s)");
        assert_eq!(of(0.0, 0.0), "0 s");
    }
}
