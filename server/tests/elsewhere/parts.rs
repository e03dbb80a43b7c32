//! Parts of an address space, read in any order as lazy restores do, from holders that may send anything.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_agent::remote::{self, Arriving, Holders, RemoteCheckpoint};
use permafrost_criu::source::{CheckpointSource, PageRun, ReadError};
use permafrost_identity::Role;
use permafrost_pmem::PAGE_SIZE;
use permafrost_protocol::control::{self, Checkpoint, ErrorCode};
use permafrost_protocol::pageserver::{PE_LAZY, PE_PRESENT};
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::request;
use permafrost_transport::peer::{Network, PeerError, ReceivedFrame};

use super::support::{Memory, Site, check_pagemap, memory};

const LONG: Duration = Duration::from_secs(60);
const LAZY: u16 = PE_LAZY | PE_PRESENT;

type Tamper = Box<dyn Fn(&request::Fetch, &mut Vec<ReceivedFrame>) + Send>;

/// Nodes, the first of which may send something else than it has.
struct Tampering {
    network: Network,
    first: String,
    tamper: Mutex<Option<Tamper>>,
    /// True if the first node is of a release that knows no proofs.
    is_old: bool,
    /// Bytes of proofs and outlines that came.
    bytes: AtomicU64,
    /// Number of replies with any.
    replies: AtomicU64,
}

impl Holders for Tampering {
    fn fetch(
        &self,
        node: &str,
        others: bool,
        mut request: request::Fetch,
    ) -> Result<Arriving, PeerError> {
        let is_first = node == self.first;
        if is_first && self.is_old {
            request.proof = false;
        }
        let arriving = remote::fetch(&self.network, node, others, request.clone(), LONG)?;
        let mut frames = arriving.frames.collect::<Result<Vec<_>, _>>()?;
        let data = frames.iter().filter(|f| f.header.kind == Kind::ImageData);
        let bytes: usize = data.map(|frame| frame.payload.len()).sum();
        self.bytes.fetch_add(bytes as u64, Ordering::SeqCst);
        self.replies
            .fetch_add(u64::from(bytes > 0), Ordering::SeqCst);
        if let Some(tamper) = self.tamper.lock().as_ref().filter(|_| is_first) {
            tamper(&request, &mut frames);
        }
        Ok(Arriving {
            opened: arriving.opened,
            frames: Box::new(frames.into_iter().map(Ok)),
        })
    }
}

fn holders(site: &Site, name: &str, is_old: bool) -> Arc<Tampering> {
    Arc::new(Tampering {
        network: site.network_of(name, Role::Reader, "team"),
        first: site.nodes[0].name.clone(),
        tamper: Mutex::default(),
        is_old,
        bytes: AtomicU64::new(0),
        replies: AtomicU64::new(0),
    })
}

/// Opens what node 0 has, to be read from these nodes.
fn open(
    site: &Site,
    holders: &Arc<Tampering>,
    sealed: &Checkpoint,
    order: &[usize],
) -> RemoteCheckpoint {
    let store = site.nodes[order[order.len() - 1]].store.local();
    let manifest = store.open_fetch(&sealed.id, "").unwrap().manifest().clone();
    let order = order.iter().map(|&n| site.nodes[n].name.clone()).collect();
    let holders = Arc::clone(holders) as Arc<dyn Holders>;
    RemoteCheckpoint::new(holders, order, sealed.clone(), manifest)
}

/// Reads pages, and compares them.
fn read(
    checkpoint: &RemoteCheckpoint,
    memory: &Memory,
    first: u64,
    pages: u64,
) -> Result<(), control::Error> {
    let mut came: Memory = Memory::new();
    let read = checkpoint.range(0, first, pages, &mut |run| {
        match run {
            PageRun::Pages {
                first_index, bytes, ..
            } => {
                let bytes: Cow<'_, [u8]> = bytes;
                came.extend((first_index..).zip(bytes.chunks(PAGE_SIZE).map(<[u8]>::to_vec)));
            }
            PageRun::Zero {
                first_index, pages, ..
            } => came.extend((first_index..first_index + pages).map(|n| (n, vec![0; PAGE_SIZE]))),
        }
        Ok(())
    });
    match read {
        Ok(()) => {
            let range = memory.range(first..first + pages);
            assert!(came.iter().eq(range), "{first}, {pages} pages");
            Ok(())
        }
        Err(ReadError::Source(error)) => Err(error),
        Err(ReadError::Taker(error)) => panic!("{error}"),
    }
}

