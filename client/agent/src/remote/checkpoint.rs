//! Reads a checkpoint that nodes hold.
//!
//! Pages come from one node; when that node fails, another node continues from the page that was reached. The
//! pages are compared with the manifest's digest before the last of them is passed on: damaged data lacks its
//! end.

use std::borrow::Cow;
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use permafrost_criu::source::{PageRun, ReadError};
use permafrost_protocol::control;
use permafrost_protocol::manifest::{Manifest, SpaceType};
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{FetchOpened, request};
use permafrost_transport::peer::{PeerError, ReceivedFrame};

use super::digest::MapDigest;
use super::positions::KnownPages;
use super::small::Prefetched;
use super::{Holders, Outline, RemoteError, refusal};

/// Advice for the case that no holder can be reached.
pub(super) const HINT: &str = "try again when a node that holds it is there";

/// Fault of a node whose pages are not the checkpoint's.
pub(super) const OTHER: &str = "other pages than the manifest's digest is of";

/// A checkpoint that is being read.
pub struct RemoteCheckpoint {
    pub(super) holders: Arc<dyn Holders>,
    /// Nodes that may have the checkpoint, in the order in which they are asked. A node that fails is asked
    /// last from then on: a node that is gone must not be waited for at each file.
    order: Mutex<Vec<String>>,
    pub(super) record: control::Checkpoint,
    pub(super) manifest: Manifest,
    pub(super) prefetched: Mutex<Prefetched>,
    /// Known positions and checksums of pages.
    pub(super) known: Mutex<KnownPages>,
}

/// A selection of pages of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageSelection {
    /// Index of the address space in the manifest, from 0.
    pub place: usize,
    /// Index of the first page.
    pub from_index: u64,
    /// Most pages to read; 0 for all that follow.
    pub pages: u64,
}

impl PageSelection {
    /// Selects all pages of an address space.
    #[must_use]
    pub fn all(place: usize) -> Self {
        Self {
            place,
            ..Self::default()
        }
    }

    /// Returns true if the part is all pages of an address space.
    #[must_use]
    pub fn is_all(&self) -> bool {
        *self == Self::all(self.place)
    }
}

/// Reasons for which the reading of a space ended early.
pub(super) enum Stop<E> {
    /// The node failed: another node may succeed.
    Node(PeerError),
    /// The taker of the pages failed.
    Taker(E),
}

/// Returns true if a manifest is of the job and the generation that a checkpoint is listed as. A registry must not be
/// able to give one job's memory to another.
#[must_use]
pub fn is_listed_as(record: &control::Checkpoint, manifest: &Manifest) -> bool {
    (&record.job, record.generation) == (&manifest.job, manifest.generation)
}

impl RemoteCheckpoint {
    /// Returns a checkpoint whose manifest is known. `order` lists the nodes that may have it, in the order in
    /// which they are asked.
    #[must_use]
    pub fn new(
        holders: Arc<dyn Holders>,
        order: Vec<String>,
        record: control::Checkpoint,
        manifest: Manifest,
    ) -> Self {
        Self {
            holders,
            order: Mutex::new(order),
            record,
            manifest,
            prefetched: Mutex::default(),
            known: Mutex::default(),
        }
    }

    /// Gets the manifest from the first node in `order` whose manifest is accepted by `is_right`. A node with
    /// another manifest is not asked again.
    ///
    /// # Errors
    /// No node has it; of several failures the first is returned.
    pub fn open(
        holders: Arc<dyn Holders>,
        order: Vec<String>,
        record: control::Checkpoint,
        is_right: impl Fn(&FetchOpened, &Manifest) -> bool,
    ) -> Result<Self, control::Error> {
        let fetch = request::Fetch {
            manifest_only: true,
            ..fetch_of(&record)
        };
        let (mut failure, mut failed) = (None, Vec::new());
        let mut left = order.into_iter();
        while let Some(holder) = left.next() {
            let arriving = holders.fetch(&holder, left.len() > 0, fetch.clone());
            let mut opened = match arriving {
                Ok(arriving) => arriving.opened,
                Err(error) => {
                    tracing::warn!(event = "manifest-not-fetched", node = holder, checkpoint = name_of(&record), %error, "no manifest");
                    failure.get_or_insert(refusal(&error, HINT));
                    failed.push(holder);
                    continue;
                }
            };
            match opened.manifest.take() {
                Some(manifest)
                    if manifest.check().is_ok()
                        && is_listed_as(&record, &manifest)
                        && is_right(&opened, &manifest) =>
                {
                    let order = std::iter::once(holder).chain(left).chain(failed);
                    return Ok(Self::new(holders, order.collect(), record, manifest));
                }
                _ => {
                    let error = corrupt(&record, &format!("manifest from {holder}"));
                    tracing::error!(
                        event = "manifest-differs",
                        error = error.message,
                        "another manifest than is listed"
                    );
                    failure.get_or_insert(error);
                }
            }
        }
        Err(failure.unwrap_or_else(|| nobody(&record)))
    }

