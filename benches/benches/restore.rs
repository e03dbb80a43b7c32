//! Restores of the newest of many generations, beside restores of a full dump of the same memory, in turn.
//!
//! A process is dumped generation after generation, and so many of its pages, chosen at random, change in between. The
//! last two generations are kept, and the region is cleaned as by the daemon. Then the same memory is dumped as another
//! job. Both are read as CRIU reads them: the pagemap first, then all pages through a pipe into fresh memory.
//!
//! `TMPDIR=/dev/shm cargo bench -p permafrost-benches --bench restore [GENERATIONS]`

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_benches::{Numbers, noise};
use permafrost_catalog::{Catalog, Positioned, SledCatalog};
use permafrost_criu::frontend::{self, PageSink};
use permafrost_pmem::{FormatOptions, OpenOptions, PAGE_SIZE, Region, open_medium};
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::images::FIRST_SERVED_PAGES_ID;
use permafrost_protocol::pageserver::{PE_PRESENT, SpaceId};
use permafrost_protocol::streamer::{FileReply, FileRequest};
use permafrost_store::{RegionLocation, SessionRequest, Store, StoreParts};
use permafrost_transport::framing;

/// Sizes of the process, MiB.
const SIZES_MIB: [usize; 2] = [64, 512];
/// Generations, unless another number is given.
const GENERATIONS: usize = 1_000;
/// Restores of each kind.
const RUNS: usize = 15;
const PID: u32 = 7;

fn main() {
    let given = std::env::args().find_map(|argument| argument.parse().ok());
    let generations = given.unwrap_or(GENERATIONS);
    println!("{generations} generations, medians of {RUNS} in turn");
    println!("size, MiB  changed  full, ms  deep, ms  ratio");
    for mib in SIZES_MIB {
        for per_mille in [1, 10] {
            let dir = tempfile::tempdir().expect("a directory");
            let mut bench = Bench::new(dir.path(), mib);
            bench.go_deep(generations, per_mille);
            bench.compare(per_mille);
        }
    }
}

struct Bench {
    store: Arc<Store>,
    contents: Vec<u8>,
    numbers: Numbers,
    /// Memory of the process, by the number of each page's content.
    memory: Vec<usize>,
    deep: Vec<Checkpoint>,
    images: tempfile::TempDir,
}

impl Bench {
    fn new(dir: &Path, mib: usize) -> Self {
        let path = dir.join("region");
        let region_bytes = (mib as u64 * 4) << 20;
        let medium =
            open_medium(&path, region_bytes, &OpenOptions::default()).expect("open the medium");
        Region::format(Arc::clone(&medium), &FormatOptions::default()).expect("format");
        let (region, _) = Region::open(medium).expect("open");
        let (catalog, _) =
            SledCatalog::open_or_replace(&dir.join("catalog")).expect("open catalog");
        let catalog = Positioned::new(Box::new(catalog), Arc::clone(&region));
        let place = RegionLocation {
            path,
            guarantee: region.medium().guarantee().clone(),
        };
        let parts = StoreParts::new(region, place, Box::new(catalog) as Box<dyn Catalog>);
        let images = tempfile::tempdir_in(dir).expect("a directory");
        for name in ["inventory", "core-7", "mm-7"] {
            let path = images.path().join(format!("{name}.img"));
            std::fs::write(path, name).expect("write an image");
        }
        let mut numbers = Numbers::default();
        let memory = (0..mib << 20 >> 12)
            .map(|_| draw(&mut numbers, 4096))
            .collect();
        Self {
            store: Store::new(parts).expect("start"),
            contents: noise(4096),
            numbers,
            memory,
            deep: Vec::new(),
            images,
        }
    }

    /// Dumps generation after generation.
    fn go_deep(&mut self, generations: usize, per_mille: usize) {
        for generation in 0..=generations {
            let pages = self.memory.len();
            for _ in 0..pages * per_mille / 1000 {
                let page = draw(&mut self.numbers, pages);
                self.memory[page] = draw(&mut self.numbers, 4096);
            }
            let sealed = self.dump("deep");
            self.deep.push(sealed);
            if self.deep.len() > 2 {
                let oldest = self.deep.remove(0);
                self.store.delete(&oldest).expect("delete");
            }
            if generation % 8 == 0 {
                self.store.clean_in_background(&|| false).expect("clean");
            }
        }
    }

