//! Tests of the `permafrost` command against a daemon that is a thread of the test, and a CRIU that is a shell
//! script: the requests, the output and the exit codes of each command.

mod asking;
mod doctor;
mod dump;
mod fake;
mod for_dumps;
mod hooks;
mod manage;
mod output;
mod pki;
mod pre_copy;
mod restore;
mod simulate;
mod tracking;
mod transfer;
