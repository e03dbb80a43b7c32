//! Verifies everything of a checkpoint: manifest, map pages, images and pages.

use std::collections::HashMap;
use std::sync::Arc;

use permafrost_agent::host::arguments::in_full;
use permafrost_pmem::{
    CopyId, MediaError, PAGE_SIZE, PageError, PageMap, RunKind, StoredCheckpoint, StoredRun,
};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control;
use permafrost_protocol::manifest::{Image, Manifest, SpaceType};

use super::dump::map_root;
use super::error::is_away;
use super::reader::checkpoint_name;
use super::{Store, StoreError, manifest_of};
use crate::{MissingObject, ReadingError, RegionMediaError};

/// Maximum number of damaged places that are listed one by one.
const MAX_DAMAGE: usize = 64;

/// Maximum number of damaged pages that are healed one by one. Beyond that, a fresh copy is fetched.
const MAX_DAMAGED_PAGES: usize = 1024;

/// Number of pages that one word of [`PagesRead`] covers.
const WORD: u64 = u64::BITS as u64;

/// Words that are kept together.
const WORDS: usize = 64;

/// Result of [`Store::check`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Number of pages of the checkpoint that were verified, or found damaged, zero and shared ones included.
    pub pages: u64,
    /// Number of bytes read from the medium.
    pub read_bytes: u64,
    /// Damaged places by name and address: the first 64.
    pub damage: Vec<String>,
    /// The damaged pages of maps that are intact: the first 1,024.
    pub pages_damaged: Vec<DamagedPage>,
    /// True if there is damage beyond those pages: in a map, a root or the manifest, or in more pages than that.
    pub damaged_beyond: bool,
    /// Number of pages in a cold tier that were not verified: it was not asked for them, or is away.
    pub unverified_pages: u64,
    /// Reason why the cold tier gave none of those that it was asked for; empty for none.
    pub away: String,
    /// True if the check was stopped before its end.
    pub stopped: bool,
}

/// Pages in a cold tier, in a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColdPages {
    /// They are counted, and not verified: their objects are not fetched.
    Leave,
    /// They are fetched and verified.
    Fetch,
}

/// Part of a checkpoint that a page belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// The address space at this place in the manifest, from 0.
    Space(usize),
    /// The small image of this name.
    Image(String),
}

/// A page whose bytes are not those that were sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedPage {
    /// Object that the page belongs to.
    pub object: Object,
    /// Index of the page in the object's map.
    pub index: u64,
}

/// Pages of the region that were read and found intact, so that pages that checkpoints share are read once.
/// Takes a bit for each page of the segments read, 32 MiB for a region of a TiB.
#[derive(Default)]
pub struct PagesRead(HashMap<u64, Box<[u64; WORDS]>>);

impl PagesRead {
    fn word(page: u64) -> (u64, usize, u64) {
        let word = page / WORD;
        let words = WORDS as u64;
        let at = (word % words) as usize;
        (word / words, at, 1 << (page % WORD))
    }

    fn has(&self, page: u64) -> bool {
        let (chunk, at, bit) = Self::word(page);
        self.0.get(&chunk).is_some_and(|words| words[at] & bit != 0)
    }

    fn add(&mut self, page: u64, pages: u32) {
        for page in (page..).take(pages as usize) {
            let (chunk, at, bit) = Self::word(page);
            self.0.entry(chunk).or_insert_with(|| Box::new([0; WORDS]))[at] |= bit;
        }
    }

    /// Returns the next pages of a run that were not read yet: the number of pages of the run before them, and
    /// their number.
    fn missing(&self, first: u64, pages: u32, from: u32) -> Option<(u32, u32)> {
        let is_missing = |skip: &u32| !self.has(first + u64::from(*skip));
        let begin = (from..pages).find(is_missing)?;
        let end = (begin..pages).find(|skip| !is_missing(skip));
        Some((begin, end.unwrap_or(pages) - begin))
    }
}

/// A checkpoint that the region holds, with its catalog record if there is one.
#[derive(Clone, Debug)]
pub struct HeldCheckpoint {
    /// Checkpoint id, 32 hex digits.
    pub id: String,
    /// Catalog record; `None` for a checkpoint whose manifest was damaged when the catalog was built.
    pub record: Option<control::Checkpoint>,
    /// Bytes of its segments, shared ones included.
    pub bytes: u64,
    /// The copy itself: another copy with the same id may lie elsewhere in the region.
    pub copy: CopyId,
}

