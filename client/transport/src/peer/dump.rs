//! The sending side of a dump, for a thread of the store or of a front end.

mod driver;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use permafrost_protocol::wire::frame::{Coding, Kind};
use permafrost_protocol::wire::message::{Closed, Commit, Committed, Prepared, request};
use permafrost_protocol::wire::sender::Sender;
use tokio::sync::Notify;

use super::PeerError;
use super::coding::{Coder, LinkSpeed};
use super::network::Network;
use driver::Driver;

/// Longest run of pages in one frame, and piece of an image, bytes.
pub(crate) const RUN_BYTES: usize = permafrost_protocol::wire::frame::MAX_PAYLOAD_BYTES as usize;
/// A page, bytes.
const PAGE_BYTES: usize = 4096;
const _: () = assert!(PAGE_BYTES as u64 == permafrost_protocol::pageserver::PAGE_BYTES);

/// Limit on the bytes that a pusher runs ahead of the connection: enough that the connection need not wait for
/// it, and not so much that pages leave the caches before they are sent. At the limit, the pusher waits until
/// half of that is left. While there is no connection it may fill the window.
const AHEAD_BYTES: u64 = 2 << 20;

/// Progress of a dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of frames pushed.
    pub pushed_frames: u64,
    /// Number of frames that the peer has acknowledged.
    pub acknowledged_frames: u64,
    /// Bytes of the window in use: what this dump holds in memory.
    pub window_used_bytes: u64,
    /// Largest value of `window_used_bytes` so far.
    pub peak_window_bytes: u64,
    /// Payload bytes pushed, before they were compressed.
    pub raw_bytes: u64,
    /// Payload bytes pushed, as sent.
    pub sent_bytes: u64,
    /// Conversations begun: 1 when the connection was never lost.
    pub conversations: u32,
}

struct State {
    sender: Sender<Bytes>,
    window_bytes: u64,
    peak_bytes: u64,
    link: LinkSpeed,
    opened: Option<bool>,
    closed: Option<Closed>,
    prepared: Option<Prepared>,
    commit: Option<Commit>,
    committed: Option<Committed>,
    failed: Option<PeerError>,
    /// The dump needs nothing more from the conversation.
    over: bool,
    raw_bytes: u64,
    sent_bytes: u64,
    conversations: u32,
}

