//! Nodes with a store each that serve fetches, with faults on demand.

mod serving;

use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_catalog::SledCatalog;
use permafrost_cluster::repair::{Puller, RepairLimits, Throttle};
use permafrost_clustered::ClusteredStore;
use permafrost_criu::source::PageRun;
use permafrost_identity::{Authority, CertificateOrder, ReloadingIdentity, Role};
use permafrost_metering::costs::{Costs, CostsConfig};
use permafrost_pmem::{FormatOptions, OpenOptions, PAGE_SIZE, Region, open_medium};
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::message::{Commit, request};
use permafrost_store::{CopyRequest, Fetched, RegionLocation, Store, StoreParts};
use permafrost_transport::peer::{Endpoint, Handler, Network, PeerOptions};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use self::serving::{Sent, Serving};

const REGION_BYTES: u64 = 24 << 20;

pub(crate) struct Node {
    pub(crate) store: Arc<Store>,
    pub(crate) serving: Arc<Serving>,
    pub(crate) puller: Arc<Puller>,
    pub(crate) throttle: Arc<Throttle>,
    region: PathBuf,
}

type Addresses = Arc<Mutex<HashMap<String, SocketAddr>>>;

/// Nodes of one cluster.
pub(crate) struct Site {
    runtime: Runtime,
    authority: Authority,
    directory: TempDir,
    addresses: Addresses,
}

impl Site {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(&directory.path().join("ca"), "test", false).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        Self {
            runtime,
            authority,
            directory,
            addresses: Addresses::default(),
        }
    }

    /// Makes a node that is running, and found by its name.
    pub(crate) fn node(&self, name: &str) -> Node {
        let options = PeerOptions {
            reconnect: Duration::from_secs(1),
            ..PeerOptions::default()
        };
        let directory = self.directory.path().join(name);
        std::fs::create_dir(&directory).unwrap();
        let region_path = directory.join("region");
        let medium = open_medium(&region_path, REGION_BYTES, &OpenOptions::default()).unwrap();
        let format = FormatOptions {
            segment_bytes: 64 << 10,
            ..FormatOptions::default()
        };
        Region::format(Arc::clone(&medium), &format).unwrap();
        let guarantee = medium.guarantee().clone();
        let region = Region::open(medium).unwrap().0;
        let (catalog, _) = SledCatalog::open_or_replace(&directory.join("catalog")).unwrap();
        let place = RegionLocation {
            path: region_path.clone(),
            guarantee,
        };
        let store = Store::new(StoreParts::new(region, place, Box::new(catalog))).unwrap();
        let identity = directory.join("identity");
        let order = CertificateOrder::new(name, Role::Node);
        self.authority.issue(&order, &identity, false).unwrap();
        let identity = Arc::new(ReloadingIdentity::load(&identity).unwrap());
        let serving = Arc::new(Serving {
            store: ClusteredStore::new(Arc::clone(&store), None, Arc::new(())),
            faults: Mutex::default(),
            sent: Sent::default(),
            endpoint: Mutex::default(),
        });
        let endpoint = Endpoint::serve(
            self.runtime.handle(),
            (Ipv4Addr::LOCALHOST, 0).into(),
            Arc::clone(&identity),
            Arc::clone(&serving) as Arc<dyn Handler>,
            options.clone(),
        );
        let endpoint = Arc::new(endpoint.unwrap());
        let address = endpoint.local_address().unwrap();
        self.addresses.lock().insert(name.to_owned(), address);
        *serving.endpoint.lock() = Some(endpoint);
        let addresses = Arc::clone(&self.addresses);
        let network = Network::new(
            self.runtime.handle().clone(),
            (Ipv4Addr::LOCALHOST, 0).into(),
            identity,
            "",
            Arc::new(move |node: &str| addresses.lock().get(node).copied()),
            options,
        );
        let throttle = Throttle::of(&store, RepairLimits::default());
        let puller = Puller::new(
            Arc::clone(&store),
            network.unwrap(),
            name,
            Arc::clone(&throttle),
            Costs::new(CostsConfig::default()),
        );
        Node {
            store,
            serving,
            puller: Arc::new(puller),
            throttle,
            region: region_path,
        }
    }
}

/// Pages of the one address space by index.
pub(crate) type Pages = BTreeMap<u64, [u8; PAGE_SIZE]>;

/// Returns a page with unique contents; zeros for 0.
pub(crate) fn page(salt: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    if salt > 0 {
        for (word, at) in page.as_chunks_mut::<8>().0.iter_mut().zip(1_u64..) {
            *word = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ at).to_le_bytes();
        }
    }
    page
}

pub(crate) fn id(number: u64) -> String {
    format!("{number:032x}")
}

