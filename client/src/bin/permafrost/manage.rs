//! `permafrost rm`, `pin`, `unpin`, `adopt`, `open` and `abort`.

use std::os::fd::AsFd;

use permafrost_criu::options::{Operation, PassedOn};
use permafrost_criu::origin;
use permafrost_protocol::control::{SessionOpened, request};
use permafrost_protocol::manifest::Origin;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::progress::QueueDisplay;
use permafrost_terminal::table::facts;

use crate::cli::{AbortArguments, AdoptArguments, OpenArguments, RmArguments};
use crate::dump::{check_fits, name_of};
use crate::transfer::open_directory;

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
    })?;
    context.print(&done, |_| {
        format!("session {} is discarded", arguments.session)
    })
}
