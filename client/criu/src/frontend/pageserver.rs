//! The page-server front end: a thin shell over a blocking stream socket around the sans-I/O core.
//!
//! One thread serves one connection, with one buffer that stays in the processor's cache: a chunk of pages is
//! received into it, and while it is still there the sink examines it (zero? equal to the parent's? checksum)
//! and copies it to its place. Memory is bounded by that buffer whatever the dump's size. A sink that takes longer than
//! the socket has a second thread, and four such buffers ([`intake`](super::intake)).

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use permafrost_identity::TlsStream;
use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::pageserver::{
    Answer, Event, MAX_FRAME_BYTES, PageServer, ProtocolError, Want,
};

use super::intake::Intake;
use super::sink::{PageSink, SinkError};

/// Status of CLOSE if the client sent invalid pages.
const EINVAL: i32 = 22;

/// Time limit for a frame's header, or for a chunk of pages, after its first byte. CRIU pauses between frames,
/// and not within one.
const CHUNK_PATIENCE: Duration = Duration::from_secs(30);

/// Most bytes that are read and dropped after a refusal, so that the client gets its reason at CLOSE. The
/// connection of a client that still sends then is closed.
const REFUSED_BYTES: u64 = 64 << 20;

/// Most bytes that are read and dropped after CLOSE was answered: a correct client sends nothing more.
const CLOSED_BYTES: u64 = 64 << 10;

/// Bytes read at a time then.
const END_BYTES: usize = 4 << 10;

/// Time for the client to end the connection after CLOSE was answered.
const CLOSED_PATIENCE: Duration = Duration::from_secs(5);

/// A stream whose reads can be limited in time.
pub trait Bounded {
    /// Makes each of the following reads fail after `limit`.
    ///
    /// # Errors
    /// The stream does not support it.
    fn limit_reads(&self, limit: Duration) -> io::Result<()>;
}

impl Bounded for TcpStream {
    fn limit_reads(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))
    }
}

impl Bounded for UnixStream {
    fn limit_reads(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))
    }
}

impl Bounded for TlsStream {
    fn limit_reads(&self, limit: Duration) -> io::Result<()> {
        self.tcp().set_read_timeout(Some(limit))
    }
}

/// End of a conversation that kept to the protocol.
#[derive(Debug)]
pub enum ConversationEnd {
    /// CLOSE was answered with 0: the sink has the dump.
    Closed,
    /// CLOSE was answered with a non-zero status: the task lives on; the reason is the sink's.
    Refused(SinkError),
    /// The peer connected and left without sending anything.
    Empty,
}

/// End of a conversation that did not keep to the protocol or lost its connection. The sink was told to abort.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The peer broke the protocol.
    #[error("protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// The socket failed, or the peer was silent for longer than the socket's timeout.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// The peer sent more than [`REFUSED_BYTES`] after its dump was refused.
    #[error("the dump was refused, and its client goes on sending")]
    Deaf,
    /// The peer requested lazy pages. It waits for them, so there is no point in going on.
    #[error("this endpoint takes dumps: `permafrost lend` gives pages to `criu lazy-pages`")]
    Lazy,
    /// The peer left in the middle of a frame's header or pages.
    #[error("the connection ended {missing_bytes} bytes short of what its last frame announced")]
    Truncated {
        /// Bytes still missing.
        missing_bytes: u64,
    },
}

/// Serves one page-server conversation on `stream` into `sink`, until CLOSE and the peer's end of file.
///
/// A sink that refuses data does not end the conversation: the rest is read and dropped, and CLOSE is answered
/// with the refusal's status. Cutting the connection would stop CRIU just as well, but leave it without a
/// reason.
///
/// # Errors
/// The peer broke the protocol or the connection; `sink.abort` has been called. The caller closes the socket.
pub fn serve<S: Read + Write + Bounded>(
    stream: &mut S,
    sink: &mut impl PageSink,
) -> Result<ConversationEnd, ServeError> {
    let (result, refusal, closed) = thread::scope(|scope| {
        let mut conversation = Conversation {
            core: PageServer::new(),
            intake: Intake::new(scope, &mut *sink),
            dropped_bytes: 0,
            closed: false,
            forced: false,
        };
        let result = conversation.run(stream);
        let refusal = conversation.intake.into_refusal();
        (result, refusal, conversation.closed)
    });
    if let Err(error) = &result
        && !closed
        && refusal.is_none()
    {
        sink.abort(&error.to_string());
    }
    match result {
        // The dump stands, or is refused, and the peer knows: what it did with its socket then is its affair.
        Err(error) if !closed => Err(error),
        _ => Ok(match (refusal, closed) {
            (Some(refusal), _) => ConversationEnd::Refused(refusal),
            (None, true) => ConversationEnd::Closed,
            (None, false) => ConversationEnd::Empty,
        }),
    }
}

