//! Tests of waiting threads. Nothing here is timed: required events are waited for, and the order of events
//! shows that others did not happen.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use permafrost_agent::host::Patiently;
use permafrost_protocol::control::ReportedError;

use super::*;

fn queues(at_once: usize) -> Arc<Queues> {
    Queues::new(QueuesOptions {
        dumps_at_once: Some(at_once),
        ..QueuesOptions::default()
    })
}

fn admission(bytes: u64, priority: u8) -> Admission {
    Admission {
        bytes,
        priority: Priority::new(priority),
        ..Admission::default()
    }
}

fn write(queues: &Queues) -> QueueReport {
    queues.report()[0]
}

/// Waits until `so` holds.
fn wait_until(so: impl Fn() -> bool) {
    while !so() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// A caller that can disconnect, and records the reports that it gets.
#[derive(Default)]
struct Waiter {
    gone: Arc<AtomicBool>,
    told: Arc<parking_lot::Mutex<Vec<control::Waiting>>>,
}

impl Waits for Waiter {
    fn waits(&mut self, waiting: &control::Waiting) {
        self.told.lock().push(waiting.clone());
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

#[test]
fn a_higher_limit_starts_who_waits_and_a_lower_one_holds_the_next_back() {
    let queues = queues(1);
    let admission = admission(100, 0);
    let first = queues.enter(Direction::Write, &admission, &mut Patiently);
    let first = first.unwrap();
    thread::scope(|scope| {
        let enter = || queues.enter(Direction::Write, &admission, &mut Patiently);
        let second = scope.spawn(enter);
        wait_until(|| write(&queues).waiting == 1);
        queues.limit(Some(2), None);
        let second = second.join().unwrap().unwrap();
        assert_eq!((write(&queues).running, write(&queues).slots), (2, 2));
        assert!(!write(&queues).automatic);

        queues.limit(Some(1), None);
        let third = scope.spawn(enter);
        wait_until(|| write(&queues).waiting == 1);
        drop(first);
        // One still runs, which is as many as may.
        thread::sleep(Duration::from_millis(50));
        assert_eq!((write(&queues).running, write(&queues).waiting), (1, 1));
        drop(second);
        drop(third.join().unwrap().unwrap());
    });
    queues.limit(None, None);
    assert!(write(&queues).automatic);
}

#[test]
fn the_highest_priority_goes_first_and_then_whoever_came_first() {
    let queues = queues(1);
    let running = queues
        .enter(Direction::Write, &admission(100, 0), &mut Patiently)
        .unwrap();
    let (sender, order) = mpsc::channel();
    thread::scope(|scope| {
        for (name, priority) in [(1, 0), (2, 5), (3, 5), (4, 11), (5, 0)] {
            let (queues, sender) = (&queues, sender.clone());
            scope.spawn(move || {
                let admission = admission(10, priority);
                let turn = queues.enter(Direction::Write, &admission, &mut Patiently);
                sender.send(name).unwrap();
                drop(turn.unwrap());
            });
            wait_until(|| write(queues).waiting == name);
        }
        let report = write(&queues);
        assert_eq!((report.running, report.slots), (1, 1));
        assert_eq!(report.bytes, 150);
        drop(running);
    });
    assert_eq!(order.try_iter().collect::<Vec<_>>(), [4, 2, 3, 1, 5]);
    let report = write(&queues);
    assert_eq!((report.running, report.waiting, report.bytes), (0, 0, 0));
    assert_eq!(queues.counters()[0].turns.value(), 6);
}

#[test]
fn one_that_goes_while_it_waits_leaves_the_queue() {
    let queues = queues(1);
    let running = queues.run(Direction::Write, 300);
    let mut waiter = Waiter::default();
    let (gone, told) = (Arc::clone(&waiter.gone), Arc::clone(&waiter.told));
    thread::scope(|scope| {
        let waiting =
            scope.spawn(|| queues.enter(Direction::Write, &admission(10, 0), &mut waiter));
        wait_until(|| !told.lock().is_empty());
        gone.store(true, Ordering::Relaxed);
        let left = waiting.join().unwrap();
        assert!(matches!(left, Err(QueuesError::Gone)), "{left:?}");
    });
    let first = told.lock()[0].clone();
    assert_eq!((first.before, first.bytes_before), (1, 300));
    assert_eq!((write(&queues).waiting, write(&queues).bytes), (0, 300));
    assert_eq!(queues.counters()[0].gone.value(), 1);
    drop(running);
    assert_eq!(write(&queues).running, 0);
}

#[test]
fn a_stop_refuses_all_that_wait_and_whoever_comes() {
    let queues = queues(1);
    let running = queues.run(Direction::Write, 1);
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..64)
            .map(|_| {
                scope.spawn(|| queues.enter(Direction::Write, &admission(1, 0), &mut Patiently))
            })
            .collect();
        wait_until(|| write(&queues).waiting == 64);
        queues.stop();
        for thread in waiting {
            let refused = thread.join().unwrap();
            assert!(matches!(refused, Err(QueuesError::Stopping)), "{refused:?}");
        }
    });
    let refused = queues.enter(Direction::Write, &admission(1, 0), &mut Patiently);
    assert!(matches!(refused, Err(QueuesError::Stopping)));
    drop(running);
    assert_eq!((write(&queues).running, write(&queues).waiting), (0, 0));
}

