//! Retention over a real store: what goes by the rules, what never does, and that what is left is as it was.

use std::os::fd::OwnedFd;
use std::path::Path;

use permafrost_clustered::{ClusteredStore, PolicyFile};
use permafrost_criu::directory::ExportedPart;
use permafrost_criu::frontend::PageSink as _;
use permafrost_protocol::control::{ErrorCode, Pruned, ReportedError, RetentionRule, request};
use permafrost_tests::random::Random;

use crate::site::{Site, images, page};

fn rule(keep_last: u64) -> RetentionRule {
    RetentionRule {
        namespace: "a".to_owned(),
        keep_last: Some(keep_last),
        ..RetentionRule::default()
    }
}

fn set(store: &ClusteredStore, rule: RetentionRule) {
    let set = request::SetRetention {
        rule: Some(rule),
        remove: false,
    };
    store.set_retention(&set).unwrap();
}

fn prune(store: &ClusteredStore, dry_run: bool) -> Pruned {
    let prune = request::Prune {
        dry_run,
        ..request::Prune::default()
    };
    store.prune(&prune).unwrap()
}

fn left(store: &ClusteredStore, job: &str) -> Vec<u64> {
    let listed = store.list(Some(&job.parse().unwrap())).unwrap();
    listed.iter().map(|record| record.generation).collect()
}

fn rules(pruned: &Pruned) -> Vec<&str> {
    let generations = pruned.generations.iter();
    generations.map(|one| one.rule.as_str()).collect()
}

fn remove(checkpoint: &str) -> request::Remove {
    request::Remove {
        checkpoint: checkpoint.to_owned(),
        ..request::Remove::default()
    }
}

/// Returns the pages of a checkpoint as they are exported.
pub(crate) fn exported(store: &ClusteredStore, dir: &Path, checkpoint: &str) -> Vec<u8> {
    let out = tempfile::tempdir_in(dir).unwrap();
    let directory = OwnedFd::from(std::fs::File::open(out.path()).unwrap());
    store
        .export(checkpoint, ExportedPart::All, directory, &mut |_, _| {})
        .unwrap();
    let files = std::fs::read_dir(out.path()).unwrap();
    let mut names = files.map(|file| file.unwrap().path());
    let is_pages = |path: &std::path::PathBuf| path.to_string_lossy().contains("pages-");
    std::fs::read(names.find(is_pages).unwrap()).unwrap()
}

#[test]
fn rules_remove_the_old_and_say_why_the_others_stay() {
    let site = Site::new();
    for _ in 0..5 {
        site.dump("a/job", 0..4);
        site.dump("b/job", 0..2);
    }
    site.store.pin("a/job@1", true).unwrap();
    set(&site.store, rule(2));
    let asked = prune(&site.store, true);
    let expected = ["pinned", "expired", "expired", "keep-last", "newest-whole"];
    assert_eq!(rules(&asked)[..5], expected);
    assert_eq!(
        rules(&asked)[5..],
        ["no-rule", "no-rule", "no-rule", "no-rule", "newest-whole"]
    );
    assert_eq!((asked.removed, left(&site.store, "a/job").len()), (2, 5));

    let done = prune(&site.store, false);
    assert_eq!((done.removed, rules(&done)), (2, rules(&asked)));
    assert_eq!(left(&site.store, "a/job"), [1, 4, 5]);
    assert_eq!(left(&site.store, "b/job").len(), 5);
    let numbers: Vec<_> = site.store.retention_numbers().removed().collect();
    assert_eq!((numbers[0].0, numbers[0].1), ("expired", 2));
    assert!(prune(&site.store, false).removed == 0);
}

#[test]
fn a_dump_is_followed_by_the_rules_of_its_job() {
    let site = Site::new();
    set(&site.store, rule(1));
    for _ in 0..3 {
        site.dump("a/job", 0..2);
        site.dump("a/other", 0..2);
        site.store.apply_to_sealed(&|| false);
    }
    assert_eq!(left(&site.store, "a/job"), [3]);
    assert_eq!(left(&site.store, "a/other"), [3]);
}

#[test]
fn what_is_being_read_stays() {
    let site = Site::new();
    let first = site.dump("a/job", 0..2);
    site.dump("a/job", 0..3);
    set(&site.store, rule(1));
    let reader = site.store.local().open_fetch(&first.id, "").unwrap();
    assert_eq!(
        rules(&prune(&site.store, false)),
        ["in-use", "newest-whole"]
    );
    drop(reader);
    assert_eq!(left(&site.store, "a/job"), [1, 2]);
}

#[test]
fn the_newest_good_one_stays_although_a_newer_one_is_damaged() {
    let site = Site::new();
    for salts in [0..4, 0..5, 0..6] {
        site.dump("a/job", salts);
    }
    set(&site.store, rule(1));
    // A page that the newest one alone has.
    site.flip_page(5);
    site.scrubber(Default::default())
        .scrub("", false, &mut |_, _| {})
        .unwrap();
    assert!(!site.listed("a/job@3").damaged.is_empty());
    let done = prune(&site.store, false);
    assert_eq!(rules(&done), ["expired", "newest-whole", "newest"]);
    assert_eq!(left(&site.store, "a/job"), [2, 3]);
    // Nor does it go by name.
    let refused = site.store.remove(&remove("a/job@2")).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Conflict);
    assert!(refused.hint().contains("--last"), "{refused}");
    // The damaged one may, as there is a good one.
    site.store.remove(&remove("a/job@3")).unwrap();
    let last = request::Remove {
        last: true,
        ..remove("a/job@2")
    };
    site.store.remove(&last).unwrap();
}

