//! Tests with a clock that only moves when it is waited for: the time that passes on it is the device's time.

use super::*;
use crate::create_medium_in_memory;

const MIB: usize = 1 << 20;

/// Time that passes by waiting alone; each wait ends late by `late_ns`, as a sleep does.
#[derive(Default)]
struct Manual {
    now_ns: AtomicU64,
    late_ns: u64,
    waits: AtomicU64,
}

impl Clock for Arc<Manual> {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.now_ns.load(Ordering::SeqCst))
    }

    fn wait_until(&self, moment: Duration) {
        let moment = u64::try_from(moment.as_nanos()).unwrap() + self.late_ns;
        self.now_ns.fetch_max(moment, Ordering::SeqCst);
        self.waits.fetch_add(1, Ordering::SeqCst);
    }
}

fn device(text: &str) -> Emulation {
    text.parse().unwrap()
}

fn medium(text: &str, late_ns: u64) -> (Emulated, Arc<Manual>) {
    let clock = Arc::new(Manual {
        // Past the credit, so that the first access gets all of it.
        now_ns: AtomicU64::new(1_000_000_000),
        late_ns,
        waits: AtomicU64::new(0),
    });
    let below = create_medium_in_memory(8 * to_u64(MIB)).unwrap();
    let medium = Emulated::new(below, device(text), Box::new(Arc::clone(&clock)));
    (medium, clock)
}

/// Milliseconds on the clock that `action` takes.
fn time(clock: &Arc<Manual>, action: impl FnOnce()) -> f64 {
    let before = clock.now();
    action();
    (clock.now() - before).as_secs_f64() * 1e3
}

fn write(medium: &Emulated, at: usize, len: usize, flushed: &mut Flushed) {
    let bytes = vec![7; len];
    // SAFETY: nothing else uses the medium.
    unsafe { medium.write_streaming(to_u64(at), &bytes) }.unwrap();
    medium
        .flush_streamed(to_u64(at), to_u64(len), flushed)
        .unwrap();
}

/// Checks a time within the credit of the first access, and a grain.
fn near(took_ms: f64, expected_ms: f64) {
    assert!(
        (expected_ms - 5.3..=expected_ms + 0.3).contains(&took_ms),
        "took {took_ms} ms, not {expected_ms}"
    );
}

#[test]
fn the_presets_are_those_of_table_3() {
    for (name, seconds, mb_per_s) in [
        ("hdd", 169.18, 29.55),
        ("ssd", 43.73, 114.34),
        ("nvm", 2.92, 1712.33),
    ] {
        let preset = Emulation::preset(name).unwrap();
        let rate = preset.write_bytes_per_s.get() as f64;
        assert!((5e9 / rate - seconds).abs() < 1e-3, "{name}");
        assert!((rate / 1e6 - mb_per_s).abs() < 0.01, "{name}");
        assert_eq!(preset.read_bytes_per_s, preset.write_bytes_per_s);
        assert_eq!(preset.latency, Duration::ZERO);
    }
    assert_eq!(Emulation::preset("tape"), None);
}

#[test]
fn devices_are_given_in_numbers() {
    let given = device("120M:1.5G:8ms:cached");
    assert_eq!(given.write_bytes_per_s.get(), 120_000_000);
    assert_eq!(given.read_bytes_per_s.get(), 1_500_000_000);
    assert_eq!(given.latency, Duration::from_millis(8));
    assert!(given.cached);
    assert_eq!(
        given.to_string(),
        "emulated device (120.0 MB/s write, 1500.0 MB/s read, latency 8ms, behind a page cache)"
    );
    assert_eq!(device("1000:2k:0").write_bytes_per_s.get(), 1000);
    for bad in [
        "",
        "disk",
        "1M",
        "1M:1M",
        "0:1M:0",
        "1M:1M:8",
        "1M:1M:0:x",
        "1M:1M:0:cached:x",
        "-1:1:0",
        "1e9:1:0",
        ".5G:1:0",
        "1.5555G:1:0",
        "9999999G:1:0",
        "é:1:0",
        "1M:1M:2h",
        "1M:1M:61s",
        "18446744073709551615G:1:0",
    ] {
        assert!(bad.parse::<Emulation>().is_err(), "{bad:?}");
    }
}

#[test]
fn it_says_that_it_is_emulated() {
    let below = create_medium_in_memory(to_u64(MIB)).unwrap();
    let plain = below.guarantee().to_string();
    let medium = emulate(below, Emulation::preset("hdd").unwrap());
    assert_eq!(
        medium.guarantee().to_string(),
        format!("emulated hdd (29.6 MB/s write, 29.6 MB/s read, behind a page cache) over {plain}")
    );
    assert!(medium.file().is_none());
}

