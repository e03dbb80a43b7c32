//! Stores the small images of a copy, piece by piece.

use std::collections::BTreeSet;

use permafrost_protocol::manifest::{Image, MAX_SMALL_IMAGES, is_plain_file_name};

use super::super::dump::Dump;
use super::super::images::{ImagePack, OpenImage};
use super::super::{StoreError, digest};
use super::out_of_order;
use crate::{ContentDigest, CopyError};

/// A copy whose address spaces are complete; its images follow.
pub(super) struct Closed {
    pub(super) dump: Dump,
    pub(super) images: Vec<Image>,
    names: BTreeSet<String>,
    open: Option<OpenImage>,
    pack: ImagePack,
    pub(super) prepared: Option<ContentDigest>,
}

impl Closed {
    pub(super) fn new(dump: Dump) -> Self {
        Self {
            dump,
            images: Vec::new(),
            names: BTreeSet::new(),
            open: None,
            pack: ImagePack::default(),
            prepared: None,
        }
    }

    pub(super) fn begin_image(&mut self, name: &str, len_bytes: u64) -> Result<(), StoreError> {
        self.end_image()?;
        if self.prepared.is_some() {
            return Err(out_of_order("given images"));
        }
        if !is_plain_file_name(name) || self.names.len() >= MAX_SMALL_IMAGES {
            return Err(CopyError::ImageRefused {
                name: name.to_owned(),
            }
            .into());
        }
        if !self.names.insert(name.to_owned()) {
            return Err(CopyError::ImageTwice {
                name: name.to_owned(),
            }
            .into());
        }
        self.open = Some(OpenImage::new(name, len_bytes, &mut self.dump.shadow));
        Ok(())
    }

    pub(super) fn image_data(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let Some(open) = self.open.as_mut() else {
            return Err(out_of_order("given bytes of no image"));
        };
        open.take(&mut self.dump.shadow, bytes)
    }

    fn end_image(&mut self) -> Result<(), StoreError> {
        let Some(open) = self.open.take() else {
            return Ok(());
        };
        let image = open.finish(&mut self.dump.shadow, &mut self.pack)?;
        self.images.push(image);
        Ok(())
    }

    pub(super) fn prepare(&mut self) -> Result<ContentDigest, StoreError> {
        if let Some(digest) = self.prepared {
            return Ok(digest);
        }
        self.end_image()?;
        let pack = std::mem::take(&mut self.pack);
        pack.finish(&mut self.dump.shadow, &mut self.images)?;
        self.dump.shadow.flush()?;
        // In the order in which a directory is read, so that the manifests of all copies name the images in one
        // order.
        self.images.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let digest = digest::of_whole(&self.dump.spaces, &self.images);
        self.prepared = Some(digest);
        Ok(digest)
    }
}
