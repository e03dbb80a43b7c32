//! Start of the daemon, from a configuration to an open store.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use permafrost_agent::host::HostError;
use permafrost_catalog::{Catalog, CatalogError, Opened, Positioned, SledCatalog};
use permafrost_http_api::serve::ApiServeError;
use permafrost_identity::IdentityError;
use permafrost_keys::{KeyStore, KeysError, Wrapper};
use permafrost_metering::costs::{Costs, CostsConfig, Learning, Prober, Probing};
use permafrost_pmem::{
    FormatError, FormatOptions, Guarantee, MediumError, OpenError, OpenOptions, RecoverOptions,
    RecoveryReport, Region, RegionMember, RegionSummary, emulate, open_medium,
};
use permafrost_protocol::control::{Checkpoint, DaemonFile, ReportedError};
use permafrost_quotas::Quotas;
use permafrost_quotas::private_file::PrivateFileError;
use permafrost_sharing::SharedPages;
use permafrost_store::{DataKeys, RegionLocation, Store, StoreError, StoreParts};
use permafrost_transport::peer::PeerError;

use super::member::Member;
use crate::config::Config;
use crate::members;
use permafrost_metrics::MetricsListenError;

/// Size of a new region where none is given, bytes.
const DEFAULT_REGION_BYTES: u64 = 4 << 30;

/// Reason why a daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A directory has wrong permissions or is missing, or a socket or port cannot be bound.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The certificate of the node cannot be used.
    #[error("load the identity")]
    Identity(#[from] IdentityError),
    /// Peers cannot be served.
    #[error("serve peers")]
    Peers(#[from] PeerError),
    /// The audit log cannot be opened.
    #[error("open the audit log")]
    Audit(#[source] io::Error),
    /// Metrics cannot be served.
    #[error(transparent)]
    Metrics(#[from] MetricsListenError),
    /// The HTTP API cannot be served.
    #[error(transparent)]
    Api(#[from] ApiServeError),
    /// The keys for encryption at rest cannot be used.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// The catalog is encrypted, and there is no key. To go on would number generations anew, and store them in the
    /// clear.
    #[error(
        "what is stored here is encrypted: give --key-file or --key-command, or remove {catalog} to go on without what is encrypted"
    )]
    NoKey {
        /// Path of the catalog.
        catalog: PathBuf,
    },
    /// The catalog is encrypted, and the data keys are gone. To make new ones would hide the loss.
    #[error(
        "the keys of what is stored here are not in {keys}: bring that directory back, or remove {catalog} to go on without what is encrypted"
    )]
    KeysGone {
        /// Directory of the keys.
        keys: PathBuf,
        /// Path of the catalog.
        catalog: PathBuf,
    },
    /// The file of quotas cannot be used.
    #[error(transparent)]
    Quotas(#[from] PrivateFileError),
    /// The catalog lists checkpoints, and there is no region. To make a new region would hide the loss.
    #[error(
        "region {path} {is}, and the catalog lists {checkpoints} checkpoints: mount the file system that the region is on, or remove {catalog} to begin anew without them"
    )]
    RegionGone {
        /// Expected path of the region.
        path: PathBuf,
        /// State of that path, in words.
        is: &'static str,
        /// Number of checkpoints that the catalog lists.
        checkpoints: usize,
        /// Path of the catalog.
        catalog: PathBuf,
    },
    /// The region to be made would be too small.
    #[error("make region {path}: {asked_bytes} bytes are too few, it needs at least {least_bytes}")]
    TooSmall {
        /// Path of the region.
        path: PathBuf,
        /// Requested size, bytes.
        asked_bytes: u64,
        /// Smallest size that suffices, bytes.
        least_bytes: u64,
    },
    /// Acknowledged checkpoints are not in the region.
    #[error(
        "region {path} {is} and lacks {} checkpoints that were acknowledged: {}",
        lost.len(),
        in_short(lost)
    )]
    Lost {
        /// Path of the region.
        path: PathBuf,
        /// Fault of the region, in words.
        is: &'static str,
        /// Names of the checkpoints that are missing.
        lost: Vec<String>,
    },
    /// The region's file cannot be opened or mapped.
    #[error("open region {path}")]
    Medium {
        /// Path of the region.
        path: PathBuf,
        /// Error of the medium.
        source: MediumError,
    },
    /// A blank region cannot be formatted.
    #[error("format region {path}")]
    Format {
        /// Path of the region.
        path: PathBuf,
        /// Error from formatting the region.
        source: FormatError,
    },
    /// The file holds no region, or a damaged one, or one of a newer version. Nothing was written.
    #[error("open region {path}")]
    Region {
        /// Path of the region.
        path: PathBuf,
        /// Error from opening the region.
        source: OpenError,
    },
    /// The catalog cannot be opened or made.
    #[error("open catalog")]
    Catalog(#[from] CatalogError),
    /// The catalog cannot be reconciled with the region, or the cluster cannot be joined.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl StartError {
    /// Returns advice on how to remove the cause. Empty where the message contains it, or where there is none.
    #[must_use]
    pub fn hint(&self) -> &str {
        match self {
            Self::Store(error) => error.hint(),
            Self::Lost { .. } => {
                "check that the right file system is mounted and the right file was put back; to go on without them: --accept-loss"
            }
            Self::Api(error) => error.hint(),
            Self::TooSmall { .. } => {
                "name a larger --region-size (a dump takes at least 1 MiB), or a --region on a file system with more room"
            }
            Self::Keys(error) => error.hint(),
            Self::Quotas(error) => error.hint(),
            Self::Audit(_) => "name another file with --audit-log, or `none`",
            _ => "",
        }
    }
}

