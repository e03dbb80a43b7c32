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

use std::time::Duration;

use anyhow::Result;

use self::machine::{Device, Machine, Results};
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

/// Scenarios, in the order in which they run.
const SCENARIOS: [Scenario; 10] = [
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
        name: "pre-copy-cluster",
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
    Scenario {
        name: "bad-sector",
        device: Device::BadSector,
        continues: false,
        cut_at: None,
    },
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
    let mut outcome = Outcome::default();
    for scenario in &SCENARIOS {
        if !only.is_empty()
            && !only
                .iter()
                .any(|prefix| scenario.name.starts_with(prefix.as_str()))
        {
            continue;
        }
        if !scenario.continues {
            machine::fresh_image(scenario.device)?;
        }
        let task = ui::Task::begin(&format!("guest {}", scenario.name));
        let mut machine =
            Machine::start(&packages, &initrd, scenario.device, scenario.name, LIMIT)?;
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
