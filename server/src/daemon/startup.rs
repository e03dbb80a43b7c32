//! From a configuration to an open store.

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use permafrost_pmem::{
    FormatError, FormatOptions, Guarantee, MediumError, OpenError, OpenOptions, Region, open_medium,
};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::catalog::{Catalog, CatalogError, Opened, SledCatalog};
use crate::config::Config;
use crate::store::{Place, Store, StoreError};

/// Size of a new region where none is given, bytes.
const DEFAULT_REGION_BYTES: u64 = 4 << 30;

/// Why a daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A directory cannot be made or examined.
    #[error("prepare directory {path}")]
    Directory {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A directory is somebody else's, who could replace what is in it.
    #[error(
        "directory {path} belongs to user {owner}, permafrostd runs as {user}: name another one"
    )]
    DirectoryOwner {
        /// Which.
        path: PathBuf,
        /// Its owner's id.
        owner: u32,
        /// Ours.
        user: u32,
    },
    /// A directory that others can enter: one made for this is not, so it may have been named by mistake.
    #[error(
        "directory {path} is open to others (mode {mode:o}): chmod 700 it if it is permafrostd's own, or name another one"
    )]
    DirectoryOpen {
        /// Which.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// There were checkpoints, and there is no region. To make a new one would hide the loss.
    #[error(
        "region {path} {is}, and the catalog lists {checkpoints} checkpoints: mount the file system that the region is on, or remove {catalog} to begin anew without them"
    )]
    RegionGone {
        /// Where it should be.
        path: PathBuf,
        /// What is there instead.
        is: &'static str,
        /// How many the catalog lists.
        checkpoints: usize,
        /// The catalog.
        catalog: PathBuf,
    },
    /// The sockets there are another daemon's.
    #[error("run directory {path} is in use by another permafrostd; name another with --run-dir")]
    RunDirInUse {
        /// Which.
        path: PathBuf,
    },
    /// The region's file cannot be opened or mapped.
    #[error("open region {path}")]
    Medium {
        /// Which.
        path: PathBuf,
        /// Why.
        source: MediumError,
    },
    /// A blank region cannot be formatted.
    #[error("format region {path}")]
    Format {
        /// Which.
        path: PathBuf,
        /// Why.
        source: FormatError,
    },
    /// The region is no region, damaged, or of a newer version. Nothing was written.
    #[error("open region {path}")]
    Region {
        /// Which.
        path: PathBuf,
        /// Why.
        source: OpenError,
    },
    /// No catalog can be made.
    #[error("open catalog")]
    Catalog(#[from] CatalogError),
    /// The catalog and the region cannot be brought together.
    #[error("open store")]
    Store(#[from] StoreError),
    /// A socket or port cannot be bound.
    #[error("listen on the {what}")]
    Listen {
        /// Which.
        what: &'static str,
        /// What the system says.
        source: io::Error,
    },
}

/// Makes the data and the run directory, or sees that they are ours alone: a wrong one is a mistake on the
/// command line.
pub(super) fn check_directories(config: &Config) -> Result<(), StartError> {
    make_private_dir(&config.data_dir)?;
    make_private_dir(&config.run_dir)
}

/// Opens catalog and region; the store, and where its catalog came from.
pub(super) fn open_store(config: &Config) -> Result<(Arc<Store>, String), StartError> {
    // The catalog first: it knows whether there must be a region.
    let catalog_path = config.data_dir.join("catalog");
    let (catalog, opened) = SledCatalog::open_or_replace(&catalog_path)?;
    let path = config.region_path();
    let checkpoints = catalog.list(None)?.len();
    let gone = |is| StartError::RegionGone {
        path: path.clone(),
        is,
        checkpoints,
        catalog: catalog_path.clone(),
    };
    let (region, guarantee) = open_region(config, &path, checkpoints > 0, gone)?;
    let origin = match opened {
        Opened::Existing => "opened".to_owned(),
        Opened::Created => "built: there was none".to_owned(),
        Opened::Replaced { aside, reason } => {
            tracing::warn!(%reason, aside = %aside.display(), "catalog put aside and rebuilt from the region");
            format!(
                "rebuilt: {reason} (the unusable one is {})",
                aside.display()
            )
        }
    };
    let place = Place { path, guarantee };
    let store = Store::new(region, place, Box::new(catalog), config.retention)?;
    Ok((store, origin))
}

/// Opens the region. One that is missing or blank is made, unless it `must_exist`.
fn open_region(
    config: &Config,
    path: &Path,
    must_exist: bool,
    gone: impl Fn(&'static str) -> StartError,
) -> Result<(Arc<Region>, Guarantee), StartError> {
    if must_exist && is_missing(path) {
        return Err(gone("is not there"));
    }
    if let (Some(asked), Ok(found)) = (config.region_size_bytes, std::fs::metadata(path))
        && found.len() > 0
        && found.len() != asked
    {
        let has = found.len();
        tracing::warn!(path = %path.display(), has, asked, "--region-size is ignored: the region is there, and does not grow");
    }
    let size_bytes = config
        .region_size_bytes
        .unwrap_or_else(|| default_size_bytes(path));
    let options = OpenOptions {
        require_dax: config.require_dax,
        populate: true,
    };
    let medium = open_medium(path, size_bytes, &options).map_err(|source| StartError::Medium {
        path: path.to_owned(),
        source,
    })?;
    let guarantee = medium.guarantee().clone();
    tracing::info!(path = %path.display(), %guarantee, "region mapped");
    let region_error = |source| StartError::Region {
        path: path.to_owned(),
        source,
    };
    let (region, report) = match Region::open(Arc::clone(&medium)) {
        Err(OpenError::NotARegion) if must_exist => return Err(gone("is blank")),
        Err(OpenError::NotARegion) => {
            Region::format(Arc::clone(&medium), &FormatOptions::default()).map_err(|source| {
                StartError::Format {
                    path: path.to_owned(),
                    source,
                }
            })?;
            Region::open(medium).map_err(region_error)?
        }
        opened => opened.map_err(region_error)?,
    };
    tracing::info!(?report, "region open");
    Ok((region, guarantee))
}

/// Whether there is nothing that could be a region: an empty file is what an interrupted start leaves.
fn is_missing(path: &Path) -> bool {
    match std::fs::metadata(path) {
        Ok(file) => file.is_file() && file.len() == 0,
        // Anything else shows when it is opened.
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

fn default_size_bytes(path: &Path) -> u64 {
    let dir = path.parent().unwrap_or(Path::new("."));
    let free_bytes =
        rustix::fs::statvfs(dir).map_or(u64::MAX, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    DEFAULT_REGION_BYTES.min(free_bytes / 2)
}

/// The run directory: sockets in it are for the owner only, which a directory open to others would undo.
///
/// The lock says whose they are: another daemon's are not removed.
pub(super) fn prepare_run_dir(path: &Path) -> Result<File, StartError> {
    let failed = |source| StartError::Directory {
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
            return Err(StartError::RunDirInUse {
                path: path.to_owned(),
            });
        }
        Err(errno) => return Err(failed(errno.into())),
    }
    let sessions = path.join("sessions");
    // Endpoints of a daemon that is gone.
    match std::fs::remove_dir_all(&sessions) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(StartError::Directory {
                path: sessions,
                source,
            });
        }
        _ => make_private_dir(&sessions)?,
    }
    Ok(lock)
}

/// Makes a directory for us alone, or sees that it is one. It is not made one: `/run`, named by mistake, stays
/// what it is.
fn make_private_dir(path: &Path) -> Result<(), StartError> {
    let directory = |source| StartError::Directory {
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
        return Err(StartError::DirectoryOwner {
            path: path.to_owned(),
            owner,
            user,
        });
    }
    let mode = found.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(StartError::DirectoryOpen {
            path: path.to_owned(),
            mode,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
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
        // One that is not ours whoever we are, without a chown, which needs a capability.
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
            matches!(refused, Err(StartError::DirectoryOwner { .. })),
            "{refused:?}"
        );
        if others != Path::new("/") {
            std::fs::remove_dir(others).unwrap();
        }
    }
}
