use std::time::Instant;

use permafrost_scheduling::NodeId;
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::{Estimate, Figure, Missing, What};
use permafrost_scheduling::quantity::{BytesPerSecond, Seconds};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::QueueReport;

const ID: NodeId = NodeId(4);

fn rate(value: f64) -> SizedRates {
    SizedRates::uniform(Figure::given(BytesPerSecond::new(value).unwrap()))
}

/// Returns the report as it is read from the registry after `change`.
fn changed(report: &NodeReport, change: impl FnOnce(&mut Value)) -> NodeReport {
    let mut value = serde_json::to_value(report).unwrap();
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

fn judged(report: &NodeReport) -> Believed {
    believe(None, report, Duration::ZERO, ID)
}

fn believed_write(believed: &Believed) -> Result<f64, Missing> {
    let known = believed.figures.write.of(Bytes::mib(1000)).known();
    known.map(|known| known.p50.value() / MIB as f64)
}

#[test]
fn an_honest_report_comes_through_as_it_is() {
    let report = measured().report();
    let report = changed(&report, |_| {});
    let believed = judged(&report);
    assert_eq!(believed.doubts, [""; 0]);
    assert!(close(believed_write(&believed).unwrap(), 1000.0));
    assert_eq!(believed.figures.node, ID);
    // The node reports itself that it has not measured this, so it is no doubt.
    assert_eq!(
        believed.figures.read.sustained().known(),
        Err(Missing::NotMeasured {
            what: What::ReadBandwidth
        })
    );
    assert_eq!(
        believed.figures.write_queue.known().unwrap().p50,
        Bytes::ZERO
    );
}

#[test]
fn a_figure_is_as_old_as_it_was_and_as_the_report() {
    let report = measured().report();
    let later = believe(None, &report, Duration::from_secs(100), ID);
    let age = later.figures.write.sustained().known().unwrap().age;
    assert!((100.0..110.0).contains(&age.value()), "{age}");
    // A queue holds for two minutes, a bandwidth for an hour.
    assert!(later.figures.write_queue.known().is_ok());
    let much_later = believe(None, &report, Duration::from_secs(200), ID);
    assert!(matches!(
        much_later.figures.write_queue.known(),
        Err(Missing::TooOld {
            what: What::Queue,
            ..
        })
    ));
    let an_hour = believe(None, &report, Duration::from_secs(4000), ID);
    assert!(matches!(
        believed_write(&an_hour),
        Err(Missing::TooOld {
            what: What::WriteBandwidth,
            ..
        })
    ));
    assert_eq!(an_hour.doubts, [""; 0], "old is no lie");
}

#[test]
fn rates_that_are_none_are_not_believed_and_the_rest_is() {
    let report = NodeReport {
        read: rate(5e8),
        ..measured().report()
    };
    let rates = ["0", "-5", "1e18", "1e308", "null", "\"fast\"", "1", "2e12"];
    for lie in rates {
        let lying = changed(&report, |value| {
            let lie: Value = serde_json::from_str(lie).unwrap();
            let estimate = json!({"p50": lie, "p95": lie, "age": 0.0, "samples": 9});
            value["write"] = json!([{"known": estimate}, {"known": estimate}, {"known": estimate}, {"known": estimate}]);
        });
        let believed = judged(&lying);
        assert_eq!(
            believed_write(&believed),
            Err(Missing::NotBelieved {
                what: What::WriteBandwidth,
                refused: 1
            }),
            "{lie}"
        );
        assert!(
            believed.doubts[0].contains("writing"),
            "{:?}",
            believed.doubts
        );
        assert!(believed.figures.read.sustained().known().is_ok(), "{lie}");
        assert!(believed.figures.dump_start.known().is_ok(), "{lie}");
    }
}

#[test]
fn a_bad_end_that_is_better_than_the_median_is_a_lie() {
    let estimate = Estimate {
        p95: BytesPerSecond::new(2e9).unwrap(),
        ..Estimate::given(BytesPerSecond::new(1e9).unwrap())
    };
    let lying = NodeReport {
        write: SizedRates::uniform(Figure::Known(estimate)),
        dump_start: Figure::Known(Estimate {
            p95: Seconds::from_millis(1),
            ..Estimate::given(Seconds::from_millis(2))
        }),
        restore_start: Figure::given(Seconds::from_millis(9_000_000)),
        ..NodeReport::default()
    };
    let believed = judged(&lying);
    assert!(believed_write(&believed).is_err());
    assert!(believed.figures.dump_start.known().is_err());
    assert!(believed.figures.restore_start.known().is_err());
    assert!(believed.doubts.len() >= 3);
}

#[test]
fn what_empties_a_queue_is_believed_if_it_can_be() {
    let told = |bytes_per_s| {
        let report = changed(&measured().report(), |value| {
            value["write_queue"]["bytes_per_s"] = bytes_per_s;
        });
        judged(&report)
    };
    let believed = told(json!(2e9));
    let (drain, alone) = (believed.figures.write_drain, believed.figures.write);
    let (drain, alone) = (drain.known().unwrap(), alone.sustained().known().unwrap());
    assert_eq!(drain.p50.value(), 2e9);
    // The relative spread is that of a single transfer.
    let width = |rate: Estimate<BytesPerSecond>| rate.p95.value() / rate.p50.value();
    assert!((width(drain) - width(alone)).abs() < 1e-9);
    assert!(believed.doubts.is_empty());

    for lie in [0.0, -1.0, 1e18, 1.0] {
        let believed = told(json!(lie));
        assert!(believed.figures.write_drain.known().is_err(), "{lie}");
        assert!(believed.doubts[0].contains("queue of dumps"), "{lie}");
        // The rate of a single transfer is still known.
        assert!(believed.figures.write_wait(Bytes::mib(1)).is_ok(), "{lie}");
    }
    let silent = told(json!(null));
    assert!(silent.figures.write_drain.known().is_err());
    assert!(silent.doubts.is_empty());
}

#[test]
fn an_absurd_queue_is_unknown_and_not_short() {
    for queue in [
        json!({"bytes": u64::MAX}),
        json!({"bytes": -1}),
        json!({"running": 5e9}),
        json!({"waiting": 4_000_000_000_u32}),
        json!("long"),
    ] {
        let lying = changed(&measured().report(), |value| {
            value["write_queue"] = queue.clone()
        });
        let believed = judged(&lying);
        assert_eq!(
            believed.figures.write_queue.known(),
            Err(Missing::NotBelieved {
                what: What::Queue,
                refused: 1
            }),
            "{queue}"
        );
        assert_eq!(believed.write_queue, QueueReport::default());
        assert!(believed.doubts[0].contains("queue of dumps"));
        assert!(believed_write(&believed).is_ok());
    }
}

#[test]
fn a_report_that_goes_backwards_is_not_gone_by() {
    let costs = measured();
    let (old, new) = (costs.report(), costs.report());
    let lying = NodeReport {
        write: rate(1e4),
        ..old
    };
    let believed = believe(Some(&new), &lying, Duration::ZERO, ID);
    assert!(close(believed_write(&believed).unwrap(), 1000.0));
    assert!(
        believed.doubts[0].contains("came after"),
        "{:?}",
        believed.doubts
    );
    // After a restart of its daemon the numbers begin anew.
    let restarted = NodeReport {
        started_unix_ms: new.started_unix_ms + 1,
        sequence: 1,
        ..lying
    };
    let believed = believe(Some(&new), &restarted, Duration::ZERO, ID);
    assert_eq!(believed.doubts, [""; 0]);
    assert!(close(believed_write(&believed).unwrap() * MIB as f64, 1e4));
}

#[test]
fn the_last_report_of_each_node_is_kept_with_its_age() {
    let costs = measured();
    let counting = Costs::new(CostsConfig::default());
    let mut reports = Reports::counted_by(Arc::clone(&counting));
    let began = Instant::now();
    let after = |seconds| began + Duration::from_secs(seconds);
    let age = |believed: &Believed| {
        let queue = believed.figures.write_queue.known().unwrap();
        queue.age.value()
    };
    let (first, second) = (costs.report(), costs.report());
    assert!(age(&reports.take("n", Some(&first), ID, began)) < 0.5);
    assert!(close(
        age(&reports.take("n", Some(&first), ID, after(20))),
        20.0
    ));
    assert!(age(&reports.take("n", Some(&second), ID, after(30))) < 0.5);
    // The first report again: it is not used, and the second one ages on.
    let backwards = reports.take("n", Some(&first), ID, after(40));
    assert!(backwards.doubts.len() == 1 && close(age(&backwards), 10.0));
    assert_eq!(counting.numbers().doubts, 1);
    // Evaluated again, it is the same doubt.
    reports.take("n", Some(&first), ID, after(41));
    assert_eq!(counting.numbers().doubts, 1);
    let silent = reports.take("n", None, ID, after(50));
    assert_eq!(silent, Believed::nothing(ID));
    reports.keep(&[]);
    assert!(age(&reports.take("n", Some(&first), ID, after(60))) < 0.5);
}

#[test]
fn what_cannot_be_read_at_all_is_a_doubt() {
    let believed = judged(&NodeReport {
        unreadable: true,
        ..NodeReport::default()
    });
    assert_eq!(believed.doubts, ["its report cannot be read"]);
}

fn nonsense() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![Just(0.0), Just(1e18), Just(-1.0), 1.0..1e12].prop_map(Value::from),
        "[a-z]{0,4}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 5, |inner| {
        let key = prop_oneof![
            Just("known".to_owned()),
            Just("unknown".to_owned()),
            Just("why".to_owned()),
            Just("p50".to_owned()),
            Just("p95".to_owned()),
            Just("age".to_owned()),
            Just("samples".to_owned()),
            Just("bytes".to_owned()),
            "[a-z]{1,3}",
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..5)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

const FIELDS: [&str; 13] = [
    "sequence",
    "started_unix_ms",
    "write",
    "compare",
    "read",
    "dump_start",
    "restore_start",
    "lazy",
    "lazy_start",
    "write_queue",
    "read_queue",
    "links",
    "emulated",
];

proptest! {
    #[test]
    fn whatever_a_node_reports_is_judged_and_only_plausible_figures_are_believed(
        fields in prop::collection::vec((prop::sample::select(&FIELDS[..]), nonsense()), 0..6),
        before in prop::option::of(0..3u64), age_s in 0..10_000u64,
    ) {
        let honest = measured().report();
        let lying = changed(&honest, |value| {
            for (field, lie) in fields {
                value[field] = lie;
            }
        });
        let previous = before.map(|sequence| NodeReport { sequence, ..honest.clone() });
        let believed = believe(previous.as_ref(), &lying, Duration::from_secs(age_s), ID);
        for rates in [believed.figures.write, believed.figures.compare, believed.figures.read, believed.figures.lazy].iter().chain(believed.links.values()) {
            for (_, figure) in rates.by_class() {
                match figure {
                    Figure::Known(known) => {
                        prop_assert!(known.p50.value() >= 1e3 && known.p50.value() <= 1e12 && known.p95 <= known.p50);
                        prop_assert!(known.age.value() >= age_s as f64);
                    }
                    Figure::Unknown { why: Missing::NotBelieved { .. } } => prop_assert!(!believed.doubts.is_empty()),
                    Figure::Unknown { .. } => {}
                }
            }
        }
        for drain in [believed.figures.write_drain, believed.figures.read_drain] {
            let plausible = |rate: f64| (1e3..=1e12).contains(&rate);
            prop_assert!(drain.known().map_or(true, |drain| plausible(drain.p50.value())));
        }
        for queue in [believed.figures.write_queue, believed.figures.read_queue] {
            prop_assert!(queue.known().map_or(true, |queue| queue.p50 <= Bytes::new(1 << 50)));
        }
        prop_assert!(believed.doubts.len() <= 8);
        // The report can also be passed on.
        let told = serde_json::to_string(&lying).unwrap();
        serde_json::from_str::<NodeReport>(&told).unwrap();
    }
}

#[test]
fn who_comes_last_waits_for_those_that_have_to_end_before() {
    let before = |slots, running, waiting| {
        let report = NodeReport {
            write_queue: QueueReport {
                bytes: 1200,
                running,
                waiting,
                slots,
                ..QueueReport::default()
            },
            ..NodeReport::default()
        };
        let believed = believe(None, &report, Duration::ZERO, NodeId(1));
        believed.figures.write_queue.known().unwrap().p50.count()
    };
    // One slot: everything is ahead. Two slots: half of two running transfers, three quarters of these and one
    // more. A free slot: nothing.
    assert_eq!([before(1, 1, 0), before(1, 1, 3)], [1200, 1200]);
    assert_eq!([before(2, 2, 0), before(2, 2, 1)], [600, 900]);
    assert_eq!([before(2, 1, 0), before(4, 3, 0)], [0, 0]);
    assert_eq!(before(0, 2, 0), 1200, "nobody says how many may run");
}
