//! Resumption: Algorithm 2 of paper 000 as it stands there, and the ranking of all the nodes that could resume.

mod algorithm;
mod rank;
mod readers;

pub use algorithm::{
    PreemptedTask, Preference, PreviousCheckpoint, ResumeDecision, algorithm_2, overhead_local,
    overhead_remote,
};
pub use rank::{Offer, RankedOffer, Ranking, rank};
pub use readers::Readers;
