//! Operations of an operator: draining, removing and readmitting nodes, and rebuilding the registry in other data of
//! etcd.

use permafrost_protocol::control::ErrorCode;
use permafrost_protocol::control::ReportedError as _;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_cluster::rebuild::{self, Copy, NodeInventory};
use permafrost_cluster::{Cluster, ClusterConfig, Inventories, Operate, Operator};
use permafrost_clustered::{Acquaintance, KnownData, Registered, Registry as _};
use permafrost_protocol::control::{NodeList, NodeProbe, NodeStatus, request};
use permafrost_protocol::wire::message::{Verified, request as to_peer};
use permafrost_store::{Holding, StoreError};

use crate::support::{Bench, entry, until};

/// Inventories as fixed data, and verification results: all checkpoints are verified but those with these ids.
#[derive(Default)]
struct Written(HashMap<String, Vec<Copy>>, Arc<Mutex<Vec<String>>>);

impl Inventories for Written {
    fn inventory(&self, node: &str) -> Result<NodeInventory, StoreError> {
        let copies = self.0.get(node).cloned();
        copies
            .map(|copies| NodeInventory {
                node: node.to_owned(),
                copies,
            })
            .ok_or_else(|| StoreError::ReadOnly {
                reason: format!("{node} is silent"),
            })
    }

    fn verify(&self, _: &str, asked: to_peer::Verify) -> Result<Verified, StoreError> {
        let unread = self.1.lock();
        let whole = asked.checkpoints.into_iter();
        Ok(Verified {
            whole: whole.filter(|id| !unread.contains(id)).collect(),
            ..Verified::default()
        })
    }

    fn probe(&self, node: &str) -> NodeProbe {
        NodeProbe {
            clock_ahead_ms: Some(if node == "n2" { 7_200_000 } else { 0 }),
            ..NodeProbe::default()
        }
    }
}

#[test]
fn nodes_and_members_of_the_registry_are_asked_only_on_request() {
    let Some(bench) = Bench::new("cluster probe", 1) else {
        return;
    };
    let (one, _two) = (bench.join("n1"), bench.join("n2"));
    let operator = operator(&one);
    until("both are seen", || {
        let list = look(&operator, "").unwrap();
        list.nodes.iter().filter(|node| node.live).count() == 2
    });
    let plain = look(&operator, "").unwrap();
    assert!(plain.registry.is_empty() && plain.nodes.iter().all(|node| node.probe.is_none()));
    let probed = operator.nodes(&request::Nodes {
        name: "n2".to_owned(),
        probe: true,
    });
    let probed = probed.unwrap();
    let [node] = probed.nodes.as_slice() else {
        panic!("{probed:?}");
    };
    let ahead = node.probe.as_ref().and_then(|probe| probe.clock_ahead_ms);
    assert_eq!(ahead, Some(7_200_000));
    let [member] = probed.registry.as_slice() else {
        panic!("{:?}", probed.registry);
    };
    assert!(member.version.starts_with("3."), "{member:?}");
    assert!(
        member.round_trip_us > 0 && member.error.is_empty(),
        "{member:?}"
    );
}

fn operator(cluster: &Cluster) -> Operator {
    cluster.operator(Arc::new(Written::default()), 2)
}

fn held(generation: u64, id: &str, nodes: &[&str]) -> Registered {
    let mut entry = entry("j", generation, id);
    entry.checkpoint.memory_bytes = 100;
    entry.nodes = nodes.iter().map(|&name| name.to_owned()).collect();
    entry
}

fn look(operator: &Operator, name: &str) -> Result<NodeList, StoreError> {
    operator.nodes(&request::Nodes {
        name: name.to_owned(),
        ..request::Nodes::default()
    })
}

fn set(
    operator: &Operator,
    name: &str,
    state: &str,
    force: bool,
) -> Result<NodeStatus, StoreError> {
    let list = operator.set_node(&request::SetNode {
        name: name.to_owned(),
        state: state.to_owned(),
        force,
    })?;
    assert_eq!(list.nodes.len(), 1);
    Ok(list.nodes.into_iter().next().unwrap())
}

