//! Registers a node.

use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, PutOptions, Txn, TxnOp};
use permafrost_protocol::versions::{Interface, SpokenVersions};
use permafrost_store::clock::unix_ms;

use super::{Keeper, Refusal};
use crate::etcd::Failure;
use crate::fence::{Registration, Tick};
use crate::values::{Json as _, Level, Member, MemberState, Node, NodeFacts, VERSION};

/// State of the registry that a registration depends on: the node of this name with its lease, and the member and the
/// level with the revisions of their values.
struct Found {
    node: Option<(Node, i64)>,
    member: Option<(Member, i64)>,
    level: (u32, i64),
}

/// Checks that a node speaks the version of the registry that the cluster uses.
fn check_level(facts: &NodeFacts, level: u32) -> Result<(), Refusal> {
    let speaks = facts.speaks.clone().unwrap_or_default();
    let range = speaks.of(Interface::Registry);
    if range.contains(level) {
        return Ok(());
    }
    Err(Refusal::Level { range, level })
}

/// Checks that a node can speak with all others that were not removed.
fn check_neighbours(
    facts: &NodeFacts,
    members: impl Iterator<Item = Member>,
) -> Result<(), Refusal> {
    let own = facts.speaks.clone().unwrap_or_default();
    for member in members {
        if member.name == facts.name || member.state == MemberState::Removed {
            continue;
        }
        let theirs = member.speaks.clone().unwrap_or_default();
        let (one, other) = ((&*facts.name, &own), (&*member.name, &theirs));
        SpokenVersions::common(Interface::Wire, one, other)?;
    }
    Ok(())
}

impl Keeper {
    /// Registers in steps: (1) check that no other node has the name; (2) get a lease; (3) write the node's key,
    /// bound to the lease, if there is still no other. The key's create revision is the fencing token.
    pub(super) async fn register(&self) -> Result<Registration, Refusal> {
        let facts = self.facts.borrow().clone();
        // A predecessor on another machine, or with another file, is waited for: perhaps only its lease is left.
        let patience = Tick::now().plus(self.ttl + Duration::from_secs(2));
        loop {
            let Found {
                node,
                member,
                level: (level, level_revision),
            } = self.look(&facts).await?;
            if let Some(kv) = &node {
                let lease = kv.1;
                let other = &kv.0;
                if other.facts.region != facts.region {
                    return Err(Refusal::Namesake {
                        name: facts.name,
                        region: other.facts.region.clone(),
                        address: other.facts.address.clone(),
                        own: facts.region,
                    });
                }
                if other.boot == self.boot && other.facts.region_file == facts.region_file {
                    // The predecessor had this very file open on this machine, and no longer has: it is dead, or it
                    // is this node and an answer was lost. Its locks go with its lease. A copy of the file has a lock
                    // of its own, so this would prove nothing for it.
                    self.revoke(lease).await?;
                } else if Tick::now() > patience {
                    return Err(Refusal::Twin {
                        name: facts.name,
                        address: other.facts.address.clone(),
                    });
                } else {
                    tokio::time::sleep(Duration::from_millis(250)).await;
                }
                continue;
            }
            let (member, member_revision) = match member {
                Some((member, _)) if member.state == MemberState::Removed => {
                    return Err(Refusal::Removed { name: facts.name });
                }
                Some((member, revision)) if member.region == facts.region => (member, revision),
                Some((member, revision)) => (
                    Member {
                        region: facts.region.clone(),
                        first_seen_unix_ms: unix_ms(),
                        ..member
                    },
                    revision,
                ),
                None => (
                    Member {
                        v: level,
                        name: facts.name.clone(),
                        region: facts.region.clone(),
                        first_seen_unix_ms: unix_ms(),
                        state: MemberState::Active,
                        speaks: None,
                    },
                    0,
                ),
            };
            let member = Member {
                v: level,
                speaks: facts.speaks.clone(),
                ..member
            };
            let (lease, sent, ttl) = self.grant().await?;
            let put = self
                .put_registration(&facts, lease, &member, member_revision, level_revision)
                .await;
            match put {
                Ok(Some(token)) => {
                    let registration = Registration { token, lease };
                    self.fence.extend(registration, sent, ttl);
                    return Ok(registration);
                }
                // Another node was quicker, or the member was changed: read again.
                Ok(None) => {
                    let _ = self.revoke(lease).await;
                }
                Err(failure) => {
                    let _ = self.revoke(lease).await;
                    return Err(failure.into());
                }
            }
        }
    }

