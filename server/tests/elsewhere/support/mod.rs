//! Nodes, requests to them, and checks of the replies.

mod list;
mod memory;
mod node;

use std::collections::HashMap;
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use parking_lot::Mutex;

pub(crate) use self::list::List;
pub(crate) use self::memory::{
    Memory, PID, check_images, check_pagemap, flat, memory, small_images,
};
pub(crate) use self::node::{Node, Suspected, Watched};
use permafrost_agent::host;
use permafrost_agent::remote;
use permafrost_agent::{Agent, AgentOptions, StorageNode as Known};
use permafrost_audit::{Audit, AuditFile};
use permafrost_catalog::SledCatalog;
use permafrost_cluster::repair::{Puller, RepairLimits, Throttle};
use permafrost_cluster::{FailureDomain, LiveNode, MemberState, NodeFacts, NodesView};
use permafrost_clustered::ClusterServices;
use permafrost_clustered::ClusteredStore;
use permafrost_clustered::Durability;
use permafrost_clustered::Registry;
use permafrost_criu::directory::ExportedPart;
use permafrost_criu::frontend::PageSink;
use permafrost_criu::source::PageRun;
use permafrost_holders::PeerHolders;
use permafrost_identity::{Authority, CertificateOrder, Namespaces, ReloadingIdentity, Role};
use permafrost_metering::costs::{Costs, CostsConfig};
use permafrost_pmem::{FormatOptions, OpenOptions, PAGE_SIZE, Region, open_medium};
use permafrost_protocol::control::{self, Checkpoint};
use permafrost_protocol::pageserver::{PE_PRESENT, SpaceId};
use permafrost_protocol::streamer::{FileReply, FileRequest};
use permafrost_protocol::wire::message::Commit;
use permafrost_server::agents::Agents;
use permafrost_server::peers::{Copying, NodeHandler};
use permafrost_store::{
    CopyRequest, Fetched, RegionLocation, SessionRequest, Store, StoreError, StoreParts,
};
use permafrost_transport::control::{Connection, ControlError};
use permafrost_transport::framing;
use permafrost_transport::peer::{self, Endpoint, Handler, Network};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::runtime::Runtime;

const REGION_BYTES: u64 = 64 << 20;
/// Time limit that allows for a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// Time that a reader waits for a node that does not answer.
const AGREE: Duration = Duration::from_secs(5);
pub(crate) const JOB: &str = "team/a-job-of-many-pages";

/// A cluster of nodes with one registry.
pub(crate) struct Site {
    pub(crate) nodes: Vec<Node>,
    pub(crate) work: tempfile::TempDir,
    pub(crate) registry: Arc<List>,
    authority: Authority,
    addresses: Arc<Mutex<HashMap<String, SocketAddr>>>,
    runtime: Runtime,
}

impl Site {
    /// Makes nodes with these names, zones and racks.
    pub(crate) fn new(nodes: &[(&str, &str, &str)]) -> Self {
        let work = tempfile::tempdir().unwrap();
        let authority = Authority::create(&work.path().join("ca"), "test", false).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let mut site = Self {
            nodes: Vec::new(),
            work,
            registry: Arc::default(),
            authority,
            addresses: Arc::default(),
            runtime,
        };
        let view: Vec<_> = nodes.iter().map(|node| live(*node)).collect();
        for facts in &view {
            let node = site.node(&facts.facts, &view);
            site.nodes.push(node);
        }
        site
    }

