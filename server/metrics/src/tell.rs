//! Metrics in the text format of Prometheus. docs/metrics.md has the same names.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use permafrost_cluster::repair;
use permafrost_cluster::scrub::Scrubber;
use permafrost_metering::QueueReport;
use permafrost_metering::queues::{Direction, QueueCounters, Queues};
use permafrost_store::{BOUNDS_S, Counter, Counters, Store, Timings};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::Metrics;

impl Metrics {
    /// Returns all metrics as text. Reads the catalog, so it blocks and must not be called from a task of the
    /// runtime.
    ///
    /// # Errors
    /// Never; the format is written to memory.
    pub(super) fn text(self: &std::sync::Arc<Self>) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(std::sync::Arc::clone(self)));
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut told = Told(encoder);
        told.process(self.started)?;
        told.store(&self.store)?;
        told.objects()?;
        told.counters(self.store.counters())?;
        told.namespaces(&self.store.namespace_usage(&|_| 0))?;
        if let Some(costs) = &self.costs {
            told.costs(costs)?;
        }
        if let Some(scrub) = &self.scrub {
            told.scrub(scrub)?;
        }
        if let Some(repair) = &self.repair {
            told.repair(repair)?;
        }
        if let Some(replication) = &self.replication {
            let numbers = replication();
            told.counter(
                "replication_copies_failed",
                "Copies of this node's dumps that failed while they streamed",
                numbers.copies_failed,
            )?;
            told.counter(
                "replication_copies_replaced",
                "Failed copies that a node pulled before the commit",
                numbers.copies_replaced,
            )?;
        }
        if let Some(cluster) = &self.cluster {
            let numbers = cluster();
            told.gauge(
                "cluster_leader",
                "1 on the node that works in the background for all",
                u64::from(numbers.leader),
            )?;
            told.gauge(
                "cluster_fenced",
                "1 while this node has no lease",
                u64::from(numbers.fenced),
            )?;
            told.gauge(
                "cluster_nodes_live",
                "Nodes whose lease lives",
                numbers.nodes_live,
            )?;
            told.gauge(
                "cluster_nodes_down",
                "Nodes that are neither alive nor removed",
                numbers.nodes_down,
            )?;
        }
        if let Some(registry) = &self.registry {
            told.histogram(
                "registry_request_seconds",
                "Calls to etcd that were answered",
                &registry.answered,
            )?;
            told.counter(
                "registry_failures",
                "Calls to etcd that were not answered in time, or refused",
                registry.failed.value(),
            )?;
        }
        if let Some(certificate) = &self.certificate {
            let numbers = certificate();
            told.gauge(
                "certificate_expires_seconds",
                "Until this node's certificate is over",
                numbers.expires_s,
            )?;
            told.gauge(
                "certificates_denied",
                "Entries of the list of denied certificates",
                numbers.denied,
            )?;
        }
        if let Some(queues) = &self.queues {
            told.queues(queues)?;
        }
        if let Some(store) = &self.retention {
            told.retention(store)?;
        }
        if let Some(audit) = &self.audit {
            told.counter(
                "audit_lines_lost",
                "Lines that are missing from the audit log: it could not be written, or the disk was too slow",
                audit.lost(),
            )?;
        }
        if let Some(page) = &self.page {
            told.counter(
                "page_requests",
                "Requests for files of the page at /ui, which anybody who reaches the port may make",
                page.load(Ordering::Relaxed),
            )?;
        }
        Ok(())
    }
}

pub(super) struct Told<'a>(pub(super) DescriptorEncoder<'a>);

