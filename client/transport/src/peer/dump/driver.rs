//! Drives the conversations of a dump, one after another: sends frames from the window, and receives replies.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use permafrost_protocol::wire::conversation::{Continuation, ConversationOutcome, DumpEvent};
use permafrost_protocol::wire::frame::HEADER_BYTES;
use permafrost_protocol::wire::message::{Commit, Reply, request};
use quinn::{RecvStream, SendStream, VarInt};

use super::Shared;
use crate::peer::bulk::BulkSender;
use crate::peer::network::{Link, Network};
use crate::peer::stream::{self, Asking, Opened, within};
use crate::peer::{PeerError, code};

/// Most bytes handed to quinn at once.
const BATCH_BYTES: usize = 512 << 10;
/// Most frames handed to quinn at once.
const BATCH_FRAMES: usize = 256;
/// Unacknowledged bytes that only a link slower than the sender accumulates: several acknowledgements' worth.
const WAITED_FOR_BYTES: u64 = 4 << 20;

/// Time for a peer to send the reason, when a bulk stream over TLS breaks off.
const BULK_LAST_WORDS: Duration = Duration::from_millis(500);

/// The task behind a [`super::DumpSender`].
pub(super) struct Driver {
    pub(super) network: Network,
    pub(super) shared: Arc<Shared>,
}

impl Driver {
    /// Holds conversations until everything was sent and answered, or none can be opened in time.
    pub(super) async fn run(self) {
        loop {
            let ended = tokio::select! {
                begun = self.begin() => match begun {
                    Ok((link, opened)) => self.exchange(&link, opened).await,
                    Err(error) => Err(error),
                },
                () = self.shared.over.notified() => return,
            };
            let next = {
                let mut state = self.shared.lock();
                let end = ended
                    .as_ref()
                    .map_or_else(PeerError::end, |()| ConversationOutcome::Settled);
                let next = state.client.ended(Instant::now(), end);
                state.link.interrupted();
                if let (Continuation::Failed, Err(error)) = (next, &ended) {
                    state.failed = Some(error.clone());
                }
                next
            };
            // Pushers may fill the window now, or have to end.
            self.shared.changed.notify_all();
            match (next, ended) {
                (Continuation::Converse(at), Err(error)) => {
                    tracing::debug!(node = self.shared.node, %error, "dump interrupted");
                    tokio::time::sleep_until(at.into()).await;
                }
                _ => return,
            }
        }
    }

    /// Opens the conversation and learns the peer's position in the dump.
    async fn begin(&self) -> Result<(Link, Opened), PeerError> {
        let node = self.shared.node.as_str();
        let (request, deadline) = self.shared.lock().client.request();
        let link = self.network.link(node, deadline).await?;
        // The next request on this connection is then sent as on one that may have died.
        link.begin();
        let left = deadline.saturating_duration_since(Instant::now());
        let opened = within(node, "the opening", left, async {
            let asking = Asking {
                body: request::Body::Dump(request),
                after_answer: false,
            };
            let hello = self.network.hello_on(&link);
            let mut opened = stream::converse(&link, node, hello, asking, &mut false).await?;
            self.hear(&mut opened.receive).await?;
            Ok(opened)
        })
        .await?;
        Ok((link, opened))
    }

