//! The replica's side by itself: what it refuses, and what a dropped one leaves.

use std::time::Duration;

use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::manifest::Origin;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::message::Commit;
use permafrost_store::{CopyDump, CopyRequest};

use super::fakes::{Node, page};

fn open(node: &Node, parent: &str) -> CopyDump {
    let request = CopyRequest {
        session: [0xab; 16],
        job: "job".to_owned(),
        parent: parent.to_owned(),
        compared: std::collections::HashMap::new(),
    };
    node.store.local().open_copy(request).unwrap()
}

fn fill(dump: &mut CopyDump) -> Commit {
    dump.space(SpaceId::process(1), 65_537).unwrap();
    dump.pages(5, 4, &page(1)).unwrap();
    dump.zero(6, 4, 1000).unwrap();
    dump.close().unwrap();
    assert_eq!(dump.close().unwrap(), dump.close().unwrap());
    dump.image("inventory.img", 3, &mut &b"abc"[..]).unwrap();
    let digest = dump.prepare().unwrap();
    assert_eq!(dump.prepare().unwrap(), digest);
    Commit {
        deadline_ms: 0,
        checkpoint: format!("{:032x}", 77),
        content_digest: digest.to_vec(),
        job: "job".to_owned(),
        generation: 5,
        parent_generation: 0,
        created_unix_ms: 1_700_000_000_000,
        kind: 0,
        origin: None,
        session: "ab".repeat(16),
        taken_by: "node n1".to_owned(),
    }
}

#[test]
fn a_commit_takes_the_senders_numbers_and_no_other_content() {
    let node = Node::new(None);
    let free = node.free_bytes();
    let mut dump = open(&node, "");
    let commit = fill(&mut dump);
    let other = Commit {
        content_digest: vec![0; 32],
        ..commit.clone()
    };
    dump.commit(&other).unwrap_err();
    dump.commit(&Commit {
        session: "cd".repeat(16),
        ..commit.clone()
    })
    .unwrap_err();
    let sealed = dump.commit(&commit).unwrap();
    assert_eq!(
        (sealed.generation, sealed.created_unix_ms),
        (5, 1_700_000_000_000)
    );
    assert_eq!(sealed.id, commit.checkpoint);
    assert_eq!(dump.commit(&commit).unwrap(), sealed);
    dump.commit(&other).unwrap_err();
    assert_eq!(
        node.store.local().committed(&commit).unwrap().unwrap(),
        sealed
    );
    node.store.local().committed(&other).unwrap_err();
    drop(dump);

    // Another checkpoint cannot have the number.
    let mut second = open(&node, "");
    let again = Commit {
        checkpoint: format!("{:032x}", 78),
        ..fill(&mut second)
    };
    second.commit(&again).unwrap_err();
    drop(second);

    assert!(node.store.local().roll_back(&sealed.id, false).unwrap());
    assert_eq!(node.free_bytes(), free);
}

#[test]
fn a_node_that_has_an_option_recorded_that_runs_code_is_refused() {
    let node = Node::new(None);
    let mut dump = open(&node, "");
    let commit = fill(&mut dump);
    let error = dump
        .commit(&Commit {
            origin: Some(Origin {
                restore_options: vec!["--config=/tmp/c".to_owned()],
                ..Origin::default()
            }),
            ..commit.clone()
        })
        .unwrap_err();
    assert_eq!(error.code(), ErrorCode::Invalid);
    assert!(error.to_string().contains("--config=/tmp/c"), "{error}");
    assert!(node.store.local().held().is_empty());
    dump.commit(&commit).unwrap();
}

#[test]
fn a_dropped_replica_is_free_at_every_stage() {
    let node = Node::new(None);
    let free = node.free_bytes();
    let mut dump = open(&node, "");
    dump.space(SpaceId::process(1), 65_537).unwrap();
    dump.pages(5, 4, &page(1)).unwrap();
    assert!(node.free_bytes() < free);
    drop(dump);
    assert_eq!(node.free_bytes(), free);
    let mut dump = open(&node, "");
    fill(&mut dump);
    drop(dump);
    assert_eq!(node.free_bytes(), free);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let node = Node::new(None);
    let mut dump = open(&node, &"f".repeat(32));
    assert!(!dump.has_parent());
    dump.pages(5, 4, &page(1)).unwrap_err();
    dump.begin_image("a.img", 1).unwrap_err();
    dump.prepare().unwrap_err();
    dump.space(SpaceId::process(1), 65_537).unwrap();
    dump.parent(5, 4, 1).unwrap_err();
    dump.pages(5, 4, &page(1)[..100]).unwrap_err();
    let mut dump = open(&node, "");
    dump.space(SpaceId::process(1), 65_537).unwrap();
    dump.zero(u64::MAX, 4, 2).unwrap_err();
    let mut dump = open(&node, "");
    dump.close().unwrap();
    dump.pages(5, 4, &page(1)).unwrap_err();
    dump.begin_image("../a.img", 1).unwrap_err();
    dump.begin_image("a.img", 2).unwrap();
    dump.image_data(b"abc").unwrap_err();
    dump.image_data(b"a").unwrap();
    dump.prepare().unwrap_err();
}

#[test]
fn publishing_is_final_but_for_a_withdrawal() {
    let node = Node::new(None);
    let mut dump = open(&node, "");
    let commit = fill(&mut dump);
    let id = dump.commit(&commit).unwrap().id;
    assert!(node.store.local().held()[0].provisional);
    node.store.local().publish(&id).unwrap();
    node.store.local().publish(&id).unwrap();
    assert!(node.store.local().held()[0].published && !node.store.local().held()[0].provisional);
    node.store.local().roll_back(&id, false).unwrap_err();
    assert!(node.store.local().roll_back(&id, true).unwrap());
    assert!(!node.store.local().roll_back(&id, true).unwrap());
    node.store.local().publish(&id).unwrap_err();
}

#[test]
fn a_copy_is_left_over_only_when_its_origins_deadline_has_passed() {
    let node = Node::new(None);
    let mut dump = open(&node, "");
    let commit = Commit {
        // Of another node than this one, which gives a dump less time.
        deadline_ms: 3_600_000,
        ..fill(&mut dump)
    };
    dump.commit(&commit).unwrap();
    let own_time = Duration::ZERO;
    assert!(node.store.unpublished(own_time).is_empty());
    drop(dump);

    let second = CopyRequest {
        session: [0xcd; 16],
        job: "other".to_owned(),
        parent: String::new(),
        compared: std::collections::HashMap::new(),
    };
    let mut dump = node.store.local().open_copy(second).unwrap();
    let quick = Commit {
        checkpoint: format!("{:032x}", 78),
        job: "other".to_owned(),
        session: "cd".repeat(16),
        ..fill(&mut dump)
    };
    dump.commit(&quick).unwrap();
    let left_over = node.store.unpublished(own_time);
    let ids: Vec<&str> = left_over.iter().map(|found| found.id.as_str()).collect();
    assert_eq!(ids, [quick.checkpoint.as_str()]);
}
