//! `permafrost agent`: the daemon of a compute node without storage.

use std::io::Write;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use permafrost_agent::host::arguments::{
    Listen, LogFormat, in_full, init_log, parse_duration, parse_listen,
};
use permafrost_agent::host::{STOPPING, end_within};
use permafrost_agent::{
    Agent, AgentError, AgentOptions, DENIALS_EVERY, StorageNode, host, transport,
};
use permafrost_terminal::failure::{Code, Failure};
use permafrost_transport::peer;
use tokio::signal::unix::{SignalKind, signal};

use crate::arguments::Durability;

pub(crate) const AGENT_EXAMPLES: &str = "\
Listens where permafrostd would, and keeps nothing itself: dumps go to a storage node as they come, and restores \
come from a node that has the checkpoint. `permafrost`, a bare `criu --page-server`, permafrost-action and callers of the \
HTTP API (api.sock) work through it unchanged. When the node that takes a dump fails, CRIU is told, and \
the process lives on; the next dump goes to another node. SIGTERM or SIGINT stops the agent.

Example:
    permafrost pki issue --dir CA --name gpu-7 --role agent --namespace '*' --out gpu-7
    permafrost agent --identity gpu-7 --node a=10.0.0.1:7118 --node b=10.0.0.2:7118
    permafrost dump --pid 4242 --job train
";

#[derive(Debug, Args)]
pub(crate) struct AgentArguments {
    /// A storage node: the name in its certificate, and where it listens for peers. The first is asked first.
    /// Repeatable.
    #[arg(long = "node", value_name = "NAME=ADDRESS:PORT", required = true, value_parser = parse_node)]
    nodes: Vec<StorageNode>,
    /// Directory of this agent's ca.pem, cert.pem and key.pem, as `permafrost pki issue` writes them, of role agent (or
    /// reader, operator). Its namespaces decide which jobs it may touch.
    #[arg(long, value_name = "DIR")]
    identity: PathBuf,
    /// Directory of the sockets.
    #[arg(long, value_name = "DIR", default_value = "/run/permafrost")]
    run_dir: PathBuf,
    /// Well-known page-server port; port 0 takes any, `none` opens no port at all. Whoever reaches it can store
    /// pages: keep it on loopback.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7117", value_parser = parse_listen)]
    listen: Listen,
    /// A user id of this machine, beside root's and this process's own, that may store pages over the ports.
    /// Repeatable.
    #[arg(long = "listen-uid", value_name = "UID")]
    listen_uids: Vec<u32>,
    /// On how many nodes a dump must be durable that does not say it itself; `local` is one node
    /// [default: the node's].
    #[arg(long, value_enum)]
    durability: Option<Durability>,
    /// How long a node may take to answer, and to have a dump durable at CLOSE.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    deadline: Duration,
    /// How long an opened session waits for its dump, or a closed one for its seal.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    session_ttl: Duration,
    /// How long a connection may be silent in the middle of a dump before it is given up.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    idle_timeout: Duration,
    /// Form of the log on standard error.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

/// Longest time for which a lost connection is retried: the task is frozen meanwhile.
const MAX_RECONNECT: Duration = Duration::from_secs(20);

pub(crate) fn agent(arguments: AgentArguments) -> Result<(), Failure> {
    init_log(arguments.log_format, None);
    host::keep_memory_private();
    host::raise_descriptor_limit();
    let options = AgentOptions {
        nodes: arguments.nodes,
        identity: arguments.identity,
        host: host::HostOptions {
            run_dir: arguments.run_dir,
            listen: arguments.listen.0,
            listen_uids: arguments.listen_uids,
            idle_connection: arguments.idle_timeout,
            // An agent's certificate is none to be connected to with.
            tls: None,
        },
        durability: Durability::word(arguments.durability),
        deadline: arguments.deadline,
        session_ttl: arguments.session_ttl,
        transport: peer::PeerOptions {
            reconnect: (arguments.deadline / 2).min(MAX_RECONNECT),
            ..transport()
        },
        denials_every: DENIALS_EVERY,
    };
    // Two threads accept, and move what goes to and comes from the nodes.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| internal("start the runtime", &error))?;
    let ended = runtime.block_on(async {
        let catch = |kind| signal(kind).map_err(|error| internal("catch a signal", &error));
        let mut terminate = catch(SignalKind::terminate())?;
        let mut interrupt = catch(SignalKind::interrupt())?;
        let agent = Agent::start(options).await.map_err(not_started)?;
        let ready = format!(
            "permafrost agent ready: control={} page-server={}",
            agent.control_socket().display(),
            agent
                .address()
                .map_or_else(|| "none".to_owned(), |address| address.to_string())
        );
        // The parent process may not read this line: that is no reason to end.
        if writeln!(std::io::stdout(), "{ready}").is_err() {
            tracing::debug!("standard output is closed");
        }
        tracing::info!(event = "daemon-ready", "{ready}");
        let signal = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!(event = "daemon-stopping", "{signal}: stopping");
        tokio::select! {
            () = agent.finish_lazy_restores() => {}
            // Whoever signals twice does not wait.
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        end_within(STOPPING);
        agent.stop().await;
        tracing::info!(event = "daemon-stopped", "stopped");
        Ok(())
    });
    // Threads that still serve a connection end with the process.
    runtime.shutdown_timeout(Duration::ZERO);
    ended
}

fn internal(doing: &str, error: &std::io::Error) -> Failure {
    Failure::new(Code::Internal, format!("{doing}: {error}"))
}

fn not_started(error: AgentError) -> Failure {
    let message = in_full(&error);
    match error {
        AgentError::Host(_) => Failure::new(Code::Invalid, message),
        AgentError::Identity(error) => Failure::from(error).during("load the identity"),
        AgentError::Peer(_) => Failure::new(Code::Internal, message),
    }
}

fn parse_node(text: &str) -> Result<StorageNode, String> {
    let (name, address) = text
        .split_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| format!("{text:?} is not NAME=ADDRESS:PORT"))?;
    let address = address
        .to_socket_addrs()
        .map_err(|error| format!("{address:?}: {error}"))?
        .next()
        .ok_or_else(|| format!("{address:?} has no address"))?;
    Ok(StorageNode {
        name: name.to_owned(),
        address,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_a_name_and_an_address() {
        let node = parse_node("a=127.0.0.1:7118").unwrap();
        assert_eq!((node.name.as_str(), node.address.port()), ("a", 7118));
        for bad in [
            "",
            "a",
            "a=",
            "=127.0.0.1:1",
            "a=127.0.0.1",
            "a=127.0.0.1:x",
        ] {
            assert!(parse_node(bad).is_err(), "{bad}");
        }
    }
}
