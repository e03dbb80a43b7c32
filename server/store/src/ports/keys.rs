//! Keys for encryption at rest.

use permafrost_pmem::KeyId;

use crate::PortError;

/// Data keys of namespaces. The region is given each key before this names it.
pub trait DataKeys: Send + Sync {
    /// Returns the key for new checkpoints of a namespace; the empty name is that of dumps which have no job yet. The
    /// first time, the key is made, durably.
    ///
    /// # Errors
    /// The key cannot be stored.
    fn key_for(&self, namespace: &str) -> Result<KeyId, PortError>;

    /// Returns all keys, by namespace.
    fn list(&self) -> Vec<NamespaceKey>;

    /// Makes a new key for a namespace's checkpoints from now on, durably. The one before is kept.
    ///
    /// # Errors
    /// The namespace has no key; the new one cannot be stored.
    fn rotate(&self, namespace: &str) -> Result<KeyId, PortError>;

    /// Erases a key that is not current, durably: nothing must be encrypted with it any more.
    ///
    /// # Errors
    /// The change cannot be stored.
    fn retire(&self, id: KeyId) -> Result<(), PortError>;

    /// Erases all keys of a namespace, durably.
    ///
    /// # Errors
    /// The namespace has no key; the change cannot be stored.
    fn destroy(&self, namespace: &str) -> Result<(), PortError>;
}

/// A data key, without the key itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceKey {
    /// Name of the namespace; empty for dumps that have no job yet.
    pub namespace: String,
    /// Id of the key.
    pub id: KeyId,
    /// Time when it was made, seconds since 1970.
    pub created_unix_s: u64,
    /// True if new checkpoints get it.
    pub is_current: bool,
}
