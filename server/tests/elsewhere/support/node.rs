//! One node, and a record of the requests to it.

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_clustered::{ClusteredStore, Suspects};
use permafrost_identity::Peer;
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{reply, request};
use permafrost_server::peers::NodeHandler;
use permafrost_transport::peer::{Endpoint, FrameSink, FrameSource, Handler, PeerError, Replies};
/// Handler of a node's peers that records requests, and that kills the node on command.
pub(crate) struct Watched {
    pub(crate) inner: NodeHandler,
    /// Every fetch of an address space with its pages: place from 1, and first index.
    pub(crate) pages_asked: Mutex<Vec<(u32, u64)>>,
    /// Number of fetches of any kind.
    pub(crate) asked: AtomicUsize,
    /// Number of frames with pages that are sent before the node dies.
    pub(crate) dies_after: AtomicUsize,
    pub(crate) endpoint: Mutex<Option<Endpoint>>,
}

impl Handler for Watched {
    fn call(&self, peer: &Peer, body: request::Body) -> reply::Body {
        self.inner.call(peer, body)
    }

    fn dump(
        &self,
        peer: &Peer,
        request: request::Dump,
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        self.inner.dump(peer, request, frames, replies)
    }

    fn fetch(
        &self,
        peer: &Peer,
        request: request::Fetch,
        frames: &mut dyn FrameSink,
    ) -> Result<(), control::Error> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if request.space > 0 && !request.outline_only {
            let asked = (request.space, request.from_index);
            self.pages_asked.lock().push(asked);
        }
        let mut mortal = Mortal {
            inner: frames,
            node: self,
            pages_frames: 0,
        };
        self.inner.fetch(peer, request, &mut mortal)
    }
}

struct Mortal<'a> {
    pub(crate) inner: &'a mut dyn FrameSink,
    node: &'a Watched,
    pages_frames: usize,
}

impl FrameSink for Mortal<'_> {
    fn opened(&mut self, manifest: Manifest, content_digest: Vec<u8>) -> Result<(), PeerError> {
        self.inner.opened(manifest, content_digest)
    }

    fn push(
        &mut self,
        kind: Kind,
        flags: u16,
        pages: u32,
        index: u64,
        payload: &[u8],
    ) -> Result<(), PeerError> {
        if kind == Kind::Pages {
            if self.pages_frames == self.node.dies_after.load(Ordering::SeqCst) {
                // What was sent is to be there.
                std::thread::sleep(Duration::from_millis(500));
                drop(self.node.endpoint.lock().take());
            }
            self.pages_frames += 1;
        }
        self.inner.push(kind, flags, pages, index, payload)
    }
}

/// Checkpoints that a reader has found damaged.
#[derive(Default)]
pub(crate) struct Suspected(Mutex<Vec<String>>);

impl Suspects for Suspected {
    fn suspect(&self, id: &str) {
        self.0.lock().push(id.to_owned());
    }
}

/// A storage node.
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) store: Arc<ClusteredStore>,
    pub(crate) watched: Arc<Watched>,
    pub(crate) suspects: Arc<Suspected>,
    pub(crate) address: SocketAddr,
    pub(crate) region: PathBuf,
}

impl Node {
    /// Flips a bit in the region's file, which the store has mapped.
    pub(crate) fn flip(&self, at: u64) {
        let file = File::options().read(true).write(true).open(&self.region);
        let file = file.unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }

    pub(crate) fn region(&self) -> Vec<u8> {
        std::fs::read(&self.region).unwrap()
    }

    /// Returns all positions of these bytes in the region.
    pub(crate) fn find(&self, bytes: &[u8]) -> Vec<u64> {
        let region = self.region();
        let mut places = Vec::new();
        for at in memchr(&region, bytes) {
            places.push(at as u64);
        }
        places
    }

    pub(crate) fn damage_told(&self) -> Vec<String> {
        std::mem::take(&mut self.suspects.0.lock())
    }

    pub(crate) fn asked(&self) -> usize {
        self.watched.asked.load(Ordering::SeqCst)
    }

    pub(crate) fn pages_asked(&self) -> Vec<(u32, u64)> {
        self.watched.pages_asked.lock().clone()
    }

    pub(crate) fn die(&self) {
        drop(self.watched.endpoint.lock().take());
    }
}

/// Returns the positions of `needle`, which begins with rare bytes.
fn memchr<'a>(haystack: &'a [u8], needle: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let places = 0..haystack.len().saturating_sub(needle.len());
    places.filter(move |&at| haystack[at] == needle[0] && haystack[at..].starts_with(needle))
}
