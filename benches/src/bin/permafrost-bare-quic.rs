//! `permafrost-bare-quic`: one end of a bare quinn pair, for `cargo xtask bench replicas`: both ends are processes of
//! their own, on hosts of their own.
#![forbid(unsafe_code)]

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use permafrost_benches::bare;
use permafrost_identity::ReloadingIdentity;

/// Runs one end of a bare quinn pair.
#[derive(Parser)]
enum Options {
    /// Accept one connection, drop the bytes that come, and end.
    Receive {
        /// UDP address; printed when it is served.
        #[arg(long)]
        listen: SocketAddr,
        #[command(flatten)]
        common: Common,
    },
    /// Send, and print the seconds until everything was read.
    Send {
        /// The receiver's address.
        #[arg(long)]
        to: SocketAddr,
        /// Name of the receiver, as in its certificate.
        #[arg(long)]
        name: String,
        /// Number of bytes to send.
        #[arg(long)]
        bytes: usize,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(clap::Args)]
struct Common {
    /// Directory of `ca.pem`, `cert.pem` and `key.pem`.
    #[arg(long)]
    identity: PathBuf,
    /// UDP payload that the path carries, bytes.
    #[arg(long)]
    packet_bytes: u16,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let (Options::Receive { common, .. } | Options::Send { common, .. }) = &options;
    let identity = match ReloadingIdentity::load(&common.identity) {
        Ok(identity) => identity,
        Err(error) => {
            eprintln!("permafrost-bare-quic: {error}");
            return ExitCode::FAILURE;
        }
    };
    let transport = bare::options(common.packet_bytes);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("runtime");
    runtime.block_on(async {
        match &options {
            Options::Receive { listen, .. } => {
                let endpoint = bare::receiver(*listen, &identity, &transport);
                println!("{}", endpoint.local_addr().expect("address"));
                bare::receive(&endpoint).await;
            }
            Options::Send {
                to, name, bytes, ..
            } => {
                let bind = (Ipv4Addr::UNSPECIFIED, 0).into();
                let endpoint = bare::sender(bind, &identity, &transport);
                let time = bare::send(&endpoint, *to, name, &bare::run(), *bytes).await;
                println!("{}", time.as_secs_f64());
            }
        }
    });
    ExitCode::SUCCESS
}
