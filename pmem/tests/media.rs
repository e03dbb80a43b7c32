//! Regions of several media, and regions that grow, on real files and on the simulator.

#![allow(missing_docs, clippy::cast_possible_truncation)]

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use permafrost_pmem::sim::{SimMedium, mix};
use permafrost_pmem::{
    CheckpointId, FormatOptions, FoundMember, MapRoot, MediaError, Medium, MediumError,
    MediumState, OpenError, OpenOptions, PAGE_SIZE, RecoverOptions, Region, RegionMember,
    ShadowError, StoredCheckpoint, TierName, member_uuid, open_medium,
};

const SEGMENT: u64 = 64 << 10;
const PAGES: u64 = SEGMENT / PAGE_SIZE as u64;

fn tier(name: &str) -> TierName {
    name.parse().unwrap()
}

fn options() -> FormatOptions {
    FormatOptions {
        segment_bytes: SEGMENT as u32,
        journal_records: Some(64),
        uuid: None,
    }
}

fn file(path: &Path, bytes: u64) -> Arc<dyn Medium> {
    let options = OpenOptions {
        require_dax: false,
        populate: false,
    };
    open_medium(path, bytes, &options).unwrap()
}

fn find(member: &RegionMember) -> Result<FoundMember, String> {
    let options = OpenOptions::default();
    let medium = open_medium(&member.path, 0, &options).map_err(|error| error.to_string())?;
    Ok(FoundMember {
        medium,
        path: member.path.clone(),
    })
}

/// A directory with a region, and files for more media.
struct Site {
    dir: tempfile::TempDir,
}

