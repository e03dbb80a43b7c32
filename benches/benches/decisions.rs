//! Cost of a scheduler's decision before it is JSON: choosing a mechanism, planning a preemption, ranking nodes for a
//! resume, placing copies.
//!
//! Tasks of 0.1 to 4 GB on nodes that write 0.5 to 4 GB/s; every figure is known, so that all seven mechanisms but
//! suspending in memory are costed. A plan frees half of what its candidates hold.

use std::cell::RefCell;
use std::collections::BTreeMap;

use divan::Bencher;
use divan::counter::ItemsCount;
use permafrost_scheduling::cost::{Copies, NodeFigures, Replica, TaskFigures, TaskResources};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::place::{CopyTarget, Domain, NodeClass, PlacementRequest, Places};
use permafrost_scheduling::policy::{
    ClusterEvent, Leaves, Name, Policy, PolicySettings, SchedulerView, TaskAction, TaskCheckpoint,
    TaskView,
};
use permafrost_scheduling::preempt::{Candidate, Site, Terms, choose, plan};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use permafrost_scheduling::resume::{Offer, Preference, Readers, rank};
use permafrost_scheduling::size::JobId;
use permafrost_scheduling::{NodeId, TaskId};

fn main() {
    divan::main();
}

#[divan::bench]
fn choose_one(bencher: Bencher<'_, '_>) {
    let nodes: Vec<_> = (0..8).map(figures).collect();
    let (task, link) = (task(1), rate(1.2));
    let site = site(&nodes, &link, 1);
    bencher.bench_local(|| choose(&task, &site, &terms()).expect("a choice"));
}

#[divan::bench(args = [100, 1_000, 10_000])]
fn plan_over_8_nodes(bencher: Bencher<'_, '_>, candidates: u32) {
    planned(bencher, candidates, 8);
}

#[divan::bench(args = [1_000, 10_000])]
fn plan_over_1000_nodes(bencher: Bencher<'_, '_>, candidates: u32) {
    planned(bencher, candidates, 1_000);
}

fn planned(bencher: Bencher<'_, '_>, candidates: u32, nodes: u32) {
    let (nodes, link): (Vec<_>, _) = ((0..nodes).map(figures).collect(), rate(1.2));
    let sites: BTreeMap<_, _> = (0..)
        .zip(&nodes)
        .map(|(n, figures)| (figures.node, site(&nodes, &link, n)))
        .collect();
    let tasks: Vec<_> = (0..candidates)
        .zip(nodes.iter().cycle())
        .map(|(n, figures)| Candidate {
            node: figures.node,
            task: task(n),
        })
        .collect();
    let wanted = TaskResources {
        cpu_millis: u64::from(candidates) * 1000 / 2,
        memory: Bytes::ZERO,
    };
    bencher
        .counter(ItemsCount::new(candidates))
        .bench_local(|| {
            let plan = plan(wanted, &tasks, &sites, &terms());
            assert_eq!(plan.lacking, TaskResources::ZERO);
            plan
        });
}

#[divan::bench(args = [8, 1_000, 10_000])]
fn rank_for_a_resume(bencher: Bencher<'_, '_>, nodes: u32) {
    let figures: Vec<_> = (0..nodes).map(figures).collect();
    let offers: Vec<_> = figures
        .iter()
        .map(|node| Offer {
            node,
            lacks: None,
            recall: None,
            lazy: None,
        })
        .collect();
    bencher
        .counter(ItemsCount::new(nodes))
        .bench_local(|| rank(Bytes::mib(512), &offers, Preference::None));
}

/// Measures the search for as many nodes as a resume considers for one checkpoint.
#[divan::bench(args = [8, 1_000, 10_000])]
fn quickest_eleven(bencher: Bencher<'_, '_>, nodes: u32) {
    let mut readers = Readers::default();
    for node in 0..nodes {
        readers.update(&figures(node)).expect("known figures");
    }
    let mut sizes = (1..4000).map(Bytes::mib).cycle();
    bencher.bench_local(|| {
        let size = sizes.next().expect("a cycle");
        let nodes = readers.quickest(size).take(11);
        nodes.map(|(node, _)| u64::from(node.0)).sum::<u64>()
    });
}

/// A full cluster of 12,500 nodes with 22,000 tasks of low priority, as large as a day of Google's trace, in which each
/// second a task of high priority comes, has room made for it, runs and ends.
struct Cluster {
    view: SchedulerView,
    policy: Box<dyn Policy>,
    now: Moment,
    job: JobId,
}

