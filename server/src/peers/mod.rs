//! A node's side of what peers ask for: other nodes, agents, readers and operators.
