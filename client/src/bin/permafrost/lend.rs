//! `permafrost lend`: gives the pages of a checkpoint to `criu lazy-pages --page-server`, for lazy restores by a CRIU of
//! one's own.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use clap::Args;
use permafrost_protocol::control::request;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::checkpoint_name;
use permafrost_terminal::table::facts;
use serde::Serialize;
use std::os::fd::AsFd as _;

use crate::transfer::{open_directory, prepare_directory};

pub(crate) const LEND_EXAMPLES: &str = "\
Writes the images directory without the pages that CRIU restores lazily, and serves those until Ctrl-C, to any number of \
restores. `permafrost restore --lazy` needs none of this, and is faster.

Examples:
    permafrost lend train images
    criu lazy-pages -D images --page-server --address 127.0.0.1 --port 40001 &
    criu restore -D images --lazy-pages -d
";

#[derive(Debug, Args)]
pub(crate) struct LendArguments {
    /// JOB or JOB@GEN.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: String,
    /// Directory for the images; created if need be. The images hold the process's secrets.
    pub(crate) directory: PathBuf,
    /// Write into a directory that is not empty.
    #[arg(long, short)]
    pub(crate) force: bool,
    /// Address for `criu lazy-pages`; port 0 takes any. Users of this machine are admitted as for dumps; other machines
    /// need `criu --tls` and a certificate.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    pub(crate) listen: SocketAddr,
    /// Listen on an AF_UNIX socket instead, for a program that hands `criu lazy-pages` a connection with --ps-socket.
    #[arg(long, value_name = "PATH", conflicts_with = "listen")]
    pub(crate) listen_unix: Option<PathBuf>,
}

/// Endpoint and directory for a lazy restore, which `lend` prints with `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Lending {
    /// Name of the checkpoint.
    checkpoint: String,
    /// Directory of the images.
    directory: PathBuf,
    /// TCP address of the endpoint; empty with `--listen-unix`.
    #[serde(skip_serializing_if = "String::is_empty")]
    address: String,
    /// Path of the endpoint's socket, with `--listen-unix`.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket: Option<PathBuf>,
}

pub(crate) fn lend(context: &Context, arguments: &LendArguments) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    let explain = |error| interrupts.explain(Failure::from(error));
    let path = &arguments.directory;
    prepare_directory(path, arguments.force)?;
    let directory = open_directory(path)?;
    let export = request::Export {
        checkpoint: arguments.checkpoint.clone(),
        without_lazy_pages: true,
        ..request::Export::default()
    };
    let exported = connection
        .call_with(export, Some(directory.as_fd()), &mut |_| {})
        .map_err(explain)?;
    let checkpoint = exported.checkpoint.as_ref();
    let name = checkpoint.map_or(
        arguments.checkpoint.clone(),
        permafrost_terminal::names::name_of,
    );
    let (listener, address) = listen(arguments)?;
    let _made = arguments.listen_unix.as_deref().map(MadeSocket);
    let request = request::Lend {
        checkpoint: name.clone(),
    };
    connection
        .begin(request, Some(listener.as_fd()))
        .and_then(|()| connection.await_turn(&mut |_| {}))
        .map_err(explain)?;
    drop(listener);
    let lending = Lending {
        checkpoint: name,
        directory: path.clone(),
        address,
        socket: arguments.listen_unix.clone(),
    };
    context.print(&lending, human_lending)?;
    let served = connection.finish::<request::Lend>(&mut |_| {});
    match served {
        // Ctrl-C is how it ends.
        Err(_) if interrupts.came() => Ok(()),
        served => {
            let served = served?;
            context.remark(&format!("{} given", human::bytes(served.bytes)));
            Ok(())
        }
    }
}

/// The file of a socket that this command has made, which goes with it.
struct MadeSocket<'a>(&'a Path);

impl Drop for MadeSocket<'_> {
    fn drop(&mut self) {
        // It may have been removed meanwhile.
        let _ = std::fs::remove_file(self.0);
    }
}

fn listen(arguments: &LendArguments) -> Result<(OwnedFd, String), Failure> {
    if let Some(path) = &arguments.listen_unix {
        let listener =
            UnixListener::bind(path).map_err(|error| Failure::io("listen on", path, &error))?;
        return Ok((listener.into(), String::new()));
    }
    let failed = |error: std::io::Error| {
        Failure::new(
            Code::Invalid,
            format!("listen on {}: {error}", arguments.listen),
        )
        .hint("name an address of this machine and a free port, or port 0")
    };
    let listener = TcpListener::bind(arguments.listen).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener.into(), address.to_string()))
}

fn human_lending(lending: &Lending) -> String {
    let directory = lending.directory.display();
    let server = match lending.address.parse::<SocketAddr>() {
        Ok(address) => format!("--address {} --port {}", address.ip(), address.port()),
        Err(_) => format!(
            "--ps-socket FD, connected to {}",
            socket_of(lending).display()
        ),
    };
    facts(
        &format!("{} is lent until Ctrl-C", lending.checkpoint),
        &[
            (
                "serve faults with",
                format!("criu lazy-pages --images-dir {directory} --page-server {server}"),
            ),
            (
                "then restore with",
                format!("criu restore --images-dir {directory} --lazy-pages -d"),
            ),
        ],
    )
}

fn socket_of(lending: &Lending) -> &Path {
    lending.socket.as_deref().unwrap_or(Path::new(""))
}
