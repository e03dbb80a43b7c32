//! The content digest: 32 bytes that identify a checkpoint's contents and are equal for every copy of it
//! (docs/format.md, "Content digest").

use std::sync::Arc;

use permafrost_pmem::StoredCheckpoint;
use permafrost_protocol::manifest::{AddressSpace, Image, Manifest};
use sha2::{Digest, Sha256};

use super::dump::map_root;
use super::{StoreError, manifest_of};
use crate::ReadingError;

/// SHA-256 over the contents of a dump, independent of where and how they are stored.
pub type ContentDigest = [u8; 32];

/// Returns the digest of the address spaces alone, which is compared at CLOSE, before there are images.
pub(super) fn of_spaces(spaces: &[AddressSpace]) -> ContentDigest {
    let mut hash = Sha256::new();
    for space in spaces {
        hash.update(space.space_type.to_le_bytes());
        hash.update(space.id.to_le_bytes());
        hash.update(space.pages_id.to_le_bytes());
        hash.update(&space.map_digest);
    }
    hash.finalize().into()
}

/// Returns the digest of address spaces and images. The order of the images means nothing, so they are sorted
/// by name.
#[must_use]
pub fn of_whole(spaces: &[AddressSpace], images: &[Image]) -> ContentDigest {
    let mut by_name: Vec<_> = images.iter().collect();
    by_name.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    let mut hash = Sha256::new();
    hash.update(of_spaces(spaces));
    for image in by_name {
        let name_bytes = u32::try_from(image.name.len()).unwrap_or(u32::MAX);
        hash.update(name_bytes.to_le_bytes());
        hash.update(image.name.as_bytes());
        hash.update(image.len_bytes.to_le_bytes());
        hash.update(&image.map_digest);
    }
    hash.finalize().into()
}

/// Returns the digest of a sealed checkpoint: from its manifest, or, if that predates digests, from its maps.
pub(super) fn of_checkpoint(
    checkpoint: &Arc<StoredCheckpoint>,
) -> Result<ContentDigest, StoreError> {
    let manifest = manifest_of(checkpoint)?;
    match manifest.content_digest.as_slice().try_into() {
        Ok(digest) => Ok(digest),
        Err(_) => recomputed(checkpoint, manifest),
    }
}

/// Returns the address spaces of a checkpoint with the digests of their maps; those of an old manifest are
/// computed.
pub(super) fn with_digests(
    checkpoint: &Arc<StoredCheckpoint>,
    mut spaces: Vec<AddressSpace>,
) -> Result<Vec<AddressSpace>, StoreError> {
    for space in &mut spaces {
        if space.map_digest.is_empty() {
            let what = format!("address space {}", space.id);
            space.map_digest = of_map(checkpoint, &space.map_root, &what)?;
        }
    }
    Ok(spaces)
}

fn of_map(
    checkpoint: &Arc<StoredCheckpoint>,
    root: &[u8],
    what: &str,
) -> Result<Vec<u8>, StoreError> {
    let digest = checkpoint.map(&map_root(root)?).digest();
    let digest = digest.map_err(|source| ReadingError::Corrupt {
        part: format!("{what} of checkpoint {}", checkpoint.id()),
        source,
    })?;
    Ok(digest.to_vec())
}

/// Computes the digest from a sealed checkpoint's maps and checksums, ignoring the digests in its manifest.
pub(super) fn recomputed(
    checkpoint: &Arc<StoredCheckpoint>,
    mut manifest: Manifest,
) -> Result<ContentDigest, StoreError> {
    for space in &mut manifest.spaces {
        let what = format!("address space {}", space.id);
        space.map_digest = of_map(checkpoint, &space.map_root, &what)?;
    }
    for image in &mut manifest.images {
        image.map_digest = of_map(checkpoint, &image.map_root, &image.name)?;
    }
    Ok(of_whole(&manifest.spaces, &manifest.images))
}
