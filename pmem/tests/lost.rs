//! Pages that the medium cannot give or take: an error to code that needs them, and no effect on other code.

#![allow(missing_docs, clippy::cast_possible_truncation)]
#![allow(
    unsafe_code,
    reason = "a mapping of the test's own, to fault outside every region"
)]

use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::Arc;

use permafrost_pmem::sim::SimMedium;
use permafrost_pmem::{
    CheckpointId, FormatOptions, LostPage, MapFault, MapRoot, Medium, OpenOptions, PAGE_SIZE,
    PageError, PageMap, RecoverOptions, Region, RunKind, ShadowError, StoredCheckpoint, StoredRun,
    open_medium,
};

const SEGMENT: u64 = 64 << 10;
const FORMAT: FormatOptions = FormatOptions {
    segment_bytes: SEGMENT as u32,
    journal_records: Some(32),
    uuid: None,
};
const CAPACITY: u64 = 32 * SEGMENT;

fn page(salt: u64) -> Vec<u8> {
    (0..PAGE_SIZE as u64 / 8)
        .flat_map(|i| (salt << 32 | i | 1 << 60).to_le_bytes())
        .collect()
}

/// Seals `pages` pages; gives their map.
fn seal(region: &Arc<Region>, id: u128, pages: u64) -> (Arc<StoredCheckpoint>, MapRoot) {
    let mut shadow = region.begin();
    let mut map = shadow.map();
    for index in 0..pages {
        shadow
            .append(&mut map, index, 0, &page(index), None)
            .unwrap();
    }
    let (root, _) = shadow.finish(map).unwrap();
    let id = CheckpointId::new(id);
    (shadow.seal(id, b"manifest", None).unwrap(), root)
}

/// Reads the pages of runs: returns the number that could be read, all right, and the first error.
fn read_runs(
    map: &PageMap,
    runs: impl Iterator<Item = Result<StoredRun, PageError>>,
) -> (u64, Option<PageError>) {
    let mut whole = 0;
    for run in runs {
        let run = match run {
            Ok(run) => run,
            Err(error) => return (whole, Some(error)),
        };
        for index in run.first_index..run.end_index() {
            match map.read_range(&run, index, 1) {
                Ok(bytes) => {
                    assert!(bytes == page(index), "page {index}");
                    whole += 1;
                }
                Err(error) => return (whole, Some(error)),
            }
        }
    }
    (whole, None)
}

fn read(checkpoint: &Arc<StoredCheckpoint>, root: &MapRoot) -> (u64, Option<PageError>) {
    let map = checkpoint.map(root);
    read_runs(&map, map.runs())
}

fn on_file(path: &Path) -> Arc<Region> {
    let medium = open_medium(path, CAPACITY, &OpenOptions::default()).unwrap();
    Region::format(Arc::clone(&medium), &FORMAT).unwrap();
    Region::open(medium).unwrap().0
}

fn simulated() -> (Arc<Region>, Arc<SimMedium>) {
    let medium = Arc::new(SimMedium::new(CAPACITY as usize));
    let shared = || Arc::clone(&medium) as Arc<dyn Medium>;
    Region::format(shared(), &FORMAT).unwrap();
    (Region::open(shared()).unwrap().0, medium)
}

fn reopened(medium: &SimMedium, lost: &[u64]) -> Arc<Region> {
    let medium = SimMedium::from_image(&medium.image());
    for &at in lost {
        medium.lose(at, 1);
    }
    Region::open(Arc::new(medium)).unwrap().0
}

/// Returns the byte offset of a page of the first run.
fn place(checkpoint: &Arc<StoredCheckpoint>, root: &MapRoot, index: u64) -> u64 {
    let run = checkpoint.map(root).lookup(index).unwrap().unwrap();
    let RunKind::Stored { location, .. } = run.kind else {
        panic!("{run:?}")
    };
    location.value() * PAGE_SIZE as u64 + (index - run.first_index) * PAGE_SIZE as u64
}

