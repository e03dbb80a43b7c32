//! Checkpoints in a cold tier: their objects are missing or damaged, their store is away, the fast tier is full.

use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use permafrost_cluster::scrub::{Mend, ScrubOptions};
use permafrost_protocol::control::{Checkpoint, ErrorCode, RegionMedia, ReportedError, request};
use permafrost_protocol::wire::message::request::Verify;
use permafrost_store::{DamagedPage, Store, StoreError};

use crate::retention::exported;
use crate::site::{Site, address, page, wait_until};

const PAGES: std::ops::Range<u64> = 0..200;

fn on_request() -> ScrubOptions {
    ScrubOptions {
        period: None,
        ..ScrubOptions::default()
    }
}

/// A site with a cold tier in a directory.
struct Cold {
    site: Site,
    store: PathBuf,
}

impl Cold {
    fn add_to(site: Site) -> Self {
        let store = Self::add_tier(&site, "");
        Self { site, store }
    }

    /// Adds a cold tier, and returns the directory that is its store.
    fn add_tier(site: &Site, suffix: &str) -> PathBuf {
        let dir = site.dir.path().canonicalize().unwrap();
        let file = dir.join(format!("cold{suffix}"));
        let store = dir.join(format!("store{suffix}"));
        std::fs::create_dir(&store).unwrap();
        let add = request::Media {
            action: "add".to_owned(),
            medium: file.to_str().unwrap().to_owned(),
            size_bytes: 16 << 20,
            store: format!("file://{}", store.display()),
            ..request::Media::default()
        };
        site.store.local().media(&add, &mut |_, _| {}).unwrap();
        store
    }

    fn region(&self, action: &str, medium: &str, checkpoint: &str) -> RegionMedia {
        let request = request::Media {
            action: action.to_owned(),
            medium: medium.to_owned(),
            checkpoint: checkpoint.to_owned(),
            ..request::Media::default()
        };
        let local = self.site.store.local();
        local.media(&request, &mut |_, _| {}).unwrap()
    }

    fn cool(&self, checkpoint: &str) -> u64 {
        self.region("cool", "", checkpoint).moved_bytes
    }

    /// Bytes in use on the fast file and on the cold one.
    fn used(&self) -> (u64, u64) {
        let media = self.region("ls", "", "").media;
        (media[0].used_bytes, media[1].used_bytes)
    }

    /// Objects of pages in the order of their slots, without the marker.
    fn objects(&self) -> Vec<PathBuf> {
        let directories = std::fs::read_dir(&self.store).unwrap();
        let directories = directories.map(|entry| entry.unwrap().path());
        let objects = directories.filter(|path| path.is_dir()).flat_map(|path| {
            let objects = std::fs::read_dir(path).unwrap();
            objects.map(|entry| entry.unwrap().path())
        });
        let mut objects: Vec<_> = objects.collect();
        objects.sort();
        objects
    }

    fn set_away(&self, away: bool) {
        let mounted = self.store.with_extension("elsewhere");
        match away {
            true => {
                std::fs::rename(&self.store, mounted).unwrap();
                std::fs::create_dir(&self.store).unwrap();
            }
            false => {
                std::fs::remove_dir(&self.store).unwrap();
                std::fs::rename(mounted, &self.store).unwrap();
            }
        }
    }

    fn assert_content(&self, name: &str, pages: std::ops::Range<u64>) {
        let expected: Vec<u8> = pages.flat_map(page).collect();
        let found = exported(&self.site.store, self.site.dir.path(), name);
        assert!(found == expected, "{name}");
    }
}

/// Another node that has all pages, and provides single pages only.
struct Pages(Weak<Store>);

