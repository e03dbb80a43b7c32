//! Files by which `permafrost` passes its order to the action script, beside the images, where the environment does not
//! get through (a CRIU that is started by sudo, or by a wrapper with `env -i`). Without those of a dump the script would
//! not know that it belongs to Permafrost and would let CRIU end the tasks; only then would it show that the seal fails.
//!
//! ```text
//! SCRATCH/           0700
//! ├── images/        0700, what CRIU calls CRTOOLS_IMAGE_DIR
//! ├── session        0600: SESSION, a NUL, the control socket's path, a NUL, when to give up sealing, a NUL
//! ├── verdict        0600, empty until the script writes it
//! └── placement.socket   of a restore: answers the script when the processes may run
//! ```
//!
//! The script may run for every dump of the machine, as root. So it trusts them only where all of this belongs to
//! the owner of the images directory, who has the images in hand anyway, and is closed to all other users; and it writes
//! into nothing but an existing `verdict` of that owner's.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, openat};

use crate::verdict::SealBy;

/// Name of the file that holds the order: session, socket and time.
const SESSION: &str = "session";

/// Name of the verdict's file.
const VERDICT: &str = "verdict";

/// Name of the socket at which the script of a restore waits until all memory is there.
const PLACEMENT: &str = "placement.socket";

/// Reply on that socket once all memory is there, or accesses to what is missing wait. Anything else is a failure.
pub const PLACED: &[u8] = b"placed";

/// Largest order that is read: a session id, a path and a time are shorter.
const MAX_BYTES: u64 = 8 << 10;

/// Request for a seal, which the script passes on to the daemon.
#[derive(Clone, Copy, Debug)]
pub struct SealOrder<'a> {
    /// Session to seal.
    pub session: &'a str,
    /// The daemon's control socket.
    pub socket: &'a Path,
    /// Time at which the freeze ends, sealed or not. `None`: never.
    pub seal_by: Option<SealBy>,
}

/// Order that the script has read.
#[derive(Debug)]
pub struct Handover {
    /// Session to seal.
    pub session: String,
    /// The daemon's control socket.
    pub socket: PathBuf,
    /// Time at which the freeze ends, sealed or not. `None`: never.
    pub seal_by: Option<SealBy>,
    /// The verdict's file, which is empty.
    pub verdict: File,
}

/// Writes the order into `scratch`, beside the images directory.
///
/// # Errors
/// An error of the file system.
pub fn write(scratch: &Path, order: &SealOrder<'_>) -> io::Result<()> {
    let mut bytes = order.session.as_bytes().to_vec();
    bytes.push(0);
    bytes.extend(order.socket.as_os_str().as_bytes());
    bytes.push(0);
    let seal_by = order.seal_by.map(|seal_by| seal_by.to_string());
    bytes.extend(seal_by.unwrap_or_default().as_bytes());
    bytes.push(0);
    create(&scratch.join(SESSION))?.write_all(&bytes)
}

