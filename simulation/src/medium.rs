//! Media that checkpoints are stored on.

use std::fmt;
use std::str::FromStr;

use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::NodeFigures;
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};
use permafrost_scheduling::sensitivity::Storage;
use serde::Serialize;

/// A medium that each node has one of.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StorageMedium {
    /// Name of the medium in tables.
    pub name: String,
    /// Bandwidths and fixed times.
    pub storage: Storage,
    /// Room for checkpoints on a node.
    pub capacity: Bytes,
}

/// Memory of the program of paper 000, Table 3.
const TABLE_3_BYTES: f64 = 5e9;

impl StorageMedium {
    /// Returns HDD, SSD and NVM of paper 000. The bandwidth is that of the first dump of Table 3: 5 GB in 169.18,
    /// 43.73 and 2.92 s, which has the starts in it; so no fixed time is added. Restores are as fast: the paper has
    /// no table of them. The capacities are those of its machine (§3.3.1, §5.3.1): 500, 120 and 48 GB.
    #[must_use]
    pub fn of_the_paper() -> [Self; 3] {
        [("hdd", 169.18, 500), ("ssd", 43.73, 120), ("nvm", 2.92, 48)].map(|(name, seconds, gb)| {
            Self {
                name: name.to_owned(),
                storage: Storage::plain(BytesPerSecond::clamped(TABLE_3_BYTES / seconds)),
                capacity: Bytes::new(gb * 1_000_000_000),
            }
        })
    }

    /// Returns the checkpoints of paper 002 (§5): 1.35 s to suspend a task and 3.88 s to resume it, whatever its
    /// memory; they have the task's counters alone.
    #[must_use]
    pub fn natjam() -> Self {
        Self {
            name: "natjam".to_owned(),
            storage: Storage {
                dump_start: Seconds::clamped(1.35),
                restore_start: Seconds::clamped(3.88),
                ..Storage::plain(BytesPerSecond::clamped(1e12))
            },
            capacity: Bytes::new(250_000_000_000),
        }
    }

    /// Makes a medium with this bandwidth, either way, and without fixed times.
    #[must_use]
    pub fn with_bandwidth(rate: BytesPerSecond) -> Self {
        Self {
            name: rate.to_string().replace(' ', ""),
            storage: Storage::plain(rate),
            capacity: Bytes::new(500_000_000_000),
        }
    }

    /// Returns the figures of an idle node with this medium.
    #[must_use]
    pub fn figures(&self, node: NodeId) -> NodeFigures {
        NodeFigures {
            write: SizedRates::uniform(Figure::given(self.storage.write)),
            read: SizedRates::uniform(Figure::given(self.storage.read)),
            write_queue: Figure::given(Bytes::ZERO),
            read_queue: Figure::given(Bytes::ZERO),
            dump_start: Figure::given(self.storage.dump_start),
            restore_start: Figure::given(self.storage.restore_start),
            ..NodeFigures::unknown(node)
        }
    }

    /// Returns the time of a dump or restore of `bytes`, without a queue; the longer of both.
    #[must_use]
    pub fn time_of(&self, bytes: Bytes) -> Seconds {
        bytes.at(self.storage.write.slower(self.storage.read))
    }
}

/// A text that names no medium.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is no medium: say hdd, ssd, nvm, or a bandwidth in bytes a second such as 500M or 2G"
)]
pub struct NoMedium(String);

impl FromStr for StorageMedium {
    type Err = NoMedium;

    fn from_str(text: &str) -> Result<Self, NoMedium> {
        let lower = text.to_ascii_lowercase();
        if let Some(medium) = (Self::of_the_paper().into_iter()).find(|medium| medium.name == lower)
        {
            return Ok(medium);
        }
        let (number, unit) = match lower.char_indices().next_back() {
            Some((at, 'k')) => (&lower[..at], 1e3),
            Some((at, 'm')) => (&lower[..at], 1e6),
            Some((at, 'g')) => (&lower[..at], 1e9),
            _ => (lower.as_str(), 1.0),
        };
        let rate = number.parse::<f64>().ok();
        rate.and_then(|rate| BytesPerSecond::new(rate * unit).ok())
            .map(Self::with_bandwidth)
            .ok_or_else(|| NoMedium(text.to_owned()))
    }
}

impl fmt::Display for StorageMedium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_media_take_its_times() {
        let times = StorageMedium::of_the_paper().map(|medium| {
            let time = medium.time_of(Bytes::new(5_000_000_000));
            (time.value() * 100.0).round() / 100.0
        });
        assert_eq!(times, [169.18, 43.73, 2.92]);
    }

    #[test]
    fn media_are_named_or_given_by_bandwidth() {
        assert_eq!("NVM".parse::<StorageMedium>().unwrap().name, "nvm");
        let half = "500M".parse::<StorageMedium>().unwrap();
        assert_eq!(
            (half.storage.write.value(), half.name.as_str()),
            (5e8, "500.0MB/s")
        );
        for bad in ["", "tape", "-1G", "NaN", "0", "é", "1e40"] {
            let error = bad.parse::<StorageMedium>().unwrap_err();
            assert!(error.to_string().contains("hdd, ssd, nvm"), "{bad}");
        }
    }
}
