//! What a node does for itself: the scrub, over a file whose bytes are flipped, and the numbers that it tells.

#![allow(missing_docs)]

mod metrics;
mod scrub;
mod site;
