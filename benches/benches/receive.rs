//! Receiving a dump: from a socket that CRIU writes to, through the front end, into a shadow's segments.
//!
//! One iteration is a conversation of 256 MiB of pages that are all different, in frames of 1 MiB, over a Unix socket
//! into a region in memory. The sender splices file pages into the socket, as CRIU splices those of a task, so that it
//! copies nothing itself. `here`: one thread receives and stores; `aside`: a second one stores. Both for a region in the
//! clear and an encrypted one. On two cores sender and receiver share what CRIU and `permafrostd` share.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use divan::Bencher;
use divan::counter::BytesCount;
use permafrost_benches::{noise, region};
use permafrost_criu::frontend::{self, ConversationEnd, PageSink, SinkError};
use permafrost_pmem::{DataKey, FormatOptions, KeyId, MapWriter, PAGE_SIZE, Region, Shadow};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{Dialect, PE_PRESENT, SpaceId};
use rustix::fs::MemfdFlags;
use rustix::pipe::SpliceFlags;

/// Bytes of a dump.
const DUMP_BYTES: u64 = 256 << 20;
/// Bytes of the file that is sent again and again: more than a core complex caches.
const FILE_BYTES: usize = 64 << 20;
/// Bytes of a frame.
const FRAME_BYTES: u64 = 1 << 20;
const REGION_BYTES: u64 = 640 << 20;

fn main() {
    divan::main();
}

#[divan::bench(args = [false, true], sample_size = 1, sample_count = 11)]
fn here(bencher: Bencher<'_, '_>, encrypted: bool) {
    bench(bencher, encrypted, false);
}

#[divan::bench(args = [false, true], sample_size = 1, sample_count = 11)]
fn aside(bencher: Bencher<'_, '_>, encrypted: bool) {
    bench(bencher, encrypted, true);
}

fn bench(bencher: Bencher<'_, '_>, encrypted: bool, is_slow: bool) {
    let region = region(REGION_BYTES, &FormatOptions::default());
    let key = encrypted.then(|| {
        let id = KeyId::random();
        let uuid = region.usage().uuid;
        let cipher = DataKey::random().cipher(uuid.as_bytes());
        region.keys().insert(id, cipher);
        id
    });
    let memory = rustix::fs::memfd_create("pages", MemfdFlags::CLOEXEC).expect("memory for pages");
    let mut memory = File::from(memory);
    let pages = noise(FILE_BYTES / PAGE_SIZE);
    memory.write_all(&pages).expect("write pages");
    bencher
        .counter(BytesCount::new(DUMP_BYTES))
        .with_inputs(|| Stored::new(&region, key, is_slow))
        .bench_local_refs(|sink| {
            let (client, mut server) = UnixStream::pair().expect("a pair of sockets");
            thread::scope(|scope| {
                scope.spawn(|| send(client, &memory));
                let outcome = frontend::serve(&mut server, sink);
                assert!(
                    matches!(outcome, Ok(ConversationEnd::Closed)),
                    "{outcome:?}"
                );
            });
        });
}

/// Sends a dump.
fn send(mut socket: UnixStream, memory: &File) {
    let (encoder, space) = (Encoder::new(Dialect::V32), SpaceId::process(1));
    let (out, into) = rustix::pipe::pipe().expect("a pipe");
    let size = usize::try_from(FRAME_BYTES).expect("a MiB");
    rustix::pipe::fcntl_setpipe_size(&into, size).expect("a larger pipe");
    socket
        .write_all(encoder.open(space).as_ref())
        .expect("open");
    let mut answer = [0; 4];
    // Whether there is a parent: a byte.
    std::io::Read::read_exact(&mut socket, &mut answer[..1]).expect("an answer");
    for vaddr in (PAGE_BYTES..)
        .step_by(size)
        .take((DUMP_BYTES / FRAME_BYTES) as usize)
    {
        let pages = u32::try_from(FRAME_BYTES / PAGE_BYTES).expect("256 pages");
        let frame = encoder.pages(space, vaddr, pages, PE_PRESENT);
        socket.write_all(frame.as_ref()).expect("a frame");
        let mut at = (vaddr - PAGE_BYTES) % FILE_BYTES as u64;
        let end = at + FRAME_BYTES;
        while at < end {
            let left = usize::try_from(end - at).expect("at most a MiB");
            let spliced = rustix::pipe::splice(
                memory,
                Some(&mut at),
                &into,
                None,
                left,
                SpliceFlags::empty(),
            );
            let mut left = spliced.expect("splice pages");
            while left > 0 {
                left -= rustix::pipe::splice(&out, None, &socket, None, left, SpliceFlags::MORE)
                    .expect("splice");
            }
        }
    }
    socket.write_all(encoder.close().as_ref()).expect("close");
    std::io::Read::read_exact(&mut socket, &mut answer).expect("the status");
}

/// Stores pages in a shadow.
struct Stored {
    shadow: Shadow,
    map: MapWriter,
    is_slow: bool,
}

impl Stored {
    fn new(region: &Arc<Region>, key: Option<KeyId>, is_slow: bool) -> Self {
        let shadow = region.begin_encrypted(key).expect("begin a shadow");
        let map = shadow.map();
        Self {
            shadow,
            map,
            is_slow,
        }
    }
}

impl PageSink for Stored {
    fn open(&mut self, _: SpaceId) -> Result<bool, SinkError> {
        Ok(false)
    }

    fn has_parent(&mut self, _: SpaceId) -> Result<bool, SinkError> {
        Ok(false)
    }

    fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), SinkError> {
        let appended = self
            .shadow
            .append(&mut self.map, vaddr / PAGE_BYTES, flags, bytes, None);
        appended.expect("append");
        Ok(())
    }

    fn is_slow(&self) -> bool {
        self.is_slow
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
