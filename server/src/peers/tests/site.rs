//! A node with checkpoints of several namespaces, and peers that send requests without a network.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use permafrost_catalog::SledCatalog;
use permafrost_clustered::ClusteredStore;
use permafrost_criu::frontend::PageSink;
use permafrost_identity::{Authority, CertificateOrder, Namespaces, Peer, Role};
use permafrost_pmem::{FormatOptions, OpenOptions, PAGE_SIZE, Region, open_medium};
use permafrost_protocol::control::{self, Checkpoint};
use permafrost_protocol::images::{Mapping, mm_name, write_mappings};
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::pageserver::{PE_PRESENT, SpaceId};
use permafrost_protocol::wire::frame::{Coding, Header, Kind};
use permafrost_protocol::wire::message::{Closed, Commit, Committed, Prepared, reply, request};
use permafrost_quotas::Quotas;
use permafrost_store::{RegionLocation, SessionRequest, Store, StoreError, StoreParts};
use permafrost_transport::peer::{
    FrameSink, FrameSource, Handler as _, PeerError, ReceivedFrame, Replies,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use crate::agents::Agents;
use crate::peers::NodeHandler;

const REGION_BYTES: u64 = 32 << 20;
const PID: u32 = 7;

pub(super) struct Site {
    pub(super) store: Arc<ClusteredStore>,
    handler: NodeHandler,
    authority: Authority,
    work: tempfile::TempDir,
}

impl Site {
    pub(super) fn new() -> Self {
        Self::with(Quotas::default())
    }

    /// Makes a site with quotas of namespaces.
    pub(super) fn limited(quotas: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self::with(load_quotas(dir.path(), quotas))
    }

    fn with(quotas: Quotas) -> Self {
        let work = tempfile::tempdir().unwrap();
        let store = ClusteredStore::new(store(work.path(), quotas), None, Arc::new(()));
        let handler = NodeHandler::new("n");
        let agents = Agents::new(Arc::clone(&store), work.path().to_owned());
        handler.begin(agents, None);
        let authority = Authority::create(&work.path().join("ca"), "test", false).unwrap();
        Self {
            store,
            handler,
            authority,
            work,
        }
    }

    pub(super) fn peer(&self, name: &str, role: Role, namespaces: &[&str]) -> Peer {
        self.peer_who_may(name, role, namespaces, false)
    }

    pub(super) fn peer_who_may(
        &self,
        name: &str,
        role: Role,
        namespaces: &[&str],
        delete: bool,
    ) -> Peer {
        let dir = self.work.path().join(format!("{name}-{role}"));
        let mut order = CertificateOrder::new(name, role);
        order.namespaces = Namespaces::new(namespaces.iter().copied()).unwrap();
        order.delete = delete;
        self.authority.issue(&order, &dir, true).unwrap();
        let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(dir.join("cert.pem"))
            .unwrap()
            .collect();
        Peer::of_chain(Some(&chain.unwrap())).unwrap().unwrap()
    }

    /// Seals a checkpoint of `job`.
    pub(super) fn dump(&self, job: &str) -> Checkpoint {
        let session = self.open(job, true);
        self.store.seal_session(&session, self.images()).unwrap()
    }

    /// Parks a dump of `job`, which may be empty. Returns its session.
    pub(super) fn park(&self, job: &str) -> String {
        self.open(job, false)
    }

    /// Seals a checkpoint of `job`, if that is allowed.
    pub(super) fn try_dump(&self, job: &str) -> Result<Checkpoint, StoreError> {
        let session = self.try_open(job, true)?;
        let sealed = self.store.seal_session(&session, self.images());
        self.store.local().drop_session(&session);
        sealed
    }

    fn open(&self, job: &str, seal_follows: bool) -> String {
        self.try_open(job, seal_follows).unwrap()
    }

    fn try_open(&self, job: &str, seal_follows: bool) -> Result<String, StoreError> {
        let request = SessionRequest {
            job: job.to_owned(),
            pre_dump: false,
            pre_copy: false,
            seal_follows,
            origin: None,
            no_parent: true,
            parent_images: false,
            from_here: false,
            taken_by: "agent a".to_owned(),
        };
        let session = self.store.open_session(request)?;
        let mut sink = session.start(self.store.local(), Box::new(|| {})).unwrap();
        sink.open(SpaceId::process(PID)).unwrap();
        for n in 1..9_u8 {
            let at = u64::from(n) * PAGE_SIZE as u64;
            sink.pages(at, PE_PRESENT, &[n; PAGE_SIZE]).unwrap();
        }
        sink.close().unwrap();
        Ok(session.id.clone())
    }

    pub(super) fn images(&self) -> OwnedFd {
        let dir = self.work.path().join("images");
        if std::fs::create_dir(&dir).is_ok() {
            for name in ["core-7.img", "inventory.img"] {
                std::fs::write(dir.join(name), name).unwrap();
            }
            let mapping = Mapping {
                start: PAGE_SIZE as u64,
                end: 9 * PAGE_SIZE as u64,
                ..Mapping::default()
            };
            std::fs::write(dir.join(mm_name(PID)), write_mappings(&[mapping])).unwrap();
        }
        OwnedFd::from(File::open(dir).unwrap())
    }

    /// Makes the service for agents over the same store, to be called without a handler.
    pub(super) fn agents(&self) -> Agents {
        Agents::new(Arc::clone(&self.store), self.work.path().to_owned())
    }

    /// Opens the conversation in which a parked session is adopted. Returns true if it was opened.
    pub(super) fn opens_adoption(
        agents: &Agents,
        peer: &Peer,
        session: &str,
        job: &str,
    ) -> Result<(), control::Error> {
        let adopt = control::request::Adopt {
            session: session.to_owned(),
            job: job.to_owned(),
            ..control::request::Adopt::default()
        };
        let dump = request::Dump {
            session: vec![1; 16],
            adopt: Some(adopt),
            ..request::Dump::default()
        };
        let mut conversation = Conversation::default();
        let ended = agents.dump(peer, dump, &mut Nothing, &mut conversation);
        if conversation.said.is_empty() {
            return ended;
        }
        Ok(())
    }

    /// Sends `pages` pages of a session that the peer has opened, and CRIU's CLOSE if it `closes`; then falls
    /// silent.
    pub(super) fn fall_silent(
        &self,
        peer: &Peer,
        session: &str,
        pages: u8,
        closes: bool,
    ) -> control::Error {
        let frame = |kind, flags, pages, index, payload: Vec<u8>| ReceivedFrame {
            header: Header {
                kind,
                coding: Coding::Raw,
                flags,
                pages,
                sequence: 0,
                index,
                payload_bytes: 0,
            },
            payload: payload.into(),
        };
        let mut frames = VecDeque::from([frame(Kind::Space, 1, PID, PID.into(), Vec::new())]);
        frames.extend((1..=pages).map(|n| {
            let page = vec![n; PAGE_SIZE];
            frame(Kind::Pages, PE_PRESENT, 1, n.into(), page)
        }));
        if closes {
            frames.push_back(frame(Kind::Close, 0, 0, 0, Vec::new()));
            frames.push_back(frame(Kind::Prepare, 0, 0, 0, Vec::new()));
        }
        let session = uuid::Uuid::parse_str(session).unwrap();
        let dump = request::Dump {
            session: session.as_bytes().to_vec(),
            ..request::Dump::default()
        };
        let mut conversation = Conversation::default();
        let ended = self
            .handler
            .dump(peer, dump, &mut Silent(frames), &mut conversation);
        ended.unwrap_err()
    }

    /// Returns job, generation, session and pin of each stored checkpoint.
    pub(super) fn stored(&self) -> Vec<(String, u64, String, bool)> {
        let listed = self.store.list(None).unwrap().into_iter();
        listed
            .map(|record| (record.job, record.generation, record.session, record.pinned))
            .collect()
    }

    /// Sends a request on the control channel.
    pub(super) fn ask(
        &self,
        peer: &Peer,
        body: control::request::Body,
    ) -> Result<control::reply::Body, control::Error> {
        let request = control::Request {
            version: 1,
            body: Some(body),
        };
        match self.handler.call(peer, request::Body::Control(request)) {
            reply::Body::Control(reply) => match reply.body.unwrap() {
                control::reply::Body::Error(error) => Err(error),
                body => Ok(body),
            },
            other => panic!("{other:?}"),
        }
    }

    /// Sends any request of the wire. Returns the reply as text, and the job whose manifest was sent.
    pub(super) fn ask_wire(&self, peer: &Peer, body: request::Body) -> Asked {
        let mut conversation = Conversation::default();
        let answered = match body {
            request::Body::Dump(dump) => {
                self.handler
                    .dump(peer, dump, &mut Nothing, &mut conversation)
            }
            request::Body::Fetch(fetch) => self.handler.fetch(peer, fetch, &mut conversation),
            body => match self.handler.call(peer, body) {
                reply::Body::Error(error) => Err(error),
                reply::Body::Control(control::Reply {
                    body: Some(control::reply::Body::Error(error)),
                }) => Err(error),
                body => {
                    conversation.said = format!("{body:?}");
                    Ok(())
                }
            },
        };
        Asked {
            refused: answered.err(),
            said: conversation.said,
        }
    }
}

pub(super) struct Asked {
    pub(super) refused: Option<control::Error>,
    pub(super) said: String,
}

pub(super) fn load_quotas(dir: &std::path::Path, text: &str) -> Quotas {
    let path = dir.join("quotas");
    std::fs::write(&path, text).unwrap();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&path, private).unwrap();
    Quotas::load(&path).unwrap()
}

