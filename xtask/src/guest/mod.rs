//! `cargo xtask guest`: scenarios on a real DAX device with real soft-dirty tracking.
//!
//! A Debian cloud kernel in QEMU under plain software emulation has what the machine underneath usually
//! lacks: an NVDIMM that mounts as ext4 with `dax=always` and accepts MAP_SYNC, CONFIG_MEM_SOFT_DIRTY, and
//! a kernel on which CRIU 3.17.1 runs. Killing QEMU loses nothing that the guest has stored, flushed or
//! not: a missing flush does not show here, only the crash simulator finds it.
//!
//! One scenario has a disk with a bad sector instead (QEMU's blkdebug driver): reads of it through a mapping are a
//! SIGBUS.

mod cpio;
mod initrd;
mod machine;
mod packages;

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use self::machine::{Device, Image, Machine, Results};
use self::packages::Packages;
use crate::ui;

/// Time limit of one machine, which is emulated, on two busy processors.
const LIMIT: Duration = Duration::from_secs(600);

/// A scenario, which one machine runs.
struct Scenario {
    name: &'static str,
    device: Device,
    /// True if the scenario needs the device as an earlier scenario has left it.
    continues: bool,
    /// Mark at which the power is cut.
    cut_at: Option<&'static str>,
}

/// Lines of scenarios. The scenarios of a line run in their order, the lines at the same time: a machine has one
/// processor busy. Both take about as long.
const LINES: [&[Scenario]; 2] = [
    &[
        Scenario {
            name: "pre-copy-cluster",
            device: Device::Nvdimm,
            continues: false,
            cut_at: None,
        },
        Scenario {
            name: "bad-sector",
            device: Device::BadSector,
            continues: false,
            cut_at: None,
        },
    ],
    &[
        Scenario {
            name: "stock-criu",
            device: Device::Nvdimm,
            continues: false,
            cut_at: None,
        },
        Scenario {
            name: "dax-dump",
            device: Device::Nvdimm,
            continues: false,
            cut_at: None,
        },
        Scenario {
            name: "pre-copy",
            device: Device::Nvdimm,
            continues: false,
            cut_at: None,
        },
        Scenario {
            name: "power-cut",
            device: Device::Nvdimm,
            continues: false,
            cut_at: Some("mid-dump"),
        },
        Scenario {
            name: "after-power-cut",
            device: Device::Nvdimm,
            continues: true,
            cut_at: None,
        },
        Scenario {
            name: "cut-while-cleaning",
            device: Device::Nvdimm,
            continues: false,
            cut_at: Some("mid-clean"),
        },
        Scenario {
            name: "after-cut-while-cleaning",
            device: Device::Nvdimm,
            continues: true,
            cut_at: None,
        },
        Scenario {
            name: "virtio-pmem",
            device: Device::VirtioPmem,
            continues: false,
            cut_at: None,
        },
    ],
];

/// Results of the checks of all scenarios.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

/// Runs the scenarios whose names begin with one of `only`, or all.
///
/// # Errors
/// Fails when the guest cannot be made or started; a failed check is an [`Outcome`].
pub(crate) fn run(only: &[String]) -> Result<Outcome> {
    let packages = packages::fetch()?;
    let initrd = initrd::build(&packages)?;
    let outcomes = std::thread::scope(|scope| {
        let (packages, initrd) = (&packages, &initrd);
        let lines = LINES.iter().enumerate().map(|(line, scenarios)| {
            scope.spawn(move || run_line(line, scenarios, only, packages, initrd))
        });
        let lines: Vec<_> = lines.collect();
        let outcomes = lines.into_iter().map(|line| match line.join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        outcomes.collect::<Result<Vec<_>>>()
    })?;
    Ok(Outcome {
        passed: outcomes.iter().map(|outcome| outcome.passed).sum(),
        failed: outcomes.iter().map(|outcome| outcome.failed).sum(),
    })
}

/// Runs those scenarios of a line whose names begin with one of `only`, or all.
fn run_line(
    line: usize,
    scenarios: &[Scenario],
    only: &[String],
    packages: &Packages,
    initrd: &Path,
) -> Result<Outcome> {
    let is_wanted = |scenario: &&Scenario| {
        let begins = |prefix: &String| scenario.name.starts_with(prefix.as_str());
        only.is_empty() || only.iter().any(begins)
    };
    let mut outcome = Outcome::default();
    for scenario in scenarios.iter().filter(is_wanted) {
        let image = Image::of(line, scenario.device);
        if !scenario.continues {
            image.empty()?;
        }
        let task = ui::Task::begin(&format!("guest {}", scenario.name));
        let mut machine = Machine::start(packages, initrd, &image, scenario.name, LIMIT)?;
        let results = machine.wait(scenario.cut_at)?;
        if !results.failed.is_empty() {
            eprintln!("{}", machine.console_tail());
        }
        if scenario.cut_at.is_some() {
            machine.cut_power()?;
        }
        task.done(&report(scenario, &results));
        outcome.passed += count(&results.passed);
        outcome.failed += count(&results.failed);
    }
    Ok(outcome)
}

fn report(scenario: &Scenario, results: &Results) -> String {
    for check in &results.passed {
        eprintln!("  guest {} … {check} … ok", scenario.name);
    }
    for check in &results.failed {
        eprintln!("  guest {} … {check} … FAILED", scenario.name);
    }
    format!(
        "{} passed, {} failed",
        results.passed.len(),
        results.failed.len()
    )
}

fn count(checks: &[String]) -> u64 {
    u64::try_from(checks.len()).unwrap_or(u64::MAX)
}