impl HeldCheckpoint {
    /// Returns the checkpoint's name as people write it.
    #[must_use]
    pub fn name(&self) -> String {
        self.record
            .as_ref()
            .map_or_else(|| format!("checkpoint {}", self.id), checkpoint_name)
    }

    /// Returns the job; empty if unknown.
    #[must_use]
    pub fn job(&self) -> &str {
        self.record.as_ref().map_or("", |record| &record.job)
    }
}

impl Store {
    /// Returns the copy of a checkpoint that the region holds.
    #[must_use]
    pub fn held_copy(&self, id: &str) -> Option<HeldCheckpoint> {
        let checkpoint = self.checkpoint(id).ok()?;
        let record = match manifest_of(&checkpoint) {
            Ok(manifest) => Some(self.summary(&checkpoint, &manifest)),
            // The catalog may still have the record.
            Err(_) => self.catalog.list(None).ok().and_then(|records| {
                let mut records = records.into_iter();
                records.find(|record| record.id == id)
            }),
        };
        Some(HeldCheckpoint {
            id: id.to_owned(),
            record,
            bytes: checkpoint.segments() * self.region.usage().segment_bytes,
            copy: checkpoint.copy_id(),
        })
    }

    /// Returns the id of the store's copy of a checkpoint.
    #[must_use]
    pub fn copy(&self, id: &str) -> Option<CopyId> {
        let checkpoint = self.checkpoint(id).ok()?;
        Some(checkpoint.copy_id())
    }

    /// Returns the id of a generation that the store holds.
    #[must_use]
    pub fn id_here(&self, job: &str, generation: u64) -> Option<String> {
        let record = self.catalog.find(job, generation).ok().flatten()?;
        self.holds(&record.id).then_some(record.id)
    }

    /// Returns the ids of all checkpoints of a job in the catalog.
    ///
    /// # Errors
    /// The catalog cannot be read.
    pub fn ids_of(&self, job: &str) -> Result<Vec<String>, StoreError> {
        let records = self.catalog.list(Some(job))?.into_iter();
        Ok(records.map(|record| record.id).collect())
    }

    /// Rewrites damaged pages of one object of a checkpoint; each comes with its index and the bytes of another
    /// copy. Returns how many were damaged. Bytes that differ from the sealed ones are refused.
    ///
    /// # Errors
    /// The checkpoint is not here, or has no such object; the object's map is damaged; the bytes are not the sealed
    /// ones; the medium takes no write there. Pages before the one that failed are healed.
    pub fn heal_pages(
        &self,
        id: &str,
        object: &Object,
        pages: &[(u64, Box<[u8; PAGE_SIZE]>)],
    ) -> Result<u64, StoreError> {
        let checkpoint = self.checkpoint(id)?;
        let manifest = manifest_of(&checkpoint)?;
        let root = match object {
            Object::Space(place) => manifest.spaces.get(*place).map(|space| &space.map_root),
            Object::Image(name) => {
                let mut images = manifest.images.iter();
                let image = images.find(|image| image.name == *name);
                image.map(|image| &image.map_root)
            }
        };
        let root = root.ok_or_else(|| {
            StoreError::NotFound(MissingObject::Object {
                object: format!("{object:?}"),
                checkpoint: id.to_owned(),
            })
        })?;
        let map = checkpoint.map(&map_root(root)?);
        let mut healed = 0;
        for (index, page) in pages {
            let changed = map.heal_page(*index, page);
            healed += u64::from(changed.map_err(|source| ReadingError::NotHealed {
                page: format!("page {index:#x} of {object:?}"),
                source,
            })?);
        }
        Ok(healed)
    }

    /// Lists the object stores of cold tiers, and returns the ids of the checkpoints with pages in objects that are
    /// missing or do not have the size that was written; and why a store is away, of whose objects nothing is known. Asks
    /// each store for a list only.
    #[must_use]
    pub fn absent_in_cold(&self) -> (Vec<String>, Vec<StoreError>) {
        let (segments, away) = self.region.absent_segments();
        let away = away.into_iter();
        let away = away.map(|(_, error)| RegionMediaError::from(MediaError::Store(error)).into());
        (self.ids_with(&segments), away.collect())
    }

