//! Media that fail: the simulator must detect one that leaves out a flush or fence, and the region must report one
//! that fails.

use std::sync::Arc;

use permafrost_pmem::layout::RECORD_BYTES;
use permafrost_pmem::sim::{MediumEvent, Replay, SimMedium};
use permafrost_pmem::{
    CheckpointId, CleanError, Cleaned, JournalError, MapRoot, Region, SealError,
};

use crate::cut_everywhere;
use crate::model::{Pages, Sealed, State, check, page, recover};
use crate::scenario::{Played, Player, roots};

/// Draws enough that each of a handful of pending chunks is lost in one and kept in another.
const DRAWS: u64 = 48;

/// Returns a region with one checkpoint of three segments.
fn prepared() -> Player {
    let mut player = Player::new(1);
    player.format();
    player.open();
    seal(&mut player, 1, 40, None).unwrap();
    player
}

/// Dumps and seals; the last of the pages are flushed apart if `flush`.
fn dump(
    player: &mut Player,
    id: u128,
    pages: u64,
    replaces: Option<CheckpointId>,
    flush: bool,
) -> Result<(), SealError> {
    let region = player.region();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    let mut expected = Pages::new();
    for index in 0..pages {
        let salt = player.rng.next();
        shadow.append(&mut map, index, 0, &page(salt), None)?;
        expected.push((index, 0, salt));
        if flush && index == pages / 2 {
            shadow.flush()?;
        }
    }
    let (root, _): (MapRoot, _) = shadow.finish(map)?;
    let id = CheckpointId::new(id);
    let manifest = root.to_bytes().to_vec();
    let mut state = player.current();
    replaces.map(|replaced| state.remove(&replaced));
    state.insert(
        id,
        Sealed {
            attrs: 0,
            manifest: manifest.clone(),
            objects: vec![expected],
        },
    );
    player.in_flight(state);
    shadow.seal(id, &manifest, replaces)?;
    player.acknowledge_in_flight();
    Ok(())
}

/// Seals without a fence of the data's own: the seal's first fence covers all ranges.
fn seal(
    player: &mut Player,
    id: u128,
    pages: u64,
    replaces: Option<CheckpointId>,
) -> Result<(), SealError> {
    dump(player, id, pages, replaces, false)
}

fn delete(player: &mut Player, id: u128) -> Result<(), JournalError> {
    let mut state = player.current();
    state.remove(&CheckpointId::new(id));
    player.in_flight(state);
    player.region().delete(CheckpointId::new(id))?;
    player.acknowledge_in_flight();
    Ok(())
}

pub(crate) fn points(player: &Player) -> u64 {
    player.medium.flushes() + player.medium.fences()
}

fn has_both_copies(image: &[u8]) -> Result<(), String> {
    let medium = Arc::new(SimMedium::from_image(image));
    let (_, report) = Region::open(medium).map_err(|e| e.to_string())?;
    match report.records_repaired {
        0 => Ok(()),
        repaired => Err(format!("{repaired} records have one copy")),
    }
}

/// Returns true if the simulator notices that `operation` is done without the flush or fence `n`.
pub(crate) fn is_caught(
    n: u64,
    draws: u64,
    mut player: Player,
    operation: impl Fn(&mut Player),
) -> bool {
    let before = player.medium.image();
    let _ = player.medium.take_log();
    player.states.drain(..player.states.len() - 1);
    player.medium.skip(n);
    operation(&mut player);
    let played = Played {
        log: player.medium.take_log(),
        states: player.states,
        cleaned_slots: 0,
    };
    let after = |_, image: &[u8], allowed: &[&State]| {
        recover(image, allowed)?;
        // With nothing in flight both copies of each record are durable.
        if allowed.len() == 1 {
            has_both_copies(image)?;
        }
        Ok(1)
    };
    cut_everywhere(n, before, &played, draws, after).is_err()
}

/// Runs `operation` once for every flush and fence that it makes, without that one; the simulator must notice every
/// time.
fn every_one_is_needed(name: &str, operation: impl Fn(&mut Player)) {
    let mut whole = prepared();
    let first = points(&whole);
    operation(&mut whole);
    let end = points(&whole);
    assert!(end - first >= 2, "{name}");
    for n in first..end {
        assert!(
            is_caught(n, DRAWS, prepared(), &operation),
            "{name} without flush or fence {} of {} was not caught",
            n - first,
            end - first
        );
    }
}

#[test]
fn every_flush_and_fence_of_a_seal_is_needed() {
    every_one_is_needed("seal", |player| seal(player, 2, 33, None).unwrap());
}

#[test]
fn every_flush_and_fence_of_a_replacement_and_a_deletion_is_needed() {
    every_one_is_needed("replace", |player| {
        seal(player, 2, 3, Some(CheckpointId::new(1))).unwrap()
    });
    every_one_is_needed("delete", |player| delete(player, 1).unwrap());
}

