//! Copies over a wire that is a function call, with faults.

use std::collections::HashSet;
use std::io::Read;
use std::sync::Arc;

use parking_lot::Mutex;
use permafrost_clustered::{CopiesRequest, CopyStreams, Durability, Replicate, SealHere};
use permafrost_pmem::PAGE_SIZE;
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::message::Commit;
use permafrost_store::{ContentDigest, CopyDump, CopyRequest, DumpTap, StoreError};

use super::{Node, Shared, Step, name, unavailable};

/// Numbers of pages by the kind of frame that they were sent in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) pages: u64,
    pub(crate) zero: u64,
    pub(crate) parent: u64,
}

/// A wire that is a function call.
pub(super) struct Wire {
    pub(super) replicas: Mutex<Vec<Arc<Node>>>,
    pub(super) faults: Shared,
    pub(super) seen: Arc<Mutex<Seen>>,
}

impl Replicate for Wire {
    fn begin(&self, request: CopiesRequest) -> Result<Box<dyn CopyStreams>, StoreError> {
        let replicas = self.replicas.lock().clone();
        let open = |node: &Arc<Node>| {
            node.store.local().open_copy(CopyRequest {
                session: request.session,
                job: request.job.clone(),
                parent: request.parent.clone(),
                compared: request.compared.clone(),
            })
        };
        let mut copies = Vec::new();
        for (n, node) in replicas.iter().enumerate() {
            copies.push(Copy {
                n,
                node: Arc::clone(node),
                dump: Some(open(node)?),
            });
        }
        Ok(Box::new(Loop {
            total: copies.len() + 1,
            takes_parent: copies
                .iter()
                .all(|copy| copy.dump.as_ref().is_some_and(CopyDump::has_parent)),
            copies,
            durability: request.durability,
            faults: self.faults.clone(),
            seen: Arc::clone(&self.seen),
            corrupted: HashSet::new(),
        }))
    }
}

struct Copy {
    n: usize,
    node: Arc<Node>,
    dump: Option<CopyDump>,
}

struct Loop {
    copies: Vec<Copy>,
    /// Number of wanted copies, the origin's included.
    total: usize,
    takes_parent: bool,
    durability: Durability,
    faults: Shared,
    seen: Arc<Mutex<Seen>>,
    corrupted: HashSet<usize>,
}

impl Loop {
    /// Calls `take` for each copy; a copy that fails is removed.
    fn each(&mut self, mut take: impl FnMut(&mut CopyDump) -> Result<(), StoreError>) {
        for copy in &mut self.copies {
            if copy.dump.as_mut().is_some_and(|dump| take(dump).is_err()) {
                copy.dump = None;
            }
        }
    }

    fn agree(
        &mut self,
        own: ContentDigest,
        ask: impl Fn(&mut CopyDump) -> Result<ContentDigest, StoreError>,
    ) -> Result<(), StoreError> {
        self.each(|dump| match ask(dump)? {
            theirs if theirs == own => Ok(()),
            _ => Err(unavailable()),
        });
        self.enough()
    }

    fn enough(&self) -> Result<(), StoreError> {
        let have = 1 + self
            .copies
            .iter()
            .filter(|copy| copy.dump.is_some())
            .count();
        let needed = match self.durability {
            Durability::Local => 1,
            Durability::Quorum => self.total / 2 + 1,
            Durability::All => self.total,
        };
        if have >= needed {
            return Ok(());
        }
        Err(StoreError::ReadOnly {
            reason: format!("{have} copies of {needed}"),
        })
    }
}

impl DumpTap for Loop {
    fn takes_parent(&self) -> bool {
        self.takes_parent
    }

    fn space(&mut self, space: SpaceId, pages_id: u32) {
        self.each(|dump| dump.space(space, pages_id));
    }

    fn pages(&mut self, first_index: u64, flags: u16, bytes: &[u8]) {
        self.seen.lock().pages += (bytes.len() / PAGE_SIZE) as u64;
        let (broken, corrupt) = {
            let faults = self.faults.faults();
            (faults.broken.clone(), faults.corrupt.clone())
        };
        for copy in &mut self.copies {
            if broken.contains(&copy.n) {
                copy.dump = None;
            }
            let Some(dump) = &mut copy.dump else { continue };
            let mut bytes = bytes.to_vec();
            if corrupt.contains(&copy.n) && self.corrupted.insert(copy.n) {
                bytes[77] ^= 4;
            }
            if dump.pages(first_index, flags, &bytes).is_err() {
                copy.dump = None;
            }
        }
    }

    fn zero(&mut self, first_index: u64, flags: u16, pages: u64) {
        self.seen.lock().zero += pages;
        self.each(|dump| dump.zero(first_index, flags, pages));
    }

    fn parent(&mut self, first_index: u64, flags: u16, pages: u64) {
        assert!(self.takes_parent);
        self.seen.lock().parent += pages;
        self.each(|dump| dump.parent(first_index, flags, pages));
    }

    fn close(&mut self, own: ContentDigest) -> Result<(), StoreError> {
        self.faults.pass(Step::Close);
        self.agree(own, CopyDump::close)
    }

    fn image(
        &mut self,
        name: &str,
        len_bytes: u64,
        contents: &mut dyn Read,
    ) -> Result<(), StoreError> {
        let mut bytes = Vec::new();
        contents.read_to_end(&mut bytes).unwrap();
        self.each(|dump| dump.image(name, len_bytes, &mut bytes.as_slice()));
        Ok(())
    }
}

impl CopyStreams for Loop {
    fn prepare(&mut self, own: ContentDigest) -> Result<(), StoreError> {
        self.faults.pass(Step::Prepare);
        self.agree(own, CopyDump::prepare)
    }

    /// Seals here when the first copy is sealed.
    fn commit(
        &mut self,
        commit: &Commit,
        seal_here: SealHere<'_>,
    ) -> Result<(Checkpoint, Vec<String>), StoreError> {
        let (mut names, mut seal_here, mut sealed) = (Vec::new(), Some(seal_here), None);
        for n in 0..self.copies.len() {
            self.faults.pass(Step::Commit(n));
            if n == 1 {
                sealed = seal_here.take().map(|seal| seal()).transpose()?;
                self.faults.pass(Step::SealedHere);
            }
            let copy = &mut self.copies[n];
            let Some(dump) = &mut copy.dump else { continue };
            match dump.commit(commit) {
                Ok(first) => {
                    // Asked again, as after a lost answer: the same checkpoint, on the conversation and without it.
                    assert_eq!(dump.commit(commit).unwrap(), first);
                    assert_eq!(
                        copy.node.store.local().committed(commit).unwrap(),
                        Some(first)
                    );
                    names.push(name(copy.n));
                }
                Err(_) => copy.dump = None,
            }
        }
        if let Some(seal) = seal_here {
            sealed = Some(seal()?);
        }
        self.faults.pass(Step::Commit(self.copies.len()));
        self.enough()?;
        Ok((sealed.expect("sealed above"), names))
    }

    fn published(&mut self, checkpoint: &str) {
        self.faults.pass(Step::Published);
        for copy in self.copies.iter().filter(|copy| copy.dump.is_some()) {
            copy.node.store.local().publish(checkpoint).unwrap();
        }
    }

    fn roll_back(&mut self, checkpoint: &str) {
        for copy in &self.copies {
            copy.node
                .store
                .local()
                .roll_back(checkpoint, false)
                .unwrap();
            // It may well be asked twice.
            assert!(
                !copy
                    .node
                    .store
                    .local()
                    .roll_back(checkpoint, false)
                    .unwrap()
            );
        }
    }
}
