//! Both ends of a dump over a bad network, under virtual time.
//!
//! Faults: a connection is lost at any time, with everything in flight, and the delivered part of the stream ends at
//! any byte; either direction is cut alone; deliveries are of any length and late, so that the control stream and the
//! bulk stream overtake each other; the receiver restarts, and keeps its session or has lost it.
//!
//! Invariants: the receiver applies the frames that were pushed, in order, each once; the frames that the sender
//! keeps never exceed its window; every run ends, with the dump committed or, where the session was lost, cleanly
//! failed.
//!
//! `PERMAFROST_SEED` replays one run, `PERMAFROST_SEEDS` sets the number of runs.

use std::collections::VecDeque;
use std::env;
use std::rc::Rc;

use permafrost_protocol::wire::conversation::{
    ConversationError, DumpClient, DumpEvent, DumpServer,
};
use permafrost_protocol::wire::frame::{Coding, HEADER_BYTES, Header, Kind, MAX_PAYLOAD_BYTES};
use permafrost_protocol::wire::message::{Closed, Commit, Committed, Prepared, Reply, request};
use permafrost_protocol::wire::receiver::{Received, Receiver};
use permafrost_protocol::wire::sender::{MIN_WINDOW_BYTES, PushError, Sender};

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
    /// Sent and not delivered, in pieces; of the first, so many bytes were.
    bulk: VecDeque<Payload>,
    delivered: usize,
    replies: VecDeque<Reply>,
    commit: Option<Commit>,
    bulk_cut: bool,
    control_cut: bool,
    /// Time at which a cut is noticed.
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

/// The receiving node: what survives a lost connection, and the bytes that do not.
struct Node {
    receiver: Receiver,
    server: DumpServer,
    bytes: Vec<u8>,
    announced: Option<Header>,
    applied: Vec<(Header, Vec<u8>)>,
    sealed: u32,
}

impl Node {
    /// Takes every whole frame.
    fn work(&mut self, replies: &mut VecDeque<Reply>) {
        let mut at = 0;
        loop {
            let rest = &self.bytes[at..];
            let Some(header) = self.announced else {
                let Some(header) = rest.first_chunk::<HEADER_BYTES>() else {
                    break;
                };
                match self.receiver.header(header).expect("a good sender") {
                    Received::New(header) => self.announced = Some(header),
                    Received::Duplicate(header) => panic!("{header:?} comes again after a resume"),
                }
                at += HEADER_BYTES;
                continue;
            };
            let Some(payload) = rest.get(..header.payload_bytes as usize) else {
                break;
            };
            if header.kind == Kind::Image {
                self.receiver.image_name(payload).expect("a good name");
            }
            self.applied.push((header, payload.to_vec()));
            self.receiver.taken().expect("announced");
            at += payload.len();
            self.announced = None;
            replies.extend(
                self.receiver
                    .poll_acknowledge()
                    .map(DumpServer::acknowledged),
            );
            match header.kind {
                Kind::Close => replies.push_back(self.server.closed(closed())),
                Kind::Prepare => replies.push_back(self.server.prepared(prepared())),
                _ => {}
            }
        }
        self.bytes.drain(..at);
    }

