//! Both ends of a dump over a bad network, under virtual time: the two state machines that nodes and agents run.
//!
//! Faults: a connection is lost at any time, with everything in flight, and the delivered part of the stream ends at
//! any byte; either direction is cut alone; deliveries are of any length and late, so that the control stream and the
//! bulk stream overtake each other; the receiver notices a loss before the sender, or after it, when the next
//! conversation has begun; the network is down for a while; the receiver is busy; it restarts and has lost the session;
//! its handler is slow, or fails.
//!
//! Invariants: the handler takes the frames that were pushed, in order, each once; the frames that the sender keeps
//! never exceed its window, nor those that the receiver queues its queue; a pusher or a connection that waits for room
//! is told; a session outlives every attempt of its sender to come back; every run ends, with the dump sealed once or,
//! where the session was lost, the handler failed, or the network stayed down, cleanly failed at both ends.
//!
//! `PERMAFROST_SEED` replays one run, `PERMAFROST_SEEDS` sets the number of runs.

use std::collections::VecDeque;
use std::env;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use permafrost_protocol::control::{self, ErrorCode};
use permafrost_protocol::wire::code;
use permafrost_protocol::wire::conversation::{
    Continuation, ConversationError, ConversationOutcome, DumpClient, DumpEvent, DumpServer,
    QUEUED_FRAMES, ReceiverLimits,
};
use permafrost_protocol::wire::frame::{Coding, HEADER_BYTES, Header, Kind, MAX_PAYLOAD_BYTES};
use permafrost_protocol::wire::message::{
    Closed, Commit, Committed, Prepared, Reply, reply, request,
};
use permafrost_protocol::wire::sender::MIN_WINDOW_BYTES;

/// Time in which a sender restores a lost connection, and for which a receiver keeps a dump: the usual ones.
const RECONNECT: Duration = Duration::from_secs(20);
const GRACE: Duration = Duration::from_secs(30);

type Payload = Rc<[u8]>;
type Script = Vec<(Kind, u32, u64, Payload)>;

/// SplitMix64: good enough here, and deterministic on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Returns the frames of one dump. Payloads are compressed ones, which may have any length.
fn script(random: &mut Random) -> Script {
    let none: Payload = Rc::from([]);
    let large: Payload = vec![0xa5; MAX_PAYLOAD_BYTES as usize].into();
    let often_large = random.one_in(4);
    let mut frames = Script::new();
    for id in 0..random.below(4) {
        frames.push((Kind::Space, 1, id, none.clone()));
        let mut index = 0;
        for _ in 0..random.below(if often_large { 60 } else { 500 }) {
            index += random.below(3);
            let pages = 1 + u32::try_from(random.below(64)).unwrap();
            let (kind, payload) = match random.below(4) {
                0 => (Kind::Zero, none.clone()),
                1 => (Kind::Parent, none.clone()),
                _ if often_large => (Kind::Pages, large.clone()),
                _ => {
                    let len = 1 + random.below(60);
                    (
                        Kind::Pages,
                        (0..len).map(|_| random.next().to_le_bytes()[0]).collect(),
                    )
                }
            };
            frames.push((kind, pages, index, payload));
            index += u64::from(pages);
        }
    }
    frames.push((Kind::Close, 0, 0, none.clone()));
    for number in 0..random.below(4) {
        let name: Vec<u8> = format!("image-{number}.img").into();
        let parts: Vec<u64> = (0..random.below(4))
            .map(|_| 1 + random.below(500))
            .collect();
        frames.push((Kind::Image, 0, parts.iter().sum(), name.into()));
        for len in parts {
            frames.push((
                Kind::ImageData,
                0,
                len,
                vec![number.to_le_bytes()[0]; 1 + usize::try_from(len / 9).unwrap()].into(),
            ));
        }
    }
    frames.push((Kind::Prepare, 0, 0, none));
    frames
}

/// Connection of both ends: bytes one way, replies and the commit beside them.
#[derive(Default)]
struct Connection {
    /// Number of the conversation at the receiver.
    conversation: u64,
    /// Sent and not delivered, in pieces; of the first, so many bytes were.
    bulk: VecDeque<Payload>,
    delivered: usize,
    replies: VecDeque<Reply>,
    commit: Option<Commit>,
    bulk_cut: bool,
    control_cut: bool,
    /// Time at which the sender notices a cut.
    dies_at: Option<u64>,
}

