//! Properties that hold for all figures: monotony, the adaptive choice against its own alternatives, and that no
//! input panics or yields NaN.

use std::collections::{BTreeMap, BTreeSet};

use permafrost_scheduling::cost::{
    Copies, MissingPages, NodeFigures, PreemptionMechanism, Replica, SwapFigures, TaskCost,
    TaskFigures, TaskResources, resume,
};
use permafrost_scheduling::estimator::{
    Channel, Direction, Estimator, MediumTier, SizedRates, Transfer,
};
use permafrost_scheduling::figure::{Estimate, Figure, What};
use permafrost_scheduling::preempt::{
    By, Candidate, CandidateVictim, Decision, Site, Terms, algorithm_1, choose, options, plan,
    together,
};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Ratio, Seconds};
use permafrost_scheduling::{NodeId, TaskId};
use proptest::prelude::*;

/// Sums of floats in another order differ in their last digits.
fn no_more(a: Seconds, b: Seconds) -> bool {
    a.value() <= b.value() * (1.0 + 1e-9) + 1e-9
}

fn estimate<T: Copy + std::fmt::Debug + 'static>(
    values: impl Strategy<Value = T> + Clone + 'static,
) -> impl Strategy<Value = Figure<T>> {
    let age = (0.0..1e6).prop_map(|age| Seconds::new(age).unwrap());
    (values.clone(), values, age, 0_u32..100).prop_map(|(p50, p95, age, samples)| {
        Figure::Known(Estimate {
            p50,
            p95,
            age,
            samples,
        })
    })
}

/// Generates a known figure, and one time in eight an unknown one.
fn figure<T: Copy + std::fmt::Debug + 'static>(
    values: impl Strategy<Value = T> + Clone + 'static,
) -> impl Strategy<Value = Figure<T>> {
    prop_oneof![
        7 => estimate(values),
        1 => Just(Figure::not_given(What::Memory)),
    ]
}

fn bytes() -> impl Strategy<Value = Bytes> + Clone {
    prop_oneof![0_u64..1 << 36, any::<u64>(), Just(0), Just(u64::MAX)].prop_map(Bytes::new)
}

fn rate() -> impl Strategy<Value = BytesPerSecond> + Clone {
    let value = prop_oneof![1e3..1e11, Just(1.0), Just(1e15)];
    value.prop_map(|value| BytesPerSecond::new(value).unwrap())
}

fn seconds() -> impl Strategy<Value = Seconds> + Clone {
    let value = prop_oneof![0.0..1e5, Just(0.0), Just(1e12)];
    value.prop_map(|value| Seconds::new(value).unwrap())
}

prop_compose! {
    fn node()(
        write in figure(rate()),
        compare in figure(rate()),
        read in figure(rate()),
        recall in figure(rate()),
        lazy in figure(rate()),
        write_queue in figure(bytes()),
        read_queue in figure(bytes()),
        write_drain in figure(rate()),
        read_drain in figure(rate()),
        dump_start in figure(seconds()),
        restore_start in figure(seconds()),
        lazy_start in figure(seconds()),
    ) -> NodeFigures {
        NodeFigures {
            node: NodeId(1),
            write: SizedRates::uniform(write),
            compare: SizedRates::uniform(compare),
            read: SizedRates::uniform(read),
            recall: SizedRates::uniform(recall),
            lazy: SizedRates::uniform(lazy),
            write_queue,
            read_queue,
            write_drain,
            read_drain,
            dump_start,
            restore_start,
            lazy_start,
        }
    }
}

prop_compose! {
    fn site()(
        node in node(),
        there in node(),
        link in figure(rate()),
        (free_memory, free_swap) in (bytes(), bytes()),
        (write, read) in (figure(rate()), figure(rate())),
        (has_replica, has_swap) in (any::<bool>(), any::<bool>()),
    ) -> Owned {
        let swap = SwapFigures { free_memory, free_swap, write, read };
        Owned {
            node,
            link: SizedRates::uniform(link),
            replica: has_replica.then_some(there),
            swap: has_swap.then_some(swap),
        }
    }
}

/// Site that owns all its parts.
#[derive(Clone, Copy, Debug)]
struct Owned {
    node: NodeFigures,
    link: SizedRates,
    replica: Option<NodeFigures>,
    swap: Option<SwapFigures>,
}

