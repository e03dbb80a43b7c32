//! Limits of the daemon's process, memory, swap, and the place in memory for images.

use std::fs;

use permafrost_criu::scratch::Scratch;
use permafrost_protocol::control::ServerStatus;
use permafrost_terminal::human;

use super::report::Findings;

const AREA: &str = "limits";
const MEMORY: &str = "memory";

/// Descriptors that the daemon should be able to have: 1,024 connections of CRIU with some for each, agents, peers and
/// callers of the API.
const DESCRIPTORS: u64 = 8192;

/// Descriptors below which ordinary use fails.
const FEWEST_DESCRIPTORS: u64 = 1024;

/// Available memory below which a machine is busy with itself.
const LITTLE_MEMORY: u64 = 256 << 20;

/// Room in memory for the small images of an ordinary dump.
const SCRATCH_BYTES: u64 = 64 << 20;

/// A limit's hard value; `None` is unlimited.
type Hard = Option<u64>;

pub(super) fn check(findings: &mut Findings, status: Option<&ServerStatus>) {
    let of_daemon = status.map(|status| status.pid).filter(|pid| *pid != 0);
    let (whose, path) = match of_daemon {
        Some(pid) => (format!("process {pid}"), format!("/proc/{pid}/limits")),
        None => ("this shell".to_owned(), "/proc/self/limits".to_owned()),
    };
    match fs::read_to_string(&path) {
        Ok(text) => {
            descriptors(findings, &whose, hard_limit(&text, "Max open files"));
            locked(findings, &whose, hard_limit(&text, "Max locked memory"));
        }
        Err(error) => findings.skipped((AREA, "open files"), format!("read {path}: {error}")),
    }
    match fs::read_to_string("/proc/meminfo") {
        Ok(text) => memory(findings, &text),
        Err(error) => findings.skipped(
            (MEMORY, "available"),
            format!("read /proc/meminfo: {error}"),
        ),
    }
    match fs::read_to_string("/proc/swaps") {
        Ok(text) => swap(findings, &text, is_encrypted),
        Err(error) => findings.skipped((MEMORY, "swap"), format!("read /proc/swaps: {error}")),
    }
    match Scratch::in_memory("doctor", SCRATCH_BYTES) {
        Ok(_) => findings.ok(
            (MEMORY, "place for images"),
            format!("a tmpfs has {} for the images of a dump", human::bytes(SCRATCH_BYTES)),
        ),
        Err(error) => findings.error(
            (MEMORY, "place for images"),
            error.to_string(),
            "free memory, enlarge /dev/shm (mount -o remount,size=…), or give dumps and restores a private directory with --work-dir",
        ),
    }
}

/// Returns the hard limit of a line of `/proc/PID/limits`.
fn hard_limit(text: &str, name: &str) -> Option<Hard> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    match line.split_whitespace().nth(1)? {
        "unlimited" => Some(None),
        number => Some(Some(number.parse().ok()?)),
    }
}

fn descriptors(findings: &mut Findings, whose: &str, hard: Option<Hard>) {
    let place = (AREA, "open files");
    let raise = "raise it: LimitNOFILE=524288 in the unit, or `ulimit -Hn`";
    match hard {
        None => findings.skipped(place, "the kernel names no such limit"),
        Some(None) => findings.ok(place, format!("unlimited for {whose}")),
        Some(Some(hard)) if hard < FEWEST_DESCRIPTORS => {
            findings.error(place, format!("{hard} at most for {whose}"), raise);
        }
        Some(Some(hard)) if hard < DESCRIPTORS => {
            findings.warning(
                place,
                format!("{hard} at most for {whose}: too few for many dumps at once"),
                raise,
            );
        }
        Some(Some(hard)) => findings.ok(place, format!("{hard} at most for {whose}")),
    }
}

fn locked(findings: &mut Findings, whose: &str, hard: Option<Hard>) {
    let place = (AREA, "locked memory");
    match hard {
        None => findings.skipped(place, "the kernel names no such limit"),
        Some(None) => findings.ok(place, format!("unlimited for {whose}")),
        Some(Some(hard)) => findings.ok(
            place,
            format!(
                "{} for {whose}: Permafrost locks none; CRIU, as root, is not bound by it",
                human::bytes(hard)
            ),
        ),
    }
}

