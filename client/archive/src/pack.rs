//! Puts an archive together again, from an images directory.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::rc::Rc;

use permafrost_protocol::manifest::is_plain_file_name;
use tar::Archive;

use crate::compression::{self, Output};
use crate::headers::Headers;
use crate::index::{Content, Index, Part, StoredFile};
use crate::skeleton::{Recorder, Skeleton};
use crate::unpack::MAX_MEMBERS;
use crate::{ArchiveCompression, ArchiveError, INDEX_NAME};

/// Longest index read: [`unpack`](crate::unpack) writes none that is longer.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// Bytes copied at once.
const CHUNK: usize = 256 << 10;

/// Result of putting an archive together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Number of members with contents.
    pub files: u64,
    /// Size of the tar before compression, bytes.
    pub bytes: u64,
}

/// Writes the archive that `images` was made from, in the compression that is asked for. `progress` receives the bytes
/// written so far, before compression; it returns false to give up.
///
/// # Errors
/// The directory was not made from an archive, or not as it was; or from headers that [`unpack`](crate::unpack) refuses;
/// or an error of the file system.
pub fn pack(
    images: &Path,
    compression: ArchiveCompression,
    output: impl Write,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Packed, ArchiveError> {
    let index = read_index(images)?;
    check_headers(&index, progress)?;
    let writing = || ArchiveError::io("write the archive");
    let mut output = Output::new(compression, output).map_err(writing())?;
    let mut packed = Packed { files: 0, bytes: 0 };
    for part in index.parts {
        match part.content {
            None => return Err(ArchiveError::BadIndex),
            Some(Content::Bytes(bytes)) => {
                output.write_all(&bytes).map_err(writing())?;
                packed.bytes += bytes.len() as u64;
            }
            Some(Content::File(file)) => {
                copy(images, &file, &mut output, &mut |bytes| {
                    packed.bytes += bytes;
                    progress(packed.bytes)
                })?;
                packed.files += 1;
            }
        }
    }
    let mut output = output.finish().map_err(writing())?;
    output.flush().map_err(writing())?;
    Ok(packed)
}

fn read_index(images: &Path) -> Result<Index, ArchiveError> {
    let file = match File::open(images.join(INDEX_NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ArchiveError::NoArchive);
        }
        opened => opened.map_err(ArchiveError::io(format!("open {INDEX_NAME}")))?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_INDEX_BYTES)
        .read_to_end(&mut bytes)
        .map_err(ArchiveError::io(format!("read {INDEX_NAME}")))?;
    Index::read(&bytes)
}

/// Checks the headers as [`unpack`](crate::unpack) does: an index may also come from an images directory that was stored,
/// and whoever unpacks the archive is as safe then. The contents of members count as zeros.
fn check_headers(index: &Index, progress: &mut dyn FnMut(u64) -> bool) -> Result<(), ArchiveError> {
    let skeleton = Rc::new(RefCell::new(Skeleton::default()));
    let mut archive = Archive::new(Recorder {
        input: IndexReader {
            parts: index.parts.iter(),
            bytes: &[],
            file_bytes: 0,
            skeleton: skeleton.clone(),
        },
        skeleton: skeleton.clone(),
    });
    let mut headers = Headers::default();
    let mut buffer = vec![0; CHUNK];
    let entries = archive
        .entries()
        .map_err(|error| compression::explain(error, ""))?;
    for entry in entries {
        let mut entry = entry.map_err(|error| compression::explain(error, ""))?;
        let Some(path) = headers.check(&mut entry, MAX_MEMBERS)? else {
            continue;
        };
        skeleton.borrow_mut().begin_contents();
        let mut left = entry.size();
        while left > 0 {
            let read = entry.read(&mut buffer);
            let read = read.map_err(|error| compression::explain(error, &path))? as u64;
            if read == 0 {
                return Err(ArchiveError::Truncated { path });
            }
            left = left.saturating_sub(read);
            if !progress(0) {
                return Err(ArchiveError::Interrupted);
            }
        }
        skeleton.borrow_mut().end_contents();
    }
    archive.into_inner().end()
}

/// The tar of an index, with zeros for the contents of members. Files must be where the headers have contents, and
/// nowhere else.
struct IndexReader<'a> {
    parts: std::slice::Iter<'a, Part>,
    /// Bytes left of a part with headers.
    bytes: &'a [u8],
    /// Bytes left of a part with a file.
    file_bytes: u64,
    skeleton: Rc<RefCell<Skeleton>>,
}

impl Read for IndexReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let bad_index = || io::Error::other(ArchiveError::BadIndex);
        while self.bytes.is_empty() && self.file_bytes == 0 {
            match self.parts.next().map(|part| &part.content) {
                None => return Ok(0),
                Some(None) => return Err(bad_index()),
                Some(Some(Content::Bytes(bytes))) => self.bytes = bytes,
                Some(Some(Content::File(file))) => self.file_bytes = file.len_bytes,
            }
        }
        if self.skeleton.borrow().in_contents != self.bytes.is_empty() {
            return Err(bad_index());
        }
        if !self.bytes.is_empty() {
            return self.bytes.read(into);
        }
        let left = usize::try_from(self.file_bytes).unwrap_or(usize::MAX);
        let read = left.min(into.len());
        into[..read].fill(0);
        self.file_bytes -= read as u64;
        Ok(read)
    }
}

/// Copies the contents of a member, and compares them with what was stored.
fn copy(
    images: &Path,
    file: &StoredFile,
    output: &mut impl Write,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<(), ArchiveError> {
    let altered = || ArchiveError::Altered {
        name: file.name.clone(),
    };
    // The index comes from the store, and may name nothing outside of the directory all the same.
    if !is_plain_file_name(&file.name) {
        return Err(ArchiveError::BadIndex);
    }
    let mut stored = match File::open(images.join(&file.name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(altered()),
        opened => opened.map_err(ArchiveError::io(format!("open {}", file.name)))?,
    };
    let mut digest = crc32fast::Hasher::new();
    let mut buffer = vec![0; CHUNK];
    let mut left = file.len_bytes;
    loop {
        let read = match stored.read(&mut buffer) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(ArchiveError::io(format!("read {}", file.name))(error)),
        };
        if read == 0 {
            break;
        }
        left = left.checked_sub(read as u64).ok_or_else(altered)?;
        digest.update(&buffer[..read]);
        let written = output.write_all(&buffer[..read]);
        written.map_err(ArchiveError::io("write the archive"))?;
        if !progress(read as u64) {
            return Err(ArchiveError::Interrupted);
        }
    }
    if left != 0 || digest.finalize() != file.crc32 {
        return Err(altered());
    }
    Ok(())
}
