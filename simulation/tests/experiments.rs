//! The papers' experiments that need more than priorities: swap, shrinking, dataflows on nodes that are taken away.

use permafrost_scheduling::cost::TaskResources;
use permafrost_scheduling::place::NodeClass;
use permafrost_scheduling::policy::pado::{DataflowOperator, Dependency, Edge};
use permafrost_scheduling::policy::{Name, PolicySettings};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use permafrost_simulation::engine::{EngineConfig, Run, SimulationError, run};
use permafrost_simulation::figures::{self, PaperFigure};
use permafrost_simulation::medium::StorageMedium;
use permafrost_simulation::workload::{
    Application, Band, Eviction, FlowSpec, JobSpec, NodeChange, NodeSpec, SUSPENDED_TASK_S,
    TaskSpec, Workload, pado, suspended,
};
use proptest::prelude::*;

const GB: u64 = 1_000_000_000;

fn gb(tenths: u64) -> Bytes {
    Bytes::new(tenths * GB / 10)
}

fn seconds(value: f64) -> Seconds {
    Seconds::new(value).unwrap()
}

fn at(value: f64) -> Moment {
    Moment::default().after(seconds(value))
}

fn replay(workload: &Workload, policy: &str, bytes_per_s: f64) -> Result<Run, SimulationError> {
    let medium = StorageMedium::with_bandwidth(BytesPerSecond::new(bytes_per_s).unwrap());
    let config = EngineConfig {
        check: true,
        ..EngineConfig::with(medium)
    };
    let name: Name = policy.parse().unwrap();
    run(
        workload,
        &mut *name.build(&PolicySettings::default()),
        &config,
        None,
    )
}

fn high(run: &Run) -> f64 {
    run.outcome.band(Band::High).unwrap().mean_s
}

#[test]
fn a_suspended_task_is_paged_as_far_as_the_other_needs_its_memory() {
    // 2.5 GB stay, and 4 GB are there: the first 1.5 GB of the other need no paging.
    let time = |high_memory, rate| {
        let workload = suspended(gb(25), high_memory, 0.5);
        replay(&workload, "suspend", rate).unwrap()
    };
    let light = time(gb(15), 1e8);
    let heavy = time(gb(25), 1e8);
    assert_eq!(light.outcome.counts.suspends, 1);
    // The command goes with a heartbeat, at most 3 s later.
    let late = high(&light) - SUSPENDED_TASK_S;
    assert!((0.0..=3.0).contains(&late), "{late}");
    // 1 GB goes out at 100 MB/s before the other starts, and comes in again.
    assert!((high(&heavy) - high(&light) - 10.0).abs() < 1e-6);
    let longer = heavy.outcome.makespan_s - light.outcome.makespan_s;
    assert!((20.0..=23.0).contains(&longer), "{longer}");
    // A disk that is half as fast takes twice as long.
    let slow = time(gb(25), 5e7);
    assert!((high(&slow) - high(&heavy) - 10.0).abs() < 1e-6);
}

#[test]
fn without_swap_nothing_is_suspended_in_memory() {
    let workload = suspended(gb(20), gb(20), 0.5).with_swap(Bytes::ZERO);
    let run = replay(&workload, "suspend", 1e8).unwrap();
    assert_eq!(run.outcome.counts.suspends, 0);
    assert_eq!(run.outcome.tasks, 2);
}

fn job(submitted: f64, priority: u8, work: f64, cpus: u64, memory: Bytes) -> JobSpec {
    JobSpec {
        submitted: at(submitted),
        priority,
        deadline: None,
        flow: None,
        stages: vec![vec![TaskSpec {
            work: seconds(work),
            asks: resources(cpus, memory),
            memory,
            dirty_rate: None,
        }]],
    }
}

const fn resources(cpus: u64, memory: Bytes) -> TaskResources {
    TaskResources {
        cpu_millis: cpus * 1000,
        memory,
    }
}

/// Makes a node that a long task fills, and a short one that comes after 30 s and wants a fourth of it.
fn long_and_short() -> Workload {
    let node = NodeSpec {
        swap: gb(160),
        ..NodeSpec::new(resources(8, gb(160)))
    };
    let mut workload = Workload::on("long-and-short", vec![node]);
    workload.jobs = vec![
        job(0.0, 0, 300.0, 8, gb(160)),
        job(30.0, 9, 20.0, 2, gb(40)),
    ];
    workload
}

