//! Sends a checkpoint to a peer: its pages, the positions of its pages, or one of its small images.
//!
//! A checkpoint that is missing or damaged here is read from another node and forwarded, except to nodes, which ask
//! the holders themselves: so a request never loops.

use permafrost_store::MissingObject;
use std::io;

use permafrost_agent::remote::{
    MapDigest, OutlineEncoder, PageSelection, ProofEncoder, ProofPart, RemoteCheckpoint,
    announce_proof,
};
use permafrost_clustered::ClusteredStore;
use permafrost_criu::source::{PageRun, ReadError};
use permafrost_identity::{Peer, Role};
use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::access::Access;
use permafrost_protocol::control::{self, ReportedError};
use permafrost_protocol::manifest::{Image, Manifest};
use permafrost_protocol::wire::frame::{Kind, MAX_PAYLOAD_BYTES};
use permafrost_protocol::wire::message::request;
use permafrost_store::{Fetch, Fetched, StoreError};
use permafrost_transport::peer::{FrameSink, PeerError};

use super::rights::{authorize, check_read, denied, job_of};
use crate::error::{RequestError, Right};

/// Sends what `request` asks for, each page verified; the last frame is `Prepare`.
///
/// # Errors
/// The error for the peer: no such checkpoint, no right to read it, damage, or no reachable holder.
pub fn serve_fetch(
    store: &ClusteredStore,
    peer: &Peer,
    request: &request::Fetch,
    frames: &mut dyn FrameSink,
) -> Result<(), control::Error> {
    authorize(peer, &Access::of_fetch(request)?)?;
    let opened = store
        .local()
        .open_fetch(&request.checkpoint, &request.parent);
    if let Ok(fetch) = &opened {
        // Before it is moved out of an object store for this peer.
        check_readable(peer, fetch.manifest())?;
    }
    let recalled = opened.and_then(|fetch| {
        if reads_all(request) {
            fetch.recall(store.local())?;
        }
        Ok(fetch)
    });
    let source = match recalled {
        Ok(fetch) => Source::Here(Box::new(fetch)),
        Err(error) => Source::Elsewhere(Box::new(pass_on(store, peer, request, &error)?)),
    };
    check_readable(peer, source.manifest())?;
    // The set of equal pages reveals contents of the compared checkpoint.
    if let Some(compared_with) = source.compared_with() {
        check_readable(peer, compared_with)?;
    }
    if request.hold
        && let Source::Here(fetch) = &source
    {
        fetch.hold();
    }
    let is_part = !request.image.is_empty() || request.space > 0;
    let manifest = match source.manifest() {
        manifest if is_part && !request.manifest_only => manifest.without_lists(),
        manifest => manifest.clone(),
    };
    frames
        .opened(manifest, source.content_digest())
        .map_err(RequestError::ReceiverGone)?;
    let mut sending = Sending {
        store,
        source,
        passes_on: peer.role() != Role::Node,
        frames,
    };
    sending.all(request).map_err(|error| match error {
        Failure::Store(error) => error.into(),
        Failure::Peer(error) => RequestError::ReceiverGone(error).into(),
    })
}

/// Returns true if a request, or the reader who makes it, reads all pages of an address space.
fn reads_all(request: &request::Fetch) -> bool {
    let all_pages = request.image.is_empty()
        && request.pages == 0
        && !request.manifest_only
        && !request.outline_only;
    request.hold || all_pages
}

/// Checks that `peer` may read the manifest's checkpoint. Nodes make copies of parked sessions without a job; for
/// all other peers such sessions do not exist before they are adopted.
fn check_readable(peer: &Peer, manifest: &Manifest) -> Result<(), control::Error> {
    match manifest.job.as_str() {
        "" if peer.role() == Role::Node => Ok(()),
        "" => Err(denied(peer, "read a parked session", Right::Namespace)),
        job => check_read(peer, &job_of(job)?),
    }
}

