//! The framing that image files share: a head, then records of a u32 length and a protobuf message.
//!
//! Some images carry raw bytes after a record (pipes-data, ghost files, socket queues, SysV shared memory);
//! these cannot be walked without knowing each one's rules, and Permafrost never needs to.

use prost::Message;

use super::{Head, ImageError};

/// Record of an image file, still encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Offset of the record's length, bytes from the beginning of the file.
    pub offset: usize,
    /// The encoded message.
    pub bytes: &'a [u8],
}

impl Record<'_> {
    /// Decodes the message.
    ///
    /// # Errors The record is not a message of this type.
    pub fn decode<M: Message + Default>(&self) -> Result<M, ImageError> {
        M::decode(self.bytes).map_err(|source| ImageError::Undecodable {
            offset: self.offset,
            source,
        })
    }
}

/// Reads an image file's records. After an error it ends.
#[derive(Clone, Debug)]
pub struct ImageReader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl ImageReader<'_> {
    /// Returns a reader of no records.
    pub(super) const fn empty() -> ImageReader<'static> {
        ImageReader {
            bytes: &[],
            offset: 0,
        }
    }
}

impl<'a> ImageReader<'a> {
    /// Checks the head.
    ///
    /// # Errors
    /// The file is too short or of another kind.
    pub fn new(bytes: &'a [u8], head: Head) -> Result<Self, ImageError> {
        let mut reader = Self { bytes, offset: 0 };
        let (first, second) = head.words();
        for expected in std::iter::once(first).chain(second) {
            let offset = reader.offset;
            let found = reader.word()?;
            if found != expected {
                return Err(ImageError::BadMagic {
                    offset,
                    expected,
                    found,
                });
            }
        }
        Ok(reader)
    }

    /// Returns the offset of the next record, bytes from the beginning of the file.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the next record.
    ///
    /// # Errors
    /// The file ends inside it.
    pub fn next_record(&mut self) -> Result<Option<Record<'a>>, ImageError> {
        if self.offset == self.bytes.len() {
            return Ok(None);
        }
        let offset = self.offset;
        let len_bytes = usize::try_from(self.word()?).unwrap_or(usize::MAX);
        let bytes = self.take(len_bytes)?;
        Ok(Some(Record { offset, bytes }))
    }

    /// Returns the only record of a file that has exactly one.
    ///
    /// # Errors
    /// The file has no record, or more than one.
    pub fn only_record(mut self, record: &'static str) -> Result<Record<'a>, ImageError> {
        let only = self
            .next_record()?
            .ok_or(ImageError::MissingRecord { record })?;
        match self.bytes.len() - self.offset {
            0 => Ok(only),
            extra_bytes => Err(ImageError::TrailingBytes {
                offset: self.offset,
                extra_bytes,
            }),
        }
    }

    fn word(&mut self) -> Result<u32, ImageError> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn take(&mut self, len_bytes: usize) -> Result<&'a [u8], ImageError> {
        let offset = self.offset;
        let rest = &self.bytes[offset..];
        let Some(taken) = rest.get(..len_bytes) else {
            self.offset = self.bytes.len();
            return Err(ImageError::Truncated {
                offset,
                missing_bytes: len_bytes - rest.len(),
            });
        };
        self.offset += len_bytes;
        Ok(taken)
    }
}

impl<'a> Iterator for ImageReader<'a> {
    type Item = Result<Record<'a>, ImageError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_record().transpose()
    }
}

/// Writes an image file into memory.
#[derive(Clone, Debug)]
pub struct ImageWriter {
    bytes: Vec<u8>,
}

impl ImageWriter {
    /// Makes a file with a head and no records.
    #[must_use]
    pub fn new(head: Head) -> Self {
        let (first, second) = head.words();
        let bytes = std::iter::once(first)
            .chain(second)
            .flat_map(u32::to_le_bytes)
            .collect();
        Self { bytes }
    }

    /// Appends a record.
    ///
    /// # Panics
    /// If the message is longer than 4 GiB.
    pub fn message(&mut self, message: &impl Message) {
        let len_bytes =
            u32::try_from(message.encoded_len()).expect("no image record is longer than 4 GiB");
        self.bytes.extend_from_slice(&len_bytes.to_le_bytes());
        message.encode_raw(&mut self.bytes);
    }

    /// Appends a record that is encoded already.
    ///
    /// # Panics
    /// If the record is longer than 4 GiB.
    pub fn encoded(&mut self, message: &[u8]) {
        let len_bytes = u32::try_from(message.len()).expect("no image record is longer than 4 GiB");
        self.bytes.extend_from_slice(&len_bytes.to_le_bytes());
        self.bytes.extend_from_slice(message);
    }

    /// Returns the finished file.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }

    /// Returns the bytes written so far and empties the writer, so that a long file can be written in pieces.
    #[must_use]
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}
