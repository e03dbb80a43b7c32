//! The processors' own power meter (RAPL), where the machine allows reading it.

use std::fs;
use std::path::{Path, PathBuf};

/// Directory in which the kernel shows the counters.
const POWERCAP: &str = "/sys/class/powercap";

/// Energy counters of all packages.
#[derive(Debug)]
pub(super) struct Meter {
    packages: Vec<Package>,
}

#[derive(Debug)]
struct Package {
    counter: PathBuf,
    /// Value at which the counter wraps around, microjoules.
    range_uj: u64,
    last_uj: u64,
    sum_uj: u64,
}

impl Meter {
    /// Starts counting; `None` on a machine without a meter, such as a virtual machine.
    pub(super) fn start() -> Option<Self> {
        Self::start_in(Path::new(POWERCAP))
    }

    fn start_in(powercap: &Path) -> Option<Self> {
        let entries = fs::read_dir(powercap).ok()?;
        let packages: Vec<Package> = entries
            .flatten()
            .filter(|entry| {
                // `intel-rapl:0` is a package, `intel-rapl:0:1` a part of it.
                let name = entry.file_name();
                let name = name.to_string_lossy();
                name.strip_prefix("intel-rapl:")
                    .is_some_and(|rest| rest.parse::<u32>().is_ok())
            })
            .filter_map(|entry| {
                let counter = entry.path().join("energy_uj");
                Some(Package {
                    last_uj: read(&counter)?,
                    range_uj: read(&entry.path().join("max_energy_range_uj"))?,
                    counter,
                    sum_uj: 0,
                })
            })
            .collect();
        (!packages.is_empty()).then_some(Self { packages })
    }

    /// Reads the counters; must be called more often than they wrap around, which happens within minutes.
    pub(super) fn look(&mut self) {
        for package in &mut self.packages {
            if let Some(now_uj) = read(&package.counter) {
                package.sum_uj += match now_uj.checked_sub(package.last_uj) {
                    Some(more) => more,
                    None => now_uj + package.range_uj.saturating_sub(package.last_uj),
                };
                package.last_uj = now_uj;
            }
        }
    }

    /// Returns the joules since the start.
    pub(super) fn joules(&mut self) -> f64 {
        self.look();
        let sum_uj: u64 = self.packages.iter().map(|package| package.sum_uj).sum();
        sum_uj as f64 / 1e6
    }
}

fn read(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_summed_and_counters_come_round() {
        let powercap = tempfile::tempdir().unwrap();
        let set = |name: &str, uj: u64| {
            let package = powercap.path().join(name);
            fs::create_dir_all(&package).unwrap();
            fs::write(package.join("energy_uj"), format!("{uj}\n")).unwrap();
            fs::write(package.join("max_energy_range_uj"), "10000000\n").unwrap();
        };
        set("intel-rapl:0", 9_000_000);
        set("intel-rapl:1", 1_000_000);
        set("intel-rapl:0:0", 5);
        let mut meter = Meter::start_in(powercap.path()).unwrap();
        assert_eq!(meter.packages.len(), 2);
        set("intel-rapl:0", 1_500_000);
        set("intel-rapl:1", 3_000_000);
        // 1 + 1.5 round the end, and 2.
        assert_eq!(meter.joules(), 4.5);
        assert_eq!(meter.joules(), 4.5);
    }

    #[test]
    fn a_machine_without_one_has_none() {
        let empty = tempfile::tempdir().unwrap();
        assert!(Meter::start_in(empty.path()).is_none());
        assert!(Meter::start_in(Path::new("/nonexistent")).is_none());
    }
}
