//! Share of the protocol itself in a dump's time through the page server.
//!
//! `core` is the sans-I/O core by itself, frame by frame: the cost of a frame of any kind. `serve` is the front end
//! over a stream in memory, with a sink that drops the pages, in frames of the given number of pages: an upper bound
//! for the rate of a connection, without a socket and a region. CRIU sends a frame for each run of present pages, so
//! a fragmented task is near the first figure, a large heap near the last.

use std::io::{self, Read, Write};
use std::time::Duration;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use permafrost_criu::frontend::{self, Bounded, ConversationEnd, PageSink, SinkError};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{Answer, Dialect, PE_PRESENT, PageServer, SpaceId, Want};

/// Frames a conversation with the core.
const FRAMES: u32 = 10_000;
/// Pages a conversation with the front end: 64 MiB, more than the last cache of a usual core complex.
const SERVED_PAGES: u32 = 16_384;

fn main() {
    divan::main();
}

#[divan::bench(args = [Dialect::V24, Dialect::V32], sample_size = 1)]
fn core(bencher: Bencher<'_, '_>, dialect: Dialect) {
    let (encoder, space) = (Encoder::new(dialect), SpaceId::process(1));
    let open = encoder.open(space);
    // Every second page: as fragmented as it gets.
    let frames: Vec<_> = (0..FRAMES)
        .map(|nr| encoder.pages(space, u64::from(nr) * 2 * PAGE_BYTES, 1, PE_PRESENT))
        .collect();
    bencher
        .counter(ItemsCount::new(FRAMES))
        .with_inputs(|| opened(open.as_ref()))
        .bench_local_refs(|server| {
            for frame in &frames {
                server.frame(frame.as_ref()).expect("a frame in order");
                server.payload(1);
            }
        });
}

/// Returns a server to which a space was opened.
fn opened(mut open: &[u8]) -> PageServer {
    let mut server = PageServer::new();
    while let Want::Frame { bytes } = server.want() {
        let (frame, rest) = open.split_at(bytes);
        server.frame(frame).expect("an OPEN frame");
        open = rest;
    }
    server.reply(Answer::HasParent(false));
    server
}

#[divan::bench(args = [1, 16, 256], sample_size = 1)]
fn serve(bencher: Bencher<'_, '_>, pages_a_frame: u32) {
    let said = conversation(pages_a_frame);
    bencher
        .counter(BytesCount::new(u64::from(SERVED_PAGES) * PAGE_BYTES))
        .counter(ItemsCount::new(SERVED_PAGES / pages_a_frame))
        .bench_local(|| {
            let outcome = frontend::serve(&mut Peer { left: &said }, &mut Dropped);
            assert!(
                matches!(outcome, Ok(ConversationEnd::Closed)),
                "{outcome:?}"
            );
        });
}

/// Returns all bytes of a CRIU that dumps one process.
fn conversation(pages_a_frame: u32) -> Vec<u8> {
    let (encoder, space) = (Encoder::new(Dialect::V32), SpaceId::process(1));
    let payload = vec![7; pages_a_frame as usize * 4096];
    let mut said = encoder.open(space).as_ref().to_vec();
    for first in (0..SERVED_PAGES).step_by(pages_a_frame as usize) {
        let vaddr = u64::from(first) * PAGE_BYTES;
        let frame = encoder.pages(space, vaddr, pages_a_frame, PE_PRESENT);
        said.extend_from_slice(frame.as_ref());
        said.extend_from_slice(&payload);
    }
    said.extend_from_slice(encoder.close().as_ref());
    said
}

/// Peer that has sent everything, and does not read.
struct Peer<'a> {
    left: &'a [u8],
}

impl Read for Peer<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.left.read(buffer)
    }
}

impl Write for Peer<'_> {
    fn write(&mut self, reply: &[u8]) -> io::Result<usize> {
        Ok(reply.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Bounded for Peer<'_> {
    fn limit_reads(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }
}

/// Takes everything, keeps nothing.
struct Dropped;

impl PageSink for Dropped {
    fn open(&mut self, _: SpaceId) -> Result<bool, SinkError> {
        Ok(false)
    }

    fn has_parent(&mut self, _: SpaceId) -> Result<bool, SinkError> {
        Ok(false)
    }

    fn pages(&mut self, _: u64, _: u16, bytes: &[u8]) -> Result<(), SinkError> {
        divan::black_box(bytes);
        Ok(())
    }

    fn hole(&mut self, _: u64, _: u64) -> Result<(), SinkError> {
        Ok(())
    }

    fn close(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
        unreachable!("nothing is refused: {reason}");
    }
}
