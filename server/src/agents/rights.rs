//! Rights of peers: one function decides from a request's needs whether its peer may make it.

use permafrost_identity::{Action, Peer, Role};
use permafrost_protocol::access::Access;
use permafrost_protocol::control;
use permafrost_protocol::manifest::JobName;

use crate::error::{DeniedError, Right};

/// Checks that `peer` may make a request, before anything is looked up for it. Rights that depend on stored data are
/// checked as soon as the data is found: the owner of a session, and the job in a checkpoint's manifest.
///
/// # Errors
/// The refusal that the peer is sent.
pub(crate) fn authorize(peer: &Peer, access: &Access) -> Result<(), control::Error> {
    match access {
        Access::Dump(job) | Access::Adopt { job, .. } => check_dump(peer, job),
        Access::Delete(job) => check_delete(peer, job),
        Access::Govern(job) => {
            let what = format!("set the retention of namespace {}", job.namespace());
            check_right(peer, Action::Govern(job), &what, Right::Govern)
        }
        Access::Read(job) => check_read(peer, job),
        Access::Park => check(peer, Action::Park, "store pages"),
        Access::Pages if peer.role() == Role::Node => {
            check(peer, Action::Replicate, "exchange copies with nodes")
        }
        // Of a session that it has opened; whose it is comes out when it is found.
        Access::Pages | Access::Seal { .. } => check(peer, Action::Park, "store pages"),
        // Of the session, or of the parked checkpoint, when it is found.
        Access::Discard { .. } => check(peer, Action::List, "discard sessions"),
        // Of the manifests, when they are found. Here only the name that it is asked for by.
        Access::ReadById { listed_as, .. } => match listed_as {
            Some(listed) => check_read(peer, &listed.job),
            None => check(peer, Action::List, "read checkpoints"),
        },
        // What it may not read is left out.
        Access::ReadVisible => check(peer, Action::List, "list checkpoints"),
        Access::Reserve { namespace } => {
            check(peer, Action::Reserve, "reserve a place")?;
            match namespace {
                Some(namespace) => check_dump(peer, &job_of(&format!("{namespace}/any"))?),
                None => Ok(()),
            }
        }
        Access::Inspect => check(peer, Action::List, "see the nodes"),
        Access::Operate => check_operate(peer),
        Access::Replicate => check(peer, Action::Replicate, "exchange copies with nodes"),
        Access::Report | Access::Ping => check(peer, Action::List, "ask this node"),
    }
}

/// Checks that `peer` may add to `job`.
pub(super) fn check_dump(peer: &Peer, job: &JobName) -> Result<(), control::Error> {
    if peer.may(Action::DumpInto(job)) {
        return Ok(());
    }
    let right = match peer.role() {
        Role::Reader | Role::Operator => Right::Agent,
        Role::Node | Role::Agent => Right::Namespace,
    };
    let action = format!("dump into namespace {}", job.namespace());
    Err(denied(peer, &action, right))
}

/// Checks that `peer` may remove from `job`.
pub(super) fn check_delete(peer: &Peer, job: &JobName) -> Result<(), control::Error> {
    let what = format!("remove from namespace {}", job.namespace());
    check_right(peer, Action::Delete(job), &what, Right::Delete)
}

/// Checks that `peer` may discard parked sessions without a job that the peer itself sent.
pub(super) fn check_delete_parked(peer: &Peer) -> Result<(), control::Error> {
    let what = "discard parked sessions";
    check_right(peer, Action::DeleteParked, what, Right::Delete)
}

/// Checks that `peer` may read `job`.
pub(super) fn check_read(peer: &Peer, job: &JobName) -> Result<(), control::Error> {
    let what = format!("read namespace {}", job.namespace());
    check(peer, Action::Read(job), &what)
}

/// Returns true if `peer` may read the job of a record. An invalid name is in no namespace.
pub(super) fn reads(peer: &Peer, job: &str) -> bool {
    job.parse().is_ok_and(|job| peer.may(Action::Read(&job)))
}

/// Returns the valid name of the job that a stored checkpoint is of.
///
/// # Errors
/// The stored name is not valid.
pub(super) fn job_of(stored: &str) -> Result<JobName, control::Error> {
    let job = stored.parse::<JobName>();
    Ok(job.map_err(DeniedError::from)?)
}

fn check_operate(peer: &Peer) -> Result<(), control::Error> {
    let what = "look after nodes, certificates and the registry";
    check_right(peer, Action::Operate, what, Right::Operator)
}

fn check(peer: &Peer, action: Action<'_>, what: &str) -> Result<(), control::Error> {
    check_right(peer, action, what, Right::Namespace)
}

fn check_right(
    peer: &Peer,
    action: Action<'_>,
    what: &str,
    right: Right,
) -> Result<(), control::Error> {
    if peer.may(action) {
        return Ok(());
    }
    Err(denied(peer, what, right))
}

/// Returns the refusal of an action that a peer's certificate does not allow, for want of `right`.
pub(super) fn denied(peer: &Peer, action: &str, right: Right) -> control::Error {
    DeniedError::Denied {
        role: peer.role(),
        peer: peer.name().to_owned(),
        action: action.to_owned(),
        right,
    }
    .into()
}
