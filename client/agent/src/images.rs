//! Small images of a dump, read from the directory that the caller handed over.

use std::io::{self, Read};

use permafrost_criu::directory::ImagesDir;
use permafrost_protocol::control;
use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::MAX_SMALL_IMAGES;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_transport::peer::DumpSender;

use super::nodes::refusal;
use crate::error::DumpError;

/// Address spaces whose pages came through the page server: their pagemap and pages files are not small images.
#[derive(Clone, Debug, Default)]
pub(super) struct Served {
    /// Each address space, with the `pages_id` that it got.
    pub(super) spaces: Vec<(SpaceId, u32)>,
}

impl Served {
    /// Returns true if `name` is the pagemap or pages file of one of the spaces.
    pub(super) fn has(&self, name: &ImageName) -> bool {
        let mut spaces = self.spaces.iter();
        match name {
            ImageName::Pagemap(id) => spaces.any(|(space, _)| space == id),
            ImageName::Pages(id) => spaces.any(|(_, pages_id)| pages_id == id),
            _ => false,
        }
    }
}

/// Refuses more small images than a node takes, with a message: the node would only end the conversation.
pub(super) fn check_count(images: usize) -> Result<(), control::Error> {
    if images <= MAX_SMALL_IMAGES {
        return Ok(());
    }
    Err(DumpError::TooManyImages {
        images,
        limit: MAX_SMALL_IMAGES,
    }
    .into())
}

/// Bytes of an image that are read at once.
const CHUNK_BYTES: usize = 256 << 10;

/// Sends a small image, piece by piece.
pub(super) fn send(
    images: &ImagesDir,
    name: &str,
    sender: &mut DumpSender,
) -> Result<(), control::Error> {
    let failed = |source| DumpError::Image {
        image: name.to_owned(),
        source,
    };
    let mut file = images.open(name)?;
    let metadata = file.metadata().map_err(failed)?;
    let mut left_bytes = metadata.len();
    sender
        .begin_image(name, left_bytes)
        .map_err(|error| refusal(&error))?;
    // A byte more than there should be, to notice that it grows.
    let wanted = usize::try_from(left_bytes).unwrap_or(CHUNK_BYTES);
    let mut buffer = vec![0; CHUNK_BYTES.min(wanted.saturating_add(1))];
    loop {
        let read = match file.read(&mut buffer) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(failed(error).into()),
        };
        let bytes = u64::try_from(read).unwrap_or(u64::MAX);
        if read == 0 && left_bytes == 0 {
            return Ok(());
        }
        if read == 0 || bytes > left_bytes {
            return Err(DumpError::ImageChanged {
                image: name.to_owned(),
            }
            .into());
        }
        left_bytes -= bytes;
        sender
            .image_data(&buffer[..read])
            .map_err(|error| refusal(&error))?;
    }
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::ErrorCode;

    use super::*;

    #[test]
    fn too_many_images_are_refused_in_words() {
        check_count(MAX_SMALL_IMAGES).unwrap();
        let refused = check_count(MAX_SMALL_IMAGES + 1).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::Invalid);
        assert!(
            refused.message.contains("131073 small images"),
            "{refused:?}"
        );
        assert!(refused.hint.contains("subtrees"), "{refused:?}");
    }
}
