//! Damage that the scrub finds, quarantines and has healed.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use permafrost_cluster::scrub::{Mend, ScrubOptions};
use permafrost_criu::frontend::PageSink;
use permafrost_protocol::control::{Checkpoint, ErrorCode, ReportedError, Scrubbed};
use permafrost_protocol::wire::message::request;
use permafrost_store::{DamagedPage, Store, StoreError};

use super::site::{CORE_IMAGE, PID, Site, address, flip_page, page, wait_until};

fn on_request() -> ScrubOptions {
    ScrubOptions {
        period: None,
        ..ScrubOptions::default()
    }
}

fn every(period: Duration) -> ScrubOptions {
    ScrubOptions {
        period: Some(period),
        share_percent: 100,
        memory: None,
    }
}

fn scrub(site: &Site, reference: &str) -> Scrubbed {
    site.scrub()
        .scrub(reference, false, &mut |_, _| {})
        .unwrap()
}

#[test]
fn damage_is_named_and_set_aside_until_it_is_gone() {
    let site = Site::new();
    let _scrubber = site.scrubber(on_request());
    site.dump("job", 0..40);
    site.dump("other", 100..140);
    let mut told = (0, 0);
    let whole = site
        .scrub()
        .scrub("", false, &mut |done, total| told = (done, total));
    let whole = whole.unwrap();
    assert_eq!((whole.checkpoints, whole.damaged.len()), (2, 0));
    // And their images: some pages each.
    assert!(whole.pages > 80, "{}", whole.pages);
    assert_eq!(told, (80 * 4096, 80 * 4096));

    site.flip_page(23);
    let found = scrub(&site, "");
    assert_eq!(found.checkpoints, 2);
    let [damaged] = &found.damaged[..] else {
        panic!("{found:?}")
    };
    let place = format!("job@1: process {} address {:#x}", PID, address(23));
    assert_eq!(damaged.checkpoint, "job@1");
    assert_eq!(damaged.damage.len(), 1);
    assert!(damaged.damage[0].starts_with(&place), "{damaged:?}");
    assert!(
        !damaged.mended && damaged.reason.contains("no other node"),
        "{damaged:?}"
    );

    // It is shown as damaged, where it is asked about.
    assert!(site.listed("job@1").damaged.starts_with(&place));
    assert!(site.listed("other@1").damaged.is_empty());
    let shown = site.store.show("job@1").unwrap().checkpoint.unwrap();
    assert!(shown.damaged.starts_with(&place));
    let status = site.scrub().status();
    assert_eq!(
        (status.quarantined, status.damaged, status.mended),
        (1, 1, 0)
    );
    // A restore is told before it begins.
    let refused = site.store.check_restorable("job").unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Corrupt);
    let refused = refused.to_string();
    assert!(
        refused.contains("job@1") && refused.contains(&place),
        "{refused}"
    );
    site.store.check_restorable("other").unwrap();
    // Nothing is built upon it.
    assert_eq!(site.dump("job", 0..40).parent_generation, 0);
    assert_eq!(site.dump("other", 100..140).parent_generation, 1);
    // What is written down does not say it: it is only said.
    assert!(site.store.pin("job@1", true).unwrap().damaged.is_empty());

    // Looked at again, it counts once.
    assert_eq!(scrub(&site, "job@1").damaged.len(), 1);
    assert_eq!(site.scrub().status().damaged, 1);
    // A cell that reads well again.
    site.flip_page(23);
    assert!(scrub(&site, "job@1").damaged.is_empty());
    assert!(site.listed("job@1").damaged.is_empty());
    site.store.check_restorable("job@1").unwrap();
}

#[test]
fn every_kind_of_page_is_read() {
    for kind in ["image", "manifest", "map"] {
        let site = Site::new();
        let _scrubber = site.scrubber(on_request());
        site.dump("a-job-to-be-found", 0..300);
        match kind {
            "image" => site.flip(CORE_IMAGE),
            "manifest" => site.flip(b"a-job-to-be-found"),
            // Runs of an address space, by the index of its first page.
            _ => site.flip(&(address(0) / 4096).to_le_bytes()),
        }
        let found = scrub(&site, "");
        assert_eq!(found.damaged.len(), 1, "{kind}: {found:?}");
        let said = &found.damaged[0].damage[0];
        let names = match kind {
            "image" => said.contains("image core-7.img"),
            // In both copies of the root.
            "manifest" => said.contains("root"),
            _ => said.contains("process 7"),
        };
        assert!(names, "{kind}: {said}");
    }
}