impl Connection {
    /// Delivers `len` bytes, or as many as there are.
    fn deliver(&mut self, mut len: usize, into: &mut Vec<u8>) {
        while len > 0
            && let Some(piece) = self.bulk.front()
        {
            let part = &piece[self.delivered..];
            let part = &part[..part.len().min(len)];
            into.extend_from_slice(part);
            len -= part.len();
            self.delivered += part.len();
            if self.delivered == piece.len() {
                self.bulk.pop_front();
                self.delivered = 0;
            }
        }
    }
}

/// The receiving node: its end of the dump, the bytes of the newest connection, and the handler.
struct Node {
    server: DumpServer<Vec<u8>>,
    bytes: Vec<u8>,
    announced: Option<Header>,
    /// True if the connection waits for room in the queue.
    blocked: bool,
    queued: usize,
    applied: Vec<(Header, Vec<u8>)>,
    /// The handler fails when it has taken so many frames.
    fails_after: Option<usize>,
    sealed: u32,
    is_opened: bool,
    is_done: bool,
    /// Conversation whose loss the node has not noticed, and the time at which it does.
    lost: Option<(u64, u64)>,
}

impl Node {
    fn new(request: request::Dump, fails_after: Option<usize>) -> Self {
        let patience = ReceiverLimits {
            grace: GRACE,
            idle: Duration::from_secs(600),
            wait: Duration::from_secs(3600),
        };
        Self {
            server: DumpServer::new(request, patience).expect("a good request"),
            bytes: vec![],
            announced: None,
            blocked: false,
            queued: 0,
            applied: vec![],
            fails_after,
            sealed: 0,
            is_opened: false,
            is_done: false,
            lost: None,
        }
    }

    /// Takes every whole frame, as long as the queue has room.
    fn receive(&mut self, conversation: u64) {
        let mut at = 0;
        while !self.blocked && self.server.wants_frames() {
            let rest = &self.bytes[at..];
            let Some(header) = self.announced else {
                let Some(header) = rest.first_chunk::<HEADER_BYTES>() else {
                    break;
                };
                let header = self.server.header(conversation, header);
                self.announced = Some(header.expect("a good sender"));
                at += HEADER_BYTES;
                continue;
            };
            let Some(payload) = rest.get(..header.payload_bytes as usize) else {
                break;
            };
            if !self.server.may_take() {
                self.blocked = true;
                break;
            }
            let taken = self.server.taken(conversation, payload.to_vec());
            taken.expect("a good sender");
            self.queued += 1;
            assert!(self.queued <= QUEUED_FRAMES, "more than the queue holds");
            at += payload.len();
            self.announced = None;
        }
        self.bytes.drain(..at);
    }

    /// The handler takes up to `frames`, and replies.
    fn handle(&mut self, frames: u64) {
        if self.is_done {
            return;
        }
        if self.server.is_given_up() {
            return self.finish(Err(refusal(ErrorCode::SessionFailed)));
        }
        if !self.is_opened && self.fails_after != Some(0) {
            self.is_opened = true;
            self.server.opened(false);
        }
        for _ in 0..frames {
            if self.fails_after == Some(self.applied.len()) {
                return self.finish(Err(refusal(ErrorCode::NoSpace)));
            }
            let Some((header, payload)) = self.server.poll_frame() else {
                break;
            };
            self.queued -= 1;
            self.applied.push((header, payload));
            match header.kind {
                Kind::Close => self.server.answer(reply::Body::Closed(closed())),
                Kind::Prepare => self.server.answer(reply::Body::Prepared(prepared())),
                _ => {}
            }
        }
        if self.server.poll_commit().is_some() {
            self.sealed += 1;
            self.server
                .answer(reply::Body::Committed(Committed::default()));
            self.finish(Ok(()));
        }
        self.blocked &= !self.server.poll_room();
    }

    fn finish(&mut self, result: Result<(), control::Error>) {
        self.is_done = true;
        self.queued = 0;
        self.server.finished(result);
        self.blocked &= !self.server.poll_room();
    }

    /// Forgets what came on a connection that is lost.
    fn connection_lost(&mut self, seen: &mut Seen) {
        seen.half_frames += u64::from(self.announced.is_some() || !self.bytes.is_empty());
        self.bytes.clear();
        self.announced = None;
        self.blocked = false;
    }
}

fn closed() -> Closed {
    Closed {
        content_digest: vec![1; 32],
        nodes: vec![],
    }
}

fn prepared() -> Prepared {
    Prepared {
        content_digest: vec![2; 32],
        nodes: vec![],
    }
}

fn commit() -> Commit {
    Commit {
        checkpoint: "0123456789abcdef".repeat(2),
        content_digest: vec![2; 32],
        job: "j".into(),
        generation: 1,
        session: "07".repeat(16),
        ..Default::default()
    }
}

