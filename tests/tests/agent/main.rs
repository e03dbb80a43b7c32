//! A compute node without storage: dumps go through an agent to a storage node, and come back through it.

mod as_a_node;
#[path = "../common/mod.rs"]
mod common;
mod hostile;
mod pipes;
mod ports;
mod rights;
mod rounds;
mod tasks;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use permafrost_protocol::control::{self, request};
use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::cluster::pki;
use permafrost_tests::daemon::{Daemon, Options, tail};
use permafrost_tests::process::wait_for;
use permafrost_transport::control::Connection;

use common::*;

/// Storage nodes, an authority that all of them trust, and agents.
struct Site {
    work: tempfile::TempDir,
    nodes: Vec<Option<Daemon>>,
}

impl Site {
    fn new(nodes: usize) -> Self {
        Self::with(nodes, &[])
    }

    /// Starts nodes with more options.
    fn with(nodes: usize, extra: &[&str]) -> Self {
        let work = tempfile::tempdir().unwrap();
        pki(&["init", "--dir", text(&work.path().join("ca"))]).unwrap();
        let mut site = Self {
            work,
            nodes: Vec::new(),
        };
        for n in 0..nodes {
            let identity = site.issue(&name(n), "node", None);
            let dir = site.path(&name(n));
            let options = Options {
                listen: "none".to_owned(),
                // Parked dumps take at most half of it.
                region_mib: 768,
                extra: [
                    "--listen-peers",
                    "127.0.0.1:0",
                    "--identity",
                    text(&identity),
                ]
                .iter()
                .chain(extra)
                .map(|&argument| argument.to_owned())
                .collect(),
                ..Options::default()
            };
            site.nodes
                .push(Some(Daemon::start(&dir, &options).unwrap()));
        }
        site
    }

    /// Kills a node and starts it again, at the same address.
    fn restart(&mut self, n: usize) {
        let node = self.nodes[n].take().expect("a node that runs");
        let peers = node.peers().to_owned();
        node.kill().unwrap();
        let identity = self.work.path().join(format!("identity-{}", name(n)));
        let options = Options {
            listen: "none".to_owned(),
            extra: ["--listen-peers", &peers, "--identity", text(&identity)]
                .map(str::to_owned)
                .to_vec(),
            ..Options::default()
        };
        let started = Daemon::start(&self.path(&name(n)), &options).unwrap();
        self.nodes[n] = Some(started);
    }

