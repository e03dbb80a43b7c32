//! Archives of container checkpoints, as `podman container checkpoint --export`, CRI-O and containerd (kubelet's
//! checkpoint API) write them and checkpointctl reads them: a tar, compressed or not, with CRIU's images in
//! `checkpoint/` and the runtime's own files beside them.
//!
//! ```text
//! archive.tar.zst                       images directory, as the daemon takes it
//! ├── config.dump, spec.dump, …  ────▶  archive-N.img   any member that is no image, under a number
//! ├── rootfs-diff.tar            ────▶  archive-N.img   opaque: never unpacked
//! └── checkpoint/
//!     ├── inventory.img, …       ────▶  inventory.img, …
//!     ├── pagemap-1.img          ────▶  pagemap-1.img, and archive-N.img, as the store divides its runs anew
//!     └── pages-1.img            ────▶  pages-1.img     stored page by page, compared with the last generation
//! headers, padding, end          ────▶  archive.img     the index: those bytes, and which file goes where
//! ```
//!
//! Put together again, the tar is the one that came, byte for byte: owners, modes, times and order are in the headers,
//! which are kept as they are. Nothing of a member's path becomes a path on this machine.

#![forbid(unsafe_code)]

mod compression;
mod error;
mod files;
mod headers;
mod index;
mod pack;
mod pages;
mod paths;
mod skeleton;
mod unpack;

#[cfg(test)]
mod tests;

pub use compression::ArchiveCompression;
pub use error::ArchiveError;
pub use files::{check_room, input, pack_into_file, room};
pub use index::INDEX_NAME;
pub use pack::{Packed, pack};
pub use unpack::{ArchiveLimits, Unpacked, unpack};
