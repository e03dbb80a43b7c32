//! Tests of the limits on a caller.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

#[tokio::test]
async fn a_body_over_the_limit_is_refused_with_its_limit() {
    let place = Place::new();
    let mut options = place.with_tokens(&[("a", "read", "t")]);
    options.limits.body_bytes = 100_000;
    let server = start(options).await;
    let client = &mut at_port(&server).await;
    let fits = said(client, send("/length", "t", vec![b'x'; 100_000])).await;
    assert_eq!(fits.text, "100000");
    let over = said(client, send("/length", "t", vec![b'x'; 100_001])).await;
    assert_eq!(over.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(over.problem().detail.contains("100000 bytes"));
    assert_eq!(over.header("connection"), "close");
    // A body without a declared length.
    let mut stream = TcpStream::connect(server.address().unwrap()).await.unwrap();
    let head = "POST /length HTTP/1.1\r\nhost: a\r\nauthorization: Bearer t\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let chunk = format!("{:x}\r\n{}\r\n", 60_000, "x".repeat(60_000));
    for _ in 0..2 {
        stream.write_all(chunk.as_bytes()).await.unwrap();
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 413 "), "{text}");
}

#[tokio::test]
async fn who_is_not_known_sends_no_body() {
    let place = Place::new();
    let server = start(place.with_tokens(&[("a", "read", "t")])).await;
    let client = &mut at_port(&server).await;
    let refused = said(client, send("/length", "wrong", vec![b'x'; 100_000])).await;
    assert_eq!(refused.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn bodies_share_their_room_and_all_are_answered() {
    let place = Place::new();
    let mut options = place.with_tokens(&[("a", "read", "t")]);
    options.limits.body_bytes = 1 << 20;
    options.limits.bodies_bytes = 1 << 20;
    let server = start(options).await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(at_port(&server).await);
    }
    let asking: Vec<_> = clients
        .into_iter()
        .map(|mut client| {
            tokio::spawn(async move {
                let body = vec![b'x'; 1 << 20];
                said(&mut client, send("/length", "t", body)).await.text
            })
        })
        .collect();
    for answer in asking {
        assert_eq!(answer.await.unwrap(), "1048576");
    }
}

#[tokio::test]
async fn a_large_body_that_does_not_come_holds_up_large_ones_alone() {
    let place = Place::new();
    let mut options = place.with_tokens(&[("a", "read", "t")]);
    options.limits.body_bytes = 1 << 20;
    options.limits.bodies_bytes = 1 << 20;
    options.limits.body = Duration::from_secs(1);
    let server = start(options).await;
    let mut stream = TcpStream::connect(server.address().unwrap()).await.unwrap();
    let head = "POST /length HTTP/1.1\r\nhost: a\r\nauthorization: Bearer t\r\nexpect: 100-continue\r\ncontent-length: 1048576\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    // Once there is room, the client is told to continue.
    let mut begun = [0; 12];
    stream.read_exact(&mut begun).await.unwrap();
    assert_eq!(&begun, b"HTTP/1.1 100");
    let client = &mut at_port(&server).await;
    let small = said(client, send("/length", "t", "small")).await;
    assert_eq!(small.text, "5");
    // The room is free again when the body is given up.
    let large = loop {
        let client = &mut at_port(&server).await;
        let large = said(client, send("/length", "t", vec![b'x'; 1 << 20])).await;
        if large.status == 200 {
            break large;
        }
        assert_eq!(large.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(large.problem().detail.contains("room"));
    };
    assert_eq!(large.text, "1048576");
}

#[tokio::test]
async fn who_asks_too_often_is_told_when_to_come_again() {
    let place = Place::new();
    let mut options = place.with_tokens(&[("a", "read", "t"), ("b", "read", "u")]);
    options.limits.rate = Rate { per_s: 1, burst: 2 };
    let server = start(options).await;
    let client = &mut at_port(&server).await;
    let mut answered = 0;
    let refused = loop {
        let said = said(client, ask("/who", Some("t"))).await;
        if said.status != 200 {
            break said;
        }
        answered += 1;
    };
    assert!(answered >= 2);
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(refused.problem().retry_after_s, Some(1));
    // Another caller, and this machine's own, are not delayed by it.
    assert_eq!(said(client, ask("/who", Some("u"))).await.status, 200);
    let local = &mut at_socket(&server).await;
    for _ in 0..10 {
        assert_eq!(said(local, ask("/who", None)).await.status, 200);
    }
}

#[tokio::test]
async fn an_answer_that_takes_too_long_is_given_up() {
    let place = Place::new();
    let mut options = place.options();
    options.limits.request = Duration::from_secs(1);
    let server = start(options).await;
    let client = &mut at_socket(&server).await;
    let late = said(client, ask("/never", None)).await;
    assert_eq!(late.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(late.problem().word(), "unavailable");
    // The connection can be used again.
    assert_eq!(said(client, ask("/who", None)).await.status, 200);
}

#[tokio::test]
async fn a_slow_body_is_given_up() {
    let place = Place::new();
    let mut options = place.with_tokens(&[("a", "read", "t")]);
    options.limits.body = Duration::from_millis(50);
    let server = start(options).await;
    let mut stream = TcpStream::connect(server.address().unwrap()).await.unwrap();
    let head = "POST /length HTTP/1.1\r\nhost: a\r\nauthorization: Bearer t\r\ncontent-length: 10\r\n\r\nx";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 408 "), "{text}");
}

#[tokio::test]
async fn strangers_do_not_keep_connections() {
    let place = Place::new();
    let mut options = place.with_tokens(&[("a", "read", "t")]);
    options.limits.introduction = Duration::from_secs(1);
    let server = start(options).await;
    // One client that sends nothing, and one that sends half a head and no more.
    for said in ["", "GET /who HTTP/1.1\r\nhost: a\r\nx-slow: "] {
        let mut stream = TcpStream::connect(server.address().unwrap()).await.unwrap();
        stream.write_all(said.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "");
    }
    // An authenticated caller's connection stays.
    let client = &mut at_port(&server).await;
    assert_eq!(said(client, ask("/who", Some("t"))).await.status, 200);
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert_eq!(said(client, ask("/who", Some("t"))).await.status, 200);
}

#[tokio::test]
async fn a_silent_peer_at_the_tls_port_is_given_up() {
    let place = Place::new();
    let mut options = place.with_tls();
    options.limits.handshake = Duration::from_millis(50);
    let server = start(options).await;
    for said in [&b""[..], b"\x16\x03\x01"] {
        let mut stream = TcpStream::connect(server.address().unwrap()).await.unwrap();
        stream.write_all(said).await.unwrap();
        let mut rest = Vec::new();
        // An error counts as an end, too.
        let _ = stream.read_to_end(&mut rest).await;
        assert_eq!(rest, b"");
    }
}

#[tokio::test]
async fn a_reader_that_takes_nothing_is_given_up() {
    let place = Place::new();
    let mut options = place.options();
    options.limits.stall = Duration::from_millis(100);
    options.limits.connections = 1;
    let server = start(options).await;
    let mut stream = UnixStream::connect(server.socket()).await.unwrap();
    stream
        .write_all(b"GET /much HTTP/1.1\r\nhost: a\r\n\r\n")
        .await
        .unwrap();
    // While this connection is the only one allowed, others are refused; when it is given up, one is accepted.
    loop {
        let mut client = at_socket(&server).await;
        let said = said(&mut client, ask("/who", None)).await;
        if said.status == 200 {
            break;
        }
        assert_eq!(said.status, StatusCode::SERVICE_UNAVAILABLE);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut got = Vec::new();
    let read = stream.read_to_end(&mut got).await;
    assert!(read.is_err() || got.len() < 64 << 20);
}

#[tokio::test]
async fn too_many_connections_are_told_so_and_the_socket_has_its_own() {
    let place = Place::new();
    let mut options = place.with_tokens(&[("a", "read", "t")]);
    options.limits.connections = 3;
    let server = start(options).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut client = at_port(&server).await;
        assert_eq!(said(&mut client, ask("/who", Some("t"))).await.status, 200);
        held.push(client);
    }
    let turned = said(&mut at_port(&server).await, ask("/who", Some("t"))).await;
    assert_eq!(turned.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(turned.header("retry-after"), "1");
    assert!(turned.problem().detail.contains("3 connections"));
    let local = said(&mut at_socket(&server).await, ask("/who", None)).await;
    assert_eq!(local.status, 200);
    held.clear();
    // A place is free again once the server has seen the end of the connection.
    loop {
        let again = said(&mut at_port(&server).await, ask("/who", Some("t"))).await;
        if again.status == 200 {
            break;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn strangers_keep_nobody_out_who_is_known() {
    let place = Place::new();
    let mut options = place.with_tokens(&[("a", "read", "t")]);
    options.limits.strangers = 4;
    let server = start(options).await;
    let known = &mut at_port(&server).await;
    assert_eq!(said(known, ask("/who", Some("t"))).await.status, 200);
    let mut strangers = Vec::new();
    for _ in 0..300 {
        strangers.push(TcpStream::connect(server.address().unwrap()).await.unwrap());
    }
    let other = &mut at_port(&server).await;
    assert_eq!(said(other, ask("/who", Some("t"))).await.status, 200);
    assert_eq!(said(known, ask("/who", Some("t"))).await.status, 200);
}

#[tokio::test]
async fn one_caller_does_not_take_all_connections() {
    let place = Place::new();
    let mut options = place.with_tokens(&[("a", "read", "t"), ("b", "read", "u")]);
    options.limits.connections = 4;
    options.limits.caller_connections = 2;
    let server = start(options).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = at_port(&server).await;
        assert_eq!(said(&mut client, ask("/who", Some("t"))).await.status, 200);
        held.push(client);
    }
    let turned = said(&mut at_port(&server).await, ask("/who", Some("t"))).await;
    assert_eq!(turned.status, StatusCode::SERVICE_UNAVAILABLE);
    let other = said(&mut at_port(&server).await, ask("/who", Some("u"))).await;
    assert_eq!(other.status, 200);
}
