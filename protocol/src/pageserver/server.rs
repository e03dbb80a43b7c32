//! The receiving side of a page-server conversation.
//!
//! ```text
//!            first frame                    OPEN2, PARENT, CLOSE
//!   start ───────────────▶ between frames ───────────────────────▶ reply owed
//!     │ 8 bytes more?            │    ▲ ◀────── reply() ───────────────┤
//!     ▼                   ADD_F  ▼    │ all pages taken                ▼ after CLOSE
//!   start32 ─▶               payload ─┘                               over
//! ```

use std::collections::BTreeSet;

use super::detect::{Detected, detect};
use super::event::{Answer, Event, PageAddr, ReplyBytes, Want};
use super::frame::{Dialect, Frame, FrameBytes, MAX_FRAME_BYTES, MIN_FRAME_BYTES, command};
use super::{
    MAX_ADDRESS, MAX_GET_PAGES, MAX_SPACES, PE_LAZY, PE_PARENT, PE_PRESENT, ProtocolError, SpaceId,
};
use crate::PAGE_BYTES;

/// The receiving side of one conversation.
///
/// Memory is bounded by the number of spaces, whatever the peer announces.
#[derive(Debug)]
pub struct PageServer {
    dialect: Option<Dialect>,
    state: State,
    open: Option<OpenSpace>,
    opened: BTreeSet<SpaceId>,
}

#[derive(Debug)]
enum State {
    /// No bytes have come yet.
    Start,
    /// The first 24 bytes have come and are the beginning of a 32-byte frame.
    Start32([u8; MIN_FRAME_BYTES]),
    /// Waits for the next frame.
    Between,
    /// A legacy frame opened its space; its pages or its hole are still to be reported.
    LeftOver(Pages),
    /// The pages of a frame are still to come, `left_pages` of them.
    Payload { vaddr: u64, left_pages: u64 },
    /// The last event's answer is owed.
    Reply(Owed),
    /// CLOSE was answered.
    Over,
    /// A fatal error was reported.
    Failed,
}

#[derive(Clone, Copy, Debug)]
enum Owed {
    HasParentByte,
    HasParentWord,
    Status,
}

#[derive(Clone, Copy, Debug)]
struct Pages {
    vaddr: u64,
    nr_pages: u64,
    flags: u16,
}

#[derive(Debug)]
struct OpenSpace {
    space: SpaceId,
    /// Id as the client wrote it: the stock server compares these values, not the ids that they decode to.
    dst_id: u64,
    /// Lowest address that may still come.
    next_vaddr: u64,
}

impl Default for PageServer {
    fn default() -> Self {
        Self::new()
    }
}

impl PageServer {
    /// Makes a conversation that has not begun.
    #[must_use]
    pub fn new() -> Self {
        Self {
            dialect: None,
            state: State::Start,
            open: None,
            opened: BTreeSet::new(),
        }
    }

    /// Returns the dialect, once it is known. It never is if the first frame is CLOSE.
    #[must_use]
    pub fn dialect(&self) -> Option<Dialect> {
        self.dialect
    }

    /// Returns the next input that the core needs.
    #[must_use]
    pub fn want(&self) -> Want {
        match &self.state {
            State::Start => Want::Frame {
                bytes: MIN_FRAME_BYTES,
            },
            State::Start32(_) => Want::Frame {
                bytes: MAX_FRAME_BYTES - MIN_FRAME_BYTES,
            },
            State::Between => Want::Frame {
                bytes: self.dialect.map_or(MIN_FRAME_BYTES, Dialect::frame_bytes),
            },
            State::LeftOver(_) => Want::Frame { bytes: 0 },
            State::Payload { left_pages, .. } => Want::Payload {
                bytes: left_pages * PAGE_BYTES,
            },
            State::Reply(_) => Want::Reply,
            State::Over | State::Failed => Want::Eof,
        }
    }

    /// Takes exactly the bytes that [`PageServer::want`] asked for. `None`: more are needed.
    ///
    /// # Errors
    /// The frame breaks the protocol. If the error [is recoverable](ProtocolError::is_recoverable), the conversation
    /// goes on where `want` says, a payload included; otherwise it is over and nothing further is taken.
    pub fn frame(&mut self, bytes: &[u8]) -> Result<Option<Event>, ProtocolError> {
        let result = self.take(bytes);
        if result.as_ref().is_err_and(|error| !error.is_recoverable()) {
            self.state = State::Failed;
        }
        result
    }

