//! Crashes at every flush and fence, with every 8-byte chunk kept or lost at random, recover to exactly
//! the sealed set.
//!
//! `PERMAFROST_SEED` replays a run, `PERMAFROST_CRASH_CUTS` sets how many cuts it tries. The operation
//! in flight at the cut may be there or not, wholly; everything acknowledged before it must be.

#![allow(missing_docs, clippy::cast_possible_truncation)]

mod cold;
mod compaction;
mod faults;
mod healing;
mod media;
mod model;
mod scenario;

use std::sync::Arc;

use permafrost_pmem::sim::{MediumEvent, Replay, mix};

use model::{State, recover};
use scenario::{CAPACITY, Played, Player};

/// Draws of kept and lost chunks at every cut.
const DRAWS: u64 = 3;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is not a number")),
    )
}

fn seed() -> u64 {
    number("PERMAFROST_SEED").unwrap_or_else(|| {
        let time = std::time::UNIX_EPOCH
            .elapsed()
            .expect("the clock is past 1970");
        mix(time.as_nanos() as u64)
    })
}

/// Returns the states allowed after each event of a log: the last acknowledged, and the one in flight.
fn allowed(states: &[State], mark: usize) -> Vec<&State> {
    let mut allowed = vec![&states[mark]];
    allowed.extend(states.get(mark + 1));
    allowed
}

/// Tries every cut of a log; returns their number.
fn cut_everywhere(
    seed: u64,
    before: Vec<u8>,
    played: &Played,
    draws: u64,
    mut after: impl FnMut(u64, &[u8], &[&State]) -> Result<u64, String>,
) -> Result<u64, String> {
    let (from, mut image) = (Replay::new(before), Vec::new());
    cut_from(seed, from, played, draws, |seed, replay, allowed| {
        replay.crash_into(seed, &mut image);
        after(seed, &image, allowed)
    })
}

/// As [`cut_everywhere`], of a log that begins with pending values; `after` draws its images itself.
fn cut_from(
    seed: u64,
    mut replay: Replay,
    played: &Played,
    draws: u64,
    mut after: impl FnMut(u64, &Replay, &[&State]) -> Result<u64, String>,
) -> Result<u64, String> {
    let mut mark = 0;
    let mut cuts = 0;
    let end = MediumEvent::Fence(Vec::new());
    for (n, event) in played.log.iter().chain([&end]).enumerate() {
        if event.is_cut() {
            let draws = if replay.pending_chunks() == 0 {
                1
            } else {
                draws
            };
            for draw in 0..draws {
                let seed = mix(seed ^ mix(n as u64) ^ draw);
                cuts += after(seed, &replay, &allowed(&played.states, mark))
                    .map_err(|e| format!("cut at event {n}, draw {draw}: {e}"))?;
            }
        }
        if let MediumEvent::Mark(number) = event {
            mark = *number as usize;
        }
        replay.apply(event);
    }
    Ok(cuts)
}

/// Recovers an image and, now and then, crashes the recovery and the operations after it.
fn recover_and_go_on(seed: u64, image: &[u8], allowed: &[&State]) -> Result<u64, String> {
    let (region, which, medium) = recover(image, allowed)?;
    let Some(region) = region else { return Ok(1) };
    let state = allowed[which].clone();
    let mut cuts = 1;
    if mix(seed).is_multiple_of(32) {
        // A crash while opening: nothing is in flight, so nothing may change.
        let played = Played {
            log: medium.take_log(),
            states: vec![state.clone()],
            cleaned_slots: 0,
        };
        cuts += cut_everywhere(seed, image.to_vec(), &played, DRAWS, |_, image, allowed| {
            recover(image, allowed)
                .map(|_| 1)
                .map_err(|e| format!("while opening again: {e}"))
        })?;
    }
    if mix(seed) % 16 == 1 {
        // Continue: dump, seal; then all of it crashes again.
        let before = medium.image();
        let _ = medium.take_log();
        let mut player = Player::resume(seed, medium, region, state);
        player.dump();
        player.clean();
        model::check(&player.region(), player.states.last().unwrap())
            .map_err(|e| format!("going on: {e}"))?;
        let played = Played {
            log: player.medium.take_log(),
            states: player.states,
            cleaned_slots: 0,
        };
        cuts += cut_everywhere(seed, before, &played, 1, |_, image, allowed| {
            recover(image, allowed)
                .map(|_| 1)
                .map_err(|e| format!("going on: {e}"))
        })?;
    }
    Ok(cuts)
}

/// Ends the process and starts another one, which finds what was written and not yet durable. It goes on; then all of
/// that crashes.
fn restart_and_go_on(seed: u64, replay: &Replay, allowed: &[&State]) -> Result<u64, String> {
    if !mix(seed).is_multiple_of(16) {
        return Ok(0);
    }
    let (region, which, medium) =
        recover(&replay.visible(), allowed).map_err(|e| format!("restarted: {e}"))?;
    let Some(region) = region else { return Ok(1) };
    // While it opens, either state is right. From then on it is the one that it found.
    medium.mark(which as u64);
    let mut player = Player::resume(seed, Arc::clone(&medium), region, None);
    player.states = allowed[..=which]
        .iter()
        .map(|&state| state.clone())
        .collect();
    player.dump();
    player.clean();
    let played = Played {
        log: player.medium.take_log(),
        states: player.states,
        cleaned_slots: 0,
    };
    cut_from(seed, replay.clone(), &played, 1, |seed, replay, allowed| {
        recover(&replay.crash(seed), allowed)
            .map(|_| 1)
            .map_err(|e| format!("restarted, going on: {e}"))
    })
}

#[test]
fn every_cut_after_a_restart_recovers_to_the_sealed_set() {
    let first = seed();
    let wanted = number("PERMAFROST_CRASH_CUTS").map_or(4_000, |cuts| cuts / 5);
    println!("PERMAFROST_SEED={first}, {wanted} cuts");
    let (mut cuts, mut scenarios) = (0, 0);
    while cuts < wanted {
        let seed = first.wrapping_add(scenarios);
        let played = Player::new(seed).play();
        let from = Replay::new(vec![0; CAPACITY]);
        cuts += cut_from(seed, from, &played, 1, restart_and_go_on)
            .unwrap_or_else(|e| panic!("PERMAFROST_SEED={seed}: {e}"));
        scenarios += 1;
    }
    println!("{cuts} cuts in {scenarios} scenarios");
}

#[test]
fn every_cut_recovers_to_the_sealed_set() {
    let first = seed();
    let wanted = number("PERMAFROST_CRASH_CUTS").unwrap_or(20_000);
    println!("PERMAFROST_SEED={first} PERMAFROST_CRASH_CUTS={wanted}");
    let (mut cuts, mut scenarios, mut cleaned_slots) = (0, 0, 0);
    while cuts < wanted {
        // The first scenario is the seed's own, so that a failing one is replayed at once.
        let seed = first.wrapping_add(scenarios);
        let played = Player::new(seed).play();
        cuts += cut_everywhere(seed, vec![0; CAPACITY], &played, DRAWS, recover_and_go_on)
            .unwrap_or_else(|e| panic!("PERMAFROST_SEED={seed}: {e}"));
        scenarios += 1;
        cleaned_slots += played.cleaned_slots;
    }
    println!("{cuts} cuts in {scenarios} scenarios, which cleaned {cleaned_slots} slots");
    assert!(wanted < 20_000 || cleaned_slots > 0);
}