fn refusal(code: ErrorCode) -> control::Error {
    control::Error {
        code: code.into(),
        ..Default::default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Committed,
    SessionLost,
    HandlerFailed,
    GaveUp,
}

/// Faults that happened in one run, so that a test can check that faults happened at all.
#[derive(Default)]
struct Seen {
    resumes: u64,
    sender_waits: u64,
    receiver_waits: u64,
    half_frames: u64,
    displaced: u64,
    reopened: u64,
}

/// A dump, its two ends and the network between them.
struct Run<'a> {
    random: Random,
    start: Instant,
    now: u64,
    frames: Script,
    pushed: usize,
    /// True if the pusher waits for room.
    blocked: bool,
    client: DumpClient<Payload>,
    /// Time at which the next conversation begins.
    converse_at: Option<u64>,
    node: Option<Node>,
    fails_after: Option<usize>,
    connection: Option<Connection>,
    /// Time until which no connection can be made.
    down_until: u64,
    seen: &'a mut Seen,
}

impl Run<'_> {
    fn time(&self) -> Instant {
        self.start + Duration::from_millis(self.now)
    }

    /// Pushes frames, connected or not.
    fn push(&mut self) {
        for _ in 0..self.random.below(40) {
            let Some((kind, pages, index, payload)) = self.frames.get(self.pushed) else {
                break;
            };
            // A dump pushes nothing behind Close before the reply to it.
            let is_closing = self.pushed > 0 && self.frames[self.pushed - 1].0 == Kind::Close;
            if self.blocked || (is_closing && self.client.closed().is_none()) {
                break;
            }
            if !self.client.may_push(payload.len()) {
                self.seen.sender_waits += 1;
                self.blocked = true;
                break;
            }
            let coding = match kind {
                Kind::Pages | Kind::ImageData => Coding::Zstd,
                _ => Coding::Raw,
            };
            let sequence = self
                .client
                .push(*kind, coding, 0, *pages, *index, payload.clone());
            assert_eq!(sequence, Ok(self.pushed as u64));
            self.pushed += 1;
        }
    }

    /// Begins a conversation, if it is time. The node may be unreachable, or busy, or not know the session.
    fn converse(&mut self) -> Option<Outcome> {
        if self.converse_at.is_none_or(|at| self.now < at) {
            return None;
        }
        self.converse_at = None;
        let (request, deadline) = self.client.request();
        if self.now < self.down_until || self.time() >= deadline {
            return self.client_ended(ConversationOutcome::Lost);
        }
        if self.random.one_in(10) {
            let busy = ConversationOutcome::Stopped(code::BUSY.into());
            return self.client_ended(busy);
        }
        if self.node.is_none() && !request.resume {
            self.node = Some(Node::new(request.clone(), self.fails_after));
        }
        let Some(node) = &mut self.node else {
            return self.client_ended(ConversationOutcome::Refused(ErrorCode::NotFound));
        };
        let checked = node.server.check_resume(&request);
        checked.expect("the same sender");
        self.seen.displaced += u64::from(node.lost.is_some());
        node.connection_lost(self.seen);
        let conversation = node.server.converse();
        self.seen.reopened += u64::from(!request.resume && conversation > 1);
        self.connection = Some(Connection {
            conversation,
            ..Connection::default()
        });
        None
    }

    /// Delivers bytes and the commit to the node, whose handler works on them.
    fn arrive(&mut self) {
        let frames = self.random.below(40);
        let Some(node) = &mut self.node else { return };
        if let Some(connection) = &mut self.connection
            && !connection.bulk_cut
        {
            let len = match self.random.below(3) {
                0 => self.random.below(100),
                1 => self.random.below(10_000),
                _ => self.random.below(2 << 20),
            };
            if !node.blocked {
                connection.deliver(usize::try_from(len).unwrap(), &mut node.bytes);
            }
            node.receive(connection.conversation);
            self.seen.receiver_waits += u64::from(node.blocked);
            if let Some(commit) = connection.commit.take() {
                let taken = node.server.commit(connection.conversation, commit);
                taken.expect("a good commit");
            }
        }
        node.handle(frames);
    }

    /// The sender writes what is to be sent.
    fn transmit(&mut self) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        for _ in 0..self.random.below(30) {
            let Some((header, payload)) = self.client.poll_transmit() else {
                break;
            };
            connection.bulk.push_back(Rc::from(header.encode()));
            if !payload.is_empty() {
                connection.bulk.push_back(payload);
            }
        }
        if self.client.prepared().is_some() {
            self.client.commit(&commit()).expect("prepared");
        }
        if let Some(commit) = self.client.poll_commit() {
            connection.commit = Some(commit);
        }
    }

    /// Replies are sent, and arrive.
    fn reply(&mut self) -> Option<Outcome> {
        let connection = self.connection.as_mut()?;
        if let Some(node) = &mut self.node {
            while let Poll::Ready(Some(reply)) = node.server.poll_reply(connection.conversation) {
                connection.replies.push_back(reply);
            }
        }
        if connection.control_cut {
            return None;
        }
        for _ in 0..self.random.below(6) {
            let reply = self.connection.as_mut()?.replies.pop_front()?;
            match self.client.reply(reply) {
                Ok(DumpEvent::Opened) => {
                    self.seen.resumes += u64::from(self.client.conversations() > 1);
                }
                Ok(DumpEvent::Committed) => {
                    assert_eq!(
                        self.client.ended(self.time(), ConversationOutcome::Settled),
                        Continuation::Over
                    );
                    return Some(Outcome::Committed);
                }
                Ok(_) => {}
                Err(ConversationError::Refused(error)) => {
                    return self.client_ended(ConversationOutcome::Refused(error.code()));
                }
                Err(error) => panic!("{error}"),
            }
        }
        None
    }

    /// Something goes wrong.
    fn fail(&mut self, loses_session: bool, long_outages: bool) {
        let now = self.now;
        if self.client.window().is_connected() && self.random.one_in(20) {
            let longest = if long_outages { 60_000 } else { 15_000 };
            self.down_until = now + self.random.below(longest);
        }
        match (self.random.below(5), &mut self.connection) {
            (0, Some(connection)) => connection.bulk_cut = true,
            (1, Some(connection)) => connection.control_cut = true,
            (2, _) if loses_session && self.node.is_some() => {
                self.node = None;
                if let Some(connection) = &mut self.connection {
                    connection.dies_at = Some(now);
                }
            }
            // The receiver notices it first.
            (3, Some(connection)) => {
                connection.bulk_cut = true;
                connection.control_cut = true;
                connection.dies_at = Some(now + self.random.below(6000));
                if let Some(node) = &mut self.node {
                    node.lost = Some((connection.conversation, now));
                }
            }
            (_, Some(connection)) => connection.dies_at = Some(now),
            (_, None) => {}
        }
    }

    /// Lets both ends notice a lost connection, each in its own time.
    fn notice(&mut self) -> Option<Outcome> {
        let now = self.now;
        let mut died = None;
        if let Some(connection) = &mut self.connection {
            if (connection.bulk_cut || connection.control_cut) && connection.dies_at.is_none() {
                connection.dies_at = Some(now + self.random.below(200));
            }
            died = connection
                .dies_at
                .is_some_and(|at| now >= at)
                .then_some(connection.conversation);
        }
        let time = self.time();
        if let Some(node) = &mut self.node {
            if let Some(conversation) = died {
                node.lost = Some((conversation, now + self.random.below(6000)));
            }
            if let Some((conversation, at)) = node.lost
                && now >= at
            {
                node.lost = None;
                let keep = node
                    .server
                    .ended(conversation, time, ConversationOutcome::Lost);
                assert!(keep.is_some(), "a lost connection loses no session");
                if self
                    .connection
                    .as_ref()
                    .is_none_or(|newer| newer.conversation == conversation)
                {
                    node.connection_lost(self.seen);
                }
            }
            let forgotten = node.server.poll_forget(time);
            assert!(!forgotten, "the sender may still come back");
        }
        died?;
        self.connection = None;
        self.client_ended(ConversationOutcome::Lost)
    }

    fn client_ended(&mut self, end: ConversationOutcome) -> Option<Outcome> {
        self.connection = None;
        match self.client.ended(self.time(), end) {
            Continuation::Converse(at) => {
                let at = at.duration_since(self.start).as_millis();
                self.converse_at = Some(u64::try_from(at).unwrap());
                None
            }
            Continuation::Over => panic!("it is not over"),
            Continuation::Failed => Some(match end {
                ConversationOutcome::Refused(ErrorCode::NotFound) => Outcome::SessionLost,
                ConversationOutcome::Refused(_) => Outcome::HandlerFailed,
                _ => Outcome::GaveUp,
            }),
        }
    }

    /// Runs the receiver to the end of a dump that the sender has given up.
    fn expire(&mut self) {
        let Some(node) = &mut self.node else { return };
        let conversation = node.server.converse();
        let time = self.start + Duration::from_millis(self.now);
        let forget_at = node
            .server
            .ended(conversation, time, ConversationOutcome::Lost);
        assert!(node.server.poll_forget(forget_at.expect("it is kept")));
        node.handle(0);
        assert!(node.is_done);
        assert!(node.sealed == 0 || self.client.prepared().is_some());
    }
}

