//! An idle node probes itself, gently: figures that nothing renews are reported as old, and later not at all.
//!
//! For each channel that was not measured for a while, the prober makes one small transfer while nothing else
//! runs: pages into free segments, which are given back; pages of a checkpoint, read and verified; a small dump
//! to another node, given up before it is sealed. An interrupted probe leaves what a failed dump leaves:
//! segments that nothing references.
//!
//! A probe measures the medium's rate, and a dump's rate is limited by CRIU as well. So probes are used only
//! where nothing else was measured.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use permafrost_pmem::{PAGE_SIZE, ShadowError};
use permafrost_scheduling::estimator::Direction;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::quantity::Bytes;
use permafrost_store::Store;

use super::channels::Lane;
use super::measure::ScrubDone;
use super::report::NodeReport;
use super::state::Costs;

/// Bytes that a probe writes or reads: enough that its rate is not its latency, and a tenth of a second on a
/// disk.
pub const PROBE_BYTES: u64 = 16 << 20;

/// Bytes that a probe sends to another node.
pub const LINK_PROBE_BYTES: u64 = 8 << 20;

/// Bytes written at a time; between two writes the probe checks whether a dump has come.
const STEP: usize = 1 << 20;

/// Divisor for the free part of a region below which no probe writes to it: an eighth.
const ROOM: u64 = 8;

/// Checks for a due probe per period; the interval is at least [`LOOK`].
const LOOKS: u32 = 10;

/// Shortest interval between two checks for a due probe.
const LOOK: Duration = Duration::from_secs(1);

/// Uptime of the daemon after which a medium that was never measured is probed: until then only the cost of a
/// kill can be estimated.
const FIRST: Duration = Duration::from_secs(2);

/// Longest wait for the end of the thread, which may be writing to a disk.
const PATIENCE: Duration = Duration::from_secs(5);

/// The links to other nodes, as far as they can be probed.
pub trait Links: Send + Sync {
    /// Returns the nodes that live and have room, without this one.
    fn peers(&self) -> Vec<String>;

    /// Sends [`LINK_PROBE_BYTES`] to a node, which discards them; returns the elapsed time. Blocks.
    ///
    /// # Errors
    /// The reason why the probe failed, in words.
    fn probe(&self, peer: &str) -> Result<Duration, String>;
}

/// A channel that can be probed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Probe {
    Write,
    Read,
    Link(String),
}

