//! The sending side of a fetch.

use std::time::Instant;

use bytes::{Bytes, BytesMut};
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::wire::frame::{Coding, HEADER_BYTES, Header, Kind, Preamble};
use permafrost_protocol::wire::message::{FetchOpened, Reply, reply};
use quinn::{Connection, SendStream, VarInt};
use tokio::sync::{mpsc, oneshot};

use super::coding::Coder;
use super::pool::Pool;
use super::stream::{self, within};
use super::{Compression, PeerError, PeerOptions, code};

/// Length of the queue between the handler and the connection, frames; 4 MiB with the largest frames.
pub(crate) const QUEUED_FRAMES: usize = 16;

/// Destination of the frames that a blocking handler sends for a fetch; blocks while the peer is slow.
pub trait FrameSink: Send {
    /// Replies that the checkpoint is here. To be called before the first frame.
    ///
    /// # Errors
    /// The peer is gone.
    fn opened(&mut self, manifest: Manifest, content_digest: Vec<u8>) -> Result<(), PeerError>;

    /// Sends the next frame, in the wire's format, with its payload as it is.
    ///
    /// # Errors
    /// The peer is gone or too slow, or that is no frame.
    fn push(
        &mut self,
        kind: Kind,
        flags: u16,
        pages: u32,
        index: u64,
        payload: &[u8],
    ) -> Result<(), PeerError>;
}

/// Reply to a fetch, which precedes the frames.
struct Opening {
    manifest: Box<Manifest>,
    content_digest: Vec<u8>,
}

/// Handler's end of a fetch.
pub(crate) struct Outflow {
    peer: String,
    opened: Option<oneshot::Sender<Opening>>,
    frames: mpsc::Sender<(Header, Bytes)>,
    coder: Coder,
    sequence: u64,
}

/// Connection's end of a fetch.
pub(crate) struct Tap {
    opened: oneshot::Receiver<Opening>,
    frames: mpsc::Receiver<(Header, Bytes)>,
}

pub(crate) fn outflow(peer: &str, options: &PeerOptions) -> (Outflow, Tap) {
    let (opened, told) = oneshot::channel();
    let (frames, tapped) = mpsc::channel(QUEUED_FRAMES);
    // The link's speed is not measured here: fetches are compressed only with the option `Always`.
    let when = match options.compression {
        Compression::Always => Compression::Always,
        Compression::Off | Compression::Adaptive => Compression::Off,
    };
    let outflow = Outflow {
        peer: peer.to_owned(),
        opened: Some(opened),
        frames,
        coder: Coder::new(when, Pool::default()),
        sequence: 0,
    };
    let tap = Tap {
        opened: told,
        frames: tapped,
    };
    (outflow, tap)
}

impl FrameSink for Outflow {
    fn opened(&mut self, manifest: Manifest, content_digest: Vec<u8>) -> Result<(), PeerError> {
        let opening = Opening {
            manifest: Box::new(manifest),
            content_digest,
        };
        let told = self.opened.take().map(|opened| opened.send(opening));
        match told {
            Some(Ok(())) => Ok(()),
            _ => Err(PeerError::aborted(&self.peer)),
        }
    }

    fn push(
        &mut self,
        kind: Kind,
        flags: u16,
        pages: u32,
        index: u64,
        payload: &[u8],
    ) -> Result<(), PeerError> {
        let (coding, payload) = match kind {
            Kind::Pages => self.coder.encode(payload, None, Instant::now()),
            _ => (Coding::Raw, Bytes::copy_from_slice(payload)),
        };
        let header = Header {
            kind,
            coding,
            flags,
            pages,
            sequence: self.sequence,
            index,
            payload_bytes: u32::try_from(payload.len()).unwrap_or(u32::MAX),
        };
        header
            .check()
            .map_err(|_| PeerError::protocol("this node", "a frame that cannot be sent"))?;
        self.sequence += 1;
        self.frames
            .blocking_send((header, payload))
            .map_err(|_| PeerError::aborted(&self.peer))
    }
}

impl Tap {
    /// Sends the handler's frames until it is done; `result` gives the handler's result then.
    pub(crate) async fn run(
        mut self,
        peer: &str,
        connection: &Connection,
        mut send: SendStream,
        result: impl Future<Output = Result<(), control::Error>>,
        options: &PeerOptions,
    ) -> Result<(), PeerError> {
        let mut bulk = None;
        if let Ok(opened) = self.opened.await {
            let id = *uuid::Uuid::new_v4().as_bytes();
            let answer = Reply {
                body: Some(reply::Body::FetchOpened(FetchOpened {
                    id: id.to_vec(),
                    manifest: Some(*opened.manifest),
                    content_digest: opened.content_digest,
                })),
            };
            stream::write(&mut send, peer, "reply", &answer).await?;
            let timeout = options.frame_timeout * 3;
            let opened = within(peer, "a bulk stream", timeout, async {
                let opened = connection.open_uni().await;
                opened.map_err(|source| PeerError::lost(peer, source))
            });
            let stream = bulk.insert(opened.await?);
            let mut chunks = vec![Bytes::copy_from_slice(&Preamble { id }.encode())];
            let mut frames = Vec::with_capacity(QUEUED_FRAMES);
            while self.frames.recv_many(&mut frames, QUEUED_FRAMES).await > 0 {
                for (header, payload) in frames.drain(..) {
                    let mut bytes = BytesMut::with_capacity(HEADER_BYTES);
                    bytes.extend_from_slice(&header.encode());
                    chunks.push(bytes.freeze());
                    if !payload.is_empty() {
                        chunks.push(payload);
                    }
                }
                // Unlike CRIU a restoring peer has no reason to pause for long.
                within(peer, "taking frames", timeout, async {
                    let written = stream.write_all_chunks(&mut chunks).await;
                    written.map_err(|error| PeerError::write(peer, "frames", error))
                })
                .await?;
                chunks.clear();
            }
            if !chunks.is_empty() {
                within(peer, "taking frames", timeout, async {
                    let written = stream.write_all_chunks(&mut chunks).await;
                    written.map_err(|error| PeerError::write(peer, "frames", error))
                })
                .await?;
            }
        }
        match result.await {
            Ok(()) => {
                if let Some(stream) = &mut bulk {
                    let _ = stream.finish();
                }
            }
            Err(error) => {
                let answer = Reply {
                    body: Some(reply::Body::Error(error)),
                };
                stream::write(&mut send, peer, "reply", &answer).await?;
                if let Some(stream) = &mut bulk {
                    let _ = stream.reset(VarInt::from_u32(code::ABORTED));
                }
            }
        }
        let _ = send.finish();
        Ok(())
    }
}
