//! Order of the messages on the bidirectional stream of a conversation.
//!
//! ```text
//!   client   Hello  Request{Dump}                                                      Commit
//!   server                        DumpOpened  Acknowledged*  Closed  Acknowledged*  Prepared  Committed
//! ```
//!
//! An `Error` may come in place of any reply, and is the last. On a conversation that resumes a dump the server
//! repeats the replies that the client may not have received: `Closed` and `Prepared`, if the dump has got so far,
//! follow `DumpOpened`; the client repeats its `Commit`, and the server its `Committed`.
//!
//! [`DumpClient`] and [`DumpServer`] decide all of it: their callers move bytes between the two, and tell them the
//! time and how a conversation ended ([`ConversationOutcome`]).

mod client;
mod error;
mod server;

pub use client::{Continuation, DumpClient, DumpEvent, RETRY_PAUSE};
pub use error::ConversationError;
pub use server::{DumpServer, QUEUED_FRAMES, ReceiverLimits};

use super::HELLO_ANSWERED;
use super::message::{FetchOpened, Hello, Reply, Request, reply, request};
use crate::access::Access;
use crate::control;
use crate::manifest::{check_job_name, is_plain_file_name};
use crate::versions::Interface;

/// Bytes of a content digest: SHA-256.
pub const DIGEST_BYTES: usize = 32;

/// Bytes of a session, and of the preamble that names it.
pub const SESSION_BYTES: usize = 16;

/// Hex digits of a checkpoint's id, and of a session's in text.
pub const ID_DIGITS: usize = 32;

/// Longest name of a region, bytes: a uuid has 36.
const MAX_REGION_BYTES: usize = 64;

/// Outcome of a conversation, as one side sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConversationOutcome {
    /// Everything was sent and answered.
    Settled,
    /// The connection was lost or could not be made, or the peer did not reply in time.
    Lost,
    /// The peer ended a stream with this [code](super::code); 0 for an end without one.
    Stopped(u64),
    /// The peer refused.
    Refused(control::ErrorCode),
    /// The peer violated the protocol, or is not the intended one.
    Violated,
}

/// Checks the first message of a stream on a connection of this version, or the answer to it. The peer's identity
/// comes from its certificate; the caller compares the two.
///
/// # Errors
/// The message has another version, or versions that cannot be, or names no node.
pub fn check_hello(hello: &Hello, version: u32) -> Result<(), ConversationError> {
    if hello.version != version {
        return Err(ConversationError::Version {
            found: hello.version,
            version,
        });
    }
    if version >= HELLO_ANSWERED {
        let spoken = hello.versions.clone().unwrap_or_default();
        spoken.check()?;
        if !spoken.of(Interface::Wire).contains(version) {
            let found = spoken.of(Interface::Wire).newest;
            return Err(ConversationError::Version { found, version });
        }
    }
    check_node(&hello.name)?;
    if hello.region.len() > MAX_REGION_BYTES {
        return Err(bad("region", &hello.region));
    }
    Ok(())
}

/// Checks the second message of a stream, and returns its operation.
///
/// # Errors
/// The message names no operation, or one of a later version, or a field has an impossible value.
pub fn check_request(request: &Request) -> Result<&request::Body, ConversationError> {
    let body = request
        .body
        .as_ref()
        .ok_or(ConversationError::UnknownRequest)?;
    if !matches!(body, request::Body::Control(_)) {
        // Control requests have replies, and refusals, of their own.
        Access::of_wire(body)?;
    }
    match body {
        request::Body::Dump(dump) => {
            check_dump(dump)?;
        }
        request::Body::Fetch(fetch) => {
            check_id("checkpoint", &fetch.checkpoint)?;
            if !fetch.parent.is_empty() {
                check_id("parent", &fetch.parent)?;
            }
        }
        request::Body::Publish(publish) => check_id("checkpoint", &publish.checkpoint)?,
        request::Body::Rollback(rollback) => check_id("checkpoint", &rollback.checkpoint)?,
        request::Body::Pull(pull) => {
            check_id("checkpoint", &pull.checkpoint)?;
            if !pull.parent.is_empty() {
                check_id("parent", &pull.parent)?;
            }
            for node in &pull.from {
                check_node(node)?;
            }
        }
        request::Body::Verify(verify) => {
            for checkpoint in &verify.checkpoints {
                check_id("checkpoint", checkpoint)?;
            }
        }
        // These have no ids.
        request::Body::Inventory(_)
        | request::Body::Ping(_)
        | request::Body::Control(_)
        | request::Body::Api(_) => {}
    }
    Ok(body)
}

