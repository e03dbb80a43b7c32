//! Pulls of a checkpoint from another node.

use std::sync::{Arc, Barrier};

use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::control::{Checkpoint, ErrorCode, ReportedError};

use super::site::{Site, id, page, pages, pull};

#[test]
fn a_pull_brings_everything_under_the_same_names() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let content = pages(100, 500);
    let digest = a.make(1, "job", 1, &content);

    let sealed = b.puller.pull(&pull(1, &digest, &["a"])).unwrap();
    assert_eq!(b.read(1).unwrap(), a.read(1).unwrap());
    assert_eq!(b.read(1).unwrap().0, content);
    assert_eq!(b.mark(1), (true, false));
    let theirs = a.store.open_fetch(&id(1), "").unwrap();
    // A copy has the same pages; where nodes of its maps begin a new page depends on when they are flushed.
    let added_bytes = sealed.added_bytes;
    assert!(added_bytes.abs_diff(theirs.checkpoint().added_bytes) <= 2 * PAGE_SIZE as u64);
    assert_eq!(
        sealed,
        Checkpoint {
            added_bytes,
            ..theirs.checkpoint().clone()
        }
    );
    let ours = b.store.open_fetch(&id(1), "").unwrap();
    assert_eq!(
        (&ours.manifest().session, &ours.manifest().content_digest),
        (&theirs.manifest().session, &digest)
    );

    // Asked again it answers without asking anybody.
    let fetches = || {
        let fetches = &a.serving.sent.fetches;
        fetches.load(std::sync::atomic::Ordering::SeqCst)
    };
    assert_eq!(fetches(), 1);
    assert_eq!(b.puller.pull(&pull(1, &digest, &["a"])).unwrap(), sealed);
    assert_eq!(b.puller.pull(&pull(1, &[], &[])).unwrap(), sealed);
    assert_eq!(fetches(), 1);
    let other = b.puller.pull(&pull(1, &[1; 32], &["a"]));
    assert!(
        other
            .as_ref()
            .is_err_and(|error| error.code() == ErrorCode::Conflict)
    );
}

#[test]
fn what_is_not_listed_yet_is_provisional() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    // Parked, of no job.
    let digest = a.make(1, "", 0, &pages(100, 10));
    let mut request = pull(1, &digest, &["a"]);
    request.published = false;
    b.puller.pull(&request).unwrap();
    assert_eq!(b.mark(1), (false, true));
    request.published = true;
    b.puller.pull(&request).unwrap();
    assert_eq!(b.mark(1), (true, false));
    assert_eq!(b.read(1).unwrap(), a.read(1).unwrap());
}

#[test]
fn with_a_parent_here_only_what_is_missing_is_sent() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let old = pages(100, 400);
    let mut new = old.clone();
    for (at, page_at) in new.values_mut().enumerate().filter(|(at, _)| at % 40 == 1) {
        *page_at = page(9000 + at as u64);
    }
    let first = a.make(1, "job", 1, &old);
    let second = a.make(2, "job", 2, &new);
    b.puller.pull(&pull(1, &first, &["a"])).unwrap();
    let (sent, _, parent) = a.serving.sent.take();
    assert_eq!((sent, parent), (320, 0));

    let mut request = pull(2, &second, &["a"]);
    request.parent = id(1);
    let before = b.free_bytes();
    b.puller.pull(&request).unwrap();
    let (sent, zero, parent) = a.serving.sent.take();
    assert_eq!((sent, zero, parent), (10, 80, 310));
    assert!(before - b.free_bytes() < 1 << 20);
    assert_eq!(b.read(2).unwrap().0, new);
}

#[test]
fn pages_of_a_damaged_parent_are_fetched_instead() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let content = pages(100, 100);
    let first = a.make(1, "job", 1, &content);
    let second = a.make(2, "job", 2, &content);
    b.puller.pull(&pull(1, &first, &["a"])).unwrap();
    b.damage(101);
    b.read(1).unwrap_err();
    a.serving.sent.take();

    let mut request = pull(2, &second, &["a"]);
    request.parent = id(1);
    b.puller.pull(&request).unwrap();
    assert_eq!(b.read(2).unwrap().0, content);
    // Found out on the way, and begun anew.
    assert_eq!(a.serving.sent.take().0, 80);
}

