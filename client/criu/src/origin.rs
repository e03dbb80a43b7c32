//! Origin of a dump: host, boot, and the process with its start time.

use std::fs;
use std::io;

use permafrost_protocol::manifest::Origin;

/// A process that cannot be dumped, found before CRIU is started.
#[derive(Debug, thiserror::Error)]
pub enum OriginError {
    /// No process has that pid.
    #[error("no process {pid}")]
    NoProcess {
        /// Pid that was given.
        pid: u32,
    },
    /// The process is a kernel thread or a zombie.
    #[error("process {pid} ({name}) is {what}")]
    NotDumpable {
        /// Pid that was given.
        pid: u32,
        /// Command name of the process.
        name: String,
        /// Description of the process: a kernel thread or a zombie.
        what: &'static str,
    },
    /// The process is the caller itself or an ancestor, and the dump would freeze its own caller.
    #[error("process {pid} is this command, or one it was started by")]
    Oneself {
        /// Pid that was given.
        pid: u32,
    },
    /// `/proc` could not be read or understood.
    #[error("read {path}: {source}")]
    Proc {
        /// Path of the file.
        path: String,
        /// Error of the read.
        source: io::Error,
    },
}

/// Fields of `/proc/PID/stat`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    /// Command name, without the parentheses.
    pub name: String,
    /// State of the process, as its letter.
    pub state: char,
    /// Pid of the parent.
    pub parent: u32,
    /// Start time, clock ticks since boot: identifies a reused pid.
    pub start_ticks: u64,
    /// Virtual size, bytes: 0 for a kernel thread.
    pub virtual_bytes: u64,
    /// Processor time of the process and of the children it has waited for, clock ticks.
    pub cpu_ticks: u64,
}

impl ProcessStat {
    /// Parses the line, whose command name may contain spaces, parentheses and newlines (proc(5)).
    fn parse(line: &str) -> Option<Self> {
        let (_, rest) = line.split_once('(')?;
        let (name, rest) = rest.rsplit_once(')')?;
        // Field 3 of proc(5) is the first of these.
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // utime, stime, cutime, cstime; the latter two are signed.
        let ticks = |at: usize| fields.get(at)?.parse::<i64>().ok()?.try_into().ok();
        let cpu_ticks = (11..=14).try_fold(0_u64, |sum, at| sum.checked_add(ticks(at)?))?;
        Some(Self {
            name: name.to_owned(),
            state: fields.first()?.chars().next()?,
            parent: fields.get(1)?.parse().ok()?,
            start_ticks: fields.get(19)?.parse().ok()?,
            virtual_bytes: fields.get(20)?.parse().ok()?,
            cpu_ticks,
        })
    }

    /// Reads `/proc/PID/stat`.
    ///
    /// # Errors
    /// [`OriginError::NoProcess`] or [`OriginError::Proc`].
    pub fn read(pid: u32) -> Result<Self, OriginError> {
        let path = format!("/proc/{pid}/stat");
        let line = fs::read(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => OriginError::NoProcess { pid },
            _ if source.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
                OriginError::NoProcess { pid }
            }
            _ => OriginError::Proc {
                path: path.clone(),
                source,
            },
        })?;
        Self::parse(&String::from_utf8_lossy(&line)).ok_or_else(|| OriginError::Proc {
            path,
            source: io::Error::new(io::ErrorKind::InvalidData, "not in the format of proc(5)"),
        })
    }
}

/// Returns the origin of a dump of `pid` on this machine, now; the caller fills in `tracked`,
/// `restore_options`, `criu_version` and the memory's size.
///
/// # Errors
/// See [`OriginError`].
pub fn collect(pid: u32) -> Result<Origin, OriginError> {
    let stat = ProcessStat::read(pid)?;
    let not_dumpable = |what| OriginError::NotDumpable {
        pid,
        name: stat.name.clone(),
        what,
    };
    if matches!(stat.state, 'Z' | 'X') {
        return Err(not_dumpable("dead already, waiting for its parent"));
    }
    if stat.virtual_bytes == 0 {
        return Err(not_dumpable("a kernel thread"));
    }
    if is_ancestor(pid) {
        return Err(OriginError::Oneself { pid });
    }
    Ok(Origin {
        pid,
        start_ticks: stat.start_ticks,
        program: stat.name,
        ..here()?
    })
}

