//! Reading everything of a checkpoint to see whether it is whole: manifest, map pages, images and pages.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use permafrost_pmem::{Checkpoint, PageError, PageMap, Run, RunKind};
use permafrost_protocol::control;
use permafrost_protocol::manifest::{Manifest, SpaceType};

use super::dump::map_root;
use super::reader::{PAGE_BYTES, checkpoint_name};
use super::{Store, StoreError, manifest_of};

/// Damaged places that are named one by one.
const MAX_DAMAGE: usize = 64;

/// Pages that one word of [`PagesRead`] stands for.
const WORD: u64 = u64::BITS as u64;

/// Words that are kept together.
const WORDS: usize = 64;

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Pages of the checkpoint that were gone through, zero and shared ones included.
    pub pages: u64,
    /// Bytes that were read for it.
    pub read_bytes: u64,
    /// What is damaged, by name and address: the first 64.
    pub damage: Vec<String>,
    /// It was stopped before its end.
    pub stopped: bool,
}

/// Pages of the region that were read and found good: those that checkpoints share need no second reading. Takes a bit
/// for each page of the segments read, 32 MiB for a region of a TiB.
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

    /// The next pages of a run that were not read: how many of it come before them, and how many they are.
    fn missing(&self, first: u64, pages: u32, from: u32) -> Option<(u32, u32)> {
        let is_missing = |skip: &u32| !self.has(first + u64::from(*skip));
        let begin = (from..pages).find(is_missing)?;
        let end = (begin..pages).find(|skip| !is_missing(skip));
        Some((begin, end.unwrap_or(pages) - begin))
    }
}

/// A checkpoint that the region holds, as far as anybody can name it.
#[derive(Clone, Debug)]
pub struct Held {
    /// 32 hex digits.
    pub id: String,
    /// Its line of this node's catalog; none of one whose manifest was damaged when the catalog was built.
    pub record: Option<control::Checkpoint>,
    /// Bytes of its segments, shared ones included.
    pub bytes: u64,
    /// This very copy: another one of the same id lies elsewhere in the region.
    pub copy: Weak<Checkpoint>,
}

impl Held {
    /// How people name it.
    #[must_use]
    pub fn name(&self) -> String {
        self.record
            .as_ref()
            .map_or_else(|| format!("checkpoint {}", self.id), checkpoint_name)
    }

    /// Job; empty if unknown.
    #[must_use]
    pub fn job(&self) -> &str {
        self.record.as_ref().map_or("", |record| &record.job)
    }
}

impl Store {
    /// Everything that the region holds, in the order of the seals.
    ///
    /// # Errors
    /// The catalog cannot be read.
    pub fn everything(&self) -> Result<Vec<Held>, StoreError> {
        let mut records: HashMap<String, control::Checkpoint> = self
            .catalog
            .list(None)?
            .into_iter()
            .map(|record| (record.id.clone(), record))
            .collect();
        let segment_bytes = self.region.usage().segment_bytes;
        let held = self.region.checkpoints().into_iter().map(|checkpoint| {
            let id = checkpoint.id().to_string();
            Held {
                record: records.remove(&id),
                bytes: checkpoint.segments() * segment_bytes,
                copy: Arc::downgrade(&checkpoint),
                id,
            }
        });
        Ok(held.collect())
    }

    /// Reads everything of a checkpoint and compares it with its checksums. `go_on` is told after each run of pages
    /// how many were gone through and how many bytes were read, and may stop it. Pages in `already` are taken for
    /// good, and good ones are added.
    ///
    /// # Errors
    /// It is not here. Damage is no error.
    pub fn check(
        &self,
        held: &Held,
        already: Option<&mut PagesRead>,
        go_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Checked, StoreError> {
        let checkpoint = self.checkpoint(&held.id)?;
        let name = held.name();
        let mut check = Check {
            name: &name,
            checkpoint: &checkpoint,
            already,
            go_on,
            found: Checked::default(),
        };
        match checkpoint.check_root() {
            Ok(0) => {}
            // One is enough. Without the other the next start would set the checkpoint aside.
            Ok(copies) => tracing::error!(
                checkpoint = name,
                copies,
                "copies of its root are damaged, and the others intact"
            ),
            Err(error) => check.note(format!(
                "{name}: {error}; it cannot be read after the next start of permafrostd"
            )),
        }
        match manifest_of(&checkpoint) {
            Ok(manifest) => check.all(&manifest),
            Err(error) => check.note(format!("{name}: {error}")),
        }
        Ok(check.found)
    }
}

struct Check<'a> {
    name: &'a str,
    checkpoint: &'a Arc<Checkpoint>,
    already: Option<&'a mut PagesRead>,
    go_on: &'a mut dyn FnMut(u64, u64) -> bool,
    found: Checked,
}

impl Check<'_> {
    fn all(&mut self, manifest: &Manifest) {
        for image in &manifest.images {
            let place = |_| format!("image {}", image.name);
            self.object(&image.map_root, &place);
        }
        for space in &manifest.spaces {
            let whose = match space.space_type() {
                SpaceType::Process => format!("process {}", space.id),
                SpaceType::SharedMemory => format!("shared memory {}", space.id),
            };
            let place = |index: u64| format!("{whose} address {:#x}", index * PAGE_BYTES);
            self.object(&space.map_root, &place);
        }
    }

    /// Goes through a map. A run that fails is noted, and the next is read; what lies behind a damaged map page cannot
    /// even be named.
    fn object(&mut self, root: &[u8], place: &dyn Fn(u64) -> String) {
        if self.found.stopped {
            return;
        }
        let map = match map_root(root) {
            Ok(root) => self.checkpoint.map(&root),
            Err(error) => return self.note(format!("{}: {error}", self.name)),
        };
        for run in map.runs() {
            let run = match run {
                Ok(run) => run,
                Err(error) => return self.damaged(place, 0, &error),
            };
            let before = self.found.read_bytes;
            if let Err(error) = self.run(&map, &run) {
                let index = error.index().unwrap_or(run.first_index);
                self.damaged(place, index, &error);
            }
            let pages = u64::from(run.pages);
            self.found.pages += pages;
            if !(self.go_on)(pages, self.found.read_bytes - before) {
                self.found.stopped = true;
                return;
            }
        }
    }

    fn run(&mut self, map: &PageMap, run: &Run) -> Result<(), PageError> {
        let RunKind::Stored { location, .. } = run.kind else {
            return Ok(());
        };
        let Some(already) = self.already.as_deref_mut() else {
            self.found.read_bytes += u64::from(run.pages) * PAGE_BYTES;
            return map.read(run).map(drop);
        };
        map.check_checksums(run)?;
        let first = location.value();
        let mut from = 0;
        while let Some((skip, pages)) = already.missing(first, run.pages, from) {
            self.found.read_bytes += u64::from(pages) * PAGE_BYTES;
            map.read_range(run, run.first_index + u64::from(skip), pages)?;
            already.add(first + u64::from(skip), pages);
            from = skip + pages;
        }
        Ok(())
    }

    fn damaged(&mut self, place: &dyn Fn(u64) -> String, index: u64, error: &PageError) {
        self.note(format!("{}: {}: {error}", self.name, place(index)));
    }

    fn note(&mut self, damage: String) {
        if self.found.damage.len() < MAX_DAMAGE {
            self.found.damage.push(damage);
        }
    }
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