#[test]
fn a_source_that_dies_midway_is_followed_by_the_next() {
    let site = Site::new();
    let (a, b, c) = (site.node("a"), site.node("b"), site.node("c"));
    let content = pages(100, 500);
    let digest = a.make(1, "job", 1, &content);
    b.puller.pull(&pull(1, &digest, &["a"])).unwrap();
    let free = c.free_bytes();
    a.serving.faults().die_after = Some(20);

    // Alone it does not do, and leaves nothing.
    let error = c.puller.pull(&pull(1, &digest, &["a"])).unwrap_err();
    assert!(error.code() == ErrorCode::Unavailable, "{error}");
    assert!(!c.store.holds(&id(1)));
    assert_eq!(c.free_bytes(), free);

    b.serving.sent.take();
    let named = ["a", "c", "b"];
    let sealed = c.puller.pull(&pull(1, &digest, &named)).unwrap();
    assert_eq!(sealed.id, id(1));
    assert_eq!(b.serving.sent.take().0, 400);
    assert_eq!(c.read(1).unwrap().0, content);
}

#[test]
fn a_damaged_source_is_refused_and_the_next_taken() {
    let site = Site::new();
    let (a, b, c) = (site.node("a"), site.node("b"), site.node("c"));
    let content = pages(100, 300);
    let digest = a.make(1, "job", 1, &content);
    b.puller.pull(&pull(1, &digest, &["a"])).unwrap();
    a.damage(201);
    let error = c.puller.pull(&pull(1, &digest, &["a"])).unwrap_err();
    assert!(!c.store.holds(&id(1)), "{error}");
    c.puller.pull(&pull(1, &digest, &["a", "b"])).unwrap();
    assert_eq!(c.read(1).unwrap().0, content);
}

#[test]
fn other_content_than_said_is_refused() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let content = pages(100, 50);
    let digest = a.make(1, "job", 1, &content);
    let free = b.free_bytes();
    let refused = |request| {
        let error = b.puller.pull(&request).unwrap_err();
        assert!(error.code() == ErrorCode::Unavailable, "{error}");
        assert!(!b.store.holds(&id(1)));
        assert_eq!(b.free_bytes(), free);
    };
    // What is listed is something else; then nothing is sent at all.
    refused(pull(1, &[1; 32], &["a"]));
    // The source says one thing and sends another, in two ways.
    a.serving.faults().corrupt = true;
    refused(pull(1, &digest, &["a"]));
    a.serving.faults().corrupt = false;
    a.serving.faults().lie = true;
    refused(pull(1, &[], &["a"]));
    a.serving.faults().lie = false;
    b.puller.pull(&pull(1, &digest, &["a"])).unwrap();
}

#[test]
fn two_pulls_of_one_checkpoint_are_one() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let digest = a.make(1, "job", 1, &pages(100, 50));
    let gate = Arc::new(Barrier::new(2));
    a.serving.faults().gate = Some(Arc::clone(&gate));
    let request = pull(1, &digest, &["a"]);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| b.puller.pull(&request));
        gate.wait();
        a.serving.faults().gate = None;
        let second = scope.spawn(|| b.puller.pull(&request));
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(!second.is_finished());
        gate.wait();
        let first = first.join().unwrap().unwrap();
        assert_eq!(second.join().unwrap().unwrap(), first);
    });
    assert_eq!(a.serving.sent.take().0, 40);
}

#[test]
fn a_node_that_stops_pulls_no_more() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let digest = a.make(1, "job", 1, &pages(100, 50));
    b.throttle.stop();
    b.puller.pull(&pull(1, &digest, &["a"])).unwrap_err();
    assert!(!b.store.holds(&id(1)));
}
