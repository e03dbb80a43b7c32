//! Checkpoints read on nodes that do not hold them, or hold them damaged: real stores over plain files, QUIC on
//! loopback, and a registry that is a list.

#![allow(missing_docs)]

mod agents;
mod damage;
mod many;
mod nodes;
mod parts;
mod retention;
mod support;
