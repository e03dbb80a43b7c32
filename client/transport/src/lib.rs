//! Connections to a daemon: QUIC between hosts ([`peer`]), the control socket on one host ([`control`]) and the
//! HTTP API ([`api`]).
#![forbid(unsafe_code)]

pub mod api;
pub mod control;
pub mod framing;
pub mod peer;
pub mod shares;
