//! Free memory and swap of this machine, and the bandwidth of paging, from `/proc/meminfo` and `/proc/vmstat` (proc(5)).
//!
//! The bandwidth is not probed: memory of running programs would have to be paged out for it. It is the fastest that was
//! seen within an hour while the machine paged for itself, and unknown until then. A machine that pages for a part of an
//! interval shows less than its swap could do, so this is a lower bound.

use std::fs;

use permafrost_scheduling::cost::SwapFigures;
use permafrost_scheduling::estimator::EstimatorConfig;
use permafrost_scheduling::figure::{Estimate, Figure, Missing, What};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};

/// Bytes that have to be paged within an interval so that its rate is one: fewer are of single faults.
const LEAST: u64 = 4 << 20;

/// Shortest interval of a rate, ms.
const SHORTEST_MS: u64 = 500;

/// Memory and swap at one time. Pages are counted since the boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SwapReading {
    free_memory: Bytes,
    free_swap: Bytes,
    paged_out_bytes: u64,
    paged_in_bytes: u64,
}

/// Reads memory and swap; `None` on a machine without swap, or if `/proc` cannot be read.
pub(super) fn read() -> Option<SwapReading> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let vmstat = fs::read_to_string("/proc/vmstat").ok()?;
    parse(&meminfo, &vmstat, rustix::param::page_size() as u64)
}

fn parse(meminfo: &str, vmstat: &str, page_bytes: u64) -> Option<SwapReading> {
    let number = |text: &str, name: &str| -> Option<u64> {
        let mut lines = text.lines().map(str::split_whitespace);
        lines.find_map(|mut words| (words.next()? == name).then(|| words.next()?.parse().ok())?)
    };
    let kib = |name| number(meminfo, name).map(|kib| Bytes::new(kib.saturating_mul(1024)));
    if kib("SwapTotal:")? == Bytes::ZERO {
        return None;
    }
    let pages = |name| number(vmstat, name).map(|pages| pages.saturating_mul(page_bytes));
    Some(SwapReading {
        free_memory: kib("MemAvailable:")?,
        free_swap: kib("SwapFree:")?,
        paged_out_bytes: pages("pswpout")?,
        paged_in_bytes: pages("pswpin")?,
    })
}

/// Bandwidth of paging, as far as it was seen.
#[derive(Debug, Default)]
pub(super) struct Paging {
    last: Option<(SwapReading, Moment)>,
    fastest_out: Option<(BytesPerSecond, Moment)>,
    fastest_in: Option<(BytesPerSecond, Moment)>,
}

impl Paging {
    /// Takes in a reading, and returns the figures that follow from all readings.
    pub(super) fn update(
        &mut self,
        reading: Option<SwapReading>,
        now: Moment,
    ) -> Option<SwapFigures> {
        let Some(reading) = reading else {
            *self = Self::default();
            return None;
        };
        match self.last {
            Some((last, at)) if now.since(at) >= Seconds::from_millis(SHORTEST_MS) => {
                let elapsed = now.since(at);
                let out = (last.paged_out_bytes, reading.paged_out_bytes);
                let back = (last.paged_in_bytes, reading.paged_in_bytes);
                note(&mut self.fastest_out, out, elapsed, now);
                note(&mut self.fastest_in, back, elapsed, now);
                self.last = Some((reading, now));
            }
            Some(_) => {}
            None => self.last = Some((reading, now)),
        }
        Some(SwapFigures {
            free_memory: reading.free_memory,
            free_swap: reading.free_swap,
            write: figure(self.fastest_out, now),
            read: figure(self.fastest_in, now),
        })
    }
}

/// Records the rate of an interval if it is the fastest, or the fastest is too old.
fn note(
    fastest: &mut Option<(BytesPerSecond, Moment)>,
    (before, after): (u64, u64),
    elapsed: Seconds,
    now: Moment,
) {
    let moved = after.saturating_sub(before);
    if moved < LEAST {
        return;
    }
    if let Ok(rate) = BytesPerSecond::measured(Bytes::new(moved), elapsed)
        && fastest.is_none_or(|(most, at)| rate >= most || is_old(at, now))
    {
        *fastest = Some((rate, now));
    }
}

fn is_old(at: Moment, now: Moment) -> bool {
    now.since(at) > EstimatorConfig::default().stale_after
}

fn figure(fastest: Option<(BytesPerSecond, Moment)>, now: Moment) -> Figure<BytesPerSecond> {
    match fastest {
        Some((rate, at)) if !is_old(at, now) => Figure::Known(Estimate {
            age: now.since(at),
            samples: 1,
            ..Estimate::given(rate)
        }),
        _ => Missing::NotMeasured {
            what: What::SwapBandwidth,
        }
        .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       24683520 kB\nMemFree:         100 kB\n\
        MemAvailable:    2048 kB\nSwapTotal:       8192 kB\nSwapFree:        4096 kB\n";

    fn reading(paged_out_mib: u64) -> Option<SwapReading> {
        let vmstat = format!(
            "nr_free_pages 7\npswpin 0\npswpout {}\n",
            paged_out_mib << 8
        );
        parse(MEMINFO, &vmstat, 4096)
    }

    #[test]
    fn a_machine_without_swap_has_no_figures_and_torn_files_neither() {
        let one = reading(1).unwrap();
        assert_eq!(one.free_memory, Bytes::mib(2));
        assert_eq!(one.free_swap, Bytes::mib(4));
        assert_eq!(one.paged_out_bytes, 1 << 20);
        let none = MEMINFO.replace("8192", "0");
        assert_eq!(parse(&none, "pswpin 0\npswpout 0\n", 4096), None);
        for torn in ["", "SwapTotal:", "SwapTotal: x kB", "SwapTotal: 5 kB"] {
            assert_eq!(parse(torn, "pswpin 0\npswpout 0\n", 4096), None, "{torn:?}");
        }
        assert_eq!(parse(MEMINFO, "pswpin 0\n", 4096), None);
    }

    #[test]
    fn the_fastest_interval_of_an_hour_is_the_bandwidth() {
        let mut paging = Paging::default();
        let mut at = |seconds: u64, mib| {
            let now = Moment::from_micros(seconds * 1_000_000);
            let figures = paging.update(reading(mib), now).unwrap();
            assert!(figures.read.known().is_err());
            figures
                .write
                .known()
                .ok()
                .map(|known| known.p50.value() / f64::from(1 << 20))
        };
        assert_eq!(at(0, 0), None);
        assert_eq!(at(1, 1), None, "a MiB is of single faults");
        assert_eq!(at(2, 101), Some(100.0));
        assert_eq!(at(3, 151), Some(100.0), "a slower second is no news");
        assert_eq!(at(4, 451), Some(300.0));
        assert_eq!(
            at(3700, 451),
            None,
            "an hour later it is not known any more"
        );
        assert_eq!(at(3701, 501), Some(50.0));
        assert_eq!(paging.update(None, Moment::from_micros(0)), None);
    }
}