fn store(dir: &std::path::Path, quotas: Quotas) -> Arc<Store> {
    let path = dir.join("region");
    let options = OpenOptions {
        populate: false,
        ..OpenOptions::default()
    };
    let medium = open_medium(&path, REGION_BYTES, &options).unwrap();
    let format = FormatOptions {
        segment_bytes: 64 << 10,
        ..FormatOptions::default()
    };
    Region::format(Arc::clone(&medium), &format).unwrap();
    let place = RegionLocation {
        path,
        guarantee: medium.guarantee().clone(),
    };
    let region = Region::open(medium).unwrap().0;
    let (catalog, _) = SledCatalog::open_or_replace(&dir.join("catalog")).unwrap();
    let parts = StoreParts {
        quotas: Arc::new(quotas),
        ..StoreParts::new(region, place, Box::new(catalog))
    };
    Store::new(parts).unwrap()
}

/// A peer that sends these frames, and then falls silent.
struct Silent(VecDeque<ReceivedFrame>);

impl FrameSource for Silent {
    fn next(&mut self) -> Result<ReceivedFrame, PeerError> {
        self.0.pop_front().ok_or_else(silent)
    }

    fn commit(&mut self) -> Result<Commit, PeerError> {
        Err(silent())
    }

    fn canceller(&self) -> Box<dyn FnOnce() + Send> {
        Box::new(|| {})
    }
}

