//! Compaction of the journal, which goes on while changes are appended.

use std::collections::BTreeMap;
use std::sync::Arc;

use permafrost_pmem::{CheckpointId, Medium, Region};

use crate::faults::{is_caught, points};
use crate::model::{Sealed, recover};
use crate::scenario::{CAPACITY, Played, Player};
use crate::{cut_everywhere, seed};

/// Seals a checkpoint without pages.
fn seal(player: &mut Player, id: u64, replaces: Option<CheckpointId>) {
    let id = CheckpointId::new(id.into());
    let mut state = player.current();
    replaces.map(|replaced| state.remove(&replaced));
    let sealed = Sealed {
        attrs: 0,
        manifest: Vec::new(),
        objects: Vec::new(),
    };
    state.insert(id, sealed);
    player.region().begin().seal(id, b"", replaces).unwrap();
    player.acknowledge(state);
}

fn set_attrs(player: &mut Player, id: CheckpointId, bits: u32) {
    let mut state = player.current();
    state.get_mut(&id).unwrap().attrs = bits;
    player.region().set_attrs(id, bits).unwrap();
    player.acknowledge(state);
}

fn delete(player: &mut Player, id: CheckpointId) {
    let mut state = player.current();
    state.remove(&id);
    player.region().delete(id).unwrap();
    player.acknowledge(state);
}

/// Changes something: few checkpoints, so that most records are superseded soon.
fn change(player: &mut Player) {
    let state = player.current();
    let nth = usize::try_from(player.rng.below(8)).unwrap();
    let picked = state.keys().nth(nth).copied();
    let fresh = player.rng.next();
    match (player.rng.below(6), picked) {
        (0 | 1, _) | (_, None) if state.len() < 10 => seal(player, fresh, None),
        (2, Some(id)) => seal(player, fresh, Some(id)),
        (3, Some(id)) => seal(player, id.value() as u64, Some(id)),
        (4, Some(id)) => set_attrs(player, id, (fresh % 4) as u32),
        (_, Some(id)) => delete(player, id),
        (_, None) => {}
    }
}

/// Returns the ids in the order of their seals, and the attributes.
fn listed(region: &Region) -> Vec<(CheckpointId, u32)> {
    let listed = region.checkpoints();
    listed.iter().map(|c| (c.id(), c.attrs())).collect()
}

#[test]
fn what_is_listed_survives_any_number_of_compactions_in_its_order() {
    let first = seed();
    println!("PERMAFROST_SEED={first}");
    let mut player = Player::new(first);
    player.format();
    player.open();
    let mut compactions = 0;
    let mut records = 0;
    for n in 0..3000 {
        change(&mut player);
        let before = listed(&player.region());
        let now = player.region().usage().journal_records;
        compactions += u32::from(now < records);
        records = now;
        let sorted: BTreeMap<_, _> = before.iter().copied().collect();
        let expected = player.current();
        assert!(
            sorted
                .into_iter()
                .eq(expected.iter().map(|(id, c)| (*id, c.attrs)))
        );
        if n % 5 == 0 {
            // What is on the medium, without going on from there: a compaction under way is not disturbed.
            let mut image = vec![0; CAPACITY];
            player.region().medium().read(0, &mut image).unwrap();
            let copy = Arc::new(permafrost_pmem::sim::SimMedium::from_image(&image));
            let (region, report) = Region::open(copy as Arc<dyn Medium>).unwrap();
            assert_eq!(listed(&region), before, "change {n}");
            assert_eq!((report.records_repaired, report.torn_record), (0, false));
        }
    }
    assert!(compactions > 50, "{compactions}");
}

#[test]
fn a_compaction_is_cut_anywhere() {
    let first = seed();
    println!("PERMAFROST_SEED={first}");
    for seed in (0..6).map(|n| first.wrapping_add(n)) {
        let mut player = Player::new(seed);
        player.format();
        player.open();
        for _ in 0..60 {
            change(&mut player);
        }
        let played = Played {
            log: player.medium.take_log(),
            states: player.states,
            cleaned_slots: 0,
        };
        let after = |_, image: &[u8], allowed: &[&_]| recover(image, allowed).map(|_| 1);
        cut_everywhere(seed, vec![0; CAPACITY], &played, 2, after)
            .unwrap_or_else(|e| panic!("PERMAFROST_SEED={seed}: {e}"));
    }
}

/// Returns a journal with a compaction under way: 24 records of 32, of which most are superseded.
fn under_way() -> Player {
    let mut player = Player::new(1);
    player.format();
    player.open();
    for id in 1..=4 {
        seal(&mut player, id, None);
    }
    for n in 0..19 {
        set_attrs(
            &mut player,
            CheckpointId::new(1 + n % 4),
            1 + (n as u32) % 3,
        );
    }
    assert_eq!(player.region().usage().journal_records, 24);
    player
}

#[test]
fn every_flush_and_fence_of_a_compaction_is_needed() {
    // Removals of what was carried over before, changes behind the cursor, and the first change in the other half.
    let operations: [&dyn Fn(&mut Player); 5] = [
        &|player| delete(player, CheckpointId::new(1)),
        &|player| set_attrs(player, CheckpointId::new(2), 0),
        &|player| seal(player, 3, Some(CheckpointId::new(3))),
        &|player| seal(player, 5, None),
        &|player| seal(player, 6, None),
    ];
    let mut player = under_way();
    let first = points(&player);
    let ends = operations.map(|operation| {
        operation(&mut player);
        points(&player)
    });
    assert!(player.region().usage().journal_records < 12);
    let mut needed = vec![false; usize::try_from(ends[4] - first).unwrap()];
    // A record of the half that is left is needed until then, one that was carried over from then on.
    for (count, end) in (1..).zip(ends) {
        for (n, needed) in (first..end).zip(&mut needed) {
            let all = |player: &mut Player| {
                operations[..count]
                    .iter()
                    .for_each(|operation| operation(player));
            };
            *needed = *needed || is_caught(n, 10, under_way(), all);
        }
    }
    // All but the flushes of the old header's two copies, and of the checksums of three roots, which the journal has,
    // too.
    let not_needed = needed.iter().filter(|needed| !**needed).count();
    assert_eq!(not_needed, 2 + 3, "{needed:?}");
}