#[test]
fn memory_is_free_when_it_is_paged_out_and_no_sooner() {
    for policy in ["ip", "gp"] {
        let run = replay(&long_and_short(), policy, 1e9 / 3.0).unwrap();
        let started = run.starts[1].unwrap().since(at(30.0)).value();
        // 4 GB in 12 s, decided on at the next run 3 s later at the latest.
        assert!((12.0..=15.1).contains(&started), "{policy}: {started}");
        assert!(run.outcome.counts.resizes >= 2, "{policy}");
        assert_eq!((run.outcome.tasks, run.kills[0]), (2, 0), "{policy}");
        // The long one gets everything back, and has done all of its work.
        let done = run.outcome.done_core_h * 3600.0;
        assert!(run.ends[0].unwrap() > run.ends[1].unwrap(), "{policy}");
        assert!(done > 8.0 * 250.0, "{policy}: {done}");
    }
    let run = replay(&long_and_short(), "kill", 1e9 / 3.0).unwrap();
    assert_eq!(run.kills, [1, 0]);
    assert_eq!(run.starts[1], Some(at(30.0)));
}

#[test]
fn faster_paging_frees_sooner() {
    let started = |rate: f64| replay(&long_and_short(), "gp", rate).unwrap().starts[1].unwrap();
    assert!(started(1e9) < started(1e9 / 3.0));
}

#[test]
fn what_was_not_committed_alone_runs_again() {
    for application in [Application::Als, Application::MapReduce] {
        let quiet = pado(application, Eviction::None, (40, 5), 1).unwrap();
        let run = replay(&quiet, "pado", 1e9).unwrap();
        let tasks = quiet.tasks().count() as u64;
        assert_eq!((run.outcome.tasks, run.started), (tasks, tasks));
        let taken = pado(application, Eviction::High, (40, 5), 1).unwrap();
        let run = replay(&taken, "pado", 1e9).unwrap();
        assert_eq!(run.outcome.tasks, tasks);
        let again = run.started - tasks;
        // Each of them was on a node that was lost, or its output was.
        assert!(again > 0 && again <= run.outcome.counts.evictions);
        let work = taken.core_seconds() / 3600.0;
        assert!((run.outcome.done_core_h - work).abs() < 1e-4 * work);
    }
}

#[test]
fn a_dataflow_with_a_circle_is_refused() {
    let operator = DataflowOperator {
        tasks: 1,
        creates: false,
    };
    let edge = |from, to| Edge {
        from,
        to,
        dependency: Dependency::OneToOne,
    };
    let operators = vec![(operator, Bytes::ZERO); 3];
    let edges = vec![edge(0, 1), edge(1, 2), edge(2, 1)];
    let refused = FlowSpec::new(operators.clone(), edges).unwrap_err();
    assert!(
        refused.to_string().contains("depends on itself"),
        "{refused}"
    );
    let refused = FlowSpec::new(operators, vec![edge(0, 9)]).unwrap_err();
    assert!(refused.to_string().contains("operator 9"), "{refused}");
}

#[test]
fn a_job_larger_than_the_cluster_runs_in_turns_and_a_task_larger_than_a_node_is_left_out() {
    let mut workload = Workload::on("large", vec![NodeSpec::new(resources(1, gb(10)))]);
    let mut large = job(0.0, 0, 10.0, 1, gb(10));
    large.stages[0] = vec![large.stages[0][0]; 5];
    workload.jobs = vec![large, job(1.0, 0, 10.0, 2, gb(10))];
    let outcome = replay(&workload, "kill", 1e9).unwrap().outcome;
    assert_eq!((outcome.tasks, outcome.misfits), (5, 1));
    assert_eq!(outcome.makespan_s, 50.0);
}

#[test]
fn when_every_node_is_lost_the_error_says_how_many_tasks_are_left() {
    for policy in ["kill", "suspend", "gp", "pado"] {
        let node = NodeSpec::new(resources(4, gb(100)));
        let mut workload = Workload::on("lost", vec![node; 2]);
        workload.jobs = vec![job(0.0, 0, 100.0, 4, gb(10)); 3];
        workload.changes = (0..2)
            .map(|node| (at(50.0), NodeChange::Lost(node)))
            .collect();
        let error = replay(&workload, policy, 1e9).unwrap_err();
        assert!(matches!(error, SimulationError::Stalled { .. }), "{error}");
        let message = error.to_string();
        assert!(
            message.contains("3 of 3 tasks are left"),
            "{policy}: {message}"
        );
    }
}

