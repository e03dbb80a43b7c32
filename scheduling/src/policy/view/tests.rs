use super::*;

fn cpus(count: u64) -> TaskResources {
    TaskResources {
        cpu_millis: count * 1000,
        memory: Bytes::mib(count),
    }
}

fn at(seconds: u64) -> Moment {
    Moment::from_micros(seconds * 1_000_000)
}

/// Makes two nodes of four processors, and a task of three.
fn cluster() -> (SchedulerView, TaskId) {
    let mut view = SchedulerView::default();
    for _ in 0..2 {
        view.add_node(cpus(4), NodeFigures::unknown(NodeId(0)));
    }
    let job = view.add_job(None);
    let task = view.submit(TaskView::new(job, at(0), cpus(3))).unwrap();
    (view, task)
}

#[test]
fn a_node_never_has_more_than_fits() {
    let (mut view, task) = cluster();
    view.begin(task, NodeId(1)).unwrap();
    let job = view.task(task).unwrap().job;
    let other = view.submit(TaskView::new(job, at(0), cpus(2))).unwrap();
    let no_room = RefusedChange::NoRoom {
        task: other,
        node: NodeId(1),
    };
    assert_eq!(view.begin(other, NodeId(1)), Err(no_room));
    view.runs(task, at(1)).unwrap();
    view.resize(task, cpus(2), at(2)).unwrap();
    view.begin(other, NodeId(1)).unwrap();
    assert_eq!(
        view.resize(task, cpus(3), at(3)),
        Err(RefusedChange::NoRoom {
            task,
            node: NodeId(1)
        })
    );
    assert_eq!(view.node(NodeId(1)).unwrap().free, TaskResources::ZERO);
    assert_eq!(view.job(job).unwrap().holds, cpus(4));
    assert_eq!(view.job(job).unwrap().containers, 2);
}

#[test]
fn work_is_kept_lost_and_restored_as_the_task_left() {
    let (mut view, task) = cluster();
    let done = |view: &SchedulerView, now| view.task(task).unwrap().progress(at(now)).value();
    let start = |view: &mut SchedulerView, node, now| {
        view.begin(task, NodeId(node)).unwrap();
        view.runs(task, at(now)).unwrap();
    };
    start(&mut view, 0, 10);
    assert_eq!(done(&view, 15), 5.0);
    view.stops(task, at(16)).unwrap();
    assert_eq!(done(&view, 20), 6.0);
    let kept = TaskCheckpoint {
        node: NodeId(0),
        bytes: Bytes::mib(3),
        done: Seconds::from_millis(6000),
    };
    view.leaves(task, Leaves::Checkpoint(kept), at(18)).unwrap();
    start(&mut view, 1, 20);
    view.leaves(task, Leaves::InMemory, at(24)).unwrap();
    assert_eq!(done(&view, 30), 10.0);
    assert!(
        view.begin(task, NodeId(0)).is_err(),
        "it is in the memory of the other"
    );
    start(&mut view, 1, 30);
    view.leaves(task, Leaves::LastCheckpoint, at(33)).unwrap();
    assert_eq!(done(&view, 40), 6.0);
    view.lose(NodeId(0), at(41)).unwrap();
    assert_eq!(view.task(task).unwrap().state, TaskState::Waiting);
    assert_eq!(done(&view, 42), 0.0);
}

#[test]
fn the_tasks_of_a_lost_node_wait_again() {
    let (mut view, task) = cluster();
    view.begin(task, NodeId(0)).unwrap();
    view.runs(task, at(1)).unwrap();
    assert_eq!(view.lose(NodeId(0), at(5)).unwrap(), [task]);
    assert_eq!(view.task(task).unwrap().state, TaskState::Waiting);
    assert_eq!(
        view.begin(task, NodeId(0)),
        Err(RefusedChange::NoNode(NodeId(0)))
    );
    view.begin(task, NodeId(1)).unwrap();
    let state = view.task(task).unwrap().state;
    assert_eq!(
        view.ends(task, at(6)),
        Err(RefusedChange::State { task, state })
    );
}
