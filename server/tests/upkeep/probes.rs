//! Probes of an idle node: their measurements, the conditions under which they pause, and that they leave nothing
//! behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_criu::frontend::PageSink;
use permafrost_metering::costs::{Costs, CostsConfig, Learning, Links, Prober};
use permafrost_scheduling::quantity::Bytes;

use super::site::Site;

const HOUR: Duration = Duration::from_secs(3600);

/// A store with room for probes, measured.
fn site(region_bytes: u64) -> (Site, Arc<Costs>) {
    let costs = Costs::new(CostsConfig::default());
    let observer = Arc::new(Learning(Arc::clone(&costs)));
    let site = Site::with(region_bytes, |parts| parts.observer = observer);
    (site, costs)
}

fn prober(
    site: &Site,
    costs: &Arc<Costs>,
    links: Option<Arc<dyn Links>>,
    period: Duration,
) -> Arc<Prober> {
    Prober::new(site.store.local(), costs, links, period)
}

fn knows(costs: &Costs) -> (bool, bool) {
    let report = costs.report();
    let known =
        |rates: &permafrost_scheduling::estimator::SizedRates| rates.of(Bytes::mib(16)).known();
    (known(&report.write).is_ok(), known(&report.read).is_ok())
}

/// Probes until everything was tried. Returns the number of figures.
fn all_turns(prober: &Prober) -> usize {
    (0..6).filter(|_| prober.turn()).count()
}

#[test]
fn an_idle_node_measures_what_nothing_else_does_and_leaves_nothing() {
    let (site, costs) = site(64 << 20);
    let free = || site.store.local().region().usage().free_bytes;
    let prober_of_all = prober(&site, &costs, None, Duration::ZERO);
    let before = free();
    assert!(all_turns(&prober_of_all) > 0);
    assert_eq!(knows(&costs), (true, false), "nothing is held to be read");
    assert_eq!(free(), before);
    site.dump("job", 0..40);
    let before = free();
    assert!(all_turns(&prober_of_all) > 1);
    assert_eq!(knows(&costs), (true, true));
    assert_eq!(free(), before);
    assert_eq!(costs.numbers().refused, 0);
    assert!(costs.numbers().probes > 1);
}

#[test]
fn what_was_measured_or_tried_within_the_period_is_left_alone() {
    let (site, costs) = site(64 << 20);
    assert_eq!(all_turns(&prober(&site, &costs, None, HOUR)), 0);
    assert_eq!(costs.numbers().probes, 0);
}

#[test]
fn while_a_dump_comes_in_it_keeps_still() {
    let (site, costs) = site(64 << 20);
    let prober = prober(&site, &costs, None, Duration::ZERO);
    let (session, mut sink) = site.begin("job", 0..3);
    assert_eq!(all_turns(&prober), 0);
    // Nor while it waits for its seal, or somebody reads.
    sink.close().unwrap();
    assert_eq!(all_turns(&prober), 0);
    site.store.abort_session(&session).unwrap();
    drop(sink);
    let reading = costs.begin_restore(1 << 20);
    assert_eq!(all_turns(&prober), 0);
    drop(reading);
    assert!(all_turns(&prober) > 0);
}

#[test]
fn a_region_without_room_is_not_written_to() {
    let (site, costs) = site(16 << 20);
    let prober = prober(&site, &costs, None, Duration::ZERO);
    assert_eq!(all_turns(&prober), 0);
    assert_eq!(knows(&costs), (false, false));
}

/// Two nodes, one of which does not answer.
#[derive(Default)]
struct Two {
    asked: AtomicUsize,
    log: Mutex<Vec<String>>,
}

impl Links for Two {
    fn peers(&self) -> Vec<String> {
        vec!["near".to_owned(), "gone".to_owned()]
    }

    fn probe(&self, peer: &str) -> Result<Duration, String> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.log.lock().push(peer.to_owned());
        match peer {
            "near" => Ok(Duration::from_millis(80)),
            _ => Err("it does not answer".to_owned()),
        }
    }
}

#[test]
fn links_are_probed_each_in_its_turn_and_one_that_fails_is_no_figure() {
    let (site, costs) = site(16 << 20);
    let links = Arc::new(Two::default());
    let asked: Arc<dyn Links> = Arc::<Two>::clone(&links);
    // Due at once, and once tried not for so long as this takes.
    let prober = prober(&site, &costs, Some(asked), Duration::from_millis(1));
    for _ in 0..40 {
        prober.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
    let log = links.log.lock().clone();
    for peer in ["near", "gone"] {
        assert!(
            log.iter().filter(|asked| *asked == peer).count() > 1,
            "{log:?}"
        );
    }
    let report = costs.report();
    let near = report.links["near"].of(Bytes::mib(8)).known().unwrap();
    assert!((near.p50.value() / (100.0 * 1048576.0) - 1.0).abs() < 1e-3);
    assert!(!report.links.contains_key("gone"));
}

#[test]
fn it_works_in_the_background_and_ends() {
    let (site, costs) = site(64 << 20);
    let probing = prober(&site, &costs, None, Duration::ZERO).start().unwrap();
    let until = std::time::Instant::now() + super::site::LIMIT;
    while costs.numbers().probes == 0 {
        assert!(std::time::Instant::now() < until, "it does not probe");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(probing);
    let probes = costs.numbers().probes;
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(costs.numbers().probes, probes);
}
