//! `permafrost slurm run`: a batch job's command, checkpointed when Slurm preempts the job and resumed when it starts
//! again.
//!
//! ```text
//! slurmstepd ─ batch script, which execs ─▶ permafrost slurm run        outside: takes Slurm's signals
//!                                             └ unshare ─▶ the same      inside: process 1 of a PID namespace
//!                                                            ├ COMMAND   a session of its own, what is dumped
//!                                                            └ CRIU      while it dumps or restores
//! ```
//!
//! CRIU restores processes with the pids they had. In a pid namespace of their own these are free on every
//! node, whatever else runs there, and no process of the job outlives process 1. CRIU runs inside too, so the
//! tree that it dumps has no namespace of its own.

mod advice;
mod asked;
mod inside;
mod job;
mod meaning;
mod outside;
mod pids;
mod policy;
mod streams;
mod supervise;
mod task;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use permafrost_agent::host::arguments::parse_duration;
use permafrost_scheduling::policy::Name;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;

/// Exit code for failures of this command itself, as `timeout`, `env` and container engines use it: lower codes
/// may be the task's.
const OWN_FAILURE: u8 = 125;

/// Exit code of a job that is to be started again: `EX_TEMPFAIL` of sysexits.h. Never 0, which Slurm would take
/// for success.
const REQUEUE: u8 = 75;

pub(crate) const SLURM_EXAMPLES: &str = "\
In the batch script, as its last line and with exec, so that Slurm's signal reaches it:

    #!/bin/bash
    #SBATCH --partition=low --requeue --open-mode=append --signal=B:USR1@120
    exec permafrost slurm run -- ./train --epochs 100

and in slurm.conf, so that the signal is sent when a job is preempted:

    PreemptType=preempt/partition_prio
    PreemptMode=REQUEUE
    SlurmctldParameters=preempt_send_user_signal
    PartitionName=low  … PriorityTier=1  GraceTime=120
    PartitionName=high … PriorityTier=10

docs/slurm.md says more.
";

const RUN_EXAMPLES: &str = "\
If Permafrost has a checkpoint of the job, COMMAND is resumed from it, otherwise started. On SIGUSR1 (preemption, the \
time limit drawing near, or `scancel --batch --signal=USR1 JOB`) it is checkpointed, and the job requeued. Where the job is \
preempted and a dump would take longer than the grace time, or costs more than the work that is lost, the task gets \
SIGTERM instead, and starts again from its last checkpoint, if any. --policy has another policy decide.

When COMMAND has exited its checkpoints are removed.

Exit codes:
    COMMAND's own, or 128 and the number of the signal that ended it
     75  checkpointed, or ended for a preemption: to be requeued (done already, where Slurm allows it)
    125  an error of Permafrost's: standard error says which
    126  COMMAND cannot be started
    127  COMMAND is not there

Examples:
    exec permafrost slurm run -- ./simulate input.dat
    exec permafrost slurm run --every 1h -- ./simulate input.dat     also against the loss of a node
    exec permafrost slurm run --job train/resnet -- python train.py  one lineage over several jobs
    exec permafrost slurm run --tcp-close -- ./worker                it can make its connections again
    exec permafrost slurm run --policy basic -- ./render scene       a checkpoint at each preemption
";

#[derive(Debug, Args)]
pub(crate) struct SlurmArguments {
    #[command(subcommand)]
    command: SlurmCommand,
}

#[derive(Debug, Subcommand)]
enum SlurmCommand {
    /// Run a batch job's command, so that the job survives preemption.
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArguments),
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Job the checkpoints belong to [default: slurm/CLUSTER/JOBID, or JOBID_TASKID of an array].
    #[arg(long, short)]
    job: Option<String>,
    /// Also take a checkpoint each TIME while it runs (90s, 30m, 2h).
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    every: Option<Duration>,
    /// Work less than TIME is not worth a dump when the job is preempted: it is ended.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    min_progress: Option<Duration>,
    /// Policy that decides how COMMAND is preempted.
    #[arg(long, value_name = "POLICY", help = policy::help())]
    policy: Option<Name>,
    /// Time that COMMAND works altogether (90m, 20h), for policies that go by what is left.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    work: Option<Duration>,
    /// Leave the checkpoints when COMMAND has exited.
    #[arg(long)]
    keep: bool,
    /// Start COMMAND anew even if there is a checkpoint.
    #[arg(long)]
    fresh: bool,
    /// Standard output of COMMAND, appended to, instead of the job's.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Standard error of COMMAND, appended to, instead of the job's.
    #[arg(long, value_name = "FILE")]
    error: Option<PathBuf>,
    /// Keep established TCP connections. Their address must still be there where the job is resumed.
    #[arg(long)]
    tcp_established: bool,
    /// Close established TCP connections when it is resumed.
    #[arg(long, conflicts_with = "tcp_established")]
    tcp_close: bool,
    /// Keep file locks.
    #[arg(long)]
    file_locks: bool,
    /// A further option for CRIU's dumps. Repeatable.
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    criu_option: Vec<String>,
    /// CRIU program.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_CRIU")]
    criu: Option<PathBuf>,
    /// What to run.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command. The exit code is COMMAND's, so it does not follow the other commands' codes.
pub(crate) fn slurm(context: &Context, arguments: SlurmArguments) -> ExitCode {
    let SlurmCommand::Run(run) = arguments.command;
    let ended = if inside::is_inside() {
        inside::run(context, &run)
    } else {
        outside::run(&run)
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(failure) => own_failure(context, &failure),
    }
}

fn own_failure(context: &Context, failure: &Failure) -> ExitCode {
    // The failure's own exit code has the other commands' meaning; only the message is used.
    let _ = failure.report(context.json);
    ExitCode::from(OWN_FAILURE)
}
