//! What the HTTP API is asked and answers, as JSON.
//!
//! Units stand last in a name: `_bytes`, `_bytes_per_s`, `_s` (seconds, with a fraction), `_unix_ms`. What is asked is
//! checked while it is read: a field that nobody knows and a number out of range are refused, and the error says where.
//! What is answered may grow fields in a later version.
//!
//! Texts of batches are borrowed from the body where they can be, as there may be thousands: whoever reads an answer
//! keeps its body.

#![forbid(unsafe_code)]

pub mod batch;
pub mod cost;
pub mod estimate;
pub mod events;
pub mod figure;
pub mod figures;
pub mod jobs;
pub mod nodes;
pub mod place;
pub mod preempt;
pub mod problem;
pub mod quantity;
pub mod reserve;
pub mod resume;
pub mod task;
pub mod text;
