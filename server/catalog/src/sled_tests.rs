//! Tests of the embedded catalog.

use super::*;

fn sealed(job: &str, generation: u64) -> Checkpoint {
    Checkpoint {
        job: job.into(),
        generation,
        id: format!("{job}-{generation}"),
        ..Checkpoint::default()
    }
}

#[test]
fn generations_are_ordered_and_never_reused() {
    let dir = tempfile::tempdir().unwrap();
    let (catalog, opened) = SledCatalog::open_or_replace(&dir.path().join("catalog")).unwrap();
    assert_eq!(opened, Opened::Created);
    for generation in [1, 2, 255, 256, 300] {
        catalog.put(&sealed("a", generation)).unwrap();
    }
    catalog.put(&sealed("ab", 900)).unwrap();
    assert_eq!(catalog.head("a").unwrap().unwrap().generation, 300);
    assert_eq!(catalog.list(Some("a")).unwrap().len(), 5);
    for (generation, older, newer) in [
        (1, 0, 2),
        (3, 2, 255),
        (256, 255, 300),
        (300, 256, 0),
        (u64::MAX, 300, 0),
    ] {
        let around = catalog.around("a", generation).unwrap();
        let number = |one: &Option<Checkpoint>| one.as_ref().map_or(0, |one| one.generation);
        assert_eq!(
            (number(&around.older), number(&around.newer)),
            (older, newer)
        );
    }
    catalog.remove(&sealed("a", 300)).unwrap();
    assert_eq!(catalog.head("a").unwrap().unwrap().generation, 256);
    assert_eq!(catalog.next_generation("a").unwrap(), 301);
    assert_eq!(catalog.next_generation("new").unwrap(), 1);
}

/// Counts the records that it decrypts; codes are in no order.
#[derive(Default)]
struct Scrambled(std::sync::atomic::AtomicUsize);

impl RecordCipher for Scrambled {
    fn name(&self, name: &[u8]) -> Vec<u8> {
        let hash = name.iter().fold(7_u128, |hash, byte| {
            (hash ^ u128::from(*byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
        });
        hash.to_be_bytes().to_vec()
    }

    fn seal(&self, _: &[u8], record: &[u8]) -> Vec<u8> {
        record.to_vec()
    }

    fn open(&self, _: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Some(sealed.to_vec())
    }
}

#[test]
fn a_page_of_an_encrypted_list_costs_what_it_shows() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog");
    let cipher = Arc::new(Scrambled::default());
    let open = || {
        SledCatalog::open_encrypted(&path, cipher.clone())
            .unwrap()
            .0
    };
    let catalog = open();
    let mut expected = Vec::new();
    for job in 0..40 {
        for generation in 1..=5 {
            let record = sealed(&format!("n/{job:02}"), generation);
            catalog.put(&record).unwrap();
            expected.push(record);
        }
    }
    catalog.put(&sealed("n/17-gone", 1)).unwrap();
    catalog.remove(&sealed("n/17-gone", 1)).unwrap();
    drop(catalog);
    let catalog = open();
    assert_eq!(catalog.list(None).unwrap(), expected);
    let reads = || cipher.0.swap(0, std::sync::atomic::Ordering::Relaxed);
    reads();
    let mut shown = Vec::new();
    let visit = &mut |record: Checkpoint| {
        shown.push(record);
        shown.len() < 8
    };
    catalog.visit_sealed(("n/17", 3), visit).unwrap();
    assert_eq!(shown, expected[88..96]);
    assert_eq!(reads(), 8);
    // A job that is gone, and one that never was.
    for (job, at) in [("n/17-gone", 90), ("n/17-never", 90), ("", 0)] {
        let mut first = None;
        let visit = &mut |record| {
            first = Some(record);
            false
        };
        catalog.visit_sealed((job, 0), visit).unwrap();
        assert_eq!(first.as_ref(), Some(&expected[at]));
    }
    catalog.remove(&sealed("n/18", 1)).unwrap();
    assert_eq!(catalog.list(None).unwrap().len(), 199);
}

#[test]
fn a_database_that_does_not_open_is_put_aside() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog");
    drop(SledCatalog::open_or_replace(&path).unwrap());
    for file in ["conf", "db"] {
        std::fs::write(path.join(file), b"not a database").unwrap();
    }
    let (catalog, opened) = SledCatalog::open_or_replace(&path).unwrap();
    let Opened::Replaced { aside, .. } = opened else {
        panic!("opened {opened:?}")
    };
    assert!(aside.join("conf").exists());
    assert!(catalog.list(None).unwrap().is_empty());
}

#[test]
fn a_database_that_another_has_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog");
    let (first, _) = SledCatalog::open_or_replace(&path).unwrap();
    first.put(&sealed("a", 1)).unwrap();
    let refused = SledCatalog::open_or_replace(&path).map(|(_, opened)| opened);
    assert!(
        matches!(refused, Err(CatalogError::InUse { .. })),
        "{refused:?}"
    );
    drop(first);
    let (again, opened) = SledCatalog::open_or_replace(&path).unwrap();
    assert_eq!(opened, Opened::Existing);
    assert_eq!(again.list(None).unwrap().len(), 1);
}

#[test]
fn a_lock_that_a_closed_database_still_has_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog");
    let open = || SledCatalog::open_or_replace(&path).unwrap();
    let (catalog, opened) = open();
    assert_eq!(opened, Opened::Created);
    catalog.put(&sealed("a", 1)).unwrap();
    drop(catalog);
    // The file that sled locks.
    let held = File::open(path.join("db")).unwrap();
    held.lock().unwrap();
    let releasing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(held);
    });
    let (catalog, opened) = open();
    assert_eq!(opened, Opened::Existing);
    assert_eq!(catalog.list(None).unwrap(), [sealed("a", 1)]);
    releasing.join().unwrap();
}
