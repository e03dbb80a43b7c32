//! Bulk streams: the frames of a dump or a fetch, beside their conversation. The frames of a dump may come over TLS on a
//! TCP connection of their own: with packets of 1,500 bytes QUIC needs more than twice the processor time, as it
//! encrypts and handles each packet by itself (docs/performance.md, "QUIC and TLS").

mod dial;

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::time::Duration;

use bytes::{BufMut as _, Bytes};
use permafrost_identity::Tenure;
use quinn::{RecvStream, SendStream, VarInt};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use super::PeerError;
use super::pool::Pool;
use super::stream::within;
use crate::shares::Share;

pub(crate) use dial::dial;

/// Most chunks taken from quinn under one lock of the connection.
const CHUNKS: usize = 32;

/// Time for which TCP may get no acknowledgement, or an end may take nothing, until the stream counts as lost. Less than
/// [`super::PeerOptions::stall`], so that the dump can go on over QUIC.
const UNACKNOWLEDGED: Duration = Duration::from_secs(15);

/// A TLS connection that was accepted.
pub(crate) type TlsBulk = tokio_rustls::server::TlsStream<BufReader<TcpStream>>;

/// Frames that come in.
pub(crate) struct BulkReceiver {
    source: Source,
    buffers: Pool,
}

enum Source {
    Quic(Chunks),
    Tls(Box<TlsSource>),
}

/// Bytes of a QUIC stream, taken from quinn many chunks at a time.
struct Chunks {
    stream: RecvStream,
    chunks: VecDeque<Bytes>,
    available: usize,
}

/// A TLS connection that brings frames, and what it occupies while it lasts.
struct TlsSource {
    stream: TlsBulk,
    _tenure: Tenure,
    _share: Share,
}

impl BulkReceiver {
    pub(crate) fn over_quic(stream: RecvStream) -> Self {
        Self::from(Source::Quic(Chunks {
            stream,
            chunks: VecDeque::new(),
            available: 0,
        }))
    }

    pub(crate) fn over_tls(stream: TlsBulk, tenure: Tenure, share: Share) -> Self {
        Self::from(Source::Tls(Box::new(TlsSource {
            stream,
            _tenure: tenure,
            _share: share,
        })))
    }

    /// Returns the next `N` bytes; `None` at a clean end. Waits for the first of them without limit, for the
    /// rest for `timeout`.
    pub(crate) async fn array<const N: usize>(
        &mut self,
        node: &str,
        timeout: Duration,
    ) -> Result<Option<[u8; N]>, PeerError> {
        let mut array = [0; N];
        match &mut self.source {
            Source::Quic(chunks) => {
                if !chunks.fill(node, 1).await? {
                    return Ok(None);
                }
                within(node, "a frame", timeout, chunks.fill(node, N)).await?;
                let mut rest = &mut array[..];
                chunks.take(N, |part| rest.put_slice(part));
            }
            Source::Tls(source) => {
                let lost = |error| PeerError::bulk_lost(node, &error);
                let first = source.stream.read(&mut array).await.map_err(lost)?;
                if first == 0 {
                    return Ok(None);
                }
                within(node, "a frame", timeout, async {
                    let read = source.stream.read_exact(&mut array[first..]).await;
                    read.map(drop).map_err(lost)
                })
                .await?;
            }
        }
        Ok(Some(array))
    }

    /// Returns the next `bytes` bytes, in one piece, within `timeout`.
    pub(crate) async fn payload(
        &mut self,
        node: &str,
        bytes: usize,
        timeout: Duration,
    ) -> Result<Bytes, PeerError> {
        if bytes == 0 {
            return Ok(Bytes::new());
        }
        match &mut self.source {
            Source::Quic(chunks) => {
                if !within(node, "a frame", timeout, chunks.fill(node, bytes)).await? {
                    return Err(PeerError::protocol(node, "a frame without its payload"));
                }
                let assemble = |payload: &mut Vec<u8>| {
                    chunks.take(bytes, |part| payload.extend_from_slice(part));
                };
                Ok(self.buffers.payload(bytes, assemble))
            }
            Source::Tls(source) => {
                let mut buffer = self.buffers.buffer(bytes);
                within(node, "a frame", timeout, async {
                    while buffer.bytes.len() < bytes {
                        let left = bytes - buffer.bytes.len();
                        let mut room = (&mut buffer.bytes).limit(left);
                        let read = source.stream.read_buf(&mut room).await;
                        let read = match read {
                            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                            read => read,
                        };
                        read.map_err(|error| PeerError::bulk_lost(node, &error))?;
                    }
                    Ok(())
                })
                .await?;
                Ok(buffer.into_payload())
            }
        }
    }