impl Node {
    /// Makes a published checkpoint that only this node holds.
    pub(crate) fn make(&self, number: u64, job: &str, generation: u64, pages: &Pages) -> Vec<u8> {
        let request = CopyRequest {
            session: [u8::try_from(number).unwrap(); 16],
            job: job.to_owned(),
            parent: String::new(),
            compared: std::collections::HashMap::new(),
        };
        let mut dump = self.store.open_copy(request).unwrap();
        dump.space(SpaceId::process(7), 65_537).unwrap();
        for (index, page) in pages {
            if page.iter().all(|byte| *byte == 0) {
                dump.zero(*index, 4, 1).unwrap();
            } else {
                dump.pages(*index, 4, page).unwrap();
            }
        }
        dump.close().unwrap();
        let image = |dump: &mut permafrost_store::CopyDump, name: &str, bytes: &[u8]| {
            let len = bytes.len() as u64;
            dump.image(name, len, &mut &bytes[..]).unwrap();
        };
        image(&mut dump, "inventory.img", b"inventory");
        image(&mut dump, "empty.img", b"");
        image(&mut dump, "big.img", &[9; 300_001]);
        let content_digest = dump.prepare().unwrap().to_vec();
        let session = dump.session().to_owned();
        dump.commit(&Commit {
            deadline_ms: 0,
            checkpoint: id(number),
            content_digest: content_digest.clone(),
            job: job.to_owned(),
            generation,
            parent_generation: generation.saturating_sub(1),
            created_unix_ms: 1_700_000_000_000 + number,
            kind: if generation == 0 { 2 } else { 0 },
            origin: None,
            session,
            taken_by: "node n1".to_owned(),
        })
        .unwrap();
        self.store.publish(&id(number)).unwrap();
        content_digest
    }

    /// Returns this node's checkpoints, without a cluster.
    pub(crate) fn clustered(&self) -> Arc<ClusteredStore> {
        Arc::clone(&self.serving.store)
    }

    /// Returns all pages and images as this node reads them, each verified.
    pub(crate) fn read(&self, number: u64) -> Result<(Pages, BTreeMap<String, usize>), String> {
        let fetch = self.store.open_fetch(&id(number), "");
        let fetch = fetch.map_err(|error| error.to_string())?;
        let mut pages = Pages::new();
        for run in fetch.runs(0, 0, 0) {
            match run.map_err(|error| error.to_string())? {
                Fetched::Own(PageRun::Pages {
                    first_index, bytes, ..
                }) => {
                    for (page, index) in bytes.chunks(PAGE_SIZE).zip(first_index..) {
                        pages.insert(index, page.try_into().unwrap());
                    }
                }
                Fetched::Own(PageRun::Zero {
                    first_index,
                    pages: count,
                    ..
                }) => pages.extend((first_index..first_index + count).map(|i| (i, page(0)))),
                Fetched::Parent { .. } => panic!("there is no parent"),
            }
        }
        let mut images = BTreeMap::new();
        for image in &fetch.manifest().images {
            let mut len = 0;
            let read = fetch.image(&image.name, |piece| {
                len += piece.len();
                Ok(())
            });
            read.map_err(|error| error.to_string())?;
            images.insert(image.name.clone(), len);
        }
        Ok((pages, images))
    }

    /// Flips one bit of a stored page, at every position in the region.
    pub(crate) fn damage(&self, salt: u64) {
        let wanted = page(salt);
        let mut bytes = std::fs::read(&self.region).unwrap();
        let pages = bytes.chunks_mut(PAGE_SIZE).enumerate();
        let file = std::fs::File::options().write(true).open(&self.region);
        let file = file.unwrap();
        let mut damaged = 0;
        for (at, found) in pages {
            if *found == wanted {
                let byte = found[500] ^ 1;
                file.write_all_at(&[byte], (at * PAGE_SIZE + 500) as u64)
                    .unwrap();
                damaged += 1;
            }
        }
        assert!(damaged > 0, "page {salt} is not there");
    }

    /// Flips a bit of a page of `big.img`.
    pub(crate) fn damage_image(&self) {
        let bytes = std::fs::read(&self.region).unwrap();
        let mut pages = bytes.chunks(PAGE_SIZE).enumerate();
        let nines = |page: &[u8]| page.iter().all(|&byte| byte == 9);
        let (at, _) = pages.rfind(|(_, page)| nines(page)).unwrap();
        let file = std::fs::File::options().write(true).open(&self.region);
        file.unwrap()
            .write_all_at(&[8], (at * PAGE_SIZE + 500) as u64)
            .unwrap();
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.store.region().usage().free_bytes
    }

    pub(crate) fn mark(&self, number: u64) -> (bool, bool) {
        let marks = self.store.marks();
        let mark = marks.iter().find(|mark| mark.id == id(number)).unwrap();
        (mark.published, mark.provisional)
    }
}

/// Returns a pull request for a listed checkpoint.
pub(crate) fn pull(number: u64, digest: &[u8], from: &[&str]) -> request::Pull {
    request::Pull {
        checkpoint: id(number),
        from: from.iter().map(|&node| node.to_owned()).collect(),
        published: true,
        content_digest: digest.to_vec(),
        ..request::Pull::default()
    }
}

/// Returns so many pages, every fifth of zeros, with a gap in the middle.
pub(crate) fn pages(salt: u64, count: u64) -> Pages {
    let index = |at| if at < count / 2 { 16 + at } else { 5000 + at };
    let salted = |at: u64| if at.is_multiple_of(5) { 0 } else { salt + at };
    (0..count).map(|at| (index(at), page(salted(at)))).collect()
}
