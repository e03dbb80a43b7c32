//! Types of the HTTP API's requests and replies, as JSON.
//!
//! Units stand last in a name: `_bytes`, `_bytes_per_s`, `_s` (seconds, with a fraction), `_unix_ms`. Requests are
//! checked while they are read: unknown fields and numbers out of range are refused, and the error names the field.
//! Replies may gain fields in a later version.
//!
//! Texts of batches are borrowed from the body where possible, as there may be thousands: a caller that keeps a reply
//! keeps its body.

#![forbid(unsafe_code)]

pub mod activity;
pub mod batch;
pub mod contents;
pub mod cost;
pub mod estimate;
pub mod events;
pub mod figure;
pub mod figures;
pub mod jobs;
pub mod nodes;
pub mod place;
pub mod policy;
pub mod preempt;
pub mod problem;
pub mod quantity;
pub mod reserve;
pub mod resume;
pub mod task;
pub mod text;
