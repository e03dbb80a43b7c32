//! Repair without a network: real plans and steps, over a cluster that is a few maps.

mod fakes;
mod leading;
mod planning;
mod property;
