//! A store with very many checkpoints: its start with its catalog and without, and what looks at some of them.
//!
//! Each checkpoint has a page and a manifest as short as they come; 100 are of one job. The region and the catalog are
//! in a temporary directory, so `TMPDIR=/dev/shm` puts both on tmpfs. A checkpoint takes 12 KiB there, and 256 bytes of
//! journal for twice their number.
//!
//! `TMPDIR=/dev/shm cargo bench -p permafrost-benches --bench million [CHECKPOINTS]`

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use permafrost_benches::noise;
use permafrost_catalog::{Catalog, ListPart, Positioned, SledCatalog};
use permafrost_pmem::{CheckpointId, FormatOptions, OpenOptions, PAGE_SIZE, Region, open_medium};
use permafrost_protocol::control::request;
use permafrost_protocol::manifest::{AddressSpace, Kind, Manifest, VERSION};
use permafrost_store::{RegionLocation, Store, StoreParts};
use prost::Message;

const CHECKPOINTS: u64 = 1_000_000;
/// Checkpoints of a job.
const GENERATIONS: u64 = 100;

fn main() {
    let given = std::env::args().find_map(|argument| argument.parse().ok());
    let checkpoints: u64 = given.unwrap_or(CHECKPOINTS);
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("region");
    println!("{checkpoints} checkpoints");
    timed("make the region", || fill(&path, checkpoints));
    let region = timed("open the region", || open(&path));
    let store = timed("start the store without a catalog", || {
        start(dir.path(), region)
    });
    look(&store, checkpoints);
    drop(store);
    for _ in 0..3 {
        let region = timed("open the region", || open(&path));
        let store = timed("start the store", || start(dir.path(), region));
        assert_eq!(store.count().0, checkpoints);
        drop(store);
    }
}

fn timed<T>(what: &str, run: impl FnOnce() -> T) -> T {
    let (began, processor) = (Instant::now(), processor_s());
    let result = run();
    let (took, processor) = (began.elapsed().as_secs_f64(), processor_s() - processor);
    println!(
        "{what:>40} {:>12.3} ms, {:>12.3} ms of processors",
        took * 1e3,
        processor * 1e3
    );
    result
}

/// Processor time of the process, seconds.
fn processor_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("stat");
    let fields: Vec<u64> = stat
        .split(' ')
        .filter_map(|field| field.parse().ok())
        .collect();
    // Behind pid and the fields before: utime and stime, hundredths of a second.
    let (user, system) = (fields[10], fields[11]);
    (user + system) as f64 / 100.0
}

fn fill(path: &Path, checkpoints: u64) {
    let records = u32::try_from((checkpoints * 2).next_multiple_of(32)).expect("a number");
    let bytes = checkpoints * 12_500 + (1 << 30) + 256 * u64::from(records);
    let medium = open_medium(path, bytes, &OpenOptions::default()).expect("open the medium");
    let options = FormatOptions {
        journal_records: Some(records),
        ..FormatOptions::default()
    };
    Region::format(Arc::clone(&medium), &options).expect("format");
    let (region, _) = Region::open(medium).expect("open");
    let contents = noise(1024);
    let (contents, _) = contents.as_chunks::<PAGE_SIZE>();
    for number in 0..checkpoints {
        let mut shadow = region.begin();
        let mut map = shadow.map();
        let content = &contents[(number % 1024) as usize];
        shadow
            .append(&mut map, 0, 0, content, None)
            .expect("append");
        let (root, stats) = shadow.finish(map).expect("finish the map");
        let manifest = Manifest {
            version: VERSION,
            job: format!(
                "team-{}/batch-{:05}",
                number / 100_000,
                number / GENERATIONS
            ),
            generation: number % GENERATIONS + 1,
            created_unix_ms: 1_700_000_000_000 + number,
            kind: Kind::Full.into(),
            spaces: vec![AddressSpace {
                map_root: root.to_bytes().to_vec(),
                pages: stats.pages,
                ..AddressSpace::default()
            }],
            session: format!("{number:032x}"),
            added_bytes: shadow.added_bytes(),
            ..Manifest::default()
        };
        let id = CheckpointId::random();
        let sealed = shadow.seal(id, &manifest.encode_to_vec(), None);
        sealed.expect("seal");
    }
    region.close().expect("close");
}

fn open(path: &Path) -> Arc<Region> {
    let medium = open_medium(path, 0, &OpenOptions::default()).expect("open the medium");
    Region::open(medium).expect("open").0
}

fn start(dir: &Path, region: Arc<Region>) -> Arc<Store> {
    let catalog = timed("of that: open the catalog", || {
        SledCatalog::open_or_replace(&dir.join("catalog")).expect("open catalog")
    });
    let (catalog, _) = catalog;
    let catalog = Positioned::new(Box::new(catalog), Arc::clone(&region));
    let place = RegionLocation {
        path: dir.join("region"),
        guarantee: region.medium().guarantee().clone(),
    };
    let parts = StoreParts::new(region, place, Box::new(catalog) as Box<dyn Catalog>);
    Store::new(parts).expect("start")
}

fn look(store: &Store, checkpoints: u64) {
    let part = |list: request::List| {
        let part = ListPart::new(&list).expect("a part");
        store.part(&part).expect("list").checkpoints.len()
    };
    let all = request::List::default;
    let middle = format!(
        "team-{0}/batch-{1:05}",
        checkpoints / 200_000,
        checkpoints / 2 / GENERATIONS
    );
    timed("count", || store.count());
    timed("list 100", || {
        part(request::List {
            limit: 100,
            ..all()
        })
    });
    timed("list 100 in the middle", || {
        part(request::List {
            limit: 100,
            after: format!("{middle}@1"),
            ..all()
        })
    });
    timed("list a job", || {
        part(request::List {
            job: middle.clone(),
            ..all()
        })
    });
    timed("list everything", || {
        store.records(None).expect("list").len()
    });
    timed("survey", || store.gc(true, &mut |_, _| ()).expect("survey"));
    timed("survey again", || {
        store.gc(true, &mut |_, _| ()).expect("survey")
    });
}
