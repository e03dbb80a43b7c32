//! What a node does for itself: the scrub, over a file whose bytes are flipped, the numbers that it tells, and probes.

#![allow(missing_docs)]

mod adopting;
mod medium;
mod metrics;
mod options;
mod probes;
mod scale;
mod scrub;
mod sessions;
mod site;
