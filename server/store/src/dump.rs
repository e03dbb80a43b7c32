//! Receives a dump: address spaces one after another, into the segments of one shadow.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_pmem::{
    CheckpointId, FindEqual, Kept, MapCursor, MapRoot, MapWriter, Piece, RunKind, Shadow,
    ShadowError, StoredCheckpoint,
};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::images::FIRST_SERVED_PAGES_ID;
use permafrost_protocol::manifest::{AddressSpace, Manifest, Origin, SpaceType};
use permafrost_protocol::pageserver::SpaceId;
use tokio::sync::watch;

use super::in_use::ReadGuard;
use super::{StoreError, digest};
use crate::SessionError;
use crate::{ContentDigest, DumpTap, Follower};
use permafrost_criu::kin::match_processes;

/// Pages passed on at once: the capacity of a wire frame.
const COPY_PAGES: u64 = 64;

/// The checkpoint that a dump is compared with.
#[derive(Clone)]
pub struct Parent {
    /// Keeps its segments from being reused while the dump refers to them.
    pub(super) checkpoint: Arc<StoredCheckpoint>,
    /// Manifest of that checkpoint.
    pub(super) manifest: Manifest,
    /// Processes of the dump whose pid the parent does not have, and the parent's pid that each is compared with
    /// instead.
    compared: HashMap<u64, u64>,
    /// Cooling leaves it alone meanwhile.
    _held: Arc<ReadGuard>,
}

impl Parent {
    pub(super) fn new(
        checkpoint: Arc<StoredCheckpoint>,
        manifest: Manifest,
        held: Arc<ReadGuard>,
    ) -> Self {
        Self {
            checkpoint,
            manifest,
            compared: HashMap::new(),
            _held: held,
        }
    }

    /// Returns the id of the checkpoint.
    #[must_use]
    pub fn id(&self) -> CheckpointId {
        self.checkpoint.id()
    }

    /// Returns the generation of the checkpoint.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.manifest.generation
    }

    /// Pairs processes with new pids with processes of the parent, by the facts in `origin`.
    #[must_use]
    pub fn knowing(self, origin: Option<&Origin>) -> Self {
        let (Some(before), Some(now)) = (&self.manifest.origin, origin) else {
            return self;
        };
        let has_pid = |pid| self.has(SpaceId::process(pid));
        let compared = match_processes(&before.processes, &now.processes, has_pid);
        self.compared_as(compared)
    }

    /// Sets the pids of the parent that processes of the dump are compared with.
    #[must_use]
    pub(super) fn compared_as(self, compared: HashMap<u64, u64>) -> Self {
        Self { compared, ..self }
    }

    /// Returns the pids that are compared with another pid.
    #[must_use]
    pub fn compared(&self) -> &HashMap<u64, u64> {
        &self.compared
    }

    /// Returns true if the checkpoint has that address space.
    #[must_use]
    pub(super) fn has(&self, id: SpaceId) -> bool {
        self.space(id).is_some()
    }

    fn space(&self, id: SpaceId) -> Option<&AddressSpace> {
        let mut spaces = self.manifest.spaces.iter();
        spaces.find(|space| space.space_type() == id.space_type && space.id == id.id)
    }

    /// Returns the space that a space is compared with: its namesake; for a process with a new pid, the space of
    /// the process that it is paired with; or for shared memory, whose ids are new after every restore, the one at
    /// the same place in the dump. A wrong guess finds little equal, and costs a comparison of checksums.
    pub(super) fn counterpart(&self, id: SpaceId, shared_before: usize) -> Option<&AddressSpace> {
        let shared = SpaceType::SharedMemory;
        let taken_for = || {
            let pid = self
                .compared
                .get(&id.id)
                .filter(|_| id.space_type != shared)?;
            self.space(SpaceId::process(u32::try_from(*pid).ok()?))
        };
        self.space(id).or_else(taken_for).or_else(|| {
            let mut spaces = self.manifest.spaces.iter();
            let mut at_same_place = spaces.by_ref().filter(|space| space.space_type() == shared);
            at_same_place
                .nth(shared_before)
                .filter(|_| id.space_type == shared)
        })
    }
}

/// Encodes a map root as a manifest holds it.
pub(super) fn map_root(bytes: &[u8]) -> Result<MapRoot, StoreError> {
    MapRoot::try_from(bytes).map_err(|source| SessionError::MapRoot { source }.into())
}

/// Receives address spaces. If it is dropped before [`DumpBuilder::finish`], everything it wrote is free again.
pub(super) struct DumpBuilder {
    shadow: Shadow,
    parent: Option<Parent>,
    current: Option<Current>,
    spaces: Vec<AddressSpace>,
    /// Receives the same pages as the region.
    follower: Option<Box<dyn Follower>>,
    /// Turns true when the session is over, which ends long work for it.
    ended: Option<watch::Receiver<bool>>,
}

struct Current {
    id: SpaceId,
    pages_id: u32,
    map: MapWriter,
    /// Map of the space that the open space's pages are compared with.
    parent: Option<MapCursor>,
    /// True if `parent` is the same space, so that holes may refer to it.
    has_parent: bool,
}

