//! Names of jobs for dumps that nobody has named.
//!
//! | the root process | job |
//! | --- | --- |
//! | is in the cgroup that a known runtime makes for a container | the container's id |
//! | is, by the state of runc or crun, the init process of the container that its cgroup is named after | the container's name |
//! | any other | `HOST.pid-PID` |
//!
//! A container's next dump is compared with its last one so, and two nodes that store into one cluster never mix up
//! their processes. A cgroup of any other program names nothing: `task_0` is the first task of every Slurm job.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use permafrost_criu::origin::ProcessStat;
use permafrost_protocol::manifest::JobName;

use super::PID_VARIABLE;

/// Hierarchies of cgroups, the most telling first: the one of version 2, systemd's, those that runtimes use most.
const HIERARCHIES: [&str; 6] = ["", "name=systemd", "memory", "pids", "devices", "cpu"];

/// Runtimes that put their name before a container's id.
const RUNTIMES: [&str; 5] = ["libpod", "crio", "cri-containerd", "docker", "nerdctl"];

/// Runtimes that put their name before a container's name, which users choose.
const NAMING_RUNTIMES: [&str; 2] = ["runc", "crun"];

/// Cgroups whose direct children are containers.
const PARENTS: [&str; 2] = ["docker", "libpod_parent"];

/// Cgroups of pods, at the top or below a slice.
const PODS: [&str; 2] = ["kubepods", "kubepods.slice"];

/// Number of digits of a container's id, unless it was shortened.
const ID_DIGITS: usize = 64;

/// Name of the cgroup that crun makes below the one of the container.
const CRUN: &str = "container";

/// Directories in which runc and crun keep the state of containers, unless `--root` names another one.
const STATES: [&str; 2] = ["/run/runc", "/run/crun"];

/// Files of the state of a container, and the field with the pid of its init process.
const STATE_FILES: [(&str, &str); 2] = [("state.json", "init_process_pid"), ("status", "pid")];

/// Number of processes above this one that are asked for `--root`: CRIU, a wrapper or two, and the runtime.
const MAX_ANCESTORS: usize = 6;

/// Returns the name of the job for the dump under way.
pub(crate) fn of_dump() -> String {
    let pid = env::var(PID_VARIABLE).unwrap_or_default();
    let cgroups =
        |process: &str| fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
    let is_container = |name: &str| states().iter().any(|root| has_init(root, name, &pid));
    of_container(&cgroups(&pid), &cgroups("self"), is_container).unwrap_or_else(|| {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        of_process(host.trim(), &pid)
    })
}

/// Returns the id or name of the container that a process is in, from its `/proc/PID/cgroup` and that of this process,
/// which is in none or in another one. `is_container` tells whether a runtime's state has a container of this name
/// for the process.
fn of_container(cgroups: &str, own: &str, is_container: impl Fn(&str) -> bool) -> Option<String> {
    let paths = HIERARCHIES.iter().filter_map(|hierarchy| {
        let path = path_in(cgroups, hierarchy)?;
        (path_in(own, hierarchy) != Some(path)).then_some(path)
    });
    let paths: Vec<&str> = paths.collect();
    let known = paths.iter().find_map(|path| id_in(path));
    let id = known.or_else(|| {
        let names: BTreeSet<&str> = paths.iter().filter_map(|path| last(path)).collect();
        names.into_iter().find(|name| is_container(name))
    });
    id?.parse::<JobName>().ok().map(String::from)
}

/// Returns the last part of a cgroup's path, or the one above crun's own.
fn last(path: &str) -> Option<&str> {
    let mut parts = path.rsplit('/');
    parts.find(|part| *part != CRUN)
}

/// Returns the container's id in the path of a cgroup, if the path has the form that a known runtime gives it.
fn id_in(path: &str) -> Option<&str> {
    let last = last(path)?;
    // containerd with systemd's cgroups: SLICE:cri-containerd:ID.
    if let [_, runtime, id] = last.split(':').collect::<Vec<_>>()[..] {
        return (RUNTIMES.contains(&runtime) && is_id(id)).then_some(id);
    }
    if let Some(scope) = last.strip_suffix(".scope") {
        let after = |runtime: &&str| scope.strip_prefix(*runtime)?.strip_prefix('-');
        let id = RUNTIMES.iter().find_map(after).filter(|id| is_id(id));
        return id.or_else(|| NAMING_RUNTIMES.iter().find_map(after));
    }
    let id = last.strip_prefix("libpod-").unwrap_or(last);
    let mut above = path.rsplit('/').skip_while(|part| *part != last).skip(1);
    let parent = above.next().unwrap_or_default();
    let is_known = id.len() == ID_DIGITS
        || PARENTS.contains(&parent)
        || parent.starts_with("pod") && above.any(|part| PODS.contains(&part));
    (is_known && is_id(id)).then_some(id)
}