#[test]
fn a_node_is_drained_removed_and_taken_back() {
    let Some(bench) = Bench::new("cluster operating", 1) else {
        return;
    };
    let (one, two, three) = (bench.join("n1"), bench.join("n2"), bench.join("n3"));
    let registry = one.registry();
    registry
        .publish(&held(1, "x", &["n2", "n3"]), None)
        .unwrap();
    registry.publish(&held(2, "y", &["n2"]), None).unwrap();
    let operator = operator(&one);
    until("all are seen and one leads", || {
        let list = look(&operator, "").unwrap();
        list.nodes.iter().filter(|node| node.live).count() == 3 && !list.leader.is_empty()
    });
    let list = look(&operator, "").unwrap();
    assert_eq!(list.answered_by, "n1");
    assert_eq!(Some(&list.cluster), one.id().as_ref());
    assert_eq!(two.id(), one.id());
    assert_eq!(
        (list.checkpoints, list.under_replicated, list.stranded),
        (Some(2), Some(1), Some(0))
    );
    assert!(list.age_ms.unwrap() < 10_000);
    assert!(look(&operator, "n9").is_err_and(|error| error.code() == ErrorCode::NotFound));
    assert!(
        set(&operator, "n9", "drained", false)
            .is_err_and(|error| error.code() == ErrorCode::NotFound)
    );
    assert!(
        set(&operator, "n2", "gone", false).is_err_and(|error| error.code() == ErrorCode::Invalid)
    );

    // Alive and not drained: not removed.
    let refused = set(&operator, "n2", "removed", false).unwrap_err();
    assert!(refused.code() == ErrorCode::Conflict, "{refused}");
    let drained = set(&operator, "n2", "drained", false).unwrap();
    assert_eq!((drained.live, drained.state.as_str()), (true, "drained"));
    assert_eq!(
        (drained.checkpoints, drained.needed, drained.needed_bytes),
        (Some(2), Some(2), Some(200))
    );
    assert_eq!(drained.only_here_names, ["j@2"]);
    // The only one that has it: not removed.
    let refused = set(&operator, "n2", "removed", false).unwrap_err();
    assert!(refused.to_string().contains("j@2"), "{refused}");

    // As repair would.
    registry
        .set_holder(&held(1, "x", &[]).checkpoint, "n1", true)
        .unwrap();
    registry
        .set_holder(&held(2, "y", &[]).checkpoint, "n1", true)
        .unwrap();
    registry
        .set_holder(&held(2, "y", &[]).checkpoint, "n3", true)
        .unwrap();
    let lock = two.registry().lock_job("other").unwrap();
    let drained = look(&operator, "n2").unwrap().nodes.remove(0);
    assert_eq!(
        (drained.checkpoints, drained.needed, drained.only_here),
        (Some(2), Some(0), Some(0))
    );
    let removed = set(&operator, "n2", "removed", false).unwrap();
    assert_eq!((removed.live, removed.state.as_str()), (false, "removed"));

    // It may not act, whatever it believes; and soon it knows. Its lock is free.
    let late = two.registry().publish(&entry("j", 3, "late"), None);
    assert!(
        late.as_ref()
            .is_err_and(|error| error.code() == ErrorCode::Unavailable),
        "{late:?}"
    );
    drop(registry.lock_job("other").unwrap());
    until("it knows", || {
        let refused = two.fence().check().err();
        refused.is_some_and(|refused| refused.to_string().contains("removed"))
    });
    drop(lock);
    assert_eq!(look(&operator, "n2").unwrap().nodes[0].state, "removed");
    // What it holds stays listed with it.
    assert_eq!(
        registry.find("j", 2).unwrap().unwrap().nodes,
        ["n2", "n1", "n3"]
    );

    // Taken back, it registers by itself.
    set(&operator, "n2", "active", false).unwrap();
    until("it is back", || two.fence().check().is_ok());
    until("it is seen", || {
        let node = look(&operator, "n2").unwrap().nodes.remove(0);
        node.live && node.state == "active"
    });
    drop(three);
}