    fn node(&self, facts: &NodeFacts, view: &[LiveNode]) -> Node {
        let name = facts.name.clone();
        let dir = self.work.path().join(&name);
        std::fs::create_dir(&dir).unwrap();
        let region = dir.join("region");
        let local = open_store(&dir, &region);
        let identity = self.identity(&name, Role::Node, None);
        let view = view.to_vec();
        let view = move || NodesView {
            nodes: view.clone(),
            members: Vec::new(),
            age: Duration::ZERO,
        };
        let domain = facts.domain.clone();
        let peers = PeerHolders::new(
            self.network(Arc::clone(&identity)),
            view,
            &name,
            domain,
            AGREE,
        );
        let services = ClusterServices {
            node: name.clone(),
            registry: Arc::clone(&self.registry) as Arc<dyn Registry>,
            replicate: None,
            remote: Some(Arc::new(peers)),
            durability: Durability::Local,
            deadline: LONG,
            wanted_copies: 2,
        };
        let suspects = Arc::new(Suspected::default());
        let store = ClusteredStore::new(
            Arc::clone(&local),
            Some(services),
            Arc::<Suspected>::clone(&suspects),
        );
        let spool = dir.join("spool");
        std::fs::create_dir(&spool).unwrap();
        let agents = Agents::new(Arc::clone(&store), spool);
        let audit = Audit::open(&AuditFile::InDataDir, &dir, &name).unwrap();
        let handler = NodeHandler::new(&name).with_audit(Arc::new(audit));
        let throttle = Throttle::of(&local, RepairLimits::default());
        let network = self.network(Arc::clone(&identity));
        let puller = Puller::new(
            local,
            network,
            &name,
            Arc::clone(&throttle),
            Costs::new(CostsConfig::default()),
        );
        let copying = Copying {
            puller: Arc::new(puller),
            throttle,
        };
        handler.begin(agents, Some(copying));
        let watched = Arc::new(Watched {
            inner: handler,
            pages_asked: Mutex::default(),
            asked: AtomicUsize::new(0),
            dies_after: AtomicUsize::new(usize::MAX),
            endpoint: Mutex::default(),
        });
        let endpoint = Endpoint::serve(
            self.runtime.handle(),
            (Ipv4Addr::LOCALHOST, 0).into(),
            Arc::clone(&identity),
            Arc::clone(&watched) as Arc<dyn Handler>,
            peer::PeerOptions::default(),
        )
        .unwrap();
        let address = endpoint.local_address().unwrap();
        *watched.endpoint.lock() = Some(endpoint);
        self.addresses.lock().insert(name.clone(), address);

        Node {
            name,
            store,
            watched,
            suspects,
            address,
            region,
        }
    }

    fn identity(&self, name: &str, role: Role, namespace: Option<&str>) -> Arc<ReloadingIdentity> {
        let dir = self.issue(name, role, namespace);
        Arc::new(ReloadingIdentity::load(&dir).unwrap())
    }

    fn issue(&self, name: &str, role: Role, namespace: Option<&str>) -> PathBuf {
        let dir = self.work.path().join(format!("identity-{name}"));
        let mut order = CertificateOrder::new(name, role);
        order.namespaces = Namespaces::new(namespace).unwrap();
        self.authority.issue(&order, &dir, false).unwrap();
        dir
    }

    fn network(&self, identity: Arc<ReloadingIdentity>) -> Network {
        let addresses = Arc::clone(&self.addresses);
        let lookup = move |node: &str| addresses.lock().get(node).copied();
        Network::new(
            self.runtime.handle().clone(),
            (Ipv4Addr::LOCALHOST, 0).into(),
            identity,
            "",
            Arc::new(lookup),
            remote::transport(),
        )
        .unwrap()
    }

    /// Returns the network of a peer that is not a node.
    pub(crate) fn network_of(&self, name: &str, role: Role, namespace: &str) -> Network {
        self.network(self.identity(name, role, Some(namespace)))
    }

