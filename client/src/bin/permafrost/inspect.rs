//! `permafrost ls`, `show` and `status`.

use std::thread;
use std::time::{Duration, Instant};

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control::{
    CertificateStatus, Checkpoint, Checkpoints, ClusterStatus, Detail, NamespaceUsage, QueueStatus,
    ScrubStatus, ServerStatus, request,
};
use permafrost_protocol::manifest::{AddressSpace, Kind, Manifest, SpaceType};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::table::{Align, Table, facts};

use crate::cli::{LsArguments, OneCheckpoint, StatusArguments};
use crate::dump::name_of;

pub(crate) fn ls(context: &Context, arguments: &LsArguments) -> Result<(), Failure> {
    let mut checkpoints = context.connect()?.call(request::List {
        job: arguments.job.clone().unwrap_or_default(),
    })?;
    if arguments.parked {
        checkpoints
            .checkpoints
            .retain(|checkpoint| checkpoint.kind == "parked");
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
    let remarks: Vec<_> = [damaged, pinned].into_iter().flatten().collect();
    remarks.join(", ")
}

fn parent(checkpoint: &Checkpoint) -> String {
    match checkpoint.parent_generation {
        0 => "-".to_owned(),
        generation => format!("@{generation}"),
    }
}

pub(crate) fn show(context: &Context, arguments: &OneCheckpoint) -> Result<(), Failure> {
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
        ("ZERO", Align::Right),
        ("RUNS", Align::Right),
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
            pages(space.zero_pages),
            space.runs.to_string(),
            format!("pages-{}.img", space.pages_id),
        ]);
    }
    table.render()
}

fn scrub(scrub: &ScrubStatus) -> String {
    let mut text = match scrub.period_s {
        0 => "on request only".to_owned(),
        period_s => format!(
            "everything within {}, oldest {} ago",
            human::span(period_s),
            human::span(scrub.oldest_s)
        ),
    };
    if scrub.quarantined > 0 {
        let damaged = human::count(
            scrub.quarantined,
            "checkpoint is damaged",
            "checkpoints are damaged",
        );
        text.push_str("; ");
        text.push_str(&damaged);
    }
    if scrub.mended > 0 {
        text.push_str(&format!("; {} mended", scrub.mended));
    }
    text
}

/// Interval at which a daemon is asked that does not answer yet.
const ASK_EVERY: Duration = Duration::from_millis(50);

pub(crate) fn status(context: &Context, arguments: &StatusArguments) -> Result<(), Failure> {
    let until = Instant::now() + arguments.wait.unwrap_or_default();
    let ask =
        || -> Result<ServerStatus, Failure> { Ok(context.connect()?.call(request::Status {})?) };
    let status = loop {
        match ask() {
            Err(failure) if failure.code == Code::Unreachable && Instant::now() < until => {
                thread::sleep(ASK_EVERY);
            }
            answered => break answered?,
        }
    };
    context.print(&status, human_status)
}

/// Joins the parts that are not empty.
fn joined(parts: &[&str]) -> String {
    let parts: Vec<_> = parts.iter().copied().filter(|p| !p.is_empty()).collect();
    parts.join(", ")
}

/// Formats a table of the namespaces' usage and limits.
fn namespaces(namespaces: &[NamespaceUsage]) -> String {
    let of = |used: String, limit: Option<String>| match limit {
        Some(limit) => format!("{used} of {limit}"),
        None => used,
    };
    let count =
        |used: u64, limit: Option<u64>| of(used.to_string(), limit.map(|limit| limit.to_string()));
    let mut table = Table::new([
        ("NAMESPACE", Align::Left),
        ("BYTES", Align::Right),
        ("CHECKPOINTS", Align::Right),
        ("SESSIONS", Align::Right),
        ("RESERVATIONS", Align::Right),
        ("PRIORITY", Align::Right),
    ]);
    for one in namespaces {
        table.row([
            one.namespace.clone(),
            of(human::bytes(one.bytes), one.bytes_limit.map(human::bytes)),
            count(one.checkpoints, one.checkpoints_limit),
            count(one.sessions, one.sessions_limit),
            count(one.reservations, one.reservations_limit),
            one.priority_limit
                .map_or_else(String::new, |limit| format!("up to {limit}")),
        ]);
    }
    table.render()
}

fn in_cluster(cluster: &ClusterStatus) -> String {
    facts(
        &format!("node {}", cluster.node),
        &[
            ("cluster", cluster.id.clone()),
            (
                "state",
                match cluster.fenced.as_str() {
                    "" => "takes part".to_owned(),
                    why => format!("fenced: {why}"),
                },
            ),
            ("leader", cluster.leader.clone()),
            ("registry", cluster.registry.clone()),
            (
                "copies",
                format!(
                    "{} wanted{}",
                    cluster.copies_wanted,
                    if cluster.copies_count {
                        ""
                    } else {
                        "; those on this node do not count towards quorum and all"
                    }
                ),
            ),
            (
                "too few",
                amiss(
                    cluster.under_replicated,
                    "with fewer good copies than wanted",
                ),
            ),
            (
                "stranded",
                amiss(
                    cluster.stranded,
                    "without a good copy on a node that is alive",
                ),
            ),
            (
                "damaged",
                amiss(
                    cluster.damaged,
                    "with a damaged copy: `permafrost node ls` tells where",
                ),
            ),
        ],
    )
}

