//! Values in etcd.
//!
//! Nodes, members, locks and the leader are JSON, to be looked at with etcdctl. A checkpoint is protobuf, as
//! there are many. Each has a version; a newer one is refused, unknown fields are skipped.

use std::collections::BTreeSet;

use permafrost_clustered::Registered;
use permafrost_identity::Signed;
use permafrost_metering::costs::NodeReport;
use permafrost_protocol::control::{Checkpoint, ColdCopy};
use permafrost_protocol::versions::{self, Interface, RELEASE, SpokenVersions};
pub use permafrost_scheduling::place::NodeClass;
use permafrost_store::StoreError;
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::error::NodesError;

/// Version of all values but those of members, which have the version of the registry that the cluster uses.
pub(crate) const VERSION: u32 = 1;

/// Speed class of a node's medium, fastest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Persistent memory, mapped by DAX.
    Pmem,
    /// Memory of the machine: tmpfs.
    Memory,
    /// A file on a disk.
    #[default]
    File,
}

impl Tier {
    /// Returns the tier as people and JSON write it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Pmem => "pmem",
            Self::Memory => "memory",
            Self::File => "file",
        }
    }
}

/// Parts of the infrastructure that fail together with a node. Empty parts are unknown, and then taken to be
/// the same everywhere, except for the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FailureDomain {
    /// Machine; empty: the node's name, so that each node is a machine of its own.
    pub host: String,
    /// Rack of the machine.
    pub rack: String,
    /// Zone or site.
    pub zone: String,
}

/// Facts that a node publishes about itself, refreshed while it lives.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeFacts {
    /// Name: that of its certificate, unique in the cluster.
    pub name: String,
    /// UUID of its region.
    pub region: String,
    /// Device and number of its region's file: a copy of the region has another.
    pub region_file: String,
    /// Address at which it takes QUIC connections, `host:port`.
    pub address: String,
    /// Speed class of its medium.
    pub tier: Tier,
    /// Class: copies on a reserved node outlast the machine.
    pub class: NodeClass,
    /// True if its medium does not outlast a power failure or a reboot: copies there do not count.
    pub volatile: bool,
    /// True if the operator lets copies there count, although its medium is volatile.
    pub counts_although_volatile: bool,
    /// Failure domain of the node.
    pub domain: FailureDomain,
    /// Size of its region, bytes.
    pub capacity_bytes: u64,
    /// Free bytes in its region.
    pub free_bytes: u64,
    /// Measured rate of writing to the medium, bytes per second; 0 while unknown.
    pub write_bytes_per_s: u64,
    /// Measured rate of reading from the medium, bytes per second; 0 while unknown.
    pub read_bytes_per_s: u64,
    /// Measured rate of its network, bytes per second; 0 while unknown.
    pub network_bytes_per_s: u64,
    /// Bytes that it has agreed to receive and not written yet.
    pub queued_bytes: u64,
    /// Version of its software.
    pub version: String,
    /// Versions that it speaks; none from a node of version 1 of the registry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speaks: Option<SpokenVersions>,
    /// True if it is stopping, or was told to take no new dumps.
    pub draining: bool,
    /// Reason for which its region takes no writes; empty while it does. Its checkpoints can be read, and are
    /// copied to other nodes.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub failed: String,
    /// Checkpoints by id that are being read there, or were a moment ago; `*` if there are too many to name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub in_use: Vec<String>,
    /// Measured figures. `None`: the node publishes none.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "permafrost_metering::costs::lenient_report"
    )]
    pub figures: Option<NodeReport>,
}

/// Divisor for the part of a region that is left free.
const RESERVE_FRACTION: u64 = 32;

impl NodeFacts {
    /// Returns true if copies on the node count towards durability: it is ours to keep, its region takes writes,
    /// and its medium outlasts a power failure.
    #[must_use]
    pub fn counts(&self) -> bool {
        self.class == NodeClass::Reserved
            && self.failed.is_empty()
            && (!self.volatile || self.counts_although_volatile)
    }

