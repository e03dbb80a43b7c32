//! The run directory, which holds the sockets: closed to other users, and used by one daemon at a time.

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::HostError;

/// Prepares and locks the run directory. Its sockets are for the owner only, which a directory open to others
/// would undo.
///
/// The lock shows which daemon owns the sockets: those of a running daemon are not removed.
pub(super) fn prepare(path: &Path) -> Result<File, HostError> {
    let failed = |source| HostError::Directory {
        path: path.to_owned(),
        source,
    };
    let lock = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path.join("lock"))
        .map_err(failed)?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            return Err(HostError::RunDirInUse {
                path: path.to_owned(),
            });
        }
        Err(errno) => return Err(failed(errno.into())),
    }
    let sessions = path.join("sessions");
    // Endpoints of a daemon that is gone.
    match std::fs::remove_dir_all(&sessions) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(HostError::Directory {
                path: sessions,
                source,
            });
        }
        _ => make_private_dir(&sessions)?,
    }
    Ok(lock)
}

/// Makes a directory of mode 0700, or checks that it is one. The mode of an existing directory is not changed:
/// `/run`, named by mistake, stays as it is.
///
/// # Errors
/// The directory cannot be made, belongs to another user, or is open to others.
pub fn make_private_dir(path: &Path) -> Result<(), HostError> {
    let directory = |source| HostError::Directory {
        path: path.to_owned(),
        source,
    };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(directory)?;
    let found = std::fs::metadata(path).map_err(directory)?;
    let (owner, user) = (found.uid(), rustix::process::geteuid().as_raw());
    if owner != user {
        return Err(HostError::DirectoryOwner {
            path: path.to_owned(),
            owner,
            user,
        });
    }
    let mode = found.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(HostError::DirectoryOpen {
            path: path.to_owned(),
            mode,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_directory_is_made_private_but_never_changed() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("run/permafrost");
        for _ in 0..2 {
            make_private_dir(&own).unwrap();
            assert_eq!(mode_of(&own), 0o700);
        }
        for mode in [0o755, 0o710, 0o701, 0o1777] {
            std::fs::set_permissions(&own, std::fs::Permissions::from_mode(mode)).unwrap();
            let refused = make_private_dir(&own).unwrap_err();
            assert!(refused.to_string().contains("chmod 700"), "{refused}");
            assert_eq!(mode_of(&own), mode);
        }
    }

    #[test]
    fn a_directory_of_another_user_is_refused() {
        // A directory that belongs to another user for any user, without a chown, which needs a capability.
        let others = if rustix::process::geteuid().is_root() {
            let dir = tempfile::tempdir().unwrap();
            if std::os::unix::fs::chown(dir.path(), Some(65534), None).is_err() {
                return;
            }
            dir.keep()
        } else {
            PathBuf::from("/")
        };
        let refused = make_private_dir(&others);
        assert!(
            matches!(refused, Err(HostError::DirectoryOwner { .. })),
            "{refused:?}"
        );
        if others != Path::new("/") {
            std::fs::remove_dir(others).unwrap();
        }
    }
}
