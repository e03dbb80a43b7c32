//! Measurements of Li et al. (Middleware '15), for comparison with those of this benchmark. Their machine: two
//! Xeon 5650, 96 GB, a 500 GB hard disk, an OCZ Deneva 2 SSD, PMFS in DRAM (§3.3.1).

use serde::Serialize;

/// A line of Table 3: a program of 5 GB checkpointed twice, 10 % of it modified in between.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Table3 {
    pub(super) tier: &'static str,
    pub(super) storage: &'static str,
    pub(super) first_s: f64,
    pub(super) second_s: f64,
}

/// Memory of the program, GB.
pub(super) const TABLE_3_GB: f64 = 5.0;
/// Part of the memory that was modified.
pub(super) const TABLE_3_DIRTY_PERCENT: u64 = 10;

/// All lines of Table 3.
pub(super) const TABLE_3: [Table3; 3] = [
    Table3 {
        tier: "hdd",
        storage: "HDD",
        first_s: 169.18,
        second_s: 15.34,
    },
    Table3 {
        tier: "ssd",
        storage: "SSD",
        first_s: 43.73,
        second_s: 4.08,
    },
    Table3 {
        tier: "nvm",
        storage: "PMFS",
        first_s: 2.92,
        second_s: 0.28,
    },
];

/// Result of Figure 2, in the paper's words.
pub(super) const FIGURE_2: &str =
    "linear in the memory; SSD 3-4 times faster than HDD, NVM 10-15 times faster than SSD";

impl Table3 {
    /// Returns the paper's tier of that name.
    pub(super) fn of(tier: &str) -> Option<Self> {
        TABLE_3.into_iter().find(|line| line.tier == tier)
    }

    /// Returns the factor by which the second dump is faster.
    pub(super) fn ratio(&self) -> f64 {
        self.first_s / self.second_s
    }
}
