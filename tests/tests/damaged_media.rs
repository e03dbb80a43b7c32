//! A daemon over a damaged data directory: it repairs what can be repaired, refuses the rest, and writes nothing to
//! data that it cannot interpret.

mod common;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::*;
use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::workload::{self, Workload};
use permafrost_tests::{binaries, criu};

const BASE: u64 = 0x7f00_0000_0000;

/// Offsets of the two superblocks, and below, the offsets of the format version and checksum within them
/// (docs/format.md).
const SUPERBLOCKS: [u64; 2] = [0, 4096];
const VERSION_AT: usize = 8;
const CRC_AT: usize = 124;

struct Scene {
    work: tempfile::TempDir,
    kept: Vec<u8>,
}

impl Scene {
    /// Makes a data directory with one checkpoint, and stops its daemon.
    fn new() -> Self {
        let work = tempfile::tempdir().unwrap();
        let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
        let kept = pages(7, 300);
        dump_and_adopt(&daemon, work.path(), "kept", BASE, &kept);
        assert!(daemon.stop().unwrap().success(), "a clean stop");
        Self { work, kept }
    }

    fn region(&self) -> PathBuf {
        self.work.path().join("data/region")
    }

    fn start(&self) -> anyhow::Result<Daemon> {
        Daemon::start(self.work.path(), &Options::default())
    }

    fn flip(&self, at: u64) {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(self.region())
            .unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }

    fn assert_kept(&self, daemon: &Daemon) {
        assert!(exported_pages(daemon, self.work.path(), "kept@1") == self.kept);
    }

    /// Checks that the daemon refuses to start and gives the reason, and that the region is unchanged.
    fn assert_refused(&self, says: &str) {
        let before = std::fs::read(self.region()).unwrap();
        let refused = format!("{:#}", self.start().expect_err("must not start"));
        assert!(refused.contains(says), "{refused}");
        assert!(
            before == std::fs::read(self.region()).unwrap(),
            "something was written"
        );
    }
}

fn catalog_of(daemon: &Daemon) -> String {
    daemon.json(&["status"]).unwrap()["catalog"]
        .as_str()
        .unwrap()
        .to_owned()
}

#[test]
fn a_missing_catalog_is_rebuilt_from_the_region() {
    let scene = Scene::new();
    std::fs::remove_dir_all(scene.work.path().join("data/catalog")).unwrap();
    let daemon = scene.start().unwrap();
    scene.assert_kept(&daemon);
    assert_eq!(listing(&daemon).len(), 1);
}

#[test]
fn a_corrupt_catalog_is_put_aside_and_rebuilt_from_the_region() {
    let scene = Scene::new();
    let catalog = scene.work.path().join("data/catalog");
    let files = |dir: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_file()).collect()
    };
    for path in files(&catalog) {
        std::fs::write(path, b"this is no database").unwrap();
    }
    let daemon = scene.start().unwrap();
    scene.assert_kept(&daemon);
    assert!(
        catalog_of(&daemon).starts_with("rebuilt"),
        "{}",
        catalog_of(&daemon)
    );
}

#[test]
fn a_damaged_manifest_costs_its_checkpoint_only() {
    let scene = Scene::new();
    let daemon = scene.start().unwrap();
    let job = "damaged-job";
    dump_and_adopt(&daemon, scene.work.path(), job, BASE, &pages(8, 20));
    daemon.stop().unwrap();
    std::fs::remove_dir_all(scene.work.path().join("data/catalog")).unwrap();
    // The job's name is in its manifests only: in that of the parked checkpoint that it once was, perhaps, too.
    let region = std::fs::read(scene.region()).unwrap();
    let named = region
        .windows(job.len())
        .enumerate()
        .filter(|(_, bytes)| *bytes == job.as_bytes());
    let places: Vec<_> = named.map(|(at, _)| at as u64).collect();
    assert!(!places.is_empty());
    for at in places {
        scene.flip(at);
    }

    let daemon = scene.start().unwrap();
    scene.assert_kept(&daemon);
    assert_eq!(listing(&daemon).len(), 1);
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    assert!(
        log.contains("checkpoint is damaged and not listed"),
        "{log}"
    );
    // The job goes on.
    dump_and_adopt(&daemon, scene.work.path(), job, BASE, &pages(9, 20));
    assert_eq!(listing(&daemon).len(), 2);
}

