//! Interface between the host's front ends and the keeper of the checkpoints.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use permafrost_criu::ProgressReceiver;
use permafrost_criu::frontend::PageSink;
use permafrost_criu::source::LazySource;
use permafrost_identity::Peer;
use permafrost_lazy::{FillGate, TouchedPages};
use permafrost_protocol::control::{self, reply, request};
use permafrost_protocol::manifest::Origin;
use tokio::sync::watch;

/// Receiver of the queue's messages for a request that waits.
pub trait Waits {
    /// Called about once a second while the request is queued.
    fn waits(&mut self, waiting: &control::Waiting);

    /// Called when the request is admitted and begins.
    fn begins(&mut self) {}

    /// Returns true if the caller that waits for the request has gone.
    fn is_gone(&self) -> bool {
        false
    }
}

/// Waits without a time limit and ignores all messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patiently;

impl Waits for Patiently {
    fn waits(&mut self, _waiting: &control::Waiting) {}
}

/// Remote end of a connection of this host.
#[derive(Clone, Debug)]
pub enum Client {
    /// A user of this machine, known by the credentials of a socket.
    User {
        /// User id of the process.
        uid: u32,
        /// Pid of the process that connected.
        pid: i32,
    },
    /// A TCP connection without a certificate.
    Tcp {
        /// Address of the remote end.
        address: SocketAddr,
        /// User id of the owner of the remote socket; `None` on another machine.
        uid: Option<u32>,
    },
    /// The holder of a certificate.
    Certificate(Peer),
}

/// Records the outcome of a request of the control socket.
pub type Trail = Box<dyn FnOnce(Result<&reply::Body, &control::Error>)>;

/// A dump that is not sealed yet.
pub trait DumpSession: Send + Sync + 'static {
    /// Returns the session's id: 32 hex digits.
    fn id(&self) -> &str;

    /// Returns the session's job; empty for an anonymous session.
    fn job(&self) -> &str;

    /// Returns the generation that the pages are compared with (0 for none), and where that one was taken.
    fn parent(&self) -> (u64, Option<Origin>);

    /// Returns a channel that turns true when the session takes no more pages: closed, failed or discarded.
    fn ended(&self) -> watch::Receiver<bool>;
}

/// A checkpoint that is lent to lazy restores, and the conditions.
#[derive(Clone, Copy, Debug)]
pub struct Lent<'a> {
    /// `JOB` or `JOB@GEN`.
    pub checkpoint: &'a str,
    /// Request whose background transfer takes its turn in the queue; `None` for one that brings pages when they are
    /// needed.
    pub queued: Option<&'a request::Thaw>,
}

/// Function that serves a checkpoint to lazy restores. The gate opens when it is the turn of the background transfer.
pub type ServeLazily<'a> = &'a mut dyn FnMut(
    &dyn LazySource,
    &Arc<FillGate>,
) -> Result<control::LazyServed, control::Error>;

/// State of a restore that places all pages.
#[derive(Clone, Copy, Debug)]
pub enum PlacingEvent {
    /// CRIU has come.
    Begun,
    /// Number of bytes placed so far.
    Placed(u64),
}

/// Function that places a checkpoint's pages, which the gate counts.
pub type ServePlacing<'a> = &'a mut dyn FnMut(
    &dyn LazySource,
    &FillGate,
    &mut dyn FnMut(PlacingEvent),
) -> Result<control::LazyServed, control::Error>;

