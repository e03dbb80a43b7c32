use proptest::prelude::*;

use super::*;
use crate::Policies;

const NOW_MS: u64 = 1_800_000_000_000;
const DAY_MS: u64 = 86_400_000;

/// A generation of `a/job` of so many days ago, the number of the days being also its distance from generation 100.
fn old(days: u64) -> Generation {
    Generation {
        job: "a/job".to_owned(),
        size: Charged {
            generation: 100 - days,
            own_bytes: 10,
            ..Charged::default()
        },
        created_unix_ms: NOW_MS - days * DAY_MS,
        whole: true,
        ..Generation::default()
    }
}

fn ten() -> Vec<Generation> {
    (0..10).map(old).collect()
}

fn policy(namespace: Settings) -> NamespacePolicy {
    NamespacePolicy {
        namespace: Some(namespace),
        ..NamespacePolicy::default()
    }
}

fn settings(keep_last: Option<u64>, within_days: Option<u64>) -> Settings {
    Settings {
        keep_last,
        keep_within_s: within_days.map(|days| days * 86_400),
        ..Settings::default()
    }
}

fn reasons(decision: &Rulings) -> Vec<Reason> {
    decision.verdicts.iter().map(|one| one.reason).collect()
}

fn removed(policy: &NamespacePolicy, generations: &[Generation], now_ms: u64) -> Vec<usize> {
    let decision = decide(policy, generations, now_ms, None);
    let verdicts = decision.verdicts.iter().enumerate();
    let gone = verdicts.filter(|(_, verdict)| verdict.reason.removes());
    gone.map(|(at, _)| at).collect()
}

#[test]
fn the_last_ones_and_the_young_ones_stay() {
    let by = |keep_last, days| removed(&policy(settings(keep_last, days)), &ten(), NOW_MS);
    assert_eq!(by(Some(3), None), (3..10).collect::<Vec<_>>());
    assert_eq!(by(None, Some(4)), (5..10).collect::<Vec<_>>());
    assert_eq!(by(Some(3), Some(4)), (5..10).collect::<Vec<_>>());
    assert_eq!(by(Some(8), Some(4)), [8, 9]);
    assert!(removed(&NamespacePolicy::default(), &ten(), NOW_MS).is_empty());
}

#[test]
fn what_is_pinned_or_read_and_the_newest_good_one_stay() {
    let mut generations = ten();
    generations[9].pinned = true;
    generations[8].in_use = true;
    // Damaged, or pre-dumps: the fourth is the last that can be restored.
    for one in &mut generations[..3] {
        one.whole = false;
    }
    let decided = decide(&policy(settings(Some(1), None)), &generations, NOW_MS, None);
    use Reason::{Expired, InUse, KeepLast, Newest, NewestWhole, Pinned};
    assert_eq!(
        reasons(&decided),
        [
            Newest,
            KeepLast,
            KeepLast,
            NewestWhole,
            Expired,
            Expired,
            Expired,
            Expired,
            InUse,
            Pinned
        ]
    );
    for one in &mut generations {
        one.whole = false;
        one.pinned = false;
    }
    assert!(removed(&policy(settings(Some(1), None)), &generations, NOW_MS).is_empty());
}

#[test]
fn a_quota_removes_the_oldest_or_refuses() {
    let limited = |over_quota| Settings {
        max_bytes: Some(45),
        over_quota,
        ..Settings::default()
    };
    let oldest = policy(limited(Some(OverQuota::RemoveOldest)));
    assert_eq!(removed(&oldest, &ten(), NOW_MS), [4, 5, 6, 7, 8, 9]);
    assert!(removed(&policy(limited(None)), &ten(), NOW_MS).is_empty());
    let incoming = |bytes| Incoming {
        job: "a/new".to_owned(),
        bytes,
    };
    let with = |policy: &NamespacePolicy, bytes| {
        let decision = decide(policy, &ten(), NOW_MS, Some(&incoming(bytes)));
        let gone = decision.verdicts.iter().filter(|one| one.reason.removes());
        (gone.count(), decision.exceeded)
    };
    assert_eq!(with(&oldest, 20), (8, None));
    let (gone, exceeded) = with(&oldest, 40);
    assert_eq!((gone, exceeded.unwrap().used), (9, 10), "the newest stays");
    let refused = with(&policy(limited(None)), 1).1.unwrap();
    assert_eq!((refused.limit, refused.used), (45, 100));
    assert!(!refused.removes_oldest);
}

