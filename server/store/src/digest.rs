//! The content digest: 32 bytes that identify a checkpoint's contents and are equal for every copy of it
//! (docs/format.md, "Content digest").

use std::sync::Arc;

use permafrost_agent::remote::MapDigest;
use permafrost_pmem::{BlobError, PAGE_SIZE, StoredCheckpoint};
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
        let map = checkpoint.map(&map_root(&image.map_root)?);
        // Of a packed image there is no map of its own.
        let mut image_digest = BlobDigest::default();
        let read = map.read_blob(image.offset_bytes, image.len_bytes, |bytes| {
            image_digest.push(bytes);
            Ok(())
        });
        read.map_err(|error| match error {
            BlobError::Page(source) => StoreError::Reading(ReadingError::Corrupt {
                part: format!("{} of checkpoint {}", image.name, checkpoint.id()),
                source,
            }),
            other => StoreError::io("read an image")(std::io::Error::other(other)),
        })?;
        image.map_digest = image_digest.finish().to_vec();
    }
    Ok(of_whole(&manifest.spaces, &manifest.images))
}

/// Digest of an image that comes in pieces of any length.
#[derive(Default)]
struct BlobDigest {
    digest: MapDigest,
    next_page: u64,
    rest: Vec<u8>,
}

impl BlobDigest {
    fn push(&mut self, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
        let whole = self.rest.len() / PAGE_SIZE * PAGE_SIZE;
        self.digest.pages(self.next_page, 0, &self.rest[..whole]);
        self.next_page += (whole / PAGE_SIZE) as u64;
        self.rest.drain(..whole);
    }

    fn finish(mut self) -> ContentDigest {
        self.digest.image_end(self.next_page, &self.rest);
        self.digest.finish()
    }
}
