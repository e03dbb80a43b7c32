//! Repair between real stores, over real QUIC on the loopback device: pulls, and what goes wrong with them.

#![allow(missing_docs)]

mod again;
mod pull;
mod site;
mod sweep;
