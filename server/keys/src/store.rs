//! The data keys of all namespaces of a node.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::{Mutex, MutexGuard};
use permafrost_pmem::{DataKey, KeyId, Region};
use permafrost_store::{DataKeys, NamespaceKey, PortError};
use zeroize::Zeroizing;

use crate::catalog::CatalogCipher;
use crate::error::KeysError;
use crate::file::{COPIES, Stored, sync_parent};
use crate::sealed::{open, seal};
use crate::wrapper::Wrapper;

/// Bytes of an entry, without the name of its namespace.
const ENTRY_BYTES: usize = 8 + 32 + 8 + 1 + 2;
/// Purposes of keys that are derived from the store key.
const SEALING: &[u8; 16] = b"permafrost seals";
const CATALOG: &[u8; 16] = b"permafrost index";

/// Data keys by namespace, stored under the store key. New checkpoints of a namespace get its current key; others are
/// kept while segments are encrypted with them.
pub struct KeyStore {
    directory: PathBuf,
    store_key: DataKey,
    state: Mutex<State>,
    /// Region that is given the keys.
    region: OnceLock<Arc<Region>>,
}

struct State {
    stored: Stored,
    entries: Vec<Entry>,
    /// Copy that is written first: the one that a failed write may have torn, so that the other one stays intact.
    first: usize,
    /// Namespaces whose keys a restart might find otherwise than in `entries`, because a write failed.
    unsettled: BTreeSet<String>,
}

#[derive(Clone)]
struct Entry {
    namespace: String,
    id: KeyId,
    key: DataKey,
    created_unix_s: u64,
    is_current: bool,
}

impl KeyStore {
    /// Returns true if there are keys in a directory, or what is left of them.
    #[must_use]
    pub fn exists(directory: &Path) -> bool {
        COPIES.iter().any(|name| directory.join(name).exists())
    }

    /// Opens the keys in a directory, or makes a store key if there is none. A store key that is wrapped with `old` is
    /// wrapped anew.
    ///
    /// # Errors
    /// The wrapper's key is not the one, or does not answer; both copies are damaged; the files cannot be read or
    /// written.
    pub fn open(
        directory: &Path,
        wrapper: &Wrapper,
        old: Option<&Wrapper>,
    ) -> Result<Self, KeysError> {
        let path = directory.to_owned();
        std::fs::create_dir_all(&path).map_err(failed("make directory", directory))?;
        let paths = COPIES.map(|name| directory.join(name));
        let read = |path: &PathBuf| Stored::read(path).map_err(failed("read keys", path));
        let copies = [read(&paths[0])?, read(&paths[1])?];
        let newest = copies
            .iter()
            .flatten()
            .max_by_key(|stored| stored.generation);
        let Some(newest) = newest.cloned() else {
            if Self::exists(directory) {
                return Err(KeysError::Damaged { path });
            }
            return Self::create(directory, wrapper);
        };
        let (store_key, is_old) = match wrapper.unwrap(&newest.wrapped) {
            Ok(Some(key)) => (key, false),
            other => match old.map(|old| old.unwrap(&newest.wrapped)).transpose()? {
                Some(Some(key)) => (key, true),
                _ => {
                    other?;
                    return Err(KeysError::OtherKey { path });
                }
            },
        };
        let store_key = DataKey::new(*store_key);
        let entries = parse(&store_key, &newest).ok_or(KeysError::OtherKey { path })?;
        // A crash came between the copies, or one is damaged: never the intact one is written to first.
        for (path, copy) in paths.iter().zip(&copies) {
            if copy.as_ref() != Some(&newest) {
                newest.write(path).map_err(failed("write keys", path))?;
            }
        }
        let keys = Self::of(directory, store_key, newest, entries);
        if is_old {
            let mut state = keys.state();
            let entries = state.entries.clone();
            state.stored.wrapped = wrap_checked(directory, wrapper, &keys.store_key)?;
            keys.save(&mut state, entries)?;
        }
        Ok(keys)
    }

