//! The command line: the global options, and the commands with their arguments. Only `main.rs` uses it.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use permafrost_agent::host::manual::CommandDocument;
use permafrost_transport::control::DEFAULT_SOCKET;

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
   12  less was freed than requested, by a plan or in fact, or there are too few nodes for the copies
  130  interrupted

Examples:
    permafrost dump --pid 4242 --job train          freeze 4242 into a checkpoint, and end it
    permafrost restore train                        bring it back, on its old pid
    permafrost ls                                   what is there
    permafrost cost --pid 4242 --job train          what preempting it would cost
";

/// A store for the images of frozen processes.
#[derive(Debug, Parser)]
#[command(name = "permafrost", version, after_help = ABOUT_EXIT_CODES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// Control socket of permafrostd.
    #[arg(long, global = true, value_name = "PATH", env = "PERMAFROST_SOCKET", default_value = DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,

    /// Print JSON instead of text for people.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Print no progress and no remarks.
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Arguments of `permafrost generate`.
#[derive(Debug, clap::Args)]
pub(crate) struct GenerateArguments {
    /// Document to write: a completion script to standard output, or man pages.
    pub(crate) document: CommandDocument,
    /// Directory for the man pages.
    #[arg(long, value_name = "DIR")]
    pub(crate) to: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Freeze a process tree into a checkpoint.
    #[command(after_help = crate::dump::DUMP_EXAMPLES)]
    Dump(crate::dump::DumpArguments),
    /// Start CRIU for a dump, and end a freeze that takes too long. `permafrost dump` starts it.
    #[command(hide = true)]
    FreezeGuard(crate::dump::GuardArguments),
    /// Keep what processes need that are restored lazily. `permafrost restore --lazy` starts it.
    #[command(hide = true)]
    LazyKeeper {
        /// Directory from which CRIU restores.
        images: std::path::PathBuf,
        /// Time for a daemon that has ended to come back.
        #[arg(value_parser = permafrost_agent::host::arguments::parse_time)]
        daemon_timeout: std::time::Duration,
    },
    /// Write man pages or a completion script from this definition. Packages are made with it.
    #[command(hide = true)]
    Generate(GenerateArguments),
    /// Bring a process tree back.
    #[command(after_help = crate::restore::RESTORE_EXAMPLES)]
    Restore(crate::restore::RestoreArguments),
    /// Write a checkpoint as an ordinary CRIU images directory, or as the archive of a container that it was.
    Get(crate::transfer::GetArguments),
    /// Give the pages of a checkpoint to `criu lazy-pages`, for lazy restores by a CRIU of one's own.
    #[command(after_help = crate::lend::LEND_EXAMPLES)]
    Lend(crate::lend::LendArguments),
    /// Read an ordinary CRIU images directory, or the archive of a container's checkpoint, as a new checkpoint.
    Put(crate::transfer::PutArguments),
    /// List checkpoints and parked sessions.
    #[command(visible_alias = "list")]
    Ls(crate::inspect::LsArguments),
    /// Show a checkpoint in full: address spaces, runs, deltas, sizes.
    Show(crate::inspect::ShowArguments),
    /// Show what changed between two checkpoints of a job: processes, mappings, pages, open files.
    #[command(after_help = permafrost_inspect::DIFF_EXAMPLES)]
    Diff(permafrost_inspect::DiffArguments),
    /// Remove checkpoints.
    #[command(visible_alias = "remove")]
    Rm(crate::manage::RmArguments),
    /// Keep a checkpoint from being removed.
    Pin(crate::manage::PinArguments),
    /// Let a pinned checkpoint be removed again.
    Unpin(crate::arguments::OneCheckpoint),
    /// Read every page and compare it with its checksum.
    Verify(crate::transfer::VerifyArguments),
    /// Read every page, heal damaged ones from other nodes, and set aside what cannot be healed.
    #[command(after_help = permafrost_operations::SCRUB_EXAMPLES)]
    Scrub(permafrost_operations::ScrubArguments),
    /// Free the space that removed checkpoints have left between others.
    #[command(after_help = permafrost_operations::GC_EXAMPLES)]
    Gc(permafrost_operations::GcArguments),
    /// List, rotate or destroy the keys for encryption at rest.
    #[command(after_help = permafrost_operations::KEYS_EXAMPLES)]
    Keys(permafrost_operations::KeysArguments),
    /// Say what is kept: rules of retention, of namespaces and of jobs.
    #[command(after_help = permafrost_operations::RETENTION_EXAMPLES)]
    Retention(Box<permafrost_operations::RetentionArguments>),
    /// Remove what the rules of retention do not keep, or say what that is.
    #[command(after_help = permafrost_operations::PRUNE_EXAMPLES)]
    Prune(permafrost_operations::PruneArguments),
    /// Look after the files that the region is on: list, add, grow, drain, remove, check, salvage.
    #[command(after_help = permafrost_operations::REGION_EXAMPLES)]
    Region(permafrost_operations::RegionArguments),
    /// Give the pages of a bare `criu --page-server` a job.
    #[command(after_help = crate::manage::ADOPT_EXAMPLES)]
    Adopt(crate::manage::AdoptArguments),
    /// Have every CRIU of this machine store its dumps.
    #[command(after_help = permafrost_operations::HOOKS_EXAMPLES)]
    InstallCriuHooks(permafrost_operations::HooksArguments),
    /// Open a session for `criu --page-server`.
    #[command(after_help = crate::manage::OPEN_EXAMPLES)]
    Open(crate::manage::OpenArguments),
    /// Discard a session, open or parked.
    Abort(crate::manage::AbortArguments),
    /// Keep a place in the queue of a node for a dump or a restore to come.
    #[command(after_help = crate::reserve::RESERVE_EXAMPLES)]
    Reserve(crate::reserve::ReserveArguments),
    /// Show the state of permafrostd, or wait until it answers.
    Status(permafrost_operations::StatusArguments),
    /// Check this machine, permafrostd and the cluster, and say what to do.
    #[command(after_help = permafrost_inspect::DOCTOR_EXAMPLES)]
    Doctor(Box<permafrost_inspect::DoctorArguments>),
    /// Show queues, transfers and nodes, live.
    #[command(after_help = permafrost_inspect::TOP_EXAMPLES)]
    Top(permafrost_inspect::TopArguments),
    /// Collect what a report of a defect needs, without secrets and memory contents.
    #[command(after_help = permafrost_inspect::REPORT_EXAMPLES)]
    Report(Box<permafrost_inspect::ReportArguments>),
    /// Listen on a compute node without storage, over the storage nodes of a cluster.
    #[command(after_help = crate::agent::AGENT_EXAMPLES)]
    Agent(crate::agent::AgentArguments),
    /// Look after the nodes of a cluster: list, drain, remove.
    #[command(after_help = permafrost_operations::NODE_EXAMPLES)]
    Node(permafrost_operations::NodeArguments),
    /// Show what is known of the nodes: room, measured bandwidths, queues.
    #[command(after_help = crate::nodes::NODES_EXAMPLES)]
    Nodes(crate::nodes::NodesArguments),
    /// Say what each way of preempting a task would cost now.
    #[command(after_help = crate::cost::COST_EXAMPLES)]
    Cost(Box<crate::cost::CostArguments>),
    /// Say whom to preempt and how, where to resume, where to put copies.
    Plan(Box<crate::plan::PlanArguments>),
    /// Replay workloads through the policies of preemption, and compare them with the papers' numbers.
    #[command(after_help = permafrost_bench::SIMULATE_EXAMPLES)]
    Simulate(Box<permafrost_bench::SimulateArguments>),
    /// Carry out a plan: preempt process trees of this machine, each in the way that costs least.
    #[command(after_help = crate::preempt::PREEMPT_EXAMPLES)]
    Preempt(Box<crate::preempt::PreemptArguments>),
    /// Suspend a process tree in memory: SIGTSTP, and the freezer for processes that run on.
    #[command(after_help = crate::suspension::SUSPEND_EXAMPLES)]
    Suspend(crate::suspension::SuspendArguments),
    /// Resume what was suspended in memory.
    #[command(after_help = crate::suspension::RESUME_EXAMPLES)]
    Resume(crate::suspension::ResumeArguments),
    /// Take processors and memory of a process tree that goes on, in steps.
    #[command(after_help = crate::shrinking::SHRINK_EXAMPLES)]
    Shrink(crate::shrinking::ShrinkArguments),
    /// Give back what `shrink` has taken.
    #[command(after_help = crate::shrinking::GROW_EXAMPLES)]
    Grow(crate::shrinking::GrowArguments),
    /// Make tokens for the HTTP API.
    #[command(after_help = permafrost_credentials::TOKEN_EXAMPLES)]
    Token(permafrost_credentials::TokenArguments),
    /// Measure storage tiers, or a node.
    Bench(Box<permafrost_bench::BenchArguments>),
    /// Run a cluster on this machine, to try things on.
    #[command(after_help = permafrost_bench::PLAYGROUND_EXAMPLES)]
    Playground(permafrost_bench::PlaygroundArguments),
    /// Run Slurm jobs that survive preemption.
    #[command(after_help = crate::slurm::SLURM_EXAMPLES)]
    Slurm(crate::slurm::SlurmArguments),
    /// Make and rotate the certificates of nodes, agents and people.
    Pki(permafrost_credentials::PkiArguments),
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
                &["diff", name, "a@1"],
                &["diff", "a@1", name],
                &["pin", name],
                &["verify", name],
                &["scrub", name],
                &["restore", name],
                &["get", name, "dir"],
                &["put", name, "dir"],
                &["dump", "--pid", "7", "--job", name],
                &["open", "--job", name],
                &["adopt", "--job", name, "-D", "dir"],
                &["prune", "--job", name],
                &["prune", "--namespace", &format!("{name}/")],
                &["retention", "show", "--namespace", &format!("{name}/")],
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