fn run(seed: u64, seen: &mut Seen) -> Outcome {
    let mut random = Random(seed);
    let frames = script(&mut random);
    // Quality of the network: one fault in `fault_every` times eight steps; after `calm_after` it is good, so that
    // runs end.
    let fault_every = 2 + random.below(60);
    let calm_after = 20_000;
    let loses_session = random.one_in(5);
    let long_outages = random.one_in(8);
    let fails_after = random
        .one_in(8)
        .then(|| usize::try_from(random.below(frames.len() as u64)).unwrap());
    let start = Instant::now();
    let request = request::Dump {
        session: vec![7; 16],
        ..Default::default()
    };
    let client = DumpClient::new(request, MIN_WINDOW_BYTES, start + RECONNECT, RECONNECT);
    let mut run = Run {
        random,
        start,
        now: 0,
        frames,
        pushed: 0,
        blocked: false,
        client: client.expect("a good request"),
        converse_at: Some(0),
        node: None,
        fails_after,
        connection: None,
        down_until: 0,
        seen,
    };
    for now in 0..400_000_u64 {
        run.now = now;
        let outcome = match run.random.below(8) {
            0 | 1 => {
                run.push();
                None
            }
            2 => run.converse(),
            3 => {
                run.transmit();
                None
            }
            4 | 5 => {
                run.arrive();
                None
            }
            6 => run.reply(),
            _ => {
                if now < calm_after && run.random.one_in(fault_every) {
                    run.fail(loses_session, long_outages);
                }
                None
            }
        };
        let outcome = outcome.or_else(|| run.notice());
        assert!(run.client.window().used_bytes() <= MIN_WINDOW_BYTES);
        run.blocked &= !run.client.poll_room();
        match outcome {
            None => {}
            Some(Outcome::Committed) => {
                check(&run.frames, run.node.as_ref().expect("it has committed"));
                assert!(run.client.window().is_drained());
                return Outcome::Committed;
            }
            Some(outcome) => {
                assert!(outcome != Outcome::SessionLost || loses_session);
                assert!(outcome != Outcome::GaveUp || long_outages);
                assert!(outcome != Outcome::HandlerFailed || fails_after.is_some());
                if outcome == Outcome::GaveUp {
                    run.expire();
                }
                return outcome;
            }
        }
    }
    panic!("the run does not end");
}

