//! Recorded conversations: for tests, and for exercising the whole path where CRIU cannot run.
//!
//! A recording is a file of bytes, little-endian:
//!
//! ```text
//! "PFCONV1\n"  u8 frame size (24 or 32), then steps:
//!   1  frame           that many bytes, client to server
//!   2  zero pages      u32 count
//!   3  made-up pages   u32 count, u64 seed: page i is generated from seed + i
//!   4  pages           u32 count, count × 4096 bytes
//!   5  reply           u8 length, that many bytes, server to client
//! ```
//!
//! Made-up pages keep a recording small and free of the recorded process's data.

use super::frame::{Dialect, Frame, FrameBytes, MIN_FRAME_BYTES};
use super::{Answer, Event, PageServer, ProtocolError, Want};
use crate::PAGE_SIZE;

const MAGIC: &[u8; 8] = b"PFCONV1\n";

/// A conversation between a client and a page server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    dialect: Dialect,
    steps: Vec<Step>,
}

/// Step of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The client sends a frame: its bytes as they were, padding (CRIU 4.2 leaves its stack there) included.
    Frame(FrameBytes),
    /// The client sends pages.
    Pages {
        /// Number of pages.
        count: u32,
        /// Contents of the pages.
        content: Content,
    },
    /// The server replies with these bytes. A replay reads as many bytes; their values come from the replay's own
    /// server.
    Reply(Vec<u8>),
}

/// Contents of recorded pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Pages of zeros.
    Zero,
    /// Made up: page i is generated from this seed + i. Never zero, all different.
    Seeded(u64),
    /// The recorded bytes.
    Kept(Vec<u8>),
}

impl Content {
    /// Writes the bytes of page `index` of a step.
    pub fn fill(&self, index: u32, page: &mut [u8; PAGE_SIZE]) {
        match self {
            Self::Zero => page.fill(0),
            Self::Seeded(seed) => {
                let mut state = seed.wrapping_add(u64::from(index));
                for word in page.chunks_exact_mut(8) {
                    word.copy_from_slice(&split_mix(&mut state).to_le_bytes());
                }
            }
            Self::Kept(bytes) => {
                let at = usize::try_from(index)
                    .unwrap_or(usize::MAX)
                    .saturating_mul(PAGE_SIZE);
                match bytes.get(at..).and_then(|rest| rest.get(..PAGE_SIZE)) {
                    Some(kept) => page.copy_from_slice(kept),
                    None => page.fill(0),
                }
            }
        }
    }
}

/// Part of the pages' contents that a recording keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All bytes of all pages.
    Pages,
    /// Only which pages are zero; the others are made up.
    ZeroPagesOnly,
}

/// Something is no recording, or no conversation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordingError {
    /// The bytes do not begin as a recording.
    #[error("this is not a recorded conversation")]
    NotARecording,
    /// The recording ends too early.
    #[error("the recording ends inside the step at byte {offset}")]
    Truncated {
        /// Offset at which the step begins.
        offset: usize,
    },
    /// A step of an unknown kind.
    #[error("unknown step {kind} at byte {offset}")]
    UnknownStep {
        /// Offset of the step.
        offset: usize,
        /// Kind of the step.
        kind: u8,
    },
    /// The client's bytes break the page-server protocol.
    #[error("the captured conversation breaks the protocol")]
    Protocol(#[from] ProtocolError),
    /// The server's bytes end before a reply that the client must have waited for.
    #[error("the captured replies end too early")]
    RepliesMissing,
}