/// Reads pages here and there, all of them at least once.
fn read_all(checkpoint: &RemoteCheckpoint, memory: &Memory) -> Result<(), control::Error> {
    let first = *memory.keys().next().unwrap();
    let end = *memory.keys().last().unwrap() + 1;
    let middle = first + (end - first) / 2;
    for (from, pages) in [
        (middle, 1),
        (end - 1, 8),
        (first, 1024),
        (first + 200, 3),
        (0, 20),
        (end, 50),
        (middle - 3, 1000),
        (first, end - first),
    ] {
        read(checkpoint, memory, from, pages)?;
    }
    // One after the other, as far as there are not too many.
    for from in (first..end.min(first + 20_000)).step_by(1000) {
        read(checkpoint, memory, from, 1000)?;
    }
    Ok(())
}

/// Memory of many sizes of mappings, far from each other.
fn scattered() -> Memory {
    let mut all = Memory::new();
    let pages = memory(3000);
    let mut pages = pages.into_values();
    for (n, (first, count)) in [
        (3, 1),
        (64, 64),
        (1 << 9, 130),
        ((1 << 12) - 3, 7),
        (1 << 20, 513),
        ((1 << 24) + 5, 3),
        ((1 << 24) + 64 * 9, 1),
        ((1 << 35) - 1, 2),
        ((1 << 35) + 4093, 600),
    ]
    .into_iter()
    .enumerate()
    {
        let step = if n % 2 == 0 { 1 } else { 2 };
        let indices = (first..).step_by(step).take(count);
        all.extend(indices.zip(&mut pages));
    }
    all
}

#[test]
fn parts_are_proven_by_themselves() {
    for (memory, flags) in [
        (memory(9000), LAZY),
        (memory(700), PE_PRESENT),
        (scattered(), LAZY),
        (scattered(), PE_PRESENT),
        (memory(1), LAZY),
    ] {
        let site = Site::new(&[("a", "", ""), ("b", "", "")]);
        let sealed = site.dump_as(0, &memory, flags);
        let holders = holders(&site, "reader", false);
        let checkpoint = open(&site, &holders, &sealed, &[0]);
        check_pagemap(&checkpoint.pagemap(0).unwrap(), &memory);
        read_all(&checkpoint, &memory).unwrap();
        // Through a node that does not hold it.
        let passed = open(&site, &holders, &sealed, &[1, 0]);
        check_pagemap(&passed.pagemap(0).unwrap(), &memory);
        read_all(&passed, &memory).unwrap();
    }
}

/// The time until a process runs must not depend on its size.
#[test]
fn positions_of_dense_memory_are_few_bytes() {
    let site = Site::new(&[("a", "", "")]);
    let mut memory = memory(8000);
    // Dense, as a large mapping is.
    memory = memory
        .into_values()
        .zip(0x1003_u64..)
        .map(|(page, index)| (index, page))
        .collect();
    let sealed = site.dump_as(0, &memory, LAZY);
    let holders = holders(&site, "reader", false);
    let checkpoint = open(&site, &holders, &sealed, &[0]);
    check_pagemap(&checkpoint.pagemap(0).unwrap(), &memory);
    let positions = holders.bytes.load(Ordering::SeqCst);
    assert!(positions < 5000, "{positions} bytes");
    // A page costs the checksums of its neighbours once.
    for from in [0x1003, 0x1200, 0x1800] {
        read(&checkpoint, &memory, from, 1).unwrap();
    }
    assert_eq!(holders.replies.load(Ordering::SeqCst), 2);
    let window = holders.bytes.load(Ordering::SeqCst) - positions;
    assert!(window < 40_000, "{window} bytes");
}

#[test]
fn a_node_of_the_release_before_sends_all_positions() {
    let site = Site::new(&[("a", "", "")]);
    let memory = memory(700);
    let sealed = site.dump_as(0, &memory, LAZY);
    let holders = holders(&site, "reader", true);
    let checkpoint = open(&site, &holders, &sealed, &[0]);
    check_pagemap(&checkpoint.pagemap(0).unwrap(), &memory);
    read_all(&checkpoint, &memory).unwrap();
    assert_eq!(holders.replies.load(Ordering::SeqCst), 1);
}