    fn connection_lost(&mut self) {
        self.bytes.clear();
        self.announced = None;
        self.receiver.connection_lost();
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

fn dump(resume: bool) -> request::Dump {
    request::Dump {
        session: vec![7; 16],
        resume,
        ..Default::default()
    }
}

#[derive(Debug, PartialEq, Eq)]
enum End {
    Committed,
    SessionLost,
}

/// Faults that happened in one run, so that a test can check that faults happened at all.
#[derive(Default)]
struct Seen {
    resumes: u64,
    window_full: u64,
    half_frames: u64,
}

fn run(seed: u64, seen: &mut Seen) -> End {
    let mut random = Random(seed);
    let frames = script(&mut random);
    // Quality of the network: one fault in `fault_every` times eight steps; after `calm_after` it is good, so that
    // runs end.
    let fault_every = 2 + random.below(60);
    let calm_after = 20_000;
    let loses_session = random.one_in(5);
    let mut sender: Sender<Payload> = Sender::new(MIN_WINDOW_BYTES);
    let mut client = DumpClient::new();
    let mut node: Option<Node> = None;
    let mut connection: Option<Connection> = None;
    let mut pushed = 0;
    let mut is_prepared = false;

    for now in 0..200_000_u64 {
        assert!(
            sender.window_left() <= MIN_WINDOW_BYTES,
            "the window has what it never had"
        );
        match random.below(8) {
            // The dump goes on, connected or not.
            0 | 1 => {
                for _ in 0..random.below(40) {
                    let Some((kind, pages, index, payload)) = frames.get(pushed) else {
                        break;
                    };
                    // A dump pushes nothing behind Close before the reply to it.
                    if pushed > 0 && frames[pushed - 1].0 == Kind::Close && !client.has_closed() {
                        break;
                    }
                    let coding = match kind {
                        Kind::Pages | Kind::ImageData => Coding::Zstd,
                        _ => Coding::Raw,
                    };
                    match sender.push(*kind, coding, 0, *pages, *index, payload.clone()) {
                        Ok(sequence) => {
                            assert_eq!(sequence, pushed as u64);
                            pushed += 1;
                            match kind {
                                Kind::Close => client.close_pushed(sequence),
                                Kind::Prepare => client.prepare_pushed(sequence),
                                _ => {}
                            }
                        }
                        Err(PushError::WindowFull { .. }) => {
                            seen.window_full += 1;
                            break;
                        }
                        Err(PushError::Frame(error)) => panic!("{error}"),
                    }
                }
            }
            // A connection is made.
            2 if connection.is_none() => {
                let mut made = Connection::default();
                let ask = dump(client.has_begun());
                if !ask.resume && node.is_none() {
                    node = Some(Node {
                        receiver: Receiver::new(),
                        server: DumpServer::new(&ask).expect("a good request"),
                        bytes: vec![],
                        announced: None,
                        applied: vec![],
                        sealed: 0,
                    });
                }
                let Some(node) = &mut node else {
                    // The receiver does not know the session.
                    let refused = client.reply(DumpServer::failed(Default::default()));
                    assert!(matches!(refused, Err(ConversationError::Refused(_))));
                    return End::SessionLost;
                };
                if ask.resume {
                    node.server.resume(&ask).expect("the same session");
                }
                made.replies
                    .extend(node.server.opened(node.receiver.next_sequence(), false));
                connection = Some(made);
            }
            // The sender writes.
            2 | 3 => {
                if let Some(connection) = &mut connection {
                    for _ in 0..random.below(30) {
                        if !sender.is_connected() || !client.has_begun() {
                            break;
                        }
                        let Some((header, payload)) = sender.poll_transmit() else {
                            break;
                        };
                        connection.bulk.push_back(Rc::from(header.encode()));
                        if !payload.is_empty() {
                            connection.bulk.push_back(payload);
                        }
                    }
                }
            }
            // Bytes arrive.
            4 | 5 => {
                if let (Some(connection), Some(node)) = (&mut connection, &mut node)
                    && !connection.bulk_cut
                {
                    let len = match random.below(3) {
                        0 => random.below(100),
                        1 => random.below(10_000),
                        _ => random.below(2 << 20),
                    };
                    connection.deliver(usize::try_from(len).unwrap(), &mut node.bytes);
                    node.work(&mut connection.replies);
                    if let Some(commit) = connection.commit.take()
                        && node
                            .server
                            .commit(&commit)
                            .expect("a good commit")
                            .is_none()
                    {
                        node.sealed += 1;
                        node.server.committed(Committed::default());
                    }
                    if node.sealed > 0 && connection.replies.is_empty() {
                        connection
                            .replies
                            .extend(node.server.commit(&commit()).unwrap());
                    }
                }
            }
            // Replies arrive.
            6 => {
                if let Some(connection) = &mut connection
                    && !connection.control_cut
                {
                    for _ in 0..random.below(6) {
                        let Some(reply) = connection.replies.pop_front() else {
                            break;
                        };
                        match client.reply(reply).expect("a good receiver") {
                            DumpEvent::Opened(opened) => {
                                sender.connection_lost();
                                sender.resumed(opened.next_sequence).expect("what was sent");
                                seen.resumes += u64::from(opened.next_sequence > 0);
                            }
                            DumpEvent::Acknowledged(next) => {
                                sender.acknowledged(next).expect("what was sent");
                            }
                            DumpEvent::Closed(_) => {}
                            DumpEvent::Prepared(_) => is_prepared = true,
                            DumpEvent::Committed(_) => {
                                check(&frames, node.as_ref().expect("it has committed"));
                                assert!(sender.is_drained(), "Prepare is acknowledged at once");
                                return End::Committed;
                            }
                        }
                    }
                    if is_prepared && sender.is_connected() && sender.is_drained() {
                        client.commit(&commit()).expect("prepared");
                        connection.commit = Some(commit());
                    }
                }
            }
            // Something goes wrong.
            _ => {
                if now < calm_after && random.one_in(fault_every) {
                    match (random.below(5), &mut connection) {
                        (0, Some(connection)) => connection.bulk_cut = true,
                        (1, Some(connection)) => connection.control_cut = true,
                        (2, _) if loses_session => {
                            node = None;
                            connection.get_or_insert_default().dies_at = Some(now);
                        }
                        (_, Some(connection)) => connection.dies_at = Some(now),
                        (_, None) => {}
                    }
                }
            }
        }
        let mut died = false;
        if let Some(connection) = &mut connection {
            if (connection.bulk_cut || connection.control_cut) && connection.dies_at.is_none() {
                connection.dies_at = Some(now + random.below(200));
            }
            died = connection.dies_at.is_some_and(|at| now >= at);
        }
        if died {
            connection = None;
            sender.connection_lost();
            client.connection_lost();
            if let Some(node) = &mut node {
                seen.half_frames += u64::from(node.announced.is_some() || !node.bytes.is_empty());
                node.connection_lost();
            }
        }
    }
    panic!("the run does not end");
}

/// Checks that each frame was applied once, as it was pushed and in order.
fn check(frames: &Script, node: &Node) {
    assert_eq!(node.sealed, 1, "sealed once");
    assert!(node.receiver.is_over());
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
    let (mut committed, mut lost) = (0, 0);
    for seed in seeds {
        println!("PERMAFROST_SEED={seed}");
        match run(seed, &mut seen) {
            End::Committed => committed += 1,
            End::SessionLost => lost += 1,
        }
    }
    println!(
        "{committed} committed, {lost} lost; {} resumes, {} times full, {} frames cut",
        seen.resumes, seen.window_full, seen.half_frames
    );
    // A simulation in which nothing goes wrong would show nothing.
    if many {
        assert!(
            committed > 50 && lost > 5,
            "{committed} committed, {lost} lost"
        );
        assert!(seen.resumes > 300 && seen.window_full > 300 && seen.half_frames > 50);
    }
}
