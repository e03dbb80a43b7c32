//! Dumps with an image for each of thousands of threads, and with one as long as a large tmpfs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use permafrost_identity::Role;
use permafrost_protocol::control::{self, Checkpoint};
use permafrost_protocol::images::write_mappings;
use permafrost_protocol::wire::message::{Commit, reply, request};
use permafrost_transport::peer::{DumpSender, Network};

use super::support::{JOB, PID, Site};

const LONG: Duration = Duration::from_secs(120);
const THREADS: u64 = 5000;
/// Type of the address space of a process, as CRIU numbers it.
const PROCESS: u16 = 0;

/// Zeros: they take room neither in a region nor in a file.
const TMPFS: (&str, u64) = ("tmpfs-dev-30.img", (256 << 20) + 4097);

fn core(thread: u64) -> (String, Vec<u8>) {
    let registers = thread.to_le_bytes().repeat(40);
    (format!("core-{}.img", u64::from(PID) + thread), registers)
}

/// Returns the images of a process with many threads, without that of its tmpfs.
fn images() -> BTreeMap<String, Vec<u8>> {
    let others = [
        ("inventory.img".to_owned(), b"what there is".to_vec()),
        ("empty.img".to_owned(), Vec::new()),
        (format!("mm-{PID}.img"), write_mappings(&[])),
    ];
    (0..THREADS).map(core).chain(others).collect()
}

fn send_pages(sender: &mut DumpSender) {
    sender.space(PROCESS, PID.into(), 65537).unwrap();
    sender.pages(0x400, 1, &[7; 4096]).unwrap();
    sender.close(Instant::now() + LONG).unwrap();
}

fn send_images(sender: &mut DumpSender) {
    for (name, contents) in images() {
        sender.begin_image(&name, contents.len() as u64).unwrap();
        sender.image_data(&contents).unwrap();
    }
}

fn send_tmpfs(sender: &mut DumpSender) {
    let (name, mut left_bytes) = TMPFS;
    sender.begin_image(name, left_bytes).unwrap();
    let zeros = vec![0; 1 << 20];
    while left_bytes > 0 {
        let piece = left_bytes.min(zeros.len() as u64);
        sender
            .image_data(&zeros[..usize::try_from(piece).unwrap()])
            .unwrap();
        left_bytes -= piece;
    }
}

#[test]
fn a_node_takes_a_copy_with_thousands_of_images() {
    let site = Site::new(&[("a", "", "")]);
    let origin = site.network_of("b", Role::Node, "*");
    let session = [9; 16];
    let dump = request::Dump {
        session: session.to_vec(),
        job: JOB.to_owned(),
        ..request::Dump::default()
    };
    let mut sender = DumpSender::open(&origin, "a", dump, Instant::now() + LONG).unwrap();
    send_pages(&mut sender);
    send_images(&mut sender);
    let prepared = sender.prepare(Instant::now() + LONG).unwrap();
    let commit = Commit {
        checkpoint: "c".repeat(32),
        content_digest: prepared.content_digest,
        job: JOB.to_owned(),
        generation: 1,
        created_unix_ms: 1,
        session: "09".repeat(16),
        ..Commit::default()
    };
    sender.commit(&commit, Instant::now() + LONG).unwrap();
    let sealed = site.nodes[0]
        .store
        .local()
        .open_fetch(&commit.checkpoint, "")
        .unwrap();
    let (name, contents) = core(THREADS - 1);
    let mut kept = Vec::new();
    sealed
        .image(&name, |piece| {
            kept.extend_from_slice(piece);
            Ok(())
        })
        .unwrap();
    assert!(kept == contents);
    assert_eq!(sealed.manifest().images.len(), images().len());
}

