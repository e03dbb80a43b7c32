//! CRIU's image files: their framing, and the few whose contents Permafrost reads or writes.
//!
//! Sans-I/O, over byte slices. Facts are from CRIU's `criu/image.c`, `criu/image-desc.c`,
//! `criu/include/magic.h`, `criu/pagemap.c` and `images/*.proto`, release 4.2. Image files carry no checksum:
//! a damaged one decodes to something else as often as to an error.

mod error;
mod fields;
mod framing;
mod inventory;
mod lazy;
mod magic;
mod mm;
mod names;
mod pagemap;
mod pstree;
mod stats;
mod tasks;

pub use error::ImageError;
pub use fields::{Field, Fields};
pub use framing::{ImageReader, ImageWriter, Record};
pub use inventory::{IMAGES_V1, IMAGES_V1_1, Inventory, Plugins};
pub use magic::{
    COMMON_MAGIC, FILES_MAGIC, Head, INVENTORY_MAGIC, MM_MAGIC, PAGEMAP_MAGIC, PSTREE_MAGIC,
    SERVICE_MAGIC, STATS_MAGIC,
};
pub use mm::{Mapping, read_executable, read_mappings, write_mappings};
pub use names::{ImageName, mm_name, pagemap_name, pages_name};
pub use pagemap::{
    FIRST_SERVED_PAGES_ID, Pagemap, PagemapEntry, PagemapReader, PagemapStream, PagemapWriter,
};
pub use pstree::{Process, read_pstree, write_pstree};
pub use stats::{DumpStats, RestoreStats, Stats};
pub use tasks::{
    DumpedDescriptor, DumpedFile, RegularFile, file_kind, read_core, read_descriptors, read_files,
    read_files_id,
};
