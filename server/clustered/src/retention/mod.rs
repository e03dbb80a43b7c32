//! Retention: the policies of this node or cluster, and what is removed by them.
//!
//! `permafrost-retention` decides; this module keeps the policies, gathers what the decision needs, and carries it out
//! so that a decision from an old listing cannot remove the last good generation of a job.

mod keeper;
mod prune;
mod room;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard, RwLock};
use permafrost_catalog::Stored;
use permafrost_protocol::control::{self, request};
use permafrost_quotas::Quota;
use permafrost_retention::{
    AgeClock, NamespacePolicy, OverQuota, Policies, PolicyError, Reason, Settings,
};
use permafrost_store::clock::unix_ms;
use permafrost_store::{Counter, StoreError};

use crate::ClusteredStore;

pub use keeper::{PolicyFile, PolicyKeeper, PolicyMemory};

/// Attempts to change the policies while others change them, too.
const ATTEMPTS: usize = 8;

/// Most jobs that wait for their rules to be applied after a seal. Beyond that the next round does it.
const MAX_SEALED: usize = 4096;

/// Receives each removal by a rule: the audit log.
pub type RemovalReceiver = Box<dyn Fn(&control::Checkpoint, Reason) + Send + Sync>;

/// State of the retention of a store.
pub(crate) struct Retention {
    keeper: Box<dyn PolicyKeeper>,
    told: RemovalReceiver,
    /// Policies as last read.
    policies: RwLock<Arc<Policies>>,
    clock: Mutex<AgeClock>,
    began: Instant,
    /// Held while generations are chosen and removed: two removals at once could each take the other for what stays.
    removing: Mutex<()>,
    /// Jobs with a new generation, to which the rules have not been applied yet.
    sealed: Mutex<BTreeSet<String>>,
    /// Checkpoints by id that a holder was found to have as they are listed.
    confirmed: Mutex<HashSet<String>>,
    /// Use of the namespaces in a cluster, and when it was counted.
    used: Mutex<Option<(Instant, BTreeMap<String, Stored>)>>,
    numbers: RetentionNumbers,
}

/// Removals by rules since the start.
#[derive(Debug, Default)]
pub struct RetentionNumbers {
    removed: BTreeMap<&'static str, (Counter, Counter)>,
    /// Generations that were not removed although they go by the rules.
    pub failed: Counter,
}

impl RetentionNumbers {
    fn new() -> Self {
        let rules = Reason::ALL.into_iter().filter(|reason| reason.removes());
        Self {
            removed: rules
                .map(|reason| (reason.word(), Default::default()))
                .collect(),
            failed: Counter::default(),
        }
    }

    fn add(&self, reason: Reason, bytes: u64) {
        if let Some((checkpoints, counted)) = self.removed.get(reason.word()) {
            checkpoints.add(1);
            counted.add(bytes);
        }
    }

    /// Returns the removals by rule: checkpoints, and the bytes that they counted in quotas.
    pub fn removed(&self) -> impl Iterator<Item = (&'static str, u64, u64)> + '_ {
        let removed = self.removed.iter();
        removed.map(|(rule, (checkpoints, bytes))| (*rule, checkpoints.value(), bytes.value()))
    }
}

/// Use and limits of a namespace that a policy limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyUsage {
    /// Name of the namespace.
    pub namespace: String,
    /// Use of the namespace.
    pub used: Stored,
    /// Most bytes by its policy.
    pub max_bytes: Option<u64>,
    /// Most checkpoints by its policy.
    pub max_checkpoints: Option<u64>,
}

impl Retention {
    pub(crate) fn new(keeper: Box<dyn PolicyKeeper>, told: RemovalReceiver) -> Self {
        Self {
            keeper,
            told,
            policies: RwLock::default(),
            clock: Mutex::default(),
            began: Instant::now(),
            removing: Mutex::default(),
            sealed: Mutex::default(),
            confirmed: Mutex::default(),
            used: Mutex::default(),
            numbers: RetentionNumbers::new(),
        }
    }

    fn policies(&self) -> Arc<Policies> {
        Arc::clone(&self.policies.read())
    }

    /// Returns the time that ages are counted from.
    fn now_unix_ms(&self) -> u64 {
        self.clock.lock().now(unix_ms(), self.began.elapsed())
    }
}

impl ClusteredStore {
    /// Returns the removals by rules.
    #[must_use]
    pub fn retention_numbers(&self) -> &RetentionNumbers {
        &self.retention.numbers
    }

    /// Lists the rules of retention of a namespace, or of all with an empty name.
    ///
    /// # Errors
    /// The rules cannot be read.
    pub fn retention_rules(&self, namespace: &str) -> Result<control::RetentionRules, StoreError> {
        let policies = self.refresh_policies()?;
        Ok(rules_of(&policies, namespace))
    }

