//! Crashes while media are added, grown, drained and removed: a cut hits all media at the same instant. And regions of
//! which a medium is missing.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use permafrost_pmem::sim::{SimMedium, mix};
use permafrost_pmem::{
    CheckpointId, MediaError, Medium, MediumState, RecoverOptions, Region, SealError, ShadowError,
    TierName,
};

use crate::model::{self, Sealed, State, check_content, find, recover_with};
use crate::scenario::{Played, Player, Rng};
use crate::{DRAWS, cut_everywhere, number, seed};

const SEGMENT: usize = 64 << 10;
/// Segments that each medium can grow to, and those that it begins with; the first one has its tables, too.
const MEDIA: [(usize, usize); 3] = [(12, 6), (6, 3), (5, 5)];
/// Tries of draining a medium before it is given up.
const DRAIN_STEPS: u32 = 4;

fn media(image: Option<&[u8]>) -> Vec<Arc<SimMedium>> {
    let blank = vec![0; MEDIA.iter().map(|(most, _)| most * SEGMENT).sum()];
    let mut rest = image.unwrap_or(&blank);
    let parts: Vec<_> = MEDIA
        .iter()
        .map(|(most, first)| {
            let (part, behind) = rest.split_at(most * SEGMENT);
            rest = behind;
            // After a crash a file may have grown already.
            let capacity = if image.is_some() { *most } else { *first };
            (part, capacity * SEGMENT)
        })
        .collect();
    let media = SimMedium::several(&parts);
    media.into_iter().map(Arc::new).collect()
}

fn images(media: &[Arc<SimMedium>]) -> Vec<u8> {
    media.iter().flat_map(|medium| medium.image()).collect()
}

fn player(seed: u64) -> Player {
    let mut player = Player::new(seed);
    let mut media = media(None);
    player.others = media.split_off(1);
    player.medium = media.remove(0);
    player
}

/// Numbers of the media that have joined the region, by their place among the others.
fn joined(region: &Region) -> BTreeMap<usize, usize> {
    let others = region.media().into_iter().skip(1);
    others
        .map(|medium| {
            (
                medium.path.to_str().unwrap().parse().unwrap(),
                medium.number,
            )
        })
        .collect()
}

impl Player {
    /// Changes the media; the state stays.
    fn change_media(&mut self) {
        let region = self.region();
        let joined = joined(&region);
        let place = self.rng.below(self.others.len() as u64) as usize;
        match (joined.get(&place), self.rng.below(5)) {
            (None, 0..=2) => {
                let tier = TierName::known(self.rng.below(3) as usize);
                let medium = Arc::clone(&self.others[place]) as Arc<dyn Medium>;
                match region.add_medium(medium, Path::new(&place.to_string()), &tier) {
                    // A crash has left its header without an entry of the list.
                    Ok(_) | Err(MediaError::Unlisted) => {}
                    Err(error) => panic!("add: {error}"),
                }
            }
            (Some(&number), 0..=1) => self.drain(&region, number),
            (Some(&number), 2) => self.grow(&region, number, MEDIA[place + 1].0),
            (Some(&number), _) if self.rng.one_in(2) => self.cool(&region, number),
            _ => self.grow(&region, 0, MEDIA[0].0),
        }
        model::check(&region, self.states.last().unwrap()).unwrap();
    }

    fn grow(&mut self, region: &Region, number: usize, most: usize) {
        let size = region
            .media()
            .iter()
            .find(|m| m.number == number)
            .unwrap()
            .size_bytes;
        let more = (1 + self.rng.below(3)) * SEGMENT as u64 + self.rng.below(2) * 12288;
        let bytes = (size + more).min((most * SEGMENT) as u64);
        match region.grow_medium(number, bytes) {
            Ok(()) => {
                let media = region.media();
                let grown = media.iter().find(|m| m.number == number).unwrap();
                assert!(grown.size_bytes > size && grown.size_bytes <= bytes);
            }
            Err(MediaError::Grow(_)) => {}
            Err(error) => panic!("grow: {error}"),
        }
    }