    /// Makes an agent that knows these nodes only.
    pub(crate) fn agent(&self, name: &str, nodes: &[usize]) -> RunningAgent<'_> {
        let nodes = nodes.iter().map(|&n| Known {
            name: self.nodes[n].name.clone(),
            address: self.nodes[n].address,
        });
        let agent = self.runtime.block_on(Agent::start(AgentOptions {
            nodes: nodes.collect(),
            identity: self.issue(name, Role::Agent, Some("*")),
            host: host::HostOptions {
                run_dir: self.work.path().join(format!("run-{name}")),
                listen: None,
                listen_uids: Vec::new(),
                idle_connection: LONG,
                tls: None,
            },
            durability: String::new(),
            deadline: LONG,
            session_ttl: LONG,
            transport: remote::transport(),
            denials_every: permafrost_agent::DENIALS_EVERY,
        }));
        RunningAgent {
            agent: Some(agent.unwrap()),
            site: self,
        }
    }

    /// Makes a dump that node `n` receives and holds alone.
    pub(crate) fn dump(&self, n: usize, memory: &Memory) -> Checkpoint {
        self.dump_as(n, memory, PE_PRESENT)
    }

    /// Makes a dump as [`dump`](Self::dump) does, of pages with these flags.
    pub(crate) fn dump_as(&self, n: usize, memory: &Memory, flags: u16) -> Checkpoint {
        let store = &self.nodes[n].store;
        let request = SessionRequest {
            job: JOB.to_owned(),
            pre_dump: false,
            pre_copy: false,
            seal_follows: true,
            origin: None,
            no_parent: true,
            parent_images: false,
            from_here: true,
            taken_by: "node".to_owned(),
        };
        let session = store.open_session(request).unwrap();
        let mut sink = session.start(store.local(), Box::new(|| {})).unwrap();
        sink.open(SpaceId::process(PID)).unwrap();
        for (index, page) in memory {
            let at = index * PAGE_SIZE as u64;
            sink.pages(at, flags, page).unwrap();
        }
        sink.close().unwrap();
        let dir = tempfile::tempdir_in(self.work.path()).unwrap();
        for (name, bytes) in small_images() {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        let images = OwnedFd::from(File::open(dir.path()).unwrap());
        store.seal_session(&session.id, images).unwrap()
    }

    /// Gives node `to` a copy of what node `from` holds, and lists it.
    pub(crate) fn copy(&self, from: usize, to: usize, checkpoint: &Checkpoint) {
        self.copy_as(from, to, checkpoint, checkpoint);
    }

    /// Gives node `to` a copy of what node `from` holds, and lists it under the name of another checkpoint.
    pub(crate) fn copy_as(
        &self,
        from: usize,
        to: usize,
        checkpoint: &Checkpoint,
        name: &Checkpoint,
    ) {
        let fetch = self.nodes[from]
            .store
            .local()
            .open_fetch(&checkpoint.id, "")
            .unwrap();
        let manifest = fetch.manifest();
        let session = checkpoint.session.parse::<uuid::Uuid>().unwrap();
        let request = CopyRequest {
            session: *session.as_bytes(),
            job: manifest.job.clone(),
            parent: String::new(),
            compared: std::collections::HashMap::new(),
        };
        let node = &self.nodes[to];
        let mut dump = node.store.local().open_copy(request).unwrap();
        for (place, space) in manifest.spaces.iter().enumerate() {
            let id = space.space_id().unwrap();
            dump.space(id, space.pages_id).unwrap();
            for run in fetch.runs(place, 0, 0) {
                match run.unwrap() {
                    Fetched::Own(PageRun::Pages {
                        first_index,
                        flags,
                        bytes,
                    }) => dump.pages(first_index, flags, &bytes),
                    Fetched::Own(PageRun::Zero {
                        first_index,
                        flags,
                        pages,
                    }) => dump.zero(first_index, flags, pages),
                    Fetched::Parent { .. } => panic!("there is no parent"),
                }
                .unwrap();
            }
        }
        dump.close().unwrap();
        for image in &manifest.images {
            dump.begin_image(&image.name, image.len_bytes).unwrap();
            let data = |bytes: &[u8]| dump.image_data(bytes).map_err(std::io::Error::other);
            fetch.image(&image.name, data).unwrap();
        }
        dump.prepare().unwrap();
        let commit = Commit {
            deadline_ms: 0,
            checkpoint: name.id.clone(),
            content_digest: fetch.content_digest().to_vec(),
            job: manifest.job.clone(),
            generation: name.generation,
            parent_generation: manifest.parent_generation,
            created_unix_ms: manifest.created_unix_ms,
            kind: manifest.kind,
            origin: None,
            session: manifest.session.clone(),
            taken_by: "node n1".to_owned(),
        };
        dump.commit(&commit).unwrap();
        node.store.local().publish(&name.id).unwrap();
        let listed = self.registry.set_holder(name, &node.name, true);
        listed.unwrap();
    }

    /// Exports a checkpoint on node `n` and compares it.
    pub(crate) fn check_get(&self, n: usize, memory: &Memory) {
        self.check_get_of(n, JOB, memory);
    }

    pub(crate) fn check_get_of(&self, n: usize, reference: &str, memory: &Memory) {
        let out = self.get_of(n, reference).unwrap();
        check_images(out.path(), memory);
    }

    pub(crate) fn get(&self, n: usize) -> Result<tempfile::TempDir, StoreError> {
        self.get_of(n, JOB)
    }

    pub(crate) fn get_of(
        &self,
        n: usize,
        reference: &str,
    ) -> Result<tempfile::TempDir, StoreError> {
        let out = tempfile::tempdir_in(self.work.path()).unwrap();
        let directory = OwnedFd::from(File::open(out.path()).unwrap());
        let got =
            self.nodes[n]
                .store
                .export(reference, ExportedPart::All, directory, &mut |_, _| {});
        if got.is_err() {
            assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0);
        }
        got.map(|_| out)
    }

    /// Restores on node `n` like CRIU, and compares.
    pub(crate) fn check_stream(&self, n: usize, memory: &Memory) {
        let dir = tempfile::tempdir_in(self.work.path()).unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let (caller, _held) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let store = &self.nodes[n].store;
            let streamed = scope.spawn(move || {
                let served = Arc::default();
                store.stream(JOB, listener.into(), &caller, &served, &mut |_, _| {})
            });
            let criu = UnixStream::connect(&path).unwrap();
            for (name, bytes) in small_images() {
                assert!(read_image(&criu, name) == bytes, "{name}");
            }
            check_pagemap(&read_image(&criu, &format!("pagemap-{PID}.img")), memory);
            let pages = read_image(&criu, "pages-65537.img");
            drop(criu);
            let streamed = streamed.join().unwrap();
            assert!(pages == flat(memory), "{} bytes; {streamed:?}", pages.len());
            assert_eq!(streamed.unwrap().files, 6);
        });
    }
}

