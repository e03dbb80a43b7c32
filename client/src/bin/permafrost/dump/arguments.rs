//! Arguments of `permafrost dump`.

use std::path::PathBuf;

use clap::Args;
use permafrost_agent::host::arguments::parse_time;
use permafrost_criu::FreezeLimit;
use permafrost_terminal::names::job_name;

use super::pre_copy::{Part, parse_limit};
use crate::arguments::{Durability, TurnArguments};

pub(crate) const DUMP_EXAMPLES: &str = "\
Where others are before it, the dump waits for its turn; the process runs on meanwhile. \
The process is frozen while CRIU takes its memory and permafrostd makes it durable; only then is it ended \
(or resumed with --leave-running). When anything fails before that, or you press Ctrl-C, CRIU rolls back \
and the process goes on. Once permafrostd has begun to seal the checkpoint, it takes a second Ctrl-C. \
A freeze that reaches --freeze-limit is rolled back, even if permafrostd hangs or this command was killed.

A tree that contains permafrostd, the agent, this command, or an etcd or a storage node that permafrostd needs is refused: \
frozen, they could not end the freeze.

CRIU sends everything through pipes, the fastest way, unless the dump uses soft-dirty bits, CRIU or permafrostd is too \
old, the memory has no room in the pipes that the kernel grants permafrostd (56 MiB for that of the packages), or the \
path of XDG_RUNTIME_DIR is too long; the output says which way was taken. --page-server takes small images of any size; \
through pipes they have at most 256 MiB.

Examples:
    permafrost dump --pid 4242 --job train
    permafrost dump --pid 4242 --job train --leave-running        a checkpoint of a process that goes on
    permafrost dump --pid $! --job build --shell-job              started from this shell
    permafrost dump --pid 4242 --job train --pre-copy             a shorter freeze: most is copied before it
    permafrost dump --pid 4242 --job web --tcp-established
    permafrost dump --pid 4242 --job web --priority 9 --deadline 30s     before others, where several wait
    permafrost dump --pid 4242 --job train -- --ghost-limit 64M   any option of CRIU
";

#[derive(Clone, Debug, Args)]
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
    /// Copy the memory while the process runs, in rounds of which each copies what was modified since the one before,
    /// then freeze it for the rest: until the rounds stop becoming smaller, N at most. Needs soft-dirty bits in the
    /// kernel; without them the dump says so and is taken at once.
    #[arg(
        long,
        value_name = "N",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "10",
        value_parser = parse_limit,
        conflicts_with = "pre_dump"
    )]
    pub(crate) pre_copy: Option<u32>,
    /// Take images and pages from CRIU through pipes (`criu dump --stream`), also where the dump would not choose that.
    #[arg(long, conflicts_with_all = ["pre_dump", "pre_copy", "page_server"])]
    pub(crate) stream: bool,
    /// Take the pages from CRIU in its page-server protocol, also where pipes would freeze the process for less.
    #[arg(long)]
    pub(crate) page_server: bool,
    /// Part of the dump with `--pre-copy` that these arguments are for.
    #[arg(skip)]
    pub(super) part: Part,
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
    /// Longest time that the process may be frozen, such as 30s or 5m, from 1s: then CRIU rolls back and the process
    /// goes on, whatever has become of permafrostd or of this command [default: 2m, and 10s more for each GiB that
    /// the processes have in memory].
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

impl DumpArguments {
    /// Returns the arguments for a part of a dump with `--pre-copy`.
    pub(super) fn part_of_pre_copy(&self, part: Part) -> Self {
        let mut arguments = self.clone();
        arguments.pre_copy = None;
        arguments.part = part;
        if let Part::Round(number) = part {
            arguments.pre_dump = true;
            // CRIU's log and statistics of each round.
            if let Some(work_dir) = &mut arguments.work_dir {
                work_dir.push(format!("round-{number}"));
            }
        }
        // The first round stores everything; the parts after it are compared with that.
        arguments.full = self.full && !part.is_later();
        arguments
    }
}

/// Parses a freeze limit of the command line.
fn parse_freeze_limit(text: &str) -> Result<FreezeLimit, String> {
    let time = parse_time(text)?;
    FreezeLimit::new(time).ok_or_else(|| {
        format!(
            "CRIU needs some of it to roll back: name {} s or more",
            FreezeLimit::SHORTEST.as_secs()
        )
    })
}
