//! Permissions of sockets, directories and secrets.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use permafrost_protocol::control::ServerStatus;
use permafrost_terminal::context::Context;
use permafrost_transport::api::SOCKET;

use super::report::Findings;

const AREA: &str = "files";

/// Purposes of the daemon's files whose contents are secret.
const SECRETS: [&str; 5] = ["tokens", "key", "quotas", "registry-user", "registry-key"];

/// Findings, and the user whose files are looked at.
struct Owned<'a> {
    findings: &'a mut Findings,
    /// User that the daemon runs as, if it runs.
    daemon: Option<u32>,
}

/// Returns the user that a process acts as; `None` if there is no such process.
fn user_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    // The real one, then the effective one.
    users.split_whitespace().nth(1)?.parse().ok()
}

pub(super) fn check(
    findings: &mut Findings,
    context: &Context,
    status: Option<&ServerStatus>,
    secrets: &[PathBuf],
) {
    let daemon = status.and_then(|status| user_of(status.pid));
    let findings = &mut Owned { findings, daemon };
    if status.is_some() {
        socket(findings, "control socket", &context.socket);
        let api = context.socket.with_file_name(SOCKET);
        if api.exists() {
            socket(findings, "API socket", &api);
        }
        if let Some(run) = context.socket.parent() {
            directory(findings, "run directory", run);
        }
    }
    for file in status.iter().flat_map(|status| &status.files) {
        let path = Path::new(&file.path);
        match file.purpose.as_str() {
            "data" => directory(findings, "data directory", path),
            purpose if SECRETS.contains(&purpose) => {
                secret_of(findings, &format!("{purpose} of permafrostd"), path);
            }
            _ => {}
        }
    }
    for path in secrets {
        secret_of(findings, &path.display().to_string(), path);
    }
}

/// Checks that nobody but the owner can connect to a socket.
fn socket(findings: &mut Owned<'_>, name: &str, path: &Path) {
    private(
        findings,
        name,
        path,
        "restart permafrostd, which makes it with mode 0600",
    );
}

fn directory(findings: &mut Owned<'_>, name: &str, path: &Path) {
    private(
        findings,
        name,
        path,
        &format!(
            "chmod 700 {}: permafrostd refuses to start with it",
            path.display()
        ),
    );
}

/// Checks that a file is its owner's alone, and that the owner is this user or root.
pub(super) fn secret(findings: &mut Findings, name: &str, path: &Path) {
    let daemon = None;
    secret_of(&mut Owned { findings, daemon }, name, path);
}

/// Checks that a file is its owner's alone, and that the owner is this user, root or the daemon's.
fn secret_of(findings: &mut Owned<'_>, name: &str, path: &Path) {
    private(
        findings,
        name,
        path,
        &format!(
            "chmod 600 {}, and replace the secret if others may have read it",
            path.display()
        ),
    );
}

fn private(owned: &mut Owned<'_>, name: &str, path: &Path, advice: &str) {
    let findings = &mut *owned.findings;
    let place = (AREA, name);
    let found = match fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return findings.skipped(place, format!("{}: {error}", path.display()));
        }
        Err(error) => {
            return findings.error(
                place,
                format!("{}: {error}", path.display()),
                "see that it is there, and readable for the user that needs it",
            );
        }
    };
    let mode = found.permissions().mode() & 0o7777;
    let shown = format!("{}, mode {mode:04o}", path.display());
    let owner = found.uid();
    if mode & 0o077 != 0 {
        findings.error(place, format!("{shown}: open to other users"), advice);
    } else if owner != 0
        && owner != rustix::process::geteuid().as_raw()
        && Some(owner) != owned.daemon
    {
        findings.warning(
            place,
            format!("{shown}, of user {owner}"),
            format!("chown it to the user that needs it; user {owner} can change it"),
        );
    } else {
        findings.ok(place, shown);
    }
}

#[cfg(test)]
mod tests {
    use super::super::DoctorStatus;
    use super::*;

    #[test]
    fn a_secret_that_others_can_read_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        fs::write(&path, "secret").unwrap();
        for (mode, expected) in [
            (0o600, DoctorStatus::Ok),
            (0o640, DoctorStatus::Error),
            (0o604, DoctorStatus::Error),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let mut findings = Findings::default();
            look(&mut findings, None, "tokens", &path);
            let found = findings.of("tokens");
            assert_eq!(found.status, expected, "{found:?}");
            assert!(!found.found.contains("secret"), "{found:?}");
        }
        let mut findings = Findings::default();
        look(&mut findings, None, "gone", &directory.path().join("gone"));
        assert_eq!(findings.of("gone").status, DoctorStatus::Error);
    }

    fn look(findings: &mut Findings, daemon: Option<u32>, name: &str, path: &Path) {
        secret_of(&mut Owned { findings, daemon }, name, path);
    }

    #[test]
    fn files_of_the_daemon_s_user_are_in_order() {
        let me = rustix::process::geteuid().as_raw();
        assert_eq!(user_of(std::process::id()), Some(me));
        if me != 0 {
            // Only root can give files away.
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        fs::write(&path, "secret").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(&path, Some(4711), None).unwrap();
        for (daemon, expected) in [
            (Some(4711), DoctorStatus::Ok),
            (Some(4712), DoctorStatus::Warning),
            (None, DoctorStatus::Warning),
        ] {
            let mut findings = Findings::default();
            look(&mut findings, daemon, "tokens", &path);
            assert_eq!(findings.of("tokens").status, expected, "{daemon:?}");
        }
    }
}
