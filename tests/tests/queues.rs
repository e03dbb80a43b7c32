//! Dumps that wait for admission: their order, dumps that give up, and refusals before anything is frozen.

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use permafrost_protocol::control::{ErrorCode, Progress, QueueStatus, request};
use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process::{signal, wait_for};
use permafrost_tests::workload::{self, Workload};
use permafrost_tests::{criu, process};
use permafrost_transport::control::{Connection, ControlError};
use rustix::process::Signal;

use common::clustered::sealed_dump;
use common::*;

const LIMIT: Duration = Duration::from_secs(60);

fn daemon(work: &Path, dumps_at_once: &str) -> Daemon {
    let options = Options {
        extra: vec!["--dumps-at-once".to_owned(), dumps_at_once.to_owned()],
        ..Options::default()
    };
    Daemon::start(work, &options).unwrap()
}

fn writes(daemon: &Daemon) -> QueueStatus {
    let mut connection = Connection::connect(&daemon.control()).unwrap();
    let status = connection.call(request::Status {}).unwrap();
    status.queues.into_iter().next().unwrap()
}

fn wait_until(daemon: &Daemon, what: &str, so: impl Fn(&QueueStatus) -> bool) {
    wait_for(what, LIMIT, || Ok(so(&writes(daemon)).then_some(()))).unwrap();
}

fn open(job: &str) -> request::Open {
    request::Open {
        job: job.to_owned(),
        seal_follows: true,
        bound_to_connection: true,
        ..request::Open::default()
    }
}

/// Makes a dump that runs until it is dropped.
fn frozen(daemon: &Daemon) -> Frozen {
    let frozen = Frozen::dump(Peer::anonymous(daemon, Dialect::V32));
    wait_until(daemon, "a dump that runs", |queue| queue.running == 1);
    frozen
}

/// Starts a dump that waits, sends its name when it is admitted, and then ends at once.
fn waiting(
    daemon: &Daemon,
    open: request::Open,
    order: &mpsc::Sender<String>,
) -> thread::JoinHandle<Vec<Progress>> {
    let mut connection = Connection::connect(&daemon.control()).unwrap();
    let order = order.clone();
    thread::spawn(move || {
        let (mut told, job) = (Vec::new(), open.job.clone());
        let opened = connection
            .call_with(open, None, &mut |progress| told.push(progress.clone()))
            .unwrap();
        order.send(job).unwrap();
        let session = opened.session;
        connection
            .call(request::Abort {
                session,
                ..request::Abort::default()
            })
            .unwrap();
        told
    })
}

#[test]
fn priority_goes_first_and_a_reservation_keeps_its_place() {
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "1");
    let frozen = frozen(&daemon);
    let (sender, order) = mpsc::channel();
    let mut control = Connection::connect(&daemon.control()).unwrap();
    let reserved = control
        .call(request::Reserve {
            direction: "write".to_owned(),
            bytes: 1 << 20,
            ..request::Reserve::default()
        })
        .unwrap();
    assert_eq!(reserved.starts_in_ms, None, "nothing was measured");
    let mut threads = Vec::new();
    for (count, (job, priority, deadline_ms, reservation)) in [
        ("plain", 0, None, ""),
        ("urgent", 0, Some(0), ""),
        ("high", 7, None, ""),
        ("reserved", 0, None, &*reserved.token),
        ("highest", 11, None, ""),
    ]
    .into_iter()
    .enumerate()
    {
        let open = request::Open {
            priority,
            deadline_ms,
            reservation: reservation.to_owned(),
            expected_bytes: 1000,
            ..open(job)
        };
        threads.push(waiting(&daemon, open, &sender));
        wait_until(&daemon, job, |queue| queue.waiting as usize == count + 1);
    }
    let queue = writes(&daemon);
    assert_eq!((queue.running, queue.reserved, queue.slots), (1, 0, 1));
    drop(frozen);
    let told: Vec<_> = threads.into_iter().map(|one| one.join().unwrap()).collect();
    drop(sender);
    let order: Vec<_> = order.iter().collect();
    assert_eq!(order, ["highest", "high", "urgent", "reserved", "plain"]);
    // The first one to wait had the dump that ran before it.
    let first = told[0][0].waiting.clone().unwrap();
    assert_eq!(first.before, 1);
    wait_until(&daemon, "an empty queue", |queue| {
        queue.running + queue.waiting == 0 && queue.bytes == 0
    });
}

