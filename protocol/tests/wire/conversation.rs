//! Order of messages in a conversation; messages of a peer that make no sense are refused.

use std::task::Poll;
use std::time::{Duration, Instant};

use permafrost_protocol::control::{self, ErrorCode};
use permafrost_protocol::versions::{SpokenVersions, VersionRange};
use permafrost_protocol::wire::code;
use permafrost_protocol::wire::conversation::{
    Continuation, ConversationError, ConversationOutcome, DumpClient, DumpEvent, DumpServer,
    QUEUED_FRAMES, RETRY_PAUSE, ReceiverLimits, check_dump, check_hello, check_request,
    fetch_opened, hello_answered,
};
use permafrost_protocol::wire::frame::{Coding, Kind};
use permafrost_protocol::wire::message::{
    Acknowledged, Closed, Commit, Committed, Done, DumpOpened, FetchOpened, Hello, Prepared, Reply,
    Request, reply, request,
};
use permafrost_protocol::wire::sender::SenderError;

fn dump() -> request::Dump {
    request::Dump {
        session: vec![7; 16],
        job: "a/b".into(),
        parent: "0123456789abcdef".repeat(2),
        resume: false,
        ..Default::default()
    }
}

fn commit(digest: u8) -> Commit {
    Commit {
        checkpoint: "0123456789abcdef".repeat(2),
        content_digest: vec![digest; 32],
        job: "a/b".into(),
        generation: 1,
        session: "07".repeat(16),
        ..Default::default()
    }
}

fn closed(digest: u8) -> Closed {
    Closed {
        content_digest: vec![digest; 32],
        nodes: vec!["n1".into()],
    }
}

fn prepared(digest: u8) -> Prepared {
    Prepared {
        content_digest: vec![digest; 32],
        nodes: vec!["n1".into()],
    }
}

fn say(body: reply::Body) -> Reply {
    Reply { body: Some(body) }
}

fn opened(next_sequence: u64) -> Reply {
    say(reply::Body::DumpOpened(DumpOpened {
        next_sequence,
        has_parent: true,
    }))
}

fn acknowledged(next_sequence: u64) -> Reply {
    say(reply::Body::Acknowledged(Acknowledged { next_sequence }))
}

fn refusal(code: ErrorCode) -> control::Error {
    control::Error {
        code: code.into(),
        message: "no".into(),
        ..Default::default()
    }
}

const RECONNECT: Duration = Duration::from_secs(20);

const PATIENCE: ReceiverLimits = ReceiverLimits {
    grace: Duration::from_secs(30),
    idle: Duration::from_secs(600),
    wait: Duration::from_secs(3600),
};

type Client = DumpClient<Vec<u8>>;
type Server = DumpServer<Vec<u8>>;

fn client(now: Instant) -> Client {
    DumpClient::new(dump(), 0, now + RECONNECT, RECONNECT).unwrap()
}

fn server() -> Server {
    DumpServer::new(dump(), PATIENCE).unwrap()
}

fn push(client: &mut Client, kind: Kind) {
    client.push(kind, Coding::Raw, 0, 0, 0, vec![]).unwrap();
}

/// Delivers all that both ends have to say, and returns what the replies meant.
fn exchange(client: &mut Client, server: &mut Server, conversation: u64) -> Vec<DumpEvent> {
    let mut events = Vec::new();
    loop {
        let before = events.len();
        while let Poll::Ready(Some(reply)) = server.poll_reply(conversation) {
            events.push(client.reply(reply).unwrap());
        }
        while let Some((header, payload)) = client.poll_transmit() {
            server.header(conversation, &header.encode()).unwrap();
            server.taken(conversation, payload).unwrap();
        }
        if let Some(commit) = client.poll_commit() {
            server.commit(conversation, commit).unwrap();
        }
        if events.len() == before {
            return events;
        }
    }
}

