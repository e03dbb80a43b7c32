//! `permafrost bench`: measures the duration of suspending and resuming on this machine. `permafrost simulate`: replays
//! workloads through policies. `permafrost playground`: a cluster to try things on.
//!
//! - `tiers`: on each storage tier under consideration, for the choice of hardware or of a policy;
//! - `node`: on a node that runs, for its own estimates.
//!
//! Both freeze real processes with the real CRIU: `bench workload`, which fills memory and can check whether
//! its contents are unchanged. All processes that they start end with them: `bench guard` makes the kernel end
//! them even if the benchmark is killed.

#![forbid(unsafe_code)]

mod against;
mod child;
mod cycle;
mod daemon;
mod etcd;
mod fit;
mod guard;
mod machine;
mod node;
mod playground;
mod simulate;
mod task;
mod tiers;
mod workload;

use clap::{Args, Subcommand};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
pub use playground::{PLAYGROUND_EXAMPLES, PlaygroundArguments, playground};
pub use simulate::{SIMULATE_EXAMPLES, SimulateArguments, simulate};

/// Options of `permafrost bench`.
#[derive(Debug, Args)]
pub struct BenchArguments {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// Suspend and resume processes on storage tiers, real or emulated, and compare them.
    #[command(after_help = tiers::EXAMPLES)]
    Tiers(tiers::TiersArguments),
    /// Measure how fast a running permafrostd takes dumps and gives them back.
    #[command(after_help = node::EXAMPLES)]
    Node(node::NodeArguments),
    /// A process that is worth freezing.
    #[command(hide = true)]
    Workload(workload::WorkloadArguments),
    /// Run a program that ends when its parent does.
    #[command(hide = true)]
    Guard(guard::GuardArguments),
}

/// Runs one of the benchmarks.
///
/// # Errors
/// A bad option; a machine, CRIU or daemon that lacks what the benchmark needs.
pub fn bench(context: &Context, arguments: &BenchArguments) -> Result<(), Failure> {
    match &arguments.command {
        BenchCommand::Tiers(arguments) => tiers::tiers(context, arguments),
        BenchCommand::Node(arguments) => node::node(context, arguments),
        BenchCommand::Workload(arguments) => workload::workload(arguments),
        BenchCommand::Guard(arguments) => guard::guard(arguments),
    }
}
