//! The target of `suspend`, `resume`, `shrink` and `grow`: a process tree of this machine, or a control group; and the
//! failures of these commands.

use std::path::PathBuf;

use clap::Args;
use permafrost_preempt::cgroup::{CgroupError, Controller, Hierarchies};
use permafrost_preempt::record::{RecordError, RecordKind, Records};
use permafrost_preempt::{PreemptError, Target};
use permafrost_terminal::failure::{Code, Failure};

/// Arguments that name one target.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct TargetArguments {
    /// Root of a process tree.
    #[arg(long, short, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) pid: Option<u32>,
    /// Control group, with those below it: its directory, or its path in the hierarchy as /proc/PID/cgroup has it.
    #[arg(long, value_name = "PATH")]
    pub(crate) cgroup: Option<PathBuf>,
}

/// Targets with a record.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct RecordedArguments {
    /// Root of a process tree.
    #[arg(long, short, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) pid: Option<u32>,
    /// Control group: its directory, or its path in the hierarchy as /proc/PID/cgroup has it.
    #[arg(long, value_name = "PATH")]
    pub(crate) cgroup: Option<PathBuf>,
    /// Everything of this user on this machine.
    #[arg(long)]
    pub(crate) all: bool,
    /// List what there is, and change nothing.
    #[arg(long)]
    pub(crate) list: bool,
}

/// Controllers in whose hierarchy a group may be named, in the order in which they are tried.
const CONTROLLERS: [Controller; 3] = [Controller::Freezer, Controller::Cpu, Controller::Memory];

impl TargetArguments {
    /// Returns the target.
    pub(crate) fn target(&self, hierarchies: &Hierarchies) -> Result<Target, Failure> {
        match (self.pid, &self.cgroup) {
            (Some(pid), _) => Ok(Target::tree(pid).map_err(failure)?),
            (None, Some(path)) => group(hierarchies, path),
            (None, None) => Err(Failure::new(Code::Invalid, "name a --pid or a --cgroup")),
        }
    }
}

fn group(hierarchies: &Hierarchies, path: &std::path::Path) -> Result<Target, Failure> {
    let mut refused = None;
    for controller in CONTROLLERS {
        match hierarchies.group_at(controller, path) {
            Ok(group) => return Ok(Target::group(&group)),
            Err(error @ CgroupError::Root { .. }) => return Err(failure(error.into())),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.map_or_else(
        || Failure::new(Code::NotFound, "no such control group"),
        |error| failure(error.into()),
    ))
}

impl RecordedArguments {
    /// Returns the targets that are meant. The root of a tree may have ended by now.
    pub(crate) fn targets(
        &self,
        hierarchies: &Hierarchies,
        records: &Records,
        kind: RecordKind,
    ) -> Result<Vec<Target>, Failure> {
        let all = || records.targets(kind).map_err(|error| failure(error.into()));
        if let Some(path) = &self.cgroup {
            // The group may be gone; its record has the path of its directory.
            let gone =
                |target: &Target| matches!(target, Target::Group { path: of, .. } if of == path);
            let recorded = all()?.into_iter().find(gone);
            return Ok(vec![match recorded {
                Some(recorded) => recorded,
                None => group(hierarchies, path)?,
            }]);
        }
        let Some(pid) = self.pid else {
            return all();
        };
        let of_pid = |target: &Target| matches!(target, Target::Tree { pid: of, .. } if *of == pid);
        let recorded: Vec<Target> = all()?.into_iter().filter(of_pid).collect();
        if !recorded.is_empty() {
            return Ok(recorded);
        }
        Ok(vec![Target::tree(pid).map_err(failure)?])
    }
}

/// Opens the hierarchies of control groups and this user's records.
pub(crate) fn open() -> Result<(Hierarchies, Records), Failure> {
    let hierarchies = Hierarchies::of_this_machine().map_err(|error| failure(error.into()))?;
    let records = Records::of_this_user().map_err(|error| failure(error.into()))?;
    Ok((hierarchies, records))
}

/// Returns the failure of a command for a preemption's.
pub(crate) fn failure(error: PreemptError) -> Failure {
    let message = error.to_string();
    let (code, hint) = match error {
        PreemptError::Origin(error) => return error.into(),
        PreemptError::Empty { .. } => (Code::NotFound, "its processes have ended"),
        PreemptError::ContainsOneself { .. } => {
            (Code::Invalid, "run permafrost from outside of the group")
        }
        PreemptError::NotYours { .. } => (
            Code::Denied,
            "run as the owner of all its processes, or as root",
        ),
        PreemptError::Signal { .. } => (Code::Denied, ""),
        PreemptError::StillRunning { .. } => (
            Code::Unavailable,
            "a process in the kernel (state D in ps) stops only when it comes back: try again later",
        ),
        PreemptError::SharedGroup { .. } => (
            Code::Invalid,
            "start the task in a group of its own: systemd-run --scope, or a container",
        ),
        PreemptError::Interrupted => (Code::Interrupted, ""),
        PreemptError::Record(RecordError::Busy { .. }) => (
            Code::Conflict,
            "wait for its end, or end it: the target is recoverable either way",
        ),
        PreemptError::Record(RecordError::Foreign { .. }) => {
            (Code::Conflict, "remove the file if nothing is suspended")
        }
        PreemptError::Record(RecordError::Io { .. }) => (Code::Internal, ""),
        PreemptError::Cgroup(error) if error.is_denied() => (
            Code::Denied,
            "control groups belong to root, or to whom root has delegated them",
        ),
        PreemptError::Cgroup(CgroupError::NotMounted { .. }) => (
            Code::Unavailable,
            "mount it: mount -t cgroup -o CONTROLLER, or mount -t cgroup2 (cgroups(7))",
        ),
        PreemptError::Cgroup(CgroupError::NoGroup { .. }) => (
            Code::NotFound,
            "cat /proc/PID/cgroup shows the groups of a process",
        ),
        PreemptError::Cgroup(CgroupError::Root { .. }) => (Code::Invalid, "name a group below it"),
        PreemptError::Cgroup(CgroupError::NotEnabled { .. }) => (
            Code::Unavailable,
            "start the task in a group of its own: systemd-run --scope -p CPUAccounting=yes -p MemoryAccounting=yes",
        ),
        PreemptError::Cgroup(CgroupError::Contents { .. } | CgroupError::Io { .. }) => {
            (Code::Internal, "")
        }
    };
    Failure::new(code, message).hint(hint)
}
