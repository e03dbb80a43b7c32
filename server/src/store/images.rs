//! A CRIU images directory that a caller handed over as a descriptor.
//!
//! Files are opened relative to it and never through a symbolic link. The one link followed is `parent`, which
//! CRIU itself makes in an incremental dump; whoever may ask is root or the daemon's own user, so it leads
//! nowhere that they could not go.

use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::{AsFd, OwnedFd};

use permafrost_pmem::Shadow;
use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::{AddressSpace, Image};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};

use super::StoreError;
use crate::replication::Copies;

/// An images directory.
pub(super) struct ImagesDir(OwnedFd);

impl ImagesDir {
    /// Takes the descriptor of a directory.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn new(fd: OwnedFd) -> Result<Self, StoreError> {
        let stat = rustix::fs::fstat(&fd)
            .map_err(io::Error::from)
            .map_err(StoreError::io("stat images directory"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return Err(StoreError::Invalid {
                message: "the descriptor handed over is no directory".to_owned(),
                hint: "hand over the images directory",
            });
        }
        Ok(Self(fd))
    }

    /// Names of the regular files, sorted, so that the same directory always reads the same.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn files(&self) -> Result<Vec<String>, StoreError> {
        let read = || -> io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in Dir::read_from(&self.0)? {
                let entry = entry?;
                let Ok(name) = entry.file_name().to_str() else {
                    continue;
                };
                let regular = match entry.file_type() {
                    FileType::RegularFile => true,
                    // Some file systems do not say.
                    FileType::Unknown => {
                        let flags = AtFlags::SYMLINK_NOFOLLOW;
                        let stat = rustix::fs::statat(&self.0, name, flags)?;
                        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                    }
                    _ => false,
                };
                if regular {
                    names.push(name.to_owned());
                }
            }
            names.sort_unstable();
            Ok(names)
        };
        read().map_err(StoreError::io("list images directory"))
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// It is not there, or is a link.
    pub(super) fn open(&self, name: &str) -> Result<File, StoreError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = rustix::fs::openat(&self.0, name, flags, Mode::empty());
        opened
            .map(File::from)
            .map_err(io::Error::from)
            .map_err(StoreError::io(format!("open image {name}")))
    }

    /// Creates a file that must not be there yet, readable by its owner only: images hold a process's secrets.
    ///
    /// # Errors
    /// It is there already, or cannot be made.
    pub(super) fn create(&self, name: &str) -> Result<File, StoreError> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR);
        made.map(File::from)
            .map_err(io::Error::from)
            .map_err(StoreError::io(format!("create image {name}")))
    }

    /// Removes a file.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::empty())?)
    }

    /// What tells it from any other directory: device and inode.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn identity(&self) -> Result<(u64, u64), StoreError> {
        let stat = rustix::fs::fstat(&self.0).map_err(io::Error::from);
        let stat = stat.map_err(StoreError::io("stat images directory"))?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// The parent images directory of an incremental dump (the link `parent` that CRIU makes), if there is one.
    ///
    /// # Errors
    /// There is one and it cannot be opened.
    pub(super) fn parent(&self) -> Result<Option<Self>, StoreError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(self.0.as_fd(), "parent", flags, Mode::empty()) {
            Ok(fd) => Ok(Some(Self(fd))),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(errno) => Err(StoreError::io("open parent images directory")(errno.into())),
        }
    }

    /// Stores the small images in `shadow`: CRIU's files but for the pagemaps and pages of `spaces`. (A dump to a
    /// page server may still write some of its own, which are small images like any other.) Copies get each one,
    /// read a second time: what changed in between makes another digest there, and so is not sealed.
    ///
    /// # Errors
    /// A file cannot be read; the region is full or fails.
    pub(super) fn store_small(
        &self,
        shadow: &mut Shadow,
        spaces: &[AddressSpace],
        mut copies: Option<&mut (dyn Copies + 'static)>,
    ) -> Result<Vec<Image>, StoreError> {
        let mut images = Vec::new();
        for name in self.files()? {
            if !is_small_image(&name, spaces) {
                continue;
            }
            let mut file = self.open(&name)?;
            let (root, stats, len_bytes) = shadow.write_blob(&mut file)?;
            if let Some(copies) = copies.as_deref_mut() {
                file.rewind()
                    .map_err(StoreError::io(format!("rewind image {name}")))?;
                copies.image(&name, len_bytes, &mut file)?;
            }
            images.push(Image {
                name,
                len_bytes,
                map_root: root.to_bytes().to_vec(),
                map_digest: stats.digest.to_vec(),
            });
        }
        Ok(images)
    }
}

/// Logs, pid files and the like are nobody's image.
fn is_small_image(name: &str, spaces: &[AddressSpace]) -> bool {
    match ImageName::parse(name) {
        ImageName::Pagemap(id) => !spaces
            .iter()
            .any(|space| space.space_type() == id.space_type && space.id == id.id),
        ImageName::Pages(id) => !spaces.iter().any(|space| space.pages_id == id),
        ImageName::StatsDump => true,
        _ => name.ends_with(".img"),
    }
}
