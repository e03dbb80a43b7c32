//! The plan of the measurements, and the check whether there is room for them.

use std::fmt;
use std::path::{Path, PathBuf};

use permafrost_criu::scratch::is_in_memory;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::arguments::{Copies, TiersArguments};
use crate::workload::Contents;
use crate::{child, etcd, machine};

/// Room in a region besides pages: maps, small images, segments that are not full.
const SPARE_BYTES: u64 = 64 << 20;
/// Memory that is left to other programs, bytes.
const OTHERS_BYTES: u64 = 256 << 20;

/// A tier to be measured.
#[derive(Clone, Debug)]
pub(super) struct Tier {
    pub(super) name: String,
    pub(super) directory: PathBuf,
    /// Device whose speed is emulated, if any.
    pub(super) emulate: Option<String>,
}

/// Parameters of the experiment with two jobs and several policies.
#[derive(Clone, Debug)]
pub(super) struct Sensitivity {
    pub(super) job_seconds: u64,
    pub(super) job_bytes: u64,
    pub(super) bandwidths: Vec<u64>,
}

/// Everything that the command line requests.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) tiers: Vec<Tier>,
    pub(super) sizes: Vec<u64>,
    pub(super) dirty: Vec<u64>,
    pub(super) runs: u32,
    pub(super) copies: Vec<Copies>,
    pub(super) contents: Contents,
    pub(super) warm: bool,
    pub(super) restart: bool,
    pub(super) sensitivity: Option<Sensitivity>,
    pub(super) model: bool,
    pub(super) power: Option<(f64, f64)>,
    pub(super) out: PathBuf,
    pub(super) criu: Option<PathBuf>,
    pub(super) permafrostd: PathBuf,
    pub(super) etcd: Result<PathBuf, String>,
}

/// One process that is measured: dumped and restored once in full, and once after each share of changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Case {
    pub(super) tier: String,
    pub(super) size_bytes: u64,
    pub(super) copies: Copies,
    /// Number of the run, from 1.
    pub(super) run: u32,
}

impl Case {
    /// Returns true if the cases differ in the run at most.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        (&self.tier, self.size_bytes, self.copies) == (&other.tier, other.size_bytes, other.copies)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = human::bytes(self.size_bytes);
        write!(f, "{} {size} {}", self.tier, self.copies)
    }
}

/// A case that was left out, with the reason.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Skipped {
    tier: String,
    size_bytes: u64,
    copies: Copies,
    pub(super) reason: String,
}

impl Skipped {
    pub(super) fn new(case: &Case, reason: String) -> Self {
        Self {
            tier: case.tier.clone(),
            size_bytes: case.size_bytes,
            copies: case.copies,
            reason,
        }
    }

    pub(super) fn is_of(&self, case: &Case) -> bool {
        (&self.tier, self.size_bytes, self.copies) == (&case.tier, case.size_bytes, case.copies)
    }

    pub(super) fn what(&self) -> String {
        let size = human::bytes(self.size_bytes);
        format!("{} {size} {}", self.tier, self.copies)
    }
}

impl Plan {
    pub(super) fn new(arguments: &TiersArguments) -> Result<Self, Failure> {
        let mut tiers: Vec<Tier> = Vec::new();
        for (name, directory) in &arguments.tiers {
            if tiers.iter().any(|tier| tier.name == *name) {
                return Err(Failure::new(
                    Code::Invalid,
                    format!("there are two tiers called {name}"),
                ));
            }
            let directory = std::fs::canonicalize(directory)
                .map_err(|error| Failure::io("use", directory, &error))?;
            tiers.push(Tier {
                name: name.clone(),
                directory,
                emulate: None,
            });
        }
        for (name, device) in &arguments.emulate {
            let tier = tiers.iter_mut().find(|tier| tier.name == *name);
            let tier = tier.ok_or_else(|| {
                Failure::new(
                    Code::Invalid,
                    format!("there is no tier {name} to emulate a device on"),
                )
                .hint(format!("add --tier {name}=DIR, best on tmpfs"))
            })?;
            tier.emulate = Some(device.clone());
        }
        let permafrostd = match &arguments.permafrostd {
            Some(path) => path.clone(),
            None => child::own_program()?.with_file_name("permafrostd"),
        };
        if !tiers.is_empty() && !permafrostd.is_file() {
            return Err(Failure::new(
                Code::NotFound,
                format!("{} is not there", permafrostd.display()),
            )
            .hint("the benchmark starts a permafrostd of its own; install it next to permafrost"));
        }
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Ok(Self {
            tiers,
            sizes: distinct(&arguments.sizes),
            dirty: distinct(&arguments.dirty),
            runs: arguments.runs,
            copies: distinct(&arguments.copies),
            contents: arguments.contents,
            warm: arguments.warm,
            restart: arguments.restart,
            sensitivity: arguments.sensitivity.then(|| Sensitivity {
                job_seconds: arguments.job_seconds,
                job_bytes: arguments.job_size,
                bandwidths: distinct(&arguments.bandwidths),
            }),
            model: arguments.model,
            power: arguments.power,
            out: absolute(&arguments.out),
            criu: arguments.criu.clone(),
            permafrostd: absolute(&permafrostd),
            etcd: etcd::find(),
        })
    }

