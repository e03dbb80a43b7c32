//! Encryption at rest: a frozen process leaves nothing readable in the data directory, thaws with its key, under the
//! next key, and with no other; and is gone with its key.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::workload::{self, Workload};

const JOB: &str = "hush-hush/payroll-of-the-director";

fn start(dir: &Path, key: Option<&str>) -> anyhow::Result<Daemon> {
    let key = key.map(|name| format!("--key-file={}", dir.join(name).display()));
    let options = Options {
        extra: key.into_iter().collect(),
        ..Options::default()
    };
    Daemon::start(dir, &options)
}

fn write_key(path: &Path, byte: u8) {
    std::fs::write(path, [byte; 32]).unwrap();
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
}

/// Returns the files below a directory that have a text in them.
fn files_with(dir: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_with(&path, text));
        } else if memchr(&std::fs::read(&path).unwrap(), text.as_bytes()) {
            found.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    found
}

fn memchr(bytes: &[u8], text: &[u8]) -> bool {
    let mut at = 0;
    while let Some(next) = bytes[at..].iter().position(|byte| *byte == text[0]) {
        if bytes[at + next..].starts_with(text) {
            return true;
        }
        at += next + 1;
    }
    false
}

fn keys(daemon: &Daemon) -> Vec<serde_json::Value> {
    let listed = daemon.json(&["keys", "ls"]).unwrap();
    listed["keys"].as_array().unwrap().clone()
}

#[test]
fn an_encrypted_process_thaws_with_its_key_only() {
    if criu::for_test("an_encrypted_process_thaws_with_its_key_only").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let dir = work.path();
    write_key(&dir.join("key"), 1);
    write_key(&dir.join("other"), 2);
    let options = workload::Options {
        size_mib: 8,
        ..workload::Options::default()
    };
    let mut workload = Workload::start(dir, &options).unwrap();
    let pid = workload.pid().to_string();

    // A checkpoint in the clear is moved into the encrypted catalog.
    let daemon = start(dir, None).unwrap();
    daemon
        .run(&["dump", "--pid", &pid, "--job", "open", "--leave-running"])
        .unwrap();
    assert!(daemon.stop().unwrap().success());

    let daemon = start(dir, Some("key")).unwrap();
    for left in [&["--leave-running"][..], &[]] {
        let dump = ["dump", "--pid", &pid, "--job", JOB];
        daemon.run(&[&dump[..], left].concat()).unwrap();
    }
    workload.wait_until_gone().unwrap();
    assert_eq!(
        daemon.json(&["ls"]).unwrap()["checkpoints"]
            .as_array()
            .unwrap()
            .len(),
        3
    );
    let data = dir.join("data");
    // The audit log names jobs: it is for those who keep the node.
    assert_eq!(files_with(&data, "payroll-of-the"), ["audit.log"]);
    assert!(!data.join("catalog").exists());

    // Another process, the key before and after a rotation.
    let first = keys(&daemon);
    daemon.run(&["keys", "rotate", "hush-hush"]).unwrap();
    let rotated = keys(&daemon);
    assert_eq!((first.len(), rotated.len()), (1, 1));
    assert!(first[0]["id"] != rotated[0]["id"] && rotated[0]["segments"].as_u64() > Some(0));
    assert!(daemon.stop().unwrap().success());

    let refused = format!("{:#}", start(dir, Some("other")).expect_err("another key"));
    assert!(refused.contains("wrapped with another key"), "{refused}");
    let refused = format!("{:#}", start(dir, None).expect_err("no key"));
    assert!(refused.contains("--key-file"), "{refused}");
    let kept = dir.join("kept");
    std::fs::rename(data.join("keys"), &kept).unwrap();
    let refused = format!("{:#}", start(dir, Some("key")).expect_err("no data keys"));
    assert!(refused.contains("bring that directory back"), "{refused}");
    let _ = std::fs::remove_dir_all(data.join("keys"));
    std::fs::rename(&kept, data.join("keys")).unwrap();
    // Without the catalog it goes on, and what is encrypted is locked.
    std::fs::remove_dir_all(data.join("catalog.encrypted")).unwrap();
    let locked = start(dir, None).unwrap();
    let listed = locked.json(&["ls"]).unwrap();
    assert_eq!(
        listed["checkpoints"].as_array().unwrap().len(),
        1,
        "{listed}"
    );
    assert!(locked.run(&["restore", JOB]).is_err());
    let log = std::fs::read_to_string(locked.log()).unwrap();
    assert!(log.contains("checkpoint is locked"), "{log}");
    assert!(locked.stop().unwrap().success());

    let daemon = start(dir, Some("key")).unwrap();
    daemon.run(&["verify"]).unwrap();
    daemon.run(&["restore", JOB]).unwrap();
    assert!(workload.verify().unwrap().is_sound());

    // Destroyed: not without --yes, and then for good.
    assert!(daemon.run(&["keys", "destroy", "hush-hush"]).is_err());
    daemon
        .run(&["keys", "destroy", "hush-hush", "--yes"])
        .unwrap();
    assert!(keys(&daemon).is_empty());
    let listed = daemon.json(&["ls"]).unwrap();
    assert_eq!(
        listed["checkpoints"].as_array().unwrap().len(),
        1,
        "{listed}"
    );
    daemon.run(&["verify", "open"]).unwrap();
}
