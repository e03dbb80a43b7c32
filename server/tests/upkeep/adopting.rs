//! Adoption of parked dumps: images are combined only with the pages that they were written with.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use permafrost_criu::frontend::PageSink as _;
use permafrost_protocol::control::{Checkpoint, ErrorCode, ReportedError};
use permafrost_protocol::images::{DumpStats, Mapping, Stats, mm_name, write_mappings};
use permafrost_store::{Adoption, StoreError};
use tempfile::TempDir;

use super::site::{PID, Site, address};

/// Makes a parked dump of pages with these salts, and the images that were written meanwhile.
fn parked(site: &Site, salts: std::ops::Range<u64>, core: &str) -> (String, TempDir) {
    let images = tempfile::tempdir().unwrap();
    let (session, mut sink) = site.begin_bare(salts.clone());
    write_images(images.path(), salts, core);
    sink.close().unwrap();
    // What is written from here on is later by any clock.
    std::thread::sleep(Duration::from_millis(40));
    (session, images)
}

pub(super) fn write_images(dir: &Path, salts: std::ops::Range<u64>, core: &str) {
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.join(name), bytes).unwrap();
    let mapping = Mapping {
        start: address(salts.start),
        end: address(salts.end),
        ..Mapping::default()
    };
    write(&mm_name(PID), &write_mappings(&[mapping]));
    write(&format!("core-{PID}.img"), core.as_bytes());
    write("inventory.img", b"inventory");
}

/// Writes the statistics that CRIU writes after its CLOSE.
fn write_stats(dir: &Path, pages: u64) {
    let dump = DumpStats {
        pages_written: pages - 1,
        shpages_written: Some(1),
        ..DumpStats::default()
    };
    let stats = Stats {
        dump: Some(dump),
        restore: None,
    };
    std::fs::write(dir.join("stats-dump"), stats.write()).unwrap();
}

pub(super) fn open(dir: &Path) -> OwnedFd {
    File::open(dir).unwrap().into()
}

fn adopt(site: &Site, session: &str, images: &Path) -> Result<Checkpoint, StoreError> {
    let adoption = Adoption {
        session,
        ..Adoption::into_job("job")
    };
    site.store.adopt(&adoption, open(images))
}

fn refused(adopted: Result<Checkpoint, StoreError>) -> (ErrorCode, String) {
    let error = adopted.unwrap_err();
    (error.code(), error.to_string())
}

#[test]
fn dumps_that_look_alike_are_told_apart_by_time() {
    let site = Site::new();
    let (first, first_images) = parked(&site, 0..4, "one");
    let (second, second_images) = parked(&site, 0..4, "two");
    let adopted = adopt(&site, "", second_images.path()).unwrap();
    assert_eq!((&adopted.session, adopted.generation), (&second, 1));

    // Asked again, it is the checkpoint that is there: not the other dump's memory with these images.
    assert_eq!(
        adopt(&site, "", second_images.path()).unwrap().id,
        adopted.id
    );
    assert_eq!(
        adopt(&site, &second, second_images.path()).unwrap().id,
        adopted.id
    );
    let (code, said) = refused(adopt(&site, &second, first_images.path()));
    assert_eq!(code, ErrorCode::Conflict);
    assert!(said.contains("is job@1 already"), "{said}");

    // Nor by its name.
    let (code, said) = refused(adopt(&site, &first, second_images.path()));
    assert_eq!(code, ErrorCode::Invalid);
    assert!(said.contains("after its last page"), "{said}");

    let adopted = adopt(&site, "", first_images.path()).unwrap();
    assert_eq!((&adopted.session, adopted.generation), (&first, 2));
    assert_eq!(site.store.list(None).unwrap().len(), 2);
}

#[test]
fn a_copy_of_the_images_fits_only_where_times_are_ignored() {
    let site = Site::new();
    let (session, images) = parked(&site, 0..4, "one");
    let copy = tempfile::tempdir().unwrap();
    write_images(copy.path(), 0..4, "one");
    let (code, said) = refused(adopt(&site, "", copy.path()));
    assert_eq!(code, ErrorCode::NotFound);
    assert!(
        said.contains(&session) && said.contains("after its last page"),
        "{said}"
    );

    let ignoring = Adoption {
        ignore_times: true,
        ..Adoption::into_job("job")
    };
    // With two that fit it is for people to say which.
    let (other, _images) = parked(&site, 0..4, "two");
    let (code, said) = refused(site.store.adopt(&ignoring, open(copy.path())));
    assert_eq!(code, ErrorCode::Conflict);
    assert!(said.contains(&session) && said.contains(&other), "{said}");
    site.store.abort_session(&other).unwrap();
    let adopted = site.store.adopt(&ignoring, open(copy.path())).unwrap();
    assert_eq!(adopted.session, session);
    let again = site.store.adopt(&ignoring, open(images.path())).unwrap();
    assert_eq!(again.id, adopted.id);
}

#[test]
fn mappings_and_page_counts_have_to_fit() {
    let site = Site::new();
    let (session, images) = parked(&site, 0..4, "one");
    for (salts, pages, why) in [
        (1..4, 4, "has not mapped 0x7f0000000000-"),
        (0..3, 4, "has not mapped 0x7f0000000000-"),
        (0..4, 5, "counts 5 pages, but 4 came"),
    ] {
        let changed = tempfile::tempdir().unwrap();
        write_images(changed.path(), salts, "one");
        write_stats(changed.path(), pages);
        let (code, said) = refused(adopt(&site, &session, changed.path()));
        assert_eq!(code, ErrorCode::Invalid, "{said}");
        assert!(said.contains(why), "{said}");
    }
    let damaged = tempfile::tempdir().unwrap();
    write_images(damaged.path(), 0..4, "one");
    std::fs::write(damaged.path().join(mm_name(PID)), "no image").unwrap();
    assert_eq!(
        refused(adopt(&site, "", damaged.path())).0,
        ErrorCode::Invalid
    );

    write_stats(images.path(), 4);
    let adopted = adopt(&site, "", images.path()).unwrap();
    assert_eq!(adopted.session, session);
}

#[test]
fn statistics_of_an_earlier_dump_are_left_alone() {
    let site = Site::new();
    let images = tempfile::tempdir().unwrap();
    write_stats(images.path(), 1000);
    std::thread::sleep(Duration::from_millis(40));
    let (session, mut sink) = site.begin_bare(0..4);
    write_images(images.path(), 0..4, "one");
    sink.close().unwrap();
    // As the post-dump action does, which comes before this dump's own statistics.
    assert_eq!(adopt(&site, "", images.path()).unwrap().session, session);
}

#[test]
fn a_listing_names_the_processes_of_parked_dumps() {
    let site = Site::new();
    let (_, images) = parked(&site, 0..4, "one");
    let listed = &site.store.list(None).unwrap()[0];
    let pids: Vec<u32> = listed.parked_processes.iter().map(|p| p.pid).collect();
    assert_eq!(pids, [PID]);
    let adopted = adopt(&site, "", images.path()).unwrap();
    assert_eq!(adopted.parked_processes, []);
}