#[test]
fn what_an_ended_dataflow_needs_no_more_does_not_run_again() {
    let classes = [NodeClass::Reserved, NodeClass::Transient];
    let policies = ["kill", "basic", "suspend", "pado"];
    for (policy, class) in policies
        .map(|policy| classes.map(|class| (policy, class)))
        .into_iter()
        .flatten()
    {
        // Pado starts what creates its own input on reserved nodes alone.
        if policy == "pado" && class == NodeClass::Transient {
            continue;
        }
        let node = NodeSpec {
            class,
            ..NodeSpec::new(resources(4, gb(40)))
        };
        let mut workload = Workload::on("flow", vec![node]);
        let operator = |tasks, creates| (DataflowOperator { tasks, creates }, Bytes::ZERO);
        // Only pado lets the last task wait for those before it.
        let edge = Edge {
            from: 0,
            to: 1,
            dependency: Dependency::ManyToMany,
        };
        let flow = FlowSpec::new(vec![operator(2, true), operator(1, false)], vec![edge]).unwrap();
        let first = job(0.0, 0, 100.0, 1, gb(10)).stages[0][0];
        let last = job(0.0, 0, 10.0, 1, gb(10)).stages[0][0];
        let flow = JobSpec {
            flow: Some(Box::new(flow)),
            stages: vec![vec![first; 2], vec![last]],
            ..job(0.0, 0, 1.0, 1, gb(10))
        };
        workload.jobs = vec![flow, job(0.0, 0, 500.0, 1, gb(10))];
        let run = replay(&workload, policy, 1e9).unwrap();
        let waits = policy == "pado";
        assert_eq!(run.started, 4, "{policy}");
        assert_eq!(run.outcome.tasks, if waits { 4 } else { 2 }, "{policy}");
    }
}

