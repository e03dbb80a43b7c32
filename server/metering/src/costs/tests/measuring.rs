use std::sync::atomic::{AtomicBool, Ordering};

use permafrost_protocol::control;
use permafrost_scheduling::cost::{Copies, Dump, TaskFigures, TierRoom, checkpoint};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::size::Basis;
use permafrost_scheduling::{NodeId, TaskId, cost::TaskResources};
use permafrost_store::{Beginning, DumpDone, RestoreDone, StoreEvent, Transferred};

use super::*;
use crate::QueueReport;

fn rate(rates: &SizedRates, mib: u64) -> f64 {
    let figure = rates.of(Bytes::mib(mib)).known().unwrap();
    figure.p50.value() / MIB as f64
}

#[test]
fn a_dump_is_taken_apart_into_its_start_and_its_bandwidth() {
    let report = measured().report();
    assert!(close(rate(&report.write, 1000), 1000.0), "{report:?}");
    let start = report.dump_start.known().unwrap();
    assert!(close(start.p50.value(), 0.5) && start.samples == 10);
    assert!(report.compare.sustained().known().is_err());
    assert!(report.read.sustained().known().is_err());
}

/// The cost formula of the papers, over the measured figures, gives the duration of a dump.
#[test]
fn the_cost_model_gives_what_a_dump_takes_as_its_client_sees_it() {
    let costs = measured();
    let restored = control::Checkpoint::default();
    costs.restored(&RestoreDone {
        checkpoint: &restored,
        bytes: 1000 * MIB,
        start: Some(Duration::from_millis(100)),
        elapsed: Duration::from_millis(250),
        all_bytes: 1000 * MIB,
        here: true,
        expected: None,
    });
    let believed = believe(None, &costs.report(), Duration::ZERO, NodeId(1));
    let task = TaskFigures {
        full: Figure::given(Bytes::mib(2000)),
        ..TaskFigures::unknown(TaskId(1), TaskResources::ZERO)
    };
    let cost = checkpoint(&task, Dump::Full, Copies::Local, &believed.figures, None).unwrap();
    assert!(close(cost.delay().p50.value(), 0.5 + 2.0), "{cost:?}");
    let both = 2.5 + 0.1 + 0.5;
    assert!(close(cost.overhead().p50.value(), both), "{cost:?}");
}

#[test]
fn a_compared_dump_goes_by_what_it_moves_and_has_a_bandwidth_of_its_own() {
    let costs = measured();
    for _ in 0..5 {
        costs.dumped(&DumpDone {
            kind: DumpKind::Incremental,
            stored_bytes: 10 * MIB,
            transferred: Transferred {
                elapsed: Duration::from_millis(250),
                ..dump("job", 1000).transferred
            },
            whole: Some(Duration::from_millis(750)),
            ..dump("job", 1000)
        });
    }
    let report = costs.report();
    assert!(close(rate(&report.write, 1000), 1000.0));
    assert!(close(rate(&report.compare, 1000), 4000.0));
    let predicted = costs
        .predict("job", "p", DumpKind::Incremental, &memory(2000))
        .unwrap();
    assert_eq!(predicted.basis, Basis::Job);
    assert!(close(predicted.size.p50.count() as f64, (20 * MIB) as f64));
    assert!(close(
        predicted.moved.p50.count() as f64,
        (2000 * MIB) as f64
    ));
}