/// Reason why a probe gave no figure.
#[derive(Debug, thiserror::Error)]
enum NoProbe {
    #[error("a dump has come")]
    Interrupted,
    #[error("the region has no room for it")]
    NoRoom,
    #[error("nothing is held")]
    NothingHeld,
    #[error("write to the region")]
    Write(#[from] ShadowError),
    #[error("{0}")]
    Link(String),
}

/// Probes channels that were not measured for a period.
pub struct Prober {
    store: Arc<Store>,
    costs: Arc<Costs>,
    links: Option<Arc<dyn Links>>,
    period: Duration,
    began: Instant,
    /// Time of the last attempt for each channel, successful or not.
    tried: Mutex<HashMap<Probe, Instant>>,
    stopped: Mutex<bool>,
    woken: Condvar,
}

impl Prober {
    /// Creates a prober for the store's own medium, and the `links` of a node of a cluster.
    #[must_use]
    pub fn new(
        store: &Arc<Store>,
        costs: &Arc<Costs>,
        links: Option<Arc<dyn Links>>,
        period: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            store: Arc::clone(store),
            costs: Arc::clone(costs),
            links,
            period,
            began: Instant::now(),
            tried: Mutex::default(),
            stopped: Mutex::new(false),
            woken: Condvar::new(),
        })
    }

    /// Probes in the background until the returned value is dropped.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(self: &Arc<Self>) -> io::Result<Probing> {
        let prober = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("probe".to_owned())
            .spawn(move || prober.run())?;
        Ok(Probing {
            prober: Arc::clone(self),
            thread,
        })
    }

    fn run(&self) {
        let patient = (self.period / LOOKS).max(LOOK);
        let mut look = LOOK;
        while !self.nap(look) {
            self.turn();
            let report = self.costs.report();
            let known = medium(&report).iter().all(|(_, age)| age.is_some());
            look = if known { patient } else { LOOK };
        }
    }

    /// Makes the most overdue probe, if one is due and the node is idle. Returns true if it made one.
    pub fn turn(&self) -> bool {
        let report = self.costs.report();
        if self.is_busy() || !is_idle(&report) {
            return false;
        }
        for probe in self.due(&report) {
            let probed = self.probe(&probe);
            match probed {
                // The first dump makes this probe possible; a probe that a dump interrupted stays due.
                Err(NoProbe::NothingHeld) => continue,
                Err(NoProbe::Interrupted) => {}
                _ => _ = self.tried().insert(probe.clone(), Instant::now()),
            }
            return match probed {
                Ok(()) => {
                    self.costs.probed();
                    tracing::debug!(?probe, "probed");
                    true
                }
                Err(why) => {
                    tracing::debug!(?probe, %why, "not probed");
                    false
                }
            };
        }
        false
    }

    /// Returns the probes that are due, the most overdue first.
    fn due(&self, report: &NodeReport) -> Vec<Probe> {
        let mut all = Vec::from(medium(report));
        for peer in self.links.iter().flat_map(|links| links.peers()) {
            let link = report.links.get(&peer);
            let age = link.and_then(|link| age_of(&link.of(Bytes::new(LINK_PROBE_BYTES))));
            all.push((Probe::Link(peer), age));
        }
        let tried = self.tried();
        let since = |(probe, measured): (Probe, Option<Duration>)| {
            // A medium that was never measured is due soon, and a link once the daemon has run for a period: there
            // are many links, and each probe is also work for another node.
            let known = measured.unwrap_or_else(|| match probe {
                Probe::Link(_) => self.began.elapsed(),
                Probe::Write | Probe::Read if self.began.elapsed() < FIRST.min(self.period) => {
                    Duration::ZERO
                }
                Probe::Write | Probe::Read => Duration::MAX,
            });
            let since = tried
                .get(&probe)
                .map_or(known, |tried| known.min(tried.elapsed()));
            (since, probe)
        };
        let mut due: Vec<_> = all.into_iter().map(since).collect();
        due.retain(|(since, _)| *since >= self.period);
        due.sort_by_key(|(since, _)| Reverse(*since));
        due.into_iter().map(|(_, probe)| probe).collect()
    }

    fn probe(&self, probe: &Probe) -> Result<(), NoProbe> {
        match probe {
            Probe::Write => {
                let elapsed = self.write()?;
                self.costs.probed_write(PROBE_BYTES, elapsed);
            }
            Probe::Read => self.costs.scrubbed(&self.read()?),
            Probe::Link(peer) => {
                let links = self.links.as_ref();
                let links = links.ok_or_else(|| NoProbe::Link("no links".to_owned()))?;
                let elapsed = links.probe(peer).map_err(NoProbe::Link)?;
                self.costs.copied(peer, LINK_PROBE_BYTES, elapsed);
            }
        }
        Ok(())
    }

    /// Writes into segments that nothing references, as a dump does, and returns the elapsed time. The segments are
    /// free again afterwards.
    fn write(&self) -> Result<Duration, NoProbe> {
        let usage = self.store.region().usage();
        if usage.free_bytes < PROBE_BYTES.saturating_add(usage.capacity_bytes / ROOM) {
            return Err(NoProbe::NoRoom);
        }
        let pages = noise(STEP);
        let since = Instant::now();
        let mut shadow = self.store.region().begin();
        let mut map = shadow.map();
        let per_step = (STEP / PAGE_SIZE) as u64;
        for step in 0..PROBE_BYTES / STEP as u64 {
            if self.is_busy() {
                return Err(NoProbe::Interrupted);
            }
            shadow.append(&mut map, step * per_step, 0, &pages, None)?;
        }
        shadow.finish(map)?;
        shadow.flush()?;
        Ok(since.elapsed())
    }

    /// Reads pages of the largest checkpoint here, and verifies them, as a restore does.
    fn read(&self) -> Result<ScrubDone, NoProbe> {
        let listed = self.store.region().listed();
        let largest = listed.iter().max_by_key(|listed| listed.segments);
        let largest = largest.and_then(|largest| self.store.held_copy(&largest.id.to_string()));
        let largest = largest.ok_or(NoProbe::NothingHeld)?;
        let since = Instant::now();
        let mut bytes = 0;
        let mut interrupted = false;
        let checked = self.store.check(&largest, None, &mut |_, read| {
            bytes += read;
            interrupted = self.is_busy();
            bytes < PROBE_BYTES && !interrupted
        });
        let elapsed = since.elapsed();
        match checked {
            _ if interrupted => Err(NoProbe::Interrupted),
            // The checkpoint was removed a moment ago.
            Err(_) => Err(NoProbe::NothingHeld),
            // Damage is left to the scrub, which will find it.
            Ok(_) => Ok(ScrubDone { bytes, elapsed }),
        }
    }

    fn is_busy(&self) -> bool {
        *self.stopped() || self.store.is_receiving()
    }

    /// Sleeps for `time`. Returns true if the prober was stopped meanwhile.
    fn nap(&self, time: Duration) -> bool {
        let mut stopped = self.stopped();
        self.woken
            .wait_while_for(&mut stopped, |stopped| !*stopped, time);
        *stopped
    }

    fn stopped(&self) -> MutexGuard<'_, bool> {
        self.stopped.lock()
    }

    fn tried(&self) -> MutexGuard<'_, HashMap<Probe, Instant>> {
        self.tried.lock()
    }
}

