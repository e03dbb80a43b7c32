//! Pages and images: the content of dumps, and a node's copy of it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;

use permafrost_clustered::ClusteredStore;
use permafrost_criu::frontend::{PageSink, SinkError};
use permafrost_criu::source::PageRun;
use permafrost_pmem::PAGE_SIZE;
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::images::write_mappings;
use permafrost_protocol::pageserver::{PE_PRESENT, SpaceId};
use permafrost_store::{ContentDigest, Fetched, SessionRequest, SessionSink};

/// Pages of an address space by index.
pub(crate) type Pages = BTreeMap<u64, [u8; PAGE_SIZE]>;

/// Returns a page with unique contents.
pub(crate) fn page(salt: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    if salt > 0 {
        for (word, at) in page.as_chunks_mut::<8>().0.iter_mut().zip(1_u64..) {
            *word = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ at).to_le_bytes();
        }
    }
    page
}

pub(crate) fn request(job: &str, seal_follows: bool) -> SessionRequest {
    SessionRequest {
        job: job.to_owned(),
        pre_dump: false,
        pre_copy: false,
        seal_follows,
        origin: None,
        no_parent: false,
        parent_images: true,
        from_here: true,
        taken_by: "node".to_owned(),
    }
}

/// Sends a process's pages, each on its own, as CRIU would.
pub(crate) fn send(sink: &mut SessionSink, space: SpaceId, pages: &Pages) -> Result<(), SinkError> {
    sink.open(space)?;
    for (index, page) in pages {
        sink.pages(index * PAGE_SIZE as u64, PE_PRESENT, page)?;
    }
    Ok(())
}

/// Makes a complete dump of one process.
pub(crate) fn dump(store: &ClusteredStore, job: &str, pages: &Pages) -> Result<Checkpoint, String> {
    let session = store
        .open_session(request(job, true))
        .map_err(|error| error.to_string())?;
    let mut sink = session.start(store.local(), Box::new(|| {})).unwrap();
    let sent = send(&mut sink, SpaceId::process(7), pages);
    sent.and_then(|()| sink.close())
        .map_err(|error| error.to_string())?;
    store
        .seal_session(&session.id, images(&[7]))
        .map_err(|error| error.to_string())
}

thread_local! {
    /// Images directories of a test, which exist as long as its thread.
    static IMAGES: RefCell<Vec<tempfile::TempDir>> = const { RefCell::new(Vec::new()) };
}

/// Makes an images directory for these processes.
pub(crate) fn images(pids: &[u32]) -> OwnedFd {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    write("inventory.img", b"inventory");
    write("empty.img", b"");
    write("big.img", &[9; 300_001]);
    for pid in pids {
        write(&format!("core-{pid}.img"), &pid.to_le_bytes());
        write(&format!("mm-{pid}.img"), &write_mappings(&[]));
    }
    let fd = OwnedFd::from(File::open(dir.path()).unwrap());
    IMAGES.with_borrow_mut(|kept| kept.push(dir));
    fd
}

/// Index, flags and bytes of a page.
type OnePage = (u64, u16, Vec<u8>);

/// Everything that a node has of a checkpoint: pages with index and flags by space, images by name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Whole {
    spaces: Vec<(i32, u64, u32, Vec<OnePage>)>,
    images: BTreeMap<String, Vec<u8>>,
    digest: ContentDigest,
}

impl Whole {
    pub(crate) fn of(store: &ClusteredStore, id: &str) -> Self {
        let fetch = store.local().open_fetch(id, "").unwrap();
        let mut spaces = Vec::new();
        for (place, space) in fetch.manifest().spaces.iter().enumerate() {
            let mut pages = Vec::new();
            for run in fetch.runs(place, 0, 0) {
                match run.unwrap() {
                    Fetched::Own(PageRun::Pages {
                        first_index,
                        flags,
                        bytes,
                    }) => {
                        for (page, index) in bytes.chunks(PAGE_SIZE).zip(first_index..) {
                            pages.push((index, flags, page.to_vec()));
                        }
                    }
                    Fetched::Own(PageRun::Zero {
                        first_index,
                        flags,
                        pages: count,
                    }) => {
                        for index in first_index..first_index + count {
                            pages.push((index, flags, vec![0; PAGE_SIZE]));
                        }
                    }
                    Fetched::Parent { .. } => panic!("there is no parent"),
                }
            }
            spaces.push((space.space_type, space.id, space.pages_id, pages));
        }
        let mut images = BTreeMap::new();
        for image in &fetch.manifest().images {
            let mut bytes = Vec::new();
            let all = fetch.image(&image.name, |piece| {
                bytes.extend_from_slice(piece);
                Ok(())
            });
            all.unwrap();
            images.insert(image.name.clone(), bytes);
        }
        Self {
            spaces,
            images,
            digest: fetch.content_digest(),
        }
    }

    /// Returns the pages of the first space.
    pub(crate) fn pages(&self) -> Pages {
        let pages = self.spaces[0].3.iter();
        pages
            .map(|(index, _, page)| (*index, page.as_slice().try_into().unwrap()))
            .collect()
    }
}
