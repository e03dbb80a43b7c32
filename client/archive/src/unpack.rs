//! Takes an archive apart into an images directory.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::rc::Rc;

use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::{MAX_SMALL_IMAGES, is_plain_file_name};
use prost::Message;
use tar::{Archive, Entry, EntryType};

use crate::index::{Content, Index, NUMBERED_PREFIX, StoredFile};
use crate::paths::{self, Paths};
use crate::{ArchiveError, INDEX_NAME, compression, pages};

/// Directory of CRIU's images in an archive.
const IMAGES_PREFIX: &str = "checkpoint/";

/// Members that every archive has, whoever wrote it.
const REQUIRED: [&str; 3] = ["checkpoint/inventory.img", "config.dump", "spec.dump"];

/// Most members: two files for each are images of the checkpoint at worst, and one is the index.
const MAX_MEMBERS: usize = MAX_SMALL_IMAGES / 2 - 1;

/// Largest member, bytes: 1 TiB.
const MAX_MEMBER_BYTES: u64 = 1 << 40;

/// Most bytes of headers: they are collected in memory. CRIU's images need 512 each.
const MAX_HEADER_BYTES: usize = 128 << 20;

/// Bytes copied at once.
const CHUNK: usize = 256 << 10;

/// Length of a tar's block.
const BLOCK: usize = 512;

/// ArchiveLimits of an archive that is taken apart.
#[derive(Clone, Copy, Debug)]
pub struct ArchiveLimits {
    /// Number of members.
    pub members: usize,
    /// Size of a member, bytes.
    pub member_bytes: u64,
    /// Size of all members, bytes.
    pub total_bytes: u64,
}

impl ArchiveLimits {
    /// Returns the limits where there is room for `room_bytes`.
    #[must_use]
    pub fn with_room(room_bytes: u64) -> Self {
        Self {
            members: MAX_MEMBERS,
            member_bytes: MAX_MEMBER_BYTES,
            total_bytes: room_bytes,
        }
    }
}

/// Result of taking an archive apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unpacked {
    /// Number of members.
    pub members: u64,
    /// Size of all members, bytes.
    pub bytes: u64,
}

/// Takes an archive apart into `images`, an empty and private directory. It holds what an import takes, and a later
/// [`pack`](crate::pack) puts the same archive together again.
///
/// # Errors
/// The archive is damaged, exceeds a limit, has members that do not belong into one or lacks some; or an error of the
/// file system. What was written stays in `images`.
pub fn unpack(
    input: impl Read,
    images: &Path,
    limits: &ArchiveLimits,
) -> Result<Unpacked, ArchiveError> {
    let recorder = Recorder {
        input: compression::open(input)?,
        skeleton: Rc::default(),
    };
    let mut unpacking = Unpacking {
        images,
        limits,
        skeleton: recorder.skeleton.clone(),
        paths: Paths::default(),
        names: HashSet::from([INDEX_NAME.to_owned()]),
        pagemaps: Vec::new(),
        missing: REQUIRED.to_vec(),
        parts: Vec::new(),
        numbered: 0,
        done: Unpacked {
            members: 0,
            bytes: 0,
        },
    };
    let mut archive = Archive::new(recorder);
    // Members and their headers are taken one by one: the crate's own unpacking is not used.
    let entries = archive
        .entries()
        .map_err(|error| compression::explain(error, ""))?;
    for entry in entries {
        let entry = entry.map_err(|error| compression::explain(error, ""))?;
        unpacking.member(entry)?;
    }
    let mut rest = archive.into_inner();
    rest.end()?;
    unpacking.finish()
}

struct Unpacking<'a> {
    images: &'a Path,
    limits: &'a ArchiveLimits,
    skeleton: Rc<RefCell<Skeleton>>,
    paths: Paths,
    /// Names of the files made so far.
    names: HashSet<String>,
    pagemaps: Vec<String>,
    missing: Vec<&'static str>,
    parts: Vec<Content>,
    /// Number of files that have a number for a name.
    numbered: u64,
    done: Unpacked,
}

