//! Where a daemon that does not run would keep its region, and its ports. The region itself is not opened.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use permafrost_criu::scratch::is_in_memory;
use permafrost_terminal::human;
use rustix::fs::OFlags;

use super::report::Findings;

const AREA: &str = "region";

/// Room below which a new region is too small to be of use.
const LITTLE_ROOM: u64 = 1 << 30;

pub(super) fn check(findings: &mut Findings, data_dir: &Path, region: Option<&Path>) {
    let beside = data_dir.join("region");
    let region = region.unwrap_or(&beside);
    if let Ok(file) = fs::metadata(region) {
        findings.ok(
            (AREA, "file"),
            format!(
                "{}, {}; `permafrostd region check` reads it while no daemon runs",
                region.display(),
                human::bytes(file.len())
            ),
        );
    } else {
        findings.ok(
            (AREA, "file"),
            format!(
                "{} is not there yet: permafrostd makes it",
                region.display()
            ),
        );
    }
    let directories = [
        ("data directory", Some(data_dir)),
        ("directory", region.parent()),
    ];
    let same = region.parent() == Some(data_dir);
    for (name, directory) in directories.into_iter().take(if same { 1 } else { 2 }) {
        if let Some(directory) = directory {
            writable(findings, name, directory);
        }
    }
    if let Some(place) = existing(region) {
        medium(findings, place);
    }
}

/// Returns the nearest directory above that exists.
fn existing(path: &Path) -> Option<&Path> {
    path.ancestors().skip(1).find(|above| above.is_dir())
}

fn writable(findings: &mut Findings, name: &str, directory: &Path) {
    let place = (AREA, name);
    let shown = directory.display();
    if !directory.exists() {
        let above = existing(directory).unwrap_or(Path::new("/"));
        return match try_write(above) {
            Ok(()) => findings.ok(
                place,
                format!("{shown} is not there yet: permafrostd makes it"),
            ),
            Err(error) => findings.error(
                place,
                format!(
                    "{shown} is not there, and {} takes no files: {error}",
                    above.display()
                ),
                "make it, as the user that permafrostd runs as, or name another with --data-dir",
            ),
        };
    }
    match try_write(directory) {
        Ok(()) => findings.ok(place, format!("{shown} takes files")),
        Err(error) => findings.error(
            place,
            format!("{shown} takes no files: {error}"),
            "mount it for writing, or give it to the user that permafrostd runs as; --data-dir and --region name other places",
        ),
    }
}

/// Tries to make a file in a directory. Nothing is left there.
fn try_write(directory: &Path) -> io::Result<()> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY;
    match rustix::fs::open(
        directory,
        flags,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
    ) {
        Ok(_) => return Ok(()),
        // The file system has no files without names.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {}
        Err(error) => return Err(error.into()),
    }
    let path = directory.join(format!(".permafrost-doctor-{}", std::process::id()));
    let made: io::Result<File> = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path);
    made?;
    fs::remove_file(&path)
}

fn medium(findings: &mut Findings, directory: &Path) {
    let Ok(system) = rustix::fs::statfs(directory) else {
        return findings.skipped((AREA, "medium"), format!("statfs {}", directory.display()));
    };
    if is_in_memory(directory) {
        findings.warning(
            (AREA, "medium"),
            format!("{} is in memory: a region there does not outlast a power failure or a reboot", directory.display()),
            "put the region on a DAX file system, or on a disk; in a cluster, copies there count only with --count-volatile-copies",
        );
    } else {
        let device = fs::metadata(directory)
            .map(|file| file.dev())
            .unwrap_or_default();
        findings.ok(
            (AREA, "medium"),
            format!(
                "{} is on device {}:{}; what it guarantees, DAX or not, shows when permafrostd runs (--require-dax insists on DAX)",
                directory.display(),
                rustix::fs::major(device),
                rustix::fs::minor(device)
            ),
        );
    }
    let block = u64::try_from(system.f_bsize).unwrap_or_default();
    let free = system.f_bavail.saturating_mul(block);
    if free < LITTLE_ROOM {
        findings.warning(
            (AREA, "room"),
            format!("{} free in {}", human::bytes(free), directory.display()),
            "free some, or name another place with --region: a new region takes half of what is free, 4 GiB at most",
        );
    } else {
        findings.ok(
            (AREA, "room"),
            format!("{} free in {}", human::bytes(free), directory.display()),
        );
    }
}

/// Checks that the ports of a daemon that does not run are free.
pub(super) fn ports(findings: &mut Findings, ports: &[SocketAddr]) {
    for port in ports {
        let name = port.to_string();
        match TcpListener::bind(port) {
            Ok(_) => findings.ok(("ports", &name), "free"),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => findings.error(
                ("ports", &name),
                "taken by another program",
                format!(
                    "`ss -ltnp 'sport = :{}'` names it: end it, or give permafrostd another address with --listen",
                    port.port()
                ),
            ),
            Err(error) => findings.error(
                ("ports", &name),
                error.to_string(),
                "choose an address of this machine with --listen",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::DoctorStatus;
    use super::*;

    #[test]
    fn a_directory_that_takes_no_files_is_an_error() {
        let mut findings = Findings::default();
        // A file system that nobody can make files in, root included.
        check(&mut findings, Path::new("/proc/self"), None);
        let refused = findings.of("data directory");
        assert_eq!(refused.status, DoctorStatus::Error, "{refused:?}");
        assert!(refused.advice.contains("--data-dir"), "{refused:?}");
    }

    #[test]
    fn nothing_is_left_in_a_directory_that_takes_files() {
        let directory = tempfile::tempdir().unwrap();
        let mut findings = Findings::default();
        check(&mut findings, directory.path(), None);
        assert_eq!(findings.of("data directory").status, DoctorStatus::Ok);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        let mut findings = Findings::default();
        check(&mut findings, &directory.path().join("a/b"), None);
        assert_eq!(findings.of("data directory").status, DoctorStatus::Ok);
        assert!(!directory.path().join("a").exists());
    }

    #[test]
    fn a_taken_port_is_an_error_and_a_free_one_is_not() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let mut findings = Findings::default();
        ports(&mut findings, &[address]);
        assert_eq!(
            findings.of(&address.to_string()).status,
            DoctorStatus::Error
        );
        drop(taken);
        let mut findings = Findings::default();
        ports(&mut findings, &[address]);
        assert_eq!(findings.of(&address.to_string()).status, DoctorStatus::Ok);
    }
}