/// Returns true for an id that a runtime has chosen: hexadecimal digits.
fn is_id(id: &str) -> bool {
    !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the directories of the states of containers: those of the runtimes above this process, and the usual ones.
fn states() -> Vec<PathBuf> {
    let mut states: Vec<PathBuf> = STATES.iter().map(PathBuf::from).collect();
    let mut pid = std::os::unix::process::parent_id();
    for _ in 0..MAX_ANCESTORS {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        states.extend(root_of(&String::from_utf8_lossy(&line)));
        match ProcessStat::read(pid) {
            Ok(stat) if stat.parent > 1 => pid = stat.parent,
            _ => break,
        }
    }
    states
}

/// Returns the directory that `--root` names in a command line, whose arguments end with zeros.
fn root_of(line: &str) -> Option<PathBuf> {
    let mut arguments = line.split('\0');
    let root = arguments.find_map(|argument| match argument.strip_prefix("--root")? {
        "" => Some(None),
        rest => rest.strip_prefix('=').map(Some),
    })?;
    root.or_else(|| arguments.next()).map(PathBuf::from)
}

/// Returns true if the state in `root` has a container of this name whose init process is `pid`.
fn has_init(root: &Path, name: &str, pid: &str) -> bool {
    STATE_FILES.iter().any(|(file, field)| {
        let text = fs::read_to_string(root.join(name).join(file)).unwrap_or_default();
        let packed: String = text.split_whitespace().collect();
        let wanted = format!("\"{field}\":{pid}");
        let mut behind = packed.split(&*wanted).skip(1);
        !pid.is_empty() && behind.any(|rest| rest.starts_with([',', '}']))
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
        let long = "9f00".repeat(16);
        for (cgroups, id) in [
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
            ("4:memory:/docker/abc\n", "abc"),
            (&format!("0::/any/where/{long}\n"), &long),
            ("0::/user.slice/runc-web.scope\n", "web"),
            ("0::/user.slice/crun-web.scope/container\n", "web"),
        ] {
            let named = of_container(cgroups, own, |_| false);
            assert_eq!(named.as_deref(), Some(id), "{cgroups}");
        }
    }

    #[test]
    fn a_cgroup_of_any_form_names_a_container_only_by_the_state_of_its_runtime() {
        let own = "0::/system.slice/ssh.service\n";
        let web = "12:memory:/web\n1:name=systemd:/\n0::/\n";
        let is_web = |name: &str| name == "web";
        assert_eq!(of_container(web, own, is_web).as_deref(), Some("web"));
        let crun = "0::/web/container\n";
        assert_eq!(of_container(crun, own, is_web).as_deref(), Some("web"));
        for cgroups in [
            web,
            "0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n",
            "0::/machine.slice/libpod-5963c7.scope/web/init\n",
            "0::/kubepods/burstable/pod12/9f00/init\n",
            "0::/machine.slice/libpod-conmon-5963c7.scope\n",
            "0::/machine.slice/lxc-web.scope\n",
            "0::/docker/buildx\n",
            "0::/system.slice/a:b:9f00\n",
            "0::/pod12/9f00\n",
        ] {
            assert_eq!(of_container(cgroups, own, |_| false), None, "{cgroups}");
        }
    }

    #[test]
    fn the_state_of_a_runtime_names_the_init_process_of_a_container() {
        let root = tempfile::tempdir().unwrap();
        for (name, file, text) in [
            (
                "web",
                "state.json",
                r#"{"id":"web","init_process_pid":42,"init_process_start":7}"#,
            ),
            (
                "db",
                "status",
                "{\n    \"pid\" : 43,\n    \"cgroup-path\" : \"/db\"\n}",
            ),
        ] {
            fs::create_dir(root.path().join(name)).unwrap();
            fs::write(root.path().join(name).join(file), text).unwrap();
        }
        let has = |name, pid| has_init(root.path(), name, pid);
        assert!(has("web", "42") && has("db", "43"));
        assert!(!has("web", "4") && !has("web", "") && !has("db", "42") && !has("none", "42"));
    }

    #[test]
    fn the_command_line_of_a_runtime_names_the_directory_of_its_state() {
        for (line, root) in [
            (
                "runc\0--root\0/a b\0--criu\0c\0checkpoint\0web\0",
                Some("/a b"),
            ),
            ("runc\0--root=/r\0checkpoint\0web\0", Some("/r")),
            ("runc\0--rootless\0true\0checkpoint\0web\0", None),
            ("criu\0swrk\x003\0", None),
            ("", None),
        ] {
            assert_eq!(root_of(line), root.map(PathBuf::from), "{line:?}");
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
            assert_eq!(of_container(cgroups, own, |_| false), None, "{cgroups}");
        }
        assert_eq!(of_process("node-3", "42"), "node-3.pid-42");
        assert_eq!(of_process("-odd host", "42"), "pid-42");
    }
}
