//! Storage of a daemon's policies of retention, and the record of their removals.

use std::path::Path;
use std::sync::Arc;

use permafrost_audit::{Audit, AuditedRequest, Who};
use permafrost_cluster::EtcdRegistry;
use permafrost_clustered::{PolicyFile, PolicyKeeper, RemovalReceiver};
use permafrost_identity::{ReloadingIdentity, Role, Signed};
use permafrost_retention::PolicyError;
use permafrost_store::StoreError;
use serde::{Deserialize, Serialize};

/// Name of the file of a single node.
const FILE: &str = "retention.json";

/// Version of the signed document.
const VERSION: u64 = 1;

/// Returns the keeper of a single node.
pub(super) fn in_file(data_dir: &Path) -> Box<dyn PolicyKeeper> {
    Box::new(PolicyFile::new(data_dir.join(FILE)))
}

/// Returns the receiver that records each removal by a rule in the audit log.
pub(super) fn recorded_by(audit: &Arc<Audit>) -> RemovalReceiver {
    let audit = Arc::clone(audit);
    Box::new(move |checkpoint, reason| {
        let event = AuditedRequest::removed_by(reason.word(), checkpoint);
        audit.record(&Who::rules(), &event, Ok(()));
    })
}

/// The policies of a cluster, in its registry.
///
/// Any client that may write to etcd could write policies that remove everything. So the node that sets them signs
/// them, and the others believe only a node whose certificate they trust.
pub struct SignedPolicies {
    registry: EtcdRegistry,
    identity: Arc<ReloadingIdentity>,
}

/// The document with its signature.
#[derive(Serialize, Deserialize)]
struct Document {
    v: u64,
    /// The document, as text.
    policies: String,
    signed: Signed,
}

impl SignedPolicies {
    /// Returns the keeper over a registry, which signs with this identity and believes the nodes that it trusts.
    #[must_use]
    pub fn new(registry: EtcdRegistry, identity: Arc<ReloadingIdentity>) -> Self {
        Self { registry, identity }
    }

    /// Signs a document, as it is put into the registry.
    ///
    /// # Errors
    /// The key cannot sign.
    pub fn sign(&self, policies: &[u8]) -> Result<Vec<u8>, StoreError> {
        let policies = String::from_utf8_lossy(policies).into_owned();
        let signed = self.identity.sign(statement(&policies).as_bytes());
        let unsigned = |reason: String| StoreError::port(PolicyError::Unsigned { reason });
        let document = Document {
            v: VERSION,
            signed: signed.map_err(|error| unsigned(error.to_string()))?,
            policies,
        };
        // Numbers and strings always serialize.
        Ok(serde_json::to_vec(&document).unwrap_or_default())
    }

    /// Returns the document that a trusted node has signed.
    fn believe(&self, value: &[u8]) -> Result<Vec<u8>, PolicyError> {
        let document: Document =
            serde_json::from_slice(value).map_err(|source| PolicyError::Damaged { source })?;
        if document.v != VERSION {
            return Err(PolicyError::Version {
                found: document.v,
                known: VERSION,
            });
        }
        let unsigned = |reason: String| PolicyError::Unsigned { reason };
        let statement = statement(&document.policies);
        let signer = self.identity.signer(statement.as_bytes(), &document.signed);
        let signer = signer.map_err(|error| unsigned(error.to_string()))?;
        if signer.role != Role::Node {
            return Err(unsigned(format!(
                "{} {} has signed them, who is no node",
                signer.role, signer.name
            )));
        }
        Ok(document.policies.into_bytes())
    }
}

/// Returns the statement that is signed.
fn statement(policies: &str) -> String {
    format!("the policies of retention are {policies}")
}

impl PolicyKeeper for SignedPolicies {
    fn read(&self) -> Result<Option<Vec<u8>>, StoreError> {
        let value = self.registry.retention()?;
        let believed = value.map(|value| self.believe(&value)).transpose();
        believed.map_err(StoreError::port)
    }

    fn replace(&self, before: Option<&[u8]>, after: &[u8]) -> Result<bool, StoreError> {
        let value = self.registry.retention()?;
        let present = value.as_deref().map(|value| self.believe(value));
        let present = present.transpose().map_err(StoreError::port)?;
        if present.as_deref() != before {
            return Ok(false);
        }
        self.registry.replace_retention(value, self.sign(after)?)
    }
}