/// An open store and its measurements.
pub(super) struct MeasuredStore {
    pub(super) store: Arc<Store>,
    /// Measurements of the store, and predictions made from them.
    pub(super) costs: Arc<Costs>,
    /// Description of the catalog's origin.
    pub(super) catalog_origin: String,
}

/// Name of the catalog of a node that encrypts, in the data directory.
const ENCRYPTED_CATALOG: &str = "catalog.encrypted";

/// Opens catalog, region and quotas, and makes the store of them. Its measurements begin with the figures of the last
/// run.
pub(super) fn open_store(config: &Config) -> Result<MeasuredStore, StartError> {
    let quotas = config.quotas.as_deref().map(Quotas::load).transpose()?;
    let directory = config.data_dir.join("keys");
    let catalog = config.data_dir.join(ENCRYPTED_CATALOG);
    if catalog.exists() && config.key.is_none() {
        return Err(StartError::NoKey { catalog });
    }
    if catalog.exists() && !KeyStore::exists(&directory) {
        let keys = directory;
        return Err(StartError::KeysGone { keys, catalog });
    }
    let keys = config
        .key
        .as_ref()
        .map(|key| KeyStore::open(&directory, key, config.old_key.as_ref()).map(Arc::new));
    let keys = keys.transpose()?;
    // The catalog first: it knows whether there must be a region.
    let (catalog, opened, catalog_path) = open_catalog(config, keys.as_deref())?;
    let path = config.region_path();
    let lists_any = count(&catalog, 1)? > 0;
    let gone = |is| match count(&catalog, usize::MAX) {
        Ok(checkpoints) => StartError::RegionGone {
            path: path.clone(),
            is,
            checkpoints,
            catalog: catalog_path.clone(),
        },
        Err(error) => error.into(),
    };
    // Before it is opened, which writes to it.
    let admit = |summary: &RegionSummary| accept_loss(config, &path, &catalog, summary);
    let (region, guarantee) = open_region(config, &path, lists_any, gone, admit)?;
    if let Some(keys) = &keys {
        keys.attach(&region);
    }
    let catalog_origin = match opened {
        Opened::Existing => "opened".to_owned(),
        Opened::Created => "built: there was none".to_owned(),
        Opened::Replaced { aside, reason } => {
            tracing::warn!(event = "catalog-rebuilt", %reason, aside = %aside.display(), "catalog put aside and rebuilt from the region");
            format!(
                "rebuilt: {reason} (the unusable one is {})",
                aside.display()
            )
        }
    };
    let costs = Costs::new(CostsConfig {
        figures: Some(config.data_dir.join("figures.json")),
        emulated: guarantee.emulated.as_ref().map(ToString::to_string),
        ..CostsConfig::default()
    });
    let catalog = Positioned::new(Box::new(catalog), Arc::clone(&region));
    let store = Store::new(StoreParts {
        retention: config.retention,
        parked_file: Some(config.data_dir.join("parked.json")),
        observer: Arc::new(Learning(Arc::clone(&costs))),
        quotas: Arc::new(quotas.unwrap_or_default()),
        keys: keys.clone().map(|keys| keys as Arc<dyn DataKeys>),
        cooling: config.cooling,
        sharing: SharedPages::new(config.share_pages.clone()),
        ..StoreParts::new(
            region,
            RegionLocation { path, guarantee },
            Box::new(catalog),
        )
    })?;
    Ok(MeasuredStore {
        store,
        costs,
        catalog_origin,
    })
}