#[test]
fn a_quota_refuses_or_makes_room() {
    let site = Site::new();
    let limited = |over_quota: &str| RetentionRule {
        namespace: "a".to_owned(),
        max_checkpoints: Some(2),
        over_quota: over_quota.to_owned(),
        ..RetentionRule::default()
    };
    set(&site.store, limited(""));
    for _ in 0..2 {
        site.store.make_room("a/job", 0, false).unwrap();
        site.dump("a/job", 0..2);
    }
    let refused = site.store.make_room("a/job", 0, false).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::NoSpace);
    assert!(
        refused
            .to_string()
            .contains("may have 2 checkpoints, and has 2"),
        "{refused}"
    );
    assert!(
        refused.hint().contains("permafrost retention set"),
        "{refused}"
    );
    site.store.make_room("b/job", 0, false).unwrap();
    // Also where nobody has asked before: the store checks it.
    assert!(site.store.local().check_may_open("a/job").is_err());

    set(&site.store, limited("remove-oldest"));
    site.store.make_room("a/job", 0, false).unwrap();
    assert_eq!(left(&site.store, "a/job"), [2]);
    site.dump("a/job", 0..2);
    for generation in [2, 3] {
        let name = format!("a/job@{generation}");
        site.store.pin(&name, true).unwrap();
    }
    let refused = site.store.make_room("a/job", 0, false).unwrap_err();
    assert!(
        refused.to_string().contains("must not be removed"),
        "{refused}"
    );
    assert_eq!(left(&site.store, "a/job"), [2, 3]);
}

#[test]
fn a_quota_of_bytes_refuses_a_first_dump_that_cannot_fit_and_a_seal_that_does_not() {
    let site = Site::new();
    let limited = RetentionRule {
        namespace: "a".to_owned(),
        max_bytes: Some(100 << 10),
        ..RetentionRule::default()
    };
    set(&site.store, limited);
    assert!(site.store.make_room("a/job", 200 << 10, false).is_err());
    site.store.make_room("a/job", 10 << 10, false).unwrap();
    let (session, mut sink) = site.begin("a/job", 0..100);
    sink.close().unwrap();
    let refused = site.store.seal_session(&session, images()).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::NoSpace);
    assert!(site.store.list(None).unwrap().is_empty());
}

#[test]
fn policies_that_cannot_be_used_remove_nothing() {
    let site = Site::new();
    let path = site.dir.path().join("retention.json");
    let open = || {
        let keeper = Box::new(PolicyFile::new(path.clone()));
        let local = std::sync::Arc::clone(site.store.local());
        ClusteredStore::with_policies(
            local,
            None,
            std::sync::Arc::new(()),
            keeper,
            Box::new(|_, _| {}),
        )
    };
    for _ in 0..3 {
        site.dump("a/job", 0..2);
    }
    let store = open();
    set(&store, rule(1));
    let whole = std::fs::read(&path).unwrap();
    for (damaged, code) in [
        (b"{".to_vec(), ErrorCode::Corrupt),
        (whole[..whole.len() / 2].to_vec(), ErrorCode::Corrupt),
        (
            String::from_utf8_lossy(&whole)
                .replacen(":1", ":9", 1)
                .into_bytes(),
            ErrorCode::Conflict,
        ),
    ] {
        std::fs::write(&path, &damaged).unwrap();
        for store in [&store, &open()] {
            assert!(store.apply_retention(true, &|| false).is_err());
            let refused = store.prune(&request::Prune::default()).unwrap_err();
            assert_eq!(refused.code(), code);
            let set = request::SetRetention {
                rule: Some(rule(1)),
                remove: false,
            };
            assert!(
                store.set_retention(&set).is_err(),
                "it would discard the others"
            );
            assert!(!refused.hint().is_empty());
        }
        assert_eq!(std::fs::read(&path).unwrap(), damaged);
    }
    assert_eq!(left(&site.store, "a/job"), [1, 2, 3]);
    // Put back, they hold again; kept, they hold after a restart.
    std::fs::write(&path, &whole).unwrap();
    open().apply_retention(true, &|| false).unwrap();
    assert_eq!(left(&site.store, "a/job"), [3]);
}

#[test]
fn generations_go_in_any_order_and_those_that_are_left_are_exact() {
    for seed in 0..4 {
        let site = Site::new();
        let mut random = Random::of(seed);
        let mut contents = Vec::new();
        for generation in 1..=12_u64 {
            let first = random.below(12);
            let end = first + 4 + random.below(20);
            site.dump("a/job", first..end);
            let pages: Vec<u8> = (first..end).flat_map(page).collect();
            contents.push((generation, pages));
        }
        while contents.len() > 1 {
            let at = usize::try_from(random.below(contents.len() as u64)).unwrap();
            let (generation, _) = contents.remove(at);
            site.store
                .remove(&remove(&format!("a/job@{generation}")))
                .unwrap();
            if random.below(3) == 0 {
                site.store.local().gc(false, &mut |_, _| {}).unwrap();
            }
            for (generation, pages) in &contents {
                let name = format!("a/job@{generation}");
                assert!(
                    exported(&site.store, site.dir.path(), &name) == *pages,
                    "{seed} {name}"
                );
            }
        }
        let used = site.store.local().usage_of("a");
        let (_, pages) = &contents[0];
        assert!(
            used.bytes >= pages.len() as u64,
            "it has all of its pages to itself now"
        );
    }
}
