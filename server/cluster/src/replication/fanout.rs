//! Copies by fan-out: the node that takes a dump sends it to each of the others itself.
//!
//! ```text
//!                     ┌─ DumpSender ═▶ node b
//! session ─▶ FanOut ──┤                             b fails ─▶ at the commit d pulls what is sealed here
//!                     └─ DumpSender ═▶ node c
//! ```
//!
//! A copy that fails or lags is given up at once, so that the task does not stay frozen for it. A missing copy
//! is replaced at the commit: the dump is sealed here, and another node pulls it.

mod links;
mod others;
mod refusal;

use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use permafrost_clustered::{CopiesRequest, CopyStreams, Durability, Replicate, SealHere};
use permafrost_metering::costs::Costs;
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::frame::{Coding, Kind, MAX_PAYLOAD_BYTES};
use permafrost_protocol::wire::message::{Commit, request};
use permafrost_store::{ContentDigest, DumpTap, StoreError};
use permafrost_transport::peer::{DumpSender, Network, PeerError};
use tokio::runtime::Handle;

use self::links::Links;
use self::refusal::too_few_nodes;
use crate::LiveNode;
use crate::error::CopyingError;

/// Longest time for the nodes to agree to a dump. Nothing is frozen yet.
const OPENING: Duration = Duration::from_secs(5);

/// Number of times that other nodes are chosen for those that did not agree.
const OPENING_ROUNDS: usize = 3;

/// Longest time that a copy may keep the dump waiting, beyond [`LAG_FACTOR`] times that of the slowest other
/// copy.
const LAG: Duration = Duration::from_secs(5);

/// Factor for the waiting time of the slowest other copy; see [`LAG`].
const LAG_FACTOR: u32 = 4;

/// Slowest copy that is waited for where there is no other to compare it with: bytes per second, counted beyond
/// the deadline.
const SLOWEST: u64 = 32 << 20;

/// Minimum time for the other copies once enough are durable. They get as long as the first ones took, if that
/// is longer.
const STRAGGLE: Duration = Duration::from_millis(500);

/// View of the current nodes.
pub trait View: Send + Sync {
    /// Returns the live nodes.
    fn live(&self) -> Vec<LiveNode>;
}

impl View for crate::ClusterNodes {
    fn live(&self) -> Vec<LiveNode> {
        crate::ClusterNodes::live(self).nodes
    }
}

/// Counters of copies since the start.
#[derive(Debug, Default)]
pub struct FanOutStats {
    /// Copies begun while the dump streamed.
    pub begun: AtomicU64,
    /// Copies given up: failed, too slow, or of other content.
    pub failed: AtomicU64,
    /// Copies pulled by another node at the commit, in the place of ones that were given up.
    pub replaced: AtomicU64,
}

/// Makes copies by fan-out.
pub struct FanOut {
    shared: Arc<Shared>,
}

struct Shared {
    runtime: Handle,
    network: Network,
    view: Arc<dyn View>,
    node: String,
    /// True if this node's own copies count towards durability.
    counts: bool,
    copies: usize,
    stats: Arc<FanOutStats>,
    costs: Arc<Costs>,
}

impl FanOut {
    /// Creates the fan-out of a node, whose own copies may count; `copies` of each checkpoint are wanted, this
    /// node's included. The links to other nodes are measured in `costs`.
    pub fn new(
        runtime: Handle,
        network: Network,
        view: Arc<dyn View>,
        node: &str,
        counts: bool,
        copies: u32,
        costs: Arc<Costs>,
    ) -> Self {
        let shared = Arc::new(Shared {
            runtime,
            network,
            view,
            node: node.to_owned(),
            counts,
            copies: usize::try_from(copies).unwrap_or(usize::MAX),
            stats: Arc::default(),
            costs,
        });
        Self { shared }
    }

    /// Returns the counters of copies.
    #[must_use]
    pub fn stats(&self) -> Arc<FanOutStats> {
        Arc::clone(&self.shared.stats)
    }
}

