//! Pipes that refer to mapped pages.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use rustix::fs::OFlags;
use rustix::pipe::{IoSliceRaw, SpliceFlags};

/// Lets a pipe refer to the memory of some pieces, at most 1,024 of them, without copying it: the pieces must not change
/// until they have been read out of the pipe. Waits for room. Returns the bytes that the pipe refers to, which are fewer
/// than all where it is full.
///
/// # Errors
/// The reading end is closed; it is no writing end of a pipe; or the kernel cannot refer to the memory, which can be
/// copied.
pub fn refer_to_memory(pipe: BorrowedFd<'_>, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
    // At the reading end the call would write to the pieces.
    if rustix::fs::fcntl_getfl(pipe)? & OFlags::RWMODE != OFlags::WRONLY {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let raw = pieces.iter().map(|piece| IoSliceRaw::from_slice(piece));
    let raw: Vec<_> = raw.collect();
    // SAFETY: at a writing end the kernel only reads the pieces, which are borrowed until it returns. It keeps the pages
    // themselves as long as the pipe refers to them.
    let referred = unsafe { rustix::pipe::vmsplice(pipe, &raw, SpliceFlags::empty()) };
    Ok(referred?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn pieces_come_out_in_order_and_only_the_writing_end_takes_them() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let memory: Vec<u8> = (0..20_000_u32).map(|at| at.to_le_bytes()[0]).collect();
        let pieces = [&memory[4096..8192], &memory[..100], &memory[9000..12_000]];
        let slices = pieces.map(IoSlice::new);
        assert_eq!(refer_to_memory(writer.as_fd(), &slices).unwrap(), 7196);
        let refused = refer_to_memory(reader.as_fd(), &slices).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        drop(writer);
        let mut got = Vec::new();
        File::from(reader).read_to_end(&mut got).unwrap();
        assert_eq!(got, pieces.concat());
    }
}
