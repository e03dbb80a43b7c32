//! Agents and readers of a node that does not hold the requested checkpoint.

use std::time::{Duration, Instant};

use permafrost_agent::remote;
use permafrost_identity::Role;
use permafrost_protocol::control::{self, Checkpoint, ErrorCode};
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{reply, request};
use permafrost_transport::peer::{Network, PeerError};

use super::support::{JOB, Site, memory};

const LONG: Duration = Duration::from_secs(60);

#[test]
fn an_agent_that_knows_one_node_gets_what_another_holds() {
    let site = Site::new(&[("a", "", ""), ("b", "", ""), ("c", "", "")]);
    let memory = memory(700);
    let sealed = site.dump(1, &memory);
    let agent = site.agent("first", &[0]);
    agent.check_get(&memory);
    // All of it went through the one that it knows.
    assert!(site.nodes[0].asked() > 0 && site.nodes[1].asked() > 0);
    drop(agent);

    // Of a damaged copy too.
    site.copy(1, 0, &sealed);
    let page = memory.values().nth(400).unwrap();
    site.nodes[0].flip(site.nodes[0].find(page)[0]);
    let image = b"the registers of a process".repeat(100);
    site.nodes[0].flip(site.nodes[0].find(&image)[0]);
    let agent = site.agent("second", &[0]);
    agent.check_get(&memory);
    assert_eq!(site.nodes[0].damage_told(), [&*sealed.id, &*sealed.id]);
}

#[test]
fn an_agent_asks_the_holders_that_it_knows() {
    let site = Site::new(&[("a", "", ""), ("b", "", "")]);
    let memory = memory(300);
    site.dump(1, &memory);
    let agent = site.agent("compute", &[0, 1]);
    agent.check_get(&memory);
    assert_eq!(site.nodes[0].asked(), 0);
}

fn fetch(of: &Checkpoint, listed_as: &str) -> request::Fetch {
    request::Fetch {
        checkpoint: of.id.clone(),
        listed_as: listed_as.to_owned(),
        ..request::Fetch::default()
    }
}