    /// Sends and receives until everything was sent and answered.
    async fn exchange(&self, link: &Link, opened: Opened) -> Result<(), PeerError> {
        let node = self.shared.node.as_str();
        let Opened {
            mut send,
            mut receive,
            tls_bulk,
        } = opened;
        let options = self.network.options();
        let mut bulk = within(node, "a bulk stream", options.request_timeout, async {
            let (identity, id) = (self.network.identity(), self.shared.lock().client.session());
            let tls_bulk = tls_bulk && options.tls_bulk;
            link.open_bulk(node, &identity, tls_bulk, id).await
        })
        .await?;
        self.shared.lock().over_tls = bulk.is_tls();
        // An end must not drop the streams, which would finish them as if everything had been sent.
        let mut listening = std::pin::pin!(self.listen(&mut receive));
        let ended = tokio::select! {
            ended = &mut listening => ended,
            error = self.transmit(&mut bulk, &mut send) => match error {
                // The peer takes no more frames, and sends the reason on the other stream.
                PeerError::Ended { .. } => {
                    let words = tokio::time::timeout(stream::LAST_WORDS, &mut listening).await;
                    words.unwrap_or(Err(error))
                }
                // The peer may have refused the dump, but it is likelier that TCP does not get through.
                PeerError::BulkLost { .. } => {
                    let words = tokio::time::timeout(BULK_LAST_WORDS, &mut listening).await;
                    words.unwrap_or(Err(error))
                }
                error => Err(error),
            },
            () = self.shared.over.notified() => {
                let aborted = VarInt::from_u32(code::ABORTED);
                bulk.reset(aborted);
                let _ = send.reset(aborted);
                Ok(())
            }
        };
        match &ended {
            Ok(()) => {
                bulk.finish();
                let _ = send.finish();
            }
            Err(error) => {
                if is_bulk_lost(error) {
                    link.bulk_failed(node, error);
                }
                bulk.reset(VarInt::from_u32(code::MISBEHAVED));
                let _ = send.reset(VarInt::from_u32(code::MISBEHAVED));
            }
        }
        ended
    }

    /// Receives the peer's replies, until the dump is committed.
    async fn listen(&self, receive: &mut RecvStream) -> Result<(), PeerError> {
        while self.hear(receive).await? != DumpEvent::Committed {}
        Ok(())
    }

    /// Receives one reply.
    async fn hear(&self, receive: &mut RecvStream) -> Result<DumpEvent, PeerError> {
        let shared = &*self.shared;
        let node = shared.node.as_str();
        let reply: Reply = stream::read(receive, node, "reply", stream::MAX_REPLY_BYTES).await?;
        let mut state = shared.lock();
        let event = state.client.reply(reply);
        let event = event.map_err(|error| PeerError::conversation(node, error))?;
        let news = if let DumpEvent::Acknowledged { freed_bytes } = event {
            // With so much still unacknowledged, there was something to send all the time.
            let window = state.client.window();
            let waiting = window.used_bytes() > WAITED_FOR_BYTES.min(window.window_bytes() / 4);
            state
                .link
                .acknowledged(Instant::now(), freed_bytes, waiting);
            // Waking a pusher that waits for something else costs as much as copying a frame.
            state.client.poll_room()
        } else {
            true
        };
        drop(state);
        if news {
            shared.changed.notify_all();
        }
        Ok(event)
    }

    /// Sends frames as they are pushed, and the commit; returns on failure only.
    async fn transmit(&self, bulk: &mut BulkSender, send: &mut SendStream) -> PeerError {
        let node = self.shared.node.as_str();
        let mut chunks = Vec::new();
        loop {
            let commit = self.batch(&mut chunks);
            if chunks.is_empty() && commit.is_none() {
                self.shared.work.notified().await;
                continue;
            }
            if let Err(error) = bulk.write(node, &mut chunks).await {
                return error;
            }
            chunks.clear();
            if let Some(commit) = commit
                && let Err(error) = stream::write(send, node, "commit", &commit).await
            {
                return error;
            }
        }
    }

    /// Takes what is to be sent now: frames, with the headers encoded into one piece of memory, and the commit.
    fn batch(&self, chunks: &mut Vec<Bytes>) -> Option<Commit> {
        let mut frames = Vec::new();
        let mut bytes = 0;
        let commit = {
            let mut state = self.shared.lock();
            while bytes < BATCH_BYTES
                && frames.len() < BATCH_FRAMES
                && let Some((header, payload)) = state.client.poll_transmit()
            {
                bytes += HEADER_BYTES + payload.len();
                frames.push((header, payload));
            }
            if state.client.poll_room() {
                self.shared.changed.notify_all();
            }
            state.client.poll_commit()
        };
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
        commit
    }
}

/// Returns true if a bulk stream over TLS was lost on either side.
fn is_bulk_lost(error: &PeerError) -> bool {
    match error {
        PeerError::BulkLost { .. } => true,
        PeerError::Ended { code, .. } => *code == u64::from(code::BULK_LOST),
        _ => false,
    }
}
