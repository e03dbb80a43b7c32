//! Control messages, over any bytes: nothing panics, and messages that decode are equal when encoded and decoded
//! again.

use permafrost_protocol::control::framing::{decode, encode};
use permafrost_protocol::control::{Reply, Request};
use prost::Message;

/// Checks all properties, on the bytes as they are and with a fitting length before them.
pub fn check(input: &[u8]) {
    let length = u32::try_from(input.len()).unwrap_or(u32::MAX).to_le_bytes();
    for bytes in [input.to_vec(), [&length[..], input].concat()] {
        round_trip::<Request>(&bytes);
        round_trip::<Reply>(&bytes);
    }
}

fn round_trip<M: Message + Default + PartialEq>(bytes: &[u8]) {
    if let Ok(Some((message, len))) = decode::<M>(bytes) {
        assert!(len <= bytes.len());
        assert!(
            decode::<M>(&bytes[..len - 1]).is_ok_and(|read| read.is_none()),
            "not whole without its last byte"
        );
        let again = encode(&message).expect("what was read can be written");
        assert!(decode(&again) == Ok(Some((message, again.len()))));
    }
}
