//! `permafrost rm`, `pin`, `unpin`, `adopt`, `open` and `abort`.

use std::os::fd::AsFd;
use std::path::PathBuf;

use clap::Args;
use permafrost_criu::options::{Operation, PassedOn};
use permafrost_criu::origin;
use permafrost_protocol::control::{SessionOpened, request};
use permafrost_protocol::manifest::Origin;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::names::{checkpoint_name, job_name, name_of};
use permafrost_terminal::progress::QueueDisplay;
use permafrost_terminal::table::facts;

use crate::dump::check_fits;
use crate::transfer::open_directory;

pub(crate) const ADOPT_EXAMPLES: &str = "\
A bare `criu dump --page-server` names no job, so its pages are parked. This gives them one, with the \
small images that CRIU wrote. Without SESSION, the parked session whose processes are those of the images \
directory is taken.

In a cluster it is refused (exit code 4): dump with `permafrost dump` there.

Example:
    criu dump -t 4242 -D /tmp/d --page-server --address 127.0.0.1 --port 7117
    permafrost adopt --job train --images-dir /tmp/d
";

pub(crate) const OPEN_EXAMPLES: &str = "\
Opens a session of its own for a job and prints where `criu --page-server` shall send the pages. Seal it \
with `permafrost adopt`, or with permafrost-action as CRIU's action script.
";

#[derive(Debug, Args)]
pub(crate) struct RmArguments {
    /// JOB@GEN, or JOB with --all.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: String,
    /// Every generation of the job.
    #[arg(long)]
    pub(crate) all: bool,
    /// Also if the job has no other generation that can be restored.
    #[arg(long, conflicts_with = "all")]
    pub(crate) last: bool,
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

pub(crate) fn rm(context: &Context, arguments: &RmArguments) -> Result<(), Failure> {
    let name = &arguments.checkpoint;
    if let (Some((job, _)), true) = (name.split_once('@'), arguments.all) {
        return Err(
            Failure::new(Code::Invalid, "--all takes a job, not a generation").hint(format!(
                "{job} --all removes every generation, {name} without --all only this one"
            )),
        );
    }
    if !name.contains('@') && !arguments.all {
        return Err(
            Failure::new(Code::Invalid, format!("{name} names no generation")).hint(format!(
                "name one as {name}@GEN, or pass --all to remove every generation"
            )),
        );
    }
    let done = context.connect()?.call(request::Remove {
        checkpoint: name.clone(),
        all_generations: arguments.all,
        force: arguments.force,
        last: arguments.last,
    })?;
    context.print(&done, |done| {
        format!(
            "{} removed",
            human::count(done.count, "checkpoint", "checkpoints")
        )
    })
}

pub(crate) fn pin(context: &Context, checkpoint: &str, pinned: bool) -> Result<(), Failure> {
    let checkpoint = context.connect()?.call(request::Pin {
        checkpoint: checkpoint.to_owned(),
        pinned,
    })?;
    context.print(&checkpoint, |checkpoint| {
        let state = if checkpoint.pinned {
            "pinned"
        } else {
            "not pinned"
        };
        format!("{} is {state}", name_of(checkpoint))
    })
}

pub(crate) fn adopt(context: &Context, arguments: &AdoptArguments) -> Result<(), Failure> {
    let passed_on = PassedOn::parse(&arguments.criu_arguments, Operation::Dump)?;
    let restore_options = passed_on.restore_options();
    // A session that was opened by name knows more of its origin than this command does.
    let origin = if arguments.session.is_some() && restore_options.is_empty() {
        None
    } else {
        Some(Origin {
            restore_options,
            ..origin::here()?
        })
    };
    let directory = open_directory(&arguments.images_dir)?;
    let checkpoint = context.connect()?.call_with(
        request::Adopt {
            session: arguments.session.clone().unwrap_or_default(),
            job: arguments.job.clone(),
            origin,
            images_age_us: None,
            ignore_times: arguments.ignore_times,
        },
        Some(directory.as_fd()),
        &mut |_| {},
    )?;
    context.print(&checkpoint, |checkpoint| {
        facts(
            &format!("{} is sealed", name_of(checkpoint)),
            &[
                ("restore needs", passed_on.with_counterpart().join(" ")),
                ("memory", human::bytes(checkpoint.memory_bytes)),
                ("stored", human::bytes(checkpoint.added_bytes)),
            ],
        )
    })
}

pub(crate) fn open(context: &Context, arguments: &OpenArguments) -> Result<(), Failure> {
    let passed_on = PassedOn::parse(&arguments.criu_arguments, Operation::Dump)?;
    let mut origin = match arguments.pid {
        Some(pid) => {
            check_fits(pid)?;
            origin::collect(pid)?
        }
        None => origin::here()?,
    };
    origin.restore_options = passed_on.restore_options();
    let open = request::Open {
        job: arguments.job.clone(),
        pre_dump: arguments.pre_dump,
        seal_follows: false,
        origin: Some(origin),
        no_parent: arguments.full,
        bound_to_connection: false,
        parent_images: arguments.prev_images,
        ..request::Open::default()
    };
    let mut queue = QueueDisplay::new(context, format!("open {}", arguments.job), "dumps", "");
    let mut connection = context.connect()?;
    let opened = connection.call_with(open, None, &mut |progress| queue.update(progress))?;
    drop(queue);
    context.print(&opened, |opened| human_opened(opened, arguments))
}

fn human_opened(opened: &SessionOpened, arguments: &OpenArguments) -> String {
    let pid = arguments
        .pid
        .map_or_else(|| "PID".to_owned(), |pid| pid.to_string());
    let command = if arguments.pre_dump {
        "pre-dump --track-mem"
    } else {
        "dump"
    };
    let dump = match opened.address.rsplit_once(':') {
        Some((address, port)) => format!(
            "criu {command} -t {pid} -D DIR --page-server --address {address} --port {port}"
        ),
        None => "no port (--listen none): use permafrost dump, or the socket".to_owned(),
    };
    facts(
        &format!("session {} is open", opened.session),
        &[
            ("socket", opened.socket.clone()),
            ("address", opened.address.clone()),
            (
                "compared with",
                match opened.parent_generation {
                    0 => String::new(),
                    generation => format!("{}@{generation}", arguments.job),
                },
            ),
            ("dump with", dump),
            (
                "and then",
                format!(
                    "permafrost adopt --job {} --images-dir DIR {}",
                    arguments.job, opened.session
                ),
            ),
        ],
    )
}

pub(crate) fn abort(context: &Context, arguments: &AbortArguments) -> Result<(), Failure> {
    let done = context.connect()?.call(request::Abort {
        session: arguments.session.clone(),
        ..request::Abort::default()
    })?;
    context.print(&done, |_| {
        format!("session {} is discarded", arguments.session)
    })
}
