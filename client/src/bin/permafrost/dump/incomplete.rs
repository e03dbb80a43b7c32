//! Refuses processes that were restored lazily and lack pages still: what is not there yet would be dumped as never used.

use std::fs::File;
use std::io::{BufRead as _, BufReader};

use permafrost_criu::processes;
use permafrost_terminal::failure::{Code, Failure};

/// Flag of a mapping whose missing pages a userfaultfd brings (`VmFlags` in the kernel's
/// Documentation/filesystems/proc.rst).
const BROUGHT: &str = "um";

/// Refuses a tree with a process whose memory is still being brought. The kernel walks the processes' page tables:
/// about 17 ms for each GiB, while they run.
pub(super) fn refuse_incomplete(root: u32) -> Result<(), Failure> {
    let Some(pid) = processes::tree(root)
        .into_iter()
        .find(|pid| is_incomplete(*pid))
    else {
        return Ok(());
    };
    let what = format!(
        "process {pid} was restored lazily, and pages of it are not there yet: a dump would not have them"
    );
    Err(Failure::new(Code::Conflict, what).hint(
        "dump it when its restore has ended; one with --touched-only never has all pages: restore it with --lazy",
    ))
}

fn is_incomplete(pid: u32) -> bool {
    let Ok(file) = File::open(format!("/proc/{pid}/smaps")) else {
        return false;
    };
    let mut lines = BufReader::new(file).lines().map_while(Result::ok);
    lines.any(|line| {
        let flags = line.strip_prefix("VmFlags:");
        flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == BROUGHT))
    })
}
