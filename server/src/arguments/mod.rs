//! Options of `permafrostd`: the only definition of them. The command line, the environment, the configuration file, the
//! man page and the documents follow it ([`crate::settings`]).

mod invocation;
mod limits;
mod values;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{ArgAction, Parser};
use permafrost_agent::host::arguments::{
    Listen, LogFormat, parse_duration, parse_listen, parse_size,
};
use permafrost_audit::AuditFile;
use permafrost_cluster::repair::RepairLimits;
use permafrost_cluster::{ClusterConfig, FailureDomain, NodeClass, Tier, TlsFiles};
use permafrost_clustered::Durability;
use permafrost_keys::{KeyStore, Wrapper};
use permafrost_pmem::Emulation;
use permafrost_server::config::{ApiServerOptions, ClusterOptions, Config};
use permafrost_store::Retention;

pub(crate) use invocation::InvocationArgs;
pub(crate) use limits::LimitArgs;
use values::{Period, parse_catalog, parse_domain, parse_durability, parse_period, parse_word};

/// Permafrost's storage node: takes CRIU's page-server dumps into a persistent-memory region.
///
/// Point CRIU at it (`criu dump … --page-server --address 127.0.0.1 --port 7117`) or use `permafrost dump`.
/// SIGTERM or SIGINT stops it cleanly; a kill -9 loses nothing that was sealed.
#[derive(Parser)]
#[command(
    name = "permafrostd",
    version,
    after_help = "Each option has a variable in the environment (PERMAFROSTD_DATA_DIR for --data-dir) and a key in the \
    configuration file (data-dir). The command line goes before the environment, and the environment before the file.\n\
    Exit codes: 0 stopped on request, 1 did not start or failed, 2 the options make no sense.",
    args_conflicts_with_subcommands = true
)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) invocation: InvocationArgs,
    /// Directory of the catalog and, by default, of the region.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/permafrost")]
    data_dir: PathBuf,
    /// The region's file: best on a DAX file system; on tmpfs it does not survive the machine
    /// [default: DATA_DIR/region].
    #[arg(long, value_name = "PATH")]
    region: Option<PathBuf>,
    /// A further file of the region that is not where it was when the region was last open. Repeatable.
    #[arg(long = "member", value_name = "FILE")]
    members: Vec<PathBuf>,
    /// Size of a region that is not there yet, such as 512M or 16G
    /// [default: 4G, or half of what is free where that is less].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    region_size: Option<u64>,
    /// Refuse to start unless the region is mapped by DAX with MAP_SYNC.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, action = ArgAction::Set, default_value_t = false, default_missing_value = "true", hide_default_value = true, hide_possible_values = true)]
    require_dax: bool,
    /// Start, and take dumps, although acknowledged checkpoints are lost: the region is older than its catalog, or
    /// records of its journal cannot be read. They are forgotten, and what they took up is free. Save what can be
    /// saved first: `permafrostd region salvage`.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, action = ArgAction::Set, default_value_t = false, default_missing_value = "true", hide_default_value = true, hide_possible_values = true)]
    accept_loss: bool,
    /// Slow the region's medium down to another device, to see what dumps would take on it: hdd, ssd or nvm as in Li et
    /// al. (Middleware '15, Table 3), or WRITE:READ:LATENCY[:cached], such as 120M:140M:8ms:cached: bytes a second in
    /// units of 1000, `cached` behind a page cache. `permafrost status` says "emulated".
    #[arg(long, value_name = "DEVICE", value_parser = str::parse::<Emulation>)]
    emulate_medium: Option<Emulation>,
    /// Directory of the sockets.
    #[arg(long, value_name = "DIR", default_value = "/run/permafrost")]
    run_dir: PathBuf,
    /// Well-known page-server port; port 0 takes any free port, `none` opens no port at all. Every process that
    /// reaches the port can store pages: keep it on loopback.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7117", value_parser = parse_listen)]
    listen: Listen,
    /// A user id of this machine, beside root's and this process's own, that may store pages over the ports.
    /// Repeatable.
    #[arg(long = "listen-uid", value_name = "UID")]
    listen_uids: Vec<u32>,
    /// Most bytes of the region for dumps that have no name yet (`criu --page-server` by itself) [default: half of
    /// the region].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    park_quota: Option<u64>,
    /// Time for which a parked dump, which CRIU closed and nobody adopted, is kept, such as 90m, 24h, 7d.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_duration)]
    park_ttl: Duration,
    /// Time that an opened session waits for its dump, or a closed one for its seal.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    session_ttl: Duration,
    /// Time that a connection may be silent in the middle of a dump before the daemon closes it.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    idle_timeout: Duration,
    /// UDP address on which other nodes and agents are served (port 0 takes any free port); the pages of their dumps
    /// are taken on the TCP port of the same number. Both sides show certificates.
    #[arg(long, value_name = "ADDRESS:PORT", requires = "identity")]
    listen_peers: Option<SocketAddr>,
    /// Take and send the pages of dumps over TLS on TCP, where the other end does so too. false: only over QUIC, which
    /// takes more of the processor unless frames are jumbo [default: true].
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, default_value_t = true, hide_default_value = true, hide_possible_values = true)]
    pages_over_tcp: bool,
    /// Directory of this node's ca.pem, cert.pem and key.pem, as `permafrost pki issue` writes them. With it the
    /// page-server ports take `criu --tls`, and from other hosts nothing else.
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// TCP address on which /metrics (Prometheus), /healthz and /readyz are served, without encryption and to every
    /// client: keep it on loopback or in a network of your own.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen_metrics: Option<SocketAddr>,
    /// TCP address of the HTTP API for schedulers, which is also served on RUN_DIR/api.sock. With --identity it uses
    /// TLS; without, it must be a loopback address. Callers show a certificate or a token.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen_api: Option<SocketAddr>,
    /// File of the tokens that callers of --listen-api may show, a line each as `permafrost token new` prints it.
    #[arg(long, value_name = "FILE", requires = "listen_api")]
    api_tokens: Option<PathBuf>,
    #[command(flatten)]
    keys: KeyArgs,
    /// File of the quotas of namespaces on this node (docs/security.md, "Quotas"); read again when it changes. It
    /// must belong to this user or root, and others must not be able to read it.
    #[arg(long, value_name = "FILE")]
    quotas: Option<PathBuf>,
    /// Period within which everything that the region holds is read and verified once, or `off`.
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = parse_period)]
    scrub_period: Period,
    /// Period at which a region that is half full is cleaned of the space that removed checkpoints have left between
    /// others, or `off`: then only `permafrost gc` does it.
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = parse_period)]
    clean_interval: Period,
    /// Period at which the rules of retention (`permafrost retention`) are applied to everything; to a job also after
    /// each of its dumps. `off`: only `permafrost prune` does it.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_period)]
    retention_interval: Period,
    /// Namespace whose jobs share equal pages: a dump refers to a page that another job has stored, compared in full.
    /// May be given several times; `*` stands for all.
    #[arg(long, value_name = "NAMESPACE")]
    share_pages: Vec<String>,
    /// Age at which a measured bandwidth is renewed: this node then makes a small measurement while it is idle (16
    /// MiB into free segments, given back; 8 MiB to another node), or `off`. A medium that was never measured is
    /// probed within seconds.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_period)]
    probe_period: Period,
    /// Audit log: the caller, the request and the checkpoint, one JSON object a line, or `none`. The daemon opens
    /// the file anew when it was moved away, and at SIGHUP [default: DATA_DIR/audit.log].
    #[arg(long, value_name = "FILE")]
    audit_log: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Form of the log on standard error.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
}