impl Replicate for FanOut {
    fn begin(&self, request: CopiesRequest) -> Result<Box<dyn CopyStreams>, StoreError> {
        let shared = &self.shared;
        let own = usize::from(shared.counts);
        let (others, needed) = match request.durability {
            // Repair makes these copies after the dump, which must not wait for another node, nor fill memory for
            // one.
            Durability::Local => (0, 0),
            Durability::Quorum => {
                let needed = shared.copies / 2 + 1;
                (shared.copies.saturating_sub(1), needed.saturating_sub(own))
            }
            Durability::All => (
                shared.copies.saturating_sub(1).max(shared.copies - own),
                shared.copies.saturating_sub(own),
            ),
        };
        // A node whose own copy does not count needs one more.
        let others = others.max(needed);
        let mut copying = Copying {
            shared: Arc::clone(shared),
            parent: request.parent.clone(),
            needed,
            deadline: request.deadline,
            copies: Vec::new(),
            without: Vec::new(),
            failures: Vec::new(),
            holders: Vec::new(),
            bytes: 0,
            began: None,
            waited: Duration::ZERO,
        };
        copying.open(&request, others);
        let counting = copying.counting();
        if counting < needed {
            let live = shared.view.live();
            return Err(too_few_nodes(needed, counting, &live, copying.failures).into());
        }
        shared
            .stats
            .begun
            .fetch_add(copying.copies.len() as u64, Ordering::Relaxed);
        Ok(Box::new(copying))
    }

    fn withdrawn(&self, checkpoint: &str, nodes: &[String]) {
        self.shared.roll_back(checkpoint, nodes);
    }
}

/// The copies of one dump.
struct Copying {
    shared: Arc<Shared>,
    parent: String,
    /// Number of copies on other nodes that must count towards durability.
    needed: usize,
    deadline: Duration,
    copies: Vec<Copy>,
    /// Nodes that have failed in this dump.
    without: Vec<String>,
    /// Reasons of the failures, each with the name of its node.
    failures: Vec<String>,
    /// Nodes that have sealed the dump.
    holders: Vec<String>,
    /// Bytes of pages sent to each copy.
    bytes: u64,
    /// Time at which the first of them was sent.
    began: Option<Instant>,
    /// Time that the dump has waited for copies.
    waited: Duration,
}

/// A copy under way.
struct Copy {
    sender: DumpSender,
    /// True if the copy counts towards durability.
    counts: bool,
    /// Time that the dump has waited for this copy.
    waited: Duration,
}

impl Copying {
    /// Opens `others` copies; if nodes refuse, on other nodes than were chosen first.
    fn open(&mut self, request: &CopiesRequest, others: usize) {
        for _ in 0..OPENING_ROUNDS {
            let there: Vec<String> = self.nodes();
            let chosen =
                self.shared
                    .choose(others.saturating_sub(there.len()), &there, &self.without);
            if chosen.is_empty() {
                return;
            }
            let opened: Vec<_> = std::thread::scope(|scope| {
                let opening: Vec<_> = chosen
                    .iter()
                    .map(|node| scope.spawn(|| self.shared.open(&node.facts.name, request)))
                    .collect();
                opening.into_iter().map(|thread| thread.join()).collect()
            });
            for (node, opened) in chosen.into_iter().zip(opened) {
                match opened {
                    Ok(Ok(sender)) => self.copies.push(Copy {
                        sender,
                        counts: node.facts.counts(),
                        waited: Duration::ZERO,
                    }),
                    Ok(Err(error)) => self.given_up(&node.facts.name, &error.to_string()),
                    Err(_) => self.given_up(&node.facts.name, "opening it failed"),
                }
            }
        }
    }

    fn nodes(&self) -> Vec<String> {
        let nodes = self.copies.iter().map(|copy| copy.sender.node().to_owned());
        nodes.collect()
    }

