//! Who descends from whom, out of `/proc`.
//!
//! Processes come and go while it is read, so an answer is only good for what its caller makes of it: each
//! function says in which direction it may be wrong.

use std::fs;

use rustix::process::{Pid, Signal};

use crate::origin::ProcessStat;

/// Longest chain of parents followed: only a mistake is deeper.
const MAX_DEPTH: u32 = 1 << 16;

/// How two processes are related.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kinship {
    /// One is the other, or an ancestor of it; or nobody can tell, since one of the chain ended meanwhile.
    Possible,
    /// Neither descends from the other.
    None,
}

/// Whether `one` may be an ancestor of `other`, the same, or a descendant. Never [`Kinship::None`] for two
/// that are related.
pub fn kinship(one: u32, other: u32) -> Kinship {
    if reaches(one, other) == Kinship::None && reaches(other, one) == Kinship::None {
        Kinship::None
    } else {
        Kinship::Possible
    }
}

/// Follows the parents of `from` up to `to`.
fn reaches(from: u32, to: u32) -> Kinship {
    let (mut pid, mut born) = (from, u64::MAX);
    for _ in 0..MAX_DEPTH {
        if pid == to {
            return Kinship::Possible;
        }
        if pid == 0 {
            return Kinship::None;
        }
        match ProcessStat::read(pid) {
            // A parent is not younger than its child, also where it adopted it: this is another process,
            // which got the number of a parent that ended a moment ago.
            Ok(stat) if stat.start_ticks > born => return Kinship::Possible,
            Ok(stat) => (pid, born) = (stat.parent, stat.start_ticks),
            Err(_) => return Kinship::Possible,
        }
    }
    Kinship::Possible
}

/// The living descendants of `ancestor`, without itself; some may be missing that came while it was read.
pub fn descendants(ancestor: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let parents: Vec<(u32, u32)> = entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, ProcessStat::read(pid).ok()?)))
        .filter(|(_, stat)| stat.state != 'Z')
        .map(|(pid, stat)| (pid, stat.parent))
        .collect();
    let mut found = vec![ancestor];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        next += 1;
        let children = parents.iter().filter(|(_, of)| *of == parent);
        let fresh: Vec<u32> = children
            .map(|(pid, _)| *pid)
            .filter(|pid| !found.contains(pid))
            .collect();
        found.extend(fresh);
    }
    found.remove(0);
    found
}

/// The number of a process in the innermost pid namespace it is in.
pub fn innermost_pid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().next_back()?.parse().ok()
}

/// Kills a process; one that has ended already is no error.
pub fn kill(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn ancestors_and_descendants_are_kin_and_siblings_are_not() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 600 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let grandchild: u32 = line.trim().parse().unwrap();
        let mut sibling = Command::new("sleep").arg("600").spawn().unwrap();
        let own = std::process::id();

        assert_eq!(kinship(own, grandchild), Kinship::Possible);
        assert_eq!(kinship(grandchild, own), Kinship::Possible);
        assert_eq!(kinship(shell.id(), shell.id()), Kinship::Possible);
        assert_eq!(kinship(sibling.id(), grandchild), Kinship::None);
        assert_eq!(kinship(sibling.id(), 5_000_000), Kinship::Possible);

        let found = descendants(own);
        assert!(
            [shell.id(), grandchild, sibling.id()]
                .iter()
                .all(|pid| found.contains(pid))
        );
        assert!(!found.contains(&own) && descendants(shell.id()) == [grandchild]);
        assert_eq!(innermost_pid(grandchild), Some(grandchild));

        kill(grandchild);
        kill(sibling.id());
        shell.wait().unwrap();
        sibling.wait().unwrap();
    }
}
