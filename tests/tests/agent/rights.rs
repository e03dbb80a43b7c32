//! Rights of an agent, a reader and a stranger.

use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::daemon::Daemon;

use super::common::*;
use super::{Site, refusal, text};

#[test]
fn an_agent_stays_in_its_namespaces() {
    let site = Site::new(1);
    let a = site.agent("a", "team-a", &[]);
    let b = site.agent("b", "team-b", &[]);
    let memory = pages(1, 50);
    let opened = a.json(&["open", "--job", "team-a/x"]).unwrap();
    let mut peer = Peer::unix(opened["socket"].as_str().unwrap().as_ref(), Dialect::V32);
    peer.open();
    peer.pages(0x40_0000, &memory);
    let images = site.path("images");
    fake_images(&images);
    assert_eq!(peer.close(), Some(0));
    peer.leave();
    let session = opened["session"].as_str().unwrap();
    // Its name is no secret of the node's, but the job is not the other's.
    let adopt = |job: &str| -> Vec<String> {
        [
            "adopt",
            "--job",
            job,
            "--images-dir",
            text(&images),
            session,
        ]
        .map(str::to_owned)
        .to_vec()
    };
    let stolen = b.try_run(&adopt("team-a/x")).unwrap();
    assert_eq!(stolen.status.code(), Some(9));
    a.run(&adopt("team-a/x")).unwrap();

    assert!(listing(&b).is_empty());
    let out = site.work().join("out");
    for arguments in [
        vec!["open", "--job", "team-a/x"],
        vec!["show", "team-a/x"],
        vec!["rm", "team-a/x@1"],
        vec!["rm", "--all", "team-a/x"],
        vec!["pin", "team-a/x"],
        vec!["verify", "team-a/x"],
        vec!["get", "team-a/x", text(&out)],
    ] {
        let (code, said) = refusal(&b, &arguments);
        assert_eq!(code, 9, "{arguments:?}: {said}");
    }
    assert!(exported_pages(&a, site.work(), "team-a/x") == memory);
}

#[test]
fn a_reader_is_told_which_role_may() {
    let site = Site::new(1);
    let reader = site.agent_of_role("r", "reader", "*", &[]);
    for (arguments, word) in [
        (["open", "--job=x"], "certificate of role agent"),
        (["rm", "x@1"], "right to delete"),
        (["pin", "x@1"], "certificate of role agent"),
    ] {
        let (code, said) = refusal(&reader, &arguments);
        assert_eq!(code, 9, "{arguments:?}: {said}");
        assert!(
            said.contains(word) && !said.contains("--namespace"),
            "{said}"
        );
    }
    let status = reader.json(&["status"]).unwrap();
    assert_eq!(status["agent"], true, "{status}");
}

#[test]
fn a_stranger_is_not_served() {
    let site = Site::new(1);
    let other = Site::new(0);
    let identity = other.issue("compute", "agent", Some("*"));
    let peers = site.nodes[0].as_ref().unwrap().peers();
    let arguments = [
        "--identity".to_owned(),
        text(&identity).to_owned(),
        format!("--node=node-0={peers}"),
        "--deadline=3s".to_owned(),
    ];
    let agent = Daemon::agent(&other.path("compute"), &arguments).unwrap();
    let (code, said) = refusal(&agent, &["ls"]);
    assert_eq!(code, 11, "{said}");
}
