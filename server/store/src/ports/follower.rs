//! A second receiver of a dump's pages, which decides about the dump's seal.

use std::io::Read;
use std::time::Duration;

use permafrost_protocol::control;
use permafrost_protocol::pageserver::SpaceId;

use crate::{ContentDigest, PreparedDump, StoreError};

/// Takes part in a dump from its opening to its seal. Dropping it before the seal ends its part.
pub trait Follower: Send {
    /// Returns the receiver of the dump's pages; `None` if there is none.
    fn tap(&mut self) -> Option<&mut dyn DumpTap>;

    /// Seals a dump whose pages and images are durable, or returns why it is not sealed. `wanted` returns false once
    /// nobody waits for the seal: see [`check_wanted`](crate::check_wanted).
    ///
    /// # Errors
    /// The dump is not a checkpoint.
    fn seal(
        self: Box<Self>,
        dump: PreparedDump<'_>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<control::Checkpoint, StoreError>;
}

/// Receives what a dump stores, while it is stored. Methods block while the receiver is slower than the dump, so that
/// no pages accumulate. Failures to receive pages appear at [`DumpTap::close`].
pub trait DumpTap: Send {
    /// Returns true if the receiver has the parent. If not, pages in the parent are passed on as pages, and
    /// [`DumpTap::parent`] is not called.
    fn takes_parent(&self) -> bool {
        true
    }

    /// Returns true if anything is done with the pages.
    fn any(&self) -> bool {
        true
    }

    /// Returns the time that the dump has waited for the receiver so far, before [`DumpTap::close`].
    fn waited(&self) -> Duration {
        Duration::ZERO
    }

    /// Begins an address space.
    fn space(&mut self, space: SpaceId, pages_id: u32);

    /// Passes on whole pages, neither zero nor in the parent.
    fn pages(&mut self, first_index: u64, flags: u16, bytes: &[u8]);

    /// Passes on pages that are all zero.
    fn zero(&mut self, first_index: u64, flags: u16, pages: u64);

    /// Passes on references to pages that are in the parent at the same place.
    fn parent(&mut self, first_index: u64, flags: u16, pages: u64);

    /// Ends the address spaces: the receiver makes them durable while they are made durable here. Does not wait.
    fn end(&mut self) {}

    /// Waits until the receiver has the address spaces, which were ended, and are durable here with the digest `own`.
    ///
    /// # Errors
    /// The receiver does not have them; the dump fails.
    fn close(&mut self, own: ContentDigest) -> Result<(), StoreError>;

    /// Passes on a small image.
    ///
    /// # Errors
    /// The image cannot be read.
    fn image(
        &mut self,
        name: &str,
        len_bytes: u64,
        contents: &mut dyn Read,
    ) -> Result<(), StoreError>;
}
