//! Room for a dump that is about to come: a quota refuses it, or the oldest generations go first.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use permafrost_protocol::manifest::namespace_of;
use permafrost_quotas::QuotaError;
use permafrost_retention::{Exceeded, Incoming, NamespacePolicy, OverQuota, Settings};
use permafrost_store::StoreError;

use super::limits_of;
use super::prune::use_of;
use crate::ClusteredStore;

/// Shortest time between two counts of a cluster's namespaces for dumps that are refused.
const COUNT_AGAIN: Duration = Duration::from_secs(5);

impl ClusteredStore {
    /// Checks that the policies of retention have room for a dump of a job, and makes room where they say so.
    /// `expected_bytes` is the size of the whole dump, if known: only a job's first dump, or one that is not compared,
    /// takes as much.
    ///
    /// # Errors
    /// A quota has no room; the checkpoints cannot be listed.
    pub fn make_room(
        &self,
        job: &str,
        expected_bytes: u64,
        no_parent: bool,
    ) -> Result<(), StoreError> {
        let policies = self.retention.policies();
        let Ok(namespace) = namespace_of(job) else {
            return Ok(());
        };
        let limited = policies.of(namespace).filter(|policy| policy.has_limits());
        let Some(policy) = limited else {
            return Ok(());
        };
        let is_whole = no_parent || self.head(job)?.is_none();
        let bytes = if is_whole { expected_bytes.max(1) } else { 1 };
        let rule = policy.of_job(job);
        let limits_job = rule.limits.max_bytes.is_some() || rule.limits.max_checkpoints.is_some();
        let whole = self.is_over_now(namespace, policy, bytes)?;
        if !limits_job && !whole {
            return Ok(());
        }
        let (policy, listed) = self.in_force(policy, (namespace, job), whole)?;
        let incoming = Incoming {
            job: job.to_owned(),
            bytes,
        };
        let done = self.carry_out(&policy, &listed, Some(&incoming), false, &|| false);
        // What could not be removed leaves no room either.
        let failed = done
            .pruned
            .generations
            .iter()
            .any(|one| !one.error.is_empty());
        let exceeded = match done.exceeded {
            None if failed => {
                let left = self.listed_generations((!whole).then_some(job))?;
                let left = left
                    .into_iter()
                    .filter(|one| namespace_of(&one.record.job) == Ok(namespace));
                let left: Vec<_> = left.collect();
                self.decide_only(&policy, &left, &incoming)
            }
            exceeded => exceeded,
        };
        match exceeded {
            Some(exceeded) => Err(refusal(namespace, exceeded).into()),
            None => Ok(()),
        }
    }

    /// Returns the limit that refuses a dump if nothing is removed.
    fn decide_only(
        &self,
        policy: &NamespacePolicy,
        left: &[super::prune::Listed],
        incoming: &Incoming,
    ) -> Option<Exceeded> {
        let mut refusing = policy.clone();
        let rules = refusing
            .namespace
            .iter_mut()
            .chain(refusing.jobs.values_mut());
        for rule in rules {
            rule.over_quota = Some(OverQuota::Refuse);
        }
        let done = self.carry_out(&refusing, left, Some(incoming), true, &|| false);
        done.exceeded.map(|exceeded| Exceeded {
            removes_oldest: true,
            ..exceeded
        })
    }

    /// Returns true if a namespace has more than its policy allows, with a dump of so many bytes: as it was counted
    /// last.
    pub(super) fn is_over(
        &self,
        namespace: &str,
        policy: &NamespacePolicy,
        bytes: u64,
        checkpoints: u64,
    ) -> bool {
        let Some(limits) = limits_of(policy) else {
            return false;
        };
        let used = self.namespace_use(namespace);
        exceeds(
            limits,
            used.bytes.saturating_add(bytes),
            used.checkpoints.saturating_add(checkpoints),
        )
    }

    /// As [`Self::is_over`] with one more checkpoint. In a cluster a namespace that is over is counted anew, but not
    /// for each of many dumps: those in between are refused by the count before.
    fn is_over_now(
        &self,
        namespace: &str,
        policy: &NamespacePolicy,
        bytes: u64,
    ) -> Result<bool, StoreError> {
        let used = self.retention.used.lock();
        let is_counted = used
            .as_ref()
            .is_some_and(|(_, used)| used.contains_key(namespace));
        drop(used);
        if self.services.is_some() && !is_counted && limits_of(policy).is_some() {
            self.count(namespace)?;
        }
        if !self.is_over(namespace, policy, bytes, 1) {
            return Ok(false);
        }
        let removes = |limits: &Settings| limits.over_quota == Some(OverQuota::RemoveOldest);
        let counted = self.retention.used.lock().as_ref().map(|(at, _)| *at);
        let is_fresh = counted.is_some_and(|at| at.elapsed() < COUNT_AGAIN);
        let limits = limits_of(policy);
        let Some(limits) = limits.filter(|limits| self.services.is_some() && !removes(limits))
        else {
            return Ok(true);
        };
        if !is_fresh {
            self.count(namespace)?;
        }
        let used = self.namespace_use(namespace);
        if !exceeds(
            limits,
            used.bytes.saturating_add(bytes),
            used.checkpoints + 1,
        ) {
            return Ok(false);
        }
        let (what, limit, used) = match limits.max_bytes {
            Some(limit) if used.bytes.saturating_add(bytes) > limit => ("bytes", limit, used.bytes),
            _ => {
                let limit = limits.max_checkpoints.unwrap_or(u64::MAX);
                ("checkpoints", limit, used.checkpoints)
            }
        };
        let exceeded = Exceeded {
            job: String::new(),
            what,
            limit,
            used,
            removes_oldest: false,
        };
        Err(refusal(namespace, exceeded).into())
    }

    /// Counts the use of a namespace of a cluster.
    fn count(&self, namespace: &str) -> Result<(), StoreError> {
        let mut listed = self.listed_generations(None)?;
        listed.retain(|one| namespace_of(&one.record.job) == Ok(namespace));
        let mut used = self.retention.used.lock();
        let (at, used) = used.get_or_insert_with(|| (Instant::now(), BTreeMap::new()));
        *at = Instant::now();
        used.insert(namespace.to_owned(), use_of(&listed));
        Ok(())
    }
}

fn exceeds(limits: &Settings, bytes: u64, checkpoints: u64) -> bool {
    limits.max_bytes.is_some_and(|limit| bytes > limit)
        || limits
            .max_checkpoints
            .is_some_and(|limit| checkpoints > limit)
}

fn refusal(namespace: &str, exceeded: Exceeded) -> QuotaError {
    QuotaError::Retention {
        scope: match exceeded.job.as_str() {
            "" => format!("namespace {namespace}"),
            job => format!("job {job}"),
        },
        what: exceeded.what,
        limit: exceeded.limit,
        used: exceeded.used,
        removes_oldest: exceeded.removes_oldest,
    }
}
