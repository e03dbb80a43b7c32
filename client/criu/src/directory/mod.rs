//! A CRIU images directory that a caller handed over as a descriptor.
//!
//! Files are opened relative to it and never through a symbolic link. The one link followed is `parent`, which
//! CRIU itself makes in an incremental dump. Only root and the daemon's own user may make such requests, so the
//! link leads nowhere that they could not go.

mod export;
mod pages;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::images::ImageName;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};

pub use export::{ExportedPart, PagesFile, export};
pub use pages::{PagesReader, PagesTarget};

/// Name of the file in which runc and crun record the standard streams of a container: they restore nothing
/// without it.
const DESCRIPTORS: &str = "descriptors.json";

/// An images directory.
pub struct ImagesDir(OwnedFd);

/// Errors of an images directory.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The descriptor is not a directory.
    #[error("the descriptor handed over is no directory")]
    NotADirectory,
    /// The images do not fit each other.
    #[error("{message}")]
    Invalid {
        /// Description of the inconsistency.
        message: String,
    },
    /// An error of the file system.
    #[error("{action}: {source}")]
    Io {
        /// Verb and noun.
        action: String,
        /// Error of the system.
        source: io::Error,
    },
}

impl DirectoryError {
    fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

impl ReportedError for DirectoryError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::NotADirectory | Self::Invalid { .. } => ErrorCode::Invalid,
            Self::Io { .. } => ErrorCode::Internal,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::NotADirectory => "hand over the images directory",
            Self::Invalid { .. } => "check the images directory with `crit`",
            Self::Io { .. } => "",
        }
    }
}

impl ImagesDir {
    /// Takes the descriptor of a directory.
    ///
    /// # Errors
    /// The descriptor is not a directory.
    pub fn new(fd: OwnedFd) -> Result<Self, DirectoryError> {
        let stat = rustix::fs::fstat(&fd).map_err(io::Error::from);
        let stat = stat.map_err(DirectoryError::io("stat images directory"))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Ok(Self(fd)),
            _ => Err(DirectoryError::NotADirectory),
        }
    }

    /// Returns the names of the regular files, sorted, so that the same directory is always read in the same
    /// order.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn files(&self) -> Result<Vec<String>, DirectoryError> {
        let read = || -> io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in Dir::read_from(&self.0)? {
                let entry = entry?;
                let Ok(name) = entry.file_name().to_str() else {
                    continue;
                };
                let regular = match entry.file_type() {
                    FileType::RegularFile => true,
                    // Some file systems do not report the type.
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
        read().map_err(DirectoryError::io("list images directory"))
    }

    /// Returns the small images among [`Self::files`]: CRIU's images except the pagemaps and pages that are
    /// `stored` as such, and the files that container runtimes keep beside them. (A dump to a page server may
    /// still write some pagemaps and pages of its own, which are small images like any other.) Logs, pid files
    /// and the like are not images.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn small_images(
        &self,
        stored: impl Fn(&ImageName) -> bool,
    ) -> Result<Vec<String>, DirectoryError> {
        let mut names = self.files()?;
        names.retain(|name| match ImageName::parse(name) {
            parsed @ (ImageName::Pagemap(_) | ImageName::Pages(_)) => !stored(&parsed),
            ImageName::StatsDump => true,
            _ => name.ends_with(".img") || name == DESCRIPTORS,
        });
        Ok(names)
    }

    /// Returns the time at which the images were complete: that of the inventory, which CRIU writes last.
    /// `None` without one.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn written(&self) -> Result<Option<SystemTime>, DirectoryError> {
        self.modified("inventory.img")
    }

    /// Returns true if `stats-dump` belongs to the same dump as the images. An earlier dump into the same
    /// directory leaves its own there, until this one has written its statistics.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn has_own_stats(&self) -> Result<bool, DirectoryError> {
        let stats = self.modified("stats-dump")?;
        Ok(stats.is_some() && stats >= self.written()?)
    }

    fn modified(&self, name: &str) -> Result<Option<SystemTime>, DirectoryError> {
        match rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => {
                let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
                let nanos = u32::try_from(stat.st_mtime_nsec).unwrap_or(0);
                Ok(Some(UNIX_EPOCH + Duration::new(seconds, nanos)))
            }
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(errno) => Err(DirectoryError::io(format!("stat image {name}"))(
                errno.into(),
            )),
        }
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// The file does not exist, or is a link.
    pub fn open(&self, name: &str) -> Result<File, DirectoryError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = rustix::fs::openat(&self.0, name, flags, Mode::empty());
        opened
            .map(File::from)
            .map_err(io::Error::from)
            .map_err(DirectoryError::io(format!("open image {name}")))
    }

    /// Creates a file that must not exist yet, readable by its owner only: images hold a process's secrets.
    ///
    /// # Errors
    /// The file exists already, or cannot be made.
    pub fn create(&self, name: &str) -> Result<File, DirectoryError> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR);
        made.map(File::from)
            .map_err(io::Error::from)
            .map_err(DirectoryError::io(format!("create image {name}")))
    }

    /// Removes a file.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::empty())?)
    }

    /// Returns the numbers that identify the directory: device and inode.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn identity(&self) -> Result<(u64, u64), DirectoryError> {
        let stat = rustix::fs::fstat(&self.0).map_err(io::Error::from);
        let stat = stat.map_err(DirectoryError::io("stat images directory"))?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Opens the parent images directory of an incremental dump (the link `parent` that CRIU makes), if there
    /// is one.
    ///
    /// # Errors
    /// The parent exists and cannot be opened.
    pub fn parent(&self) -> Result<Option<Self>, DirectoryError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(self.0.as_fd(), "parent", flags, Mode::empty()) {
            Ok(fd) => Ok(Some(Self(fd))),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(errno) => Err(DirectoryError::io("open parent images directory")(
                errno.into(),
            )),
        }
    }
}
