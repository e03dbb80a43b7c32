//! `permafrost`: the command for users, scripts and compute nodes.

#![forbid(unsafe_code)]

mod agent;
mod archive;
mod arguments;
mod candidate;
mod cli;
mod cost;
mod delivery;
mod dump;
mod inspect;
mod lazy;
mod lazy_keeper;
mod lend;
mod manage;
mod nodes;
mod placement;
mod plan;
mod preempt;
mod reserve;
mod restore;
mod shrinking;
mod slurm;
mod suspension;
mod targets;
mod transfer;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use permafrost_protocol::versions;
use permafrost_terminal::api;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};

use cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let context = Context::new(&cli.socket, cli.json, cli.quiet);
    if let Err(error) = versions::limit_by_environment() {
        return Failure::new(Code::Invalid, error.to_string()).report(context.json);
    }
    match run(&context, cli.command) {
        Ok(code) => code,
        Err(failure) => failure.report(context.json),
    }
}

fn run(context: &Context, command: Command) -> Result<ExitCode, Failure> {
    let done = match command {
        // The exit code is the task's.
        Command::Slurm(arguments) => return Ok(slurm::slurm(context, arguments)),
        // Errors that it finds are its result, and no failure.
        Command::Doctor(arguments) => return permafrost_inspect::doctor(context, &arguments),
        Command::FreezeGuard(arguments) => return dump::guard(arguments),
        Command::LazyKeeper {
            images,
            daemon_timeout,
        } => lazy_keeper::keep(context, &images, daemon_timeout),
        Command::Generate(arguments) => {
            let to = arguments.to.as_deref();
            let written = arguments.document.write(Cli::command(), "1", to);
            written.map_err(|error| Failure::new(Code::Internal, format!("generate: {error}")))
        }
        Command::Dump(arguments) => dump::dump(context, &arguments),
        Command::Restore(arguments) => restore::restore(context, &arguments),
        Command::Get(arguments) => transfer::get(context, &arguments),
        Command::Lend(arguments) => lend::lend(context, &arguments),
        Command::Put(arguments) => transfer::put(context, &arguments),
        Command::Ls(arguments) => inspect::ls(context, &arguments),
        Command::Show(arguments) => inspect::show(context, &arguments),
        Command::Diff(arguments) => permafrost_inspect::diff(context, &arguments),
        Command::Top(arguments) => permafrost_inspect::top(context, &arguments),
        Command::Report(arguments) => permafrost_inspect::report(context, &arguments),
        Command::Status(arguments) => permafrost_operations::status(context, &arguments),
        Command::Agent(arguments) => agent::agent(arguments),
        Command::Node(arguments) => permafrost_operations::node(context, &arguments),
        Command::Nodes(arguments) => nodes::nodes(context, &arguments),
        Command::Cost(arguments) => cost::cost(context, &arguments),
        Command::Plan(arguments) => plan::plan(context, &arguments),
        Command::Playground(arguments) => permafrost_bench::playground(context, &arguments),
        Command::Simulate(arguments) => permafrost_bench::simulate(context, &arguments),
        Command::Preempt(arguments) => preempt::preempt(context, &arguments),
        Command::Suspend(arguments) => suspension::suspend(context, &arguments),
        Command::Resume(arguments) => suspension::resume(context, &arguments),
        Command::Shrink(arguments) => shrinking::shrink(context, &arguments),
        Command::Grow(arguments) => shrinking::grow(context, &arguments),
        Command::Token(arguments) => permafrost_credentials::token(context, &arguments),
        Command::InstallCriuHooks(arguments) => permafrost_operations::install(context, &arguments),
        Command::Pki(arguments) => permafrost_credentials::pki(context, &arguments),
        Command::Bench(arguments) => permafrost_bench::bench(context, &arguments),
        Command::Verify(arguments) => transfer::verify(context, &arguments),
        Command::Scrub(arguments) => permafrost_operations::scrub(context, &arguments),
        Command::Gc(arguments) => permafrost_operations::gc(context, &arguments),
        Command::Keys(arguments) => permafrost_operations::keys(context, &arguments),
        Command::Prune(arguments) => permafrost_operations::prune(context, &arguments),
        Command::Retention(arguments) => permafrost_operations::retention(context, &arguments),
        Command::Rm(arguments) => manage::rm(context, &arguments),
        Command::Pin(arguments) => manage::pin(context, &arguments.checkpoint, !arguments.unpin),
        Command::Unpin(arguments) => manage::pin(context, &arguments.checkpoint, false),
        Command::Region(arguments) => permafrost_operations::region(context, arguments),
        Command::Adopt(arguments) => manage::adopt(context, &arguments),
        Command::Open(arguments) => manage::open(context, &arguments),
        Command::Abort(arguments) => manage::abort(context, &arguments),
        Command::Reserve(arguments) => reserve::reserve(context, &arguments),
    };
    done.map(|()| ExitCode::SUCCESS)
}