    /// Dumps the same memory as another job, and restores both in turn.
    fn compare(&mut self, per_mille: usize) {
        let flat = self.dump("flat");
        let deep = self.deep.last().expect("a checkpoint").clone();
        let [mut full, mut old] = [Vec::new(), Vec::new()];
        for _ in 0..RUNS {
            full.push(self.restore(&flat));
            old.push(self.restore(&deep));
        }
        let [full, old] = [full, old].map(|mut times| {
            times.sort_unstable();
            times[RUNS / 2].as_secs_f64() * 1e3
        });
        let (mib, percent) = (self.memory.len() >> 8, per_mille as f64 / 10.0);
        println!(
            "{mib:>9}  {percent:>5.1} %  {full:>8.1}  {old:>8.1}  {:>5.2}",
            old / full
        );
    }

    fn dump(&mut self, job: &str) -> Checkpoint {
        let request = SessionRequest {
            job: job.to_owned(),
            pre_dump: false,
            pre_copy: false,
            seal_follows: true,
            origin: None,
            no_parent: false,
            parent_images: false,
            from_here: true,
            taken_by: "bench".to_owned(),
        };
        let mut opening = self.store.begin_session(&request).expect("begin");
        if job == "deep" {
            let parent = self.deep.last();
            opening.parent = parent.and_then(|head| self.store.parent(head));
        }
        let session = self.store.open_session(request, opening);
        let mut sink = session
            .start(&self.store, Box::new(|| {}))
            .expect("connect");
        sink.open(SpaceId::process(PID)).expect("open");
        for (index, &content) in self.memory.iter().enumerate() {
            let address = (0x10_0000 + index * PAGE_SIZE) as u64;
            let page = &self.contents[content * PAGE_SIZE..][..PAGE_SIZE];
            sink.pages(address, PE_PRESENT, page).expect("pages");
        }
        sink.close().expect("close");
        drop(sink);
        let images = OwnedFd::from(File::open(self.images.path()).expect("open the images"));
        let sealed = self.store.seal_session(&session, images, &|| true);
        sealed.expect("seal")
    }

    /// Reads a checkpoint as a restoring CRIU does.
    fn restore(&self, checkpoint: &Checkpoint) -> Duration {
        let (ours, theirs) = UnixStream::pair().expect("a socket");
        let began = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let source = self.store.open(checkpoint.clone()).expect("open");
                let served = Arc::default();
                let streamed = frontend::stream(&ours, &source, &served, &mut |_| {});
                streamed.expect("stream");
            });
            let pagemap = self.read(&theirs, &format!("pagemap-{PID}.img"), 1 << 16);
            assert!(pagemap > 0);
            let pages = format!("pages-{FIRST_SERVED_PAGES_ID}.img");
            let bytes = self.memory.len() * PAGE_SIZE;
            assert_eq!(self.read(&theirs, &pages, bytes), bytes);
            drop(theirs);
        });
        began.elapsed()
    }

    /// Reads an image into fresh memory, and returns its length.
    fn read(&self, streamer: &UnixStream, name: &str, most: usize) -> usize {
        let request = FileRequest {
            filename: name.to_owned(),
        };
        framing::send(streamer, &request, &[]).expect("send");
        let reply = framing::recv::<FileReply>(streamer).expect("receive");
        assert!(reply.is_some_and(|(reply, _)| reply.exists), "{name}");
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        send_fd(streamer, writer);
        let mut memory = vec![0; most];
        let (mut file, mut at) = (File::from(reader), 0);
        loop {
            match file.read(&mut memory[at..]).expect("read") {
                0 => return at,
                bytes => at += bytes,
            }
        }
    }
}

/// Sends a descriptor on a byte of its own.
fn send_fd(stream: &UnixStream, fd: OwnedFd) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let fds = [fd.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    let byte = [std::io::IoSlice::new(&[0])];
    sendmsg(stream, &byte, &mut ancillary, SendFlags::empty()).expect("send a descriptor");
}

/// Returns a number below `count`.
fn draw(numbers: &mut Numbers, count: usize) -> usize {
    usize::try_from(numbers.draw() % count as u64).unwrap_or(0)
}