/// Opens a checkpoint that cannot be opened here from the copies on other nodes, if the peer may read it. A peer
/// that is itself a node gets the error instead, because it asks the other nodes itself.
fn pass_on(
    store: &ClusteredStore,
    peer: &Peer,
    request: &request::Fetch,
    error: &StoreError,
) -> Result<RemoteCheckpoint, control::Error> {
    let is_damaged = !matches!(error, StoreError::NotFound { .. });
    if is_damaged {
        store.report_damage(&request.checkpoint, error);
    }
    // Whether the peer may read the job that it names was checked with the request.
    if request.listed_as.is_empty() || peer.role() == Role::Node {
        return Err(error.to_reply());
    }
    let opened = store.open_on_others(&request.checkpoint, &request.listed_as);
    // What is wrong here says more.
    opened.map_err(|elsewhere| if is_damaged { error } else { &elsewhere }.to_reply())
}

/// Location that the checkpoint is read from.
enum Source {
    Here(Box<Fetch>),
    Elsewhere(Box<RemoteCheckpoint>),
}

impl Source {
    fn manifest(&self) -> &Manifest {
        match self {
            Self::Here(fetch) => fetch.manifest(),
            Self::Elsewhere(remote) => remote.manifest(),
        }
    }

    /// Returns the manifest of the checkpoint that pages are compared with.
    fn compared_with(&self) -> Option<&Manifest> {
        match self {
            Self::Here(fetch) => fetch.compared_with(),
            Self::Elsewhere(_) => None,
        }
    }

    fn content_digest(&self) -> Vec<u8> {
        match self {
            Self::Here(fetch) => fetch.content_digest().to_vec(),
            Self::Elsewhere(remote) => remote.manifest().content_digest.clone(),
        }
    }
}

struct Sending<'a> {
    store: &'a ClusteredStore,
    source: Source,
    /// True if pages that are damaged here may be read from other nodes.
    passes_on: bool,
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