/// CRIU kills the processes after the seal, the longer the larger they are.
#[test]
fn whoever_ran_it_says_how_long_it_took_in_all() {
    let costs = Costs::new(CostsConfig::default());
    let ids: Vec<String> = (1..=8).map(|n| format!("{n:032x}")).collect();
    for (id, mib) in ids.iter().zip([100, 1000, 200, 800, 300, 600, 400, 500]) {
        costs.dumped(&DumpDone {
            id,
            ..dump("job", mib)
        });
        let seen = Duration::from_millis(mib + 500);
        let took = seen + Duration::from_millis(100 + mib / 2);
        assert!(!costs.took("another", false, took));
        assert!(!costs.took(id, true, took), "it was no restore");
        assert!(costs.took(id, false, took));
        assert!(!costs.took(id, false, took), "once");
    }
    let report = costs.report();
    assert!(close(report.dump_start.known().unwrap().p50.value(), 0.6));
    assert!(close(rate(&report.write, 700), 1000.0 / 1.5));
    // A time below the daemon's own is not believed, and neither is a day.
    for wrong in [Duration::ZERO, Duration::from_secs(86_400)] {
        costs.dumped(&DumpDone {
            id: "wrong",
            ..dump("job", 700)
        });
        assert!(!costs.took("wrong", false, wrong));
    }
}

#[test]
fn what_copies_made_a_dump_wait_for_is_not_the_mediums() {
    let costs = Costs::new(CostsConfig::default());
    for _ in 0..3 {
        costs.dumped(&DumpDone {
            copied: true,
            transferred: Transferred {
                elapsed: Duration::from_millis(4000),
                waited: Duration::from_millis(3000),
                all_bytes: 1000 * MIB,
            },
            whole: Some(Duration::from_millis(4500)),
            ..dump("job", 1000)
        });
    }
    assert!(close(rate(&costs.report().write, 1000), 1000.0));
    // The next dump with copies is expected to take longer all the same.
    let next = |copied| {
        let ticket = costs.begin_dump(&Beginning {
            copied,
            ..beginning("job", 1000)
        });
        ticket.expected.unwrap().whole.unwrap().value()
    };
    assert!(close(next(true), 4.5) && close(next(false), 1.5));
}

#[test]
fn dumps_that_share_a_node_are_not_taken_for_slow_ones() {
    let costs = measured();
    // Two at once at half the speed each: the node does 1000 MiB/s, as before.
    for _ in 0..5 {
        costs.dumped(&DumpDone {
            transferred: Transferred {
                elapsed: Duration::from_millis(2000),
                waited: Duration::ZERO,
                all_bytes: 2000 * MIB,
            },
            ..dump("other", 1000)
        });
    }
    assert!(close(rate(&costs.report().write, 1000), 1000.0));
    // A dump that begins beside one with 300 MiB to go takes longer by the time that those take.
    let running = beginning("job", 600);
    running
        .moved
        .store(300 * MIB, std::sync::atomic::Ordering::Relaxed);
    let first = costs.begin_dump(&running);
    let expected = |mib| {
        let ticket = costs.begin_dump(&beginning("job", mib));
        ticket.expected.unwrap().transfer.unwrap().value()
    };
    assert!(close(expected(1000), 1.3), "{}", expected(1000));
    // A small dump ends first: it has half the node while it lasts.
    assert!(close(expected(100), 0.2), "{}", expected(100));
    drop(first);
    assert!(close(expected(1000), 1.0));
}

#[test]
fn a_prediction_is_compared_with_what_came_of_it() {
    let costs = measured();
    assert!(costs.accuracy().dump_time.errors().is_err());
    let ticket = costs.begin_dump(&beginning("job", 1000));
    let expected = ticket.expected.unwrap();
    assert!(close(expected.whole.unwrap().value(), 1.5), "{expected:?}");
    let queue = costs.report().write_queue;
    assert_eq!((queue.running, queue.bytes >> 20), (1, 1000));
    drop(ticket);
    assert_eq!(costs.report().write_queue, QueueReport::default());
    costs.dumped(&DumpDone {
        whole: Some(Duration::from_millis(2000)),
        stored_bytes: 1000 * MIB,
        expected: Some(expected),
        ..dump("job", 1000)
    });
    let accuracy = costs.accuracy();
    let time = accuracy.dump_time.errors().unwrap();
    assert!(close(time.bias, -0.25) && time.samples == 1, "{time:?}");
    assert!(close(accuracy.stored.errors().unwrap().bias, -0.5));
    assert!(accuracy.moved.errors().unwrap().p95 < 1e-3);
}

