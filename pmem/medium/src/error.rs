//! Error of opening a medium.

use std::io;
use std::path::PathBuf;

/// Opening a medium failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MediumError {
    /// A system call on the file failed.
    #[error("{action} {path}")]
    Io {
        /// Operation that failed, a verb and a noun.
        action: &'static str,
        /// The region's path.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// Another process has the file open as a region.
    #[error("{path} is in use by another process")]
    InUse {
        /// The region's path.
        path: PathBuf,
    },
    /// Neither a regular file nor to be made one.
    #[error("{path} is not a regular file")]
    NotARegularFile {
        /// The region's path.
        path: PathBuf,
    },
    /// The file belongs to another user, who could change its mode, read the memory of every process in it, and
    /// replace pages.
    #[error(
        "{path} belongs to uid {owner}, and this process is uid {user}: give it to this user with chown if you trust what \
         is in it, or use another file"
    )]
    ForeignOwner {
        /// The region's path.
        path: PathBuf,
        /// User id of the file's owner.
        owner: u32,
        /// User id that the owner must have: the process's effective one.
        user: u32,
    },
    /// Others than its owner may read or write it.
    #[error(
        "{path} has mode {mode:04o}, so others can reach the memory of every process in it: chmod 0600 it if you trust what \
         is in it, or use another file"
    )]
    OpenToOthers {
        /// The region's path.
        path: PathBuf,
        /// Permission bits of the file.
        mode: u32,
    },
    /// Too small for the smallest region.
    #[error(
        "{path} has {bytes} bytes and so holds no region, which needs at least {needed}: name a larger or a new file"
    )]
    TooSmall {
        /// The region's path.
        path: PathBuf,
        /// Length of the file, bytes.
        bytes: u64,
        /// The least that is of use.
        needed: u64,
    },
    /// DAX with MAP_SYNC was required and refused.
    #[error(
        "{path} cannot be mapped with MAP_SYNC (errno {errno}): its file system is not mounted with DAX, \
         or its device gives no persistence by flushing the CPU cache; leave out the requirement of DAX \
         or move the region"
    )]
    DaxRefused {
        /// The region's path.
        path: PathBuf,
        /// Error number that mmap returned.
        errno: i32,
    },
}
