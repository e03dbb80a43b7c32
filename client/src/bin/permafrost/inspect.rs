//! `permafrost ls` and `show`.

use clap::Args;
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control::{Checkpoint, Checkpoints, Detail, request};
use permafrost_protocol::manifest::{AddressSpace, Kind, Manifest, SpaceType};
use permafrost_terminal::api::ApiArguments;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::names::{job_name, name_of};
use permafrost_terminal::table::{Align, Table, facts};

use crate::arguments::OneCheckpoint;

#[derive(Debug, Args)]
pub(crate) struct LsArguments {
    /// Only this job.
    #[arg(value_parser = job_name)]
    pub(crate) job: Option<String>,
    /// Only parked sessions: dumps that CRIU closed and nobody has adopted.
    #[arg(long)]
    pub(crate) parked: bool,
    /// Only jobs of this namespace.
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// List so many at most, and where to go on. Default: all.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) limit: Option<u64>,
    /// Go on behind this one: JOB@GEN, or a parked session.
    #[arg(long, value_name = "LAST")]
    pub(crate) after: Option<String>,
}

pub(crate) fn ls(context: &Context, arguments: &LsArguments) -> Result<(), Failure> {
    let checkpoints = list(context, arguments)?;
    if arguments.parked {
        return context.print(&checkpoints, |parked| match parked.checkpoints.len() {
            0 => "no parked sessions\n".to_owned(),
            _ => human_parked(&parked.checkpoints),
        });
    }
    if let (Some(job), true) = (&arguments.job, checkpoints.checkpoints.is_empty()) {
        return Err(
            Failure::new(Code::NotFound, format!("no checkpoint of job {job}"))
                .hint("permafrost ls lists all"),
        );
    }
    context.print(&checkpoints, human_list)
}

/// Asks for one part of the list after the other.
fn list(context: &Context, arguments: &LsArguments) -> Result<Checkpoints, Failure> {
    let mut list = request::List {
        job: arguments.job.clone().unwrap_or_default(),
        namespace: arguments.namespace.clone().unwrap_or_default(),
        parked: arguments.parked,
        limit: arguments.limit.unwrap_or(0),
        after: arguments.after.clone().unwrap_or_default(),
    };
    let mut all = Checkpoints::default();
    loop {
        let part = context.connect()?.call(list.clone())?;
        let records = part.checkpoints.into_iter();
        // A daemon of an earlier version sends all.
        all.checkpoints
            .extend(records.filter(|record| !list.parked || record.kind == "parked"));
        all.next = part.next;
        let listed = all.checkpoints.len() as u64;
        let left = arguments.limit.map(|limit| limit.saturating_sub(listed));
        if all.next.is_empty() || left == Some(0) {
            return Ok(all);
        }
        list.limit = left.unwrap_or(0);
        list.after.clone_from(&all.next);
    }
}

fn human_list(list: &Checkpoints) -> String {
    let (parked, sealed): (Vec<_>, Vec<_>) = list
        .checkpoints
        .iter()
        .partition(|checkpoint| checkpoint.kind == "parked");
    let mut text = String::new();
    let clustered = sealed.iter().any(|checkpoint| checkpoint.copies_wanted > 0);
    if !sealed.is_empty() {
        let mut table = Table::new([
            ("CHECKPOINT", Align::Left),
            ("KIND", Align::Left),
            ("AGE", Align::Right),
            ("MEMORY", Align::Right),
            ("STORED", Align::Right),
            ("PROCESSES", Align::Right),
            ("PARENT", Align::Left),
            // On a single machine there are no copies to show.
            (if clustered { "COPIES" } else { "" }, Align::Left),
            ("", Align::Left),
        ]);
        for checkpoint in sealed {
            table.row([
                name_of(checkpoint),
                checkpoint.kind.clone(),
                human::age(human::seconds_since(checkpoint.created_unix_ms)),
                human::bytes(checkpoint.memory_bytes),
                human::bytes(checkpoint.added_bytes),
                checkpoint.processes.to_string(),
                parent(checkpoint),
                copies_in_short(checkpoint),
                remarks(checkpoint),
            ]);
        }
        text.push_str(&table.render());
    }
    if !parked.is_empty() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&human_parked(parked));
    }
    if text.is_empty() {
        text.push_str("no checkpoints\n");
    }
    if !list.next.is_empty() {
        text.push_str(&format!("there are more: --after {}\n", list.next));
    }
    text
}

