//! `inventory.img`: version and kind of a dump's images (`images/inventory.proto`).

use prost::Message;

use super::{Head, ImageError, ImageReader, ImageWriter};

/// `img_version` of images without the common magic (before CRIU 1.1). Not read.
pub const IMAGES_V1: u32 = 1;
/// `img_version` of all images since.
pub const IMAGES_V1_1: u32 = 2;

/// Only record of the inventory, as far as it is needed. To change one, use [`super::Fields`].
#[derive(Clone, PartialEq, Message)]
pub struct Inventory {
    /// Version of the images: [`IMAGES_V1_1`].
    #[prost(uint32, required, tag = "1")]
    pub img_version: u32,
    /// Namespaces of the root process, encoded.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub root_ids: Option<Vec<u8>>,
    /// Microseconds since boot at which the dump was taken; distinguishes processes with a reused pid in an
    /// incremental dump.
    #[prost(uint64, optional, tag = "8")]
    pub dump_uptime: Option<u64>,
    /// Mode in which a pre-dump read the memory, as CRIU numbers it.
    #[prost(uint32, optional, tag = "9")]
    pub pre_dump_mode: Option<u32>,
    /// True if TCP connections were closed (`--tcp-close`); a restore needs the option too.
    #[prost(bool, optional, tag = "10")]
    pub tcp_close: Option<bool>,
    /// Method by which the network was locked, as CRIU numbers it.
    #[prost(uint32, optional, tag = "11")]
    pub network_lock_method: Option<u32>,
    /// Plugins without which it cannot be restored.
    #[prost(message, optional, tag = "12")]
    pub plugins: Option<Plugins>,
    /// Random id of the CRIU run that took the dump.
    #[prost(string, optional, tag = "13")]
    pub dump_criu_run_id: Option<String>,
    /// True if it was dumped with `--allow-uprobes`; a restore needs the option too.
    #[prost(bool, optional, tag = "14")]
    pub allow_uprobes: Option<bool>,
}

/// The plugins a dump needs.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Plugins {
    /// Names of the plugins.
    #[prost(string, repeated, tag = "12")]
    pub plugins: Vec<String>,
}

impl Inventory {
    /// Reads `inventory.img`.
    ///
    /// # Errors The image is damaged, or its version is not [`IMAGES_V1_1`].
    pub fn read(bytes: &[u8]) -> Result<Self, ImageError> {
        let inventory: Self = ImageReader::new(bytes, Head::Inventory)?
            .only_record("inventory entry")?
            .decode()?;
        match inventory.img_version {
            IMAGES_V1_1 => Ok(inventory),
            version => Err(ImageError::UnsupportedVersion { version }),
        }
    }

    /// Writes an `inventory.img` with these fields and no others.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        let mut image = ImageWriter::new(Head::Inventory);
        image.message(self);
        image.finish()
    }
}
