//! The kernel: its version, its pages, and whether it records which pages were written.

use std::fs::{self, File};
use std::hint::black_box;
use std::io;
use std::os::unix::fs::FileExt;

use permafrost_protocol::{PAGE_BYTES, PAGE_SIZE};

use super::report::Findings;

const AREA: &str = "kernel";

/// Bit of an entry of `/proc/PID/pagemap`: the page was written since the last `clear_refs` (proc_pid_pagemap(5)).
const SOFT_DIRTY: u64 = 1 << 55;

/// First kernel with the ioctl PAGEMAP_SCAN.
const PAGEMAP_SCAN: (u32, u32) = (6, 7);

/// Oldest kernel with userfaultfd events for other processes (`fork`, `mremap`), which lazy restores need.
const USERFAULT_EVENTS: (u32, u32) = (4, 11);

pub(super) fn check(findings: &mut Findings) {
    let system = rustix::system::uname();
    let release = system.release().to_string_lossy();
    let machine = system.machine().to_string_lossy();
    let version = version_of(&release);
    match (machine.as_ref(), rustix::param::page_size() == PAGE_SIZE) {
        ("x86_64", true) => findings.ok((AREA, "version"), format!("Linux {release}, {machine}")),
        _ => findings.error(
            (AREA, "version"),
            format!(
                "Linux {release}, {machine}, pages of {} bytes",
                rustix::param::page_size()
            ),
            format!("run it on x86-64 with pages of {PAGE_BYTES} bytes: nothing else is supported"),
        ),
    }
    match is_tracked() {
        Ok(true) => findings.ok((AREA, "soft-dirty"), "the kernel marks pages that are written"),
        Ok(false) => findings.warning(
            (AREA, "soft-dirty"),
            "the kernel does not mark pages that are written: every dump reads all of the memory, and pre-copy is not possible",
            "use a kernel with CONFIG_MEM_SOFT_DIRTY, if freezes are to be shorter; pages that did not change are not stored in either case",
        ),
        Err(error) => findings.skipped((AREA, "soft-dirty"), format!("try it: {error}")),
    }
    if version >= Some(PAGEMAP_SCAN) {
        findings.ok(
            (AREA, "PAGEMAP_SCAN"),
            "the kernel has it; newer releases of CRIU use it",
        );
    } else {
        findings.ok(
            (AREA, "PAGEMAP_SCAN"),
            "not before Linux 6.7: CRIU reads /proc/PID/pagemap instead, which takes longer for sparse memory",
        );
    }
    if version < Some(USERFAULT_EVENTS) {
        findings.error(
            (AREA, "userfaultfd"),
            format!("Linux {release} has no events of userfaultfd"),
            "use Linux 4.11 or newer for `permafrost restore --lazy`",
        );
    }
    let euid = rustix::process::geteuid();
    if euid.is_root() {
        findings.ok(
            (AREA, "privileges"),
            "root: any process can be dumped and restored",
        );
    } else {
        findings.warning(
            (AREA, "privileges"),
            format!(
                "user {}: CRIU freezes and restores processes of root only as root",
                euid.as_raw()
            ),
            "run `permafrost dump` and `restore` as root",
        );
    }
}

/// Parses the first two numbers of a release, such as `6.1.0-18-amd64`.
fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

/// Tries whether the kernel marks pages that are written: clears the marks of this process, writes a page and reads its
/// mark. Other processes do not notice.
fn is_tracked() -> io::Result<bool> {
    let mut memory = vec![1_u8; 3 * PAGE_SIZE];
    black_box(&mut memory);
    fs::write("/proc/self/clear_refs", "4")?;
    if let Some(byte) = black_box(&mut memory).get_mut(PAGE_SIZE) {
        *byte = 2;
    }
    let address = memory.as_ptr().addr() + PAGE_SIZE;
    let place = u64::try_from(address / PAGE_SIZE).unwrap_or(0) * 8;
    let mut entry = [0; 8];
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, place)?;
    Ok(u64::from_le_bytes(entry) & SOFT_DIRTY != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_have_two_numbers() {
        assert_eq!(version_of("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(version_of("5.10"), Some((5, 10)));
        assert_eq!(version_of("weird"), None);
        assert!(version_of("6.10.1") >= Some(PAGEMAP_SCAN));
        assert!(version_of("6.6.9") < Some(PAGEMAP_SCAN));
    }

    #[test]
    fn this_kernel_is_examined() {
        let mut findings = Findings::default();
        check(&mut findings);
        assert_eq!(
            findings.of("version").status,
            super::super::DoctorStatus::Ok
        );
        findings.of("soft-dirty");
    }
}