impl Cluster {
    fn new(name: &str, index: bool) -> Self {
        let mut view = SchedulerView::default();
        let job = view.add_job(None);
        let settings = PolicySettings {
            index,
            ..PolicySettings::default()
        };
        let name: Name = name.parse().expect("a policy");
        let mut cluster = Self {
            view,
            policy: name.build(&settings),
            now: Moment::from_micros(0),
            job,
        };
        for node in 0..12_500 {
            let tasks = if node < 9_500 { 2 } else { 1 };
            let capacity = resources(tasks);
            cluster.view.add_node(capacity, figures(node));
            for task in 0..tasks {
                cluster.start(node, u32::try_from(task).expect("few") * 12_500 + node);
            }
        }
        cluster.now = Moment::from_micros(700_000_000);
        cluster.tell(ClusterEvent::Tick);
        cluster
    }

    /// Starts a task at a time between 0 and 600 s.
    fn start(&mut self, node: u32, n: u32) {
        let mut task = TaskView::new(self.job, Moment::from_micros(0), resources(1));
        task.memory = Bytes::mib(100 + u64::from(n * 37 % 3900));
        task.dirty_rate = Some(BytesPerSecond::new(5e7).expect("a rate"));
        let id = self.view.submit(task).expect("a job");
        self.view.begin(id, NodeId(node)).expect("room");
        let when = Moment::from_micros(u64::from(n * 7 % 600) * 1_000_000);
        self.view.runs(id, when).expect("a start");
    }

    fn submit(&mut self) -> TaskId {
        let mut task = TaskView::new(self.job, self.now, resources(1));
        task.priority = 9;
        self.view.submit(task).expect("a job")
    }

    fn decide(&mut self, event: ClusterEvent) -> Vec<permafrost_scheduling::policy::Decision> {
        self.policy.decide(self.now, event, &self.view)
    }

    /// Tells of an event, and carries the decisions out at once.
    fn tell(&mut self, event: ClusterEvent) {
        for decision in self.decide(event) {
            self.carry_out(&decision);
        }
    }

    fn carry_out(&mut self, decision: &permafrost_scheduling::policy::Decision) {
        let (id, now) = (decision.task, self.now);
        match decision.action {
            TaskAction::Preempt(_) => {
                self.view.stops(id, now).expect("it runs");
                let task = self.view.task(id).expect("a task");
                let kept = TaskCheckpoint {
                    node: decision.node,
                    bytes: task.memory,
                    done: task.done,
                };
                let left = self.view.leaves(id, Leaves::Checkpoint(kept), now);
                let node = left.expect("it was leaving");
                self.tell(ClusterEvent::Left(id, node));
            }
            _ => {
                self.view.begin(id, decision.node).expect("room");
                self.view.runs(id, now).expect("a start");
                self.tell(ClusterEvent::Running(id));
            }
        }
    }

    /// Lets a second pass in which what was decided is done, and the task of high priority ends.
    fn second(&mut self, high: TaskId, decided: &[permafrost_scheduling::policy::Decision]) {
        for decision in decided {
            self.carry_out(decision);
        }
        let node = self.view.ends(high, self.now).expect("it runs");
        self.tell(ClusterEvent::Ended(high, node));
        self.now = Moment::from_micros(self.now.micros() + 1_000_000);
    }
}

fn resources(count: u64) -> TaskResources {
    TaskResources {
        cpu_millis: count * 1000,
        memory: Bytes::mib(count * 4000),
    }
}

/// Measures one preemption out of 22,000 candidates on 12,500 nodes, with the index that is kept between decisions.
#[divan::bench(args = ["kill", "li2015", "adaptive"], sample_size = 1, sample_count = 2000)]
fn preempt_one_of_22000(bencher: Bencher<'_, '_>, name: &str) {
    preempted(bencher, name, true);
}

/// Measures the same with a visit of all nodes.
#[divan::bench(args = ["adaptive"], sample_size = 1, sample_count = 20)]
fn preempt_one_of_22000_without_index(bencher: Bencher<'_, '_>, name: &str) {
    preempted(bencher, name, false);
}

