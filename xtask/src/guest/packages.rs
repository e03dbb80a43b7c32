//! Contents of the guest: packages of Debian 12, because its CRIU is 3.17.1 and speaks the 24-byte page-server
//! dialect. They are fetched and unpacked, not installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::initrd;
use crate::apt::{self, Root};
use crate::{paths, ui};

/// Release of Debian, and the packages fetched from it.
const SUITE: &str = "bookworm";
const PACKAGES: [&str; 6] = [
    "qemu-system-x86",
    "linux-image-cloud-amd64",
    "busybox-static",
    "criu",
    "e2fsprogs",
    "etcd-server",
];

/// Kernel modules besides those built into the cloud kernel: the disk, the NVDIMM in both its forms, the socket
/// diagnostics that CRIU uses, and others that CRIU checks for before it does anything.
const MODULES: [&str; 17] = [
    "virtio_pci",
    "virtio_blk",
    "nfit",
    "nd_pmem",
    "virtio_pmem",
    "ext4",
    "crc32c_generic",
    "unix_diag",
    "inet_diag",
    "tcp_diag",
    "udp_diag",
    "raw_diag",
    "af_packet_diag",
    "netlink_diag",
    "tun",
    "veth",
    "nf_tables",
];

/// Returns the directory of all files of the guest.
pub(crate) fn dir() -> PathBuf {
    paths::target().join("guest")
}

/// Returns the unpacked packages; fetches them if they are missing (about a minute, once).
pub(crate) fn fetch() -> Result<Packages> {
    let dir = dir();
    fs::create_dir_all(&dir).context("create target/guest")?;
    let lock = fs::File::create(dir.join("lock")).context("create the lock")?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).context("take the lock")?;
    let root = Root {
        dir: dir.join("root"),
    };
    // Unpacked before the last of them was needed, perhaps.
    if !initrd::PROGRAMS
        .iter()
        .all(|program| root.dir.join(program).exists())
    {
        let task = ui::Task::begin("fetch QEMU, a kernel and CRIU 3.17.1 for the guest");
        apt::unpack(SUITE, &PACKAGES, &root.dir).context("fetch the guest's packages")?;
        task.done("unpacked under target/guest, nothing installed");
    }
    let modules = root.dir.join("lib/modules");
    let mut versions = fs::read_dir(&modules)
        .context("list the kernels")?
        .flatten()
        .map(|entry| entry.file_name());
    let Some(version) = versions.next() else {
        bail!("no kernel in {}", modules.display())
    };
    let version = version.to_string_lossy().into_owned();
    Ok(Packages { root, version })
}

/// The guest's packages.
pub(crate) struct Packages {
    /// Directory into which the packages are unpacked.
    pub(crate) root: Root,
    version: String,
}

impl Packages {
    pub(crate) fn kernel(&self) -> PathBuf {
        self.root
            .dir
            .join("boot")
            .join(format!("vmlinuz-{}", self.version))
    }

    pub(crate) fn busybox(&self) -> PathBuf {
        self.root.dir.join("bin/busybox")
    }

    /// Returns the files of the wanted modules, each after those it depends on.
    pub(crate) fn modules(&self) -> Result<Vec<PathBuf>> {
        let dir = self.root.dir.join("lib/modules").join(&self.version);
        let status = Command::new(self.busybox())
            .args(["depmod", "-b"])
            .arg(&self.root.dir)
            .arg(&self.version)
            .status()
            .context("run depmod")?;
        if !status.success() {
            bail!("depmod fails ({status})");
        }
        let dependencies =
            fs::read_to_string(dir.join("modules.dep")).context("read modules.dep")?;
        let builtin =
            fs::read_to_string(dir.join("modules.builtin")).context("read modules.builtin")?;
        order(&MODULES, &dependencies, &builtin)
            .map(|files| files.into_iter().map(|file| dir.join(file)).collect())
    }

    /// Returns the libraries that a program of the packages needs, as the packages' own loader finds them.
    pub(crate) fn libraries(&self, program: &str) -> Result<Vec<PathBuf>> {
        let output = Command::new(self.root.loader()?)
            .args(["--library-path", &self.root.library_path(), "--list"])
            .arg(self.root.dir.join(program))
            .output()
            .context("run the guest's loader")?;
        if !output.status.success() {
            bail!(
                "libraries of {program} are missing: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(listed(&String::from_utf8_lossy(&output.stdout)))
    }
}

/// Returns the libraries that a program built on this machine needs.
pub(crate) fn libraries_of(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .output()
        .context("run ldd")?;
    if !output.status.success() {
        bail!(
            "ldd {}: {}",
            program.display(),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(listed(&String::from_utf8_lossy(&output.stdout)))
}

/// Returns the paths in a loader's listing: `name => path (address)` or `path (address)`.
fn listed(listing: &str) -> Vec<PathBuf> {
    listing
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

/// Returns `wanted` and all modules they depend on, dependencies first, without those that are built in.
fn order(wanted: &[&str], dependencies: &str, builtin: &str) -> Result<Vec<String>> {
    // Names have - and _ for each other.
    let name = |path: &str| {
        path.rsplit('/')
            .next()
            .unwrap_or(path)
            .trim_end_matches(".ko")
            .replace('-', "_")
    };
    let mut ordered: Vec<String> = Vec::new();
    for want in wanted {
        if let Some(line) = dependencies.lines().find(|line| {
            line.split(':')
                .next()
                .is_some_and(|path| name(path) == *want)
        }) {
            let (own, needs) = line
                .split_once(':')
                .context("a line of modules.dep without a colon")?;
            // depmod lists the direct ones first.
            for file in needs.split_whitespace().rev().chain([own]) {
                if !ordered.iter().any(|known| known == file) {
                    ordered.push(file.to_owned());
                }
            }
        } else if !builtin.lines().any(|path| name(path) == *want) {
            bail!("the guest's kernel has no module {want}");
        }
    }
    Ok(ordered)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need() {
        let dependencies = "k/nd_pmem.ko: k/nd_btt.ko k/libnvdimm.ko\nk/nfit.ko: k/libnvdimm.ko\nk/libnvdimm.ko:\n";
        let files = order(
            &["nd_pmem", "nfit", "ext4"],
            dependencies,
            "kernel/fs/ext4/ext4.ko\n",
        )
        .unwrap();
        assert_eq!(
            files,
            ["k/libnvdimm.ko", "k/nd_btt.ko", "k/nd_pmem.ko", "k/nfit.ko"]
        );
        assert!(order(&["absent"], dependencies, "").is_err());
    }
}
