//! Endpoints of quinn over loopback, and directories of certificates.

mod connections;
mod criu;
mod directories;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::*;

/// A CA and the identities it issued, in a temporary directory.
struct Cluster {
    scratch: tempfile::TempDir,
    authority: Authority,
}

const DAY: Duration = Duration::from_secs(86_400);

impl Cluster {
    fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let authority = Authority::create(&scratch.path().join("ca"), "test", false).unwrap();
        Self { scratch, authority }
    }

    fn place(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn issue(&self, name: &str, role: Role) -> PathBuf {
        let place = self.place(name);
        self.authority
            .issue(&CertificateOrder::new(name, role), &place, false)
            .unwrap();
        place
    }

    fn identity(&self, name: &str, role: Role) -> Identity {
        Identity::load(self.issue(name, role)).unwrap()
    }

    /// Issues a certificate that is valid from `from` to `to` seconds from now.
    fn issue_between(&self, name: &str, role: Role, from: i64, to: i64) -> PathBuf {
        let place = self.place(name);
        self.authority
            .issue_for(
                &CertificateOrder::new(name, role),
                at(from),
                at(to),
                &place,
                true,
            )
            .unwrap();
        place
    }
}

fn at(seconds: i64) -> SystemTime {
    let distance = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 {
        SystemTime::now() - distance
    } else {
        SystemTime::now() + distance
    }
}

fn write(path: &Path, contents: &[u8]) {
    std::fs::write(path, contents).unwrap();
}
