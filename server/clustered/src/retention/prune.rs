//! Carries the rules of retention out.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use permafrost_catalog::Stored;
use permafrost_protocol::control::{self, request};
use permafrost_protocol::manifest::namespace_of;
use permafrost_retention::{
    Charged, Generation, Incoming, NamespacePolicy, Policies, Reason, charge, decide,
};
use permafrost_store::{
    MissingObject, ReadingError, SealingError, StoreError, checkpoint_name, job_name,
};

use crate::ClusteredStore;

/// Pause after each removal while dumps come in.
const PAUSE: Duration = Duration::from_millis(20);

/// Most checkpoints that are remembered to have been found as they are listed.
const MAX_CONFIRMED: usize = 16_384;

/// Most generations that a reply names: a message has a limit.
const MAX_NAMED: usize = 65_536;

/// A listed generation.
pub(super) struct Listed {
    pub(super) record: control::Checkpoint,
    /// True if it can be restored: it is no pre-dump, and a copy of it is not known to be damaged.
    pub(super) whole: bool,
}

/// A generation that goes by the rules.
struct Doomed<'a> {
    at: usize,
    record: &'a control::Checkpoint,
    reason: Reason,
    bytes: u64,
}

/// Result of carrying out a decision about a namespace.
#[derive(Default)]
pub(super) struct CarriedOut {
    pub(super) pruned: control::Pruned,
    pub(super) exceeded: Option<permafrost_retention::Exceeded>,
}

impl ClusteredStore {
    /// Removes what the rules of retention do not keep, or (`dry_run`) says what that is.
    ///
    /// # Errors
    /// The rules or the checkpoints cannot be read; there is no such job. A generation that could not be removed is no
    /// error: the reply says why.
    pub fn prune(&self, prune: &request::Prune) -> Result<control::Pruned, StoreError> {
        let job = match prune.job.as_str() {
            "" => None,
            job => Some(job_name(job)?),
        };
        let job = job.as_ref().map(|job| job.as_str());
        let policies = self.refresh_policies()?;
        let listed = self.listed_generations(job)?;
        if let Some(job) = job.filter(|_| listed.is_empty()) {
            return Err(StoreError::NotFound(MissingObject::Job(job.to_owned())));
        }
        let mut all = control::Pruned::default();
        for (namespace, listed) in by_namespace(listed) {
            if !prune.namespace.is_empty() && prune.namespace != namespace {
                continue;
            }
            let policy = policies.of(&namespace).cloned().unwrap_or_default();
            let policy = if job.is_some() {
                of_jobs(policy)
            } else {
                policy
            };
            let done = self.carry_out(&policy, &listed, None, prune.dry_run, &|| false);
            add(&mut all, done.pruned);
        }
        if all.generations.len() > MAX_NAMED {
            all.generations.retain(|one| one.goes);
            all.generations.truncate(MAX_NAMED);
        }
        Ok(all)
    }

