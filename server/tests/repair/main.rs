//! Repair between real stores, over real QUIC on the loopback device: pulls, and their failures.

#![allow(missing_docs)]

mod again;
mod pull;
mod site;
mod sweep;