fn human_parked<'a>(parked: impl IntoIterator<Item = &'a Checkpoint>) -> String {
    let mut table = Table::new([
        ("PARKED SESSION", Align::Left),
        ("TAKEN", Align::Left),
        ("MEMORY", Align::Right),
        ("STORED", Align::Right),
        ("DISCARDED IN", Align::Right),
        ("JOB", Align::Left),
        ("PROCESSES", Align::Left),
    ]);
    for session in parked {
        table.row([
            session.session.clone(),
            human::date(session.created_unix_ms),
            human::bytes(session.memory_bytes),
            human::bytes(session.added_bytes),
            match session.expires_unix_ms {
                0 => "never".to_owned(),
                expires => human::age(expires.saturating_sub(human::now_unix_ms()) / 1_000),
            },
            if session.job.is_empty() {
                "-".to_owned()
            } else {
                session.job.clone()
            },
            parked_processes(session),
        ]);
    }
    table.render()
}

/// Formats the processes of a parked session: `12 postgres, 13, and 4 more`.
fn parked_processes(session: &Checkpoint) -> String {
    const SHOWN: usize = 6;
    let processes = &session.parked_processes;
    let mut shown: Vec<String> = processes
        .iter()
        .take(SHOWN)
        .map(|process| match process.program.as_str() {
            "" => process.pid.to_string(),
            program => format!("{} {program}", process.pid),
        })
        .collect();
    let all = usize::try_from(session.processes).unwrap_or(usize::MAX);
    if shown.is_empty() {
        return all.to_string();
    }
    if all > shown.len() {
        shown.push(format!("and {} more", all - shown.len()));
    }
    shown.join(", ")
}

/// Formats the number of copies: `2 of 3`; empty for a checkpoint that no cluster lists.
fn copies_in_short(checkpoint: &Checkpoint) -> String {
    match checkpoint.copies_wanted {
        0 => String::new(),
        wanted => format!("{} of {wanted}", checkpoint.nodes.len()),
    }
}

/// Lists the nodes that hold a copy; empty for a checkpoint that no cluster lists.
pub(crate) fn copies(checkpoint: &Checkpoint) -> String {
    let nodes = checkpoint.nodes.join(", ");
    let wanted = usize::try_from(checkpoint.copies_wanted).unwrap_or(usize::MAX);
    if checkpoint.nodes.len() < wanted {
        format!("{nodes} ({wanted} wanted)")
    } else {
        nodes
    }
}

fn remarks(checkpoint: &Checkpoint) -> String {
    let damaged = (!checkpoint.damaged.is_empty()).then_some("damaged");
    let pinned = checkpoint.pinned.then_some("pinned");
    let cold = (!checkpoint.cold.is_empty()).then_some("cold");
    let remarks: Vec<_> = [damaged, cold, pinned].into_iter().flatten().collect();
    remarks.join(", ")
}

/// Formats how much comes back from object stores before a restore: `12.0 MiB on a, 3.0 MiB on b`.
fn cold(checkpoint: &Checkpoint) -> String {
    let copies = checkpoint.cold.iter().map(|copy| {
        let bytes = human::bytes(copy.bytes);
        match copy.node.as_str() {
            "" => bytes,
            node => format!("{bytes} on {node}"),
        }
    });
    copies.collect::<Vec<_>>().join(", ")
}

fn parent(checkpoint: &Checkpoint) -> String {
    match checkpoint.parent_generation {
        0 => "-".to_owned(),
        generation => format!("@{generation}"),
    }
}

#[derive(Debug, Args)]
pub(crate) struct ShowArguments {
    #[command(flatten)]
    checkpoint: OneCheckpoint,
    /// Show the address spaces instead: each mapping with its permissions, its file, and what of it is stored, shared
    /// with the parent generation, or zero. Reads no pages of memory.
    #[arg(long)]
    maps: bool,
    /// Only this process.
    #[arg(long, requires = "maps", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
    #[command(flatten)]
    api: ApiArguments,
}

pub(crate) fn show(context: &Context, arguments: &ShowArguments) -> Result<(), Failure> {
    if arguments.maps {
        let pid = arguments.pid.unwrap_or(0);
        let checkpoint = &arguments.checkpoint.checkpoint;
        return permafrost_inspect::maps(context, checkpoint, pid, &arguments.api);
    }
    if arguments.api.api.is_some() {
        context.remark("--api is for --maps: the daemon of this machine tells the rest");
    }
    let arguments = &arguments.checkpoint;
    let detail = context.connect()?.call(request::Show {
        checkpoint: arguments.checkpoint.clone(),
    })?;
    context.print(&detail, human_detail)
}