impl Unpacking<'_> {
    fn member(&mut self, mut entry: Entry<'_, impl Read>) -> Result<(), ArchiveError> {
        self.done.members += 1;
        if self.done.members > self.limits.members as u64 {
            return Err(ArchiveError::TooMany {
                limit: self.limits.members,
            });
        }
        let kind = entry.header().entry_type();
        let path = self
            .paths
            .add(&entry.path_bytes(), kind == EntryType::Symlink)?;
        refuse_sparse(&mut entry, &path)?;
        let target = entry.link_name_bytes().unwrap_or_default().into_owned();
        match kind {
            EntryType::Regular if !path.is_empty() => return self.file(entry, &path),
            EntryType::Directory => {}
            EntryType::Symlink => paths::check_symlink(&path, &target)?,
            EntryType::Link => paths::check_hard_link(&path, &target)?,
            other => {
                let kind = kind_of(other);
                return Err(ArchiveError::Special { path, kind });
            }
        }
        // Such a member has no contents; some programs write a length all the same, and none is read then.
        if entry.size() != 0 {
            let kind = "directory or a link with contents";
            return Err(ArchiveError::Special { path, kind });
        }
        Ok(())
    }

    fn file(&mut self, mut entry: Entry<'_, impl Read>, path: &str) -> Result<(), ArchiveError> {
        let bytes = entry.size();
        self.check_size(path, bytes)?;
        self.missing.retain(|missing| *missing != path);
        let mut files = Vec::new();
        // The name under which the contents come out again.
        let name = match self.image_name(path) {
            Some(image) if matches!(ImageName::parse(image), ImageName::Pagemap(_)) => {
                files.push(self.create(image.to_owned())?);
                self.pagemaps.push(image.to_owned());
                self.next_number()
            }
            Some(image) => image.to_owned(),
            None => self.next_number(),
        };
        files.push(self.create(name.clone())?);

        // What was read since the last contents is the header of these.
        let headers = self.skeleton.borrow_mut().begin_contents();
        self.parts.push(Content::Bytes(headers));
        let crc32 = copy(&mut entry, bytes, &mut files, path)?;
        self.skeleton.borrow_mut().end_contents();
        self.parts.push(Content::File(StoredFile {
            name,
            len_bytes: bytes,
            crc32,
        }));
        Ok(())
    }

    /// Checks the size that a header promises before any of it is written.
    fn check_size(&mut self, path: &str, bytes: u64) -> Result<(), ArchiveError> {
        let ArchiveLimits {
            member_bytes,
            total_bytes,
            ..
        } = *self.limits;
        if bytes > member_bytes {
            return Err(ArchiveError::TooLarge {
                path: path.to_owned(),
                bytes,
                limit: member_bytes,
            });
        }
        self.done.bytes = self.done.bytes.saturating_add(bytes);
        if self.done.bytes > total_bytes {
            return Err(ArchiveError::NoRoom {
                path: path.to_owned(),
                bytes,
                room_bytes: total_bytes,
            });
        }
        Ok(())
    }

    /// Returns the name under which an image is imported; `None` for a member that is none, or whose name is taken.
    fn image_name<'p>(&self, path: &'p str) -> Option<&'p str> {
        // podman keeps CRIU's statistics beside the images.
        let name = path
            .strip_prefix(IMAGES_PREFIX)
            .or((path == "stats-dump").then_some(path))?;
        let imported = name.ends_with(".img") || matches!(name, "stats-dump" | "descriptors.json");
        let free = !name.starts_with(NUMBERED_PREFIX) && !self.names.contains(name);
        (imported && free && is_plain_file_name(name)).then_some(name)
    }

    fn next_number(&mut self) -> String {
        self.numbered += 1;
        format!("{NUMBERED_PREFIX}{}.img", self.numbered)
    }

    fn create(&mut self, name: String) -> Result<File, ArchiveError> {
        let made = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.images.join(&name));
        let file = made.map_err(ArchiveError::io(format!("create {name}")))?;
        self.names.insert(name);
        Ok(file)
    }

    fn finish(mut self) -> Result<Unpacked, ArchiveError> {
        if let Some(path) = self.missing.first() {
            return Err(ArchiveError::Missing { path });
        }
        pages::check(self.images, &self.pagemaps)?;
        let end = self.skeleton.borrow_mut().begin_contents();
        self.parts.push(Content::Bytes(end));
        let index = Index::new(std::mem::take(&mut self.parts)).encode_to_vec();
        let mut file = OpenOptions::new();
        let file = file
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.images.join(INDEX_NAME));
        file.and_then(|mut file| file.write_all(&index))
            .map_err(ArchiveError::io(format!("write {INDEX_NAME}")))?;
        Ok(self.done)
    }
}

