//! Invariants of every policy over random small clusters: no node has more than it can have, no task is lost or run
//! twice, the processor time that is held is done or wasted, and a seed gives the same bytes.

use permafrost_scheduling::cost::TaskResources;
use permafrost_scheduling::policy::{Name, PolicySettings};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use permafrost_simulation::engine::{EngineConfig, SimulationError, run};
use permafrost_simulation::medium::StorageMedium;
use permafrost_simulation::workload::{
    Google, JobSpec, NodeChange, NodeSpec, TaskSpec, Workload, google,
};
use proptest::prelude::*;

fn resources(cpus: u64, gb: u64) -> TaskResources {
    TaskResources {
        cpu_millis: cpus * 1000,
        memory: Bytes::new(gb * 1_000_000_000),
    }
}

fn at(seconds: f64) -> Moment {
    Moment::default().after(Seconds::new(seconds).unwrap())
}

prop_compose! {
    fn task()(work in 0.0..300.0_f64, cpus in 1_u64..4, gb in 1_u64..4, dirty in any::<bool>()) -> TaskSpec {
        TaskSpec {
            work: Seconds::new(work).unwrap(),
            asks: resources(cpus, gb),
            memory: Bytes::new(gb * 900_000_000),
            dirty_rate: dirty.then(|| BytesPerSecond::new(1e6).unwrap()),
        }
    }
}

prop_compose! {
    fn job()(
        submitted in 0.0..500.0_f64,
        priority in 0_u8..12,
        deadline in proptest::option::of(1.0..1000.0_f64),
        stages in proptest::collection::vec(proptest::collection::vec(task(), 0..6), 1..3),
    ) -> JobSpec {
        let deadline = deadline.map(|later| at(submitted + later));
        JobSpec { submitted: at(submitted), priority, deadline, flow: None, stages }
    }
}

prop_compose! {
    fn cluster(changes: bool)(
        nodes in proptest::collection::vec((1_u64..5, 2_u64..6), 1..5),
        swap in any::<bool>(),
        jobs in proptest::collection::vec(job(), 1..8),
        lost in proptest::collection::vec(1.0..800.0_f64, 0..3),
    ) -> Workload {
        let spec = |(cpus, gb): (u64, u64)| NodeSpec {
            swap: if swap { Bytes::new(4_000_000_000) } else { Bytes::ZERO },
            ..NodeSpec::new(resources(cpus, gb))
        };
        let mut workload = Workload::on("random", nodes.into_iter().map(spec).collect());
        workload.jobs = jobs;
        workload.jobs.sort_by_key(|job| job.submitted);
        if changes {
            // Another one comes for each that is lost, so that all tasks end.
            let (count, first) = (workload.nodes.len(), workload.nodes.clone());
            for (index, (time, node)) in lost.iter().zip(first).enumerate() {
                let index = u32::try_from(index % count).unwrap();
                workload.changes.push((at(*time), NodeChange::Joined(node)));
                workload.changes.push((at(*time), NodeChange::Lost(index)));
            }
            workload.changes.sort_by_key(|change| change.0);
        }
        workload
    }
}

/// Returns true for the policies of paper 002 that evict by deadline or laxity. They assume equal containers: between
/// tasks of different sizes they may evict each other without end, which the simulator has to find out.
fn may_thrash(name: Name) -> bool {
    matches!(name.as_str(), "mdf+edf" | "mlf+llf")
}

/// Returns true for the policy that keeps a part of the cluster free: a task of low priority may be larger than the
/// rest, and then never starts, which the simulator has to find out.
fn may_starve(name: Name) -> bool {
    name.as_str() == "reserve"
}

fn replay(workload: &Workload, name: Name, seed: u64) -> String {
    let settings = PolicySettings {
        seed,
        ..PolicySettings::default()
    };
    let config = EngineConfig {
        check: true,
        // A dump that takes longer than the policies of paper 002 wait for, 12 s, is a kill under them.
        ..EngineConfig::with("2G".parse::<StorageMedium>().unwrap())
    };
    let run = match run(workload, &mut *name.build(&settings), &config, None) {
        Err(error @ SimulationError::Unending { .. }) if may_thrash(name) => {
            return error.to_string();
        }
        Err(error @ SimulationError::Stalled { .. }) if may_starve(name) => {
            return error.to_string();
        }
        run => run.unwrap_or_else(|error| panic!("{name}: {error}")),
    };
    let outcome = run.outcome;
    let tasks = workload.tasks().count() as u64;
    let fits = |task: &TaskSpec| {
        workload
            .nodes
            .iter()
            .any(|node| node.capacity.covers(task.asks))
    };
    if workload.tasks().all(fits) {
        assert_eq!((outcome.tasks, outcome.misfits), (tasks, 0), "{name}");
        // Each task's work counts once; its end is rounded up to a microsecond each time that it ran.
        let work = workload.core_seconds() / 3600.0;
        assert!(
            (outcome.done_core_h - work).abs() < 1e-5,
            "{name}: {} h of {work} h",
            outcome.done_core_h
        );
    }
    format!("{outcome:?}{:?}", run.ends)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn all_tasks_end_once_under_every_policy(workload in cluster(false), seed in any::<u64>()) {
        for name in Name::ALL {
            let first = replay(&workload, *name, seed);
            prop_assert_eq!(&first, &replay(&workload, *name, seed), "{} differs", name);
        }
    }

    #[test]
    fn tasks_of_lost_nodes_begin_again(workload in cluster(true), seed in any::<u64>()) {
        for name in ["wait", "kill", "basic", "li2015", "adaptive"] {
            replay(&workload, name.parse().unwrap(), seed);
        }
    }
}

#[test]
fn a_part_of_googles_day_has_the_aggregates_that_it_is_calibrated_on() {
    let day = Google::default().part(20);
    let workload = google(&day);
    assert!(workload.synthetic && workload.title().ends_with("(synthetic)"));
    assert_eq!(workload.jobs.len(), 750);
    assert_eq!(workload.tasks().count(), 30_000);
    let hours = workload.core_seconds() / 3600.0;
    assert!(
        (hours - day.work_core_h).abs() < 0.01 * day.work_core_h,
        "{hours}"
    );
    assert_eq!(workload, google(&day), "the same seed");
    assert_ne!(workload, google(&Google { seed: 2, ..day }));
}
