//! `permafrost status`.

use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use permafrost_agent::host::arguments::parse_duration;
use permafrost_protocol::control::{
    CertificateStatus, ClusterStatus, NamespaceUsage, QueueStatus, ScrubStatus, ServerStatus,
    request,
};
use permafrost_protocol::versions::{Interface, SpokenVersions};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::table::{Align, Table, facts};

/// Arguments of `permafrost status`.
#[derive(Debug, Args)]
pub struct StatusArguments {
    /// Wait until it answers, at most so long: for scripts that have just started it.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    wait: Option<Duration>,
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
    if scrub.unverified_pages > 0 {
        let pages = human::count(scrub.unverified_pages, "page", "pages");
        text.push_str(&format!("; {pages} in cold tiers not verified"));
    }
    if scrub.mended > 0 {
        text.push_str(&format!("; {} mended", scrub.mended));
    }
    text
}

/// Interval at which a daemon is asked that does not answer yet.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// Runs `permafrost status`.
///
/// # Errors
/// The failure of the command.
pub fn status(context: &Context, arguments: &StatusArguments) -> Result<(), Failure> {
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

/// Formats the versions that a process speaks.
pub(crate) fn spoken(speaks: &SpokenVersions) -> String {
    let of = Interface::ALL.map(|interface| format!("{interface} {}", speaks.of(interface)));
    of.join(", ")
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
            (
                "speaks",
                status.speaks.as_ref().map_or_else(String::new, spoken),
            ),
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