struct Conversation<'scope, 'env, K> {
    core: PageServer,
    intake: Intake<'scope, 'env, K>,
    /// Bytes that came after the refusal.
    dropped_bytes: u64,
    closed: bool,
    forced: bool,
}

impl<K: PageSink> Conversation<'_, '_, K> {
    fn run<S: Read + Write + Bounded>(&mut self, stream: &mut S) -> Result<(), ServeError> {
        // Flags of the frame whose payload is being read.
        let mut flags = 0_u16;
        loop {
            match self.core.want() {
                Want::Frame { bytes } => {
                    let mut frame = [0; MAX_FRAME_BYTES];
                    let frame = &mut frame[..bytes];
                    let filled = read_full(stream, frame)?;
                    if filled == 0 && bytes > 0 {
                        self.core.eof()?;
                        return Ok(());
                    }
                    if filled < bytes {
                        return Err(ServeError::Truncated {
                            missing_bytes: (bytes - filled) as u64,
                        });
                    }
                    self.drop_if_refused(filled)?;
                    let event = match self.core.frame(frame) {
                        Ok(Some(event)) => event,
                        Ok(None) => continue,
                        // The framing holds: what follows can be read and dropped up to CLOSE.
                        Err(error) if error.is_recoverable() => {
                            let status = EINVAL;
                            self.intake.note(Err(SinkError {
                                message: error.to_string(),
                                status,
                            }));
                            continue;
                        }
                        Err(error) => return Err(error.into()),
                    };
                    if let Event::Pages {
                        flags: frame_flags, ..
                    } = &event
                    {
                        flags = *frame_flags;
                    }
                    if let Some(answer) = self.apply(event)? {
                        stream.write_all(self.core.reply(answer).as_ref())?;
                    }
                }
                Want::Payload { bytes } => {
                    let room = self.intake.room(bytes);
                    let chunk = room.len();
                    let filled = read_full(stream, room)?;
                    if filled < chunk {
                        return Err(ServeError::Truncated {
                            missing_bytes: bytes - filled as u64,
                        });
                    }
                    self.drop_if_refused(filled)?;
                    let at = self.core.payload(chunk / PAGE_SIZE);
                    self.intake.pages(at.vaddr, flags, chunk);
                }
                Want::Eof => {
                    // The stock server waits for the client's end of file, too (criu/page-xfer.c); after
                    // FORCE_CLOSE the client may keep its socket for other things.
                    if !self.forced {
                        await_end(stream, &mut [0; END_BYTES])?;
                    }
                    return Ok(());
                }
                Want::Reply => unreachable!("every event that wants a reply is answered at once"),
            }
        }
    }

    /// Counts bytes that come after a refusal.
    fn drop_if_refused(&mut self, bytes: usize) -> Result<(), ServeError> {
        if self.intake.refusal().is_some() {
            self.dropped_bytes += bytes as u64;
            if self.dropped_bytes > REFUSED_BYTES {
                return Err(ServeError::Deaf);
            }
        }
        Ok(())
    }

    /// Passes an event to the sink. Returns the reply, if one is due.
    fn apply(&mut self, event: Event) -> Result<Option<Answer>, ServeError> {
        Ok(match event {
            Event::Open { space, wants_reply } => {
                self.intake.begin_space();
                let has_parent = self.intake.ask(|sink| sink.open(space));
                wants_reply.then_some(Answer::HasParent(has_parent.unwrap_or(false)))
            }
            Event::QueryParent { space } => {
                let has_parent = self.intake.ask(|sink| sink.has_parent(space));
                Some(Answer::HasParent(has_parent.unwrap_or(false)))
            }
            Event::Pages { .. } => None,
            Event::Hole {
                vaddr, nr_pages, ..
            } => {
                self.intake.hole(vaddr, nr_pages);
                None
            }
            Event::Get { .. } => return Err(ServeError::Lazy),
            Event::Close { force } => {
                self.forced = force;
                self.intake.ask(PageSink::close);
                self.closed = true;
                let refusal = self.intake.refusal();
                Some(Answer::Status(refusal.map_or(0, |refusal| refusal.status)))
            }
        })
    }
}