    /// Returns everything that the region holds, in the order of the seals.
    ///
    /// # Errors
    /// The catalog cannot be read.
    pub fn everything(&self) -> Result<Vec<HeldCheckpoint>, StoreError> {
        let mut records: HashMap<String, control::Checkpoint> = self
            .catalog
            .list(None)?
            .into_iter()
            .map(|record| (record.id.clone(), record))
            .collect();
        let segment_bytes = self.region.usage().segment_bytes;
        let held = self.region.listed().into_iter().map(|listed| {
            let id = listed.id.to_string();
            HeldCheckpoint {
                record: records.remove(&id),
                bytes: listed.segments * segment_bytes,
                copy: listed.copy,
                id,
            }
        });
        Ok(held.collect())
    }

    /// Reads everything of a checkpoint but pages in a cold tier, as [`check_with`](Self::check_with) does.
    ///
    /// # Errors
    /// The checkpoint is not here. Damage is no error.
    pub fn check(
        &self,
        held: &HeldCheckpoint,
        already: Option<&mut PagesRead>,
        go_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Checked, StoreError> {
        self.check_with(held, already, ColdPages::Leave, go_on)
    }

    /// Reads everything of a checkpoint and verifies its checksums. After each run of pages `go_on` is called with
    /// the number of pages visited and of bytes read, and may stop the check. Pages in `already` are taken for
    /// intact, and intact ones are added to it.
    ///
    /// # Errors
    /// The checkpoint is not here. Damage is no error.
    pub fn check_with(
        &self,
        held: &HeldCheckpoint,
        already: Option<&mut PagesRead>,
        cold: ColdPages,
        go_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Checked, StoreError> {
        let checkpoint = self.checkpoint(&held.id)?;
        let name = held.name();
        let mut own = PagesRead::default();
        let mut check = Check {
            name: &name,
            checkpoint: &checkpoint,
            already: already.unwrap_or(&mut own),
            cold,
            go_on,
            found: Checked::default(),
        };
        match checkpoint.check_root() {
            Ok(0) => {}
            // One copy of the root is enough. Without the other, the next start would quarantine the checkpoint.
            Ok(copies) => tracing::error!(
                event = "damage-in-root-copies",
                checkpoint = name,
                copies,
                "copies of its root are damaged, and the others intact"
            ),
            Err(error) => check.beyond(format!(
                "{name}: {error}; it cannot be read after the next start of permafrostd"
            )),
        }
        match manifest_of(&checkpoint) {
            Ok(manifest) => check.all(&manifest),
            Err(error) => check.beyond(format!("{name}: {error}")),
        }
        Ok(check.found)
    }
}

struct Check<'a> {
    name: &'a str,
    checkpoint: &'a Arc<StoredCheckpoint>,
    already: &'a mut PagesRead,
    cold: ColdPages,
    go_on: &'a mut dyn FnMut(u64, u64) -> bool,
    found: Checked,
}

impl Check<'_> {
    fn all(&mut self, manifest: &Manifest) {
        let mut maps: HashMap<&[u8], Vec<&Image>> = HashMap::new();
        for image in &manifest.images {
            maps.entry(&image.map_root).or_default().push(image);
        }
        for image in &manifest.images {
            // Packed ones together, with the first of them.
            let Some(images) = maps.remove(image.map_root.as_slice()) else {
                continue;
            };
            let own = Object::Image(image.name.clone());
            // Other copies pack their images differently, so no page of theirs heals one of these.
            let object = (images.len() == 1).then_some(&own);
            let place = |index: u64| images_at(&images, index);
            self.object(&image.map_root, object, &place);
        }
        for (number, space) in manifest.spaces.iter().enumerate() {
            let whose = match space.space_type() {
                SpaceType::Process => format!("process {}", space.id),
                SpaceType::SharedMemory => format!("shared memory {}", space.id),
            };
            let place = |index: u64| format!("{whose} address {:#x}", index * PAGE_BYTES);
            self.object(&space.map_root, Some(&Object::Space(number)), &place);
        }
    }

    /// Visits all pages of a map. A page that fails is recorded, and the next is read; pages behind a damaged map
    /// page cannot even be named.
    fn object(&mut self, root: &[u8], object: Option<&Object>, place: &dyn Fn(u64) -> String) {
        if self.found.stopped {
            return;
        }
        let map = match map_root(root) {
            Ok(root) => self.checkpoint.map(&root),
            Err(error) => return self.beyond(format!("{}: {error}", self.name)),
        };
        for run in map.runs() {
            let run = match run {
                Ok(run) => run,
                Err(error) => {
                    return self.beyond(format!("{}: {}: {error}", self.name, place(0)));
                }
            };
            let (before, left) = (self.found.read_bytes, self.found.unverified_pages);
            self.run(&map, &run, object, place);
            let pages = u64::from(run.pages) - (self.found.unverified_pages - left);
            self.found.pages += pages;
            if !(self.go_on)(pages, self.found.read_bytes - before) {
                self.found.stopped = true;
                return;
            }
        }
    }