/// A dump whose pages are complete; the small images and the seal are missing.
pub(super) struct Dump {
    /// Shadow that holds the pages.
    pub(super) shadow: Shadow,
    /// The address spaces, as the manifest lists them.
    pub(super) spaces: Vec<AddressSpace>,
    /// Digest of the address spaces' contents, independent of where they are stored.
    pub(super) digest: ContentDigest,
    /// Seals the dump, if there is one.
    pub(super) follower: Option<Box<dyn Follower>>,
    /// Time that the dump waited for its follower.
    pub(super) waited: Duration,
}

impl DumpBuilder {
    /// Begins a dump into a shadow, compared with `parent`; `follower` was begun with the same parent.
    #[must_use]
    pub(super) fn new(
        shadow: Shadow,
        parent: Option<Parent>,
        follower: Option<Box<dyn Follower>>,
    ) -> Self {
        Self {
            shadow,
            parent,
            current: None,
            spaces: Vec::new(),
            follower,
            ended: None,
        }
    }

    /// Ends long work early once `ended` turns true.
    #[must_use]
    pub(super) fn until(self, ended: watch::Receiver<bool>) -> Self {
        Self {
            ended: Some(ended),
            ..self
        }
    }

    /// Compares pages with those that `others` finds, too.
    #[must_use]
    pub(super) fn sharing(mut self, others: Option<Box<dyn FindEqual>>) -> Self {
        if let Some(others) = others {
            self.shadow.look_in(others);
        }
        self
    }

    /// Returns true if a page takes longer here than on its way through a socket.
    pub(super) fn is_slow(&self) -> bool {
        self.shadow.is_encrypted()
    }

    /// Returns the bytes written so far.
    pub(super) fn added_bytes(&self) -> u64 {
        self.shadow.added_bytes()
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
        let mut map = self.shadow.map();
        if id.space_type == SpaceType::Process {
            map.share_with_siblings();
        }
        if let Some(tap) = tap_of(&mut self.follower) {
            map.watch();
            tap.space(id, pages_id);
        }
        self.current = Some(Current {
            id,
            pages_id,
            map,
            parent: cursor,
            has_parent,
        });
        Ok(has_parent)
    }

    /// Returns true if the parent has that space.
    #[must_use]
    pub(super) fn has_parent(&self, id: SpaceId) -> bool {
        self.parent.as_ref().is_some_and(|parent| parent.has(id))
    }