impl Conversation {
    /// Returns the dialect of the frames.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Returns the steps in order; after the last one the client ends the connection.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Builds a conversation from all that a client and a server sent.
    ///
    /// # Errors
    /// These are not both sides of a whole conversation.
    pub fn capture(client: &[u8], server: &[u8], keep: Keep) -> Result<Self, RecordingError> {
        let mut core = PageServer::new();
        let mut steps = Vec::new();
        let (mut client, mut server) = (client, server);
        let mut owed = None;
        let mut first = Vec::new();
        loop {
            match core.want() {
                Want::Frame { bytes } => {
                    if client.is_empty() && bytes > 0 {
                        core.eof()?;
                        break;
                    }
                    let missing_bytes =
                        u64::try_from(bytes.saturating_sub(client.len())).unwrap_or(u64::MAX);
                    let (frame, rest) = client
                        .split_at_checked(bytes)
                        .ok_or(ProtocolError::Truncated { missing_bytes })?;
                    client = rest;
                    let event = core.frame(frame)?;
                    first.extend_from_slice(frame);
                    let Some(event) = event else { continue };
                    let dialect = core.dialect().unwrap_or(Dialect::V24);
                    steps.extend(FrameBytes::from_wire(dialect, &first).map(Step::Frame));
                    first.clear();
                    owed = match event {
                        Event::Open {
                            wants_reply: true, ..
                        } => Some((1, Answer::HasParent(false))),
                        Event::QueryParent { .. } => Some((4, Answer::HasParent(false))),
                        Event::Close { .. } => Some((4, Answer::Status(0))),
                        _ => None,
                    };
                }
                Want::Payload { bytes } => {
                    let (page, rest) =
                        client
                            .split_at_checked(PAGE_SIZE)
                            .ok_or(ProtocolError::Truncated {
                                missing_bytes: bytes,
                            })?;
                    client = rest;
                    core.payload(1);
                    push_page(&mut steps, page, keep);
                }
                Want::Reply => {
                    let (len, answer) = owed.take().ok_or(RecordingError::RepliesMissing)?;
                    let (reply, rest) = server
                        .split_at_checked(len)
                        .ok_or(RecordingError::RepliesMissing)?;
                    server = rest;
                    core.reply(answer);
                    steps.push(Step::Reply(reply.to_vec()));
                }
                Want::Eof => break,
            }
        }
        Ok(Self {
            dialect: core.dialect().unwrap_or(Dialect::V24),
            steps,
        })
    }

    /// Converts the conversation into that of a client of `dialect`; `None` if that dialect cannot express a number
    /// of pages in it.
    #[must_use]
    pub fn in_dialect(&self, dialect: Dialect) -> Option<Self> {
        let mut steps = self.steps.clone();
        if dialect != self.dialect {
            for step in &mut steps {
                if let Step::Frame(bytes) = step {
                    *bytes = Frame::decode(self.dialect, bytes.as_ref())?.encode(dialect)?;
                }
            }
        }
        Some(Self { dialect, steps })
    }