/// Returns a region with a checkpoint that refers to a page of each of three slots.
fn prepared_sparse() -> Player {
    let mut player = prepared();
    let region = player.region();
    let parent = region.checkpoint(CheckpointId::new(1)).unwrap();
    let root = MapRoot::try_from(parent.manifest().unwrap().as_slice()).unwrap();
    let mut cursor = parent.map(&root).cursor();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    let mut state = player.current();
    let mut expected = Pages::new();
    for index in [2, 20, 36] {
        shadow.reference(&mut map, index, 1, &mut cursor).unwrap();
        expected.push(state[&CheckpointId::new(1)].objects[0][usize::try_from(index).unwrap()]);
    }
    let (root, _) = shadow.finish(map).unwrap();
    let manifest = root.to_bytes().to_vec();
    let id = CheckpointId::new(2);
    shadow.seal(id, &manifest, None).unwrap();
    let objects = vec![expected];
    state.insert(
        id,
        Sealed {
            attrs: 0,
            manifest,
            objects,
        },
    );
    player.acknowledge(state);
    drop((cursor, parent));
    delete(&mut player, 1).unwrap();
    player
}

fn clean(player: &Player) -> Result<Cleaned, CleanError> {
    let region = player.region();
    // Otherwise the segment with the map stays, as the next checkpoint goes on in it.
    let slots = region.occupied_slots();
    region.retire_tails(&slots.iter().collect::<Vec<_>>());
    let mut survey = region.survey(&roots);
    region.clean(&mut survey, u64::MAX)
}

/// The segments that are moved: the three sparse ones, and the one with the map of the checkpoint that refers to them.
const MOVED: u64 = 4;

#[test]
fn every_flush_and_fence_of_the_moved_pages_is_needed() {
    let mut whole = prepared_sparse();
    let first = points(&whole);
    assert_eq!(clean(&whole).unwrap().slots, MOVED);
    // A flush for the pages of each, one for the headers, a fence; then for each copy of the table a flush an entry,
    // and a fence.
    assert_eq!(points(&whole) - first, MOVED + 2 + 2 * (MOVED + 1));
    whole.states.clear();
    for n in first..first + MOVED + 2 {
        let mut player = prepared_sparse();
        let before = player.medium.image();
        let _ = player.medium.take_log();
        player.states.drain(..player.states.len() - 1);
        player.medium.skip(n);
        clean(&player).unwrap();
        // The slots that were left are written to.
        seal(&mut player, 3, 45, None).unwrap();
        let played = Played {
            log: player.medium.take_log(),
            states: player.states,
            cleaned_slots: 0,
        };
        let caught = cut_everywhere(n, before, &played, DRAWS, |_, image, allowed| {
            recover(image, allowed).map(|_| 1)
        });
        assert!(caught.is_err(), "without {} it was not caught", n - first);
    }
}

#[test]
fn the_table_has_the_new_places_before_the_old_ones_are_reused() {
    // Without any flush of the table's first or second copy, the other copy has them; without both, nobody.
    let copies = |which: &[u64]| {
        let mut player = prepared_sparse();
        let before = player.medium.image();
        let _ = player.medium.take_log();
        player.states.drain(..player.states.len() - 1);
        let first = points(&player) + MOVED + 2;
        for copy in which {
            for n in 0..MOVED {
                player.medium.skip(first + copy * (MOVED + 1) + n);
            }
        }
        clean(&player).unwrap();
        seal(&mut player, 3, 45, None).unwrap();
        let played = Played {
            log: player.medium.take_log(),
            states: player.states,
            cleaned_slots: 0,
        };
        cut_everywhere(7, before, &played, DRAWS, |_, image, allowed| {
            recover(image, allowed).map(|_| 1)
        })
    };
    copies(&[]).unwrap();
    assert!(copies(&[0, 1]).is_err());
}

#[test]
fn cleaning_on_a_failing_medium_loses_nothing() {
    let whole = prepared_sparse();
    let first = points(&whole);
    clean(&whole).unwrap();
    let end = points(&whole);
    for n in first..end {
        let player = prepared_sparse();
        let before = player.medium.image();
        let _ = player.medium.take_log();
        player.medium.fail_from(n);
        assert!(clean(&player).is_err(), "point {n}");
        let region = player.region();
        check_reads(&player, &region);
        assert!(region.delete(CheckpointId::new(2)).is_err());
        let mut replay = Replay::new(before);
        let log = player.medium.take_log();
        log.iter().for_each(|event| replay.apply(event));
        for seed in 0..8 {
            recover(&replay.crash(seed), &[&Some(player.current())])
                .unwrap_or_else(|e| panic!("point {n}, draw {seed}: {e}"));
        }
    }
}

