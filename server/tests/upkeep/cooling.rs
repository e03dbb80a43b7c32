//! Segments move to slower tiers by age, under pressure and on request, and back.

use std::time::Duration;

use permafrost_cooling::CoolingRules;
use permafrost_protocol::control::{RegionMedia, request};
use permafrost_store::Store;

use crate::retention::exported;
use crate::site::{Site, page};

const PAGES: std::ops::Range<u64> = 0..200;

/// Makes a site with a file of tier `hdd` beside its first, which is faster.
fn site(after: Option<Duration>, above_percent: Option<u8>) -> Site {
    let site = Site::with(4 << 20, |parts| {
        parts.cooling = CoolingRules {
            after,
            above_percent,
        };
    });
    let path = site.dir.path().canonicalize().unwrap().join("slow");
    let add = request::Media {
        action: "add".to_owned(),
        medium: path.to_str().unwrap().to_owned(),
        tier: "hdd".to_owned(),
        size_bytes: 8 << 20,
        ..request::Media::default()
    };
    site.store.local().media(&add, &mut |_, _| {}).unwrap();
    site
}

fn request(store: &Store, action: &str, checkpoint: &str, dry_run: bool) -> RegionMedia {
    let request = request::Media {
        action: action.to_owned(),
        checkpoint: checkpoint.to_owned(),
        dry_run,
        ..request::Media::default()
    };
    store.media(&request, &mut |_, _| {}).unwrap()
}

/// Returns the bytes in use on the fast and on the slow file.
fn used(store: &Store) -> (u64, u64) {
    let media = request(store, "ls", "", false).media;
    (media[0].used_bytes, media[1].used_bytes)
}

fn assert_content(site: &Site, name: &str, pages: std::ops::Range<u64>) {
    let expected: Vec<u8> = pages.flat_map(page).collect();
    assert!(
        exported(&site.store, site.dir.path(), name) == expected,
        "{name}"
    );
}

#[test]
fn old_generations_cool_by_themselves_and_what_the_newest_needs_stays() {
    let site = site(Some(Duration::ZERO), None);
    site.dump("a/job", PAGES);
    let shared_and_new = 0..300;
    site.dump("a/job", 1000..1200);
    site.dump("a/other", shared_and_new.clone());
    let store = site.store.local();
    let rooms = store.tier_rooms();
    assert_eq!((rooms.len(), &*rooms[1].tier), (2, "hdd"));
    assert!(rooms.iter().all(|room| !room.cold && room.free_bytes > 0));
    let (fast, slow) = used(store);
    assert_eq!(slow, 0);
    assert!(store.clean_in_background(&|| false).unwrap());
    let cooled = used(store);
    assert!(cooled.1 > 0 && cooled.0 < fast, "{cooled:?}");
    assert_eq!(cooled.0 + cooled.1, fast);
    // No more than the older generation of the one job.
    assert!(cooled.1 <= 15 * (64 << 10), "{cooled:?}");
    assert_content(&site, "a/job@1", PAGES);
    assert_content(&site, "a/job@2", 1000..1200);
    assert_content(&site, "a/other", shared_and_new);
    assert!(store.counters().tiered_bytes.value() >= cooled.1);
}

#[test]
fn nothing_cools_before_its_time_or_while_the_tier_has_room() {
    let site = site(Some(Duration::from_secs(3600)), Some(90));
    site.dump("a/job", PAGES);
    site.dump("a/job", 1000..1200);
    let store = site.store.local();
    assert!(!store.clean_in_background(&|| false).unwrap());
    assert_eq!(request(store, "cool", "", true).moved_bytes, 0);
    assert_eq!(used(store).1, 0);
}

#[test]
fn under_pressure_the_coldest_go_and_newest_generations_last() {
    let site = site(None, Some(30));
    site.dump("a/job", PAGES);
    site.dump("a/job", 1000..1200);
    let store = site.store.local();
    let planned = request(store, "cool", "", true).moved_bytes;
    assert!(planned > 0);
    assert_eq!(used(store).1, 0, "only counted");
    assert_eq!(request(store, "cool", "", false).moved_bytes, planned);
    let media = request(store, "ls", "", false).media;
    assert!(media[0].used_bytes * 100 <= media[0].capacity_bytes * 30);
    assert_content(&site, "a/job@1", PAGES);
    assert_content(&site, "a/job@2", 1000..1200);
}

#[test]
fn what_is_often_restored_comes_back() {
    let site = site(None, Some(90));
    site.dump("a/job", PAGES);
    let record = site.dump("a/job", 1000..1200);
    let store = site.store.local();
    let cooled = request(store, "cool", "a/job@2", false).moved_bytes;
    assert!(cooled > 0 && used(store).1 == cooled);
    let warmed = request(store, "warm", "a/job", false).moved_bytes;
    assert_eq!((warmed, used(store).1), (cooled, 0));
    request(store, "cool", "a/job", false);
    for _ in 0..2 {
        store.restored(&record, true, store.restoring(0), 0);
    }
    assert!(store.clean_in_background(&|| false).unwrap());
    assert_eq!(used(store).1, 0);
    assert_content(&site, "a/job@2", 1000..1200);
    let unknown = request::Media {
        action: "warm".to_owned(),
        checkpoint: "a/nobody".to_owned(),
        ..request::Media::default()
    };
    store.media(&unknown, &mut |_, _| {}).unwrap_err();
}