impl Owned {
    fn site(&self) -> Site<'_> {
        Site {
            node: &self.node,
            replica: self.replica.as_ref().map(|node| Replica {
                link: &self.link,
                node,
            }),
            swap: self.swap,
        }
    }
}

prop_compose! {
    fn task()(
        (cpu_millis, memory) in (any::<u64>(), bytes()),
        full in figure(bytes()),
        has_checkpoint in any::<bool>(),
        incremental in figure(bytes()),
        resident in figure(bytes()),
        dirty_rate in figure(rate()),
        (progress, since_checkpoint) in (figure(seconds()), figure(seconds())),
        (remaining, start) in (figure(seconds()), figure(seconds())),
        grace in prop::option::of(seconds()),
    ) -> TaskFigures {
        TaskFigures {
            id: TaskId(1),
            holds: TaskResources { cpu_millis, memory },
            full,
            has_checkpoint,
            incremental,
            resident,
            dirty_rate,
            progress,
            since_checkpoint,
            remaining,
            start,
            grace,
        }
    }
}

prop_compose! {
    fn terms()(
        replicated in any::<bool>(),
        bad_end in any::<bool>(),
        weight in 0.0..1e6,
        longest_delay in prop::option::of(seconds()),
        may_wait in any::<bool>(),
    ) -> Terms {
        Terms {
            copies: if replicated { Copies::Replicated } else { Copies::Local },
            by: if bad_end { By::P95 } else { By::P50 },
            delay_weight: Ratio::new(weight).unwrap(),
            longest_delay,
            may_wait,
        }
    }
}

fn faster(rates: SizedRates, by: f64) -> SizedRates {
    match rates.sustained() {
        Figure::Known(known) => {
            let times =
                |rate: BytesPerSecond| BytesPerSecond::new((rate.value() * by).min(1e15)).unwrap();
            SizedRates::uniform(Figure::Known(Estimate {
                p50: times(known.p50),
                p95: times(known.p95),
                ..known
            }))
        }
        Figure::Unknown { .. } => rates,
    }
}

fn check_sums(cost: &TaskCost) {
    for sum in [cost.overhead(), cost.delay(), cost.until_running()] {
        assert!(sum.p50.value().is_finite() && sum.p95.value().is_finite());
        assert!(sum.p50 <= sum.p95, "{cost}");
    }
}