#[test]
fn both_copies_of_a_root_are_looked_at() {
    let site = Site::new();
    let _scrubber = site.scrubber(on_request());
    let id = site.dump("job", 0..10).id;
    let root = site.root(&id);
    site.flip_at(root + 8);
    // The other one is enough.
    assert!(scrub(&site, "").damaged.is_empty());
    site.flip_at(root + 4096 + 8);
    let found = scrub(&site, "");
    assert_eq!(found.damaged.len(), 1, "{found:?}");
    let said = &found.damaged[0].damage;
    // And the manifest, which is in it.
    assert!(said.len() == 2 && said[0].contains("root"), "{said:?}");
}

#[test]
fn a_shared_page_is_read_once_and_its_damage_found_in_all() {
    let site = Site::new();
    let scrubber = site.scrubber(on_request());
    for generation in 1..=4 {
        site.dump("job", 0..200 + generation);
    }
    let whole = scrub(&site, "");
    assert!(whole.pages > 800 && whole.damaged.is_empty());
    let read = scrubber.counters().read_bytes.value() / 4096;
    assert!((200..260).contains(&read), "{read} pages read");

    site.flip_page(150);
    assert_eq!(scrub(&site, "job@2").damaged.len(), 1);
    // Found in one, and looked for in the others without being asked.
    let scrubbing = scrubber.start().unwrap();
    let quarantined = || site.scrub().status().quarantined;
    wait_until("the others are found", || quarantined() == 4);
    assert_eq!(scrub(&site, "").damaged.len(), 4);
    drop(scrubbing);
}

/// Behaviour of the stand-in for healing.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Repairs,
    Lies,
    Refuses,
}

struct Fake {
    region: PathBuf,
    way: Way,
    asked: AtomicUsize,
}

/// Another node that has all pages, and provides single pages only.
struct Pages(Weak<Store>);

impl Mend for Pages {
    fn heal(
        &self,
        checkpoint: &Checkpoint,
        holders: &[String],
        pages: &[DamagedPage],
    ) -> Result<u64, StoreError> {
        assert_eq!(holders, ["other"]);
        let store = self.0.upgrade().unwrap();
        let mut healed = 0;
        for damaged in pages {
            let salt = damaged.index - address(0) / 4096;
            let bytes = [(damaged.index, Box::new(page(salt)))];
            healed += store.heal_pages(&checkpoint.id, &damaged.object, &bytes)?;
        }
        Ok(healed)
    }

    fn mend(&self, _: &Checkpoint, _: &[String]) -> Result<(), StoreError> {
        panic!("nobody needs a whole copy");
    }
}

#[test]
fn a_page_is_healed_in_place_for_all_that_share_it() {
    const GENERATIONS: u64 = 50;
    let site = Site::clustered();
    let pages = Arc::new(Pages(Arc::downgrade(site.store.local())));
    let scrubber = site.scrubber_with(on_request(), Some(pages));
    for generation in 0..GENERATIONS {
        site.dump("job", 0..40 + generation);
    }
    let free = site.store.local().region().usage().free_bytes;
    for damaged in [3, 4, 23] {
        site.flip_page(damaged);
    }
    let found = scrub(&site, "job@2");
    assert!(
        found.damaged.len() == 1 && found.damaged[0].mended,
        "{found:?}"
    );
    assert_eq!(found.damaged[0].damage.len(), 3);
    assert_eq!(scrubber.counters().pages_healed.value(), 3);
    // All the others were healed with it, and nothing was stored a second time.
    let all = scrub(&site, "");
    assert_eq!((all.checkpoints, all.damaged.len()), (GENERATIONS, 0));
    assert_eq!(scrubber.counters().pages_healed.value(), 3);
    assert_eq!(site.store.local().region().usage().free_bytes, free);
    assert!(site.listed("job@2").damaged.is_empty());
}

#[test]
fn damage_is_marked_for_the_cluster_while_it_lasts() {
    let site = Site::clustered();
    let _scrubber = site.scrubber(on_request());
    site.dump("job", 0..40);
    site.flip_page(23);
    assert_eq!(scrub(&site, "job@1").damaged.len(), 1);
    assert_eq!(site.marked("job", 1), ["self"]);
    site.flip_page(23);
    assert!(scrub(&site, "job@1").damaged.is_empty());
    assert!(site.marked("job", 1).is_empty());
}