#[test]
fn a_token_that_is_none_is_refused_before_anything_is_opened() {
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "auto");
    let mut control = Connection::connect(&daemon.control()).unwrap();
    let reserve = request::Reserve {
        direction: "write".to_owned(),
        bytes: 1 << 20,
        lifetime_ms: 1,
        ..request::Reserve::default()
    };
    let lapsing = control.call(reserve.clone()).unwrap();
    wait_until(&daemon, "the lapse", |queue| queue.reserved == 0);
    let foreign = control
        .call(request::Reserve {
            direction: "read".to_owned(),
            lifetime_ms: 0,
            ..reserve
        })
        .unwrap();
    for token in [&lapsing.token, &foreign.token, &"f".repeat(32)] {
        let refused = control.call(request::Open {
            reservation: token.clone(),
            ..open("train")
        });
        let Err(ControlError::Refused { code, hint, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(code, ErrorCode::Conflict);
        assert!(hint.contains("reserve again"), "{hint}");
    }
    assert!(
        control
            .call(request::Status {})
            .unwrap()
            .sessions
            .is_empty()
    );
    let cancel = request::CancelReservation {
        token: foreign.token,
        node: String::new(),
    };
    assert_eq!(control.call(cancel.clone()).unwrap().count, 1);
    let refused = control.call(cancel);
    assert!(matches!(
        refused,
        Err(ControlError::Refused {
            code: ErrorCode::Conflict,
            ..
        })
    ));
}

#[test]
fn a_session_that_nobody_comes_to_holds_nobody_up() {
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "1");
    let mut idle = Connection::connect(&daemon.control()).unwrap();
    idle.call(open("idle")).unwrap();
    // It has its turn although the first one never ends, and so has the one after it.
    for job in ["one", "two"] {
        let checkpoint = sealed_dump(&daemon, work.path(), job, &pages(2, 64), || {});
        assert_eq!(checkpoint.generation, 1);
    }
}

#[test]
fn all_that_wait_are_refused_when_the_daemon_stops() {
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "1");
    let frozen = frozen(&daemon);
    let threads: Vec<_> = (0..8)
        .map(|n| {
            let mut connection = Connection::connect(&daemon.control()).unwrap();
            thread::spawn(move || connection.call(open(&format!("job-{n}"))))
        })
        .collect();
    wait_until(&daemon, "eight that wait", |queue| queue.waiting == 8);
    assert!(daemon.stop().unwrap().success());
    for one in threads {
        match one.join().unwrap() {
            Err(ControlError::Refused { code, .. }) => assert_eq!(code, ErrorCode::Unavailable),
            // The answer did not get out.
            Err(ControlError::Closed | ControlError::Receive(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    drop(frozen);
}

#[test]
fn sixty_four_at_once_all_get_their_turns_and_no_more_run_than_may() {
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "3");
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let mut most = 0;
            while !over.load(Ordering::Relaxed) {
                let queue = writes(&daemon);
                assert_eq!(queue.slots, 3);
                most = most.max(queue.running);
            }
            most
        });
        let dumps: Vec<_> = (0..64_u8)
            .map(|n| {
                let (daemon, work) = (&daemon, work.path());
                scope.spawn(move || {
                    let job = format!("crowd/{n}");
                    sealed_dump(daemon, work, &job, &pages(n + 1, 512), || {});
                })
            })
            .collect();
        for dump in dumps {
            dump.join().unwrap();
        }
        over.store(true, Ordering::Relaxed);
        let most = looking.join().unwrap();
        assert!((1..=3).contains(&most), "{most}");
    });
    assert_eq!(listing(&daemon).len(), 64);
    let queue = writes(&daemon);
    assert_eq!((queue.running, queue.waiting, queue.bytes), (0, 0, 0));
    assert!(queue.bytes_per_s.is_some());
}

#[test]
fn ctrl_c_while_a_dump_waits_leaves_the_task_and_the_queue_alone() {
    const TEST: &str = "ctrl_c_while_a_dump_waits_leaves_the_task_and_the_queue_alone";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "1");
    let mut task = Workload::start(work.path(), &workload::Options::default()).unwrap();
    let frozen = frozen(&daemon);
    let mut dump = daemon.command().unwrap();
    dump.args(["dump", "--job", "train", "--pid", &task.pid().to_string()])
        .stderr(std::process::Stdio::piped());
    let child = dump.spawn().unwrap();
    wait_until(&daemon, "a dump that waits", |queue| queue.waiting == 1);
    signal(child.id(), Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(130), "{said}");
    assert!(
        said.contains("waiting for 1 dumps before it") && said.contains("the process runs on"),
        "{said}"
    );
    wait_until(&daemon, "an empty queue", |queue| queue.waiting == 0);
    assert!(task.is_running());
    task.verify().unwrap();
    drop(frozen);
    // And nothing of it is in the way.
    daemon
        .json(&["dump", "--job", "train", "--pid", &task.pid().to_string()])
        .unwrap();
    task.wait_until_gone().unwrap();
    process::reap(task.pid());
    let restored = daemon.json(&["restore", "train"]).unwrap();
    assert_eq!(restored["pid"], task.pid());
    task.verify().unwrap();
    assert_eq!(listing(&daemon).len(), 1);
}
