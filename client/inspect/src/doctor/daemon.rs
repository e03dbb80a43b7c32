//! The daemon of this machine, and what its regions guarantee.

use permafrost_protocol::control::{RegionStatus, ServerStatus};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Code;
use permafrost_terminal::human;

use super::report::Findings;

const AREA: &str = "daemon";
const REGION: &str = "region";

/// Part of a region, in percent, below which its free space is little.
const LITTLE_PERCENT: u64 = 10;

/// Asks the daemon for its state; `None` if it does not answer. With `is_before` it need not run: what it will find is
/// looked at.
pub(super) fn ask(
    findings: &mut Findings,
    context: &Context,
    is_before: bool,
) -> Option<ServerStatus> {
    let place = (AREA, "permafrostd");
    match super::status(context) {
        Ok(status) => {
            let program = if status.agent {
                "permafrost agent"
            } else {
                "permafrostd"
            };
            let found = format!(
                "{program} {}, process {}, up {}",
                status.version,
                status.pid,
                human::span(status.uptime_s)
            );
            if status.version == env!("CARGO_PKG_VERSION") {
                findings.ok(place, found);
            } else {
                findings.warning(
                    place,
                    format!("{found}; this command is {}", env!("CARGO_PKG_VERSION")),
                    "install the same version of both",
                );
            }
            Some(status)
        }
        Err(failure) if is_before && failure.code == Code::Unreachable => {
            findings.skipped(place, "it does not run: its places are looked at before");
            None
        }
        Err(failure) => {
            let advice = match failure.code {
                Code::Denied => {
                    "run it as the user that permafrostd runs as, or as root".to_owned()
                }
                _ => format!(
                    "start permafrostd, or name its control socket with --socket (now {})",
                    context.socket.display()
                ),
            };
            findings.error(place, failure.message, advice);
            None
        }
    }
}

pub(super) fn check(findings: &mut Findings, status: &ServerStatus) {
    for (name, address) in [
        ("page server", &status.address),
        ("peers", &status.peers),
        ("metrics", &status.metrics),
    ] {
        if !address.is_empty() {
            findings.ok(("ports", name), format!("{address}, of permafrostd"));
        }
    }
    for region in &status.regions {
        check_region(findings, region);
    }
    if let Some(scrub) = &status.scrub {
        let place = (REGION, "scrub");
        if scrub.quarantined > 0 {
            findings.error(
                place,
                human::count(scrub.quarantined, "checkpoint is damaged", "checkpoints are damaged"),
                "`permafrost scrub` names them, and heals those that another node has a good copy of",
            );
        } else if scrub.period_s == 0 {
            findings.warning(
                place,
                "nothing is read and verified unless requested",
                "start permafrostd without `--scrub-period off`: damage is found while other copies are left",
            );
        } else {
            findings.ok(
                place,
                format!(
                    "everything is verified within {}",
                    human::span(scrub.period_s)
                ),
            );
        }
    }
    if let Some(bytes) = status.pipe_bytes {
        findings.ok(
            (AREA, "pipes"),
            format!(
                "of up to {} are dumps sent through pipes, the fastest way; larger ones by CRIU's page-server protocol (fs.pipe-user-pages-soft)",
                human::bytes(bytes)
            ),
        );
    }
    for queue in &status.queues {
        let name = format!(
            "queue of {}s",
            match queue.direction.as_str() {
                "write" => "dump",
                _ => "restore",
            }
        );
        findings.ok(
            (AREA, &name),
            format!("{} running, {} waiting", queue.running, queue.waiting),
        );
    }
}

fn check_region(findings: &mut Findings, region: &RegionStatus) {
    let guarantee = (REGION, "guarantee");
    let found = format!("{}: {}", region.path, region.guarantee);
    if region.volatile {
        findings.warning(
            guarantee,
            format!("{found}; it does not outlast a power failure"),
            "put the region on a DAX file system or on a disk, if checkpoints are to outlast the machine",
        );
    } else {
        findings.ok(guarantee, found);
    }
    if !region.failure.is_empty() {
        findings.error(
            (REGION, "writes"),
            format!("it takes no writes: {}", region.failure),
            "`permafrost region ls` and the log say more; checkpoints can still be read: copy or salvage them before the medium is replaced",
        );
    }
    if region.lost_pages > 0 || region.unreadable > 0 {
        findings.error(
            (REGION, "damage"),
            format!(
                "{} pages lost, {} checkpoints not readable",
                region.lost_pages, region.unreadable
            ),
            "`permafrost scrub` and `permafrost ls` name what is damaged; replace the medium",
        );
    }
    let room = (REGION, "room");
    let found = format!(
        "{} of {} free",
        human::bytes(region.free_bytes),
        human::bytes(region.capacity_bytes)
    );
    let advice = "remove checkpoints (`permafrost prune`, `permafrost rm`, then `permafrost gc`), or enlarge the region (`permafrost region grow`, `add`)";
    if region.capacity_bytes == 0 {
        findings.skipped(room, "the daemon does not say");
    } else if region.free_bytes == 0 {
        findings.error(room, found, advice);
    } else if region.free_bytes < region.capacity_bytes / 100 * LITTLE_PERCENT {
        findings.warning(room, found, advice);
    } else {
        findings.ok(room, found);
    }
    if region.journal_capacity > 0 && region.journal_records > region.journal_capacity / 10 * 9 {
        findings.warning(
            (REGION, "journal"),
            format!(
                "{} of {} records used: there is room for few further checkpoints",
                region.journal_records, region.journal_capacity
            ),
            "remove checkpoints: `permafrost prune`, `permafrost rm`",
        );
    }
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::ScrubStatus;

    use super::super::DoctorStatus;
    use super::*;

    #[test]
    fn regions_that_are_full_damaged_or_volatile_are_found() {
        let status = ServerStatus {
            regions: vec![RegionStatus {
                path: "/r".to_owned(),
                guarantee: "msync".to_owned(),
                capacity_bytes: 100 << 20,
                free_bytes: 1 << 20,
                lost_pages: 2,
                failure: "EIO".to_owned(),
                volatile: true,
                journal_records: 95,
                journal_capacity: 100,
                ..RegionStatus::default()
            }],
            pipe_bytes: Some(56 << 20),
            scrub: Some(ScrubStatus {
                quarantined: 1,
                ..ScrubStatus::default()
            }),
            ..ServerStatus::default()
        };
        let mut findings = Findings::default();
        check(&mut findings, &status);
        for (name, expected) in [
            ("guarantee", DoctorStatus::Warning),
            ("writes", DoctorStatus::Error),
            ("damage", DoctorStatus::Error),
            ("room", DoctorStatus::Warning),
            ("journal", DoctorStatus::Warning),
            ("scrub", DoctorStatus::Error),
            ("pipes", DoctorStatus::Ok),
        ] {
            assert_eq!(findings.of(name).status, expected, "{name}");
        }
        let full = RegionStatus {
            free_bytes: 0,
            ..status.regions[0].clone()
        };
        let mut findings = Findings::default();
        check_region(&mut findings, &full);
        assert_eq!(findings.of("room").status, DoctorStatus::Error);
    }
}
