//! `permafrostd`, the storage node.
#![forbid(unsafe_code)]

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use permafrost_client::host::arguments::{
    Listen, LogFormat, init_log, parse_duration, parse_listen,
};
use permafrost_server::config::Config;
use permafrost_server::daemon::Daemon;
use permafrost_server::store::Retention;
use tokio::signal::unix::{SignalKind, signal};

/// Permafrost's storage node: takes CRIU's page-server dumps into a persistent-memory region.
///
/// Point CRIU at it (`criu dump … --page-server --address 127.0.0.1 --port 7117`) or use `permafrost dump`.
/// SIGTERM or SIGINT stops it cleanly; a kill -9 loses nothing that was sealed.
#[derive(Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 stopped on request, 1 did not start or failed, 2 usage.\n\
    RUST_LOG sets the log level (default info)."
)]
struct Args {
    /// Directory of the catalog and, by default, of the region.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/permafrost")]
    data_dir: PathBuf,
    /// The region's file: best on a DAX file system; on tmpfs it does not survive the machine
    /// [default: DATA_DIR/region].
    #[arg(long, value_name = "PATH")]
    region: Option<PathBuf>,
    /// Size of a region that is not there yet, such as 512M or 16G
    /// [default: 4G, or half of what is free where that is less].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    region_size: Option<u64>,
    /// Refuse to start unless the region is mapped by DAX with MAP_SYNC.
    #[arg(long)]
    require_dax: bool,
    /// Directory of the sockets.
    #[arg(long, value_name = "DIR", default_value = "/run/permafrost")]
    run_dir: PathBuf,
    /// Well-known page-server port; port 0 takes any, `none` opens no port at all. Whoever reaches it can store
    /// pages: keep it on loopback.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7117", value_parser = parse_listen)]
    listen: Listen,
    /// How long a dump is kept that CRIU closed and nobody adopted, such as 90m, 24h, 7d.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_duration)]
    park_ttl: Duration,
    /// How long an opened session waits for its dump, or a closed one for its seal.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    session_ttl: Duration,
    /// How long a connection may be silent in the middle of a dump before it is given up.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    idle_timeout: Duration,
    /// Where agents are served (UDP; port 0 takes any). Both sides show certificates.
    #[arg(long, value_name = "ADDRESS:PORT", requires = "identity")]
    listen_peers: Option<SocketAddr>,
    /// Directory of this node's ca.pem, cert.pem and key.pem, as `permafrost pki issue` writes them. With it the
    /// page-server ports take `criu --tls`, and from other hosts nothing else.
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// Form of the log on standard error.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

fn main() -> ExitCode {
    let args = Args::parse();
    init_log(args.log_format);
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    let config = Config {
        data_dir: args.data_dir,
        region: args.region,
        region_size_bytes: args.region_size,
        require_dax: args.require_dax,
        run_dir: args.run_dir,
        listen: args.listen.0,
        retention: Retention {
            parked: args.park_ttl,
            idle_session: args.session_ttl,
        },
        idle_connection: args.idle_timeout,
        identity: args.identity,
        listen_peers: args.listen_peers,
    };
    // Two threads accept and keep time; the work is done on threads of its own.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // Conversations with peers have a thread each: dumps, fetches and requests.
        .max_blocking_threads(1024)
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("catch SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("catch SIGINT")?;
        let daemon = Daemon::start(config).await?;
        let or_none = |address: Option<SocketAddr>| {
            address.map_or_else(|| "none".to_owned(), |address| address.to_string())
        };
        let ready = format!(
            "permafrostd ready: control={} page-server={} peers={}",
            daemon.control_socket().display(),
            or_none(daemon.address()),
            or_none(daemon.peer_address())
        );
        // Whoever started us may not read it: that is no reason to die.
        if writeln!(std::io::stdout(), "{ready}").is_err() {
            tracing::debug!("standard output is closed");
        }
        tracing::info!("{ready}");
        tokio::select! {
            _ = terminate.recv() => tracing::info!("SIGTERM: stopping"),
            _ = interrupt.recv() => tracing::info!("SIGINT: stopping"),
        }
        daemon.stop().context("mark the region clean")
    })
}

/// `4G` and the like: binary units, as sizes of memory are.
fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim().trim_end_matches("iB").trim_end_matches('B');
    let (number, shift) = match text.char_indices().last() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => {
            let shift = match unit.to_ascii_uppercase() {
                'K' => 10,
                'M' => 20,
                'G' => 30,
                'T' => 40,
                _ => return Err(format!("{unit:?} is no unit: use K, M, G or T")),
            };
            (&text[..at], shift)
        }
        _ => (text, 0),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| format!("{text:?} is no size such as 512M or 16G"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("{text:?} is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("512M"), Ok(512 << 20));
        assert_eq!(parse_size("16GiB"), Ok(16 << 30));
        for bad in ["", "G", "-1", "1.5G", "12Q", "99999999999T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