impl Told<'_> {
    /// Exports a counter; the encoder appends `_total` to the name.
    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let name = format!("permafrost_{name}");
        let mut metric = self
            .0
            .encode_descriptor(&name, help, None, MetricType::Counter)?;
        metric.encode_counter::<NoLabelSet, u64, u64>(&value, None)
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let name = format!("permafrost_{name}");
        let mut metric = self
            .0
            .encode_descriptor(&name, help, None, MetricType::Gauge)?;
        metric.encode_gauge(&Whole(value))
    }

    /// Exports one counter for each value of a label.
    pub(super) fn counters_by(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: &BTreeMap<String, u64>,
    ) -> fmt::Result {
        self.by_label(name, help, MetricType::Counter, (label, values))
    }

    /// Exports one gauge for each value of a label.
    pub(super) fn gauges(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: &BTreeMap<String, u64>,
    ) -> fmt::Result {
        self.by_label(name, help, MetricType::Gauge, (label, values))
    }

    fn by_label(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        (label, values): (&'static str, &BTreeMap<String, u64>),
    ) -> fmt::Result {
        let name = format!("permafrost_{name}");
        let mut metric = self.0.encode_descriptor(&name, help, None, kind)?;
        for (value, count) in values {
            let labels = [(label, value.as_str())];
            let mut one = metric.encode_family(&labels)?;
            match kind {
                MetricType::Counter => one.encode_counter::<NoLabelSet, u64, u64>(count, None)?,
                _ => one.encode_gauge(&Whole(*count))?,
            }
        }
        Ok(())
    }

    fn histogram(&mut self, name: &str, help: &str, timings: &Timings) -> fmt::Result {
        let name = format!("permafrost_{name}");
        let counts = timings.counts();
        // What is beyond the last bound is the encoder's f64::MAX.
        let bounds = BOUNDS_S.into_iter().chain([f64::MAX]);
        let buckets: Vec<_> = bounds.zip(counts).collect();
        let mut metric = self
            .0
            .encode_descriptor(&name, help, None, MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(
            timings.sum().as_secs_f64(),
            counts.iter().sum(),
            &buckets,
            None,
        )
    }

    /// Tells of each tier of the region's media.
    fn media(&mut self, store: &Store) -> fmt::Result {
        let (mut room, mut free, mut used) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut missing = 0;
        for medium in store.region().media() {
            let tier = medium.tier.to_string();
            *room.entry(tier.clone()).or_default() += medium.capacity_bytes;
            *free.entry(tier.clone()).or_default() += medium.free_bytes;
            *used.entry(tier).or_default() += medium.used_bytes;
            missing += u64::from(medium.guarantee.is_none());
        }
        let help = "Bytes in the segments of a tier's media";
        self.gauges("tier_capacity_bytes", help, "tier", &room)?;
        let help = "Bytes of free segments of a tier's media";
        self.gauges("tier_free_bytes", help, "tier", &free)?;
        let help = "Bytes of segments of a tier's media that are in use";
        self.gauges("tier_used_bytes", help, "tier", &used)?;
        let help = "Files of the region that are missing";
        self.gauge("region_missing_media", help, missing)
    }

    fn store(&mut self, store: &Store) -> fmt::Result {
        let usage = store.region().usage();
        self.gauge(
            "region_capacity_bytes",
            "Bytes in the region's segments",
            usage.capacity_bytes,
        )?;
        self.gauge(
            "region_free_bytes",
            "Bytes in segments that nobody holds",
            usage.free_bytes,
        )?;
        self.gauge(
            "region_failed",
            "1 if the region takes no writes: its medium failed, or its journal is damaged",
            u64::from(store.region().failure().is_some()),
        )?;
        self.gauge(
            "region_lost_pages",
            "Pages that the medium could not give or take since the start",
            store.region().lost_pages(),
        )?;
        self.gauge(
            "region_unreadable_checkpoints",
            "Checkpoints that could not be read when the region was opened",
            store.region().damaged().len() as u64,
        )?;
        self.media(store)?;
        let mut kinds = zeros(&["full", "pre-dump", "pre-copy", "parked", "unknown"]);
        kinds.extend(store.count_kinds());
        self.gauges(
            "checkpoints",
            "Checkpoints that this node holds",
            "kind",
            &kinds,
        )?;
        let mut states = zeros(&["open", "receiving", "closed", "sealing", "failed"]);
        for session in store.session_states() {
            *states.entry(session.state).or_default() += 1;
        }
        self.gauges(
            "sessions",
            "Dumps that are not sealed, or failed of late",
            "state",
            &states,
        )
    }

    fn counters(&mut self, counters: &Counters) -> fmt::Result {
        let all = [
            ("dumps_begun", "Sessions opened", &counters.dumps_begun),
            (
                "dumps_sealed",
                "Sessions that became checkpoints",
                &counters.dumps_sealed,
            ),
            (
                "dumps_parked",
                "Sessions parked at CLOSE",
                &counters.dumps_parked,
            ),
            (
                "dumps_failed",
                "Sessions that failed or were discarded",
                &counters.dumps_failed,
            ),
            (
                "freeze_limits_reached",
                "Dumps that were given up at the freeze limit",
                &counters.freeze_limits_reached,
            ),
            (
                "quota_refusals",
                "Requests that a quota refused",
                &counters.quota_refusals,
            ),
            (
                "received_bytes",
                "Bytes of pages that sessions received",
                &counters.received_bytes,
            ),
            (
                "copies_begun",
                "Copies of other nodes' dumps begun here",
                &counters.copies_begun,
            ),
            (
                "copies_sealed",
                "Copies of other nodes' dumps sealed here",
                &counters.copies_sealed,
            ),
            (
                "copies_received_bytes",
                "Bytes of pages that came for copies",
                &counters.copies_received_bytes,
            ),
            (
                "restores",
                "Restores served and images directories written",
                &counters.restores,
            ),
            (
                "restores_failed",
                "Those that failed",
                &counters.restores_failed,
            ),
            (
                "restored_bytes",
                "Bytes of images given to them",
                &counters.restored_bytes,
            ),
            (
                "cleaned_bytes",
                "Bytes of the region that cleaning freed",
                &counters.cleaned_bytes,
            ),
            (
                "moved_bytes",
                "Bytes that cleaning wrote",
                &counters.moved_bytes,
            ),
            (
                "tiered_bytes",
                "Bytes that moved between tiers of the region",
                &counters.tiered_bytes,
            ),
        ];
        for (name, help, count) in all {
            self.counter(name, help, count.value())?;
        }
        self.histogram(
            "dump_seconds",
            "From the opening of a session to its checkpoint",
            &counters.dumps,
        )?;
        self.histogram(
            "restore_seconds",
            "From the request of a restore to its last byte",
            &counters.restore_times,
        )?;
        self.histogram(
            "seal_seconds",
            "From the request to seal to the checkpoint",
            &counters.seals,
        )
    }

    fn scrub(&mut self, scrub: &Scrubber) -> fmt::Result {
        let status = scrub.status();
        let counters = scrub.counters();
        self.gauge(
            "scrub_oldest_seconds",
            "Since the least recently verified checkpoint was",
            status.oldest_s,
        )?;
        self.gauge(
            "scrub_quarantined",
            "Checkpoints that are damaged and set aside",
            status.quarantined,
        )?;
        self.gauge(
            "scrub_paused",
            "1 while the scrub waits for dumps to be in",
            u64::from(scrub.is_paused()),
        )?;
        let all = [
            (
                "scrub_checkpoints",
                "Checkpoints verified",
                &counters.checkpoints,
            ),
            (
                "scrub_pages",
                "Pages verified, shared ones each time",
                &counters.pages,
            ),
            (
                "scrub_read_bytes",
                "Bytes read for it",
                &counters.read_bytes,
            ),
            (
                "scrub_damaged",
                "Checkpoints found damaged",
                &counters.damaged,
            ),
            (
                "scrub_mended",
                "Damaged ones that were healed",
                &counters.mended,
            ),
            (
                "scrub_pages_healed",
                "Damaged pages that were written anew in their places",
                &counters.pages_healed,
            ),
            (
                "scrub_mends_failed",
                "Times that healing failed",
                &counters.mends_failed,
            ),
        ];
        for (name, help, count) in all {
            self.counter(name, help, count.value())?;
        }
        Ok(())
    }

    fn repair(&mut self, progress: &repair::RepairProgress) -> fmt::Result {
        let value = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let counters = [
            (
                "repair_copies_made",
                "Copies made anew",
                &progress.copies_made,
            ),
            (
                "repair_copied_bytes",
                "Bytes of their memory",
                &progress.bytes_copied,
            ),
            (
                "repair_copies_failed",
                "Copies that were not made",
                &progress.copies_failed,
            ),
            (
                "repair_copies_dropped",
                "Surplus copies dropped",
                &progress.copies_dropped,
            ),
            (
                "repair_rounds",
                "Times that everything was looked through",
                &progress.rounds,
            ),
        ];
        for (name, help, number) in counters {
            self.counter(name, help, value(number))?;
        }
        let gauges = [
            (
                "repair_under_replicated",
                "Checkpoints with fewer good copies than wanted",
                &progress.under_replicated,
            ),
            (
                "repair_stranded",
                "Checkpoints that no live node holds undamaged",
                &progress.stranded,
            ),
            (
                "repair_damaged",
                "Copies that are known to be damaged",
                &progress.damaged,
            ),
            ("repair_under_way", "Copies under way", &progress.under_way),
        ];
        for (name, help, number) in gauges {
            self.gauge(name, help, value(number))?;
        }
        Ok(())
    }
}

// Queues.

impl Told<'_> {
    fn queues(&mut self, queues: &Queues) -> fmt::Result {
        let (reports, counters) = (queues.report(), queues.counters());
        type Gauge = fn(&QueueReport) -> u64;
        let gauges: [(&str, &str, Gauge); 5] = [
            ("running", "Turns that run", |report| report.running.into()),
            ("waiting", "Requests that wait", |report| {
                report.waiting.into()
            }),
            ("reserved", "Places reserved and not taken up", |report| {
                report.reserved.into()
            }),
            (
                "bytes",
                "Bytes that all of these still have to move",
                |report| report.bytes,
            ),
            ("slots", "How many may run at once", |report| {
                report.slots.into()
            }),
        ];
        for (name, help, of) in gauges {
            let values = Direction::ALL.into_iter().zip(&reports);
            let values =
                values.map(|(direction, report)| (direction.name().to_owned(), of(report)));
            self.gauges(
                &format!("queue_{name}"),
                help,
                "direction",
                &values.collect(),
            )?;
        }
        type CounterOf = fn(&QueueCounters) -> &Counter;
        let counts: [(&str, &str, CounterOf); 4] = [
            ("turns", "Turns that have begun", |counters| &counters.turns),
            (
                "refused",
                "Requests refused as too many waited",
                |counters| &counters.refused,
            ),
            ("gone", "Callers that went while they waited", |counters| {
                &counters.gone
            }),
            (
                "lapsed",
                "Reservations that were not taken up",
                |counters| &counters.lapsed,
            ),
        ];
        for (name, help, of) in counts {
            let name = format!("permafrost_queue_{name}");
            let mut metric = (self.0).encode_descriptor(&name, help, None, MetricType::Counter)?;
            for (direction, counters) in Direction::ALL.into_iter().zip(counters) {
                let labels = [("direction", direction.name())];
                let value = of(counters).value();
                metric
                    .encode_family(&labels)?
                    .encode_counter::<NoLabelSet, u64, u64>(&value, None)?;
            }
        }
        for (direction, counters) in Direction::ALL.into_iter().zip(counters) {
            self.histogram(
                &format!("queue_{direction}_wait_seconds"),
                "From a request to its turn",
                &counters.waits,
            )?;
        }
        Ok(())
    }
}

fn zeros(names: &[&str]) -> BTreeMap<String, u64> {
    names.iter().map(|name| ((*name).to_owned(), 0)).collect()
}

/// Gauge with an integer value, because the encoder supports `f64` and `i64` only.
struct Whole(u64);

impl prometheus_client::encoding::EncodeGaugeValue for Whole {
    fn encode(
        &self,
        encoder: &mut prometheus_client::encoding::GaugeValueEncoder<'_>,
    ) -> fmt::Result {
        i64::try_from(self.0).unwrap_or(i64::MAX).encode(encoder)
    }
}