fn human_detail(detail: &Detail) -> String {
    let checkpoint = detail.checkpoint.clone().unwrap_or_default();
    let manifest = detail.manifest.clone().unwrap_or_default();
    let title = if checkpoint.kind == "parked" {
        format!("parked session {}", checkpoint.session)
    } else {
        name_of(&checkpoint)
    };
    let of_memory = |bytes: u64| {
        if bytes == 0 {
            String::new()
        } else {
            format!(
                "{} ({})",
                human::bytes(bytes),
                human::percent(bytes, checkpoint.memory_bytes)
            )
        }
    };
    let images_bytes = manifest.images.iter().map(|image| image.len_bytes).sum();
    let mut text = facts(
        &title,
        &[
            ("id", checkpoint.id.clone()),
            (
                "kind",
                format!(
                    "{}{}",
                    kind(&checkpoint, &manifest),
                    if checkpoint.pinned { ", pinned" } else { "" }
                ),
            ),
            ("damaged", checkpoint.damaged.clone()),
            ("copies", copies(&checkpoint)),
            ("in the object store", cold(&checkpoint)),
            (
                "sealed",
                format!(
                    "{}, {} ago",
                    human::date(checkpoint.created_unix_ms),
                    human::span(human::seconds_since(checkpoint.created_unix_ms))
                ),
            ),
            ("taken", taken(&manifest)),
            ("dumped by", manifest.taken_by.clone()),
            (
                "restored with",
                manifest
                    .origin
                    .clone()
                    .unwrap_or_default()
                    .restore_options
                    .join(" "),
            ),
            ("processes", checkpoint.processes.to_string()),
            ("memory", human::bytes(checkpoint.memory_bytes)),
            (
                "equal",
                match checkpoint.parent_generation {
                    0 => String::new(),
                    generation => format!(
                        "{} to {}@{generation}",
                        match checkpoint.parent_bytes {
                            0 => "nothing".to_owned(),
                            bytes => of_memory(bytes),
                        },
                        checkpoint.job
                    ),
                },
            ),
            ("zero", of_memory(checkpoint.zero_bytes)),
            ("stored", human::bytes(checkpoint.added_bytes)),
            (
                "segments",
                format!(
                    "{}, {} free if it were removed",
                    detail.segments,
                    human::bytes(detail.exclusive_bytes)
                ),
            ),
            (
                "images",
                format!(
                    "{}, {}",
                    human::count(
                        manifest.images.len().try_into().unwrap_or(u64::MAX),
                        "file",
                        "files"
                    ),
                    human::bytes(images_bytes)
                ),
            ),
        ],
    );
    if !manifest.spaces.is_empty() {
        text.push('\n');
        text.push_str(&spaces(&manifest.spaces));
    }
    text
}

fn kind(checkpoint: &Checkpoint, manifest: &Manifest) -> String {
    match manifest.kind() {
        Kind::PreDump => "pre-dump: memory only, makes the next dump shorter".to_owned(),
        Kind::PreCopy => {
            "pre-copy: round of a dump that is under way, removed when that ends".to_owned()
        }
        Kind::Parked => "parked: give it a job with permafrost adopt".to_owned(),
        Kind::Full => checkpoint.kind.clone(),
    }
}

fn taken(manifest: &Manifest) -> String {
    let Some(origin) = &manifest.origin else {
        return String::new();
    };
    let mut parts = Vec::new();
    if !origin.host.is_empty() {
        parts.push(format!("on {}", origin.host));
    }
    if origin.pid != 0 {
        parts.push(format!("of process {}", origin.pid));
    }
    if !origin.criu_version.is_empty() {
        parts.push(format!("by CRIU {}", origin.criu_version));
    }
    if origin.tracked {
        parts.push("tracking memory".to_owned());
    }
    parts.join(", ")
}

fn spaces(spaces: &[AddressSpace]) -> String {
    let mut table = Table::new([
        ("ADDRESS SPACE", Align::Left),
        ("MEMORY", Align::Right),
        ("STORED", Align::Right),
        ("EQUAL", Align::Right),
        ("SHARED", Align::Right),
        ("ZERO", Align::Right),
        ("IMAGE", Align::Left),
    ]);
    for space in spaces {
        let pages = |pages: u64| human::bytes(pages.saturating_mul(PAGE_BYTES));
        table.row([
            match space.space_type() {
                SpaceType::Process => format!("process {}", space.id),
                SpaceType::SharedMemory => format!("shared memory {:#x}", space.id),
            },
            pages(space.pages),
            pages(space.stored_pages),
            pages(space.parent_pages),
            pages(space.sibling_pages + space.shared_pages),
            pages(space.zero_pages),
            format!("pages-{}.img", space.pages_id),
        ]);
    }
    table.render()
}
