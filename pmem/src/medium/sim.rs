//! Crash simulator.