#[test]
fn a_copy_is_relied_on_when_it_was_read_lately() {
    let site = Site::clustered();
    let scrubber = site.scrubber(on_request());
    let ids = ["one", "two"].map(|job| site.dump(job, 0..40).id);
    let ask = || {
        let asked = request::Verify {
            checkpoints: ids.iter().cloned().chain(["0".repeat(32)]).collect(),
            within_s: 3600,
        };
        let mut answer = site.scrub().verified(&asked).unwrap();
        answer.whole.sort_unstable();
        assert_eq!(answer.missing.len(), 1);
        answer
    };
    // Never read, by this daemon or one before.
    let answer = ask();
    assert!(answer.whole.is_empty() && answer.damaged.is_empty());
    let _scrubbing = scrubber.start().unwrap();
    let mut both = ids.to_vec();
    both.sort_unstable();
    wait_until("they are read", || ask().whole == both);
    // What they share was read once.
    let read = scrubber.counters().read_bytes.value() / 4096;
    assert!(read < 60 + 40, "{read} pages");
    assert_eq!(scrubber.counters().checkpoints.value(), 2);
    site.flip_page(3);
    scrub(&site, "one@1");
    let answer = ask();
    assert_eq!(answer.damaged, &ids[..1]);
    let many = request::Verify {
        checkpoints: vec!["0".repeat(32); request::MAX_VERIFY + 1],
        within_s: 0,
    };
    site.scrub().verified(&many).unwrap_err();
}

/// A pass reads what many checkpoints share once, and lists the checkpoints now and then, not once for each.
#[test]
fn a_pass_over_many_generations_is_linear() {
    const GENERATIONS: u64 = 300;
    let site = Site::of(64 << 20);
    for generation in 0..GENERATIONS {
        site.dump("job", 0..100 + generation % 2);
    }
    let scrubber = site.scrubber(every(Duration::from_secs(86_400)));
    let memory = serde_json::json!({"v": 1, "verified_unix_ms": {}});
    std::fs::write(site.memory(), memory.to_string()).unwrap();
    let ids: Vec<_> = site.store.list(Some(&"job".parse().unwrap())).unwrap();
    let asked = request::Verify {
        checkpoints: ids.into_iter().map(|record| record.id).collect(),
        within_s: 3600,
    };
    let _scrubbing = scrubber.start().unwrap();
    wait_until("all are read", || {
        site.scrub().verified(&asked).unwrap().whole.len() == asked.checkpoints.len()
    });
    let counters = scrubber.counters();
    // The pages that they share, and of each its manifest's and images'.
    let read = counters.read_bytes.value() / 4096;
    assert!(read < 100 + 8 * GENERATIONS, "{read} pages");
    let listings = counters.listings.value();
    assert!(listings <= 3, "{listings} listings");
}

impl Mend for Fake {
    fn heal(&self, _: &Checkpoint, _: &[String], _: &[DamagedPage]) -> Result<u64, StoreError> {
        Err(StoreError::ReadOnly {
            reason: "the medium takes no write there".to_owned(),
        })
    }

    fn mend(&self, checkpoint: &Checkpoint, holders: &[String]) -> Result<(), StoreError> {
        assert_eq!(checkpoint.job, "job");
        assert_eq!(checkpoint.id.len(), 32);
        assert_eq!(holders, ["other"]);
        self.asked.fetch_add(1, Ordering::Relaxed);
        match self.way {
            Way::Repairs => flip_page(&self.region, 23),
            Way::Lies => {}
            Way::Refuses => {
                return Err(StoreError::ReadOnly {
                    reason: "other is asleep".to_owned(),
                });
            }
        }
        Ok(())
    }
}