    /// Returns the bytes that copies may still take on the node: the free bytes, minus those already on their way to
    /// it, and minus a part that is left for dumps that grow while they stream and for the journal.
    #[must_use]
    pub const fn room_bytes(&self) -> u64 {
        self.free_bytes
            .saturating_sub(self.queued_bytes)
            .saturating_sub(self.capacity_bytes / RESERVE_FRACTION)
    }

    /// Returns true if the node takes new copies, by its own facts.
    #[must_use]
    pub const fn takes_copies(&self) -> bool {
        !self.draining && self.failed.is_empty()
    }
}

/// Value of a live node's key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Node {
    pub(crate) v: u32,
    /// Id of this start of the daemon.
    pub(crate) incarnation: String,
    /// Id of the machine's start: an earlier incarnation on the same machine start is known to be dead, because it
    /// held the region's lock.
    pub(crate) boot: String,
    pub(crate) facts: NodeFacts,
}

/// Membership status of a node, set by an operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberState {
    /// The node takes part; the default.
    #[default]
    Active,
    /// The node takes no new copies; its own are moved away.
    Drained,
    /// The node must not come back.
    Removed,
}

impl MemberState {
    /// Returns the status as people and JSON write it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Drained => "drained",
            Self::Removed => "removed",
        }
    }

    pub(crate) fn parse(word: &str) -> Result<Self, StoreError> {
        let all = [Self::Active, Self::Drained, Self::Removed];
        all.into_iter()
            .find(|state| state.word() == word)
            .ok_or_else(|| {
                NodesError::UnknownState {
                    word: word.to_owned(),
                }
                .into()
            })
    }
}

/// A node that has ever been registered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub(crate) v: u32,
    /// Name of the node.
    pub name: String,
    /// UUID of its region at its last registration.
    pub region: String,
    /// Time at which this region was first registered, milliseconds since the Unix epoch.
    pub first_seen_unix_ms: u64,
    /// Membership status set by an operator.
    #[serde(default)]
    pub state: MemberState,
    /// Versions that it spoke when it was registered last; none from a node of version 1 of the registry, which also
    /// drops them when it sets the status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speaks: Option<SpokenVersions>,
}

/// Version of the registry that the cluster uses: that of the members' values. A node that does not speak it does not
/// register. Without it, version 1 is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Level {
    pub(crate) v: u32,
    pub(crate) registry: u32,
}

/// Value of a lock's or the leader's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holder {
    pub(crate) v: u32,
    pub(crate) node: String,
    /// Random token, by which a node recognises its own write after a lost answer.
    pub(crate) token: String,
}

/// Record that a checkpoint was taken off the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Withdrawal {
    pub(crate) v: u32,
    /// Key under which it was listed; `*` where it was not listed any more.
    pub(crate) key: String,
    /// Signature of the node that removed it.
    pub(crate) signed: Option<Signed>,
}

/// List of denied certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DenialList {
    pub(crate) v: u32,
    /// Entries, `serial HEX` or `name ROLE NAME`.
    pub(crate) entries: BTreeSet<String>,
}

