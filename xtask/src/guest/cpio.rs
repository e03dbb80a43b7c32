//! A writer of initial ram file systems: cpio archives in the "newc" format
//! (Documentation/driver-api/early-userspace/buffer-format.rst in the kernel). The kernel unpacks several
//! put one after another.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context, Result};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// An archive being written. Every file belongs to root.
pub(crate) struct Archive<W> {
    to: W,
    inode: u32,
    directories: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    pub(crate) fn new(to: W) -> Self {
        Self {
            to,
            inode: 0,
            directories: BTreeSet::new(),
        }
    }

    /// Makes a directory and those above it, each once.
    pub(crate) fn directory(&mut self, path: &str) -> Result<()> {
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            let directory = &path[..end];
            if !directory.is_empty() && self.directories.insert(directory.to_owned()) {
                self.entry(directory, DIRECTORY | 0o755, &[])?;
            }
        }
        Ok(())
    }

    /// Adds a file with these contents.
    pub(crate) fn file(&mut self, path: &str, mode: u32, contents: &[u8]) -> Result<()> {
        self.parent(path)?;
        self.entry(path, REGULAR | mode, contents)
    }

    /// Adds a copy of a file, executable if the original is. Links are followed.
    pub(crate) fn copy(&mut self, path: &str, from: &Path) -> Result<()> {
        let contents = fs::read(from).with_context(|| format!("read {}", from.display()))?;
        let mode = fs::metadata(from)
            .with_context(|| format!("look at {}", from.display()))?
            .permissions()
            .mode();
        self.file(path, mode & 0o777, &contents)
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, path: &str, to: &str) -> Result<()> {
        self.parent(path)?;
        self.entry(path, LINK | 0o777, to.as_bytes())
    }

    /// Writes the end of the archive.
    pub(crate) fn finish(mut self) -> Result<W> {
        self.entry("TRAILER!!!", 0, &[])?;
        self.to.flush().context("write the archive")?;
        Ok(self.to)
    }

    fn parent(&mut self, path: &str) -> Result<()> {
        path.rsplit_once('/')
            .map_or(Ok(()), |(parent, _)| self.directory(parent))
    }

    fn entry(&mut self, path: &str, mode: u32, contents: &[u8]) -> Result<()> {
        self.inode += 1;
        let len = u32::try_from(contents.len())
            .with_context(|| format!("{path} is too large for an archive"))?;
        let name_len = path.len() + 1;
        // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        let head = format!(
            "070701{:08x}{mode:08x}{:08x}{:08x}{:08x}{:08x}{len:08x}{:08x}{:08x}{:08x}{:08x}{name_len:08x}{:08x}",
            self.inode, 0, 0, 1, 0, 0, 0, 0, 0, 0
        );
        (|| -> io::Result<()> {
            self.to.write_all(head.as_bytes())?;
            self.to.write_all(path.as_bytes())?;
            self.to.write_all(&[0])?;
            self.pad(head.len() + name_len)?;
            self.to.write_all(contents)?;
            self.pad(contents.len())
        })()
        .with_context(|| format!("write {path} to the archive"))
    }

    /// Pads to four bytes, as the format requires after the head with the name, and after the contents.
    fn pad(&mut self, len: usize) -> io::Result<()> {
        self.to.write_all(&[0; 3][..len.wrapping_neg() % 4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_laid_out_as_the_kernel_reads_it() {
        let mut archive = Archive::new(Vec::new());
        archive.file("a/b/c", 0o644, b"hello").unwrap();
        archive.file("a/d", 0o755, b"").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let magics = text.match_indices("070701").count();
        assert_eq!(magics, 5, "a, a/b, a/b/c, a/d and the trailer");
        assert_eq!(
            text.match_indices("070701")
                .filter(|(at, _)| at % 4 != 0)
                .count(),
            0
        );
        assert!(text.contains("000081a4"), "a regular file, 0644");
    }
}