impl From<control::Error> for Failure {
    fn from(error: control::Error) -> Self {
        Self::Store(StoreError::Elsewhere(error))
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
                self.images(&request.image, request.images)?;
            } else if request.space > 0 {
                let part = PageSelection {
                    place: usize::try_from(request.space - 1).unwrap_or(usize::MAX),
                    from_index: request.from_index,
                    pages: request.pages,
                };
                match (request.outline_only, request.proof) {
                    (true, true) => self.proof(part)?,
                    (true, false) => self.outline(part.place)?,
                    (false, _) => self.space(part)?,
                }
            } else {
                // From where, and how many, is said of one space only.
                for place in 0..self.source.manifest().spaces.len() {
                    self.space(PageSelection::all(place))?;
                }
                for place in 0..self.source.manifest().images.len() {
                    self.image(place)?;
                }
            }
        }
        self.frames.push(Kind::Prepare, 0, 0, 0, &[])?;
        Ok(())
    }

    /// Announces an address space.
    fn begin_space(&mut self, place: usize) -> Result<(), Failure> {
        let Some(space) = self.source.manifest().spaces.get(place) else {
            return Err(Failure::Store(StoreError::NotFound(
                MissingObject::AddressSpace {
                    number: place.saturating_add(1),
                },
            )));
        };
        let space_type = u16::try_from(space.space_type).unwrap_or(u16::MAX);
        self.frames
            .push(Kind::Space, space_type, space.pages_id, space.id, &[])?;
        Ok(())
    }

    /// Sends the positions and checksums of an address space's pages. Whoever asks compares them with the digest, and
    /// asks another holder where the map is damaged here.
    fn outline(&mut self, place: usize) -> Result<(), Failure> {
        self.begin_space(place)?;
        let mut send = |bytes: &[u8]| {
            let len_bytes = bytes.len() as u64;
            self.frames.push(Kind::ImageData, 0, 0, len_bytes, bytes)?;
            Ok(())
        };
        match &self.source {
            Source::Here(fetch) => {
                let mut encoder = OutlineEncoder::default();
                fetch.outline(place, |first_index, flags, pages| {
                    encoder.push::<Failure>(first_index, flags, pages, &mut send)
                })?;
                encoder.finish(&mut send)
            }
            Source::Elsewhere(remote) => remote.outline(place)?.send(&mut send),
        }
    }

    /// Sends a proof of some pages, as many indices as the part has pages, or of the positions of all pages.
    fn proof(&mut self, part: PageSelection) -> Result<(), Failure> {
        self.begin_space(part.place)?;
        let mut push = |kind, index, bytes: &[u8]| {
            self.frames.push(kind, 0, 0, index, bytes)?;
            Ok::<_, Failure>(())
        };
        match &self.source {
            Source::Here(fetch) => {
                let end = part.from_index.saturating_add(part.pages);
                let indices = (part.pages > 0).then_some(part.from_index..end);
                announce_proof(&mut push)?;
                let mut send = |bytes: &[u8]| push(Kind::ImageData, bytes.len() as u64, bytes);
                let mut proof = ProofEncoder::default();
                fetch.prove(part.place, indices, &mut proof, |proof| {
                    proof.send(false, &mut send)
                })?;
                proof.send(true, &mut send)
            }
            Source::Elsewhere(remote) => {
                let proof = remote.prove(ProofPart {
                    place: part.place,
                    from_index: part.from_index,
                    indices: part.pages,
                });
                proof?.send(&mut push)
            }
        }
    }

    fn space(&mut self, part: PageSelection) -> Result<(), Failure> {
        self.begin_space(part.place)?;
        let fetch = match &self.source {
            Source::Here(fetch) => fetch,
            Source::Elsewhere(remote) => {
                let before = Some(MapDigest::default());
                return others_pages(remote, self.frames, part, part, before);
            }
        };
        let mut rest = part;
        let sent = own_pages(fetch, self.frames, &mut rest);
        let Err(Failure::Store(damage)) = sent else {
            return sent;
        };
        let others = self.others(fetch, damage)?;
        let before = part
            .is_all()
            .then(|| fetch.digest_before(part.place, rest.from_index))
            .transpose()?;
        others_pages(&others, self.frames, part, rest, before)
    }

    /// Sends the small image of that name and those behind it in the manifest, `count` of them at most.
    fn images(&mut self, name: &str, count: u32) -> Result<(), Failure> {
        let images = &self.source.manifest().images;
        let Some(first) = images.iter().position(|image| image.name == name) else {
            return Err(Failure::Store(StoreError::NotFound(
                MissingObject::ImageName(name.to_owned()),
            )));
        };
        let count = usize::try_from(count).unwrap_or(usize::MAX).max(1);
        let end = first.saturating_add(count).min(images.len());
        (first..end).try_for_each(|place| self.image(place))
    }

    fn image(&mut self, place: usize) -> Result<(), Failure> {
        let Image {
            name, len_bytes, ..
        } = &self.source.manifest().images[place];
        let len_bytes = *len_bytes;
        let mut image = ImageFrames::new(self.frames, name, len_bytes);
        let passed = match &self.source {
            Source::Here(fetch) => fetch.image_at(place, |bytes| image.push(bytes)),
            Source::Elsewhere(remote) => return image.passed_on(remote, place),
        };
        let begun = image.announced;
        match (passed, image.lost, &self.source) {
            (_, Some(lost), _) => Err(Failure::Peer(lost)),
            (Ok(()), None, _) if begun => Ok(()),
            // An empty one has no piece.
            (Ok(()), None, _) => ImageFrames::new(self.frames, name, len_bytes).all(&[]),
            (Err(damage), None, Source::Here(fetch)) if !begun => {
                let others = self.others(fetch, damage)?;
                ImageFrames::new(self.frames, name, len_bytes).passed_on(&others, place)
            }
            (Err(error), ..) => Err(Failure::Store(error)),
        }
    }

    /// Opens the other copies of a checkpoint that is damaged here, for a peer that does not ask other nodes itself.
    fn others(&self, fetch: &Fetch, damage: StoreError) -> Result<RemoteCheckpoint, StoreError> {
        let others = self.store.others_of_damaged(fetch, &damage);
        others.filter(|_| self.passes_on).ok_or(damage)
    }
}