    /// Records that `pages` whole pages of the payload were taken; returns the address of the first of them.
    ///
    /// # Panics
    /// If `pages` exceeds the rest of [`Want::Payload`]: a mistake of the caller's, which no peer can cause.
    pub fn payload(&mut self, pages: usize) -> PageAddr {
        let State::Payload { vaddr, left_pages } = &mut self.state else {
            panic!("no payload is expected here");
        };
        let taken = u64::try_from(pages).unwrap_or(u64::MAX);
        assert!(
            taken <= *left_pages,
            "{taken} pages taken of a payload of {left_pages}"
        );
        let first = PageAddr { vaddr: *vaddr };
        *vaddr += taken * PAGE_BYTES;
        *left_pages -= taken;
        if *left_pages == 0 {
            self.state = State::Between;
        }
        first
    }

    /// Answers the last event: the bytes to send.
    ///
    /// # Panics
    /// If no answer is owed, or `answer` is of the other kind: a mistake of the caller's, which no peer can cause.
    pub fn reply(&mut self, answer: Answer) -> ReplyBytes {
        let State::Reply(owed) = self.state else {
            panic!("no reply is owed here");
        };
        let mut reply = ReplyBytes {
            bytes: [0; 4],
            len: 4,
        };
        self.state = match (owed, answer) {
            (Owed::HasParentByte, Answer::HasParent(has_parent)) => {
                reply.bytes[0] = u8::from(has_parent);
                reply.len = 1;
                State::Between
            }
            (Owed::HasParentWord, Answer::HasParent(has_parent)) => {
                reply.bytes = i32::from(has_parent).to_ne_bytes();
                State::Between
            }
            (Owed::Status, Answer::Status(status)) => {
                reply.bytes = status.to_ne_bytes();
                State::Over
            }
            _ => panic!("{answer:?} does not answer the last event"),
        };
        reply
    }

    /// Returns the frame that begins the answer to [`Event::Get`]; the bytes of `nr_pages` pages follow it. `None` before
    /// the dialect is known, which no GET comes before.
    #[must_use]
    pub fn pages_frame(&self, pid: u32, vaddr: u64, nr_pages: u16) -> Option<FrameBytes> {
        let frame = Frame {
            command: command::ADD_F,
            flags: PE_PRESENT,
            nr_pages: nr_pages.into(),
            vaddr,
            dst_id: pid.into(),
        };
        frame.encode(self.dialect?)
    }

