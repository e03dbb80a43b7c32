//! Regions as builds have written them: a build must read what was written by those of its format before it.
//!
//! `fixtures/region-2.zst` is a region of format 2, compressed. `PERMAFROST_WRITE_FIXTURES=1 cargo test -p
//! permafrost-pmem --test fixture` writes it anew: until the format is released, when it has changed on purpose; from
//! then on never, and the next format has a file of its own.

#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use permafrost_pmem::layout::FORMAT_VERSION;
use permafrost_pmem::{
    CheckpointId, FormatOptions, MapRoot, OpenOptions, PAGE_SIZE, Region, RunKind,
    StoredCheckpoint, open_medium,
};

const SEGMENT: u32 = 64 << 10;
const SLOTS: u64 = 24;
/// Attribute of a checkpoint that was pinned.
const PINNED: u32 = 1;

/// Content of a checkpoint: the salt of each page, 0 for a page of zeros.
type Content = BTreeMap<u64, u64>;

/// Page that compresses well.
fn page(salt: u64) -> Vec<u8> {
    salt.to_le_bytes().repeat(PAGE_SIZE / 8)
}

fn roots(checkpoint: &Arc<StoredCheckpoint>) -> Option<Vec<MapRoot>> {
    let manifest = checkpoint.manifest().ok()?;
    let roots = manifest.chunks(32);
    roots.map(|root| MapRoot::try_from(root).ok()).collect()
}

fn seal(region: &Arc<Region>, id: u128, parent: Option<u128>, content: &Content) {
    let parent = parent.map(|id| region.checkpoint(CheckpointId::new(id)).unwrap());
    let mut parent = parent.map(|parent| parent.map(&roots(&parent).unwrap()[0]).cursor());
    let mut shadow = region.begin();
    let mut map = shadow.map();
    for (&index, &salt) in content {
        let appended = shadow.append(&mut map, index, 7, &page(salt), parent.as_mut());
        appended.unwrap();
    }
    let (root, _) = shadow.finish(map).unwrap();
    let sealed = shadow.seal(CheckpointId::new(id), &root.to_bytes(), None);
    sealed.unwrap();
}

fn content(pages: std::ops::Range<u64>, salt: u64) -> Content {
    pages
        .map(|index| (index, if index % 10 == 9 { 0 } else { salt + index }))
        .collect()
}

/// Contents of the fixture's checkpoints. The first is full, the second refers to it, and both to segments that were
/// packed.
fn contents() -> BTreeMap<u128, Content> {
    let full = content(0..40, 1000);
    let mut delta = full.clone();
    delta.extend(content(15..20, 2000));
    BTreeMap::from([(1, full), (2, delta), (9, content(500..507, 9000))])
}

fn write(path: &Path) {
    let bytes = (SLOTS + 1) * u64::from(SEGMENT);
    let medium = open_medium(path, bytes, &OpenOptions::default()).unwrap();
    let options = FormatOptions {
        segment_bytes: SEGMENT,
        journal_records: Some(64),
        uuid: None,
    };
    Region::format(Arc::clone(&medium), &options).unwrap();
    let region = Region::open(medium).unwrap().0;
    let contents = contents();
    // Referred to here and there, and removed.
    let large = content(0..90, 1000);
    seal(&region, 100, None, &large);
    seal(&region, 1, Some(100), &contents[&1]);
    seal(&region, 2, Some(1), &contents[&2]);
    seal(&region, 9, None, &contents[&9]);
    region.set_attrs(CheckpointId::new(9), PINNED).unwrap();
    region.delete(CheckpointId::new(100)).unwrap();
    let mut survey = region.survey(&roots);
    assert!(region.clean(&mut survey, u64::MAX).unwrap().slots > 0);
    drop(survey);
    region.close().unwrap();
}

fn assert_content(region: &Region, id: u128, content: &Content) {
    let checkpoint = region.checkpoint(CheckpointId::new(id)).unwrap();
    let map = checkpoint.map(&roots(&checkpoint).unwrap()[0]);
    let mut found = Content::new();
    for run in map.runs().map(Result::unwrap) {
        assert_eq!(run.flags, 7);
        match run.kind {
            RunKind::Zero => found.extend((run.first_index..run.end_index()).map(|at| (at, 0))),
            RunKind::Stored { .. } => {
                let bytes = map.read(&run).unwrap();
                for (bytes, index) in bytes.chunks(PAGE_SIZE).zip(run.first_index..) {
                    assert!(bytes == page(content[&index]), "page {index} of {id}");
                    found.insert(index, content[&index]);
                }
            }
        }
    }
    assert_eq!(&found, content, "{id}");
}

fn open(path: &Path) -> Arc<Region> {
    let medium = open_medium(path, 0, &OpenOptions::default()).unwrap();
    Region::open(medium).unwrap().0
}

#[test]
fn a_region_that_was_written_before_is_read_and_written_to() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("region");
    let fixture = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join(format!("tests/fixtures/region-{FORMAT_VERSION}.zst"));
    if std::env::var_os("PERMAFROST_WRITE_FIXTURES").is_some() {
        write(&path);
        let region = std::fs::read(&path).unwrap();
        std::fs::write(&fixture, zstd::encode_all(&*region, 19).unwrap()).unwrap();
    }
    let compressed = std::fs::read(&fixture).unwrap();
    let mut file = std::fs::File::options();
    // A region that others may read is refused.
    let mut file = file
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&path)
        .unwrap();
    zstd::stream::copy_decode(&*compressed, &mut file).unwrap();

    let region = open(&path);
    let contents = contents();
    let listed: Vec<_> = region.listed().into_iter().collect();
    assert_eq!(listed.len(), contents.len());
    for (&id, content) in &contents {
        assert_content(&region, id, content);
    }
    let pinned = listed.iter().filter(|entry| entry.attrs & PINNED != 0);
    let pinned: Vec<_> = pinned.map(|entry| entry.id).collect();
    assert_eq!(pinned, [CheckpointId::new(9)]);

    let more = content(0..60, 1000);
    seal(&region, 3, Some(2), &more);
    region.delete(CheckpointId::new(1)).unwrap();
    region.close().unwrap();
    drop(region);
    let region = open(&path);
    assert!(region.checkpoint(CheckpointId::new(1)).is_none());
    assert_content(&region, 2, &contents[&2]);
    assert_content(&region, 3, &more);
}