fn memory(findings: &mut Findings, meminfo: &str) {
    let place = (MEMORY, "available");
    let value = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kib.saturating_mul(1024))
    };
    let (Some(total), Some(available)) = (value("MemTotal:"), value("MemAvailable:")) else {
        return findings.skipped(place, "/proc/meminfo has another form");
    };
    let found = format!("{} of {}", human::bytes(available), human::bytes(total));
    if available < LITTLE_MEMORY {
        findings.warning(
            place,
            found,
            "free some: CRIU needs memory for images and for pages that are on their way, and a restore needs all of its process's",
        );
    } else {
        findings.ok(place, found);
    }
}

/// Looks at the devices of `/proc/swaps`.
fn swap(findings: &mut Findings, swaps: &str, is_safe: impl Fn(&str) -> bool) {
    let place = (MEMORY, "swap");
    let devices: Vec<&str> = swaps
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    let open: Vec<&str> = devices
        .iter()
        .copied()
        .filter(|one| !is_safe(one))
        .collect();
    if devices.is_empty() {
        findings.ok(
            place,
            "none: nothing of a frozen process can be written to a disk by it; `permafrost suspend` keeps memory in memory",
        );
    } else if open.is_empty() {
        findings.ok(
            place,
            format!("{}, encrypted or in memory", devices.join(", ")),
        );
    } else {
        findings.warning(
            place,
            format!(
                "{} in the clear: images in tmpfs, and the memory of suspended processes, can be written there",
                open.join(", ")
            ),
            "encrypt it (crypttab, option `swap`), use zram, or accept that the disk may hold secrets of processes",
        );
    }
}

/// Returns true if a swap device is in memory, or a mapped device that encrypts.
fn is_encrypted(device: &str) -> bool {
    let real = fs::canonicalize(device).unwrap_or_else(|_| device.into());
    let name = real
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    let Some(name) = name else { return false };
    if name.starts_with("zram") {
        return true;
    }
    let uuid = fs::read_to_string(format!("/sys/block/{name}/dm/uuid"));
    uuid.is_ok_and(|uuid| uuid.starts_with("CRYPT-"))
}

#[cfg(test)]
mod tests {
    use super::super::DoctorStatus;
    use super::*;

    const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     
Max open files            1024                 4096                 files     
Max locked memory         unlimited            unlimited            bytes     
";

    #[test]
    fn limits_are_read_from_proc() {
        assert_eq!(hard_limit(LIMITS, "Max open files"), Some(Some(4096)));
        assert_eq!(hard_limit(LIMITS, "Max locked memory"), Some(None));
        assert_eq!(hard_limit(LIMITS, "Max nothing"), None);
    }

    #[test]
    fn few_descriptors_are_a_warning_and_very_few_an_error() {
        for (hard, status) in [
            (Some(4096), DoctorStatus::Warning),
            (Some(512), DoctorStatus::Error),
            (Some(DESCRIPTORS), DoctorStatus::Ok),
            (None, DoctorStatus::Ok),
        ] {
            let mut findings = Findings::default();
            descriptors(&mut findings, "x", Some(hard));
            assert_eq!(findings.of("open files").status, status, "{hard:?}");
        }
    }

    #[test]
    fn swap_in_the_clear_is_a_warning() {
        let swaps = "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n";
        for (text, safe, status) in [
            (swaps, false, DoctorStatus::Warning),
            (swaps, true, DoctorStatus::Ok),
            ("Filename Type\n", false, DoctorStatus::Ok),
        ] {
            let mut findings = Findings::default();
            swap(&mut findings, text, |_| safe);
            assert_eq!(findings.of("swap").status, status);
        }
    }

    #[test]
    fn little_memory_is_a_warning() {
        let mut findings = Findings::default();
        memory(
            &mut findings,
            "MemTotal: 1000000 kB\nMemAvailable: 1000 kB\n",
        );
        assert_eq!(findings.of("available").status, DoctorStatus::Warning);
    }
}
