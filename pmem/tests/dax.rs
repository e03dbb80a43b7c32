//! DAX tests: `PERMAFROST_DAX_DIR` names a directory on a file system mounted with it. With
//! `PERMAFROST_DAX_EXPECT=errno` the tests expect instead that MAP_SYNC is refused there with that errno.

#![allow(missing_docs)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use permafrost_pmem::sim::mix;
use permafrost_pmem::{
    CheckpointId, FormatOptions, MediumError, MediumKind, OpenOptions, PAGE_SIZE, Region,
    open_medium,
};

/// Error number of the kernel where MAP_SYNC is not available.
const EOPNOTSUPP: i32 = 95;

fn options(require_dax: bool) -> OpenOptions {
    OpenOptions {
        require_dax,
        ..OpenOptions::default()
    }
}

#[test]
fn where_there_is_none_the_requirement_is_refused_by_errno() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("region");
    let refused = open_medium(&path, 1 << 20, &options(true)).map(|_| ());
    let expected = EOPNOTSUPP;
    assert!(
        matches!(&refused, Err(MediumError::DaxRefused { errno, .. }) if *errno == expected),
        "{refused:?}"
    );
    let medium = open_medium(&path, 1 << 20, &options(false)).unwrap();
    assert_eq!(
        (medium.kind(), medium.guarantee().dax_errno),
        (MediumKind::File, Some(expected))
    );
    assert!(medium.guarantee().volatile);
    let text = medium.guarantee().to_string();
    assert!(
        text.contains("tmpfs") && text.contains("DAX refused"),
        "{text}"
    );
}

#[test]
fn a_checkpoint_on_dax() {
    let Some(dir) = std::env::var_os("PERMAFROST_DAX_DIR").map(PathBuf::from) else {
        println!("SKIPPED: PERMAFROST_DAX_DIR is not set; `cargo xtask guest` has DAX");
        return;
    };
    let path = dir.join("pmem-test-region");
    let _ = std::fs::remove_file(&path);
    let expect: Option<i32> = std::env::var("PERMAFROST_DAX_EXPECT")
        .ok()
        .map(|e| e.parse().unwrap());
    let size = 128 << 20;
    let medium = match (expect, open_medium(&path, size, &options(true))) {
        (None, medium) => medium.unwrap(),
        (Some(expected), Err(MediumError::DaxRefused { errno, .. })) if errno == expected => {
            let medium = open_medium(&path, size, &options(false)).unwrap();
            assert_eq!(medium.guarantee().dax_errno, Some(expected));
            medium
        }
        (Some(errno), other) => panic!("errno {errno} expected: {:?}", other.map(|_| ())),
    };
    let dax = expect.is_none();
    println!("{}", medium.guarantee());
    assert_eq!(
        medium.kind(),
        if dax {
            MediumKind::Dax
        } else {
            MediumKind::File
        }
    );
    assert_eq!(medium.guarantee().instruction.is_some(), dax);
    Region::format(Arc::clone(&medium), &FormatOptions::default()).unwrap();
    let (region, _) = Region::open(medium).unwrap();
    let pages: Vec<u8> = (0..8192 * PAGE_SIZE as u64 / 8)
        .flat_map(|i| mix(i).to_le_bytes())
        .collect();
    let start = Instant::now();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    for (chunk, index) in pages.chunks(64 * PAGE_SIZE).zip((0..).step_by(64)) {
        shadow.append(&mut map, index, 0, chunk, None).unwrap();
    }
    let (root, _) = shadow.finish(map).unwrap();
    let written = start.elapsed();
    shadow
        .seal(CheckpointId::new(1), b"manifest", None)
        .unwrap();
    println!(
        "32 MiB written in {written:?}, sealed after {:?}",
        start.elapsed()
    );
    drop(region);
    let (region, report) = Region::open(open_medium(&path, 0, &options(dax)).unwrap()).unwrap();
    assert!(!report.clean);
    let checkpoint = region.checkpoint(CheckpointId::new(1)).unwrap();
    assert_eq!(checkpoint.manifest().unwrap(), b"manifest");
    let map = checkpoint.map(&root);
    let read: Vec<u8> = map
        .runs()
        .flat_map(|run| map.read(&run.unwrap()).unwrap().to_vec())
        .collect();
    assert!(read == pages);
    region.close().unwrap();
    std::fs::remove_file(&path).unwrap();
}
