//! Metrics, scraped over HTTP: exactly those that docs/metrics.md names, and their changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use permafrost_audit::Audit;
use permafrost_cluster::RegistryCounters;
use permafrost_cluster::repair::RepairProgress;
use permafrost_cluster::scrub::{ScrubOptions, Scrubber};
use permafrost_criu::directory::ExportedPart;
use permafrost_criu::frontend::PageSink;
use permafrost_metering::costs::{
    Costs, CostsConfig, Learning, SavedFigures, StartSample, StartWhat,
};
use permafrost_metering::queues::{Direction, Queues, QueuesOptions};
use permafrost_metrics::{CertificateNumbers, ClusterNumbers, Metrics, ReplicationNumbers};
use permafrost_protocol::control::{RetentionRule, request};
use permafrost_quotas::Quotas;
use permafrost_scheduling::quantity::Seconds;
use permafrost_store::CopyRequest;

use super::site::{LIMIT, Site};

const DOCS: &str = include_str!("../../../docs/metrics.md");

/// Returns status line and body.
pub(crate) fn fetch(address: SocketAddr, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

/// Returns samples by name and labels.
fn scrape(address: SocketAddr) -> BTreeMap<String, f64> {
    let (status, body) = fetch(address, "/metrics");
    assert!(status.contains(" 200 "), "{status}");
    assert!(body.ends_with("# EOF\n"), "{body}");
    let samples = body.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

/// Returns names without labels, and for a histogram its base name.
fn families(samples: &BTreeMap<String, f64>) -> BTreeSet<String> {
    let own = samples.keys().map(|name| {
        let name = name.split('{').next().unwrap();
        let of_histogram = ["_bucket", "_sum", "_count"];
        let mut cut = of_histogram.iter().filter_map(|end| name.strip_suffix(end));
        cut.next().unwrap_or(name).to_owned()
    });
    own.collect()
}

/// Returns the names in the first column of the tables of docs/metrics.md.
fn documented() -> BTreeSet<String> {
    let rows = DOCS
        .lines()
        .filter_map(|line| line.strip_prefix("| `permafrost_"));
    rows.map(|row| {
        let name = row.split(['`', '{']).next().unwrap();
        format!("permafrost_{name}")
    })
    .collect()
}

struct Scene {
    site: Site,
    scrubber: Arc<Scrubber>,
    ready: Arc<AtomicBool>,
    _runtime: tokio::runtime::Runtime,
    server: permafrost_metrics::MetricsServer,
}

/// Returns costs in which every figure was measured once.
fn measured() -> Arc<Costs> {
    let costs = Costs::new(CostsConfig::default());
    let sample = |what, bytes, seconds| StartSample {
        what,
        tier: String::new(),
        bytes,
        elapsed: Seconds::new(seconds).unwrap(),
        age: Seconds::ZERO,
    };
    let figures = SavedFigures {
        samples: vec![
            sample(StartWhat::Write, 2 << 30, 2.0),
            sample(StartWhat::Compare, 2 << 30, 1.0),
            sample(StartWhat::Read, 2 << 30, 0.5),
            sample(StartWhat::Link("other".to_owned()), 2 << 30, 4.0),
            sample(StartWhat::WriteTogether, 0, 0.25),
            sample(StartWhat::Read, 0, 0.125),
        ],
        emulated: None,
    };
    costs.install(&figures).unwrap();
    costs
}

/// Returns quotas that are not reached, but for those of the namespace `tight`.
fn quotas() -> Quotas {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("quotas");
    std::fs::write(&path, "* bytes=1G checkpoints=100\ntight checkpoints=1\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    Quotas::load(&path).unwrap()
}

impl Scene {
    fn new() -> Self {
        let costs = measured();
        let observer = Arc::new(Learning(Arc::clone(&costs)));
        let site = Site::with(16 << 20, |parts| {
            parts.observer = observer;
            parts.quotas = Arc::new(quotas());
        });
        // A namespace's use is told when a rule limits it.
        let limited = request::SetRetention {
            rule: Some(RetentionRule {
                namespace: "default".to_owned(),
                max_bytes: Some(1 << 30),
                max_checkpoints: Some(100),
                ..RetentionRule::default()
            }),
            remove: false,
        };
        site.store.set_retention(&limited).unwrap();
        let options = ScrubOptions {
            period: None,
            ..ScrubOptions::default()
        };
        let scrubber = site.scrubber(options);
        let progress = Arc::new(RepairProgress::default());
        progress.copies_made.store(5, Ordering::Relaxed);
        progress.stranded.store(6, Ordering::Relaxed);
        progress.damaged.store(9, Ordering::Relaxed);
        let registry = Arc::new(RegistryCounters::default());
        registry.answered.record(Duration::from_millis(250));
        registry.failed.add(4);
        let queues = Queues::new(QueuesOptions::default());
        drop(queues.run(Direction::Write, 1));
        let metrics = Metrics::new(site.store.local())
            .costs(&costs)
            .scrub(&scrubber)
            .queues(&queues)
            .audit(&Arc::new(Audit::off()))
            .page(Arc::default())
            .retention(&site.store)
            .registry(registry)
            .repair(progress)
            .replication(|| ReplicationNumbers {
                copies_failed: 7,
                copies_replaced: 8,
            })
            .certificate(|| CertificateNumbers {
                expires_s: 86_400,
                denied: 9,
            })
            .cluster(|| ClusterNumbers {
                leader: true,
                fenced: false,
                nodes_live: 3,
                nodes_down: 2,
            });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let ready = Arc::new(AtomicBool::new(true));
        let is_ready = Arc::clone(&ready);
        let server = runtime.block_on(permafrost_metrics::serve(
            SocketAddr::from(([127, 0, 0, 1], 0)),
            metrics,
            move || match is_ready.load(Ordering::Relaxed) {
                true => Ok(vec![
                    "3 listed checkpoints have fewer good copies".to_owned(),
                ]),
                false => Err("no lease".to_owned()),
            },
        ));
        Self {
            site,
            scrubber,
            ready,
            server: server.unwrap(),
            _runtime: runtime,
        }
    }

    fn scrape(&self) -> BTreeMap<String, f64> {
        scrape(self.server.address())
    }
}

#[test]
fn every_documented_name_is_told_and_no_other() {
    let scene = Scene::new();
    // Errors are there when a prediction could be compared.
    scene.site.dump("job", 0..40);
    scene.site.dump("job", 0..40);
    let (told, documented) = (families(&scene.scrape()), documented());
    assert!(documented.len() > 30, "the tables are not found");
    let missing: Vec<_> = documented.difference(&told).collect();
    assert!(missing.is_empty(), "not told: {missing:?}");
    let undocumented: Vec<_> = told.difference(&documented).collect();
    assert!(
        undocumented.is_empty(),
        "not in docs/metrics.md: {undocumented:?}"
    );
}

const ALERTS: &str = include_str!("../../../packaging/prometheus/alerts.yml");
const DASHBOARD: &str = include_str!("../../../packaging/grafana/permafrost.json");
const RUNBOOKS: &str = include_str!("../../../docs/runbooks.md");

/// Returns the names of Permafrost's metrics in a text, as they are told: without the ends of a histogram's series.
fn named(text: &str) -> BTreeSet<String> {
    let is_of_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let words = text.split(|c| !is_of_name(c));
    let ours = words.filter(|word| word.starts_with("permafrost_"));
    let base = ours.map(|word| word.strip_suffix("_bucket").unwrap_or(word).to_owned());
    base.collect()
}

/// Returns the names of the alerts.
fn alerts() -> BTreeSet<&'static str> {
    let names = ALERTS
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    names.collect()
}

#[test]
fn rules_and_dashboard_ask_for_metrics_that_are_told() {
    let scene = Scene::new();
    scene.site.dump("job", 0..40);
    scene.site.dump("job", 0..40);
    let told = families(&scene.scrape());
    for (text, least) in [(ALERTS, 30), (DASHBOARD, 50)] {
        let asked = named(text);
        assert!(asked.len() > least, "{asked:?}");
        let unknown: Vec<_> = asked.difference(&told).collect();
        assert!(unknown.is_empty(), "nobody tells {unknown:?}");
    }
}

#[test]
fn every_alert_has_a_severity_a_summary_and_a_section() {
    let alerts = alerts();
    assert!(alerts.len() > 20, "{alerts:?}");
    let sections = RUNBOOKS
        .lines()
        .filter_map(|line| line.strip_prefix("### "));
    assert_eq!(alerts, sections.collect());
    for rule in ALERTS.split("- alert: ").skip(1) {
        let name = rule.lines().next().unwrap();
        let link = format!("runbooks.md#{}\n", name.to_lowercase());
        assert!(rule.contains(&link), "{rule}");
        assert!(rule.contains("summary: "), "{rule}");
        let severities = ["critical", "warning", "info"];
        let has = |severity: &&str| rule.contains(&format!("severity: {severity}\n"));
        assert_eq!(
            severities.iter().filter(|one| has(one)).count(),
            1,
            "{rule}"
        );
        assert!(rule.contains("job=\"permafrost\""), "{rule}");
    }
}

#[test]
fn figures_are_told_as_they_were_measured() {
    let told = Scene::new().scrape();
    let gib = f64::from(1 << 30);
    for (name, value) in [
        (
            "bandwidth_bytes_per_second{direction=\"write\",quantile=\"0.5\"}",
            gib,
        ),
        (
            "bandwidth_bytes_per_second{direction=\"compare\",quantile=\"0.5\"}",
            2.0 * gib,
        ),
        (
            "bandwidth_bytes_per_second{direction=\"read\",quantile=\"0.5\"}",
            4.0 * gib,
        ),
        (
            "link_bytes_per_second{node=\"other\",quantile=\"0.5\"}",
            0.5 * gib,
        ),
        ("start_seconds{of=\"dump\",quantile=\"0.5\"}", 0.25),
        ("start_seconds{of=\"restore\",quantile=\"0.5\"}", 0.125),
    ] {
        let is = told[&format!("permafrost_{name}")];
        assert!((is / value - 1.0).abs() < 1e-6, "{name}: {is}");
        if !name.starts_with("start") {
            let bad = told[&format!("permafrost_{name}").replace("\"0.5\"", "\"0.95\"")];
            assert!(bad < is, "{name}: {bad}");
        }
    }
    assert!(told["permafrost_bandwidth_age_seconds{direction=\"read\"}"] < 60.0);
    assert_eq!(
        told["permafrost_predictions_compared{of=\"dump_time\"}"],
        0.0
    );
}

#[test]
fn dumps_and_restores_feed_the_figures() {
    let scene = Scene::new();
    let site = &scene.site;
    let before = scene.scrape();
    site.dump("job", 0..400);
    site.dump("job", 0..400);
    let out = tempfile::tempdir().unwrap();
    let directory = OwnedFd::from(File::open(out.path()).unwrap());
    let exported = site
        .store
        .export("job", ExportedPart::All, directory, &mut |_, _| {});
    exported.unwrap();
    let after = scene.scrape();
    // Two transfers; each dump's start, of its kind and of any; each dump as a whole; one restore.
    let measurements = "permafrost_measurements_total";
    assert_eq!(after[measurements] - before[measurements], 9.0);
    // Of the first dump nothing could be expected but its time, had it been known how large it is.
    for (of, compared) in [
        ("dump_time", 1.0),
        ("stored_bytes", 1.0),
        ("moved_bytes", 1.0),
        ("restore_time", 1.0),
    ] {
        assert_eq!(
            after[&format!("permafrost_predictions_compared{{of=\"{of}\"}}")],
            compared,
            "{of}"
        );
    }
    let moved = "permafrost_prediction_error_ratio{of=\"moved_bytes\",quantile=\"0.95\"}";
    assert!(after[moved] < 0.01, "{}", after[moved]);
    assert!(after.contains_key("permafrost_prediction_bias_ratio{of=\"restore_time\"}"));
}

#[test]
fn what_others_count_is_passed_on() {
    let told = Scene::new().scrape();
    for (name, value) in [
        ("permafrost_repair_copies_made_total", 5.0),
        ("permafrost_repair_stranded", 6.0),
        ("permafrost_repair_damaged", 9.0),
        ("permafrost_registry_failures_total", 4.0),
        ("permafrost_registry_request_seconds_count", 1.0),
        ("permafrost_registry_request_seconds_sum", 0.25),
        (
            "permafrost_registry_request_seconds_bucket{le=\"0.1\"}",
            0.0,
        ),
        (
            "permafrost_registry_request_seconds_bucket{le=\"+Inf\"}",
            1.0,
        ),
        ("permafrost_replication_copies_failed_total", 7.0),
        ("permafrost_replication_copies_replaced_total", 8.0),
        ("permafrost_cluster_leader", 1.0),
        ("permafrost_cluster_fenced", 0.0),
        ("permafrost_cluster_nodes_live", 3.0),
        ("permafrost_cluster_nodes_down", 2.0),
        ("permafrost_queue_slots{direction=\"read\"}", 2.0),
        ("permafrost_queue_turns_total{direction=\"write\"}", 1.0),
        ("permafrost_queue_turns_total{direction=\"read\"}", 0.0),
    ] {
        assert_eq!(told.get(name), Some(&value), "{name}");
    }
}

#[test]
fn dumps_copies_and_restores_move_them() {
    let scene = Scene::new();
    let site = &scene.site;
    let before = scene.scrape();
    let moved = || {
        let mut moved = scene.scrape();
        for (name, value) in &mut moved {
            *value -= before.get(name).copied().unwrap_or(0.0);
        }
        moved
    };
    let is = |moved: &BTreeMap<String, f64>, name: &str, value: f64| {
        let name = format!("permafrost_{name}");
        assert_eq!(moved.get(&name), Some(&value), "{name}");
    };

    // One sealed, one discarded, one under way.
    site.dump("job", 0..40);
    let (failed, sink) = site.begin("job", 0..3);
    drop(sink);
    site.store.abort_session(&failed).unwrap();
    let (_, receiving) = site.begin("job", 0..2);
    let now = moved();
    is(&now, "dumps_begun_total", 3.0);
    is(&now, "dumps_sealed_total", 1.0);
    is(&now, "dumps_failed_total", 1.0);
    is(&now, "dumps_parked_total", 0.0);
    is(&now, "received_bytes_total", 45.0 * 4096.0);
    is(&now, "checkpoints{kind=\"full\"}", 1.0);
    is(&now, "checkpoints{kind=\"parked\"}", 0.0);
    is(&now, "sessions{state=\"receiving\"}", 1.0);
    is(&now, "seal_seconds_count", 1.0);
    is(&now, "dump_seconds_count", 1.0);
    is(&now, "seal_seconds_bucket{le=\"+Inf\"}", 1.0);
    assert!(now["permafrost_seal_seconds_sum"] > 0.0);
    assert!(now["permafrost_region_free_bytes"] < 0.0);
    assert_eq!(now["permafrost_region_capacity_bytes"], 0.0);
    drop(receiving);

    // CLOSE is the last word of this one.
    let (_, mut parked) = site.begin_bare(50..60);
    parked.close().unwrap();
    drop(parked);
    let now = moved();
    is(&now, "dumps_parked_total", 1.0);
    is(&now, "checkpoints{kind=\"parked\"}", 1.0);

    // A copy for another node, given up.
    let request = CopyRequest {
        session: [9; 16],
        job: "theirs".to_owned(),
        parent: String::new(),
        compared: std::collections::HashMap::new(),
    };
    let mut copy = site.store.local().open_copy(request).unwrap();
    copy.space(super::site::space(), 1).unwrap();
    copy.pages(0, 0, &[3; 4096]).unwrap();
    drop(copy);
    let now = moved();
    is(&now, "copies_begun_total", 1.0);
    is(&now, "copies_sealed_total", 0.0);
    is(&now, "copies_received_bytes_total", 4096.0);

    // Restores, as the daemon counts them.
    let since = Instant::now();
    let out = tempfile::tempdir().unwrap();
    let directory = OwnedFd::from(File::open(out.path()).unwrap());
    let exported = site
        .store
        .export("job", ExportedPart::All, directory, &mut |_, _| {});
    let bytes = site
        .store
        .local()
        .counters()
        .restored(since, exported, |exported| exported.bytes)
        .unwrap()
        .bytes;
    let failed = site.store.check_restorable("job").and_then(|()| {
        let directory = OwnedFd::from(File::open(out.path()).unwrap());
        site.store
            .export("nothing", ExportedPart::All, directory, &mut |_, _| {})
    });
    assert!(
        site.store
            .local()
            .counters()
            .restored(since, failed, |failed| failed.bytes)
            .is_err()
    );
    let now = moved();
    is(&now, "restores_total", 1.0);
    is(&now, "restore_seconds_count", 1.0);
    is(&now, "restores_failed_total", 1.0);
    #[expect(clippy::cast_precision_loss, reason = "some hundred KiB")]
    is(&now, "restored_bytes_total", bytes as f64);
}

#[test]
fn a_quota_that_refuses_is_counted() {
    let scene = Scene::new();
    let (store, counter) = (&scene.site.store, "permafrost_quota_refusals_total");
    scene.site.dump("tight/x", 0..2);
    scene.site.dump("loose/x", 0..2);
    store.local().check_may_open("loose/x").unwrap();
    assert_eq!(scene.scrape()[counter], 0.0);
    store.local().check_may_open("tight/x").unwrap_err();
    assert_eq!(scene.scrape()[counter], 1.0);
}

#[test]
fn the_scrub_moves_its_own() {
    let scene = Scene::new();
    scene.site.dump("job", 0..40);
    scene.site.flip_page(4);
    std::thread::sleep(Duration::from_millis(1100));
    let told = scene.scrape();
    assert!(told["permafrost_scrub_oldest_seconds"] >= 1.0);
    assert_eq!(told["permafrost_scrub_pages_total"], 0.0);
    scene.site.scrub().scrub("", false, &mut |_, _| {}).unwrap();
    let told = scene.scrape();
    assert!(told["permafrost_scrub_pages_total"] > 40.0);
    assert!(told["permafrost_scrub_read_bytes_total"] > 40.0 * 4096.0);
    for (name, value) in [
        ("checkpoints_total", 1.0),
        ("damaged_total", 1.0),
        ("quarantined", 1.0),
        ("mended_total", 0.0),
        ("paused", 0.0),
    ] {
        assert_eq!(told[&format!("permafrost_scrub_{name}")], value, "{name}");
    }
    assert_eq!(scene.scrubber.counters().damaged.value(), 1);
}

#[test]
fn it_says_whether_it_lives_and_whether_it_is_ready() {
    let scene = Scene::new();
    let address = scene.server.address();
    let (status, body) = fetch(address, "/healthz");
    assert!(
        status.contains(" 200 ") && body == "ok\n",
        "{status} {body}"
    );
    // What is amiss is said, and keeps nobody from dumping.
    let (status, body) = fetch(address, "/readyz");
    assert!(
        status.contains(" 200 ") && body == "ready\n3 listed checkpoints have fewer good copies\n",
        "{status} {body}"
    );
    scene.ready.store(false, Ordering::Relaxed);
    let (status, body) = fetch(address, "/readyz");
    assert!(
        status.contains(" 503 ") && body == "no lease\n",
        "{status} {body}"
    );
    assert!(fetch(address, "/healthz").0.contains(" 200 "));
    assert!(fetch(address, "/else").0.contains(" 404 "));
}
