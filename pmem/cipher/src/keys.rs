//! Data keys, and the ciphers that are derived from them for a region.

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use sha2::{Digest, Sha512};
use zeroize::{Zeroize, Zeroizing};

use crate::xts::PageCipher;

/// Names a data key: 63 random bits or more, never zero. It is stored in clear in the header of each segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(NonZeroU64);

impl KeyId {
    /// Makes an id from its number; `None` for zero, which names no key.
    #[must_use]
    pub const fn new(number: u64) -> Option<Self> {
        match NonZeroU64::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// Makes a new id.
    ///
    /// # Panics
    /// If the kernel has no `getrandom`, which every kernel since 3.17 has.
    #[must_use]
    pub fn random() -> Self {
        loop {
            let number = getrandom::u64().expect("the kernel gives random numbers");
            if let Some(id) = Self::new(number) {
                return id;
            }
        }
    }

    /// Returns the id as a number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({self})")
    }
}

/// Random key of a namespace, zeroed when it is dropped. [`PageCipher`]s are derived from it.
#[derive(Clone, PartialEq, Eq)]
pub struct DataKey(Zeroizing<[u8; 32]>);

impl DataKey {
    /// Makes a key of its bytes.
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Makes a new key.
    ///
    /// # Panics
    /// If the kernel has no `getrandom`, which every kernel since 3.17 has.
    #[must_use]
    pub fn random() -> Self {
        let mut key = Self::new([0; 32]);
        getrandom::fill(key.0.as_mut_slice()).expect("the kernel gives random numbers");
        key
    }

    /// Returns the bytes of the key, to be wrapped.
    #[must_use]
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Derives the cipher for the pages of a region: the one-step key derivation of NIST SP 800-56C with SHA-512, whose
    /// output is as long as the two keys of XTS. So equal pages in two regions have unrelated ciphertexts.
    #[must_use]
    pub fn cipher(&self, region: &[u8; 16]) -> PageCipher {
        let mut keys = self.derive(b"permafrost pages", region);
        let cipher = PageCipher::new(&keys);
        keys.zeroize();
        cipher
    }

    /// Derives 64 bytes for a purpose: keys for different purposes or contexts say nothing about each other.
    #[must_use]
    pub fn derive(&self, purpose: &[u8; 16], context: &[u8; 16]) -> [u8; 64] {
        let mut hash = Sha512::new();
        hash.update(1_u32.to_be_bytes());
        hash.update(self.0.as_slice());
        hash.update(purpose);
        hash.update(context);
        hash.finalize().into()
    }
}

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataKey(…)")
    }
}

/// Ciphers of a region by the ids of their keys. Keys come and go while the region is open.
#[derive(Default)]
pub struct Keyring {
    ciphers: RwLock<HashMap<KeyId, Arc<PageCipher>>>,
    /// False until the first key: a region without keys does not look for any.
    has_keys: AtomicBool,
}

/// A key that the region was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownKey(pub KeyId);

impl Keyring {
    /// Adds a key's cipher.
    pub fn insert(&self, id: KeyId, cipher: PageCipher) {
        self.ciphers.write().insert(id, Arc::new(cipher));
        self.has_keys.store(true, Ordering::Release);
    }

    /// Forgets a key, and returns its cipher. Readers that have the cipher finish what they read.
    pub fn remove(&self, id: KeyId) -> Option<Arc<PageCipher>> {
        self.ciphers.write().remove(&id)
    }

    /// Takes a key back that was removed.
    pub fn give_back(&self, id: KeyId, cipher: Arc<PageCipher>) {
        self.ciphers.write().insert(id, cipher);
    }

    /// Returns true if there never was a key.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        !self.has_keys.load(Ordering::Acquire)
    }

    /// Returns a key's cipher.
    ///
    /// # Errors
    /// [`UnknownKey`].
    pub fn get(&self, id: KeyId) -> Result<Arc<PageCipher>, UnknownKey> {
        self.ciphers.read().get(&id).cloned().ok_or(UnknownKey(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ciphers_of_keys_and_regions_are_unrelated() {
        let (one, other) = (DataKey::new([1; 32]), DataKey::new([2; 32]));
        let stored = |key: &DataKey, region: u8| {
            let mut page = [0; crate::PAGE_BYTES];
            key.cipher(&[region; 16]).encrypt(5, &mut page);
            page
        };
        assert_eq!(stored(&one, 3), stored(&one, 3));
        assert_ne!(stored(&one, 3), stored(&one, 4));
        assert_ne!(stored(&one, 3), stored(&other, 3));
        assert_eq!(format!("{one:?}"), "DataKey(…)");
    }

    #[test]
    fn a_removed_key_is_unknown() {
        let keys = Keyring::default();
        let id = KeyId::random();
        assert!(keys.is_unused() && keys.get(id).is_err());
        keys.insert(id, DataKey::random().cipher(&[0; 16]));
        assert!(keys.get(id).is_ok());
        keys.remove(id);
        assert_eq!(keys.get(id).err(), Some(UnknownKey(id)));
        assert!(!keys.is_unused());
    }
}
