//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use permafrost_agent::host::arguments::parse_duration;
use permafrost_criu::FreezeLimit;
use permafrost_protocol::manifest::{CheckpointRef, CheckpointRefError, JobName, JobNameError};
use permafrost_transport::control::DEFAULT_SOCKET;

use crate::gc::GcArguments;
use crate::trust::Rule;

const ABOUT_EXIT_CODES: &str = "\
Checkpoints are named JOB@GEN, or JOB for the newest of the job.

Output: a table or a few lines for people on standard output, or with --json one JSON object whose fields \
are those of docs/command.md. Errors go to standard error, with --json as {\"error\": {\"code\", \
\"exit_code\", \"message\", \"hint\", \"criu\", \"log\"}}.

Exit codes:
    0  done
    1  internal error
    2  the command line or the request makes no sense
    3  no such job, checkpoint, session, process, node or file
    4  in the way: an open dump of the job, a pin, a directory that is not empty
    5  CRIU failed
    6  the region is full, or no tmpfs has room for the images
    7  a page or a record is damaged
    8  the session failed
    9  not allowed
   10  permafrostd cannot be reached, or went away
   11  not enough nodes, no holder there, nothing known, or the registry is away: try again later
   12  not enough: what was planned does not do
  130  interrupted

Examples:
    permafrost dump --pid 4242 --job train          freeze 4242 into a checkpoint, and end it
    permafrost restore train                        bring it back, on its old pid
    permafrost ls                                   what is there
    permafrost cost --pid 4242 --job train          what preempting it would cost
";

const DUMP_EXAMPLES: &str = "\
Where others are before it, the dump waits for its turn; the process runs on meanwhile. \
The process is frozen while CRIU takes its memory and permafrostd makes it durable; only then is it ended \
(or resumed with --leave-running). When anything fails before that, or you press Ctrl-C, CRIU rolls back \
and the process goes on. Once permafrostd has begun to seal the checkpoint, it takes a second Ctrl-C. \
A freeze that reaches --freeze-limit is rolled back, even if permafrostd hangs or this command was killed.

A tree that contains permafrostd, the agent, this command, or an etcd or a storage node that permafrostd needs is refused: \
frozen, they could not end the freeze.

Examples:
    permafrost dump --pid 4242 --job train
    permafrost dump --pid 4242 --job train --leave-running        a checkpoint of a process that goes on
    permafrost dump --pid $! --job build --shell-job              started from this shell
    permafrost dump --pid 4242 --job web --tcp-established
    permafrost dump --pid 4242 --job web --priority 9 --deadline 30s     before others, where several wait
    permafrost dump --pid 4242 --job train -- --ghost-limit 64M   any option of CRIU
";

const RESTORE_EXAMPLES: &str = "\
The images are built in memory and removed when CRIU is done. CRIU options of the dump that the restore \
must repeat (--shell-job, --tcp-established, …) are repeated; yours win over them.

Examples:
    permafrost restore train                 the newest checkpoint, detached; prints the pid
    permafrost restore train@3 --foreground  an older one, and wait until it ends
";

const ADOPT_EXAMPLES: &str = "\
A bare `criu dump --page-server` names no job, so its pages are parked. This gives them one, with the \
small images that CRIU wrote. Without SESSION, the parked session whose processes are those of the images \
directory is taken.

In a cluster it is refused (exit code 4): dump with `permafrost dump` there.

Example:
    criu dump -t 4242 -D /tmp/d --page-server --address 127.0.0.1 --port 7117
    permafrost adopt --job train --images-dir /tmp/d
";

const SCRUB_EXAMPLES: &str = "\
permafrostd does so by itself once in --scrub-period; this does it now, for what the node holds. A damaged \
checkpoint gets a fresh copy from another node that has one. Where none can give it, the checkpoint stays as \
it is, is shown as damaged, is not compared with by the next dump, and is looked at again every hour. \
`permafrost verify` only reads.

Exit code 7 when something is damaged and was not mended.

Examples:
    permafrost scrub               everything
    permafrost scrub train@3       one checkpoint
";

const GC_EXAMPLES: &str = "\
Checkpoints share segments of the region, and a segment stays in use while one of its pages does. Cleaning moves the \
pages that are in use together; nothing else changes. permafrostd does so by itself when a region is half full \
(--clean-interval); this does it now. Through an agent every node that it knows does it.

Examples:
    permafrost gc --dry-run        what is in use, and what cleaning would free
    permafrost gc
";

const OPEN_EXAMPLES: &str = "\
Opens a session of its own for a job and prints where `criu --page-server` shall send the pages. Seal it \
with `permafrost adopt`, or with permafrost-action as CRIU's action script.
";

/// A store for the images of frozen processes.
#[derive(Debug, Parser)]
#[command(name = "permafrost", version, after_help = ABOUT_EXIT_CODES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// Control socket of permafrostd.
    #[arg(long, global = true, value_name = "PATH", env = "PERMAFROST_SOCKET", default_value = DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,

    /// Print JSON.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Print no progress and no remarks.
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Freeze a process tree into a checkpoint.
    #[command(after_help = DUMP_EXAMPLES)]
    Dump(DumpArguments),
    /// Start CRIU for a dump, and end a freeze that takes too long. `permafrost dump` starts it.
    #[command(hide = true)]
    FreezeGuard(crate::dump::GuardArguments),
    /// Bring a process tree back.
    #[command(after_help = RESTORE_EXAMPLES)]
    Restore(RestoreArguments),
    /// Write a checkpoint as an ordinary CRIU images directory.
    Get(GetArguments),
    /// Read an ordinary CRIU images directory as a new checkpoint.
    Put(PutArguments),
    /// List checkpoints and parked sessions.
    #[command(visible_alias = "list")]
    Ls(LsArguments),
    /// Show a checkpoint in full: address spaces, runs, deltas, sizes.
    Show(OneCheckpoint),
    /// Remove checkpoints.
    #[command(visible_alias = "remove")]
    Rm(RmArguments),
    /// Keep a checkpoint from being removed.
    Pin(PinArguments),
    /// Let a pinned checkpoint be removed again.
    Unpin(OneCheckpoint),
    /// Read every page and compare it with its checksum.
    Verify(VerifyArguments),
    /// Read every page, heal damaged ones from other nodes, and set aside what cannot be healed.
    #[command(after_help = SCRUB_EXAMPLES)]
    Scrub(ScrubArguments),
    /// Free the space that removed checkpoints have left between others.
    #[command(after_help = GC_EXAMPLES)]
    Gc(GcArguments),
    /// Look at a region that no daemon has open (`check`), or save what can be read of it (`salvage`).
    ///
    /// Runs `permafrostd region`, the one beside this program or on PATH: regions are the daemon's.
    #[command(disable_help_flag = true)]
    Region(RegionArguments),
    /// Give the pages of a bare `criu --page-server` a job.
    #[command(after_help = ADOPT_EXAMPLES)]
    Adopt(AdoptArguments),
    /// Open a session for `criu --page-server`.
    #[command(after_help = OPEN_EXAMPLES)]
    Open(OpenArguments),
    /// Discard a session, open or parked.
    Abort(AbortArguments),
    /// Keep a place in the queue of a node for a dump or a restore to come.
    #[command(after_help = crate::reserve::RESERVE_EXAMPLES)]
    Reserve(crate::reserve::ReserveArguments),
    /// Show the state of permafrostd, or wait until it answers.
    Status(StatusArguments),
    /// Listen on a compute node without storage, over the storage nodes of a cluster.
    #[command(after_help = crate::agent::AGENT_EXAMPLES)]
    Agent(crate::agent::AgentArguments),
    /// Look after the nodes of a cluster: list, drain, remove.
    #[command(after_help = crate::node::NODE_EXAMPLES)]
    Node(crate::node::NodeArguments),
    /// Show what is known of the nodes: room, measured bandwidths, queues.
    #[command(after_help = crate::nodes::NODES_EXAMPLES)]
    Nodes(crate::nodes::NodesArguments),
    /// Say what each way of preempting a task would cost now.
    #[command(after_help = crate::cost::COST_EXAMPLES)]
    Cost(Box<crate::cost::CostArguments>),
    /// Say whom to preempt and how, where to resume, where to put copies.
    Plan(Box<crate::plan::PlanArguments>),
    /// Make tokens for the HTTP API.
    #[command(after_help = crate::token::TOKEN_EXAMPLES)]
    Token(crate::token::TokenArguments),
    /// Measure storage tiers, or a node.
    Bench(Box<permafrost_bench::BenchArguments>),
    /// Run Slurm jobs that survive preemption.
    #[command(after_help = crate::slurm::SLURM_EXAMPLES)]
    Slurm(crate::slurm::SlurmArguments),
    /// Make and rotate the certificates of nodes, agents and people.
    Pki(crate::pki::PkiArguments),
}

