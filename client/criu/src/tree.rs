//! Process trees as a checkpoint records them, so that the next dump can match their processes.

use std::fs;

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::manifest::DumpedProcess;

use crate::origin::ProcessStat;

/// Most processes that are recorded: their data travels with every listing of the checkpoint.
const MAX_PROCESSES: usize = 1024;

/// Returns the processes of a tree, given as [`tree`](crate::processes::tree) returns it, with programs, parents and
/// mappings. Processes that have ended are left out.
pub fn of(tree: &[u32]) -> Vec<DumpedProcess> {
    let root = tree.first();
    let inner: Vec<(u32, u32)> = tree
        .iter()
        .take(MAX_PROCESSES)
        .filter_map(|pid| Some((*pid, innermost_pid(*pid)?)))
        .collect();
    let inside = |outer: u32| {
        let known = inner.iter().find(|(pid, _)| *pid == outer);
        known.map(|(_, inner)| *inner)
    };
    inner
        .iter()
        .filter_map(|(outer, pid)| {
            let stat = ProcessStat::read(*outer).ok()?;
            Some(DumpedProcess {
                pid: *pid,
                program: stat.name,
                parent: if Some(outer) == root {
                    0
                } else {
                    inside(stat.parent).unwrap_or(0)
                },
                executable: executable(*outer),
                mappings: mappings(&fs::read_to_string(format!("/proc/{outer}/maps")).ok()?),
            })
        })
        .collect()
}

/// Returns the pid in the process's own namespace, by which CRIU names its memory.
fn innermost_pid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let pids = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    pids.split_whitespace().last()?.parse().ok()
}

/// Returns the path of the process's program; empty if it cannot be read, or there is none.
fn executable(pid: u32) -> String {
    let link = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    // The kernel marks the path so if the program was replaced on disk while it runs.
    let path = link.to_string_lossy();
    path.strip_suffix(" (deleted)").unwrap_or(&path).to_owned()
}

/// Returns the largest private writable mappings of `/proc/PID/maps`, in the format of
/// [`DumpedProcess::mappings`].
fn mappings(maps: &str) -> Vec<u64> {
    let mut ranges: Vec<(u64, u64)> = maps.lines().filter_map(private_writable).collect();
    ranges.sort_unstable_by_key(|(_, pages)| std::cmp::Reverse(*pages));
    ranges.truncate(DumpedProcess::MAX_MAPPINGS);
    ranges.sort_unstable();
    ranges.into_iter().flat_map(<[u64; 2]>::from).collect()
}

/// Returns the first page number and the number of pages of a line whose permissions are `rw-p` or `rwxp`.
fn private_writable(line: &str) -> Option<(u64, u64)> {
    let (range, rest) = line.split_once(' ')?;
    let permissions = rest.as_bytes().get(..4)?;
    if permissions[1] != b'w' || permissions[3] != b'p' {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let start = u64::from_str_radix(start, 16).ok()? / PAGE_BYTES;
    let end = u64::from_str_radix(end, 16).ok()? / PAGE_BYTES;
    Some((start, end.checked_sub(start)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes;

    #[test]
    fn of_the_mappings_the_largest_private_writable_ones_are_kept() {
        let maps = "\
5581a000-5581c000 r--p 00000000 fe:00 12 /usr/sbin/nginx
5581c000-5581e000 rw-p 00002000 fe:00 12 /usr/sbin/nginx
7f0000000000-7f0000010000 rw-s 00000000 00:01 7 /dev/zero (deleted)
7f1000000000-7f1000004000 rw-p 00000000 00:00 0 [heap]
";
        assert_eq!(mappings(maps), [0x5581c, 2, 0x7_f100_0000, 4]);
        let many: String = (1..100_u64)
            .map(|n| format!("{:x}-{:x} rw-p 0 0:0 0\n", n << 24, (n << 24) + (n << 12)))
            .collect();
        let kept = mappings(&many);
        assert_eq!(kept.len(), 2 * DumpedProcess::MAX_MAPPINGS);
        assert_eq!(kept[1], 100 - DumpedProcess::MAX_MAPPINGS as u64);
        for odd in ["", "x", "1-2", "zz-3 rw-p", "9000-1000 rw-p 0"] {
            assert_eq!(private_writable(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_child_is_of_its_parents_tree() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let tree = of(&processes::tree(std::process::id()));
        let found = tree.iter().find(|process| process.pid == child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        let found = found.unwrap();
        assert_eq!(found.parent, std::process::id());
        assert!(!found.mappings.is_empty());
        assert_eq!(tree[0].parent, 0, "the root's parent is none of the tree");
    }
}