fn control(network: &Network, body: control::request::Body) -> control::reply::Body {
    let request = control::Request {
        version: 1,
        body: Some(body),
    };
    let body = request::Body::Control(request);
    match network.call("a", body, Instant::now() + LONG).unwrap() {
        reply::Body::Control(reply) => reply.body.unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Opens a session on node `a` like an agent, and sends its pages.
fn begin_as_agent(agent: &Network) -> (String, DumpSender) {
    let open = control::request::Open {
        job: JOB.to_owned(),
        seal_follows: true,
        ..control::request::Open::default()
    };
    let control::reply::Body::SessionOpened(opened) =
        control(agent, control::request::Body::Open(open))
    else {
        panic!("not opened");
    };
    let session: uuid::Uuid = opened.session.parse().unwrap();
    let dump = request::Dump {
        session: session.as_bytes().to_vec(),
        job: JOB.to_owned(),
        ..request::Dump::default()
    };
    let mut sender = DumpSender::open(agent, "a", dump, Instant::now() + LONG).unwrap();
    send_pages(&mut sender);
    (opened.session, sender)
}

fn dump_as_agent(agent: &Network) -> Checkpoint {
    let (session, mut sender) = begin_as_agent(agent);
    send_images(&mut sender);
    send_tmpfs(&mut sender);
    sender.prepare(Instant::now() + LONG).unwrap();
    let commit = Commit {
        session,
        ..Commit::default()
    };
    let committed = sender.commit(&commit, Instant::now() + LONG).unwrap();
    committed.checkpoint.unwrap()
}

#[test]
fn what_an_agent_dumps_may_have_thousands_of_images_and_a_long_one() {
    let site = Site::new(&[("a", "", ""), ("b", "", "")]);
    let agent = site.network_of("compute", Role::Agent, "team");
    let sealed = dump_as_agent(&agent);
    assert_eq!((&*sealed.job, sealed.generation), (JOB, 1));

    // Another node reads it, most images many at a time.
    let out = site.get(1).unwrap();
    for (name, contents) in images() {
        assert!(
            std::fs::read(out.path().join(&name)).unwrap() == contents,
            "{name}"
        );
    }
    let tmpfs = std::fs::metadata(out.path().join(TMPFS.0)).unwrap();
    assert_eq!(tmpfs.len(), TMPFS.1);
    let asked = site.nodes[0].asked();
    assert!(asked < 20, "{asked} conversations");

    // Repair makes a copy there.
    let pull = request::Body::Pull(request::Pull {
        checkpoint: sealed.id.clone(),
        from: vec!["a".to_owned()],
        ..request::Pull::default()
    });
    let repair = site.network_of("a-repair", Role::Node, "*");
    repair.call("b", pull, Instant::now() + LONG).unwrap();
    let copy = site.nodes[1]
        .store
        .local()
        .open_fetch(&sealed.id, "")
        .unwrap();
    assert_eq!(copy.manifest().images.len(), images().len() + 1);
}

#[test]
fn a_session_can_be_aborted_while_its_images_come() {
    let site = Site::new(&[("a", "", "")]);
    let agent = site.network_of("compute", Role::Agent, "team");
    let (session, mut sender) = begin_as_agent(&agent);
    let (name, contents) = core(0);
    sender.begin_image(&name, contents.len() as u64).unwrap();
    let store = &site.nodes[0].store;
    let states = || -> Vec<String> {
        let states = store.local().session_states().into_iter();
        states.map(|session| session.state).collect()
    };
    wait_until(|| states() == ["sealing"]);
    store.abort_session(&session).unwrap();
    let _ = sender.image_data(&contents);
    let refused = sender.prepare(Instant::now() + LONG).unwrap_err();
    assert!(
        refused.to_string().contains("discarded on request"),
        "{refused}"
    );
    drop(sender);
    assert!(store.list(None).unwrap().is_empty());
    // The job is free.
    assert!(states().is_empty());
    let (session, _sender) = begin_as_agent(&agent);
    store.abort_session(&session).unwrap();
}

fn wait_until(is_so: impl Fn() -> bool) {
    let until = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(5));
    }
}
