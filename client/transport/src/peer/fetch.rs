//! The receiving side of a fetch, for a thread of the store.

use std::time::{Duration, Instant};

use permafrost_protocol::wire::conversation::{SESSION_BYTES, fetch_opened};
use permafrost_protocol::wire::frame::{Header, Kind};
use permafrost_protocol::wire::message::{FetchOpened, Reply, request};
use quinn::{RecvStream, VarInt};
use tokio::sync::mpsc;

use super::bulk::BulkReceiver;
use super::network::{Link, Network, Terms, WHOLE, answered};
use super::outflow::QUEUED_FRAMES;
use super::stream::{self, within};
use super::{PeerError, ReceivedFrame, code, decode};

/// Time limit for a node's next frame, as a multiple of the frame timeout: the node verifies pages as it reads
/// them.
const PATIENCE: u32 = 3;

/// A checkpoint that is being received: an iterator of its frames, without the final [`Kind::Prepare`]. At most
/// [`QUEUED_FRAMES`] are held. After an error it yields nothing more: fetch again from where it ended.
pub struct FetchReader {
    node: String,
    opened: FetchOpened,
    frames: mpsc::Receiver<Result<ReceivedFrame, PeerError>>,
}

impl FetchReader {
    /// Requests a checkpoint from `node`, and waits until the node has agreed.
    ///
    /// # Errors
    /// The node refuses, or does not reply by `deadline`.
    pub fn open(
        network: &Network,
        node: &str,
        request: request::Fetch,
        deadline: Instant,
    ) -> Result<Self, PeerError> {
        Self::open_on(network, node, request, deadline, WHOLE)
    }

    /// Requests a checkpoint from `node`, as [`Self::open`] does, but gives up as soon as the connection is lost: other
    /// nodes have it.
    ///
    /// # Errors
    /// The same as for [`Self::open`].
    pub fn open_once(
        network: &Network,
        node: &str,
        request: request::Fetch,
        deadline: Instant,
    ) -> Result<Self, PeerError> {
        let once = Terms {
            repeats: false,
            ..WHOLE
        };
        Self::open_on(network, node, request, deadline, once)
    }

    fn open_on(
        network: &Network,
        node: &str,
        request: request::Fetch,
        deadline: Instant,
        terms: Terms,
    ) -> Result<Self, PeerError> {
        let (give, frames) = mpsc::channel(QUEUED_FRAMES);
        let runtime = network.runtime().clone();
        let opened = runtime.block_on(begin(network, node, request, deadline, terms));
        let (link, mut receive, id, opened) = opened?;
        let name = node.to_owned();
        let timeout = network.options().frame_timeout;
        runtime.spawn(async move {
            // All of it, which keeps the connection open.
            let link = link;
            let claimed = link.router.claim(id);
            let taken = tokio::select! {
                taken = take(claimed, &give, &name, timeout) => taken,
                // The node sends a message on this stream only if it has to give up.
                error = complaint(&mut receive, &name) => Err(error),
                () = give.closed() => Ok(()),
            };
            if let Err(error) = taken {
                // A reset bulk stream may arrive before the error message that explains it.
                let error = match error {
                    PeerError::Ended { .. } => {
                        let words = complaint(&mut receive, &name);
                        tokio::time::timeout(timeout, words).await.unwrap_or(error)
                    }
                    error => error,
                };
                let _ = give.send(Err(error)).await;
            }
        });
        Ok(Self {
            node: node.to_owned(),
            opened,
            frames,
        })
    }

    /// Returns the node's reply, with the manifest and the digest.
    #[must_use]
    pub fn opened(&self) -> &FetchOpened {
        &self.opened
    }

    /// Returns the name of the sending node.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }
}

impl Iterator for FetchReader {
    type Item = Result<ReceivedFrame, PeerError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (node, frames) = (&self.node, &mut self.frames);
        let decoded = frames
            .blocking_recv()?
            .and_then(|ReceivedFrame { header, payload }| {
                let payload = decode(node, &header, payload)?;
                Ok(ReceivedFrame { header, payload })
            });
        if decoded.is_err() {
            frames.close();
        }
        Some(decoded)
    }
}

async fn begin(
    network: &Network,
    node: &str,
    request: request::Fetch,
    deadline: Instant,
    terms: Terms,
) -> Result<(Link, RecvStream, [u8; SESSION_BYTES], FetchOpened), PeerError> {
    let body = request::Body::Fetch(request);
    let (link, _, receive, reply) = network.ask(node, body, deadline, terms).await?;
    let opened = fetch_opened(reply);
    let (id, opened) = opened.map_err(|error| PeerError::conversation(node, error))?;
    Ok((link, receive, id, opened))
}

/// Passes on frames until the last one.
async fn take(
    claimed: tokio::sync::oneshot::Receiver<RecvStream>,
    give: &mpsc::Sender<Result<ReceivedFrame, PeerError>>,
    node: &str,
    timeout: Duration,
) -> Result<(), PeerError> {
    let patience = timeout * PATIENCE;
    let stream = within(node, "a bulk stream", patience, async {
        claimed
            .await
            .map_err(|_| PeerError::ended(node, "a bulk stream", 0))
    });
    let mut bulk = BulkReceiver::over_quic(stream.await?);
    let mut sequence = 0;
    loop {
        let bytes = within(node, "frames", patience, bulk.array(node, timeout)).await?;
        let Some(bytes) = bytes else {
            return Err(PeerError::ended(node, "frames", 0));
        };
        let header = Header::decode(&bytes)
            .ok()
            .filter(|header| header.sequence == sequence)
            .ok_or_else(|| PeerError::protocol(node, "a frame that may not come"))?;
        sequence += 1;
        let length = usize::try_from(header.payload_bytes).unwrap_or(usize::MAX);
        let payload = bulk.payload(node, length, timeout).await?;
        if header.kind == Kind::Prepare {
            return Ok(());
        }
        if give
            .send(Ok(ReceivedFrame { header, payload }))
            .await
            .is_err()
        {
            bulk.stop(VarInt::from_u32(code::ABORTED));
            return Ok(());
        }
    }
}

/// Returns the error that the node sends when it gives up; never completes if the node sends none.
async fn complaint(receive: &mut RecvStream, node: &str) -> PeerError {
    let said = stream::read(receive, node, "reply", stream::MAX_REPLY_BYTES).await;
    match said.and_then(|answer: Reply| answered(node, answer)) {
        Ok(_) => PeerError::protocol(node, "a reply that was not asked for"),
        // The node sends nothing more on this stream.
        Err(PeerError::Ended { code: 0, .. }) => std::future::pending().await,
        Err(error) => error,
    }
}
