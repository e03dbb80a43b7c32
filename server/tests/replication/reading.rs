//! A checkpoint read by one node and rebuilt on another, with and without a parent there.

use permafrost_clustered::ClusteredStore;
use permafrost_clustered::Durability;
use permafrost_criu::source::PageRun;
use permafrost_protocol::wire::message::Commit;
use permafrost_store::{CopyDump, CopyRequest, Fetched};

use super::fakes::{Node, Pages, Whole, World, dump, page};

/// Copies pages run by run. Returns how many were sent as pages, as zeros and as the parent's.
fn copy(from: &ClusteredStore, id: &str, parent: &str, to: &mut CopyDump) -> (u64, u64, u64) {
    let fetch = from.local().open_fetch(id, parent).unwrap();
    let mut sent = (0, 0, 0);
    for (place, space) in fetch.manifest().spaces.iter().enumerate() {
        to.space(space.space_id().unwrap(), space.pages_id).unwrap();
        for run in fetch.runs(place, 0, 0) {
            match run.unwrap() {
                Fetched::Own(PageRun::Pages {
                    first_index,
                    flags,
                    bytes,
                }) => {
                    sent.0 += bytes.len() as u64 / 4096;
                    to.pages(first_index, flags, &bytes).unwrap();
                }
                Fetched::Own(PageRun::Zero {
                    first_index,
                    flags,
                    pages,
                }) => {
                    sent.1 += pages;
                    to.zero(first_index, flags, pages).unwrap();
                }
                Fetched::Parent {
                    first_index,
                    flags,
                    pages,
                } => {
                    sent.2 += pages;
                    to.parent(first_index, flags, pages).unwrap();
                }
            }
        }
    }
    to.close().unwrap();
    for image in &fetch.manifest().images {
        to.begin_image(&image.name, image.len_bytes).unwrap();
        let passed = fetch.image(&image.name, |bytes| {
            to.image_data(bytes).map_err(std::io::Error::other)
        });
        passed.unwrap();
    }
    assert_eq!(to.prepare().unwrap(), fetch.content_digest());
    let manifest = fetch.manifest();
    to.commit(&Commit {
        deadline_ms: 0,
        checkpoint: id.to_owned(),
        content_digest: fetch.content_digest().to_vec(),
        job: manifest.job.clone(),
        generation: manifest.generation,
        parent_generation: manifest.parent_generation,
        created_unix_ms: manifest.created_unix_ms,
        kind: manifest.kind,
        origin: manifest.origin.clone(),
        session: manifest.session.clone(),
        taken_by: "node n1".to_owned(),
    })
    .unwrap();
    sent
}

fn open(store: &ClusteredStore, session: &str, parent: &str) -> CopyDump {
    let session = u128::from_str_radix(session, 16).unwrap().to_be_bytes();
    let request = CopyRequest {
        session,
        job: "job".to_owned(),
        parent: parent.to_owned(),
        compared: std::collections::HashMap::new(),
    };
    store.local().open_copy(request).unwrap()
}

#[test]
fn a_new_node_gets_a_copy_and_then_the_difference() {
    let world = World::new(0, Durability::Local);
    let store = &world.origin.store;
    let mut pages: Pages = (0..300).map(|n| (n, page(n + 1))).collect();
    let first = dump(store, "job", &pages).unwrap();
    pages.insert(100, page(5000));
    pages.insert(101, page(5001));
    pages.insert(200, page(0));
    pages.insert(900, page(0));
    let second = dump(store, "job", &pages).unwrap();

    let new = Node::new(None);
    let mut to = open(&new.store, &first.session, "");
    assert_eq!(copy(store, &first.id, "", &mut to), (300, 0, 0));
    let mut to = open(&new.store, &second.session, &first.id);
    assert!(to.has_parent());
    assert_eq!(copy(store, &second.id, &first.id, &mut to), (2, 2, 297));
    for id in [&first.id, &second.id] {
        assert_eq!(Whole::of(&new.store, id), Whole::of(store, id));
    }

    // Stored apart, pages are found equal by their bytes.
    let apart = dump(store, "apart", &pages).unwrap();
    let fetch = store.local().open_fetch(&apart.id, &second.id).unwrap();
    let equal: u64 = fetch
        .runs(0, 0, 0)
        .map(|run| match run.unwrap() {
            Fetched::Parent { pages, .. } => pages,
            Fetched::Own(PageRun::Zero { .. }) => 0,
            other => panic!("{other:?}"),
        })
        .sum();
    assert_eq!(equal, 299);
}

#[test]
fn a_part_of_a_space_is_read_from_where_one_asks() {
    let world = World::new(0, Durability::Local);
    let store = &world.origin.store;
    let pages: Pages = (0..300).map(|n| (n * 2, page(n))).collect();
    let sealed = dump(store, "job", &pages).unwrap();
    let fetch = store.local().open_fetch(&sealed.id, "").unwrap();
    let runs: Vec<_> = fetch.runs(0, 99, 3).map(Result::unwrap).collect();
    let firsts: Vec<_> = runs
        .iter()
        .map(|run| match run {
            Fetched::Own(PageRun::Pages {
                first_index, bytes, ..
            }) => {
                assert_eq!(bytes.as_ref(), page(first_index / 2));
                *first_index
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(firsts, [100, 102, 104]);
    assert_eq!(fetch.runs(0, 700, 0).count(), 0);
    assert_eq!(fetch.runs(9, 0, 0).count(), 0);
}
