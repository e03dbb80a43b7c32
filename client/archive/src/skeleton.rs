//! The bytes of a tar that are not the contents of its members.

use std::cell::RefCell;
use std::io::{self, Read};
use std::rc::Rc;

use crate::{ArchiveError, compression};

/// Most bytes of headers: they are collected in memory. CRIU's images need 512 each.
const MAX_HEADER_BYTES: usize = 128 << 20;

/// Bytes read at once behind the end.
const CHUNK: usize = 256 << 10;

/// Length of a tar's block.
const BLOCK: usize = 512;

/// Bytes of a tar that are not the contents of a member.
#[derive(Default)]
pub(crate) struct Skeleton {
    bytes: Vec<u8>,
    /// Number of bytes in all, also those that were taken.
    pub(crate) total: usize,
    pub(crate) in_contents: bool,
}

impl Skeleton {
    pub(crate) fn begin_contents(&mut self) -> Vec<u8> {
        self.in_contents = true;
        std::mem::take(&mut self.bytes)
    }

    pub(crate) fn end_contents(&mut self) {
        self.in_contents = false;
    }
}

/// Passes a tar on, and keeps what is not contents.
pub(crate) struct Recorder<R> {
    pub(crate) input: R,
    pub(crate) skeleton: Rc<RefCell<Skeleton>>,
}

impl<R: Read> Read for Recorder<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(into)?;
        let mut skeleton = self.skeleton.borrow_mut();
        if !skeleton.in_contents {
            skeleton.total += read;
            if skeleton.total > MAX_HEADER_BYTES {
                return Err(io::Error::other(ArchiveError::Headers {
                    limit: MAX_HEADER_BYTES,
                }));
            }
            skeleton.bytes.extend_from_slice(&into[..read]);
        }
        Ok(read)
    }
}

impl<R: Read> Recorder<R> {
    /// Reads the rest of the tar, whose end was found: a block of zeros, and nothing but zeros behind it.
    pub(crate) fn end(&mut self) -> Result<(), ArchiveError> {
        let ended = {
            let skeleton = self.skeleton.borrow();
            let at = skeleton.bytes.len().checked_sub(BLOCK);
            at.is_some_and(|at| skeleton.bytes[at..].iter().all(|byte| *byte == 0))
        };
        if !ended {
            return Err(ArchiveError::Truncated {
                path: String::new(),
            });
        }
        let mut buffer = vec![0; CHUNK];
        loop {
            match self.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) if buffer[..read].iter().any(|byte| *byte != 0) => {
                    return Err(ArchiveError::BehindEnd);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(compression::explain(error, "")),
            }
        }
    }
}
