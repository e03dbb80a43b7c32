//! Reading a checkpoint that this node does not hold, or whose copy here is damaged.
