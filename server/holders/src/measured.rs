//! Measures the rate of a link from the reads over it: reads the clock when reading begins and when it ends.

use std::sync::Arc;
use std::time::Instant;

use permafrost_metering::costs::Costs;
use permafrost_transport::peer::{PeerError, ReceivedFrame};

/// Frames that a node sends.
type Frames = Box<dyn Iterator<Item = Result<ReceivedFrame, PeerError>>>;

/// Frames that are counted on their way. The restored task reads them at its own speed, so the link is at least
/// as fast as they came.
pub(super) struct Measured {
    frames: Frames,
    node: String,
    costs: Arc<Costs>,
    began: Instant,
    bytes: u64,
}

impl Measured {
    pub(super) fn new(frames: Frames, node: &str, costs: &Arc<Costs>) -> Self {
        Self {
            frames,
            node: node.to_owned(),
            costs: Arc::clone(costs),
            began: Instant::now(),
            bytes: 0,
        }
    }
}

impl Iterator for Measured {
    type Item = Result<ReceivedFrame, PeerError>;

    fn next(&mut self) -> Option<Self::Item> {
        let frame = self.frames.next()?;
        if let Ok(frame) = &frame {
            self.bytes += frame.payload.len() as u64;
        }
        Some(frame)
    }
}

impl Drop for Measured {
    fn drop(&mut self) {
        let elapsed = self.began.elapsed();
        self.costs.copied_at_least(&self.node, self.bytes, elapsed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use permafrost_metering::costs::CostsConfig;
    use permafrost_protocol::wire::frame::{Coding, Header, Kind};

    use super::*;

    #[test]
    fn what_was_read_says_how_fast_the_link_is_at_least() {
        let costs = Costs::new(CostsConfig::default());
        let frame = |len: usize| ReceivedFrame {
            header: Header {
                kind: Kind::Pages,
                coding: Coding::Raw,
                flags: 0,
                pages: 0,
                index: 0,
                payload_bytes: 0,
                sequence: 0,
            },
            payload: Bytes::from(vec![7; len]),
        };
        let read = |len: usize| {
            let frames = [Ok(frame(len)), Ok(frame(len))].into_iter();
            // Without a delay it would be faster than any real link.
            let frames = frames.inspect(|_| std::thread::sleep(Duration::from_millis(2)));
            let frames: Frames = Box::new(frames);
            assert_eq!(Measured::new(frames, "n", &costs).count(), 2);
        };
        read(1000);
        assert!(
            costs.report().links.is_empty(),
            "too little to say anything"
        );
        read(1 << 20);
        assert!(costs.report().links.contains_key("n"));
    }
}
