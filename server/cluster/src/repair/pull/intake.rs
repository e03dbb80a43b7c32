//! Stores the frames of a fetch in a copy of the dump.

use std::time::Instant;

use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::wire::frame::Kind;
use permafrost_store::{ContentDigest, CopyDump, StoreError};
use permafrost_transport::peer::ReceivedFrame;

use crate::replication::apply;
use permafrost_metering::throttle::{Throttle, named_bytes};

/// Reason why a pull from one node failed.
pub(super) enum Failure {
    /// The source node failed, described with its name: another one may succeed.
    Source(String),
    /// The parent's pages here are damaged.
    Parent(StoreError),
    /// This node failed: no other source can help.
    Own(StoreError),
}

impl Failure {
    pub(super) fn source(node: &str, what: &str) -> Self {
        Self::Source(format!("{node}: {what}"))
    }
}

/// Stores the frames of one fetch.
pub(super) struct Intake<'a> {
    node: &'a str,
    dump: CopyDump,
    throttle: Option<&'a Throttle>,
    closed: bool,
}

impl<'a> Intake<'a> {
    pub(super) fn new(node: &'a str, dump: CopyDump, throttle: Option<&'a Throttle>) -> Self {
        Self {
            node,
            dump,
            throttle,
            closed: false,
        }
    }

    /// Stores a frame, and waits as the throttle requires.
    pub(super) fn take(&mut self, frame: &ReceivedFrame) -> Result<(), Failure> {
        let began = Instant::now();
        let header = &frame.header;
        self.put(frame)?;
        if let Some(throttle) = self.throttle {
            let named = named_bytes(header.kind, header.pages);
            throttle.took(frame.payload.len() as u64 + named, began.elapsed());
        }
        Ok(())
    }

    /// Ends the fetch: returns the copy, durable, after checking that its content digest is `expected`.
    pub(super) fn finish(mut self, expected: ContentDigest) -> Result<CopyDump, Failure> {
        self.close()?;
        let digest = self.dump.prepare();
        if digest.map_err(|error| self.blame(error))? != expected {
            return Err(Failure::source(
                self.node,
                "what came is not what it said it would send",
            ));
        }
        Ok(self.dump)
    }

    fn put(&mut self, frame: &ReceivedFrame) -> Result<(), Failure> {
        let header = &frame.header;
        match header.kind {
            Kind::Parent => {
                let (index, pages) = (header.index, u64::from(header.pages));
                return apply(&mut self.dump, frame)
                    .and_then(|()| self.dump.check_parent(index, pages))
                    .map_err(Failure::Parent);
            }
            Kind::Close | Kind::Prepare => {
                return Err(Failure::source(self.node, "a frame that may not come"));
            }
            Kind::Image => self.close()?,
            _ => {}
        }
        apply(&mut self.dump, frame).map_err(|error| self.blame(error))
    }

    /// Ends the address spaces.
    fn close(&mut self) -> Result<(), Failure> {
        if !self.closed {
            self.dump.close().map_err(|error| self.blame(error))?;
            self.closed = true;
        }
        Ok(())
    }

    /// Classifies an error: invalid data is the source's fault, everything else this node's.
    fn blame(&self, error: StoreError) -> Failure {
        match error.code() {
            ErrorCode::Invalid | ErrorCode::Conflict => {
                Failure::source(self.node, &error.to_string())
            }
            _ => Failure::Own(error),
        }
    }
}
