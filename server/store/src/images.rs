//! Stores the small images of a dump, from an images directory or from an agent.
//!
//! Each image is read once, piece by piece, written to the region and passed on at the same time: no image has to
//! fit in memory.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use permafrost_agent::remote::MapDigest;
use permafrost_criu::directory::ImagesDir;
use permafrost_pmem::{MapWriter, PAGE_SIZE, Shadow};
use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::{AddressSpace, Image, MAX_SMALL_IMAGES};

use super::StoreError;
use crate::DumpTap;
use crate::ImagesError;

/// Length from which on an image has pages of its own. Shorter ones are packed: most have some hundred bytes.
const PACKED_BYTES: u64 = 32 << 10;

/// Bytes of an image that are collected before they are written.
pub(super) const IMAGE_CHUNK: usize = 64 * PAGE_SIZE;

/// A source of small images, one after another. [`Read`] gives the bytes of the one that [`Self::next_image`]
/// named last.
pub trait SmallImages: Read {
    /// Goes on to the next image and returns its name, a plain one, and its length in bytes. `None` behind the last.
    ///
    /// # Errors
    /// The next image cannot be read.
    fn next_image(&mut self) -> Result<Option<(String, u64)>, StoreError>;

    /// Returns the reason of a failed [`Read`], if it is more precise than the error of the read.
    fn failure(&mut self) -> Option<StoreError> {
        None
    }
}

impl<S: SmallImages + ?Sized> SmallImages for &mut S {
    fn next_image(&mut self) -> Result<Option<(String, u64)>, StoreError> {
        (**self).next_image()
    }

    fn failure(&mut self) -> Option<StoreError> {
        (**self).failure()
    }
}

/// The small images of a directory: CRIU's files but for the pagemaps and pages that are stored as such.
pub(super) struct DirectoryImages {
    directory: ImagesDir,
    names: std::vec::IntoIter<String>,
    open: Option<File>,
}

impl DirectoryImages {
    pub(super) fn new(directory: ImagesDir, spaces: &[AddressSpace]) -> Result<Self, StoreError> {
        let names = directory.small_images(|name| holds_pages(name, spaces))?;
        Ok(Self {
            directory,
            names: names.into_iter(),
            open: None,
        })
    }

    /// Opens the images of a directory that a client has handed over.
    pub(super) fn of(images: OwnedFd, spaces: &[AddressSpace]) -> Result<Self, StoreError> {
        Self::new(ImagesDir::new(images)?, spaces)
    }
}

impl SmallImages for DirectoryImages {
    fn next_image(&mut self) -> Result<Option<(String, u64)>, StoreError> {
        let Some(name) = self.names.next() else {
            return Ok(None);
        };
        let file = self.directory.open(&name)?;
        let metadata = file
            .metadata()
            .map_err(StoreError::io(format!("stat image {name}")))?;
        self.open = Some(file);
        Ok(Some((name, metadata.len())))
    }
}

impl Read for DirectoryImages {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.open {
            Some(file) => file.read(into),
            None => Ok(0),
        }
    }
}

/// Returns true if an image is a pagemap or the pages of one of `spaces`, which are stored as such.
pub(super) fn holds_pages(name: &ImageName, spaces: &[AddressSpace]) -> bool {
    match name {
        ImageName::Pagemap(id) => spaces
            .iter()
            .any(|space| space.space_type() == id.space_type && space.id == id.id),
        ImageName::Pages(id) => spaces.iter().any(|space| space.pages_id == *id),
        _ => false,
    }
}

/// Stores small images in `shadow`, and passes them on to `tap`.
///
/// # Errors
/// One cannot be read, or is not as long as announced; there are too many; the region is full or fails.
pub(super) fn store_small(
    source: &mut dyn SmallImages,
    shadow: &mut Shadow,
    mut tap: Option<&mut dyn DumpTap>,
) -> Result<Vec<Image>, StoreError> {
    let mut images = Vec::new();
    let mut pack = ImagePack::default();
    let mut buffer = vec![0; IMAGE_CHUNK];
    while let Some((name, len_bytes)) = source.next_image()? {
        if images.len() >= MAX_SMALL_IMAGES {
            return Err(ImagesError::TooMany {
                limit: MAX_SMALL_IMAGES,
            }
            .into());
        }
        let mut storing = Storing {
            source: &mut *source,
            image: OpenImage::new(&name, len_bytes, shadow),
            shadow: &mut *shadow,
            failure: None,
        };
        if let Some(tap) = tap.as_deref_mut() {
            let passed = tap.image(&name, len_bytes, &mut storing);
            // A failure here is the reason why the receiver got no more.
            storing.check(&name)?;
            passed?;
        }
        loop {
            match storing.read(&mut buffer) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    storing.check(&name)?;
                    return Err(StoreError::io(format!("read image {name}"))(error));
                }
            }
        }
        let Storing { image, shadow, .. } = storing;
        images.push(image.finish(shadow, &mut pack)?);
    }
    pack.finish(shadow, &mut images)?;
    // The manifests of all copies name the images in this order.
    images.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(images)
}

/// Reads an image, and stores the bytes that were read.
struct Storing<'a> {
    source: &'a mut dyn SmallImages,
    image: OpenImage,
    shadow: &'a mut Shadow,
    failure: Option<StoreError>,
}

impl Storing<'_> {
    /// Fails with the reason of a read that failed.
    fn check(&mut self, name: &str) -> Result<(), StoreError> {
        match self.failure.take() {
            None => Ok(()),
            Some(StoreError::Io { source, .. }) => {
                Err(StoreError::io(format!("read image {name}"))(source))
            }
            Some(failure) => Err(failure),
        }
    }
}

