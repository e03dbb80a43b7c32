//! Replication and `POST /v1/place` choose the same nodes, in the same order: both use one ranking, on the same facts.

use std::time::Duration;

use permafrost_cluster::placement::{CopiesWanted, place};
use permafrost_cluster::{FailureDomain, LiveNode, MemberState, NodeClass, NodeFacts, Tier};
use permafrost_metering::QueueReport;
use permafrost_metering::costs::{NodeReport, believe};
use permafrost_scheduling::NodeId;
use permafrost_server::daemon::node_entry;
use serde_json::json;

use crate::fixture::{GB, Plain, asked, rate};

/// Deterministic numbers that look random.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }
}

fn node(name: String, draw: &mut Draw) -> LiveNode {
    let mut gb_per_s = || (1 + draw.below(100_000)) as f64 / 25_000.0;
    let (write, link) = (rate(gb_per_s()), rate(gb_per_s()));
    let queued = draw.below(20) * GB;
    let report = NodeReport {
        write,
        write_queue: QueueReport {
            bytes: queued,
            ..QueueReport::default()
        },
        links: [("other".to_owned(), link)].into(),
        ..NodeReport::default()
    };
    LiveNode {
        facts: NodeFacts {
            name,
            domain: FailureDomain {
                host: format!("h{}", draw.below(9)),
                rack: format!("r{}", draw.below(3)),
                zone: format!("z{}", draw.below(3)),
            },
            tier: match draw.below(3) {
                0 => Tier::Pmem,
                1 => Tier::Memory,
                _ => Tier::File,
            },
            class: [NodeClass::Reserved, NodeClass::Transient][usize::from(draw.one_in(4))],
            volatile: draw.one_in(4),
            draining: draw.one_in(9),
            capacity_bytes: 100 * GB,
            free_bytes: (10 + draw.below(90)) * GB,
            queued_bytes: queued,
            figures: Some(report),
            ..NodeFacts::default()
        },
        state: [MemberState::Active, MemberState::Drained][usize::from(draw.one_in(9))],
        token: 1,
    }
}

#[tokio::test]
async fn replication_and_the_api_name_the_same_nodes_in_the_same_order() {
    let mut several = 0;
    for seed in 0..60 {
        let mut draw = Draw(seed);
        let nodes: Vec<LiveNode> = (0..14)
            .map(|n| node(format!("n{n:02}"), &mut draw))
            .collect();
        let name = |draw: &mut Draw| format!("n{:02}", draw.below(14));
        let local = name(&mut draw);
        let holders = [name(&mut draw)];
        let without = [name(&mut draw)];
        let wanted = CopiesWanted {
            local: &local,
            copies: 4,
            size_bytes: 5 * GB,
            holders: &holders,
            without: &without,
        };
        let by_replication = place(&nodes, &wanted);

        let entries = nodes.iter().map(|node| {
            let report = node.facts.figures.as_ref().unwrap();
            let believed = believe(None, report, Duration::ZERO, NodeId(0));
            node_entry(&node.facts, believed, true, node.state)
        });
        let asked = asked(Plain::new(entries.collect(), Vec::new()));
        let request = json!({"placements": [{
            "size_bytes": 5 * GB, "copies": 4, "local": local, "holders": holders, "without": without,
        }]});
        let answer = asked.ok("/v1/place", &request).await;
        let chosen = answer["answers"][0]["nodes"].as_array().unwrap();
        let by_api: Vec<&str> = chosen
            .iter()
            .filter_map(|node| node["node"].as_str())
            .collect();
        assert_eq!(by_api, by_replication.nodes, "seed {seed}: {answer:#}");
        assert_eq!(answer["answers"][0]["missing"], by_replication.missing);
        several += usize::from(by_api.len() > 1);
    }
    assert!(several > 40, "{several}: too few choices to compare");
}
