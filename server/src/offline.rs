//! `permafrostd region`: examines a region that no daemon has open, and saves all checkpoints that can be read.
//! Writes nothing to the region.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::members;
use permafrost_agent::host::arguments::in_full;
use permafrost_catalog::MemoryCatalog;
use permafrost_criu::directory::{self, ExportedPart};
use permafrost_keys::KeyStore;
use permafrost_pmem::{
    MediumError, OpenError, OpenOptions, RecoverOptions, Region, RegionMember, open_medium,
};
use permafrost_store::{
    Checked, ColdPages, HeldCheckpoint, RegionLocation, Store, StoreError, StoreParts,
};

/// Failure to examine a region, or to write what is saved.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// The region cannot be opened as a file, or a daemon has it open.
    #[error("open region {path}")]
    Medium {
        /// Path of the region.
        path: PathBuf,
        /// Error of the medium.
        source: MediumError,
    },
    /// No part of the region can be read.
    #[error("open region {path}")]
    Region {
        /// Path of the region.
        path: PathBuf,
        /// Error from opening the region.
        source: OpenError,
    },
    /// The store cannot list or read what the region holds.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Failure to access a file or directory, or to write the report.
    #[error("{action} {path}")]
    Io {
        /// Verb and noun that name the failed action.
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Directory for checkpoints that [`salvage`] finds although no readable record names them.
const UNLISTED: &str = "unlisted";

/// A region opened for reading only, and the list of its checkpoints.
struct Opened {
    region: Arc<Region>,
    store: Arc<Store>,
}

impl Opened {
    fn open(path: &Path, keys: Option<&KeyStore>) -> Result<Self, OfflineError> {
        let io_error = |action, path: &Path| {
            let path = path.to_owned();
            move |source| OfflineError::Io {
                action,
                path,
                source,
            }
        };
        // A file that is not there is not to be made.
        File::open(path).map_err(io_error("open region", path))?;
        let options = OpenOptions {
            require_dax: false,
            populate: false,
        };
        let medium = open_medium(path, 0, &options).map_err(|source| OfflineError::Medium {
            path: path.to_owned(),
            source,
        })?;
        let guarantee = medium.guarantee().clone();
        let options = RecoverOptions::default().read_only(true).unlisted(true);
        let unpopulated = OpenOptions {
            require_dax: false,
            populate: false,
        };
        let mut find = |member: &RegionMember| members::find(member, &[], &unpopulated);
        let opened = Region::open_all(medium, options, &mut find);
        let (region, _) = opened.map_err(|source| OfflineError::Region {
            path: path.to_owned(),
            source,
        })?;
        if let Some(keys) = keys {
            keys.attach(&region);
        }
        let place = RegionLocation {
            path: path.to_owned(),
            guarantee,
        };
        let store = Store::new(StoreParts::new(
            Arc::clone(&region),
            place,
            // It names jobs, which an encrypted region keeps from the disk.
            Box::new(MemoryCatalog::default()),
        ))?;
        Ok(Self { region, store })
    }

    /// Reports the faults of the region itself. Returns true if there are none.
    fn report(&self, out: &mut dyn Write) -> io::Result<bool> {
        let usage = self.region.usage();
        let held = self.region.checkpoints().len();
        writeln!(out, "region {}: {held} checkpoints", usage.uuid)?;
        let media = self.region.media();
        let missing = media
            .iter()
            .filter_map(|medium| Some((medium, medium.problem.as_ref()?)));
        let mut whole = true;
        for (medium, problem) in missing {
            writeln!(out, "medium {}: MISSING: {problem}", medium.number)?;
            whole = false;
        }
        let damaged = self.region.damaged();
        for checkpoint in &damaged {
            writeln!(
                out,
                "checkpoint {}: LOST: {}",
                checkpoint.id, checkpoint.reason
            )?;
        }
        let Some(journal) = self.region.journal_damage() else {
            return Ok(whole && damaged.is_empty());
        };
        for fault in &journal.faults {
            writeln!(out, "journal: {fault}")?;
        }
        let lost = journal.checkpoints_lost.iter();
        for id in lost.filter(|id| !self.region.is_unlisted(**id)) {
            writeln!(out, "checkpoint {id}: LOST: the record of its seal")?;
        }
        writeln!(
            out,
            "journal: {} records cannot be read, each of which may have sealed or removed a checkpoint",
            journal.records_lost
        )?;
        Ok(false)
    }

    /// Returns true for a checkpoint that no readable record names.
    fn is_unlisted(&self, held: &HeldCheckpoint) -> bool {
        let id = held.id.parse();
        id.is_ok_and(|id| self.region.is_unlisted(id))
    }

    /// Returns the checkpoint's name for messages.
    fn name(&self, held: &HeldCheckpoint) -> String {
        let listed = if self.is_unlisted(held) {
            " (unlisted)"
        } else {
            ""
        };
        held.name() + listed
    }

    /// Reads a checkpoint, and what of it is in a cold tier.
    fn verify(&self, held: &HeldCheckpoint) -> Result<Checked, StoreError> {
        let fetch = ColdPages::Fetch;
        self.store.check_with(held, None, fetch, &mut |_, _| true)
    }
}

/// Reads everything that the region holds and writes the names of the damaged parts to `out`. Returns true if
/// nothing is damaged.
///
/// # Errors
/// [`OfflineError`]. Damage is not an error.
pub fn check(
    region: &Path,
    keys: Option<&KeyStore>,
    out: &mut dyn Write,
) -> Result<bool, OfflineError> {
    let opened = Opened::open(region, keys)?;
    let written = report_to(region);
    let mut whole = opened.report(out).map_err(&written)?;
    for held in opened.store.everything()? {
        let checked = opened.verify(&held)?;
        if checked.damage.is_empty() && checked.unverified_pages == 0 {
            writeln!(out, "{}: whole", opened.name(&held)).map_err(&written)?;
            continue;
        }
        whole = false;
        if checked.unverified_pages > 0 {
            let (name, pages, away) = (opened.name(&held), checked.unverified_pages, checked.away);
            writeln!(out, "{name}: {pages} pages not verified: {away}").map_err(&written)?;
        }
        for damage in checked.damage {
            writeln!(out, "{damage}").map_err(&written)?;
        }
    }
    Ok(whole)
}

/// Writes every checkpoint that can be read into a directory of its own beneath `to`, as CRIU images, and reports
/// each to `out`. Returns true if every checkpoint was written. One that is damaged in its middle is left as
/// `NAME.incomplete`. If the journal is damaged, checkpoints that no readable record names go to `unlisted` beneath
/// `to`.
///
/// # Errors
/// [`OfflineError`]. Damage is not an error.
pub fn salvage(
    region: &Path,
    to: &Path,
    keys: Option<&KeyStore>,
    out: &mut dyn Write,
) -> Result<bool, OfflineError> {
    let opened = Opened::open(region, keys)?;
    let written = report_to(region);
    let mut whole = opened.report(out).map_err(&written)?;
    let io_error = |action, path: &Path| {
        let path = path.to_owned();
        move |source| OfflineError::Io {
            action,
            path,
            source,
        }
    };
    std::fs::create_dir_all(to).map_err(io_error("make directory", to))?;
    for held in opened.store.everything()? {
        let name = opened.name(&held);
        // A checkpoint that may have been removed, or forged, is kept apart from the rest.
        let to = if opened.is_unlisted(&held) {
            to.join(UNLISTED)
        } else {
            to.to_owned()
        };
        let file_name = held.name().replace(['/', ' '], "_");
        let Some(record) = held.record else {
            // Without a manifest the names of the images are unknown.
            writeln!(out, "{name}: LOST: its manifest is damaged").map_err(&written)?;
            whole = false;
            continue;
        };
        let directory = to.join(&file_name);
        std::fs::create_dir_all(&to).map_err(io_error("make directory", &to))?;
        std::fs::create_dir(&directory).map_err(io_error("make directory", &directory))?;
        let opened_directory =
            File::open(&directory).map_err(io_error("open directory", &directory))?;
        let directory_fd = OwnedFd::from(opened_directory);
        let saved = opened.store.open(record).and_then(|checkpoint| {
            directory::export(&checkpoint, ExportedPart::All, directory_fd, &mut |_, _| {})
        });
        match saved {
            Ok(_) => {
                writeln!(out, "{name}: saved to {}", directory.display()).map_err(&written)?;
            }
            Err(error) => {
                whole = false;
                let aside = to.join(format!("{file_name}.incomplete"));
                std::fs::rename(&directory, &aside)
                    .map_err(io_error("rename directory", &directory))?;
                let error = in_full(&error);
                writeln!(out, "{name}: INCOMPLETE, in {}: {error}", aside.display())
                    .map_err(&written)?;
            }
        }
    }
    Ok(whole)
}

fn report_to(region: &Path) -> impl Fn(io::Error) -> OfflineError {
    let path = region.to_owned();
    move |source| OfflineError::Io {
        action: "write the report on",
        path: path.clone(),
        source,
    }
}
