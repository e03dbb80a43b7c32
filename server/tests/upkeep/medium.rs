//! Media that fail or have lost data: the node reports it, refuses what it cannot keep, and serves what it can.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use permafrost_criu::frontend::PageSink;
use permafrost_metrics::Metrics;
use permafrost_pmem::sim::SimMedium;
use permafrost_pmem::{Medium, OpenOptions, open_medium};
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_server::offline;
use permafrost_store::{CopyRequest, SessionRequest, StoreError};

use super::metrics::fetch;
use super::site::Site;

fn request(job: &str) -> SessionRequest {
    SessionRequest {
        job: job.to_owned(),
        pre_dump: false,
        pre_copy: false,
        seal_follows: true,
        origin: None,
        no_parent: false,
        parent_images: false,
        from_here: true,
        taken_by: "node".to_owned(),
    }
}

#[test]
fn a_medium_that_fails_is_said_and_what_is_stored_is_read() {
    let medium = Arc::new(SimMedium::new(16 << 20));
    let shared = Arc::clone(&medium) as Arc<dyn Medium>;
    let site = Site::over(tempfile::tempdir().unwrap(), shared);
    site.dump("job", 0..20);
    site.store.local().check_writable().unwrap();

    let (_, mut sink) = site.begin("other", 0..20);
    medium.fail_now();
    let refused = sink.close().unwrap_err();
    assert!(
        refused.message.contains("Input/output error"),
        "{refused:?}"
    );

    let failed = site.store.local().check_writable().unwrap_err();
    assert!(matches!(failed, StoreError::ReadOnly { .. }), "{failed}");
    assert_eq!(failed.code(), ErrorCode::Unavailable);
    let status = site.store.local().region_status();
    assert!(status.failure.contains("Input/output error"), "{status:?}");
    // Neither dumps nor copies of others' are begun.
    let replica = CopyRequest {
        session: [7; 16],
        job: "third".to_owned(),
        parent: String::new(),
        compared: std::collections::HashMap::new(),
    };
    for refused in [
        site.store.open_session(request("third")).map(drop),
        site.store.local().open_copy(replica).map(drop),
    ] {
        assert!(
            matches!(refused, Err(StoreError::ReadOnly { .. })),
            "{refused:?}"
        );
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let served = Arc::clone(&site.store);
    let ready = move || {
        let writable = served.local().check_writable().map(|()| Vec::new());
        writable.map_err(|error| error.to_string())
    };
    let any = "127.0.0.1:0".parse().unwrap();
    let serving = permafrost_metrics::serve(any, Metrics::new(site.store.local()), ready);
    let server = runtime.block_on(serving).unwrap();
    let (status, body) = fetch(server.address(), "/readyz");
    assert!(
        status.contains(" 503 ") && body.contains("Input/output error"),
        "{status} {body}"
    );
    assert!(fetch(server.address(), "/healthz").0.contains(" 200 "));
    let (_, numbers) = fetch(server.address(), "/metrics");
    assert!(
        numbers.contains("permafrost_region_failed 1\n"),
        "{numbers}"
    );
    let verified = site.store.verify("job@1", false, &mut |_, _| {}).unwrap();
    assert!(verified.damage.is_empty(), "{:?}", verified.damage);
}

/// Returns a site with the same region, whose checkpoints are read again at the start.
fn reopened(site: Site) -> Site {
    let path = site.region();
    site.store.local().close().unwrap();
    let (store, dir) = (site.store, site.dir);
    drop(store);
    std::fs::remove_dir_all(dir.path().join("catalog")).unwrap();
    let options = OpenOptions {
        require_dax: false,
        populate: false,
    };
    let medium = open_medium(&path, 0, &options).unwrap();
    Site::on(dir, medium)
}

/// Damages both copies of a checkpoint's root.
fn lose_root(site: &Site, id: &str) {
    let at = site.root(id);
    site.flip_at(at + 8);
    site.flip_at(at + 4096 + 8);
}

#[test]
fn a_checkpoint_without_a_root_is_listed_as_damaged_and_removed_like_any_other() {
    let site = Site::new();
    let lost = site.dump("lost", 0..20);
    site.dump("kept", 20..40);
    // As the daemon does it: with its catalog.
    let path = site.region();
    lose_root(&site, &lost.id);
    site.store.local().close().unwrap();
    let Site { store, dir, .. } = site;
    drop(store);
    let options = OpenOptions {
        require_dax: false,
        populate: false,
    };
    let site = Site::on(dir, open_medium(&path, 0, &options).unwrap());

    let listed = site.listed("lost@1");
    assert!(listed.damaged.contains("root page"), "{listed:?}");
    assert_eq!(site.store.local().region_status().unreadable, 1);
    assert_eq!(site.store.local().set_asides().len(), 1);
    let refused = site.store.check_restorable("lost@1").unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Corrupt, "{refused}");
    assert!(site.store.check_restorable("kept@1").is_ok());
    // Its job goes on, under the next number.
    assert_eq!(site.dump("lost", 50..60).generation, 2);
    assert_eq!(
        site.store
            .remove(&permafrost_protocol::control::request::Remove {
                checkpoint: "lost@1".to_owned(),
                last: true,
                ..Default::default()
            })
            .unwrap(),
        1
    );
    assert!(site.store.local().set_asides().is_empty());
    assert_eq!(site.store.local().region_status().unreadable, 0);
    let site = reopened(site);
    assert_eq!(site.store.list(None).unwrap().len(), 2);
}

