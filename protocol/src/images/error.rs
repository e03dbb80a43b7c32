//! Errors in image files.

/// Error in an image file. Offsets are bytes from the beginning of the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The file ends before its head, a record's length or a record does.
    #[error("the image ends {missing_bytes} bytes too early, in what begins at byte {offset}")]
    Truncated {
        /// Offset at which the incomplete piece begins.
        offset: usize,
        /// Number of bytes that are missing.
        missing_bytes: usize,
    },
    /// The file is of another kind, or not an image of CRIU.
    #[error("magic {found:#010x} at byte {offset}, expected {expected:#010x}")]
    BadMagic {
        /// Offset of the magic number.
        offset: usize,
        /// Magic number that was expected.
        expected: u32,
        /// Magic number that was found.
        found: u32,
    },
    /// A record is not the protobuf message it should be.
    #[error("the record at byte {offset} does not decode")]
    Undecodable {
        /// Offset of the record's length.
        offset: usize,
        /// Error of the decoder.
        #[source]
        source: prost::DecodeError,
    },
    /// A record with fields that this version does not know, in a file that it would have to rewrite.
    #[error(
        "the record at byte {offset} has field {field}, which this version does not know and would lose"
    )]
    UnknownField {
        /// Offset of the record's length.
        offset: usize,
        /// The field's number.
        field: u32,
    },
    /// A file without a record it must have.
    #[error("the image has no {record}")]
    MissingRecord {
        /// Name of the record that is missing.
        record: &'static str,
    },
    /// Something after the last record that the file can have.
    #[error("{extra_bytes} bytes after the last record, at byte {offset}")]
    TrailingBytes {
        /// Offset of the first extra byte.
        offset: usize,
        /// Number of extra bytes.
        extra_bytes: usize,
    },
    /// Images of a version that is not read.
    #[error("images version {version} is not supported (2 is: CRIU 1.1 and later)")]
    UnsupportedVersion {
        /// Version that the images have.
        version: u32,
    },
    /// A pagemap entry that describes no pages, or none that can exist.
    #[error(
        "the pagemap entry at byte {offset} ({nr_pages} pages at {vaddr:#x}) is no range of whole pages"
    )]
    BadRange {
        /// Offset of the entry's length.
        offset: usize,
        /// Address of the first page.
        vaddr: u64,
        /// Number of pages.
        nr_pages: u64,
    },
    /// A pagemap entry that begins before the end of the one before it.
    #[error(
        "the pagemap entry at byte {offset} begins at {vaddr:#x}, before {expected:#x}, where the last one ended"
    )]
    NotAscending {
        /// Offset of the entry's length.
        offset: usize,
        /// Address of the first page.
        vaddr: u64,
        /// The least address it could have.
        expected: u64,
    },
    /// A pagemap entry with flags that are unknown or contradict each other.
    #[error(
        "the pagemap entry at byte {offset} has flags {flags:#x}, which this version does not understand"
    )]
    BadFlags {
        /// Offset of the entry's length.
        offset: usize,
        /// Flags of the entry.
        flags: u32,
    },
}
