//! The sending side of a dump, for a thread of the store or of a front end.

mod driver;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};
use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::wire::conversation::DumpClient;
use permafrost_protocol::wire::frame::{Coding, Kind};
use permafrost_protocol::wire::message::{Closed, Commit, Committed, Prepared, request};
use tokio::sync::Notify;

use super::PeerError;
use super::coding::{Coder, LinkSpeed};
use super::network::Network;
use driver::Driver;

/// Longest run of pages in one frame, and longest piece of an image, bytes.
pub(crate) const RUN_BYTES: usize = permafrost_protocol::wire::frame::MAX_PAYLOAD_BYTES as usize;

/// Progress of a dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DumpProgress {
    /// Number of frames pushed.
    pub pushed_frames: u64,
    /// Number of frames that the peer has acknowledged.
    pub acknowledged_frames: u64,
    /// Bytes of the window in use: the memory that this dump takes.
    pub window_used_bytes: u64,
    /// Largest value of `window_used_bytes` so far.
    pub peak_window_bytes: u64,
    /// Payload bytes pushed, before they were compressed.
    pub raw_bytes: u64,
    /// Payload bytes pushed, as sent.
    pub sent_bytes: u64,
    /// Number of conversations begun: 1 if the connection was never lost.
    pub conversations: u32,
    /// True if the frames of the latest conversation go over TLS, and not over QUIC.
    pub over_tls: bool,
}

struct State {
    client: DumpClient<Bytes>,
    peak_bytes: u64,
    link: LinkSpeed,
    /// Reason why the dump has failed.
    failed: Option<PeerError>,
    raw_bytes: u64,
    sent_bytes: u64,
    over_tls: bool,
}

struct Shared {
    node: String,
    state: Mutex<State>,
    /// Notified when there is room for a frame that waits, a reply has come, or the dump is over.
    changed: Condvar,
    /// Notified when there are frames or a commit to send.
    work: Notify,
    /// Notified when the dump was given up on this side.
    over: Notify,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits until `ready` returns a value, the dump fails, or the deadline passes.
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
            if state.client.is_over() {
                return Err(PeerError::aborted(&self.node));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(PeerError::deadline(&self.node, doing));
            }
            self.changed.wait_for(&mut state, left);
        }
    }
}

/// A dump that is being sent to one node. Its calls block; a lost connection is restored in the background. A
/// dump that is dropped without a commit is aborted.
pub struct DumpSender {
    shared: Arc<Shared>,
    coder: Coder,
    stall: Duration,
    /// True if the address spaces were ended.
    ended: bool,
}

impl DumpSender {
    /// Opens a dump at `node` and waits until the node has agreed.
    ///
    /// # Errors
    /// The node refuses, or does not reply by `deadline`.
    pub fn open(
        network: &Network,
        node: &str,
        request: request::Dump,
        deadline: Instant,
    ) -> Result<Self, PeerError> {
        let options = network.options();
        let window_bytes = u64::try_from(options.dump_window_bytes).unwrap_or(u64::MAX);
        let client = DumpClient::new(request, window_bytes, deadline, options.reconnect);
        let shared = Arc::new(Shared {
            node: node.to_owned(),
            state: Mutex::new(State {
                client: client.map_err(|error| PeerError::conversation("this node", error))?,
                peak_bytes: 0,
                link: LinkSpeed::default(),
                failed: None,
                raw_bytes: 0,
                sent_bytes: 0,
                over_tls: false,
            }),
            changed: Condvar::new(),
            work: Notify::new(),
            over: Notify::new(),
        });
        let dump = Self {
            shared: Arc::clone(&shared),
            coder: Coder::new(options.compression, network.buffers()),
            stall: options.stall,
            ended: false,
        };
        let driver = Driver {
            network: network.clone(),
            shared,
        };
        network.runtime().spawn(driver.run());
        // On failure `dump` is dropped, which ends the driver.
        dump.shared
            .wait("the opening", deadline, |state| state.client.has_parent())?;
        Ok(dump)
    }

