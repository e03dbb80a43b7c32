//! Registers a node.

use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, PutOptions, Txn, TxnOp};
use permafrost_store::clock::unix_ms;

use super::{Keeper, Refusal};
use crate::etcd::Failure;
use crate::fence::{Registration, Tick};
use crate::values::{Json as _, Member, MemberState, Node, NodeFacts, VERSION};

impl Keeper {
    /// Registers in steps: (1) check that no other node has the name; (2) get a lease; (3) write the node's key,
    /// bound to the lease, if there is still no other. The key's create revision is the fencing token.
    pub(super) async fn register(&self) -> Result<Registration, Refusal> {
        let facts = self.facts.borrow().clone();
        // A predecessor on another machine, or with another file, is waited for: perhaps only its lease is left.
        let patience = Tick::now().plus(self.ttl + Duration::from_secs(2));
        loop {
            let (node, member) = self.look(&facts.name).await?;
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
                        v: VERSION,
                        name: facts.name.clone(),
                        region: facts.region.clone(),
                        first_seen_unix_ms: unix_ms(),
                        state: MemberState::Active,
                    },
                    0,
                ),
            };
            let (lease, sent, ttl) = self.grant().await?;
            let put = self
                .put_registration(&facts, lease, &member, member_revision)
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

    /// Reads the node's key with its lease, and the member's with its revision.
    async fn look(
        &self,
        name: &str,
    ) -> Result<(Option<(Node, i64)>, Option<(Member, i64)>), Refusal> {
        let (node_key, member_key) = (self.keys.node(name), self.keys.member(name));
        let look = Txn::new().and_then([
            TxnOp::get(node_key, None::<GetOptions>),
            TxnOp::get(member_key, None),
        ]);
        let mut found = self
            .transaction(look)
            .await?
            .found
            .into_iter()
            .map(|kvs| kvs.into_iter().next());
        let unusable = |error| Refusal::Value {
            name: name.to_owned(),
            error,
        };
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
        Ok((node, member))
    }

    async fn put_registration(
        &self,
        facts: &NodeFacts,
        lease: i64,
        member: &Member,
        member_revision: i64,
    ) -> Result<Option<i64>, Failure> {
        let (node_key, member_key) = (self.keys.node(&facts.name), self.keys.member(&facts.name));
        let put = Txn::new()
            .when([
                Compare::create_revision(node_key.clone(), CompareOp::Equal, 0),
                Compare::mod_revision(member_key.clone(), CompareOp::Equal, member_revision),
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