/// Opens the catalog; with keys the encrypted one, which takes over what one in the clear has. That one is removed.
fn open_catalog(
    config: &Config,
    keys: Option<&KeyStore>,
) -> Result<(SledCatalog, Opened, PathBuf), StartError> {
    let plain_path = config.data_dir.join("catalog");
    let Some(keys) = keys else {
        let (catalog, opened) = SledCatalog::open_or_replace(&plain_path)?;
        return Ok((catalog, opened, plain_path));
    };
    let mut contents = None;
    if plain_path.exists() {
        contents = Some(SledCatalog::open_or_replace(&plain_path)?.0.contents()?);
    }
    let path = config.data_dir.join(ENCRYPTED_CATALOG);
    let cipher = Arc::new(keys.catalog_cipher());
    let (catalog, opened) = SledCatalog::open_encrypted(&path, cipher)?;
    if let Some(contents) = contents {
        catalog.take_over(&contents)?;
        let removed = std::fs::remove_dir_all(&plain_path);
        removed.map_err(|source| KeysError::Io {
            action: "remove the catalog in the clear",
            path: plain_path,
            source,
        })?;
    }
    Ok((catalog, opened, path))
}

/// Refuses a region that lacks acknowledged checkpoints, or logs them with `accept_loss`: the file is an older copy,
/// another region, or has lost its last records. A crash never has this effect.
///
/// A region whose journal is damaged opens read-only and is not refused: a refusal would not save anything.
fn accept_loss(
    config: &Config,
    path: &Path,
    catalog: &dyn Catalog,
    region: &RegionSummary,
) -> Result<(), StartError> {
    let Some(noted) = catalog.noted()? else {
        return Ok(());
    };
    let same = noted.region == region.uuid.to_string();
    if (same && region.position >= noted.position)
        || (region.journal_damaged && !config.accept_loss)
    {
        return Ok(());
    }
    let is = if same {
        "is older than its catalog"
    } else {
        "is another one than that of its catalog"
    };
    let listed = catalog.list(None)?.into_iter();
    let lost: Vec<_> = listed
        .filter(|record| !record.id.parse().is_ok_and(|id| region.lists(id)))
        .map(|record| name_of(&record))
        .collect();
    let path = path.to_owned();
    match lost.len() {
        0 => {
            tracing::error!(event = "region-older-than-catalog", path = %path.display(), "the region {is}: what was removed or unpinned since may be back")
        }
        _ if config.accept_loss => {
            for name in lost {
                tracing::error!(
                    event = "checkpoint-lost",
                    checkpoint = name,
                    "lost: the region {is}"
                );
            }
        }
        _ => return Err(StartError::Lost { path, is, lost }),
    }
    Ok(())
}

/// Counts the records of a catalog, up to `most` sealed ones.
fn count(catalog: &dyn Catalog, most: usize) -> Result<usize, CatalogError> {
    let (mut count, mut sealed) = (catalog.all_parked()?.len(), 0);
    catalog.visit_sealed(("", 0), &mut |_| {
        count += 1;
        sealed += 1;
        sealed < most
    })?;
    Ok(count)
}

fn name_of(record: &Checkpoint) -> String {
    if record.generation == 0 {
        format!("session {}", record.session)
    } else {
        format!("{}@{}", record.job, record.generation)
    }
}

/// Returns the first ten names.
fn in_short(names: &[String]) -> String {
    let mut text = names.get(..10).unwrap_or(names).join(", ");
    if names.len() > 10 {
        text.push_str(", …");
    }
    text
}

