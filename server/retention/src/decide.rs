//! The decision: what stays, what goes, and by which rule.

use std::collections::BTreeMap;
use std::fmt;

use crate::policy::JobPolicy;
use crate::usage::{Charged, charge};
use crate::{NamespacePolicy, OverQuota, Settings};

/// A generation of a job, as far as it matters for its retention.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Generation {
    /// Job, named in full.
    pub job: String,
    /// Number and sizes.
    pub size: Charged,
    /// Time of its seal, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// True if somebody has pinned it.
    pub pinned: bool,
    /// True if it can be restored: it is no pre-dump, and a copy of it is not known to be damaged.
    pub whole: bool,
    /// True if it is being read.
    pub in_use: bool,
}

/// A dump that is about to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// Job, named in full.
    pub job: String,
    /// Bytes that it will add, as far as known.
    pub bytes: u64,
}

/// Rule by which a generation stays or goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Stays: no rule says what to keep.
    NoRule,
    /// Stays: somebody has pinned it.
    Pinned,
    /// Stays: the newest generation of its job.
    Newest,
    /// Stays: the newest generation of its job that can be restored.
    NewestWhole,
    /// Stays: no generation of its job is known to be good.
    NoneWhole,
    /// Stays for now: it is being read.
    InUse,
    /// Stays: the rule says `keep-all`.
    KeepAll,
    /// Stays: among the last N.
    KeepLast,
    /// Stays: younger than the age.
    KeepWithin,
    /// Goes: no rule keeps it.
    Expired,
    /// Goes: the job has more than it may have.
    JobQuota,
    /// Goes: the namespace has more than it may have.
    NamespaceQuota,
}

impl Reason {
    /// All of the reasons.
    pub const ALL: [Self; 12] = [
        Self::NoRule,
        Self::Pinned,
        Self::Newest,
        Self::NewestWhole,
        Self::NoneWhole,
        Self::InUse,
        Self::KeepAll,
        Self::KeepLast,
        Self::KeepWithin,
        Self::Expired,
        Self::JobQuota,
        Self::NamespaceQuota,
    ];

    /// Returns true if a generation with this reason goes.
    #[must_use]
    pub const fn removes(self) -> bool {
        matches!(self, Self::Expired | Self::JobQuota | Self::NamespaceQuota)
    }

    /// Returns the word that JSON, metrics and the audit log have.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::NoRule => "no-rule",
            Self::Pinned => "pinned",
            Self::Newest => "newest",
            Self::NewestWhole => "newest-whole",
            Self::NoneWhole => "none-whole",
            Self::InUse => "in-use",
            Self::KeepAll => "keep-all",
            Self::KeepLast => "keep-last",
            Self::KeepWithin => "keep-within",
            Self::Expired => "expired",
            Self::JobQuota => "job-quota",
            Self::NamespaceQuota => "namespace-quota",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// Rulings about one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ruling {
    /// Rule that decides.
    pub reason: Reason,
    /// Bytes that it counts in quotas, before anything goes.
    pub bytes: u64,
}

/// A limit for which there is no room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// Job that has the limit; empty: the namespace.
    pub job: String,
    /// `bytes` or `checkpoints`.
    pub what: &'static str,
    /// Limit of the rule.
    pub limit: u64,
    /// Use after all that may go has gone.
    pub used: u64,
    /// True if what may go was to go first.
    pub removes_oldest: bool,
}

/// The decision about a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rulings {
    /// Verdicts, in the order of the generations that were given.
    pub verdicts: Vec<Ruling>,
    /// Limit that does not let the dump in for which room was wanted.
    pub exceeded: Option<Exceeded>,
}

/// Returns the position of a job's newest generation that can be restored. `of_job` is in the order of generations.
fn newest_whole(of_job: &[&Generation]) -> Option<usize> {
    of_job.iter().rposition(|generation| generation.whole)
}