    /// Returns the number of copies under way that count.
    fn counting(&self) -> usize {
        self.copies.iter().filter(|copy| copy.counts).count()
    }

    fn given_up(&mut self, node: &str, why: &str) {
        tracing::warn!(
            event = "replication-copy-given-up",
            node,
            why,
            "copy given up"
        );
        self.shared.stats.failed.fetch_add(1, Ordering::Relaxed);
        self.without.push(node.to_owned());
        self.failures.push(format!("{node} ({why})"));
    }

    /// Calls `act` with every copy. Copies for which it fails, and those that lag, are given up.
    fn each(&mut self, mut act: impl FnMut(&mut DumpSender) -> Result<(), PeerError>) {
        let mut failed = Vec::new();
        for (at, copy) in self.copies.iter_mut().enumerate() {
            let began = Instant::now();
            if let Err(error) = act(&mut copy.sender) {
                failed.push((at, error.to_string()));
            }
            let waited = began.elapsed();
            copy.waited += waited;
            self.waited += waited;
        }
        for (at, why) in failed.into_iter().rev() {
            let copy = self.copies.swap_remove(at);
            self.given_up(copy.sender.node(), &why);
        }
        if let Some(at) = self.laggard() {
            let copy = self.copies.swap_remove(at);
            self.given_up(copy.sender.node(), "it is much slower than the others");
        }
    }

    /// Returns a copy that delays the dump by much more than the others, or by more than any may.
    fn laggard(&self) -> Option<usize> {
        let slowest = (0..self.copies.len()).max_by_key(|at| self.copies[*at].waited)?;
        let others = self.copies.iter().enumerate();
        let next = others
            .filter(|(at, _)| *at != slowest)
            .map(|(_, copy)| copy.waited);
        let by_others = next.max().map(|next| LAG + next * LAG_FACTOR);
        let by_itself = self.deadline + Duration::from_secs(self.bytes / SLOWEST);
        let limit = by_others.map_or(by_itself, |limit| limit.min(by_itself));
        (self.copies[slowest].waited > limit).then_some(slowest)
    }

