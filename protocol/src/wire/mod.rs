//! Wire protocol between nodes, and between an agent and a node, over QUIC.
//!
//! Both ends of a connection agree on a version by ALPN ([`offered`], [`agreed`]). Each bidirectional stream is one conversation: a [`message::Hello`] and a
//! [`message::Request`] one way, [`message::Reply`] the other, framed as control messages are
//! ([`crate::control::framing`]). Pages travel beside it, on a unidirectional *bulk* stream that begins with a
//! [`frame::Preamble`] and then consists of [`frame::Header`]s, each with its payload. [`sender`] and [`receiver`]
//! are the two ends of that stream, over all connections of a dump. A dump's bulk stream may be a TLS connection over TCP
//! instead, if the node's Hello says so. [`conversation`] is the two ends of a dump as a
//! whole, which nodes and agents run, and which are tested over a simulated network.

pub mod code;
pub mod conversation;
pub mod frame;
pub mod message;
pub mod receiver;
pub mod sender;

use crate::versions::VersionRange;

/// ALPN protocol name of a version is this name, a slash and the version. The name alone is offered and taken last: on
/// such a connection each conversation is refused, with an error that names the versions of both.
pub const ALPN: &str = "permafrost";

/// ALPN protocol name of a bulk stream over TLS. Everything else about it was agreed on in the dump's conversation.
pub const BULK_ALPN: &[u8] = b"permafrost-bulk/1";

/// First version in which a node answers a [`message::Hello`] with its own, before the request comes.
pub const HELLO_ANSWERED: u32 = 2;

/// Returns the ALPN names that an end offers: the newest version first, [`ALPN`] alone last.
#[must_use]
pub fn offered(spoken: VersionRange) -> Vec<Vec<u8>> {
    let versions = (spoken.oldest..=spoken.newest).rev();
    let mut names: Vec<_> = versions
        .map(|version| format!("{ALPN}/{version}").into_bytes())
        .collect();
    names.push(ALPN.as_bytes().to_vec());
    names
}

/// Returns the version that the ALPN name of a connection stands for; `None` if the ends have none in common.
#[must_use]
pub fn agreed(name: &[u8], spoken: VersionRange) -> Option<u32> {
    let (_, version) = std::str::from_utf8(name).ok()?.split_once('/')?;
    let version = version.parse().ok()?;
    spoken.contains(version).then_some(version)
}