    fn of(directory: &Path, store_key: DataKey, stored: Stored, entries: Vec<Entry>) -> Self {
        Self {
            directory: directory.to_owned(),
            store_key,
            state: Mutex::new(State {
                stored,
                entries,
                first: 0,
                unsettled: BTreeSet::new(),
            }),
            region: OnceLock::new(),
        }
    }

    fn create(directory: &Path, wrapper: &Wrapper) -> Result<Self, KeysError> {
        let store_key = DataKey::random();
        let wrapped = wrap_checked(directory, wrapper, &store_key)?;
        let stored = Stored {
            generation: 0,
            wrapped,
            sealed: Vec::new(),
        };
        let keys = Self::of(directory, store_key, stored, Vec::new());
        // Whatever is encrypted is written later: the keys must not be what a power failure takes.
        sync_parent(directory).map_err(failed("make durable", directory))?;
        keys.save(&mut keys.state(), Vec::new())?;
        Ok(keys)
    }

    /// Gives a region all keys, and those that are made from now on. Called once.
    pub fn attach(&self, region: &Arc<Region>) {
        let state = self.state();
        let _ = self.region.set(Arc::clone(region));
        state.entries.iter().for_each(|entry| self.give(entry));
    }

    /// Returns the cipher for the catalog.
    #[must_use]
    pub fn catalog_cipher(&self) -> CatalogCipher {
        CatalogCipher::new(&Zeroizing::new(self.store_key.derive(CATALOG, &[0; 16])))
    }

    /// Returns all keys, by namespace.
    #[must_use]
    pub fn list(&self) -> Vec<NamespaceKey> {
        let state = self.state();
        let mut all: Vec<_> = state.entries.iter().map(Entry::describe).collect();
        all.sort_by(|a, b| (&a.namespace, a.created_unix_s).cmp(&(&b.namespace, b.created_unix_s)));
        all
    }

    /// Returns the current key of a namespace. The first time it is made, durably.
    ///
    /// # Errors
    /// The key cannot be stored, or an earlier change of the namespace's keys cannot.
    pub fn key_for(&self, namespace: &str) -> Result<KeyId, KeysError> {
        let mut state = self.state();
        self.settle(&mut state, namespace)?;
        match state.current(namespace) {
            Some(id) => Ok(id),
            None => self.add(&mut state, namespace),
        }
    }

    /// Makes a new key for a namespace's checkpoints from now on, durably, and returns its id. The one before is kept.
    ///
    /// # Errors
    /// The namespace has no key; the new one cannot be stored.
    pub fn rotate(&self, namespace: &str) -> Result<KeyId, KeysError> {
        let mut state = self.state();
        self.settle(&mut state, namespace)?;
        if state.current(namespace).is_none() {
            let namespace = namespace.to_owned();
            return Err(KeysError::NoKey { namespace });
        }
        self.add(&mut state, namespace)
    }

    /// Erases a key that is not current, durably: nothing must be encrypted with it any more.
    ///
    /// # Errors
    /// The change cannot be stored.
    pub fn retire(&self, id: KeyId) -> Result<(), KeysError> {
        self.erase(&mut self.state(), |entry| {
            entry.id == id && !entry.is_current
        })
        .map(drop)
    }

    /// Erases all keys of a namespace, durably, in both copies: what is encrypted with them cannot be read any more.
    /// Returns their ids; none if they were erased by a call that failed, and that this one completes.
    ///
    /// # Errors
    /// The namespace has no key; the change cannot be stored: then the keys are not used any more, and may still be in
    /// the files.
    pub fn destroy(&self, namespace: &str) -> Result<Vec<KeyId>, KeysError> {
        let mut state = self.state();
        let completes = state.unsettled.contains(namespace);
        self.settle(&mut state, namespace)?;
        let erased = self.erase(&mut state, |entry| entry.namespace == namespace)?;
        if erased.is_empty() && !completes {
            let namespace = namespace.to_owned();
            return Err(KeysError::NoKey { namespace });
        }
        Ok(erased)
    }