#[test]
fn a_job_has_a_quota_of_its_own_and_the_oldest_of_all_jobs_goes_first() {
    let mut generations = ten();
    for one in &mut generations[..5] {
        one.job = "a/other".to_owned();
    }
    let mut policies = Policies::default();
    let limit = |max_checkpoints| Settings {
        max_checkpoints: Some(max_checkpoints),
        over_quota: Some(OverQuota::RemoveOldest),
        ..Settings::default()
    };
    policies.set("a", "j*", limit(2)).unwrap();
    let decided = decide(policies.of("a").unwrap(), &generations, NOW_MS, None);
    let by_job = [Reason::NoRule, Reason::NewestWhole, Reason::JobQuota];
    assert_eq!(reasons(&decided)[5..8], [by_job[1], by_job[0], by_job[2]]);
    policies.set("a", "", limit(4)).unwrap();
    let gone = removed(policies.of("a").unwrap(), &generations, NOW_MS);
    assert_eq!(gone, [3, 4, 6, 7, 8, 9]);
}

#[test]
fn a_delta_takes_over_the_pages_of_its_removed_parents() {
    let mut generations: Vec<_> = (1..=4)
        .map(|number| Generation {
            size: Charged {
                generation: number,
                parent_generation: number - 1,
                own_bytes: if number == 1 { 100 } else { 2 },
                shared_bytes: if number == 1 { 0 } else { 98 },
            },
            ..old(100 - number)
        })
        .collect();
    generations[0].created_unix_ms = NOW_MS;
    let limit = Settings {
        max_bytes: Some(103),
        over_quota: Some(OverQuota::RemoveOldest),
        ..Settings::default()
    };
    // Counted by what each added, the first alone would have to go, and nothing would be free.
    assert_eq!(removed(&policy(limit), &generations, NOW_MS), [0, 1]);
}

#[test]
fn times_within_a_job_do_not_turn_its_order_round() {
    let mut generations = ten();
    generations[0].created_unix_ms = 0;
    generations[9].created_unix_ms = u64::MAX;
    assert_eq!(
        removed(&policy(settings(Some(2), None)), &generations, NOW_MS),
        (2..10).collect::<Vec<_>>()
    );
    let limit = Settings {
        max_checkpoints: Some(9),
        over_quota: Some(OverQuota::RemoveOldest),
        ..Settings::default()
    };
    assert_eq!(removed(&policy(limit), &generations, NOW_MS), [9]);
    // From the future: of no age.
    assert!(removed(&policy(settings(None, Some(1))), &ten(), 0).is_empty());
    let expired = removed(&policy(settings(None, Some(1))), &ten(), u64::MAX);
    assert_eq!(expired.len(), 9, "the newest stays under every clock");
}

fn generation() -> impl Strategy<Value = Generation> {
    let flags = (
        any::<bool>(),
        prop::bool::weighted(0.8),
        prop::bool::weighted(0.1),
    );
    let sizes = (0..40_u64, 0..8_u64, 0..200_u64, 0..200_u64);
    let time = prop_oneof![4 => NOW_MS - 60 * DAY_MS..NOW_MS + DAY_MS, 1 => any::<u64>()];
    (0..3_u8, sizes, time, flags).prop_map(|(job, size, created_unix_ms, flags)| {
        let (generation, distance, own_bytes, shared_bytes) = size;
        let (pinned, whole, in_use) = flags;
        Generation {
            job: format!("a/job-{job}"),
            size: Charged {
                generation: generation + 1,
                parent_generation: generation.saturating_sub(distance),
                own_bytes,
                shared_bytes,
            },
            created_unix_ms,
            pinned: pinned && generation % 5 == 0,
            whole,
            in_use,
        }
    })
}

fn generations() -> impl Strategy<Value = Vec<Generation>> {
    prop::collection::vec(generation(), 0..40).prop_map(|mut all| {
        all.sort_by(|a, b| (&a.job, a.size.generation).cmp(&(&b.job, b.size.generation)));
        all.dedup_by(|a, b| (&a.job, a.size.generation) == (&b.job, b.size.generation));
        all
    })
}

fn rule() -> impl Strategy<Value = Settings> {
    let some = |range: std::ops::Range<u64>| prop::option::of(range);
    let over = prop::option::of(prop_oneof![
        Just(OverQuota::Refuse),
        Just(OverQuota::RemoveOldest)
    ]);
    (
        some(1..20),
        some(1..50 * 86_400),
        some(1..3000),
        some(1..30),
        over,
    )
        .prop_map(
            |(keep_last, keep_within_s, max_bytes, max_checkpoints, over_quota)| Settings {
                keep_all: false,
                keep_last,
                keep_within_s,
                max_bytes,
                max_checkpoints,
                over_quota,
            },
        )
}

