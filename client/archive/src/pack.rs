//! Puts an archive together again, from an images directory.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use permafrost_protocol::manifest::is_plain_file_name;

use crate::compression::Output;
use crate::index::{Content, Index, StoredFile};
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
/// The directory was not made from an archive, or not as it was; or an error of the file system.
pub fn pack(
    images: &Path,
    compression: ArchiveCompression,
    output: impl Write,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Packed, ArchiveError> {
    let index = read_index(images)?;
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