/// Keys for encryption at rest.
#[derive(clap::Args)]
#[command(next_help_heading = "Encryption at rest")]
pub(crate) struct KeyArgs {
    /// Encrypt what is stored from now on, in all namespaces. The file has the 32 random bytes that the data keys in
    /// DATA_DIR/keys are wrapped with; nobody else may be able to read it. Without it the daemon does not start again:
    /// keep a copy of it, and of that directory.
    #[arg(long, value_name = "FILE", conflicts_with = "key_command")]
    key_file: Option<PathBuf>,
    /// As --key-file, with a command line for the shell that wraps keys: it gets `wrap` or `unwrap` as its last
    /// argument and the bytes on its standard input, and prints the result. Called when the daemon starts.
    #[arg(long, value_name = "COMMAND", hide_env_values = true)]
    key_command: Option<String>,
    /// The key file before: the keys that it wraps are wrapped with the new one. Needed once.
    #[arg(long, value_name = "FILE", conflicts_with = "old_key_command")]
    old_key_file: Option<PathBuf>,
    /// The key command before: as --old-key-file.
    #[arg(long, value_name = "COMMAND", hide_env_values = true)]
    old_key_command: Option<String>,
}

/// Keys of a region that no daemon has open.
#[derive(clap::Args)]
pub(crate) struct StoredKeyArgs {
    /// Key file of the daemon, for a region with encrypted checkpoints.
    #[arg(long, value_name = "FILE", conflicts_with = "key_command")]
    key_file: Option<PathBuf>,
    /// Key command of the daemon.
    #[arg(long, value_name = "COMMAND")]
    key_command: Option<String>,
    /// Directory of the stored keys [default: `keys` beside the region's file].
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,
}