fn refused(network: &Network, node: &str, request: request::Fetch) -> ErrorCode {
    match remote::fetch(network, node, false, request, LONG) {
        Err(PeerError::Refused { error, .. }) => error.code(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("granted"),
    }
}

#[test]
fn what_one_may_not_read_is_refused_through_another_node_too() {
    let site = Site::new(&[("a", "", ""), ("b", "", "")]);
    let sealed = site.dump(1, &memory(100));
    let name = format!("{JOB}@{}", sealed.generation);
    let stranger = site.network_of("stranger", Role::Reader, "others");
    for node in ["a", "b"] {
        assert_eq!(
            refused(&stranger, node, fetch(&sealed, &name)),
            ErrorCode::Denied
        );
    }
    // Nor under a name that one may read.
    let under = fetch(&sealed, "others/x@1");
    assert_eq!(refused(&stranger, "a", under), ErrorCode::NotFound);
    // Nobody was asked on a stranger's behalf.
    assert_eq!(site.nodes[1].asked(), 1);

    let friend = site.network_of("friend", Role::Reader, "team");
    let passed = remote::fetch(&friend, "a", false, fetch(&sealed, &name), LONG).unwrap();
    assert_eq!(passed.opened.manifest.unwrap().job, JOB);
    let mut pages = 0;
    let mut images = Vec::new();
    for frame in passed.frames {
        let frame = frame.unwrap();
        match frame.header.kind {
            Kind::Pages | Kind::Zero => pages += frame.header.pages,
            Kind::Image => images.push(String::from_utf8(frame.payload.to_vec()).unwrap()),
            _ => {}
        }
    }
    assert_eq!(pages, 100);
    images.sort();
    assert_eq!(
        images,
        ["core-7.img", "empty.img", "inventory.img", "mm-7.img"]
    );
    // Without the name nobody knows who has it; nor is it passed on to nodes, which would go round in circles.
    assert_eq!(
        refused(&friend, "a", fetch(&sealed, "")),
        ErrorCode::NotFound
    );
    let node = site.network_of("c", Role::Node, "*");
    assert_eq!(
        refused(&node, "a", fetch(&sealed, &name)),
        ErrorCode::NotFound
    );
}

#[test]
fn what_is_shown_by_any_node_names_the_holders() {
    let site = Site::new(&[("a", "", ""), ("b", "", "")]);
    site.dump(1, &memory(100));
    let show = |network: &Network| {
        let show = control::request::Body::Show(control::request::Show {
            checkpoint: JOB.to_owned(),
        });
        let request = control::Request {
            version: 1,
            body: Some(show),
        };
        let body = request::Body::Control(request);
        match network.call("a", body, Instant::now() + LONG).unwrap() {
            reply::Body::Control(reply) => reply.body.unwrap(),
            other => panic!("{other:?}"),
        }
    };
    let friend = site.network_of("friend", Role::Reader, "team");
    let control::reply::Body::Detail(detail) = show(&friend) else {
        panic!("not shown");
    };
    assert_eq!(detail.checkpoint.unwrap().nodes, ["b"]);
    assert_eq!(detail.manifest.unwrap().spaces[0].pages, 100);
    let stranger = site.network_of("stranger", Role::Reader, "others");
    let control::reply::Body::Error(error) = show(&stranger) else {
        panic!("shown");
    };
    assert_eq!(error.code(), ErrorCode::Denied);
}

/// Waits for lines of a node's audit log. Returns caller, action, object and outcome of each.
fn audited(site: &Site, node: &str, count: usize) -> Vec<[String; 4]> {
    let path = site.work.path().join(node).join("audit.log");
    let until = Instant::now() + LONG;
    loop {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text
            .lines()
            .map(|line| {
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                assert_eq!(
                    (&line["node"], &line["via"]),
                    (&node.into(), &"peer".into())
                );
                ["who", "action", "on", "outcome"]
                    .map(|field| line[field].as_str().unwrap().to_owned())
            })
            .collect();
        if lines.len() >= count || Instant::now() > until {
            return lines;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_peers_read_and_what_they_were_denied_is_in_the_audit_log() {
    let site = Site::new(&[("a", "", "")]);
    let sealed = site.dump(0, &memory(50));
    let name = format!("{JOB}@{}", sealed.generation);
    let call = |network: &Network, body: control::request::Body| {
        let request = control::Request {
            version: 1,
            body: Some(body),
        };
        let body = request::Body::Control(request);
        network.call("a", body, Instant::now() + LONG).unwrap()
    };
    let remove = |checkpoint: &str| {
        control::request::Body::Remove(control::request::Remove {
            checkpoint: checkpoint.to_owned(),
            ..control::request::Remove::default()
        })
    };
    let stranger = site.network_of("stranger", Role::Agent, "others");
    assert_eq!(
        refused(&stranger, "a", fetch(&sealed, "")),
        ErrorCode::Denied
    );
    call(&stranger, remove(&name));
    let friend = site.network_of("friend", Role::Agent, "team");
    // Each file of a restore is a fetch; one line says that it reads.
    for _ in 0..3 {
        let passed = remote::fetch(&friend, "a", false, fetch(&sealed, ""), LONG).unwrap();
        assert!(passed.frames.into_iter().all(|frame| frame.is_ok()));
    }
    call(
        &friend,
        control::request::Body::List(control::request::List::default()),
    );
    call(&friend, remove(&name));
    let [stranger, friend] = ["agent stranger", "agent friend"];
    let expected = [
        [stranger, "read", &sealed.id, "denied"],
        [stranger, "remove", &name, "denied"],
        [friend, "read", &name, "done"],
        // Without the right to delete.
        [friend, "remove", &name, "denied"],
    ];
    assert_eq!(
        audited(&site, "a", expected.len()),
        expected.map(|line| line.map(str::to_owned))
    );
}
