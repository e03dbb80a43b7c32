//! The papers' examples.

use permafrost_scheduling::cost::{Dump, PreemptionMechanism};
use permafrost_scheduling::policy::{Name, PolicySettings, TaskAction, TaskView};
use permafrost_scheduling::quantity::{Bytes, Moment};
use permafrost_scheduling::size::JobId;
use permafrost_scheduling::{NodeId, TaskId};

use crate::world::{World, at, cpus, seconds};

fn world(name: &str, nodes: u32, containers: u64) -> World {
    let name: Name = name.parse().unwrap();
    World::new(
        name.build(&PolicySettings::default()),
        nodes,
        cpus(containers, containers * 1000),
    )
}

/// Submits a task of one container of 500 MB.
fn submit(world: &mut World, job: JobId, priority: u8, when: f64, work: f64) {
    let mut task = TaskView::new(job, at(when), cpus(1, 1000));
    task.priority = priority;
    task.memory = Bytes::new(500_000_000);
    task.work = Some(seconds(work));
    world.submit(task);
}

/// The paper's two k-means jobs (000, §3.3.3): the second arrives after 30 s of the first's 60. Returns when they end.
fn k_means(name: &str) -> (f64, f64) {
    let mut world = world(name, 1, 1);
    let job = world.view.add_job(None);
    submit(&mut world, job, 0, 0.0, 60.0);
    submit(&mut world, job, 1, 30.0, 60.0);
    world.run(at(1000.0));
    let end = |task: u64| world.ended[&TaskId(task)].since(at(0.0)).value();
    (end(0), end(1))
}

#[test]
fn wait_kill_and_checkpoint_end_when_the_papers_two_jobs_do() {
    let near = |(low, high): (f64, f64), expected: (f64, f64)| {
        assert!(
            (low - expected.0).abs() < 1.0 && (high - expected.1).abs() < 1.0,
            "{low} and {high} and not {expected:?}"
        );
    };
    near(k_means("wait"), (60.0, 120.0));
    near(k_means("kill"), (150.0, 90.0));
    // 500 MB at 100 MB/s: 5 s to dump, and 5 s to restore.
    for name in ["basic", "li2015"] {
        near(k_means(name), (130.0, 95.0));
    }
    // With swap nothing is dumped: the newcomer's memory is paged, at no cost in this world.
    near(k_means("adaptive"), (120.0, 90.0));
}

fn preempted(world: &World) -> Vec<(Moment, TaskId)> {
    let is = |action| matches!(action, TaskAction::Preempt(_));
    let log = world.log.iter().filter(|(_, decision)| is(decision.action));
    log.map(|(when, decision)| (*when, decision.task)).collect()
}

