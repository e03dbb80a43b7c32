//! The cluster over a real etcd: what its registry promises, and what happens when members of it die or fall silent.

mod denials;
mod fencing;
mod members;
mod operating;
mod outages;
mod registry;
mod security;
mod storms;
mod support;