fn one_certificate(certificate: &CertificateStatus) -> String {
    facts(
        &format!("certificate of {} {}", certificate.role, certificate.name),
        &[
            ("serial", certificate.serial.clone()),
            ("expires", human::expiry(certificate.expires_unix_ms)),
            (
                "denied",
                match certificate.denied {
                    0 => String::new(),
                    denied => human::count(denied, "entry", "entries"),
                },
            ),
        ],
    )
}

/// Formats a number of affected checkpoints; empty if there are none, or their number is unknown.
fn amiss(checkpoints: Option<u64>, what: &str) -> String {
    match checkpoints {
        None | Some(0) => String::new(),
        Some(count) => format!(
            "{} {what}",
            human::count(count, "checkpoint", "checkpoints")
        ),
    }
}

fn one_queue(queue: &QueueStatus) -> String {
    let (title, slots) = match queue.direction.as_str() {
        "write" => ("queue of dumps", "dumps at once"),
        _ => ("queue of restores", "restores at once"),
    };
    facts(
        title,
        &[
            (
                slots,
                format!(
                    "{}{}",
                    queue.slots,
                    if queue.automatic { ", as measured" } else { "" }
                ),
            ),
            (
                "now",
                format!(
                    "{} running, {} waiting, {} reserved, {} to move",
                    queue.running,
                    queue.waiting,
                    queue.reserved,
                    human::bytes(queue.bytes)
                ),
            ),
            ("together", queue.bytes_per_s.map_or_else(String::new, rate)),
        ],
    )
}

fn rate(bytes_per_s: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate is not negative; a cast of a float saturates"
    )]
    let whole = bytes_per_s as u64;
    format!("{} a second", human::bytes(whole))
}

fn human_status(status: &ServerStatus) -> String {
    let program = if status.agent {
        "permafrost agent"
    } else {
        "permafrostd"
    };
    let mut text = facts(
        &format!(
            "{program} {}, process {}, up {}",
            status.version,
            status.pid,
            human::span(status.uptime_s)
        ),
        &[
            ("page server", joined(&[&status.address, &status.socket])),
            ("peers", status.peers.clone()),
            ("metrics", status.metrics.clone()),
            ("checkpoints", status.checkpoints.to_string()),
            (
                "parked",
                match status.park_ttl_s {
                    // An agent keeps none.
                    0 => status.parked.to_string(),
                    ttl_s => format!("{}, kept {}", status.parked, human::span(ttl_s)),
                },
            ),
            ("catalog", status.catalog.clone()),
            (
                "scrub",
                status.scrub.as_ref().map_or_else(String::new, scrub),
            ),
        ],
    );
    if let Some(certificate) = &status.certificate {
        text.push('\n');
        text.push_str(&one_certificate(certificate));
    }
    if let Some(cluster) = &status.cluster {
        text.push('\n');
        text.push_str(&in_cluster(cluster));
    }
    for queue in &status.queues {
        text.push('\n');
        text.push_str(&one_queue(queue));
    }
    for region in &status.regions {
        let used = region.capacity_bytes.saturating_sub(region.free_bytes);
        text.push('\n');
        text.push_str(&facts(
            &format!("region {}", region.path),
            &[
                ("uuid", region.uuid.clone()),
                (
                    "medium",
                    if region.volatile {
                        format!("{}, volatile", region.medium)
                    } else {
                        region.medium.clone()
                    },
                ),
                ("guarantee", region.guarantee.clone()),
                (
                    "space",
                    format!(
                        "{} of {} used ({}), {} free",
                        human::bytes(used),
                        human::bytes(region.capacity_bytes),
                        human::percent(used, region.capacity_bytes),
                        human::bytes(region.free_bytes),
                    ),
                ),
                (
                    "journal",
                    format!(
                        "{} of {} records used",
                        region.journal_records, region.journal_capacity
                    ),
                ),
                ("unclean stops", region.unsafe_shutdowns.to_string()),
                ("failed", failed(region)),
                ("damaged", damaged(region)),
            ],
        ));
    }
    if !status.namespaces.is_empty() {
        text.push('\n');
        text.push_str(&namespaces(&status.namespaces));
    }
    if !status.sessions.is_empty() {
        let mut table = Table::new([
            ("SESSION", Align::Left),
            ("JOB", Align::Left),
            ("STATE", Align::Left),
            ("AGE", Align::Right),
            ("RECEIVED", Align::Right),
            ("", Align::Left),
        ]);
        for session in &status.sessions {
            table.row([
                session.session.clone(),
                (if session.job.is_empty() {
                    "-"
                } else {
                    &session.job
                })
                .to_owned(),
                session.state.clone(),
                human::age(session.age_s),
                human::bytes(session.received_bytes),
                session.error.clone(),
            ]);
        }
        text.push('\n');
        text.push_str(&table.render());
    }
    text
}

/// Explains why a region accepts no writes, if so.
fn failed(region: &permafrost_protocol::control::RegionStatus) -> String {
    if region.failure.is_empty() {
        return String::new();
    }
    format!("for reading only: {}", region.failure)
}

/// Formats the losses of a medium, if any.
fn damaged(region: &permafrost_protocol::control::RegionStatus) -> String {
    if region.lost_pages == 0 && region.unreadable == 0 {
        return String::new();
    }
    format!(
        "{} pages lost, {} checkpoints not readable (`permafrost scrub` and `permafrost ls` name them)",
        region.lost_pages, region.unreadable
    )
}
