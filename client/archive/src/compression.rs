//! Compression of archives: detected from the first bytes when one is read, since podman calls an archive
//! `checkpoint.tar.gz` that it has compressed with zstd.

use std::io::{self, Read, Write};

use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;

use crate::ArchiveError;

/// Bytes that are read to find out what a file is: those up to the end of a tar's magic.
const HEAD_BYTES: usize = 262;

/// Place of `ustar` in a tar header.
const MAGIC_AT: usize = 257;

/// First bytes of compressions, and their names.
const FOREIGN: [(&[u8], &str); 5] = [
    (b"\xfd7zXZ\0", "xz"),
    (b"BZh", "bzip2"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"LZIP", "lzip"),
    (b"\x1f\x9d", "compress"),
];

/// Compression of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchiveCompression {
    /// None: a plain tar.
    None,
    /// Compression with gzip.
    Gzip,
    /// Compression with zstd.
    Zstd,
}

impl ArchiveCompression {
    /// Returns the compression for a file's name. `None` if its ending is not known.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        let endings = [
            (".tar", Self::None),
            (".tar.gz", Self::Gzip),
            (".tgz", Self::Gzip),
            (".tar.zst", Self::Zstd),
            (".tzst", Self::Zstd),
        ];
        endings
            .into_iter()
            .find(|(ending, _)| name.ends_with(ending))
            .map(|(_, compression)| compression)
    }
}

/// Returns the tar inside `input`.
pub(crate) fn open<'a>(mut input: impl Read + 'a) -> Result<Box<dyn Read + 'a>, ArchiveError> {
    let head = head_of(&mut input)?;
    let rest = io::Cursor::new(head.clone()).chain(input);
    let mut tar: Box<dyn Read + 'a> = if head.starts_with(b"\x1f\x8b") {
        Box::new(MultiGzDecoder::new(rest))
    } else if head.starts_with(b"\x28\xb5\x2f\xfd") {
        let decoder = zstd::Decoder::new(rest);
        Box::new(decoder.map_err(ArchiveError::io("begin to decompress"))?)
    } else if let Some((_, found)) = FOREIGN.iter().find(|(magic, _)| head.starts_with(magic)) {
        return Err(ArchiveError::Compression { found });
    } else {
        Box::new(rest)
    };
    let head = head_of(&mut tar)?;
    if head.get(MAGIC_AT..HEAD_BYTES) != Some(b"ustar") {
        return Err(
            if head.is_empty() || head.get(MAGIC_AT).is_none() && is_text_free(&head) {
                ArchiveError::Truncated {
                    path: String::new(),
                }
            } else {
                ArchiveError::NotTar
            },
        );
    }
    Ok(Box::new(io::Cursor::new(head).chain(tar)))
}

/// Returns true for the beginning of a tar header that ends before its magic: a name, zeros, octal numbers.
fn is_text_free(head: &[u8]) -> bool {
    head.len() >= 100 && head[..100].contains(&0)
}

fn head_of(input: &mut impl Read) -> Result<Vec<u8>, ArchiveError> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    let read = input.take(HEAD_BYTES as u64).read_to_end(&mut head);
    read.map_err(|error| explain(error, ""))?;
    Ok(head)
}

/// Returns the error for a failed read of a tar, within the member at `path`.
pub(crate) fn explain(error: io::Error, path: &str) -> ArchiveError {
    // Errors of this crate come through the readers of others.
    match error.downcast::<ArchiveError>() {
        Ok(error) => error,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => ArchiveError::Truncated {
            path: path.to_owned(),
        },
        Err(source) if source.raw_os_error().is_some() => {
            ArchiveError::io("read the archive")(source)
        }
        Err(source) => ArchiveError::Damaged { source },
    }
}

/// A tar that is written compressed or not.
pub(crate) enum Output<W: Write> {
    Plain(W),
    Gzip(GzEncoder<W>),
    Zstd(zstd::Encoder<'static, W>),
}

impl<W: Write> Output<W> {
    pub(crate) fn new(compression: ArchiveCompression, output: W) -> io::Result<Self> {
        Ok(match compression {
            ArchiveCompression::None => Self::Plain(output),
            ArchiveCompression::Gzip => {
                Self::Gzip(GzEncoder::new(output, flate2::Compression::fast()))
            }
            ArchiveCompression::Zstd => {
                let mut encoder = zstd::Encoder::new(output, zstd::DEFAULT_COMPRESSION_LEVEL)?;
                encoder.include_checksum(true)?;
                Self::Zstd(encoder)
            }
        })
    }

    pub(crate) fn finish(self) -> io::Result<W> {
        match self {
            Self::Plain(output) => Ok(output),
            Self::Gzip(encoder) => encoder.finish(),
            Self::Zstd(encoder) => encoder.finish(),
        }
    }
}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(output) => output.write(bytes),
            Self::Gzip(encoder) => encoder.write(bytes),
            Self::Zstd(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(output) => output.flush(),
            Self::Gzip(encoder) => encoder.flush(),
            Self::Zstd(encoder) => encoder.flush(),
        }
    }
}
