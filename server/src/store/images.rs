//! The small images of a dump, out of an images directory into the store.

use std::io::Seek;

use permafrost_client::directory::ImagesDir;
use permafrost_pmem::Shadow;
use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::{AddressSpace, Image};

use super::StoreError;
use crate::replication::Copies;

/// Stores the small images of a directory in `shadow`: CRIU's files but for the pagemaps and pages of `spaces`. Copies
/// get each one, read a second time: what changed in between makes another digest there, and so is not sealed.
///
/// # Errors
/// A file cannot be read; the region is full or fails.
pub(super) fn store_small(
    directory: &ImagesDir,
    shadow: &mut Shadow,
    spaces: &[AddressSpace],
    mut copies: Option<&mut (dyn Copies + 'static)>,
) -> Result<Vec<Image>, StoreError> {
    let mut images = Vec::new();
    for name in directory.small_images(|name| holds_pages(name, spaces))? {
        let mut file = directory.open(&name)?;
        let (root, stats, len_bytes) = shadow.write_blob(&mut file)?;
        if let Some(copies) = copies.as_deref_mut() {
            file.rewind()
                .map_err(StoreError::io(format!("rewind image {name}")))?;
            copies.image(&name, len_bytes, &mut file)?;
        }
        images.push(Image {
            name,
            len_bytes,
            map_root: root.to_bytes().to_vec(),
            map_digest: stats.digest.to_vec(),
        });
    }
    Ok(images)
}

/// Says whether an image is a pagemap or the pages of one of `spaces`, which are stored as such.
pub(super) fn holds_pages(name: &ImageName, spaces: &[AddressSpace]) -> bool {
    match name {
        ImageName::Pagemap(id) => spaces
            .iter()
            .any(|space| space.space_type() == id.space_type && space.id == id.id),
        ImageName::Pages(id) => spaces.iter().any(|space| space.pages_id == *id),
        _ => false,
    }
}
