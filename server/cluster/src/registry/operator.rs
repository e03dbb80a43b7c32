//! Operator's part of the registry: identity of its data, leader, and membership status of nodes.

use etcd_client::{GetOptions, KeyValue};
use permafrost_clustered::Registered;
use permafrost_protocol::control::RegistryMember;
use permafrost_store::StoreError;

use super::{EtcdRegistry, Inner, damaged};
use crate::error::{NodesError, RegistryError};
use crate::etcd::Failure;
use crate::values::{Holder, Json as _, Level, Member, MemberState, VERSION};
use permafrost_clustered::DataMark;

impl EtcdRegistry {
    /// Returns the identity and revision of etcd's data.
    ///
    /// # Errors
    /// The registry is unavailable.
    pub fn mark(&self) -> Result<DataMark, StoreError> {
        let (mark, _) = self.wait(|inner| async move { inner.mark().await })?;
        if mark.id.is_empty() {
            return Err(RegistryError::NoClusterId.into());
        }
        Ok(mark)
    }

    /// Returns a registry whose [`Registry::list`] is of this data, at this revision or later, or fails: for a
    /// caller that drops unlisted checkpoints. So it notices data that is replaced between the check and the list.
    #[must_use]
    pub fn bound_to(&self, mark: &DataMark) -> Self {
        Self {
            inner: self.inner.clone(),
            bound: Some(mark.clone()),
        }
    }

    /// Asks each member of etcd for its version, all at once.
    ///
    /// # Errors
    /// The threads that would ask have no time.
    pub(crate) fn members(&self) -> Result<Vec<RegistryMember>, StoreError> {
        self.wait(|inner| async move { Ok(inner.etcd.probe().await) })
    }

    /// Returns all listed checkpoints, and the identity of the data.
    ///
    /// # Errors
    /// The registry is unavailable.
    pub fn listed(&self) -> Result<(Vec<Registered>, DataMark), StoreError> {
        let bound = self.bound.clone();
        self.wait(|inner| async move { inner.list("", bound.as_ref()).await })
    }

    /// Returns the node that leads the background work.
    ///
    /// # Errors
    /// The registry is unavailable.
    pub fn leader(&self) -> Result<Option<String>, StoreError> {
        self.wait(|inner| async move {
            let key = inner.keys.leader();
            let found = inner.get(key.clone(), None).await?;
            let holder = found
                .kvs()
                .first()
                .map(|kv| Holder::decode(kv.value()).map_err(|error| damaged(&key, error)));
            Ok(holder.transpose()?.map(|holder| holder.node))
        })
    }

    /// Returns the version of the registry that the cluster uses.
    ///
    /// # Errors
    /// The registry is unavailable.
    pub fn level(&self) -> Result<u32, StoreError> {
        self.wait(|inner| async move {
            let key = inner.keys.level();
            let found = inner.get(key.clone(), None).await?;
            found
                .kvs()
                .first()
                .map_or(Ok(VERSION), |kv| read_level(&key, kv))
        })
    }

    /// Sets the version of the registry that the cluster uses, and with it that of the members' values. The caller has
    /// checked that every node speaks it. Returns the members, as they were after the level was set.
    ///
    /// # Errors
    /// The registry is unavailable: then it can be done again.
    pub(crate) fn set_level(&self, level: u32) -> Result<Vec<Member>, StoreError> {
        self.wait(|inner| async move {
            let key = inner.keys.level();
            let set = |present: Option<&KeyValue>| {
                let now = present.map_or(Ok(VERSION), |kv| read_level(&key, kv))?;
                let value = Level {
                    v: VERSION,
                    registry: level,
                };
                Ok((now != level).then(|| value.encode()))
            };
            inner.revise(key.clone(), set).await?;
            let options = GetOptions::new().with_prefix();
            let found = inner.get(inner.keys.members(), Some(options)).await?;
            let mut members = Vec::new();
            for kv in found.kvs() {
                let key = String::from_utf8_lossy(kv.key()).into_owned();
                members.push(Member::decode(kv.value()).map_err(|error| damaged(&key, error))?);
                let set = |present: Option<&KeyValue>| {
                    let Some(kv) = present else { return Ok(None) };
                    let mut member =
                        Member::decode(kv.value()).map_err(|error| damaged(&key, error))?;
                    let changed = member.v != level;
                    member.v = level;
                    Ok(changed.then(|| member.encode()))
                };
                inner.revise(key.clone(), set).await?;
            }
            Ok(members)
        })
    }

    /// Returns the name of the node that uses this registry.
    pub(crate) fn node(&self) -> &str {
        &self.inner.node
    }

    /// Raises the job's counter to at least `generation`, so that the number is never handed out.
    ///
    /// # Errors
    /// The registry is unavailable.
    pub fn raise_generation(&self, job: &str, generation: u64) -> Result<(), StoreError> {
        let job = job.to_owned();
        self.wait(|inner| async move { inner.raise_generation(&job, generation).await })
    }

    /// Sets a node's membership status: it takes part, takes no new copies, or must not come back. A removed node
    /// loses its registration and its locks; it keeps trying, and registers when it is taken back.
    ///
    /// # Errors
    /// The registry is unavailable, or the cluster has never seen the node.
    pub fn set_member_state(&self, node: &str, state: MemberState) -> Result<(), StoreError> {
        let node = node.to_owned();
        self.wait(|inner| async move {
            let key = inner.keys.member(&node);
            let changed = |present: Option<&KeyValue>| {
                let Some(kv) = present else {
                    return Err(NodesError::NoNode { node: node.clone() }.into());
                };
                let mut member =
                    Member::decode(kv.value()).map_err(|error| damaged(&key, error))?;
                member.state = state;
                Ok(Some(member.encode()))
            };
            inner.revise(key.clone(), changed).await?;
            if state == MemberState::Removed {
                // After the member, whose revision a registration compares, so that the node cannot register in
                // between.
                inner.end_registration(&node).await?;
            }
            Ok(())
        })
    }
}

fn read_level(key: &str, kv: &KeyValue) -> Result<u32, StoreError> {
    let level = Level::decode(kv.value()).map_err(|error| damaged(key, error))?;
    Ok(level.registry)
}

impl Inner {
    /// Ends a node's lease, if it has one.
    async fn end_registration(&self, node: &str) -> Result<(), StoreError> {
        let found = self.get(self.keys.node(node), None).await?;
        let Some(lease) = found.kvs().first().map(KeyValue::lease) else {
            return Ok(());
        };
        let revoked = self
            .etcd
            .call(self.limit, |mut client| async move {
                client.lease_revoke(lease).await
            })
            .await;
        match revoked {
            // Not found: the registration is already over.
            Ok(_) | Err(Failure::Refused(_)) => Ok(()),
            Err(failure) => Err(failure.into()),
        }
    }
}
