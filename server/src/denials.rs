//! Certificates that are refused: the node's own list, and the cluster's, which reaches every node through the
//! registry.
//!
//! The registry only ever adds to a node's list, which is kept in its data directory: a thief of a node's key most
//! likely has the node's access to etcd, too, and must not be able to take the denial back. So an operator takes it
//! back on each node.

use std::sync::Arc;

use parking_lot::Mutex;
use permafrost_cluster::{EtcdRegistry, HeardDenials};
use permafrost_identity::{Denial, IdentityError, ReloadingIdentity};
use permafrost_protocol::control::{self, request};
use permafrost_store::StoreError;

use crate::error::SetupError;

/// Name of the list in the data directory.
pub const DENIED_FILE: &str = permafrost_identity::DENIED;

/// The lists of a node.
pub struct DenialLists {
    identity: Arc<ReloadingIdentity>,
    registry: Option<EtcdRegistry>,
    /// The cluster's list that was taken in last: id of etcd's data, and revision of the list.
    heard: Mutex<(String, i64)>,
}

impl DenialLists {
    /// Makes the lists of a node with this identity and, in a cluster, its registry.
    #[must_use]
    pub fn new(identity: Arc<ReloadingIdentity>, registry: Option<EtcdRegistry>) -> Self {
        Self {
            identity,
            registry,
            heard: Mutex::default(),
        }
    }

    /// Denies certificates, or takes denials back. A request without entries only returns the list.
    ///
    /// # Errors
    /// An entry is invalid, the list cannot be written, or the registry does not answer.
    pub fn answer(&self, deny: &request::Deny) -> Result<control::Denials, StoreError> {
        let denials = parse(&deny.entries)?;
        let changed = match (denials.is_empty(), deny.take_back) {
            (true, _) => 0,
            (false, false) => self.deny(&denials)?,
            (false, true) => self.take_back(&denials)?,
        };
        Ok(control::Denials {
            entries: self
                .identity
                .denied()
                .iter()
                .map(Denial::to_string)
                .collect(),
            changed: changed as u64,
        })
    }

    /// Denies on this node first, so that the certificates are refused here whether or not the registry answers.
    fn deny(&self, denials: &[Denial]) -> Result<usize, StoreError> {
        let added = self.identity.deny(denials).map_err(refused)?;
        tracing::warn!(
            event = "certificates-denied",
            entries = words(denials),
            "certificates are denied"
        );
        let Some(registry) = &self.registry else {
            return Ok(added);
        };
        let entries: Vec<String> = denials.iter().map(Denial::to_string).collect();
        registry
            .deny(&entries)
            .map_err(|error| SetupError::DeniedHereOnly(Box::new(error)))?;
        Ok(added)
    }

    /// Removes denials from the registry first, because the registry would add them again otherwise.
    fn take_back(&self, denials: &[Denial]) -> Result<usize, StoreError> {
        if let Some(registry) = &self.registry {
            let entries: Vec<String> = denials.iter().map(Denial::to_string).collect();
            let mut heard = self.heard.lock();
            // A list that was read before and is taken in later would bring them back.
            heard.1 = heard.1.max(registry.undeny(&entries)?);
        }
        let taken = self.identity.undeny(denials).map_err(refused)?;
        tracing::warn!(
            event = "denials-taken-back",
            entries = words(denials),
            "denials are taken back on this node"
        );
        Ok(taken)
    }

    /// Puts this node's list into the registry after the registry's data was lost.
    ///
    /// # Errors
    /// The registry does not answer.
    pub fn list_again(&self) -> Result<(), StoreError> {
        let list = self.identity.denied();
        match &self.registry {
            Some(registry) if !list.is_empty() => {
                let entries: Vec<String> = list.iter().map(Denial::to_string).collect();
                registry.deny(&entries)
            }
            _ => Ok(()),
        }
    }

    /// Adds the cluster's list to this node's: certificates on it are denied here, too.
    pub fn hear(&self, list: &HeardDenials) {
        let mut heard = self.heard.lock();
        if heard.0 == list.data && list.revision <= heard.1 {
            return;
        }
        // One line that makes no sense does not hide the others.
        let denials = list.entries.iter().filter_map(|entry| {
            let parsed = entry.parse::<Denial>();
            parsed
                .inspect_err(
                    |error| tracing::warn!(event = "denial-line-skipped", %error, "a line of the cluster's list is skipped"),
                )
                .ok()
        });
        match self.identity.deny(&denials.collect::<Vec<_>>()) {
            Ok(added) => {
                if added > 0 {
                    tracing::warn!(
                        event = "certificates-denied-by-cluster",
                        added,
                        "certificates are denied, as the cluster says"
                    );
                }
                *heard = (list.data.clone(), list.revision);
            }
            Err(error) => {
                tracing::error!(event = "cluster-denials-not-used", %error, "the cluster's list of denied certificates is not used")
            }
        }
    }
}

fn parse(entries: &[String]) -> Result<Vec<Denial>, StoreError> {
    let parsed = entries.iter().map(|entry| entry.parse::<Denial>());
    parsed.collect::<Result<_, _>>().map_err(refused)
}

fn words(denials: &[Denial]) -> String {
    let words: Vec<String> = denials.iter().map(Denial::to_string).collect();
    words.join(", ")
}

fn refused(error: IdentityError) -> StoreError {
    SetupError::from(error).into()
}

/// Returns the error of a node that has no certificates.
pub(crate) fn no_certificates() -> StoreError {
    SetupError::NoCertificate.into()
}
