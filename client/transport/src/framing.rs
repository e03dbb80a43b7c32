//! Framing of control messages: a little-endian `u32` length and that many bytes of protobuf, with at
//! most two file descriptors riding on the first byte (SCM_RIGHTS).
//!
//! Both sides use it over a blocking [`UnixStream`]; read and write timeouts set on the stream are
//! honoured and come back as [`io::ErrorKind::WouldBlock`]. A frame is never read past its end, so a
//! descriptor always belongs to the frame it came with.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use permafrost_protocol::control::MAX_MESSAGE_BYTES;
use prost::Message;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Most descriptors of a message: no request of the protocol needs more than two.
pub const MAX_FDS: usize = 2;

/// Bytes of the length in front of a message.
const LENGTH_BYTES: usize = 4;

/// Most bytes requested from the socket at once. A peer that announces 16 MiB and sends none of them costs this
/// much memory, not 16 MiB.
const READ_CHUNK_BYTES: usize = 64 << 10;

/// A message that could not be received. The stream is out of step afterwards and must be dropped.
#[derive(Debug, thiserror::Error)]
pub enum FramingError {
    /// The socket failed, or its read timeout passed.
    #[error("read control message: {0}")]
    Io(#[from] io::Error),
    /// The peer announced more than [`MAX_MESSAGE_BYTES`].
    #[error("control message of {announced_bytes} bytes is longer than {MAX_MESSAGE_BYTES}")]
    TooLong {
        /// Length that the peer announced.
        announced_bytes: u32,
    },
    /// The stream ended inside a message.
    #[error("connection ended after {read_bytes} of {expected_bytes} bytes of a control message")]
    Truncated {
        /// Number of bytes received.
        read_bytes: usize,
        /// Number of bytes expected.
        expected_bytes: usize,
    },
    /// The bytes are not the expected protobuf message.
    #[error("decode control message: {0}")]
    Decode(#[from] prost::DecodeError),
}

/// Sends a message; `fds` (at most [`MAX_FDS`]) ride on its first byte.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for too many descriptors or too long a message, before anything is
/// sent; otherwise the socket's own error. A peer that is gone is EPIPE, never SIGPIPE.
pub fn send(stream: &UnixStream, message: &impl Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if fds.len() > MAX_FDS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "{} descriptors with one control message, at most {MAX_FDS}",
                fds.len()
            ),
        ));
    }
    let length = u32::try_from(message.encoded_len())
        .ok()
        .filter(|length| *length <= MAX_MESSAGE_BYTES)
        .ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "control message of {} bytes is longer than {MAX_MESSAGE_BYTES}",
                    message.encoded_len()
                ),
            )
        })?;
    let mut frame = Vec::with_capacity(LENGTH_BYTES + message.encoded_len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(&message.encode_to_vec());

    let sent = send_with_fds(stream, &frame, fds)?;
    // std's write uses send(MSG_NOSIGNAL) on sockets, and write_all retries EINTR.
    let mut rest = stream;
    rest.write_all(&frame[sent..])
}

/// Sends as much of `frame` as one call takes, with the descriptors on its first byte.
fn send_with_fds(stream: &UnixStream, frame: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::other(
                "descriptors do not fit the ancillary buffer",
            ));
        }
        match rustix::net::sendmsg(
            stream,
            &[IoSlice::new(frame)],
            &mut control,
            SendFlags::NOSIGNAL,
        ) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent?),
        }
    }
}

/// Receives a message and the descriptors that came with it, in their order; `None` at a clean end of the stream.
///
/// At most [`MAX_FDS`] are kept, close-on-exec; any further ones are closed.
///
/// # Errors
/// See [`FramingError`].
pub fn recv<M: Message + Default>(
    stream: &UnixStream,
) -> Result<Option<(M, Vec<OwnedFd>)>, FramingError> {
    let mut fds = Vec::new();
    let mut length = [0; LENGTH_BYTES];
    match recv_exact(stream, &mut length, &mut fds)? {
        LENGTH_BYTES => {}
        0 => return Ok(None),
        read_bytes => {
            return Err(FramingError::Truncated {
                read_bytes,
                expected_bytes: LENGTH_BYTES,
            });
        }
    }
    let announced_bytes = u32::from_le_bytes(length);
    if announced_bytes > MAX_MESSAGE_BYTES {
        return Err(FramingError::TooLong { announced_bytes });
    }
    let expected_bytes =
        usize::try_from(announced_bytes).map_err(|_| FramingError::TooLong { announced_bytes })?;

    let mut body = Vec::new();
    while body.len() < expected_bytes {
        let start = body.len();
        body.resize(expected_bytes.min(start + READ_CHUNK_BYTES), 0);
        let read = recv_exact(stream, &mut body[start..], &mut fds)?;
        if start + read < body.len() {
            return Err(FramingError::Truncated {
                read_bytes: start + read,
                expected_bytes,
            });
        }
    }
    Ok(Some((M::decode(body.as_slice())?, fds)))
}

/// Receives one byte and the descriptor riding on it, as CRIU sends pipes to an image streamer.
///
/// # Errors
/// The socket fails or ends; [`io::ErrorKind::InvalidData`] when the byte comes without a descriptor.
pub fn recv_fd(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut fds = Vec::new();
    if recv_exact(stream, &mut [0], &mut fds)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    fds.pop()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a byte without a descriptor"))
}

