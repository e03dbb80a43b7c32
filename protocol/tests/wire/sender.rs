//! Window of the sender: bounded in bytes and in frames, and the acknowledgements that a receiver may send.

use permafrost_protocol::wire::frame::{Coding, FrameError, Kind, MAX_PAYLOAD_BYTES};
use permafrost_protocol::wire::sender::{
    AHEAD_BYTES, FRAME_COST_BYTES, MIN_WINDOW_BYTES, PushError, Sender, SenderError,
};

fn sender(window_bytes: u64) -> Sender<Vec<u8>> {
    let mut sender = Sender::new(window_bytes);
    sender.resumed(0).unwrap();
    sender
}

fn zero(sender: &mut Sender<Vec<u8>>, index: u64) -> Result<u64, PushError> {
    sender.push(Kind::Zero, Coding::Raw, 0, 1, index, vec![])
}

#[test]
fn frames_without_a_payload_fill_the_window_too() {
    let mut sender = sender(0);
    let mut pushed = 0;
    while zero(&mut sender, pushed).is_ok() {
        pushed += 1;
    }
    assert_eq!(pushed, MIN_WINDOW_BYTES / FRAME_COST_BYTES);
    let full = PushError::WindowFull {
        left_bytes: 0,
        needed_bytes: FRAME_COST_BYTES,
    };
    assert_eq!(zero(&mut sender, pushed), Err(full));
    assert!(!sender.may_push(0));
    while sender.poll_transmit().is_some() {}
    assert_eq!(sender.acknowledged(3), Ok(3 * FRAME_COST_BYTES));
    assert_eq!(sender.window_left(), 3 * FRAME_COST_BYTES);
    assert_eq!(zero(&mut sender, pushed), Ok(pushed), "sequences go on");
    assert_eq!(
        sender.acknowledged(pushed),
        Ok((pushed - 3) * FRAME_COST_BYTES)
    );
    assert!(!sender.is_drained());
    assert!(sender.poll_transmit().is_some());
    assert_eq!(sender.acknowledged(pushed + 1), Ok(FRAME_COST_BYTES));
    assert!(sender.is_drained());
}

#[test]
fn a_pusher_runs_little_ahead_of_its_connection_and_is_told_when_it_may_go_on() {
    let mut sender = sender(1 << 30);
    assert!(sender.may_push(0) && !sender.poll_room());
    let mut index = 0;
    while sender.may_push(4096) {
        let page = vec![1; 4096];
        sender
            .push(Kind::Pages, Coding::Raw, 4, 1, index, page)
            .unwrap();
        index += 1;
    }
    assert!((AHEAD_BYTES..AHEAD_BYTES + 8192).contains(&sender.unsent_bytes()));
    sender.poll_transmit().unwrap();
    assert!(!sender.poll_room(), "only when half of it is sent");
    while sender.unsent_bytes() >= AHEAD_BYTES / 2 {
        assert!(!sender.poll_room() && !sender.may_push(4096));
        sender.poll_transmit().unwrap();
    }
    assert!(sender.poll_room() && !sender.poll_room() && sender.may_push(4096));
    // Without a connection the window alone is the limit.
    sender.connection_lost();
    assert!(sender.may_push((1 << 30) - 4 * usize::try_from(AHEAD_BYTES).unwrap()));
}

#[test]
fn what_waits_to_be_sent_is_counted_on_each_connection() {
    let mut sender = sender(0);
    for index in 0..10 {
        zero(&mut sender, index).unwrap();
    }
    for _ in 0..6 {
        sender.poll_transmit().unwrap();
    }
    assert_eq!(sender.unsent_bytes(), 4 * FRAME_COST_BYTES);
    sender.acknowledged(5).unwrap();
    assert_eq!(sender.unsent_bytes(), 4 * FRAME_COST_BYTES);
    sender.connection_lost();
    zero(&mut sender, 10).unwrap();
    // Frame 5 has not come through: it waits again.
    sender.resumed(5).unwrap();
    assert_eq!(sender.unsent_bytes(), 6 * FRAME_COST_BYTES);
    while sender.poll_transmit().is_some() {}
    assert_eq!(sender.unsent_bytes(), 0);
}

#[test]
fn what_a_receiver_would_refuse_is_not_taken() {
    let mut sender = sender(1 << 30);
    let long = vec![0; MAX_PAYLOAD_BYTES as usize + 1];
    let pushed = sender.push(Kind::Pages, Coding::Zstd, 4, 64, 0, long);
    let expected = FrameError::PayloadTooLong {
        payload_bytes: MAX_PAYLOAD_BYTES + 1,
    };
    assert_eq!(pushed, Err(PushError::Frame(expected)));
    assert_eq!((sender.next_sequence(), sender.window_left()), (0, 1 << 30));
}

#[test]
fn a_receiver_neither_goes_back_nor_ahead() {
    let mut sender = sender(0);
    for index in 0..10 {
        zero(&mut sender, index).unwrap();
    }
    let beyond = |next_sequence, sent| SenderError::BeyondSent {
        next_sequence,
        sent,
    };
    assert_eq!(sender.acknowledged(1), Err(beyond(1, 0)));
    for _ in 0..6 {
        sender.poll_transmit().unwrap();
    }
    sender.acknowledged(4).unwrap();
    let backwards = |next_sequence| SenderError::Backwards {
        next_sequence,
        acknowledged: 4,
    };
    assert_eq!(sender.acknowledged(3), Err(backwards(3)));

    sender.connection_lost();
    assert_eq!(sender.poll_transmit(), None);
    assert_eq!(
        sender.resumed(3),
        Err(backwards(3)),
        "it has lost what it took"
    );
    assert_eq!(sender.resumed(7), Err(beyond(7, 6)));
    assert!(!sender.is_connected());
    // Frames 4 and 5 were sent, and one of them was taken.
    assert_eq!(sender.resumed(5), Ok(FRAME_COST_BYTES));
    assert_eq!(
        sender.acknowledged(6),
        Err(beyond(6, 5)),
        "not on this connection"
    );
    assert_eq!(sender.poll_transmit().unwrap().0.sequence, 5);
    assert_eq!(sender.acknowledged(6), Ok(FRAME_COST_BYTES));
    assert_eq!(sender.poll_transmit().unwrap().0.sequence, 6);
}