impl StoredKeyArgs {
    pub(crate) fn open(&self, region: &Path) -> anyhow::Result<Option<KeyStore>> {
        let Some(wrapper) = wrapper(self.key_file.clone(), self.key_command.clone())? else {
            return Ok(None);
        };
        let beside = || region.with_file_name("keys");
        let directory = self.keys.clone().unwrap_or_else(beside);
        // Keys that are not there are not to be made.
        anyhow::ensure!(
            KeyStore::exists(&directory),
            "there are no keys in {}: name their directory with --keys",
            directory.display()
        );
        Ok(Some(KeyStore::open(&directory, &wrapper, None)?))
    }
}

fn wrapper(file: Option<PathBuf>, command: Option<String>) -> anyhow::Result<Option<Wrapper>> {
    let file = file.map(std::path::absolute).transpose();
    let file = file.context("find the working directory")?;
    Ok(file.map(Wrapper::File).or(command.map(Wrapper::Command)))
}

/// Commands besides serving.
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Look at a region that no daemon has open. Nothing is written to it.
    #[command(
        after_help = "Exit codes: 0 everything is whole, 1 failed, 2 usage, 7 something is damaged."
    )]
    Region {
        #[command(subcommand)]
        what: RegionCommand,
    },
}

#[derive(clap::Subcommand)]
pub(crate) enum RegionCommand {
    /// Read everything and name what is damaged.
    Check {
        /// The region's file.
        region: PathBuf,
        #[command(flatten)]
        keys: StoredKeyArgs,
    },
    /// Write every checkpoint that can be read into a directory, as CRIU images that `permafrost put` takes.
    Salvage {
        /// The region's file.
        region: PathBuf,
        /// Target: one directory for each checkpoint is made there.
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
        #[command(flatten)]
        keys: StoredKeyArgs,
    },
}

/// Options of a node of a cluster.
#[derive(clap::Args)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct ClusterArgs {
    /// The cluster's registry: etcd://HOST:PORT,HOST:PORT,…[/PREFIX]. Name all members. Without it this is one
    /// machine, and nothing below applies. The node's name is that of its certificate.
    #[arg(
        long,
        value_name = "URL",
        requires = "listen_peers",
        requires = "identity",
        value_parser = parse_catalog
    )]
    catalog: Option<String>,
    /// File with etcd's USER:PASSWORD in its first line.
    #[arg(long, value_name = "FILE", requires = "catalog")]
    catalog_user_file: Option<PathBuf>,
    /// Certificate of the authority that etcd's certificates are signed by; makes connections with etcd TLS.
    #[arg(long, value_name = "FILE", requires = "catalog")]
    catalog_ca: Option<PathBuf>,
    /// Directory of the cert.pem and key.pem that etcd is shown.
    #[arg(long, value_name = "DIR", requires = "catalog_ca")]
    catalog_identity: Option<PathBuf>,
    /// Address at which other nodes and agents reach this node [default: --listen-peers, if it is no wildcard].
    #[arg(long, value_name = "ADDRESS:PORT", requires = "catalog")]
    advertise: Option<SocketAddr>,
    /// Number of copies to keep of each checkpoint, on nodes of different hosts.
    #[arg(long, requires = "catalog", value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    copies: u32,
    /// Nodes on which a dump that requests no durability must be durable before it is acknowledged: local, quorum
    /// (more than half of the copies) or all.
    #[arg(long, requires = "catalog", value_name = "WORD", default_value = "quorum", value_parser = parse_durability)]
    durability: Durability,
    /// Time that a frozen task may wait for other nodes. The dump is then refused, and the task runs on.
    #[arg(long, requires = "catalog", value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    deadline: Duration,
    /// reserved: ours to keep. transient: may be taken away at any time, so copies here count for nothing.
    #[arg(long, requires = "catalog", value_name = "CLASS", default_value = "reserved", value_parser = parse_word::<NodeClass>)]
    class: NodeClass,
    /// Count copies here towards quorum and all although the region is on a medium that does not outlast a power
    /// failure (tmpfs, ramfs).
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, action = ArgAction::Set, default_value_t = false, default_missing_value = "true", hide_default_value = true, hide_possible_values = true, requires = "catalog")]
    count_volatile_copies: bool,
    /// Failure domain of this node: HOST, RACK/HOST or ZONE/RACK/HOST [default: a domain of its own].
    #[arg(long, requires = "catalog", value_name = "DOMAIN", default_value = "", value_parser = parse_domain)]
    domain: FailureDomain,
    /// Speed of the medium: pmem, memory or file [default: what the region is on].
    #[arg(long, requires = "catalog", value_name = "TIER", value_parser = parse_word::<Tier>)]
    tier: Option<Tier>,
    /// Time for which this node counts as alive after its last renewal of its lease.
    #[arg(long, requires = "catalog", value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    lease: Duration,
    /// Time that a node may be gone before its copies are replaced on other nodes: longer than a restart takes.
    #[arg(long, requires = "catalog", value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    repair_grace: Duration,
}

