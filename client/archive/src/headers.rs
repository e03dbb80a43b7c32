//! Checks of the headers of a tar's members, when an archive is taken apart and when it is put together.

use std::collections::HashSet;
use std::io::Read;

use tar::{Entry, EntryType};

use crate::paths::{self, Paths};
use crate::{ArchiveError, compression};

/// Most records of a member's pax header.
const MAX_RECORDS: usize = 4096;

/// Headers of the members so far.
#[derive(Default)]
pub(crate) struct Headers {
    paths: Paths,
    members: usize,
}

impl Headers {
    /// Checks the headers of the next member, of at most `limit`. Returns the path of a file with contents; `None` for
    /// a directory or a link.
    pub(crate) fn check(
        &mut self,
        entry: &mut Entry<'_, impl Read>,
        limit: usize,
    ) -> Result<Option<String>, ArchiveError> {
        self.members += 1;
        if self.members > limit {
            return Err(ArchiveError::TooMany { limit });
        }
        let kind = entry.header().entry_type();
        let stored_path = entry.path_bytes().into_owned();
        let target = entry.link_name_bytes().unwrap_or_default().into_owned();
        let path = self.paths.add(&stored_path, kind)?;
        match kind {
            EntryType::Directory => {}
            // Some programs take a file whose name ends with a slash for a directory, and its contents for headers.
            EntryType::Regular if !path.is_empty() && !stored_path.ends_with(b"/") => {}
            EntryType::Symlink if !path.is_empty() => paths::check_symlink(&path, &target)?,
            EntryType::Link if !path.is_empty() => self.paths.check_hard_link(&path, &target)?,
            other => {
                let kind = kind_of(other);
                return Err(ArchiveError::Special { path, kind });
            }
        }
        check_records(entry, &path, &stored_path, &target)?;
        if kind == EntryType::Regular {
            return Ok(Some(path));
        }
        // Such a member has no contents; some programs write a length all the same, and none is read then.
        if entry.size() != 0 {
            let kind = "directory or a link with contents";
            return Err(ArchiveError::Special { path, kind });
        }
        Ok(None)
    }
}

/// Checks the pax header of the member at `path`. Of two records with one key, and of a long name of GNU's and one of
/// pax, some programs take the first and some the last. The contents of a sparse member are not the file's.
fn check_records(
    entry: &mut Entry<'_, impl Read>,
    path: &str,
    stored_path: &[u8],
    target: &[u8],
) -> Result<(), ArchiveError> {
    let ambiguous = |reason| ArchiveError::Ambiguous {
        path: path.to_owned(),
        reason,
    };
    let records = entry.pax_extensions();
    let records = records.map_err(|error| compression::explain(error, path))?;
    let mut keys = HashSet::new();
    for record in records.into_iter().flatten() {
        let record = record.map_err(|error| compression::explain(error, path))?;
        let (key, value) = (record.key_bytes(), record.value_bytes());
        if key.starts_with(b"GNU.sparse.") {
            return Err(ArchiveError::Special {
                path: path.to_owned(),
                kind: "sparse file",
            });
        }
        if !keys.insert(key) {
            return Err(ambiguous("two pax records have one key"));
        }
        if keys.len() > MAX_RECORDS {
            return Err(ambiguous("there are more than 4,096 pax records"));
        }
        let is_used = match key {
            b"path" => value == stored_path,
            b"linkpath" => value == target,
            b"size" => is_number(value),
            _ => continue,
        };
        if !is_used || value.is_empty() {
            return Err(ambiguous(
                "a pax record for the path, the link or the size is not the one that counts",
            ));
        }
    }
    Ok(())
}

/// Returns true for a number that all programs read alike.
fn is_number(value: &[u8]) -> bool {
    let digits = value.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(value).unwrap_or_default();
    digits && text.parse::<u64>().is_ok()
}

fn kind_of(kind: EntryType) -> &'static str {
    match kind {
        EntryType::Regular => "file without a name",
        EntryType::Symlink | EntryType::Link => "link without a name",
        EntryType::Char | EntryType::Block => "device",
        EntryType::Fifo => "FIFO",
        EntryType::GNUSparse => "sparse file",
        EntryType::XGlobalHeader => "header for all members",
        _ => "member of an unknown kind",
    }
}