/// Refuses a sparse member: its contents in the tar are not the file's.
fn refuse_sparse(entry: &mut Entry<'_, impl Read>, path: &str) -> Result<(), ArchiveError> {
    let extensions = entry.pax_extensions();
    let extensions = extensions.map_err(|error| compression::explain(error, path))?;
    for extension in extensions.into_iter().flatten() {
        let extension = extension.map_err(|error| compression::explain(error, path))?;
        if extension.key_bytes().starts_with(b"GNU.sparse.") {
            return Err(ArchiveError::Special {
                path: path.to_owned(),
                kind: "sparse file",
            });
        }
    }
    Ok(())
}

fn kind_of(kind: EntryType) -> &'static str {
    match kind {
        EntryType::Regular => "file without a name",
        EntryType::Char | EntryType::Block => "device",
        EntryType::Fifo => "FIFO",
        EntryType::GNUSparse => "sparse file",
        EntryType::XGlobalHeader => "header for all members",
        _ => "member of an unknown kind",
    }
}

/// Copies the contents of a member into `files`, and returns their CRC32.
fn copy(
    entry: &mut impl Read,
    bytes: u64,
    files: &mut [File],
    path: &str,
) -> Result<u32, ArchiveError> {
    let mut digest = crc32fast::Hasher::new();
    let mut buffer = vec![0; CHUNK.min(usize::try_from(bytes).unwrap_or(CHUNK))];
    let mut left = bytes;
    while left > 0 {
        let read = match entry.read(&mut buffer) {
            Ok(0) => {
                return Err(ArchiveError::Truncated {
                    path: path.to_owned(),
                });
            }
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(compression::explain(error, path)),
        };
        left = left.saturating_sub(read as u64);
        digest.update(&buffer[..read]);
        for file in &mut *files {
            let written = file.write_all(&buffer[..read]);
            written.map_err(ArchiveError::io(format!("unpack {path}")))?;
        }
    }
    Ok(digest.finalize())
}

/// Bytes of a tar that are not the contents of a member.
#[derive(Default)]
struct Skeleton {
    bytes: Vec<u8>,
    /// Number of bytes in all, also those that were taken.
    total: usize,
    in_contents: bool,
}

impl Skeleton {
    fn begin_contents(&mut self) -> Vec<u8> {
        self.in_contents = true;
        std::mem::take(&mut self.bytes)
    }

    fn end_contents(&mut self) {
        self.in_contents = false;
    }
}

/// Passes a tar on, and keeps what is not contents.
struct Recorder<R> {
    input: R,
    skeleton: Rc<RefCell<Skeleton>>,
}

impl<R: Read> Read for Recorder<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(into)?;
        let mut skeleton = self.skeleton.borrow_mut();
        if !skeleton.in_contents {
            skeleton.total += read;
            if skeleton.total > MAX_HEADER_BYTES {
                return Err(io::Error::other(ArchiveError::Headers {
                    limit: MAX_HEADER_BYTES,
                }));
            }
            skeleton.bytes.extend_from_slice(&into[..read]);
        }
        Ok(read)
    }
}

impl<R: Read> Recorder<R> {
    /// Reads the rest of the tar, whose end was found: a block of zeros, and nothing but zeros behind it.
    fn end(&mut self) -> Result<(), ArchiveError> {
        let ended = {
            let skeleton = self.skeleton.borrow();
            let at = skeleton.bytes.len().checked_sub(BLOCK);
            at.is_some_and(|at| skeleton.bytes[at..].iter().all(|byte| *byte == 0))
        };
        if !ended {
            return Err(ArchiveError::Truncated {
                path: String::new(),
            });
        }
        let mut buffer = vec![0; CHUNK];
        loop {
            match self.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) if buffer[..read].iter().any(|byte| *byte != 0) => {
                    return Err(ArchiveError::BehindEnd);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(compression::explain(error, "")),
            }
        }
    }
}
