//! Control groups, of version 1 (a hierarchy for each controller) and version 2 (one for all): which hierarchies the
//! machine has, the group of a process, and the files of a group.
//!
//! Sources: the kernel's Documentation/admin-guide/cgroup-v1/{cgroups,freezer-subsystem,memory}.rst,
//! Documentation/scheduler/sched-bwc.rst and Documentation/admin-guide/cgroup-v2.rst.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Prefix of the names of groups that this crate makes.
const MADE_PREFIX: &str = "permafrost-";

/// Longest time in which a group that has been emptied can still be busy: its last member is about to leave.
const REMOVE_PATIENCE: Duration = Duration::from_secs(2);

/// Deepest nesting of groups that is read.
const MAX_DEPTH: u32 = 64;

/// A file or directory of a control group that could not be used.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The controller is in no mounted hierarchy.
    #[error("no hierarchy of control groups with the controller {controller} is mounted")]
    NotMounted {
        /// Name of the controller.
        controller: &'static str,
    },
    /// The path names no control group of a controller.
    #[error("{path} is no control group of the controller {controller}")]
    NoGroup {
        /// Path as it was given.
        path: PathBuf,
        /// Name of the controller.
        controller: &'static str,
    },
    /// The path names the root of a hierarchy, to which all processes belong.
    #[error("{path} is the root of a hierarchy: it holds every process of the machine")]
    Root {
        /// Path as it was given.
        path: PathBuf,
    },
    /// The group is version 2, and its parent does not pass the controller on.
    #[error(
        "{path} has no {file}: the groups above do not enable the controller in cgroup.subtree_control"
    )]
    NotEnabled {
        /// Path of the group.
        path: PathBuf,
        /// File that is missing.
        file: &'static str,
    },
    /// The contents of a file are not as the kernel documents them.
    #[error("{path} holds {contents:?}, which cannot be understood")]
    Contents {
        /// Path of the file.
        path: PathBuf,
        /// Contents as they were read.
        contents: String,
    },
    /// The operating system failed.
    #[error("{action} {path}: {source}")]
    Io {
        /// Verb of what was tried.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl CgroupError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io {
            action,
            path: path.to_owned(),
            source,
        }
    }

    /// Returns true if the caller may not do it.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Io { source, .. }
            if matches!(source.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem))
    }

    /// Returns true if the kernel answered that the resource is in use (EBUSY).
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.raw_os_error() == Some(Errno::BUSY.raw_os_error()))
    }
}

/// Version of a hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Version {
    /// A hierarchy of some controllers.
    V1,
    /// The hierarchy of all controllers.
    V2,
}

/// Controllers that this crate uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// Quotas of processor time.
    Cpu,
    /// Memory and swap.
    Memory,
    /// Freezing; part of every group of version 2.
    Freezer,
}

impl Controller {
    /// Returns the kernel's name of the controller.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Freezer => "freezer",
        }
    }
}

/// A mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// Controllers of a hierarchy of version 1.
    controllers: Vec<String>,
    /// Directory that it is mounted on.
    at: PathBuf,
    /// Group that is mounted there: `/`, or in a container often the container's.
    root: PathBuf,
}

/// The hierarchies that are mounted on this machine.
#[derive(Clone, Debug)]
pub struct Hierarchies {
    mounts: Vec<Mount>,
    proc: PathBuf,
}

/// A control group of one controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Version of its hierarchy.
    pub version: Version,
    /// Directory of the group.
    pub path: PathBuf,
    /// True if it is the root of its hierarchy, or of the part that is mounted here.
    pub is_root: bool,
}

