//! Figures of earlier runs, and those that a benchmark measured before the first: written down beside the
//! region.
//!
//! They are samples, not results: bytes, duration and age of a transfer. So they are checked as the daemon's
//! own measurements are, weigh less the older they are, and do not hold any more after an hour.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use permafrost_scheduling::estimator::{Channel, Direction, Estimator, Refused, Transfer};
use permafrost_scheduling::quantity::{Bytes, Moment, Seconds};
use permafrost_store::clock::unix_ms;
use permafrost_store::private;
use serde::{Deserialize, Serialize};

use super::channels::Lane;
use super::state::{Costs, CostsConfig, State};

/// Version of the file.
const VERSION: u32 = 1;

/// Maximum size of the file. A longer one was not written by this module.
const MAX_BYTES: u64 = 64 << 20;

/// Maximum number of samples that are recorded at once: all windows of a thousand links.
const MAX_SAMPLES: usize = 1 << 19;

/// Kind of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartWhat {
    /// A full dump, or pages stored.
    Write,
    /// A dump that was compared with the one before it.
    Compare,
    /// A full dump, until its copies were durable.
    WriteCopied,
    /// A dump that was compared, until its copies were durable.
    CompareCopied,
    /// Several dumps at once, together.
    WriteTogether,
    /// Pages that a probe stored.
    WriteProbed,
    /// A restore, or pages read.
    Read,
    /// Several restores at once, together.
    ReadTogether,
    /// Pages that were read to verify them.
    ReadProbed,
    /// Pages that came back from an object store.
    Recall,
    /// Pages that followed to the processes of a lazy restore.
    Lazy,
    /// A full dump as its client measures it, from the first preparation to the last clean-up.
    FullDump,
    /// A compared dump as its client measures it.
    ComparedDump,
    /// A restore as its client measures it.
    Restore,
    /// Pages sent to a node, or fetched from it.
    Link(String),
}

/// A measurement with its age.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartSample {
    /// Kind of the measurement.
    pub what: StartWhat,
    /// Name of the tier that a dump went to; empty for any other measurement, and for the tier that dumps go to.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tier: String,
    /// Bytes moved; 0 for a fixed time that does not depend on the size.
    pub bytes: u64,
    /// Duration of the transfer.
    pub elapsed: Seconds,
    /// Time since the transfer ended.
    pub age: Seconds,
}

/// Measurements of earlier runs or of a benchmark.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFigures {
    /// Measurements in the order in which they were made.
    pub samples: Vec<StartSample>,
    /// Kind of medium that was emulated during the measurements, if any.
    #[serde(default)]
    pub emulated: Option<String>,
}

/// Reason why figures cannot be installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// There are more samples than the maximum.
    #[error("{samples} samples are more than {MAX_SAMPLES}")]
    TooMany {
        /// Number of samples.
        samples: usize,
    },
    /// A sample cannot be true; nothing was changed.
    #[error("sample {place} cannot be true: {why}")]
    Implausible {
        /// Index of the sample, from 0.
        place: usize,
        /// Reason why it cannot be true.
        why: String,
    },
    /// The figures are in use, but could not be saved: they are lost at a restart.
    #[error("write {path}")]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

#[derive(Serialize, Deserialize)]
struct File {
    v: u32,
    /// Wall-clock time at which the file was written: only used to compute how long the daemon was away.
    written_unix_ms: u64,
    figures: SavedFigures,
}

/// Returns the lane of a measurement; `None` for a link.
fn lane(what: &StartWhat) -> Option<(Direction, Lane)> {
    let write = |lane| Some((Direction::Write, lane));
    match what {
        StartWhat::Write => write(Lane::Whole),
        StartWhat::Compare => write(Lane::Compared),
        StartWhat::WriteCopied => write(Lane::WholeCopied),
        StartWhat::CompareCopied => write(Lane::ComparedCopied),
        StartWhat::WriteTogether => write(Lane::Together),
        StartWhat::WriteProbed => write(Lane::Probed),
        StartWhat::Read => Some((Direction::Read, Lane::Whole)),
        StartWhat::ReadTogether => Some((Direction::Read, Lane::Together)),
        StartWhat::ReadProbed => Some((Direction::Read, Lane::Probed)),
        StartWhat::Recall => Some((Direction::Read, Lane::Recalled)),
        StartWhat::Lazy => Some((Direction::Read, Lane::Lazy)),
        StartWhat::FullDump => write(Lane::Whole),
        StartWhat::ComparedDump => write(Lane::Compared),
        StartWhat::Restore => Some((Direction::Read, Lane::Whole)),
        StartWhat::Link(_) => None,
    }
}