    /// Reads what a registration depends on. The level is checked first: values of another one may not be readable.
    async fn look(&self, facts: &NodeFacts) -> Result<Found, Refusal> {
        let name = facts.name.as_str();
        let (node_key, member_key) = (self.keys.node(name), self.keys.member(name));
        let look = Txn::new().and_then([
            TxnOp::get(self.keys.level(), None::<GetOptions>),
            TxnOp::get(node_key, None),
            TxnOp::get(member_key, None),
            TxnOp::get(self.keys.members(), Some(GetOptions::new().with_prefix())),
        ]);
        let mut found = self.transaction(look).await?.found;
        let members = found.pop().unwrap_or_default();
        let mut found = found.into_iter().map(|kvs| kvs.into_iter().next());
        let unusable = |error| Refusal::Value {
            name: name.to_owned(),
            error,
        };
        let level = match found.next().flatten() {
            Some(kv) => {
                let level = Level::decode(kv.value()).map_err(unusable)?;
                (level.registry, kv.mod_revision())
            }
            None => (VERSION, 0),
        };
        check_level(facts, level.0)?;
        // One that cannot be read is of a later version, which the level tells.
        let members = members.iter().map(|kv| Member::decode(kv.value()));
        check_neighbours(facts, members.flatten())?;
        let node = match found.next().flatten() {
            Some(kv) => Some((Node::decode(kv.value()).map_err(unusable)?, kv.lease())),
            None => None,
        };
        let member = match found.next().flatten() {
            Some(kv) => Some((
                Member::decode(kv.value()).map_err(unusable)?,
                kv.mod_revision(),
            )),
            None => None,
        };
        Ok(Found {
            node,
            member,
            level,
        })
    }

    async fn put_registration(
        &self,
        facts: &NodeFacts,
        lease: i64,
        member: &Member,
        member_revision: i64,
        level_revision: i64,
    ) -> Result<Option<i64>, Failure> {
        let (node_key, member_key) = (self.keys.node(&facts.name), self.keys.member(&facts.name));
        let put = Txn::new()
            .when([
                Compare::create_revision(node_key.clone(), CompareOp::Equal, 0),
                Compare::mod_revision(member_key.clone(), CompareOp::Equal, member_revision),
                Compare::mod_revision(self.keys.level(), CompareOp::Equal, level_revision),
            ])
            .and_then([
                TxnOp::put(
                    node_key.clone(),
                    self.value(facts.clone()),
                    Some(PutOptions::new().with_lease(lease)),
                ),
                TxnOp::put(member_key, member.encode(), None),
                self.name_data(),
                TxnOp::get(node_key.clone(), None),
                TxnOp::get(self.keys.cluster(), None),
            ])
            .or_else([
                TxnOp::get(node_key, None),
                TxnOp::get(self.keys.cluster(), None),
            ]);
        let found = self.transaction(put).await?.found;
        self.data.learn(&found, &self.keys.cluster());
        // Also ours if an earlier attempt's answer was lost: the lease is only ours.
        Ok(found
            .into_iter()
            .flatten()
            .find(|kv| kv.lease() == lease)
            .map(|kv| kv.create_revision()))
    }

    /// Returns an operation that gives etcd's data an id if it has none: the first node to register sets it.
    pub(super) fn name_data(&self) -> TxnOp {
        let key = self.keys.cluster();
        let id = uuid::Uuid::new_v4().to_string();
        TxnOp::txn(
            Txn::new()
                .when([Compare::create_revision(key.clone(), CompareOp::Equal, 0)])
                .and_then([TxnOp::put(key, id, None)]),
        )
    }
}
