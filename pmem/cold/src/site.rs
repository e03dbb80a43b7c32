//! The files of a cold medium: the sparse file, its index, and a description that names the object store.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use permafrost_medium::{Medium, MediumError, OpenOptions, open_sparse_medium};

use crate::medium::ColdMedium;
use crate::objects::Objects;

/// First line of a description.
const TITLE: &str = "permafrost cold medium 1";

/// Error of making or opening a cold medium.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ColdSiteError {
    /// The address names no store.
    #[error("{address:?} names no object store: {reason}")]
    Address {
        /// Address that was given.
        address: String,
        /// Reason why not.
        reason: String,
    },
    /// The description is damaged, or was written by a newer build.
    #[error("{path} does not describe a cold medium")]
    Description {
        /// Path of the description.
        path: PathBuf,
    },
    /// The file cannot be opened as a medium.
    #[error(transparent)]
    Medium(#[from] MediumError),
    /// The index or the description cannot be opened, read or written.
    #[error("open {path}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the file system.
        #[source]
        source: io::Error,
    },
}

/// Function that returns the store at an address, without asking it for anything, or says why there is none.
pub type Connect<'a> = dyn Fn(&str) -> Result<Arc<dyn Objects>, String> + 'a;

/// Contents of a description.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Description {
    store: String,
    name: [u8; 16],
    block_bytes: u64,
}

impl Description {
    fn text(&self) -> String {
        let name = u128::from_be_bytes(self.name);
        let (store, block_bytes) = (&self.store, self.block_bytes);
        format!("{TITLE}\nstore {store}\nname {name:032x}\nblock {block_bytes}\n")
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        if lines.next()? != TITLE {
            return None;
        }
        let found = Self {
            store: lines.next()?.strip_prefix("store ")?.to_owned(),
            name: u128::from_str_radix(lines.next()?.strip_prefix("name ")?, 16)
                .ok()?
                .to_be_bytes(),
            block_bytes: lines.next()?.strip_prefix("block ")?.parse().ok()?,
        };
        // Whole, and nothing behind it.
        (found.text() == text).then_some(found)
    }
}

/// Returns the path of a file beside that of a medium.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn description_of(path: &Path) -> PathBuf {
    beside(path, ".store")
}

fn index_of(path: &Path) -> PathBuf {
    beside(path, ".index")
}

/// Returns true if the file of a medium is that of a cold one.
#[must_use]
pub fn is_cold(path: &Path) -> bool {
    description_of(path).exists()
}

/// Makes a cold medium: a sparse file of `size_bytes`, and beside it a description and an index.
///
/// # Errors
/// [`ColdSiteError`]. The store is not asked for anything.
pub fn create_cold(
    path: &Path,
    size_bytes: u64,
    (address, connect): (&str, &Connect<'_>),
    block_bytes: u64,
) -> Result<Arc<dyn Medium>, ColdSiteError> {
    named(address, connect)?;
    let io_error = |path: &Path, source| ColdSiteError::Io {
        path: path.to_owned(),
        source,
    };
    let mut name = [0; 16];
    getrandom::fill(&mut name).map_err(|error| io_error(path, io::Error::other(error)))?;
    let description = Description {
        store: address.to_owned(),
        name,
        block_bytes,
    };
    let place = description_of(path);
    let write = || {
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&place)?;
        file.write_all(description.text().as_bytes())?;
        file.sync_all()?;
        ColdMedium::create_index(&index_of(path))?;
        place.parent().map_or(Ok(()), |p| File::open(p)?.sync_all())
    };
    write().map_err(|source| io_error(&place, source))?;
    let made = open(path, size_bytes, &OpenOptions::default(), connect);
    if made.is_err() {
        remove_cold(path);
    }
    made
}

/// Opens a cold medium that was made before. The store is not asked for anything, and may be away.
///
/// # Errors
/// [`ColdSiteError`].
pub fn open_cold(
    path: &Path,
    options: &OpenOptions,
    connect: &Connect<'_>,
) -> Result<Arc<dyn Medium>, ColdSiteError> {
    open(path, 0, options, connect)
}

/// Removes the files beside that of a medium which did not become part of a region.
pub fn remove_cold(path: &Path) {
    for path in [description_of(path), index_of(path)] {
        let _ = fs::remove_file(path);
    }
}

fn open(
    path: &Path,
    size_if_created: u64,
    options: &OpenOptions,
    connect: &Connect<'_>,
) -> Result<Arc<dyn Medium>, ColdSiteError> {
    let place = description_of(path);
    let text = fs::read_to_string(&place).map_err(|source| ColdSiteError::Io {
        path: place.clone(),
        source,
    })?;
    let described = Description::parse(&text);
    let described = described.ok_or(ColdSiteError::Description { path: place })?;
    let objects = named(&described.store, connect)?;
    let file = open_sparse_medium(path, size_if_created, options)?;
    let index = index_of(path);
    let identity = (described.name, described.block_bytes);
    let medium = ColdMedium::open(file, Some(path), &index, identity, objects);
    let medium = medium.map_err(|source| ColdSiteError::Io {
        path: index,
        source,
    })?;
    Ok(Arc::new(medium))
}

fn named(address: &str, connect: &Connect<'_>) -> Result<Arc<dyn Objects>, ColdSiteError> {
    let refuse = |reason: String| ColdSiteError::Address {
        address: address.to_owned(),
        reason,
    };
    if address.contains('\n') {
        return Err(refuse("it is more than a line".to_owned()));
    }
    connect(address).map_err(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::DirectoryObjects;

    fn connect(address: &str) -> Result<Arc<dyn Objects>, String> {
        let path = address.strip_prefix("file://").ok_or("no file")?;
        Ok(Arc::new(DirectoryObjects::new(Path::new(path))))
    }

    #[test]
    fn a_cold_medium_is_opened_as_it_was_made() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cold");
        for address in ["", "ftp:///store", "file:///a\nb"] {
            let refused = create_cold(&path, 1 << 20, (address, &connect), 65536)
                .err()
                .unwrap();
            assert!(
                matches!(refused, ColdSiteError::Address { .. }),
                "{refused}"
            );
        }
        let store = dir.path().join("store");
        let address = format!("file://{}", store.display());
        assert!(create_cold(&path, 0, (&address, &connect), 65536).is_err());
        assert!(!is_cold(&path) && !path.exists());
        let made = create_cold(&path, 1 << 20, (&address, &connect), 65536).unwrap();
        assert_eq!(made.cold().unwrap().address(), address);
        drop(made);
        assert!(is_cold(&path) && !store.exists());
        let medium = open_cold(&path, &OpenOptions::default(), &connect).unwrap();
        assert_eq!(medium.capacity_bytes(), 1 << 20);
        drop(medium);
        let description = description_of(&path);
        let text = fs::read_to_string(&description).unwrap();
        fs::write(&description, text.replace("block", "blocks")).unwrap();
        let damaged = open_cold(&path, &OpenOptions::default(), &connect)
            .err()
            .unwrap();
        assert!(
            matches!(damaged, ColdSiteError::Description { .. }),
            "{damaged}"
        );
    }
}
