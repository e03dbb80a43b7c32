//! Bytes that a client sends, put together frame by frame.

use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{Dialect, Frame, PE_LAZY, PE_PRESENT, SpaceId};

pub(crate) const DIALECTS: [Dialect; 2] = [Dialect::V24, Dialect::V32];

fn page(fill: u8) -> Vec<u8> {
    vec![fill; 4096]
}

/// Frames and pages, one after another.
pub(crate) struct Stream(Encoder, pub(crate) Vec<u8>);

impl Stream {
    pub(crate) fn new(dialect: Dialect) -> Self {
        Self(Encoder::new(dialect), Vec::new())
    }

    pub(crate) fn frame(
        mut self,
        frame: impl FnOnce(&Encoder) -> permafrost_protocol::pageserver::FrameBytes,
    ) -> Self {
        self.1.extend_from_slice(frame(&self.0).as_ref());
        self
    }

    pub(crate) fn raw(mut self, frame: Frame) -> Self {
        self.1
            .extend_from_slice(frame.encode(self.0.dialect()).unwrap().as_ref());
        self
    }

    pub(crate) fn pages(mut self, count: u8) -> Self {
        for fill in 1..=count {
            self.1.extend(page(fill));
        }
        self
    }
}

/// Returns a dump of a shared-memory segment and two processes, with every kind of frame of a current client.
pub(crate) fn whole_dump(dialect: Dialect) -> Vec<u8> {
    let (shared, first, second) = (
        SpaceId::shared_memory(70_000).unwrap(),
        SpaceId::process(1),
        SpaceId::process(42),
    );
    Stream::new(dialect)
        .frame(|e| e.query_parent(first))
        .frame(|e| e.open(shared))
        .frame(|e| e.pages(shared, 0, 1, PE_PRESENT))
        .pages(1)
        .frame(|e| e.open(first))
        .frame(|e| e.pages(first, 0x1_0000, 2, PE_PRESENT | PE_LAZY))
        .pages(2)
        .frame(|e| e.hole(first, 0x1_2000, 3))
        .frame(|e| e.pages(first, 0x7fff_0000_0000, 1, PE_PRESENT))
        .pages(1)
        .frame(|e| e.open(second))
        .frame(|e| e.pages(second, 0x1_0000, 3, PE_PRESENT))
        .pages(3)
        .frame(Encoder::force_close)
        .1
}
