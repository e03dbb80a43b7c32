//! Errors of archives.

use std::io;

/// Error of an archive that is taken apart or put together.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The file is compressed in a way that is not read.
    #[error("the archive is compressed with {found}, which is not supported")]
    Compression {
        /// Name of the compression.
        found: &'static str,
    },
    /// The file is no tar.
    #[error("this is not a tar archive, nor one compressed with gzip or zstd")]
    NotTar,
    /// The archive ends early.
    #[error("the archive is truncated{}", within(path))]
    Truncated {
        /// Member in which it ends; empty if it ends between two.
        path: String,
    },
    /// The archive is damaged.
    #[error("the archive is damaged: {source}")]
    Damaged {
        /// Reason given by the decoder.
        #[source]
        source: io::Error,
    },
    /// Bytes follow the end of the archive.
    #[error("the archive has data behind its end")]
    BehindEnd,
    /// The path of a member is absolute, leads upwards or is empty.
    #[error("member {path:?} is outside of the archive's directory")]
    OutsidePath {
        /// Path of the member.
        path: String,
    },
    /// A path or a link target is too long.
    #[error("the path or link target {begin:?}… has more than {limit} bytes or {depth} components")]
    LongPath {
        /// First bytes of the path.
        begin: String,
        /// Largest size, bytes.
        limit: usize,
        /// Largest number of components.
        depth: usize,
    },
    /// The paths of all members take too much memory.
    #[error("the paths of the archive's members take more than {limit} bytes of memory")]
    Paths {
        /// Largest size, bytes.
        limit: usize,
    },
    /// Programs read the headers of a member differently.
    #[error("programs read the headers of member {path:?} differently: {reason}")]
    Ambiguous {
        /// Path of the member, as one of them reads it.
        path: String,
        /// Property of the headers.
        reason: &'static str,
    },
    /// A hard link does not lead to an earlier file.
    #[error(
        "member {path:?} is a hard link to {target:?}, which is not an earlier file of the archive"
    )]
    HardLink {
        /// Path of the member.
        path: String,
        /// Target of the link.
        target: String,
    },
    /// A link leads out of the archive.
    #[error(
        "member {path:?} is a link to {target:?}, which may be outside of the archive's directory"
    )]
    OutsideLink {
        /// Path of the member.
        path: String,
        /// Target of the link.
        target: String,
    },
    /// A member is beneath a symbolic link.
    #[error("member {path:?} is beneath the symbolic link {link:?}")]
    BeneathLink {
        /// Path of the member.
        path: String,
        /// Path of the link.
        link: String,
    },
    /// A member is neither a file nor a directory nor a link.
    #[error(
        "member {path:?} is a {kind}; only files, directories and links belong into a checkpoint"
    )]
    Special {
        /// Path of the member.
        path: String,
        /// Kind of the member.
        kind: &'static str,
    },
    /// A member occurs twice.
    #[error("member {path:?} occurs twice")]
    Twice {
        /// Path of the member.
        path: String,
    },
    /// A member that every checkpoint has is missing.
    #[error("the archive has no {path}: it is not a container checkpoint")]
    Missing {
        /// Path of the member.
        path: &'static str,
    },
    /// There are too many members.
    #[error("the archive has more than {limit} members")]
    TooMany {
        /// Largest number of members.
        limit: usize,
    },
    /// A member is too large.
    #[error("member {path:?} has {bytes} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Path of the member.
        path: String,
        /// Size of the member, bytes.
        bytes: u64,
        /// Largest size, bytes.
        limit: u64,
    },
    /// The unpacked archive does not fit.
    #[error(
        "the archive takes more than the {room_bytes} bytes that there is room for: member {path:?} has {bytes}"
    )]
    NoRoom {
        /// Path of the first member for which there is no room.
        path: String,
        /// Size of the member, bytes.
        bytes: u64,
        /// Room for all members, bytes.
        room_bytes: u64,
    },
    /// A checkpoint does not fit.
    #[error("the archive takes {needed_bytes} bytes, and there is room for {room_bytes}")]
    NoRoomToPack {
        /// Size of all images, bytes.
        needed_bytes: u64,
        /// Room for them, bytes.
        room_bytes: u64,
    },
    /// The headers are too long.
    #[error("the archive's headers have more than {limit} bytes")]
    Headers {
        /// Largest size, bytes.
        limit: usize,
    },
    /// A pagemap is damaged.
    #[error("checkpoint/{name}: {source}")]
    Pagemap {
        /// Name of the pagemap.
        name: String,
        /// Reason given by the decoder.
        source: permafrost_protocol::images::ImageError,
    },
    /// A pages file does not have the pages that its pagemap lists.
    #[error("checkpoint/{pages} has {bytes} bytes, and {pagemap} lists {listed}")]
    PagesDiffer {
        /// Name of the pages file.
        pages: String,
        /// Size of the pages file, bytes; 0 if it is missing.
        bytes: u64,
        /// Name of the pagemap.
        pagemap: String,
        /// Size of the pages that the pagemap lists, bytes.
        listed: u64,
    },
    /// Two pagemaps name one pages file.
    #[error("two pagemaps name checkpoint/{pages}")]
    SharedPages {
        /// Name of the pages file.
        pages: String,
    },
    /// The checkpoint was not stored from an archive.
    #[error("the checkpoint was not stored from an archive")]
    NoArchive,
    /// The index of the archive cannot be read.
    #[error("the archive's index is damaged, or of a newer version")]
    BadIndex,
    /// A member is not what was stored.
    #[error("{name} is not what the archive had: its checksum or length differs")]
    Altered {
        /// Name of the file in the images directory.
        name: String,
    },
    /// The caller gave up.
    #[error("interrupted")]
    Interrupted,
    /// An error of the file system.
    #[error("{action}: {source}")]
    Io {
        /// Verb and noun.
        action: String,
        /// Error of the system.
        #[source]
        source: io::Error,
    },
}

impl ArchiveError {
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

fn within(path: &str) -> String {
    if path.is_empty() {
        String::new()
    } else {
        format!(" in member {path:?}")
    }
}
