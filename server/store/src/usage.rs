//! Use and limits of namespaces on this node.

use std::collections::BTreeSet;
use std::sync::Arc;

use permafrost_protocol::control::NamespaceUsage;
use permafrost_protocol::manifest::namespace_of;

use super::{Store, StoreError};
use permafrost_quotas::{QuotaUsage, Quotas};

impl Store {
    /// Returns the quotas of namespaces.
    #[must_use]
    pub fn quotas(&self) -> &Arc<Quotas> {
        &self.quotas
    }

    /// Returns the use of a namespace, without reservations, which the queues count.
    pub fn usage_of(&self, namespace: &str) -> QuotaUsage {
        let stored = self.stored.stored(namespace);
        let sessions = self.sessions();
        let open = sessions.values().filter(|session| {
            session.failed_since().is_none() && namespace_of(&session.request.job) == Ok(namespace)
        });
        QuotaUsage {
            bytes: stored.bytes,
            checkpoints: stored.checkpoints,
            sessions: open.count() as u64,
            reservations: 0,
        }
    }

    /// Returns the use and limits of the namespaces that have a line of their own, or store something; none where
    /// there are no quotas.
    pub fn namespace_usage(&self, reserved: &dyn Fn(&str) -> u64) -> Vec<NamespaceUsage> {
        if !self.quotas.are_set() {
            return Vec::new();
        }
        let quotas = &self.quotas;
        let mut namespaces: BTreeSet<String> = quotas.namespaces().into_iter().collect();
        namespaces.extend(self.stored.namespaces());
        let described = namespaces.into_iter().map(|namespace| {
            let (used, quota) = (self.usage_of(&namespace), quotas.of(&namespace));
            NamespaceUsage {
                bytes: used.bytes,
                bytes_limit: quota.bytes,
                checkpoints: used.checkpoints,
                checkpoints_limit: quota.checkpoints,
                sessions: used.sessions,
                sessions_limit: quota.sessions,
                reservations: reserved(&namespace),
                reservations_limit: quota.reservations,
                priority_limit: quota.priority,
                namespace,
            }
        });
        described.collect()
    }

    /// Checks that a dump of `job` may be opened: its namespace has room for one more byte and checkpoint, and for
    /// one more session. Its real size is known, and checked, when it is sealed.
    ///
    /// # Errors
    /// A quota does not allow it.
    pub fn check_may_open(&self, job: &str) -> Result<(), StoreError> {
        let one = QuotaUsage {
            bytes: 1,
            checkpoints: 1,
            sessions: 1,
            reservations: 0,
        };
        self.check_quota(job, &one)
    }

    /// Checks that `more` may be stored for `job`.
    ///
    /// # Errors
    /// A quota does not allow it.
    pub fn check_may_store(
        &self,
        job: &str,
        bytes: u64,
        checkpoints: u64,
    ) -> Result<(), StoreError> {
        let more = QuotaUsage {
            bytes,
            checkpoints,
            ..QuotaUsage::default()
        };
        self.check_quota(job, &more)
    }

    /// Checks that an operation for `job` may have this priority.
    ///
    /// # Errors
    /// A quota does not allow it.
    pub fn check_priority(&self, job: &str, priority: u32) -> Result<(), StoreError> {
        let Ok(namespace) = namespace_of(job) else {
            return Ok(());
        };
        let checked = self
            .quotas
            .of(namespace)
            .check_priority(namespace, priority);
        Ok(checked?)
    }

    /// Checks the quota of the job's namespace. Pages without a job are in no namespace: they are counted once they
    /// are adopted.
    fn check_quota(&self, job: &str, more: &QuotaUsage) -> Result<(), StoreError> {
        let (true, Ok(namespace)) = (self.quotas.are_set(), namespace_of(job)) else {
            return Ok(());
        };
        let used = self.usage_of(namespace);
        let checked = self.quotas.of(namespace).check(namespace, &used, more);
        if checked.is_err() {
            self.counters.quota_refusals.add(1);
        }
        Ok(checked?)
    }
}
