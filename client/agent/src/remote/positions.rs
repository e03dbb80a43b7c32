//! Positions and checksums of a checkpoint's pages, which holders send: all of an address space, or a proof of some.
//!
//! A restore that reads pages in any order needs the positions of all pages first, and the checksum of a page when it
//! is read. Both are proven by few of the digests, so the time before the first page does not depend on the size.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use permafrost_criu::source::{PageRun, ReadError};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control;
use permafrost_protocol::images::{PagemapEntry, PagemapWriter};
use permafrost_protocol::wire::frame::{Kind, MAX_PAYLOAD_BYTES};
use permafrost_protocol::wire::message::request;
use permafrost_transport::peer::PeerError;

use super::checkpoint::{
    HINT, OTHER, Stop, corrupt, fetch_of, name_of, nobody, protocol, run_of, told,
};
use super::proof::{self, most_bytes};
use super::{Outline, PageSelection, RemoteCheckpoint, refusal};

/// Pages whose checksums are proven at once: 16 MiB. A fault waits for them.
const WINDOW_PAGES: u64 = 4096;

/// Windows that are proven at once where the two before are known: all pages are being read, one after the other.
const WINDOWS_AHEAD: u64 = 16;

/// Name that announces the bytes of a proof, in [`Kind::Image`].
const PROOF: &[u8] = b"proof";

/// Known pages of address spaces, by their places.
#[derive(Default)]
pub(super) struct KnownPages {
    /// Outlines of all pages.
    outlines: HashMap<usize, Arc<Outline>>,
    /// Positions of all pages, as a pagemap lists them.
    positions: HashMap<usize, Arc<[PagemapEntry]>>,
    /// Pages of a window, by its number.
    windows: HashMap<(usize, u64), Arc<Outline>>,
}

/// Part of an address space that is proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProofPart {
    /// Index of the address space in the manifest, from 0.
    pub place: usize,
    /// Index of the first page.
    pub from_index: u64,
    /// Number of indices; 0 for the positions of all pages, without checksums.
    pub indices: u64,
}

/// Reply of a node to a request for a proof, verified.
pub enum ReceivedProof<T = Vec<u8>> {
    /// The proof, or what it shows.
    Proof(T),
    /// All pages: the node is of an earlier release, or the manifest has no digest.
    Outline(Arc<Outline>),
}

/// Frames of a reply, unverified.
#[derive(Default)]
struct Received {
    /// Bytes of a proof, if one was announced.
    proof: Option<Vec<u8>>,
    outline: Outline,
}

impl ProofPart {
    /// Selects the positions of all pages.
    #[must_use]
    pub fn positions(place: usize) -> Self {
        Self {
            place,
            from_index: 0,
            indices: 0,
        }
    }

    fn range(&self) -> Range<u64> {
        self.from_index..self.from_index.saturating_add(self.indices)
    }
}

