//! Report of medians, ratios, and distances from the aims.

use std::path::Path;

use serde_json::{Value, json};

use super::Measured;
use super::contenders::{Contender, Sample};
use super::figures::{as_f64, median, spread};
use super::recovery::Recovery;
use crate::table;

/// All measurements of a run.
pub(super) struct Report<'a> {
    pub(super) criu: &'a Path,
    pub(super) measured: &'a [Measured],
    pub(super) recovery: Option<Recovery>,
}

/// One figure of a sample.
struct Figure {
    name: &'static str,
    unit: &'static str,
    of: fn(&Sample, u64) -> f64,
    /// Contenders for which the figure is measured.
    measured: &'static [Contender],
    /// Contenders, and the largest permitted ratio of Permafrost's median to theirs.
    aims: &'static [(Contender, f64)],
    /// Largest permitted ratio of a stream's median to that of Permafrost's page server.
    stream_aim: Option<f64>,
}

/// Contenders that are Permafrost.
const OURS: [Contender; 3] = [
    Contender::Permafrost,
    Contender::Stream,
    Contender::NewRegion,
];

const FIGURES: [Figure; 6] = [
    Figure {
        name: "frozen",
        unit: "ms",
        of: |sample, _| sample.frozen_ms,
        measured: &Contender::ALL,
        aims: &[(Contender::Local, 0.8), (Contender::PageServer, 0.5)],
        stream_aim: Some(1.0),
    },
    Figure {
        name: "of that, writing pages",
        unit: "ms",
        of: |sample, _| sample.memwrite_ms,
        measured: &Contender::ALL,
        aims: &[],
        stream_aim: None,
    },
    Figure {
        name: "dump, wall",
        unit: "ms",
        of: |sample, _| sample.dump_ms,
        measured: &Contender::ALL,
        aims: &[],
        stream_aim: None,
    },
    Figure {
        name: "restore, wall",
        unit: "ms",
        of: |sample, _| sample.restore_ms,
        measured: &Contender::ALL,
        aims: &[(Contender::Local, 1.0)],
        stream_aim: None,
    },
    Figure {
        name: "server's processor time",
        unit: "s/GiB",
        of: |sample, size_mib| sample.server_cpu_s * 1024.0 / as_f64(size_mib),
        measured: &[
            Contender::Permafrost,
            Contender::Stream,
            Contender::NewRegion,
            Contender::PageServer,
            Contender::ImageStreamer,
        ],
        aims: &[],
        stream_aim: None,
    },
    Figure {
        name: "permafrostd's memory, peak",
        unit: "MiB",
        of: |sample, _| as_f64(sample.daemon_memory_bytes >> 10) / 1024.0,
        measured: &OURS,
        aims: &[],
        stream_aim: None,
    },
];

/// Aim for the memory of `permafrostd` beside its region, MiB.
const MEMORY_AIM_MIB: f64 = 64.0;

impl Report<'_> {
    /// Renders the report as text.
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        for measured in self.measured {
            out += &format!(
                "\n{} MiB, medians of {} (least–most), everything on tmpfs\n",
                measured.size_mib,
                measured.runs()
            );
            out += &table::render(&measured.rows());
        }
        if let Some(recovery) = &self.recovery {
            out += &format!(
                "\nrecovery of a region with {} checkpoints, from start to ready: {:.0} ms after a crash, {:.0} ms with the catalog lost too (aim: under 1000 ms)\n",
                recovery.checkpoints,
                recovery.after_crash.as_secs_f64() * 1e3,
                recovery.without_catalog.as_secs_f64() * 1e3
            );
        }
        out += "\nfrozen, writing pages: CRIU's own statistics. Processor time: utime + stime of permafrostd during the dump, of\n\
                criu page-server and criu-image-streamer over their lives; 10 ms ticks. Memory: highest RssAnon + RssFile\n\
                of permafrostd during dump and restore, looked at every 5 ms; the region on tmpfs counts as RssShmem and\n\
                is left out.\n";
        out
    }

    /// Renders the report as JSON.
    pub(super) fn json(&self) -> Value {
        json!({
            "criu": self.criu,
            "processors": std::thread::available_parallelism().map_or(0, usize::from),
            "kernel": rustix::system::uname().release().to_string_lossy(),
            "sizes": self.measured.iter().map(Measured::json).collect::<Vec<_>>(),
            "recovery": self.recovery.map(|recovery| json!({
                "checkpoints": recovery.checkpoints,
                "after_crash_ms": recovery.after_crash.as_secs_f64() * 1e3,
                "without_catalog_ms": recovery.without_catalog.as_secs_f64() * 1e3,
            })),
        })
    }
}

impl Measured {
    fn runs(&self) -> usize {
        self.samples
            .iter()
            .map(|(_, samples)| samples.len())
            .min()
            .unwrap_or(0)
    }

    /// Returns the contenders that were measured.
    fn contenders(&self) -> impl Iterator<Item = Contender> {
        self.samples.iter().map(|(contender, _)| *contender)
    }

