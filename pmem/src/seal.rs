//! The seal: a shadow becomes a checkpoint, once and for all.

use std::sync::Arc;

use crate::checkpoint::{Sealed, StoredCheckpoint};
use crate::error::{SealError, ShadowError};
use crate::ids::CheckpointId;
use crate::journal::{Change, JournalError};
use crate::root::{self, Manifest};
use crate::shadow::Shadow;
use permafrost_medium::LostPage;

impl Shadow {
    /// Makes the shadow a checkpoint named `id`, and deletes `replaces`, which may have this id too, in one step. On
    /// `Ok` it is durable. Two fences, for any amount of flushed data; a third if the journal is compacted.
    ///
    /// # Errors
    /// [`SealError`]: nothing was sealed, and the shadow's segments are free again; except after
    /// [`JournalError::Io`], when the next open shows whether it was, and the region takes no more writes until then.
    pub fn seal(
        self,
        id: CheckpointId,
        manifest: &[u8],
        replaces: Option<CheckpointId>,
    ) -> Result<Arc<StoredCheckpoint>, SealError> {
        self.seal_with(id, manifest, replaces, 0)
    }

    /// Seals as [`seal`](Self::seal) does; the checkpoint has those attribute bits from its first instant.
    ///
    /// # Errors
    /// The errors of [`seal`](Self::seal).
    pub fn seal_with(
        mut self,
        id: CheckpointId,
        manifest: &[u8],
        replaces: Option<CheckpointId>,
        attrs: u32,
    ) -> Result<Arc<StoredCheckpoint>, SealError> {
        let region = Arc::clone(&self.region);
        let medium = &region.space().medium;

        // 1. Write the manifest, if the root has no room for it, and the root behind the data: into the shadow, so a crash here leaves
        //    nothing. The root lists all segments, its own included, so it comes last.
        let manifest = if root::has_room(&mut self.out, manifest.len())? {
            Manifest::Inline(manifest)
        } else {
            let (map, _, len_bytes) = self.write_blob(&mut &*manifest)?;
            Manifest::Blob(map, len_bytes)
        };
        let (root, root_crc32) = root::write(&mut self.out, id, manifest)?;
        let manifest = manifest.place();

        // 2. Flush and fence data, maps, manifest, root: everything that the record will refer to is durable. Not
        //    after step 4: the record may become durable as soon as it is stored, long before its own fence, and
        //    would refer to pages that a crash then loses. Not after step 3: a session that seals a few pages would
        //    wait for the journal until all pages of another session are on the medium.
        if let Err(error) = self.out.flush_and_fence() {
            if LostPage::of(&error).is_none() {
                // A failed fence is final for the medium.
                region.journal().fail();
            }
            return Err(ShadowError::Io(error).into());
        }

        // 3. Take the journal. From here to the end no other operation decides anything, so the checks still hold at
        //    step 4.
        let mut journal = region.journal();
        if replaces != Some(id) && journal.live().contains_key(&id) {
            return Err(SealError::Exists { id });
        }
        //    If the key was erased since the dump began, nobody could read the checkpoint. A key is first taken from the
        //    keyring, and erased only if no segment is encrypted with it then.
        self.out.check_key()?;
        let change = Change::Seal {
            id,
            root,
            root_crc32,
            attrs,
            replaces,
        };
        //    If the active half is full this writes the other one, which counts for nothing before
        //    its header is there.
        let prepared = region.note(journal.prepare(medium, change))?;
        let order = journal.next_order();

        // 4. Write the record (after a compaction: the header), flush, fence. Now it is sealed. Not before step 2,
        //    see there.
        let (holdings, tail) = self.out.into_holdings();
        let lease = holdings.into_lease();
        if let Err(error) = region.note(journal.commit(medium, &prepared)) {
            if matches!(error, JournalError::Io(_)) {
                // The record may be durable and refer to these segments: no other shadow may get them.
                lease.leak();
            }
            return Err(error.into());
        }

        //    The next shadow may begin behind the root. Before the checkpoint is seen: a survey that sees it, and no shadow
        //    in the tail, relies on the segment not being written to any more (it drops the tail of what it moves).
        if let Some((segment, page)) = tail {
            region.space().offer_tail(segment, page);
        }

        // 5. Let readers see it, and no longer the replaced one: not before it is durable, as a checkpoint that was
        //    seen must not vanish. Freed segments are reused from here on, after the record that freed them became
        //    durable.
        let sealed = Arc::new(Sealed::new(
            id,
            region.space(),
            lease,
            (root, root_crc32),
            manifest,
            attrs,
            order,
        ));
        region.count_records(&journal);
        let checkpoint = StoredCheckpoint::of(&sealed);
        let replaced = region.publish(sealed, replaces);
        drop(journal);
        drop(replaced);
        Ok(checkpoint)
    }
}
