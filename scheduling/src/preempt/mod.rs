//! Preemption: Algorithm 1 of paper 000 as published, its refinement to the cheapest mechanism for each victim, and a
//! plan of the victims.

mod algorithm;
mod choose;
mod plan;

pub use algorithm::{CandidateVictim, Decision, algorithm_1, overhead_chkpt};
pub use choose::{
    By, Choice, Rejection, Site, Terms, UndecidedTask, choose, choose_for, cost_of, freed,
    least_scores, options,
};
pub use plan::{Candidate, PlannedVictim, PreemptionPlan, dumped, plan, together};