    /// Makes a directory in the site's own and returns its path.
    fn path(&self, name: &str) -> PathBuf {
        let path = self.work.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn issue(&self, name: &str, role: &str, namespace: Option<&str>) -> PathBuf {
        self.issue_with(name, role, namespace, &[])
    }

    fn issue_with(
        &self,
        name: &str,
        role: &str,
        namespace: Option<&str>,
        extra: &[&str],
    ) -> PathBuf {
        let out = self.work.path().join(format!("identity-{name}"));
        let ca = self.work.path().join("ca");
        let mut arguments = vec!["issue", "--dir", text(&ca), "--name", name, "--role", role];
        arguments.extend(["--out", text(&out)]);
        if let Some(namespace) = namespace {
            arguments.extend(["--namespace", namespace]);
        }
        arguments.extend(extra);
        pki(&arguments).unwrap();
        out
    }

    /// Starts an agent that knows all nodes.
    fn agent(&self, agent: &str, namespace: &str, extra: &[&str]) -> Daemon {
        self.agent_of_role(agent, "agent", namespace, extra)
    }

    fn agent_of_role(&self, agent: &str, role: &str, namespace: &str, extra: &[&str]) -> Daemon {
        let identity = self.issue(agent, role, Some(namespace));
        self.agent_with(agent, &identity, extra)
    }

    fn agent_with(&self, agent: &str, identity: &Path, extra: &[&str]) -> Daemon {
        let mut arguments = vec!["--identity".to_owned(), text(identity).to_owned()];
        for (n, node) in self.nodes.iter().enumerate() {
            let peers = node.as_ref().expect("a node that runs").peers();
            arguments.push(format!("--node={}={peers}", name(n)));
        }
        arguments.extend(extra.iter().map(|&argument| argument.to_owned()));
        Daemon::agent(&self.path(agent), &arguments).unwrap()
    }

    fn work(&self) -> &Path {
        self.work.path()
    }

    fn log(&self, n: usize) -> String {
        tail(&self.work.path().join(name(n)).join("permafrostd.log"))
    }
}

fn name(n: usize) -> String {
    format!("node-{n}")
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs a command that is refused. Returns its exit code and its error output.
fn refusal(daemon: &Daemon, arguments: &[&str]) -> (i32, String) {
    let output = daemon.try_run(arguments).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().unwrap(), said)
}

#[test]
fn what_goes_through_an_agent_is_on_the_node_and_comes_back() {
    let site = Site::new(1);
    let agent = site.agent("compute", "*", &[]);
    let mut memory = pages(3, 700);
    memory[100 * PAGE_SIZE..300 * PAGE_SIZE].fill(0);

    // A bare page-server dump is parked, and adopted without its name.
    let adopted = dump_and_adopt(&agent, site.work(), "team/plain", 0x40_0000, &memory);
    assert_eq!(adopted["generation"], 1, "{adopted}");
    assert_eq!(adopted["zero_bytes"], 200 * PAGE_SIZE);
    assert!(exported_pages(&agent, site.work(), "team/plain") == memory);
    let node = site.nodes[0].as_ref().unwrap();
    assert!(exported_pages(node, site.work(), "team/plain") == memory);

    // A session of its own, compared with the first one by the node, part of it by the client's word.
    memory[699 * PAGE_SIZE] ^= 1;
    let opened = agent
        .json(&["open", "--job", "team/plain", "--prev-images"])
        .unwrap();
    assert_eq!(opened["parent_generation"], 1);
    let mut peer = Peer::unix(opened["socket"].as_str().unwrap().as_ref(), Dialect::V32);
    assert!(peer.open(), "the parent has this process");
    peer.hole(0x40_0000, 400);
    peer.pages(
        0x40_0000 + 400 * PAGE_SIZE as u64,
        &memory[400 * PAGE_SIZE..],
    );
    let images = site.path("images-second");
    fake_images(&images);
    assert_eq!(peer.close(), Some(0));
    peer.leave();
    let session = opened["session"].as_str().unwrap();
    let adopt = [
        "adopt",
        "--job",
        "team/plain",
        "--images-dir",
        text(&images),
        session,
    ];
    let second = agent.json(&adopt).unwrap();
    assert_eq!(second["generation"], 2);
    let added_pages = second["added_bytes"].as_u64().unwrap() / PAGE_SIZE as u64;
    assert!(added_pages < 16, "one page differs: {second}");
    assert!(exported_pages(&agent, site.work(), "team/plain@2") == memory);

    // What is exported is what the node itself exports, byte for byte.
    let through = site.path("through");
    let direct = site.path("direct");
    agent
        .run(&["get", "--force", "team/plain", text(&through)])
        .unwrap();
    node.run(&["get", "--force", "team/plain", text(&direct)])
        .unwrap();
    let mut names: Vec<_> = std::fs::read_dir(&direct)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert!(names.len() >= 6, "{names:?}");
    assert_eq!(std::fs::read_dir(&through).unwrap().count(), names.len());
    for file in names {
        let same = std::fs::read(through.join(&file)).unwrap()
            == std::fs::read(direct.join(&file)).unwrap();
        assert!(same, "{file:?}");
    }

    // The small requests.
    assert_eq!(listing(&agent), listing(node));
    agent.run(&["pin", "team/plain@2"]).unwrap();
    agent.run(&["unpin", "team/plain@2"]).unwrap();
    // Whoever dumps does not remove, unless its certificate says so.
    let (code, said) = refusal(&agent, &["rm", "team/plain@1"]);
    assert!(code == 9 && said.contains("pki issue --delete"), "{said}");
    let identity = site.issue_with("cleaner", "agent", Some("team"), &["--delete"]);
    let cleaner = site.agent_with("cleaner", &identity, &[]);
    cleaner.run(&["rm", "team/plain@1"]).unwrap();
    drop(cleaner);
    let verified = agent.json(&["verify"]).unwrap();
    // The small images share a page.
    assert_eq!(verified["pages"].as_u64(), Some(700 + 1), "{verified}");
    assert_eq!(verified["damage"].as_array().map(Vec::len), Some(0));
    agent.run(&["status"]).unwrap();
    agent.stop().unwrap();
}

#[test]
fn a_refusal_of_the_node_is_answered_at_close() {
    let site = Site::new(1);
    let agent = site.agent("compute", "*", &[]);
    let opened = agent.json(&["open", "--job", "odd"]).unwrap();
    let (code, said) = refusal(&agent, &["open", "--job", "odd"]);
    assert_eq!(code, 4, "a job has one dump at a time: {said}");
    let mut peer = Peer::unix(opened["socket"].as_str().unwrap().as_ref(), Dialect::V32);
    assert!(!peer.open());
    peer.hole(0x40_0000, 4);
    peer.pages(0x50_0000, &pages(1, 64));
    assert_ne!(peer.close().expect("an answer"), 0);
    peer.leave();
    // The node has let go of the job.
    let deadline = Instant::now() + Duration::from_secs(20);
    while agent.json(&["open", "--job", "odd"]).is_err() {
        assert!(Instant::now() < deadline, "{}", site.log(0));
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(listing(&agent).is_empty());

    // Pages that descend would be refused by the node as no dump at all.
    let mut peer = Peer::anonymous(&agent, Dialect::V32);
    peer.open();
    peer.pages(0x50_0000, &pages(1, 64));
    peer.pages(0x40_0000, &pages(1, 64));
    assert_eq!(peer.close(), Some(22));
    peer.leave();
    assert!(listing(&agent).is_empty());
}

#[test]
fn the_first_request_after_a_restart_of_the_node_is_answered() {
    let mut site = Site::new(1);
    let agent = site.agent("compute", "*", &[]);
    agent.json(&["ls"]).unwrap();
    let requests: [&[&str]; 2] = [&["ls"], &["open", "--job", "any"]];
    for arguments in requests {
        site.restart(0);
        let answered = agent.json(arguments);
        assert!(answered.is_ok(), "{answered:?}\n{}", site.log(0));
    }
}

#[test]
fn an_agent_that_stops_gives_its_dumps_up_and_lets_go_of_their_jobs() {
    let site = Site::new(1);
    let first = site.agent("first", "*", &["--log-format", "json"]);
    let log = first.log();
    let opened = first.json(&["open", "--job", "held"]).unwrap();
    let mut peer = Peer::unix(opened["socket"].as_str().unwrap().as_ref(), Dialect::V32);
    peer.open();
    peer.pages(0x40_0000, &pages(1, 64));
    assert!(first.stop().unwrap().success());
    assert_ne!(peer.close().unwrap_or(-1), 0);
    let log = std::fs::read_to_string(log).unwrap();
    let lines = log.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).expect(line);
        let is_ours = line["target"].as_str().unwrap().starts_with("permafrost");
        let needs_id =
            is_ours && ["INFO", "WARN", "ERROR"].contains(&line["level"].as_str().unwrap());
        assert!(!needs_id || line["event"].is_string(), "{line}");
        line["event"].as_str().unwrap_or_default().to_owned()
    });
    let events: Vec<_> = lines.collect();
    for event in [
        "daemon-ready",
        "daemon-stopping",
        "session-failed",
        "daemon-stopped",
    ] {
        assert!(events.iter().any(|one| one == event), "{event}: {log}");
    }
    // Sooner than a lost connection would be given up.
    let second = site.agent("second", "*", &[]);
    let deadline = Instant::now() + Duration::from_secs(15);
    while second.json(&["open", "--job", "held"]).is_err() {
        assert!(Instant::now() < deadline, "{}", site.log(0));
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_freeze_that_reached_its_limit_is_counted_by_the_node_that_took_the_dump() {
    let site = Site::with(1, &["--listen-metrics", "127.0.0.1:0"]);
    let node = site.nodes[0].as_ref().unwrap();
    let agent = site.agent("compute", "*", &[]);
    // A job each: the session of one is gone only when the node has seen the end of its connection.
    let give_up = |job: &str, daemon: &Daemon, freeze_limit_reached: bool| {
        let mut connection = Connection::connect(&daemon.control()).unwrap();
        let open = request::Open {
            job: job.to_owned(),
            seal_follows: true,
            bound_to_connection: true,
            ..request::Open::default()
        };
        let session = connection.call(open).unwrap().session;
        let abort = request::Abort {
            session,
            freeze_limit_reached,
        };
        connection.call(abort).unwrap();
        node.counter("permafrost_freeze_limits_reached_total")
            .unwrap()
    };
    for (job, daemon, is_reached, counted) in [
        ("a", node, false, 0),
        ("b", node, true, 1),
        ("c", &agent, false, 1),
        ("d", &agent, true, 2),
    ] {
        assert_eq!(give_up(job, daemon, is_reached), counted);
    }
}

#[test]
fn many_sessions_at_once_keep_their_pages_apart() {
    const DUMPS: u8 = 16;
    let site = Site::new(1);
    let agent = site.agent("compute", "*", &[]);
    let contents = |n: u8| pages(n + 1, 256 + usize::from(n) * 7);
    std::thread::scope(|scope| {
        for n in 0..DUMPS {
            let (agent, site) = (&agent, &site);
            scope.spawn(move || {
                let job = format!("crowd/{n}");
                let opened = agent.json(&["open", "--job", &job]).unwrap();
                let mut peer = if n % 3 == 0 {
                    Peer::tcp(opened["address"].as_str().unwrap(), Dialect::V24)
                } else {
                    Peer::unix(opened["socket"].as_str().unwrap().as_ref(), Dialect::V32)
                };
                assert!(!peer.open());
                for (at, chunk) in contents(n).chunks(64 * PAGE_SIZE).enumerate() {
                    peer.pages(0x5000_0000 + at as u64 * 0x100_0000, chunk);
                }
                let images = site.path(&format!("images-{n}"));
                fake_images(&images);
                assert_eq!(peer.close(), Some(0));
                peer.leave();
                let session = opened["session"].as_str().unwrap();
                let adopt = [
                    "adopt",
                    "--job",
                    &job,
                    "--images-dir",
                    text(&images),
                    session,
                ];
                agent.json(&adopt).unwrap();
            });
        }
    });
    assert_eq!(listing(&agent).len(), usize::from(DUMPS));
    for n in 0..DUMPS {
        let job = format!("crowd/{n}");
        assert!(
            exported_pages(&agent, site.work(), &job) == contents(n),
            "dump {n}"
        );
    }
}

#[test]
fn a_node_that_dies_in_mid_dump_fails_it_and_the_next_goes_to_another() {
    let mut site = Site::new(2);
    let agent = site.agent("compute", "*", &["--deadline", "6s"]);
    let mut peer = Peer::anonymous(&agent, Dialect::V32);
    peer.open();
    peer.pages(0x40_0000, &pages(1, 64));
    // The first node has the session.
    let first = site.nodes[0].take().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while first.json(&["status"]).unwrap()["sessions"]
        .as_array()
        .is_none_or(Vec::is_empty)
    {
        assert!(Instant::now() < deadline, "{}", site.log(0));
        std::thread::sleep(Duration::from_millis(50));
    }
    first.kill().unwrap();
    peer.pages(0x50_0000, &pages(2, 64));
    let status = peer.close().expect("an answer to CLOSE");
    assert_ne!(status, 0, "the task lives on");
    peer.leave();

    let memory = pages(5, 100);
    dump_and_adopt(&agent, site.work(), "again", 0x40_0000, &memory);
    let second = site.nodes[1].as_ref().unwrap();
    assert!(exported_pages(second, site.work(), "again") == memory);
    assert!(exported_pages(&agent, site.work(), "again") == memory);
}

#[test]
fn a_dump_through_an_agent_waits_for_its_turn_at_the_node_and_can_be_given_up() {
    let mut site = Site::new(0);
    let identity = site.issue(&name(0), "node", None);
    let options = Options {
        extra: [
            "--listen-peers",
            "127.0.0.1:0",
            "--identity",
            text(&identity),
            "--dumps-at-once",
            "1",
        ]
        .map(str::to_owned)
        .to_vec(),
        ..Options::default()
    };
    let dir = site.path(&name(0));
    site.nodes
        .push(Some(Daemon::start(&dir, &options).unwrap()));
    let agent = site.agent("compute", "default", &[]);
    let reader = site.agent_of_role("reader", "reader", "default", &[]);
    let node = site.nodes[0].as_ref().unwrap();
    let writes = || {
        let status = node.json(&["status"]).unwrap();
        let queue = &status["queues"][0];
        ["running", "waiting", "reserved"].map(|count| queue[count].as_u64().unwrap())
    };
    let wait_until = |what: &str, so: &dyn Fn([u64; 3]) -> bool| {
        wait_for(what, Duration::from_secs(60), || {
            Ok(so(writes()).then_some(()))
        })
        .unwrap();
    };
    // It has its turn, and keeps it as long as pages come.
    let first = Frozen::dump(Peer::anonymous(node, Dialect::V32));
    wait_until("a dump that runs", &|[running, ..]| running == 1);
    let open = |job: &str| control::request::Open {
        job: job.to_owned(),
        seal_follows: true,
        bound_to_connection: true,
        ..control::request::Open::default()
    };
    let mut leaving = Connection::connect(&agent.control()).unwrap();
    leaving.begin(open("leaves"), None).unwrap();
    wait_until("one that waits", &|[_, waiting, reserved]| {
        waiting + reserved == 1
    });
    // Its place is kept from one question to the next.
    wait_until("one that asks again", &|[_, _, reserved]| reserved == 1);
    drop(leaving);
    wait_until("an empty queue", &|[_, waiting, reserved]| {
        waiting + reserved == 0
    });
    let mut staying = Connection::connect(&agent.control()).unwrap();
    let waits = std::thread::spawn(move || {
        let mut told = 0;
        let opened = staying.call_with(open("stays"), None, &mut |_| told += 1);
        (opened.map(|_| ()), told)
    });
    wait_until("one that waits", &|[_, waiting, reserved]| {
        waiting + reserved == 1
    });
    drop(first);
    let (opened, told) = waits.join().unwrap();
    opened.unwrap();
    assert!(told > 0);
    // Places are kept for agents, and not for those who only read.
    let place = site.work().join("place");
    let place = place.to_str().unwrap();
    let reserve = ["reserve", "--bytes", "1M", "--reservation-file", place];
    let reserved = agent.json(&reserve).unwrap();
    assert_eq!(reserved["node"], name(0));
    let refused = reader.try_run(&reserve).unwrap();
    assert_eq!(refused.status.code(), Some(9));
    let cancel = ["reserve", "--cancel", "--reservation-file", place];
    agent.run(&cancel).unwrap();
}
