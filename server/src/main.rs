//! `permafrostd`, the storage node.
#![forbid(unsafe_code)]

mod arguments;
mod settings;

use std::ffi::OsString;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::CommandFactory;
use permafrost_agent::host::arguments::{in_full, init_log};
use permafrost_agent::host::{STOPPING, end_within, notify_manager};
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::versions;
use permafrost_server::config::Config;
use permafrost_server::daemon::{self, Daemon, StartError};
use permafrost_server::offline;
use permafrost_store::StoreError;
use tokio::signal::unix::{SignalKind, signal};

use arguments::{Args, Command, InvocationArgs, RegionCommand};
use settings::{Environment, Reloading, Settings, SettingsError};

/// The exit code for options that make no sense, which is clap's.
const USAGE: u8 = 2;

/// Section of the manual that has the pages of daemons.
const MANUAL_SECTION: &str = "8";

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
    let arguments: Vec<OsString> = std::env::args_os().collect();
    if let Err(error) = versions::limit_by_environment() {
        eprintln!("error: {error}");
        return ExitCode::from(USAGE);
    }
    let environment: Environment = std::env::vars_os().collect();
    let read = Settings::read(&arguments, &environment);
    let (settings, args) = match read.and_then(|settings| Ok((settings.args()?, settings))) {
        Ok((args, settings)) => (settings, args),
        Err(SettingsError::CommandLine(error)) => error.exit(),
        Err(error) => {
            error
                .to_string()
                .lines()
                .for_each(|line| eprintln!("error: {line}"));
            return ExitCode::from(USAGE);
        }
    };
    if let Some(done) = answer(&args.invocation, &settings) {
        return done.unwrap_or_else(|error| {
            eprintln!("error: {}", in_full(error.as_ref()));
            ExitCode::FAILURE
        });
    }
    let log = init_log(args.log_format, Some(&args.limits.log_level));
    for variable in settings.unknown_variables() {
        tracing::warn!(
            event = "variable-unknown",
            "{variable} in the environment belongs to no option: is it misspelt?"
        );
    }
    permafrost_agent::host::keep_memory_private();
    permafrost_agent::host::raise_descriptor_limit();
    let reloading = Reloading::new(arguments, environment, settings, log);
    let done = match &args.command {
        Some(Command::Region { what }) => look_at(what),
        None => args
            .config()
            .and_then(|config| run(config, reloading))
            .map(|()| ExitCode::SUCCESS),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            tracing::error!(event = "daemon-failed", "{}", in_full(error.as_ref()));
            let hint = hint(&error);
            if !hint.is_empty() {
                tracing::error!(event = "daemon-failed-hint", "hint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Does what is requested instead of serving; `None` if nothing is.
fn answer(invocation: &InvocationArgs, settings: &Settings) -> Option<anyhow::Result<ExitCode>> {
    let out = &mut std::io::stdout().lock();
    let printed = if let Some(document) = invocation.generate {
        document.write(Args::command(), MANUAL_SECTION, invocation.to.as_deref())
    } else if invocation.print_default_config {
        out.write_all(settings::default_file().as_bytes())
    } else if invocation.print_config {
        settings::print(settings, invocation.json, out)
    } else if invocation.check_config {
        return Some(check(settings, out));
    } else {
        return None;
    };
    Some(printed.map(|()| ExitCode::SUCCESS).map_err(Into::into))
}

/// Checks the options further than they are read: the files that they name.
fn check(settings: &Settings, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    for variable in settings.unknown_variables() {
        eprintln!("warning: {variable} belongs to no option: is it misspelt?");
    }
    let config = match settings.args()?.config() {
        Ok(config) => config,
        Err(error) => {
            eprintln!("error: {}", in_full(error.as_ref()));
            return Ok(ExitCode::from(USAGE));
        }
    };
    if let Err(error) = daemon::check(&config) {
        eprintln!("error: {}", in_full(&error));
        if !error.hint().is_empty() {
            eprintln!("hint: {}", error.hint());
        }
        return Ok(ExitCode::from(USAGE));
    }
    let file = settings.file().map(Path::display);
    match file {
        Some(file) => writeln!(out, "{file}: permafrostd can start with these options")?,
        None => writeln!(
            out,
            "no configuration file: permafrostd can start with these options"
        )?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the hint of the error, or an empty string if the error has none.
fn hint(error: &anyhow::Error) -> &str {
    let of_start = error.downcast_ref().map(StartError::hint);
    let of_store = || error.downcast_ref::<StoreError>().map(|error| error.hint());
    of_start.or_else(of_store).unwrap_or_default()
}

fn run(config: Config, mut reloading: Reloading) -> anyhow::Result<()> {
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
        tracing::info!(event = "daemon-ready", "{ready}");
        notify_manager("READY=1");
        let ended = loop {
            tokio::select! {
                _ = terminate.recv() => break Ok("SIGTERM"),
                _ = interrupt.recv() => break Ok("SIGINT"),
                _ = hangup.recv() => {
                    // Files are read and certificates verified, which takes milliseconds.
                    tokio::task::block_in_place(|| reloading.reload(&daemon));
                }
                error = daemon.failed() => break Err(error),
            }
        };
        if let Ok(signal) = &ended {
            tracing::info!(event = "daemon-stopping", "{signal}: stopping");
        }
        notify_manager("STOPPING=1");
        if ended.is_ok() {
            tokio::select! {
                () = daemon.finish_lazy_restores() => {}
                // Whoever signals twice does not wait.
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
        end_within(STOPPING);
        daemon.stop().await.context("mark the region clean")?;
        ended?;
        tracing::info!(event = "daemon-stopped", "stopped");
        Ok(())
    });
    // Threads that still serve clients end with the process.
    runtime.shutdown_timeout(Duration::ZERO);
    ended
}