/// Logs the damage in a region that was opened.
fn report(region: &Region, report: &RecoveryReport) {
    tracing::info!(event = "region-opened", ?report, "region open");
    for damaged in region.damaged() {
        let (id, reason) = (damaged.id, &damaged.reason);
        tracing::error!(event = "checkpoint-unreadable", %id, %reason, "a checkpoint cannot be read; free segments that may be its are kept until it is removed");
    }
    if let Some(damage) = region.journal_damage() {
        for fault in damage.faults.iter().take(64) {
            tracing::error!(event = "region-journal-damaged", %fault, "the region's journal is damaged");
        }
        for id in &damage.checkpoints_lost {
            tracing::error!(event = "checkpoint-record-lost", %id, "a checkpoint is lost: the record of its seal cannot be read");
        }
    }
}

/// Returns the files and directories that the daemon uses.
pub(super) fn files(config: &Config) -> Vec<DaemonFile> {
    let key = match &config.key {
        Some(Wrapper::File(path)) => Some(path.clone()),
        _ => None,
    };
    let registry = config.cluster.as_ref().map(|cluster| &cluster.registry);
    let shown = registry.and_then(|registry| registry.tls.as_ref()?.identity.as_ref());
    [
        ("data", Some(config.data_dir.clone())),
        ("run", Some(config.run_dir.clone())),
        ("identity", config.identity.clone()),
        ("tokens", config.api.tokens.clone()),
        ("key", key),
        ("quotas", config.quotas.clone()),
        ("audit", config.audit.path(&config.data_dir)),
        (
            "registry-user",
            registry.and_then(|registry| registry.user_file.clone()),
        ),
        ("registry-key", shown.map(|(_, key)| key.clone())),
    ]
    .into_iter()
    .filter_map(|(purpose, path)| {
        let path = std::path::absolute(path?).ok()?;
        Some(DaemonFile {
            purpose: purpose.to_owned(),
            path: path.to_string_lossy().into_owned(),
        })
    })
    .collect()
}

/// Starts the probes that renew old figures while the node is idle.
pub(super) fn probe(
    period: Option<Duration>,
    store: &Arc<Store>,
    costs: &Arc<Costs>,
    member: Option<&Member>,
) -> Result<Option<Probing>, StoreError> {
    let Some(period) = period else {
        return Ok(None);
    };
    let prober = Prober::new(store, costs, member.map(Member::links), period);
    let started = prober.start();
    started
        .map(Some)
        .map_err(StoreError::io("start the probes"))
}

/// Opens the region, unless `admit` refuses it. A missing or blank region is made, unless it `must_exist`.
fn open_region(
    config: &Config,
    path: &Path,
    must_exist: bool,
    gone: impl Fn(&'static str) -> StartError,
    admit: impl Fn(&RegionSummary) -> Result<(), StartError>,
) -> Result<(Arc<Region>, Guarantee), StartError> {
    if must_exist && is_missing(path) {
        return Err(gone("is not there"));
    }
    if let (Some(asked), Ok(found)) = (config.region_size_bytes, std::fs::metadata(path))
        && found.len() > 0
        && found.len() != asked
    {
        let has = found.len();
        tracing::warn!(event = "region-size-ignored", path = %path.display(), has, asked, "--region-size is ignored: the region is there; `permafrost region grow` lets it grow");
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
    tracing::info!(event = "region-mapped", path = %path.display(), %guarantee, "region mapped");
    let region_error = |source| StartError::Region {
        path: path.to_owned(),
        source,
    };
    // Whatever is wrong with it, opening it says.
    if let Ok(summary) = Region::summary(&*medium) {
        admit(&summary)?;
    }
    let options = RecoverOptions::default().accept_loss(config.accept_loss);
    let mut find =
        |member: &RegionMember| members::find(member, &config.members, &OpenOptions::default());
    let (region, found) = match Region::open_all(Arc::clone(&medium), options, &mut find) {
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
    report(&region, &found);
    for medium in region.media() {
        if let Some(problem) = medium.problem {
            let (number, uuid) = (medium.number, medium.uuid);
            tracing::error!(event = "region-medium-missing", number, %uuid, path = %medium.path.display(), problem, "a file of the region is missing: what is on it cannot be read");
        }
    }
    Ok((region, guarantee))
}

/// Returns true if `path` cannot be a region: nothing is there, or an empty file, which an interrupted start leaves.
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