#[test]
fn a_file_truncated_under_its_readers_and_writers_is_an_error_to_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    let region = on_file(&path);
    let (first, first_root) = seal(&region, 1, 10);
    let (second, second_root) = seal(&region, 2, 40);
    let cut = place(&second, &second_root, 20);
    let map = second.map(&second_root);
    let runs: Vec<StoredRun> = map.runs().map(Result::unwrap).collect();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(cut).unwrap();

    assert_eq!(read(&first, &first_root).0, 10);
    // Map and checksums were read before.
    let again = || read_runs(&map, runs.iter().copied().map(Ok));
    let (whole, error) = again();
    assert_eq!(whole, 20);
    assert!(
        matches!(error, Some(PageError::Lost { index: 20, location }) if location.value() * PAGE_SIZE as u64 == cut),
        "{error:?}"
    );
    // Again, and on many threads: the page that the handler put there is never given out.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(again().0, 20));
        }
    });
    // The map's node comes behind its pages.
    let (whole, error) = read(&second, &second_root);
    let fault = MapFault::Unreadable;
    assert!(
        matches!(error, Some(PageError::MapCorrupt { fault: found, .. }) if found == fault),
        "{whole} {error:?}"
    );
    assert!(region.lost_pages() >= 1);

    // A dump fails with the cause, which names the medium.
    let mut shadow = region.begin();
    let mut map = shadow.map();
    let written = (0..200).try_for_each(|index| {
        let page = page(index);
        shadow.append(&mut map, index, 0, &page, None)
    });
    let failed = written.and_then(|()| shadow.flush());
    assert!(
        matches!(failed, Err(ShadowError::Io(_) | ShadowError::Full { .. })),
        "{failed:?}"
    );
    assert!(
        region
            .begin()
            .seal(CheckpointId::new(3), b"", None)
            .is_err()
    );
    assert_eq!(read(&first, &first_root).0, 10);
}

#[test]
fn a_fence_on_a_truncated_file_fails_the_region() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    let region = on_file(&path);
    let mut shadow = region.begin();
    let mut map = shadow.map();
    shadow.append(&mut map, 0, 0, &page(1), None).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(CAPACITY / 2).unwrap();
    assert!(shadow.flush().is_err());
    let failure = region.failure().unwrap().to_string();
    assert!(failure.contains("truncated"), "{failure}");
}

#[test]
fn a_page_lost_while_it_is_lent_is_found_afterwards() {
    let (region, medium) = simulated();
    let (checkpoint, root) = seal(&region, 1, 5);
    let map = checkpoint.map(&root);
    let run = map.lookup(0).unwrap().unwrap();
    assert!(map.read(&run).is_ok() && map.confirm(&run, 0, 5).is_ok());
    medium.lose(place(&checkpoint, &root, 3), 1);
    assert!(map.confirm(&run, 0, 3).is_ok());
    let lost = map.confirm(&run, 2, 2).unwrap_err();
    assert_eq!(lost.index(), Some(3));
}

#[test]
fn a_lost_page_that_is_healed_is_read_and_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    let region = on_file(&path);
    let (checkpoint, root) = seal(&region, 1, 10);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let lost = place(&checkpoint, &root, 6);
    let map = checkpoint.map(&root);
    let run = map.lookup(0).unwrap().unwrap();
    file.set_len(lost).unwrap();
    assert!(map.read_range(&run, 6, 1).is_err());
    // The file is as long as before, with all but the lost page.
    let rest = lost + PAGE_SIZE as u64;
    file.write_all_at(&whole[rest as usize..], rest).unwrap();
    assert!(map.read_range(&run, 6, 1).is_err(), "still lost");
    assert!(map.heal_page(6, &page(6).try_into().unwrap()).unwrap());
    assert_eq!(read(&checkpoint, &root).0, 10);
    assert_eq!(region.lost_pages(), 0);
    drop((checkpoint, map, region));
    let medium = open_medium(&path, 0, &OpenOptions::default()).unwrap();
    let (region, _) = Region::open(medium).unwrap();
    assert_eq!(
        read(&region.checkpoints()[0], &root).0,
        10,
        "in the file, too"
    );
}

#[test]
fn lost_pages_are_not_written_to_again() {
    let (region, medium) = simulated();
    // In the segment that is written next, in the middle, and all of the one after it.
    let (before, root) = seal(&region, 1, 3);
    let next = place(&before, &root, 0) / SEGMENT * SEGMENT + SEGMENT;
    medium.lose(next + 7 * PAGE_SIZE as u64, 1);
    medium.lose(next + SEGMENT, SEGMENT);
    let (checkpoint, root) = seal(&region, 2, 40);
    assert_eq!(read(&checkpoint, &root).0, 40);
    let retired = [next, next + SEGMENT];
    for index in 0..40 {
        let segment = place(&checkpoint, &root, index) / SEGMENT * SEGMENT;
        assert!(!retired.contains(&segment));
    }
    // A segment that is lost while it is being written: pages in it stay good, the rest goes to other segments.
    let mut shadow = region.begin();
    let mut map = shadow.map();
    for index in 0..20 {
        if index == 4 {
            let free = next + 5 * SEGMENT;
            medium.lose(free + 5 * PAGE_SIZE as u64, free);
        }
        shadow
            .append(&mut map, index, 0, &page(index), None)
            .unwrap();
    }
    let (root, _) = shadow.finish(map).unwrap();
    let checkpoint = shadow.seal(CheckpointId::new(3), b"", None).unwrap();
    assert_eq!(read(&checkpoint, &root).0, 20);
    assert_eq!(region.failure(), None);
}

