//! Page-server core: conversations of a correct peer in either dialect, and each way of breaking the protocol.

#[path = "../common/mod.rs"]
mod common;

mod addresses;
mod arbitrary;
mod conversation;
mod refusals;
mod stream;
