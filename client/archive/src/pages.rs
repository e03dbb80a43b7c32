//! Checks that the pages of an archive can be stored page by page and come back as the same file.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::images::{Pagemap, pages_name};
use permafrost_protocol::pageserver::PE_PRESENT;

use crate::ArchiveError;

/// Checks that each of `pagemaps` in `images` has a pages file of its own, with the pages that it lists and no more.
pub(crate) fn check(images: &Path, pagemaps: &[String]) -> Result<(), ArchiveError> {
    let mut seen = HashSet::new();
    for name in pagemaps {
        let read = fs::read(images.join(name));
        let bytes = read.map_err(ArchiveError::io(format!("read {name}")))?;
        let pagemap = Pagemap::read(&bytes).map_err(|source| ArchiveError::Pagemap {
            name: name.clone(),
            source,
        })?;
        let pages = pages_name(pagemap.pages_id);
        if !seen.insert(pagemap.pages_id) {
            return Err(ArchiveError::SharedPages { pages });
        }
        let present = pagemap
            .entries
            .iter()
            .filter(|entry| entry.flags & PE_PRESENT != 0);
        let listed = present.fold(0_u64, |sum, entry| {
            sum.saturating_add(entry.nr_pages.saturating_mul(PAGE_BYTES))
        });
        let held = fs::metadata(images.join(&pages))
            .ok()
            .map(|metadata| metadata.len());
        if held != Some(listed) {
            return Err(ArchiveError::PagesDiffer {
                pages,
                bytes: held.unwrap_or(0),
                pagemap: name.clone(),
                listed,
            });
        }
    }
    Ok(())
}
