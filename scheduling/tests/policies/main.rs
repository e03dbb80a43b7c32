//! Policies over clusters in which decisions take effect: properties that hold for all of them, and the examples of
//! their papers.

mod paper;
mod properties;
mod world;
