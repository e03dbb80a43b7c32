//! Wire protocol between nodes, over any bytes: nothing panics, sequences advance one by one, headers that are read
//! are equal when written, and messages are refused or taken.

use permafrost_protocol::control::framing::decode;
use permafrost_protocol::wire::conversation::{DumpClient, check_hello, check_request};
use permafrost_protocol::wire::frame::{HEADER_BYTES, Kind, MAX_PAYLOAD_BYTES};
use permafrost_protocol::wire::message::{Hello, Reply, Request};
use permafrost_protocol::wire::receiver::{Received, Receiver};

/// Checks all properties of the wire.
pub fn check(input: &[u8]) {
    check_frames(input);
    if let Ok(Some((hello, len))) = decode::<Hello>(input) {
        let _ = check_hello(&hello);
        if let Ok(Some((request, _))) = decode::<Request>(&input[len..]) {
            let _ = check_request(&request);
        }
    }
    let mut client = DumpClient::new();
    client.close_pushed(1);
    client.prepare_pushed(2);
    let mut rest = input;
    while let Ok(Some((reply, len))) = decode::<Reply>(rest) {
        if client.reply(reply).is_err() {
            break;
        }
        rest = &rest[len..];
    }
}

/// Headers with a checksum and a sequence that fit, which the fuzzer would otherwise have to find.
fn check_frames(input: &[u8]) {
    let mut receiver = Receiver::new();
    let mut rest = input;
    while let Some((bytes, after)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let mut bytes = *bytes;
        let expected = receiver.next_sequence();
        bytes[8..16].copy_from_slice(&expected.to_le_bytes());
        let crc32 = crc32fast::hash(&bytes[..28]);
        bytes[28..].copy_from_slice(&crc32.to_le_bytes());
        rest = after;
        let Ok(Received::New(header)) = receiver.header(&bytes) else {
            assert_eq!(receiver.next_sequence(), expected);
            continue;
        };
        assert_eq!(header.encode(), bytes);
        assert!(header.payload_bytes <= MAX_PAYLOAD_BYTES);
        assert!(header.decoded_bytes() <= MAX_PAYLOAD_BYTES.into());
        let len = rest.len().min(header.payload_bytes as usize);
        let (payload, after) = rest.split_at(len);
        rest = after;
        if header.kind == Kind::Image && receiver.image_name(payload).is_err() {
            receiver.connection_lost();
            continue;
        }
        receiver.taken().expect("it was announced");
        assert_eq!(receiver.next_sequence(), expected + 1);
    }
}
