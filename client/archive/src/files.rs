//! Archives as files and pipes, and the room for their members.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read};
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use tempfile::TempPath;

use crate::{ArchiveCompression, ArchiveError, Packed, pack};

/// Interval at which the caller is asked whether to go on while nothing comes from a pipe, nanoseconds: 250 ms.
const TICK_NANOS: i64 = 250_000_000;

/// Room that is left free beside an unpacked archive, bytes: for its index, and for others.
const SLACK_BYTES: u64 = 64 << 20;

/// Bytes read and written at once.
const BUFFER_BYTES: usize = 256 << 10;

/// Name prefix of an archive that is not complete.
const PREFIX: &str = ".permafrost-";

/// Returns a reader of an archive. `goes_on` receives the number of bytes read so far, also now and then while nothing
/// comes from a pipe; it returns false to give up.
pub fn input<'a>(source: File, goes_on: impl FnMut(u64) -> bool + 'a) -> impl Read + 'a {
    let input = Input {
        source,
        goes_on,
        done_bytes: 0,
    };
    BufReader::with_capacity(BUFFER_BYTES, input)
}

struct Input<F> {
    source: File,
    goes_on: F,
    done_bytes: u64,
}

impl<F: FnMut(u64) -> bool> Read for Input<F> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if !(self.goes_on)(self.done_bytes) {
                return Err(io::Error::other(ArchiveError::Interrupted));
            }
            let tick = Timespec {
                tv_sec: 0,
                tv_nsec: TICK_NANOS,
            };
            let mut ready = [PollFd::new(&self.source, PollFlags::IN)];
            match rustix::event::poll(&mut ready, Some(&tick)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => break,
                Err(error) => return Err(error.into()),
            }
        }
        let bytes = self.source.read(into)?;
        self.done_bytes += bytes as u64;
        Ok(bytes)
    }
}

/// Puts an archive together in a file beside `path`, readable by its owner only, and gives it its name when it is
/// complete and on disk; `force` replaces a file of this name.
///
/// # Errors
/// As [`pack`]; there is a file of this name.
pub fn pack_into_file(
    images: &Path,
    compression: ArchiveCompression,
    path: &Path,
    force: bool,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Packed, ArchiveError> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let (file, named) = create(parent).map_err(ArchiveError::io(format!(
        "create a file in {}",
        parent.display()
    )))?;
    let output = BufWriter::with_capacity(BUFFER_BYTES, &file);
    let packed = pack(images, compression, output, progress)?;
    let written = file.sync_all();
    written.map_err(ArchiveError::io(format!("write {}", path.display())))?;
    name(&file, named, parent, path, force)
        .map_err(ArchiveError::io(format!("name {}", path.display())))?;
    Ok(packed)
}

/// Creates a file without a name, which the kernel removes if this process is killed. File systems without such files
/// get one with a temporary name, which is returned, too.
fn create(parent: &Path) -> io::Result<(File, Option<TempPath>)> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(parent, flags, Mode::RUSR | Mode::WUSR) {
        return Ok((file.into(), None));
    }
    let named = tempfile::Builder::new()
        .prefix(PREFIX)
        .tempfile_in(parent)?;
    let (file, path) = named.into_parts();
    Ok((file, Some(path)))
}

/// Gives a file of [`create`] its name.
fn name(
    file: &File,
    named: Option<TempPath>,
    parent: &Path,
    path: &Path,
    force: bool,
) -> io::Result<()> {
    let link = |path: &Path| {
        let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::linkat(CWD, unnamed, CWD, path, AtFlags::SYMLINK_FOLLOW)
            .map_err(io::Error::from)
    };
    let named = match named {
        Some(named) => named,
        None if !force => return link(path),
        // A link replaces no file, but a rename does.
        None => {
            let mut builder = tempfile::Builder::new();
            builder
                .prefix(PREFIX)
                .make_in(parent, link)?
                .into_temp_path()
        }
    };
    let renamed = if force {
        named.persist(path)
    } else {
        named.persist_noclobber(path)
    };
    renamed.map_err(|error| error.error)
}

/// Checks that there is room in a directory for the images of an archive; `in_memory` for one on tmpfs.
///
/// # Errors
/// There is not; or an error of the file system.
pub fn check_room(
    directory: &Path,
    in_memory: bool,
    needed_bytes: u64,
) -> Result<(), ArchiveError> {
    let room_bytes = room(directory, in_memory)?;
    if needed_bytes > room_bytes {
        return Err(ArchiveError::NoRoomToPack {
            needed_bytes,
            room_bytes,
        });
    }
    Ok(())
}

/// Returns the room for an unpacked archive in a directory, bytes; `in_memory` for one on tmpfs.
///
/// # Errors
/// An error of the file system.
pub fn room(directory: &Path, in_memory: bool) -> Result<u64, ArchiveError> {
    let stat = rustix::fs::statvfs(directory).map_err(io::Error::from);
    let stat = stat.map_err(ArchiveError::io(format!("statvfs {}", directory.display())))?;
    let mut free_bytes = stat.f_bavail.saturating_mul(stat.f_frsize);
    if in_memory {
        // A tmpfs may be larger than the memory that is left.
        free_bytes = free_bytes.min(available_memory().unwrap_or(free_bytes));
    }
    Ok(free_bytes.saturating_sub(SLACK_BYTES))
}

/// Returns `MemAvailable` of `/proc/meminfo`, bytes.
fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
    Some(kib.saturating_mul(1024))
}
