//! Properties that the fuzz targets check.
//!
//! Each property is a plain function over bytes, so that a finding can be replayed by a test, with a debugger,
//! and without the fuzzer.
#![forbid(unsafe_code)]

pub mod control;
pub mod images;
pub mod manifest;
pub mod pageserver;
pub mod wire;