#[test]
fn the_last_good_copy_does_not_go_with_its_node() {
    let Some(bench) = Bench::new("cluster damaged", 1) else {
        return;
    };
    let (one, two) = (bench.join("n1"), bench.join("n2"));
    let registry = one.registry();
    let x = held(1, "x", &["n1", "n2"]);
    registry.publish(&x, None).unwrap();
    let unread = Arc::new(Mutex::new(Vec::new()));
    let written = Written(HashMap::new(), Arc::clone(&unread));
    let operator = one.operator(Arc::new(written), 2);
    until("both are seen", || {
        let list = look(&operator, "").unwrap();
        list.nodes.iter().filter(|node| node.live).count() == 2
    });
    // One does not know of itself that it is damaged before it was read: nobody relies on it.
    unread.lock().push("x".to_owned());
    let drained = set(&operator, "n2", "drained", false).unwrap();
    assert_eq!((drained.needed, drained.unverified), (Some(0), Some(1)));
    let refused = set(&operator, "n2", "removed", false).unwrap_err();
    assert!(refused.code() == ErrorCode::Unavailable);
    assert!(refused.to_string().contains("j@1"), "{refused}");
    // It was read, and is damaged.
    registry.set_damaged(&x.checkpoint, "n1", true).unwrap();
    registry.set_damaged(&x.checkpoint, "n9", true).unwrap();
    assert_eq!(registry.find("j", 1).unwrap().unwrap().damaged, ["n1"]);
    unread.lock().clear();
    let list = look(&operator, "").unwrap();
    let counted = (list.under_replicated, list.stranded, list.damaged);
    assert_eq!(counted, (Some(1), Some(0), Some(1)));
    let drained = look(&operator, "n2").unwrap().nodes.remove(0);
    let counted = (drained.needed, drained.stuck, drained.only_here);
    assert_eq!(counted, (Some(1), Some(1), Some(1)));
    let refused = set(&operator, "n2", "removed", false).unwrap_err();
    assert!(refused.code() == ErrorCode::Conflict);
    assert!(refused.to_string().contains("j@1"), "{refused}");
    // Healed and read.
    registry.set_damaged(&x.checkpoint, "n1", false).unwrap();
    let drained = look(&operator, "n2").unwrap().nodes.remove(0);
    assert_eq!((drained.needed, drained.unverified), (Some(0), Some(0)));
    // Once more, and it is removed by force: what is lost is said.
    registry.set_damaged(&x.checkpoint, "n1", true).unwrap();
    let removed = set(&operator, "n2", "removed", true).unwrap();
    assert_eq!(removed.only_here_names, ["j@1"]);
    // Who is no holder any more has no damaged copy either.
    registry.set_holder(&x.checkpoint, "n1", false).unwrap();
    assert!(registry.find("j", 1).unwrap().unwrap().damaged.is_empty());
    drop(two);
}

#[test]
fn a_dead_holder_of_the_last_copy_is_removed_only_by_force() {
    let Some(bench) = Bench::new("cluster lost disk", 1) else {
        return;
    };
    let (one, two) = (bench.join("n1"), bench.join("n2"));
    let registry = one.registry();
    registry
        .publish(&held(1, "x", &["n1", "n2"]), None)
        .unwrap();
    registry.publish(&held(2, "y", &["n2"]), None).unwrap();
    let operator = operator(&one);
    until("both are seen", || {
        look(&operator, "")
            .unwrap()
            .nodes
            .iter()
            .all(|node| node.live)
            && look(&operator, "n2").is_ok()
    });
    bench.runtime.block_on(two.leave());
    until("it is seen to be dead", || {
        !look(&operator, "n2").unwrap().nodes[0].live
    });
    let list = look(&operator, "").unwrap();
    assert_eq!((list.under_replicated, list.stranded), (Some(2), Some(1)));
    let refused = set(&operator, "n2", "removed", false).unwrap_err();
    assert!(
        refused.to_string().contains("j@2") && !refused.to_string().contains("j@1"),
        "{refused}"
    );
    let removed = set(&operator, "n2", "removed", true).unwrap();
    assert_eq!(removed.only_here, Some(1));
    // Stranded, and not forgotten.
    assert_eq!(registry.find("j", 2).unwrap().unwrap().nodes, ["n2"]);
    assert_eq!(look(&operator, "").unwrap().stranded, Some(1));
    // Removing what is removed is no news.
    set(&operator, "n2", "removed", false).unwrap();
}

