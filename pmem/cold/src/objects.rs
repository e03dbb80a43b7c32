//! Object stores, as a cold medium uses them: whole objects by name.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

/// Error of an object store.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// There is no such object.
    #[error("no such object")]
    Missing,
    /// The store cannot be reached, or fails.
    #[error(transparent)]
    Store(#[from] Box<dyn std::error::Error + Send + Sync>),
}

impl ObjectError {
    fn of_file(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Missing,
            _ => Self::Store(error.into()),
        }
    }
}

/// An object in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Name of the object.
    pub name: String,
    /// Bytes of the object.
    pub len_bytes: u64,
}

/// An object store. Methods block, and end within a time that the implementation limits.
pub trait Objects: Send + Sync {
    /// Returns the address of the store, without credentials.
    fn address(&self) -> &str;

    /// Returns true if the store may be replaced by another one between two requests, as a directory is whose file
    /// system is mounted and unmounted.
    fn may_be_swapped(&self) -> bool {
        false
    }

    /// Writes an object under a name that was never used; it is durable when this returns.
    ///
    /// # Errors
    /// [`ObjectError`]; the object may exist nevertheless.
    fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), ObjectError>;

    /// Reads an object.
    ///
    /// # Errors
    /// [`ObjectError`].
    fn get(&self, name: &str) -> Result<Vec<u8>, ObjectError>;

    /// Removes an object; removing a missing one succeeds.
    ///
    /// # Errors
    /// [`ObjectError`].
    fn delete(&self, name: &str) -> Result<(), ObjectError>;

    /// Lists the objects whose names begin with `directory`, a name without its last part.
    ///
    /// # Errors
    /// [`ObjectError`].
    fn list(&self, directory: &str) -> Result<Vec<ListedObject>, ObjectError>;
}

/// Objects as files of a directory.
#[derive(Debug)]
pub struct DirectoryObjects {
    path: PathBuf,
    address: String,
}

impl DirectoryObjects {
    /// Names the store in a directory, which has to be there whenever the store is asked.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            address: format!("file://{}", path.display()),
        }
    }

    /// Makes the directory of an object. Not the store's: where nothing is mounted, nothing is to be written.
    fn make_directory(&self, path: &Path) -> io::Result<()> {
        let Some(parent) = path.parent() else {
            return Ok(());
        };
        match fs::create_dir(parent) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Ok(()) => File::open(&self.path)?.sync_all(),
            made => made,
        }
    }
}

impl Objects for DirectoryObjects {
    fn address(&self) -> &str {
        &self.address
    }

    fn may_be_swapped(&self) -> bool {
        true
    }

    fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), ObjectError> {
        let path = self.path.join(name);
        let written = || {
            self.make_directory(&path)?;
            let mut file = File::create_new(&path)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            path.parent().map_or(Ok(()), |p| File::open(p)?.sync_all())
        };
        // A missing directory is not a missing object.
        written().map_err(|error: io::Error| ObjectError::Store(error.into()))
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, ObjectError> {
        // A store that is not mounted is away; its objects are not missing.
        let there = fs::metadata(&self.path);
        there.map_err(|error| ObjectError::Store(error.into()))?;
        fs::read(self.path.join(name)).map_err(ObjectError::of_file)
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        match fs::remove_file(self.path.join(name)).map_err(ObjectError::of_file) {
            Err(ObjectError::Missing) => Ok(()),
            removed => removed,
        }
    }

    fn list(&self, directory: &str) -> Result<Vec<ListedObject>, ObjectError> {
        let entries = match fs::read_dir(self.path.join(directory)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(ObjectError::of_file)?,
        };
        let listed = entries.map(|entry| {
            let entry = entry?;
            Ok(ListedObject {
                name: format!("{directory}/{}", entry.file_name().to_string_lossy()),
                len_bytes: entry.metadata()?.len(),
            })
        });
        listed
            .collect::<io::Result<_>>()
            .map_err(ObjectError::of_file)
    }
}

/// Objects in memory, for tests.
#[derive(Debug, Default)]
pub struct MemoryObjects {
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    /// True while every request fails.
    away: std::sync::atomic::AtomicBool,
}

impl MemoryObjects {
    /// Sets whether the store is away: then every request fails.
    pub fn set_away(&self, away: bool) {
        self.away.store(away, std::sync::atomic::Ordering::Relaxed);
    }

    /// Makes a store with these objects.
    #[must_use]
    pub fn with(objects: BTreeMap<String, Vec<u8>>) -> Self {
        Self {
            objects: Mutex::new(objects),
            ..Self::default()
        }
    }

    /// Changes every object but the store's marker.
    pub fn change_all(&self, change: impl Fn(&mut Vec<u8>)) {
        let mut objects = self.objects.lock();
        let pages = objects.iter_mut().filter(|(name, _)| name.contains('/'));
        pages.for_each(|(_, bytes)| change(bytes));
    }

    /// Returns a copy of all objects but the store's marker.
    #[must_use]
    pub fn all(&self) -> BTreeMap<String, Vec<u8>> {
        let mut objects = self.objects.lock().clone();
        objects.retain(|name, _| name.contains('/'));
        objects
    }

    fn there(&self) -> Result<(), ObjectError> {
        if self.away.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(ObjectError::Store("no route to it".into()));
        }
        Ok(())
    }
}

impl Objects for MemoryObjects {
    fn address(&self) -> &str {
        "memory"
    }

    fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), ObjectError> {
        self.there()?;
        self.objects.lock().insert(name.to_owned(), bytes);
        Ok(())
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, ObjectError> {
        self.there()?;
        let objects = self.objects.lock();
        objects.get(name).cloned().ok_or(ObjectError::Missing)
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.there()?;
        self.objects.lock().remove(name);
        Ok(())
    }

    fn list(&self, directory: &str) -> Result<Vec<ListedObject>, ObjectError> {
        self.there()?;
        let objects = self.objects.lock();
        let prefix = format!("{directory}/");
        let listed = objects.iter().filter(|(name, _)| name.starts_with(&prefix));
        let listed = listed.map(|(name, bytes)| ListedObject {
            name: name.clone(),
            len_bytes: permafrost_medium::convert::to_u64(bytes.len()),
        });
        Ok(listed.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_keeps_objects_and_one_that_is_not_there_is_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let store = DirectoryObjects::new(&path);
        assert!(matches!(
            store.put("a/1", vec![1]),
            Err(ObjectError::Store(_))
        ));
        assert!(matches!(store.get("a/1"), Err(ObjectError::Store(_))));
        fs::create_dir(&path).unwrap();
        assert!(matches!(store.get("a/1"), Err(ObjectError::Missing)));
        store.put("a/1", vec![1, 2]).unwrap();
        assert!(store.put("a/1", vec![3]).is_err(), "no name is used twice");
        assert_eq!(store.get("a/1").unwrap(), [1, 2]);
        let listed = ListedObject {
            name: "a/1".to_owned(),
            len_bytes: 2,
        };
        assert_eq!(store.list("a").unwrap(), [listed]);
        assert!(store.list("b").unwrap().is_empty());
        store.delete("a/1").unwrap();
        store.delete("a/1").unwrap();
        assert!(store.list("a").unwrap().is_empty());
    }
}