impl Hierarchies {
    /// Reads the hierarchies from `/proc/self/mountinfo`.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn of_this_machine() -> Result<Self, CgroupError> {
        let path = Path::new("/proc/self/mountinfo");
        let text =
            fs::read_to_string(path).map_err(|error| CgroupError::io("read", path, error))?;
        Ok(Self {
            mounts: text.lines().filter_map(parse_mount).collect(),
            proc: PathBuf::from("/proc"),
        })
    }

    /// Returns hierarchies of version 2 alone, mounted on `at`, with `/proc` at `proc`.
    #[must_use]
    pub fn of_version_2(at: &Path, proc: &Path) -> Self {
        let mount = Mount {
            version: Version::V2,
            controllers: Vec::new(),
            at: at.to_owned(),
            root: PathBuf::from("/"),
        };
        Self {
            mounts: vec![mount],
            proc: proc.to_owned(),
        }
    }

    /// Returns the hierarchy of a controller: that of version 1 if the controller is in one, else that of version 2.
    fn mount_of(&self, controller: Controller) -> Result<&Mount, CgroupError> {
        let name = controller.name();
        let of_version_1 =
            (self.mounts.iter()).find(|mount| mount.controllers.iter().any(|one| one == name));
        let of_version_2 = || {
            self.mounts
                .iter()
                .find(|mount| mount.version == Version::V2)
        };
        (of_version_1.or_else(of_version_2)).ok_or(CgroupError::NotMounted { controller: name })
    }

    /// Returns the group of a controller that a process belongs to.
    ///
    /// # Errors
    /// The process has ended; no such hierarchy is mounted, or not this part of it.
    pub fn group_of(&self, controller: Controller, pid: u32) -> Result<Group, CgroupError> {
        let mount = self.mount_of(controller)?;
        let path = self.proc.join(pid.to_string()).join("cgroup");
        let text =
            fs::read_to_string(&path).map_err(|error| CgroupError::io("read", &path, error))?;
        let group = text.lines().find_map(|line| {
            // HIERARCHY:CONTROLLERS:PATH, without controllers for version 2 (cgroups(7)).
            let (_, rest) = line.split_once(':')?;
            let (controllers, group) = rest.split_once(':')?;
            let is_it = match mount.version {
                Version::V1 => controllers.split(',').any(|one| one == controller.name()),
                Version::V2 => controllers.is_empty(),
            };
            is_it.then(|| PathBuf::from(group))
        });
        let group = group.ok_or(CgroupError::NotMounted {
            controller: controller.name(),
        })?;
        mount.group(&group).ok_or(CgroupError::NoGroup {
            path: group,
            controller: controller.name(),
        })
    }

    /// Returns the group of a controller with a path: its directory in any mounted hierarchy, or its path in the
    /// hierarchy as `/proc/PID/cgroup` has it.
    ///
    /// # Errors
    /// There is no such group, or it is a root.
    pub fn group_at(&self, controller: Controller, path: &Path) -> Result<Group, CgroupError> {
        let no_group = || CgroupError::NoGroup {
            path: path.to_owned(),
            controller: controller.name(),
        };
        if path.components().any(|part| part.as_os_str() == "..") {
            return Err(no_group());
        }
        // The longest mount point wins: hybrid machines mount version 2 below a directory of version 1.
        let inside = self
            .mounts
            .iter()
            .filter(|mount| path.starts_with(&mount.at));
        let named = inside.max_by_key(|mount| mount.at.components().count());
        let own = self.mount_of(controller)?;
        let (mount, relative) = match named {
            // A directory of version 2 has a freezer of its own.
            Some(named) if named.version == Version::V2 && controller == Controller::Freezer => {
                (named, path.strip_prefix(&named.at).map_err(|_| no_group())?)
            }
            Some(named) => (own, path.strip_prefix(&named.at).map_err(|_| no_group())?),
            None => {
                let below = path.strip_prefix(&own.root).ok();
                (
                    own,
                    below
                        .or_else(|| path.strip_prefix("/").ok())
                        .unwrap_or(path),
                )
            }
        };
        let directory = mount.at.join(relative);
        if relative.as_os_str().is_empty() {
            return Err(CgroupError::Root {
                path: path.to_owned(),
            });
        }
        if !directory.join("cgroup.procs").is_file() {
            return Err(no_group());
        }
        Ok(Group {
            version: mount.version,
            path: directory,
            is_root: false,
        })
    }
}

impl Mount {
    /// Returns the group with this path in the hierarchy, if it is in the part that is mounted.
    fn group(&self, path: &Path) -> Option<Group> {
        let relative = path.strip_prefix(&self.root).ok()?;
        Some(Group {
            version: self.version,
            path: self.at.join(relative),
            is_root: relative.as_os_str().is_empty(),
        })
    }
}

