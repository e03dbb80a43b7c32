use proptest::prelude::*;

use super::*;

fn second(n: u64) -> Moment {
    Moment::from_micros(n * 1_000_000)
}

fn request(priority: u8, start_by: Option<u64>) -> TransferRequest {
    TransferRequest {
        bytes: Bytes::new(100),
        priority: Priority::new(priority),
        start_by: start_by.map(second),
    }
}

/// Starts and finishes all that wait, one after the other.
fn drain(queue: &mut TransferQueue, now: Moment) -> Vec<QueueTicket> {
    let mut order = Vec::new();
    while let Some(event) = queue.poll(now) {
        if let QueueEvent::Start(ticket) = event {
            order.push(ticket);
            queue.finish(ticket).unwrap();
        }
    }
    order
}

#[test]
fn priority_goes_first_then_the_deadline_then_the_arrival() {
    let mut queue = TransferQueue::new(QueueConfig::default());
    let mut submit = |priority, start_by| {
        let request = request(priority, start_by);
        queue.submit(second(1), request).unwrap()
    };
    let (low, urgent_low) = (submit(0, None), submit(0, Some(1)));
    let (high, urgent_high) = (submit(9, None), submit(9, Some(25)));
    let later_high = submit(9, None);
    assert_eq!(
        drain(&mut queue, second(1)),
        [urgent_high, high, later_high, urgent_low, low]
    );
}

#[test]
fn a_stream_of_the_highest_priority_does_not_starve_the_lowest() {
    let mut queue = TransferQueue::new(QueueConfig::default());
    let low = queue.submit(second(0), request(0, None)).unwrap();
    let mut started = None;
    for now in 0..1000 {
        queue.submit(second(now), request(11, Some(0))).unwrap();
        if let Some(QueueEvent::Start(ticket)) = queue.poll(second(now)) {
            queue.finish(ticket).unwrap();
            if ticket == low {
                started = Some(now);
                break;
            }
        }
    }
    // 12 priorities, 10 s each.
    assert_eq!(started, Some(121));
}

#[test]
fn no_more_run_than_may() {
    let mut queue = TransferQueue::new(QueueConfig {
        running: 2,
        ..QueueConfig::default()
    });
    for _ in 0..3 {
        queue.submit(second(0), request(0, None)).unwrap();
    }
    let first = queue.poll(second(0)).unwrap();
    assert!(queue.poll(second(0)).is_some());
    assert_eq!(queue.poll(second(0)), None);
    assert_eq!(queue.lengths(), (2, 1));
    let QueueEvent::Start(first) = first else {
        panic!("{first:?}")
    };
    queue.progressed(first, Bytes::new(30)).unwrap();
    assert_eq!(queue.queued_bytes(), Bytes::new(230));
    queue.finish(first).unwrap();
    assert_eq!(queue.finish(first), Err(QueueError::NoRequest));
    queue.allow_running(1);
    assert_eq!(queue.poll(second(0)), None);
}

#[test]
fn a_reservation_keeps_its_place_and_holds_nobody_up() {
    let mut queue = TransferQueue::new(QueueConfig::default());
    let minute = Seconds::from_millis(60_000);
    let reserved = queue
        .reserve(second(0), ReservationToken(7), request(5, None), minute)
        .unwrap();
    let other = queue.submit(second(1), request(5, None)).unwrap();
    let last = queue.submit(second(2), request(5, None)).unwrap();
    assert_eq!(
        queue.bytes_before(second(2), &request(5, None)).count(),
        300
    );
    assert_eq!(queue.bytes_before(second(2), &request(6, None)).count(), 0);
    assert_eq!(queue.poll(second(3)), Some(QueueEvent::Start(other)));
    assert_eq!(
        queue.present(second(4), ReservationToken(7), Bytes::new(1)),
        Ok(reserved.ticket)
    );
    queue.finish(other).unwrap();
    assert_eq!(drain(&mut queue, second(5)), [reserved.ticket, last]);
    assert_eq!(
        queue.present(second(6), ReservationToken(7), Bytes::new(1)),
        Err(QueueError::NoReservation)
    );
}