#[test]
fn every_page_of_a_region_may_be_lost_when_it_is_opened() {
    let (region, medium) = simulated();
    let (checkpoint, root) = seal(&region, 1, 5);
    drop(seal(&region, 2, 5));
    region.close().unwrap();
    let first_segment = place(&checkpoint, &root, 0) / SEGMENT * SEGMENT;
    let pages = (0..first_segment + 3 * SEGMENT).step_by(PAGE_SIZE);
    let mut damaged = 0;
    for at in pages {
        let region = reopened(&medium, &[at]);
        let whole: Vec<_> = region.checkpoints();
        assert_eq!(region.journal_damage(), None, "{at:#x}");
        // A lost page of the journal is written anew.
        if (2 * PAGE_SIZE as u64..6 * PAGE_SIZE as u64).contains(&at) {
            assert_eq!(region.failure(), None, "{at:#x}");
        }
        assert_eq!(whole.len() + region.damaged().len(), 2, "{at:#x}");
        for checkpoint in whole {
            let read = (
                read(&checkpoint, &root),
                checkpoint.manifest(),
                checkpoint.check_root(),
            );
            damaged += u32::from(read.1.is_err() || !matches!(read.2, Ok(0)));
        }
    }
    assert!(damaged >= 4, "{damaged}");
    // Both copies of a root.
    let roots: Vec<u64> = (first_segment..CAPACITY)
        .step_by(PAGE_SIZE)
        .filter(|&at| medium.image()[at as usize..].starts_with(b"PFCKROOT"))
        .collect();
    let region = reopened(&medium, &roots[..2]);
    assert_eq!(region.damaged().len(), 1);
    assert_eq!(region.checkpoints().len(), 1);
}

#[test]
fn a_region_that_cannot_be_marked_as_open_is_read_all_the_same() {
    let (region, medium) = simulated();
    let (_, root) = seal(&region, 1, 5);
    let again = SimMedium::from_image(&medium.image());
    again.fail_now();
    let (region, _) = Region::open(Arc::new(again)).unwrap();
    assert!(region.failure().is_some());
    assert_eq!(read(&region.checkpoints()[0], &root).0, 5);
    assert!(region.delete(CheckpointId::new(1)).is_err());
    let (region, _) = Region::open_with(
        Arc::new(SimMedium::from_image(&medium.image())),
        RecoverOptions::default().read_only(true),
    )
    .unwrap();
    let mut now = vec![0; CAPACITY as usize];
    region.medium().read(0, &mut now).unwrap();
    assert!(now == medium.image(), "opened for reading, and written to");
}

#[test]
fn lost_pages_are_named_by_their_place() {
    let medium = SimMedium::new(CAPACITY as usize);
    medium.lose(3 * PAGE_SIZE as u64 + 1, 1);
    let error = medium
        .read(PAGE_SIZE as u64, &mut [0; 3 * PAGE_SIZE])
        .unwrap_err();
    assert_eq!(
        LostPage::of(&error),
        Some(LostPage {
            at: 3 * PAGE_SIZE as u64
        })
    );
    assert_eq!(LostPage::of(&std::io::Error::from_raw_os_error(5)), None);
    assert_eq!(medium.lost_pages(), 1);
}

/// Helper of [`a_fault_elsewhere_ends_the_process_as_before`], which runs it in a process of its own.
#[test]
fn fault_elsewhere() {
    if std::env::var_os("FAULT_ELSEWHERE").is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let _region = on_file(&dir.path().join("region"));
    let file = tempfile::tempfile().unwrap();
    file.set_len(2 * PAGE_SIZE as u64).unwrap();
    // SAFETY: no other code has the file; the test truncates it under the mapping on purpose.
    let map = unsafe { memmap2::Mmap::map(&file).unwrap() };
    file.set_len(0).unwrap();
    std::process::exit(i32::from(map[PAGE_SIZE]));
}

#[test]
fn a_fault_elsewhere_ends_the_process_as_before() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fault_elsewhere", "--nocapture"])
        .env("FAULT_ELSEWHERE", "1")
        .output()
        .unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
}
