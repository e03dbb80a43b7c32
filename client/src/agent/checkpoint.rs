//! A checkpoint that nodes hold, as what a restoring CRIU or an export is served from.
//!
//! Pages come from one node, and from another when that one fails, from the page on that was reached. What came is
//! compared with the manifest's digest before the last of it is passed on: of damaged data the end is missing.

use std::io::Write;
use std::sync::Arc;

use permafrost_protocol::control::{self, ErrorCode, request};
use permafrost_protocol::images::{ImageName, PagemapEntry, PagemapWriter};
use permafrost_protocol::manifest::{AddressSpace, Manifest, SpaceType};
use permafrost_protocol::wire::frame::{Kind, MAX_IMAGE_BYTES};
use permafrost_protocol::wire::message;

use super::digest::{MapDigest, of_image};
use super::nodes::{Nodes, odd_answer, refusal};
use crate::frontend::{ImageError, ImageSource, Pipe};
use crate::peer::{FetchReader, Frame, PeerError};

pub(super) const PAGE_BYTES: u64 = 4096;

/// What zero pages are written from.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A checkpoint that is being read.
pub(super) struct RemoteCheckpoint {
    nodes: Arc<Nodes>,
    /// Who may have it, in the order in which they are asked.
    holders: Vec<String>,
    /// Its line of the listing.
    pub(super) record: control::Checkpoint,
    /// Its manifest; the map roots mean nothing here.
    pub(super) manifest: Manifest,
}

/// Some pages of an address space.
pub(super) enum Run<'a> {
    /// Whole pages.
    Pages(&'a [u8]),
    /// So many pages of zeros.
    Zero(u64),
}

/// How reading a space ended early.
enum Stop<E> {
    /// The node's side: another may do better.
    Node(PeerError),
    /// Whoever takes the pages.
    Taker(E),
}

impl RemoteCheckpoint {
    /// Looks it up.
    pub(super) fn open(nodes: &Arc<Nodes>, reference: &str) -> Result<Self, control::Error> {
        let show = control::request::Body::Show(request::Show {
            checkpoint: reference.to_owned(),
        });
        let (node, answer) = nodes.ask_for(&show)?;
        let control::reply::Body::Detail(control::Detail {
            checkpoint: Some(record),
            manifest: Some(manifest),
            ..
        }) = answer
        else {
            return Err(odd_answer(&node));
        };
        manifest.check().map_err(|error| control::Error {
            code: ErrorCode::Corrupt.into(),
            message: format!("manifest of {reference} from {node}: {error}"),
            hint: String::new(),
        })?;
        Ok(Self {
            holders: nodes.holders_first(&node, &record.nodes),
            nodes: Arc::clone(nodes),
            record,
            manifest,
        })
    }

    fn name(&self) -> String {
        format!("{}@{}", self.record.job, self.record.generation)
    }

    /// A small image, whole and compared with its digest.
    pub(super) fn image(&self, place: usize) -> Result<Vec<u8>, control::Error> {
        let image = &self.manifest.images[place];
        let fetch = message::request::Fetch {
            checkpoint: self.record.id.clone(),
            image: image.name.clone(),
            ..message::request::Fetch::default()
        };
        let mut failure = None;
        for (holder, at) in self.holders.iter().zip(1..) {
            let others = at < self.holders.len();
            match self.image_from(holder, others, &fetch, image.len_bytes) {
                Ok(bytes) if of_image(&bytes).is(pages_of(image.len_bytes), &image.map_digest) => {
                    return Ok(bytes);
                }
                Ok(_) => {
                    failure = Some(self.corrupt(&format!("image {} from {holder}", image.name)));
                }
                Err(error) => {
                    failure.get_or_insert(refusal(&error));
                }
            }
        }
        Err(failure.unwrap_or_else(|| odd_answer("nobody")))
    }

    fn image_from(
        &self,
        holder: &str,
        others: bool,
        fetch: &message::request::Fetch,
        len_bytes: u64,
    ) -> Result<Vec<u8>, PeerError> {
        let wrong = || protocol(holder, "an image of another length");
        if len_bytes > MAX_IMAGE_BYTES {
            return Err(wrong());
        }
        let reader = self.reader(holder, others, fetch.clone())?;
        let mut bytes = Vec::new();
        for frame in reader {
            let Frame { header, payload } = frame?;
            if header.kind == Kind::ImageData {
                bytes.extend_from_slice(&payload);
                if bytes.len() as u64 > len_bytes {
                    return Err(wrong());
                }
            }
        }
        if bytes.len() as u64 == len_bytes {
            Ok(bytes)
        } else {
            Err(wrong())
        }
    }