/// Number of nodes on which a dump must be durable before it is acknowledged.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Durability {
    /// One; repair makes the others later
    Local,
    /// More than half of the copies
    Quorum,
    /// All copies
    All,
}

impl Durability {
    /// Returns the word of the control protocol; empty for the node's default.
    pub(crate) fn word(chosen: Option<Self>) -> String {
        match chosen {
            None => "",
            Some(Self::Local) => "local",
            Some(Self::Quorum) => "quorum",
            Some(Self::All) => "all",
        }
        .to_owned()
    }
}

/// Parses a job's name; an empty name stands for none.
pub(crate) fn job_name(name: &str) -> Result<String, JobNameError> {
    name.parse::<JobName>().map(String::from)
}

/// Parses a checkpoint's name.
pub(crate) fn checkpoint_name(name: &str) -> Result<String, CheckpointRefError> {
    name.parse::<CheckpointRef>().map(|name| name.to_string())
}

/// Priority and deadline in a queue of dumps or restores.
#[derive(Debug, Args)]
pub(crate) struct TurnArguments {
    /// From 0, the lowest, to 11: those of a higher one go first.
    #[arg(long, value_name = "0..11", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=11))]
    pub(crate) priority: u32,
    /// It should start within this time, such as 500ms, 30s or 5m: it goes before others of its priority.
    #[arg(long, value_name = "TIME", value_parser = crate::reserve::parse_time)]
    pub(crate) deadline: Option<Duration>,
    #[command(flatten)]
    pub(crate) reservation: crate::reserve::ReservationArguments,
}

