//! Checkpoints on persistent memory: media, regions, shadow segments and the seal.
//!
//! ```text
//!  pages ──▶ Shadow::append ──▶ segments of this session alone ──┐
//!              │ zero? equal to the parent's? CRC32              │ referenced by nothing
//!              ▼                                                 │ until …
//!            MapWriter: page map, bulk-loaded as it comes ───────┤
//!                                                                ▼
//!  Shadow::seal: data, fence │ manifest and root, fence │ one journal record, fence
//!                                                                ▼
//!  Region::checkpoint ──▶ StoredCheckpoint ──▶ PageMap ──▶ runs ──▶ pages, each verified
//! ```
//!
//! A [`Medium`] is memory that can be read, written, flushed and fenced. A [`Region`] is a formatted medium: two
//! superblocks, a journal, segments. All writes of a session go through a [`Shadow`] into segments that nothing
//! refers to; a crash or a dropped shadow leaves them free. [`Shadow::seal`] makes them a [`StoredCheckpoint`], once
//! and for all, with one journal record. `docs/format.md` describes every byte.
//!
//! This crate uses no network and no async runtime, does not depend on CRIU's formats, and is the only one of the
//! project with `unsafe` code, besides `permafrost-medium` below it.

#![allow(
    unsafe_code,
    reason = "who may write where is decided here, so the promises that a medium asks for are made here"
)]

mod alloc;
mod checkpoint;
mod clean;
mod cool;
mod damage;
mod drain;
mod encrypted;
mod error;
mod geometry;
mod map;
mod media;
mod members;
mod readers;
mod recover;
mod region;
mod root;
mod seal;
mod segment;
mod shadow;
mod space;
mod superblock;
mod table;

pub use checkpoint::{ATTR_PINNED, ATTR_PROVISIONAL, ATTR_PUBLISHED, CopyId, StoredCheckpoint};
pub use clean::{Cleaned, Survey};
pub use damage::{RegionFailure, UnreadableCheckpoint};
pub use drain::{Drained, OccupiedSlot, StuckSlot};
pub use encrypted::Reencrypted;
pub use error::{
    BlobError, CleanError, CloseError, FormatError, GrowError, HealError, MapFault, MediaError,
    OpenError, PageError, SealError, ShadowError, SuperblockFault,
};
pub use ids::{CheckpointId, PageNo, ParseIdError, RegionUuid, SegmentNo};
pub use map::{
    FindEqual, Kept, MapCursor, MapRoot, MapStats, MapWriter, PageExtent, PageMap, Piece,
    ProofRecord, ProofScope, RunKind, Runs, StoredRun,
};
pub use media::RegionMedium;
pub use members::{
    FindMember, FoundMember, MediumState, NoTierName, RegionMember, TierName, member_uuid,
};
pub use permafrost_cipher::{DataKey, KeyId, Keyring};
use permafrost_journal as journal;
pub use permafrost_journal::{JournalDamage, JournalError, JournalFault};
pub use permafrost_layout as layout;
use permafrost_layout::{by_id, ids, slots};
pub use permafrost_liveness::{MediumUsage, RegionUsage, has_grown};
pub use permafrost_medium::heap;
pub use permafrost_medium::{
    ColdIdentity, ColdStore, Emulation, Flushed, Guarantee, LostPage, Medium, MediumError,
    MediumKind, NoDevice, OpenOptions, PAGE_SIZE, create_medium_in_memory, emulate,
    is_damaged_object, open_medium, open_sparse_medium, refer_to_memory, sim,
};
pub use recover::{RecoverOptions, RecoveryReport, RegionSummary};
pub use region::{FormatOptions, Region, RegionEntry};
pub use shadow::Shadow;

/// [`PAGE_SIZE`] as an offset.
pub(crate) const PAGE_BYTES: u64 = PAGE_SIZE as u64;