    pub(super) fn order(&self) -> Vec<String> {
        self.order.lock().clone()
    }

    pub(super) fn ask_last(&self, holder: &str) {
        let mut order = self.order.lock();
        // Stable, so that the others stay in order.
        order.sort_by_key(|name| name == holder);
    }

    /// Returns the checkpoint's record, as listings show it.
    #[must_use]
    pub fn record(&self) -> &control::Checkpoint {
        &self.record
    }

    /// Returns the checkpoint's manifest; its map roots mean nothing on this host.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Passes on the pages of the address space at `place` from `from_index` on, ascending. `before` is the
    /// digest of the pages before them, which the taker got in another way. The last pages are held back until
    /// the digest of all pages was found to match the manifest.
    ///
    /// # Errors
    /// No holder gives them, or they differ from the manifest; an error of the taker.
    pub fn pages<E>(
        &self,
        place: usize,
        from_index: u64,
        before: MapDigest,
        mut take: impl FnMut(PageRun<'_>) -> Result<(), E>,
    ) -> Result<(), ReadError<control::Error, E>> {
        let space = &self.manifest.spaces[place];
        let mut digest = before;
        let mut held: Option<ReceivedFrame> = None;
        let part = PageSelection {
            place,
            from_index,
            pages: 0,
        };
        let taken = self.frames(part, None, |frame| {
            let (index, flags) = (frame.header.index, frame.header.flags);
            match frame.header.kind {
                Kind::Pages => digest.pages(index, flags, &frame.payload),
                _ => digest.zeros(index, flags, frame.header.pages.into()),
            }
            match held.replace(frame) {
                Some(before) => take(run_of(&before)),
                None => Ok(()),
            }
        });
        taken.map_err(told)?;
        if !digest.is(space.pages, &space.map_digest) {
            let what = match space.space_type() {
                SpaceType::Process => format!("process {}", space.id),
                SpaceType::SharedMemory => format!("shared memory {}", space.id),
            };
            return Err(ReadError::Source(corrupt(&self.record, &what)));
        }
        held.map_or(Ok(()), |last| take(run_of(&last)))
            .map_err(ReadError::Taker)
    }

    /// Passes on some pages of an address space, ascending. A part has no digest: the caller that puts the
    /// parts together must compare the digest of the whole.
    ///
    /// # Errors
    /// No holder gives them; an error of the taker.
    pub fn part<E>(
        &self,
        part: PageSelection,
        mut take: impl FnMut(PageRun<'_>) -> Result<(), E>,
    ) -> Result<(), ReadError<control::Error, E>> {
        let taken = self.frames(part, None, |frame| take(run_of(&frame)));
        taken.map_err(told)
    }

    /// Has the holders keep the pages for 30 s, even if the checkpoint is removed. Returns once one of them has agreed:
    /// one that is away takes seconds.
    pub(super) fn hold(&self) {
        let (tell, agreed) = mpsc::channel();
        for holder in self.order() {
            let hold = request::Fetch {
                manifest_only: true,
                hold: true,
                ..fetch_of(&self.record)
            };
            let (holders, tell) = (Arc::clone(&self.holders), tell.clone());
            let checkpoint = name_of(&self.record);
            std::thread::spawn(move || match holders.fetch(&holder, true, hold) {
                // Nobody waits for the second.
                Ok(_) => drop(tell.send(())),
                Err(error) => tracing::debug!(node = holder, checkpoint, %error, "not held"),
            });
        }
        drop(tell);
        if agreed.recv().is_err() {
            tracing::debug!(checkpoint = name_of(&self.record), "held by no node");
        }
    }

    /// Passes on every frame with pages of the part, ascending and each once, from one holder after another. Those that
    /// differ from `outline` are not passed on: another holder is asked.
    pub(super) fn frames<E>(
        &self,
        part: PageSelection,
        outline: Option<&Outline>,
        mut take: impl FnMut(ReceivedFrame) -> Result<(), E>,
    ) -> Result<(), Stop<E>> {
        let mut rest = part;
        let mut failure = None;
        let order = self.order();
        for (holder, at) in order.iter().zip(1..) {
            let others = at < order.len();
            loop {
                let begun_at = rest.from_index;
                match self.frames_from(holder, others, outline, &mut rest, &mut take) {
                    Err(Stop::Node(error)) => {
                        let (checkpoint, next_index) = (name_of(&self.record), rest.from_index);
                        tracing::warn!(event = "pages-ended-early", node = holder, checkpoint, next_index, %error, "pages end early");
                        // A node gives up a reader that does not read for long; a restored task may have to wait for
                        // others. A request that the node itself refuses will be refused again.
                        let again = rest.from_index > begun_at
                            && !matches!(error, PeerError::Refused { .. });
                        // The first node's error is the cause; the others may never have had the checkpoint.
                        failure.get_or_insert(error);
                        if part.pages > 0 && rest.pages == 0 {
                            return Ok(());
                        }
                        if !again {
                            self.ask_last(holder);
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
        outline: Option<&Outline>,
        rest: &mut PageSelection,
        take: &mut impl FnMut(ReceivedFrame) -> Result<(), E>,
    ) -> Result<(), Stop<E>> {
        let fetch = request::Fetch {
            space: u32::try_from(rest.place + 1).unwrap_or(u32::MAX),
            from_index: rest.from_index,
            pages: rest.pages,
            ..fetch_of(&self.record)
        };
        let limited = rest.pages > 0;
        let arriving = self.holders.fetch(holder, others, fetch);
        for frame in arriving.map_err(Stop::Node)?.frames {
            let frame = frame.map_err(Stop::Node)?;
            let header = &frame.header;
            let wanted = match header.kind {
                Kind::Space => continue,
                Kind::Pages | Kind::Zero => true,
                _ => false,
            };
            let pages = u64::from(header.pages);
            let fits = header.index >= rest.from_index && (!limited || pages <= rest.pages);
            let Some(end) = header.index.checked_add(pages).filter(|_| wanted && fits) else {
                let error = protocol(holder, "pages that were not asked for");
                return Err(Stop::Node(error));
            };
            if outline.is_some_and(|outline| !outline.matches(rest.from_index, &frame)) {
                return Err(Stop::Node(protocol(holder, OTHER)));
            }
            take(frame).map_err(Stop::Taker)?;
            rest.from_index = end;
            if limited {
                rest.pages -= pages;
            }
        }
        let is_all = !limited || rest.pages == 0;
        match outline.and_then(|outline| outline.next_index(rest.from_index)) {
            Some(_) if !is_all => Err(Stop::Node(protocol(holder, OTHER))),
            _ => Ok(()),
        }
    }
}

/// Returns the parts of a fetch that are the same for every request. With the checkpoint's name, a node that
/// does not hold it finds the holders.
pub(super) fn fetch_of(record: &control::Checkpoint) -> request::Fetch {
    let is_parked = record.generation == 0;
    request::Fetch {
        checkpoint: record.id.clone(),
        listed_as: if is_parked {
            String::new()
        } else {
            name_of(record)
        },
        ..request::Fetch::default()
    }
}

pub(super) fn name_of(record: &control::Checkpoint) -> String {
    format!("{}@{}", record.job, record.generation)
}

pub(super) fn run_of(frame: &ReceivedFrame) -> PageRun<'_> {
    let (first_index, flags) = (frame.header.index, frame.header.flags);
    match frame.header.kind {
        Kind::Pages => PageRun::Pages {
            first_index,
            flags,
            bytes: Cow::Borrowed(&frame.payload),
        },
        _ => PageRun::Zero {
            first_index,
            flags,
            pages: frame.header.pages.into(),
        },
    }
}

pub(super) fn told<E>(stop: Stop<E>) -> ReadError<control::Error, E> {
    match stop {
        Stop::Node(error) => ReadError::Source(refusal(&error, HINT)),
        Stop::Taker(error) => ReadError::Taker(error),
    }
}

pub(super) fn corrupt(record: &control::Checkpoint, part: &str) -> control::Error {
    RemoteError::Corrupt {
        checkpoint: name_of(record),
        part: part.to_owned(),
    }
    .into()
}

pub(super) fn nobody(record: &control::Checkpoint) -> control::Error {
    RemoteError::NoHolder {
        checkpoint: name_of(record),
    }
    .into()
}

pub(super) fn protocol(node: &str, what: &'static str) -> PeerError {
    PeerError::Protocol {
        node: node.to_owned(),
        what,
    }
}