/// An agent that ends with the test.
pub(crate) struct RunningAgent<'a> {
    agent: Option<Agent>,
    site: &'a Site,
}

impl RunningAgent<'_> {
    pub(crate) fn check_get(&self, memory: &Memory) {
        let out = self.get().unwrap();
        check_images(out.path(), memory);
    }

    pub(crate) fn get(&self) -> Result<tempfile::TempDir, ControlError> {
        let out = tempfile::tempdir_in(self.site.work.path()).unwrap();
        let directory = File::open(out.path()).unwrap();
        let socket = self.agent.as_ref().unwrap().control_socket();
        let mut connection = Connection::connect(&socket).unwrap();
        let export = control::request::Export {
            checkpoint: JOB.to_owned(),
            ..Default::default()
        };
        let got: Result<control::Exported, _> =
            connection.call_with(export, Some(directory.as_fd()), &mut |_| {});
        got.map(|_| out)
    }
}

impl Drop for RunningAgent<'_> {
    fn drop(&mut self) {
        if let Some(agent) = self.agent.take() {
            self.site.runtime.block_on(agent.stop());
        }
    }
}

fn open_store(dir: &Path, region: &Path) -> Arc<Store> {
    let options = OpenOptions {
        populate: false,
        ..OpenOptions::default()
    };
    let medium = open_medium(region, REGION_BYTES, &options).unwrap();
    let format = FormatOptions {
        segment_bytes: 64 << 10,
        ..FormatOptions::default()
    };
    Region::format(Arc::clone(&medium), &format).unwrap();
    let place = RegionLocation {
        path: region.to_owned(),
        guarantee: medium.guarantee().clone(),
    };
    let region = Region::open(medium).unwrap().0;
    let (catalog, _) = SledCatalog::open_or_replace(&dir.join("catalog")).unwrap();
    Store::new(StoreParts::new(region, place, Box::new(catalog))).unwrap()
}

fn live((name, zone, rack): (&str, &str, &str)) -> LiveNode {
    LiveNode {
        facts: NodeFacts {
            name: name.to_owned(),
            domain: FailureDomain {
                zone: zone.to_owned(),
                rack: rack.to_owned(),
                host: String::new(),
            },
            ..NodeFacts::default()
        },
        state: MemberState::Active,
        token: 1,
    }
}

/// Requests one file like CRIU.
fn read_image(criu: &UnixStream, name: &str) -> Vec<u8> {
    let request = FileRequest {
        filename: name.to_owned(),
    };
    framing::send(criu, &request, &[]).unwrap();
    let (reply, _) = framing::recv::<FileReply>(criu).unwrap().unwrap();
    assert!(reply.exists, "{name}");
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [writer.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let byte = [IoSlice::new(&[0])];
    rustix::net::sendmsg(criu, &byte, &mut control, SendFlags::empty()).unwrap();
    drop(writer);
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    bytes
}
