//! Metrics of the process itself and of its object stores.

use std::fmt;
use std::time::Instant;

use permafrost_store::clock::unix_ms;
use prometheus_client::metrics::MetricType;

use super::tell::Told;

impl Told<'_> {
    /// Exports version, age and wall clock. The clock is there so that Prometheus can compare it with its own.
    pub(super) fn process(&mut self, started: Instant) -> fmt::Result {
        let mut build = self.0.encode_descriptor(
            "permafrost_build_info",
            "1, with the version of the program",
            None,
            MetricType::Gauge,
        )?;
        build
            .encode_family(&[("version", env!("CARGO_PKG_VERSION"))])?
            .encode_gauge(&1_i64)?;
        self.gauge(
            "uptime_seconds",
            "Since the daemon started",
            started.elapsed().as_secs(),
        )?;
        self.gauge(
            "clock_seconds",
            "This node's wall clock, since the Unix epoch",
            unix_ms() / 1000,
        )
    }

    /// Exports the requests to object stores.
    pub(super) fn objects(&mut self) -> fmt::Result {
        let counters = permafrost_objects::counters();
        self.counter(
            "object_requests",
            "Requests to object stores of cold tiers",
            counters.requests(),
        )?;
        self.counter(
            "object_failures",
            "Requests that an object store did not answer, or failed",
            counters.failures(),
        )
    }
}
