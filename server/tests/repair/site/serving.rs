//! A node that serves fetches, with faults on demand.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use permafrost_clustered::ClusteredStore;
use permafrost_identity::Peer;
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{Done, reply, request};
use permafrost_server::agents::serve_fetch;
use permafrost_transport::peer::{Endpoint, FrameSink, FrameSource, Handler, PeerError, Replies};

/// Faults of a node as the source of a fetch. Each stays until it is cleared.
#[derive(Default)]
pub(crate) struct Faults {
    /// Disconnects after so many frames: all its connections end.
    pub(crate) die_after: Option<u64>,
    /// Claims another digest than that of the pages it sends.
    pub(crate) lie: bool,
    /// Flips one bit of the first page.
    pub(crate) corrupt: bool,
    /// Barrier at which both sides wait before the first frame.
    pub(crate) gate: Option<Arc<Barrier>>,
}

/// Numbers of pages by the kind of frame that they were sent in.
#[derive(Default)]
pub(crate) struct Sent {
    pub(crate) fetches: AtomicU64,
    pub(crate) pages: AtomicU64,
    pub(crate) zero: AtomicU64,
    pub(crate) parent: AtomicU64,
}

impl Sent {
    /// Returns the pages sent, zero, and left to the parent, and resets them.
    pub(crate) fn take(&self) -> (u64, u64, u64) {
        let take = |count: &AtomicU64| count.swap(0, Ordering::SeqCst);
        (take(&self.pages), take(&self.zero), take(&self.parent))
    }
}

pub(crate) struct Serving {
    pub(super) store: Arc<ClusteredStore>,
    pub(super) faults: Mutex<Faults>,
    pub(crate) sent: Sent,
    pub(super) endpoint: Mutex<Option<Arc<Endpoint>>>,
}

impl Serving {
    pub(crate) fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock()
    }
}

struct Faulty<'a> {
    inner: &'a mut dyn FrameSink,
    serving: &'a Serving,
    frames: u64,
}

impl FrameSink for Faulty<'_> {
    fn opened(&mut self, manifest: Manifest, mut digest: Vec<u8>) -> Result<(), PeerError> {
        if self.serving.faults().lie {
            digest[3] ^= 1;
        }
        self.inner.opened(manifest, digest)?;
        let gate = self.serving.faults().gate.clone();
        if let Some(gate) = gate {
            gate.wait();
            gate.wait();
        }
        Ok(())
    }

    fn push(
        &mut self,
        kind: Kind,
        flags: u16,
        pages: u32,
        index: u64,
        payload: &[u8],
    ) -> Result<(), PeerError> {
        self.frames += 1;
        let (die_after, corrupt) = {
            let faults = self.serving.faults();
            (faults.die_after, faults.corrupt)
        };
        if die_after.is_some_and(|after| self.frames > after) {
            let endpoint = self.serving.endpoint.lock().clone().unwrap();
            // What was pushed before is to be there.
            std::thread::sleep(Duration::from_millis(200));
            endpoint.disconnect();
        }
        let sent = &self.serving.sent;
        let count = match kind {
            Kind::Pages => &sent.pages,
            Kind::Zero => &sent.zero,
            Kind::Parent => &sent.parent,
            _ => return self.inner.push(kind, flags, pages, index, payload),
        };
        count.fetch_add(pages.into(), Ordering::SeqCst);
        if corrupt && kind == Kind::Pages {
            let mut wrong = payload.to_vec();
            wrong[1000] ^= 16;
            return self.inner.push(kind, flags, pages, index, &wrong);
        }
        self.inner.push(kind, flags, pages, index, payload)
    }
}

impl Handler for Serving {
    fn call(&self, _: &Peer, _: request::Body) -> reply::Body {
        reply::Body::Done(Done::default())
    }

    fn dump(
        &self,
        _: &Peer,
        _: request::Dump,
        _: &mut dyn FrameSource,
        _: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        unreachable!("nobody dumps")
    }

    fn fetch(
        &self,
        peer: &Peer,
        request: request::Fetch,
        frames: &mut dyn FrameSink,
    ) -> Result<(), control::Error> {
        self.sent.fetches.fetch_add(1, Ordering::SeqCst);
        let mut faulty = Faulty {
            inner: frames,
            serving: self,
            frames: 0,
        };
        serve_fetch(&self.store, peer, &request, &mut faulty)
    }
}
