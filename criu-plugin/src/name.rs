//! Names of jobs for dumps that nobody has named.
//!
//! | the root process | job |
//! | --- | --- |
//! | is in the cgroup of a container | the container's id: the last part of the cgroup's path, without what runtimes put around it |
//! | any other | `HOST.pid-PID` |
//!
//! A container's next dump is compared with its last one so, and two nodes that store into one cluster never mix up
//! their processes.

use std::env;
use std::fs;

use permafrost_protocol::manifest::JobName;

/// CRIU's variable for the pid of the root process.
const PID_VARIABLE: &str = "CRTOOLS_INIT_PID";

/// Hierarchies of cgroups, the most telling first: the one of version 2, systemd's, those that runtimes use most.
const HIERARCHIES: [&str; 6] = ["", "name=systemd", "memory", "pids", "devices", "cpu"];

/// Prefixes that runtimes put before a container's id.
const PREFIXES: [&str; 5] = ["libpod-", "crio-", "cri-containerd-", "docker-", "nerdctl-"];

/// Endings of cgroups of systemd, which hold anything.
const UNITS: [&str; 3] = [".slice", ".scope", ".service"];

/// Name of the cgroup that crun makes below the one of the container.
const CRUN: &str = "container";

/// Returns the name of the job for the dump under way.
pub(crate) fn of_dump() -> String {
    let pid = env::var(PID_VARIABLE).unwrap_or_default();
    let cgroups =
        |process: &str| fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
    of_container(&cgroups(&pid), &cgroups("self")).unwrap_or_else(|| {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        of_process(host.trim(), &pid)
    })
}

/// Returns the id of the container that a process is in, from its `/proc/PID/cgroup` and that of this process, which is
/// in none or in another one.
fn of_container(cgroups: &str, own: &str) -> Option<String> {
    HIERARCHIES.iter().find_map(|hierarchy| {
        let path = path_in(cgroups, hierarchy)?;
        if path_in(own, hierarchy) == Some(path) {
            return None;
        }
        let mut parts = path.rsplit('/');
        let last = match parts.next()? {
            CRUN => parts.next()?,
            last => last,
        };
        let scope = last.strip_suffix(".scope").unwrap_or(last);
        let id = match PREFIXES
            .iter()
            .find_map(|prefix| scope.strip_prefix(prefix))
        {
            Some(id) => id,
            None if UNITS.iter().any(|unit| last.ends_with(unit)) => return None,
            None => last,
        };
        // containerd with systemd's cgroups: SLICE:cri-containerd:ID.
        let id = id.rsplit(':').next().unwrap_or(id);
        id.parse::<JobName>().ok().map(String::from)
    })
}

/// Returns the path of a process in a hierarchy, unless it is the root.
fn path_in<'a>(cgroups: &'a str, hierarchy: &str) -> Option<&'a str> {
    cgroups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, names, path) = (fields.next()?, fields.next()?, fields.next()?);
        let here = names.split(',').any(|name| name == hierarchy);
        (here && path != "/").then_some(path)
    })
}

fn of_process(host: &str, pid: &str) -> String {
    let name = format!("{host}.pid-{pid}");
    match name.parse::<JobName>() {
        Ok(name) => name.into(),
        Err(_) => format!("pid-{pid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_named_by_its_cgroup_whichever_runtime_made_it() {
        let own = "0::/system.slice/ssh.service\n";
        for (cgroups, id) in [
            ("12:memory:/web\n1:name=systemd:/\n0::/\n", "web"),
            ("5:cpu,cpuacct:/libpod_parent/libpod-5963c7\n", "5963c7"),
            (
                "0::/machine.slice/libpod-5963c7.scope/container\n",
                "5963c7",
            ),
            (
                "0::/kubepods.slice/kubepods-besteffort.slice/crio-77aa.scope\n",
                "77aa",
            ),
            ("0::/kubepods/burstable/pod12/9f00\n", "9f00"),
            (
                "0::/system.slice/kubepods-pod1.slice:cri-containerd:9f00\n",
                "9f00",
            ),
            ("0::/system.slice/docker-abc.scope\n", "abc"),
        ] {
            assert_eq!(of_container(cgroups, own).as_deref(), Some(id), "{cgroups}");
        }
    }

    #[test]
    fn other_processes_are_named_by_their_pid() {
        for (cgroups, own) in [
            (
                "0::/user.slice/user-0.slice/session-1.scope\n",
                "0::/system.slice\n",
            ),
            ("0::/system.slice/web.service\n", "0::/system.slice\n"),
            ("0::/\n", "0::/\n"),
            ("4:memory:/here\n", "4:memory:/here\n"),
            ("0::/no name\n", ""),
            ("", ""),
        ] {
            assert_eq!(of_container(cgroups, own), None, "{cgroups}");
        }
        assert_eq!(of_process("node-3", "42"), "node-3.pid-42");
        assert_eq!(of_process("-odd host", "42"), "pid-42");
    }
}