#[test]
fn as_many_wait_as_may_and_the_next_is_told_how_many_that_is() {
    let queues = Queues::new(QueuesOptions {
        dumps_at_once: Some(1),
        waiting: 2,
        reserved: 1,
        ..QueuesOptions::default()
    });
    let reserve = request::Reserve {
        direction: "write".to_owned(),
        bytes: 1,
        ..request::Reserve::default()
    };
    queues.reserve(&reserve).unwrap();
    let full = queues.reserve(&reserve).unwrap_err();
    assert!(matches!(full, QueuesError::Full { limit: 1, .. }));
    let running = queues.run(Direction::Write, 1);
    thread::scope(|scope| {
        scope.spawn(|| queues.enter(Direction::Write, &admission(1, 0), &mut Patiently));
        wait_until(|| write(&queues).waiting == 1);
        let full = queues
            .enter(Direction::Write, &admission(1, 11), &mut Patiently)
            .unwrap_err();
        assert_eq!(full.code(), control::ErrorCode::Unavailable);
        assert_eq!(
            full.to_string(),
            "2 dumps wait already or have reserved places"
        );
        assert_eq!(queues.counters()[0].refused.value(), 1);
        // The other direction is another queue.
        drop(queues.enter(Direction::Read, &admission(1, 0), &mut Patiently));
        drop(running);
    });
}

#[test]
fn a_token_has_its_place_once_and_in_its_own_queue() {
    let queues = queues(1);
    let reserved = queues
        .reserve(&request::Reserve {
            direction: "write".to_owned(),
            bytes: 50,
            ..request::Reserve::default()
        })
        .unwrap();
    assert_eq!(reserved.token.len(), 32);
    assert_eq!(reserved.lapses_in_ms, 300_000);
    assert_eq!((write(&queues).reserved, write(&queues).bytes), (1, 50));
    let with = |token: &str| Admission::new(70, 0, None, token);
    let wrong = queues.enter(
        Direction::Read,
        &with(&reserved.token).unwrap(),
        &mut Patiently,
    );
    assert!(matches!(wrong, Err(QueuesError::NoReservation { .. })));
    let turn = queues
        .enter(
            Direction::Write,
            &with(&reserved.token).unwrap(),
            &mut Patiently,
        )
        .unwrap();
    assert_eq!((write(&queues).reserved, write(&queues).bytes), (0, 70));
    drop(turn);
    let again = queues.enter(
        Direction::Write,
        &with(&reserved.token).unwrap(),
        &mut Patiently,
    );
    assert_eq!(again.unwrap_err().code(), control::ErrorCode::Conflict);
    assert!(matches!(
        queues.cancel(&reserved.token),
        Err(QueuesError::NoReservation { .. })
    ));
    for bad in [
        "x",
        "+1234567890123456789012345678901",
        "é234567890123456789012345678901",
    ] {
        assert!(
            matches!(with(bad), Err(QueuesError::BadToken { .. })),
            "{bad}"
        );
    }
}

#[test]
fn one_that_comes_again_has_the_place_it_had() {
    let queues = queues(1);
    let running = queues.run(Direction::Write, 10);
    let nobody_waits = Duration::ZERO;
    let entered = queues.enter_within(Direction::Write, &admission(20, 0), nobody_waits);
    let Ok(Entered::Later(first)) = entered else {
        panic!("{entered:?}")
    };
    assert_eq!((first.before, first.bytes_before), (1, 10));
    thread::scope(|scope| {
        let (sender, order) = mpsc::channel();
        let after = sender.clone();
        let queues = &queues;
        scope.spawn(move || {
            let turn = queues.enter(Direction::Write, &admission(30, 0), &mut Patiently);
            after.send("after").unwrap();
            drop(turn.unwrap());
        });
        wait_until(|| write(queues).waiting == 1);
        let token = first.token.clone();
        scope.spawn(move || {
            let again = Admission::new(20, 0, None, &token).unwrap();
            let turn = queues.enter(Direction::Write, &again, &mut Patiently);
            sender.send("again").unwrap();
            drop(turn.unwrap());
        });
        wait_until(|| write(queues).waiting == 2);
        drop(running);
        assert_eq!(order.iter().collect::<Vec<_>>(), ["again", "after"]);
    });
}

#[test]
fn one_that_moves_nothing_gives_its_place_until_it_goes_on() {
    let queues = Queues::new(QueuesOptions {
        dumps_at_once: Some(1),
        arrival: Duration::from_millis(1),
        ..QueuesOptions::default()
    });
    let late = queues
        .enter(Direction::Write, &admission(100, 0), &mut Patiently)
        .unwrap();
    // The request needs only the check that another request makes.
    let other = queues
        .enter(Direction::Write, &admission(100, 0), &mut Patiently)
        .unwrap();
    late.moved(40);
    wait_until(|| write(&queues).running >= 1 && write(&queues).bytes == 160);
    drop(late);
    drop(other);
    assert_eq!((write(&queues).running, write(&queues).bytes), (0, 0));
}

#[test]
fn what_turns_move_of_late_is_what_the_next_is_taken_to() {
    let queues = queues(2);
    assert_eq!(write(&queues).bytes_per_s, None);
    let turn = queues
        .enter(Direction::Write, &Admission::default(), &mut Patiently)
        .unwrap();
    turn.moved(1000);
    thread::sleep(Duration::from_millis(2));
    drop(turn);
    let turn = queues
        .enter(Direction::Write, &Admission::default(), &mut Patiently)
        .unwrap();
    assert_eq!(write(&queues).bytes, 1000);
    assert!(write(&queues).bytes_per_s.is_some());
    turn.expect(7);
    assert_eq!(write(&queues).bytes, 7);
}

#[test]
fn tokens_have_no_fixed_bits() {
    let (mut set, mut clear) = (0_u128, 0_u128);
    for _ in 0..1000 {
        let token = new_token().0;
        set |= token;
        clear |= !token;
    }
    assert_eq!((set, clear), (u128::MAX, u128::MAX));
}
