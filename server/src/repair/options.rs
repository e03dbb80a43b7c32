//! What can be set about repair.

use std::time::Duration;

use super::throttle::Limits;

/// Flags of `permafrostd`.
#[derive(Clone, Debug, clap::Args)]
pub struct RepairArgs {
    /// Most bytes a second that repair moves on this node, at any time; without it as fast as it goes
    #[arg(long, value_name = "BYTES")]
    pub repair_rate: Option<u64>,

    /// Percent of its full speed that repair may have while dumps come in
    #[arg(long, value_name = "PERCENT", default_value_t = 25, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub repair_share: u8,

    /// Seconds that a node may be gone before its copies are made anew elsewhere: longer than a restart takes
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub repair_grace: u64,
}

impl Default for RepairArgs {
    fn default() -> Self {
        Self {
            repair_rate: None,
            repair_share: 25,
            repair_grace: 30,
        }
    }
}

impl RepairArgs {
    /// For [`super::Throttle`].
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits {
            rate: self.repair_rate,
            share_percent: self.repair_share,
        }
    }

    /// For [`super::Leading`].
    #[must_use]
    pub fn timing(&self) -> Timing {
        Timing {
            grace: Duration::from_secs(self.repair_grace),
            ..Timing::default()
        }
    }
}

/// When the leader does what.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long a node may be gone before its copies are made anew. Default 30 s.
    pub grace: Duration,
    /// How long a checkpoint may lack copies before one is made: its dump may still be making them. Default 10 s.
    pub patience: Duration,
    /// Between two looks at all that is listed, while there is something to do. Default 3 s.
    pub busy: Duration,
    /// The same while there is not, and no node comes, goes or is drained. Default 30 s.
    pub idle: Duration,
    /// The view of the nodes must be younger. Default 5 s.
    pub freshness: Duration,
    /// First pause after a failed copy; it doubles, up to 64 times as long. Default 10 s.
    pub pause: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            grace: Duration::from_secs(30),
            patience: Duration::from_secs(10),
            busy: Duration::from_secs(3),
            idle: Duration::from_secs(30),
            freshness: Duration::from_secs(5),
            pause: Duration::from_secs(10),
        }
    }
}