#[test]
fn a_region_that_has_gone_is_not_replaced() {
    let scene = Scene::new();
    let away = scene.work.path().join("unmounted");
    std::fs::rename(scene.region(), &away).unwrap();
    let refused = format!("{:#}", scene.start().expect_err("must not start"));
    let catalog = scene.work.path().join("data/catalog");
    let hint = format!("remove {}", catalog.display());
    assert!(
        refused.contains("mount") && refused.contains(&hint),
        "{refused}"
    );
    assert!(!scene.region().exists(), "a region was made");
    // Blank, as after a format of the disk, and empty.
    for bytes in [1 << 20, 0] {
        std::fs::write(scene.region(), vec![0; bytes]).unwrap();
        scene.assert_refused("mount");
    }

    // Mounted again, nothing was lost.
    std::fs::rename(&away, scene.region()).unwrap();
    let daemon = scene.start().unwrap();
    scene.assert_kept(&daemon);
    assert_eq!(catalog_of(&daemon), "opened");
    daemon.stop().unwrap();
    // Or begun anew, as the message says.
    std::fs::remove_file(scene.region()).unwrap();
    std::fs::remove_dir_all(&catalog).unwrap();
    assert!(listing(&scene.start().unwrap()).is_empty());
}

#[test]
fn a_region_that_is_older_than_its_catalog_is_refused_unless_the_loss_is_accepted() {
    let scene = Scene::new();
    let old = std::fs::read(scene.region()).unwrap();
    let daemon = scene.start().unwrap();
    dump_and_adopt(&daemon, scene.work.path(), "later", BASE, &pages(8, 20));
    daemon.stop().unwrap();
    std::fs::write(scene.region(), &old).unwrap();
    scene.assert_refused(
        "is older than its catalog and lacks 1 checkpoints that were acknowledged: later@1",
    );

    let options = Options {
        extra: vec!["--accept-loss".to_owned()],
        ..Options::default()
    };
    let daemon = Daemon::start(scene.work.path(), &options).unwrap();
    scene.assert_kept(&daemon);
    assert_eq!(listing(&daemon).len(), 1);
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    assert!(log.contains("later@1") && log.contains("lost"), "{log}");
    daemon.stop().unwrap();
    // Once is enough, and its number is not given out again.
    let daemon = scene.start().unwrap();
    dump_and_adopt(&daemon, scene.work.path(), "later", BASE, &pages(8, 20));
    let listed = listing(&daemon);
    let later = listed.iter().find(|record| record["job"] == "later");
    assert_eq!(later.unwrap()["generation"], 2, "{listed:?}");
}