    /// Moves some slots to a medium, wherever they are, or away from it to the first.
    fn cool(&mut self, region: &Region, number: usize) {
        for slot in region.occupied_slots() {
            let to = if slot.medium() == number { 0 } else { number };
            if self.rng.one_in(2) {
                match region.move_slot(&slot, to) {
                    Ok(0) => panic!("the slot is as it was listed"),
                    Ok(bytes) => assert_eq!(bytes, SEGMENT as u64),
                    // Full, or drained.
                    Err(MediaError::Clean(_)) => {}
                    Err(error) => panic!("cool: {error}"),
                }
            }
        }
    }

    fn drain(&mut self, region: &Region, number: usize) {
        region.set_draining(number, true).unwrap();
        for _ in 0..DRAIN_STEPS {
            match region.drain_step(number, self.rng.below(4) * SEGMENT as u64) {
                Ok(drained) if drained.left_bytes == 0 => {
                    region.remove_medium(number).unwrap();
                    return;
                }
                Ok(drained) => assert!(!drained.waiting),
                Err(MediaError::Clean(_)) => break,
                Err(error) => panic!("drain: {error}"),
            }
        }
        if self.rng.one_in(2) {
            region.set_draining(number, false).unwrap();
        }
    }

    fn play_media(mut self) -> (Played, Vec<Arc<SimMedium>>) {
        self.format();
        self.open();
        for _ in 0..6 + self.rng.below(10) {
            if self.rng.one_in(3) {
                self.change_media();
            } else {
                self.step();
            }
        }
        let played = Played {
            log: self.medium.take_log(),
            states: self.states,
            cleaned_slots: self.cleaned_slots,
        };
        let mut all = vec![self.medium];
        all.append(&mut self.others);
        (played, all)
    }
}

/// Recovers images of all media and, now and then, goes on or takes one of them away.
fn recover_all(seed: u64, image: &[u8], allowed: &[&State]) -> Result<u64, String> {
    let mut all = media(Some(image));
    let others = all.split_off(1);
    let (region, which, medium) = recover_with(&all[0], &others, allowed)?;
    let Some(region) = region else { return Ok(1) };
    let state = allowed[which].clone();
    if mix(seed).is_multiple_of(8) {
        let mut player = Player::resume(seed, medium, region, state);
        player.others = others;
        player.dump();
        player.change_media();
        return Ok(1);
    }
    let members = joined(&region);
    drop(region);
    if let (Some((&place, _)), true) = (members.first_key_value(), mix(seed) % 4 == 1) {
        let lost = without(seed, image, place, state.as_ref().unwrap());
        lost.map_err(|e| format!("without {place}: {e}"))?;
    }
    Ok(1)
}

