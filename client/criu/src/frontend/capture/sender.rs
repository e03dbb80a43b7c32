//! Sends pages to a session, as a CRIU with `--page-server` does.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{Dialect, SpaceId};

use super::CaptureError;
use super::error::session_failed;

/// Sends pages to a session, as CRIU does.
pub(super) struct PageSender<'a> {
    session: &'a UnixStream,
    encoder: Encoder,
}

impl<'a> PageSender<'a> {
    pub(super) fn new(session: &'a UnixStream) -> Self {
        Self {
            session,
            encoder: Encoder::new(Dialect::V32),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), CaptureError> {
        self.session
            .write_all(bytes)
            .map_err(session_failed("send pages to permafrostd"))
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), CaptureError> {
        self.session
            .read_exact(bytes)
            .map_err(session_failed("receive permafrostd's reply"))
    }

    pub(super) fn open(&mut self, space: SpaceId) -> Result<(), CaptureError> {
        let frame = self.encoder.open(space);
        self.write(frame.as_ref())?;
        self.read(&mut [0])
    }

    pub(super) fn pages(
        &mut self,
        space: SpaceId,
        vaddr: u64,
        flags: u16,
        bytes: &[u8],
    ) -> Result<(), CaptureError> {
        let pages = u32::try_from(bytes.len() as u64 / PAGE_BYTES).unwrap_or(u32::MAX);
        let frame = self.encoder.pages(space, vaddr, pages, flags);
        self.write(frame.as_ref())?;
        self.write(bytes)
    }

    pub(super) fn close(&mut self) -> Result<(), CaptureError> {
        let frame = self.encoder.close();
        self.write(frame.as_ref())?;
        let mut status = [0; 4];
        self.read(&mut status)?;
        match i32::from_ne_bytes(status) {
            0 => Ok(()),
            status => Err(CaptureError::Refused { status }),
        }
    }
}