    /// Checks the conversation at the peer's end of file, where bytes were wanted and none of them had come. (If some
    /// had come, the conversation was truncated, whatever this returns.)
    ///
    /// # Errors
    /// The peer has sent something, and no CLOSE.
    pub fn eof(&self) -> Result<(), ProtocolError> {
        match &self.state {
            State::Start | State::Over => Ok(()),
            State::Start32(_) => Err(ProtocolError::Truncated {
                missing_bytes: (MAX_FRAME_BYTES - MIN_FRAME_BYTES) as u64,
            }),
            State::Payload { left_pages, .. } => Err(ProtocolError::Truncated {
                missing_bytes: left_pages * PAGE_BYTES,
            }),
            State::LeftOver(pages) => Err(ProtocolError::Truncated {
                missing_bytes: if pages.flags & PE_PRESENT == 0 {
                    0
                } else {
                    pages.nr_pages * PAGE_BYTES
                },
            }),
            State::Between | State::Reply(_) | State::Failed => {
                Err(ProtocolError::EndedWithoutClose)
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<Option<Event>, ProtocolError> {
        let expected = match self.want() {
            Want::Frame { bytes } => bytes,
            Want::Payload { .. } | Want::Reply | Want::Eof => 0,
        };
        let wrong_length = ProtocolError::WrongLength {
            expected,
            found: bytes.len(),
        };
        if bytes.len() != expected {
            return Err(wrong_length);
        }
        match &self.state {
            State::Start => self.first(bytes.try_into().map_err(|_| wrong_length)?),
            State::Start32(first) => {
                let mut frame = [0; MAX_FRAME_BYTES];
                frame[..MIN_FRAME_BYTES].copy_from_slice(first);
                frame[MIN_FRAME_BYTES..].copy_from_slice(bytes);
                self.decoded(Frame::decode(Dialect::V32, &frame).ok_or(wrong_length)?)
                    .map(Some)
            }
            State::Between => {
                let frame = self
                    .dialect
                    .and_then(|dialect| Frame::decode(dialect, bytes))
                    .ok_or(wrong_length)?;
                self.decoded(frame).map(Some)
            }
            State::LeftOver(pages) => {
                let pages = *pages;
                self.pages(pages).map(Some)
            }
            State::Payload { .. } | State::Reply(_) | State::Over | State::Failed => {
                Err(wrong_length)
            }
        }
    }

    /// Takes the first 24 bytes.
    fn first(&mut self, bytes: [u8; MIN_FRAME_BYTES]) -> Result<Option<Event>, ProtocolError> {
        match detect(&bytes)? {
            Detected::Dialect(Dialect::V32) => {
                self.dialect = Some(Dialect::V32);
                self.state = State::Start32(bytes);
                Ok(None)
            }
            Detected::Dialect(Dialect::V24) => {
                self.dialect = Some(Dialect::V24);
                let frame = Frame::decode(Dialect::V24, &bytes);
                self.decoded(frame.ok_or(ProtocolError::UnknownDialect { first: bytes })?)
                    .map(Some)
            }
            Detected::Close => {
                let frame = Frame::decode(Dialect::V24, &bytes);
                self.decoded(frame.ok_or(ProtocolError::UnknownDialect { first: bytes })?)
                    .map(Some)
            }
        }
    }

    fn decoded(&mut self, frame: Frame) -> Result<Event, ProtocolError> {
        if frame.flags != 0 && !matches!(frame.command, command::ADD_F | command::ADD_F_COMPRESSED)
        {
            return Err(if is_known(frame.command) {
                ProtocolError::BadFlags {
                    command: frame.command,
                    flags: frame.flags,
                }
            } else {
                unknown_command(frame)
            });
        }
        match frame.command {
            command::OPEN | command::OPEN2 => {
                let space = self.open(frame.dst_id)?;
                let wants_reply = frame.command == command::OPEN2;
                self.state = if wants_reply {
                    State::Reply(Owed::HasParentByte)
                } else {
                    State::Between
                };
                Ok(Event::Open { space, wants_reply })
            }
            command::PARENT => {
                let space = SpaceId::from_dst_id(frame.dst_id)?;
                self.state = State::Reply(Owed::HasParentWord);
                Ok(Event::QueryParent { space })
            }
            command::ADD_F => {
                let open = self.open.as_ref().ok_or(ProtocolError::PagesBeforeOpen)?;
                if open.dst_id != frame.dst_id {
                    let found = SpaceId::from_dst_id(frame.dst_id)?;
                    return Err(ProtocolError::NotTheOpenSpace {
                        open: open.space,
                        found,
                    });
                }
                self.pages(checked_pages(frame, frame.flags)?)
            }
            command::ADD | command::HOLE => {
                let flags = if frame.command == command::ADD {
                    PE_PRESENT
                } else {
                    PE_PARENT
                };
                let pages = checked_pages(frame, flags)?;
                if self
                    .open
                    .as_ref()
                    .is_some_and(|open| open.dst_id == frame.dst_id)
                {
                    return self.pages(pages);
                }
                let space = self.open(frame.dst_id)?;
                self.state = State::LeftOver(pages);
                Ok(Event::Open {
                    space,
                    wants_reply: false,
                })
            }
            command::GET => {
                let Pages {
                    vaddr, nr_pages, ..
                } = checked_range(frame, 0)?;
                if nr_pages > MAX_GET_PAGES {
                    return Err(ProtocolError::TooManyPages { vaddr, nr_pages });
                }
                let pid = u32::try_from(frame.dst_id).ok().filter(|pid| *pid != 0);
                let pid = pid.ok_or(ProtocolError::BadPid {
                    dst_id: frame.dst_id,
                })?;
                self.state = State::Between;
                Ok(Event::Get {
                    pid,
                    vaddr,
                    nr_pages,
                })
            }
            command::CLOSE | command::FORCE_CLOSE => {
                self.state = State::Reply(Owed::Status);
                Ok(Event::Close {
                    force: frame.command == command::FORCE_CLOSE,
                })
            }
            command::ADD_F_COMPRESSED => Err(ProtocolError::Compressed),
            _ => Err(unknown_command(frame)),
        }
    }

    fn open(&mut self, dst_id: u64) -> Result<SpaceId, ProtocolError> {
        let space = SpaceId::from_dst_id(dst_id)?;
        if self.opened.contains(&space) {
            return Err(ProtocolError::OpenedTwice { space });
        }
        if self.opened.len() >= MAX_SPACES {
            return Err(ProtocolError::TooManySpaces);
        }
        self.opened.insert(space);
        self.open = Some(OpenSpace {
            space,
            dst_id,
            next_vaddr: 0,
        });
        Ok(space)
    }

    /// Takes pages or a hole in the open space, checked except for their order.
    fn pages(
        &mut self,
        Pages {
            vaddr,
            nr_pages,
            flags,
        }: Pages,
    ) -> Result<Event, ProtocolError> {
        let open = self.open.as_mut().ok_or(ProtocolError::PagesBeforeOpen)?;
        let (space, expected) = (open.space, open.next_vaddr);
        // Before anything is refused below: the payload is on its way and has to be drained.
        self.state = if flags & PE_PRESENT == 0 {
            State::Between
        } else {
            State::Payload {
                vaddr,
                left_pages: nr_pages,
            }
        };
        if vaddr < expected {
            return Err(ProtocolError::NotAscending {
                space,
                vaddr,
                expected,
            });
        }
        open.next_vaddr = vaddr + nr_pages * PAGE_BYTES;
        if flags & PE_PRESENT != 0 {
            Ok(Event::Pages {
                space,
                vaddr,
                nr_pages,
                flags,
            })
        } else if flags & PE_PARENT != 0 {
            Ok(Event::Hole {
                space,
                vaddr,
                nr_pages,
                flags,
            })
        } else {
            Err(ProtocolError::PagesWithheld {
                space,
                vaddr,
                nr_pages,
            })
        }
    }
}

fn is_known(number: u16) -> bool {
    matches!(
        number,
        command::ADD..=command::ADD_F_COMPRESSED | command::CLOSE | command::FORCE_CLOSE
    )
}

fn unknown_command(frame: Frame) -> ProtocolError {
    ProtocolError::UnknownCommand {
        word: u32::from(frame.flags) << 16 | u32::from(frame.command),
    }
}

/// Checks flags and range. Present and in the parent at once is no state a page can be in: CRIU's reader
/// would take the parent's and its position in the pages file would be off from there on.
fn checked_pages(frame: Frame, flags: u16) -> Result<Pages, ProtocolError> {
    let known = flags & !(PE_PARENT | PE_LAZY | PE_PRESENT) == 0;
    let both = flags & (PE_PARENT | PE_PRESENT) == PE_PARENT | PE_PRESENT;
    if flags == 0 || !known || both {
        return Err(ProtocolError::BadFlags {
            command: frame.command,
            flags,
        });
    }
    checked_range(frame, flags)
}

fn checked_range(
    Frame {
        vaddr, nr_pages, ..
    }: Frame,
    flags: u16,
) -> Result<Pages, ProtocolError> {
    if vaddr % PAGE_BYTES != 0 {
        return Err(ProtocolError::Misaligned { vaddr });
    }
    if nr_pages == 0 {
        return Err(ProtocolError::NoPages { vaddr });
    }
    let end = nr_pages
        .checked_mul(PAGE_BYTES)
        .and_then(|len_bytes| vaddr.checked_add(len_bytes));
    if end.is_none_or(|end| end > MAX_ADDRESS) {
        return Err(ProtocolError::BeyondAddressSpace { vaddr, nr_pages });
    }
    Ok(Pages {
        vaddr,
        nr_pages,
        flags,
    })
}
