//! From a configuration to an open store.

use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use permafrost_pmem::{
    FormatError, FormatOptions, Guarantee, MediumError, OpenError, OpenOptions, Region, open_medium,
};

use crate::catalog::{CatalogError, Opened, SledCatalog};
use crate::config::Config;
use crate::store::{Place, Store, StoreError};

/// Size of a new region where none is given, bytes.
const DEFAULT_REGION_BYTES: u64 = 4 << 30;

/// Why a daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A directory cannot be made or is open to others.
    #[error("prepare directory {path}")]
    Directory {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
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

/// Opens region and catalog; the store, and where its catalog came from.
pub(super) fn open_store(config: &Config) -> Result<(Arc<Store>, String), StartError> {
    make_private_dir(&config.data_dir)?;
    let path = config.region_path();
    let (region, guarantee) = open_region(config, &path)?;
    let (catalog, opened) = SledCatalog::open_or_replace(&config.data_dir.join("catalog"))?;
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

fn open_region(config: &Config, path: &Path) -> Result<(Arc<Region>, Guarantee), StartError> {
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

fn default_size_bytes(path: &Path) -> u64 {
    let dir = path.parent().unwrap_or(Path::new("."));
    let free_bytes =
        rustix::fs::statvfs(dir).map_or(u64::MAX, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    DEFAULT_REGION_BYTES.min(free_bytes / 2)
}

/// The run directory: sockets in it are for the owner only, which a directory open to others would undo.
pub(super) fn prepare_run_dir(path: &Path) -> Result<(), StartError> {
    make_private_dir(path)?;
    let sessions = path.join("sessions");
    // Endpoints of a daemon that is gone.
    match std::fs::remove_dir_all(&sessions) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(StartError::Directory {
            path: sessions,
            source,
        }),
        _ => make_private_dir(&sessions),
    }
}

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
    let mode = std::fs::metadata(path)
        .map_err(directory)?
        .permissions()
        .mode()
        & 0o777;
    if mode & 0o077 != 0 {
        tracing::warn!(path = %path.display(), mode = format!("{mode:o}"), "directory was open to others; made 0700");
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))
            .map_err(directory)?;
    }
    Ok(())
}
