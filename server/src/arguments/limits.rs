//! Options that a running daemon takes anew at SIGHUP.

use permafrost_agent::host::arguments::{parse_log_filter, parse_size};
use permafrost_cluster::repair::RepairLimits;
use permafrost_cooling::CoolingRules;
use permafrost_http_api::serve::Rate;
use permafrost_metering::queues::QueuesOptions;

use super::values::{AtOnce, Percent, Period, parse_at_once, parse_percent, parse_period};

/// Options that a running daemon takes anew at SIGHUP. [`crate::settings`] recognizes them by their group, which clap
/// names after this type.
#[derive(clap::Args)]
#[command(next_help_heading = "Limits, which SIGHUP reads again")]
pub(crate) struct LimitArgs {
    /// Level of the log on standard error: error, warn, info, debug or trace, or a filter with levels of single modules,
    /// such as info,permafrost_cluster=debug.
    #[arg(long, value_name = "FILTER", env = "RUST_LOG", default_value = "info", value_parser = parse_log_filter)]
    pub(crate) log_level: String,
    /// Requests each second that one caller of --listen-api may make; twice as many at once.
    #[arg(long, value_name = "N", default_value_t = Rate::default().per_s, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) api_rate: u32,
    /// Time without a dump or a restore after which parts of checkpoints move to the next slower tier of the region, or
    /// `off`. What the newest generation of a job needs stays.
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = parse_period)]
    cool_after: Period,
    /// Percentage of a tier above which its coldest parts of checkpoints move to a slower one, or `off`.
    #[arg(long, value_name = "PERCENT", default_value = "80", value_parser = parse_percent)]
    cool_above: Percent,
    /// Dumps that run at once: a number, or `auto` for as many as increase the total throughput. Further dumps wait
    /// in a queue, while their processes run on.
    #[arg(long, value_name = "N", default_value = "auto", value_parser = parse_at_once)]
    dumps_at_once: AtOnce,
    /// Restores that run at once: a number, or `auto`.
    #[arg(long, value_name = "N", default_value = "auto", value_parser = parse_at_once)]
    restores_at_once: AtOnce,
    /// Most bytes a second that repair reads or writes here, such as 100M [default: as fast as it goes].
    #[arg(long, requires = "catalog", value_name = "SIZE", value_parser = parse_size)]
    repair_rate: Option<u64>,
    /// Percent of full speed, and of a processor, that repair gets while dumps come in.
    #[arg(long, requires = "catalog", value_name = "PERCENT", default_value_t = RepairLimits::default().share_percent, value_parser = clap::value_parser!(u8).range(1..=100))]
    repair_share: u8,
}

impl LimitArgs {
    /// Options that only a node of a cluster has.
    pub(crate) const OF_REPAIR: [&str; 2] = ["repair-rate", "repair-share"];

    /// Returns the options of the queues.
    pub(crate) fn queues(&self) -> QueuesOptions {
        QueuesOptions {
            dumps_at_once: self.dumps_at_once.0,
            restores_at_once: self.restores_at_once.0,
            ..QueuesOptions::default()
        }
    }

    /// Returns the rules by which segments move to slower tiers.
    pub(crate) fn cooling(&self) -> CoolingRules {
        CoolingRules {
            after: self.cool_after.0,
            above_percent: self.cool_above.0,
        }
    }

    /// Returns the limits of repair.
    pub(crate) fn repair(&self) -> RepairLimits {
        RepairLimits {
            rate: self.repair_rate,
            share_percent: self.repair_share,
        }
    }
}