    /// Returns all bytes that the client sends.
    #[must_use]
    pub fn client_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut page = [0; PAGE_SIZE];
        for step in &self.steps {
            match step {
                Step::Frame(frame) => bytes.extend_from_slice(frame.as_ref()),
                Step::Pages { count, content } => {
                    for index in 0..*count {
                        content.fill(index, &mut page);
                        bytes.extend_from_slice(&page);
                    }
                }
                Step::Reply(_) => {}
            }
        }
        bytes
    }

    /// Returns all bytes that the server sent.
    #[must_use]
    pub fn server_bytes(&self) -> Vec<u8> {
        let replies = self.steps.iter().filter_map(|step| match step {
            Step::Reply(reply) => Some(reply.as_slice()),
            Step::Frame(_) | Step::Pages { .. } => None,
        });
        replies.flatten().copied().collect()
    }

    /// Encodes a recording.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        let frame_bytes = self.dialect.frame_bytes();
        out.push(if frame_bytes == MIN_FRAME_BYTES {
            24
        } else {
            32
        });
        for step in &self.steps {
            match step {
                Step::Frame(frame) => {
                    out.push(1);
                    out.extend_from_slice(frame.as_ref());
                }
                Step::Pages {
                    count,
                    content: Content::Zero,
                } => {
                    out.push(2);
                    out.extend_from_slice(&count.to_le_bytes());
                }
                Step::Pages {
                    count,
                    content: Content::Seeded(seed),
                } => {
                    out.push(3);
                    out.extend_from_slice(&count.to_le_bytes());
                    out.extend_from_slice(&seed.to_le_bytes());
                }
                Step::Pages {
                    count,
                    content: Content::Kept(bytes),
                } => {
                    out.push(4);
                    out.extend_from_slice(&count.to_le_bytes());
                    out.extend_from_slice(bytes);
                }
                Step::Reply(reply) => {
                    out.push(5);
                    out.push(u8::try_from(reply.len()).unwrap_or(u8::MAX));
                    out.extend_from_slice(reply);
                }
            }
        }
        out
    }

    /// Decodes a recording. Whether it keeps to the protocol is not checked.
    ///
    /// # Errors
    /// The bytes are not a recording, or are damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordingError> {
        let rest = bytes
            .strip_prefix(MAGIC)
            .ok_or(RecordingError::NotARecording)?;
        let (dialect, mut rest) = match rest.split_first() {
            Some((24, rest)) => (Dialect::V24, rest),
            Some((32, rest)) => (Dialect::V32, rest),
            _ => return Err(RecordingError::NotARecording),
        };
        let mut steps = Vec::new();
        while let Some((&kind, after)) = rest.split_first() {
            let offset = bytes.len() - rest.len();
            if !(1..=5).contains(&kind) {
                return Err(RecordingError::UnknownStep { offset, kind });
            }
            rest = after;
            steps.push(step(dialect, kind, &mut rest).ok_or(RecordingError::Truncated { offset })?);
        }
        Ok(Self { dialect, steps })
    }
}

fn step(dialect: Dialect, kind: u8, rest: &mut &[u8]) -> Option<Step> {
    let mut take = |len: usize| {
        let (taken, after) = rest.split_at_checked(len)?;
        *rest = after;
        Some(taken)
    };
    let word = |bytes: &[u8]| Some(u32::from_le_bytes(bytes.try_into().ok()?));
    Some(match kind {
        1 => Step::Frame(FrameBytes::from_wire(
            dialect,
            take(dialect.frame_bytes())?,
        )?),
        2 => Step::Pages {
            count: word(take(4)?)?,
            content: Content::Zero,
        },
        3 => {
            let count = word(take(4)?)?;
            let seed = u64::from_le_bytes(take(8)?.try_into().ok()?);
            Step::Pages {
                count,
                content: Content::Seeded(seed),
            }
        }
        4 => {
            let count = word(take(4)?)?;
            let len = usize::try_from(count).ok()?.checked_mul(PAGE_SIZE)?;
            Step::Pages {
                count,
                content: Content::Kept(take(len)?.to_vec()),
            }
        }
        _ => {
            let len = usize::from(*take(1)?.first()?);
            Step::Reply(take(len)?.to_vec())
        }
    })
}

fn push_page(steps: &mut Vec<Step>, page: &[u8], keep: Keep) {
    let zero = page.iter().all(|byte| *byte == 0);
    if let Some(Step::Pages { count, content }) = steps.last_mut() {
        match content {
            Content::Zero if zero => return *count += 1,
            Content::Seeded(_) if !zero && keep == Keep::ZeroPagesOnly => return *count += 1,
            Content::Kept(bytes) if !zero && keep == Keep::Pages => {
                bytes.extend_from_slice(page);
                return *count += 1;
            }
            _ => {}
        }
    }
    let content = match keep {
        _ if zero => Content::Zero,
        Keep::Pages => Content::Kept(page.to_vec()),
        Keep::ZeroPagesOnly => Content::Seeded(fnv(page)),
    };
    steps.push(Step::Pages { count: 1, content });
}

/// Returns the next output of SplitMix64. The first output differs for each state, so pages of different seeds
/// differ.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Returns the FNV-1a hash, 64 bits: equal pages get equal seeds.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