#[test]
fn restores_are_measured_and_predicted() {
    let costs = Costs::new(CostsConfig::default());
    let ticket = costs.begin_restore(1000 * MIB);
    assert_eq!(ticket.expected.unwrap().whole, None, "nothing is known yet");
    ticket.read_so_far(400 * MIB);
    ticket.read_so_far(1000 * MIB);
    assert_eq!(ticket.all_read(), 1000 * MIB);
    let checkpoint = control::Checkpoint::default();
    let mut events = costs.events();
    let done = RestoreDone {
        checkpoint: &checkpoint,
        bytes: 1000 * MIB,
        start: Some(Duration::from_millis(200)),
        elapsed: Duration::from_millis(500),
        all_bytes: ticket.all_read(),
        here: true,
        expected: ticket.expected,
    };
    drop(ticket);
    costs.restored(&done);
    assert!(
        matches!(events.try_recv(), Ok(StoreEvent::Restored { elapsed, .. }) if elapsed.as_millis() == 700)
    );
    let next = costs.begin_restore(2000 * MIB).expected.unwrap();
    assert!(close(next.whole.unwrap().value(), 0.2 + 1.0), "{next:?}");
    costs.restored(&RestoreDone {
        expected: Some(next),
        ..done
    });
    let error = costs.accuracy().restore_time.errors().unwrap();
    assert!(close(error.bias, 0.5 / 0.7), "{error:?}");
    // A restore from another node says nothing about this node's medium.
    let before = costs.report().read;
    costs.restored(&RestoreDone {
        elapsed: Duration::from_millis(50_000),
        here: false,
        ..done
    });
    assert!(close(rate(&costs.report().read, 1000), rate(&before, 1000)));
}

#[test]
fn links_count_what_ruled_them_and_lower_bounds_only_where_nothing_is_known() {
    let costs = Costs::new(CostsConfig::default());
    let link = |costs: &Costs| costs.report().links.get("b").map(|link| rate(link, 100));
    costs.copied("b", 1000, Duration::from_millis(1));
    assert_eq!(link(&costs), None, "too little to say anything");
    costs.copied_at_least("b", 100 * MIB, Duration::from_millis(1000));
    assert!(close(link(&costs).unwrap(), 100.0));
    for _ in 0..5 {
        costs.copied("b", 100 * MIB, Duration::from_millis(200));
    }
    assert!(close(link(&costs).unwrap(), 500.0));
    for _ in 0..20 {
        costs.copied_at_least("b", 100 * MIB, Duration::from_millis(1000));
    }
    assert!(close(link(&costs).unwrap(), 500.0));
}

#[test]
fn a_scrub_counts_only_where_no_restore_does() {
    let costs = Costs::new(CostsConfig::default());
    let scrub = ScrubDone {
        bytes: 100 * MIB,
        elapsed: Duration::from_millis(100),
    };
    costs.scrubbed(&scrub);
    assert!(close(rate(&costs.report().read, 100), 1000.0));
    let checkpoint = control::Checkpoint::default();
    costs.restored(&RestoreDone {
        checkpoint: &checkpoint,
        bytes: 100 * MIB,
        start: None,
        elapsed: Duration::from_millis(200),
        all_bytes: 100 * MIB,
        here: true,
        expected: None,
    });
    for _ in 0..9 {
        costs.scrubbed(&scrub);
    }
    assert!(close(rate(&costs.report().read, 100), 500.0));
}

#[test]
fn what_cannot_be_true_is_counted_and_changes_nothing() {
    let costs = measured();
    let before = costs.numbers();
    costs.dumped(&DumpDone {
        whole: None,
        transferred: Transferred {
            elapsed: Duration::ZERO,
            ..dump("job", 1000).transferred
        },
        ..dump("job", 1000)
    });
    let after = costs.numbers();
    assert_eq!(after.refused, before.refused + 1);
    assert!(close(rate(&costs.report().write, 1000), 1000.0));
}