    /// Reads those pages of a run that were not yet read through another map.
    fn run(
        &mut self,
        map: &PageMap,
        run: &StoredRun,
        object: Option<&Object>,
        place: &dyn Fn(u64) -> String,
    ) {
        let RunKind::Stored { location, .. } = run.kind else {
            return;
        };
        if let Err(error) = map.check_checksums(run) {
            let place = place(run.first_index);
            return self.beyond(format!("{}: {place}: {error}", self.name));
        }
        let first = location.value();
        let in_store = map.is_out(run);
        if in_store && (self.cold == ColdPages::Leave || !self.found.away.is_empty()) {
            return self.leave(first, run.pages, 0);
        }
        let mut from = 0;
        // If one page of several cannot be read at all, they are read one by one.
        let mut at_once = u32::MAX;
        while let Some((skip, pages)) = self.already.missing(first, run.pages, from) {
            let pages = pages.min(at_once);
            let index = run.first_index + u64::from(skip);
            let (good, error) = match map.read_range(run, index, pages) {
                Ok(_) => (pages, None),
                // Nothing is known to be wrong with it, and the store is not asked again.
                Err(error) if is_away(&error) => {
                    self.found.away = in_full(&error);
                    return self.leave(first, run.pages, skip);
                }
                Err(error) if error.index().is_some_and(|bad| bad >= index) => {
                    let before = error.index().map_or(0, |bad| bad - index);
                    (u32::try_from(before).unwrap_or(0), Some(error))
                }
                Err(_) if pages > 1 => {
                    at_once = 1;
                    continue;
                }
                Err(error) => (0, Some(error)),
            };
            let read = good + u32::from(error.is_some());
            self.found.read_bytes += u64::from(read) * PAGE_BYTES;
            self.already.add(first + u64::from(skip), good);
            if let Some(error) = error {
                self.page(object, index + u64::from(good), place, &error);
            }
            from = skip + read;
        }
    }

    /// Counts the pages of a run from a place on that were not read as not verified.
    fn leave(&mut self, first: u64, pages: u32, from: u32) {
        let mut from = from;
        while let Some((skip, pages)) = self.already.missing(first, pages, from) {
            self.found.unverified_pages += u64::from(pages);
            from = skip + pages;
        }
    }

    fn page(
        &mut self,
        object: Option<&Object>,
        index: u64,
        place: &dyn Fn(u64) -> String,
        error: &PageError,
    ) {
        match object.cloned() {
            Some(object) if self.found.pages_damaged.len() < MAX_DAMAGED_PAGES => {
                self.found.pages_damaged.push(DamagedPage { object, index });
            }
            _ => self.found.damaged_beyond = true,
        }
        let error = in_full(error);
        self.note(format!("{}: {}: {error}", self.name, place(index)));
    }

    /// Records damage that no page of another copy heals.
    fn beyond(&mut self, damage: String) {
        self.found.damaged_beyond = true;
        self.note(damage);
    }

    fn note(&mut self, damage: String) {
        if self.found.damage.len() < MAX_DAMAGE {
            self.found.damage.push(damage);
        }
    }
}

/// Names the images with bytes in a page of their map.
fn images_at(images: &[&Image], index: u64) -> String {
    let page = index * PAGE_BYTES..(index + 1) * PAGE_BYTES;
    let has_part = |image: &&&Image| {
        image.offset_bytes < page.end && image.offset_bytes + image.len_bytes > page.start
    };
    let named = images.iter().filter(has_part);
    let names: Vec<_> = named.map(|image| image.name.as_str()).collect();
    format!("image {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_were_read_are_left_out() {
        let mut read = PagesRead::default();
        // Across two words, and across two chunks.
        for first in [60, WORD * WORDS as u64 - 3] {
            assert_eq!(read.missing(first, 10, 0), Some((0, 10)));
            read.add(first + 2, 5);
            assert_eq!(read.missing(first, 10, 0), Some((0, 2)));
            assert_eq!(read.missing(first, 10, 2), Some((7, 3)));
            read.add(first, 2);
            read.add(first + 7, 3);
            assert_eq!(read.missing(first, 10, 0), None);
            assert_eq!(read.missing(first - 1, 12, 0), Some((0, 1)));
            assert_eq!(read.missing(first - 1, 12, 1), Some((11, 1)));
        }
    }
}
