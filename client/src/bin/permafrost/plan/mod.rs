//! `permafrost plan`: computes the cheapest actions for a scheduler from the current costs. Carries out
//! nothing.

pub(crate) mod decisions;
mod place;
pub(crate) mod preempt;
mod resume;

use clap::{Args, Subcommand};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;

#[derive(Debug, Args)]
pub(crate) struct PlanArguments {
    #[command(subcommand)]
    command: PlanCommand,
}

#[derive(Debug, Subcommand)]
enum PlanCommand {
    /// Whom to preempt, and how, so that resources become free.
    #[command(after_help = preempt::EXAMPLES)]
    Preempt(preempt::PlanPreemptArguments),
    /// Where to resume checkpoints.
    #[command(after_help = resume::EXAMPLES)]
    Resume(resume::ResumeArguments),
    /// Where a dump and its copies would go.
    #[command(after_help = place::EXAMPLES)]
    Place(place::PlaceArguments),
}

pub(crate) fn plan(context: &Context, arguments: &PlanArguments) -> Result<(), Failure> {
    match &arguments.command {
        PlanCommand::Preempt(arguments) => preempt::preempt(context, arguments),
        PlanCommand::Resume(arguments) => resume::resume(context, arguments),
        PlanCommand::Place(arguments) => place::place(context, arguments),
    }
}
