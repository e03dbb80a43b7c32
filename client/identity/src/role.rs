//! Roles and namespaces of certificates, and the actions that they permit.

use std::fmt;
use std::str::FromStr;

use permafrost_protocol::manifest::JobName;

use super::IdentityError;

/// Role of a certificate's holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// `permafrostd` of a cluster, which keeps copies of every namespace.
    Node,
    /// Agent of a compute node, which dumps and restores in its namespaces.
    Agent,
    /// Reader of the checkpoints in its namespaces: for a restore on another host, or an export.
    Reader,
    /// Person who operates the cluster. May read no pages unless namespaces are listed.
    Operator,
}

/// An action that a peer requests. Namespaces contain only valid names, so an invalid one permits nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action<'a> {
    /// Add a checkpoint to this job, or pin one of its checkpoints.
    DumpInto(&'a JobName),
    /// Store pages without a job, which stay the peer's own until it adopts them.
    Park,
    /// Read pages and images of this job.
    Read(&'a JobName),
    /// Remove checkpoints of this job.
    Delete(&'a JobName),
    /// Set what the namespace of this job keeps, and how much it may have.
    Govern(&'a JobName),
    /// Discard a parked session without a job that the peer has brought itself.
    DeleteParked,
    /// Reserve places in the queues.
    Reserve,
    /// Store copies and pass them on, from node to node.
    Replicate,
    /// Drain and remove nodes, scrub.
    Operate,
    /// See the nodes and their state, and of the jobs those that the peer may read.
    List,
}

impl Role {
    /// All of the roles.
    pub const ALL: [Self; 4] = [Self::Node, Self::Agent, Self::Reader, Self::Operator];

    /// Returns the role's name, as written in certificates and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Agent => "agent",
            Self::Reader => "reader",
            Self::Operator => "operator",
        }
    }

    /// Returns true if the holder of this role and these namespaces may do `action`. `delete`: the holder has
    /// the right to remove checkpoints in the namespaces. This is the complete table of rights.
    pub fn may(self, action: Action<'_>, namespaces: &Namespaces, delete: bool) -> bool {
        match (self, action) {
            // A node acts for others and holds everybody's copies; but it does not govern.
            (
                Self::Node,
                Action::DumpInto(_)
                | Action::Park
                | Action::Read(_)
                | Action::Reserve
                | Action::Replicate,
            ) => true,
            // A node drops copies because the registry says so, never on request.
            (
                Self::Node,
                Action::Delete(_) | Action::DeleteParked | Action::Govern(_) | Action::Operate,
            ) => false,

            (Self::Agent, Action::DumpInto(job) | Action::Read(job)) => {
                namespaces.contains(job.namespace())
            }
            (Self::Agent | Self::Operator, Action::Delete(job)) => {
                delete && namespaces.contains(job.namespace())
            }
            (Self::Agent | Self::Operator, Action::DeleteParked) => {
                delete && !namespaces.is_empty()
            }
            (Self::Agent, Action::Park | Action::Reserve) => !namespaces.is_empty(),
            // A quota that its holder could raise would be none.
            (Self::Agent, Action::Replicate | Action::Govern(_) | Action::Operate) => false,

            (Self::Reader, Action::Read(job)) => namespaces.contains(job.namespace()),
            (
                Self::Reader,
                Action::DumpInto(_)
                | Action::Park
                | Action::Delete(_)
                | Action::DeleteParked
                | Action::Govern(_)
                | Action::Reserve
                | Action::Replicate
                | Action::Operate,
            ) => false,

            (Self::Operator, Action::Operate) => true,
            // A rule removes checkpoints, too.
            (Self::Operator, Action::Govern(job)) => delete && namespaces.contains(job.namespace()),
            (Self::Operator, Action::Read(job)) => namespaces.contains(job.namespace()),
            (
                Self::Operator,
                Action::DumpInto(_) | Action::Park | Action::Reserve | Action::Replicate,
            ) => false,

            (_, Action::List) => true,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        Self::ALL
            .into_iter()
            .find(|role| role.name() == text)
            .ok_or_else(|| IdentityError::Role {
                role: text.to_owned(),
            })
    }
}

/// Name that stands for all namespaces in a certificate.
pub const ALL_NAMESPACES: &str = "*";

/// Longest namespace, in bytes.
pub const MAX_NAMESPACE_BYTES: usize = 63;

/// Most namespaces in a certificate, so that it stays small enough for a handshake.
pub const MAX_NAMESPACES: usize = 64;

/// The namespaces of a certificate, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespaces(Vec<String>);

impl Namespaces {
    /// Checks, sorts and deduplicates the namespaces.
    ///
    /// # Errors
    /// A namespace contains other characters than those of job names and is not `*`; or there are too many
    /// namespaces.
    pub fn new(
        namespaces: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<Self, IdentityError> {
        let mut checked = Vec::new();
        for namespace in namespaces {
            let namespace = namespace.into();
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:+".contains(&byte);
            let sound = !namespace.is_empty()
                && namespace.len() <= MAX_NAMESPACE_BYTES
                && namespace.bytes().all(plain);
            if !sound && namespace != ALL_NAMESPACES {
                return Err(IdentityError::Namespace { namespace });
            }
            checked.push(namespace);
            if checked.len() > MAX_NAMESPACES {
                return Err(IdentityError::TooManyNamespaces {
                    limit: MAX_NAMESPACES,
                });
            }
        }
        checked.sort();
        checked.dedup();
        Ok(Self(checked))
    }

    /// Returns true if the set contains `namespace`, or all namespaces.
    pub fn contains(&self, namespace: &str) -> bool {
        self.0
            .iter()
            .any(|own| own == ALL_NAMESPACES || own == namespace)
    }

    /// Returns true if the set stands for all namespaces.
    pub fn is_all(&self) -> bool {
        self.0.iter().any(|own| own == ALL_NAMESPACES)
    }

    /// Returns the namespace, if the set holds exactly one and that is not the wildcard.
    pub fn only(&self) -> Option<&str> {
        match self.0.as_slice() {
            [only] if only != ALL_NAMESPACES => Some(only),
            _ => None,
        }
    }

    /// Iterates over the namespaces in sorted order.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Returns true if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_this_one() {
        // Each cell: without namespaces, with `team-b`, with `team-a`, with `*`; the action is on `team-a`.
        let job: JobName = "team-a/train".parse().unwrap();
        let (dump, read, delete, govern) = (
            Action::DumpInto(&job),
            Action::Read(&job),
            Action::Delete(&job),
            Action::Govern(&job),
        );
        // Each action without the right to delete, and with it.
        let never = [[false; 4]; 2];
        let always = [[true; 4]; 2];
        let any = [[false, true, true, true]; 2];
        let listed = [[false, false, true, true]; 2];
        let deletes = [never[0], listed[0]];
        let discards = [never[0], any[0]];
        let table = [
            (Role::Node, dump, always),
            (Role::Node, Action::Park, always),
            (Role::Node, read, always),
            (Role::Node, delete, never),
            (Role::Node, Action::DeleteParked, never),
            (Role::Node, govern, never),
            (Role::Node, Action::Reserve, always),
            (Role::Node, Action::Replicate, always),
            (Role::Node, Action::Operate, never),
            (Role::Node, Action::List, always),
            (Role::Agent, dump, listed),
            (Role::Agent, Action::Park, any),
            (Role::Agent, read, listed),
            (Role::Agent, delete, deletes),
            (Role::Agent, Action::DeleteParked, discards),
            (Role::Agent, govern, never),
            (Role::Agent, Action::Reserve, any),
            (Role::Agent, Action::Replicate, never),
            (Role::Agent, Action::Operate, never),
            (Role::Agent, Action::List, always),
            (Role::Reader, dump, never),
            (Role::Reader, Action::Park, never),
            (Role::Reader, read, listed),
            (Role::Reader, delete, never),
            (Role::Reader, Action::DeleteParked, never),
            (Role::Reader, govern, never),
            (Role::Reader, Action::Reserve, never),
            (Role::Reader, Action::Replicate, never),
            (Role::Reader, Action::Operate, never),
            (Role::Reader, Action::List, always),
            (Role::Operator, dump, never),
            (Role::Operator, Action::Park, never),
            (Role::Operator, read, listed),
            (Role::Operator, delete, deletes),
            (Role::Operator, Action::DeleteParked, discards),
            (Role::Operator, govern, deletes),
            (Role::Operator, Action::Reserve, never),
            (Role::Operator, Action::Replicate, never),
            (Role::Operator, Action::Operate, always),
            (Role::Operator, Action::List, always),
        ];
        assert_eq!(table.len(), Role::ALL.len() * 10);
        for (role, action, expected) in table {
            for (delete, expected) in [false, true].into_iter().zip(expected) {
                let listed = [&[][..], &["team-b"], &["team-a"], &["*"]];
                for (listed, expected) in listed.into_iter().zip(expected) {
                    let namespaces = Namespaces::new(listed.iter().copied()).unwrap();
                    assert_eq!(
                        role.may(action, &namespaces, delete),
                        expected,
                        "{role} {action:?} {listed:?} {delete}"
                    );
                }
            }
        }
    }

    #[test]
    fn another_namespace_is_none_of_ones_own() {
        let own = Namespaces::new(["team-a"]).unwrap();
        for job in ["team-b/x", "team/x", "team-a2/x", "team-a", "x"] {
            let job: JobName = job.parse().unwrap();
            assert!(
                !Role::Agent.may(Action::DumpInto(&job), &own, true),
                "{job}"
            );
            assert!(!Role::Reader.may(Action::Read(&job), &own, true), "{job}");
        }
    }

    #[test]
    fn odd_namespaces_are_refused() {
        for namespace in [
            "",
            "a/b",
            "a@1",
            "**",
            "a*",
            "ä",
            "a b",
            "a\0",
            &"x".repeat(64),
        ] {
            assert!(Namespaces::new([namespace]).is_err(), "{namespace:?}");
        }
        assert!(Namespaces::new((0..65).map(|n| n.to_string())).is_err());
        assert_eq!(
            Namespaces::new(["b", "a", "b"]).unwrap(),
            Namespaces::new(["a", "b"]).unwrap()
        );
    }
}
