//! Number of copies that suffices, and the consequences of too few.

use std::time::Duration;

use permafrost_clustered::Durability;

use super::fakes::{Pages, Whole, World, dump, fenced, page, request, unavailable};

fn pages() -> Pages {
    (0..100).map(|n| (n, page(n))).collect()
}

/// Checks that nothing is left on any node, and that the next dump works.
fn nothing_but(world: &World, free: &[u64]) {
    assert!(world.registry.entries().is_empty());
    for (node, free) in world.nodes().zip(free) {
        assert_eq!(node.checkpoints(), 0);
        assert_eq!(node.free_bytes(), *free);
        assert!(node.store.list(None).unwrap().is_empty());
    }
    *world.faults.faults() = Default::default();
    dump(&world.origin.store, "job", &pages()).unwrap();
}

#[test]
fn copies_that_fail_count_as_the_session_asked() {
    let cases = [
        (Durability::Local, 2, true),
        (Durability::Quorum, 1, true),
        (Durability::Quorum, 2, false),
        (Durability::All, 1, false),
        (Durability::All, 0, true),
    ];
    for (durability, failing, enough) in cases {
        for corrupt in [false, true] {
            let world = World::new(2, durability);
            let free: Vec<_> = world.nodes().map(|node| node.free_bytes()).collect();
            {
                let mut faults = world.faults.faults();
                let failing = (0..failing).collect();
                if corrupt {
                    faults.corrupt = failing;
                } else {
                    faults.broken = failing;
                }
            }
            let dumped = dump(&world.origin.store, "job", &pages());
            let case = format!("{durability:?}, {failing} failing, corrupt: {corrupt}");
            assert_eq!(dumped.is_ok(), enough, "{case}: {dumped:?}");
            match dumped {
                Ok(sealed) => {
                    assert_eq!(sealed.nodes.len(), 3 - failing, "{case}");
                    for (n, replica) in world.replicas.iter().enumerate() {
                        assert_eq!(replica.checkpoints(), usize::from(n >= failing), "{case}");
                    }
                    assert_eq!(Whole::of(&world.origin.store, &sealed.id).pages(), pages());
                }
                Err(_) => nothing_but(&world, &free),
            }
        }
    }
}

#[test]
fn what_cannot_be_published_is_rolled_back_on_all() {
    for (refusal, at_once) in [(unavailable as fn() -> _, false), (fenced, true)] {
        let world = World::new(2, Durability::All);
        let free: Vec<_> = world.nodes().map(|node| node.free_bytes()).collect();
        world.faults.faults().refuse_publish = Some(refusal);
        let error = dump(&world.origin.store, "job", &pages()).unwrap_err();
        assert!(error.contains(&refusal().to_string()), "{error}");
        if at_once {
            assert!(world.nodes().all(|node| node.checkpoints() == 0));
        }
        // Of a registry that did not answer it is only known later.
        *world.faults.faults() = Default::default();
        for node in world.nodes() {
            node.store.settle(Duration::ZERO).unwrap();
        }
        nothing_but(&world, &free);
    }
}

#[test]
fn a_publication_whose_answer_is_lost_counts() {
    let world = World::new(1, Durability::All);
    world.faults.faults().lose_answer = true;
    let sealed = dump(&world.origin.store, "job", &pages()).unwrap();
    for node in world.nodes() {
        assert!(node.store.local().held()[0].published);
        assert_eq!(node.store.local().held()[0].checkpoint.id, sealed.id);
    }
}

#[test]
fn a_job_is_locked_on_the_registry() {
    use permafrost_clustered::Registry as _;

    let world = World::new(1, Durability::All);
    let lock = world.registry.lock_job("job").unwrap();
    assert!(dump(&world.origin.store, "job", &pages()).is_err());
    drop(lock);
    dump(&world.origin.store, "job", &pages()).unwrap();
    dump(&world.origin.store, "job", &pages()).unwrap();
}

#[test]
fn copies_of_a_dump_that_cannot_be_sealed_here_are_rolled_back() {
    let world = World::new(2, Durability::Local);
    world.faults.faults().broken = (0..2).collect();
    dump(&world.origin.store, "job", &pages()).unwrap();
    *world.faults.faults() = Default::default();
    // The number is free on the copies' nodes, which seal, and taken here.
    world.registry.forget_reserved();
    let error = dump(&world.origin.store, "job", &pages()).unwrap_err();
    assert!(error.contains("job@1"), "{error}");
    let held: Vec<_> = world.nodes().map(|node| node.checkpoints()).collect();
    assert_eq!(held, [1, 0, 0]);
    dump(&world.origin.store, "job", &pages()).unwrap();
    assert!(world.nodes().all(|node| node.checkpoints() > 0));
}

#[test]
fn a_generation_is_reserved_before_the_task_is_frozen() {
    let world = World::new(1, Durability::All);
    let store = &world.origin.store;
    let session = store.open_session(request("job", true)).unwrap();
    assert_eq!(world.registry.reserved("job"), 1);
    store.abort_session(&session.id).unwrap();
    // A gap in the numbers.
    assert_eq!(dump(store, "job", &pages()).unwrap().generation, 2);
}
