//! Assignment of bulk streams to conversations.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quinn::{Connection, RecvStream, VarInt};
use tokio::sync::oneshot;

use super::code;

/// Most bulk streams of a connection that are kept while no conversation has claimed them.
const MAX_UNCLAIMED: usize = 16;

#[derive(Default)]
struct Places {
    claimed: HashMap<[u8; 16], oneshot::Sender<RecvStream>>,
    unclaimed: HashMap<[u8; 16], RecvStream>,
}

/// Bulk streams of one connection, by preamble. A stream and its conversation arrive in either order.
#[derive(Clone, Default)]
pub(crate) struct Router(Arc<Mutex<Places>>);

impl Router {
    /// Receives the bulk streams of `connection` until it ends.
    pub(crate) fn spawn(connection: Connection, timeout: Duration) -> Self {
        let router = Self::default();
        let routed = router.clone();
        tokio::spawn(async move {
            // quinn bounds how many a peer may have open, and so these tasks.
            while let Ok(stream) = connection.accept_uni().await {
                let router = routed.clone();
                tokio::spawn(router.place(stream, timeout));
            }
            // Conversations that wait for a stream of this connection need wait no longer.
            routed.lock().claimed.clear();
        });
        router
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, Places> {
        self.0.lock()
    }

    async fn place(self, mut stream: RecvStream, timeout: Duration) {
        let mut id = [0; 16];
        match tokio::time::timeout(timeout, stream.read_exact(&mut id)).await {
            Ok(Ok(())) => {}
            _ => return refuse(stream),
        }
        let refused = {
            let mut places = self.lock();
            match places.claimed.remove(&id) {
                Some(waiting) => waiting.send(stream).err(),
                None if places.unclaimed.len() < MAX_UNCLAIMED => {
                    places.unclaimed.insert(id, stream)
                }
                None => Some(stream),
            }
        };
        if let Some(stream) = refused {
            return refuse(stream);
        }
        tokio::time::sleep(timeout).await;
        let forgotten = self.lock().unclaimed.remove(&id);
        if let Some(stream) = forgotten {
            refuse(stream);
        }
    }

    /// Returns the stream with this preamble, as soon as it has come.
    pub(crate) fn claim(&self, id: [u8; 16]) -> oneshot::Receiver<RecvStream> {
        let (send, receive) = oneshot::channel();
        let mut places = self.lock();
        // Conversations that ended without their stream.
        places.claimed.retain(|_, waiting| !waiting.is_closed());
        match places.unclaimed.remove(&id) {
            Some(stream) => drop(send.send(stream)),
            None => drop(places.claimed.insert(id, send)),
        }
        receive
    }
}

fn refuse(mut stream: RecvStream) {
    let _ = stream.stop(VarInt::from_u32(code::UNWANTED));
}