impl ReceivedProof {
    /// Sends a proof as frames: `push` takes their kind, index and payload.
    ///
    /// # Errors
    /// Those of `push`.
    pub fn send<E>(
        &self,
        push: &mut impl FnMut(Kind, u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut data = |bytes: &[u8]| push(Kind::ImageData, bytes.len() as u64, bytes);
        match self {
            Self::Outline(outline) => outline.send(&mut data),
            Self::Proof(proof) => {
                announce_proof(push)?;
                let mut frames = proof.chunks(MAX_PAYLOAD_BYTES as usize);
                frames.try_for_each(|bytes| push(Kind::ImageData, bytes.len() as u64, bytes))
            }
        }
    }
}

/// Announces a proof, whose bytes follow as [`Kind::ImageData`]: `push` takes a frame's kind, index and payload.
///
/// # Errors
/// Those of `push`.
pub fn announce_proof<E>(
    push: &mut impl FnMut(Kind, u64, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    push(Kind::Image, 0, PROOF)
}

impl RemoteCheckpoint {
    /// Returns the pagemap image of the address space at `place`, which lists the positions of its pages.
    ///
    /// # Errors
    /// No holder gives it, or it differs from the manifest.
    pub fn pagemap(&self, place: usize) -> Result<Vec<u8>, control::Error> {
        let mut pagemap = PagemapWriter::new(self.manifest.spaces[place].pages_id);
        for entry in self.positions(place)?.iter() {
            pagemap.push(*entry);
        }
        Ok(pagemap.finish())
    }

    fn positions(&self, place: usize) -> Result<Arc<[PagemapEntry]>, control::Error> {
        if let Some(positions) = self.known.lock().positions.get(&place) {
            return Ok(Arc::clone(positions));
        }
        let space = &self.manifest.spaces[place];
        let proven = self.proven(ProofPart::positions(place), |proof| {
            proof::positions(proof, space.pages, &space.map_digest)
        });
        let positions: Vec<_> = match proven? {
            ReceivedProof::Outline(outline) => outline.runs().collect(),
            ReceivedProof::Proof(positions) => positions,
        };
        let entries = positions.into_iter();
        let entries = entries.map(|(first_index, flags, nr_pages)| PagemapEntry {
            vaddr: first_index * PAGE_BYTES,
            nr_pages,
            flags,
        });
        let positions: Arc<[PagemapEntry]> = entries.collect();
        let mut known = self.known.lock();
        known.positions.insert(place, Arc::clone(&positions));
        Ok(positions)
    }

    /// Returns the positions and checksums of the pages of the address space at `place`, which match the manifest.
    ///
    /// # Errors
    /// No holder gives them, or they differ from the manifest.
    pub fn outline(&self, place: usize) -> Result<Arc<Outline>, control::Error> {
        if let Some(known) = self.known.lock().outlines.get(&place) {
            return Ok(Arc::clone(known));
        }
        let fetch = request::Fetch {
            outline_only: true,
            ..self.fetch_of_space(place)
        };
        self.ask_holders(place, |holder, others| {
            let received = self.receive(holder, others, fetch.clone(), 0)?;
            Ok(self.matching_outline(place, received.outline))
        })
    }

    /// Returns a proof of a part, which matches the manifest, to be passed on.
    ///
    /// # Errors
    /// No holder gives it, or it differs from the manifest.
    pub fn prove(&self, part: ProofPart) -> Result<ReceivedProof, control::Error> {
        let space = &self.manifest.spaces[part.place];
        self.proven(part, |proof| {
            let proves = match part.indices {
                0 => proof::positions(proof, space.pages, &space.map_digest).is_some(),
                _ => proof::outline(proof, &part.range(), &space.map_digest).is_some(),
            };
            proves.then(|| proof.to_vec())
        })
    }

    /// Returns what `read` takes from the proof of a part: `None` if it differs from the manifest.
    fn proven<T>(
        &self,
        part: ProofPart,
        read: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<ReceivedProof<T>, control::Error> {
        let place = part.place;
        let space = &self.manifest.spaces[place];
        if space.map_digest.is_empty() {
            return self.outline(place).map(ReceivedProof::Outline);
        }
        if let Some(outline) = self.known.lock().outlines.get(&place) {
            return Ok(ReceivedProof::Outline(Arc::clone(outline)));
        }
        let fetch = request::Fetch {
            outline_only: true,
            proof: true,
            from_index: part.from_index,
            pages: part.indices,
            ..self.fetch_of_space(place)
        };
        let pages = match part.indices {
            0 => space.pages,
            indices => space.pages.min(indices),
        };
        self.ask_holders(place, |holder, others| {
            let received = self.receive(holder, others, fetch.clone(), most_bytes(pages))?;
            let Some(proof) = received.proof else {
                let outline = self.matching_outline(place, received.outline);
                return Ok(outline.map(ReceivedProof::Outline));
            };
            Ok(read(&proof).map(ReceivedProof::Proof))
        })
    }

    /// Passes on the pages with these indices, ascending, each compared with the manifest's digest.
    ///
    /// # Errors
    /// No holder gives them, or they differ from the manifest; an error of the taker.
    pub(super) fn verified_part<E>(
        &self,
        place: usize,
        range: Range<u64>,
        mut take: impl FnMut(PageRun<'_>) -> Result<(), E>,
    ) -> Result<(), ReadError<control::Error, E>> {
        let outline = self.outline_of(place, &range).map_err(ReadError::Source)?;
        let part = PageSelection {
            place,
            from_index: range.start,
            pages: outline.count(),
        };
        if part.pages == 0 {
            return Ok(());
        }
        let taken = self.frames(part, Some(&outline), |frame| take(run_of(&frame)));
        taken.map_err(|stop| match stop {
            Stop::Node(PeerError::Protocol { what: OTHER, .. }) => {
                let space = &self.manifest.spaces[place];
                let what = format!("pages of {}", space.id);
                ReadError::Source(corrupt(&self.record, &what))
            }
            stop => told(stop),
        })
    }

    /// Returns the outline of the pages with these indices.
    fn outline_of(&self, place: usize, range: &Range<u64>) -> Result<Outline, control::Error> {
        let windows = range.start / WINDOW_PAGES..range.end.div_ceil(WINDOW_PAGES);
        let mut outline = Outline::default();
        if windows.end.saturating_sub(windows.start) > 2 {
            // Not of a restore that has begun, but of one that is prepared: those pages are read once.
            let of_range = self.proven_outline(place, range)?;
            outline.append_from(&of_range, range);
            return Ok(outline);
        }
        for window in windows {
            outline.append_from(&*self.window(place, window)?, range);
        }
        Ok(outline)
    }

    fn window(&self, place: usize, window: u64) -> Result<Arc<Outline>, control::Error> {
        let count = {
            let known = &self.known.lock().windows;
            if let Some(known) = known.get(&(place, window)) {
                return Ok(Arc::clone(known));
            }
            let before = window.saturating_sub(2)..window;
            let is_next = before.clone().count() == 2
                && before.into_iter().all(|n| known.contains_key(&(place, n)));
            if is_next { WINDOWS_AHEAD } else { 1 }
        };
        let pages_of = |window: u64| {
            let first = window.saturating_mul(WINDOW_PAGES);
            first..first.saturating_add(WINDOW_PAGES)
        };
        let windows = window..window.saturating_add(count);
        let range = pages_of(window).start..pages_of(windows.end - 1).end;
        let outline = self.proven_outline(place, &range)?;
        let mut known = self.known.lock();
        for window in windows {
            let mut part = Outline::default();
            part.append_from(&outline, &pages_of(window));
            known.windows.insert((place, window), Arc::new(part));
        }
        Ok(Arc::clone(&known.windows[&(place, window)]))
    }

    /// Returns an outline that has at least the pages with these indices.
    fn proven_outline(
        &self,
        place: usize,
        range: &Range<u64>,
    ) -> Result<Arc<Outline>, control::Error> {
        let part = ProofPart {
            place,
            from_index: range.start,
            indices: range.end.saturating_sub(range.start),
        };
        if part.indices == 0 {
            return Ok(Arc::default());
        }
        let digest = &self.manifest.spaces[place].map_digest;
        match self.proven(part, |proof| proof::outline(proof, range, digest))? {
            ReceivedProof::Outline(outline) => Ok(outline),
            ReceivedProof::Proof(outline) => Ok(Arc::new(outline)),
        }
    }

    /// Asks one holder after another, until one gives what matches the manifest: `ask` returns `None` otherwise.
    fn ask_holders<T>(
        &self,
        place: usize,
        mut ask: impl FnMut(&str, bool) -> Result<Option<T>, PeerError>,
    ) -> Result<T, control::Error> {
        let mut failure = None;
        let order = self.order();
        for (holder, at) in order.iter().zip(1..) {
            let error = match ask(holder, at < order.len()) {
                Ok(Some(received)) => return Ok(received),
                Ok(None) => {
                    let space = &self.manifest.spaces[place];
                    corrupt(&self.record, &format!("pagemap of {}", space.id))
                }
                Err(error) => refusal(&error, HINT),
            };
            let checkpoint = name_of(&self.record);
            tracing::warn!(
                event = "positions-not-fetched",
                node = holder,
                checkpoint,
                error = error.message,
                "no positions of pages"
            );
            failure.get_or_insert(error);
            self.ask_last(holder);
        }
        Err(failure.unwrap_or_else(|| nobody(&self.record)))
    }

    fn fetch_of_space(&self, place: usize) -> request::Fetch {
        request::Fetch {
            space: u32::try_from(place + 1).unwrap_or(u32::MAX),
            ..fetch_of(&self.record)
        }
    }

    /// Receives an outline, or a proof of at most so many bytes.
    fn receive(
        &self,
        holder: &str,
        others: bool,
        fetch: request::Fetch,
        most_bytes: usize,
    ) -> Result<Received, PeerError> {
        let mut received = Received::default();
        for frame in self.holders.fetch(holder, others, fetch)?.frames {
            let frame = frame?;
            let read = match (frame.header.kind, &mut received.proof) {
                (Kind::Space, _) => Some(()),
                (Kind::Image, None) if frame.payload[..] == *PROOF && most_bytes > 0 => {
                    received.proof = Some(Vec::new());
                    Some(())
                }
                (Kind::ImageData, None) => received.outline.extend(&frame.payload),
                (Kind::ImageData, Some(proof)) => {
                    proof.extend_from_slice(&frame.payload);
                    (proof.len() <= most_bytes).then_some(())
                }
                _ => None,
            };
            read.ok_or_else(|| protocol(holder, "positions of pages that cannot be"))?;
        }
        Ok(received)
    }

    /// Returns an outline that matches the manifest, and remembers it.
    fn matching_outline(&self, place: usize, outline: Outline) -> Option<Arc<Outline>> {
        let space = &self.manifest.spaces[place];
        if !outline.is(space.pages, &space.map_digest) {
            return None;
        }
        let outline = Arc::new(outline);
        let mut known = self.known.lock();
        known.outlines.insert(place, Arc::clone(&outline));
        Some(outline)
    }
}
