//! Identity and permissions of a caller. `serve` determines them and puts them into the request's extensions.

use permafrost_identity::{ALL_NAMESPACES, Namespaces, Peer, Role};
pub use permafrost_identity::{NoScope, Scope, Scopes};
use permafrost_protocol::manifest::namespace_of;

/// An authenticated caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Name for the log and for limits: `root`, `uid 1000`, `agent c7`, `token slurm`. Two callers with one name
    /// are the same.
    pub name: String,
    /// Kinds of requests that the caller may make.
    pub scopes: Scopes,
    /// Namespaces whose jobs the caller may see and ask about.
    pub namespaces: Namespaces,
}

impl Caller {
    /// Returns the caller for root, or for the user that the daemon runs as.
    #[must_use]
    pub fn local(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            scopes: Scopes::all(),
            namespaces: every_namespace(),
        }
    }

    /// Returns the caller with a verified certificate. A node holds everybody's copies and acts for others, so it
    /// sees all namespaces.
    #[must_use]
    pub fn certified(peer: &Peer) -> Self {
        Self {
            name: format!("{} {}", peer.role(), peer.name()),
            scopes: Scopes::of_role(peer.role()),
            namespaces: match peer.role() {
                Role::Node => every_namespace(),
                _ => peer.namespaces().clone(),
            },
        }
    }

    /// Returns true if the caller may make requests of this kind.
    #[must_use]
    pub const fn may(&self, scope: Scope) -> bool {
        self.scopes.contains(scope)
    }

    /// Returns true if the caller may see and ask about `job`. Parked checkpoints without a job, and strings that
    /// are no job name, are in no namespace: only callers who see all namespaces see them.
    #[must_use]
    pub fn sees(&self, job: &str) -> bool {
        // Most callers, of requests with thousands of jobs: no name is taken apart for them.
        self.namespaces.is_all()
            || namespace_of(job).is_ok_and(|namespace| self.namespaces.contains(namespace))
    }
}

/// Returns the set of all namespaces, `*`.
pub(super) fn every_namespace() -> Namespaces {
    Namespaces::new([ALL_NAMESPACES]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_sees_the_jobs_of_its_namespaces() {
        let mut caller = Caller::local("root");
        assert!(caller.sees("train") && caller.sees("team-a/train"));
        caller.namespaces = Namespaces::new(["team-a"]).unwrap();
        assert!(caller.sees("team-a/train") && !caller.sees("train") && !caller.sees("team-b/x"));
        caller.namespaces = Namespaces::new(["default"]).unwrap();
        assert!(caller.sees("train"));
        for odd in ["", "/", "/train", "team-a/", "..", "a@1"] {
            assert!(!caller.sees(odd), "{odd:?}");
        }
    }
}