#[test]
fn both_ends_agree_on_a_dump_with_a_lost_connection_at_every_step() {
    for lost_after in 0..5 {
        let now = Instant::now();
        let (mut client, mut server) = (client(now), server());
        server.opened(true);
        let mut conversation = server.converse();
        let steps: [fn(&mut Client, &mut Server); 5] = [
            |_, _| {},
            |client, _| push(client, Kind::Close),
            |_, server| {
                assert_eq!(server.poll_frame().unwrap().0.kind, Kind::Close);
                server.answer(reply::Body::Closed(closed(1)));
            },
            |client, server| {
                push(client, Kind::Prepare);
                server.answer(reply::Body::Prepared(prepared(2)));
            },
            |client, _| client.commit(&commit(2)).unwrap(),
        ];
        for (number, step) in steps.into_iter().enumerate() {
            exchange(&mut client, &mut server, conversation);
            step(&mut client, &mut server);
            if number == lost_after {
                let next = client.ended(now, ConversationOutcome::Lost);
                assert_eq!(next, Continuation::Converse(now + RETRY_PAUSE));
                assert!(
                    server
                        .ended(conversation, now, ConversationOutcome::Lost)
                        .is_some()
                );
                let (request, _) = client.request();
                assert!(request.resume);
                server.check_resume(&request).unwrap();
                conversation = server.converse();
            }
        }
        exchange(&mut client, &mut server, conversation);
        assert_eq!(server.poll_commit(), Some(&commit(2)));
        server.answer(reply::Body::Committed(Committed::default()));
        server.finished(Ok(()));
        // The reply is lost, too: the client repeats the commit before it gets the reply.
        client.ended(now, ConversationOutcome::Lost);
        conversation = server.converse();
        let events = exchange(&mut client, &mut server, conversation);
        let expected = [
            DumpEvent::Opened,
            DumpEvent::Closed,
            DumpEvent::Prepared,
            DumpEvent::Committed,
        ];
        assert_eq!(events, expected);
        assert_eq!(server.poll_reply(conversation), Poll::Ready(None));
        assert_eq!(
            client.ended(now, ConversationOutcome::Settled),
            Continuation::Over
        );
    }
}

#[test]
fn a_sender_retries_what_may_succeed_and_as_long_as_a_receiver_waits_for_it() {
    let now = Instant::now();
    let end = |end| client(now).ended(now, end);
    let again = Continuation::Converse(now + RETRY_PAUSE);
    assert_eq!(end(ConversationOutcome::Lost), again);
    assert_eq!(end(ConversationOutcome::Stopped(code::BUSY.into())), again);
    assert_eq!(
        end(ConversationOutcome::Refused(ErrorCode::Unavailable)),
        again
    );
    assert_eq!(
        end(ConversationOutcome::Stopped(code::MISBEHAVED.into())),
        Continuation::Failed
    );
    assert_eq!(
        end(ConversationOutcome::Refused(ErrorCode::NoSpace)),
        Continuation::Failed
    );
    assert_eq!(end(ConversationOutcome::Violated), Continuation::Failed);

    // The first conversation has to be open in time; once one was, each lost one has its own time.
    let late = now + RECONNECT - RETRY_PAUSE;
    assert_eq!(
        client(now).ended(late, ConversationOutcome::Lost),
        Continuation::Failed
    );
    let mut client = client(now);
    client.reply(opened(0)).unwrap();
    let mut lost_at = late;
    assert!(matches!(
        client.ended(lost_at, ConversationOutcome::Lost),
        Continuation::Converse(_)
    ));
    lost_at += RECONNECT - RETRY_PAUSE;
    assert_eq!(
        client.ended(lost_at, ConversationOutcome::Lost),
        Continuation::Failed
    );
    assert!(client.is_over() && !client.may_push(0));
}