#[test]
fn what_is_not_the_checkpoints_is_refused_and_comes_from_another_holder() {
    let site = Site::new(&[("false", "", ""), ("true", "", "")]);
    let memory = memory(700);
    let sealed = site.dump_as(0, &memory, LAZY);
    site.copy(0, 1, &sealed);
    let holders = holders(&site, "reader", false);
    fn data(frames: &mut [ReceivedFrame]) -> impl Iterator<Item = &mut ReceivedFrame> {
        let is_data = |frame: &&mut ReceivedFrame| frame.header.kind == Kind::ImageData;
        frames.iter_mut().filter(is_data)
    }
    fn flipped(frame: &mut ReceivedFrame, at: usize) {
        let mut bytes = frame.payload.to_vec();
        let at = at % bytes.len();
        bytes[at] ^= 4;
        frame.payload = bytes.into();
    }
    let tampers: Vec<(&str, Tamper)> = vec![
        ("nothing", Box::new(|_, frames| frames.clear())),
        (
            "no proof",
            Box::new(|_, frames| {
                frames.retain(|frame| frame.header.kind != Kind::ImageData);
            }),
        ),
        (
            "no pages",
            Box::new(|_, frames| {
                frames.retain(|frame| frame.header.kind != Kind::Pages);
            }),
        ),
        (
            "half a proof",
            Box::new(|_, frames| {
                for frame in data(frames) {
                    frame.payload = frame.payload.slice(..frame.payload.len() / 2);
                }
            }),
        ),
        (
            "too much",
            Box::new(|_, frames| {
                if let Some(last) = data(frames).last().cloned() {
                    frames.extend(std::iter::repeat_n(last, 100));
                }
            }),
        ),
        (
            "two proofs",
            Box::new(|_, frames| frames.extend_from_within(..)),
        ),
        (
            "another digest",
            Box::new(|_, frames| {
                if let Some(last) = data(frames).last() {
                    let at = last.payload.len() - 1;
                    flipped(last, at);
                }
            }),
        ),
        (
            "another index",
            Box::new(|_, frames| data(frames).for_each(|frame| flipped(frame, 4))),
        ),
        (
            "another page",
            Box::new(|_, frames| {
                let mut pages = frames.iter_mut().filter(|f| f.header.kind == Kind::Pages);
                pages.by_ref().for_each(|frame| flipped(frame, 77));
            }),
        ),
        (
            "zeros",
            Box::new(|_, frames| {
                for frame in frames.iter_mut().filter(|f| f.header.kind == Kind::Pages) {
                    frame.header.kind = Kind::Zero;
                    frame.payload = Default::default();
                }
            }),
        ),
        (
            "the proof of another part",
            Box::new(|request, frames| {
                if request.proof && request.pages > 0 {
                    data(frames).for_each(|frame| frame.payload = frame.payload.slice(..12));
                }
            }),
        ),
    ];
    for (name, tamper) in tampers {
        *holders.tamper.lock() = Some(tamper);
        let checkpoint = open(&site, &holders, &sealed, &[0]);
        let read_alone = match checkpoint.pagemap(0) {
            Ok(pagemap) => {
                check_pagemap(&pagemap, &memory);
                read_all(&checkpoint, &memory)
            }
            Err(error) => Err(error),
        };
        let error = read_alone.expect_err(name);
        let expected = [ErrorCode::Corrupt, ErrorCode::Internal];
        assert!(expected.contains(&error.code()), "{name}: {error:?}");

        let checkpoint = open(&site, &holders, &sealed, &[0, 1]);
        check_pagemap(&checkpoint.pagemap(0).expect(name), &memory);
        read_all(&checkpoint, &memory).expect(name);
    }
}

#[test]
fn a_holder_that_dies_in_the_middle_is_gone_on_from() {
    let site = Site::new(&[("first", "", ""), ("second", "", "")]);
    let memory = memory(3000);
    let sealed = site.dump_as(0, &memory, LAZY);
    site.copy(0, 1, &sealed);
    let holders = holders(&site, "reader", false);
    let checkpoint = open(&site, &holders, &sealed, &[0, 1]);
    check_pagemap(&checkpoint.pagemap(0).unwrap(), &memory);
    let first = *memory.keys().next().unwrap();
    read(&checkpoint, &memory, first + 1000, 1).unwrap();
    site.nodes[0].die();
    read_all(&checkpoint, &memory).unwrap();
    assert!(!site.nodes[1].pages_asked().is_empty());
}

#[test]
fn a_damaged_map_is_read_from_another_holder() {
    let site = Site::new(&[("damaged", "", ""), ("whole", "", "")]);
    let memory = memory(700);
    let sealed = site.dump_as(0, &memory, LAZY);
    site.copy(0, 1, &sealed);
    // A leaf of the map: its first index, and a page's worth of neighbours.
    let leaf = (0x400_u64 + 8 * 20).to_le_bytes();
    let places = site.nodes[0].find(&leaf);
    assert!(!places.is_empty());
    places.iter().for_each(|at| site.nodes[0].flip(*at));
    let holders = holders(&site, "reader", false);
    let alone = open(&site, &holders, &sealed, &[0]);
    let first = 0x400 + 8 * 20;
    let error = read(&alone, &memory, first, 1).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Corrupt, "{error:?}");
    let checkpoint = open(&site, &holders, &sealed, &[0, 1]);
    read_all(&checkpoint, &memory).unwrap();
}
