//! Admission to a cluster: the nodes and agents that may take part, and those that are refused.

mod common;

use std::path::Path;
use std::time::{Duration, SystemTime};

use permafrost_identity::{Authority, CertificateOrder, Namespaces, Role};
use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::daemon::Daemon;

use common::clustered::*;
use common::*;

/// Number of the compute node's host, after one node and one member.
const COMPUTE: usize = 2;
const HOUR: Duration = Duration::from_secs(3600);
/// Job of a namespace that the agents under test may not access.
const SECRET: &str = "team-b/secret";

#[test]
fn who_does_not_belong_is_refused_and_disturbs_nobody() {
    const TEST: &str = "who_does_not_belong_is_refused_and_disturbs_nobody";
    let setup = Setup {
        nodes: 1,
        members: 1,
        others: 1,
        extra: ["--copies", "1"].map(str::to_owned).to_vec(),
        ..Setup::default()
    };
    let Some(cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let node = cluster.node(0);
    sealed_dump(node, work.path(), SECRET, &pages(1, 50), || {});
    let before = listing(node);
    let shown = node.json(&["node", "show", "node-0"]).unwrap();

    a_namesake_does_not_start(&cluster);
    an_agent_without_a_certificate_does_not_start(&cluster, work.path());
    let (late, until) = a_late_agent(&cluster, work.path());
    is_refused_everything(&a_foreign_agent(&cluster, work.path()), "UnknownIssuer");
    another_namespace_is_not_there(&cluster, work.path());
    a_stolen_key_is_cut_off(&cluster, work.path());
    let left = until.duration_since(SystemTime::now());
    std::thread::sleep(left.unwrap_or_default() + Duration::from_secs(2));
    is_refused_everything(&late, "certificate expired");

    assert_eq!(listing(node), before);
    let after = node.json(&["node", "show", "node-0"]).unwrap();
    assert_eq!(after["nodes"][0]["region"], shown["nodes"][0]["region"]);
    assert_eq!(after["nodes"][0]["live"], true);
    // It takes dumps as before.
    sealed_dump(node, work.path(), "more", &pages(2, 50), || {});
}

/// Another region under the name of a node that lives, from another machine.
fn a_namesake_does_not_start(cluster: &Cluster) {
    let dir = cluster.path("namesake").unwrap();
    let options = cluster.node_options(COMPUTE, "node-0");
    let refused = Daemon::start(&dir, &options).expect_err("the name is taken");
    let refused = format!("{refused:#}");
    let own = cluster.node(0).json(&["status"]).unwrap();
    let region = own["regions"][0]["uuid"].as_str().unwrap().to_owned();
    assert!(
        refused.contains("node-0 is alive with another region"),
        "{refused}"
    );
    assert!(refused.contains(&region), "{refused}");
}

fn an_agent_without_a_certificate_does_not_start(cluster: &Cluster, work: &Path) {
    let nothing = work.join("nothing");
    std::fs::create_dir(&nothing).unwrap();
    let refused = cluster
        .agent_as("nobody", COMPUTE, &nothing, &[])
        .expect_err("it has no certificate");
    let refused = format!("{refused:#}");
    assert!(refused.contains("cert.pem"), "{refused}");
}

fn order(name: &str) -> CertificateOrder {
    CertificateOrder {
        namespaces: Namespaces::new(["*"]).unwrap(),
        ..CertificateOrder::new(name, Role::Agent)
    }
}

/// Starts an agent whose certificate expires at the returned time, before it has connected to any node.
fn a_late_agent(cluster: &Cluster, work: &Path) -> (Daemon, SystemTime) {
    let now = SystemTime::now();
    let authority = Authority::open(&cluster.authority()).unwrap();
    let [expired, late] = ["expired", "late"].map(|name| work.join(name));
    let issued = authority.issue_for(&order("late"), now - 2 * HOUR, now - HOUR, &expired, false);
    issued.unwrap();
    let refused = cluster
        .agent_as("expired", COMPUTE, &expired, &[])
        .expect_err("it is over");
    assert!(format!("{refused:#}").contains("expired"), "{refused:#}");

    let until = SystemTime::now() + Duration::from_secs(5);
    let issued = authority.issue_for(&order("late"), now - HOUR, until, &late, false);
    issued.unwrap();
    let agent = cluster.agent_as("late", COMPUTE, &late, &["--deadline", "5s"]);
    (agent.unwrap(), until)
}

/// Starts an agent with a certificate of an authority that no node trusts.
fn a_foreign_agent(cluster: &Cluster, work: &Path) -> Daemon {
    let foreign = work.join("foreign");
    let authority = Authority::create(&work.join("other-ca"), "other", false).unwrap();
    authority.issue(&order("foreign"), &foreign, false).unwrap();
    // It trusts the nodes: they are to refuse it.
    let trusted = [&foreign, &cluster.authority()].map(|dir| {
        let pem = std::fs::read_to_string(dir.join("ca.pem"));
        pem.unwrap()
    });
    std::fs::write(foreign.join("ca.pem"), trusted.concat()).unwrap();
    let agent = cluster.agent_as("foreign", COMPUTE, &foreign, &["--deadline", "5s"]);
    agent.unwrap()
}

/// Until an operator takes the denial back.
fn a_stolen_key_is_cut_off(cluster: &Cluster, work: &Path) {
    let authority = Authority::open(&cluster.authority()).unwrap();
    let place = work.join("stolen");
    authority.issue(&order("stolen"), &place, false).unwrap();
    let agent = cluster.agent_as("stolen", COMPUTE, &place, &["--deadline", "5s"]);
    let (agent, node) = (agent.unwrap(), cluster.node(0));
    assert!(!listing(&agent).is_empty());
    // An agent does not operate.
    let certificate = place.to_str().unwrap();
    let (code, said) = refusal(&agent, &["pki", "deny", "--certificate", certificate]);
    assert_eq!(code, 9, "{said}");

    let denied = node
        .json(&["pki", "deny", "--certificate", certificate])
        .unwrap();
    assert_eq!(denied["changed"], 1, "{denied}");
    assert_eq!(node.json(&["status"]).unwrap()["certificate"]["denied"], 1);
    is_refused_everything(&agent, "Revoked");
    node.json(&["pki", "undeny", "--certificate", certificate])
        .unwrap();
    assert!(!listing(&agent).is_empty());
}

/// Checks that the node stores nothing for the agent, and reveals nothing to it.
fn is_refused_everything(agent: &Daemon, words: &str) {
    for request in [&["ls"][..], &["show", SECRET], &["open", "--job", "theirs"]] {
        let (code, said) = refusal(agent, request);
        assert_eq!(code, 11, "{request:?}: {said}");
        assert!(said.contains("aborted by peer"), "{request:?}: {said}");
        assert!(said.contains(words), "{request:?}: {said}");
    }
}

fn another_namespace_is_not_there(cluster: &Cluster, work: &Path) {
    let agent = cluster.agent("team-a", COMPUTE, "team-a", &[]).unwrap();
    assert!(listing(&agent).is_empty());
    let out = work.join("out");
    let out = out.to_str().unwrap();
    for request in [
        &["show", SECRET][..],
        &["get", SECRET, out],
        &["restore", SECRET],
        &["rm", "team-b/secret@1"],
        &["pin", "team-b/secret@1"],
        &["open", "--job", "team-b/theirs"],
    ] {
        let (code, said) = refusal(&agent, request);
        assert_eq!(code, 9, "{request:?}: {said}");
        assert!(said.contains("namespace team-b"), "{request:?}: {said}");
    }
    assert!(!Path::new(out).exists());
}
