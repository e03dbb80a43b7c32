//! Tars whose bytes depend on nothing but names, modes and contents of the files.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder};

use crate::files;

/// A tar that is being written to memory. Files are root's, if nothing else is said, and all of one time.
pub(super) struct Archive {
    tar: tar::Builder<Vec<u8>>,
    epoch: u64,
}

impl Archive {
    /// Begins a tar of files of the time `epoch`, seconds since the Unix epoch.
    pub(super) fn new(epoch: u64) -> Self {
        let tar = tar::Builder::new(Vec::new());
        Self { tar, epoch }
    }

    fn header(&self, kind: tar::EntryType, mode: u32, owner: u64, size: u64) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(owner);
        header.set_gid(owner);
        header.set_mtime(self.epoch);
        header.set_size(size);
        header
    }

    /// Adds everything below `root` that is `wanted` by its path below it, sorted by path, under the directory `name`,
    /// which may be empty. What is not wanted has nothing below it, either.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn tree(
        &mut self,
        root: &Path,
        name: &str,
        wanted: impl Fn(&Path) -> bool,
    ) -> Result<()> {
        let mut left = files(root)?;
        left.reverse();
        while let Some(path) = left.pop() {
            let below = path.strip_prefix(root).unwrap_or(&path);
            if !wanted(below) {
                continue;
            }
            let name = Path::new(name).join(below);
            let found = path.symlink_metadata().context("look at a file")?;
            // Whatever the umask was under which a tree was written: packages have no other modes either.
            let mode = match found.permissions().mode() & 0o111 {
                0 => 0o644,
                _ => 0o755,
            };
            if found.is_dir() {
                let mut header = self.header(tar::EntryType::Directory, 0o755, 0, 0);
                self.tar.append_data(&mut header, &name, std::io::empty())?;
                left.extend(files(&path)?.into_iter().rev());
            } else if found.is_symlink() {
                let mut header = self.header(tar::EntryType::Symlink, 0o777, 0, 0);
                let to = fs::read_link(&path).context("read a link")?;
                self.tar.append_link(&mut header, &name, to)?;
            } else {
                let mut header = self.header(tar::EntryType::Regular, mode, 0, found.len());
                let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
                self.tar
                    .append_data(&mut header, &name, file.take(found.len()))?;
            }
        }
        Ok(())
    }

    /// Adds a file that everybody may read.
    ///
    /// # Errors
    /// The name is too long.
    pub(super) fn file(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut header = self.header(tar::EntryType::Regular, 0o644, 0, bytes.len() as u64);
        Ok(self.tar.append_data(&mut header, name, bytes)?)
    }

    /// Adds a directory without files.
    ///
    /// # Errors
    /// The name is too long.
    pub(super) fn directory(&mut self, name: &str, mode: u32, owner: u64) -> Result<()> {
        let mut header = self.header(tar::EntryType::Directory, mode, owner, 0);
        Ok(self.tar.append_data(&mut header, name, std::io::empty())?)
    }

    /// Ends the tar, and returns its bytes.
    ///
    /// # Errors
    /// None happens in memory.
    pub(super) fn finish(self) -> Result<Vec<u8>> {
        self.tar.into_inner().context("end a tar")
    }
}

/// Compresses by gzip, without a name and a time: the same bytes give the same bytes.
///
/// # Errors
/// None happens in memory.
pub(super) fn compress(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut gzip = GzBuilder::new().write(Vec::new(), Compression::best());
    gzip.write_all(bytes).context("compress")?;
    gzip.finish().context("compress")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_those_of_packages_whatever_the_umask_was() {
        let dir = tempfile::tempdir().unwrap();
        let of = |file: u32, program: u32| {
            for (name, mode) in [("file", file), ("program", program)] {
                let path = dir.path().join(name);
                fs::write(&path, name).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            }
            let mut archive = Archive::new(1);
            archive.tree(dir.path(), "top", |_| true).unwrap();
            archive.finish().unwrap()
        };
        let tar = of(0o664, 0o775);
        assert_eq!(tar, of(0o600, 0o700));
        let mut archive = tar::Archive::new(tar.as_slice());
        let modes: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().header().mode().unwrap())
            .collect();
        assert_eq!(modes, [0o644, 0o755]);
    }
}
