//! What the host's front ends need of whatever keeps the checkpoints.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use permafrost_criu::Progress;
use permafrost_criu::frontend::PageSink;
use permafrost_identity::Peer;
use permafrost_protocol::control::{self, reply, request};
use permafrost_protocol::manifest::Origin;
use tokio::sync::watch;

/// Whoever waits for its turn with a request.
pub trait Waits {
    /// It waits; told about once a second.
    fn waits(&mut self, waiting: &control::Waiting);

    /// It has its turn, and what was asked for begins.
    fn begins(&mut self) {}

    /// Nobody waits any more.
    fn is_gone(&self) -> bool {
        false
    }
}

/// Waits for as long as it takes, and wants to be told nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patiently;

impl Waits for Patiently {
    fn waits(&mut self, _waiting: &control::Waiting) {}
}

/// The other end of a connection of this host.
#[derive(Clone, Debug)]
pub enum Client {
    /// A user of this machine, by the credentials of a socket.
    User {
        /// User id.
        uid: u32,
        /// Process that connected.
        pid: i32,
    },
    /// A TCP connection without a certificate.
    Tcp {
        /// Address of the other end.
        address: SocketAddr,
        /// User whose socket the other end is; `None` on another machine.
        uid: Option<u32>,
    },
    /// The holder of a certificate.
    Certificate(Peer),
}

/// Takes in what a request of the control socket came to.
pub type Trail = Box<dyn FnOnce(Result<&reply::Body, &control::Error>)>;

/// A dump that is not sealed yet.
pub trait Session: Send + Sync + 'static {
    /// 32 hex digits.
    fn id(&self) -> &str;

    /// Empty for an anonymous one.
    fn job(&self) -> &str;

    /// Generation that its pages are compared with (0 for none), and where that one was taken.
    fn parent(&self) -> (u64, Option<Origin>);

    /// Turns true when it takes no more pages: closed, failed or discarded.
    fn ended(&self) -> watch::Receiver<bool>;
}

