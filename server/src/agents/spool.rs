//! Small images on their way from an agent into a checkpoint: an images directory of the daemon's own.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use permafrost_client::peer::Frame;
use permafrost_protocol::wire::frame::Kind;

use crate::store::StoreError;

/// All small images of a dump together, bytes. CRIU's are of some kilobytes; ghost files and the contents of tmpfs
/// may be large.
const MAX_BYTES: u64 = 1 << 30;

/// A directory that is removed when it is dropped.
pub(super) struct Spool {
    directory: tempfile::TempDir,
    current: Option<File>,
    left_bytes: u64,
}

impl Spool {
    pub(super) fn new(beneath: &Path) -> Result<Self, StoreError> {
        // Only its owner can enter it.
        let directory = tempfile::Builder::new()
            .prefix("images-")
            .tempdir_in(beneath)
            .map_err(StoreError::io("make a directory for small images"))?;
        Ok(Self {
            directory,
            current: None,
            left_bytes: MAX_BYTES,
        })
    }

    /// Takes a frame of an image: its name was found to be a plain one, and its data not to be more than announced.
    pub(super) fn take(&mut self, frame: &Frame) -> Result<(), StoreError> {
        match frame.header.kind {
            Kind::Image => {
                let name = std::str::from_utf8(&frame.payload).map_err(|_| invalid())?;
                let len_bytes = frame.header.index;
                let left = self.left_bytes.checked_sub(len_bytes);
                self.left_bytes = left.ok_or_else(|| StoreError::Invalid {
                    message: format!("the small images are more than {MAX_BYTES} bytes"),
                    hint: "",
                })?;
                let made = File::options()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(self.directory.path().join(name));
                self.current = Some(made.map_err(StoreError::io(format!("keep image {name}")))?);
                Ok(())
            }
            Kind::ImageData => self
                .current
                .as_mut()
                .ok_or_else(invalid)?
                .write_all(&frame.payload)
                .map_err(StoreError::io("keep an image")),
            _ => Err(invalid()),
        }
    }

    /// Names of the images.
    pub(super) fn names(&self) -> Result<Vec<String>, StoreError> {
        let read = || -> std::io::Result<Vec<String>> {
            std::fs::read_dir(self.directory.path())?
                .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                .collect()
        };
        read().map_err(StoreError::io("list images"))
    }

    /// The directory, as the store takes it.
    pub(super) fn descriptor(&self) -> Result<OwnedFd, StoreError> {
        let opened = File::open(self.directory.path());
        Ok(opened.map_err(StoreError::io("open the images"))?.into())
    }
}

fn invalid() -> StoreError {
    StoreError::Invalid {
        message: "a frame that is none of an image".to_owned(),
        hint: "",
    }
}