/// Sends one byte with a descriptor, as [`recv_fd`] receives it.
///
/// # Errors
/// The socket fails; a peer that is gone is EPIPE, never SIGPIPE.
pub fn send_fd(stream: &UnixStream, fd: BorrowedFd<'_>) -> io::Result<()> {
    send_with_fds(stream, &[0], &[fd]).map(drop)
}

/// Fills `buffer`; returns less than its length at the end of the stream only.
fn recv_exact(stream: &UnixStream, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::net::recvmsg(
            stream.as_fd(),
            &mut [IoSliceMut::new(&mut buffer[filled..])],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        let received = match received {
            Err(Errno::INTR) => continue,
            received => received?,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received_fds) = message {
                // Every descriptor is owned here; those past the last are closed by their drop.
                for fd in received_fds {
                    if fds.len() < MAX_FDS {
                        fds.push(fd);
                    }
                }
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) && fds.is_empty() {
            // The kernel drops descriptors for which a process has no room, and the message looks like one without.
            return Err(Errno::MFILE.into());
        }
        if received.bytes == 0 {
            break;
        }
        filled += received.bytes;
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use permafrost_protocol::control::{Error, Request, request};
    use rustix::io::FdFlags;

    use super::*;

    fn request() -> Request {
        Request {
            version: 1,
            body: Some(request::Body::Seal(request::Seal {
                session: "0123".to_owned(),
            })),
        }
    }

    fn encoded(message: &impl Message) -> Vec<u8> {
        let body = message.encode_to_vec();
        let mut frame = u32::try_from(body.len()).unwrap().to_le_bytes().to_vec();
        frame.extend(body);
        frame
    }

    #[test]
    fn message_and_descriptor_round_trip() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"through the socket").unwrap();
        send(&here, &request(), &[file.as_fd()]).unwrap();
        send(&here, &Request::default(), &[]).unwrap();
        drop(here);

        let (message, mut fds) = recv::<Request>(&there).unwrap().unwrap();
        assert_eq!(message, request());
        assert_eq!(fds.len(), 1);
        let fd = fds.remove(0);
        assert!(
            rustix::io::fcntl_getfd(&fd)
                .unwrap()
                .contains(FdFlags::CLOEXEC)
        );
        let mut file = File::from(fd);
        rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0)).unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through the socket");

        // The descriptor stayed with its own frame, and an empty message is a message.
        let (message, fds) = recv::<Request>(&there).unwrap().unwrap();
        assert_eq!(message, Request::default());
        assert!(fds.is_empty());
        assert!(recv::<Request>(&there).unwrap().is_none());
    }

    #[test]
    fn large_message_arrives_in_pieces() {
        let (here, there) = UnixStream::pair().unwrap();
        let sent = Error {
            code: 1,
            message: "x".repeat(3 << 20),
            hint: String::new(),
        };
        let expected = sent.clone();
        let sender = std::thread::spawn(move || send(&here, &sent, &[]));
        let (message, _) = recv::<Error>(&there).unwrap().unwrap();
        sender.join().unwrap().unwrap();
        assert_eq!(message, expected);
    }

    #[test]
    fn end_of_stream_inside_a_message_is_an_error_at_every_byte() {
        let frame = encoded(&request());
        for cut in 0..frame.len() {
            let (mut here, there) = UnixStream::pair().unwrap();
            here.write_all(&frame[..cut]).unwrap();
            drop(here);
            match (cut, recv::<Request>(&there)) {
                (0, Ok(None)) => {}
                (1.., Err(FramingError::Truncated { .. })) => {}
                (_, other) => panic!("cut at {cut}: {other:?}"),
            }
        }
    }

    #[test]
    fn overlong_and_garbage_messages_are_refused() {
        let (mut here, there) = UnixStream::pair().unwrap();
        here.write_all(&(MAX_MESSAGE_BYTES + 1).to_le_bytes())
            .unwrap();
        assert!(matches!(
            recv::<Request>(&there),
            Err(FramingError::TooLong { announced_bytes }) if announced_bytes == MAX_MESSAGE_BYTES + 1
        ));

        let (mut here, there) = UnixStream::pair().unwrap();
        here.write_all(&[3, 0, 0, 0, 0xff, 0xff, 0xff]).unwrap();
        assert!(matches!(
            recv::<Request>(&there),
            Err(FramingError::Decode(_))
        ));
    }

    #[test]
    fn no_more_descriptors_are_kept_than_a_request_needs() {
        let (here, there) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let frame = encoded(&request());
        let many = [file.as_fd(), file.as_fd(), file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        rustix::net::sendmsg(
            &here,
            &[IoSlice::new(&frame)],
            &mut control,
            SendFlags::empty(),
        )
        .unwrap();
        let (message, fds) = recv::<Request>(&there).unwrap().unwrap();
        assert_eq!(message, request());
        assert_eq!(fds.len(), MAX_FDS);

        let error = send(&here, &request(), &many).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn sending_to_a_peer_that_is_gone_is_an_error() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        let error = send(&here, &request(), &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