/// Keeps checkpoints, here or elsewhere. Every method blocks: callers are threads of their own, one for each
/// connection.
pub trait Backend: Send + Sync + 'static {
    /// A dump that is not sealed yet.
    type Session: Session;
    /// What its pages go into.
    type Sink: PageSink;

    /// Opens a session when it is its turn; it takes pages once a connection has come. An empty job is an anonymous
    /// session's, which is parked at CLOSE: its task is frozen already, and it waits for nothing.
    ///
    /// # Errors
    /// A bad job name, a dump of the job that is open already; too many wait; whoever waits has gone.
    fn open(
        &self,
        request: request::Open,
        waits: &mut dyn Waits,
    ) -> Result<Arc<Self::Session>, control::Error>;

    /// The session, for the one connection that brings its pages; `hang_up` ends that connection. `client` is its other end,
    /// `None` if that is not known.
    ///
    /// # Errors
    /// Another connection is or was at it.
    fn start(
        &self,
        session: &Arc<Self::Session>,
        client: Option<&Client>,
        hang_up: Box<dyn FnOnce() + Send>,
    ) -> Result<Self::Sink, control::Error>;

    /// The one who opened a session is gone: discards it, unless it is sealed or being sealed.
    fn drop_session(&self, id: &str);

    /// Endpoints that a dump needs beside this process, `host:port`.
    fn depends_on(&self) -> Vec<String>;

    /// Makes a closed session a checkpoint, with the small images of a directory. Nothing is sealed once whoever asked is gone, as
    /// far as that can be known: the freeze has ended without the seal.
    ///
    /// # Errors
    /// It is not closed; the directory does not fit its pages; the checkpoint cannot be kept; whoever asked is gone.
    fn seal(
        &self,
        seal: &request::Seal,
        images: OwnedFd,
        waits: &dyn Waits,
    ) -> Result<control::Checkpoint, control::Error>;

    /// Discards a session that is not sealed; a parked one too.
    ///
    /// # Errors
    /// There is none of that name, or it is being sealed.
    fn abort(&self, abort: &request::Abort) -> Result<(), control::Error>;

    /// Gives a parked session a job and its small images.
    ///
    /// # Errors
    /// None or several fit; the job has a dump under way.
    fn adopt(
        &self,
        adopt: request::Adopt,
        images: OwnedFd,
    ) -> Result<control::Checkpoint, control::Error>;

    /// Checkpoints of a job, or all with an empty name.
    ///
    /// # Errors
    /// No such job.
    fn list(&self, list: &request::List) -> Result<Vec<control::Checkpoint>, control::Error>;

    /// One checkpoint in full.
    ///
    /// # Errors
    /// No such checkpoint, or a damaged manifest.
    fn show(&self, show: &request::Show) -> Result<control::Detail, control::Error>;

    /// Removes a checkpoint, or every one of a job. How many.
    ///
    /// # Errors
    /// No such checkpoint, or it is pinned.
    fn remove(&self, remove: &request::Remove) -> Result<u64, control::Error>;

    /// Pins or unpins a checkpoint.
    ///
    /// # Errors
    /// No such checkpoint.
    fn pin(&self, pin: &request::Pin) -> Result<control::Checkpoint, control::Error>;

    /// Reads every page and checks it.
    ///
    /// # Errors
    /// No such checkpoint. Damage is no error: it is what the answer lists.
    fn verify(
        &self,
        verify: &request::Verify,
        progress: Progress<'_>,
    ) -> Result<control::Verified, control::Error>;

    /// Reads every page and checks it, has what is damaged mended, and sets aside what cannot be.
    ///
    /// # Errors
    /// No such checkpoint. Damage is no error.
    fn scrub(
        &self,
        scrub: &request::Scrub,
        progress: Progress<'_>,
    ) -> Result<control::Scrubbed, control::Error>;

    /// Writes a checkpoint into a directory as CRIU images, when it is its turn; at once if it is for the small ones.
    ///
    /// # Errors
    /// No such checkpoint; damage; a file that is there already or cannot be written.
    fn export(
        &self,
        export: &request::Export,
        directory: OwnedFd,
        waits: &mut dyn Waits,
        progress: Progress<'_>,
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
        progress: Progress<'_>,
    ) -> Result<control::Checkpoint, control::Error>;

    /// When it is its turn: serves a checkpoint to the CRIU that connects to `listener`, until it hangs up or, before it came, `caller`
    /// does.
    ///
    /// # Errors
    /// No such checkpoint; nobody came; damage.
    fn stream(
        &self,
        stream: &request::Stream,
        listener: OwnedFd,
        caller: &UnixStream,
        waits: &mut dyn Waits,
        progress: Progress<'_>,
    ) -> Result<control::Exported, control::Error>;

    /// Its state. What is said of the process and of where it listens is the front ends' to fill in.
    ///
    /// # Errors
    /// The checkpoints cannot be listed.
    fn status(&self) -> Result<control::ServerStatus, control::Error>;

    /// Nodes of the cluster, and how its checkpoints stand.
    ///
    /// # Errors
    /// There is no cluster, or no such node.
    fn nodes(&self, nodes: &request::Nodes) -> Result<control::NodeList, control::Error>;

    /// Drains a node, takes it back or removes it. That one as it is afterwards.
    ///
    /// # Errors
    /// There is no cluster or no such node; something would be lost with it.
    fn set_node(&self, set: &request::SetNode) -> Result<control::NodeList, control::Error>;

    /// Lists again what the nodes hold.
    ///
    /// # Errors
    /// There is no cluster, or its registry does not answer.
    fn rebuild(&self, rebuild: &request::Rebuild) -> Result<control::Rebuilt, control::Error>;

    /// Denies certificates, or takes that back. The list as it is afterwards.
    ///
    /// # Errors
    /// There are no certificates here; an entry makes no sense; the list cannot be written, or not distributed.
    fn deny(&self, deny: &request::Deny) -> Result<control::Denials, control::Error>;

    /// Keeps a place in a queue.
    ///
    /// # Errors
    /// No such node or queue; too many are reserved.
    fn reserve(&self, reserve: &request::Reserve) -> Result<control::Reserved, control::Error>;

    /// Gives a place up.
    ///
    /// # Errors
    /// There is none with that token.
    fn cancel_reservation(&self, cancel: &request::CancelReservation)
    -> Result<(), control::Error>;

    /// Begins to record a request of the control socket; `None` where nothing is recorded.
    fn trail(&self, client: &Client, body: &request::Body) -> Option<Trail> {
        let _ = (client, body);
        None
    }

    /// Records that a page-server connection brought the pages of a dump, or why not. `session` is its job, or the
    /// session's id where it has none; empty for a connection that was refused before there was one.
    fn received(&self, client: &Client, session: &str, outcome: Result<(), &control::Error>) {
        let _ = (client, session, outcome);
    }

    /// Takes in how long a dump or a restore took whoever ran it. Whether that is news of one that was measured here.
    fn took(&self, took: &request::Took) -> bool;
}
