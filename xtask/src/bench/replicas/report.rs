//! Medians, and their ratios to `criu page-server --tls`, which promises the same on the wire.

use std::path::Path;

use serde_json::{Value, json};

use super::contenders::{Contender, Sample};
use super::{Measured, Setting};
use crate::bench::figures::{as_f64, median, spread, three_digits};
use crate::table;

/// Contender with which the others are compared.
const BASE: Contender = Contender::PageServerTls;

/// All measurements of a run.
pub(super) struct Report<'a> {
    pub(super) criu: &'a Path,
    pub(super) mbit: Option<u32>,
    pub(super) measured: &'a [Measured],
}

/// One figure of a sample.
struct Figure {
    name: &'static str,
    unit: &'static str,
    /// True if the table shows minimum, maximum and ratio as well. The JSON contains all of them for each figure.
    in_full: bool,
    /// Returns the figure's value, or `None` if the contender does not have it.
    of: fn(&Sample, Setting) -> Option<f64>,
}

const FIGURES: [Figure; 6] = [
    Figure {
        name: "frozen",
        unit: "ms",
        in_full: true,
        of: |sample, _| (sample.frozen_ms > 0.0).then_some(sample.frozen_ms),
    },
    Figure {
        name: "wall",
        unit: "ms",
        in_full: true,
        of: |sample, _| Some(sample.wall_ms),
    },
    Figure {
        name: "speed",
        unit: "MB/s",
        in_full: false,
        of: speed,
    },
    Figure {
        name: "wire",
        unit: "× memory",
        in_full: false,
        of: |sample, setting| {
            Some(as_f64(sample.forth_bytes + sample.back_bytes) / memory_bytes(setting))
        },
    },
    Figure {
        name: "CPU here",
        unit: "s/GB",
        in_full: false,
        of: |sample, setting| Some(sample.here_cpu_s * 1e9 / memory_bytes(setting)),
    },
    Figure {
        name: "CPU there",
        unit: "s/GB",
        in_full: false,
        of: |sample, setting| Some(sample.there_cpu_s * 1e9 / memory_bytes(setting)),
    },
];

/// Returns the memory divided by the time for which the task is frozen; for the bare pair, by the time that it
/// takes.
fn speed(sample: &Sample, setting: Setting) -> Option<f64> {
    let ms = if sample.frozen_ms > 0.0 {
        sample.frozen_ms
    } else {
        sample.wall_ms
    };
    (ms > 0.0).then(|| memory_bytes(setting) / ms / 1e3)
}

fn memory_bytes(setting: Setting) -> f64 {
    as_f64(setting.size_mib << 20)
}

impl Report<'_> {
    /// Renders the report as text.
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        for measured in self.measured {
            let setting = measured.setting;
            let speed = self
                .mbit
                .map_or(String::new(), |mbit| format!(", {mbit} Mbit/s"));
            out += &format!(
                "\n{setting}{speed}, medians of {} (least–most); ×: of {BASE} in the same run, median\n",
                measured.runs()
            );
            out += &table::render(&measured.rows());
        }
        out += "\nfrozen: CRIU's own statistics. wall: the dump command; of bare QUIC, from the handshake until the last byte was read.\n\
                speed: memory over the frozen time; of bare QUIC, bytes over wall. wire: both directions with all headers.\n\
                CPU: user and system time, in ticks of 10 ms, on the task's host (CRIU, permafrost, its permafrostd) and on the\n\
                other (page server, permafrostd); GB of the process's memory. What the kernel does with packets is counted where\n\
                it happens to be done. The registry of permafrost is in the JSON only.\n";
        out
    }

    /// Renders the report as JSON.
    pub(super) fn json(&self) -> Value {
        json!({
            "criu": self.criu,
            "processors": std::thread::available_parallelism().map_or(0, usize::from),
            "kernel": rustix::system::uname().release().to_string_lossy(),
            "link_mbit": self.mbit,
            "settings": self.measured.iter().map(Measured::json).collect::<Vec<_>>(),
        })
    }
}

impl Measured {
    fn runs(&self) -> usize {
        let runs = self.samples.iter().map(|(_, samples)| samples.len());
        runs.min().unwrap_or(0)
    }

    /// Returns the values of a figure, run by run.
    fn in_turn(&self, figure: &Figure, contender: Contender) -> impl Iterator<Item = Option<f64>> {
        let samples = self.samples.iter().find(|(of, _)| *of == contender);
        let samples = samples.map_or(&[][..], |(_, samples)| samples.as_slice());
        samples
            .iter()
            .map(|sample| (figure.of)(sample, self.setting))
    }

    /// Returns the sorted values of a figure.
    fn values(&self, figure: &Figure, contender: Contender) -> Vec<f64> {
        let mut values: Vec<f64> = self.in_turn(figure, contender).flatten().collect();
        values.sort_by(f64::total_cmp);
        values
    }