/// Checks the request for a dump, and returns its session.
///
/// # Errors
/// A field has an impossible value.
pub fn check_dump(dump: &request::Dump) -> Result<[u8; SESSION_BYTES], ConversationError> {
    let session = bytes("session", &dump.session)?;
    if !dump.job.is_empty() && check_job_name(&dump.job).is_err() {
        return Err(bad("job", &dump.job));
    }
    if !dump.parent.is_empty() {
        check_id("parent", &dump.parent)?;
    }
    Ok(session)
}

/// Checks the reply to a fetch, and returns the preamble of its stream.
///
/// # Errors
/// The peer refuses, or this is another reply, or a field has an impossible value.
pub fn fetch_opened(reply: Reply) -> Result<([u8; SESSION_BYTES], FetchOpened), ConversationError> {
    match reply.body {
        Some(reply::Body::FetchOpened(opened)) => {
            let id = bytes("id", &opened.id)?;
            check_digest_length(&opened.content_digest)?;
            Ok((id, opened))
        }
        Some(reply::Body::Error(error)) => Err(refused(&error)),
        other => Err(unexpected(other.as_ref(), "a fetch")),
    }
}

/// Checks the reply to a Hello on a connection of this version with `node`.
///
/// # Errors
/// The peer refuses, or this is another reply, or not the node's, or has a field with an impossible value.
pub fn hello_answered(reply: Reply, version: u32, node: &str) -> Result<Hello, ConversationError> {
    match reply.body {
        Some(reply::Body::Hello(hello)) => {
            check_hello(&hello, version)?;
            if hello.name != node {
                return Err(bad("name of the node", &hello.name));
            }
            Ok(hello)
        }
        Some(reply::Body::Error(error)) => Err(refused(&error)),
        other => Err(unexpected(other.as_ref(), "a hello")),
    }
}

fn check_node(name: &str) -> Result<(), ConversationError> {
    if is_plain_file_name(name) {
        return Ok(());
    }
    Err(bad("node", name))
}

fn check_id(field: &'static str, text: &str) -> Result<(), ConversationError> {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() == ID_DIGITS && text.bytes().all(digit) {
        return Ok(());
    }
    Err(bad(field, text))
}

fn bytes<const N: usize>(field: &'static str, value: &[u8]) -> Result<[u8; N], ConversationError> {
    value.try_into().map_err(|_| ConversationError::BadLength {
        field,
        len_bytes: value.len(),
    })
}

/// Checks the length of a content digest. A node that is the origin of a dump sends none.
fn check_digest_length(digest: &[u8]) -> Result<(), ConversationError> {
    match digest {
        [] => Ok(()),
        digest => bytes::<DIGEST_BYTES>("content_digest", digest).map(drop),
    }
}

/// Checks a content digest against the one that is known.
fn check_digest(digest: &[u8], known: &[u8], of: &'static str) -> Result<(), ConversationError> {
    check_digest_length(digest)?;
    if digest != known {
        return Err(ConversationError::DigestChanged { of });
    }
    Ok(())
}

fn bad(field: &'static str, value: &str) -> ConversationError {
    // The part of a peer's text that is logged is bounded.
    let value = value.chars().take(64).collect();
    ConversationError::BadField { field, value }
}

fn refused(error: &control::Error) -> ConversationError {
    ConversationError::Refused(error.clone())
}

fn unexpected(body: Option<&reply::Body>, during: &'static str) -> ConversationError {
    let reply = match body {
        None => "a reply of a later version",
        Some(reply::Body::Error(_)) => "Error",
        Some(reply::Body::DumpOpened(_)) => "DumpOpened",
        Some(reply::Body::Acknowledged(_)) => "Acknowledged",
        Some(reply::Body::Closed(_)) => "Closed",
        Some(reply::Body::Prepared(_)) => "Prepared",
        Some(reply::Body::Committed(_)) => "Committed",
        Some(reply::Body::FetchOpened(_)) => "FetchOpened",
        Some(reply::Body::Held(_)) => "Held",
        Some(reply::Body::Done(_)) => "Done",
        Some(reply::Body::Control(_)) => "Control",
        Some(reply::Body::Verified(_)) => "Verified",
        Some(reply::Body::Hello(_)) => "Hello",
    };
    ConversationError::Unexpected { reply, during }
}
