//! Drives the conversations of a dump, one after another: sends frames from the window, and receives replies.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use permafrost_protocol::control;
use permafrost_protocol::wire::frame::{HEADER_BYTES, Preamble};
use permafrost_protocol::wire::message::{Reply, reply, request};
use quinn::{RecvStream, SendStream, VarInt};

use super::{AHEAD_BYTES, RUN_BYTES, Shared};
use crate::peer::network::{Link, Network, answered};
use crate::peer::stream::{self, within};
use crate::peer::{PeerError, code};

/// Most bytes handed to quinn at once.
const BATCH_BYTES: usize = 512 << 10;
/// Most frames handed to quinn at once.
const BATCH_FRAMES: usize = 256;
/// Pause between two conversations that ended immediately, so that a peer that ends each of them is not
/// flooded.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Unacknowledged bytes that only a link slower than the sender accumulates: several acknowledgements' worth.
const WAITED_FOR_BYTES: u64 = 4 << 20;
/// Time for a peer that accepts no more frames to report the reason.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Outcome of a conversation.
enum End {
    /// Everything was sent and answered, or this side gave up.
    Over,
    /// The conversation failed; another one may continue the dump.
    Lost(PeerError),
    /// The dump failed; no other conversation can continue it.
    Failed(PeerError),
}

/// The task behind a [`super::DumpSender`].
pub(super) struct Driver {
    pub(super) network: Network,
    pub(super) shared: Arc<Shared>,
    pub(super) request: request::Dump,
    pub(super) session: [u8; 16],
}

