//! The small images of a dump, out of the directory that its caller handed over.

use std::io::{self, Read};

use permafrost_protocol::control::{self, ErrorCode};
use permafrost_protocol::images::ImageName;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::frame::MAX_IMAGE_BYTES;

use crate::directory::ImagesDir;

/// Address spaces whose pages came another way: their pagemaps and pages are no small images.
#[derive(Clone, Debug, Default)]
pub(super) struct Served {
    /// Each, with the `pages_id` that it got.
    pub(super) spaces: Vec<(SpaceId, u32)>,
}

impl Served {
    /// Whether a pagemap or pages file is one of theirs.
    pub(super) fn has(&self, name: &ImageName) -> bool {
        let mut spaces = self.spaces.iter();
        match name {
            ImageName::Pagemap(id) => spaces.any(|(space, _)| space == id),
            ImageName::Pages(id) => spaces.any(|(_, pages_id)| pages_id == id),
            _ => false,
        }
    }
}

/// A small image, whole.
pub(super) fn read(images: &ImagesDir, name: &str) -> Result<Vec<u8>, control::Error> {
    let file = images.open(name)?;
    let mut bytes = Vec::new();
    file.take(MAX_IMAGE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| failed(&format!("read image {name}"), &error))?;
    if bytes.len() as u64 > MAX_IMAGE_BYTES {
        return Err(control::Error {
            code: ErrorCode::Invalid.into(),
            message: format!("image {name} is longer than {MAX_IMAGE_BYTES} bytes"),
            hint: String::new(),
        });
    }
    Ok(bytes)
}

/// What the system did not do.
pub(super) fn failed(action: &str, error: &io::Error) -> control::Error {
    control::Error {
        code: ErrorCode::Internal.into(),
        message: format!("{action}: {error}"),
        hint: String::new(),
    }
}