/// Returns the probes of this node's own medium, and the age of each measurement.
fn medium(report: &NodeReport) -> [(Probe, Option<Duration>); 2] {
    let size = Bytes::new(PROBE_BYTES);
    [
        (Probe::Write, age_of(&report.write.of(size))),
        (Probe::Read, age_of(&report.read.of(size))),
    ]
}

/// Returns the age of a measurement; `None` if there is none, or it is too old.
fn age_of<T: Copy>(figure: &Figure<T>) -> Option<Duration> {
    let known = figure.known().ok()?;
    Duration::try_from_secs_f64(known.age.value()).ok()
}

fn is_idle(report: &NodeReport) -> bool {
    let queues = [&report.write_queue, &report.read_queue];
    queues
        .iter()
        .all(|queue| queue.running == 0 && queue.waiting == 0 && queue.bytes == 0)
}

/// Returns bytes that neither compress nor repeat: the worst case for the contents of a dump.
pub fn noise(len_bytes: usize) -> Vec<u8> {
    let mut word = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = vec![0; len_bytes];
    for bytes in noise.chunks_mut(8) {
        // xorshift64, Marsaglia 2003.
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        for (to, from) in bytes.iter_mut().zip(word.to_le_bytes()) {
            *to = from;
        }
    }
    noise
}

/// The background thread. It ends when this is dropped.
pub struct Probing {
    prober: Arc<Prober>,
    thread: JoinHandle<()>,
}

impl Drop for Probing {
    fn drop(&mut self) {
        *self.prober.stopped() = true;
        self.prober.woken.notify_all();
        let until = Instant::now() + PATIENCE;
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Costs {
    /// Counts a probe.
    fn probed(&self) {
        self.counted.probes.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the bytes that a probe wrote; `elapsed` until they were durable.
    pub(super) fn probed_write(&self, bytes: u64, elapsed: Duration) {
        self.look_at_tiers();
        let now = self.now();
        let mut state = self.state();
        let channel = state.channel(Direction::Write, Lane::Probed);
        self.sample(&mut state.estimator, channel, now, bytes, elapsed);
    }
}
