//! An images directory that a caller handed over as a descriptor: files are opened relative to it, and never
//! through a symbolic link.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use permafrost_protocol::control::{self, ErrorCode};
use permafrost_protocol::images::ImageName;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::frame::MAX_IMAGE_BYTES;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};

/// An images directory.
pub(super) struct ImagesDir(OwnedFd);

/// Address spaces whose pages came another way: their pagemaps and pages are no small images.
#[derive(Clone, Debug, Default)]
pub(super) struct Served {
    /// Each, with the `pages_id` that it got.
    pub(super) spaces: Vec<(SpaceId, u32)>,
}

impl ImagesDir {
    /// Takes the descriptor of a directory.
    pub(super) fn new(fd: OwnedFd) -> Result<Self, control::Error> {
        let stat = rustix::fs::fstat(&fd)
            .map_err(|errno| failed("stat images directory", &errno.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return Err(control::Error {
                code: ErrorCode::Invalid.into(),
                message: "the descriptor handed over is no directory".to_owned(),
                hint: "hand over the images directory".to_owned(),
            });
        }
        Ok(Self(fd))
    }

    /// Names of the small images, sorted: CRIU's files but for what was `served`. Logs, pid files and the like are
    /// nobody's image.
    pub(super) fn small_images(&self, served: &Served) -> Result<Vec<String>, control::Error> {
        let mut names = self
            .files()
            .map_err(|error| failed("list images directory", &error))?;
        names.retain(|name| match ImageName::parse(name) {
            ImageName::Pagemap(id) => !served.spaces.iter().any(|(space, _)| *space == id),
            ImageName::Pages(id) => !served.spaces.iter().any(|(_, pages_id)| *pages_id == id),
            ImageName::StatsDump => true,
            _ => name.ends_with(".img"),
        });
        Ok(names)
    }

    fn files(&self) -> io::Result<Vec<String>> {
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
                    let stat = rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW)?;
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
    }

    /// A small image, whole.
    pub(super) fn read(&self, name: &str) -> Result<Vec<u8>, control::Error> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = rustix::fs::openat(&self.0, name, flags, Mode::empty());
        let file = opened
            .map(File::from)
            .map_err(|errno| failed(&format!("open image {name}"), &errno.into()))?;
        let mut bytes = Vec::new();
        file.take(MAX_IMAGE_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| failed(&format!("read image {name}"), &error))?;
        if bytes.len() as u64 > MAX_IMAGE_BYTES {
            return Err(control::Error {
                code: ErrorCode::Invalid.into(),
                message: format!("image {name} is longer than {MAX_IMAGE_BYTES} bytes"),
                hint: String::new(),
            });
        }
        Ok(bytes)
    }

    /// Creates a file that must not be there yet, readable by its owner only: images hold a process's secrets.
    pub(super) fn create(&self, name: &str) -> io::Result<File> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?;
        Ok(File::from(made))
    }

    /// Removes a file.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::empty())?)
    }
}

/// What the system did not do.
pub(super) fn failed(action: &str, error: &io::Error) -> control::Error {
    control::Error {
        code: ErrorCode::Internal.into(),
        message: format!("{action}: {error}"),
        hint: String::new(),
    }
}
