//! The routes of the API: parameters and answers.

pub mod activity;
pub mod contents;
pub mod estimate;
pub mod events;
pub mod figures;
pub mod health;
pub mod jobs;
pub mod nodes;
pub mod place;
pub mod preempt;
pub mod reserve;
pub mod resume;

mod asking;
mod paging;