#[test]
fn a_region_is_looked_at_and_saved_without_a_daemon() {
    let site = Site::new();
    let lost = site.dump("lost", 0..20);
    site.dump("team/kept", 20..40);
    site.dump("bad", 60..80);
    let path = site.region();
    let text = |out: Vec<u8>| String::from_utf8(out).unwrap();

    // It is in use.
    assert!(offline::check(&path, None, &mut Vec::new()).is_err());
    site.store.local().close().unwrap();
    let Site { store, dir, .. } = site;
    drop(store);
    let mut out = Vec::new();
    assert!(
        offline::check(&path, None, &mut out).unwrap(),
        "{}",
        text(out)
    );
    assert!(text(out).contains("team/kept@1: whole"));

    let copy = dir.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    let before = std::fs::read(&copy).unwrap();
    let at = {
        let id = u128::from_str_radix(&lost.id, 16).unwrap().to_le_bytes();
        let pages: Vec<_> = before.chunks_exact(4096).collect();
        let pairs = pages.windows(2);
        let root =
            |pair: &[&[u8]]| pair[0] == pair[1] && pair[0].windows(16).any(|bytes| bytes == id);
        pairs.enumerate().find(|(_, pair)| root(pair)).unwrap().0 * 4096
    };
    let file = File::options().write(true).open(&copy).unwrap();
    for at in [at, at + 4096] {
        file.write_all_at(&[0xff; 8], at as u64).unwrap();
    }
    super::site::flip_page(&copy, 70);
    let damaged = std::fs::read(&copy).unwrap();

    let mut out = Vec::new();
    assert!(!offline::check(&copy, None, &mut out).unwrap());
    let said = text(out);
    assert!(
        said.contains(&format!("checkpoint {}: LOST", lost.id)),
        "{said}"
    );
    assert!(said.contains("team/kept@1: whole"), "{said}");
    assert!(said.contains("bad@1: process"), "{said}");

    let to = dir.path().join("saved");
    let mut out = Vec::new();
    assert!(!offline::salvage(&copy, &to, None, &mut out).unwrap());
    let said = text(out);
    let saved = std::fs::read_dir(to.join("team_kept@1")).unwrap();
    let names = saved.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(
        names.into_iter().any(|name| name.starts_with("pages-")),
        "{said}"
    );
    assert!(to.join("bad@1.incomplete").exists(), "{said}");
    assert!(said.contains("bad@1: INCOMPLETE"), "{said}");
    assert!(damaged == std::fs::read(&copy).unwrap(), "written to");
    // A file that is not there is not made.
    assert!(offline::check(&dir.path().join("none"), None, &mut Vec::new()).is_err());
    assert!(!dir.path().join("none").exists());
}

/// Both copies of the journal record that seals a checkpoint are lost: they lie in one sector.
#[test]
fn a_checkpoint_whose_record_is_lost_is_salvaged_apart() {
    let site = Site::new();
    site.dump("first", 0..20);
    let lost = site.dump("lost", 20..40);
    site.dump("last", 40..60);
    let path = site.region();
    site.store.local().close().unwrap();
    let Site { store, dir, .. } = site;
    drop(store);
    // In a copy of the record the id is at byte 16, behind the kind of a seal at byte 4.
    let id = u128::from_str_radix(&lost.id, 16).unwrap().to_le_bytes();
    let region = std::fs::read(&path).unwrap();
    let copies = region.chunks_exact(64).enumerate();
    let seals = copies.filter(|(_, copy)| copy[16..32] == id && copy[4..6] == [2, 0]);
    let places: Vec<u64> = seals.map(|(place, _)| place as u64 * 64).collect();
    assert_eq!(places.len(), 2);
    let file = File::options().write(true).open(&path).unwrap();
    for at in places {
        file.write_all_at(&[0xff; 8], at).unwrap();
    }
    let damaged = std::fs::read(&path).unwrap();

    let text = |out: Vec<u8>| String::from_utf8(out).unwrap();
    let mut out = Vec::new();
    assert!(!offline::check(&path, None, &mut out).unwrap());
    let said = text(out);
    assert!(said.contains("lost@1 (unlisted): whole"), "{said}");
    assert!(
        said.contains("first@1: whole") && said.contains("last@1: whole"),
        "{said}"
    );
    let to = dir.path().join("saved");
    let mut out = Vec::new();
    assert!(!offline::salvage(&path, &to, None, &mut out).unwrap());
    let said = text(out);
    assert!(said.contains("lost@1 (unlisted): saved to"), "{said}");
    let saved = |directory: &str| {
        let mut files = std::fs::read_dir(to.join(directory)).unwrap();
        let pages = files.find_map(|file| {
            let path = file.unwrap().path();
            let name = path.file_name()?.to_str()?;
            name.starts_with("pages-")
                .then(|| std::fs::read(&path).unwrap())
        });
        pages.unwrap()
    };
    assert!(saved("unlisted/lost@1") == (20..40).flat_map(super::site::page).collect::<Vec<_>>());
    assert!(saved("first@1") == (0..20).flat_map(super::site::page).collect::<Vec<_>>());
    assert!(!to.join("lost@1").exists());
    assert!(damaged == std::fs::read(&path).unwrap(), "written to");
}