#[test]
fn the_region_command_checks_and_salvages_what_no_daemon_has_open() {
    let scene = Scene::new();
    let (region, saved) = (scene.region(), scene.work.path().join("saved"));
    let run = |arguments: &[&str]| {
        let permafrost = binaries::path("permafrost").unwrap();
        let mut command = Command::new(permafrost);
        let output = command.arg("region").args(arguments).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(said).unwrap())
    };
    let check = ["check", region.to_str().unwrap()];
    let daemon = scene.start().unwrap();
    let (code, said) = run(&check);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("in use"), "{said}");
    daemon.stop().unwrap();

    let before = std::fs::read(&region).unwrap();
    let (code, said) = run(&check);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("kept@1: whole"), "{said}");
    let page = before
        .chunks_exact(PAGE_SIZE)
        .position(|page| page == &scene.kept[..PAGE_SIZE]);
    scene.flip((page.unwrap() * PAGE_SIZE + 2000) as u64);
    let damaged = std::fs::read(&region).unwrap();
    let (code, said) = run(&check);
    assert_eq!(code, Some(7), "{said}");
    assert!(said.contains(&format!("address {BASE:#x}")), "{said}");
    let to = [
        "salvage",
        region.to_str().unwrap(),
        "--to",
        saved.to_str().unwrap(),
    ];
    let (code, said) = run(&to);
    assert_eq!(code, Some(7), "{said}");
    assert!(said.contains("kept@1: INCOMPLETE"), "{said}");
    assert!(saved.join("kept@1.incomplete").is_dir(), "{said}");
    assert!(damaged == std::fs::read(&region).unwrap(), "written to");

    // Whole again, what is saved can be put into another store.
    std::fs::write(&region, &before).unwrap();
    std::fs::remove_dir_all(&saved).unwrap();
    let (code, said) = run(&to);
    assert_eq!(code, Some(0), "{said}");
    let images = saved.join("kept@1");
    let daemon = scene.start().unwrap();
    let put = ["put", "again", images.to_str().unwrap()];
    daemon.run(&put).unwrap();
    assert!(exported_pages(&daemon, scene.work.path(), "again@1") == scene.kept);

    let (code, said) = run(&["--help"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("salvage"), "{said}");
    let (code, said) = run(&["salvage"]);
    assert_eq!(code, Some(2), "{said}");
}

#[test]
fn a_region_that_is_truncated_under_its_daemon_is_damaged_and_the_daemon_goes_on() {
    let scene = Scene::new();
    let options = Options {
        extra: ["--listen-metrics", "127.0.0.1:0", "--scrub-period", "off"]
            .map(str::to_owned)
            .to_vec(),
        ..Options::default()
    };
    let mut daemon = Daemon::start(scene.work.path(), &options).unwrap();
    scene.assert_kept(&daemon);
    let length = std::fs::metadata(scene.region()).unwrap().len();
    let file = std::fs::File::options()
        .write(true)
        .open(scene.region())
        .unwrap();
    // All segments.
    file.set_len(length / 64).unwrap();
    file.set_len(length / 2).unwrap();
    file.set_len(0).unwrap();
    let verified = daemon.try_run(&["verify"]).unwrap();
    assert_eq!(verified.status.code(), Some(7), "{verified:?}");
    let put = daemon.try_run(&["open", "--job", "new"]).unwrap();
    assert!(daemon.is_running(), "{put:?}");
    // The first dump that fails says that the medium has.
    let mut peer = Peer::anonymous(&daemon, Dialect::V32);
    peer.open();
    peer.pages(BASE, &pages(9, 20));
    assert_ne!(peer.close(), Some(0));
    let status = daemon.json(&["status"]).unwrap();
    let region = &status["regions"][0];
    assert_ne!(region["lost_pages"], 0, "{status}");
    assert!(!region["failure"].as_str().unwrap().is_empty(), "{status}");
    assert!(daemon.is_running());
}

#[test]
fn superblocks_that_were_blanked_are_refused_and_nothing_is_written() {
    let scene = Scene::new();
    let file = std::fs::File::options()
        .write(true)
        .open(scene.region())
        .unwrap();
    file.write_all_at(&[0; 8192], 0).unwrap();
    scene.assert_refused("both superblocks");
    // Not either without the catalog, which would tell that there was something.
    std::fs::remove_dir_all(scene.work.path().join("data/catalog")).unwrap();
    scene.assert_refused("both superblocks");
}

#[test]
fn directories_that_are_open_to_others_are_refused_and_left_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    for name in ["data", "run"] {
        let work = tempfile::tempdir().unwrap();
        let dir = work.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        let refused = format!(
            "{:#}",
            Daemon::start(work.path(), &Options::default()).expect_err("must not start")
        );
        assert!(refused.contains("chmod 700"), "{refused}");
        let mode = std::fs::metadata(&dir).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
        assert!(!work.path().join("data/region").exists());
    }
}