#[test]
fn writing_takes_what_its_bandwidth_says_however_it_is_cut() {
    for piece in [MIB, 64 << 10, 4096] {
        let (medium, clock) = medium("100M:100M:0", 0);
        let mut flushed = Flushed::new();
        let took = time(&clock, || {
            for at in (0..8 * MIB).step_by(piece) {
                write(&medium, at, piece, &mut flushed);
            }
            medium.fence(&mut flushed).unwrap();
        });
        // 8 MiB at 100 MB/s.
        near(took, 83.886);
    }
}

#[test]
fn a_flush_waits_only_when_the_queue_is_full() {
    let (medium, clock) = medium("10M:10M:0", 0);
    let mut flushed = Flushed::new();
    let took = time(&clock, || write(&medium, 0, MIB, &mut flushed));
    // 105 ms of work, of which 100 fit the queue, and 5 were made up for.
    near(took, 5.0);
    let took = time(&clock, || write(&medium, MIB, MIB, &mut flushed));
    assert!((took - 104.857).abs() < 0.3, "{took}");
    let took = time(&clock, || medium.fence(&mut flushed).unwrap());
    assert!((took - 100.0).abs() < 0.3, "{took}");
    assert_eq!(time(&clock, || medium.fence(&mut flushed).unwrap()), 0.0);
}

#[test]
fn a_fence_waits_for_its_own_ranges() {
    let (medium, clock) = medium("10M:10M:0", 0);
    let (mut small, mut large) = (Flushed::new(), Flushed::new());
    write(&medium, 0, 4096, &mut small);
    write(&medium, MIB, MIB / 2, &mut large);
    let took = time(&clock, || medium.fence(&mut small).unwrap());
    assert!(took < 0.5, "{took}");
    let took = time(&clock, || medium.fence(&mut large).unwrap());
    assert!(took > 40.0, "{took}");
}

#[test]
fn reading_takes_what_its_bandwidth_says_however_it_is_cut() {
    for piece in [MIB, 4096] {
        let (medium, clock) = medium("1G:50M:0", 0);
        let mut into = vec![0; piece];
        let took = time(&clock, || {
            for at in (0..8 * MIB).step_by(piece) {
                medium.read(to_u64(at), &mut into).unwrap();
            }
        });
        near(took, 167.772);
        let lend = || {
            // SAFETY: nothing writes.
            let bytes = unsafe { medium.bytes(0, MIB) };
            assert_eq!(bytes.unwrap().len(), MIB);
        };
        let took = time(&clock, lend);
        assert!((took - 20.97).abs() < 0.5, "{took}");
    }
}

#[test]
fn late_sleeps_do_not_add_up() {
    // Each wait ends a millisecond late, and there are many.
    let (medium, clock) = medium("100M:100M:0", 1_000_000);
    let mut into = vec![0; 64 << 10];
    let took = time(&clock, || {
        for at in (0..8 * MIB).step_by(into.len()) {
            medium.read(to_u64(at), &mut into).unwrap();
        }
    });
    assert!(clock.waits.load(Ordering::SeqCst) > 20);
    near(took - 1.0, 83.886);
}

#[test]
fn a_fence_and_a_seek_wait_for_the_latency() {
    let (medium, clock) = medium("1G:1G:8ms", 0);
    let mut flushed = Flushed::new();
    write(&medium, 0, 4096, &mut flushed);
    let took = time(&clock, || medium.fence(&mut flushed).unwrap());
    near(took, 8.0);
    let mut into = vec![0; 4096];
    let mut read = |at: u64| time(&clock, || medium.read(at, &mut into).unwrap());
    near(read(MIB as u64), 8.0);
    assert!(read(MIB as u64 + 4096) < 0.3, "goes on where it was");
    assert!(read(0) > 7.9, "elsewhere");
}

#[test]
fn behind_a_page_cache_only_the_first_read_costs() {
    let (medium, clock) = medium("1G:50M:0:cached", 0);
    let mut flushed = Flushed::new();
    write(&medium, 0, MIB, &mut flushed);
    medium.fence(&mut flushed).unwrap();
    let mut into = vec![0; MIB];
    let mut read = |at: usize| time(&clock, || medium.read(to_u64(at), &mut into).unwrap());
    assert_eq!(read(0), 0.0, "written just now");
    let first = read(2 * MIB);
    near(first, 20.97);
    assert_eq!(read(2 * MIB), 0.0, "read before");
    // Half of the pages are cached.
    let half = read(2 * MIB + MIB / 2);
    assert!((half - 10.48).abs() < 0.3, "{half}");
}

#[test]
fn a_failed_access_costs_nothing_and_what_is_read_is_what_was_written() {
    let (medium, clock) = medium("1G:1G:1s", 0);
    let mut into = [0; 64];
    assert!(medium.read(9 * to_u64(MIB), &mut into).is_err());
    let mut flushed = Flushed::new();
    assert!(medium.flush(9 * to_u64(MIB), 64, &mut flushed).is_err());
    assert_eq!(time(&clock, || medium.fence(&mut flushed).unwrap()), 0.0);
    write(&medium, 128, 64, &mut flushed);
    medium.read(128, &mut into).unwrap();
    assert_eq!(into, [7; 64]);
}
