//! Opening a region's file: lock, allocation, probing for DAX.

use std::fs::{File, Metadata, OpenOptions as FileOptions};
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, FlockOperation, StatxAttributes, StatxFlags};
use rustix::io::Errno;

use super::dax::Dax;
use super::file::MappedFile;
use super::{Guarantee, Medium, MediumKind};
use crate::MediumError;
use crate::PAGE_BYTES;

/// The least a medium must have; the smallest region needs about as much.
const MIN_BYTES: u64 = 256 * 1024;

/// `f_type` of tmpfs, from `linux/magic.h`.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// `f_type` of ramfs, from `linux/magic.h`.
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// Options for opening a medium.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// True to fail unless the region can be mapped with MAP_SYNC. Default: false, a plain file is accepted.
    pub require_dax: bool,
    /// True if [`Medium::populate`] shall map the pages of a tmpfs file or DAX mapping, so that dumps do not wait for
    /// page faults. Takes all of the memory on tmpfs, and up to a few seconds a gigabyte. Without effect on files with
    /// a disk behind, where it would write the whole file. Default: true.
    pub populate: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            require_dax: false,
            populate: true,
        }
    }
}

/// Opens the file at `path` as a medium, creating it with `size_if_created` bytes (0600) if there is none. Takes an
/// exclusive lock until the medium is dropped. Tries DAX first, then a plain mapping; [`Medium::guarantee`] returns
/// which of them was used, and the reason.
///
/// All of the file is allocated, so that a full disk is an error here and not a fatal signal later.
///
/// # Errors
/// [`MediumError`]: the file is another user's or open to others, or cannot be opened, locked, allocated or mapped;
/// DAX is required and refused.
pub fn open_medium(
    path: &Path,
    size_if_created: u64,
    options: &OpenOptions,
) -> Result<Arc<dyn Medium>, MediumError> {
    open(path, size_if_created, options, allocate)
}

/// Opens a medium as [`open_medium`] does, but its file takes room only for what is written to it: without room a page
/// that is written is lost.
///
/// # Errors
/// Those of [`open_medium`].
pub fn open_sparse_medium(
    path: &Path,
    size_if_created: u64,
    options: &OpenOptions,
) -> Result<Arc<dyn Medium>, MediumError> {
    open(path, size_if_created, options, |file, len_bytes, _| {
        file.set_len(len_bytes)
    })
}

fn open(
    path: &Path,
    size_if_created: u64,
    options: &OpenOptions,
    allocate: impl FnOnce(&File, u64, bool) -> io::Result<()>,
) -> Result<Arc<dyn Medium>, MediumError> {
    let io_error = |action: &'static str| {
        move |source: io::Error| MediumError::Io {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let file = FileOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(io_error("open region"))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            return Err(MediumError::InUse {
                path: path.to_owned(),
            });
        }
        Err(errno) => return Err(io_error("lock region")(errno.into())),
    }
    let metadata = file.metadata().map_err(io_error("examine region"))?;
    if !metadata.is_file() {
        return Err(MediumError::NotARegularFile {
            path: path.to_owned(),
        });
    }
    check_private(path, &metadata)?;
    // Length 0: created now, or by a process that ended before it allocated the file.
    let created = metadata.len() == 0;
    let wanted = if created {
        size_if_created
    } else {
        metadata.len()
    } / PAGE_BYTES
        * PAGE_BYTES;
    if wanted < MIN_BYTES {
        if created {
            // An empty file would be in the way of the next try with a better size.
            let _ = std::fs::remove_file(path);
        }
        return Err(MediumError::TooSmall {
            path: path.to_owned(),
            bytes: if created { wanted } else { metadata.len() },
            needed: MIN_BYTES,
        });
    }
    if let Err(error) = allocate(&file, wanted, created) {
        if created {
            let _ = std::fs::remove_file(path);
        }
        return Err(io_error("allocate region")(error));
    }

    let volatile = is_in_memory(&file);
    match Dax::map(file, wanted, options.populate) {
        Ok(dax) => Ok(Arc::new(dax)),
        Err((_, errno)) if options.require_dax => Err(MediumError::DaxRefused {
            path: path.to_owned(),
            errno,
        }),
        Err((file, errno)) => {
            let guarantee = Guarantee {
                kind: MediumKind::File,
                dax_errno: Some(errno),
                dax_without_sync: has_dax_attribute(&file),
                volatile,
                instruction: None,
                emulated: None,
            };
            let mapped = MappedFile::map(file, wanted, guarantee, options.populate && volatile)
                .map_err(io_error("map region"))?;
            Ok(Arc::new(mapped))
        }
    }
}