/// Decides about the generations of one namespace.
///
/// For each job, in this order: what is pinned, the newest generation, the newest that can be restored and what is
/// being read stays, whatever the rules say; and everything, if none can be restored. Of the others those stay that a
/// rule keeps, or all if no rule says what to keep. Then, where the policy says `remove-oldest`, the oldest of the
/// job go until its quota is kept, and the oldest of all jobs until the namespace's is. `incoming` counts in both.
///
/// The order within a job is that of its generations: times are compared with `now_unix_ms` and between jobs only. A
/// generation from the future has no age.
#[must_use]
pub fn decide(
    policy: &NamespacePolicy,
    generations: &[Generation],
    now_unix_ms: u64,
    incoming: Option<&Incoming>,
) -> Rulings {
    let mut jobs: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, generation) in generations.iter().enumerate() {
        jobs.entry(&generation.job).or_default().push(at);
    }
    if let Some(incoming) = incoming {
        jobs.entry(&incoming.job).or_default();
    }
    for of_job in jobs.values_mut() {
        of_job.sort_by_key(|&at| generations[at].size.generation);
    }
    let mut namespace = Namespace {
        generations,
        reasons: vec![Reason::NoRule; generations.len()],
        chain: Chain::default(),
        exceeded: None,
    };
    let bytes = {
        let all = Chain::new(generations, jobs.values(), |_| true);
        let bytes = (0..generations.len()).map(|at| all.charge(generations, at, all.before[at]));
        bytes.collect::<Vec<_>>()
    };
    let rules: BTreeMap<&str, JobPolicy> =
        jobs.keys().map(|&job| (job, policy.of_job(job))).collect();
    for (job, of_job) in &jobs {
        namespace.keep(&rules[job].keep, of_job, now_unix_ms);
    }
    namespace.chain = Chain::new(generations, jobs.values(), |at| namespace.stays(at));
    let mut all = Sum::default();
    for (job, of_job) in &jobs {
        let coming = incoming.filter(|incoming| incoming.job == **job);
        all = all.plus(namespace.limit_job(job, &rules[job], of_job, coming));
    }
    if let Some(limits) = &policy.namespace {
        namespace.limit_all(limits, &jobs, all, incoming);
    }
    let verdicts = namespace.reasons.iter().zip(bytes);
    let verdicts = verdicts.map(|(&reason, bytes)| Ruling { reason, bytes });
    Rulings {
        verdicts: verdicts.collect(),
        exceeded: namespace.exceeded,
    }
}

/// The generations that stay, each with the older and the newer one of its job: what one counts changes when the one
/// before it goes.
#[derive(Default)]
struct Chain {
    before: Vec<Option<usize>>,
    after: Vec<Option<usize>>,
}

impl Chain {
    fn new<'a>(
        generations: &[Generation],
        jobs: impl Iterator<Item = &'a Vec<usize>>,
        stays: impl Fn(usize) -> bool,
    ) -> Self {
        let mut chain = Self {
            before: vec![None; generations.len()],
            after: vec![None; generations.len()],
        };
        for of_job in jobs {
            let mut last: Option<usize> = None;
            for &at in of_job.iter().filter(|&&at| stays(at)) {
                chain.before[at] = last;
                if let Some(last) = last.replace(at) {
                    chain.after[last] = Some(at);
                }
            }
        }
        chain
    }

    /// Returns what a generation counts behind another one.
    fn charge(&self, generations: &[Generation], at: usize, before: Option<usize>) -> u64 {
        let before = before.map(|before| generations[before].size.generation);
        charge(&generations[at].size, before)
    }

    /// Takes a generation out. Returns what it and the one behind it counted before, and what that one counts now.
    fn take_out(&mut self, generations: &[Generation], at: usize) -> (u64, u64) {
        let (before, after) = (self.before[at], self.after[at]);
        let mut counted = self.charge(generations, at, before);
        let mut counts = 0;
        if let Some(before) = before {
            self.after[before] = after;
        }
        if let Some(after) = after {
            counted = counted.saturating_add(self.charge(generations, after, Some(at)));
            counts = self.charge(generations, after, before);
            self.before[after] = before;
        }
        (counted, counts)
    }
}

/// Use of a job or a namespace.
#[derive(Clone, Copy, Default)]
struct Sum {
    bytes: u64,
    checkpoints: u64,
}

impl Sum {
    fn add(self, bytes: u64) -> Self {
        Self {
            bytes: self.bytes.saturating_add(bytes),
            checkpoints: self.checkpoints.saturating_add(1),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            checkpoints: self.checkpoints.saturating_add(other.checkpoints),
        }
    }

    /// Returns the first limit that the sum exceeds: its name, the limit, and what there is.
    fn beyond(self, limits: &Settings) -> Option<(&'static str, u64, u64)> {
        let limits = [
            ("bytes", limits.max_bytes, self.bytes),
            ("checkpoints", limits.max_checkpoints, self.checkpoints),
        ];
        let beyond = |(what, limit, used): (_, Option<u64>, _)| {
            limit
                .filter(|&limit| used > limit)
                .map(|limit| (what, limit, used))
        };
        limits.into_iter().find_map(beyond)
    }
}

/// A namespace that is being decided about.
struct Namespace<'a> {
    generations: &'a [Generation],
    reasons: Vec<Reason>,
    chain: Chain,
    exceeded: Option<Exceeded>,
}