const LANES: [StartWhat; 11] = [
    StartWhat::Write,
    StartWhat::Compare,
    StartWhat::WriteCopied,
    StartWhat::CompareCopied,
    StartWhat::WriteTogether,
    StartWhat::WriteProbed,
    StartWhat::Read,
    StartWhat::ReadTogether,
    StartWhat::ReadProbed,
    StartWhat::Recall,
    StartWhat::Lazy,
];

impl Costs {
    /// Creates the measurements with the figures of the last run, if they can be read. An unreadable file is logged
    /// and left in place.
    #[must_use]
    pub fn new(config: CostsConfig) -> Arc<Self> {
        let costs = Self::empty(config);
        costs.load();
        Arc::new(costs)
    }

    /// Records measurements that were made elsewhere, replaces those that this node has made of the same kinds, and
    /// saves everything for the next start.
    ///
    /// # Errors
    /// [`InstallError`]; if one of them cannot be true, none is recorded.
    pub fn install(&self, figures: &SavedFigures) -> Result<(), InstallError> {
        if figures.samples.len() > MAX_SAMPLES {
            let samples = figures.samples.len();
            return Err(InstallError::TooMany { samples });
        }
        let now = self.now();
        let mut state = self.state();
        let mut estimator = state.estimator.clone();
        let mut peers = state.peers.clone();
        let mut replaced = BTreeSet::new();
        for (place, sample) in in_order(&figures.samples) {
            let refuse = |why: String| InstallError::Implausible { place, why };
            let channel = match (&sample.what, lane(&sample.what)) {
                (_, Some((direction, lane))) => {
                    lane.channel(direction, state.tier_of(&sample.tier))
                }
                (StartWhat::Link(peer), _) => peers
                    .link(peer)
                    .ok_or_else(|| refuse("there are too many links".to_owned()))?,
                _ => continue,
            };
            if replaced.insert(channel) {
                estimator.forget_channel(channel);
            }
            take(&mut estimator, channel, now, &sample)
                .map_err(|error| refuse(error.to_string()))?;
        }
        state.estimator = estimator;
        state.peers = peers;
        state.starting.emulated.clone_from(&figures.emulated);
        drop(state);
        self.save()
    }

    /// Saves the measurements atomically; does nothing if no file is configured.
    ///
    /// # Errors
    /// [`InstallError::Write`].
    pub fn save(&self) -> Result<(), InstallError> {
        let Some(path) = &self.config.figures else {
            return Ok(());
        };
        let file = File {
            v: VERSION,
            written_unix_ms: unix_ms(),
            figures: self.kept(),
        };
        let written = serde_json::to_vec(&file).map_err(io::Error::from);
        written
            .and_then(|bytes| private::replace(path, &bytes))
            .map_err(|source| InstallError::Write {
                path: path.clone(),
                source,
            })
    }

    /// Returns all measurements that still count.
    #[must_use]
    pub fn kept(&self) -> SavedFigures {
        let now = self.now();
        let state = self.state();
        let mut samples = Vec::new();
        for what in LANES {
            match lane(&what) {
                Some((Direction::Write, lane)) => {
                    for (number, tier) in state.tiers.named() {
                        let channel = lane.channel(Direction::Write, number);
                        keep(&state, (&what, &tier), channel, now, &mut samples);
                    }
                }
                Some((direction, lane)) => {
                    let channel = state.channel(direction, lane);
                    keep(&state, (&what, ""), channel, now, &mut samples);
                }
                None => {}
            }
        }
        for (peer, link) in state.peers.links() {
            let what = StartWhat::Link(peer.to_owned());
            keep(&state, (&what, ""), link, now, &mut samples);
        }
        SavedFigures {
            samples,
            emulated: state.starting.emulated.clone(),
        }
    }