/// Returns the origin of this machine and its boot, without a process.
///
/// # Errors
/// [`OriginError::Proc`].
pub fn here() -> Result<Origin, OriginError> {
    let path = "/proc/sys/kernel/random/boot_id";
    let boot_id = fs::read_to_string(path).map_err(|source| OriginError::Proc {
        path: path.to_owned(),
        source,
    })?;
    Ok(Origin {
        host: rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned(),
        boot_id: boot_id.trim().to_owned(),
        ..Origin::default()
    })
}

/// Returns the name of a process that is unique in its job, as in [`Origin::process`].
///
/// # Errors
/// There is no such process, or `/proc` cannot be read.
pub fn process(pid: u32) -> Result<String, OriginError> {
    let start_ticks = ProcessStat::read(pid)?.start_ticks;
    let origin = Origin {
        start_ticks,
        ..here()?
    };
    Ok(origin.process())
}

/// Returns true if both dumps are of the same process: same boot, pid and start time.
pub fn same_process(one: &Origin, other: &Origin) -> bool {
    one.boot_id == other.boot_id && one.pid == other.pid && one.start_ticks == other.start_ticks
}

/// Returns true if `pid` is this process or one of its ancestors.
fn is_ancestor(pid: u32) -> bool {
    let mut ancestor = std::process::id();
    while ancestor > 0 {
        if ancestor == pid {
            return true;
        }
        match ProcessStat::read(ancestor) {
            Ok(stat) => ancestor = stat.parent,
            Err(_) => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_names_with_parentheses_and_spaces_parse() {
        let tail = "S 1 4242 4242 0 -1 4194304 100 0 0 0 1 2 0 0 20 0 1 0 987654 123456789 50";
        for name in [
            "sleep",
            "a) S 2 (b",
            "((",
            "))",
            "tmux: server",
            "line\nbreak",
            "",
        ] {
            let stat = ProcessStat::parse(&format!("4242 ({name}) {tail}\n")).unwrap();
            assert_eq!(
                stat,
                ProcessStat {
                    name: name.to_owned(),
                    state: 'S',
                    parent: 1,
                    start_ticks: 987_654,
                    virtual_bytes: 123_456_789,
                    cpu_ticks: 3,
                }
            );
        }
        for broken in ["", "1", "1 (a", "1 (a)", "1 (a) S 1 2 3"] {
            assert_eq!(ProcessStat::parse(broken), None, "{broken:?}");
        }
    }

    #[test]
    fn a_child_has_an_origin_and_a_stranger_number_has_none() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let origin = collect(child.id()).unwrap();
        assert_eq!(origin.pid, child.id());
        assert_eq!(origin.program, "sleep");
        assert!(origin.start_ticks > 0);
        assert_eq!(origin.boot_id.len(), 36);
        assert!(same_process(&origin, &collect(child.id()).unwrap()));
        child.kill().unwrap();
        // A child that has not been waited for is a zombie.
        while ProcessStat::read(child.id()).unwrap().state != 'Z' {
            std::thread::yield_now();
        }
        assert!(matches!(
            collect(child.id()),
            Err(OriginError::NotDumpable { .. })
        ));
        child.wait().unwrap();
        // Above the largest pid_max.
        assert!(matches!(
            collect(5_000_000),
            Err(OriginError::NoProcess { .. })
        ));
        assert!(matches!(
            collect(std::process::id()),
            Err(OriginError::Oneself { .. })
        ));
    }
}
