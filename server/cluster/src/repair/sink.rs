//! Frames for a peer that fetches in the background, at the rate of repair.

use std::time::Instant;

use permafrost_metering::throttle::{Throttle, named_bytes};
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::wire::frame::Kind;
use permafrost_transport::peer::{FrameSink, PeerError};

/// Passes frames on at the rate of repair.
pub struct ThrottledSink<'a> {
    throttle: &'a Throttle,
    frames: &'a mut dyn FrameSink,
    /// Time since which this thread has been reading the next frame.
    since: Instant,
}

impl<'a> ThrottledSink<'a> {
    /// Wraps a sink of frames for a peer that fetches in the background.
    pub fn new(throttle: &'a Throttle, frames: &'a mut dyn FrameSink) -> Self {
        Self {
            throttle,
            frames,
            since: Instant::now(),
        }
    }
}

impl FrameSink for ThrottledSink<'_> {
    fn opened(&mut self, manifest: Manifest, content_digest: Vec<u8>) -> Result<(), PeerError> {
        self.frames.opened(manifest, content_digest)
    }

    fn push(
        &mut self,
        kind: Kind,
        flags: u16,
        pages: u32,
        index: u64,
        payload: &[u8],
    ) -> Result<(), PeerError> {
        // Without the time spent waiting for the peer.
        let busy = self.since.elapsed();
        self.frames.push(kind, flags, pages, index, payload)?;
        let bytes = payload.len() as u64 + named_bytes(kind, pages);
        self.throttle.took(bytes, busy);
        self.since = Instant::now();
        Ok(())
    }
}
