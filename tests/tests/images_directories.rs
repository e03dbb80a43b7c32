//! `get` and `put` are each other's reverse, and CRIU's own images directories go in and come out.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use permafrost_protocol::images::{ImageName, Pagemap};
use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options, tail};
use permafrost_tests::workload::{self, Workload};

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    let images = entries.filter(|entry| {
        let name = entry.file_name();
        name.to_str().unwrap().ends_with(".img") || name == "stats-dump"
    });
    images
        .map(|entry| {
            (
                entry.file_name().into_string().unwrap(),
                std::fs::read(entry.path()).unwrap(),
            )
        })
        .collect()
}

/// Returns a pagemap as single pages, which do not depend on its division into entries.
fn page_by_page(bytes: &[u8]) -> (u32, Vec<(u64, u16)>) {
    let pagemap = Pagemap::read(bytes).expect("a pagemap");
    let pages = pagemap
        .entries
        .iter()
        .flat_map(|e| (0..e.nr_pages).map(|n| (e.vaddr + n * 4096, e.flags)));
    (pagemap.pages_id, pages.collect())
}

fn assert_same_images(one: &Path, other: &Path) {
    let (one, other) = (files(one), files(other));
    assert_eq!(
        one.keys().collect::<Vec<_>>(),
        other.keys().collect::<Vec<_>>()
    );
    for (name, bytes) in &one {
        if matches!(ImageName::parse(name), ImageName::Pagemap(_)) {
            assert_eq!(page_by_page(bytes), page_by_page(&other[name]), "{name}");
        } else {
            assert!(*bytes == other[name], "{name} differs");
        }
    }
}

#[test]
fn criu_images_go_in_and_come_out_byte_for_byte() {
    let Some(criu) = criu::for_test("criu_images_go_in_and_come_out_byte_for_byte") else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut workload = Workload::start(work.path(), &workload::Options::tree(16)).unwrap();
    let images = work.path().join("images");
    std::fs::create_dir(&images).unwrap();
    let status = Command::new(&criu.path)
        .args([
            "dump",
            "-t",
            &workload.pid().to_string(),
            "-o",
            "dump.log",
            "-v4",
            "--images-dir",
        ])
        .arg(&images)
        .status()
        .unwrap();
    assert!(status.success(), "{}", tail(&images.join("dump.log")));
    workload.wait_until_gone().unwrap();

    daemon
        .json(&["put", "imported", images.to_str().unwrap()])
        .unwrap();
    let out = work.path().join("out");
    daemon
        .run(&["get", "imported", out.to_str().unwrap()])
        .unwrap();
    assert_same_images(&images, &out);

    // Once more round, and what came out is what CRIU takes.
    daemon
        .json(&["put", "again", out.to_str().unwrap()])
        .unwrap();
    daemon.run(&["restore", "again"]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
    workload.kill();
    let status = Command::new(&criu.path)
        .args(["restore", "-d", "-o", "restore.log", "-v4", "--images-dir"])
        .arg(&out)
        .status()
        .unwrap();
    assert!(status.success(), "{}", tail(&out.join("restore.log")));
    assert!(workload.verify().unwrap().is_sound());
}

#[test]
fn what_a_dump_stored_comes_out_as_images_for_their_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let Some(criu) = criu::for_test("what_a_dump_stored_comes_out_as_images_for_their_owner_only")
    else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut workload = Workload::start(work.path(), &workload::Options::tree(16)).unwrap();
    daemon
        .json(&["dump", "--pid", &workload.pid().to_string(), "--job", "a"])
        .unwrap();
    workload.wait_until_gone().unwrap();
    let out = work.path().join("out");
    daemon.run(&["get", "a", out.to_str().unwrap()]).unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&out), 0o700);
    for entry in std::fs::read_dir(&out).unwrap() {
        assert_eq!(mode(&entry.unwrap().path()), 0o600);
    }
    let status = Command::new(&criu.path)
        .args(["restore", "-d", "-o", "restore.log", "-v4", "--images-dir"])
        .arg(&out)
        .status()
        .unwrap();
    assert!(status.success(), "{}", tail(&out.join("restore.log")));
    assert!(workload.verify().unwrap().is_sound());
}

#[test]
fn broken_images_are_refused_and_leave_nothing() {
    let Some(criu) = criu::for_test("broken_images_are_refused_and_leave_nothing") else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let workload = Workload::start(work.path(), &workload::Options::default()).unwrap();
    let images = work.path().join("images");
    std::fs::create_dir(&images).unwrap();
    let status = Command::new(&criu.path)
        .args([
            "dump",
            "-t",
            &workload.pid().to_string(),
            "-R",
            "-o",
            "dump.log",
            "-v4",
            "--images-dir",
        ])
        .arg(&images)
        .status()
        .unwrap();
    assert!(status.success(), "{}", tail(&images.join("dump.log")));
    let whole = files(&images);
    let name_of = |wanted: fn(ImageName) -> bool| {
        whole
            .keys()
            .find(|name| wanted(ImageName::parse(name)))
            .unwrap()
    };
    let pages = name_of(|name| matches!(name, ImageName::Pages(_)));
    let pagemap = name_of(|name| matches!(name, ImageName::Pagemap(_)));
    let mm = name_of(|name| matches!(name, ImageName::Mm(_)));
    let cases: Vec<(&str, &str, Option<Vec<u8>>)> = vec![
        ("no inventory", "inventory.img", None),
        ("no pages file", pages, None),
        ("no mm image", mm, None),
        (
            "a short pages file",
            pages,
            Some(whole[pages][..4096].to_vec()),
        ),
        (
            "a short pagemap",
            pagemap,
            Some(whole[pagemap][..whole[pagemap].len() - 3].to_vec()),
        ),
        (
            "no pagemap at all",
            pagemap,
            Some(b"nothing of the kind".to_vec()),
        ),
    ];
    for (what, name, bytes) in cases {
        let path = images.join(name);
        match bytes {
            Some(bytes) => std::fs::write(&path, bytes).unwrap(),
            None => std::fs::remove_file(&path).unwrap(),
        }
        let refused = daemon
            .try_run(&["put", "broken", images.to_str().unwrap()])
            .unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            matches!(refused.status.code(), Some(1 | 2)),
            "{what}: {said}"
        );
        let status = daemon.json(&["status"]).unwrap();
        let region = &status["regions"][0];
        assert_eq!(region["free_bytes"], region["capacity_bytes"], "{what}");
        std::fs::write(&path, &whole[name]).unwrap();
    }
    daemon
        .run(&["put", "whole", images.to_str().unwrap()])
        .unwrap();
}