    /// Sets or removes a rule of retention, durably. Returns the rules of its namespace.
    ///
    /// # Errors
    /// The rule is not valid, or is not there; the rules cannot be read or written.
    pub fn set_retention(
        &self,
        set: &request::SetRetention,
    ) -> Result<control::RetentionRules, StoreError> {
        let rule = set.rule.clone().unwrap_or_default();
        for _ in 0..ATTEMPTS {
            let before = self.retention.keeper.read()?;
            let mut policies = decoded(before.as_deref())?;
            let changed = match set.remove {
                true => policies.remove(&rule.namespace, &rule.jobs),
                false => Settings::try_from(&rule)
                    .and_then(|settings| policies.set(&rule.namespace, &rule.jobs, settings)),
            };
            changed.map_err(StoreError::port)?;
            let after = policies.encode();
            if self.retention.keeper.replace(before.as_deref(), &after)? {
                return Ok(rules_of(&self.take_policies(policies), &rule.namespace));
            }
        }
        Err(StoreError::port(PolicyError::Busy))
    }

    /// Reads the policies anew. Policies that cannot be used are none: nothing is removed or refused by them.
    ///
    /// # Errors
    /// They cannot be read, or make no sense.
    pub fn refresh_policies(&self) -> Result<Arc<Policies>, StoreError> {
        let document = self.retention.keeper.read()?;
        match decoded(document.as_deref()) {
            Ok(policies) => Ok(self.take_policies(policies)),
            Err(error) => {
                self.take_policies(Policies::default());
                Err(error)
            }
        }
    }

    /// Uses policies from now on. On a single node those that refuse dumps become quotas of the store, which checks
    /// them once more when the size of the dump is known.
    fn take_policies(&self, policies: Policies) -> Arc<Policies> {
        if self.services.is_none() {
            let refusing = policies.namespaces().filter_map(|namespace| {
                let rule = policies.of(namespace)?.namespace.as_ref()?;
                let quota = Quota {
                    bytes: rule.max_bytes,
                    checkpoints: rule.max_checkpoints,
                    ..Quota::default()
                };
                let refuses = rule.over_quota != Some(OverQuota::RemoveOldest);
                (refuses && quota != Quota::default()).then(|| (namespace.to_owned(), quota))
            });
            self.local.quotas().set_policies(refusing.collect());
        }
        let policies = Arc::new(policies);
        *self.retention.policies.write() = Arc::clone(&policies);
        policies
    }

    /// Returns the use and limits of the namespaces that a policy limits: on a single node exactly, in a cluster as it
    /// was counted last.
    #[must_use]
    pub fn policy_usage(&self) -> Vec<PolicyUsage> {
        let policies = self.retention.policies();
        let limited = policies.namespaces().filter_map(|namespace| {
            let limits = limits_of(policies.of(namespace)?)?;
            Some(PolicyUsage {
                namespace: namespace.to_owned(),
                used: self.namespace_use(namespace),
                max_bytes: limits.max_bytes,
                max_checkpoints: limits.max_checkpoints,
            })
        });
        limited.collect()
    }

    /// Returns what a namespace uses: on a single node exactly, in a cluster as it was counted last.
    fn namespace_use(&self, namespace: &str) -> Stored {
        if self.services.is_none() {
            let used = self.local.usage_of(namespace);
            return Stored {
                bytes: used.bytes,
                checkpoints: used.checkpoints,
            };
        }
        let used = self.retention.used.lock();
        let used = used.as_ref().and_then(|(_, used)| used.get(namespace));
        used.copied().unwrap_or_default()
    }

    /// Begins a removal, which excludes others on this node.
    pub(crate) fn begin_removal(&self) -> MutexGuard<'_, ()> {
        self.retention.removing.lock()
    }

    /// Notes that a job has a new generation, for the next [`Self::apply_to_sealed`].
    pub fn note_sealed(&self, record: &control::Checkpoint) {
        let policies = self.retention.policies();
        let namespace = permafrost_protocol::manifest::namespace_of(&record.job);
        if namespace.is_ok_and(|namespace| policies.of(namespace).is_some()) {
            let mut sealed = self.retention.sealed.lock();
            if sealed.len() < MAX_SEALED {
                sealed.insert(record.job.clone());
            }
        }
    }
}

/// Returns the rule that limits a whole namespace, if there is one.
fn limits_of(policy: &NamespacePolicy) -> Option<&Settings> {
    let rule = policy.namespace.as_ref();
    rule.filter(|rule| rule.max_bytes.is_some() || rule.max_checkpoints.is_some())
}

fn decoded(document: Option<&[u8]>) -> Result<Policies, StoreError> {
    let Some(document) = document else {
        return Ok(Policies::default());
    };
    Policies::decode(document).map_err(StoreError::port)
}

fn rules_of(policies: &Policies, namespace: &str) -> control::RetentionRules {
    let rules = policies.rules();
    let of = rules.filter(|rule| namespace.is_empty() || rule.namespace == namespace);
    control::RetentionRules {
        rules: of.collect(),
    }
}
