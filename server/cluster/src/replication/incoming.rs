//! Stores frames from another node in a copy of this node's store.

use permafrost_protocol::wire::frame::Kind;
use permafrost_store::{CopyDump, StoreError};
use permafrost_transport::peer::ReceivedFrame;

use crate::error::CopyingError;

/// Applies a frame of pages or of an image.
///
/// # Errors
/// Those of the store.
pub fn apply(dump: &mut CopyDump, frame: &ReceivedFrame) -> Result<(), StoreError> {
    let header = &frame.header;
    let (index, flags) = (header.index, header.flags);
    match header.kind {
        Kind::Space => {
            let space = header
                .space()
                .map_err(|source| CopyingError::Space { source })?;
            dump.space(space, header.pages)
        }
        Kind::Pages => dump.pages(index, flags, &frame.payload),
        Kind::Zero => dump.zero(index, flags, header.pages.into()),
        Kind::Parent => dump.parent(index, flags, header.pages.into()),
        Kind::Image => {
            let name = std::str::from_utf8(&frame.payload).map_err(|_| CopyingError::ImageName)?;
            dump.begin_image(name, index)
        }
        Kind::ImageData => dump.image_data(&frame.payload),
        Kind::Close | Kind::Prepare => Ok(()),
    }
}