prop_compose! {
    /// Operators, of which each takes what some of those before it put out.
    fn flow()(
        shape in proptest::collection::vec((1_u32..5, any::<bool>(), 0_u64..400, 0.0..60.0_f64), 1..6),
        edges in proptest::collection::vec((0_u32..6, 0_u32..6, 0_usize..4), 0..10),
    ) -> (FlowSpec, Vec<Vec<TaskSpec>>) {
        let kinds = [Dependency::OneToOne, Dependency::OneToMany, Dependency::ManyToOne, Dependency::ManyToMany];
        let count = u32::try_from(shape.len()).unwrap();
        let tasks = |operator: u32| shape[operator as usize].0;
        let forward = edges.into_iter().filter(|(from, to, _)| from < to && *to < count);
        let edges = forward.map(|(from, to, kind)| {
            // One to one needs as many tasks.
            let dependency = if tasks(from) == tasks(to) { kinds[kind] } else { Dependency::ManyToMany };
            Edge { from, to, dependency }
        });
        let edges = edges.collect();
        let operators = shape.iter().map(|(tasks, creates, mb, _)| {
            let operator = DataflowOperator { tasks: *tasks, creates: *creates };
            (operator, Bytes::new(mb * 1_000_000))
        });
        let operators = operators.collect();
        let stages = shape.iter().map(|(tasks, _, _, work)| {
            let task = TaskSpec { work: seconds(*work), asks: resources(1, gb(10)), memory: gb(10), dirty_rate: None };
            vec![task; *tasks as usize]
        });
        let stages = stages.collect();
        (FlowSpec::new(operators, edges).unwrap(), stages)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_dataflow_ends_with_all_of_its_work_done_once(
        (flow, stages) in flow(),
        lost in proptest::collection::vec(1.0..200.0_f64, 0..8),
    ) {
        let node = |class| NodeSpec { class, ..NodeSpec::new(resources(2, gb(40))) };
        let transient = node(NodeClass::Transient);
        let nodes = vec![node(NodeClass::Reserved), transient, transient];
        let mut workload = Workload::on("flow", nodes);
        workload.network = BytesPerSecond::new(1e7).unwrap();
        let flow = JobSpec { flow: Some(Box::new(flow)), stages, ..job(0.0, 0, 1.0, 1, gb(10)) };
        // The other one goes on when the dataflow has ended.
        workload.jobs = vec![flow, job(0.0, 0, 500.0, 1, gb(10)), job(300.0, 0, 500.0, 1, gb(10))];
        let mut times = lost;
        times.sort_by(f64::total_cmp);
        for (node, time) in (1_u32..).zip(times) {
            workload.changes.push((at(time), NodeChange::Lost(node)));
            workload.changes.push((at(time), NodeChange::Joined(transient)));
        }
        let run = replay(&workload, "pado", 1e9).unwrap();
        prop_assert_eq!(run.outcome.tasks, workload.tasks().count() as u64);
        let work = workload.core_seconds() / 3600.0;
        prop_assert!((run.outcome.done_core_h - work).abs() < 1e-5);
    }
}

/// Returns a number of a figure by its name.
fn number(figure: &PaperFigure, what: &str) -> f64 {
    let row = figure.rows.iter().find(|row| row.what == what);
    row.unwrap_or_else(|| panic!("no {what:?} in {:?}", figure.rows))
        .ours
}

#[test]
fn figures_of_suspension_begin_to_degrade_where_the_memory_is_short() {
    let figure = figures::make("001-F4", 1, None, &mut |_| {}).unwrap();
    let worst = figure.rows.iter().filter(|row| row.paper.is_some());
    assert_eq!(worst.count(), 6);
    for medium in ["hdd", "ssd", "nvm"] {
        let at = |gigabytes| {
            number(
                &figure,
                &format!("sojourn on kill, {gigabytes} GB, {medium}"),
            )
        };
        assert_eq!(at("0.5"), at("1.5"), "{medium}");
        assert!(at("1.5") < at("2") && at("2") < at("2.5"), "{medium}");
    }
    let light = figures::make("001-F2", 1, None, &mut |_| {}).unwrap();
    // A kill loses what was done; a wait delays the other by the rest.
    assert_eq!(number(&light, "makespan at 70 %, kill"), 216.0);
    assert_eq!(number(&light, "sojourn at 30 %, wait"), 136.0);
    assert_eq!(number(&light, "sojourn at 30 %, kill"), 80.0);
}

#[test]
fn deadlines_are_met_when_they_are_long() {
    let figure = figures::make("002-F11", 1, None, &mut |_| {}).unwrap();
    let met = |epsilon| number(&figure, &format!("deadlines met at {epsilon}"));
    assert!(met("0.2") <= met("0.8"));
    assert_eq!(met("1"), 2.0);
}

#[test]
fn natjam_costs_less_than_caps_and_kills() {
    let figure = figures::make("002-F4", 1, None, &mut |_| {}).unwrap();
    let more = |job: &str, how: &str| number(&figure, &format!("{job} on alone, {how}"));
    for other in ["hard cap", "kill"] {
        assert!(more("research", "mr+srt") + 10.0 < more("research", other));
    }
    assert!(more("production", "mr+srt") + 10.0 < more("production", "soft cap"));
    assert_eq!(more("production", "hard cap"), 0.0);
}

#[test]
fn figures_of_a_trace_are_made_of_it_or_refused() {
    let refused = figures::make("002-F7", 1, None, &mut |_| {}).unwrap_err();
    assert!(refused.to_string().contains("FB-2009"), "{refused}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    // A job each ten seconds, of one map, every tenth of 150, and every third with a reduce.
    let lines = (0..400_u64).map(|job| {
        let maps: u64 = if job % 10 == 0 { 150 } else { 1 };
        let shuffle = (job % 3 / 2) << 30;
        format!("job{job}\t{}\t10\t{}\t{shuffle}\t0\n", job * 10, maps << 27)
    });
    std::fs::write(&path, lines.collect::<String>()).unwrap();
    let make = |id| figures::make(id, 1, Some(&path), &mut |_| {}).unwrap();
    let soft_cap = make("002-F7");
    let earlier = number(&soft_cap, "production, at least 5 s earlier");
    assert!(earlier > number(&soft_cap, "production, at least 5 s later"));
    let deadlines = make("002-F12");
    let met = |by| number(&deadlines, &format!("deadlines met, {by}"));
    assert!(met("Natjam-R") > met("soft cap"));
    assert!(number(&make("002-F9"), "production, median less median alone") < 10.0);
}