    /// Appends whole pages at `vaddr` (a multiple of the page size) to the open space.
    ///
    /// # Errors
    /// The region is full or fails, the addresses do not ascend.
    pub(super) fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), StoreError> {
        self.append(vaddr / PAGE_BYTES, flags, bytes)
    }

    /// Appends pages as [`DumpBuilder::pages`] does, addressed by the first page's index.
    ///
    /// # Errors
    /// Those of [`DumpBuilder::pages`].
    pub(super) fn append(
        &mut self,
        first_index: u64,
        flags: u16,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        let current = self.current.as_mut().ok_or_else(no_space_open)?;
        self.shadow.append(
            &mut current.map,
            first_index,
            flags,
            bytes,
            current.parent.as_mut(),
        )?;
        let Some(tap) = tap_of(&mut self.follower) else {
            return Ok(());
        };
        let takes_parent = tap.takes_parent();
        for piece in current.map.pieces() {
            match piece.kept {
                Kept::Zero => tap.zero(piece.first_index, piece.flags, piece.pages),
                Kept::Parent if takes_parent => {
                    tap.parent(piece.first_index, piece.flags, piece.pages);
                }
                Kept::Stored | Kept::Parent => {
                    let from = byte_len(piece.first_index - first_index);
                    let len = byte_len(piece.pages);
                    tap.pages(piece.first_index, piece.flags, &bytes[from..from + len]);
                }
            }
        }
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
            return Err(SessionError::NotInParent {
                space: id,
                vaddr,
                pages: nr_pages,
            }
            .into());
        };
        self.shadow
            .reference(&mut current.map, vaddr / PAGE_BYTES, nr_pages, parent)?;
        if let Some(tap) = tap_of(&mut self.follower) {
            for piece in current.map.pieces() {
                match piece.kept {
                    Kept::Zero => tap.zero(piece.first_index, piece.flags, piece.pages),
                    _ if tap.takes_parent() => {
                        tap.parent(piece.first_index, piece.flags, piece.pages);
                    }
                    _ => tap_from_parent(tap, parent, piece, self.ended.as_ref())?,
                }
            }
        }
        Ok(())
    }

    /// Appends zero pages that were announced and not sent.
    ///
    /// # Errors
    /// Those of [`DumpBuilder::pages`].
    pub(super) fn zeros(
        &mut self,
        first_index: u64,
        flags: u16,
        pages: u64,
    ) -> Result<(), StoreError> {
        let current = self.current.as_mut().ok_or_else(no_space_open)?;
        self.shadow
            .append_zeros(&mut current.map, first_index, flags, pages)?;
        if let Some(tap) = tap_of(&mut self.follower) {
            // The pieces are taken off the list of pieces to pass on: otherwise the next pages would pass them on
            // again.
            for piece in current.map.pieces() {
                tap.zero(piece.first_index, piece.flags, piece.pages);
            }
        }
        Ok(())
    }

    /// Appends pages that the sender found equal to the parent's at the same place, in the same space or in its
    /// counterpart.
    ///
    /// # Errors
    /// The parent lacks one of them; the region is full or fails.
    pub(super) fn same_as_parent(
        &mut self,
        first_index: u64,
        flags: u16,
        pages: u64,
    ) -> Result<(), StoreError> {
        let current = self.current.as_mut().ok_or_else(no_space_open)?;
        let id = current.id;
        let parent = current
            .parent
            .as_mut()
            .ok_or(SessionError::NoParent { space: id })?;
        self.shadow
            .reference_as(&mut current.map, first_index, flags, pages, parent)?;
        Ok(())
    }

    /// Reads and verifies pages of the parent at the same place. A copy that refers to damaged pages would have the
    /// right digest and be damaged all the same.
    ///
    /// # Errors
    /// One of them is damaged; there is no parent, or its map is damaged.
    pub(super) fn check_parent(&mut self, first_index: u64, pages: u64) -> Result<(), StoreError> {
        let current = self.current.as_mut().ok_or_else(no_space_open)?;
        let Some(parent) = current.parent.as_mut() else {
            return Ok(());
        };
        let end = first_index.saturating_add(pages);
        let mut index = first_index;
        while index < end {
            let Some(run) = parent.lookup(index).map_err(ShadowError::from)? else {
                return Err(ShadowError::MissingInParent { index }.into());
            };
            let mut here = run.end_index().min(end) - index;
            if matches!(run.kind, RunKind::Stored { .. }) {
                here = here.min(COPY_PAGES);
                let count = u32::try_from(here).unwrap_or(u32::MAX);
                let read = parent.map().read_range(&run, index, count);
                read.map_err(ShadowError::from)?;
            }
            index += here;
        }
        Ok(())
    }

    /// Ends the dump: everything received is durable when this returns. Nothing references it yet.
    ///
    /// # Errors
    /// The region is full or fails; the follower fails.
    pub(super) fn finish(mut self) -> Result<Dump, StoreError> {
        if let Some(tap) = tap_of(&mut self.follower) {
            tap.end();
        }
        self.finish_space()?;
        self.shadow.flush()?;
        let digest = digest::of_spaces(&self.spaces);
        let mut waited = Duration::ZERO;
        if let Some(tap) = tap_of(&mut self.follower) {
            waited = tap.waited();
            let since = Instant::now();
            tap.close(digest)?;
            waited += since.elapsed();
        }
        Ok(Dump {
            shadow: self.shadow,
            spaces: self.spaces,
            digest,
            follower: self.follower,
            waited,
        })
    }

    fn finish_space(&mut self) -> Result<(), StoreError> {
        let Some(current) = self.current.take() else {
            return Ok(());
        };
        let (root, stats) = self.shadow.finish(current.map)?;
        if stats.parent_damaged > 0 {
            let (space, pages) = (current.id, stats.parent_damaged);
            tracing::error!(event = "damage-found-in-parent", %space, pages, "parent is damaged: pages stored anew; `permafrost verify` names them");
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
            sibling_pages: stats.sibling,
            shared_pages: stats.shared,
            map_digest: stats.digest.to_vec(),
        });
        Ok(())
    }
}

/// Returns the receiver of a dump's pages, if there is one.
pub(super) fn tap_of(follower: &mut Option<Box<dyn Follower>>) -> Option<&mut dyn DumpTap> {
    follower.as_mut()?.tap()
}

/// Passes on pages that the parent has here, and that the receiver does not have.
fn tap_from_parent(
    tap: &mut dyn DumpTap,
    parent: &mut MapCursor,
    piece: Piece,
    ended: Option<&watch::Receiver<bool>>,
) -> Result<(), StoreError> {
    let end = piece.first_index + piece.pages;
    let mut index = piece.first_index;
    while index < end {
        if ended.is_some_and(|ended| *ended.borrow()) {
            return Err(SessionError::Over.into());
        }
        // The pages were there a moment ago, or there would be no piece.
        let Some(run) = parent.lookup(index).map_err(ShadowError::from)? else {
            return Err(ShadowError::MissingInParent { index }.into());
        };
        let mut pages = run.end_index().min(end) - index;
        if matches!(run.kind, RunKind::Stored { .. }) {
            pages = pages.min(COPY_PAGES);
        }
        let count = u32::try_from(pages).unwrap_or(u32::MAX);
        match run.kind {
            RunKind::Zero => tap.zero(index, piece.flags, pages),
            RunKind::Stored { .. } => {
                let bytes = parent.map().read_range(&run, index, count);
                tap.pages(index, piece.flags, &bytes.map_err(ShadowError::from)?);
            }
        }
        index += pages;
    }
    Ok(())
}

fn byte_len(pages: u64) -> usize {
    usize::try_from(pages * PAGE_BYTES).unwrap_or(usize::MAX)
}

fn no_space_open() -> StoreError {
    SessionError::NoSpaceOpen.into()
}
