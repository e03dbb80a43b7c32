//! Checks that the pages of an archive can be stored page by page and come back as the same file.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::images::{ImageError, PagemapStream, pages_name};
use permafrost_protocol::pageserver::PE_PRESENT;

use crate::ArchiveError;

/// Bytes of a pagemap read at once.
const CHUNK: usize = 256 << 10;

/// Checks that each of `pagemaps` in `images` has a pages file of its own, with the pages that it lists and no more.
pub(crate) fn check(images: &Path, pagemaps: &[String]) -> Result<(), ArchiveError> {
    let mut seen = HashSet::new();
    for name in pagemaps {
        let (pages_id, listed) = read_pagemap(images, name)?;
        let pages = pages_name(pages_id);
        if !seen.insert(pages_id) {
            return Err(ArchiveError::SharedPages { pages });
        }
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

/// Reads a pagemap. Returns N of its `pages-N.img`, and the size of the pages that it lists, bytes.
fn read_pagemap(images: &Path, name: &str) -> Result<(u32, u64), ArchiveError> {
    let damaged = |source| ArchiveError::Pagemap {
        name: name.to_owned(),
        source,
    };
    let reading = || ArchiveError::io(format!("read {name}"));
    let mut file = File::open(images.join(name)).map_err(reading())?;
    let mut buffer = vec![0; CHUNK];
    let mut pagemap = PagemapStream::default();
    let mut listed = 0_u64;
    loop {
        let read = match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(reading()(error)),
        };
        let entries = pagemap.push(&buffer[..read]).map_err(damaged)?;
        let present = entries.iter().filter(|entry| entry.flags & PE_PRESENT != 0);
        listed = present.fold(listed, |sum, entry| {
            sum.saturating_add(entry.nr_pages.saturating_mul(PAGE_BYTES))
        });
    }
    let headless = ImageError::MissingRecord {
        record: "pagemap head",
    };
    let pages_id = pagemap.pages_id().ok_or_else(|| damaged(headless))?;
    pagemap.finish().map_err(damaged)?;
    Ok((pages_id, listed))
}
