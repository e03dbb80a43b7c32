//! The cluster over a real etcd: the guarantees of its registry, and failures of etcd's members.

mod denials;
mod fencing;
mod members;
mod operating;
mod outages;
mod registry;
mod retention;
mod security;
mod storms;
mod support;