impl Namespace<'_> {
    /// Applies what the rules keep to the generations of a job, the oldest first.
    fn keep(&mut self, keep: &Settings, of_job: &[usize], now_unix_ms: u64) {
        let ordered: Vec<&Generation> = of_job.iter().map(|&at| &self.generations[at]).collect();
        let newest_whole = newest_whole(&ordered);
        let within_ms = keep.keep_within_s.map(|age_s| age_s.saturating_mul(1000));
        let mut whole_ones = 0_u64;
        for (place, generation) in ordered.iter().enumerate().rev() {
            let age_ms = now_unix_ms.saturating_sub(generation.created_unix_ms);
            // Those that cannot be restored do not count, and do not go before as many good ones have come after them.
            let is_last = keep.keep_last.is_some_and(|n| whole_ones < n);
            whole_ones += u64::from(generation.whole);
            let reason = if generation.pinned {
                Reason::Pinned
            } else if Some(place) == newest_whole {
                Reason::NewestWhole
            } else if place + 1 == ordered.len() {
                Reason::Newest
            } else if newest_whole.is_none() {
                Reason::NoneWhole
            } else if generation.in_use {
                Reason::InUse
            } else if keep.keep_all {
                Reason::KeepAll
            } else if !keep.says_what_to_keep() {
                Reason::NoRule
            } else if is_last {
                Reason::KeepLast
            } else if within_ms.is_some_and(|within_ms| age_ms <= within_ms) {
                Reason::KeepWithin
            } else {
                Reason::Expired
            };
            self.reasons[of_job[place]] = reason;
        }
    }

    /// Returns true if a generation stays so far.
    fn stays(&self, at: usize) -> bool {
        !self.reasons[at].removes()
    }

    /// Returns true if a generation may go for a quota: no rule protects it from quotas, too.
    fn may_go(&self, at: usize) -> bool {
        matches!(
            self.reasons[at],
            Reason::NoRule | Reason::KeepAll | Reason::KeepLast | Reason::KeepWithin
        )
    }

    /// Removes a generation for a quota, and takes it out of the sum.
    fn remove(&mut self, at: usize, reason: Reason, sum: Sum) -> Sum {
        self.reasons[at] = reason;
        let (counted, counts) = self.chain.take_out(self.generations, at);
        Sum {
            bytes: sum.bytes.saturating_sub(counted).saturating_add(counts),
            checkpoints: sum.checkpoints.saturating_sub(1),
        }
    }

    /// Applies a job's own limits. Returns what stays of it.
    fn limit_job(
        &mut self,
        job: &str,
        rule: &JobPolicy,
        of_job: &[usize],
        coming: Option<&Incoming>,
    ) -> Sum {
        let stay = of_job.iter().copied().filter(|&at| self.stays(at));
        let mut sum = stay.fold(Sum::default(), |sum, at| {
            sum.add(
                self.chain
                    .charge(self.generations, at, self.chain.before[at]),
            )
        });
        let extra = coming.map_or_else(Sum::default, |coming| Sum::default().add(coming.bytes));
        let removes_oldest = rule.over_quota == OverQuota::RemoveOldest;
        let mut oldest = of_job.iter().copied();
        while let Some(beyond) = sum.plus(extra).beyond(&rule.limits) {
            let next = oldest.find(|&at| self.may_go(at));
            let Some(next) = next.filter(|_| removes_oldest) else {
                self.exceed(coming, job, beyond, removes_oldest);
                break;
            };
            sum = self.remove(next, Reason::JobQuota, sum);
        }
        sum
    }

    /// Applies the limits of the namespace; `sum` is what stays of it.
    fn limit_all(
        &mut self,
        limits: &Settings,
        jobs: &BTreeMap<&str, Vec<usize>>,
        mut sum: Sum,
        incoming: Option<&Incoming>,
    ) {
        let extra = incoming.map_or_else(Sum::default, |coming| Sum::default().add(coming.bytes));
        let removes_oldest = limits.over_quota == Some(OverQuota::RemoveOldest);
        if sum.plus(extra).beyond(limits).is_none() {
            return;
        }
        let mut oldest = self.by_age(jobs).into_iter();
        while let Some(beyond) = sum.plus(extra).beyond(limits) {
            let next = oldest.find(|&at| self.may_go(at));
            let Some(next) = next.filter(|_| removes_oldest) else {
                self.exceed(incoming, "", beyond, removes_oldest);
                return;
            };
            sum = self.remove(next, Reason::NamespaceQuota, sum);
        }
    }

    /// Returns all generations, the oldest first: within a job in its order, whatever their times say.
    fn by_age(&self, jobs: &BTreeMap<&str, Vec<usize>>) -> Vec<usize> {
        let mut all = Vec::with_capacity(self.generations.len());
        for of_job in jobs.values() {
            let mut time_ms = 0;
            for &at in of_job {
                time_ms = self.generations[at].created_unix_ms.max(time_ms);
                all.push((time_ms, at));
            }
        }
        // Stable: equal times keep the order of jobs and generations.
        all.sort_by_key(|&(time_ms, _)| time_ms);
        all.into_iter().map(|(_, at)| at).collect()
    }

    /// Notes the first limit that does not let a dump in.
    fn exceed(
        &mut self,
        incoming: Option<&Incoming>,
        job: &str,
        (what, limit, used): (&'static str, u64, u64),
        removes_oldest: bool,
    ) {
        let Some(incoming) = incoming else { return };
        let own = if what == "bytes" { incoming.bytes } else { 1 };
        self.exceeded.get_or_insert(Exceeded {
            job: job.to_owned(),
            what,
            limit,
            used: used.saturating_sub(own),
            removes_oldest,
        });
    }
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
