//! A QEMU machine that runs one scenario.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::packages::{self, Packages};

/// Size of the memory device, MiB; ext4 and fsdax's own page structures take about 30 of it.
const DEVICE_MIB: u64 = 512;

/// Size of the disk, MiB: one block group of ext4, so that the region is around the sector that cannot be read.
const DISK_MIB: u64 = 128;

/// A sector of [`Device::BadSector`], of 512 bytes: 40 MiB from the start of the disk.
const BAD_SECTOR: u64 = (40 << 20) / 512;

/// Device of a machine that holds a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// An NVDIMM: DAX with MAP_SYNC.
    Nvdimm,
    /// virtio-pmem: DAX, but durable only by a request to the host, so without MAP_SYNC.
    VirtioPmem,
    /// A disk that takes writes everywhere, and returns an error for each read of one sector.
    BadSector,
}

/// A running guest; killed when dropped.
pub(crate) struct Machine {
    qemu: Child,
    console: PathBuf,
    results: PathBuf,
    deadline: Instant,
}

/// Output of a guest on its second serial port.
#[derive(Debug, Default)]
pub(crate) struct Results {
    /// Checks that passed.
    pub(crate) passed: Vec<String>,
    /// Checks that failed, with the reason.
    pub(crate) failed: Vec<String>,
    /// Marks that the guest has reached; it waits at each.
    pub(crate) marks: Vec<String>,
    /// True if the scenario has ended.
    pub(crate) done: bool,
}

/// Image behind the device of a machine. It keeps its contents from one machine of a line to the next.
pub(crate) struct Image {
    device: Device,
    path: PathBuf,
}

impl Image {
    /// Returns the image of a device for the machines of a line, of which one runs at a time.
    pub(crate) fn of(line: usize, device: Device) -> Self {
        let name = match device {
            Device::Nvdimm => "nvdimm",
            Device::VirtioPmem => "virtio-pmem",
            Device::BadSector => "bad-sector",
        };
        Self {
            device,
            path: packages::dir().join(format!("{name}-{line}.img")),
        }
    }

    /// Replaces it by an empty one.
    pub(crate) fn empty(&self) -> Result<()> {
        let file = fs::File::create(&self.path).context("create the device's image")?;
        let mib = match self.device {
            Device::Nvdimm | Device::VirtioPmem => DEVICE_MIB,
            Device::BadSector => DISK_MIB,
        };
        file.set_len(mib << 20).context("size the device's image")
    }

    /// Returns the arguments of QEMU for the device.
    fn arguments(&self) -> Vec<String> {
        let path = self.path.display().to_string();
        let memory = |driver: &str| {
            let backend = format!(
                "memory-backend-file,id=memory,share=on,mem-path={path},size={DEVICE_MIB}M,align=2M"
            );
            let device = format!("{driver},id=pmem,memdev=memory");
            vec!["-object".to_owned(), backend, "-device".to_owned(), device]
        };
        match self.device {
            Device::Nvdimm => memory("nvdimm"),
            Device::VirtioPmem => memory("virtio-pmem-pci"),
            Device::BadSector => {
                let fault = serde_json::json!({
                    "event": "none", "iotype": "read", "sector": BAD_SECTOR, "errno": 5, "once": false
                });
                let disk = serde_json::json!({
                    "node-name": "disk",
                    "driver": "raw",
                    "file": {
                        "driver": "blkdebug",
                        "image": { "driver": "file", "filename": path },
                        "inject-error": [fault],
                    },
                });
                let device = "virtio-blk-pci,drive=disk".to_owned();
                let disk = disk.to_string();
                vec!["-blockdev".to_owned(), disk, "-device".to_owned(), device]
            }
        }
    }
}

impl Machine {
    pub(crate) fn start(
        packages: &Packages,
        initrd: &Path,
        image: &Image,
        scenario: &str,
        limit: Duration,
    ) -> Result<Self> {
        let dir = packages::dir();
        let console = dir.join(format!("{scenario}.console"));
        let results = dir.join(format!("{scenario}.results"));
        fs::write(&results, "").context("empty the results")?;
        let share = packages.root.dir.join("usr/share");
        let mut command = packages.root.command("usr/bin/qemu-system-x86_64")?;
        for data in ["qemu", "seabios"] {
            command.arg("-L").arg(share.join(data));
        }
        // Plain emulation: it works everywhere, /dev/kvm or not.
        command.args([
            "-accel",
            "tcg",
            "-cpu",
            "max",
            "-machine",
            "q35,nvdimm=on",
            "-smp",
            "1",
        ]);
        command.args([
            "-m",
            "2G,slots=2,maxmem=8G",
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
        ]);
        command.args(["-display", "none", "-monitor", "none"]);
        command
            .arg("-kernel")
            .arg(packages.kernel())
            .arg("-initrd")
            .arg(initrd);
        command.args([
            "-append",
            &format!("console=ttyS0 quiet panic=-1 permafrost.scenario={scenario}"),
        ]);
        command.args(image.arguments());
        for serial in [&console, &results] {
            command
                .arg("-serial")
                .arg(format!("file:{}", serial.display()));
        }
        let module_dir = packages
            .root
            .dir
            .join(format!("usr/lib/{}-linux-gnu/qemu", std::env::consts::ARCH));
        let qemu = command
            .env("QEMU_MODULE_DIR", module_dir)
            .stdin(Stdio::null())
            .spawn()
            .context("start QEMU")?;
        Ok(Self {
            qemu,
            console,
            results,
            deadline: Instant::now() + limit,
        })
    }

    /// Waits until the scenario has ended, or has set `mark`.
    ///
    /// # Errors
    /// Fails with the end of the console when QEMU ends early or the time is over.
    pub(crate) fn wait(&mut self, mark: Option<&str>) -> Result<Results> {
        loop {
            let ended = self.qemu.try_wait().context("wait for QEMU")?;
            let results = self.results()?;
            if results.done || mark.is_some_and(|mark| results.marks.iter().any(|set| set == mark))
            {
                return Ok(results);
            }
            if !results.failed.is_empty() && mark.is_some() {
                return Ok(results);
            }
            if let Some(status) = ended {
                bail!(
                    "QEMU ended early ({status}); the console's end:\n{}",
                    self.console_tail()
                );
            }
            if Instant::now() > self.deadline {
                bail!(
                    "the guest takes too long; {results:?}; the console's end:\n{}",
                    self.console_tail()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Simulates a power failure: kills QEMU at once.
    pub(crate) fn cut_power(mut self) -> Result<()> {
        self.qemu.kill().context("kill QEMU")?;
        self.qemu.wait().context("wait for QEMU")?;
        Ok(())
    }

    /// Returns the last lines of the console.
    pub(crate) fn console_tail(&self) -> String {
        permafrost_tests::daemon::tail(&self.console)
    }

    fn results(&self) -> Result<Results> {
        let text = fs::read(&self.results).context("read the guest's results")?;
        let mut results = Results::default();
        for line in String::from_utf8_lossy(&text).lines() {
            match line.trim_end().split_once(' ') {
                Some(("PASS", check)) => results.passed.push(check.to_owned()),
                Some(("FAIL", check)) => results.failed.push(check.to_owned()),
                Some(("MARK", mark)) => results.marks.push(mark.to_owned()),
                _ => results.done |= line.trim_end() == "DONE",
            }
        }
        Ok(results)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