fn preempted(bencher: Bencher<'_, '_>, name: &str, index: bool) {
    let cluster = RefCell::new(Cluster::new(name, index));
    let last = RefCell::new(None);
    bencher
        .with_inputs(|| {
            let mut cluster = cluster.borrow_mut();
            if let Some((high, decided)) = last.take() {
                let decided: Vec<_> = decided;
                cluster.second(high, &decided);
            }
            cluster.submit()
        })
        .bench_local_values(|high| {
            let decided = cluster.borrow_mut().decide(ClusterEvent::Submitted(high));
            assert_eq!(decided.len(), 1);
            last.replace(Some((high, decided)));
        });
}

/// Measures the text of one explanation.
#[divan::bench]
fn say_one(bencher: Bencher<'_, '_>) {
    let nodes: Vec<_> = (0..8).map(figures).collect();
    let link = rate(1.2);
    let choice = choose(&task(1), &site(&nodes, &link, 1), &terms()).expect("a choice");
    bencher.bench_local(|| choice.to_string());
}

#[divan::bench(args = [8, 1_000, 10_000])]
fn place_two_copies(bencher: Bencher<'_, '_>, nodes: u32) {
    let places = places(nodes);
    bencher.bench_local(|| {
        let placement = places.place(&PlacementRequest {
            size: Bytes::mib(512),
            copies: 2,
            local: None,
            holders: &[],
            without: &[],
        });
        assert_eq!(placement.nodes.len(), 2);
        placement
    });
}

#[divan::bench(args = [8, 1_000, 10_000])]
fn update_a_node(bencher: Bencher<'_, '_>, nodes: u32) {
    let mut places = places(nodes);
    let mut next = (0..nodes).cycle();
    bencher.bench_local(move || put(&mut places, next.next().expect("a cycle")));
}

fn rate(gb_per_s: f64) -> SizedRates {
    SizedRates::uniform(Figure::given(
        BytesPerSecond::new(gb_per_s * 1e9).expect("a rate"),
    ))
}

fn figures(node: u32) -> NodeFigures {
    NodeFigures {
        write: rate(0.5 + f64::from(node % 8) / 2.0),
        read: rate(1.0 + f64::from(node % 5)),
        write_queue: Figure::given(Bytes::mib(u64::from(node % 13) * 100)),
        read_queue: Figure::given(Bytes::mib(u64::from(node % 7) * 100)),
        dump_start: Figure::given(Seconds::from_millis(30)),
        restore_start: Figure::given(Seconds::from_millis(50)),
        ..NodeFigures::unknown(NodeId(node))
    }
}

/// Returns the site of one of the nodes, with the next node for copies.
fn site<'a>(nodes: &'a [NodeFigures], link: &'a SizedRates, node: usize) -> Site<'a> {
    Site {
        node: &nodes[node],
        replica: Some(Replica {
            link,
            node: &nodes[(node + 1) % nodes.len()],
        }),
        swap: None,
    }
}

fn terms() -> Terms {
    Terms {
        copies: Copies::Replicated,
        ..Terms::default()
    }
}

fn task(n: u32) -> TaskFigures {
    let memory = Bytes::mib(100 + u64::from(n * 37 % 3900));
    let seconds = |n: u32| Figure::given(Seconds::from_millis(u64::from(n) * 1000));
    let holds = TaskResources {
        cpu_millis: 1000,
        memory,
    };
    TaskFigures {
        full: Figure::given(memory),
        has_checkpoint: n.is_multiple_of(2),
        incremental: Figure::given(Bytes::new(memory.count() / 10)),
        resident: Figure::given(memory),
        dirty_rate: Figure::given(BytesPerSecond::new(5e7).expect("a rate")),
        progress: seconds(1 + n * 7 % 600),
        since_checkpoint: seconds(1 + n * 7 % 60),
        remaining: seconds(n * 11 % 900),
        start: seconds(2),
        ..TaskFigures::unknown(TaskId(u64::from(n)), holds)
    }
}

fn put(places: &mut Places, node: u32) {
    let domain = Domain {
        zone: node % 3,
        rack: node / 20,
        host: node,
    };
    let class = if node.is_multiple_of(4) {
        NodeClass::Transient
    } else {
        NodeClass::Reserved
    };
    let target = CopyTarget {
        figures: &figures(node),
        network: None,
        ahead: Bytes::ZERO,
        class,
        domain,
        free: Bytes::mib(u64::from(node % 100) * 1000),
    };
    places.update(&target).expect("known figures");
}

fn places(nodes: u32) -> Places {
    let mut places = Places::default();
    for node in 0..nodes {
        put(&mut places, node);
    }
    places
}