#[test]
fn a_receiver_keeps_a_dump_for_the_grace_period_and_serves_its_newest_conversation() {
    let now = Instant::now();
    let keeps = |end| {
        let mut server = server();
        server.opened(false);
        let conversation = server.converse();
        server.ended(conversation, now, end)
    };
    assert_eq!(keeps(ConversationOutcome::Lost), Some(now + PATIENCE.grace));
    assert_eq!(
        keeps(ConversationOutcome::Settled),
        Some(now + PATIENCE.grace)
    );
    assert_eq!(
        keeps(ConversationOutcome::Stopped(0)),
        Some(now + PATIENCE.grace)
    );
    assert_eq!(
        keeps(ConversationOutcome::Stopped(code::ABORTED.into())),
        None
    );
    assert_eq!(keeps(ConversationOutcome::Violated), None);

    let mut server = server();
    server.opened(false);
    let first = server.converse();
    server.ended(first, now, ConversationOutcome::Lost);
    assert!(!server.poll_forget(now + PATIENCE.grace / 2));
    let second = server.converse();
    assert!(!server.poll_forget(now + PATIENCE.grace));
    // The end of the first one is noticed late, and means nothing.
    server.ended(first, now, ConversationOutcome::Violated);
    assert_eq!(server.poll_reply(first), Poll::Ready(None));
    assert_eq!(
        server.taken(first, vec![]),
        Err(ConversationError::Displaced)
    );
    assert_eq!(
        server.poll_reply(second),
        Poll::Ready(Some(say(reply::Body::DumpOpened(DumpOpened::default()))))
    );
    server.ended(second, now, ConversationOutcome::Lost);
    assert!(server.poll_forget(now + PATIENCE.grace) && server.is_given_up());
}

#[test]
fn a_handler_is_slower_than_the_wire_and_its_error_is_the_last_reply() {
    let now = Instant::now();
    let (mut client, mut server) = (client(now), server());
    server.opened(true);
    let conversation = server.converse();
    exchange(&mut client, &mut server, conversation);
    assert_eq!(server.silence_limit(), PATIENCE.wait);
    client
        .push(Kind::Space, Coding::Raw, 0, 1, 5, vec![])
        .unwrap();
    for index in 1..QUEUED_FRAMES as u64 {
        let pushed = client.push(Kind::Zero, Coding::Raw, 0, 1, index, vec![]);
        pushed.unwrap();
        assert!(server.may_take());
        exchange(&mut client, &mut server, conversation);
    }
    assert!(!server.may_take() && !server.poll_room());
    server.poll_frame().unwrap();
    assert_eq!(server.silence_limit(), PATIENCE.idle);
    assert!(server.poll_room() && !server.poll_room());
    server.finished(Err(refusal(ErrorCode::NoSpace)));
    assert!(!server.wants_frames() && server.may_take() && server.poll_frame().is_none());
    for _ in 0..2 {
        let conversation = server.converse();
        let replies = std::iter::from_fn(|| match server.poll_reply(conversation) {
            Poll::Ready(reply) => reply,
            Poll::Pending => panic!("the handler has returned"),
        });
        let replies: Vec<_> = replies.collect();
        assert_eq!(replies.len(), 2);
        assert_eq!(
            replies[1],
            say(reply::Body::Error(refusal(ErrorCode::NoSpace)))
        );
    }
}