impl Mend for Pages {
    fn heal(
        &self,
        checkpoint: &Checkpoint,
        _: &[String],
        pages: &[DamagedPage],
    ) -> Result<u64, StoreError> {
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
fn a_missing_object_is_found_by_the_list_marked_and_healed() {
    let cold = Cold::add_to(Site::clustered());
    let site = &cold.site;
    let _alone = site.scrubber(on_request());
    let id = site.dump("job", PAGES).id;
    assert!(cold.cool("job@1") > 0);
    let scrub = |reference: &str| {
        let scrub = site.scrub();
        scrub.scrub(reference, false, &mut |_, _| {}).unwrap()
    };
    let all = scrub("");
    // Counted, and never as verified.
    assert!(
        all.damaged.is_empty() && all.unverified_pages >= 100,
        "{all:?}"
    );
    assert_eq!(site.scrub().status().unverified_pages, all.unverified_pages);
    let asked = Verify {
        checkpoints: vec![id],
        within_s: 3600,
    };
    assert!(site.scrub().verified(&asked).unwrap().whole.is_empty());
    let one = scrub("job@1");
    assert_eq!((one.damaged.len(), one.unverified_pages), (0, 0));
    assert_eq!(site.scrub().status().unverified_pages, 0);
    assert_eq!(site.scrub().verified(&asked).unwrap().whole.len(), 1);

    let gone = cold.objects().remove(0);
    std::fs::remove_file(&gone).unwrap();
    let found = scrub("");
    let [damaged] = &found.damaged[..] else {
        panic!("{found:?}")
    };
    let name = gone.file_name().unwrap().to_str().unwrap();
    assert_eq!(
        (damaged.checkpoint.as_str(), damaged.mended),
        ("job@1", false)
    );
    assert!(damaged.damage[0].contains(name), "{damaged:?}");
    assert_eq!(site.marked("job", 1), ["self"]);
    assert_eq!(
        site.store
            .local()
            .damage(&damaged.id)
            .map(|damage| damage.contains(name)),
        Some(true)
    );

    let pages = Arc::new(Pages(Arc::downgrade(site.store.local())));
    let _healing = site.scrubber_with(on_request(), Some(pages));
    let healed = scrub("");
    assert!(healed.damaged[0].mended, "{healed:?}");
    assert!(site.marked("job", 1).is_empty());
    cold.assert_content("job@1", PAGES);
}

#[test]
fn a_page_that_is_healed_while_the_tier_is_away_needs_no_fresh_copy() {
    let cold = Cold::add_to(Site::clustered());
    let site = &cold.site;
    site.dump("job", PAGES);
    site.dump("job", 0..400);
    assert!(cold.cool("job@1") > 0);
    let pages = Arc::new(Pages(Arc::downgrade(site.store.local())));
    let _healing = site.scrubber_with(on_request(), Some(pages));
    let scrub = || {
        let scrub = site.scrub();
        scrub.scrub("job@2", false, &mut |_, _| {}).unwrap()
    };
    // One of its own, which are not in the cold tier.
    site.flip_page(390);
    cold.set_away(true);
    let found = scrub();
    let [damaged] = &found.damaged[..] else {
        panic!("{found:?}")
    };
    assert!(
        !damaged.mended && damaged.reason.contains("written anew"),
        "{damaged:?}"
    );
    assert_eq!(site.scrub().counters().pages_healed.value(), 1);
    assert_eq!(site.marked("job", 2), ["self"]);
    cold.set_away(false);
    assert!(scrub().damaged.is_empty());
    assert!(site.marked("job", 2).is_empty());
    cold.assert_content("job@2", 0..400);
}

#[test]
fn a_tier_that_is_away_hides_nothing_of_another_one() {
    let cold = Cold::add_to(Site::new());
    let site = &cold.site;
    let _scrubber = site.scrubber(on_request());
    site.dump("job", PAGES);
    assert!(cold.cool("job@1") > 0);
    std::fs::remove_file(cold.objects().remove(0)).unwrap();
    std::fs::remove_dir_all(Cold::add_tier(site, "2")).unwrap();
    let found = site.scrub().scrub("", false, &mut |_, _| {}).unwrap();
    assert_eq!(found.damaged.len(), 1, "{found:?}");
}

#[test]
fn who_looks_at_a_checkpoint_moves_nothing() {
    let cold = Cold::add_to(Site::new());
    let site = &cold.site;
    let record = site.dump("job", PAGES);
    assert!(cold.cool("job@1") > 0);
    let before = cold.used();
    site.store.show("job@1").unwrap();
    let local = site.store.local();
    let fetch = local.open_fetch(&record.id, "").unwrap();
    // A few of its pages.
    let runs = fetch.runs(0, address(20) / 4096, 2);
    assert!(runs.map(Result::unwrap).count() > 0);
    assert_eq!(cold.used(), before);
    // All of them.
    fetch.recall(local).unwrap();
    assert!(cold.used().0 > before.0);
    drop(fetch);
    cold.assert_content("job@1", PAGES);
}

#[test]
fn the_store_is_listed_for_what_crashes_leave_and_not_at_each_pass() {
    let cold = Cold::add_to(Site::new());
    let site = &cold.site;
    let record = site.dump("job", PAGES);
    assert!(cold.cool("job@1") > 0);
    let directory = cold.objects()[0].parent().unwrap().to_owned();
    let stray = directory.join("9-0000000000000001");
    let pass = || {
        let _ = site.store.local().clean_in_background(&|| false).unwrap();
    };
    std::fs::write(&stray, b"x").unwrap();
    pass();
    assert!(!stray.exists());
    // The next list is due in a day.
    std::fs::write(&stray, b"x").unwrap();
    pass();
    assert!(stray.exists());
    // What is removed here is known without one.
    site.store.local().delete(&record).unwrap();
    pass();
    assert_eq!(cold.objects(), [stray]);
}

#[test]
fn the_background_lists_once_a_period_and_reads_what_is_missing() {
    let cold = Cold::add_to(Site::new());
    let site = &cold.site;
    site.dump("job", PAGES);
    cold.cool("job@1");
    // An object that has pages of both checkpoints would damage both.
    let of_job = cold.objects().remove(0);
    site.dump("other", 1000..1200);
    cold.cool("other@1");
    std::fs::remove_file(of_job).unwrap();
    let scrubber = site.scrubber(ScrubOptions {
        period: Some(Duration::from_secs(86_400)),
        share_percent: 100,
        memory: None,
    });
    let _scrubbing = scrubber.start().unwrap();
    wait_until("it is found", || site.scrub().status().quarantined == 1);
    wait_until("the other is counted", || {
        site.scrub().status().unverified_pages >= 100
    });
}

#[test]
fn a_damaged_object_is_found_when_it_is_fetched() {
    let cold = Cold::add_to(Site::new());
    let site = &cold.site;
    let _scrubber = site.scrubber(on_request());
    site.dump("job", PAGES);
    cold.cool("job@1");
    let object = cold.objects().remove(0);
    let mut bytes = std::fs::read(&object).unwrap();
    bytes[300] ^= 1;
    std::fs::write(&object, bytes).unwrap();
    // As long as it was, so a list does not show it.
    let left = site.store.verify("", false, &mut |_, _| {}).unwrap();
    assert!(
        left.damage.is_empty() && left.unverified_pages > 0,
        "{left:?}"
    );
    for (reference, fetch) in [("job", false), ("", true)] {
        let found = site.store.verify(reference, fetch, &mut |_, _| {}).unwrap();
        assert!(
            !found.damage.is_empty() && found.unverified_pages == 0,
            "{found:?}"
        );
    }
    let scrub = site.scrub();
    let found = scrub.scrub("", true, &mut |_, _| {}).unwrap();
    assert_eq!(found.damaged.len(), 1);

    // What is away is neither whole nor damaged.
    cold.set_away(true);
    let away = scrub.scrub("", true, &mut |_, _| {}).unwrap();
    assert!(
        away.unverified_pages > 0 && away.away.contains("cold tier"),
        "{away:?}"
    );
    assert_eq!(scrub.status().quarantined, 1, "as it was");
    let away = site.store.verify("job", false, &mut |_, _| {}).unwrap();
    assert!(
        away.unverified_pages > 0 && !away.away.is_empty(),
        "{away:?}"
    );
    cold.set_away(false);
}

#[test]
fn a_store_that_is_away_damages_nothing_and_a_restore_says_so() {
    let cold = Cold::add_to(Site::new());
    let site = &cold.site;
    let _scrubber = site.scrubber(on_request());
    let record = site.dump("job", PAGES);
    cold.cool("job@1");
    cold.set_away(true);
    let found = site.scrub().scrub("", true, &mut |_, _| {}).unwrap();
    assert!(
        found.damaged.is_empty() && found.unverified_pages > 0,
        "{found:?}"
    );
    let refused = site.store.local().open(record).map(|_| ()).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Unavailable, "{refused}");
    cold.set_away(false);
    cold.assert_content("job@1", PAGES);
}

#[test]
fn what_a_reader_or_a_dump_has_is_not_cooled_under_it() {
    let cold = Cold::add_to(Site::with(16 << 20, |parts| {
        parts.cooling.after = Some(Duration::ZERO);
    }));
    let site = &cold.site;
    let record = site.dump("job", PAGES);
    site.dump("job", 1000..1200);
    let local = site.store.local();
    let reader = local.open(record.clone()).unwrap();
    assert_eq!(cold.cool("job@1"), 0);
    assert_eq!(cold.cool(""), 0);
    drop(reader);
    let parent = local.parent(&record).unwrap();
    assert_eq!(cold.cool("job@1"), 0);
    drop(parent);
    // It was used just now, which age counts by.
    assert!(cold.cool("job@1") > 0);
    cold.assert_content("job@1", PAGES);
}

#[test]
fn a_restore_that_finds_no_room_reads_from_the_store() {
    // 32 slots of 64 KiB, of which some are the region's own.
    let cold = Cold::add_to(Site::of(3 << 20));
    let site = &cold.site;
    site.dump("job", PAGES);
    assert!(cold.cool("job@1") > 0);
    let mut filled = 0;
    for job in ["b", "c", "d", "e"] {
        let begun = site.begin(job, 0..0);
        let (session, mut sink) = begun;
        let sent = (0..120).try_for_each(|n| {
            use permafrost_criu::frontend::PageSink as _;
            let salt = 10_000 * (filled + 1) + n;
            sink.pages(
                address(salt),
                permafrost_protocol::pageserver::PE_PRESENT,
                &page(salt),
            )
        });
        use permafrost_criu::frontend::PageSink as _;
        if sent.is_err() || sink.close().is_err() {
            break;
        }
        if site
            .store
            .seal_session(&session, crate::site::images())
            .is_err()
        {
            break;
        }
        filled += 1;
    }
    assert!(filled > 0);
    let (_, before) = cold.used();
    cold.assert_content("job@1", PAGES);
    let (_, after) = cold.used();
    assert!(after > 0 && after <= before, "{before} {after}");
    // A dump is not compared with it: that would wait for the store. It is stored whole, if there is room.
    let record = site.listed("job@1");
    assert!(site.store.local().parent(&record).is_none());
}

#[test]
fn restores_at_once_share_the_room_that_there_is() {
    let cold = Cold::add_to(Site::of(3 << 20));
    let site = &cold.site;
    let records: Vec<_> = (0..3)
        .map(|n| {
            let pages = n * 1000..n * 1000 + 240;
            let record = site.dump(&format!("job{n}"), pages);
            assert!(cold.cool(&format!("job{n}@1")) > 0);
            record
        })
        .collect();
    // Room for two of three at the most.
    for _ in 0..4 {
        std::thread::scope(|scope| {
            for (n, record) in (0..).zip(&records) {
                let cold = &cold;
                scope.spawn(move || {
                    drop(cold.site.store.local().open(record.clone()).unwrap());
                    let dir = tempfile::tempdir().unwrap();
                    let name = format!("job{n}@1");
                    let found = exported(&cold.site.store, dir.path(), &name);
                    let expected: Vec<u8> = (n * 1000..n * 1000 + 240).flat_map(page).collect();
                    assert!(found == expected, "{name}");
                });
            }
        });
        for n in 0..3 {
            cold.cool(&format!("job{n}@1"));
        }
    }
}

#[test]
fn a_cold_tier_that_is_drained_is_read_and_names_what_it_cannot_move() {
    let cold = Cold::add_to(Site::new());
    let site = &cold.site;
    site.dump("job", PAGES);
    site.dump("whole", 1000..1200);
    cold.cool("job@1");
    let damaged = cold.objects().remove(0);
    cold.cool("whole@1");
    let kept = std::fs::read(&damaged).unwrap();
    std::fs::remove_file(&damaged).unwrap();
    let drained = cold.region("drain", "1", "");
    let [part] = &drained.not_moved[..] else {
        panic!("{drained:?}")
    };
    let name = damaged.file_name().unwrap().to_str().unwrap();
    assert!(part.starts_with("job@1") && part.contains(name), "{part}");
    assert_eq!(drained.media[1].used_bytes, 64 << 10);
    cold.assert_content("whole@1", 1000..1200);
    std::fs::write(&damaged, kept).unwrap();
}