impl ClusterArgs {
    /// Returns the cluster options, or `None` without `--catalog`.
    fn options(self, repair: RepairLimits) -> anyhow::Result<Option<ClusterOptions>> {
        let Some(url) = &self.catalog else {
            return Ok(None);
        };
        let mut registry = ClusterConfig::parse(url)?;
        registry.user_file = self.catalog_user_file;
        registry.lease_ttl = self.lease;
        registry.tls = self.catalog_ca.map(|ca| TlsFiles {
            ca,
            identity: self
                .catalog_identity
                .map(|directory| (directory.join("cert.pem"), directory.join("key.pem"))),
        });
        Ok(Some(ClusterOptions {
            registry,
            advertise: self.advertise,
            copies: self.copies,
            durability: self.durability,
            deadline: self.deadline,
            class: self.class,
            count_volatile_copies: self.count_volatile_copies,
            domain: self.domain,
            tier: self.tier,
            repair,
            repair_grace: self.repair_grace,
        }))
    }
}

impl Args {
    /// Returns the configuration that the options make.
    pub(crate) fn config(self) -> anyhow::Result<Config> {
        // `status` tells where things are to people who are elsewhere.
        let absolute =
            |path: PathBuf| std::path::absolute(path).context("find the working directory");
        Ok(Config {
            data_dir: absolute(self.data_dir)?,
            region: self.region.map(absolute).transpose()?,
            members: self
                .members
                .into_iter()
                .map(absolute)
                .collect::<Result<_, _>>()?,
            region_size_bytes: self.region_size,
            require_dax: self.require_dax,
            accept_loss: self.accept_loss,
            emulate: self.emulate_medium,
            run_dir: self.run_dir,
            listen: self.listen.0,
            retention: Retention {
                parked: self.park_ttl,
                idle_session: self.session_ttl,
                parked_bytes: self.park_quota,
            },
            listen_uids: self.listen_uids,
            idle_connection: self.idle_timeout,
            identity: self.identity,
            listen_peers: self.listen_peers,
            pages_over_tcp: self.pages_over_tcp,
            listen_metrics: self.listen_metrics,
            api: ApiServerOptions {
                listen: self.listen_api,
                tokens: self.api_tokens.map(absolute).transpose()?,
                rate_per_s: self.limits.api_rate,
            },
            key: wrapper(self.keys.key_file, self.keys.key_command)?,
            old_key: wrapper(self.keys.old_key_file, self.keys.old_key_command)?,
            quotas: self.quotas.map(absolute).transpose()?,
            scrub_period: self.scrub_period.0,
            clean_interval: self.clean_interval.0,
            cooling: self.limits.cooling(),
            retention_interval: self.retention_interval.0,
            share_pages: self.share_pages,
            queues: self.limits.queues(),
            probe_period: self.probe_period.0,
            audit: match self.audit_log {
                None => AuditFile::InDataDir,
                Some(none) if none.as_os_str() == "none" => AuditFile::Off,
                Some(path) => AuditFile::At(absolute(path)?),
            },
            cluster: self.cluster.options(self.limits.repair())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_cluster_need_one_and_defaults_do_not() {
        use clap::error::ErrorKind;

        let parse = |args: &[&str]| Args::try_parse_from([&["permafrostd"], args].concat());
        assert!(parse(&[]).is_ok());
        for option in [
            "--copies=3",
            "--durability=all",
            "--deadline=1s",
            "--class=transient",
            "--count-volatile-copies",
            "--domain=h",
            "--tier=pmem",
            "--lease=9s",
            "--repair-rate=1M",
            "--repair-share=9",
            "--repair-grace=9s",
        ] {
            let refused = parse(&[option]).map(drop).map_err(|error| error.kind());
            assert_eq!(refused, Err(ErrorKind::MissingRequiredArgument), "{option}");
            let rest = "--catalog=etcd://h:1 --listen-peers=127.0.0.1:0 --identity=i";
            let mut args: Vec<_> = rest.split(' ').collect();
            assert!(parse(&args).is_ok());
            args.push(option);
            assert!(parse(&args).is_ok(), "{option}");
        }
    }
}