/// Parses a line of `/proc/self/mountinfo` (proc(5)) if it is of a hierarchy.
fn parse_mount(line: &str) -> Option<Mount> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, at) = (mount.next()?, mount.next()?);
    let mut kind = kind.split(' ');
    let version = match kind.next()? {
        "cgroup" => Version::V1,
        "cgroup2" => Version::V2,
        _ => return None,
    };
    let options = kind.nth(1).unwrap_or_default();
    let controllers = match version {
        Version::V1 => options.split(',').map(str::to_owned).collect(),
        Version::V2 => Vec::new(),
    };
    Some(Mount {
        version,
        controllers,
        at: unescape(at),
        root: unescape(root),
    })
}

/// Replaces the octal escapes of mountinfo: `\040` is a space.
fn unescape(text: &str) -> PathBuf {
    let mut plain = text.to_owned();
    for (escaped, character) in [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ] {
        plain = plain.replace(escaped, character);
    }
    PathBuf::from(plain)
}

impl Group {
    /// Reads a file of the group.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self, file: &'static str) -> Result<String, CgroupError> {
        let path = self.path.join(file);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(text.trim().to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.path.is_dir() => {
                Err(CgroupError::NotEnabled {
                    path: self.path.clone(),
                    file,
                })
            }
            Err(error) => Err(CgroupError::io("read", &path, error)),
        }
    }

    /// Reads a number in a file of the group; `max` is the largest one.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub fn read_number(&self, file: &'static str) -> Result<u64, CgroupError> {
        let text = self.read(file)?;
        if text == "max" {
            return Ok(u64::MAX);
        }
        text.parse().map_err(|_| self.not_understood(file, text))
    }

    pub(crate) fn not_understood(&self, file: &str, contents: String) -> CgroupError {
        CgroupError::Contents {
            path: self.path.join(file),
            contents,
        }
    }

    /// Writes a file of the group.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn write(&self, file: &str, value: &str) -> Result<(), CgroupError> {
        write(&self.path.join(file), value)
    }

    /// Returns the processes of the group and of those below it.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn members(&self) -> Result<Vec<u32>, CgroupError> {
        let mut members = Vec::new();
        collect_members(&self.path, MAX_DEPTH, &mut members)?;
        members.sort_unstable();
        members.dedup();
        Ok(members)
    }

    /// Returns true if all members of the group are among `pids`, and it is not the root: what is done to it is done
    /// to these alone.
    ///
    /// # Errors
    /// Its members cannot be read.
    pub fn is_exclusive_to(&self, pids: &[u32]) -> Result<bool, CgroupError> {
        Ok(!self.is_root && self.members()?.iter().all(|member| pids.contains(member)))
    }

    /// Returns the group with a name of this crate's below this one, which may not exist yet.
    #[must_use]
    pub fn child(&self, name: &str) -> Self {
        Self {
            version: self.version,
            path: self.path.join(format!("{MADE_PREFIX}{name}")),
            is_root: false,
        }
    }

    /// Makes the group's directory; one that exists already is not an error.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn make(&self) -> Result<(), CgroupError> {
        match fs::create_dir(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(CgroupError::io("make", &self.path, error))
            }
            _ => Ok(()),
        }
    }

    /// Moves a process with all its threads into the group; one that has ended is not an error.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add(&self, pid: u32) -> Result<(), CgroupError> {
        match self.write("cgroup.procs", &pid.to_string()) {
            Err(CgroupError::Io { source, .. })
                if source.raw_os_error() == Some(Errno::SRCH.raw_os_error()) =>
            {
                Ok(())
            }
            written => written,
        }
    }

    /// Returns true if the group is to be frozen, and if it is so already.
    ///
    /// # Errors
    /// The state cannot be read.
    pub fn freezing(&self) -> Result<Freezing, CgroupError> {
        match self.version {
            Version::V1 => Ok(match self.read("freezer.state")?.as_str() {
                "THAWED" => Freezing::Thawed,
                "FREEZING" => Freezing::Freezing,
                _ => Freezing::Frozen,
            }),
            Version::V2 if self.read("cgroup.freeze")? != "1" => Ok(Freezing::Thawed),
            Version::V2 => {
                let events = self.read("cgroup.events")?;
                let is_frozen = events.lines().any(|line| line == "frozen 1");
                Ok(if is_frozen {
                    Freezing::Frozen
                } else {
                    Freezing::Freezing
                })
            }
        }
    }

    /// Returns true if the group itself was told to freeze, whatever the groups above it were told: `freezer.state` is
    /// that of all of them together.
    ///
    /// # Errors
    /// The state cannot be read.
    pub fn is_frozen_itself(&self) -> Result<bool, CgroupError> {
        let file = match self.version {
            Version::V1 => "freezer.self_freezing",
            Version::V2 => "cgroup.freeze",
        };
        Ok(self.read(file)? == "1")
    }

    /// Begins to freeze the group, or thaws it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_frozen(&self, frozen: bool) -> Result<(), CgroupError> {
        match (self.version, frozen) {
            (Version::V1, true) => self.write("freezer.state", "FROZEN"),
            (Version::V1, false) => self.write("freezer.state", "THAWED"),
            (Version::V2, true) => self.write("cgroup.freeze", "1"),
            (Version::V2, false) => self.write("cgroup.freeze", "0"),
        }
    }
}