    /// Runs a long operation on every copy in parallel, and `meanwhile` here, until enough have finished; the others
    /// get a little longer. Copies that are not right by then are given up. Returns the result of `meanwhile`.
    fn all<T: Send + 'static, R>(
        &mut self,
        act: impl Fn(&mut DumpSender, Instant) -> Result<T, PeerError> + Clone + Send + 'static,
        right: impl Fn(&T) -> bool,
        meanwhile: impl FnOnce() -> R,
    ) -> R {
        let began = Instant::now();
        let deadline = began + self.deadline;
        let (done, results) = mpsc::channel();
        let mut pending: Vec<String> = self.nodes();
        for mut copy in self.copies.drain(..) {
            let (act, done) = (act.clone(), done.clone());
            std::thread::spawn(move || {
                let result = act(&mut copy.sender, deadline);
                // The receiver is gone if the copy was given up: the copy is dropped, and so ended.
                let _ = done.send((copy, result));
            });
        }
        drop(done);
        let here = meanwhile();
        let mut until = deadline;
        while !pending.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            let Ok((copy, result)) = results.recv_timeout(left) else {
                break;
            };
            let node = copy.sender.node().to_owned();
            pending.retain(|other| *other != node);
            match result {
                Ok(answer) if right(&answer) => self.copies.push(copy),
                Ok(_) => self.given_up(&node, "it has other content"),
                Err(error) => self.given_up(&node, &error.to_string()),
            }
            if self.counting() >= self.needed {
                until = deadline.min(Instant::now() + began.elapsed().max(STRAGGLE));
            }
        }
        for node in pending {
            self.given_up(&node, "it was not done in time");
        }
        here
    }

    /// Checks that there are enough copies, or nodes to replace them at the commit.
    fn check(&self) -> Result<(), StoreError> {
        let missing = self.needed.saturating_sub(self.counting());
        if missing == 0 {
            return Ok(());
        }
        let substitutes = self.shared.choose(missing, &self.nodes(), &self.without);
        let counting = substitutes.iter().filter(|node| node.facts.counts());
        if counting.count() >= missing {
            return Ok(());
        }
        Err(self.too_few(self.counting()))
    }

    fn too_few(&self, have: usize) -> StoreError {
        CopyingError::TooFewCopies {
            have,
            needed: self.needed,
            failures: self.failures.clone(),
        }
        .into()
    }

    /// Has other nodes pull the checkpoint that is sealed here, until there are enough. Returns their names, and
    /// true for those that count.
    fn pull(&mut self, commit: &Commit, mut have: usize, deadline: Instant) -> Vec<(String, bool)> {
        let mut pulled = Vec::new();
        while have < self.needed {
            let mut taken = self.nodes();
            taken.extend(pulled.iter().map(|(node, _): &(String, bool)| node.clone()));
            let chosen = self
                .shared
                .choose(self.needed - have, &taken, &self.without);
            if chosen.is_empty() || Instant::now() >= deadline {
                break;
            }
            let results: Vec<_> = std::thread::scope(|scope| {
                let pulls: Vec<_> = chosen
                    .iter()
                    .map(|node| {
                        let body = request::Body::Pull(request::Pull {
                            checkpoint: commit.checkpoint.clone(),
                            from: vec![self.shared.node.clone()],
                            parent: self.parent.clone(),
                            content_digest: commit.content_digest.clone(),
                            ..request::Pull::default()
                        });
                        let network = &self.shared.network;
                        scope.spawn(move || network.call(&node.facts.name, body, deadline))
                    })
                    .collect();
                pulls.into_iter().map(|thread| thread.join()).collect()
            });
            for (node, result) in chosen.into_iter().zip(results) {
                let counts = node.facts.counts();
                let name = node.facts.name;
                match result {
                    Ok(Ok(_)) => {
                        tracing::info!(
                            event = "replication-copy-replaced",
                            node = name,
                            "keeps a copy in the place of one that failed"
                        );
                        self.shared.stats.replaced.fetch_add(1, Ordering::Relaxed);
                        have += usize::from(counts);
                        pulled.push((name, counts));
                    }
                    Ok(Err(error)) => self.given_up(&name, &error.to_string()),
                    Err(_) => self.given_up(&name, "asking it failed"),
                }
            }
        }
        pulled
    }
}

impl Shared {
    fn open(&self, node: &str, request: &CopiesRequest) -> Result<DumpSender, PeerError> {
        let dump = request::Dump {
            session: request.session.to_vec(),
            job: request.job.clone(),
            parent: request.parent.clone(),
            compared: request.compared.clone(),
            ..request::Dump::default()
        };
        DumpSender::open(&self.network, node, dump, Instant::now() + OPENING)
    }
}

impl DumpTap for Copying {
    fn any(&self) -> bool {
        !self.copies.is_empty()
    }

    fn waited(&self) -> Duration {
        self.waited
    }

    fn takes_parent(&self) -> bool {
        self.copies.iter().all(|copy| copy.sender.has_parent())
    }

    fn space(&mut self, space: SpaceId, pages_id: u32) {
        let space_type = u16::try_from(i32::from(space.space_type)).unwrap_or(u16::MAX);
        self.each(|sender| sender.space(space_type, space.id, pages_id));
    }

    fn pages(&mut self, first_index: u64, flags: u16, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.began.get_or_insert_with(Instant::now);
        self.each(|sender| sender.pages(first_index, flags, bytes));
    }

    fn zero(&mut self, first_index: u64, flags: u16, pages: u64) {
        self.each(|sender| counted(first_index, pages, |at, n| sender.zero(at, flags, n)));
    }

    fn parent(&mut self, first_index: u64, flags: u16, pages: u64) {
        self.each(|sender| counted(first_index, pages, |at, n| sender.parent(at, flags, n)));
    }