#[test]
fn replies_that_may_not_come_are_refused() {
    let now = Instant::now();
    let early = [
        acknowledged(0),
        say(reply::Body::Closed(closed(1))),
        say(reply::Body::Prepared(prepared(1))),
        say(reply::Body::Committed(Committed::default())),
        say(reply::Body::Done(Default::default())),
        Reply { body: None },
    ];
    for reply in &early {
        let refused = client(now).reply(reply.clone());
        assert!(
            matches!(refused, Err(ConversationError::Unexpected { .. })),
            "{reply:?}"
        );
    }
    for reply in &early[1..] {
        let mut client = client(now);
        client.reply(opened(0)).unwrap();
        let refused = client.reply(reply.clone());
        assert!(
            matches!(refused, Err(ConversationError::Unexpected { .. })),
            "{reply:?}"
        );
    }
    let mut client = client(now);
    let beyond = |next_sequence, sent| {
        Err(ConversationError::Acknowledgement(
            SenderError::BeyondSent {
                next_sequence,
                sent,
            },
        ))
    };
    assert_eq!(client.reply(opened(3)), beyond(3, 0), "it is new");
    client.reply(opened(0)).unwrap();
    push(&mut client, Kind::Close);
    assert_eq!(client.reply(acknowledged(1)), beyond(1, 0));
    client.poll_transmit().unwrap();
    assert!(matches!(
        client.reply(acknowledged(1)),
        Ok(DumpEvent::Acknowledged { freed_bytes: 1.. })
    ));
    client.reply(say(reply::Body::Closed(closed(1)))).unwrap();
    let changed = client.reply(say(reply::Body::Closed(closed(2))));
    assert_eq!(
        changed,
        Err(ConversationError::DigestChanged { of: "Closed" })
    );
    let short = Closed {
        content_digest: vec![1; 31],
        ..closed(1)
    };
    assert!(matches!(
        client.reply(say(reply::Body::Closed(short))),
        Err(ConversationError::BadLength { len_bytes: 31, .. })
    ));
    assert_eq!(
        client.commit(&commit(1)),
        Err(ConversationError::CommitTooEarly)
    );
    push(&mut client, Kind::Prepare);
    client
        .reply(say(reply::Body::Prepared(prepared(2))))
        .unwrap();
    assert_eq!(
        client.commit(&commit(1)),
        Err(ConversationError::DigestChanged { of: "Commit" })
    );
    let error = refusal(ErrorCode::NoSpace);
    let refused = client.reply(say(reply::Body::Error(error.clone())));
    assert_eq!(refused, Err(ConversationError::Refused(error)));
}

#[test]
fn commits_that_may_not_come_are_refused() {
    let mut server = server();
    let conversation = server.converse();
    let early = Err(ConversationError::CommitTooEarly);
    assert_eq!(server.commit(conversation, commit(2)), early);
    server.answer(reply::Body::Closed(closed(1)));
    assert_eq!(server.commit(conversation, commit(2)), early);
    server.answer(reply::Body::Prepared(prepared(2)));
    assert_eq!(
        server.commit(conversation, commit(3)),
        Err(ConversationError::DigestChanged { of: "Commit" })
    );
    for wrong in [
        Commit {
            checkpoint: "x".into(),
            ..commit(2)
        },
        Commit {
            session: String::new(),
            ..commit(2)
        },
        Commit {
            kind: 9,
            ..commit(2)
        },
        Commit {
            kind: 2,
            ..commit(2)
        },
        Commit {
            generation: 0,
            ..commit(2)
        },
        Commit {
            job: "../x".into(),
            ..commit(2)
        },
    ] {
        let refused = server.commit(conversation, wrong.clone());
        assert!(
            matches!(refused, Err(ConversationError::BadField { .. })),
            "{wrong:?}"
        );
        assert_eq!(server.poll_commit(), None);
    }
    assert_eq!(server.commit(conversation, commit(2)), Ok(()));
    let other = Commit {
        generation: 2,
        ..commit(2)
    };
    assert_eq!(
        server.commit(conversation, other),
        Err(ConversationError::CommitChanged)
    );
    let parked = Commit {
        kind: 2,
        generation: 0,
        job: String::new(),
        ..commit(2)
    };
    // The origin of a dump sends no digest, and names the checkpoint itself.
    let own = Commit {
        session: "07".repeat(16),
        ..Commit::default()
    };
    for (digest, commit) in [(vec![2; 32], parked), (vec![], own)] {
        let mut server = self::server();
        let conversation = server.converse();
        server.answer(reply::Body::Prepared(Prepared {
            content_digest: digest,
            nodes: vec![],
        }));
        assert_eq!(server.commit(conversation, commit), Ok(()));
    }
}

