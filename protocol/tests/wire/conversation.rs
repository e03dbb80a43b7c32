//! Order of messages in a conversation; messages of a peer that make no sense are refused.

use permafrost_protocol::control;
use permafrost_protocol::wire::conversation::{
    ConversationError, DumpClient, DumpEvent, DumpServer, check_dump, check_hello, check_request,
    fetch_opened,
};
use permafrost_protocol::wire::message::{
    Closed, Commit, Committed, FetchOpened, Hello, Prepared, Reply, Request, reply, request,
};

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

#[test]
fn both_ends_agree_on_a_dump_with_a_lost_connection_at_every_step() {
    for lost_after in 0..5 {
        let mut server = DumpServer::new(&dump()).unwrap();
        let mut client = DumpClient::new();
        let lose = |step: u32, client: &mut DumpClient, server: &DumpServer, next: u64| {
            if step != lost_after {
                return;
            }
            client.connection_lost();
            let resume = request::Dump {
                resume: true,
                ..dump()
            };
            server.resume(&resume).unwrap();
            for reply in server.opened(next, true) {
                client.reply(reply).unwrap();
            }
        };
        for reply in server.opened(0, true) {
            client.reply(reply).unwrap();
        }
        assert!(client.has_begun());
        lose(0, &mut client, &server, 0);
        let event = client.reply(DumpServer::acknowledged(9)).unwrap();
        assert_eq!(event, DumpEvent::Acknowledged(9));
        client.close_pushed(9);
        lose(1, &mut client, &server, 10);
        let event = client.reply(server.closed(closed(1))).unwrap();
        assert_eq!(event, DumpEvent::Closed(closed(1)));
        lose(2, &mut client, &server, 10);
        client.prepare_pushed(10);
        let event = client.reply(server.prepared(prepared(2))).unwrap();
        assert_eq!(event, DumpEvent::Prepared(prepared(2)));
        lose(3, &mut client, &server, 11);
        client.commit(&commit(2)).unwrap();
        assert_eq!(server.commit(&commit(2)), Ok(None));
        let committed = server.committed(Committed::default());
        if lost_after == 4 {
            // The answer is lost, and the client repeats the commit.
            lose(4, &mut client, &server, 11);
            client.commit(&commit(2)).unwrap();
            assert_eq!(server.commit(&commit(2)), Ok(Some(committed.clone())));
        }
        let event = client.reply(committed).unwrap();
        assert_eq!(event, DumpEvent::Committed(Box::default()));
    }
}

#[test]
fn replies_that_may_not_come_are_refused() {
    let opened = |client: &mut DumpClient| {
        let server = DumpServer::new(&dump()).unwrap();
        client.reply(server.opened(0, false).remove(0)).unwrap();
    };
    let early = [
        DumpServer::acknowledged(1),
        say(reply::Body::Closed(closed(1))),
        say(reply::Body::Prepared(prepared(1))),
        say(reply::Body::Committed(Committed::default())),
        say(reply::Body::Done(Default::default())),
        Reply { body: None },
    ];
    for reply in &early {
        let refused = DumpClient::new().reply(reply.clone());
        assert!(
            matches!(refused, Err(ConversationError::Unexpected { .. })),
            "{reply:?}"
        );
    }
    for reply in &early[1..] {
        let mut client = DumpClient::new();
        opened(&mut client);
        let refused = client.reply(reply.clone());
        assert!(
            matches!(refused, Err(ConversationError::Unexpected { .. })),
            "{reply:?}"
        );
    }
    let mut client = DumpClient::new();
    let not_new = DumpServer::new(&dump()).unwrap().opened(3, false).remove(0);
    assert_eq!(
        client.reply(not_new),
        Err(ConversationError::NotNew { next_sequence: 3 })
    );
    opened(&mut client);
    client.reply(DumpServer::acknowledged(5)).unwrap();
    let backwards = ConversationError::Backwards {
        next_sequence: 4,
        acknowledged: 5,
    };
    assert_eq!(client.reply(DumpServer::acknowledged(4)), Err(backwards));
    client.close_pushed(5);
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
    let error = control::Error {
        code: 6,
        message: "full".into(),
        ..Default::default()
    };
    let refused = client.reply(DumpServer::failed(error.clone()));
    assert_eq!(refused, Err(ConversationError::Refused(error)));
}

#[test]
fn commits_that_may_not_come_are_refused() {
    let mut server = DumpServer::new(&dump()).unwrap();
    assert_eq!(
        server.commit(&commit(2)),
        Err(ConversationError::CommitTooEarly)
    );
    server.closed(closed(1));
    assert_eq!(
        server.commit(&commit(2)),
        Err(ConversationError::CommitTooEarly)
    );
    server.prepared(prepared(2));
    assert_eq!(
        server.commit(&commit(3)),
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
        let refused = server.commit(&wrong);
        assert!(
            matches!(refused, Err(ConversationError::BadField { .. })),
            "{wrong:?}"
        );
    }
    assert_eq!(server.commit(&commit(2)), Ok(None));
    let other = Commit {
        generation: 2,
        ..commit(2)
    };
    assert_eq!(server.commit(&other), Err(ConversationError::CommitChanged));
    let mut parked = DumpServer::new(&dump()).unwrap();
    parked.prepared(prepared(2));
    let commit = Commit {
        kind: 2,
        generation: 0,
        job: String::new(),
        ..commit(2)
    };
    assert_eq!(parked.commit(&commit), Ok(None));
}

#[test]
fn first_words_are_checked() {
    let hello = Hello {
        version: 1,
        name: "n1".into(),
        region: String::new(),
    };
    assert_eq!(check_hello(&hello), Ok(()));
    let newer = Hello {
        version: 2,
        ..hello.clone()
    };
    assert_eq!(
        check_hello(&newer),
        Err(ConversationError::Version { found: 2 })
    );
    for name in ["", "a/b", ".."] {
        assert!(
            check_hello(&Hello {
                name: name.into(),
                ..hello.clone()
            })
            .is_err()
        );
    }
    assert!(
        check_hello(&Hello {
            region: "x".repeat(65),
            ..hello
        })
        .is_err()
    );

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
    let server = DumpServer::new(&dump()).unwrap();
    assert_eq!(server.resume(&dump()), Err(ConversationError::OtherSession));
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
    assert!(fetch_opened(&say(reply::Body::FetchOpened(opened.clone()))).is_ok());
    let short = FetchOpened {
        id: vec![1],
        ..opened
    };
    assert!(fetch_opened(&say(reply::Body::FetchOpened(short))).is_err());
    assert!(fetch_opened(&say(reply::Body::Done(Default::default()))).is_err());
}
