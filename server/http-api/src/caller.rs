//! Who asks, and what they may ask for. `serve` finds it out and puts it into the request's extensions.

use permafrost_identity::{ALL_NAMESPACES, Namespaces, Peer, Role};
pub use permafrost_identity::{NoScope, Scope, Scopes};
use permafrost_protocol::manifest::namespace_of;

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// For the log and for limits: `root`, `uid 1000`, `agent c7`, `token slurm`. Two callers of one name are one.
    pub name: String,
    /// What they may ask for.
    pub scopes: Scopes,
    /// Whose jobs they may see and ask about.
    pub namespaces: Namespaces,
}

impl Caller {
    /// Root, or the user that the daemon runs as.
    #[must_use]
    pub fn local(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            scopes: Scopes::all(),
            namespaces: every_namespace(),
        }
    }

    /// Who showed a certificate that was verified. A node holds everybody's copies and acts for others, so it sees all.
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

    /// Whether they may make requests of this kind.
    #[must_use]
    pub const fn may(&self, scope: Scope) -> bool {
        self.scopes.contains(scope)
    }

    /// Returns whether they may see and ask about `job`. Parked checkpoints without a job, and what is no job name, are in
    /// no namespace: only those see them who see all.
    #[must_use]
    pub fn sees(&self, job: &str) -> bool {
        match namespace_of(job) {
            Ok(namespace) => self.namespaces.contains(namespace),
            Err(_) => self.namespaces.is_all(),
        }
    }
}

/// `*`.
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