#[test]
fn unused_tokens_lapse() {
    let mut queue = TransferQueue::new(QueueConfig::default());
    let year = Seconds::ONE_DAY;
    let reserved = queue
        .reserve(second(0), ReservationToken(7), request(5, None), year)
        .unwrap();
    assert_eq!(reserved.lapses_at, second(300));
    assert_eq!(
        queue.reserve(second(0), ReservationToken(7), request(5, None), year),
        Err(QueueError::TokenInUse)
    );
    assert_eq!(queue.next_lapse(), Some(second(300)));
    assert_eq!(queue.poll(second(299)), None);
    assert_eq!(
        queue.present(second(300), ReservationToken(7), Bytes::ZERO),
        Err(QueueError::NoReservation)
    );
    // A clock that goes back does not restore the reservation.
    assert_eq!(
        queue.present(second(1), ReservationToken(7), Bytes::ZERO),
        Err(QueueError::NoReservation)
    );
    assert_eq!(
        queue.poll(second(1)),
        Some(QueueEvent::Lapsed(reserved.ticket))
    );
    assert_eq!(queue.queued_bytes(), Bytes::ZERO);
    assert_eq!(queue.lengths(), (0, 0));
}

#[test]
fn a_full_queue_says_so() {
    let mut queue = TransferQueue::new(QueueConfig {
        waiting: 1,
        ..QueueConfig::default()
    });
    let first = queue.submit(second(0), request(0, None)).unwrap();
    let full = Err(QueueError::Full { limit: 1 });
    assert_eq!(queue.submit(second(0), request(11, None)), full);
    assert_eq!(queue.poll(second(0)), Some(QueueEvent::Start(first)));
    assert!(queue.submit(second(0), request(0, None)).is_ok());
}

proptest! {
    /// Holds for any order of operations: the bound on running requests is kept, no request that was due before
    /// another arrived starts after that one, and in the end all have started or lapsed.
    #[test]
    fn any_order_of_operations(
        operations in prop::collection::vec((0_u8..5, any::<u8>(), 0_u64..40), 1..200),
        running in 1_usize..4,
    ) {
        let mut queue = TransferQueue::new(QueueConfig { running, ..QueueConfig::default() });
        let mut now = 0;
        let mut alive = BTreeMap::new();
        let mut runs = Vec::new();
        let tokens = &mut Vec::new();
        let poll = |queue: &mut TransferQueue, now, alive: &mut BTreeMap<QueueTicket, (u64, bool)>, runs: &mut Vec<QueueTicket>| {
            while let Some(event) = queue.poll(second(now)) {
                match event {
                    QueueEvent::Start(ticket) => {
                        let (arrived, _) = alive.remove(&ticket).unwrap();
                        let passed = alive.iter().find(|(_, (other, present))| *present && other + 120 < arrived);
                        assert!(passed.is_none(), "{ticket:?} passed {passed:?}");
                        runs.push(ticket);
                    }
                    QueueEvent::Lapsed(ticket) => assert!(!alive.remove(&ticket).unwrap().1),
                }
            }
            assert!(queue.lengths().0 <= running);
        };
        for (operation, priority, time) in operations {
            match operation {
                0 => {
                    let start_by = (time % 2 == 0).then_some(now + time);
                    let ticket = queue.submit(second(now), request(priority, start_by)).unwrap();
                    alive.insert(ticket, (now, true));
                }
                1 => {
                    let token = ReservationToken(alive.len() as u128 + u128::from(now) * 1000);
                    let lifetime = Seconds::from_millis(time * 1000);
                    if let Ok(made) = queue.reserve(second(now), token, request(priority, None), lifetime) {
                        alive.insert(made.ticket, (now, false));
                        tokens.push(token);
                    }
                }
                2 => {
                    if let Some(token) = tokens.pop()
                        && let Ok(ticket) = queue.present(second(now), token, Bytes::new(1))
                    {
                        alive.get_mut(&ticket).unwrap().1 = true;
                    }
                }
                3 => {
                    if let Some(ticket) = runs.pop() {
                        queue.finish(ticket).unwrap();
                    }
                }
                _ => now += time,
            }
            poll(&mut queue, now, &mut alive, &mut runs);
        }
        now += 1000;
        for _ in 0..1000 {
            poll(&mut queue, now, &mut alive, &mut runs);
            for ticket in runs.drain(..) {
                queue.finish(ticket).unwrap();
            }
        }
        prop_assert!(alive.is_empty());
        prop_assert_eq!(queue.lengths(), (0, 0));
        prop_assert_eq!(queue.queued_bytes(), Bytes::ZERO);
        prop_assert!(queue.line.is_empty() && queue.tokens.is_empty() && queue.lapses.is_empty());
    }
}