    /// Returns the sorted ratios to the base in the same run. Varying load on a shared machine affects both of a
    /// run, and hardly their ratio.
    fn ratios(&self, figure: &Figure, contender: Contender) -> Vec<f64> {
        let both = self
            .in_turn(figure, contender)
            .zip(self.in_turn(figure, BASE));
        let mut ratios: Vec<f64> = both
            .filter_map(|(value, base)| Some(value? / base.filter(|&base| base > 0.0)?))
            .collect();
        ratios.sort_by(f64::total_cmp);
        ratios
    }

    fn ratio(&self, figure: &Figure, contender: Contender) -> Option<f64> {
        median(&self.ratios(figure, contender))
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let mut head = vec![String::new()];
        for figure in &FIGURES {
            head.push(format!("{} ({})", figure.name, figure.unit));
            if figure.in_full {
                head.push("×".to_owned());
            }
        }
        let mut rows = vec![head];
        for (contender, _) in &self.samples {
            let mut row = vec![contender.to_string()];
            for figure in &FIGURES {
                let values = self.values(figure, *contender);
                if !figure.in_full {
                    row.push(median(&values).map_or("–".to_owned(), three_digits));
                    continue;
                }
                row.push(spread(&values));
                row.push(
                    self.ratio(figure, *contender)
                        .map_or("–".to_owned(), |ratio| format!("{ratio:.2}")),
                );
            }
            rows.push(row);
        }
        rows
    }

    fn json(&self) -> Value {
        let mut contenders = serde_json::Map::new();
        for (contender, samples) in &self.samples {
            let mut figures = serde_json::Map::new();
            for figure in &FIGURES {
                // Run by run, so that figures of one can be put together.
                let in_turn: Vec<_> = self.in_turn(figure, *contender).collect();
                figures.insert(
                    format!("{} ({})", figure.name, figure.unit),
                    json!({
                        "median": median(&self.values(figure, *contender)),
                        "values": in_turn,
                        "ratio": self.ratio(figure, *contender),
                        "ratios": self.ratios(figure, *contender),
                    }),
                );
            }
            let registry: Vec<f64> = samples.iter().map(|sample| sample.registry_cpu_s).collect();
            figures.insert("registry (s)".to_owned(), json!(registry));
            contenders.insert(contender.to_string(), Value::Object(figures));
        }
        json!({
            "mtu": self.setting.mtu,
            "size_mib": self.setting.size_mib,
            "contents": self.setting.contents.to_string(),
            "runs": self.runs(),
            "ratios_to": BASE.to_string(),
            "contenders": contenders,
        })
    }
}

#[cfg(test)]
mod tests {
    use permafrost_tests::contents::Contents;

    use super::*;

    fn measured() -> Measured {
        let samples = |frozen: &[f64]| {
            let sample = |&frozen_ms: &f64| Sample {
                frozen_ms,
                wall_ms: 1000.0,
                forth_bytes: 1 << 20,
                here_cpu_s: 0.5,
                ..Sample::default()
            };
            frozen.iter().map(sample).collect()
        };
        Measured {
            setting: Setting {
                mtu: 1500,
                size_mib: 2,
                contents: Contents::Heap,
            },
            samples: vec![
                (BASE, samples(&[400.0, 100.0, 200.0])),
                (Contender::Permafrost, samples(&[50.0, 100.0, 900.0])),
                (Contender::BareQuic, samples(&[0.0])),
            ],
        }
    }

    #[test]
    fn ratios_are_of_the_same_run() {
        let measured = measured();
        assert_eq!(
            measured.ratios(&FIGURES[0], Contender::Permafrost),
            [0.125, 1.0, 4.5]
        );
        assert_eq!(
            measured.ratio(&FIGURES[0], Contender::Permafrost),
            Some(1.0)
        );
        assert_eq!(measured.ratio(&FIGURES[0], Contender::BareQuic), None);
        assert_eq!(measured.ratio(&FIGURES[0], Contender::PageServer), None);
        assert_eq!(measured.values(&FIGURES[3], BASE), [0.5, 0.5, 0.5]);
        let speed = measured.values(&FIGURES[2], Contender::BareQuic);
        assert!((speed[0] - 2.097_152).abs() < 1e-6, "{speed:?}");
    }

    #[test]
    fn a_row_for_each_contender_and_a_dash_for_what_it_has_not() {
        let rows = measured().rows();
        assert_eq!(rows.len(), 4);
        assert!(rows.iter().all(|row| row.len() == rows[0].len()));
        assert_eq!(
            rows[2][..3],
            ["permafrost, 2 copies", "100 (50–900)", "1.00"]
        );
        assert_eq!(rows[3][1..3], ["–", "–"]);
        let report = Report {
            criu: Path::new("criu"),
            mbit: Some(100),
            measured: &[measured()],
        };
        assert!(report.text().contains("2 MiB, heap, MTU 1500, 100 Mbit/s"));
        let ratio = &report.json()["settings"][0]["contenders"]["permafrost, 2 copies"]["frozen (ms)"]
            ["ratio"];
        assert_eq!(ratio.as_f64(), Some(1.0));
        let base = &report.json()["settings"][0]["contenders"]["page-server --tls"]["frozen (ms)"];
        assert_eq!(base["values"], json!([400.0, 100.0, 200.0]), "run by run");
    }
}
