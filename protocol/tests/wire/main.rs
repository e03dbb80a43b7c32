//! The wire between nodes: headers, the two ends of a bulk stream, messages, and both ends under a bad network.

mod conversation;
mod frame;
mod receiver;
mod sender;
mod simulation;
