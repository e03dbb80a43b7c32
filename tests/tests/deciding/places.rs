//! Places in the queues, and the reports while a dump uses one.

use permafrost_tests::criu;
use permafrost_tests::process::wait_for;
use permafrost_tests::workload::{self, Workload};
use serde_json::json;

use super::asking::{Answer, Events, ask, socket};
use super::common::clustered::sealed_dump;
use super::common::pages;
use super::*;

fn reserve(daemon: &Daemon, body: &Value) -> Answer {
    let body = body.to_string();
    ask(socket(daemon), "POST", "/v1/reserve", "", body.as_bytes())
}

fn give_up(daemon: &Daemon, token: &str) -> Answer {
    let path = format!("/v1/reserve/{token}");
    ask(socket(daemon), "DELETE", &path, "", b"")
}

fn reserved(daemon: &Daemon) -> u64 {
    let status = daemon.json(&["status"]).unwrap();
    status["queues"][0]["reserved"].as_u64().unwrap()
}

fn token(of: &Value) -> String {
    of["token"].as_str().expect("a token").to_owned()
}

#[test]
fn a_place_is_reserved_taken_up_by_a_dump_and_given_up_only_once() {
    const TEST: &str = "a_place_is_reserved_taken_up_by_a_dump_and_given_up_only_once";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = quiet(work.path(), &["--dumps-at-once=1"]);
    let mut task = Workload::start(work.path(), &workload::Options::default()).unwrap();

    let first = json!({"direction": "write", "bytes": 16 << 20, "priority": 3, "lifetime_s": 120});
    let first = reserve(&daemon, &first);
    assert_eq!(first.status, 200, "{first:?}");
    let lapses = number(&first.body["lapses_in_s"]);
    assert!((60.0..=120.0).contains(&lapses), "{first:?}");
    assert_eq!(first.body["bytes_before"], 0);
    let nodes = told(&daemon, &["nodes"]).1;
    assert_eq!(first.body["node"], nodes["answered_by"]);
    // The shell's is of the same kind: what is before it is what the API has reserved.
    let second = daemon.json(&["reserve", "--bytes", "1M"]).unwrap();
    assert_eq!(second["bytes_before"], 16 << 20);
    assert_eq!(reserved(&daemon), 2);
    wait_for("the reservations among the nodes", LIMIT, || {
        let nodes = told(&daemon, &["nodes"]).1;
        let queue = &nodes["nodes"][0]["tiers"][0]["write_queue"];
        Ok((queue["reserved"] == 2 && queue["bytes"]["p50"] == 17 << 20).then_some(()))
    })
    .unwrap();

    // Each is taken up by a dump, and then is none any more.
    for reserved in [&first.body, &second] {
        let token = token(reserved);
        let pid = task.pid().to_string();
        let place = work.path().join("place");
        std::fs::write(&place, &token).unwrap();
        let place = place.to_str().unwrap();
        let dump = [
            "dump",
            "--job",
            "train",
            "--pid",
            &pid,
            "--reservation-file",
            place,
        ];
        daemon.json(&dump).unwrap();
        task.wait_until_gone().unwrap();
        daemon.run(&["restore", "train"]).unwrap();
        give_up(&daemon, &token).assert_problem(404, "not-found", &[]);
        let again = told(&daemon, &dump);
        assert_eq!(again.0, 4, "{again:?}");
    }
    assert_eq!(reserved(&daemon), 0);
    assert!(task.verify().unwrap().is_sound(), "frozen for nothing");
    task.kill();
    process::reap(task.pid());
}

#[test]
fn a_token_that_is_given_up_has_lapsed_or_never_was_is_not_found() {
    let work = tempfile::tempdir().unwrap();
    let daemon = quiet(work.path(), &[]);
    let place = json!({"direction": "read", "bytes": 1000});
    let kept = token(&reserve(&daemon, &place).body);
    let given_up = give_up(&daemon, &kept);
    assert_eq!(given_up.status / 100, 2, "{given_up:?}");
    give_up(&daemon, &kept).assert_problem(404, "not-found", &[]);

    let short = json!({"direction": "write", "bytes": 1000, "lifetime_s": 0.001});
    let lapsed = token(&reserve(&daemon, &short).body);
    wait_for("its lapse", LIMIT, || {
        Ok((reserved(&daemon) == 0).then_some(()))
    })
    .unwrap();
    give_up(&daemon, &lapsed).assert_problem(404, "not-found", &[]);
    for never in [&*"f".repeat(32), "nonsense", "%00", "a%2Fb"] {
        give_up(&daemon, never).assert_problem(404, "not-found", &[]);
    }
    // One of the shell's, given up through the API, and the other way round.
    let shells = daemon.json(&["reserve", "--bytes", "1M"]).unwrap();
    assert_eq!(give_up(&daemon, &token(&shells)).status / 100, 2);
    let write = json!({"direction": "write", "bytes": 1});
    let ours = token(&reserve(&daemon, &write).body);
    let place = work.path().join("place");
    std::fs::write(&place, &ours).unwrap();
    let place = place.to_str().unwrap();
    let cancel = ["reserve", "--cancel", "--reservation-file", place];
    let done = daemon.json(&cancel).unwrap();
    assert_eq!(done["count"], 1);
    assert_eq!(reserved(&daemon), 0);
}

#[test]
fn events_tell_of_a_dump_from_its_open_to_its_seal_and_removal() {
    let work = tempfile::tempdir().unwrap();
    let daemon = quiet(work.path(), &[]);
    let events = Events::of(socket(&daemon), "");
    let runs = |running: u64| {
        move |event: &Value| {
            event["event"] == "queue"
                && event["direction"] == "write"
                && event["running"] == running
        }
    };
    let memory = pages(7, 300);
    sealed_dump(&daemon, work.path(), "train", &memory, || {
        events.next("a dump that runs", runs(1));
    });
    // Its end of the queue and its seal come in either order.
    let both = std::cell::Cell::new((None, false));
    events.next("the seal and the end", |event| {
        let (mut sealed, mut ended) = both.take();
        if event["event"] == "checkpoint" {
            sealed = Some(event.clone());
        }
        ended |= runs(0)(event);
        let over = sealed.is_some() && ended;
        both.set((sealed, ended));
        over
    });
    let sealed = both.take().0.unwrap();
    assert_eq!(sealed["checkpoint"], "train@1");
    assert_eq!(
        (&sealed["job"], &sealed["generation"]),
        (&"train".into(), &1.into())
    );
    assert_eq!(sealed["memory_bytes"], 300 * 4096);
    assert!(sealed["stored_bytes"].as_u64() >= Some(300 * 4096));
    // Who hears of it finds it.
    let known = ask(socket(&daemon), "GET", "/v1/checkpoints?job=train", "", b"");
    assert_eq!(known.body["checkpoints"][0]["checkpoint"], "train@1");

    daemon.run(&["rm", "train@1", "--last"]).unwrap();
    let removed = events.next("the removal", |event| event["event"] == "removed");
    assert_eq!(removed["checkpoint"], "train@1");
    assert_no_panic(&daemon);
}