    /// Tells the sender that no more data is wanted.
    pub(crate) fn stop(&mut self, code: VarInt) {
        if let Source::Quic(chunks) = &mut self.source {
            let _ = chunks.stream.stop(code);
        }
    }
}

impl From<Source> for BulkReceiver {
    fn from(source: Source) -> Self {
        Self {
            source,
            buffers: Pool::default(),
        }
    }
}

impl Chunks {
    /// Reads until `bytes` of them are buffered; returns false at a clean end before the first of them.
    async fn fill(&mut self, node: &str, bytes: usize) -> Result<bool, PeerError> {
        while self.available < bytes {
            let mut taken: [Bytes; CHUNKS] = std::array::from_fn(|_| Bytes::new());
            let read = self
                .stream
                .read_chunks(&mut taken)
                .await
                .map_err(|error| PeerError::read(node, "frames", error))?;
            match read {
                Some(count) => {
                    for chunk in taken.into_iter().take(count) {
                        self.available += chunk.len();
                        self.chunks.push_back(chunk);
                    }
                }
                None if self.available == 0 => return Ok(false),
                None => return Err(PeerError::protocol(node, "a frame that is not whole")),
            }
        }
        Ok(true)
    }

    /// Passes the next buffered bytes to `take`.
    fn take(&mut self, mut bytes: usize, mut take: impl FnMut(&[u8])) {
        self.available -= bytes;
        while bytes > 0 {
            let Some(chunk) = self.chunks.front_mut() else {
                return;
            };
            let part = bytes.min(chunk.len());
            take(&chunk[..part]);
            bytes -= part;
            if part == chunk.len() {
                self.chunks.pop_front();
            } else {
                bytes::Buf::advance(chunk, part);
            }
        }
    }
}

/// Frames that go out.
pub(crate) enum BulkSender {
    Quic(SendStream),
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
}

impl BulkSender {
    pub(crate) fn is_tls(&self) -> bool {
        matches!(self, Self::Tls(_))
    }

    /// Sends all chunks, which are empty or gone afterwards.
    pub(crate) async fn write(
        &mut self,
        node: &str,
        chunks: &mut [Bytes],
    ) -> Result<(), PeerError> {
        match self {
            Self::Quic(stream) => {
                let written = stream.write_all_chunks(chunks).await;
                written.map_err(|error| PeerError::write(node, "frames", error))
            }
            Self::Tls(stream) => {
                let written = write_tls(stream, chunks).await;
                written.map_err(|error| PeerError::bulk_lost(node, &error))
            }
        }
    }

    /// Ends the stream: everything was sent. Over TLS the last frame ends it.
    pub(crate) fn finish(&mut self) {
        if let Self::Quic(stream) = self {
            let _ = stream.finish();
        }
    }

    /// Breaks the stream off. Over TLS the reason is the conversation's, and the connection ends when this is dropped.
    pub(crate) fn reset(&mut self, code: VarInt) {
        if let Self::Quic(stream) = self {
            let _ = stream.reset(code);
        }
    }
}

async fn write_tls(
    stream: &mut tokio_rustls::client::TlsStream<TcpStream>,
    chunks: &[Bytes],
) -> io::Result<()> {
    let mut slices: Vec<_> = chunks.iter().map(|chunk| IoSlice::new(chunk)).collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        match stream.write_vectored(rest).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => IoSlice::advance_slices(&mut rest, written),
        }
    }
    stream.flush().await
}

/// Sets the options of a TCP connection that bulk streams need.
pub(crate) fn tune(stream: &TcpStream) -> io::Result<()> {
    let limit = u32::try_from(UNACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX);
    rustix::net::sockopt::set_tcp_user_timeout(stream, limit)?;
    stream.set_nodelay(true)
}