impl Driver {
    /// Holds conversations, the first by `opening`, until everything was sent and answered or none can be
    /// opened in time.
    pub(super) async fn run(mut self, opening: Instant) {
        let reconnect = self.network.options().reconnect;
        let mut deadline = opening;
        let mut conversations = 0;
        loop {
            let ended = self.converse(deadline).await;
            let begun = {
                let mut state = self.shared.lock();
                state.sender.connection_lost();
                state.link.interrupted();
                if state.over {
                    return;
                }
                state.conversations
            };
            // Pushers may fill the window now.
            self.shared.changed.notify_all();
            match ended {
                End::Over => return,
                End::Failed(error) => return self.shared.fail(error),
                End::Lost(error) => {
                    tracing::debug!(node = self.shared.node, %error, "dump interrupted");
                    // The time for a new connection counts from the end of one that was there.
                    if begun > conversations {
                        conversations = begun;
                        deadline = Instant::now() + reconnect;
                    }
                    if Instant::now() + RETRY_PAUSE >= deadline {
                        return self.shared.fail(error);
                    }
                    self.request.resume = begun > 0;
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    async fn converse(&self, deadline: Instant) -> End {
        let begun = tokio::select! {
            begun = self.begin(deadline) => begun,
            () = self.shared.over.notified() => return End::Over,
        };
        match begun {
            Ok((link, send, receive)) => {
                let ended = self.exchange(&link, send, receive).await;
                match ended {
                    Ok(()) => End::Over,
                    Err(error) => ending(error),
                }
            }
            Err(error) => ending(error),
        }
    }

    /// Opens the conversation and learns the peer's position in the dump.
    async fn begin(&self, deadline: Instant) -> Result<(Link, SendStream, RecvStream), PeerError> {
        let node = self.shared.node.as_str();
        let link = self.network.link(node, deadline).await?;
        let left = deadline.saturating_duration_since(Instant::now());
        let body = request::Body::Dump(self.request.clone());
        let (send, receive, opened) = within(node, "the opening", left, async {
            let hello = self.network.hello();
            let (send, mut receive) = stream::converse(&link.connection, node, hello, body).await?;
            let answer: Reply =
                stream::read(&mut receive, node, "reply", stream::MAX_REPLY_BYTES).await?;
            match answered(node, answer)? {
                reply::Body::DumpOpened(opened) => Ok((send, receive, opened)),
                _ => Err(PeerError::protocol(node, "no answer to a dump")),
            }
        })
        .await?;
        let mut state = self.shared.lock();
        state
            .sender
            .resumed(opened.next_sequence)
            .map_err(|_| PeerError::protocol(node, "a place in the dump that cannot be"))?;
        state.conversations += 1;
        state.opened.get_or_insert(opened.has_parent);
        drop(state);
        self.shared.changed.notify_all();
        Ok((link, send, receive))
    }

    /// Sends and receives until everything was sent and answered.
    async fn exchange(
        &self,
        link: &Link,
        mut send: SendStream,
        mut receive: RecvStream,
    ) -> Result<(), PeerError> {
        let node = self.shared.node.as_str();
        let timeout = self.network.options().request_timeout;
        let mut bulk = within(node, "a bulk stream", timeout, async {
            let opened = link.connection.open_uni().await;
            opened.map_err(|source| PeerError::lost(node, source))
        })
        .await?;
        // An end must not drop the streams, which would finish them as if everything had been sent.
        let mut listening = std::pin::pin!(self.listen(&mut receive));
        let ended = tokio::select! {
            ended = &mut listening => ended,
            error = self.transmit(&mut bulk) => match error {
                // The peer takes no more frames, and sends the reason on the other stream.
                PeerError::Ended { .. } => {
                    let words = tokio::time::timeout(LAST_WORDS, &mut listening).await;
                    words.unwrap_or(Err(error))
                }
                error => Err(error),
            },
            error = self.say_commit(&mut send) => Err(error),
            () = self.shared.over.notified() => {
                let aborted = VarInt::from_u32(code::ABORTED);
                let _ = bulk.reset(aborted);
                let _ = send.reset(aborted);
                Ok(())
            }
        };
        match &ended {
            Ok(()) => {
                let _ = bulk.finish();
                let _ = send.finish();
            }
            Err(_) => {
                let _ = bulk.reset(VarInt::from_u32(code::MISBEHAVED));
                let _ = send.reset(VarInt::from_u32(code::MISBEHAVED));
            }
        }
        ended
    }

    /// Receives the peer's replies, until [`Committed`].
    async fn listen(&self, receive: &mut RecvStream) -> Result<(), PeerError> {
        let shared = &*self.shared;
        let node = shared.node.as_str();
        loop {
            let answer: Reply =
                stream::read(receive, node, "reply", stream::MAX_REPLY_BYTES).await?;
            let body = answered(node, answer)?;
            let mut state = shared.lock();
            let (mut over, mut news) = (false, true);
            match body {
                reply::Body::Acknowledged(acknowledged) => {
                    let used = state.window_bytes - state.sender.window_left();
                    // Waking a pusher that waits for something else costs as much as copying a frame.
                    news = !state.sender.has_room(RUN_BYTES);
                    let freed = state
                        .sender
                        .acknowledged(acknowledged.next_sequence)
                        .map_err(|_| {
                            PeerError::protocol(node, "an acknowledgement that cannot be")
                        })?;
                    // With so much still unacknowledged, there was something to send all the time.
                    let waiting = used - freed > WAITED_FOR_BYTES.min(state.window_bytes / 4);
                    state.link.acknowledged(Instant::now(), freed, waiting);
                }
                reply::Body::Closed(closed) => state.closed = Some(closed),
                reply::Body::Prepared(prepared) => state.prepared = Some(prepared),
                reply::Body::Committed(committed) => {
                    state.committed = Some(committed);
                    over = true;
                }
                _ => return Err(PeerError::protocol(node, "a reply that was not asked for")),
            }
            drop(state);
            if news {
                shared.changed.notify_all();
            }
            if over {
                return Ok(());
            }
        }
    }

    /// Sends frames as they are pushed; returns on failure only.
    async fn transmit(&self, bulk: &mut SendStream) -> PeerError {
        let node = self.shared.node.as_str();
        let preamble = Preamble { id: self.session };
        let mut chunks = vec![Bytes::copy_from_slice(&preamble.encode())];
        loop {
            self.batch(&mut chunks);
            if chunks.is_empty() {
                self.shared.work.notified().await;
                continue;
            }
            if let Err(error) = bulk.write_all_chunks(&mut chunks).await {
                return PeerError::write(node, "frames", error);
            }
            chunks.clear();
        }
    }

    /// Takes the frames to be sent now, with the headers encoded into one piece of memory.
    fn batch(&self, chunks: &mut Vec<Bytes>) {
        let mut frames = Vec::new();
        let mut bytes = 0;
        {
            let mut state = self.shared.lock();
            while bytes < BATCH_BYTES
                && frames.len() < BATCH_FRAMES
                && let Some((header, payload)) = state.sender.poll_transmit()
            {
                bytes += HEADER_BYTES + payload.len();
                frames.push((header, payload));
            }
            if !frames.is_empty() && state.sender.unsent_bytes() < AHEAD_BYTES / 2 {
                self.shared.changed.notify_all();
            }
        }
        let mut headers = BytesMut::with_capacity(frames.len() * HEADER_BYTES);
        for (header, payload) in frames {
            headers.extend_from_slice(&header.encode());
            // Headers without payload in between go as one chunk.
            if !payload.is_empty() {
                chunks.push(headers.split().freeze());
                chunks.push(payload);
            }
        }
        if !headers.is_empty() {
            chunks.push(headers.freeze());
        }
    }

    /// Sends the commit once there is one; returns on failure only.
    async fn say_commit(&self, send: &mut SendStream) -> PeerError {
        loop {
            let commit = self.shared.lock().commit.clone();
            if let Some(commit) = commit {
                let said = stream::write(send, &self.shared.node, "commit", &commit).await;
                if let Err(error) = said {
                    return error;
                }
                // The commit is sent again only after a lost connection.
                return std::future::pending().await;
            }
            self.shared.commit.notified().await;
        }
    }
}

/// Classifies `error`: another conversation may continue the dump, or the dump has failed.
fn ending(error: PeerError) -> End {
    match error {
        PeerError::Lost { .. } | PeerError::Unreachable { .. } | PeerError::Deadline { .. } => {
            End::Lost(error)
        }
        // A peer that stops or is too busy now may be there again.
        PeerError::Ended { code: ended, .. } if ended == u64::from(code::BUSY) => End::Lost(error),
        PeerError::Refused {
            error: refusal,
            node,
        } if refusal.code == i32::from(control::ErrorCode::Unavailable) => {
            End::Lost(PeerError::Refused {
                node,
                error: refusal,
            })
        }
        error => End::Failed(error),
    }
}