    /// Applies the rules to everything, and counts the use of the namespaces. `decides`: this node removes; otherwise
    /// it only counts, as another node of the cluster removes. Ends early if `stopped` returns true.
    ///
    /// # Errors
    /// The rules or the checkpoints cannot be read.
    pub fn apply_retention(
        &self,
        decides: bool,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(), StoreError> {
        let policies = self.refresh_policies()?;
        let counts = self.services.is_some() && limits_any(&policies);
        if policies.is_empty() || !(decides || counts) {
            return Ok(());
        }
        let namespaces = policies.namespaces();
        let mut used: BTreeMap<String, Stored> = namespaces
            .map(|namespace| (namespace.to_owned(), Stored::default()))
            .collect();
        for (namespace, mut listed) in by_namespace(self.listed_generations(None)?) {
            let Some(policy) = policies.of(&namespace) else {
                continue;
            };
            if decides {
                let done = self.carry_out(policy, &listed, None, false, stopped);
                let gone = done.pruned.generations.iter().zip(&listed);
                let gone = gone.filter(|(one, _)| one.goes && one.error.is_empty());
                let gone: HashSet<String> =
                    gone.map(|(_, listed)| listed.record.id.clone()).collect();
                listed.retain(|one| !gone.contains(&one.record.id));
            }
            used.insert(namespace, use_of(&listed));
        }
        *self.retention.used.lock() = Some((Instant::now(), used));
        Ok(())
    }

    /// Applies the rules to the jobs that have had a dump since the last call. Ends early if `stopped` returns true.
    pub fn apply_to_sealed(&self, stopped: &dyn Fn() -> bool) {
        let sealed = std::mem::take(&mut *self.retention.sealed.lock());
        for job in sealed {
            if stopped() {
                return;
            }
            if let Err(error) = self.apply_to_job(&job, stopped) {
                tracing::warn!(event = "retention-not-applied-to-job", job, %error, "retention not applied; the next round does it");
            }
        }
    }

    fn apply_to_job(&self, job: &str, stopped: &dyn Fn() -> bool) -> Result<(), StoreError> {
        let policies = self.retention.policies();
        let Ok(namespace) = namespace_of(job) else {
            return Ok(());
        };
        let Some(policy) = policies.of(namespace) else {
            return Ok(());
        };
        // The whole namespace only if it has more than it may have.
        let whole = self.is_over(namespace, policy, 0, 0);
        let (policy, listed) = self.in_force(policy, (namespace, job), whole)?;
        self.carry_out(&policy, &listed, None, false, stopped);
        Ok(())
    }

    /// Refuses the removal of the last generation of a job that can be restored.
    ///
    /// # Errors
    /// [`SealingError::LastOne`]; the checkpoints cannot be listed.
    pub(crate) fn check_not_last(&self, record: &control::Checkpoint) -> Result<(), StoreError> {
        if record.generation == 0 {
            return Ok(());
        }
        // Nearly always the newest one is another one, and good: not all of them have to be listed.
        let head = match self.registry() {
            Some(registry) => {
                let head = registry.find(&record.job, 0)?;
                let good = head.filter(|head| head.good().next().is_some());
                good.map(|head| head.checkpoint)
            }
            None => {
                let head = self.local.record(&record.job, None)?;
                head.filter(|head| self.local.damage(&head.id).is_none())
            }
        };
        if head.is_some_and(|head| head.id != record.id && is_dump(&head)) {
            return Ok(());
        }
        let listed = self.listed_generations(Some(&record.job))?;
        if listed
            .iter()
            .any(|one| one.whole && one.record.id != record.id)
        {
            return Ok(());
        }
        Err(SealingError::LastOne {
            checkpoint: checkpoint_name(record),
        }
        .into())
    }

    /// Returns the generations that a decision about a job looks at, and the policy for them: those of the whole
    /// `namespace` if it has more than it may have, else of the job alone, without the limits of the namespace.
    ///
    /// # Errors
    /// The checkpoints cannot be listed.
    pub(super) fn in_force(
        &self,
        policy: &NamespacePolicy,
        (namespace, job): (&str, &str),
        whole: bool,
    ) -> Result<(NamespacePolicy, Vec<Listed>), StoreError> {
        let mut listed = self.listed_generations((!whole).then_some(job))?;
        listed.retain(|one| namespace_of(&one.record.job) == Ok(namespace));
        let policy = if whole {
            policy.clone()
        } else {
            of_jobs(policy.clone())
        };
        Ok((policy, listed))
    }

    /// Lists the generations of a job, or all, by job and generation. Unlike the listing for people, it fails where
    /// the registry does not answer.
    pub(super) fn listed_generations(&self, job: Option<&str>) -> Result<Vec<Listed>, StoreError> {
        let mut own = self.local.records(job)?;
        own.retain(|record| record.generation > 0);
        let mut listed = Vec::new();
        if let Some(registry) = self.registry() {
            let entries = registry.list(job.unwrap_or_default())?;
            let ids: HashSet<String> = entries
                .iter()
                .map(|entry| entry.checkpoint.id.clone())
                .collect();
            own.retain(|record| !ids.contains(&record.id) && !self.was_committed_here(&record.id));
            let entries = entries
                .into_iter()
                .filter(|entry| entry.checkpoint.generation > 0);
            listed.extend(entries.map(|entry| Listed {
                whole: is_dump(&entry.checkpoint) && entry.good().next().is_some(),
                record: entry.into_record(),
            }));
        }
        let has_damage = self.local.has_damage();
        listed.extend(own.into_iter().map(|record| Listed {
            whole: is_dump(&record) && !(has_damage && self.local.damage(&record.id).is_some()),
            record,
        }));
        listed.sort_by(|a, b| {
            let key = |one: &'_ Listed| (one.record.generation, one.record.id.clone());
            a.record
                .job
                .cmp(&b.record.job)
                .then_with(|| key(a).cmp(&key(b)))
        });
        Ok(listed)
    }

    /// Decides about the generations of a namespace and removes what goes. A generation that cannot be removed keeps
    /// the reason.
    pub(super) fn carry_out(
        &self,
        policy: &NamespacePolicy,
        listed: &[Listed],
        incoming: Option<&Incoming>,
        dry_run: bool,
        stopped: &dyn Fn() -> bool,
    ) -> CarriedOut {
        let in_use = self.in_use();
        let generation = |one| generation(one, &in_use);
        let generations: Vec<Generation> = listed.iter().map(generation).collect();
        let now_unix_ms = self.retention.now_unix_ms();
        let decision = decide(policy, &generations, now_unix_ms, incoming);
        let both = || listed.iter().zip(&decision.verdicts);
        let mut done = CarriedOut {
            exceeded: decision.exceeded.clone(),
            ..CarriedOut::default()
        };
        let described = both().map(|(one, verdict)| control::PrunedGeneration {
            job: one.record.job.clone(),
            generation: one.record.generation,
            created_unix_ms: one.record.created_unix_ms,
            bytes: verdict.bytes,
            rule: verdict.reason.word().to_owned(),
            goes: verdict.reason.removes(),
            error: String::new(),
        });
        done.pruned.generations = described.collect();
        let mut jobs: BTreeMap<&str, Vec<Doomed<'_>>> = BTreeMap::new();
        for (at, (one, verdict)) in both().enumerate() {
            if verdict.reason.removes() {
                jobs.entry(&one.record.job).or_default().push(Doomed {
                    at,
                    record: &one.record,
                    reason: verdict.reason,
                    bytes: verdict.bytes,
                });
            }
        }
        for (job, doomed) in jobs {
            if stopped() {
                break;
            }
            let removed = match dry_run {
                true => Ok(doomed.iter().map(|_| Ok(())).collect()),
                false => self.remove_of_job(job, &doomed, stopped),
            };
            let removed = removed.unwrap_or_else(|error| {
                let message = control::Error::from(error).message;
                doomed
                    .iter()
                    .map(|_| Err(message.clone()))
                    .collect::<Vec<_>>()
            });
            for (one, removed) in doomed.iter().zip(removed) {
                match removed {
                    Ok(()) => {
                        done.pruned.removed += 1;
                        let bytes = done.pruned.removed_bytes.saturating_add(one.bytes);
                        done.pruned.removed_bytes = bytes;
                    }
                    Err(message) => {
                        self.retention.numbers.failed.add(1);
                        tracing::warn!(
                            event = "retention-removal-failed",
                            job,
                            generation = one.record.generation,
                            reason = message,
                            "not removed by retention"
                        );
                        done.pruned.generations[one.at].error = message;
                    }
                }
            }
        }
        done
    }

    /// Returns the checkpoints that are being read, here or, as far as is known, on other nodes.
    fn in_use(&self) -> HashSet<String> {
        let elsewhere = self.remote_nodes().map(|remote| remote.in_use());
        let mut in_use: HashSet<String> = self.local.in_use().into_iter().collect();
        in_use.extend(elsewhere.into_iter().flatten());
        in_use
    }

    /// Removes generations of a job that go by the rules: each under its own name, unpinned, unread, and only while
    /// another one that can be restored is there. Returns the outcome of each.
    fn remove_of_job(
        &self,
        job: &str,
        doomed: &[Doomed<'_>],
        stopped: &dyn Fn() -> bool,
    ) -> Result<Vec<Result<(), String>>, StoreError> {
        let _removing = self.retention.removing.lock();
        // The decision may be old by now.
        let listed = self.listed_generations(Some(job))?;
        let ids: HashSet<&str> = doomed.iter().map(|one| one.record.id.as_str()).collect();
        let stays = |one: &&Listed| one.whole && !ids.contains(one.record.id.as_str());
        let newest_doomed = doomed.iter().map(|one| one.record.generation).max();
        let mut witness = None;
        for one in listed.iter().rev().filter(stays) {
            // An entry of the registry that no node knows of must not push others out of the last N.
            let counts = Some(one.record.generation) > newest_doomed && self.services.is_some();
            if witness.is_none() || counts {
                self.confirm(&one.record)?;
                witness.get_or_insert(&one.record);
            }
        }
        let no_other = |one: &Doomed<'_>| SealingError::NoOther {
            checkpoint: checkpoint_name(one.record),
        };
        let mut outcomes = Vec::with_capacity(doomed.len());
        for one in doomed {
            let now = listed.iter().find(|now| now.record.id == one.record.id);
            let removed = match (now, witness) {
                _ if stopped() => Err("stopped".to_owned()),
                // Removed by somebody else.
                (None, _) => Ok(()),
                (_, None) => Err(no_other(one).to_string()),
                (Some(now), Some(witness)) => self
                    .remove_one(&now.record, one.reason, one.bytes, witness)
                    .map_err(|error| control::Error::from(error).message),
            };
            outcomes.push(removed);
        }
        Ok(outcomes)
    }

    fn remove_one(
        &self,
        record: &control::Checkpoint,
        reason: Reason,
        bytes: u64,
        witness: &control::Checkpoint,
    ) -> Result<(), StoreError> {
        let checkpoint = || checkpoint_name(record);
        if record.pinned {
            return Err(SealingError::Pinned {
                checkpoint: checkpoint(),
            }
            .into());
        }
        if is_in(&self.in_use(), &record.id) {
            return Err(SealingError::InUse {
                checkpoint: checkpoint(),
            }
            .into());
        }
        if self.services.is_some() {
            self.confirm(record)?;
        }
        self.delete_while(record, witness)?;
        (self.retention.told)(record, reason);
        self.retention.numbers.add(reason, bytes);
        tracing::info!(
            event = "retention-removed",
            checkpoint = checkpoint(),
            rule = reason.word(),
            "removed by retention"
        );
        if self.local.is_receiving() {
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Takes a checkpoint off the list while another one is on it, and removes it here.
    fn delete_while(
        &self,
        record: &control::Checkpoint,
        witness: &control::Checkpoint,
    ) -> Result<(), StoreError> {
        if self.local.holds(&record.id) {
            self.local.check_listed(record)?;
        }
        self.withdraw_by(record, &|registry| registry.withdraw_while(record, witness))?;
        self.local.delete(record)
    }

    /// Checks that a node has a checkpoint as it is listed: its manifest can be read, and says the same job,
    /// generation and time.
    fn confirm(&self, record: &control::Checkpoint) -> Result<(), StoreError> {
        if self.retention.confirmed.lock().contains(&record.id) {
            return Ok(());
        }
        let created_unix_ms = if self.local.holds(&record.id) {
            self.local.check_listed(record)?;
            self.local.manifest(&record.id)?.created_unix_ms
        } else {
            let remote = self.open_remote(record)?;
            permafrost_criu::source::CheckpointSource::manifest(&remote).created_unix_ms
        };
        if created_unix_ms != record.created_unix_ms {
            return Err(ReadingError::Mislisted {
                name: checkpoint_name(record),
                id: record.id.clone(),
            }
            .into());
        }
        let mut confirmed = self.retention.confirmed.lock();
        if confirmed.len() >= MAX_CONFIRMED {
            confirmed.clear();
        }
        confirmed.insert(record.id.clone());
        Ok(())
    }
}

fn generation(one: &Listed, in_use: &HashSet<String>) -> Generation {
    let record = &one.record;
    Generation {
        job: record.job.clone(),
        size: Charged::from(record),
        created_unix_ms: record.created_unix_ms,
        pinned: record.pinned,
        whole: one.whole,
        in_use: is_in(in_use, &record.id),
    }
}

fn is_in(in_use: &HashSet<String>, id: &str) -> bool {
    in_use.contains(id) || in_use.contains("*")
}

fn is_dump(record: &control::Checkpoint) -> bool {
    record.kind == "full"
}

/// Returns a policy without the limits of the namespace, for a decision about some of its jobs.
fn of_jobs(mut policy: NamespacePolicy) -> NamespacePolicy {
    if let Some(rule) = &mut policy.namespace {
        rule.max_bytes = None;
        rule.max_checkpoints = None;
    }
    policy
}

fn limits_any(policies: &Policies) -> bool {
    let mut namespaces = policies.namespaces();
    namespaces.any(|namespace| policies.of(namespace).and_then(super::limits_of).is_some())
}

fn by_namespace(listed: Vec<Listed>) -> BTreeMap<String, Vec<Listed>> {
    let mut namespaces: BTreeMap<String, Vec<Listed>> = BTreeMap::new();
    for one in listed {
        // A name that is not valid is in no namespace.
        if let Ok(namespace) = namespace_of(&one.record.job) {
            let namespace = namespace.to_owned();
            namespaces.entry(namespace).or_default().push(one);
        }
    }
    namespaces
}

/// Returns what listed generations of a namespace, by job and generation, count.
pub(super) fn use_of(listed: &[Listed]) -> Stored {
    let mut used = Stored::default();
    let mut before: Option<&control::Checkpoint> = None;
    for one in listed {
        let older = before.filter(|older| older.job == one.record.job);
        let bytes = charge(
            &Charged::from(&one.record),
            older.map(|older| older.generation),
        );
        used.bytes = used.bytes.saturating_add(bytes);
        used.checkpoints += 1;
        before = Some(&one.record);
    }
    used
}

fn add(all: &mut control::Pruned, more: control::Pruned) {
    all.generations.extend(more.generations);
    all.removed += more.removed;
    all.removed_bytes = all.removed_bytes.saturating_add(more.removed_bytes);
}
