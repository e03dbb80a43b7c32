//! Simulated media: the total rate by the number of transfers, with noise that is drawn anew for each transfer.

use proptest::prelude::*;

use super::*;

/// Rate that a medium gives to a number of concurrent transfers together, bytes a second.
type Medium = fn(usize) -> f64;

const ONE: f64 = 1e9;

fn saturates_at_one(_: usize) -> f64 {
    ONE
}

fn saturates_at_four(running: usize) -> f64 {
    ONE * [1.0, 2.0, 3.0, 4.0][running.clamp(1, 4) - 1]
}

/// Models a disk whose head moves between more than two positions.
fn degrades_beyond_two(running: usize) -> f64 {
    match running {
        1 => ONE,
        2 => 1.8 * ONE,
        more => 1.8 * ONE / more as f64,
    }
}

/// Deterministic numbers between 0 and 1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn draw(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// Runs transfers of a queue that is never empty, as many at once as may run. Returns the limit that was settled
/// after each.
fn run(medium: Medium, noise: f64, turns: usize, seed: u64) -> (Concurrency, Vec<usize>) {
    let mut concurrency = Concurrency::new(ConcurrencyConfig::default());
    let mut random = Noise(seed);
    let mut settled = Vec::new();
    for _ in 0..turns {
        let running = concurrency.limit();
        let bytes = 100_000_000 + random.draw() % 900_000_000;
        let factor = ((random.next() + random.next() - 1.0) * noise).exp();
        let rate = medium(running) / running as f64 * factor;
        concurrency.finished(&FinishedTurn {
            bytes: Bytes::new(bytes),
            elapsed: Seconds::new(bytes as f64 / rate).unwrap(),
            beside: running as f64,
        });
        settled.push(concurrency.settled());
    }
    (concurrency, settled)
}

#[test]
fn as_many_as_still_raise_what_is_moved() {
    for seed in 0..20 {
        for (medium, best) in [
            (saturates_at_one as Medium, 1),
            (saturates_at_four, 4),
            (degrades_beyond_two, 2),
        ] {
            let (_, settled) = run(medium, 0.1, 1000, seed);
            let late = &settled[500..];
            assert!(
                late.iter().all(|at| *at == best),
                "seed {seed}: {settled:?}"
            );
        }
    }
}

#[test]
fn noise_moves_nothing_back_and_forth() {
    for seed in 0..20 {
        for medium in [
            saturates_at_one as Medium,
            saturates_at_four,
            degrades_beyond_two,
        ] {
            // Twice as fast or half as fast, from transfer to transfer.
            let (_, settled) = run(medium, 0.7, 20_000, seed);
            let late = &settled[2000..];
            let changes = late.windows(2).filter(|pair| pair[0] != pair[1]).count();
            assert!(changes <= 4, "seed {seed}: {changes} changes");
        }
    }
}

#[test]
fn what_changes_is_found_out_again() {
    let (mut concurrency, _) = run(saturates_at_four, 0.1, 400, 1);
    assert_eq!(concurrency.settled(), 4);
    let mut turns = 0;
    while concurrency.settled() > 1 {
        turns += 1;
        assert!(turns < 10_000);
        let running = concurrency.limit() as f64;
        concurrency.finished(&FinishedTurn {
            bytes: Bytes::new(1 << 30),
            elapsed: Seconds::new(running).unwrap(),
            beside: running,
        });
    }
}

#[test]
fn sizes_far_apart_hide_nothing() {
    // Half a second of start, in which others move their bytes, and sizes from 1 MB to 4 GB: two overlap, and more than
    // two gain little, as the medium is busy.
    for seed in 0..10 {
        let mut concurrency = Concurrency::new(ConcurrencyConfig::default());
        let mut random = Noise(seed);
        let mut late = Vec::new();
        for turn in 0..4000 {
            let running = concurrency.limit() as f64;
            let bytes = 1e6 * 4000_f64.powf(random.next());
            let elapsed = 0.5 + bytes * running / ONE * (0.9 + 0.2 * random.next());
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "below 4e9"
            )]
            let bytes = Bytes::new(bytes as u64);
            concurrency.finished(&FinishedTurn {
                bytes,
                elapsed: Seconds::new(elapsed).unwrap(),
                beside: running,
            });
            if turn > 2000 {
                late.push(concurrency.settled());
            }
        }
        let changes = late.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert!(changes <= 4, "seed {seed}: {changes} changes");
        assert!(late.iter().all(|at| (1..=8).contains(at)), "{late:?}");
    }
}

#[test]
fn without_anyone_waiting_nothing_is_tried() {
    let mut concurrency = Concurrency::new(ConcurrencyConfig::default());
    for _ in 0..1000 {
        concurrency.finished(&FinishedTurn {
            bytes: Bytes::new(1 << 30),
            elapsed: Seconds::new(1.0).unwrap(),
            beside: 1.0,
        });
    }
    assert_eq!((concurrency.limit(), concurrency.settled()), (2, 2));
}

proptest! {
    /// Holds for any input: the bounds are kept, the limit moves one step at a time, and nothing panics.
    #[test]
    fn bounds_hold_on_nonsense(
        most in 0_usize..40,
        start in 0_usize..40,
        turns in prop::collection::vec(
            (any::<u64>(), 0.0_f64..1e12, prop_oneof![any::<f64>(), 0.0_f64..20.0]),
            0..400,
        ),
        zero in any::<bool>(),
    ) {
        let mut concurrency = Concurrency::new(ConcurrencyConfig {
            start,
            most,
            longest_trial: if zero { 0 } else { 32 },
            pause: if zero { 0 } else { 8 },
            ..ConcurrencyConfig::default()
        });
        let most = most.max(1);
        let mut before = concurrency.limit();
        for (bytes, elapsed, beside) in turns {
            concurrency.finished(&FinishedTurn {
                bytes: Bytes::new(bytes),
                elapsed: Seconds::new(elapsed).unwrap(),
                beside,
            });
            let limit = concurrency.limit();
            prop_assert!((1..=most).contains(&limit) && (1..=most).contains(&concurrency.settled()));
            prop_assert!(limit.abs_diff(before) <= 2);
            before = limit;
        }
    }
}