    /// Reads the measurements that the last run saved. If the clock was set back, they keep at least the age that
    /// they had then.
    pub(super) fn load(&self) {
        let Some(path) = &self.config.figures else {
            return;
        };
        let file = match read(path) {
            Ok(Some(file)) => file,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(event = "figures-unreadable", %error, path = %path.display(), "figures of the last run cannot be read: they are measured anew");
                return;
            }
        };
        let away = Seconds::from_millis(unix_ms().saturating_sub(file.written_unix_ms));
        let now = self.now();
        let mut state = self.state();
        let mut refused = 0;
        for (_, mut sample) in in_order(&file.figures.samples) {
            sample.age = sample.age.plus(away);
            let channel = match (&sample.what, lane(&sample.what)) {
                (_, Some((direction, lane))) => {
                    Some(lane.channel(direction, state.tier_of(&sample.tier)))
                }
                (StartWhat::Link(peer), _) => state.peers.link(peer),
                _ => None,
            };
            let taken = channel.map(|channel| take(&mut state.estimator, channel, now, &sample));
            refused += usize::from(!matches!(taken, Some(Ok(()))));
        }
        state.starting.emulated = file.figures.emulated;
        drop(state);
        if refused > 0 {
            tracing::warn!(event = "figures-refused", refused, path = %path.display(), "figures of the last run that cannot be true are left out");
        }
    }
}

/// Returns the samples with the oldest first, each with its index.
fn in_order(samples: &[StartSample]) -> Vec<(usize, StartSample)> {
    let mut ordered: Vec<_> = samples
        .iter()
        .take(MAX_SAMPLES)
        .cloned()
        .enumerate()
        .collect();
    ordered.sort_by_key(|(_, sample)| std::cmp::Reverse(sample.age));
    ordered
}

fn take(
    estimator: &mut Estimator,
    channel: Channel,
    now: Moment,
    sample: &StartSample,
) -> Result<(), Refused> {
    let at = now.before(sample.age);
    let transfer = Transfer {
        at,
        bytes: Bytes::new(sample.bytes),
        elapsed: sample.elapsed,
    };
    match sample.what {
        StartWhat::FullDump | StartWhat::ComparedDump | StartWhat::Restore => {
            estimator.took(channel, now, transfer)
        }
        _ if sample.bytes == 0 => estimator.answered(channel, now, at, sample.elapsed),
        _ => estimator.transferred(channel, now, transfer),
    }
}

/// Returns the kind under which whole transfers of a lane are saved.
const fn whole_of(what: &StartWhat) -> Option<StartWhat> {
    match what {
        StartWhat::Write => Some(StartWhat::FullDump),
        StartWhat::Compare => Some(StartWhat::ComparedDump),
        StartWhat::Read => Some(StartWhat::Restore),
        _ => None,
    }
}

fn keep(
    state: &State,
    (what, tier): (&StartWhat, &str),
    channel: Channel,
    now: Moment,
    samples: &mut Vec<StartSample>,
) {
    let kept = state.estimator.kept(channel);
    let sample = |what: &StartWhat, bytes, elapsed, at| StartSample {
        what: what.clone(),
        tier: tier.to_owned(),
        bytes,
        elapsed,
        age: now.since(at),
    };
    let transfers = kept.transfers.iter();
    samples.extend(transfers.map(|one| sample(what, one.bytes.count(), one.elapsed, one.at)));
    let latencies = kept.latencies.iter();
    samples.extend(latencies.map(|(at, latency)| sample(what, 0, *latency, *at)));
    if let Some(whole) = whole_of(what) {
        let wholes = kept.wholes.iter();
        samples.extend(wholes.map(|one| sample(&whole, one.bytes.count(), one.elapsed, one.at)));
    }
}

fn read(path: &Path) -> io::Result<Option<File>> {
    let length = match std::fs::metadata(path) {
        Ok(found) => found.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if length > MAX_BYTES {
        return Err(io::Error::other("it is too long"));
    }
    let file: File = serde_json::from_slice(&std::fs::read(path)?)?;
    if file.v != VERSION {
        let version = file.v;
        return Err(io::Error::other(format!("it is of version {version}")));
    }
    Ok(Some(file))
}
