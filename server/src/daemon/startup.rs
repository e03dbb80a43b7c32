//! From a configuration to an open store.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use permafrost_client::host::HostError;
use permafrost_client::identity::IdentityError;
use permafrost_client::peer::PeerError;
use permafrost_pmem::{
    FormatError, FormatOptions, Guarantee, MediumError, OpenError, OpenOptions, Region, emulate,
    open_medium,
};

use super::member::Member;
use crate::api::serve::ApiServeError;
use crate::catalog::{Catalog, CatalogError, Opened, SledCatalog};
use crate::config::Config;
use crate::costs::{Costs, CostsConfig, Prober, Probing};
use crate::metrics::ServeError;
use crate::store::{Place, Store, StoreError};

/// Size of a new region where none is given, bytes.
const DEFAULT_REGION_BYTES: u64 = 4 << 30;

/// Why a daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A directory is not as it must be, or a socket or port cannot be bound.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The certificate of the node cannot be used.
    #[error("load the identity")]
    Identity(#[from] IdentityError),
    /// Peers cannot be served.
    #[error("serve peers")]
    Peers(#[from] PeerError),
    /// Metrics cannot be served.
    #[error(transparent)]
    Metrics(#[from] ServeError),
    /// The HTTP API cannot be served.
    #[error(transparent)]
    Api(#[from] ApiServeError),
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
    /// The region that is to be made would be too small.
    #[error("make region {path}: {asked_bytes} bytes are too few, it needs at least {least_bytes}")]
    TooSmall {
        /// Where.
        path: PathBuf,
        /// Its size.
        asked_bytes: u64,
        /// The least that would do.
        least_bytes: u64,
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
    /// The catalog and the region cannot be brought together, or the cluster cannot be joined.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl StartError {
    /// What to do about it; empty where the message says it, or there is nothing to be said.
    #[must_use]
    pub fn hint(&self) -> &str {
        match self {
            Self::Store(error) => error.hint(),
            Self::Api(error) => error.hint(),
            Self::TooSmall { .. } => {
                "name a larger --region-size (a dump takes at least 1 MiB), or a --region on a file system with more room"
            }
            _ => "",
        }
    }
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
    store.remember_parked_in(config.data_dir.join("parked.json"));
    Ok((store, origin))
}

/// Has what the store does measured, from the figures of the last run on.
pub(super) fn measure(config: &Config, store: &Store) -> Result<(), StoreError> {
    let emulated = store.place().guarantee.emulated.as_ref();
    let costs = Costs::new(CostsConfig {
        figures: Some(config.data_dir.join("figures.json")),
        emulated: emulated.map(ToString::to_string),
        ..CostsConfig::default()
    });
    let held = store.everything()?;
    let records: Vec<_> = held.into_iter().filter_map(|held| held.record).collect();
    costs.learn_history(&records);
    store.measured_by(costs);
    Ok(())
}

/// Has what nothing renews measured while the node is idle.
pub(super) fn probe(
    period: Option<Duration>,
    store: &Arc<Store>,
    member: Option<&Member>,
) -> Result<Option<Probing>, StoreError> {
    let (Some(period), Some(costs)) = (period, store.costs()) else {
        return Ok(None);
    };
    let prober = Prober::new(store, costs, member.map(Member::links), period);
    let started = prober.start();
    started
        .map(Some)
        .map_err(StoreError::io("start the probes"))
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
    let least_bytes = Region::least_bytes(&FormatOptions::default());
    // Before there is a file that would be in the way of the next try.
    if size_bytes < least_bytes && is_missing(path) {
        return Err(StartError::TooSmall {
            path: path.to_owned(),
            asked_bytes: size_bytes,
            least_bytes,
        });
    }
    let options = OpenOptions {
        require_dax: config.require_dax,
        populate: true,
    };
    let medium = open_medium(path, size_bytes, &options).map_err(|source| StartError::Medium {
        path: path.to_owned(),
        source,
    })?;
    let medium = match &config.emulate {
        Some(device) => emulate(medium, device.clone()),
        None => medium,
    };
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