    /// Returns the name of the receiving node.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.shared.node
    }

    /// Returns true if the peer has the requested parent: [`Self::parent`] may then be used.
    #[must_use]
    pub fn has_parent(&self) -> bool {
        self.shared.lock().client.has_parent().unwrap_or(false)
    }

    /// Begins an address space with its type, id and `pages_id`.
    ///
    /// # Errors
    /// The dump failed, or the window stays full. The same holds for every call of this type.
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
            let (coding, payload) = self.coder.encode(run, link, Instant::now());
            let count = u32::try_from(run.len() / PAGE_SIZE).unwrap_or(u32::MAX);
            self.shared.lock().raw_bytes += u64::try_from(run.len()).unwrap_or(0);
            self.push(Kind::Pages, coding, flags, count, index, payload)?;
            index += u64::from(count);
        }
        Ok(())
    }

    /// Pushes pages that are all zero.
    ///
    /// # Errors
    /// The same as for [`Self::space`].
    pub fn zero(&mut self, index: u64, flags: u16, pages: u32) -> Result<(), PeerError> {
        self.push(Kind::Zero, Coding::Raw, flags, pages, index, Bytes::new())
    }

    /// Pushes references to pages that the peer has in its parent.
    ///
    /// # Errors
    /// The same as for [`Self::space`].
    pub fn parent(&mut self, index: u64, flags: u16, pages: u32) -> Result<(), PeerError> {
        self.push(Kind::Parent, Coding::Raw, flags, pages, index, Bytes::new())
    }

    /// Ends the address spaces, without waiting for the peer.
    ///
    /// # Errors
    /// The same as for [`Self::space`].
    pub fn end(&mut self) -> Result<(), PeerError> {
        self.push(Kind::Close, Coding::Raw, 0, 0, 0, Bytes::new())?;
        self.ended = true;
        Ok(())
    }

    /// Ends the address spaces, if they are not ended yet, and waits until the peer has stored them durably.
    ///
    /// # Errors
    /// The same as for [`Self::space`]; or no reply by `deadline`.
    pub fn close(&mut self, deadline: Instant) -> Result<Closed, PeerError> {
        if !self.ended {
            self.end()?;
        }
        self.shared.wait("the close", deadline, |state| {
            state.client.closed().cloned()
        })
    }

    /// Begins a small image of `len_bytes`, which [`Self::image_data`] brings.
    ///
    /// # Errors
    /// The same as for [`Self::space`].
    pub fn begin_image(&mut self, name: &str, len_bytes: u64) -> Result<(), PeerError> {
        let name = Bytes::copy_from_slice(name.as_bytes());
        self.push(Kind::Image, Coding::Raw, 0, 0, len_bytes, name)
    }

    /// Pushes the next bytes of the image.
    ///
    /// # Errors
    /// The same as for [`Self::space`].
    pub fn image_data(&mut self, bytes: &[u8]) -> Result<(), PeerError> {
        for part in bytes.chunks(RUN_BYTES) {
            let bytes = u64::try_from(part.len()).unwrap_or(u64::MAX);
            let payload = Bytes::copy_from_slice(part);
            self.push(Kind::ImageData, Coding::Raw, 0, 0, bytes, payload)?;
        }
        Ok(())
    }

    /// Ends the images, and waits until the peer has stored everything durably.
    ///
    /// # Errors
    /// The same as for [`Self::space`]; or no reply by `deadline`.
    pub fn prepare(&mut self, deadline: Instant) -> Result<Prepared, PeerError> {
        self.push(Kind::Prepare, Coding::Raw, 0, 0, 0, Bytes::new())?;
        self.shared.wait("the prepare", deadline, |state| {
            state.client.prepared().cloned()
        })
    }

    /// Makes the peer seal the dump. Sent again after a lost connection; the peer carries it out once.
    ///
    /// # Errors
    /// The same as for [`Self::space`]; or no reply by `deadline`: then it is unknown whether the peer sealed
    /// the dump.
    pub fn commit(&mut self, commit: &Commit, deadline: Instant) -> Result<Committed, PeerError> {
        let accepted = self.shared.lock().client.commit(commit);
        accepted.map_err(|error| PeerError::conversation("this node", error))?;
        self.shared.work.notify_one();
        self.shared.wait("the commit", deadline, |state| {
            state.client.committed().cloned()
        })
    }

    /// Gives the dump up; the peer discards its part.
    pub fn abort(self) {
        drop(self);
    }

    /// Returns the progress of the dump.
    #[must_use]
    pub fn progress(&self) -> DumpProgress {
        let state = self.shared.lock();
        let window = state.client.window();
        DumpProgress {
            pushed_frames: window.next_sequence(),
            acknowledged_frames: window.acknowledged_below(),
            window_used_bytes: window.used_bytes(),
            peak_window_bytes: state.peak_bytes,
            raw_bytes: state.raw_bytes,
            sent_bytes: state.sent_bytes,
            conversations: state.client.conversations(),
            over_tls: state.over_tls,
        }
    }

    /// Passes a frame on unchanged. `payload` is encoded by `coding`.
    ///
    /// # Errors
    /// The same as for [`Self::space`].
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
        let pushed = shared.wait("room in the window", deadline, |state| {
            if !state.client.may_push(length) {
                return None;
            }
            let payload = payload.take()?;
            state.sent_bytes += u64::try_from(length).unwrap_or(0);
            let pushed = state
                .client
                .push(kind, coding, flags, pages, index, payload);
            state.peak_bytes = state.peak_bytes.max(state.client.window().used_bytes());
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
        self.shared.lock().client.abandon();
        self.shared.over.notify_one();
    }
}
