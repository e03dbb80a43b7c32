//! Crashes while segments move to an object store and back, and while objects are removed. The store outlives a cut:
//! what it has acknowledged is there, and what is under way may be there or not.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use permafrost_cold::{ColdMedium, ListedObject, MemoryObjects, ObjectError, Objects};
use permafrost_pmem::sim::{MediumEvent, Replay, SimMedium, mix};
use permafrost_pmem::{FoundMember, MediaError, Medium, Region};

use crate::model::{self, State, recover_found};
use crate::scenario::{CAPACITY, Played, Player, roots};
use crate::{DRAWS, allowed, number, seed};

const SEGMENT: usize = 64 << 10;
/// Bytes of the cold medium's file, and of its index.
const FILE: usize = 7 * SEGMENT;
const INDEX: usize = 3 << 12;

/// A change of the store: an object was put, or removed.
type Change = (String, Option<Vec<u8>>);

/// A store in memory that notes its changes in the log of a medium.
pub(crate) struct Store {
    objects: MemoryObjects,
    medium: Arc<SimMedium>,
    changes: Mutex<Vec<Change>>,
}

impl Store {
    fn note(&self, name: &str, bytes: Option<Vec<u8>>) {
        let mut changes = self.changes.lock().unwrap();
        self.medium.aside(changes.len() as u64);
        changes.push((name.to_owned(), bytes));
    }
}

impl Objects for Store {
    fn address(&self) -> &str {
        "memory"
    }

    fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), ObjectError> {
        self.note(name, Some(bytes.clone()));
        self.objects.put(name, bytes)
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, ObjectError> {
        self.objects.get(name)
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.note(name, None);
        self.objects.delete(name)
    }

    fn list(&self, directory: &str) -> Result<Vec<ListedObject>, ObjectError> {
        self.objects.list(directory)
    }
}

/// A cold medium's file, index and store.
#[derive(Clone)]
pub(crate) struct ColdParts {
    file: Arc<SimMedium>,
    index: Arc<SimMedium>,
    store: Arc<Store>,
}

impl ColdParts {
    fn medium(&self) -> Arc<dyn Medium> {
        let (file, index) = (Arc::clone(&self.file), Arc::clone(&self.index));
        let objects = Arc::clone(&self.store) as Arc<dyn Objects>;
        let named = ([7; 16], SEGMENT as u64);
        Arc::new(ColdMedium::simulated(file, index, named, objects).unwrap())
    }

    pub(crate) fn found(&self) -> FoundMember {
        FoundMember {
            medium: self.medium(),
            path: PathBuf::from("cold"),
        }
    }
}

/// Makes the first medium and a cold one, with these bytes and objects.
fn media(image: &[u8], objects: BTreeMap<String, Vec<u8>>) -> (Arc<SimMedium>, ColdParts) {
    let (first, rest) = image.split_at(CAPACITY);
    let (file, index) = rest.split_at(FILE);
    let parts = [first, file, index].map(|part| (part, part.len()));
    let mut media = SimMedium::several(&parts).into_iter().map(Arc::new);
    let mut next = || media.next().unwrap();
    let (first, file, index) = (next(), next(), next());
    let store = Arc::new(Store {
        objects: MemoryObjects::with(objects),
        medium: Arc::clone(&first),
        changes: Mutex::default(),
    });
    (first, ColdParts { file, index, store })
}

/// Things that a scenario has done.
#[derive(Debug, Default)]
struct Done {
    added: u64,
    cooled: u64,
    recalled: u64,
    swept: u64,
    removed: u64,
}

fn player(seed: u64) -> Player {
    let mut player = Player::new(seed);
    let (first, cold) = media(&[0; CAPACITY + FILE + INDEX], BTreeMap::new());
    (player.medium, player.cold) = (first, Some(cold));
    player
}

/// Returns the number of the cold medium, if it has joined the region.
fn joined(region: &Region) -> Option<usize> {
    let media = region.media();
    media
        .iter()
        .find(|medium| medium.is_cold)
        .map(|medium| medium.number)
}

impl Player {
    /// Adds the cold medium, or moves something there or back; the state stays.
    fn change_cold(&mut self, done: &mut Done) {
        let region = self.region();
        match (joined(&region), self.rng.below(8)) {
            (None, _) => {
                let medium = self.cold.as_ref().unwrap().medium();
                match region.add_medium(medium, Path::new("cold"), &"cold".parse().unwrap()) {
                    Ok(_) => done.added += 1,
                    // A crash has left its header without an entry of the list.
                    Err(MediaError::Unlisted) => {}
                    Err(error) => panic!("add: {error}"),
                }
            }
            (Some(number), 0..=3) => self.move_slots(&region, number, done, true),
            (Some(number), 4..=6) => {
                self.move_slots(&region, number, done, false);
                if self.rng.one_in(2) {
                    done.swept += region.sweep_cold(true, &|| false).unwrap();
                }
            }
            (Some(number), _) => {
                region.set_draining(number, true).unwrap();
                match region.drain_step(number, u64::MAX) {
                    Ok(drained) if drained.left_bytes == 0 => {
                        region.remove_medium(number).unwrap();
                        done.removed += 1;
                    }
                    Ok(drained) => assert!(drained.stuck.is_empty()),
                    Err(MediaError::Clean(_)) => {}
                    Err(error) => panic!("drain: {error}"),
                }
                if joined(&region).is_some() {
                    region.set_draining(number, false).unwrap();
                }
            }
        }
        model::check(&region, self.states.last().unwrap()).unwrap();
    }