struct Shared {
    node: String,
    state: Mutex<State>,
    /// Something was acknowledged or answered, or it failed.
    changed: Condvar,
    /// Something is to be sent.
    work: Notify,
    /// A commit is to be sent.
    commit: Notify,
    /// It is over.
    over: Notify,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: PeerError) {
        self.lock().failed.get_or_insert(error);
        self.changed.notify_all();
    }

    fn end(&self) {
        self.lock().over = true;
        self.over.notify_one();
        self.changed.notify_all();
    }

    /// Waits until `ready` has something, the dump fails, or the deadline passes.
    fn wait<T>(
        &self,
        doing: &'static str,
        deadline: Instant,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, PeerError> {
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if state.over {
                return Err(PeerError::aborted(&self.node));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(PeerError::deadline(&self.node, doing));
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// A dump on its way to one node. Its calls block; a lost connection is made again behind them. Dropped without a
/// commit it is aborted.
pub struct DumpSender {
    shared: Arc<Shared>,
    coder: Coder,
    stall: Duration,
}

impl DumpSender {
    /// Opens a dump at `node` and waits until the node has agreed.
    ///
    /// # Errors
    /// It refuses, or does not answer by `deadline`.
    pub fn open(
        network: &Network,
        node: &str,
        request: request::Dump,
        deadline: Instant,
    ) -> Result<Self, PeerError> {
        let options = network.options();
        let session: [u8; 16] = request
            .session
            .as_slice()
            .try_into()
            .map_err(|_| PeerError::protocol("this node", "a session that is not 16 bytes"))?;
        let window_bytes = u64::try_from(options.dump_window_bytes).unwrap_or(u64::MAX);
        let mut sender = Sender::new(window_bytes);
        let window_bytes = sender.window_left();
        sender.connection_lost();
        let shared = Arc::new(Shared {
            node: node.to_owned(),
            state: Mutex::new(State {
                sender,
                window_bytes,
                peak_bytes: 0,
                link: LinkSpeed::default(),
                opened: None,
                closed: None,
                prepared: None,
                commit: None,
                committed: None,
                failed: None,
                over: false,
                raw_bytes: 0,
                sent_bytes: 0,
                conversations: 0,
            }),
            changed: Condvar::new(),
            work: Notify::new(),
            commit: Notify::new(),
            over: Notify::new(),
        });
        let dump = Self {
            shared: Arc::clone(&shared),
            coder: Coder::new(options.compression),
            stall: options.stall,
        };
        let driver = Driver {
            network: network.clone(),
            shared,
            request,
            session,
        };
        network.runtime().spawn(driver.run(deadline));
        // On failure `dump` is dropped, which ends the driver.
        dump.shared
            .wait("the opening", deadline, |state| state.opened)?;
        Ok(dump)
    }

    /// Returns the name of the receiving node.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.shared.node
    }

    /// The peer has the parent that was asked for: [`Self::parent`] may be used.
    #[must_use]
    pub fn has_parent(&self) -> bool {
        self.shared.lock().opened.unwrap_or(false)
    }

    /// An address space begins: its type, id and `pages_id`.
    ///
    /// # Errors
    /// The dump failed, or the window stays full. So for every call here.
    pub fn space(&mut self, space_type: u16, id: u64, pages_id: u32) -> Result<(), PeerError> {
        self.push(
            Kind::Space,
            Coding::Raw,
            space_type,
            pages_id,
            id,
            Bytes::new(),
        )
    }

    /// Pushes whole pages that begin at virtual page number `index`, with CRIU's flags.
    ///
    /// # Errors
    /// The same as for [`Self::space`].
    pub fn pages(&mut self, mut index: u64, flags: u16, pages: &[u8]) -> Result<(), PeerError> {
        for run in pages.chunks(RUN_BYTES) {
            let link = self.shared.lock().link.bytes_per_second();
            let (coding, payload) = self.coder.encode(run, link);
            let count = u32::try_from(run.len() / PAGE_BYTES).unwrap_or(u32::MAX);
            self.shared.lock().raw_bytes += u64::try_from(run.len()).unwrap_or(0);
            self.push(Kind::Pages, coding, flags, count, index, payload)?;
            index += u64::from(count);
        }
        Ok(())
    }

    /// Pages that are all zero.
    ///
    /// # Errors
    /// As [`Self::space`].
    pub fn zero(&mut self, index: u64, flags: u16, pages: u32) -> Result<(), PeerError> {
        self.push(Kind::Zero, Coding::Raw, flags, pages, index, Bytes::new())
    }

    /// Pages that the peer has in its parent.
    ///
    /// # Errors
    /// As [`Self::space`].
    pub fn parent(&mut self, index: u64, flags: u16, pages: u32) -> Result<(), PeerError> {
        self.push(Kind::Parent, Coding::Raw, flags, pages, index, Bytes::new())
    }

    /// All address spaces are in: waits until the peer has them durably.
    ///
    /// # Errors
    /// As [`Self::space`]; or no answer by `deadline`.
    pub fn close(&mut self, deadline: Instant) -> Result<Closed, PeerError> {
        self.push(Kind::Close, Coding::Raw, 0, 0, 0, Bytes::new())?;
        self.shared
            .wait("the close", deadline, |state| state.closed.clone())
    }

    /// Begins a small image of `len_bytes`, which [`Self::image_data`] brings.
    ///
    /// # Errors
    /// As [`Self::space`].
    pub fn begin_image(&mut self, name: &str, len_bytes: u64) -> Result<(), PeerError> {
        let name = Bytes::copy_from_slice(name.as_bytes());
        self.push(Kind::Image, Coding::Raw, 0, 0, len_bytes, name)
    }

    /// The next bytes of the image.
    ///
    /// # Errors
    /// As [`Self::space`].
    pub fn image_data(&mut self, bytes: &[u8]) -> Result<(), PeerError> {
        for part in bytes.chunks(RUN_BYTES) {
            let bytes = u64::try_from(part.len()).unwrap_or(u64::MAX);
            let payload = Bytes::copy_from_slice(part);
            self.push(Kind::ImageData, Coding::Raw, 0, 0, bytes, payload)?;
        }
        Ok(())
    }

    /// All images are in: waits until the peer has everything durably.
    ///
    /// # Errors
    /// As [`Self::space`]; or no answer by `deadline`.
    pub fn prepare(&mut self, deadline: Instant) -> Result<Prepared, PeerError> {
        self.push(Kind::Prepare, Coding::Raw, 0, 0, 0, Bytes::new())?;
        self.shared
            .wait("the prepare", deadline, |state| state.prepared.clone())
    }

    /// Has the peer seal it. Said again after a lost connection; the peer takes it once.
    ///
    /// # Errors
    /// As [`Self::space`]; or no answer by `deadline`: then nobody here knows whether the peer sealed it.
    pub fn commit(&mut self, commit: &Commit, deadline: Instant) -> Result<Committed, PeerError> {
        self.shared.lock().commit = Some(commit.clone());
        self.shared.commit.notify_one();
        self.shared
            .wait("the commit", deadline, |state| state.committed.clone())
    }

    /// Gives it up; the peer drops what it has of it.
    pub fn abort(self) {
        drop(self);
    }

    /// Returns the progress of the dump.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let state = self.shared.lock();
        Progress {
            pushed_frames: state.sender.next_sequence(),
            acknowledged_frames: state.sender.acknowledged_below(),
            window_used_bytes: state.window_bytes - state.sender.window_left(),
            peak_window_bytes: state.peak_bytes,
            raw_bytes: state.raw_bytes,
            sent_bytes: state.sent_bytes,
            conversations: state.conversations,
        }
    }

    /// Passes a frame on as it is. `payload` is as `coding` says.
    ///
    /// # Errors
    /// As [`Self::space`].
    pub fn push(
        &mut self,
        kind: Kind,
        coding: Coding,
        flags: u16,
        pages: u32,
        index: u64,
        payload: Bytes,
    ) -> Result<(), PeerError> {
        let length = payload.len();
        let mut payload = Some(payload);
        let deadline = Instant::now() + self.stall;
        let shared = &self.shared;
        let mut ahead_bytes = AHEAD_BYTES;
        let pushed = shared.wait("room in the window", deadline, |state| {
            let ahead = state.sender.is_connected() && state.sender.unsent_bytes() >= ahead_bytes;
            if state.failed.is_some() || state.over || ahead || !state.sender.has_room(length) {
                ahead_bytes = AHEAD_BYTES / 2;
                return None;
            }
            state.sent_bytes += u64::try_from(length).unwrap_or(0);
            let payload = payload.take()?;
            let pushed = state
                .sender
                .push(kind, coding, flags, pages, index, payload);
            let used = state.window_bytes - state.sender.window_left();
            state.peak_bytes = state.peak_bytes.max(used);
            Some(pushed)
        })?;
        match pushed {
            Ok(_) => {
                shared.work.notify_one();
                Ok(())
            }
            Err(_) => Err(PeerError::protocol(
                "this node",
                "a frame that cannot be sent",
            )),
        }
    }
}

impl Drop for DumpSender {
    fn drop(&mut self) {
        self.shared.end();
    }
}