impl TurnArguments {
    /// Returns the deadline in milliseconds, for the control protocol.
    pub(crate) fn deadline_ms(&self) -> Option<u64> {
        let deadline = self.deadline?;
        Some(u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX))
    }
}

/// Parses a freeze limit of the command line.
fn parse_freeze_limit(text: &str) -> Result<FreezeLimit, String> {
    let time = crate::reserve::parse_time(text)?;
    FreezeLimit::new(time).ok_or_else(|| {
        format!(
            "CRIU needs some of it to roll back: name {} s or more",
            FreezeLimit::SHORTEST.as_secs()
        )
    })
}

#[derive(Debug, Args)]
pub(crate) struct RegionArguments {
    /// Arguments of `permafrostd region`: `check REGION`, `salvage REGION --to DIR`.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    pub(crate) arguments: Vec<std::ffi::OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct DumpArguments {
    /// Root of the process tree.
    #[arg(long, short)]
    pub(crate) pid: u32,
    /// Job the checkpoint belongs to.
    #[arg(long, short, value_parser = job_name)]
    pub(crate) job: String,
    /// Let the process go on afterwards.
    #[arg(long)]
    pub(crate) leave_running: bool,
    /// Take memory only, while the process runs, so that a later dump freezes it for less.
    /// Needs soft-dirty bits in the kernel.
    #[arg(long)]
    pub(crate) pre_dump: bool,
    /// Keep established TCP connections.
    #[arg(long)]
    pub(crate) tcp_established: bool,
    /// The process belongs to a shell's session, or to a terminal.
    #[arg(long)]
    pub(crate) shell_job: bool,
    /// Neither leave out nor compare with what the job's newest checkpoint has.
    #[arg(long)]
    pub(crate) full: bool,
    /// On how many nodes it must be durable before the process may end [default: the node's].
    #[arg(long, value_enum)]
    pub(crate) durability: Option<Durability>,
    /// Longest time that the process may be frozen, such as 30s or 5m, from 1s: then CRIU rolls back and the process goes
    /// on, whatever has become of permafrostd or of this command [default: 2m, and 10s more for each GiB that the
    /// processes have in memory].
    #[arg(long, value_name = "TIME", value_parser = parse_freeze_limit)]
    pub(crate) freeze_limit: Option<FreezeLimit>,
    #[command(flatten)]
    pub(crate) turn: TurnArguments,
    /// CRIU program.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_CRIU")]
    pub(crate) criu: Option<PathBuf>,
    /// Keep CRIU's log and statistics in this directory. Otherwise the log is kept on failure only.
    #[arg(long, value_name = "DIR")]
    pub(crate) work_dir: Option<PathBuf>,
    /// Program that CRIU calls to seal; next to this one unless told otherwise.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_ACTION", hide = true)]
    pub(crate) action: Option<PathBuf>,
    /// Options for CRIU.
    #[arg(last = true, value_name = "CRIU ARGS")]
    pub(crate) criu_arguments: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArguments {
    /// JOB or JOB@GEN.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: String,
    #[command(flatten)]
    pub(crate) turn: TurnArguments,
    /// CRIU program.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_CRIU")]
    pub(crate) criu: Option<PathBuf>,
    /// Wait until the process ends.
    #[arg(long)]
    pub(crate) foreground: bool,
    /// Build a whole images directory first, instead of letting CRIU read the images from the store. Takes
    /// memory for all pages once more; for a CRIU whose --stream does not work.
    #[arg(long)]
    pub(crate) no_stream: bool,
    /// Leave the images directory and the log, and print where. Implies --no-stream.
    #[arg(long)]
    pub(crate) keep_images: bool,
    /// Build the images directory in this one instead of in memory. Implies --no-stream.
    #[arg(long, value_name = "DIR")]
    pub(crate) work_dir: Option<PathBuf>,
    /// Restore only what was dumped by these: node, agent:NAME, uid:UID, namespace:NAME or any [default: node on a storage node,
    /// any through an agent]. A restore runs whatever the dump contains.
    #[arg(
        long,
        value_name = "ORIGIN",
        value_delimiter = ',',
        env = "PERMAFROST_TRUST"
    )]
    pub(crate) trust: Vec<Rule>,
    /// Repeat none of the CRIU options that the checkpoint records, only those given here.
    #[arg(long)]
    pub(crate) no_recorded_options: bool,
    /// Options for CRIU.
    #[arg(last = true, value_name = "CRIU ARGS")]
    pub(crate) criu_arguments: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct GetArguments {
    /// JOB or JOB@GEN.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: String,
    /// Where to; created if need be. The images hold the process's secrets.
    pub(crate) directory: PathBuf,
    /// Write into a directory that is not empty.
    #[arg(long, short)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PutArguments {
    /// Job the checkpoint will belong to.
    #[arg(value_parser = job_name)]
    pub(crate) job: String,
    /// A directory that `criu dump` wrote.
    pub(crate) directory: PathBuf,
    /// Do not compare with the job's newest checkpoint.
    #[arg(long)]
    pub(crate) full: bool,
    /// On how many nodes it must be durable before it is sealed [default: the node's].
    #[arg(long, value_enum)]
    pub(crate) durability: Option<Durability>,
}

