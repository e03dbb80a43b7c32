//! Processes of a parked dump, as far as they can be named.

use std::fs;

use permafrost_protocol::manifest::{AddressSpace, DumpedProcess, Kind, Manifest, SpaceType};

/// Maximum number of processes of a parked dump that a listing names.
const MAX_LISTED: usize = 16;

/// Maximum number of processes whose programs are looked up while they are frozen.
const MAX_LOOKED_AT: usize = 64;

/// Returns the processes that pages were received for; with their programs if `from_here` is true, that is, if
/// they run on this machine. They are frozen: CRIU waits for the answer to its CLOSE. A process with such a
/// number that is not traced is another one, because the pid is that of the process's own namespace.
pub(super) fn look_at(spaces: &[AddressSpace], from_here: bool) -> Vec<DumpedProcess> {
    let processes = spaces
        .iter()
        .filter(|space| space.space_type() == SpaceType::Process);
    processes
        .take(MAX_LOOKED_AT)
        .filter_map(|space| {
            let pid = u32::try_from(space.id).ok()?;
            let program = if from_here { frozen_program(pid) } else { None };
            Some(DumpedProcess {
                pid,
                program: program.unwrap_or_default(),
                ..DumpedProcess::default()
            })
        })
        .collect()
}

/// Name of the program of a process that is traced and stopped.
fn frozen_program(pid: u32) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    program_of_status(&status)
}

fn program_of_status(status: &str) -> Option<String> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let is_traced = field("TracerPid:")?.trim() != "0";
    let is_stopped = field("State:")?.trim().starts_with(['t', 'T']);
    let program = field("Name:")?.trim();
    (is_traced && is_stopped).then(|| program.to_owned())
}

/// Returns the processes of a parked dump for its listing; none for any other checkpoint.
pub(super) fn processes_of(manifest: &Manifest) -> Vec<DumpedProcess> {
    if manifest.kind() != Kind::Parked {
        return Vec::new();
    }
    let known = manifest.origin.iter().flat_map(|origin| &origin.processes);
    let known: Vec<&DumpedProcess> = known.collect();
    let processes = manifest
        .spaces
        .iter()
        .filter(|space| space.space_type() == SpaceType::Process);
    processes
        .take(MAX_LISTED)
        .filter_map(|space| {
            let pid = u32::try_from(space.id).ok()?;
            let program = known.iter().find(|process| process.pid == pid);
            Some(DumpedProcess {
                pid,
                program: program.map_or_else(String::new, |process| process.program.clone()),
                ..DumpedProcess::default()
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_traced_and_stopped_process_has_a_name() {
        let status = |state: &str, tracer: u32| {
            format!("Name:\tsleep\nUmask:\t0022\nState:\t{state}\nTgid:\t7\nTracerPid:\t{tracer}\n")
        };
        for (state, tracer, program) in [
            ("t (tracing stop)", 9, Some("sleep")),
            ("T (stopped)", 9, Some("sleep")),
            ("S (sleeping)", 9, None),
            ("T (stopped)", 0, None),
        ] {
            let found = program_of_status(&status(state, tracer));
            assert_eq!(found.as_deref(), program, "{state} {tracer}");
        }
        assert_eq!(program_of_status(""), None);
    }
}