/// Checks that each frame was applied once, as it was pushed and in order.
fn check(frames: &Script, node: &Node) {
    assert_eq!(node.sealed, 1, "sealed once");
    assert_eq!(node.applied.len(), frames.len());
    for (at, ((kind, pages, index, payload), (header, applied))) in
        frames.iter().zip(&node.applied).enumerate()
    {
        assert_eq!((header.sequence, header.kind), (at as u64, *kind));
        assert_eq!((header.pages, header.index), (*pages, *index));
        assert!(applied[..] == payload[..], "the payload of frame {at}");
    }
}

#[test]
fn a_dump_survives_any_network_and_fails_cleanly_when_its_session_is_gone() {
    let number = |name: &str| {
        env::var(name)
            .ok()
            .map(|text| text.parse().expect("a number"))
    };
    let seeds = match number("PERMAFROST_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("PERMAFROST_SEEDS").unwrap_or(300_u64),
    };
    let many = seeds.end - seeds.start >= 100;
    let mut seen = Seen::default();
    let mut outcomes = [0; 4];
    for seed in seeds {
        println!("PERMAFROST_SEED={seed}");
        outcomes[run(seed, &mut seen) as usize] += 1;
    }
    let [committed, lost, failed, gave_up] = outcomes;
    println!(
        "{committed} committed, {lost} lost, {failed} failed, {gave_up} given up; {} resumes, {} waits of the sender, \
         {} of the receiver, {} frames cut, {} conversations displaced, {} opened again",
        seen.resumes,
        seen.sender_waits,
        seen.receiver_waits,
        seen.half_frames,
        seen.displaced,
        seen.reopened,
    );
    // A simulation in which nothing goes wrong would show nothing.
    if many {
        assert!(committed > 50 && lost > 5 && failed > 5 && gave_up > 0);
        assert!(seen.resumes > 300 && seen.sender_waits > 100 && seen.receiver_waits > 300);
        assert!(seen.half_frames > 50 && seen.displaced > 50 && seen.reopened > 5);
    }
}