/// Refuses a file that another user owns or can open: its pages go into processes, and come out of them.
fn check_private(path: &Path, metadata: &Metadata) -> Result<(), MediumError> {
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner != user {
        return Err(MediumError::ForeignOwner {
            path: path.to_owned(),
            owner,
            user,
        });
    }
    let mode = metadata.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(MediumError::OpenToOthers {
            path: path.to_owned(),
            mode,
        });
    }
    Ok(())
}

/// Makes a plain medium in anonymous shared memory, for tests and benches: gone with its last reference. Every page
/// is mapped when it returns.
///
/// # Errors
/// [`MediumError::Io`] if there is not enough memory.
pub fn create_medium_in_memory(capacity_bytes: u64) -> Result<Arc<dyn Medium>, MediumError> {
    let path = Path::new("memfd:region");
    let io_error = |action: &'static str| {
        move |source: io::Error| MediumError::Io {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let memory = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(|errno| io_error("create region")(errno.into()))?;
    let file = File::from(memory);
    allocate(&file, capacity_bytes, true).map_err(io_error("allocate region"))?;
    let guarantee = Guarantee {
        kind: MediumKind::File,
        dax_errno: None,
        dax_without_sync: false,
        volatile: true,
        instruction: None,
        emulated: None,
    };
    let mapped =
        MappedFile::map(file, capacity_bytes, guarantee, false).map_err(io_error("map region"))?;
    mapped.populate_now();
    Ok(Arc::new(mapped))
}

/// Gives every byte of the file a place on its medium: a hole that cannot be filled later is SIGBUS.
fn allocate(file: &File, len_bytes: u64, created: bool) -> io::Result<()> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len_bytes) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            // The file system cannot: write it out once. A file that exists was so by us.
            Err(Errno::OPNOTSUPP) if created => return write_zeros(file, len_bytes),
            Err(Errno::OPNOTSUPP) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Allocates a region's file up to a greater length, durably; after an error it has the length that it had.
pub(crate) fn allocate_more(file: &File, len_bytes: u64) -> io::Result<()> {
    let before = file.metadata()?.len();
    let grown = match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len_bytes) {
        Err(Errno::OPNOTSUPP) => {
            let more = len_bytes.saturating_sub(before);
            (&*file).seek(SeekFrom::End(0))?;
            write_zeros(file, more)
        }
        Err(errno) => Err(errno.into()),
        Ok(()) => Ok(()),
    };
    if let Err(error) = grown.and_then(|()| file.sync_all()) {
        // Otherwise a part would stay allocated that no one knows of.
        let _ = file.set_len(before);
        return Err(error);
    }
    Ok(())
}

fn write_zeros(mut file: &File, len_bytes: u64) -> io::Result<()> {
    let copied = io::copy(&mut io::Read::take(io::repeat(0), len_bytes), &mut file)?;
    if copied == len_bytes {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// Returns true if the file is in memory that is lost when the machine stops.
fn is_in_memory(file: &File) -> bool {
    let is_one_of = |kind| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&kind);
    rustix::fs::fstatfs(file).is_ok_and(|fs| u64::try_from(fs.f_type).is_ok_and(is_one_of))
}

fn has_dax_attribute(file: &File) -> bool {
    rustix::fs::statx(
        file,
        "",
        rustix::fs::AtFlags::EMPTY_PATH,
        StatxFlags::BASIC_STATS,
    )
    .is_ok_and(|stat| stat.stx_attributes.contains(StatxAttributes::DAX))
}
