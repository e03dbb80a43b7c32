//! Records of removals, kept for as long as nodes may be away.
//!
//! Any client that may write to etcd could forge such a record. So the removing node signs it, and other nodes
//! believe only a node whose certificate they trust.

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp};
use permafrost_identity::Role;
use permafrost_protocol::control::Checkpoint;
use permafrost_store::StoreError;

use super::{EtcdRegistry, Inner};
use crate::error::RegistryError;
use crate::values::{Json as _, VERSION, Withdrawal};

/// Lifetime of a record, seconds: a node that has been away for less drops its copy when it comes back.
const WITHDRAWN_S: i64 = 30 * 86_400;

/// Stands in the place of a key: the checkpoint is not listed, and may be dropped under any name.
const UNLISTED: &str = "*";

/// Returns the statement that is signed.
fn statement(id: &str, key: &str) -> String {
    format!("checkpoint {id} is taken off the list, where it was {key}")
}

impl EtcdRegistry {
    /// Records a removal of a checkpoint that is not listed, so that the nodes drop their copies.
    ///
    /// # Errors
    /// The checkpoint is listed; the registry is unavailable.
    pub fn discard(&self, id: &str) -> Result<(), StoreError> {
        let id = id.to_owned();
        self.wait(|inner| async move {
            let (listed, _) = inner.list("", None).await?;
            if let Some(entry) = listed.iter().find(|entry| entry.checkpoint.id == id) {
                let checkpoint = &entry.checkpoint;
                return Err(RegistryError::Listed {
                    checkpoint: format!("{}@{}", checkpoint.job, checkpoint.generation),
                    id,
                }
                .into());
            }
            let own = inner.own().await?;
            let put = inner.say_withdrawn(&id, UNLISTED).await?;
            let still =
                Compare::create_revision(inner.keys.node(&inner.node), CompareOp::Equal, own.token);
            let outcome = inner
                .transaction(Txn::new().when([still]).and_then([put]))
                .await?;
            if outcome.succeeded {
                Ok(())
            } else {
                Err(inner.fenced())
            }
        })
    }
}

impl Inner {
    /// Returns the operation that records, signed by this node, that the checkpoint listed under `key` was taken
    /// off the list.
    pub(super) async fn say_withdrawn(&self, id: &str, key: &str) -> Result<TxnOp, StoreError> {
        let sign = |identity: &std::sync::Arc<permafrost_identity::ReloadingIdentity>| {
            identity.sign(statement(id, key).as_bytes())
        };
        let signed = self.identity.as_ref().map(sign).transpose();
        let signed = signed.map_err(|source| RegistryError::Unsigned {
            id: id.to_owned(),
            source,
        })?;
        let word = Withdrawal {
            v: VERSION,
            key: key.to_owned(),
            signed,
        };
        let for_a_month = PutOptions::new().with_lease(self.month().await?);
        Ok(TxnOp::put(
            self.keys.withdrawn(id),
            word.encode(),
            Some(for_a_month),
        ))
    }

    /// Returns a lease for the record of a removal.
    async fn month(&self) -> Result<i64, StoreError> {
        let granted = self
            .etcd
            .call(self.limit, |mut client| async move {
                client.lease_grant(WITHDRAWN_S, None).await
            })
            .await?;
        Ok(granted.id())
    }

    pub(super) async fn is_withdrawn(&self, checkpoint: &Checkpoint) -> Result<bool, StoreError> {
        let key = self.keys.withdrawn(&checkpoint.id);
        let found = self.get(key.clone(), None).await?;
        let Some(kv) = found.kvs().first() else {
            return Ok(false);
        };
        match self.believe(checkpoint, kv.value()) {
            Ok(()) => Ok(true),
            Err(why) => {
                tracing::error!(
                    event = "removal-not-believed",
                    key,
                    why,
                    "somebody says that a checkpoint was removed, and is not believed: it stays"
                );
                Ok(false)
            }
        }
    }

    /// Checks that a node of this cluster has signed the removal of this checkpoint; the error is the reason.
    fn believe(&self, checkpoint: &Checkpoint, value: &[u8]) -> Result<(), String> {
        let word = Withdrawal::decode(value).map_err(|error| format!("it is {error}"))?;
        // If the manifest is damaged, only the id is known.
        let is_known = !checkpoint.kind.is_empty();
        if is_known && word.key != UNLISTED && word.key != self.key_of(checkpoint) {
            return Err(format!("it is about {}", word.key));
        }
        let Some(identity) = &self.identity else {
            return Ok(());
        };
        let signed = word.signed.ok_or("no node has signed it")?;
        let statement = statement(&checkpoint.id, &word.key);
        let signer = identity
            .signer(statement.as_bytes(), &signed)
            .map_err(|error| error.to_string())?;
        if signer.role != Role::Node {
            return Err(format!(
                "{} {} has signed it, who is no node",
                signer.role, signer.name
            ));
        }
        Ok(())
    }
}
