//! A cold medium: most of its pages are compressed objects in an object store, one object a block.
//!
//! ```text
//! block 3 of the file  │hdr│   │   │nod│   │   │     pages that stay: headers, map nodes, roots
//!                        ▲   └─┬─┘       └─┬─┘
//! index, entry 3         │     └─────┬─────┘
//!   object 7, pages kept ┘           ▼
//! object store         UUID/3-7: the other pages, compressed, with their own checksum
//! ```
//!
//! The file is sparse and has the layout of any medium of a region; pages that have been moved out are holes. So what a
//! region reads to open, list and survey checkpoints is on the node, and the store is asked for page contents only.
//! A page that is out is copied out of its object ([`Medium::read`]), and never lent ([`Medium::bytes`]).
//!
//! A block is moved out before the region refers to it, in this order: the object, the index entry, the hole. A crash
//! leaves an object that no entry names, or an entry of a block that is free: the region has both removed later.
//!
//! The store carries a marker, an object that names region and medium. Where the marker is missing or another's, the
//! store is away: a directory where nothing is mounted must not count as one that has lost its objects.
//!
//! [`Medium::read`]: permafrost_medium::Medium::read
//! [`Medium::bytes`]: permafrost_medium::Medium::bytes

#![allow(
    unsafe_code,
    reason = "the medium passes the promises of its callers on to the file's"
)]

mod error;
mod index;
mod marker;
mod medium;
mod object;
mod objects;
mod site;

pub use error::ColdError;
pub use medium::ColdMedium;
pub use objects::{DirectoryObjects, ListedObject, MemoryObjects, ObjectError, Objects};
pub use site::{ColdSiteError, Connect, create_cold, is_cold, open_cold, remove_cold};
