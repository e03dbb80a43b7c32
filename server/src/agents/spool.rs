//! Directory for the small images with which an agent adopts a parked session: an images directory of the daemon's
//! own, because the images may decide which session is chosen.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use permafrost_protocol::wire::frame::Kind;
use permafrost_store::StoreError;
use permafrost_transport::peer::ReceivedFrame;

use crate::error::RequestError;

/// Small images of one adoption together, bytes. CRIU's have a few kilobytes; ghost files and the contents of tmpfs
/// may be large.
const MAX_BYTES: u64 = 1 << 30;

/// Small images of all adoptions of one agent that are under way, bytes: one of the largest size, and room for more.
const MAX_PEER_BYTES: u64 = 2 << 30;

/// Small images of the adoptions of all agents that are under way, bytes.
const MAX_ALL_BYTES: u64 = 4 << 30;

/// Overhead counted for each file, bytes: even an empty one takes an inode and a page.
const FILE_BYTES: u64 = 4096;

/// Bytes in the spool, by peer.
#[derive(Default)]
pub(super) struct Spooled(Mutex<HashMap<String, u64>>);

impl Spooled {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.0.lock()
    }

    fn add(&self, peer: &str, bytes: u64) -> Result<(), StoreError> {
        let mut spooled = self.lock();
        let all: u64 = spooled.values().sum();
        let own = spooled.get(peer).copied().unwrap_or_default();
        if own.saturating_add(bytes) > MAX_PEER_BYTES || all.saturating_add(bytes) > MAX_ALL_BYTES {
            return Err(RequestError::SpoolFull.into());
        }
        spooled.insert(peer.to_owned(), own + bytes);
        Ok(())
    }

    fn give_back(&self, peer: &str, bytes: u64) {
        let mut spooled = self.lock();
        if let Some(own) = spooled.get_mut(peer) {
            *own = own.saturating_sub(bytes);
            if *own == 0 {
                spooled.remove(peer);
            }
        }
    }
}

/// Directory of one adoption's images. It is removed when it is dropped.
pub(super) struct Spool {
    directory: tempfile::TempDir,
    current: Option<File>,
    left_bytes: u64,
    spooled: Arc<Spooled>,
    peer: String,
    taken_bytes: u64,
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.spooled.give_back(&self.peer, self.taken_bytes);
    }
}

impl Spool {
    /// Makes a directory for a dump of `peer`, counted in `spooled`.
    pub(super) fn new(
        beneath: &Path,
        spooled: &Arc<Spooled>,
        peer: &str,
    ) -> Result<Self, StoreError> {
        // Only its owner can enter it.
        let directory = tempfile::Builder::new()
            .prefix("images-")
            .tempdir_in(beneath)
            .map_err(StoreError::io("make a directory for small images"))?;
        Ok(Self {
            directory,
            current: None,
            left_bytes: MAX_BYTES,
            spooled: Arc::clone(spooled),
            peer: peer.to_owned(),
            taken_bytes: 0,
        })
    }

    /// Writes a frame of an image. The receiver has checked that the name is plain, and that there is no more data
    /// than announced.
    pub(super) fn take(&mut self, frame: &ReceivedFrame) -> Result<(), StoreError> {
        match frame.header.kind {
            Kind::Image => {
                let name =
                    std::str::from_utf8(&frame.payload).map_err(|_| RequestError::NoImageFrame)?;
                let len_bytes = frame.header.index;
                let left = self.left_bytes.checked_sub(len_bytes);
                self.left_bytes = left.ok_or(RequestError::ImagesTooLarge {
                    limit_bytes: MAX_BYTES,
                })?;
                let counted = len_bytes + FILE_BYTES;
                self.spooled.add(&self.peer, counted)?;
                self.taken_bytes += counted;
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
                .ok_or(RequestError::NoImageFrame)?
                .write_all(&frame.payload)
                .map_err(StoreError::io("keep an image")),
            _ => Err(RequestError::NoImageFrame.into()),
        }
    }

    /// Returns a descriptor of the directory, for the store.
    pub(super) fn descriptor(&self) -> Result<OwnedFd, StoreError> {
        let opened = File::open(self.directory.path());
        Ok(opened.map_err(StoreError::io("open the images"))?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_leaves_room_for_the_images_of_others() {
        let spooled = Arc::<Spooled>::default();
        spooled.add("a", MAX_PEER_BYTES).unwrap();
        assert!(spooled.add("a", 1).is_err());
        spooled.add("b", MAX_ALL_BYTES - MAX_PEER_BYTES).unwrap();
        assert!(spooled.add("c", 1).is_err());
        spooled.give_back("a", MAX_PEER_BYTES);
        spooled.add("c", 1).unwrap();
    }
}
