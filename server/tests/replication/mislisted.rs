//! A registry that lists a checkpoint under another job: an attacker who can write to etcd must not be able to read
//! the checkpoint.

use permafrost_clustered::{Durability, Registered, Registry as _};
use permafrost_store::ReadingError;
use permafrost_store::StoreError;

use super::fakes::{Pages, World, dump, page};

fn pages(seed: u64) -> Pages {
    (0..20).map(|n| (n, page(seed + n))).collect()
}

#[test]
fn what_is_listed_as_another_jobs_is_neither_read_nor_changed() {
    let world = World::new(1, Durability::All);
    let store = &world.origin.store;
    let victim = dump(store, "team-b/secret", &pages(1)).unwrap();
    let own = dump(store, "team-a/mine", &pages(500)).unwrap();

    // The registry says that the other job's memory is this one's newest checkpoint.
    let mut entries = world.registry.entries().into_iter();
    let entry = entries
        .find(|entry| entry.checkpoint.id == victim.id)
        .unwrap();
    let mut forged = Registered {
        nodes: vec!["origin".to_owned(), "replica-0".to_owned()],
        ..entry
    };
    forged.checkpoint.job = "team-a/mine".to_owned();
    forged.checkpoint.generation = 7;
    world.registry.publish(&forged, None).unwrap();

    for node in world.nodes() {
        let refused = |error: StoreError| {
            let text = error.to_string();
            assert!(
                matches!(error, StoreError::Reading(ReadingError::Mislisted { .. })),
                "{text}"
            );
            assert!(!text.contains("secret"), "{text}");
        };
        refused(node.store.show("team-a/mine").unwrap_err());
        refused(node.store.show("team-a/mine@7").unwrap_err());
        refused(
            node.store
                .verify("team-a/mine", false, &mut |_, _| {})
                .unwrap_err(),
        );
        refused(node.store.pin("team-a/mine@7", true).unwrap_err());
        refused(
            node.store
                .remove(&permafrost_protocol::control::request::Remove {
                    checkpoint: "team-a/mine@7".to_owned(),
                    force: true,
                    last: true,
                    ..Default::default()
                })
                .unwrap_err(),
        );
        assert!(
            node.store.local().damage(&victim.id).is_none(),
            "it is not damaged"
        );
        // What is listed rightly is there as before.
        assert_eq!(
            node.store
                .show("team-b/secret")
                .unwrap()
                .checkpoint
                .unwrap()
                .id,
            victim.id
        );
        node.store
            .show(&format!("team-a/mine@{}", own.generation))
            .unwrap();
    }
    // The job's next dump is not compared with it either.
    let next = dump(store, "team-a/mine", &pages(1)).unwrap();
    let shown = store
        .show(&format!("team-a/mine@{}", next.generation))
        .unwrap();
    let spaces = &shown.manifest.unwrap().spaces;
    assert!(
        spaces.iter().all(|space| space.parent_pages == 0),
        "{spaces:?}"
    );
}