/// Opens the image without one of its media, goes on, and brings it back: nothing but what was removed is lost.
fn without(
    seed: u64,
    image: &[u8],
    missing: usize,
    state: &BTreeMap<CheckpointId, Sealed>,
) -> Result<(), String> {
    let mut all = media(Some(image));
    let others = all.split_off(1);
    let first = Arc::clone(&all[0]) as Arc<dyn Medium>;
    let mut present = find(&others);
    let (region, _) = Region::open_all(
        Arc::clone(&first),
        RecoverOptions::default(),
        &mut |member| {
            if member.path == Path::new(&missing.to_string()) {
                return Err("taken away".to_owned());
            }
            present(member)
        },
    )
    .map_err(|e| format!("open: {e}"))?;
    model::give_keys(&region);
    let mut expected = state.clone();
    for id in expected.keys() {
        if !region.lists(*id) {
            return Err(format!("{id} is not listed"));
        }
    }
    // What can be read is right; what cannot is an error.
    let mut rng = Rng::new(seed);
    for checkpoint in region.checkpoints() {
        if let Err(error) = check_content(&checkpoint, &expected[&checkpoint.id()])
            && error.ends_with("differs")
        {
            return Err(format!("{}: {error}", checkpoint.id()));
        }
    }
    for id in state.keys() {
        if rng.one_in(3) {
            region.delete(*id).map_err(|e| format!("delete: {e}"))?;
            expected.remove(id);
        }
    }
    let before = others[missing].image();
    for n in 0..3 {
        let mut shadow = region.begin();
        let mut map = shadow.map();
        let salt = mix(seed ^ n);
        let written = (0..20).try_for_each(|index| {
            let page = model::page(salt.wrapping_add(index) | 1);
            shadow.append(&mut map, index, 0, &page, None)
        });
        let full = |error: &ShadowError| matches!(error, ShadowError::Full { .. });
        match written.and_then(|()| shadow.finish(map)) {
            Err(error) if full(&error) => break,
            Err(error) => return Err(format!("fill: {error}")),
            Ok((root, _)) => {
                let (id, manifest) = (CheckpointId::new(u128::from(n)), root.to_bytes().to_vec());
                match shadow.seal(id, &manifest, None) {
                    Ok(_) => {}
                    Err(SealError::Shadow(error)) if full(&error) => break,
                    Err(SealError::Journal(_)) => break,
                    Err(error) => return Err(format!("seal: {error}")),
                }
                let objects = vec![
                    (0..20)
                        .map(|index| (index, 0, salt.wrapping_add(index) | 1))
                        .collect(),
                ];
                let attrs = 0;
                expected.insert(
                    id,
                    Sealed {
                        attrs,
                        manifest,
                        objects,
                    },
                );
            }
        }
    }
    if others[missing].image() != before {
        return Err("written to".to_owned());
    }
    drop(region);
    let (region, _) = Region::open_all(first, RecoverOptions::default(), &mut find(&others))
        .map_err(|e| format!("open again: {e}"))?;
    model::give_keys(&region);
    model::check(&region, &Some(expected))
        .map_err(|e| format!("brought back: {e}; damaged: {:?}", region.damaged()))
}

#[test]
fn every_cut_while_media_change_recovers_to_the_sealed_set() {
    let first = seed();
    let wanted = number("PERMAFROST_CRASH_CUTS").unwrap_or(20_000) / 4;
    println!(
        "PERMAFROST_SEED={first} PERMAFROST_CRASH_CUTS={}",
        wanted * 4
    );
    let (mut cuts, mut scenarios) = (0, 0);
    while cuts < wanted {
        let seed = first.wrapping_add(scenarios);
        let (played, all) = player(seed).play_media();
        let before = vec![0; images(&all).len()];
        cuts += cut_everywhere(seed, before, &played, DRAWS, recover_all)
            .unwrap_or_else(|e| panic!("PERMAFROST_SEED={seed}: {e}"));
        scenarios += 1;
    }
    println!("{cuts} cuts in {scenarios} scenarios");
}

/// The scenarios do what they are for.
#[test]
fn scenarios_add_grow_drain_and_remove() {
    let (mut grown, mut joined_once, mut removed, mut draining) = (0, 0, 0, 0);
    for seed in 0..60 {
        let mut player = player(seed);
        player.format();
        player.open();
        for _ in 0..10 {
            let before = player.region().media();
            player.dump();
            player.change_media();
            let after = player.region().media();
            grown += u64::from(before[0].size_bytes < after[0].size_bytes);
            joined_once += u64::from(before.len() < after.len());
            removed += u64::from(before.len() > after.len());
            draining += u64::from(after.iter().any(|m| m.state == MediumState::Draining));
        }
    }
    assert!(
        grown > 0 && joined_once > 0 && removed > 0 && draining > 0,
        "{grown} grown, {joined_once} joined, {removed} removed, {draining} draining"
    );
}