/// A value that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ValueError {
    #[error("of version {found}; this daemon (release {RELEASE}) knows {newest}")]
    Version { found: u32, newest: u32 },
    #[error("not JSON of its kind")]
    Json(#[from] serde_json::Error),
    #[error("not protobuf of its kind")]
    Protobuf(#[from] prost::DecodeError),
    #[error("incomplete: {0}")]
    Incomplete(&'static str),
    #[error("used up")]
    UsedUp,
    #[error("no number")]
    NoNumber,
}

/// A JSON value with a version.
pub(crate) trait Json: Serialize + for<'a> Deserialize<'a> {
    /// Returns the newest version of the value that this process speaks.
    fn newest() -> u32 {
        VERSION
    }

    fn encode(&self) -> Vec<u8> {
        // Structs of strings and numbers always serialize.
        serde_json::to_vec(self).unwrap_or_default()
    }

    fn decode(bytes: &[u8]) -> Result<Self, ValueError> {
        // The version is read first: a newer value may have another shape.
        #[derive(Deserialize)]
        struct Version {
            v: u32,
        }
        let Version { v } = serde_json::from_slice(bytes)?;
        let newest = Self::newest();
        if !(VERSION..=newest).contains(&v) {
            return Err(ValueError::Version { found: v, newest });
        }
        Ok(serde_json::from_slice(bytes)?)
    }
}

impl Json for Node {}
impl Json for Member {
    fn newest() -> u32 {
        versions::own().of(Interface::Registry).newest
    }
}
impl Json for Level {}
impl Json for Holder {}
impl Json for DenialList {}
impl Json for Withdrawal {}

/// A listed checkpoint.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Entry {
    #[prost(uint32, tag = "1")]
    pub(crate) version: u32,
    #[prost(message, optional, tag = "2")]
    pub(crate) checkpoint: Option<Checkpoint>,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) content_digest: Vec<u8>,
    #[prost(string, repeated, tag = "4")]
    pub(crate) nodes: Vec<String>,
    #[prost(uint32, tag = "5")]
    pub(crate) wanted_copies: u32,
    #[prost(string, repeated, tag = "6")]
    pub(crate) damaged: Vec<String>,
    #[prost(message, repeated, tag = "7")]
    pub(crate) cold: Vec<ColdCopy>,
}

impl Entry {
    pub(crate) fn of(registered: &Registered) -> Self {
        Self {
            version: VERSION,
            checkpoint: Some(registered.checkpoint.clone()),
            content_digest: registered.content_digest.to_vec(),
            nodes: registered.nodes.clone(),
            wanted_copies: registered.wanted_copies,
            damaged: registered.damaged.clone(),
            cold: registered.cold.clone(),
        }
    }