/// State of a group's freezer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freezing {
    /// Its members run.
    Thawed,
    /// Some of its members are not frozen yet.
    Freezing,
    /// All of its members are frozen.
    Frozen,
}

/// Writes a file of a control group. The kernel takes a value in one write.
pub(crate) fn write(path: &Path, value: &str) -> Result<(), CgroupError> {
    // Not created if it is missing: a made group is not a plain directory.
    let file = fs::OpenOptions::new().write(true).truncate(true).open(path);
    file.and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()))
        .map_err(|error| CgroupError::io("write", path, error))
}

/// Moves all members of a group that this crate made to the group above it, and removes it. A group that is gone is not
/// an error.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn dissolve(path: &Path) -> Result<(), CgroupError> {
    let Some(parent) = path.parent() else {
        return Ok(());
    };
    let group = Group {
        version: Version::V1,
        path: path.to_owned(),
        is_root: false,
    };
    let above = Group {
        path: parent.to_owned(),
        ..group.clone()
    };
    let started = Instant::now();
    loop {
        if !path.is_dir() {
            return Ok(());
        }
        match group.members() {
            Ok(members) => members.into_iter().try_for_each(|pid| above.add(pid))?,
            // It was removed meanwhile, or never became a group: it has no members.
            Err(CgroupError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        match fs::remove_dir(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if started.elapsed() > REMOVE_PATIENCE => {
                return Err(CgroupError::io("remove", path, error));
            }
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn collect_members(path: &Path, depth: u32, members: &mut Vec<u32>) -> Result<(), CgroupError> {
    let procs = path.join("cgroup.procs");
    match fs::read_to_string(&procs) {
        Ok(text) => members.extend(text.lines().filter_map(|pid| pid.parse::<u32>().ok())),
        // A group below was removed meanwhile. Threaded groups of version 2 list their processes above (EOPNOTSUPP).
        Err(error) if error.kind() == io::ErrorKind::NotFound && depth < MAX_DEPTH => return Ok(()),
        Err(error) if error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => {}
        Err(error) => return Err(CgroupError::io("read", &procs, error)),
    }
    let Some(depth) = depth.checked_sub(1) else {
        return Ok(());
    };
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect_members(&entry.path(), depth, members)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 /docker/7f /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/with\\040space rw - cgroup2 cgroup2 rw
";

    fn hybrid(proc: &Path) -> Hierarchies {
        Hierarchies {
            mounts: MOUNTS.lines().filter_map(parse_mount).collect(),
            proc: proc.to_owned(),
        }
    }

    #[test]
    fn a_controller_is_found_in_its_hierarchy_of_version_1_or_else_in_version_2() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("7")).unwrap();
        let text = "5:memory:/docker/7f/a\n4:cpu,cpuacct:/b\n0::/c\n";
        fs::write(proc.path().join("7/cgroup"), text).unwrap();
        let hierarchies = hybrid(proc.path());
        let of = |controller| hierarchies.group_of(controller, 7).unwrap();
        assert_eq!(
            of(Controller::Memory).path,
            Path::new("/sys/fs/cgroup/memory/a")
        );
        assert_eq!(
            of(Controller::Cpu).path,
            Path::new("/sys/fs/cgroup/cpu,cpuacct/b")
        );
        let freezer = of(Controller::Freezer);
        assert_eq!(freezer.path, Path::new("/sys/fs/cgroup/with space/c"));
        assert_eq!(freezer.version, Version::V2);
        assert!(!freezer.is_root);
        // The container's own group is the root of what is mounted; others are outside of it.
        fs::write(proc.path().join("7/cgroup"), "5:memory:/docker/7f\n").unwrap();
        assert!(of(Controller::Memory).is_root);
        fs::write(proc.path().join("7/cgroup"), "5:memory:/docker/8\n").unwrap();
        let outside = hierarchies.group_of(Controller::Memory, 7);
        assert!(
            matches!(outside, Err(CgroupError::NoGroup { .. })),
            "{outside:?}"
        );
        assert!(hierarchies.group_of(Controller::Memory, 8).is_err());
    }

    #[test]
    fn a_path_is_a_directory_or_a_path_in_the_hierarchy_and_never_a_root() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchies = Hierarchies::of_version_2(dir.path(), Path::new("/proc"));
        fs::create_dir(dir.path().join("job")).unwrap();
        fs::write(dir.path().join("job/cgroup.procs"), "4\n5\n").unwrap();
        fs::create_dir(dir.path().join("job/step")).unwrap();
        fs::write(dir.path().join("job/step/cgroup.procs"), "5\n6\n").unwrap();
        for path in [dir.path().join("job"), "/job".into(), "job".into()] {
            let group = hierarchies.group_at(Controller::Memory, &path).unwrap();
            assert_eq!(group.path, dir.path().join("job"));
            assert_eq!(group.members().unwrap(), [4, 5, 6]);
            assert!(group.is_exclusive_to(&[4, 5, 6, 7]).unwrap());
            assert!(!group.is_exclusive_to(&[4, 5]).unwrap());
        }
        for root in [dir.path(), Path::new("/")] {
            let refused = hierarchies.group_at(Controller::Cpu, root);
            assert!(
                matches!(refused, Err(CgroupError::Root { .. })),
                "{refused:?}"
            );
        }
        for bad in ["/none", "/job/../job", "../etc"] {
            let refused = hierarchies.group_at(Controller::Cpu, Path::new(bad));
            assert!(
                matches!(refused, Err(CgroupError::NoGroup { .. })),
                "{bad}: {refused:?}"
            );
        }
    }

    #[test]
    fn missing_files_of_controllers_are_told_from_missing_groups() {
        let dir = tempfile::tempdir().unwrap();
        let group = Group {
            version: Version::V2,
            path: dir.path().to_owned(),
            is_root: false,
        };
        assert!(matches!(
            group.read("cpu.max"),
            Err(CgroupError::NotEnabled { .. })
        ));
        fs::write(dir.path().join("memory.high"), "max\n").unwrap();
        assert_eq!(group.read_number("memory.high").unwrap(), u64::MAX);
        fs::write(dir.path().join("memory.high"), "many\n").unwrap();
        let error = group.read_number("memory.high").unwrap_err();
        assert!(error.to_string().contains("\"many\""), "{error}");
        // A group below a frozen one is in the state FROZEN, though it was not frozen itself.
        let below = Group {
            version: Version::V1,
            ..group.clone()
        };
        fs::write(dir.path().join("freezer.state"), "FROZEN\n").unwrap();
        for (own, is_frozen) in [("0\n", false), ("1\n", true)] {
            fs::write(dir.path().join("freezer.self_freezing"), own).unwrap();
            assert_eq!(below.freezing().unwrap(), Freezing::Frozen);
            assert_eq!(below.is_frozen_itself().unwrap(), is_frozen);
        }
        // Nothing is written where the kernel has no file.
        assert!(group.write("cpu.max", "1").is_err());
        assert!(!dir.path().join("cpu.max").exists());
    }
}