/// Waits for the peer's end of file, and drops the little that may come before it.
pub(super) fn await_end<S: Read + Bounded>(stream: &mut S, buffer: &mut [u8]) -> io::Result<()> {
    let deadline = Instant::now() + CLOSED_PATIENCE;
    let mut dropped = 0;
    while dropped <= CLOSED_BYTES {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        stream.limit_reads(left)?;
        match stream.read(buffer)? {
            0 => return Ok(()),
            read => dropped += read as u64,
        }
    }
    Err(ErrorKind::TimedOut.into())
}

/// Reads until `buffer` is full or the peer has ended. Returns the number of bytes. Fails when they come too
/// slowly.
pub(super) fn read_full(stream: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    let mut began = None;
    while filled < buffer.len() {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => {
                filled += read;
                // Most reads fill the buffer at once, and need no clock.
                if filled < buffer.len()
                    && began.get_or_insert_with(Instant::now).elapsed() > CHUNK_PATIENCE
                {
                    return Err(ErrorKind::TimedOut.into());
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::pageserver::client::Encoder;
    use permafrost_protocol::pageserver::{Dialect, PE_PRESENT, SpaceId};

    use super::*;

    /// Refuses all pages, or takes them.
    struct Sink {
        refuses: bool,
    }

    impl PageSink for Sink {
        fn open(&mut self, _: SpaceId) -> Result<bool, SinkError> {
            Ok(false)
        }

        fn has_parent(&mut self, _: SpaceId) -> Result<bool, SinkError> {
            Ok(false)
        }

        fn pages(&mut self, _: u64, _: u16, _: &[u8]) -> Result<(), SinkError> {
            let full = SinkError {
                message: "full".to_owned(),
                status: 28,
            };
            if self.refuses { Err(full) } else { Ok(()) }
        }

        fn hole(&mut self, _: u64, _: u64) -> Result<(), SinkError> {
            Ok(())
        }

        fn close(&mut self) -> Result<(), SinkError> {
            Ok(())
        }

        fn abort(&mut self, _: &str) {}
    }

    /// A client that says something first and then the same for ever, and counts what is read of it.
    struct Endless {
        first: Vec<u8>,
        then: Vec<u8>,
        read_bytes: u64,
    }

    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.first.is_empty() {
                self.first.clone_from(&self.then);
            }
            let length = self.first.len().min(buffer.len());
            buffer[..length].copy_from_slice(&self.first[..length]);
            self.first.drain(..length);
            self.read_bytes += length as u64;
            Ok(length)
        }
    }

    impl Write for Endless {
        fn write(&mut self, reply: &[u8]) -> io::Result<usize> {
            Ok(reply.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Bounded for Endless {
        fn limit_reads(&self, _: Duration) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_client_that_never_stops_sending_is_hung_up_on() {
        let (encoder, space) = (Encoder::new(Dialect::V32), SpaceId::process(1));
        let opened = encoder.open(space).as_ref().to_vec();

        let close = encoder.close();
        let mut client = Endless {
            first: [&opened, close.as_ref()].concat(),
            then: vec![7; 1000],
            read_bytes: 0,
        };
        let outcome = serve(&mut client, &mut Sink { refuses: false });
        assert!(
            matches!(outcome, Ok(ConversationEnd::Closed)),
            "{outcome:?}"
        );
        assert!(client.read_bytes < 1 << 20, "{}", client.read_bytes);

        let frame = encoder.pages(space, 0x1000, 256, PE_PRESENT);
        let mut client = Endless {
            first: opened,
            then: [frame.as_ref(), &[7; 256 * PAGE_SIZE]].concat(),
            read_bytes: 0,
        };
        let outcome = serve(&mut client, &mut Sink { refuses: true });
        assert!(matches!(outcome, Err(ServeError::Deaf)), "{outcome:?}");
        assert!(
            client.read_bytes < 2 * REFUSED_BYTES,
            "{}",
            client.read_bytes
        );
    }
}