    fn end(&mut self) {
        self.each(DumpSender::end);
    }

    fn close(&mut self, own: ContentDigest) -> Result<(), StoreError> {
        let links = self.links();
        self.all(
            move |sender, deadline| {
                let since = Instant::now();
                let closed = sender.close(deadline)?;
                links.closed(sender.node(), since.elapsed());
                Ok(closed)
            },
            |closed| closed.content_digest == own,
            || {},
        );
        self.check()
    }

    fn image(
        &mut self,
        name: &str,
        len_bytes: u64,
        contents: &mut dyn Read,
    ) -> Result<(), StoreError> {
        let failed = StoreError::io(format!("read image {name}"));
        let title = Bytes::copy_from_slice(name.as_bytes());
        self.each(|sender| sender.push(Kind::Image, Coding::Raw, 0, 0, len_bytes, title.clone()));
        let longest = usize::try_from(len_bytes).unwrap_or(usize::MAX);
        let mut piece = Vec::with_capacity(longest.min(MAX_PAYLOAD_BYTES as usize));
        loop {
            piece.clear();
            let read =
                Read::take(&mut *contents, u64::from(MAX_PAYLOAD_BYTES)).read_to_end(&mut piece);
            let read = match read {
                Ok(0) => return Ok(()),
                Ok(read) => read as u64,
                Err(error) => return Err(failed(error)),
            };
            let bytes = Bytes::copy_from_slice(&piece);
            self.each(|sender| {
                sender.push(Kind::ImageData, Coding::Raw, 0, 0, read, bytes.clone())
            });
        }
    }
}

impl CopyStreams for Copying {
    fn prepare(&mut self, own: ContentDigest) -> Result<(), StoreError> {
        self.all(
            DumpSender::prepare,
            |ready| ready.content_digest == own,
            || {},
        );
        self.check()
    }

    fn commit(
        &mut self,
        commit: &Commit,
        seal_here: SealHere<'_>,
    ) -> Result<(Checkpoint, Vec<String>), StoreError> {
        let deadline = Instant::now() + self.deadline;
        // A node that got the commit may have sealed, even if its answer was lost.
        self.holders = self.nodes();
        let wanted = commit.clone();
        let sealed = self.all(
            move |sender, deadline| sender.commit(&wanted, deadline),
            |_| true,
            seal_here,
        )?;
        let mut holders = self.nodes();
        let mut have = self.counting();
        for (node, counts) in self.pull(commit, have, deadline) {
            have += usize::from(counts);
            self.holders.push(node.clone());
            holders.push(node);
        }
        if have < self.needed {
            return Err(self.too_few(have));
        }
        Ok((sealed, holders))
    }

    fn published(&mut self, checkpoint: &str) {
        let checkpoint = checkpoint.to_owned();
        let body = request::Body::Publish(request::Publish { checkpoint });
        self.shared.tell(&self.holders, &body);
    }

    fn roll_back(&mut self, checkpoint: &str) {
        self.copies.clear();
        self.shared.roll_back(checkpoint, &self.holders);
    }
}

impl Copying {
    fn links(&self) -> Links {
        let copies = self.copies.iter();
        Links {
            costs: Arc::clone(&self.shared.costs),
            bytes: self.bytes,
            elapsed: self.began.map_or(Duration::ZERO, |began| began.elapsed()),
            waited: Arc::new(
                copies
                    .map(|copy| (copy.sender.node().to_owned(), copy.waited))
                    .collect(),
            ),
        }
    }
}

/// Sends references to pages, in as many frames as their count takes.
fn counted(
    mut index: u64,
    mut pages: u64,
    mut push: impl FnMut(u64, u32) -> Result<(), PeerError>,
) -> Result<(), PeerError> {
    while pages > 0 {
        let count = u32::try_from(pages).unwrap_or(u32::MAX);
        push(index, count)?;
        index += u64::from(count);
        pages -= u64::from(count);
    }
    Ok(())
}
