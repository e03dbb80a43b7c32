//! Metrics of the node's own measurements and of the errors of its predictions.

use std::fmt;

use permafrost_metering::costs::{Comparisons, CostCounters, Costs, NodeReport};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::quantity::{BytesPerSecond, Seconds};
use permafrost_scheduling::size::Accuracy;
use prometheus_client::metrics::MetricType;

use super::tell::Told;

/// Values of two labels each, with a number.
type Labelled<'a> = Vec<([&'a str; 2], f64)>;

impl Told<'_> {
    /// Exports the known figures. An unknown figure is left out: a missing number is better than a wrong one.
    pub(super) fn costs(&mut self, costs: &Costs) -> fmt::Result {
        let report = costs.report();
        self.bandwidths(&report)?;
        self.starts(&report)?;
        self.errors(&costs.accuracy())?;
        self.numbers(&costs.numbers())
    }

    fn bandwidths(&mut self, report: &NodeReport) -> fmt::Result {
        let directions = [
            ("write", &report.write),
            ("compare", &report.compare),
            ("read", &report.read),
            ("lazy", &report.lazy),
        ];
        let mut rates = Vec::new();
        let mut ages = Vec::new();
        for (direction, sized) in directions {
            push_rates(&mut rates, direction, sized);
            if let Ok(known) = sized.sustained().known() {
                ages.push(([direction, ""], known.age.value()));
            }
        }
        self.floats(
            "bandwidth_bytes_per_second",
            "Bandwidth of large transfers, as measured",
            ["direction", "quantile"],
            &rates,
        )?;
        self.floats(
            "bandwidth_age_seconds",
            "Since the newest measurement",
            ["direction", ""],
            &ages,
        )?;
        let mut links = Vec::new();
        for (node, sized) in &report.links {
            push_rates(&mut links, node, sized);
        }
        self.floats(
            "link_bytes_per_second",
            "Bandwidth between this node and another, as measured",
            ["node", "quantile"],
            &links,
        )
    }

    fn starts(&mut self, report: &NodeReport) -> fmt::Result {
        let mut starts = Vec::new();
        let both = [
            ("dump", report.dump_start),
            ("restore", report.restore_start),
            ("lazy", report.lazy_start),
        ];
        for (what, figure) in both {
            push(&mut starts, what, &figure, Seconds::value);
        }
        self.floats(
            "start_seconds",
            "What a dump or a restore takes whatever its size",
            ["of", "quantile"],
            &starts,
        )
    }

    fn errors(&mut self, accuracy: &Comparisons) -> fmt::Result {
        let all: [(&str, &Accuracy); 4] = [
            ("stored_bytes", &accuracy.stored),
            ("moved_bytes", &accuracy.moved),
            ("dump_time", &accuracy.dump_time),
            ("restore_time", &accuracy.restore_time),
        ];
        let (mut errors, mut biases, mut compared) = (Vec::new(), Vec::new(), Vec::new());
        for (of, accuracy) in all {
            let samples = match accuracy.errors() {
                Ok(known) => {
                    errors.push(([of, "0.5"], known.p50));
                    errors.push(([of, "0.95"], known.p95));
                    biases.push(([of, ""], known.bias));
                    known.samples
                }
                Err(_) => 0,
            };
            compared.push(([of, ""], samples as f64));
        }
        self.floats(
            "prediction_error_ratio",
            "How far predictions were off, relative to what was measured",
            ["of", "quantile"],
            &errors,
        )?;
        self.floats(
            "prediction_bias_ratio",
            "Median of the signed errors: above 0, too much was predicted",
            ["of", ""],
            &biases,
        )?;
        self.floats(
            "predictions_compared",
            "Predictions that the errors rest on, the last 200",
            ["of", ""],
            &compared,
        )
    }

    fn numbers(&mut self, numbers: &CostCounters) -> fmt::Result {
        let all = [
            (
                "measurements",
                "Transfers taken in as measurements",
                numbers.samples,
            ),
            (
                "measurements_refused",
                "Measurements that cannot be true",
                numbers.refused,
            ),
            (
                "probes",
                "Times that this node probed itself or a link",
                numbers.probes,
            ),
            (
                "report_doubts",
                "Things in other nodes' reports that were not believed",
                numbers.doubts,
            ),
        ];
        for (name, help, value) in all {
            self.counter(name, help, value)?;
        }
        Ok(())
    }

    /// Exports gauges with up to two labels; a label with an empty name is left out.
    fn floats(
        &mut self,
        name: &str,
        help: &str,
        labels: [&'static str; 2],
        values: &Labelled<'_>,
    ) -> fmt::Result {
        let name = format!("permafrost_{name}");
        let mut metric = self
            .0
            .encode_descriptor(&name, help, None, MetricType::Gauge)?;
        for (of, value) in values {
            let pairs: Vec<_> = labels.into_iter().zip(*of).collect();
            let pairs: Vec<_> = pairs
                .into_iter()
                .filter(|(label, _)| !label.is_empty())
                .collect();
            metric.encode_family(&pairs)?.encode_gauge(value)?;
        }
        Ok(())
    }
}

fn push_rates<'a>(to: &mut Labelled<'a>, of: &'a str, rates: &SizedRates) {
    push(to, of, &rates.sustained(), BytesPerSecond::value);
}

fn push<'a, T: Copy>(
    to: &mut Labelled<'a>,
    of: &'a str,
    figure: &Figure<T>,
    value: impl Fn(T) -> f64,
) {
    if let Ok(known) = figure.known() {
        to.push(([of, "0.5"], value(known.p50)));
        to.push(([of, "0.95"], value(known.p95)));
    }
}
