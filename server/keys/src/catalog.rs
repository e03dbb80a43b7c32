//! Encryption of the catalog: its records name jobs.

use permafrost_catalog::RecordCipher;
use ring::hmac;
use zeroize::Zeroizing;

use crate::sealed::{open, seal};

/// Bytes of a name in the catalog.
const NAME_BYTES: usize = 16;

/// Encrypts the catalog's records, and replaces names in its keys by message authentication codes.
pub struct CatalogCipher {
    names: hmac::Key,
    records: Zeroizing<[u8; 32]>,
}

impl CatalogCipher {
    /// Makes a cipher of two keys, one after the other.
    pub(crate) fn new(keys: &[u8; 64]) -> Self {
        let mut records = Zeroizing::new([0; 32]);
        records.copy_from_slice(&keys[32..]);
        Self {
            names: hmac::Key::new(hmac::HMAC_SHA256, &keys[..32]),
            records,
        }
    }
}

impl RecordCipher for CatalogCipher {
    fn name(&self, name: &[u8]) -> Vec<u8> {
        hmac::sign(&self.names, name).as_ref()[..NAME_BYTES].to_vec()
    }

    fn seal(&self, key: &[u8], record: &[u8]) -> Vec<u8> {
        seal(&self.records, key, record)
    }

    fn open(&self, key: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        open(&self.records, key, sealed).map(|record| record.to_vec())
    }
}