#[test]
fn first_words_are_checked() {
    let hello = Hello {
        version: 1,
        name: "n1".into(),
        region: String::new(),
        versions: None,
        tls_bulk: false,
    };
    assert_eq!(check_hello(&hello, 1), Ok(()));
    let newer = Hello {
        version: 2,
        versions: Some(SpokenVersions::built()),
        ..hello.clone()
    };
    assert_eq!(check_hello(&newer, 2), Ok(()));
    assert_eq!(
        check_hello(&newer, 1),
        Err(ConversationError::Version {
            found: 2,
            version: 1
        })
    );
    // Versions of a peer are of use only if they can be, and have the one that is spoken.
    for (oldest, newest) in [(0, 2), (3, 2), (1, 65_536), (3, 4), (1, 1)] {
        let wire = Some(VersionRange { oldest, newest });
        let versions = Some(SpokenVersions {
            wire,
            ..SpokenVersions::built()
        });
        let said = Hello {
            versions,
            ..newer.clone()
        };
        assert!(check_hello(&said, 2).is_err(), "{oldest} to {newest}");
    }
    let untold = Hello {
        versions: None,
        ..newer.clone()
    };
    assert!(check_hello(&untold, 2).is_err());
    for name in ["", "a/b", ".."] {
        assert!(
            check_hello(
                &Hello {
                    name: name.into(),
                    ..hello.clone()
                },
                1
            )
            .is_err()
        );
    }
    assert!(
        check_hello(
            &Hello {
                region: "x".repeat(65),
                ..hello
            },
            1
        )
        .is_err()
    );
    let answer = |body| Reply { body: Some(body) };
    let good = answer(reply::Body::Hello(newer.clone()));
    assert_eq!(hello_answered(good.clone(), 2, "n1"), Ok(newer));
    assert!(hello_answered(good, 2, "n2").is_err());
    let other = answer(reply::Body::Done(Done::default()));
    assert!(hello_answered(other, 2, "n1").is_err());

    assert_eq!(check_dump(&dump()), Ok([7; 16]));
    for wrong in [
        request::Dump {
            session: vec![7; 15],
            ..dump()
        },
        request::Dump {
            job: "/".into(),
            ..dump()
        },
        request::Dump {
            parent: "0".into(),
            ..dump()
        },
    ] {
        assert!(check_dump(&wrong).is_err(), "{wrong:?}");
    }
    let mut server = server();
    let other = request::Dump {
        parent: String::new(),
        ..dump()
    };
    let twice = Err(ConversationError::BegunTwice);
    assert_eq!(server.check_resume(&other), twice);
    // A sender that has not received the first reply has sent no frame, and begins again.
    assert_eq!(server.check_resume(&dump()), Ok(()));
    let conversation = server.converse();
    let mut client = client(Instant::now());
    client.reply(opened(0)).unwrap();
    push(&mut client, Kind::Close);
    let (header, _) = client.poll_transmit().unwrap();
    server.header(conversation, &header.encode()).unwrap();
    server.taken(conversation, vec![]).unwrap();
    assert_eq!(server.check_resume(&dump()), twice);
    let resume = request::Dump {
        resume: true,
        ..dump()
    };
    assert_eq!(server.check_resume(&resume), Ok(()));
    let nothing = Request { body: None };
    assert_eq!(
        check_request(&nothing),
        Err(ConversationError::UnknownRequest)
    );
    let fetch = request::Fetch {
        checkpoint: "0".into(),
        ..Default::default()
    };
    let fetch = Request {
        body: Some(request::Body::Fetch(fetch)),
    };
    assert!(matches!(
        check_request(&fetch),
        Err(ConversationError::BadField { .. })
    ));

    let opened = FetchOpened {
        id: vec![1; 16],
        content_digest: vec![2; 32],
        manifest: None,
    };
    assert!(fetch_opened(say(reply::Body::FetchOpened(opened.clone()))).is_ok());
    let short = FetchOpened {
        id: vec![1],
        ..opened
    };
    assert!(fetch_opened(say(reply::Body::FetchOpened(short))).is_err());
    assert!(fetch_opened(say(reply::Body::Done(Default::default()))).is_err());
}
