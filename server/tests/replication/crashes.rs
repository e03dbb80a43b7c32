//! Crashes of the origin at each step; the registry decides the outcome.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use permafrost_clustered::Durability;

use super::fakes::{Pages, Step, Whole, World, dump, page, unavailable};

fn pages() -> Pages {
    (0..100).map(|n| (n, page(n))).collect()
}

#[test]
fn at_every_step_there_is_a_whole_checkpoint_or_none() {
    let steps = [
        (Step::Reserve, 0),
        (Step::Close, 0),
        (Step::Prepare, 0),
        (Step::Commit(0), 0),
        (Step::Commit(1), 1),
        (Step::SealedHere, 2),
        (Step::Commit(2), 3),
        (Step::BeforePublish, 3),
        (Step::AfterPublish, 3),
        (Step::Published, 3),
    ];
    for (step, sealed) in steps {
        let world = World::new(2, Durability::All);
        let free: Vec<_> = world.nodes().map(|node| node.free_bytes()).collect();
        world.faults.faults().die_at = Some(step);
        let died = catch_unwind(AssertUnwindSafe(|| {
            dump(&world.origin.store, "job", &pages())
        }));
        assert!(died.is_err(), "{step:?}");
        world.faults.faults().die_at = None;

        let listed = world.registry.entries();
        let survives = matches!(step, Step::AfterPublish | Step::Published);
        assert_eq!(listed.len(), usize::from(survives), "{step:?}");
        let held: usize = world.nodes().map(|node| node.checkpoints()).sum();
        assert_eq!(held, sealed, "{step:?}");
        // What is not listed is not seen, on any node.
        for node in world.nodes() {
            assert_eq!(node.store.list(None).unwrap().len(), usize::from(survives));
            assert_eq!(node.store.show("job").is_ok(), survives, "{step:?}");
        }

        // Young ones may yet be published, and are left alone; without a registry nobody knows.
        for node in world.nodes() {
            assert_eq!(
                node.store.settle(Duration::from_secs(3600)).unwrap(),
                Default::default()
            );
        }
        world.faults.faults().silent = true;
        for node in world.nodes() {
            let unpublished = node.store.unpublished(Duration::ZERO).len();
            assert_eq!(
                node.store.settle(Duration::ZERO).is_err(),
                unpublished > 0,
                "{step:?}"
            );
        }
        world.faults.faults().silent = false;
        assert_eq!(
            world.nodes().map(|node| node.checkpoints()).sum::<usize>(),
            sealed
        );

        for (node, free) in world.nodes().zip(&free) {
            node.store.settle(Duration::ZERO).unwrap();
            assert!(node.store.unpublished(Duration::ZERO).is_empty());
            if survives {
                assert!(node.store.local().held()[0].published);
                assert_eq!(
                    Whole::of(&node.store, &listed[0].checkpoint.id).pages(),
                    pages()
                );
                assert!(
                    node.store
                        .local()
                        .roll_back(&listed[0].checkpoint.id, false)
                        .is_err()
                );
            } else {
                assert_eq!(
                    (node.checkpoints(), node.free_bytes()),
                    (0, *free),
                    "{step:?}"
                );
            }
        }
        // The job is free, and its next dump compares with what survived.
        let next = dump(&world.origin.store, "job", &pages()).unwrap();
        assert_eq!(next.parent_generation, u64::from(survives), "{step:?}");
    }
}

#[test]
fn an_unknown_outcome_is_left_to_the_registry() {
    for lose_answer in [false, true] {
        let world = World::new(1, Durability::All);
        dump(&world.origin.store, "job", &pages()).unwrap();
        let session = world
            .origin
            .store
            .open_session(super::fakes::request("job", true));
        let session = session.unwrap();
        let mut sink = session
            .start(world.origin.store.local(), Box::new(|| {}))
            .unwrap();
        use permafrost_criu::frontend::PageSink as _;
        let space = permafrost_protocol::pageserver::SpaceId::process(7);
        super::fakes::send(&mut sink, space, &pages()).unwrap();
        sink.close().unwrap();
        {
            let mut faults = world.faults.faults();
            faults.silent = true;
            faults.lose_answer = lose_answer;
            faults.refuse_publish = (!lose_answer).then_some(unavailable);
        }
        let images = super::fakes::images(&[7]);
        world
            .origin
            .store
            .seal_session(&session.id, images)
            .unwrap_err();
        for node in world.nodes() {
            assert_eq!(node.checkpoints(), 2, "nobody may drop what may be listed");
        }
        *world.faults.faults() = Default::default();
        for node in world.nodes() {
            let settled = node.store.settle(Duration::ZERO).unwrap();
            assert_eq!(settled.published.len(), usize::from(lose_answer));
            assert_eq!(settled.dropped.len(), usize::from(!lose_answer));
            assert_eq!(node.checkpoints(), 1 + usize::from(lose_answer));
        }
    }
}
