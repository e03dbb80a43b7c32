//! A dump being taken in: address spaces one after another into the segments of one shadow.

use std::sync::Arc;

use permafrost_pmem::{Checkpoint, MapCursor, MapRoot, MapWriter, PAGE_SIZE, Region, Shadow};
use permafrost_protocol::images::FIRST_SERVED_PAGES_ID;
use permafrost_protocol::manifest::{AddressSpace, Manifest, SpaceType};
use permafrost_protocol::pageserver::SpaceId;

use super::StoreError;

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// The checkpoint that a dump is compared with.
#[derive(Clone)]
pub(super) struct Parent {
    /// Keeps its segments from being reused while the dump refers to them.
    pub(super) checkpoint: Arc<Checkpoint>,
    /// Its manifest.
    pub(super) manifest: Manifest,
}

impl Parent {
    /// Whether it has that address space.
    #[must_use]
    pub(super) fn has(&self, id: SpaceId) -> bool {
        self.space(id).is_some()
    }

    fn space(&self, id: SpaceId) -> Option<&AddressSpace> {
        let mut spaces = self.manifest.spaces.iter();
        spaces.find(|space| space.space_type() == id.space_type && space.id == id.id)
    }

    /// What to compare a space with: its namesake, or for shared memory, whose ids are new after every
    /// restore, the one that came at the same place in the dump. A wrong guess finds little equal, and costs
    /// a comparison of checksums.
    fn counterpart(&self, id: SpaceId, shared_before: usize) -> Option<&AddressSpace> {
        let shared = SpaceType::SharedMemory;
        self.space(id).or_else(|| {
            let mut spaces = self.manifest.spaces.iter();
            let mut at_same_place = spaces.by_ref().filter(|space| space.space_type() == shared);
            at_same_place
                .nth(shared_before)
                .filter(|_| id.space_type == shared)
        })
    }
}

/// A map root as a manifest holds it.
pub(super) fn map_root(bytes: &[u8]) -> Result<MapRoot, StoreError> {
    MapRoot::try_from(bytes).map_err(|error| StoreError::Invalid {
        message: format!("manifest holds a map root that is none: {error}"),
        hint: "",
    })
}

/// Takes in address spaces. Dropped before [`DumpBuilder::finish`], everything it wrote is free again.
pub(super) struct DumpBuilder {
    shadow: Shadow,
    parent: Option<Parent>,
    current: Option<Current>,
    spaces: Vec<AddressSpace>,
}

struct Current {
    id: SpaceId,
    pages_id: u32,
    map: MapWriter,
    /// What its pages are compared with.
    parent: Option<MapCursor>,
    /// Whether that is the same space, so that holes may refer to it.
    has_parent: bool,
}

/// All pages are in; what is missing is the small images and the seal.
pub(super) struct Dump {
    /// Holds the pages.
    pub(super) shadow: Shadow,
    /// The address spaces, as the manifest lists them.
    pub(super) spaces: Vec<AddressSpace>,
}

impl DumpBuilder {
    /// Begins a dump in `region`, compared with `parent`.
    #[must_use]
    pub(super) fn new(region: &Arc<Region>, parent: Option<Parent>) -> Self {
        Self {
            shadow: region.begin(),
            parent,
            current: None,
            spaces: Vec::new(),
        }
    }

    /// Begins an address space and ends the one before. `pages_id` is the N of its `pages-N.img`, by default
    /// counted from where CRIU's own page server begins. Returns whether the parent has the space.
    ///
    /// # Errors
    /// No room for the finished space's map.
    pub(super) fn open(&mut self, id: SpaceId, pages_id: Option<u32>) -> Result<bool, StoreError> {
        self.finish_space()?;
        let mut cursor = None;
        if let Some(parent) = &self.parent {
            let shared = |space: &&AddressSpace| space.space_type() == SpaceType::SharedMemory;
            let shared_before = self.spaces.iter().filter(shared).count();
            if let Some(space) = parent.counterpart(id, shared_before) {
                cursor = Some(parent.checkpoint.map(&map_root(&space.map_root)?).cursor());
            }
        }
        let counted = u32::try_from(self.spaces.len()).unwrap_or(u32::MAX);
        let pages_id = pages_id.unwrap_or(FIRST_SERVED_PAGES_ID.saturating_add(counted));
        let has_parent = self.has_parent(id);
        self.current = Some(Current {
            id,
            pages_id,
            map: self.shadow.map(),
            parent: cursor,
            has_parent,
        });
        Ok(has_parent)
    }

    /// Whether the parent has that space.
    #[must_use]
    pub(super) fn has_parent(&self, id: SpaceId) -> bool {
        self.parent.as_ref().is_some_and(|parent| parent.has(id))
    }

    /// Takes whole pages at `vaddr` (a multiple of the page size) of the open space.
    ///
    /// # Errors
    /// The region is full or fails, the addresses do not ascend.
    pub(super) fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), StoreError> {
        let current = self.current.as_mut().ok_or_else(no_space_open)?;
        self.shadow.append(
            &mut current.map,
            vaddr / PAGE_BYTES,
            flags,
            bytes,
            current.parent.as_mut(),
        )?;
        Ok(())
    }

    /// Takes `nr_pages` pages at `vaddr` from the parent.
    ///
    /// # Errors
    /// The parent lacks one of them; the region is full or fails.
    pub(super) fn hole(&mut self, vaddr: u64, nr_pages: u64) -> Result<(), StoreError> {
        let current = self.current.as_mut().ok_or_else(no_space_open)?;
        let id = current.id;
        let Some(parent) = current.parent.as_mut().filter(|_| current.has_parent) else {
            return Err(StoreError::Invalid {
                message: format!(
                    "hole of {nr_pages} pages at {vaddr:#x} of {id}, which the parent does not have"
                ),
                hint: "dump without --prev-images-dir, or into a session of the job that has the parent",
            });
        };
        self.shadow
            .reference(&mut current.map, vaddr / PAGE_BYTES, nr_pages, parent)?;
        Ok(())
    }

    /// Ends the dump: everything taken in is durable when this returns, and referenced by nothing.
    ///
    /// # Errors
    /// The region is full or fails.
    pub(super) fn finish(mut self) -> Result<Dump, StoreError> {
        self.finish_space()?;
        self.shadow.flush()?;
        Ok(Dump {
            shadow: self.shadow,
            spaces: self.spaces,
        })
    }

    fn finish_space(&mut self) -> Result<(), StoreError> {
        let Some(current) = self.current.take() else {
            return Ok(());
        };
        let (root, stats) = self.shadow.finish(current.map)?;
        if stats.parent_damaged > 0 {
            let (space, pages) = (current.id, stats.parent_damaged);
            tracing::error!(%space, pages, "parent is damaged: pages stored anew; `permafrost verify` names them");
        }
        self.spaces.push(AddressSpace {
            space_type: current.id.space_type.into(),
            id: current.id.id,
            pages_id: current.pages_id,
            map_root: root.to_bytes().to_vec(),
            pages: stats.pages,
            stored_pages: stats.stored,
            zero_pages: stats.zero,
            parent_pages: stats.parent,
            runs: stats.runs,
        });
        Ok(())
    }
}

fn no_space_open() -> StoreError {
    StoreError::Invalid {
        message: "pages before any address space was opened".to_owned(),
        hint: "",
    }
}