/// Sends this node's pages. `rest` shrinks to the part that is not sent yet, also if damage ends the call.
fn own_pages(
    fetch: &Fetch,
    frames: &mut dyn FrameSink,
    rest: &mut PageSelection,
) -> Result<(), Failure> {
    let limited = rest.pages > 0;
    for fetched in fetch.runs(rest.place, rest.from_index, rest.pages) {
        let (next_index, pages) = match fetched? {
            Fetched::Own(PageRun::Pages {
                first_index,
                flags,
                bytes,
            }) => {
                let pages = push_pages(frames, first_index, flags, &bytes)?;
                (first_index + pages, pages)
            }
            Fetched::Own(PageRun::Zero {
                first_index,
                flags,
                pages,
            }) => {
                named(frames, Kind::Zero, first_index, flags, pages)?;
                (first_index + pages, pages)
            }
            Fetched::Parent {
                first_index,
                flags,
                pages,
            } => {
                named(frames, Kind::Parent, first_index, flags, pages)?;
                (first_index + pages, pages)
            }
        };
        rest.from_index = next_index;
        if limited {
            rest.pages -= pages;
        }
    }
    Ok(())
}

/// Forwards the pages of other nodes, the `rest` of a part; `before` is the digest of the pages before it. For a
/// whole address space, the last pages are held back until the digest matches. A part has no digest: a peer that
/// asks for parts compares the whole itself.
fn others_pages(
    others: &RemoteCheckpoint,
    frames: &mut dyn FrameSink,
    part: PageSelection,
    rest: PageSelection,
    before: Option<MapDigest>,
) -> Result<(), Failure> {
    let mut push = |run: PageRun<'_>| match run {
        PageRun::Pages {
            first_index,
            flags,
            bytes,
        } => push_pages(frames, first_index, flags, &bytes).map(drop),
        PageRun::Zero {
            first_index,
            flags,
            pages,
        } => named(frames, Kind::Zero, first_index, flags, pages),
    };
    let passed = match before {
        Some(before) if part.is_all() => others.pages(rest.place, rest.from_index, before, push),
        _ => others.part(rest, &mut push),
    };
    passed.map_err(|error| match error {
        ReadError::Source(error) => Failure::Store(StoreError::Elsewhere(error)),
        ReadError::Taker(error) => Failure::Peer(error),
    })
}

/// Sends one small image as frames.
struct ImageFrames<'a> {
    frames: &'a mut dyn FrameSink,
    name: &'a str,
    len_bytes: u64,
    announced: bool,
    /// Error that ended the connection to the peer.
    lost: Option<PeerError>,
}

impl<'a> ImageFrames<'a> {
    fn new(frames: &'a mut dyn FrameSink, name: &'a str, len_bytes: u64) -> Self {
        Self {
            frames,
            name,
            len_bytes,
            announced: false,
            lost: None,
        }
    }

    fn try_push(&mut self, bytes: &[u8]) -> Result<(), PeerError> {
        if !self.announced {
            let name = self.name.as_bytes();
            self.frames.push(Kind::Image, 0, 0, self.len_bytes, name)?;
            self.announced = true;
        }
        for piece in bytes.chunks(MAX_PAYLOAD_BYTES as usize) {
            let index = piece.len() as u64;
            self.frames.push(Kind::ImageData, 0, 0, index, piece)?;
        }
        Ok(())
    }

    /// Sends the next bytes. Callers see system errors only; the peer's error is kept in `lost`.
    fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.try_push(bytes).map_err(|error| {
            let told = io::Error::other(error.to_string());
            self.lost = Some(error);
            told
        })
    }

    fn all(mut self, bytes: &[u8]) -> Result<(), Failure> {
        Ok(self.try_push(bytes)?)
    }

    /// Sends the whole image from the copies on other nodes.
    fn passed_on(mut self, others: &RemoteCheckpoint, place: usize) -> Result<(), Failure> {
        let passed = others.image(place, |piece| self.try_push(piece));
        passed.map_err(|error| match error {
            ReadError::Source(error) => Failure::Store(StoreError::Elsewhere(error)),
            ReadError::Taker(error) => Failure::Peer(error),
        })
    }
}

fn push_pages(
    frames: &mut dyn FrameSink,
    first_index: u64,
    flags: u16,
    bytes: &[u8],
) -> Result<u64, PeerError> {
    let pages = u32::try_from(bytes.len() / PAGE_SIZE).unwrap_or(u32::MAX);
    frames.push(Kind::Pages, flags, pages, first_index, bytes)?;
    Ok(pages.into())
}

/// Sends pages that are only named, in as many frames as their count requires.
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