#[derive(Debug, Args)]
pub(crate) struct LsArguments {
    /// Only this job.
    #[arg(value_parser = job_name)]
    pub(crate) job: Option<String>,
    /// Only parked sessions: dumps that CRIU closed and nobody has adopted.
    #[arg(long)]
    pub(crate) parked: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArguments {
    /// Wait until it answers, at most so long: for scripts that have just started it.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) wait: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct OneCheckpoint {
    /// JOB or JOB@GEN.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: String,
}

#[derive(Debug, Args)]
pub(crate) struct RmArguments {
    /// JOB@GEN, or JOB with --all.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: String,
    /// Every generation of the job.
    #[arg(long)]
    pub(crate) all: bool,
    /// Pinned ones too.
    #[arg(long, short)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PinArguments {
    /// JOB or JOB@GEN.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: String,
    /// Take the pin away.
    #[arg(long)]
    pub(crate) unpin: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    /// JOB or JOB@GEN; everything without it.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ScrubArguments {
    /// JOB or JOB@GEN; everything without it.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct AdoptArguments {
    /// Job the checkpoint will belong to.
    #[arg(long, short, value_parser = job_name)]
    pub(crate) job: String,
    /// The images directory of the dump.
    #[arg(long, short = 'D', value_name = "DIR")]
    pub(crate) images_dir: PathBuf,
    /// Session, as `permafrost ls --parked` prints it. By default the one that the images belong to, by their
    /// processes, mappings, number of pages and time.
    pub(crate) session: Option<String>,
    /// Take images that were not written while the pages came: a copy of the directory has other times. Everything
    /// else must fit.
    #[arg(long)]
    pub(crate) ignore_times: bool,
    /// CRIU options of the dump, so that a restore repeats those it must.
    #[arg(last = true, value_name = "CRIU ARGS")]
    pub(crate) criu_arguments: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct OpenArguments {
    /// Job the dump will belong to.
    #[arg(long, short, value_parser = job_name)]
    pub(crate) job: String,
    /// Root of the process tree that will be dumped, if known.
    #[arg(long, short)]
    pub(crate) pid: Option<u32>,
    /// For `criu pre-dump`.
    #[arg(long)]
    pub(crate) pre_dump: bool,
    /// Do not compare with the job's newest checkpoint.
    #[arg(long)]
    pub(crate) full: bool,
    /// CRIU will be given --prev-images-dir with the small images of the job's newest checkpoint, so it may
    /// leave clean pages out.
    #[arg(long, conflicts_with = "full")]
    pub(crate) prev_images: bool,
    /// CRIU options of the dump, so that a restore repeats those it must.
    #[arg(last = true, value_name = "CRIU ARGS")]
    pub(crate) criu_arguments: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct AbortArguments {
    /// Session, as `permafrost ls` or `permafrost status` prints it.
    pub(crate) session: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn names_that_are_none_are_refused() {
        for name in ["", "/", "..", "a/", "a//b", "a b", "jöb", &"x".repeat(201)] {
            for arguments in [
                &["rm", "--all", "--force", name][..],
                &["rm", &format!("{name}@1")],
                &["ls", name],
                &["show", name],
                &["pin", name],
                &["verify", name],
                &["scrub", name],
                &["restore", name],
                &["get", name, "dir"],
                &["put", name, "dir"],
                &["dump", "--pid", "7", "--job", name],
                &["open", "--job", name],
                &["adopt", "--job", name, "-D", "dir"],
            ] {
                let line = ["permafrost"].iter().chain(arguments);
                let refused = Cli::try_parse_from(line).unwrap_err();
                assert_eq!(refused.exit_code(), 2, "{arguments:?}");
            }
        }
    }

    #[test]
    fn criu_options_come_after_a_double_dash() {
        let cli = Cli::try_parse_from([
            "permafrost",
            "dump",
            "--pid",
            "7",
            "--job",
            "a",
            "--json",
            "--",
            "--file-locks",
            "-v4",
        ])
        .unwrap();
        assert!(cli.json);
        match cli.command {
            Command::Dump(dump) => {
                assert_eq!((dump.pid, dump.job.as_str()), (7, "a"));
                assert_eq!(dump.criu_arguments, ["--file-locks", "-v4"]);
            }
            other => panic!("{other:?}"),
        }
    }
}