#[test]
fn one_that_is_idle_gives_its_place_and_has_it_again() {
    let mut queue = TransferQueue::new(QueueConfig::default());
    let first = queue.submit(second(0), request(0, None)).unwrap();
    let other = queue.submit(second(0), request(0, None)).unwrap();
    assert_eq!(queue.poll(second(0)), Some(QueueEvent::Start(first)));
    assert_eq!(queue.poll(second(0)), None);
    assert!(!queue.idle(other) && !queue.resume(first));
    assert!(queue.idle(first) && !queue.idle(first));
    assert_eq!(queue.poll(second(1)), Some(QueueEvent::Start(other)));
    assert_eq!(queue.queued_bytes(), Bytes::new(200));
    assert!(queue.resume(first));
    assert_eq!(queue.lengths(), (2, 0));
    assert!(queue.idle(other));
    queue.finish(other).unwrap();
    queue.finish(first).unwrap();
    assert_eq!(queue.lengths(), (0, 0));
}

#[test]
fn what_cannot_wait_runs_and_counts() {
    let mut queue = TransferQueue::new(QueueConfig::default());
    let first = queue.run(second(0), request(0, None));
    queue.run(second(0), request(0, None));
    let waiting = queue.submit(second(0), request(11, None)).unwrap();
    assert_eq!(queue.poll(second(0)), None);
    assert_eq!(queue.lengths(), (2, 1));
    assert_eq!(
        queue.line().collect::<Vec<_>>(),
        [(waiting, 2, Bytes::new(200))]
    );
    queue.finish(first).unwrap();
    assert_eq!(queue.poll(second(0)), None);
}

#[test]
fn who_is_set_aside_comes_back_to_the_same_place() {
    let mut queue = TransferQueue::new(QueueConfig::default());
    let minute = Seconds::from_millis(60_000);
    let running = queue.run(second(0), request(0, None));
    let first = queue.submit(second(0), request(0, None)).unwrap();
    let next = queue.submit(second(1), request(0, None)).unwrap();
    let made = queue.set_aside(second(2), first, ReservationToken(1), minute);
    assert_eq!(made.unwrap().lapses_at, second(62));
    assert_eq!(
        queue.set_aside(second(2), running, ReservationToken(2), minute),
        Err(QueueError::NoRequest)
    );
    assert_eq!(
        queue.set_aside(second(2), next, ReservationToken(1), minute),
        Err(QueueError::TokenInUse)
    );
    assert_eq!(queue.line().count(), 1);
    assert_eq!(
        queue.present(second(3), ReservationToken(1), Bytes::new(5)),
        Ok(first)
    );
    queue.finish(running).unwrap();
    assert_eq!(drain(&mut queue, second(3)), [first, next]);
    let again = queue.reserve(second(4), ReservationToken(3), request(0, None), minute);
    assert!(again.is_ok() && queue.reserved() == 1);
    assert_eq!(queue.cancel(ReservationToken(3)), Ok(()));
    assert_eq!(
        queue.cancel(ReservationToken(3)),
        Err(QueueError::NoReservation)
    );
}

#[test]
fn reservations_leave_room_for_those_that_come() {
    let mut queue = TransferQueue::new(QueueConfig {
        reserved: 1,
        ..QueueConfig::default()
    });
    let minute = Seconds::from_millis(60_000);
    let first = queue.reserve(second(0), ReservationToken(1), request(0, None), minute);
    assert!(first.is_ok());
    assert_eq!(
        queue.reserve(second(0), ReservationToken(2), request(0, None), minute),
        Err(QueueError::Full { limit: 1 })
    );
    assert!(queue.submit(second(0), request(0, None)).is_ok());
}
