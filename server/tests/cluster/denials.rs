//! Denied certificates: every node receives the list, and etcd can take no denial back.

use std::path::Path;
use std::sync::Arc;

use permafrost_cluster::Cluster;
use permafrost_identity::{Authority, CertificateOrder, ReloadingIdentity, Role};
use permafrost_protocol::control::request;
use permafrost_server::denials::{DENIED_FILE, DenialLists};

use crate::support::{Bench, until};

const THIEF: &str = "name node thief";

/// Returns a node's identity, with its list in `directory`.
fn identity(directory: &Path, name: &str) -> Arc<ReloadingIdentity> {
    let identity = ReloadingIdentity::load(directory.join(name)).unwrap();
    let list = directory.join(format!("{name}-data"));
    std::fs::create_dir_all(&list).unwrap();
    identity.keep_denials_in(list.join(DENIED_FILE)).unwrap();
    Arc::new(identity)
}

fn ask(denials: &DenialLists, entries: &[&str], take_back: bool) -> (u64, Vec<String>) {
    let deny = request::Deny {
        entries: entries.iter().map(|&entry| entry.to_owned()).collect(),
        take_back,
    };
    let answer = denials.answer(&deny).unwrap();
    (answer.changed, answer.entries)
}

/// Waits until a node has received a list for which `holds` is true, and applies it.
fn hear(cluster: &Cluster, denials: &DenialLists, holds: impl Fn(&[String]) -> bool) {
    let lists = cluster.denials();
    until("the list", || {
        lists
            .borrow()
            .as_ref()
            .is_some_and(|list| holds(&list.entries))
    });
    denials.hear(&lists.borrow().clone().unwrap());
}

#[test]
fn a_denial_reaches_every_node_and_is_taken_back_by_each_alone() {
    let Some(bench) = Bench::new("cluster denials", 1) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name);
    let authority = Authority::create(&place("ca"), "test", false).unwrap();
    for name in ["n1", "n2"] {
        let order = CertificateOrder::new(name, Role::Node);
        authority.issue(&order, &place(name), false).unwrap();
    }
    let (one, two) = (bench.join("n1"), bench.join("n2"));
    let identities = ["n1", "n2"].map(|name| identity(directory.path(), name));
    let first = DenialLists::new(Arc::clone(&identities[0]), Some(one.registry()));
    let second = DenialLists::new(Arc::clone(&identities[1]), Some(two.registry()));

    assert_eq!(ask(&first, &[THIEF, "serial 0A"], false).0, 2);
    assert_eq!(ask(&first, &["serial a"], false).0, 0, "it is there");
    let listed = |list: &[String]| list.len() == 2;
    hear(&two, &second, listed);
    assert_eq!(ask(&second, &[], false).1, ["serial a", THIEF]);
    let stale = two.denials().borrow().clone().unwrap();

    // Whoever may write to etcd takes nothing back.
    one.registry()
        .undeny(&[THIEF.to_owned(), "serial a".to_owned()])
        .unwrap();
    hear(&two, &second, <[String]>::is_empty);
    assert_eq!(ask(&second, &[], false).1.len(), 2);
    // Not even over a restart.
    let again = identity(directory.path(), "n2");
    assert_eq!(again.denied().len(), 2);

    // The list is made again from what a node knows.
    second.list_again().unwrap();
    hear(&one, &first, listed);
    assert_eq!(
        ask(&second, &[THIEF], true),
        (1, vec!["serial a".to_owned()])
    );
    // A list that was read before does not bring it back.
    second.hear(&stale);
    assert_eq!(ask(&second, &[], false).1, ["serial a"]);
    assert_eq!(ask(&first, &[], false).1.len(), 2, "each node by itself");

    let refused = first.answer(&request::Deny {
        entries: vec!["thief".to_owned()],
        take_back: false,
    });
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("denies no certificate")
    );
}
