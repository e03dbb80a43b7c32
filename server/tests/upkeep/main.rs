//! Upkeep that a node does by itself: the scrub, over a file whose bytes are flipped, metrics, and probes.

#![allow(missing_docs)]

mod adopting;
mod cold;
mod cooling;
mod keys;
mod medium;
mod metrics;
mod options;
mod probes;
mod retention;
mod scale;
mod scrub;
mod sessions;
mod site;