#[test]
fn a_seal_has_two_fences_and_a_third_when_it_compacts() {
    let mut player = prepared();
    let region = player.region();
    let id = CheckpointId::new(1);
    let mut compactions = 0;
    for n in 0..100 {
        let (fences, records) = (player.medium.fences(), region.usage().journal_records);
        region
            .begin()
            .seal(CheckpointId::new(100 + n), b"manifest", None)
            .unwrap();
        let compacted = region.usage().journal_records < records;
        let expected = 2 + u64::from(compacted);
        assert_eq!(player.medium.fences() - fences, expected, "seal {n}");
        compactions += u32::from(compacted);
        region.set_attrs(id, 1).unwrap();
        region.delete(CheckpointId::new(100 + n)).unwrap();
    }
    assert!(compactions > 0);
    let mut shadow = region.begin();
    let mut map = shadow.map();
    shadow.append(&mut map, 0, 0, &page(1), None).unwrap();
    shadow.finish(map).unwrap();
    let fences = player.medium.fences();
    shadow.flush().unwrap();
    shadow.flush().unwrap();
    assert_eq!(player.medium.fences() - fences, 1, "the data's own, once");
    let records = region.usage().journal_records;
    shadow.seal(CheckpointId::new(2), b"", None).unwrap();
    let compacted = u64::from(region.usage().journal_records < records);
    assert_eq!(player.medium.fences() - fences, 3 + compacted);
    player.states.clear();
}

#[test]
fn a_failing_medium_loses_nothing_and_the_region_takes_no_more() {
    let mut whole = prepared();
    let first = points(&whole);
    dump(&mut whole, 2, 33, Some(CheckpointId::new(1)), true).unwrap();
    delete(&mut whole, 2).unwrap();
    let end = points(&whole);
    for n in first..end {
        let mut player = prepared();
        let before = player.medium.image();
        let _ = player.medium.take_log();
        let free_before = player.region().usage().free_bytes;
        player.medium.fail_from(n);
        let sealed = dump(&mut player, 2, 33, Some(CheckpointId::new(1)), true);
        let deleted = sealed.is_ok().then(|| delete(&mut player, 2));
        let region: Arc<Region> = player.region();
        assert!(
            sealed.is_err() || deleted.as_ref().is_some_and(Result::is_err),
            "point {n}"
        );
        // Acknowledged checkpoints are still read, whatever failed.
        check_reads(&player, &region);
        let unknown = matches!(sealed, Err(SealError::Journal(JournalError::Io(_))));
        if unknown {
            assert!(
                region.usage().free_bytes < free_before,
                "segments that may be sealed are not given away"
            );
        }
        assert!(
            region
                .begin()
                .seal(CheckpointId::new(3), b"", None)
                .is_err()
        );
        assert!(region.delete(CheckpointId::new(1)).is_err());
        assert!(region.close().is_err());
        // The power goes: before the operation in flight or after it, nothing else.
        let mut replay = Replay::new(before);
        player
            .medium
            .take_log()
            .iter()
            .for_each(|event| replay.apply(event));
        let allowed = [
            Some(player.current()),
            player
                .pending
                .clone()
                .map(Some)
                .unwrap_or(Some(player.current())),
        ];
        for seed in 0..8 {
            recover(&replay.crash(seed), &allowed.each_ref())
                .unwrap_or_else(|e| panic!("point {n}, draw {seed}: {e}"));
        }
    }
}

fn check_reads(player: &Player, region: &Region) {
    let state = Some(player.current());
    // Allocation is compared only where no segment is withheld.
    if let Err(error) = check(region, &state) {
        assert!(error.contains(" segments held"), "{error}");
    }
}

/// Returns the image of a crash that keeps only the chunks of the journal's writes that `keep` names by their place
/// in the record's copy.
fn keep_of_record(before: Vec<u8>, player: &Player, keep: impl Fn(usize) -> bool) -> Vec<u8> {
    let log = player.medium.take_log();
    // The two copies. After them only the headers of segments that became free are blanked.
    let is_copy = |event: &MediumEvent| matches!(event, MediumEvent::Write { bytes, .. } if bytes.len() == RECORD_BYTES);
    let copies: Vec<_> = (0..log.len()).filter(|&n| is_copy(&log[n])).collect();
    let copies = &copies[copies.len() - 2..];
    let mut replay = Replay::new(before);
    log[..copies[0]]
        .iter()
        .for_each(|event| replay.apply(event));
    let mut image = replay.crash(0);
    for &copy in copies {
        let MediumEvent::Write { at, bytes } = &log[copy] else {
            panic!("not a write")
        };
        for (n, chunk) in bytes.chunks(8).enumerate().filter(|(n, _)| keep(*n)) {
            let at = usize::try_from(*at).unwrap() + n * 8;
            image[at..at + 8].copy_from_slice(chunk);
        }
    }
    image
}

#[test]
fn a_torn_record_is_not_completed_by_a_later_one() {
    // A deletion that lost just the chunk with epoch and place, which the next record there shares.
    let mut player = prepared();
    let (before, state) = (player.medium.image(), player.current());
    let _ = player.medium.take_log();
    delete(&mut player, 1).unwrap();
    let image = keep_of_record(before, &player, |chunk| chunk != 1);
    let allowed = Some(state.clone());
    let (region, _, medium) = recover(&image, &[&allowed]).unwrap();
    let mut player = Player::resume(2, medium, region.unwrap(), allowed.clone());
    let before = player.medium.image();
    let _ = player.medium.take_log();
    seal(&mut player, 2, 3, None).unwrap();
    let image = keep_of_record(before, &player, |chunk| chunk == 1);
    recover(&image, &[&allowed]).unwrap();
}
