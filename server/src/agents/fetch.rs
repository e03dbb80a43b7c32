//! Sending a checkpoint to a peer: its pages, where they are, or one of its small images.

use permafrost_client::identity::{Peer, Role};
use permafrost_client::peer::{FrameSink, PeerError};
use permafrost_protocol::control::{self, ErrorCode};
use permafrost_protocol::wire::frame::{Kind, MAX_PAYLOAD_BYTES};
use permafrost_protocol::wire::message::request;

use super::{check_read, denied, refusal};
use crate::store::{Fetch, Fetched, Store, StoreError};

const PAGE_BYTES: usize = 4096;

/// Sends what `request` asks for, each page verified; the last frame is `Prepare`.
///
/// # Errors
/// What the peer is told: no such checkpoint, not its own to read, damage.
pub fn serve_fetch(
    store: &Store,
    peer: &Peer,
    request: &request::Fetch,
    frames: &mut dyn FrameSink,
) -> Result<(), control::Error> {
    let fetch = store
        .open_fetch(&request.checkpoint, &request.parent)
        .map_err(|error| refusal(&error))?;
    match fetch.manifest().job.as_str() {
        // Copies are made of it by nodes; to everybody else it is not there before it is adopted.
        "" if peer.role() != Role::Node => return Err(denied(peer, "read a parked session")),
        "" => {}
        job => check_read(peer, job)?,
    }
    let digest = fetch.content_digest().to_vec();
    frames
        .opened(fetch.manifest().clone(), digest)
        .map_err(|error| gone(&error))?;
    let mut sending = Sending { fetch, frames };
    sending.all(request).map_err(|error| match error {
        Failure::Store(error) => refusal(&error),
        Failure::Peer(error) => gone(&error),
    })
}

struct Sending<'a> {
    fetch: Fetch,
    frames: &'a mut dyn FrameSink,
}

enum Failure {
    Store(StoreError),
    Peer(PeerError),
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<PeerError> for Failure {
    fn from(error: PeerError) -> Self {
        Self::Peer(error)
    }
}

impl Sending<'_> {
    fn all(&mut self, request: &request::Fetch) -> Result<(), Failure> {
        if !request.manifest_only {
            if !request.image.is_empty() {
                self.image(&request.image)?;
            } else if request.space > 0 {
                let place = usize::try_from(request.space - 1).unwrap_or(usize::MAX);
                self.space(place, request)?;
            } else {
                for place in 0..self.fetch.manifest().spaces.len() {
                    self.space(place, request)?;
                }
                let images = self.fetch.manifest().images.iter();
                let names: Vec<String> = images.map(|image| image.name.clone()).collect();
                for name in names {
                    self.image(&name)?;
                }
            }
        }
        self.frames.push(Kind::Prepare, 0, 0, 0, &[])?;
        Ok(())
    }

    fn space(&mut self, place: usize, request: &request::Fetch) -> Result<(), Failure> {
        let Some(space) = self.fetch.manifest().spaces.get(place) else {
            return Err(Failure::Store(StoreError::NotFound {
                what: format!("address space {}", place + 1),
            }));
        };
        let space_type = u16::try_from(space.space_type).unwrap_or(u16::MAX);
        self.frames
            .push(Kind::Space, space_type, space.pages_id, space.id, &[])?;
        // From where, and how many, is said of one space only.
        let (from_index, pages) = if request.space > 0 {
            (request.from_index, request.pages)
        } else {
            (0, 0)
        };
        if request.runs_only {
            for placed in self.fetch.places(place, from_index) {
                let (first_index, flags, pages, zero) = placed?;
                let kind = if zero { Kind::Zero } else { Kind::Parent };
                named(self.frames, kind, first_index, flags, pages)?;
            }
            return Ok(());
        }
        for fetched in self.fetch.runs(place, from_index, pages) {
            match fetched? {
                Fetched::Pages {
                    first_index,
                    flags,
                    bytes,
                } => {
                    let pages = u32::try_from(bytes.len() / PAGE_BYTES).unwrap_or(u32::MAX);
                    self.frames
                        .push(Kind::Pages, flags, pages, first_index, bytes)?;
                }
                Fetched::Zero {
                    first_index,
                    flags,
                    pages,
                } => named(self.frames, Kind::Zero, first_index, flags, pages)?,
                Fetched::Parent {
                    first_index,
                    flags,
                    pages,
                } => named(self.frames, Kind::Parent, first_index, flags, pages)?,
            }
        }
        Ok(())
    }

    fn image(&mut self, name: &str) -> Result<(), Failure> {
        let mut images = self.fetch.manifest().images.iter();
        let found = images.find(|image| image.name == name);
        let len_bytes = found.map_or(0, |image| image.len_bytes);
        let frames = &mut *self.frames;
        let mut announced = false;
        let mut lost = None;
        let mut push = |kind, index, payload: &[u8]| {
            frames.push(kind, 0, 0, index, payload).map_err(|error| {
                let told = std::io::Error::other(error.to_string());
                lost = Some(error);
                told
            })
        };
        let passed = self.fetch.image(name, |bytes| {
            if !announced {
                push(Kind::Image, len_bytes, name.as_bytes())?;
                announced = true;
            }
            for piece in bytes.chunks(MAX_PAYLOAD_BYTES as usize) {
                push(Kind::ImageData, piece.len() as u64, piece)?;
            }
            Ok(())
        });
        if passed.is_ok() && !announced {
            // An empty one has no piece.
            let _ = push(Kind::Image, len_bytes, name.as_bytes());
        }
        match lost {
            Some(error) => Err(Failure::Peer(error)),
            None => Ok(passed?),
        }
    }
}

/// Pages that are only named, in as many frames as their count takes.
fn named(
    frames: &mut dyn FrameSink,
    kind: Kind,
    mut index: u64,
    flags: u16,
    mut pages: u64,
) -> Result<(), PeerError> {
    while pages > 0 {
        let count = u32::try_from(pages).unwrap_or(u32::MAX);
        frames.push(kind, flags, count, index, &[])?;
        index += u64::from(count);
        pages -= u64::from(count);
    }
    Ok(())
}

/// The peer is gone, so nobody hears this; the log does.
fn gone(error: &PeerError) -> control::Error {
    control::Error {
        code: ErrorCode::Unavailable.into(),
        message: error.to_string(),
        hint: String::new(),
    }
}
