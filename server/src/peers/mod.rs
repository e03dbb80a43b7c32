//! A node's side of what peers ask for: other nodes, agents, readers and operators.

mod handler;
pub(crate) mod replica;

pub use handler::{Copying, NodeHandler};