fn silent() -> PeerError {
    PeerError::Deadline {
        node: "agent c7".to_owned(),
        doing: "its dump",
    }
}

/// A peer that opens a conversation, and then sends nothing.
struct Nothing;

impl FrameSource for Nothing {
    fn next(&mut self) -> Result<ReceivedFrame, PeerError> {
        Err(gone())
    }

    fn commit(&mut self) -> Result<Commit, PeerError> {
        Err(gone())
    }

    fn canceller(&self) -> Box<dyn FnOnce() + Send> {
        Box::new(|| {})
    }
}

fn gone() -> PeerError {
    PeerError::NoAddress {
        node: "gone".to_owned(),
    }
}

#[derive(Default)]
struct Conversation {
    said: String,
}

impl Replies for Conversation {
    fn opened(&mut self, _has_parent: bool) {
        self.said.push_str("opened ");
    }

    fn closed(&mut self, _closed: Closed) {}

    fn prepared(&mut self, _prepared: Prepared) {}

    fn committed(&mut self, _committed: Committed) {}
}

impl FrameSink for Conversation {
    fn opened(&mut self, manifest: Manifest, _content_digest: Vec<u8>) -> Result<(), PeerError> {
        self.said.push_str(&format!("{:?} ", manifest.job));
        Ok(())
    }

    fn push(&mut self, _: Kind, _: u16, _: u32, _: u64, _: &[u8]) -> Result<(), PeerError> {
        Ok(())
    }
}