impl Read for Storing<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = match self.source.read(into) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
            Err(error) => {
                let told = io::Error::new(error.kind(), error.to_string());
                let failure = self.source.failure();
                self.failure = Some(failure.unwrap_or_else(|| StoreError::io("read image")(error)));
                return Err(told);
            }
        };
        if let Err(error) = self.image.take(self.shadow, &into[..read]) {
            let told = io::Error::other(error.to_string());
            self.failure = Some(error);
            return Err(told);
        }
        Ok(read)
    }
}

/// An image that is received in pieces.
pub(super) struct OpenImage {
    name: String,
    len_bytes: u64,
    received_bytes: u64,
    map: MapWriter,
    buffer: Vec<u8>,
}

impl OpenImage {
    pub(super) fn new(name: &str, len_bytes: u64, shadow: &mut Shadow) -> Self {
        Self {
            name: name.to_owned(),
            len_bytes,
            received_bytes: 0,
            map: shadow.map(),
            // Most images have some hundred bytes.
            buffer: Vec::with_capacity(chunk_of(len_bytes)),
        }
    }

    pub(super) fn take(&mut self, shadow: &mut Shadow, mut bytes: &[u8]) -> Result<(), StoreError> {
        let after = self.received_bytes.saturating_add(bytes.len() as u64);
        if after > self.len_bytes {
            return Err(ImagesError::TooLong {
                image: self.name.clone(),
                announced_bytes: self.len_bytes,
            }
            .into());
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

    /// Writes the collected bytes. Only the last write of an image may be less than a whole number of pages.
    fn write(&mut self, shadow: &mut Shadow) -> Result<(), StoreError> {
        let collected = self.buffer.len();
        let first_index = (self.received_bytes - collected as u64) / PAGE_SIZE as u64;
        self.buffer.resize(collected.next_multiple_of(PAGE_SIZE), 0);
        shadow.append(&mut self.map, first_index, 0, &self.buffer, None)?;
        self.buffer.clear();
        Ok(())
    }

    /// Ends the image. The map root of a packed one is empty until [`ImagePack::finish`].
    pub(super) fn finish(
        mut self,
        shadow: &mut Shadow,
        pack: &mut ImagePack,
    ) -> Result<Image, StoreError> {
        if self.received_bytes != self.len_bytes {
            return Err(ImagesError::TooShort {
                image: self.name,
                received_bytes: self.received_bytes,
                announced_bytes: self.len_bytes,
            }
            .into());
        }
        if self.len_bytes < PACKED_BYTES {
            let mut digest = MapDigest::default();
            digest.image_end(0, &self.buffer);
            return Ok(Image {
                name: self.name,
                len_bytes: self.len_bytes,
                map_root: Vec::new(),
                map_digest: digest.finish().to_vec(),
                offset_bytes: pack.push(shadow, &self.buffer)?,
            });
        }
        self.write(shadow)?;
        let (root, stats) = shadow.finish(self.map)?;
        Ok(Image {
            name: self.name,
            len_bytes: self.len_bytes,
            map_root: root.to_bytes().to_vec(),
            map_digest: stats.digest.to_vec(),
            offset_bytes: 0,
        })
    }
}

/// Short images, one behind the other in the pages of one map: with pages and a map of its own, an image of a hundred
/// bytes would take two pages.
#[derive(Default)]
pub(super) struct ImagePack {
    map: Option<MapWriter>,
    /// Bytes of the page that is not full.
    buffer: Vec<u8>,
    written_bytes: u64,
}

impl ImagePack {
    /// Appends an image, and returns its place.
    fn push(&mut self, shadow: &mut Shadow, bytes: &[u8]) -> Result<u64, StoreError> {
        let at = self.written_bytes + self.buffer.len() as u64;
        self.buffer.extend_from_slice(bytes);
        let whole = self.buffer.len() / PAGE_SIZE * PAGE_SIZE;
        self.write(shadow, whole)?;
        Ok(at)
    }

    fn write(&mut self, shadow: &mut Shadow, len: usize) -> Result<(), StoreError> {
        let map = self.map.get_or_insert_with(|| shadow.map());
        let index = self.written_bytes / PAGE_SIZE as u64;
        shadow.append(map, index, 0, &self.buffer[..len], None)?;
        self.buffer.drain(..len);
        self.written_bytes += len as u64;
        Ok(())
    }

    /// Writes the rest, and names the map in the images that are packed.
    pub(super) fn finish(
        mut self,
        shadow: &mut Shadow,
        images: &mut [Image],
    ) -> Result<(), StoreError> {
        let padded = self.buffer.len().next_multiple_of(PAGE_SIZE);
        self.buffer.resize(padded, 0);
        self.write(shadow, padded)?;
        let root = match self.map {
            Some(map) => shadow.finish(map)?.0.to_bytes().to_vec(),
            None => return Ok(()),
        };
        for image in images.iter_mut().filter(|image| image.map_root.is_empty()) {
            image.map_root.clone_from(&root);
        }
        Ok(())
    }
}

/// Returns the size of the buffer for an image of this length.
fn chunk_of(len_bytes: u64) -> usize {
    usize::try_from(len_bytes)
        .unwrap_or(IMAGE_CHUNK)
        .min(IMAGE_CHUNK)
        .next_multiple_of(PAGE_SIZE)
}