impl Site {
    fn new(bytes: u64) -> (Self, Arc<Region>) {
        // In memory: so are the files that are added.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let site = Self { dir };
        let medium = file(&site.path("first"), bytes);
        Region::format(Arc::clone(&medium), &options()).unwrap();
        let region = Region::open(medium).unwrap().0;
        (site, region)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn add(&self, region: &Region, name: &str, bytes: u64, to: &str) -> usize {
        let path = self.path(name);
        let medium = file(&path, bytes);
        region.add_medium(medium, &path, &tier(to)).unwrap()
    }

    fn open(&self) -> Arc<Region> {
        let medium = file(&self.path("first"), 0);
        let (region, _) = Region::open_all(medium, RecoverOptions::default(), &mut find).unwrap();
        region
    }
}

fn page(salt: u64) -> Vec<u8> {
    (0..PAGE_SIZE as u64 / 8)
        .flat_map(|i| mix(salt ^ i << 48).to_le_bytes())
        .collect()
}

/// Seals a checkpoint of `pages` pages, of which those of the parent are shared whose number is not a multiple of
/// `step`.
fn seal(
    region: &Arc<Region>,
    id: u128,
    pages: u64,
    parent: Option<(&Arc<StoredCheckpoint>, u64)>,
) -> Result<Arc<StoredCheckpoint>, ShadowError> {
    let mut shadow = region.begin();
    let mut map = shadow.map();
    let mut cursor = parent.map(|(parent, step)| (parent.map(&root(parent)).cursor(), step));
    for index in 0..pages {
        match &mut cursor {
            Some((cursor, step)) if !index.is_multiple_of(*step) => {
                shadow.reference(&mut map, index, 1, cursor)?;
            }
            _ => shadow.append(&mut map, index, 0, &page(id as u64 + index), None)?,
        }
    }
    let root = shadow.finish(map)?.0;
    Ok(shadow
        .seal(CheckpointId::new(id), &root.to_bytes(), None)
        .unwrap())
}

fn root(checkpoint: &Arc<StoredCheckpoint>) -> MapRoot {
    MapRoot::try_from(&*checkpoint.manifest().unwrap()).unwrap()
}

/// Compares a checkpoint with what `seal` wrote: pages whose number is a multiple of `step` are its own, others
/// `parent`'s.
fn assert_content(region: &Region, id: u128, pages: u64, parent: u128, step: u64) {
    let checkpoint = region.checkpoint(CheckpointId::new(id)).unwrap();
    let map = checkpoint.map(&root(&checkpoint));
    let mut seen = 0;
    for run in map.runs() {
        let run = run.unwrap();
        let bytes = map.read(&run).unwrap();
        for (content, index) in bytes.chunks(PAGE_SIZE).zip(run.first_index..) {
            let from = if index.is_multiple_of(step) {
                id
            } else {
                parent
            };
            assert!(content == page(from as u64 + index), "page {index} of {id}");
            seen += 1;
        }
    }
    assert_eq!(seen, pages);
}

fn used(region: &Region, number: usize) -> u64 {
    let media = region.media();
    media
        .iter()
        .find(|m| m.number == number)
        .unwrap()
        .used_bytes
        / SEGMENT
}

#[test]
fn a_region_grows_under_its_readers() {
    let (site, region) = Site::new(20 * SEGMENT);
    seal(&region, 1, 30, None).unwrap();
    let checkpoint = region.checkpoint(CheckpointId::new(1)).unwrap();
    let map = checkpoint.map(&root(&checkpoint));
    let run = map.lookup(3).unwrap().unwrap();
    let lent = map.read(&run).unwrap();
    let before = region.usage();
    // Each puts slots where the table was.
    for bytes in [30, 50, 90] {
        region.grow_medium(0, bytes * SEGMENT).unwrap();
        seal(&region, u128::from(bytes), 10 * PAGES, None).unwrap();
    }
    assert!(region.usage().segments >= before.segments + 65);
    assert!(matches!(
        region.grow_medium(0, 90 * SEGMENT),
        Err(MediaError::Grow(_))
    ));
    assert_eq!(lent[..PAGE_SIZE], page(1 + run.first_index));
    map.confirm(&run, run.first_index, run.pages).unwrap();
    let usage = region.usage();
    drop((checkpoint, map));
    drop(region);
    let region = site.open();
    assert_eq!(region.usage().segments, usage.segments);
    assert_content(&region, 1, 30, 1, 1);
    for id in [30, 50, 90] {
        assert_content(&region, id, 10 * PAGES, id, 1);
    }
}

#[test]
fn a_region_that_has_no_room_to_grow_is_as_it_was() {
    let image = vec![0; 40 * SEGMENT as usize];
    let medium = SimMedium::several(&[(&image, 20 * SEGMENT as usize)]).remove(0);
    let medium: Arc<dyn Medium> = Arc::new(medium);
    Region::format(Arc::clone(&medium), &options()).unwrap();
    let region = Region::open(Arc::clone(&medium)).unwrap().0;
    let before = region.usage();
    let refused = region.grow_medium(0, 41 * SEGMENT).unwrap_err();
    assert!(matches!(refused, MediaError::NoRoom(_)), "{refused}");
    assert_eq!((region.usage(), region.failure()), (before, None));
    assert_eq!(medium.capacity_bytes(), 20 * SEGMENT);
    seal(&region, 1, 3, None).unwrap();
    region.grow_medium(0, 40 * SEGMENT).unwrap();
    assert!(region.usage().segments > before.segments);

    // A file system without room.
    let (site, region) = Site::new(20 * SEGMENT);
    let number = site.add(&region, "second", 5 * SEGMENT, "hdd");
    let room = rustix::fs::statvfs(site.dir.path()).unwrap();
    let too_much = (room.f_blocks + 1) * room.f_frsize;
    for (number, name, bytes) in [(0, "first", 20), (number, "second", 5)] {
        let refused = region.grow_medium(number, too_much).unwrap_err();
        let too_large = matches!(refused, MediaError::TooFewNumbers { .. });
        let expected = matches!(refused, MediaError::NoRoom(_)) || number > 0 && too_large;
        assert!(expected, "{refused}");
        let len = std::fs::metadata(site.path(name)).unwrap().len();
        assert_eq!(len, bytes * SEGMENT);
    }
    seal(&region, 1, 3, None).unwrap();
    drop(region);
    assert_content(&site.open(), 1, 3, 1, 1);
}

#[test]
fn dumps_go_to_the_fastest_medium_with_room_and_deltas_reach_across() {
    let (site, region) = Site::new(12 * SEGMENT);
    // The first is of memory, and so as fast as can be.
    let slow = site.add(&region, "slow", 9 * SEGMENT, "hdd");
    let fast = site.add(&region, "fast", 5 * SEGMENT, "ssd");
    assert_eq!((slow, fast), (1, 2));
    let room = region.usage();
    let first = region.media()[0].capacity_bytes;
    assert_eq!(room.capacity_bytes, first + 8 * SEGMENT + 4 * SEGMENT);
    let parent = seal(&region, 1000, (first / SEGMENT - 1) * (PAGES - 1), None).unwrap();
    assert_eq!((used(&region, fast), used(&region, slow)), (0, 0));
    // Spills over into the next tier, and the one after that.
    seal(&region, 2000, 7 * (PAGES - 1), Some((&parent, 1))).unwrap();
    assert_eq!(used(&region, fast), 4);
    assert!(used(&region, slow) > 0);
    let child = seal(&region, 3000, 40, Some((&parent, 7))).unwrap();
    drop((parent, child));
    // Rooms of all are used up before a dump fails.
    let full = seal(&region, 4000, 100 * PAGES, None).unwrap_err();
    assert!(matches!(full, ShadowError::Full { .. }), "{full}");
    drop(region);
    let region = site.open();
    assert_content(&region, 2000, 7 * (PAGES - 1), 1000, 1);
    assert_content(&region, 3000, 40, 1000, 7);
}

#[test]
fn a_medium_is_drained_and_removed_under_readers() {
    let (site, region) = Site::new(9 * SEGMENT);
    let number = site.add(&region, "second", 7 * SEGMENT, "hdd");
    let parent = seal(&region, 1, 10 * (PAGES - 1), None).unwrap();
    seal(&region, 5, 30, Some((&parent, 3))).unwrap();
    assert!(used(&region, number) > 0);
    assert!(matches!(
        region.remove_medium(number),
        Err(MediaError::InUse { .. })
    ));
    region.grow_medium(0, 40 * SEGMENT).unwrap();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    for index in 0..5 {
        shadow.append(&mut map, index, 0, &page(9), None).unwrap();
    }
    drop((shadow, map));
    let map = parent.map(&root(&parent));
    let lent: Vec<_> = map.runs().map(|run| run.unwrap()).collect();
    let lent: Vec<_> = lent
        .iter()
        .map(|run| (run, map.read(run).unwrap()))
        .collect();
    region.set_draining(number, true).unwrap();
    let drained = region.drain_step(number, u64::MAX).unwrap();
    assert!(drained.moved_bytes > 0 && drained.left_bytes > 0);
    let waiting = region.drain_step(number, u64::MAX).unwrap();
    assert!(waiting.waiting, "the reader has pages of it");
    assert!(matches!(
        region.remove_medium(number),
        Err(MediaError::InUse { .. })
    ));
    for (run, bytes) in &lent {
        for (content, index) in bytes.chunks(PAGE_SIZE).zip(run.first_index..) {
            assert!(content == page(1 + index));
        }
    }
    drop(lent);
    drop((map, parent));
    assert_eq!(region.drain_step(number, u64::MAX).unwrap().left_bytes, 0);
    region.remove_medium(number).unwrap();
    assert_eq!(region.media().len(), 1);
    // Its file is free: for another region, too.
    let (_other, another) = Site::new(9 * SEGMENT);
    let path = site.path("second");
    another
        .add_medium(file(&path, 0), &path, &tier("ssd"))
        .unwrap();
    drop(region);
    let region = site.open();
    assert_content(&region, 1, 10 * (PAGES - 1), 1, 1);
    assert_content(&region, 5, 30, 1, 3);
}

#[test]
fn slots_move_between_media_under_readers() {
    let (site, region) = Site::new(20 * SEGMENT);
    let number = site.add(&region, "second", 20 * SEGMENT, "hdd");
    let parent = seal(&region, 1, 10 * (PAGES - 1), None).unwrap();
    seal(&region, 500, 30, Some((&parent, 3))).unwrap();
    let before = used(&region, 0);
    let map = parent.map(&root(&parent));
    let run = map.runs().next().unwrap().unwrap();
    let lent = map.read(&run).unwrap();
    let slots = region.occupied_slots();
    for slot in &slots {
        assert_eq!(slot.medium(), 0);
        assert_eq!(region.move_slot(slot, number).unwrap(), SEGMENT);
        assert_eq!(region.move_slot(slot, number).unwrap(), 0, "it has left");
    }
    assert!(used(&region, 0) > 0, "the reader has pages there");
    assert!(lent[..PAGE_SIZE] == page(1)[..]);
    drop((run, map, parent));
    assert_eq!((used(&region, 0), used(&region, number)), (0, before));
    assert_content(&region, 1, 10 * (PAGES - 1), 1, 1);
    // None is moved to a medium that takes nothing.
    region.set_draining(number, true).unwrap();
    let slots = region.occupied_slots();
    let full = region.move_slot(&slots[0], number);
    assert!(matches!(full, Err(MediaError::Clean(_))));
    region.set_draining(number, false).unwrap();
    for slot in slots.iter().take(2) {
        region.move_slot(slot, 0).unwrap();
    }
    drop(region);
    let region = site.open();
    assert_eq!(used(&region, 0), 2);
    assert_content(&region, 1, 10 * (PAGES - 1), 1, 1);
    assert_content(&region, 500, 30, 1, 3);
}

#[test]
fn a_dump_in_a_draining_medium_is_waited_for() {
    let (site, region) = Site::new(9 * SEGMENT);
    let number = site.add(&region, "second", 7 * SEGMENT, "hdd");
    let first = region.media()[0].capacity_bytes / SEGMENT;
    seal(&region, 1, (first - 1) * (PAGES - 1), None).unwrap();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    for index in 0..3 * PAGES {
        shadow
            .append(&mut map, index, 0, &page(100 + index), None)
            .unwrap();
    }
    assert!(used(&region, number) > 0);
    region.set_draining(number, true).unwrap();
    assert!(region.drain_step(number, u64::MAX).unwrap().waiting);
    region.set_draining(number, false).unwrap();
    let root = shadow.finish(map).unwrap().0;
    drop(
        shadow
            .seal(CheckpointId::new(100), &root.to_bytes(), None)
            .unwrap(),
    );
    region.delete(CheckpointId::new(1)).unwrap();
    region.set_draining(number, true).unwrap();
    let drained = region.drain_step(number, u64::MAX).unwrap();
    assert_eq!(drained.left_bytes, 0);
    assert_content(&region, 100, 3 * PAGES, 100, 1);
    assert_eq!(region.media()[1].state, MediumState::Draining);
    drop(region);
    let region = site.open();
    assert_eq!(region.media()[1].state, MediumState::Draining);
    assert_content(&region, 100, 3 * PAGES, 100, 1);
}

#[test]
fn a_missing_medium_is_left_alone_until_it_is_back_or_given_up() {
    let (site, region) = Site::new(9 * SEGMENT);
    let number = site.add(&region, "second", 20 * SEGMENT, "hdd");
    let room = region.media()[0].capacity_bytes / SEGMENT;
    // The first in one medium, the second in the other, the third in both.
    let first = seal(&region, 1, (room - 2) * (PAGES - 1), None).unwrap();
    seal(&region, 1000, 4 * PAGES, None).unwrap();
    seal(&region, 2000, 8, Some((&first, 2))).unwrap();
    drop(first);
    drop(region);
    let away = site.path("away");
    std::fs::rename(site.path("second"), &away).unwrap();
    let before = std::fs::read(&away).unwrap();
    // The daemon makes no file where it finds none.
    let mut find = |_: &RegionMember| Err("not there".to_owned());
    let medium = file(&site.path("first"), 0);
    let (region, report) = Region::open_all(medium, RecoverOptions::default(), &mut find).unwrap();
    assert_eq!((report.checkpoints, report.damaged), (1, 2));
    assert_eq!(region.failure(), None);
    assert_content(&region, 1, (room - 2) * (PAGES - 1), 1, 1);
    let listed = region.media();
    assert_eq!(listed[1].problem.as_deref(), Some("not there"));
    for refused in [
        region.grow_medium(number, 30 * SEGMENT),
        region.remove_medium(number),
        region.set_draining(number, true),
        region.drain_step(number, 1).map(drop),
    ] {
        assert!(refused.is_err());
    }
    // The pages that the third shares with it are kept.
    region.delete(CheckpointId::new(1)).unwrap();
    while seal(&region, u128::from(mix(region.position())), 5, None).is_ok() {}
    // Back at another path, while the region is open.
    assert_eq!(
        region
            .add_medium(file(&away, 0), &away, &tier("ssd"))
            .unwrap(),
        number
    );
    let listed = region.media();
    assert_eq!((&listed[1].path, &listed[1].problem), (&away, &None));
    assert_eq!(listed[1].tier, tier("hdd"), "its own");
    drop(region);
    assert_eq!(std::fs::read(&away).unwrap(), before);
    let region = site.open();
    assert!(region.damaged().is_empty());
    assert_content(&region, 1000, 4 * PAGES, 1000, 1);
    assert_content(&region, 2000, 8, 1, 2);
    // Given up: what is on it is damaged for good, and can be removed.
    assert!(matches!(
        region.accept_lost_medium(number),
        Err(MediaError::Present { .. })
    ));
    drop(region);
    std::fs::remove_file(&away).unwrap();
    let region = site.open();
    region.accept_lost_medium(number).unwrap();
    assert_eq!(region.media().len(), 1);
    // Segments still name it, so another one has another number.
    assert_ne!(site.add(&region, "third", 5 * SEGMENT, "ssd"), number);
    for id in [1000, 2000] {
        assert!(region.checkpoint(CheckpointId::new(id)).is_none());
        region.delete(CheckpointId::new(id)).unwrap();
    }
    drop(region);
    let region = site.open();
    assert!(region.damaged().is_empty());
}

#[test]
fn a_number_is_not_reused_while_a_segment_names_it() {
    let (site, region) = Site::new(9 * SEGMENT);
    let number = site.add(&region, "second", 20 * SEGMENT, "hdd");
    let room = region.media()[0].capacity_bytes / SEGMENT;
    // Roots on the first medium, pages on the second.
    let mut shadow = region.begin();
    let mut map = shadow.map();
    for index in 0..(room + 1) * PAGES {
        shadow
            .append(&mut map, index, 0, &page(index), None)
            .unwrap();
    }
    shadow.flush().unwrap();
    let filler = region.begin();
    drop(filler);
    let root = shadow.finish(map).unwrap().0;
    region.grow_medium(0, 20 * SEGMENT).unwrap();
    shadow
        .seal(CheckpointId::new(1), &root.to_bytes(), None)
        .unwrap();
    drop(region);
    std::fs::remove_file(site.path("second")).unwrap();
    let region = site.open();
    region.accept_lost_medium(number).unwrap();
    if region.checkpoint(CheckpointId::new(1)).is_some() {
        assert_eq!(site.add(&region, "third", 5 * SEGMENT, "ssd"), number + 1);
    }
}

#[test]
fn headers_are_repaired_from_each_other_and_without_one_the_medium_is_left_out() {
    let (site, region) = Site::new(9 * SEGMENT);
    site.add(&region, "second", 5 * SEGMENT, "hdd");
    let room = region.media()[0].capacity_bytes / SEGMENT;
    seal(&region, 1, (room + 1) * PAGES, None).unwrap();
    drop(region);
    let path = site.path("second");
    let good = std::fs::read(&path).unwrap();
    for copy in 0..2 {
        let mut damaged = good.clone();
        damaged[copy * PAGE_SIZE + 20] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        drop(site.open());
        assert!(std::fs::read(&path).unwrap() == good, "copy {copy}");
    }
    let mut damaged = good.clone();
    damaged[20] ^= 1;
    damaged[PAGE_SIZE + 20] ^= 1;
    std::fs::write(&path, &damaged).unwrap();
    let region = site.open();
    assert!(region.media()[1].problem.is_some());
    let refused = region.add_medium(file(&path, 0), &path, &tier("hdd"));
    assert!(matches!(refused, Err(MediaError::NotBlank)), "{refused:?}");
    drop(region);
    // Shorter than it was: left out as well.
    std::fs::write(&path, &good[..4 * SEGMENT as usize]).unwrap();
    let region = site.open();
    assert!(
        region.media()[1]
            .problem
            .as_deref()
            .unwrap()
            .contains("truncated")
    );
    drop(region);
    std::fs::write(&path, &good).unwrap();
    let region = site.open();
    assert_content(&region, 1, (room + 1) * PAGES, 1, 1);
}

#[test]
fn files_that_are_something_else_are_refused_and_left_as_they_are() {
    let (site, region) = Site::new(9 * SEGMENT);
    let (other, others_region) = Site::new(9 * SEGMENT);
    other.add(&others_region, "member", 5 * SEGMENT, "hdd");
    drop(others_region);
    let foreign = other.path("member");
    let refused = region.add_medium(file(&foreign, 0), &foreign, &tier("hdd"));
    assert!(matches!(refused, Err(MediaError::Foreign { .. })));
    let first = other.path("first");
    let refused = region.add_medium(file(&first, 0), &first, &tier("hdd"));
    assert!(matches!(refused, Err(MediaError::Region)));
    // The member is no region of its own.
    assert!(matches!(
        Region::open(file(&foreign, 0)),
        Err(OpenError::Member)
    ));
    let text = site.path("text");
    for at in [0, 9000, SEGMENT as usize] {
        let mut content = vec![0; 4 * SEGMENT as usize];
        content[at..at + 4].copy_from_slice(b"mine");
        std::fs::write(&text, &content).unwrap();
        std::fs::set_permissions(&text, std::fs::Permissions::from_mode(0o600)).unwrap();
        let refused = region.add_medium(file(&text, 0), &text, &tier("hdd"));
        assert!(matches!(refused, Err(MediaError::NotBlank)), "{at}");
        assert!(std::fs::read(&text).unwrap() == content);
    }
    // Too small, and a path that is too long for the list.
    let medium: Arc<dyn Medium> = Arc::new(SimMedium::new(SEGMENT as usize));
    let refused = region.add_medium(Arc::clone(&medium), Path::new("x"), &tier("hdd"));
    assert!(matches!(refused, Err(MediaError::Grow(_))));
    let long = "x".repeat(217);
    let refused = region.add_medium(medium, Path::new(&long), &tier("hdd"));
    assert!(matches!(refused, Err(MediaError::PathTooLong { .. })));
    assert_eq!(region.media().len(), 1);
}

#[test]
fn a_file_is_a_medium_once() {
    let (site, region) = Site::new(9 * SEGMENT);
    site.add(&region, "second", 5 * SEGMENT, "hdd");
    let path = site.path("second");
    let link = site.path("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let options = OpenOptions::default();
    // By whichever name, and by whichever process: the lock is the file's.
    for name in [&path, &link] {
        assert!(matches!(
            open_medium(name, 0, &options),
            Err(MediumError::InUse { .. })
        ));
        let uuid = region.media()[1].uuid;
        assert_eq!(member_uuid(name).unwrap(), Some(uuid));
    }
    assert_eq!(member_uuid(&site.path("first")).unwrap(), None);
    assert_eq!(member_uuid(site.dir.path()).unwrap(), None);
    // A copy of it has another lock, and the same header.
    let copy = site.path("copy");
    std::fs::copy(&path, &copy).unwrap();
    let refused = region.add_medium(file(&copy, 0), &copy, &tier("hdd"));
    assert!(matches!(refused, Err(MediaError::Listed { number: 1 })));
}

#[test]
fn the_first_medium_stays() {
    let (site, region) = Site::new(9 * SEGMENT);
    assert!(matches!(
        region.set_draining(0, true),
        Err(MediaError::First)
    ));
    assert!(matches!(region.remove_medium(0), Err(MediaError::First)));
    assert!(matches!(
        region.accept_lost_medium(0),
        Err(MediaError::First)
    ));
    assert!(matches!(
        region.grow_medium(3, 1 << 30),
        Err(MediaError::Unknown { number: 3 })
    ));
    site.add(&region, "second", 5 * SEGMENT, "hdd");
    region.grow_medium(1, 9 * SEGMENT + 5).unwrap();
    assert_eq!(region.media()[1].size_bytes, 9 * SEGMENT);
    region.close().unwrap();
    assert!(matches!(
        region.grow_medium(1, 20 * SEGMENT),
        Err(MediaError::Journal(_))
    ));
    drop(region);
    assert_eq!(site.open().media()[1].size_bytes, 9 * SEGMENT);
}