proptest! {
    #[test]
    fn more_bandwidth_never_raises_a_cost(task in task(), site in site(), by in 1.0..100.0) {
        let mut better = site;
        better.node.write = faster(site.node.write, by);
        better.node.read = faster(site.node.read, by);
        better.link = faster(site.link, by);
        if let Some(replica) = &mut better.replica {
            replica.write = faster(replica.write, by);
        }
        let (site, better) = (site.site(), better.site());
        for copies in [Copies::Local, Copies::Replicated] {
            let both = options(&task, &site, copies).into_iter().zip(options(&task, &better, copies));
            for ((mechanism, before), (_, after)) in both {
                let Ok(before) = before else { continue };
                let after = after.unwrap();
                prop_assert!(no_more(after.overhead().p50, before.overhead().p50), "{mechanism}");
                prop_assert!(no_more(after.overhead().p95, before.overhead().p95), "{mechanism}");
                prop_assert!(no_more(after.delay().p50, before.delay().p50), "{mechanism}");
                prop_assert!(no_more(after.delay().p95, before.delay().p95), "{mechanism}");
            }
        }
    }

    #[test]
    fn a_longer_queue_never_lowers_a_cost(task in task(), site in site(), more in bytes()) {
        let mut longer = site;
        if let Figure::Known(queued) = &mut longer.node.write_queue {
            queued.p50 = queued.p50.plus(more);
            queued.p95 = queued.p95.plus(more);
        }
        let (site, longer) = (site.site(), longer.site());
        for ((mechanism, before), (_, after)) in options(&task, &site, Copies::Local)
            .into_iter()
            .zip(options(&task, &longer, Copies::Local))
        {
            let (Ok(before), Ok(after)) = (before, after) else { continue };
            prop_assert!(no_more(before.overhead().p50, after.overhead().p50), "{mechanism}");
            prop_assert!(no_more(before.delay().p95, after.delay().p95), "{mechanism}");
        }
    }

    /// Checks that resuming on a node that must be sent more is never cheaper.
    #[test]
    fn lacking_more_never_lowers_the_cost_of_a_resume(
        node in node(), size in bytes(), link in figure(rate()), less in bytes(), more in bytes(),
    ) {
        let link = SizedRates::uniform(link);
        let time = |bytes| resume(size, &node, Some(&MissingPages { bytes, link: &link }), None);
        if let (Ok(less), Ok(more)) = (time(less.min(more)), time(less.max(more))) {
            check_sums(&more);
            prop_assert!(no_more(less.until_running().p50, more.until_running().p50));
        }
    }

    /// Compares costs by the model itself, under equal terms.
    #[test]
    fn adaptive_never_costs_more_than_kill_or_checkpoint(task in task(), site in site(), terms in terms()) {
        let free = Terms { longest_delay: None, ..terms };
        let site = site.site();
        let known: Vec<_> = options(&task, &site, terms.copies)
            .into_iter()
            .filter_map(|(mechanism, cost)| Some((mechanism, cost.ok()?)))
            .collect();
        for (_, cost) in &known {
            check_sums(cost);
        }
        let unhurried = TaskFigures { grace: None, ..task };
        match choose(&unhurried, &site, &free) {
            Ok(choice) => for (mechanism, cost) in known {
                if mechanism != PreemptionMechanism::Wait || terms.may_wait {
                    prop_assert!(choice.score <= terms.score(&cost), "{choice} against {mechanism}");
                }
            },
            Err(_) => prop_assert!(known.iter().all(|(mechanism, _)| *mechanism == PreemptionMechanism::Wait)),
        }
        // A choice never exceeds the grace time, whatever else holds.
        if let Ok(choice) = choose(&task, &site, &terms) {
            for longest in [terms.longest_delay, task.grace].into_iter().flatten() {
                prop_assert!(choice.cost.delay().p95 <= longest);
            }
        }
    }

    /// Checks plans of tasks and sites of which anything may be unknown.
    #[test]
    fn a_plan_takes_no_task_twice_and_frees_what_it_says(
        tasks in prop::collection::vec((task().boxed(), 0_u32..3), 0..12).boxed(),
        sites in (site().boxed(), site().boxed()),
        terms in terms(),
        wanted in (0_u64..5_000, 0_u64..1 << 36),
    ) {
        let wanted = TaskResources { cpu_millis: wanted.0, memory: Bytes::new(wanted.1) };
        let candidates: Vec<Candidate> = (0..).zip(&tasks).map(|(id, (task, node))| {
            // Holds that can be added up.
            let holds = TaskResources {
                cpu_millis: task.holds.cpu_millis % 2_000,
                memory: Bytes::new(task.holds.memory.count() % (1 << 34)),
            };
            Candidate { node: NodeId(*node), task: TaskFigures { id: TaskId(id), holds, ..*task } }
        }).collect();
        let sites = BTreeMap::from([(NodeId(0), sites.0.site()), (NodeId(1), sites.1.site())]);
        let plan = plan(wanted, &candidates, &sites, &terms);
        let holds = |task: TaskId| candidates[usize::try_from(task.0).unwrap()].task.holds;
        let sum = |victims: &mut dyn Iterator<Item = TaskResources>| {
            victims.fold(TaskResources::ZERO, |sum, one| sum.plus(one))
        };
        prop_assert_eq!(sum(&mut plan.victims.iter().map(|victim| victim.frees)), plan.frees);
        prop_assert_eq!(plan.lacking, wanted.less(plan.frees));
        let mut seen = BTreeSet::new();
        for victim in &plan.victims {
            prop_assert!(seen.insert(victim.task), "{:?} twice", victim.task);
            prop_assert!(holds(victim.task).covers(victim.frees));
            if victim.choice.mechanism != PreemptionMechanism::SuspendInMemory {
                prop_assert_eq!(victim.frees, holds(victim.task));
            }
        }
        prop_assert!(plan.unknown_node.iter().all(|task| candidates[usize::try_from(task.0).unwrap()].node == NodeId(2)));
        let all = together(&candidates, &sites, &terms);
        prop_assert_eq!(
            all.victims.len() + all.undecided.len() + all.unknown_node.len(),
            candidates.len()
        );
    }

    /// Compares the refinement with Algorithm 1 where only a kill and a full dump have costs.
    #[test]
    fn with_kill_and_full_dump_only_the_choice_is_algorithm_1(
        size in 0_u64..1 << 40, (write, read) in (rate(), rate()), queued in 0_u64..1 << 40, progress in 0.0..1e5,
    ) {
        let (size, queued) = (Bytes::new(size), Bytes::new(queued));
        let progress = Seconds::new(progress).unwrap();
        let decision = algorithm_1(vec![CandidateVictim {
            task: TaskId(1),
            size,
            bw_write: write,
            bw_read: read,
            queue_time_dump: queued.at(write),
            progress,
            previous_checkpoint: false,
        }])[0].1;
        let task = TaskFigures {
            full: Figure::given(size),
            progress: Figure::given(progress),
            ..TaskFigures::unknown(TaskId(1), TaskResources::ZERO)
        };
        let node = NodeFigures {
            write: SizedRates::uniform(Figure::given(write)),
            read: SizedRates::uniform(Figure::given(read)),
            write_queue: Figure::given(queued),
            ..NodeFigures::unknown(NodeId(1))
        };
        let site = Site { node: &node, replica: None, swap: None };
        let choice = choose(&task, &site, &Terms::default()).unwrap();
        let even = (choice.next.unwrap().1.value() - choice.score.value()).abs() < 1e-6;
        prop_assert!(even || (choice.mechanism == PreemptionMechanism::Kill) == (decision == Decision::Kill));
    }

    #[test]
    fn a_plan_frees_what_it_says_and_takes_nobody_twice(
        tasks in prop::collection::vec(task(), 0..12), site in site(), terms in terms(),
        (cpu_millis, memory) in (any::<u64>(), bytes()),
    ) {
        let candidates: Vec<_> = (0..).zip(tasks).map(|(id, task)| Candidate {
            node: NodeId(1),
            task: TaskFigures { id: TaskId(id), ..task },
        }).collect();
        let wanted = TaskResources { cpu_millis, memory };
        let plan = plan(wanted, &candidates, &BTreeMap::from([(NodeId(1), site.site())]), &terms);
        let mut ids: Vec<_> = plan.victims.iter().map(|victim| victim.task).collect();
        let frees = plan.victims.iter().fold(TaskResources::ZERO, |sum, victim| sum.plus(victim.frees));
        prop_assert!(frees.covers(plan.frees));
        prop_assert_eq!(wanted.less(plan.frees), plan.lacking);
        let taken = ids.len();
        ids.sort_unstable();
        ids.dedup();
        prop_assert_eq!(ids.len(), taken);
    }

    /// Checks that figures of any reports lie between the limits of belief, or are missing.
    #[test]
    fn a_node_that_lies_never_yields_nonsense(
        reports in prop::collection::vec((any::<u64>(), bytes(), seconds(), any::<u64>()), 0..100),
        now in any::<u64>(),
    ) {
        let mut estimator = Estimator::default();
        let channel = Channel::Medium { node: NodeId(1), tier: MediumTier::Hdd, direction: Direction::Read };
        for (at, bytes, elapsed, now) in reports {
            let transfer = Transfer { at: Moment::from_micros(at), bytes, elapsed };
            // Refused or not: both are well.
            let _ = estimator.transferred(channel, Moment::from_micros(now), transfer);
            let _ = estimator.answered(channel, Moment::from_micros(now), transfer.at, elapsed);
        }
        let now = Moment::from_micros(now);
        let rates = estimator.rates(channel, now);
        for size in [0, 1 << 22, 1 << 28, u64::MAX] {
            if let Ok(figure) = rates.of(Bytes::new(size)).known() {
                prop_assert!(figure.p95 <= figure.p50);
                prop_assert!((999.0..=1.001e12).contains(&figure.p50.value()), "{figure:?}");
                prop_assert!(figure.age.value() <= 3600.0);
            }
        }
        if let Ok(latency) = estimator.latency(channel, now).known() {
            prop_assert!(latency.p50 <= latency.p95);
        }
    }
}
