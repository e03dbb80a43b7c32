//! Files that only their owner can read.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Replaces a file in one durable step: a crash leaves the old contents or the new ones. Only its owner can
/// read it.
///
/// # Errors
/// The file system fails.
pub fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    const OWNER_ONLY: u32 = 0o600;
    let aside = path.with_extension("new");
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(OWNER_ONLY)
        .open(&aside)?;
    // A file that a crash has left keeps its mode.
    file.set_permissions(Permissions::from_mode(OWNER_ONLY))?;
    file.write_all(contents)?;
    file.sync_all()?;
    fs::rename(aside, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_and_private_whatever_was_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("figures.json");
        fs::write(dir.path().join("figures.new"), "left, and readable by all").unwrap();
        for contents in [&b"first"[..], b"2"] {
            replace(&path, contents).unwrap();
            assert_eq!(fs::read(&path).unwrap(), contents);
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
    }
}