    /// Returns the parameters that make results comparable: a journal with other parameters belongs to another
    /// benchmark.
    pub(super) fn parameters(&self, machine: &machine::Machine) -> Value {
        let tiers = self.tiers.iter().map(|tier| {
            json!({ "name": tier.name, "directory": tier.directory, "emulate": tier.emulate })
        });
        let sensitivity = self.sensitivity.as_ref().map(|jobs| {
            json!({
                "job_seconds": jobs.job_seconds,
                "job_bytes": jobs.job_bytes,
                "bandwidths": jobs.bandwidths,
            })
        });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "machine": machine,
            "tiers": tiers.collect::<Vec<_>>(),
            "sizes_bytes": self.sizes,
            "dirty_percents": self.dirty,
            "runs": self.runs,
            "copies": self.copies,
            "contents": self.contents,
            "warm": self.warm,
            "sensitivity": sensitivity,
        })
    }

    /// Iterates over all cases, the cheapest first.
    pub(super) fn cases(&self) -> impl Iterator<Item = Case> + '_ {
        let copies_of = move |tier: &'_ Tier, size_bytes: u64| {
            let tier = tier.name.clone();
            self.copies.iter().flat_map(move |&copies| {
                let tier = tier.clone();
                (1..=self.runs).map(move |run| Case {
                    tier: tier.clone(),
                    size_bytes,
                    copies,
                    run,
                })
            })
        };
        let sizes = self.sizes.iter();
        sizes.flat_map(move |&size_bytes| {
            let tiers = self.tiers.iter();
            tiers.flat_map(move |tier| copies_of(tier, size_bytes))
        })
    }

    pub(super) fn tier(&self, name: &str) -> Result<&Tier, Failure> {
        self.tiers
            .iter()
            .find(|tier| tier.name == name)
            .ok_or_else(|| Failure::new(Code::Internal, format!("no tier {name}")))
    }

    /// Returns the size of a region that holds all dumps of one run, bytes.
    pub(super) fn region_bytes(&self, size_bytes: u64) -> u64 {
        let changed: u64 = self
            .dirty
            .iter()
            .map(|percent| size_bytes / 100 * percent)
            .sum();
        let pages = size_bytes.saturating_add(changed);
        pages.saturating_add(pages / 8).saturating_add(SPARE_BYTES)
    }

    /// Returns the memory that a case moves, bytes: progress is counted in it.
    pub(super) fn moved_bytes(&self, case: &Case) -> u64 {
        case.size_bytes * (1 + self.dirty.len() as u64)
    }

    /// Checks that there is room for a case.
    ///
    /// # Errors
    /// There is no room; the error is a message with the reason.
    pub(super) fn room_for(&self, case: &Case) -> Result<(), String> {
        let tier = self.tiers.iter().find(|tier| tier.name == case.tier);
        let tier = tier.ok_or_else(|| format!("no tier {}", case.tier))?;
        let mut nodes = 1;
        if case.copies == Copies::Replicated {
            self.etcd.as_ref().map_err(Clone::clone)?;
            nodes = 2;
        }
        let regions_bytes = self.region_bytes(case.size_bytes).saturating_mul(nodes);
        room(&tier.directory, case.size_bytes, regions_bytes)
    }
}

/// Checks that a directory has room for regions while there is memory for processes of so many bytes.
pub(super) fn room(
    directory: &Path,
    processes_bytes: u64,
    regions_bytes: u64,
) -> Result<(), String> {
    let in_memory = is_in_memory(directory);
    let mut memory_bytes = processes_bytes.saturating_add(OTHERS_BYTES);
    if in_memory {
        memory_bytes = memory_bytes.saturating_add(regions_bytes);
    }
    let available_bytes = machine::available_memory_bytes();
    if memory_bytes > available_bytes {
        return Err(format!(
            "needs {} of memory{}, {} are available",
            human::bytes(memory_bytes),
            if in_memory {
                ", the store's included"
            } else {
                ""
            },
            human::bytes(available_bytes)
        ));
    }
    let free_bytes = machine::free_bytes(directory);
    if regions_bytes > free_bytes {
        return Err(format!(
            "needs {} in {}, {} are free",
            human::bytes(regions_bytes),
            directory.display(),
            human::bytes(free_bytes)
        ));
    }
    Ok(())
}

/// Returns each value once, in the order of the first occurrences.
fn distinct<T: Copy + PartialEq>(values: &[T]) -> Vec<T> {
    let mut seen = Vec::new();
    for &value in values {
        if !seen.contains(&value) {
            seen.push(value);
        }
    }
    seen
}
