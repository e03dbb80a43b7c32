//! Service for peers: other nodes, agents, readers and operators.

mod handler;
mod replica;

pub use handler::{Copying, NodeHandler};