    /// The pagemap image of the address space at `place`: where its pages are, without them.
    pub(super) fn pagemap(&self, place: usize) -> Result<Vec<u8>, control::Error> {
        let space = &self.manifest.spaces[place];
        let mut pagemap = PagemapWriter::new(space.pages_id);
        let mut total = 0;
        let taken = self.frames(place, true, |frame| {
            let nr_pages = u64::from(frame.header.pages);
            total += nr_pages;
            pagemap.push(PagemapEntry {
                vaddr: frame.header.index * PAGE_BYTES,
                nr_pages,
                flags: frame.header.flags,
            });
            Ok::<_, control::Error>(())
        });
        taken.map_err(|stop| self.stopped(stop))?;
        if total != space.pages {
            return Err(self.corrupt(&format!("pagemap of {}", space.id)));
        }
        Ok(pagemap.finish())
    }

    /// Passes on the pages of the address space at `place`, ascending. The last of them are held back until the
    /// digest of all was found right.
    pub(super) fn pages<E>(
        &self,
        place: usize,
        mut take: impl FnMut(Run<'_>) -> Result<(), E>,
    ) -> Result<(), ImageOrTaker<E>> {
        let space = &self.manifest.spaces[place];
        let mut digest = MapDigest::default();
        let mut held: Option<Frame> = None;
        let mut pass = |frame: &Frame| {
            take(match frame.header.kind {
                Kind::Pages => Run::Pages(&frame.payload),
                _ => Run::Zero(frame.header.pages.into()),
            })
        };
        let taken = self.frames(place, false, |frame| {
            let (index, flags) = (frame.header.index, frame.header.flags);
            match frame.header.kind {
                Kind::Pages => digest.pages(index, flags, &frame.payload),
                _ => digest.zeros(index, flags, frame.header.pages.into()),
            }
            match held.replace(frame) {
                Some(before) => pass(&before),
                None => Ok(()),
            }
        });
        match taken {
            Ok(()) => {}
            Err(Stop::Taker(error)) => return Err(ImageOrTaker::Taker(error)),
            Err(Stop::Node(error)) => return Err(ImageOrTaker::Image(refusal(&error))),
        }
        if !digest.is(space.pages, &space.map_digest) {
            let what = match space.space_type() {
                SpaceType::Process => format!("process {}", space.id),
                SpaceType::SharedMemory => format!("shared memory {}", space.id),
            };
            return Err(ImageOrTaker::Image(self.corrupt(&what)));
        }
        held.map_or(Ok(()), |last| pass(&last))
            .map_err(ImageOrTaker::Taker)
    }

    /// Every frame with pages of the space at `place`, ascending and each once, from one holder after another.
    fn frames<E>(
        &self,
        place: usize,
        runs_only: bool,
        mut take: impl FnMut(Frame) -> Result<(), E>,
    ) -> Result<(), Stop<E>> {
        let mut next_index = 0;
        let mut failure = None;
        for (holder, at) in self.holders.iter().zip(1..) {
            let others = at < self.holders.len();
            loop {
                let begun_at = next_index;
                let fetch = message::request::Fetch {
                    checkpoint: self.record.id.clone(),
                    space: u32::try_from(place + 1).unwrap_or(u32::MAX),
                    from_index: next_index,
                    runs_only,
                    ..message::request::Fetch::default()
                };
                match self.frames_from(holder, others, fetch, &mut next_index, &mut take) {
                    Err(Stop::Node(error)) => {
                        tracing::warn!(node = holder, checkpoint = self.name(), next_index, %error, "pages end early");
                        // A node gives up who does not read for long; a task that is restored may have to wait for
                        // others. What the node itself refuses, it refuses again.
                        let again =
                            next_index > begun_at && !matches!(error, PeerError::Refused { .. });
                        // What the first one said is what went wrong; the others may never have had it.
                        failure.get_or_insert(error);
                        if !again {
                            break;
                        }
                    }
                    done => return done,
                }
            }
        }
        Err(Stop::Node(
            failure.unwrap_or_else(|| protocol("nobody", "no node is known")),
        ))
    }

    fn frames_from<E>(
        &self,
        holder: &str,
        others: bool,
        fetch: message::request::Fetch,
        next_index: &mut u64,
        take: &mut impl FnMut(Frame) -> Result<(), E>,
    ) -> Result<(), Stop<E>> {
        let runs_only = fetch.runs_only;
        let reader = self.reader(holder, others, fetch);
        for frame in reader.map_err(Stop::Node)? {
            let frame = frame.map_err(Stop::Node)?;
            let header = &frame.header;
            let wanted = match header.kind {
                Kind::Space => continue,
                Kind::Pages => !runs_only,
                Kind::Parent => runs_only,
                Kind::Zero => true,
                _ => false,
            };
            if !wanted || header.index < *next_index {
                let error = protocol(holder, "pages that were not asked for");
                return Err(Stop::Node(error));
            }
            let end = header.index + u64::from(header.pages);
            take(frame).map_err(Stop::Taker)?;
            *next_index = end;
        }
        Ok(())
    }

    fn reader(
        &self,
        holder: &str,
        others: bool,
        fetch: message::request::Fetch,
    ) -> Result<FetchReader, PeerError> {
        self.nodes.reach(holder, others)?;
        FetchReader::open(&self.nodes.network, holder, fetch, self.nodes.until())
    }

    fn stopped(&self, stop: Stop<control::Error>) -> control::Error {
        match stop {
            Stop::Node(error) => refusal(&error),
            Stop::Taker(error) => error,
        }
    }

    fn corrupt(&self, what: &str) -> control::Error {
        control::Error {
            code: ErrorCode::Corrupt.into(),
            message: format!("{}: {what}: not what the manifest says", self.name()),
            hint: "`permafrost verify` on the nodes lists everything that is damaged".to_owned(),
        }
    }
}

/// Why pages were not passed on.
pub(super) enum ImageOrTaker<E> {
    /// They could not be had.
    Image(control::Error),
    /// Whoever takes them.
    Taker(E),
}

fn pages_of(len_bytes: u64) -> u64 {
    len_bytes.div_ceil(PAGE_BYTES)
}

fn protocol(node: &str, what: &'static str) -> PeerError {
    PeerError::Protocol {
        node: node.to_owned(),
        what,
    }
}

/// What CRIU asks for, as places in the manifest.
pub(super) enum Wanted {
    Small(usize),
    Pagemap(usize),
    Pages(usize),
}

impl ImageSource for RemoteCheckpoint {
    type Image = Wanted;
    type Error = control::Error;

