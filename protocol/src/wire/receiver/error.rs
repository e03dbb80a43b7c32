//! Errors that a sender can make.

use super::MAX_IMAGES;
use crate::pageserver::{MAX_SPACES, SpaceId};
use crate::wire::frame::{FrameError, Kind};

/// A sender did not keep to the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReceiverError {
    /// A header that no sender sends.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A frame is missing, or comes again.
    #[error("frame {found} came, and {expected} was expected")]
    OutOfOrder {
        /// Sequence that was expected.
        expected: u64,
        /// Sequence of the frame that came.
        found: u64,
    },
    /// Pages before any address space.
    #[error("a frame of kind {kind:?} before any address space")]
    BeforeSpace {
        /// Kind of the frame that came.
        kind: Kind,
    },
    /// An image, or the end, before `Close`.
    #[error("a frame of kind {kind:?} before Close")]
    BeforeClose {
        /// Kind of the frame that came.
        kind: Kind,
    },
    /// Address spaces or pages after `Close`, or another.
    #[error("a frame of kind {kind:?} after Close")]
    AfterClose {
        /// Kind of the frame that came.
        kind: Kind,
    },
    /// Anything after `Prepare`.
    #[error("a frame of kind {kind:?} after Prepare")]
    AfterPrepare {
        /// Kind of the frame that came.
        kind: Kind,
    },
    /// An address space twice.
    #[error("{space} came twice")]
    OpenedTwice {
        /// Id of the space.
        space: SpaceId,
    },
    /// More than a dump has.
    #[error("more than {MAX_SPACES} address spaces in one dump")]
    TooManySpaces,
    /// The pages overlap earlier pages, or precede them.
    #[error("pages from page {index}, and all below {expected} are past")]
    NotAscending {
        /// Virtual page number of the first.
        index: u64,
        /// The lowest that may come.
        expected: u64,
    },
    /// More than a dump has.
    #[error("more than {MAX_IMAGES} images in one dump")]
    TooManyImages,
    /// The name is not a plain file name.
    #[error("image name {name:?} is no plain file name")]
    BadName {
        /// The name; bytes that are not text are replaced.
        name: String,
    },
    /// Two images of one name.
    #[error("two images are named {name}")]
    ImageTwice {
        /// Name that both images have.
        name: String,
    },
    /// More than was announced, or data of no image.
    #[error("{decoded_bytes} bytes of an image that has {left_bytes} left")]
    TooMuchData {
        /// Bytes in the frame.
        decoded_bytes: u64,
        /// Bytes that may come.
        left_bytes: u64,
    },
    /// The next image, or the end, before all of an image.
    #[error("an image ended {left_bytes} bytes before its end")]
    Unfinished {
        /// Bytes that are missing.
        left_bytes: u64,
    },
    /// A header before the frame in hand was taken: a mistake of the caller's.
    #[error("frame {sequence} was not taken yet")]
    NotTaken {
        /// The frame in hand.
        sequence: u64,
    },
    /// Something for a frame that was not announced: a mistake of the caller's.
    #[error("no such frame was announced")]
    NothingPending,
}
