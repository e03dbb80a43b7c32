//! Reads on a node without a copy.

use std::sync::atomic::Ordering;

use permafrost_protocol::control::{ErrorCode, ReportedError};

use super::support::{JOB, Site, flat, memory};

#[test]
fn a_node_without_a_copy_reads_the_nearest() {
    let site = Site::new(&[
        ("me", "z1", "r1"),
        ("a-far", "z2", "r1"),
        ("b-zone", "z1", "r2"),
        ("c-rack", "z1", "r1"),
    ]);
    let memory = memory(700);
    let sealed = site.dump(1, &memory);
    site.copy(1, 2, &sealed);
    site.copy(1, 3, &sealed);

    let shown = site.nodes[0].store.show(JOB).unwrap();
    assert_eq!(
        shown.checkpoint.unwrap().nodes,
        ["a-far", "b-zone", "c-rack"]
    );
    assert_eq!(shown.manifest.unwrap().spaces[0].pages, 700);
    assert_eq!((shown.segments, shown.exclusive_bytes), (0, 0));
    site.check_get(0, &memory);
    site.check_stream(0, &memory);
    let asked: Vec<_> = site.nodes.iter().map(|node| node.asked() > 0).collect();
    assert_eq!(asked, [false, false, false, true]);

    // Where it is held nobody is asked; and one node after another may go.
    let before = site.nodes[3].asked();
    site.check_get(2, &memory);
    site.check_stream(2, &memory);
    assert_eq!(site.nodes[3].asked(), before);
    site.nodes[3].die();
    site.check_get(0, &memory);
    assert!(site.nodes[2].asked() > 0);
    assert_eq!(site.nodes[1].asked(), 0);
    site.nodes[2].die();
    site.check_get(0, &memory);
    assert!(site.nodes[1].asked() > 0);
}

#[test]
fn a_holder_that_dies_is_gone_on_from() {
    let site = Site::new(&[("me", "", "r1"), ("near", "", "r1"), ("far", "", "r2")]);
    let memory = memory(1500);
    let sealed = site.dump(1, &memory);
    site.copy(1, 2, &sealed);
    site.nodes[1].watched.dies_after.store(7, Ordering::SeqCst);
    site.check_stream(0, &memory);
    assert_eq!(site.nodes[1].pages_asked(), [(1, 0)]);
    let asked = site.nodes[2].pages_asked();
    // Behind what came, not from the start.
    let first = *memory.keys().next().unwrap();
    assert!(matches!(asked[..], [(1, at)] if at > first), "{asked:?}");
}

#[test]
fn without_a_holder_it_is_an_error_and_nothing_is_left() {
    let site = Site::new(&[("me", "", ""), ("only", "", "")]);
    let memory = memory(300);
    site.dump(1, &memory);
    site.nodes[1].watched.dies_after.store(1, Ordering::SeqCst);
    let error = site.get(0).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
    let verified = site.nodes[0].store.verify(JOB, false, &mut |_, _| {});
    let error = verified.unwrap_err().to_string();
    assert!(error.contains("held by only"), "{error}");
    // It is there all the same.
    assert_eq!(site.nodes[0].store.list(None).unwrap().len(), 1);
    site.check_get(1, &memory);
    assert_eq!(flat(&memory).len(), 300 * 4096);
}

#[test]
fn a_copy_that_is_not_what_is_listed_is_not_believed() {
    let site = Site::new(&[("me", "", ""), ("false", "", ""), ("true", "x", "")]);
    let memory = memory(200);
    let sealed = site.dump(2, &memory);
    // Something else under the same name.
    let mut other = memory.clone();
    other.pop_last();
    let another = site.dump(2, &other);
    site.copy_as(2, 1, &another, &sealed);
    let reference = format!("{JOB}@{}", sealed.generation);
    site.check_get_of(0, &reference, &memory);
    assert!(site.nodes[1].asked() > 0);
    site.nodes[2].die();
    let error = site.get_of(0, &reference).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Corrupt, "{error}");
}
