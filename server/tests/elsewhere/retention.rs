//! Retention on a node that holds none of the copies.

use permafrost_clustered::{Registered, Registry as _};
use permafrost_protocol::control::{
    Checkpoint, ErrorCode, Pruned, ReportedError as _, RetentionRule, request,
};

use super::support::{JOB, Site, memory};

fn prune(site: &Site) -> Pruned {
    let prune = request::Prune::default();
    site.nodes[0].store.prune(&prune).unwrap()
}

fn left(site: &Site) -> Vec<u64> {
    let listed = site.registry.list(JOB).unwrap().into_iter();
    listed.map(|entry| entry.checkpoint.generation).collect()
}

#[test]
fn what_a_holder_confirms_goes_and_entries_that_no_node_knows_of_push_nothing_out() {
    let site = Site::new(&[("me", "", "r1"), ("holder", "", "r2")]);
    let memory = memory(20);
    for _ in 0..3 {
        site.dump(1, &memory);
    }
    let set = request::SetRetention {
        rule: Some(RetentionRule {
            namespace: "team".to_owned(),
            keep_last: Some(1),
            ..RetentionRule::default()
        }),
        remove: false,
    };
    site.nodes[0].store.set_retention(&set).unwrap();

    let newest = site.registry.find(JOB, 0).unwrap().unwrap();
    let forged = Registered {
        checkpoint: Checkpoint {
            generation: 99,
            id: "f".repeat(32),
            ..newest.checkpoint.clone()
        },
        ..newest.clone()
    };
    site.registry.publish(&forged, None).unwrap();
    let done = prune(&site);
    let refused = done.generations.iter().filter(|one| !one.error.is_empty());
    assert_eq!((done.removed, refused.count()), (0, 3), "{done:?}");
    assert_eq!(left(&site), [1, 2, 3, 99]);

    site.registry.withdraw(&forged.checkpoint).unwrap();
    // An entry that says that a generation is older than its manifest does.
    let mut older = site.registry.find(JOB, 1).unwrap().unwrap();
    site.registry.withdraw(&older.checkpoint).unwrap();
    older.checkpoint.created_unix_ms = 1;
    site.registry.publish(&older, None).unwrap();
    let done = prune(&site);
    assert_eq!(done.removed, 1, "{done:?}");
    assert!(done.generations[0].error.contains("listed"), "{done:?}");
    assert!(!left(&site).contains(&2));
}

#[test]
fn a_quota_counts_what_all_nodes_hold_and_each_checkpoint_once() {
    let site = Site::new(&[("me", "", "r1"), ("holder", "", "r2")]);
    let memory = memory(20);
    let limit = |over_quota: &str| request::SetRetention {
        rule: Some(RetentionRule {
            namespace: "team".to_owned(),
            max_checkpoints: Some(2),
            over_quota: over_quota.to_owned(),
            ..RetentionRule::default()
        }),
        remove: false,
    };
    let store = &site.nodes[0].store;
    store.set_retention(&limit("refuse")).unwrap();
    let first = site.dump(1, &memory);
    site.copy(1, 0, &first);
    store.make_room(JOB, 0, false).unwrap();
    site.dump(1, &memory);
    // As it was counted last; one that would be refused by that is counted anew.
    store.apply_retention(false, &|| false).unwrap();
    let refused = store.make_room(JOB, 0, false).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::NoSpace, "{refused}");
    assert_eq!(store.policy_usage()[0].used.checkpoints, 2);
    store.make_room("other/job", 0, false).unwrap();
    store.set_retention(&limit("remove-oldest")).unwrap();
    store.make_room(JOB, 0, false).unwrap();
    assert_eq!(left(&site), [2]);
}
