//! `permafrost`: the command for users, scripts and compute nodes.

#![forbid(unsafe_code)]

mod agent;
mod api;
mod archive;
mod arguments;
mod candidate;
mod cli;
mod cost;
mod delivery;
mod dump;
mod gc;
mod hooks;
mod inspect;
mod keys;
mod lazy;
mod lazy_keeper;
mod lend;
mod manage;
mod node;
mod nodes;
mod plan;
mod prune;
mod region;
mod reserve;
mod restore;
mod retention;
mod scrub;
mod slurm;
mod status;
mod transfer;
mod trust;
mod words;

use std::process::ExitCode;

use clap::Parser;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;

use cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let context = Context::new(&cli.socket, cli.json, cli.quiet);
    match run(&context, cli.command) {
        Ok(code) => code,
        Err(failure) => failure.report(context.json),
    }
}

fn run(context: &Context, command: Command) -> Result<ExitCode, Failure> {
    let done = match command {
        // The exit code is the task's.
        Command::Slurm(arguments) => return Ok(slurm::slurm(context, arguments)),
        Command::FreezeGuard(arguments) => return dump::guard(arguments),
        Command::LazyKeeper => lazy_keeper::keep(context),
        Command::Dump(arguments) => dump::dump(context, &arguments),
        Command::Restore(arguments) => restore::restore(context, &arguments),
        Command::Get(arguments) => transfer::get(context, &arguments),
        Command::Lend(arguments) => lend::lend(context, &arguments),
        Command::Put(arguments) => transfer::put(context, &arguments),
        Command::Ls(arguments) => inspect::ls(context, &arguments),
        Command::Show(arguments) => inspect::show(context, &arguments),
        Command::Status(arguments) => status::status(context, &arguments),
        Command::Agent(arguments) => agent::agent(arguments),
        Command::Node(arguments) => node::node(context, &arguments),
        Command::Nodes(arguments) => nodes::nodes(context, &arguments),
        Command::Cost(arguments) => cost::cost(context, &arguments),
        Command::Plan(arguments) => plan::plan(context, &arguments),
        Command::Token(arguments) => permafrost_credentials::token(context, &arguments),
        Command::InstallCriuHooks(arguments) => hooks::install(context, &arguments),
        Command::Pki(arguments) => permafrost_credentials::pki(context, &arguments),
        Command::Bench(arguments) => permafrost_bench::bench(context, &arguments),
        Command::Verify(arguments) => transfer::verify(context, &arguments),
        Command::Scrub(arguments) => scrub::scrub(context, &arguments),
        Command::Gc(arguments) => gc::gc(context, &arguments),
        Command::Keys(arguments) => keys::keys(context, &arguments),
        Command::Prune(arguments) => prune::prune(context, &arguments),
        Command::Retention(arguments) => retention::retention(context, &arguments),
        Command::Rm(arguments) => manage::rm(context, &arguments),
        Command::Pin(arguments) => manage::pin(context, &arguments.checkpoint, !arguments.unpin),
        Command::Unpin(arguments) => manage::pin(context, &arguments.checkpoint, false),
        Command::Region(arguments) => region::region(context, arguments),
        Command::Adopt(arguments) => manage::adopt(context, &arguments),
        Command::Open(arguments) => manage::open(context, &arguments),
        Command::Abort(arguments) => manage::abort(context, &arguments),
        Command::Reserve(arguments) => reserve::reserve(context, &arguments),
    };
    done.map(|()| ExitCode::SUCCESS)
}