#[test]
fn a_data_directory_has_one_daemon() {
    let scene = Scene::new();
    let first = scene.start().unwrap();
    let options = Options {
        region: Some(scene.work.path().join("another")),
        ..Options::default()
    };
    let refused = format!(
        "{:#}",
        Daemon::start(scene.work.path(), &options).expect_err("must not start")
    );
    assert!(refused.contains("in use"), "{refused}");
    scene.assert_kept(&first);
}

#[test]
fn a_stale_catalog_is_made_to_agree_with_the_region() {
    let scene = Scene::new();
    let (catalog, old) = (
        scene.work.path().join("data/catalog"),
        scene.work.path().join("old"),
    );
    copy_dir(&catalog, &old);
    let daemon = scene.start().unwrap();
    dump_and_adopt(&daemon, scene.work.path(), "later", BASE, &pages(8, 20));
    daemon.run(&["pin", "later"]).unwrap();
    daemon.run(&["rm", "kept@1", "--last"]).unwrap();
    daemon.stop().unwrap();
    std::fs::remove_dir_all(&catalog).unwrap();
    copy_dir(&old, &catalog);

    let daemon = scene.start().unwrap();
    let listed = listing(&daemon);
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!(
        (listed[0]["job"].as_str(), listed[0]["pinned"].as_bool()),
        (Some("later"), Some(true))
    );
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn one_corrupt_superblock_is_survived_whichever_it_is() {
    for at in SUPERBLOCKS {
        let scene = Scene::new();
        scene.flip(at + 40);
        let daemon = scene.start().unwrap();
        scene.assert_kept(&daemon);
        drop(daemon);
    }
}

#[test]
fn two_corrupt_superblocks_are_refused_and_nothing_is_written() {
    let scene = Scene::new();
    for at in SUPERBLOCKS {
        scene.flip(at + 40);
    }
    scene.assert_refused("both superblocks");
}

#[test]
fn a_newer_format_version_is_refused_and_nothing_is_written() {
    let scene = Scene::new();
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(scene.region())
        .unwrap();
    for at in SUPERBLOCKS {
        let mut superblock = [0; 128];
        file.read_exact_at(&mut superblock, at).unwrap();
        if superblock.iter().all(|byte| *byte == 0) {
            continue;
        }
        superblock[VERSION_AT..][..4].copy_from_slice(&99_u32.to_le_bytes());
        let crc = crc32fast::hash(&superblock[..CRC_AT]);
        superblock[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        file.write_all_at(&superblock, at).unwrap();
    }
    scene.assert_refused("version 99");
}

#[test]
fn something_else_than_a_region_is_refused_and_left_alone() {
    let scene = Scene::new();
    let length = std::fs::metadata(scene.region()).unwrap().len();
    let file = std::fs::File::options()
        .write(true)
        .open(scene.region())
        .unwrap();
    file.write_all_at(
        b"some other file system's superblock, or somebody's diary",
        0,
    )
    .unwrap();
    file.write_all_at(&[0x5a; 8192], 4096).unwrap();
    scene.assert_refused("superblock");
    assert_eq!(std::fs::metadata(scene.region()).unwrap().len(), length);
}

#[test]
fn a_flipped_bit_in_a_page_is_refused_by_name_and_address() {
    let scene = Scene::new();
    // Page 123 of the dump: its number is at its start, the seed everywhere else.
    let mut page = pages(7, 124)[123 * PAGE_SIZE..].to_vec();
    page.truncate(PAGE_SIZE);
    let region = std::fs::read(scene.region()).unwrap();
    let at = region
        .chunks_exact(PAGE_SIZE)
        .position(|chunk| chunk == page)
        .expect("the page in the region")
        * PAGE_SIZE;
    scene.flip(at as u64 + 2000);

    let daemon = scene.start().unwrap();
    let address = format!("{:#x}", BASE + 123 * 4096);
    let target = scene.work.path().join("out");
    let refused = daemon
        .try_run(&["get", "kept", target.to_str().unwrap()])
        .unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(7), "{said}");
    assert!(said.contains("kept@1") && said.contains(&address), "{said}");

    let refused = daemon.try_run(&["--json", "verify"]).unwrap();
    assert_eq!(refused.status.code(), Some(7));
    let verified: serde_json::Value = serde_json::from_slice(&refused.stdout).unwrap();
    let damage = verified["damage"].as_array().unwrap();
    assert_eq!(damage.len(), 1, "{verified}");
    assert!(damage[0].as_str().unwrap().contains(&address), "{verified}");
    // The rest is served.
    dump_and_adopt(&daemon, scene.work.path(), "other", BASE, &pages(9, 10));
}

#[test]
fn a_task_is_not_restored_from_damaged_pages() {
    if criu::for_test("a_task_is_not_restored_from_damaged_pages").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut workload = Workload::start(work.path(), &workload::Options::default()).unwrap();
    let pid = workload.pid().to_string();
    daemon
        .json(&["dump", "--pid", &pid, "--job", "task"])
        .unwrap();
    workload.wait_until_gone().unwrap();
    daemon.stop().unwrap();
    // Somewhere in the random pages, which are most of the region's used part.
    let region = work.path().join("data/region");
    let used = std::fs::read(&region).unwrap();
    let last = used.iter().rposition(|byte| *byte != 0).unwrap();
    let file = std::fs::File::options().write(true).open(&region).unwrap();
    let at = last / 2;
    file.write_all_at(&[used[at] ^ 0x10], at as u64).unwrap();

    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    for arguments in [
        &["restore", "task"][..],
        &["restore", "--no-stream", "task"],
    ] {
        let refused = daemon.try_run(arguments).unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(7), "{arguments:?}: {said}");
        assert!(
            said.contains("task@1") && said.contains("address 0x"),
            "{said}"
        );
        assert!(!workload.is_running(), "{arguments:?}");
    }
    let target = work.path().join("out");
    daemon
        .try_run(&["get", "task", target.to_str().unwrap()])
        .unwrap();
    let left = std::fs::read_dir(&target).map_or(0, Iterator::count);
    assert_eq!(left, 0, "half an export must not be taken for a whole one");
}

