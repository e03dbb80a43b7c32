//! Dumps while the region is cleaned, beside dumps while it is not: bytes a second, in turn.
//!
//! A process of [`PAGES`] pages is dumped again and again; each dump is compared with the one before, and
//! [`CHANGED_PERCENT`] of the pages, chosen at random, have changed. The last two generations are kept, so that
//! segments become sparse all the time. In every second window the region is cleaned as by the daemon, but without its
//! pause of a minute between passes: the worst case. What was moved meanwhile is printed, so that a window without
//! cleaning is seen.
//!
//! `TMPDIR=/dev/shm cargo bench -p permafrost-benches --bench cleaning [WINDOWS]`

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use permafrost_benches::{Numbers, noise};
use permafrost_catalog::{Catalog, Positioned, SledCatalog};
use permafrost_criu::frontend::PageSink;
use permafrost_pmem::{FormatOptions, OpenOptions, PAGE_SIZE, Region, open_medium};
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::pageserver::{PE_PRESENT, SpaceId};
use permafrost_store::{RegionLocation, SessionRequest, Store, StoreParts};

/// Pages of the process: 64 MiB.
const PAGES: usize = 16_384;
/// Share of the pages that change between two dumps.
const CHANGED_PERCENT: usize = 30;
/// Room for the process 16 times.
const REGION_BYTES: u64 = 1 << 30;
/// Dumps of a window.
const DUMPS: u32 = 12;
/// Windows of each kind, unless another number is given.
const WINDOWS: usize = 7;
const PID: u32 = 7;
const JOB: &str = "bench";

fn main() {
    let given = std::env::args().find_map(|argument| argument.parse().ok());
    let windows: usize = given.unwrap_or(WINDOWS);
    let dir = tempfile::tempdir().expect("a directory");
    let mut bench = Bench::new(dir.path());
    println!("{PAGES} pages, {CHANGED_PERCENT} % changed, {DUMPS} dumps a window");
    println!("cleaned      MB/s  moved, MiB  freed, MiB");
    let mut rates = [Vec::new(), Vec::new()];
    // The first one fills the region.
    for window in 0..=2 * windows {
        let cleaned = window % 2 == 1;
        let (moved, freed) = bench.cleaned();
        let rate = bench.window(cleaned);
        let (moved, freed) = (bench.cleaned().0 - moved, bench.cleaned().1 - freed);
        let named = if cleaned { "yes" } else { "no" };
        println!(
            "{named:>7} {rate:>9.0} {:>11} {:>11}",
            moved >> 20,
            freed >> 20
        );
        if window > 0 {
            rates[usize::from(cleaned)].push(rate);
        }
    }
    let [without, with] = rates.map(median);
    println!(
        "medians {without:.0} and {with:.0} MB/s: {:.2}",
        with / without
    );
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

struct Bench {
    store: Arc<Store>,
    contents: Vec<u8>,
    numbers: Numbers,
    /// Memory of the process, by the number of each page's content.
    memory: Vec<usize>,
    newest: Option<Checkpoint>,
    /// Generation before the newest one.
    older: Option<Checkpoint>,
    images: tempfile::TempDir,
}

impl Bench {
    fn new(dir: &Path) -> Self {
        let path = dir.join("region");
        let medium =
            open_medium(&path, REGION_BYTES, &OpenOptions::default()).expect("open the medium");
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
        for (name, content) in [
            ("inventory", "inventory"),
            ("core-7", "core"),
            ("mm-7", "mm"),
        ] {
            let path = images.path().join(format!("{name}.img"));
            std::fs::write(path, content).expect("write an image");
        }
        Self {
            store: Store::new(parts).expect("start"),
            contents: noise(4096),
            numbers: Numbers::default(),
            memory: vec![0; PAGES],
            newest: None,
            older: None,
            images,
        }
    }

    /// Bytes that cleaning has moved, and those that it has freed.
    fn cleaned(&self) -> (u64, u64) {
        let counters = self.store.counters();
        (counters.moved_bytes.value(), counters.cleaned_bytes.value())
    }

    /// Makes the dumps of a window. Returns their bytes a second in MB, without the time between dumps.
    fn window(&mut self, cleaned: bool) -> f64 {
        let stopped = AtomicBool::new(false);
        let store = Arc::clone(&self.store);
        let is_stopped = || stopped.load(Ordering::Relaxed);
        let mut took = Duration::ZERO;
        std::thread::scope(|scope| {
            if cleaned {
                scope.spawn(|| {
                    while !is_stopped() {
                        store.clean_in_background(&is_stopped).expect("clean");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
            }
            for _ in 0..DUMPS {
                took += self.dump();
            }
            stopped.store(true, Ordering::Relaxed);
        });
        if !cleaned {
            // So that both kinds begin with the same room.
            self.store.gc(false, &mut |_, _| {}).expect("clean");
        }
        let bytes = f64::from(DUMPS) * (PAGES * PAGE_SIZE) as f64;
        bytes / 1e6 / took.as_secs_f64()
    }

    fn dump(&mut self) -> Duration {
        let drawn = |numbers: &mut Numbers, below: usize| {
            usize::try_from(numbers.draw() % below as u64).expect("a small number")
        };
        for _ in 0..PAGES * CHANGED_PERCENT / 100 {
            let page = drawn(&mut self.numbers, PAGES);
            self.memory[page] = drawn(&mut self.numbers, 4096);
        }
        let began = Instant::now();
        let request = SessionRequest {
            job: JOB.to_owned(),
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
        opening.parent = self
            .newest
            .as_ref()
            .and_then(|head| self.store.parent(head));
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
        let sealed = sealed.expect("seal");
        let took = began.elapsed();
        let oldest = self.older.take();
        self.older = self.newest.replace(sealed);
        if let Some(oldest) = oldest {
            self.store.delete(&oldest).expect("delete");
        }
        took
    }
}
