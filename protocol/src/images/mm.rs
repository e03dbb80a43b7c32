//! `mm-N.img`: a process's mappings (`images/mm.proto`, `images/vma.proto`).

use prost::Message;

use super::magic::MM_MAGIC;
use super::{Head, ImageError, ImageReader, ImageWriter};

/// Only record of the image, as far as it is needed.
#[derive(Clone, PartialEq, Message)]
struct MmRecord {
    #[prost(message, repeated, tag = "14")]
    mappings: Vec<Mapping>,
}

/// Memory mapping, as far as it is needed.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Mapping {
    /// First address of the mapping.
    #[prost(uint64, required, tag = "1")]
    pub start: u64,
    /// The address behind it.
    #[prost(uint64, required, tag = "2")]
    pub end: u64,
}

/// Reads the mappings of `mm-N.img`, in the order of the image. Releases before CRIU 1.6 kept them in a separate
/// file: then the result is empty.
///
/// # Errors
/// The image is damaged.
pub fn read_mappings(bytes: &[u8]) -> Result<Vec<Mapping>, ImageError> {
    let record: MmRecord = ImageReader::new(bytes, Head::Common(MM_MAGIC))?
        .only_record("memory entry")?
        .decode()?;
    Ok(record.mappings)
}

/// Writes an `mm-N.img` with these mappings and nothing else: enough to be read here, not by CRIU.
#[must_use]
pub fn write_mappings(mappings: &[Mapping]) -> Vec<u8> {
    let mut image = ImageWriter::new(Head::Common(MM_MAGIC));
    image.message(&MmRecord {
        mappings: mappings.to_vec(),
    });
    image.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_round_trip_and_damage_is_an_error() {
        let mappings = [(0x1000, 0x3000), (0x7f00_0000_0000, 0x7f00_0000_1000)]
            .map(|(start, end)| Mapping { start, end });
        let bytes = write_mappings(&mappings);
        assert_eq!(read_mappings(&bytes).unwrap(), mappings);
        assert_eq!(read_mappings(&write_mappings(&[])).unwrap(), []);
        for len in 0..bytes.len() {
            assert!(read_mappings(&bytes[..len]).is_err(), "{len}");
        }
    }
}