/// Makes the empty `verdict` in `scratch`, and returns its path: the file stays readable for this user,
/// whichever user fills it.
///
/// # Errors
/// An error of the file system.
pub fn make_verdict(scratch: &Path) -> io::Result<PathBuf> {
    let path = scratch.join(VERDICT);
    create(&path)?;
    Ok(path)
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Reads the order beside the images directory that is open as `images`; `None` if there is none, or none that
/// can be trusted.
pub fn beside(images: &File) -> Option<Handover> {
    let (scratch, owner) = private_scratch(images)?;
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = |name: &str, access: OFlags| -> Option<File> {
        // A FIFO would be waited for.
        let flags = flags | OFlags::NONBLOCK | access;
        let file: OwnedFd = openat(scratch.as_fd(), name, flags, Mode::empty()).ok()?;
        let stat = fstat(&file).ok()?;
        private(&stat, FileType::RegularFile, Some(owner))?;
        // Another name of it may be a file that the owner could not write.
        (stat.st_nlink == 1).then(|| File::from(file))
    };
    let mut bytes = Vec::new();
    open(SESSION, OFlags::RDONLY)?
        .take(MAX_BYTES)
        .read_to_end(&mut bytes)
        .ok()?;
    let mut parts = bytes.split(|byte| *byte == 0);
    let (session, socket, seal_by) = (parts.next()?, parts.next()?, parts.next()?);
    let whole = !session.is_empty() && !socket.is_empty() && parts.next()?.is_empty();
    let seal_by = match std::str::from_utf8(seal_by).ok()? {
        "" => None,
        time => Some(time.parse().ok()?),
    };
    Some(Handover {
        session: whole
            .then(|| std::str::from_utf8(session).ok())??
            .to_owned(),
        socket: OsStr::from_bytes(socket).into(),
        seal_by,
        verdict: open(VERDICT, OFlags::WRONLY)?,
    })
}

/// Gives the listening socket at `socket`, on the same file system, its name in `scratch`.
///
/// # Errors
/// An error of the file system.
pub fn link_placement(scratch: &Path, socket: &Path) -> io::Result<()> {
    std::fs::hard_link(socket, scratch.join(PLACEMENT))
}

/// Waits for the memory of a restore whose images directory is open as `images`. Returns true once all of it is there, or
/// if the restore does not wait for it.
///
/// # Errors
/// The memory will not come.
pub fn await_placement(images: &File) -> io::Result<bool> {
    let Some(socket) = placement_beside(images) else {
        return Ok(true);
    };
    let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
    let mut reply = Vec::new();
    let stream = UnixStream::connect(path)?;
    let limit = PLACED.len() as u64 + 1;
    stream.take(limit).read_to_end(&mut reply)?;
    Ok(reply == PLACED)
}

/// Opens the path of the socket beside the images directory that is open as `images`; `None` if there is none, or none
/// that can be trusted.
fn placement_beside(images: &File) -> Option<OwnedFd> {
    let (scratch, owner) = private_scratch(images)?;
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::PATH;
    let socket = openat(&scratch, PLACEMENT, flags, Mode::empty()).ok()?;
    let stat = fstat(&socket).ok()?;
    let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
    (is_socket && stat.st_uid == owner).then_some(socket)
}

/// Opens the directory above `images` and returns it with its owner, if both belong to one user and are closed to others.
fn private_scratch(images: &File) -> Option<(OwnedFd, u32)> {
    let owner = private(&fstat(images).ok()?, FileType::Directory, None)?;
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::DIRECTORY | OFlags::RDONLY;
    let scratch = openat(images, "..", flags, Mode::empty()).ok()?;
    private(&fstat(&scratch).ok()?, FileType::Directory, Some(owner))?;
    Some((scratch, owner))
}

/// Returns the owner, if the file is of that type, closed to all other users, and belongs to `owner` if one is
/// given.
fn private(stat: &Stat, file_type: FileType, owner: Option<u32>) -> Option<u32> {
    let good = FileType::from_raw_mode(stat.st_mode) == file_type
        && stat.st_mode & 0o077 == 0
        && owner.is_none_or(|owner| owner == stat.st_uid);
    good.then_some(stat.st_uid)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::scratch::Scratch;

    fn scratch() -> (tempfile::TempDir, Scratch, PathBuf) {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::within(parent.path(), "dump").unwrap();
        let images = scratch.subdirectory("images").unwrap();
        make_verdict(scratch.path()).unwrap();
        let order = SealOrder {
            session: "5e55",
            socket: Path::new("/run/a b.sock"),
            seal_by: Some("1234567".parse().unwrap()),
        };
        write(scratch.path(), &order).unwrap();
        (parent, scratch, images)
    }

    fn read(images: &Path) -> Option<Handover> {
        beside(&File::open(images).unwrap())
    }

    #[test]
    fn session_and_socket_round_trip_and_the_verdict_is_writable() {
        let (_parent, scratch, images) = scratch();
        let mut handover = read(&images).unwrap();
        assert_eq!(handover.session, "5e55");
        assert_eq!(handover.socket, Path::new("/run/a b.sock"));
        assert_eq!(handover.seal_by.unwrap().to_string(), "1234567");
        handover.verdict.write_all(b"sealed").unwrap();
        let verdict = fs::read(scratch.path().join("verdict")).unwrap();
        assert_eq!(verdict, b"sealed");
    }

    #[test]
    fn a_restore_waits_until_its_memory_is_there_and_fails_if_it_does_not_come() {
        use std::os::unix::net::UnixListener;

        let (_parent, scratch, images) = scratch();
        let images = File::open(images).unwrap();
        // It is the restore of a whole directory, or of a stream.
        assert!(await_placement(&images).unwrap());
        let work = scratch.subdirectory("work").unwrap();
        let socket = work.join("lazy-pages.socket");
        let listener = UnixListener::bind(&socket).unwrap();
        link_placement(scratch.path(), &socket).unwrap();
        for (reply, is_placed) in [(PLACED, true), (b"plac", false), (b"placed!", false)] {
            std::thread::scope(|scope| {
                let script = scope.spawn(|| await_placement(&images));
                let (mut connection, _) = listener.accept().unwrap();
                connection.write_all(reply).unwrap();
                drop(connection);
                assert_eq!(script.join().unwrap().unwrap(), is_placed);
            });
        }
        drop(listener);
        assert!(await_placement(&images).is_err());
    }

    #[test]
    fn what_others_may_have_put_there_is_not_believed() {
        let spoil: [fn(&Path); 8] = [
            |scratch| fs::set_permissions(scratch, Permissions::from_mode(0o755)).unwrap(),
            |scratch| {
                fs::set_permissions(scratch.join("session"), Permissions::from_mode(0o644))
                    .unwrap();
            },
            |scratch| {
                fs::set_permissions(scratch.join("images"), Permissions::from_mode(0o750)).unwrap();
            },
            |scratch| fs::hard_link(scratch.join("verdict"), scratch.join("passwd")).unwrap(),
            |scratch| {
                fs::remove_file(scratch.join("verdict")).unwrap();
                std::os::unix::fs::symlink("session", scratch.join("verdict")).unwrap();
            },
            |scratch| fs::write(scratch.join("session"), b"5e55").unwrap(),
            |scratch| fs::write(scratch.join("session"), b"5e55\0/run/s\0soon\0").unwrap(),
            |scratch| fs::remove_file(scratch.join("session")).unwrap(),
        ];
        for (number, spoil) in spoil.iter().enumerate() {
            let (_parent, scratch, images) = scratch();
            spoil(scratch.path());
            assert!(read(&images).is_none(), "{number}");
        }
        if rustix::process::geteuid().is_root() {
            let (_parent, scratch, images) = scratch();
            std::os::unix::fs::chown(scratch.path(), Some(65_534), None).unwrap();
            assert!(read(&images).is_none());
        }
    }
}
