//! Times of the last verifications, in a small file: if it is lost, everything is read once more.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use permafrost_store::private;
use serde::{Deserialize, Serialize};

/// Version of the file.
const VERSION: u32 = 1;

/// Maximum size of the file, for 2^20 checkpoints. A longer file was not written by this module.
const MAX_BYTES: u64 = 64 << 20;

#[derive(Serialize, Deserialize)]
struct File {
    v: u32,
    /// Time of the last verification by checkpoint id, milliseconds since the Unix epoch.
    verified_unix_ms: HashMap<String, u64>,
}

/// Reads the file; returns nothing if it is missing or damaged.
pub(super) fn load(path: &Path) -> HashMap<String, u64> {
    let read = || -> io::Result<File> {
        if std::fs::metadata(path)?.len() > MAX_BYTES {
            return Err(io::Error::other("too long"));
        }
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    };
    match read() {
        Ok(file) if file.v == VERSION => file.verified_unix_ms,
        Ok(file) => {
            let version = file.v;
            tracing::warn!(event = "scrub-record-of-other-version", version, path = %path.display(), "what the scrub wrote is of another version: it begins anew");
            HashMap::new()
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => HashMap::new(),
        Err(error) => {
            tracing::warn!(event = "scrub-record-unreadable", %error, path = %path.display(), "what the scrub wrote cannot be read: it begins anew");
            HashMap::new()
        }
    }
}

/// Writes the file atomically.
pub(super) fn save(path: &Path, verified: &HashMap<String, u64>) -> io::Result<()> {
    let file = File {
        v: VERSION,
        verified_unix_ms: verified.clone(),
    };
    private::replace(path, &serde_json::to_vec(&file)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_back_and_rubbish_is_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scrub.json");
        assert!(load(&path).is_empty());
        let verified = HashMap::from([("a".to_owned(), 7), ("b".to_owned(), u64::MAX)]);
        save(&path, &verified).unwrap();
        assert_eq!(load(&path), verified);
        for rubbish in [&b"{\"v\":2,\"verified_unix_ms\":{\"a\":1}}"[..], b"{", b""] {
            std::fs::write(&path, rubbish).unwrap();
            assert!(load(&path).is_empty());
        }
    }
}