#[test]
fn victims_come_from_the_job_with_most_or_least_containers_and_have_least_or_most_left() {
    let first = |name: &str| {
        let mut world = world(name, 5, 1);
        let jobs: Vec<JobId> = (0..3).map(|_| world.view.add_job(None)).collect();
        for work in [100.0, 200.0, 300.0] {
            submit(&mut world, jobs[0], 0, 0.0, work);
        }
        for work in [400.0, 150.0] {
            submit(&mut world, jobs[1], 0, 0.0, work);
        }
        submit(&mut world, jobs[2], 1, 10.5, 10.0);
        world.run(at(12.0));
        preempted(&world)
    };
    let victims = |name: &str| {
        first(name)
            .into_iter()
            .map(|(_, task)| task.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(victims("mr+srt"), [0]);
    assert_eq!(victims("mr+lrt"), [2]);
    assert_eq!(victims("lr+srt"), [4]);
    assert_eq!(victims("lr+lrt"), [3]);
    // Decided at the next second, and once: the victim is not gone after two.
    assert_eq!(first("mr+srt"), [(at(11.0), TaskId(0))]);
}

/// Theorem 2.1: those evicted are resumed together, and the job ends the sooner the less they had left.
#[test]
fn shortest_remaining_time_ends_the_victim_job_first() {
    let end = |name: &str| {
        let mut world = world(name, 6, 1);
        let (research, production) = (world.view.add_job(None), world.view.add_job(None));
        for work in [60.0, 80.0, 100.0, 120.0, 140.0, 160.0] {
            submit(&mut world, research, 0, 0.0, work);
        }
        for _ in 0..3 {
            submit(&mut world, production, 1, 20.5, 15.0);
        }
        world.run(at(5000.0));
        let ends = (0..6).map(|task| world.ended[&TaskId(task)]);
        ends.max().unwrap()
    };
    let (shortest, longest, random) = (end("mr+srt"), end("mr+lrt"), end("mr+random"));
    assert!(
        shortest <= random && random <= longest && shortest < longest,
        "{shortest:?} {random:?} {longest:?}"
    );
}

#[test]
fn a_request_that_is_not_answered_in_twelve_seconds_becomes_a_kill() {
    let mut world = world("mr+srt", 1, 1);
    let (research, production) = (world.view.add_job(None), world.view.add_job(None));
    submit(&mut world, research, 0, 0.0, 100.0);
    let mut slow = TaskView::new(production, at(10.5), cpus(1, 1000));
    slow.priority = 1;
    slow.work = Some(seconds(10.0));
    world.submit(slow);
    // 5 GB take 50 s.
    world.run(at(9.0));
    let mut task = world.view.task(TaskId(0)).unwrap().clone();
    task.memory = Bytes::new(5_000_000_000);
    world.replace(TaskId(0), task);
    world.run(at(60.0));
    let actions: Vec<_> = (world.log.iter())
        .filter(|(_, decision)| {
            decision.task == TaskId(0) && matches!(decision.action, TaskAction::Preempt(_))
        })
        .map(|(when, decision)| (when.since(at(0.0)).value(), decision.action))
        .collect();
    assert!(
        matches!(
            actions[..],
            [
                (asked, TaskAction::Preempt(PreemptionMechanism::Checkpoint { dump: Dump::Full, .. })),
                (killed, TaskAction::Preempt(PreemptionMechanism::Kill)),
            ] if asked == 11.0 && killed == 24.0
        ),
        "{actions:?}"
    );
    assert!(world.ended[&TaskId(1)] < at(36.0));
}

/// Job 1 with 200 s, job 2 with 190, job 3 with 180, as in the paper's Figure 10, on 8 containers.
fn deadlines(world: &mut World) -> Vec<JobId> {
    let jobs: Vec<JobId> = [200.0, 190.0, 180.0]
        .map(|by| world.view.add_job(Some(at(by))))
        .to_vec();
    for (index, job) in (0_u32..).zip(&jobs) {
        for _ in 0..8 {
            submit(world, *job, 0, f64::from(index) * 5.0, 50.0);
        }
    }
    jobs
}

#[test]
fn by_deadlines_all_are_met_and_by_laxity_they_go_in_lockstep() {
    let ends = |name: &str| {
        let mut world = world(name, 8, 1);
        deadlines(&mut world);
        world.run(at(5000.0));
        let end = |job: u64| {
            (job * 8..job * 8 + 8)
                .map(|task| world.ended[&TaskId(task)])
                .max()
                .unwrap()
        };
        ([end(0), end(1), end(2)], preempted(&world).len())
    };
    let (mdf, few) = ends("mdf+edf");
    assert!(mdf[2] < mdf[1] && mdf[1] < mdf[0], "{mdf:?}");
    assert!(
        mdf[2] <= at(180.0) && mdf[1] <= at(190.0) && mdf[0] <= at(200.0),
        "{mdf:?}"
    );
    let (mlf, many) = ends("mlf+llf");
    assert!(mlf.iter().max() > mdf.iter().max(), "{mlf:?}");
    assert!(many > few, "{many} {few}");
}

#[test]
fn eviction_by_deadline_with_resumption_by_laxity_thrashes() {
    let preemptions = |policy| {
        let mut world = World::new(policy, 1, cpus(1, 1000));
        // The first has the later deadline, and more to do.
        let late = world.view.add_job(Some(at(400.0)));
        let early = world.view.add_job(Some(at(300.0)));
        submit(&mut world, late, 0, 0.0, 380.0);
        submit(&mut world, early, 0, 1.0, 10.0);
        world.run(at(120.0));
        preempted(&world).len()
    };
    let forced = permafrost_scheduling::policy::mismatched_deadlines(&PolicySettings::default());
    let matched: Name = "mdf+edf".parse().unwrap();
    let (forced, matched) = (
        preemptions(forced),
        preemptions(matched.build(&PolicySettings::default())),
    );
    assert!(matched == 1 && forced > 3, "{forced} against {matched}");
}

#[test]
fn a_task_without_room_anywhere_waits_where_algorithm_2_says() {
    // The node with the checkpoint is free again after 3 s; sending 500 MB takes 5.
    let places = |name: &str, busy: f64| {
        let mut world = world(name, 2, 1);
        let job = world.view.add_job(None);
        for node in 0..2 {
            world.view.node_mut(NodeId(node)).unwrap().swap = None;
        }
        submit(&mut world, job, 0, 0.0, 100.0);
        submit(&mut world, job, 1, 0.0, 50.0);
        submit(&mut world, job, 1, 30.0, 20.0 + busy);
        world.run(at(1000.0));
        let log = world.log.iter();
        let restored =
            log.filter(|(_, decision)| matches!(decision.action, TaskAction::Restore { .. }));
        restored
            .map(|(_, decision)| decision.node.0)
            .collect::<Vec<_>>()
    };
    // Task 0 runs on node 0, task 1 on node 1 until 50 s; task 2 takes node 0, and ends there after 55 s and `busy`.
    let (soon, late) = (places("basic+cheaper", -4.0), places("basic+cheaper", 40.0));
    assert_eq!((soon, late), (vec![0], vec![1]));
    assert_eq!(places("basic+remote", -4.0), [1]);
    assert_eq!(places("basic+local", 40.0), [0]);
}

#[test]
fn suspension_goes_with_heartbeats_smallest_first_and_spares_the_nearly_done() {
    let mut world = world("suspend", 3, 1);
    let job = world.view.add_job(None);
    // The first is nearly done, the second large, the third small, the fourth has just begun.
    for (work, megabytes) in [(16.0, 100), (500.0, 900), (500.0, 200)] {
        let mut task = TaskView::new(job, at(0.0), cpus(1, 1000));
        task.memory = Bytes::new(megabytes * 1_000_000);
        task.work = Some(seconds(work));
        world.submit(task);
    }
    for when in [10.5, 10.6, 10.7] {
        submit(&mut world, job, 1, when, 30.0);
    }
    world.run(at(14.0));
    // The first newcomer waits for the one that is nearly done; the others are suspended at the heartbeat, 12 s.
    let log: Vec<_> = (world.log.iter())
        .filter_map(|(when, decision)| match decision.action {
            TaskAction::Preempt(how) => Some((when.since(at(0.0)).value(), decision.task.0, how)),
            _ => None,
        })
        .collect();
    let suspend = PreemptionMechanism::SuspendInMemory;
    assert_eq!(log.len(), 3, "{log:?}");
    assert!(
        log.contains(&(12.0, 0, PreemptionMechanism::Wait)),
        "{log:?}"
    );
    assert!(
        log.contains(&(12.0, 2, suspend)) && log.contains(&(12.0, 1, suspend)),
        "{log:?}"
    );
    world.run(at(3000.0));
    assert_eq!(world.wasted, 0.0, "each resumed on its node");
    assert_eq!(world.ended.len(), 6);
}

#[test]
fn a_suspended_task_begins_again_elsewhere_when_its_node_stays_full() {
    let mut world = world("suspend", 2, 1);
    let job = world.view.add_job(None);
    submit(&mut world, job, 0, 0.0, 100.0);
    submit(&mut world, job, 1, 0.0, 45.0);
    submit(&mut world, job, 1, 20.5, 500.0);
    world.run(at(3000.0));
    // Its node is taken from 21 to 521 s; the other is free from 45 s on, and 15 s later it gives up 21 s of work.
    let end = world.ended[&TaskId(0)].since(at(0.0)).value();
    assert!((160.0..170.0).contains(&end), "{end}");
    assert!((20.0..22.0).contains(&world.wasted), "{}", world.wasted);
}

/// The paper's containers: long ones of 8 processors and 16 GB, short ones of 4 and 4 (004, §5.1).
fn long_and_short(name: &str, shorts: u32) -> World {
    let name: Name = name.parse().unwrap();
    let mut world = World::new(name.build(&PolicySettings::default()), 2, cpus(16, 32_000));
    let long = world.view.add_job(None);
    for _ in 0..4 {
        let mut task = TaskView::new(long, at(0.0), cpus(8, 16_000));
        task.work = Some(seconds(300.0));
        task.memory = Bytes::mib(4000);
        world.submit(task);
    }
    let short = world.view.add_job(None);
    for _ in 0..shorts {
        let mut task = TaskView::new(short, at(10.0), cpus(4, 4000));
        task.priority = 1;
        task.work = Some(seconds(20.0));
        world.submit(task);
    }
    world
}

#[test]
fn long_containers_shrink_for_short_tasks_at_once_or_in_steps_and_get_all_back() {
    let taken = |name: &str| {
        let mut world = long_and_short(name, 1);
        world.run(at(12.5));
        let log = world.log.iter();
        let resized = log.filter_map(|(_, decision)| match decision.action {
            TaskAction::Resize(to) => Some((decision.task.0, 8000 - to.cpu_millis)),
            _ => None,
        });
        let taken: Vec<_> = resized.collect();
        world.run(at(5000.0));
        assert_eq!(world.ended.len(), 5, "{name}");
        assert!(world.wasted == 0.0, "{name} wastes nothing");
        (taken, world.ended[&TaskId(4)].since(at(10.0)).value())
    };
    // All of the request from one container, or 2 processors of each of two.
    let ((ip, soon), (gp, later)) = (taken("ip"), taken("gp"));
    assert_eq!(ip, [(0, 4000)]);
    assert_eq!(gp, [(0, 2000), (1, 2000)]);
    assert!(soon < 25.0 && later < 30.0, "{soon} {later}");
}

#[test]
fn forty_percent_are_all_that_long_jobs_get_when_the_rest_is_reserved() {
    let mut world = long_and_short("reserve", 2);
    world.run(at(9.0));
    // 12.8 of 32 processors: one container of 8.
    assert_eq!(world.view.held_by_priority_0(), cpus(8, 16_000));
    world.run(at(5000.0));
    assert_eq!(world.ended.len(), 6);
    assert!(world.ended[&TaskId(4)] < at(31.0), "it did not wait");
}

#[test]
fn an_eviction_runs_only_what_was_not_committed_again() {
    use permafrost_scheduling::place::NodeClass;
    use permafrost_scheduling::policy::pado::{Dataflow, DataflowOperator, Dependency, Edge};
    let mut world = world("pado", 4, 1);
    for node in 0..3 {
        world.view.node_mut(NodeId(node)).unwrap().class = NodeClass::Transient;
    }
    let job = world.view.add_job(None);
    let map = DataflowOperator {
        tasks: 6,
        creates: false,
    };
    let reduce = DataflowOperator { tasks: 2, ..map };
    let shuffle = Edge {
        from: 0,
        to: 1,
        dependency: Dependency::ManyToMany,
    };
    let flow = Dataflow::new(vec![map, reduce], vec![shuffle]).unwrap();
    world.view.set_dataflow(job, flow).unwrap();
    for task in 0..8 {
        let mut task = TaskView {
            operator: Some(u32::from(task >= 6)),
            ..TaskView::new(job, at(0.0), cpus(1, 1000))
        };
        task.work = Some(seconds(10.0));
        world.submit(task);
    }
    // Three maps end at 10.1 s and are committed at 11.1; three others run until 20.2.
    world.lose(NodeId(0), at(15.0));
    world.run(at(500.0));
    let starts = |node: u32| {
        let log = world
            .log
            .iter()
            .filter(|(_, decision)| decision.node == NodeId(node));
        log.map(|(_, decision)| decision.task.0).collect::<Vec<_>>()
    };
    let mut maps: Vec<u64> = (0..3).flat_map(starts).collect();
    maps.sort_unstable();
    // The one that ran on the lost node, the fourth, runs twice; those that were committed do not.
    assert_eq!(maps, [0, 1, 2, 3, 3, 4, 5]);
    assert_eq!(starts(3), [6, 7], "the gatherers run on the reserved node");
    assert_eq!(world.ended.len(), 8);
}

/// A decision that the view refused does not stand: the room that it was to make is asked for again.
#[test]
fn a_refused_preemption_is_decided_again() {
    use permafrost_scheduling::cost::NodeFigures;
    use permafrost_scheduling::policy::{ClusterEvent, SchedulerView};

    let mut view = SchedulerView::default();
    let node = view.add_node(cpus(1, 1000), NodeFigures::unknown(NodeId(0)));
    let job = view.add_job(None);
    let mut task = TaskView::new(job, at(0.0), cpus(1, 1000));
    let low = view.submit(task.clone()).unwrap();
    view.begin(low, node).unwrap();
    view.runs(low, at(1.0)).unwrap();
    task.priority = 1;
    let high = view.submit(task).unwrap();
    let mut policy = "kill"
        .parse::<Name>()
        .unwrap()
        .build(&PolicySettings::default());
    let mut decide = |event, when| {
        let decisions = policy.decide(at(when), event, &view);
        let kill = TaskAction::Preempt(PreemptionMechanism::Kill);
        decisions
            .iter()
            .any(|decision| decision.task == low && decision.action == kill)
    };
    assert!(decide(ClusterEvent::Submitted(high), 2.0));
    // Nobody has carried it out.
    assert!(decide(ClusterEvent::NodeChanged(node), 3.0));
}
