//! Pairs a process that has a new pid with a process of an earlier dump, to compare them.
//!
//! A program that renews its workers (`nginx -s reload`) has the same memory at the same addresses as before, under
//! other pids: workers are forked from one parent, and so have its layout. A wrong guess finds little equal and
//! costs a comparison of checksums; a page is shared only where its bytes are equal.

use std::collections::{HashMap, HashSet};

use permafrost_protocol::manifest::DumpedProcess;

/// Maximum number of processes of either dump that are paired: each is compared with each.
const MAX_COMPARED: usize = 1024;

/// Returns the process of `before` for every process of `now` whose pid is not in `before`.
pub fn match_processes(
    before: &[DumpedProcess],
    now: &[DumpedProcess],
    has_pid: impl Fn(u32) -> bool,
) -> HashMap<u64, u64> {
    let before = &before[..before.len().min(MAX_COMPARED)];
    let mut matched = HashMap::new();
    let mut taken: HashSet<u32> = now.iter().map(|process| process.pid).collect();
    let strangers = now.iter().filter(|process| !has_pid(process.pid));
    for process in strangers.take(MAX_COMPARED) {
        // The parent process is already matched if it has kept its pid or comes earlier in the tree.
        let parent = matched
            .get(&u64::from(process.parent))
            .copied()
            .unwrap_or(u64::from(process.parent));
        let candidates = before.iter().filter_map(|other| {
            let shared = shared_pages(process, other)?;
            let same_parent = u64::from(other.parent) == parent;
            Some((shared, same_parent, !taken.contains(&other.pid), other.pid))
        });
        // Order of preference: the same layout, the same parent, and a process that no other one is compared with.
        if let Some((.., pid)) = candidates.max() {
            taken.insert(pid);
            matched.insert(u64::from(process.pid), u64::from(pid));
        }
    }
    matched
}

/// Returns the share of pages that both processes have mapped at the same addresses, in 16ths of those of
/// `process`. `None` if the program differs, or less than half is in common.
fn shared_pages(process: &DumpedProcess, other: &DumpedProcess) -> Option<u64> {
    if process.executable.is_empty() || process.executable != other.executable {
        return None;
    }
    let all: u64 = process.ranges().map(|(start, end)| end - start).sum();
    let shared: u64 = process
        .ranges()
        .flat_map(|(start, end)| {
            let overlaps = other.ranges().map(move |range| {
                let (from, to) = (start.max(range.0), end.min(range.1));
                to.saturating_sub(from)
            });
            overlaps.collect::<Vec<_>>()
        })
        .sum();
    let sixteenths = shared.saturating_mul(16).checked_div(all)?;
    (sixteenths >= 8).then_some(sixteenths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, parent: u32, executable: &str, mappings: &[u64]) -> DumpedProcess {
        DumpedProcess {
            pid,
            parent,
            executable: executable.to_owned(),
            mappings: mappings.to_vec(),
            ..DumpedProcess::default()
        }
    }

    const NGINX: [u64; 4] = [0x5500, 100, 0x7f00, 900];

    fn matched(before: &[DumpedProcess], now: &[DumpedProcess]) -> HashMap<u64, u64> {
        match_processes(before, now, |pid| before.iter().any(|one| one.pid == pid))
    }

    #[test]
    fn new_workers_are_compared_with_old_ones_of_the_same_master() {
        let nginx = |pid, parent| process(pid, parent, "/usr/sbin/nginx", &NGINX);
        let before = [nginx(10, 0), nginx(11, 10), nginx(12, 10)];
        let now = [nginx(10, 0), nginx(21, 10), nginx(22, 10), nginx(23, 10)];
        let found = matched(&before, &now);
        assert_eq!(found.len(), 3);
        // Each old process is used before one is used twice, and the master for none.
        let mut used: Vec<u64> = [21, 22].map(|pid| found[&pid]).to_vec();
        used.sort_unstable();
        assert_eq!(used, [11, 12]);
        assert!([11, 12].contains(&found[&23]));
    }

    #[test]
    fn of_a_tree_under_new_pids_everyone_finds_their_own() {
        let sh = |pid, parent| process(pid, parent, "/bin/sh", &[0x1000, 10]);
        let before = [
            sh(1, 0),
            process(2, 1, "/bin/a", &NGINX),
            sh(3, 2),
            sh(4, 1),
        ];
        let now = [
            sh(101, 0),
            process(102, 101, "/bin/a", &NGINX),
            sh(103, 102),
            sh(104, 101),
        ];
        let found = matched(&before, &now);
        let expected = [(101, 1), (102, 2), (103, 3), (104, 4)];
        assert_eq!(found, HashMap::from(expected));
    }

    #[test]
    fn another_program_or_another_layout_is_nobody_to_compare_with() {
        let before = [process(1, 0, "/bin/a", &NGINX), process(2, 0, "", &NGINX)];
        for now in [
            process(9, 0, "/bin/b", &NGINX),
            process(9, 0, "/bin/a", &[0x6600, 100, 0x7f00, 90]),
            process(9, 0, "/bin/a", &[]),
            process(9, 0, "", &NGINX),
        ] {
            assert_eq!(
                matched(&before, std::slice::from_ref(&now)),
                HashMap::new(),
                "{now:?}"
            );
        }
        // A process that has kept its pid needs no match.
        assert_eq!(matched(&before, &before), HashMap::new());
    }
}
