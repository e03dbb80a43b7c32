//! Content that arrives on the replicas.

use permafrost_clustered::Durability;
use permafrost_protocol::control::ReportedError;

use super::fakes::{Pages, Seen, Whole, World, dump, name, page};

#[test]
fn copies_hold_what_the_origin_holds_under_the_same_id() {
    let world = World::new(2, Durability::All);
    let pages = Pages::from([(16, page(1)), (17, page(0)), (18, page(2)), (4000, page(0))]);
    let sealed = dump(&world.origin.store, "job", &pages).unwrap();
    assert_eq!(
        world.seen(),
        Seen {
            pages: 2,
            zero: 2,
            parent: 0
        }
    );

    let own = Whole::of(&world.origin.store, &sealed.id);
    assert_eq!(own.pages(), pages);
    for replica in &world.replicas {
        assert_eq!(Whole::of(&replica.store, &sealed.id), own);
        let held = replica.store.local().held();
        assert_eq!(held.len(), 1);
        assert!(held[0].published && !held[0].provisional);
        let (theirs, ours) = (&held[0].checkpoint, &sealed);
        assert_eq!(
            (
                &theirs.job,
                theirs.generation,
                theirs.created_unix_ms,
                &theirs.session
            ),
            (
                &ours.job,
                ours.generation,
                ours.created_unix_ms,
                &ours.session
            ),
        );
    }
    let nodes = ["origin".to_owned(), name(0), name(1)];
    assert_eq!(sealed.nodes, nodes);
    let listed = world
        .origin
        .store
        .list(Some(&"job".parse().unwrap()))
        .unwrap();
    assert_eq!(
        (listed[0].nodes.as_slice(), listed[0].copies_wanted),
        (&nodes[..], 3)
    );
    let shown = world.replicas[1].store.show("job@1").unwrap();
    assert_eq!(shown.checkpoint.unwrap().id, sealed.id);
}

#[test]
fn pages_in_the_parent_are_not_sent_again() {
    let mut world = World::new(1, Durability::All);
    let mut pages: Pages = (0..200).map(|n| (n, page(n + 1))).collect();
    dump(&world.origin.store, "job", &pages).unwrap();
    world.seen();
    pages.insert(7, page(1000));
    pages.insert(300, page(1001));
    pages.insert(9, page(0));
    let second = dump(&world.origin.store, "job", &pages).unwrap();
    assert_eq!(
        world.seen(),
        Seen {
            pages: 2,
            zero: 1,
            parent: 198
        }
    );
    let own = Whole::of(&world.origin.store, &second.id);
    assert_eq!(own.pages(), pages);
    assert_eq!(Whole::of(&world.replicas[0].store, &second.id), own);

    // To a node without the parent everything goes as pages.
    world.replace(0);
    let third = dump(&world.origin.store, "job", &pages).unwrap();
    assert_eq!(
        world.seen(),
        Seen {
            pages: 200,
            zero: 1,
            parent: 0
        }
    );
    assert_eq!(third.parent_generation, 2);
    let own = Whole::of(&world.origin.store, &third.id);
    assert_eq!(Whole::of(&world.replicas[0].store, &third.id), own);
}

#[test]
fn a_parked_dump_is_parked_on_all() {
    use permafrost_criu::frontend::PageSink as _;
    use permafrost_protocol::pageserver::SpaceId;
    use permafrost_store::Adoption;

    let world = World::new(2, Durability::All);
    let pages = Pages::from([(1, page(1)), (2, page(0))]);
    let store = &world.origin.store;
    let session = store
        .open_session(super::fakes::request("", false))
        .unwrap();
    let mut sink = session.start(store.local(), Box::new(|| {})).unwrap();
    super::fakes::send(&mut sink, SpaceId::process(3), &pages).unwrap();
    sink.close().unwrap();
    let entries = world.registry.entries();
    assert_eq!(entries.len(), 1);
    let parked = &entries[0].checkpoint;
    assert_eq!(
        (parked.kind.as_str(), &parked.session),
        ("parked", &session.id)
    );
    for node in world.nodes() {
        assert_eq!(Whole::of(&node.store, &parked.id).pages(), pages);
        assert!(node.store.local().held()[0].published);
    }
    let adoption = Adoption {
        ignore_times: true,
        ..Adoption::into_job("job")
    };
    let refused = store
        .adopt(&adoption, super::fakes::images(&[3]))
        .unwrap_err();
    assert!(
        refused.to_reply().hint.contains("permafrost dump"),
        "{refused}"
    );
}

#[test]
fn a_worker_with_a_new_pid_shares_with_its_predecessor_everywhere() {
    use permafrost_criu::frontend::PageSink as _;
    use permafrost_protocol::manifest::{DumpedProcess, Origin};
    use permafrost_protocol::pageserver::SpaceId;

    let world = World::new(2, Durability::All);
    let store = &world.origin.store;
    let memory: Pages = (1..200).map(|index| (index, page(index))).collect();
    let process = |pid, parent| DumpedProcess {
        pid,
        parent,
        program: "nginx".to_owned(),
        executable: "/usr/sbin/nginx".to_owned(),
        mappings: vec![1, 200],
    };
    let dump = |worker: u32, executable: &str| {
        let mut request = super::fakes::request("job", true);
        let worker_of = DumpedProcess {
            executable: executable.to_owned(),
            ..process(worker, 10)
        };
        request.origin = Some(Origin {
            processes: vec![process(10, 0), worker_of],
            ..Origin::default()
        });
        let session = store.open_session(request).unwrap();
        let mut sink = session.start(store.local(), Box::new(|| {})).unwrap();
        super::fakes::send(&mut sink, SpaceId::process(worker), &memory).unwrap();
        // CRIU is told of no parent that it has no images of.
        assert!(!sink.has_parent(SpaceId::process(worker)).unwrap());
        sink.close().unwrap();
        store
            .seal_session(&session.id, super::fakes::images(&[worker]))
            .unwrap()
    };
    let first = dump(11, "/usr/sbin/nginx");
    assert_eq!(first.parent_bytes, 0);
    let second = dump(21, "/usr/sbin/nginx");
    assert_eq!(second.parent_bytes, second.memory_bytes);
    let own = Whole::of(store, &second.id);
    assert_eq!(own.pages(), memory);
    for node in world.nodes() {
        assert_eq!(Whole::of(&node.store, &second.id), own);
    }
    // Another program's memory is not compared with it, whatever it holds.
    assert_eq!(dump(31, "/bin/other").parent_bytes, 0);
}