    fn move_slots(&mut self, region: &Arc<Region>, cold: usize, done: &mut Done, out: bool) {
        let mut slots = region.occupied_slots();
        slots.retain(|slot| (slot.medium() == cold) != out && self.rng.one_in(2));
        if out {
            region.retire_tails(&slots.iter().collect::<Vec<_>>());
        }
        let survey = out.then(|| region.survey(&roots));
        for slot in &slots {
            let moved = match &survey {
                Some(survey) => region.cool_slot(survey, slot, cold, &|| true),
                None => region.move_slot(slot, 0),
            };
            match moved {
                Ok(bytes) if out => done.cooled += bytes,
                Ok(bytes) => done.recalled += bytes,
                // Full.
                Err(MediaError::Clean(_)) => {}
                Err(error) => panic!("move: {error}"),
            }
        }
    }

    fn play_cold(mut self, done: &mut Done) -> (Played, Vec<Change>) {
        self.format();
        self.open();
        for _ in 0..6 + self.rng.below(10) {
            match self.rng.one_in(2) {
                true => self.change_cold(done),
                false => self.step(),
            }
        }
        let played = Played {
            log: self.medium.take_log(),
            states: self.states,
            cleaned_slots: self.cleaned_slots,
        };
        let store = self.cold.unwrap().store;
        let changes = store.changes.lock().unwrap().clone();
        (played, changes)
    }
}

fn apply(objects: &mut BTreeMap<String, Vec<u8>>, (name, bytes): &Change) {
    match bytes {
        Some(bytes) => objects.insert(name.clone(), bytes.clone()),
        None => objects.remove(name),
    };
}

/// Recovers an image with the objects that the store has, removes what nothing needs and, now and then, goes on.
fn recover_cold(
    seed: u64,
    image: &[u8],
    objects: BTreeMap<String, Vec<u8>>,
    allowed: &[&State],
) -> Result<(), String> {
    let (first, cold) = media(image, objects);
    let find = &mut |_: &_| Ok(cold.found());
    let (region, which, medium) = recover_found(&first, find, allowed)?;
    let Some(region) = region else { return Ok(()) };
    let state = allowed[which];
    if joined(&region).is_some() {
        region
            .sweep_cold(true, &|| false)
            .map_err(|error| format!("sweep: {error}"))?;
        model::check(&region, state).map_err(|e| format!("after the sweep: {e}"))?;
        let used = region.media()[1].used_bytes / SEGMENT as u64;
        let left = cold.store.objects.all().len() as u64;
        if left > used {
            return Err(format!("{left} objects of {used} slots"));
        }
        let (absent, away) = region.absent_segments();
        if !absent.is_empty() || !away.is_empty() {
            return Err(format!("{absent:?} {away:?}"));
        }
    }
    if mix(seed).is_multiple_of(8) {
        let mut player = Player::resume(seed, medium, region, state.clone());
        player.cold = Some(cold);
        for _ in 0..3 {
            player.dump();
            player.change_cold(&mut Done::default());
        }
        player.open();
        model::check(&player.region(), player.states.last().unwrap())
            .map_err(|e| format!("going on: {e}"))?;
    }
    Ok(())
}

/// Tries every cut of a log; returns their number.
fn cut_everywhere(seed: u64, played: &Played, changes: &[Change]) -> Result<u64, String> {
    let mut replay = Replay::new(vec![0; CAPACITY + FILE + INDEX]);
    let (mut mark, mut cuts, mut objects) = (0, 0, BTreeMap::new());
    let end = MediumEvent::Fence(Vec::new());
    for (n, event) in played.log.iter().chain([&end]).enumerate() {
        if event.is_cut() {
            for draw in 0..DRAWS {
                let seed = mix(seed ^ mix(n as u64) ^ draw);
                let mut there = objects.clone();
                if let (MediumEvent::Aside(change), true) = (event, seed.is_multiple_of(2)) {
                    apply(&mut there, &changes[*change as usize]);
                }
                let states = allowed(&played.states, mark);
                recover_cold(seed, &replay.crash(seed), there, &states)
                    .map_err(|e| format!("cut at event {n}, draw {draw}: {e}"))?;
                cuts += 1;
            }
        }
        match event {
            MediumEvent::Mark(number) => mark = *number as usize,
            MediumEvent::Aside(change) => apply(&mut objects, &changes[*change as usize]),
            _ => {}
        }
        replay.apply(event);
    }
    Ok(cuts)
}

#[test]
fn every_cut_while_segments_cool_and_are_recalled_recovers_to_the_sealed_set() {
    let first = seed();
    let wanted = number("PERMAFROST_CRASH_CUTS").map_or(2_000, |cuts| cuts / 10);
    println!("PERMAFROST_SEED={first}, {wanted} cuts");
    let (mut cuts, mut scenarios, mut done) = (0, 0, Done::default());
    while cuts < wanted {
        let seed = first.wrapping_add(scenarios);
        let (played, changes) = player(seed).play_cold(&mut done);
        cuts += cut_everywhere(seed, &played, &changes)
            .unwrap_or_else(|e| panic!("PERMAFROST_SEED={seed}: {e}"));
        scenarios += 1;
    }
    println!("{cuts} cuts in {scenarios} scenarios: {done:?}");
}

/// The scenarios do what they are for.
#[test]
fn scenarios_cool_recall_sweep_and_remove() {
    let mut done = Done::default();
    for seed in 0..60 {
        player(seed).play_cold(&mut done);
    }
    let all = [
        done.added,
        done.cooled,
        done.recalled,
        done.swept,
        done.removed,
    ];
    assert!(all.iter().all(|count| *count > 0), "{done:?}");
}
