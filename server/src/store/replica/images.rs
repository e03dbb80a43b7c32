//! The small images of a copy, piece by piece.

use std::collections::BTreeSet;

use permafrost_pmem::{MapWriter, PAGE_SIZE, Shadow};
use permafrost_protocol::manifest::{Image, is_plain_file_name};

use super::super::dump::Dump;
use super::super::{StoreError, digest};
use super::{invalid, out_of_order};
use crate::replication::ContentDigest;

/// Bytes of an image that are collected before they are written.
pub(super) const IMAGE_CHUNK: usize = 64 * PAGE_SIZE;

/// Small images that a dump can have: CRIU writes some ten, and a few for each task.
const MAX_IMAGES: usize = 1 << 20;

/// The spaces are in; images come.
pub(super) struct Closed {
    pub(super) dump: Dump,
    pub(super) images: Vec<Image>,
    names: BTreeSet<String>,
    open: Option<OpenImage>,
    pub(super) prepared: Option<ContentDigest>,
}

/// An image that comes in pieces.
struct OpenImage {
    name: String,
    len_bytes: u64,
    received_bytes: u64,
    map: MapWriter,
    buffer: Vec<u8>,
}

impl Closed {
    pub(super) fn new(dump: Dump) -> Self {
        Self {
            dump,
            images: Vec::new(),
            names: BTreeSet::new(),
            open: None,
            prepared: None,
        }
    }

    pub(super) fn begin_image(&mut self, name: &str, len_bytes: u64) -> Result<(), StoreError> {
        self.end_image()?;
        if self.prepared.is_some() {
            return Err(out_of_order("given images"));
        }
        if !is_plain_file_name(name) || self.names.len() >= MAX_IMAGES {
            return Err(invalid(format!("image {name:?} is not taken")));
        }
        if !self.names.insert(name.to_owned()) {
            return Err(invalid(format!("image {name:?} came twice")));
        }
        self.open = Some(OpenImage {
            name: name.to_owned(),
            len_bytes,
            received_bytes: 0,
            map: self.dump.shadow.map(),
            buffer: Vec::with_capacity(IMAGE_CHUNK),
        });
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
        self.images.push(open.finish(&mut self.dump.shadow)?);
        Ok(())
    }

    pub(super) fn prepare(&mut self) -> Result<ContentDigest, StoreError> {
        if let Some(digest) = self.prepared {
            return Ok(digest);
        }
        self.end_image()?;
        self.dump.shadow.flush()?;
        // As a directory is read: so the manifests of all copies name images in one order.
        self.images.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let digest = digest::of_whole(&self.dump.spaces, &self.images);
        self.prepared = Some(digest);
        Ok(digest)
    }
}

impl OpenImage {
    fn take(&mut self, shadow: &mut Shadow, mut bytes: &[u8]) -> Result<(), StoreError> {
        let after = self.received_bytes.saturating_add(bytes.len() as u64);
        if after > self.len_bytes {
            return Err(invalid(format!(
                "image {} is longer than the {} bytes announced",
                self.name, self.len_bytes
            )));
        }
        while !bytes.is_empty() {
            let part = bytes.len().min(IMAGE_CHUNK - self.buffer.len());
            self.buffer.extend_from_slice(&bytes[..part]);
            self.received_bytes += part as u64;
            bytes = &bytes[part..];
            if self.buffer.len() == IMAGE_CHUNK {
                self.write(shadow)?;
            }
        }
        Ok(())
    }

    /// Writes what is collected; only the last time is it less than a whole number of pages.
    fn write(&mut self, shadow: &mut Shadow) -> Result<(), StoreError> {
        let collected = self.buffer.len();
        let first_index = (self.received_bytes - collected as u64) / PAGE_SIZE as u64;
        self.buffer.resize(collected.next_multiple_of(PAGE_SIZE), 0);
        shadow.append(&mut self.map, first_index, 0, &self.buffer, None)?;
        self.buffer.clear();
        Ok(())
    }

    fn finish(mut self, shadow: &mut Shadow) -> Result<Image, StoreError> {
        if self.received_bytes != self.len_bytes {
            return Err(invalid(format!(
                "image {} has {} bytes of {}",
                self.name, self.received_bytes, self.len_bytes
            )));
        }
        self.write(shadow)?;
        let (root, stats) = shadow.finish(self.map)?;
        Ok(Image {
            name: self.name,
            len_bytes: self.len_bytes,
            map_root: root.to_bytes().to_vec(),
            map_digest: stats.digest.to_vec(),
        })
    }
}