    fn values(&self, figure: &Figure, contender: Contender) -> Vec<f64> {
        let samples = self
            .samples
            .iter()
            .find(|(of, _)| *of == contender)
            .map(|(_, samples)| samples.as_slice());
        let mut values: Vec<f64> = samples
            .unwrap_or_default()
            .iter()
            .map(|sample| (figure.of)(sample, self.size_mib))
            .collect();
        values.sort_by(f64::total_cmp);
        values
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let mut head = vec![String::new()];
        head.extend(self.contenders().map(|contender| contender.to_string()));
        head.extend([
            "of criu dump".to_owned(),
            "of page-server".to_owned(),
            "aim".to_owned(),
            "stream".to_owned(),
        ]);
        let mut rows = vec![head];
        for figure in &FIGURES {
            let mut row = vec![format!("{} ({})", figure.name, figure.unit)];
            for contender in self.contenders() {
                row.push(if figure.measured.contains(&contender) {
                    spread(&self.values(figure, contender))
                } else {
                    "–".to_owned()
                });
            }
            for other in [Contender::Local, Contender::PageServer] {
                row.push(
                    self.ratio(figure, other)
                        .map_or("–".to_owned(), |ratio| format!("{ratio:.2} ×")),
                );
            }
            row.push(self.aim(figure));
            row.push(self.stream(figure));
            rows.push(row);
        }
        rows
    }

    /// Returns the ratio of Permafrost's median to the other's.
    fn ratio(&self, figure: &Figure, other: Contender) -> Option<f64> {
        if !figure.measured.contains(&other) || !figure.measured.contains(&Contender::Permafrost) {
            return None;
        }
        let theirs = median(&self.values(figure, other))?;
        (theirs > 0.0).then_some(median(&self.values(figure, Contender::Permafrost))? / theirs)
    }

    fn aim(&self, figure: &Figure) -> String {
        let verdict = |met: bool| if met { "met" } else { "MISSED" };
        if figure.unit == "MiB" {
            let peak = self
                .values(figure, Contender::Permafrost)
                .last()
                .copied()
                .unwrap_or(0.0);
            return format!("< {MEMORY_AIM_MIB} {}", verdict(peak < MEMORY_AIM_MIB));
        }
        let aims = figure.aims.iter().filter_map(|(other, most)| {
            let ratio = self.ratio(figure, *other)?;
            Some(format!("≤ {most} {}", verdict(ratio <= *most)))
        });
        aims.collect::<Vec<_>>().join(", ")
    }

    /// Describes the ratio of a stream's median to that of Permafrost's page server.
    fn stream(&self, figure: &Figure) -> String {
        let medians = || {
            let stream = median(&self.values(figure, Contender::Stream))?;
            let ours = median(&self.values(figure, Contender::Permafrost))?;
            (ours > 0.0).then_some(stream / ours)
        };
        match (medians(), figure.stream_aim) {
            (None, _) => "–".to_owned(),
            (Some(ratio), None) => format!("{ratio:.2} × ours"),
            (Some(ratio), Some(most)) => {
                let verdict = if ratio <= most { "met" } else { "MISSED" };
                format!("{ratio:.2} × ours, ≤ {most} {verdict}")
            }
        }
    }

    fn json(&self) -> Value {
        let mut contenders = serde_json::Map::new();
        for contender in self.contenders() {
            let mut figures = serde_json::Map::new();
            for figure in FIGURES
                .iter()
                .filter(|figure| figure.measured.contains(&contender))
            {
                let values = self.values(figure, contender);
                figures.insert(
                    format!("{} ({})", figure.name, figure.unit),
                    json!({"median": median(&values), "values": values, "ratio_of_ours": self.ratio(figure, contender)}),
                );
            }
            contenders.insert(contender.to_string(), Value::Object(figures));
        }
        json!({"size_mib": self.size_mib, "runs": self.runs(), "contenders": contenders})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_and_aims() {
        let samples = |frozen: &[f64]| {
            frozen
                .iter()
                .map(|&frozen_ms| Sample {
                    frozen_ms,
                    ..Sample::default()
                })
                .collect()
        };
        let measured = Measured {
            size_mib: 64,
            samples: vec![
                (Contender::Permafrost, samples(&[3.0, 4.0, 50.0])),
                (Contender::Local, samples(&[8.0, 1.0, 9.0])),
                (Contender::Stream, samples(&[5.0, 5.0, 5.0])),
            ],
        };
        assert_eq!(measured.ratio(&FIGURES[0], Contender::Local), Some(0.5));
        assert_eq!(measured.ratio(&FIGURES[0], Contender::PageServer), None);
        assert_eq!(measured.aim(&FIGURES[0]), "≤ 0.8 met");
        assert_eq!(measured.stream(&FIGURES[0]), "1.25 × ours, ≤ 1 MISSED");
        assert_eq!(
            measured.ratio(&FIGURES[5], Contender::Local),
            None,
            "only ours is measured"
        );
    }
}
