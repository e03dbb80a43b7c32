//! Pids of the task, chosen so that a restore can use them again: CRIU restores a process with the pid, and a
//! thread with the tid, that it had.
//!
//! In a fresh namespace the kernel counts up from 1: this program and its threads come first. The task begins
//! at [`FIRST`], and once the numbers are used up the kernel continues from 300 (`RESERVED_PIDS`), so the task
//! never gets one of the first numbers. In the namespace of a restore, CRIU and all processes forked later get
//! numbers behind the highest in the checkpoint.

use std::fs;
use std::path::Path;

use permafrost_protocol::manifest::Manifest;
use permafrost_terminal::failure::Failure;

/// First pid of a task; leaves room for this program, its threads and its helpers.
const FIRST: u32 = 1000;

/// File with the last pid that the kernel assigned in this namespace.
const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";

/// Free numbers that CRIU's own processes, and the forks of a restored task until the next dump, should have before the
/// kernel starts again at 300.
const ROOM: u32 = 4096;

/// Makes the next processes of this namespace get pids behind those of a task that is to be restored; or,
/// without one, from [`FIRST`] on.
///
/// # Errors
/// The kernel refuses the write.
pub(super) fn begin_behind(manifest: Option<&Manifest>) -> Result<(), Failure> {
    let last = match manifest {
        None => FIRST - 1,
        Some(manifest) => last_before_gap(&used(manifest), most()),
    };
    let path = Path::new(LAST_PID);
    fs::write(path, last.to_string()).map_err(|error| Failure::io("write", path, &error))
}

/// Returns the number after the largest pid.
fn most() -> u32 {
    fs::read_to_string("/proc/sys/kernel/pid_max")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        // The kernel's default for small machines, and the least it ever has on those with fewer than 32 processors.
        .unwrap_or(32768)
}

/// Returns the pids and tids in a checkpoint: each thread has an image `core-TID.img`.
fn used(manifest: &Manifest) -> Vec<u32> {
    let of = |name: &str| {
        name.strip_prefix("core-")?
            .strip_suffix(".img")?
            .parse()
            .ok()
    };
    let mut used: Vec<u32> = manifest
        .images
        .iter()
        .filter_map(|image| of(&image.name))
        .collect();
    used.sort_unstable();
    used
}

/// Returns the number before a run of free ones: behind the highest if there is [`ROOM`], else the longest run.
fn last_before_gap(used: &[u32], most: u32) -> u32 {
    let highest = used.last().copied().unwrap_or(FIRST - 1).max(FIRST - 1);
    if most.saturating_sub(highest) > ROOM {
        return highest;
    }
    let before = [FIRST - 1].into_iter().chain(used.iter().copied());
    let behind = used.iter().copied().chain([most]);
    before
        .zip(behind)
        .max_by_key(|(before, behind)| behind.saturating_sub(*before))
        .map_or(highest, |(before, _)| before)
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::manifest::Image;

    use super::*;

    #[test]
    fn helpers_come_behind_the_checkpoint() {
        assert_eq!(last_before_gap(&[1000, 1001, 1007], 32768), 1007);
        assert_eq!(last_before_gap(&[], 32768), 999);
        // Up to the end of the numbers: then where most are free.
        assert_eq!(last_before_gap(&[310, 1000, 32_700], 32768), 1000);
        assert_eq!(last_before_gap(&[1000, 30_000, 32_767], 32768), 1000);
        assert_eq!(last_before_gap(&[20_000, 32_767], 32768), 999);
    }

    #[test]
    fn pids_and_tids_are_those_of_the_core_images() {
        let image = |name: &str| Image {
            name: name.to_owned(),
            ..Image::default()
        };
        let names = [
            "core-1003.img",
            "inventory.img",
            "core-1000.img",
            "core-x.img",
            "mm-1000.img",
        ];
        let manifest = Manifest {
            images: names.map(image).to_vec(),
            ..Manifest::default()
        };
        assert_eq!(used(&manifest), [1000, 1003]);
    }
}
