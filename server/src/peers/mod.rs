//! Service for peers: other nodes, agents, readers and operators.

mod handler;
mod replica;
#[cfg(test)]
mod tests;

pub use handler::{Copying, NodeHandler};
