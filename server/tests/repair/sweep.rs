//! The sweep: actions of a node on the difference between the copies that it holds and those that are listed.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_cluster::repair::{Standing, Sweep, SweepTiming, Swept};
use permafrost_clustered::{
    ClusterServices, ClusteredStore, Durability, JobLock, Registered, Registry,
};
use permafrost_protocol::control::Checkpoint;
use permafrost_store::{MissingObject, StoreError};

use super::site::{Node, Site, id, pages};

/// Called at the end of each listing.
type Hook = Box<dyn Fn() + Send>;

/// Number, job, generation, digest and holders.
type Line<'a> = (u64, &'a str, u64, &'a [u8], &'a [&'a str]);

#[derive(Default)]
struct List {
    entries: Mutex<Vec<Registered>>,
    withdrawn: Mutex<HashSet<String>>,
    silent: AtomicBool,
    after_claim: Mutex<Option<Hook>>,
}

impl List {
    fn of(entries: &[Line<'_>]) -> Arc<Self> {
        let entries = entries
            .iter()
            .map(|(number, job, generation, digest, nodes)| {
                let mut checkpoint = Checkpoint::default();
                (*job).clone_into(&mut checkpoint.job);
                checkpoint.generation = *generation;
                checkpoint.id = id(*number);
                Registered {
                    checkpoint,
                    content_digest: (*digest).try_into().unwrap(),
                    nodes: nodes.iter().map(|&node| node.to_owned()).collect(),
                    wanted_copies: 2,
                    damaged: Vec::new(),
                    cold: Vec::new(),
                }
            });
        Arc::new(Self {
            entries: Mutex::new(entries.collect()),
            ..Self::default()
        })
    }

    fn holders(&self, number: u64) -> Vec<String> {
        let entries = self.entries.lock();
        let mut entries = entries.iter();
        let entry = entries.find(|entry| entry.checkpoint.id == id(number));
        entry.unwrap().nodes.clone()
    }

    /// Removes an entry and marks it withdrawn, like `permafrost rm`.
    fn remove(&self, number: u64) {
        self.lose(number);
        self.withdrawn.lock().insert(id(number));
    }

    /// Removes an entry without a trace, like the restore of an older backup of etcd's data.
    fn lose(&self, number: u64) {
        let mut entries = self.entries.lock();
        entries.retain(|entry| entry.checkpoint.id != id(number));
    }
}

impl Registry for List {
    fn lock_job(&self, _: &str) -> Result<JobLock, StoreError> {
        unreachable!()
    }

    fn reserve_generation(&self, _: &str) -> Result<u64, StoreError> {
        unreachable!()
    }

    fn publish(&self, _: &Registered, _: Option<&str>) -> Result<(), StoreError> {
        unreachable!()
    }

    fn withdraw(&self, _: &Checkpoint) -> Result<(), StoreError> {
        unreachable!()
    }

    fn is_withdrawn(&self, checkpoint: &Checkpoint) -> Result<bool, StoreError> {
        Ok(self.withdrawn.lock().contains(&checkpoint.id))
    }

    fn set_pinned(&self, _: &Checkpoint, _: bool) -> Result<(), StoreError> {
        Ok(())
    }

    fn find(&self, _: &str, _: u64) -> Result<Option<Registered>, StoreError> {
        unreachable!()
    }

    fn list(&self, _: &str) -> Result<Vec<Registered>, StoreError> {
        if self.silent.load(Ordering::SeqCst) {
            return Err(StoreError::ReadOnly {
                reason: "no registry".to_owned(),
            });
        }
        Ok(self.entries.lock().clone())
    }

    fn set_holder(&self, of: &Checkpoint, node: &str, holds: bool) -> Result<(), StoreError> {
        {
            let mut entries = self.entries.lock();
            let mut entries = entries.iter_mut();
            let Some(entry) = entries.find(|entry| entry.checkpoint.id == of.id) else {
                return Err(StoreError::NotFound(MissingObject::Listed(of.id.clone())));
            };
            entry.set_holder(node, holds);
        }
        if let Some(hook) = self.after_claim.lock().take() {
            hook();
        }
        Ok(())
    }

    fn set_damaged(&self, of: &Checkpoint, node: &str, damaged: bool) -> Result<(), StoreError> {
        for entry in &mut *self.entries.lock() {
            if entry.checkpoint.id == of.id {
                entry.set_damaged(node, damaged);
            }
        }
        Ok(())
    }

    fn set_cold(&self, of: &Checkpoint, node: &str, bytes: u64) -> Result<(), StoreError> {
        for entry in &mut *self.entries.lock() {
            if entry.checkpoint.id == of.id {
                entry.set_cold(node, bytes);
            }
        }
        Ok(())
    }
}

struct Stands {
    may_hold: AtomicBool,
    knows: AtomicBool,
}

impl Standing for Stands {
    fn may_hold(&self) -> bool {
        self.may_hold.load(Ordering::SeqCst)
    }

    fn knows_registry(&self) -> bool {
        self.knows.load(Ordering::SeqCst)
    }
}

fn sweep(node: &Node, list: &Arc<List>) -> (Sweep, Arc<Stands>) {
    let registry = Arc::clone(list) as Arc<dyn Registry>;
    let services = ClusterServices {
        node: "a".to_owned(),
        registry: Arc::clone(&registry),
        replicate: None,
        remote: None,
        durability: Durability::Local,
        deadline: Duration::from_secs(60),
        wanted_copies: 2,
    };
    let store = ClusteredStore::new(Arc::clone(&node.store), Some(services), Arc::new(()));
    let stands = Arc::new(Stands {
        may_hold: AtomicBool::new(true),
        knows: AtomicBool::new(true),
    });
    let timing = SweepTiming {
        settle: Duration::ZERO,
        ..SweepTiming::default()
    };
    let standing = Arc::clone(&stands) as Arc<dyn Standing>;
    let sweep = Sweep::new(store, registry, "a", standing, timing);
    (sweep, stands)
}

#[test]
fn what_is_here_and_listed_without_us_is_claimed_at_the_second_sight() {
    let site = Site::new();
    let a = site.node("a");
    let digest = a.make(1, "job", 1, &pages(1, 10));
    // Parked, of no job.
    let parked = a.make(2, "", 0, &pages(2, 10));
    let list = List::of(&[
        (1, "job", 1, &digest, &["b"]),
        (2, "", 0, &parked, &["b"]),
        // Here by name, and with other content.
        (3, "job", 3, &digest, &["b"]),
    ]);
    a.make(3, "job", 3, &pages(3, 10));
    let (mut sweep, _) = sweep(&a, &list);
    assert_eq!(sweep.once().unwrap(), Swept::default());
    assert_eq!(list.holders(1), ["b"]);
    a.store.set_aside(&id(1), "a page");
    assert_eq!(sweep.once().unwrap().claimed, [id(2)]);
    a.store.lift(&id(1));
    assert_eq!(sweep.once().unwrap().claimed, [id(1)]);
    assert_eq!(list.holders(1), ["b", "a"]);
    assert_eq!(list.holders(2), ["b", "a"]);
    assert_eq!(list.holders(3), ["b"]);
    assert_eq!(sweep.once().unwrap(), Swept::default());
}

#[test]
fn a_node_that_may_not_hold_claims_nothing() {
    let site = Site::new();
    let a = site.node("a");
    let digest = a.make(1, "job", 1, &pages(1, 10));
    let list = List::of(&[(1, "job", 1, &digest, &["b"])]);
    let (mut sweep, stands) = sweep(&a, &list);
    stands.may_hold.store(false, Ordering::SeqCst);
    for _ in 0..3 {
        assert_eq!(sweep.once().unwrap(), Swept::default());
    }
    stands.may_hold.store(true, Ordering::SeqCst);
    assert_eq!(sweep.once().unwrap().claimed, [id(1)]);
}

#[test]
fn a_copy_that_is_dropped_while_it_is_claimed_is_not_listed() {
    let site = Site::new();
    let a = site.node("a");
    let digest = a.make(1, "job", 1, &pages(1, 10));
    let list = List::of(&[(1, "job", 1, &digest, &["b"])]);
    let (mut sweep, _) = sweep(&a, &list);
    sweep.once().unwrap();
    let store = Arc::clone(&a.store);
    *list.after_claim.lock() = Some(Box::new(move || {
        assert!(store.roll_back(&id(1), true).unwrap());
    }));
    assert_eq!(sweep.once().unwrap(), Swept::default());
    assert_eq!(list.holders(1), ["b"]);
}

#[test]
fn a_node_that_starts_disclaims_what_it_has_not() {
    let site = Site::new();
    let a = site.node("a");
    let digest = a.make(1, "job", 1, &pages(1, 10));
    let list = List::of(&[
        (1, "job", 1, &digest, &["a", "b"]),
        (2, "job", 2, &[0; 32], &["a", "b"]),
        (3, "job", 3, &[0; 32], &["a"]),
    ]);
    let (sweep, _) = sweep(&a, &list);
    assert_eq!(sweep.disclaim_missing().unwrap(), [id(2)]);
    assert_eq!(list.holders(1), ["a", "b"]);
    assert_eq!(list.holders(2), ["b"]);
    assert_eq!(list.holders(3), ["a"], "who had it last");
}

#[test]
fn what_is_listed_here_and_is_not_is_disclaimed_unless_nobody_else_has_it() {
    let site = Site::new();
    let a = site.node("a");
    let list = List::of(&[
        (1, "job", 1, &[0; 32], &["a", "b"]),
        (2, "job", 2, &[0; 32], &["a"]),
    ]);
    let (mut sweep, _) = sweep(&a, &list);
    assert_eq!(sweep.once().unwrap(), Swept::default());
    assert_eq!(sweep.once().unwrap().disclaimed, [id(1)]);
    assert_eq!(list.holders(1), ["b"]);
    assert_eq!(list.holders(2), ["a"]);

    // One that came between the two sights stays listed.
    let list = List::of(&[(3, "job", 3, &[0; 32], &["a", "b"])]);
    let b = site.node("b");
    let (mut sweep, _) = self::sweep(&b, &list);
    sweep.once().unwrap();
    b.make(3, "job", 3, &pages(3, 10));
    assert_eq!(sweep.once().unwrap(), Swept::default());
    assert_eq!(list.holders(3), ["a", "b"]);
}

#[test]
fn what_was_removed_goes_at_once() {
    let site = Site::new();
    let a = site.node("a");
    let digest = a.make(1, "job", 1, &pages(1, 10));
    a.make(2, "job", 2, &pages(2, 10));
    let list = List::of(&[(1, "job", 1, &digest, &["a"])]);
    list.remove(2);
    let (mut sweep, _) = sweep(&a, &list);
    assert_eq!(sweep.once().unwrap().dropped, [id(2)]);
    assert!(a.store.holds(&id(1)) && !a.store.holds(&id(2)));
    list.remove(1);
    assert_eq!(sweep.once().unwrap().dropped, [id(1)]);
}

#[test]
fn a_damaged_copy_that_was_taken_off_the_list_goes_when_the_others_are_enough() {
    let site = Site::new();
    let a = site.node("a");
    let digest = a.make(1, "job", 1, &pages(1, 10));
    let list = List::of(&[(1, "job", 1, &digest, &["b"])]);
    let (mut sweep, _) = sweep(&a, &list);
    a.store.set_aside(&id(1), "a page");
    for _ in 0..3 {
        assert_eq!(sweep.once().unwrap(), Swept::default());
    }
    // Two are wanted.
    list.entries.lock()[0].set_holder("c", true);
    assert_eq!(sweep.once().unwrap().dropped, [id(1)]);
    assert!(!a.store.holds(&id(1)));
}

#[test]
fn damage_is_listed_and_remembered_over_a_restart() {
    let site = Site::new();
    let a = site.node("a");
    let digest = a.make(1, "job", 1, &pages(1, 10));
    let list = List::of(&[(1, "job", 1, &digest, &["a", "b"])]);
    let (mut sweep, _) = sweep(&a, &list);
    let damaged = || list.entries.lock()[0].damaged.clone();
    a.store.set_aside(&id(1), "a page");
    assert_eq!(sweep.once().unwrap().damaged, [id(1)]);
    assert_eq!(damaged(), ["a"]);
    assert_eq!(sweep.once().unwrap(), Swept::default());
    // As after a restart: nothing is known here, and what is listed holds until it was read.
    a.store.lift(&id(1));
    assert_eq!(sweep.remember_damage().unwrap(), [id(1)]);
    assert!(a.store.damage(&id(1)).is_some());
    assert_eq!(damaged(), ["a"]);
    // Forgotten in the midst of life only by an answer that was lost: seen twice.
    a.store.lift(&id(1));
    assert_eq!(sweep.once().unwrap(), Swept::default());
    assert_eq!(sweep.once().unwrap().suspected, [id(1)]);
    assert!(a.store.damage(&id(1)).is_some());
}

#[test]
fn a_registry_that_has_lost_something_or_is_silent_costs_nothing() {
    let site = Site::new();
    let a = site.node("a");
    a.make(1, "job", 1, &pages(1, 10));
    let list = List::of(&[]);
    let (mut sweep, _) = sweep(&a, &list);
    sweep.once().unwrap();
    for _ in 0..3 {
        let swept = sweep.once().unwrap();
        assert_eq!((swept.in_doubt, swept.dropped), (vec![id(1)], vec![]));
    }
    list.remove(1);
    list.silent.store(true, Ordering::SeqCst);
    sweep.once().unwrap_err();
    assert!(a.store.holds(&id(1)));
    list.silent.store(false, Ordering::SeqCst);
    assert_eq!(sweep.once().unwrap().dropped, [id(1)]);
}

#[test]
fn a_sweep_settles_what_was_never_published() {
    let site = Site::new();
    let (a, b) = (site.node("a"), site.node("b"));
    let listed = b.make(1, "job", 1, &pages(1, 10));
    let other = b.make(2, "job", 2, &pages(2, 10));
    for (number, digest) in [(1, &listed), (2, &other)] {
        let mut request = super::site::pull(number, digest, &["b"]);
        request.published = false;
        a.puller.pull(&request).unwrap();
    }
    let list = List::of(&[(1, "job", 1, &listed, &["a", "b"])]);
    let (mut sweep, _) = sweep(&a, &list);
    let swept = sweep.once().unwrap();
    assert_eq!(
        (swept.published, swept.left_over),
        (vec![id(1)], vec![id(2)])
    );
    assert_eq!(a.mark(1), (true, false));
}

#[test]
fn what_is_in_the_object_store_is_listed() {
    let site = Site::new();
    let a = site.node("a");
    let digest = a.make(1, "job", 1, &pages(1, 10));
    let list = List::of(&[(1, "job", 1, &digest, &["a", "b"])]);
    // Of a tier that this node had before, and of another node's.
    for node in ["a", "b"] {
        list.entries.lock()[0].set_cold(node, 1 << 20);
    }
    let (mut sweep, _) = sweep(&a, &list);
    assert_eq!(sweep.once().unwrap().tiered, [id(1)]);
    let cold = |node| list.entries.lock()[0].cold_bytes_on(node);
    assert_eq!((cold("a"), cold("b")), (0, 1 << 20));
    assert_eq!(sweep.once().unwrap(), Swept::default());
}