    fn erase(
        &self,
        state: &mut State,
        goes: impl Fn(&Entry) -> bool,
    ) -> Result<Vec<KeyId>, KeysError> {
        let (gone, left): (Vec<_>, Vec<_>) = state.entries.iter().cloned().partition(goes);
        if gone.is_empty() {
            return Ok(Vec::new());
        }
        // First from the keyring: nothing is sealed under them any more when they are erased.
        let keyring = self.region.get().map(|region| region.keys());
        let remove = |entry: &Entry| {
            keyring.map(|keys| keys.remove(entry.id));
        };
        gone.iter().for_each(remove);
        if let Err(error) = self.save(state, left.clone()) {
            // One copy may be without them already. So they are gone, and the next call erases them from both.
            let namespaces = gone.into_iter().map(|entry| entry.namespace);
            state.unsettled.extend(namespaces);
            state.entries = left;
            return Err(error);
        }
        Ok(gone.iter().map(|entry| entry.id).collect())
    }

    fn add(&self, state: &mut State, namespace: &str) -> Result<KeyId, KeysError> {
        let mut entries = state.entries.clone();
        for entry in entries
            .iter_mut()
            .filter(|entry| entry.namespace == namespace)
        {
            entry.is_current = false;
        }
        let mut id = KeyId::random();
        while entries.iter().any(|entry| entry.id == id) {
            id = KeyId::random();
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let entry = Entry {
            namespace: namespace.to_owned(),
            id,
            key: DataKey::random(),
            created_unix_s: now.map_or(0, |now| now.as_secs()),
            is_current: true,
        };
        entries.push(entry.clone());
        // Durable before anything is encrypted with it.
        if let Err(error) = self.save(state, entries) {
            // One copy may have it already: nothing is encrypted with any key of the namespace until both agree.
            state.unsettled.insert(namespace.to_owned());
            return Err(error);
        }
        self.give(&entry);
        Ok(id)
    }

    /// Stores the keys as they are in memory, if a change of the namespace's has failed.
    fn settle(&self, state: &mut State, namespace: &str) -> Result<(), KeysError> {
        if !state.unsettled.contains(namespace) {
            return Ok(());
        }
        let saved = self.save(state, state.entries.clone());
        saved.map_err(|source| KeysError::Unsettled {
            namespace: namespace.to_owned(),
            source: Box::new(source),
        })
    }

    fn give(&self, entry: &Entry) {
        if let Some(region) = self.region.get() {
            let uuid = region.usage().uuid;
            region
                .keys()
                .insert(entry.id, entry.key.cipher(uuid.as_bytes()));
        }
    }

    /// Stores entries in both copies; the state has them once both are durable. At each step one copy is intact.
    fn save(&self, state: &mut State, entries: Vec<Entry>) -> Result<(), KeysError> {
        let generation = state.stored.generation + 1;
        let plain = to_bytes(&entries);
        let sealed = seal(
            &sealing_key(&self.store_key),
            &generation.to_le_bytes(),
            &plain,
        );
        let stored = Stored {
            generation,
            wrapped: state.stored.wrapped.clone(),
            sealed,
        };
        // After a failure one copy may have the next generation already.
        state.stored.generation = generation;
        for copy in [state.first, 1 - state.first] {
            let path = self.directory.join(COPIES[copy]);
            state.first = copy;
            stored.write(&path).map_err(failed("write keys", &path))?;
        }
        (state.stored, state.entries) = (stored, entries);
        state.unsettled.clear();
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Wraps the store key. A wrapper that does not give back what it was given would lose everything.
fn wrap_checked(
    directory: &Path,
    wrapper: &Wrapper,
    store_key: &DataKey,
) -> Result<Vec<u8>, KeysError> {
    let wrapped = wrapper.wrap(store_key.bytes())?;
    if wrapper.unwrap(&wrapped)?.as_deref() == Some(store_key.bytes()) {
        return Ok(wrapped);
    }
    let path = directory.to_owned();
    Err(KeysError::OtherKey { path })
}

impl DataKeys for KeyStore {
    fn key_for(&self, namespace: &str) -> Result<KeyId, PortError> {
        Self::key_for(self, namespace).map_err(PortError::new)
    }

    fn list(&self) -> Vec<NamespaceKey> {
        Self::list(self)
    }

    fn rotate(&self, namespace: &str) -> Result<KeyId, PortError> {
        Self::rotate(self, namespace).map_err(PortError::new)
    }

    fn retire(&self, id: KeyId) -> Result<(), PortError> {
        Self::retire(self, id).map_err(PortError::new)
    }

    fn destroy(&self, namespace: &str) -> Result<(), PortError> {
        Self::destroy(self, namespace)
            .map(drop)
            .map_err(PortError::new)
    }
}

impl State {
    fn current(&self, namespace: &str) -> Option<KeyId> {
        let mut entries = self.entries.iter();
        let current = entries.find(|entry| entry.is_current && entry.namespace == namespace);
        current.map(|entry| entry.id)
    }
}

impl Entry {
    fn describe(&self) -> NamespaceKey {
        NamespaceKey {
            namespace: self.namespace.clone(),
            id: self.id,
            created_unix_s: self.created_unix_s,
            is_current: self.is_current,
        }
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KeysError {
    let path = path.to_owned();
    move |source| KeysError::Io {
        action,
        path,
        source,
    }
}

fn sealing_key(store_key: &DataKey) -> Zeroizing<[u8; 32]> {
    let derived = Zeroizing::new(store_key.derive(SEALING, &[0; 16]));
    let mut key = Zeroizing::new([0; 32]);
    key.copy_from_slice(&derived[..32]);
    key
}

fn to_bytes(entries: &[Entry]) -> Zeroizing<Vec<u8>> {
    let len = |entry: &Entry| ENTRY_BYTES + entry.namespace.len();
    // Allocated at once: a vector that grows leaves copies behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(entries.iter().map(len).sum()));
    for entry in entries {
        let name_bytes = u16::try_from(entry.namespace.len()).unwrap_or(u16::MAX);
        bytes.extend_from_slice(&entry.id.get().to_le_bytes());
        bytes.extend_from_slice(entry.key.bytes());
        bytes.extend_from_slice(&entry.created_unix_s.to_le_bytes());
        bytes.push(u8::from(entry.is_current));
        bytes.extend_from_slice(&name_bytes.to_le_bytes());
        bytes.extend_from_slice(entry.namespace.as_bytes());
    }
    bytes
}

fn parse(store_key: &DataKey, stored: &Stored) -> Option<Vec<Entry>> {
    let context = stored.generation.to_le_bytes();
    let plain = open(&sealing_key(store_key), &context, &stored.sealed)?;
    let mut rest = plain.as_slice();
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let (id, after) = rest.split_first_chunk::<8>()?;
        let (key, after) = after.split_first_chunk::<32>()?;
        let (created, after) = after.split_first_chunk::<8>()?;
        let (&is_current, after) = after.split_first()?;
        let (len, after) = after.split_first_chunk::<2>()?;
        let (name, after) = after.split_at_checked(usize::from(u16::from_le_bytes(*len)))?;
        entries.push(Entry {
            namespace: String::from_utf8(name.to_vec()).ok()?,
            id: KeyId::new(u64::from_le_bytes(*id))?,
            key: DataKey::new(*key),
            created_unix_s: u64::from_le_bytes(*created),
            is_current: is_current == 1,
        });
        rest = after;
    }
    Some(entries)
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