#[test]
fn memory_that_nobody_tells_is_what_it_was_and_history_tells_it() {
    let costs = Costs::new(CostsConfig::default());
    let nobody = costs.predict("job", "", DumpKind::Full, &Memory::default());
    assert!(nobody.is_err());
    let record = |generation: u64| control::Checkpoint {
        job: "job".to_owned(),
        generation,
        parent_generation: generation - 1,
        created_unix_ms: generation,
        memory_bytes: 100 * MIB,
        added_bytes: if generation == 1 { 50 * MIB } else { MIB },
        ..control::Checkpoint::default()
    };
    let parked = control::Checkpoint {
        generation: 0,
        parent_generation: 0,
        ..record(1)
    };
    costs.learn_history(&[record(3), record(1), record(2), parked]);
    let predict = |kind| {
        let predicted = costs.predict("job", "", kind, &Memory::default()).unwrap();
        (
            predicted.size.p50.count() >> 20,
            predicted.moved.p50.count() >> 20,
        )
    };
    assert_eq!(predict(DumpKind::Full), (50, 100));
    assert_eq!(predict(DumpKind::Incremental), (1, 100));
}

#[test]
fn events_are_told_to_whoever_listens() {
    let costs = Costs::new(CostsConfig::default());
    costs.dumped(&dump("unheard", 1));
    let mut events = costs.events();
    costs.dumped(&dump("heard", 1));
    let Ok(StoreEvent::Dumped { job, bytes, .. }) = events.try_recv() else {
        panic!("nothing was told");
    };
    assert_eq!((job.as_str(), bytes), ("heard", MIB));
    assert!(events.try_recv().is_err());
}

#[test]
fn queues_are_those_of_whoever_keeps_them() {
    let costs = Costs::new(CostsConfig::default());
    let queue = |bytes| QueueReport {
        bytes,
        waiting: 2,
        ..QueueReport::default()
    };
    assert!(costs.set_queues(move || [queue(7), queue(9)]));
    assert!(!costs.set_queues(|| [QueueReport::default(); 2]));
    let report = costs.report();
    assert_eq!(
        (report.write_queue, report.read_queue),
        (queue(7), queue(9))
    );
    assert!(costs.report().sequence > report.sequence);
}

#[test]
fn what_is_measured_of_dumps_belongs_to_the_tier_that_they_go_to() {
    let costs = Costs::new(CostsConfig::default());
    let fast_is_full = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&fast_is_full);
    let tiers = move || {
        let room = |tier: &str, free_bytes| TierRoom {
            tier: tier.to_owned(),
            capacity_bytes: MIB,
            free_bytes,
            cold: false,
        };
        let free = u64::from(!asked.load(Ordering::Relaxed));
        vec![room("nvm", free), room("hdd", 1)]
    };
    assert!(costs.set_tiers(tiers));
    let rate = |costs: &Costs| {
        let known = costs.report().write.sustained().known();
        known.ok().map(|rate| rate.p50.value())
    };
    for _ in 0..10 {
        costs.dumped(&dump("job", 1000));
    }
    let fast = rate(&costs).unwrap();
    fast_is_full.store(true, Ordering::Relaxed);
    // One that went to both says nothing of either.
    costs.dumped(&dump("job", 1000));
    assert_eq!(rate(&costs), None, "nothing was written there alone yet");
    for _ in 0..10 {
        let mut slow = dump("job", 1000);
        slow.tier = 1;
        slow.transferred.elapsed *= 10;
        slow.whole = Some(slow.transferred.elapsed);
        costs.dumped(&slow);
    }
    assert!(close(rate(&costs).unwrap() * 10.0, fast));
    fast_is_full.store(false, Ordering::Relaxed);
    assert!(close(rate(&costs).unwrap(), fast));
    assert_eq!(costs.report().tiers[1].tier, "hdd");
}