fn policies() -> impl Strategy<Value = NamespacePolicy> {
    (prop::option::of(rule()), prop::option::of(rule())).prop_map(|(namespace, jobs)| {
        NamespacePolicy {
            namespace,
            jobs: jobs
                .into_iter()
                .map(|rule| ("job-1".to_owned(), rule))
                .collect(),
        }
    })
}

/// Returns the generations that are left after a decision was carried out.
fn left(generations: &[Generation], decision: &Rulings) -> Vec<Generation> {
    let both = generations.iter().zip(&decision.verdicts);
    let left = both.filter(|(_, verdict)| !verdict.reason.removes());
    left.map(|(generation, _)| generation.clone()).collect()
}

fn counted(generations: &[Generation]) -> u64 {
    let (mut bytes, mut before) = (0, None);
    for one in generations {
        let older = before
            .filter(|(job, _)| *job == &one.job)
            .map(|(_, number)| number);
        bytes += charge(&one.size, older);
        before = Some((&one.job, one.size.generation));
    }
    bytes
}

proptest! {
    #[test]
    fn the_newest_the_newest_good_one_and_pins_survive_every_policy_and_clock(
        generations in generations(), policy in policies(), now_ms in any::<u64>(),
    ) {
        let decision = decide(&policy, &generations, now_ms, None);
        let left = left(&generations, &decision);
        for one in &generations {
            let of_job = || generations.iter().filter(|other| other.job == one.job);
            let newest = of_job().max_by_key(|other| other.size.generation).unwrap();
            prop_assert!(left.contains(newest));
            if let Some(whole) = of_job().filter(|other| other.whole).max_by_key(|other| other.size.generation) {
                prop_assert!(left.contains(whole));
            } else {
                prop_assert!(left.contains(one), "none of them is known to be good");
            }
            prop_assert!(left.contains(one) || !(one.pinned || one.in_use));
        }
        prop_assert_eq!(&decision, &decide(&policy, &generations, now_ms, None));
    }

    #[test]
    fn more_to_keep_never_removes_more(
        generations in generations(),
        (last, more) in (1..20_u64, 0..20_u64),
        (age_s, longer_s) in (1..50_u64 * 86_400, 0..50_u64 * 86_400),
        (now_ms, later_ms) in (any::<u64>(), any::<u64>()),
    ) {
        let by = |keep_last, keep_within_s, now_ms| {
            let rule = Settings {
                keep_last: Some(keep_last),
                keep_within_s: Some(keep_within_s),
                ..Settings::default()
            };
            removed(&policy(rule), &generations, now_ms)
        };
        let base = by(last, age_s, now_ms);
        for fewer in [
            by(last + more, age_s, now_ms),
            by(last, age_s + longer_s, now_ms),
            by(last, age_s, now_ms.min(later_ms)),
        ] {
            prop_assert!(fewer.iter().all(|at| base.contains(at)));
        }
    }

    #[test]
    fn a_larger_quota_never_removes_more(
        generations in generations(), (bytes, more) in (1..3000_u64, 0..1000_u64),
    ) {
        let by = |max_bytes| {
            let rule = Settings {
                max_bytes: Some(max_bytes),
                over_quota: Some(OverQuota::RemoveOldest),
                ..Settings::default()
            };
            removed(&policy(rule), &generations, NOW_MS)
        };
        let base = by(bytes);
        prop_assert!(by(bytes + more).iter().all(|at| base.contains(at)));
    }

    #[test]
    fn a_quota_is_kept_as_far_as_anything_may_go(
        generations in generations(), policy in policies(), bytes in 0..500_u64,
    ) {
        let incoming = Incoming { job: "a/job-0".to_owned(), bytes };
        let decision = decide(&policy, &generations, NOW_MS, Some(&incoming));
        let left = left(&generations, &decision);
        let limits = policy.namespace.clone().unwrap_or_default();
        let fits = limits.max_bytes.is_none_or(|limit| counted(&left) + bytes <= limit)
            && limits.max_checkpoints.is_none_or(|limit| (left.len() as u64) < limit);
        // The rule of job-1 cannot be exceeded by a dump of job-0.
        prop_assert_eq!(fits, decision.exceeded.is_none());
    }

    #[test]
    fn a_decision_that_was_carried_out_has_nothing_to_add(
        generations in generations(), last in 1..20_u64, max_checkpoints in 1..30_u64,
    ) {
        let rule = Settings {
            keep_last: Some(last),
            max_checkpoints: Some(max_checkpoints),
            over_quota: Some(OverQuota::RemoveOldest),
            ..Settings::default()
        };
        let decision = decide(&policy(rule.clone()), &generations, NOW_MS, None);
        let left = left(&generations, &decision);
        prop_assert!(removed(&policy(rule), &left, NOW_MS).is_empty());
    }
}
