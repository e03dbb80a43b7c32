//! `permafrostd`, the storage node.
#![forbid(unsafe_code)]

mod arguments;

use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use permafrost_agent::host::arguments::{in_full, init_log};
use permafrost_agent::host::{STOPPING, end_within};
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_server::config::Config;
use permafrost_server::daemon::{Daemon, StartError};
use permafrost_server::offline;
use permafrost_store::StoreError;
use tokio::signal::unix::{SignalKind, signal};

use arguments::{Args, Command, RegionCommand};

/// The exit code for damage, which is that of `permafrost`.
const DAMAGED: u8 = ErrorCode::Corrupt as u8;

fn look_at(what: &RegionCommand) -> anyhow::Result<ExitCode> {
    let out = &mut std::io::stdout().lock();
    let whole = match what {
        RegionCommand::Check { region, keys } => {
            offline::check(region, keys.open(region)?.as_ref(), out)
        }
        RegionCommand::Salvage { region, to, keys } => {
            offline::salvage(region, to, keys.open(region)?.as_ref(), out)
        }
    }?;
    Ok(if whole {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(DAMAGED)
    })
}

fn main() -> ExitCode {
    let args = Args::parse();
    init_log(args.log_format);
    permafrost_agent::host::keep_memory_private();
    permafrost_agent::host::raise_descriptor_limit();
    let done = match &args.command {
        Some(Command::Region { what }) => look_at(what),
        None => args.config().and_then(run).map(|()| ExitCode::SUCCESS),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            tracing::error!("{}", in_full(error.as_ref()));
            let hint = hint(&error);
            if !hint.is_empty() {
                tracing::error!("hint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Returns the hint of the error, or an empty string if the error has none.
fn hint(error: &anyhow::Error) -> &str {
    let of_start = error.downcast_ref().map(StartError::hint);
    let of_store = || error.downcast_ref::<StoreError>().map(|error| error.hint());
    of_start.or_else(of_store).unwrap_or_default()
}

fn run(config: Config) -> anyhow::Result<()> {
    permafrost_pmem::heap::bound_arenas();
    // Two threads accept and keep time; the work is done on threads of its own.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // Conversations with peers have a thread each: dumps, fetches and requests.
        .max_blocking_threads(1024)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let ended = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("catch SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("catch SIGINT")?;
        let mut hangup = signal(SignalKind::hangup()).context("catch SIGHUP")?;
        let daemon = Daemon::start(config).await?;
        let or_none = |address: Option<SocketAddr>| {
            address.map_or_else(|| "none".to_owned(), |address| address.to_string())
        };
        let ready = format!(
            "permafrostd ready: control={} page-server={} peers={} metrics={} api={}",
            daemon.control_socket().display(),
            or_none(daemon.address()),
            or_none(daemon.peer_address()),
            or_none(daemon.metrics_address()),
            daemon.api_address().map_or_else(
                || daemon.api_socket().display().to_string(),
                |address| address.to_string()
            )
        );
        // Whoever started us may not read it: that is no reason to die.
        if writeln!(std::io::stdout(), "{ready}").is_err() {
            tracing::debug!("standard output is closed");
        }
        tracing::info!("{ready}");
        let failed = loop {
            tokio::select! {
                _ = terminate.recv() => {
                    tracing::info!("SIGTERM: stopping");
                    break Ok(());
                }
                _ = interrupt.recv() => {
                    tracing::info!("SIGINT: stopping");
                    break Ok(());
                }
                _ = hangup.recv() => {
                    tracing::info!("SIGHUP: opening the audit log anew");
                    daemon.audit().reopen();
                }
                error = daemon.failed() => break Err(error),
            }
        };
        end_within(STOPPING);
        daemon.stop().await.context("mark the region clean")?;
        Ok(failed?)
    });
    // Threads that still serve clients end with the process.
    runtime.shutdown_timeout(Duration::ZERO);
    ended
}