#[test]
fn nodes_notice_that_etcd_has_other_data_and_a_rebuild_puts_it_right() {
    let Some(mut bench) = Bench::new("cluster other data", 1) else {
        return;
    };
    let known = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let known = known.each_ref().map(|dir| KnownData::new(dir.path()));
    let config = ClusterConfig {
        call_deadline: Duration::from_secs(4),
        ..bench.config()
    };
    let one = bench.try_join(&config, "n1", "r1").unwrap();
    let two = bench.join("n2");
    let (registry, other) = (one.registry(), two.registry());
    let first = registry.mark().unwrap();
    assert_eq!(one.id(), Some(first.id.clone()));
    assert_eq!(other.mark().unwrap().id, first.id);
    for known in &known {
        assert_eq!(known.check(&first).unwrap(), Acquaintance::New);
        known.accept(&first).unwrap();
    }
    assert_eq!(registry.reserve_generation("j").unwrap(), 1);
    let x = held(1, "x", &["n1", "n2"]);
    registry.publish(&x, None).unwrap();
    let later = registry.mark().unwrap();
    assert!(later.revision > first.revision);
    assert_eq!(known[0].check(&later).unwrap(), Acquaintance::Known);
    let bound = registry.bound_to(&later);
    assert_eq!(bound.list("").unwrap(), std::slice::from_ref(&x));

    // Everything in it is gone, as with a new etcd under the same addresses.
    let client = bench.etcd.addresses()[0].clone();
    bench.runtime.block_on(async {
        let mut client = etcd_client::Client::connect([client], None).await.unwrap();
        let all = etcd_client::DeleteOptions::new().with_all_keys();
        client.delete("", Some(all)).await.unwrap();
    });
    // Whoever looked before does not take the empty list for true.
    let refused = bound.list("").unwrap_err();
    assert!(refused.code() == ErrorCode::Unavailable, "{refused}");
    until("both register in it", || {
        let id = one.id();
        id != Some(first.id.clone())
            && id == two.id()
            && one.fence().check().is_ok()
            && two.fence().check().is_ok()
            && registry.mark().is_ok()
    });
    let second = registry.mark().unwrap();
    assert_ne!(second.id, first.id);
    for known in &known {
        assert!(matches!(
            known.check(&second).unwrap(),
            Acquaintance::Different(_)
        ));
    }
    assert!(bound.list("").is_err(), "the list of other data");

    // Rebuilt from what the nodes hold. The third has nothing to say.
    let three = bench.join("n3");
    let copy = |entry: &Registered, is_published| Copy {
        checkpoint: entry.checkpoint.clone(),
        content_digest: entry.content_digest,
        is_published,
        is_damaged: false,
    };
    let mut z = held(4, "z", &[]);
    z.content_digest = [9; 32];
    let mut doubted = copy(&z, true);
    doubted.content_digest = [8; 32];
    let unlisted = copy(&held(7, "u", &[]), false);
    let written = Written(
        HashMap::from([
            (
                "n1".to_owned(),
                vec![copy(&x, true), copy(&z, true), unlisted],
            ),
            ("n2".to_owned(), vec![copy(&x, true), doubted]),
        ]),
        Arc::default(),
    );
    let operator = one.operator(Arc::new(written), 3);
    until("all are seen", || {
        look(&operator, "").is_ok_and(|list| list.nodes.len() == 3)
    });
    let planned = operator
        .rebuild(&request::Rebuild {
            dry_run: true,
            ..request::Rebuild::default()
        })
        .unwrap();
    assert!(
        registry.list("").unwrap().is_empty(),
        "a dry run did something"
    );
    let rebuilt = operator.rebuild(&request::Rebuild::default()).unwrap();
    assert_eq!(planned.listed, rebuilt.listed);
    assert_eq!(rebuilt.cluster, second.id);
    assert_eq!(rebuilt.nodes, ["n1", "n2"]);
    assert_eq!(rebuilt.missing.len(), 1);
    assert!(rebuilt.missing[0].name == "n3" && rebuilt.missing[0].why.contains("silent"));
    let doubts: Vec<_> = rebuilt
        .doubts
        .iter()
        .map(|doubt| (doubt.node.as_str(), doubt.checkpoint.as_str()))
        .collect();
    assert_eq!(doubts, [("n1", "j@4"), ("n2", "j@4")]);
    assert!(rebuilt.busy.is_empty());
    let listed = registry.list("").unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(
        (&listed[0].nodes, listed[0].wanted_copies),
        (&vec!["n1".to_owned(), "n2".to_owned()], 3)
    );
    assert_eq!(
        registry.reserve_generation("j").unwrap(),
        8,
        "a number that was used"
    );
    // Again, it finds nothing to do.
    let again = operator.rebuild(&request::Rebuild::default()).unwrap();
    assert!(again.listed.is_empty() && again.copies_added == 0);

    // A node's own numbers are kept, rebuilt or not.
    let old = Holding {
        checkpoint: entry("only-here", 42, "old").checkpoint,
        content_digest: [1; 32],
        published: true,
        provisional: false,
        damaged: false,
    };
    rebuild::keep_numbers(&registry, &[old]).unwrap();
    assert_eq!(registry.reserve_generation("only-here").unwrap(), 43);

    // A sweep finds everything listed, and takes the new data.
    let now = registry.mark().unwrap();
    known[0].accept(&now).unwrap();
    assert_eq!(known[0].check(&now).unwrap(), Acquaintance::Known);
    assert_eq!(registry.bound_to(&now).list("").unwrap().len(), 1);
    drop(three);

    // While etcd is away the nodes are told as last seen, and nothing is counted.
    bench.etcd.kill(0).unwrap();
    let list = look(&operator, "").unwrap();
    assert_eq!(list.nodes.len(), 3);
    assert_eq!((list.checkpoints, list.nodes[0].needed), (None, None));
}