#[test]
fn a_truncated_region_is_refused() {
    let scene = Scene::new();
    let file = std::fs::File::options()
        .write(true)
        .open(scene.region())
        .unwrap();
    file.set_len(64 << 20).unwrap();
    scene.assert_refused("truncated");
}

#[test]
fn a_region_has_one_daemon() {
    let scene = Scene::new();
    let first = scene.start().unwrap();
    let other = tempfile::tempdir().unwrap();
    let options = Options {
        region: Some(scene.region()),
        ..Options::default()
    };
    let refused = format!(
        "{:#}",
        Daemon::start(other.path(), &options).expect_err("must not start")
    );
    assert!(refused.contains("in use"), "{refused}");
    scene.assert_kept(&first);
}

#[test]
fn a_run_directory_has_one_daemon_and_a_start_that_fails_leaves_no_trace() {
    let scene = Scene::new();
    let first = scene.start().unwrap();
    let run = scene.work.path().join("run");
    // Another data directory, the same sockets.
    let other = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(&run, other.path().join("run")).unwrap();
    let refused = format!(
        "{:#}",
        Daemon::start(other.path(), &Options::default()).expect_err("must not start")
    );
    assert!(
        refused.contains("in use by another permafrostd"),
        "{refused}"
    );
    scene.assert_kept(&first);
    first.stop().unwrap();

    // A port that is taken.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let options = Options {
        listen: taken.local_addr().unwrap().to_string(),
        ..Options::default()
    };
    let refused = Daemon::start(scene.work.path(), &options);
    assert!(format!("{:#}", refused.expect_err("must not start")).contains("page-server port"));
    let daemon = scene.start().unwrap();
    let status = daemon.json(&["status"]).unwrap();
    assert_eq!(status["regions"][0]["unsafe_shutdowns"], 0, "{status}");
}
