//! Cost of a scheduler's decision before it is JSON: choosing a mechanism, planning a preemption, ranking nodes for a
//! resume, placing copies.
//!
//! Tasks of 0.1 to 4 GB on nodes that write 0.5 to 4 GB/s; every figure is known, so that all seven mechanisms but
//! suspending in memory are costed. A plan frees half of what its candidates hold.

use std::collections::BTreeMap;

use divan::Bencher;
use divan::counter::ItemsCount;
use permafrost_scheduling::cost::{Copies, NodeFigures, Replica, TaskFigures, TaskResources};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::place::{CopyTarget, Domain, NodeClass, PlacementRequest, Places};
use permafrost_scheduling::preempt::{Candidate, Site, Terms, choose, plan};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};
use permafrost_scheduling::resume::{Offer, Preference, Readers, rank};
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