/// Keeper of checkpoints, on this host or on others. Every method blocks: each connection's thread calls them.
pub trait Backend: Send + Sync + 'static {
    /// Type of a dump that is not sealed yet.
    type Session: DumpSession;
    /// Type that takes the pages of a session.
    type Sink: PageSink;

    /// Opens a session when the request is admitted; it takes pages once a connection has come. An empty job
    /// stands for an anonymous session, which is parked at CLOSE: its task is frozen already, and it is not
    /// queued.
    ///
    /// # Errors
    /// A bad job name; a dump of the job that is open already; too many requests wait; the caller has gone.
    fn open(
        &self,
        request: request::Open,
        waits: &mut dyn Waits,
    ) -> Result<Arc<Self::Session>, control::Error>;

    /// Returns a session that was opened, as long as it is known.
    fn session(&self, id: &str) -> Option<Arc<Self::Session>>;

    /// Assigns a session to the one connection that brings its pages. `hang_up` ends that connection. `client`
    /// is the connection's remote end, `None` if that is not known.
    ///
    /// # Errors
    /// Another connection is, or was, assigned to the session.
    fn start(
        &self,
        session: &Arc<Self::Session>,
        client: Option<&Client>,
        hang_up: Box<dyn FnOnce() + Send>,
    ) -> Result<Self::Sink, control::Error>;

    /// Discards a session whose opener has gone, unless it is sealed or being sealed.
    fn drop_session(&self, id: &str);

    /// Returns the endpoints that a dump needs besides this process, `host:port`.
    fn depends_on(&self) -> Vec<String>;

    /// Makes a closed session a checkpoint, with the small images of a directory. Nothing is sealed once the
    /// caller is gone, as far as that can be known: the freeze has ended without the seal.
    ///
    /// # Errors
    /// The session is not closed; the directory does not fit its pages; the checkpoint cannot be kept; the
    /// caller is gone.
    fn seal(
        &self,
        seal: &request::Seal,
        images: OwnedFd,
        waits: &dyn Waits,
    ) -> Result<control::Checkpoint, control::Error>;

    /// Discards a session that is not sealed; a parked session too.
    ///
    /// # Errors
    /// No such session, or it is being sealed.
    fn abort(&self, abort: &request::Abort) -> Result<(), control::Error>;

    /// Gives a parked session a job and its small images.
    ///
    /// # Errors
    /// No parked session fits, or several do; the job has a dump under way.
    fn adopt(
        &self,
        adopt: request::Adopt,
        images: OwnedFd,
    ) -> Result<control::Checkpoint, control::Error>;

    /// Lists a part of the checkpoints.
    ///
    /// # Errors
    /// No such job.
    fn list(&self, list: &request::List) -> Result<control::Checkpoints, control::Error>;

    /// Returns one checkpoint with all details.
    ///
    /// # Errors
    /// No such checkpoint, or a damaged manifest.
    fn show(&self, show: &request::Show) -> Result<control::Detail, control::Error>;

    /// Returns what a checkpoint consists of, compared with another one.
    ///
    /// # Errors
    /// No such checkpoint; an image of it does not decode; there is more than fits into a reply.
    fn contents(
        &self,
        contents: &request::Describe,
    ) -> Result<control::CheckpointContents, control::Error>;

    /// Removes a checkpoint, or every one of a job. Returns their number.
    ///
    /// # Errors
    /// No such checkpoint, or it is pinned.
    fn remove(&self, remove: &request::Remove) -> Result<u64, control::Error>;

    /// Pins or unpins a checkpoint.
    ///
    /// # Errors
    /// No such checkpoint.
    fn pin(&self, pin: &request::Pin) -> Result<control::Checkpoint, control::Error>;

    /// Reads and verifies every page.
    ///
    /// # Errors
    /// No such checkpoint. Damage is not an error: the reply lists it.
    fn verify(
        &self,
        verify: &request::Verify,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Verified, control::Error>;

    /// Reads and verifies every page, has damaged pages healed, and sets aside what cannot be healed.
    ///
    /// # Errors
    /// No such checkpoint. Damage is not an error.
    fn scrub(
        &self,
        scrub: &request::Scrub,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Scrubbed, control::Error>;

    /// Packs sparse parts of the region, or measures what that would free.
    ///
    /// # Errors
    /// The region takes no writes, or there is no free space to move pages to.
    fn gc(
        &self,
        gc: &request::Gc,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::GcReport, control::Error>;

    /// Lists the keys for encryption at rest, or changes those of a namespace.
    ///
    /// # Errors
    /// Nothing is encrypted here; the namespace has no key; keys cannot be stored, or segments not be moved.
    fn keys(
        &self,
        keys: &request::Keys,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::KeyList, control::Error>;

    /// Sets or removes a rule of retention. Returns the rules of its namespace afterwards.
    ///
    /// # Errors
    /// The rule makes no sense, or is not there; the rules cannot be read or written.
    fn set_retention(
        &self,
        set: &request::SetRetention,
    ) -> Result<control::RetentionRules, control::Error>;

    /// Lists the rules of retention.
    ///
    /// # Errors
    /// The rules cannot be read.
    fn show_retention(
        &self,
        show: &request::ShowRetention,
    ) -> Result<control::RetentionRules, control::Error>;

    /// Removes what the rules of retention do not keep, or says what that is.
    ///
    /// # Errors
    /// The rules, or the checkpoints, cannot be read; there is no such job.
    fn prune(&self, prune: &request::Prune) -> Result<control::Pruned, control::Error>;

    /// Lists the media of the region, or changes them.
    ///
    /// # Errors
    /// No such medium, or the change is not possible: the media are as they were.
    fn media(
        &self,
        media: &request::Media,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::RegionMedia, control::Error>;

    /// Writes a checkpoint into a directory as CRIU images, when the request is admitted; at once if only the
    /// small images are wanted.
    ///
    /// # Errors
    /// No such checkpoint; damage; a file that exists already or cannot be written.
    fn export(
        &self,
        export: &request::Export,
        directory: OwnedFd,
        waits: &mut dyn Waits,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Exported, control::Error>;

    /// Reads a CRIU images directory as the next checkpoint of a job.
    ///
    /// # Errors
    /// A file is missing, damaged or short; the job has a dump under way.
    fn import(
        &self,
        import: &request::Import,
        directory: OwnedFd,
        waits: &mut dyn Waits,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Checkpoint, control::Error>;

    /// Serves a checkpoint, when the request is admitted, to the CRIU that connects to `listener`, until CRIU
    /// hangs up or, before it connects, `caller` does.
    ///
    /// # Errors
    /// No such checkpoint; CRIU did not connect; damage.
    fn stream(
        &self,
        stream: &request::Stream,
        listener: OwnedFd,
        caller: &UnixStream,
        waits: &mut dyn Waits,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Exported, control::Error>;

    /// Calls `serve` with a checkpoint, when the request is admitted. The checkpoint's pages stay until `serve` returns.
    ///
    /// # Errors
    /// No such checkpoint; an error of `serve`.
    fn lend(
        &self,
        wanted: &Lent<'_>,
        waits: &mut dyn Waits,
        serve: ServeLazily<'_>,
    ) -> Result<control::LazyServed, control::Error>;

    /// Calls `serve` with a checkpoint for a restore, when the request is admitted. The checkpoint's pages stay until `serve`
    /// returns.
    ///
    /// # Errors
    /// No such checkpoint; an error of `serve`.
    fn place(
        &self,
        place: &request::Place,
        waits: &mut dyn Waits,
        serve: ServePlacing<'_>,
    ) -> Result<control::LazyServed, control::Error>;

    /// Returns the backend's state. The front ends fill in what concerns the process and its listeners.
    ///
    /// # Errors
    /// The checkpoints cannot be listed.
    fn status(&self) -> Result<control::ServerStatus, control::Error>;

    /// Lists the nodes of the cluster, and the state of its checkpoints.
    ///
    /// # Errors
    /// There is no cluster, or no such node.
    fn nodes(&self, nodes: &request::Nodes) -> Result<control::NodeList, control::Error>;

    /// Drains a node, takes it back or removes it. Returns that node's state afterwards.
    ///
    /// # Errors
    /// No cluster or no such node; data would be lost with the node.
    fn set_node(&self, set: &request::SetNode) -> Result<control::NodeList, control::Error>;

    /// Sets the version of the registry that the cluster uses. Returns all nodes.
    ///
    /// # Errors
    /// No cluster, or a node that was not removed does not speak the version.
    fn set_level(&self, set: &request::SetLevel) -> Result<control::NodeList, control::Error>;

    /// Lists the nodes' checkpoints in the registry again.
    ///
    /// # Errors
    /// There is no cluster, or its registry does not answer.
    fn rebuild(&self, rebuild: &request::Rebuild) -> Result<control::Rebuilt, control::Error>;

    /// Denies certificates, or takes denials back. Returns the list afterwards.
    ///
    /// # Errors
    /// This backend uses no certificates; an entry is invalid; the list cannot be written, or not distributed.
    fn deny(&self, deny: &request::Deny) -> Result<control::Denials, control::Error>;

    /// Reserves a place in a queue.
    ///
    /// # Errors
    /// No such node or queue; too many places are reserved.
    fn reserve(&self, reserve: &request::Reserve) -> Result<control::Reserved, control::Error>;

    /// Gives up a reserved place.
    ///
    /// # Errors
    /// No reservation has that token.
    fn cancel_reservation(&self, cancel: &request::CancelReservation)
    -> Result<(), control::Error>;

    /// Begins to record a request of the control socket; `None` where nothing is recorded.
    fn trail(&self, client: &Client, body: &request::Body) -> Option<Trail> {
        let _ = (client, body);
        None
    }

    /// Records that a page-server connection brought the pages of a dump, or why it did not. `session` is the
    /// session's job, or its id where it has none; empty for a connection that was refused before there was a
    /// session.
    fn received(&self, client: &Client, session: &str, outcome: Result<(), &control::Error>) {
        let _ = (client, session, outcome);
    }

    /// Records that a connection got pages of a checkpoint for a lazy restore, or why it did not.
    fn lent(&self, client: &Client, checkpoint: &str, outcome: Result<(), &control::Error>) {
        let _ = (client, checkpoint, outcome);
    }

    /// Returns the pages of a checkpoint in the order in which a restored process accessed them, as far as it is known.
    fn touched(&self, checkpoint: &control::Checkpoint) -> TouchedPages {
        let _ = checkpoint;
        TouchedPages::default()
    }

    /// Keeps that order for the next restore.
    fn record_touched(&self, checkpoint: &control::Checkpoint, touched: &TouchedPages) {
        let _ = (checkpoint, touched);
    }

    /// Records the duration of a dump or a restore that its caller measured. Returns true if the operation was measured
    /// here too, a moment ago, and can have taken that long.
    fn took(&self, took: &request::Took) -> bool;
}
