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
use tar::{Archive, Entry};

use crate::headers::Headers;
use crate::index::{Content, Index, NUMBERED_PREFIX, StoredFile};
use crate::skeleton::{Recorder, Skeleton};
use crate::{ArchiveError, INDEX_NAME, compression, pages};

/// Directory of CRIU's images in an archive.
const IMAGES_PREFIX: &str = "checkpoint/";

/// Members that every archive has, whoever wrote it.
const REQUIRED: [&str; 3] = ["checkpoint/inventory.img", "config.dump", "spec.dump"];

/// Most members: two files for each are images of the checkpoint at worst, and one is the index.
pub(crate) const MAX_MEMBERS: usize = MAX_SMALL_IMAGES / 2 - 1;

/// Largest member, bytes: 1 TiB.
const MAX_MEMBER_BYTES: u64 = 1 << 40;

/// Largest pagemap, bytes: 1 GiB, some 40 million runs of pages.
const MAX_PAGEMAP_BYTES: u64 = 1 << 30;

/// Copies of the headers at the end: two in this process, as they came and encoded, and one in the index.
const HEADER_COPIES: u64 = 3;

/// Bytes copied at once.
const CHUNK: usize = 256 << 10;

/// Limits of an archive that is taken apart.
#[derive(Clone, Copy, Debug)]
pub struct ArchiveLimits {
    /// Number of members.
    pub members: usize,
    /// Size of a member, bytes.
    pub member_bytes: u64,
    /// Size of all files that are made of the members, and of the headers, bytes.
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
        headers: Headers::default(),
        names: HashSet::from([INDEX_NAME.to_owned()]),
        pagemaps: Vec::new(),
        missing: REQUIRED.to_vec(),
        parts: Vec::new(),
        numbered: 0,
        written_bytes: 0,
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
    headers: Headers,
    /// Names of the files made so far.
    names: HashSet<String>,
    pagemaps: Vec<String>,
    missing: Vec<&'static str>,
    parts: Vec<Content>,
    /// Number of files that have a number for a name.
    numbered: u64,
    /// Bytes of all files made so far.
    written_bytes: u64,
    done: Unpacked,
}

impl Unpacking<'_> {
    fn member(&mut self, mut entry: Entry<'_, impl Read>) -> Result<(), ArchiveError> {
        self.done.members += 1;
        match self.headers.check(&mut entry, self.limits.members)? {
            Some(path) => self.file(entry, &path),
            None => Ok(()),
        }
    }

    fn file(&mut self, mut entry: Entry<'_, impl Read>, path: &str) -> Result<(), ArchiveError> {
        let bytes = entry.size();
        let image = self.image_name(path);
        let is_pagemap =
            image.is_some_and(|image| matches!(ImageName::parse(image), ImageName::Pagemap(_)));
        self.check_size(path, bytes, is_pagemap)?;
        self.missing.retain(|missing| *missing != path);
        let mut files = Vec::new();
        // The name under which the contents come out again.
        let name = match image {
            Some(image) if is_pagemap => {
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

    /// Checks the size that a header promises before any of it is written. A pagemap is written twice.
    fn check_size(&mut self, path: &str, bytes: u64, is_pagemap: bool) -> Result<(), ArchiveError> {
        let (limit, copies) = if is_pagemap {
            (self.limits.member_bytes.min(MAX_PAGEMAP_BYTES), 2)
        } else {
            (self.limits.member_bytes, 1)
        };
        if bytes > limit {
            return Err(ArchiveError::TooLarge {
                path: path.to_owned(),
                bytes,
                limit,
            });
        }
        self.done.bytes = self.done.bytes.saturating_add(bytes);
        self.written_bytes = self
            .written_bytes
            .saturating_add(bytes.saturating_mul(copies));
        self.check_room(path, bytes)
    }

    /// Checks that there is room for the files and the headers so far. The last of them is the member at `path`.
    fn check_room(&self, path: &str, bytes: u64) -> Result<(), ArchiveError> {
        let headers = self.skeleton.borrow().total as u64;
        let needed_bytes = headers
            .saturating_mul(HEADER_COPIES)
            .saturating_add(self.written_bytes);
        if needed_bytes > self.limits.total_bytes {
            return Err(ArchiveError::NoRoom {
                path: path.to_owned(),
                bytes,
                room_bytes: self.limits.total_bytes,
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
        let headers = self.skeleton.borrow().total as u64;
        self.check_room(INDEX_NAME, headers)?;
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
