use super::*;
use crate::objects::MemoryObjects;
use permafrost_medium::{OpenOptions, open_sparse_medium};

const BLOCK: u64 = 64 << 10;

struct Site {
    dir: tempfile::TempDir,
    objects: Arc<MemoryObjects>,
}

impl Site {
    fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            objects: Arc::default(),
        }
    }

    fn open(&self) -> ColdMedium {
        let path = self.dir.path().join("cold");
        let file = open_sparse_medium(&path, 1 << 20, &OpenOptions::default()).unwrap();
        let objects = Arc::clone(&self.objects) as Arc<dyn Objects>;
        let index = self.dir.path().join("index");
        ColdMedium::create_index(&index).unwrap();
        ColdMedium::open(file, Some(&path), &index, ([7; 16], BLOCK), objects).unwrap()
    }
}

fn page(salt: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    for (at, word) in page.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(salt << 32 | to_u64(at)).to_le_bytes());
    }
    page
}

fn fill(medium: &ColdMedium, block: u64) {
    let mut flushed = Flushed::new();
    for n in 0..16 {
        let at = block * BLOCK + n * PAGE_BYTES;
        // SAFETY: no one else has the medium.
        unsafe { medium.write_streaming(at, &page(block * 100 + n)).unwrap() };
    }
    medium
        .flush_streamed(block * BLOCK, BLOCK, &mut flushed)
        .unwrap();
    medium.fence(&mut flushed).unwrap();
}

fn read(medium: &ColdMedium, block: u64, n: u64) -> io::Result<[u8; PAGE_SIZE]> {
    let mut bytes = [0; PAGE_SIZE];
    medium.read(block * BLOCK + n * PAGE_BYTES, &mut bytes)?;
    Ok(bytes)
}

/// Moves all pages out but 0 and 5; 9 is dead.
fn move_out(medium: &ColdMedium, block: u64) -> io::Result<u64> {
    let out: Vec<u32> = (1..16).filter(|n| ![5, 9].contains(n)).collect();
    medium.move_out(block * BLOCK, BLOCK, &[0, 5], &out)
}

fn sweep(medium: &ColdMedium) -> u64 {
    medium.remove(&medium.unneeded(true).unwrap()).unwrap()
}

#[test]
fn a_block_is_moved_out_but_for_what_stays_and_read_from_its_object() {
    let site = Site::new();
    let medium = site.open();
    fill(&medium, 2);
    let stored = move_out(&medium, 2).unwrap();
    assert!(stored < BLOCK / 2 && medium.is_out(2 * BLOCK) && !medium.is_out(BLOCK));
    drop(medium);
    // The same after a restart.
    let medium = site.open();
    for n in 0..16 {
        let expected = if n == 9 {
            [0; PAGE_SIZE]
        } else {
            page(200 + n)
        };
        assert!(read(&medium, 2, n).unwrap() == expected, "page {n}");
    }
    let mut across = [0; 100];
    medium
        .read(2 * BLOCK + 6 * PAGE_BYTES - 50, &mut across)
        .unwrap();
    assert_eq!(across[..50], page(205)[PAGE_SIZE - 50..]);
    assert_eq!(across[50..], page(206)[..50]);
    // SAFETY: nobody writes to the medium.
    let (kept, out) = unsafe {
        (
            medium.bytes(2 * BLOCK + 5 * PAGE_BYTES, PAGE_SIZE).is_ok(),
            medium.bytes(2 * BLOCK, 2 * PAGE_SIZE).unwrap_err(),
        )
    };
    assert!(kept && NotRecalled::is(&out));
    assert!(medium.file().is_none(), "holes are not spliced");
}

#[test]
fn a_store_that_is_away_costs_what_is_out_until_it_is_back() {
    let site = Site::new();
    let medium = site.open();
    fill(&medium, 1);
    site.objects.set_away(true);
    let error = move_out(&medium, 1).unwrap_err();
    assert!(matches!(
        ColdError::of(&error),
        Some(ColdError::Away { .. })
    ));
    assert!(!medium.is_out(BLOCK) && read(&medium, 1, 3).unwrap() == page(103));
    site.objects.set_away(false);
    move_out(&medium, 1).unwrap();
    site.objects.set_away(true);
    drop(medium);
    let medium = site.open();
    assert!(read(&medium, 1, 5).unwrap() == page(105));
    let error = read(&medium, 1, 3).unwrap_err();
    assert!(matches!(
        ColdError::of(&error),
        Some(ColdError::Away { .. })
    ));
    site.objects.set_away(false);
    assert!(read(&medium, 1, 3).unwrap() == page(103));
}

#[test]
fn garbage_is_damage_and_a_page_that_is_healed_stays_in_the_file() {
    let site = Site::new();
    let medium = site.open();
    fill(&medium, 1);
    move_out(&medium, 1).unwrap();
    site.objects.change_all(|bytes| bytes[200] ^= 1);
    let error = read(&medium, 1, 3).unwrap_err();
    assert!(matches!(
        ColdError::of(&error),
        Some(ColdError::Damaged { .. })
    ));
    // SAFETY: nobody has borrowed it.
    unsafe {
        medium
            .rewrite_page(BLOCK + 3 * PAGE_BYTES, &page(103))
            .unwrap()
    };
    drop(medium);
    let medium = site.open();
    assert!(read(&medium, 1, 3).unwrap() == page(103));
    read(&medium, 1, 4).unwrap_err();
}

#[test]
fn objects_of_free_blocks_and_objects_that_no_entry_names_are_removed() {
    let site = Site::new();
    let medium = site.open();
    for block in 1..4 {
        fill(&medium, block);
        move_out(&medium, block).unwrap();
    }
    // As a crash leaves one, and another medium's.
    let stray = format!("{}/9-0000000000000001", medium.directory());
    site.objects.put(&stray, vec![1]).unwrap();
    site.objects.put("00/9-1", vec![1]).unwrap();
    // Its name is given up when the block is written to again.
    fill(&medium, 2);
    assert!(read(&medium, 2, 9).unwrap() == page(209));
    medium.forget(3 * BLOCK).unwrap();
    assert_eq!(sweep(&medium), 3);
    let left: Vec<_> = site.objects.all().into_keys().collect();
    assert_eq!(left.len(), 2);
    assert!(read(&medium, 1, 3).unwrap() == page(103));
    assert!(!medium.is_out(3 * BLOCK));
    assert_eq!(sweep(&medium), 0);
}
