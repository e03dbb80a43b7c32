//! The `permafrost` command against a daemon that is a thread of the test, and a CRIU that is a shell
//! script: which requests a command sends, what it prints, and what it exits with.

mod asking;
mod dump;
mod fake;
mod for_dumps;
mod manage;
mod output;
mod pki;
mod restore;
mod tracking;
mod transfer;