    fn find(&self, name: &str) -> Option<Wanted> {
        let mut images = self.manifest.images.iter();
        if let Some(at) = images.position(|image| image.name == name) {
            return Some(Wanted::Small(at));
        }
        let place = |is: &dyn Fn(&AddressSpace) -> bool| self.manifest.spaces.iter().position(is);
        match ImageName::parse(name) {
            ImageName::Pagemap(id) => {
                place(&|space| space.space_type() == id.space_type && space.id == id.id)
                    .map(Wanted::Pagemap)
            }
            ImageName::Pages(id) => place(&|space| space.pages_id == id).map(Wanted::Pages),
            _ => None,
        }
    }

    fn write(&self, wanted: &Wanted, pipe: &mut Pipe) -> Result<u64, ImageError<control::Error>> {
        match *wanted {
            Wanted::Small(place) => {
                let image = self.image(place).map_err(ImageError::Source)?;
                pipe.write_all(&image)?;
                Ok(image.len() as u64)
            }
            Wanted::Pagemap(place) => {
                let pagemap = self.pagemap(place).map_err(ImageError::Source)?;
                pipe.write_all(&pagemap)?;
                Ok(pagemap.len() as u64)
            }
            Wanted::Pages(place) => {
                let written = self.pages(place, |run| match run {
                    Run::Pages(bytes) => pipe.write_all(bytes),
                    Run::Zero(pages) => write_zeros(pipe, pages * PAGE_BYTES),
                });
                match written {
                    Ok(()) => Ok(self.manifest.spaces[place].pages * PAGE_BYTES),
                    Err(ImageOrTaker::Image(error)) => Err(ImageError::Source(error)),
                    Err(ImageOrTaker::Taker(error)) => Err(ImageError::Out(error)),
                }
            }
        }
    }
}

fn write_zeros(pipe: &mut Pipe, mut bytes: u64) -> std::io::Result<()> {
    while bytes > 0 {
        let chunk = usize::try_from(bytes)
            .unwrap_or(usize::MAX)
            .min(ZEROS.len());
        pipe.write_all(&ZEROS[..chunk])?;
        bytes -= chunk as u64;
    }
    Ok(())
}
