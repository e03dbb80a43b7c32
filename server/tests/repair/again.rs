//! Replacement of a damaged copy by a fresh one.

use std::sync::Arc;

use permafrost_cluster::scrub::{Mend as _, MendByPull};
use permafrost_store::{ReadingError, StoreError};

use super::site::{Site, id, page, pages, pull};

#[test]
fn a_damaged_copy_is_replaced_and_its_marks_stay() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let content = pages(100, 300);
    let digest = a.make(1, "job", 1, &content);
    b.puller.pull(&pull(1, &digest, &["a"])).unwrap();
    b.clustered().pin("job@1", true).unwrap();
    let free = b.free_bytes();
    b.damage(201);
    b.read(1).unwrap_err();

    let record = b.puller.pull_again(&pull(1, &digest, &["a"])).unwrap();
    assert_eq!((&*record.id, record.pinned), (&*id(1), true));
    assert_eq!(b.read(1).unwrap().0, content);
    assert_eq!(b.mark(1), (true, false));
    let listed = b.clustered().list(Some(&"job".parse().unwrap())).unwrap();
    assert_eq!((listed.len(), listed[0].pinned), (1, true));
    assert!(b.free_bytes().abs_diff(free) <= 128 << 10);
}

#[test]
fn damaged_pages_are_fetched_and_nothing_else() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let content = pages(100, 300);
    let digest = a.make(1, "job", 1, &content);
    b.puller.pull(&pull(1, &digest, &["a"])).unwrap();
    let free = b.free_bytes();
    for salt in [151, 152, 201, 399] {
        b.damage(salt);
    }
    b.damage_image();
    let check = || {
        let held = b.store.held_copy(&id(1)).unwrap();
        b.store.check(&held, None, &mut |_, _| true).unwrap()
    };
    let checked = check();
    assert_eq!(checked.pages_damaged.len(), 5, "{checked:?}");
    assert!(!checked.damaged_beyond);
    let mend = MendByPull::new(b.clustered(), Arc::clone(&b.puller));
    let record = b
        .clustered()
        .list(Some(&"job".parse().unwrap()))
        .unwrap()
        .remove(0);
    let holders = ["b".to_owned(), "a".to_owned()];
    let healed = mend.heal(&record, &holders, &checked.pages_damaged);
    assert_eq!(healed.unwrap(), 5);
    assert!(check().damage.is_empty());
    assert_eq!(b.read(1).unwrap().0, content);
    assert_eq!(b.free_bytes(), free);
    // Nobody else has this one whole: it stays damaged, and so it is said.
    b.damage(201);
    a.damage(201);
    let checked = check();
    mend.heal(&record, &holders, &checked.pages_damaged)
        .unwrap_err();
    assert_eq!(check().pages_damaged, checked.pages_damaged);
}

#[test]
fn what_is_known_to_be_damaged_is_no_answer_to_a_pull() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let content = pages(100, 300);
    let digest = a.make(1, "job", 1, &content);
    b.puller.pull(&pull(1, &digest, &["a"])).unwrap();
    b.damage(201);
    b.store.set_aside(&id(1), "a page");
    let asked = b.puller.pull(&pull(1, &digest, &["b"]));
    assert!(matches!(
        asked,
        Err(StoreError::Reading(ReadingError::Damaged { .. }))
    ));
    b.puller.pull(&pull(1, &digest, &["a"])).unwrap();
    assert_eq!(b.read(1).unwrap().0, content);
    assert_eq!(b.store.damage(&id(1)), None);
    b.puller.pull(&pull(1, &digest, &[])).unwrap();
}

#[test]
fn pages_shared_with_a_damaged_parent_are_not_used_again() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let old = pages(100, 100);
    let mut new = old.clone();
    new.insert(9000, page(77));
    let first = a.make(1, "job", 1, &old);
    let second = a.make(2, "job", 2, &new);
    b.puller.pull(&pull(1, &first, &["a"])).unwrap();
    let mut request = pull(2, &second, &["a"]);
    request.parent = id(1);
    b.puller.pull(&request).unwrap();
    // One page that both refer to.
    b.damage(102);
    b.read(1).unwrap_err();
    b.read(2).unwrap_err();
    b.puller.pull_again(&request).unwrap();
    assert_eq!(b.read(2).unwrap().0, new);
    b.read(1).unwrap_err();
    b.puller.pull_again(&pull(1, &first, &["a"])).unwrap();
    assert_eq!(b.read(1).unwrap().0, old);
    assert_eq!(b.read(2).unwrap().0, new);
}

#[test]
fn without_a_whole_source_the_damaged_copy_stays() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let digest = a.make(1, "job", 1, &pages(100, 300));
    let request = pull(1, &digest, &["a"]);
    let absent = b.puller.pull_again(&request);
    assert!(matches!(absent, Err(StoreError::NotFound { .. })));
    b.puller.pull(&request).unwrap();
    b.damage(201);
    a.damage(202);
    let free = b.free_bytes();
    b.puller.pull_again(&request).unwrap_err();
    assert!(b.store.holds(&id(1)));
    assert_eq!(b.mark(1), (true, false));
    assert_eq!(b.free_bytes(), free);
}
