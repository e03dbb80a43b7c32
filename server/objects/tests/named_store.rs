//! A cold medium over the object store that the environment names: Google Cloud Storage, Azure, or an emulator of one.
//!
//! `PERMAFROST_TEST_STORE=gs://BUCKET/PREFIX cargo test -p permafrost-objects --test named_store -- --ignored`, with the
//! credentials that `permafrostd` would take (docs/command.md). Everything below the prefix is the test's own.

#![allow(missing_docs)]

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

use permafrost_cold::{ColdMedium, ObjectError};
use permafrost_medium::{Medium, OpenOptions, PAGE_SIZE, open_sparse_medium};
use permafrost_objects::connect;

const BLOCK: u64 = 64 << 10;

#[test]
#[ignore = "needs PERMAFROST_TEST_STORE"]
fn a_cold_medium_works_over_the_named_store() {
    let address = std::env::var("PERMAFROST_TEST_STORE").expect("PERMAFROST_TEST_STORE");
    let store = connect(&address).unwrap();
    assert!(matches!(store.get("a/1"), Err(ObjectError::Missing)));
    store.put("a/1", vec![7; 1 << 20]).unwrap();
    store.put("a/2", vec![8]).unwrap();
    store.put("b/3", vec![9]).unwrap();
    assert_eq!(store.get("a/1").unwrap(), vec![7; 1 << 20]);
    // Overwritten, as a marker is.
    store.put("a/2", vec![8, 8]).unwrap();
    let names = || -> Vec<_> {
        let listed = store.list("a").unwrap().into_iter();
        let mut all: Vec<_> = listed.map(|o| (o.name, o.len_bytes)).collect();
        all.sort();
        all
    };
    assert_eq!(
        names(),
        [("a/1".to_owned(), 1 << 20), ("a/2".to_owned(), 2)]
    );
    store.delete("a/1").unwrap();
    store.delete("a/1").unwrap();
    assert_eq!(names(), [("a/2".to_owned(), 2)]);
    assert!(store.list("nothing").unwrap().is_empty());
    for name in ["a/2", "b/3"] {
        store.delete(name).unwrap();
    }

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cold");
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path);
    let file = file.unwrap();
    file.set_len(1 << 20).unwrap();
    let page = |n: u8| [n; PAGE_SIZE];
    for n in 0..16 {
        let at = BLOCK + u64::from(n) * PAGE_SIZE as u64;
        file.write_all_at(&page(n), at).unwrap();
    }
    drop(file);
    let index = dir.path().join("index");
    ColdMedium::create_index(&index).unwrap();
    let open = || {
        let file = open_sparse_medium(&path, 1 << 20, &OpenOptions::default()).unwrap();
        let store = connect(&address).unwrap();
        ColdMedium::open(file, Some(&path), &index, ([7; 16], BLOCK), store).unwrap()
    };
    let medium = open();
    let out: Vec<u32> = (1..16).collect();
    let cold = medium.cold().unwrap();
    cold.move_out(BLOCK, BLOCK, &[0], &out).unwrap();
    drop(medium);
    let medium = open();
    let mut read = page(0);
    let at = BLOCK + 5 * PAGE_SIZE as u64;
    medium.read(at, &mut read).unwrap();
    assert!(read == page(5));
    let cold = medium.cold().unwrap();
    assert!(cold.is_out(BLOCK) && cold.absent().unwrap().is_empty());
    cold.forget(BLOCK).unwrap();
    assert_eq!(cold.remove(&cold.unneeded(true).unwrap()).unwrap(), 1);
    assert!(cold.unneeded(true).unwrap().is_empty());
}
