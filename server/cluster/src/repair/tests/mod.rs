//! Tests of repair without a network: real plans and steps, over a simulated cluster.

mod fakes;
mod leading;
mod planning;
mod property;