#[test]
fn another_nodes_copy_mends_it() {
    for way in [Way::Repairs, Way::Lies, Way::Refuses] {
        let site = Site::clustered();
        let fake = Arc::new(Fake {
            region: site.region(),
            way,
            asked: AtomicUsize::new(0),
        });
        let mend = Arc::clone(&fake) as Arc<dyn Mend>;
        let scrubber = site.scrubber_with(on_request(), Some(mend));
        site.dump("job", 0..40);
        assert!(scrub(&site, "").damaged.is_empty());
        assert_eq!(fake.asked.load(Ordering::Relaxed), 0);

        site.flip_page(23);
        let found = scrub(&site, "job@1");
        assert_eq!(fake.asked.load(Ordering::Relaxed), 1);
        let [damaged] = &found.damaged[..] else {
            panic!("{found:?}")
        };
        let repaired = way == Way::Repairs;
        assert_eq!(damaged.mended, repaired, "{damaged:?}");
        assert_eq!(site.listed("job@1").damaged.is_empty(), repaired);
        // Another node has it: a restore reads from there.
        site.store.check_restorable("job").unwrap();
        let counters = scrubber.counters();
        let counted = (counters.mended.value(), counters.mends_failed.value());
        assert_eq!(counted, if repaired { (1, 0) } else { (0, 1) });
        match way {
            Way::Repairs => assert!(damaged.reason.is_empty()),
            Way::Lies => assert!(damaged.reason.contains("damaged, too"), "{damaged:?}"),
            Way::Refuses => assert!(damaged.reason.contains("other is asleep"), "{damaged:?}"),
        }
    }
}

#[test]
fn the_background_finds_damage_by_itself() {
    let site = Site::new();
    site.dump("job", 0..40);
    site.dump("job", 0..41);
    let scrubber = site.scrubber(every(Duration::from_millis(200)));
    let _scrubbing = scrubber.start().unwrap();
    wait_until("two rounds", || {
        scrubber.counters().checkpoints.value() >= 4
    });
    assert_eq!(scrubber.counters().damaged.value(), 0);
    site.flip_page(40);
    wait_until("the damage", || !site.listed("job@2").damaged.is_empty());
    assert!(site.listed("job@1").damaged.is_empty());
}

#[test]
fn suspects_are_read_without_a_period_and_nothing_else_is() {
    let site = Site::new();
    let scrubber = site.scrubber(on_request());
    let _scrubbing = scrubber.start().unwrap();
    let checkpoint = site.dump("job", 0..40);
    site.dump("other", 100..140);
    site.flip_page(3);
    site.flip_page(103);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(scrubber.counters().checkpoints.value(), 0);
    site.store.suspect(&checkpoint.id);
    wait_until("the damage", || !site.listed("job@1").damaged.is_empty());
    assert!(site.listed("other@1").damaged.is_empty());
    assert_eq!(scrubber.counters().checkpoints.value(), 1);
}

#[test]
fn a_dump_pauses_it() {
    let site = Site::new();
    site.dump("job", 0..40);
    let (session, mut sink) = site.begin("frozen", 100..120);
    let scrubber = site.scrubber(every(Duration::from_millis(1)));
    let _scrubbing = scrubber.start().unwrap();
    wait_until("the pause", || scrubber.is_paused());
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(scrubber.counters().read_bytes.value(), 0);
    assert!(scrubber.is_paused());
    sink.close().unwrap();
    drop(sink);
    site.store.abort_session(&session).unwrap();
    wait_until("it goes on", || scrubber.counters().checkpoints.value() > 3);
}

#[test]
fn it_goes_on_behind_where_it_was() {
    let site = Site::new();
    let first = site.dump("first", 0..40).id;
    let second = site.dump("second", 100..140).id;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = u64::try_from(now.as_millis()).unwrap();
    let (hour, two) = (now - 3_600_000, now - 7_200_000);
    let written = |at: [u64; 2]| {
        let verified = HashMap::from([(&first, at[0]), (&second, at[1])]);
        serde_json::json!({"v": 1, "verified_unix_ms": verified})
    };
    // Whoever was verified earlier is the next, whatever the order of the seals.
    for at in [[hour, two], [two, hour]] {
        std::fs::write(site.memory(), written(at).to_string()).unwrap();
        let options = ScrubOptions {
            period: Some(Duration::from_secs(86_400)),
            memory: Some(site.memory()),
            ..ScrubOptions::default()
        };
        let scrubber = site.scrubber(options);
        let scrubbing = scrubber.start().unwrap();
        wait_until("the first one", || {
            scrubber.counters().checkpoints.value() == 1
        });
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(scrubber.counters().checkpoints.value(), 1);
        drop(scrubbing);
        let after = std::fs::read(site.memory()).unwrap();
        let after: serde_json::Value = serde_json::from_slice(&after).unwrap();
        let verified = |id: &String| after["verified_unix_ms"][id].as_u64().unwrap();
        let (next, other) = if at[0] < at[1] {
            (&first, &second)
        } else {
            (&second, &first)
        };
        assert!(verified(next) >= now, "{after}");
        assert_eq!(verified(other), hour, "{after}");
    }
}