    pub(crate) fn read(bytes: &[u8]) -> Result<Registered, ValueError> {
        let entry = <Self as Message>::decode(bytes)?;
        if entry.version != VERSION {
            return Err(ValueError::Version {
                found: entry.version,
                newest: VERSION,
            });
        }
        Ok(Registered {
            checkpoint: entry
                .checkpoint
                .ok_or(ValueError::Incomplete("no checkpoint"))?,
            content_digest: entry
                .content_digest
                .try_into()
                .map_err(|_| ValueError::Incomplete("a digest that is not 32 bytes"))?,
            nodes: entry.nodes,
            wanted_copies: entry.wanted_copies,
            damaged: entry.damaged,
            cold: entry.cold,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back() {
        let node = Node {
            v: VERSION,
            incarnation: "i".into(),
            boot: "b".into(),
            facts: NodeFacts {
                name: "n".into(),
                class: NodeClass::Transient,
                ..NodeFacts::default()
            },
        };
        assert_eq!(Node::decode(&node.encode()).unwrap(), node);
        let entry = Registered {
            checkpoint: Checkpoint {
                job: "j".into(),
                generation: 3,
                ..Checkpoint::default()
            },
            content_digest: [7; 32],
            nodes: vec!["a".into(), "b".into()],
            wanted_copies: 2,
            damaged: vec!["b".into()],
            cold: vec![ColdCopy {
                node: "a".into(),
                bytes: 1 << 20,
            }],
        };
        let bytes = Entry::of(&entry).encode_to_vec();
        assert_eq!(Entry::read(&bytes).unwrap(), entry);
    }

    #[test]
    fn copies_in_memory_count_only_if_the_operator_says_so() {
        let facts = |class, volatile, counts_although_volatile| NodeFacts {
            class,
            volatile,
            counts_although_volatile,
            ..NodeFacts::default()
        };
        assert!(facts(NodeClass::Reserved, false, false).counts());
        assert!(!facts(NodeClass::Reserved, true, false).counts());
        assert!(facts(NodeClass::Reserved, true, true).counts());
        assert!(!facts(NodeClass::Transient, true, true).counts());
        assert!(!facts(NodeClass::Transient, false, false).counts());
    }

    #[test]
    fn words_are_those_of_the_values() {
        for state in [
            MemberState::Active,
            MemberState::Drained,
            MemberState::Removed,
        ] {
            assert_eq!(MemberState::parse(state.word()).unwrap(), state);
            assert_eq!(serde_json::to_value(state).unwrap(), state.word());
        }
        assert!(MemberState::parse("Active").is_err());
        for class in [NodeClass::Reserved, NodeClass::Transient] {
            assert_eq!(serde_json::to_value(class).unwrap(), class.word());
        }
        for tier in [Tier::Pmem, Tier::Memory, Tier::File] {
            assert_eq!(serde_json::to_value(tier).unwrap(), tier.word());
        }
    }

    #[test]
    fn newer_and_broken_values_are_refused() {
        assert!(matches!(
            Node::decode(br#"{"v":2,"what":1}"#),
            Err(ValueError::Version {
                found: 2,
                newest: 1
            })
        ));
        assert!(Node::decode(b"{").is_err());
        assert!(Entry::read(&[8, 2]).is_err());
        assert!(Entry::read(&[8, 1]).is_err());
        assert!(Entry::read(b"\xff\xff").is_err());
    }

    #[test]
    fn members_of_either_version_are_read() {
        let older = br#"{"v":1,"name":"n","region":"r","first_seen_unix_ms":3}"#;
        let older = Member::decode(older).unwrap();
        assert_eq!((older.v, &older.speaks), (1, &None));
        let newer = Member {
            v: 2,
            speaks: Some(SpokenVersions::built()),
            ..older
        };
        assert_eq!(Member::decode(&newer.encode()).unwrap(), newer);
        // Fields of a later release are skipped, a later version is refused.
        let later = br#"{"v":2,"name":"n","region":"r","first_seen_unix_ms":3,"news":1}"#;
        assert!(Member::decode(later).is_ok());
        let later = br#"{"v":3,"name":"n","region":"r","first_seen_unix_ms":3}"#;
        let refused = Member::decode(later).unwrap_err();
        assert!(
            refused.to_string().starts_with("of version 3; this daemon"),
            "{refused}"
        );
        for impossible in [
            r#"{"v":0}"#,
            r#"{"v":-1}"#,
            r#"{"v":65536}"#,
            r#"{"v":4294967296}"#,
        ] {
            assert!(
                Member::decode(impossible.as_bytes()).is_err(),
                "{impossible}"
            );
        }
    }

    #[test]
    fn facts_of_an_older_node_are_read() {
        let node = Node::decode(
            br#"{"v":1,"incarnation":"i","boot":"b","facts":{"name":"n","news":[1]}}"#,
        )
        .unwrap();
        assert_eq!(node.facts.name, "n");
        assert_eq!(node.facts.class, NodeClass::Reserved);
        assert_eq!(node.facts.figures, None);
    }

    #[test]
    fn figures_that_make_no_sense_take_nothing_else_with_them() {
        let value = |figures: &str| {
            let node = format!(
                r#"{{"v":1,"incarnation":"i","boot":"b","facts":{{"name":"n","figures":{figures}}}}}"#
            );
            Node::decode(node.as_bytes()).unwrap().facts
        };
        for nonsense in ["7", "[]", "true"] {
            let facts = value(nonsense);
            assert!(
                facts.name == "n" && facts.figures.unwrap().unreadable,
                "{nonsense}"
            );
        }
        let facts = value(r#"{"sequence":4,"write":{"known":-1},"write_queue":{"bytes":-1}}"#);
        let figures = facts.figures.unwrap();
        assert!(!figures.unreadable && figures.sequence == 4);
        assert!(figures.write.sustained().known().is_err());
        assert_eq!(value("null").figures, None);
    }
}
