//! Tests of the log over real files: its contents, a rotation, and a full disk.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::Duration;

use permafrost_protocol::control::request;
use serde_json::Value;

use super::*;

#[test]
fn a_connection_from_this_machine_is_recorded_with_its_user() {
    let address = "127.0.0.1:4242".parse().unwrap();
    let fields = |uid| {
        let who = Who::client("page-server", &Client::Tcp { address, uid });
        serde_json::to_value(who).unwrap()
    };
    assert_eq!(
        fields(Some(1000)),
        serde_json::json!({"via": "page-server", "who": "127.0.0.1:4242", "uid": 1000})
    );
    assert!(fields(None).get("uid").is_none());
}

fn uid(uid: u32) -> Who {
    Who::client("control", &Client::User { uid, pid: 42 })
}

fn denied(message: &str) -> control::Error {
    control::Error {
        code: ErrorCode::Denied.into(),
        message: message.to_owned(),
        hint: String::new(),
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_str(line).expect(line))
        .collect()
}

/// Waits until the log's thread has written `count` lines.
fn wait_for(path: &Path, count: usize) -> Vec<Value> {
    for _ in 0..6000 {
        let found = lines(path);
        if found.len() >= count {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{count} lines did not come: {:?}", lines(path));
}

#[test]
fn a_line_says_who_did_what_to_what_with_which_outcome() {
    let dir = tempfile::tempdir().unwrap();
    let audit = Audit::open(&AuditFile::InDataDir, dir.path(), "n1").unwrap();
    let remove = AuditedRequest::of_control(&request::Body::Remove(request::Remove {
        checkpoint: "train@3".into(),
        ..request::Remove::default()
    }));
    audit.record(&uid(0), &remove, Ok(()));
    audit.record(&Who::api("token slurm"), &remove, Err(&denied("no\nno")));
    drop(audit);
    let path = dir.path().join("audit.log");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let [done, refused] = &lines(&path)[..] else {
        panic!("{:?}", lines(&path));
    };
    for (field, value) in [
        ("node", "n1"),
        ("via", "control"),
        ("who", "uid 0"),
        ("action", "remove"),
        ("on", "train@3"),
        ("outcome", "done"),
    ] {
        assert_eq!(done[field], value, "{done}");
    }
    assert_eq!((&done["uid"], &done["pid"]), (&0.into(), &42.into()));
    assert!(done["time_unix_ms"].as_u64().unwrap() > 1_700_000_000_000);
    assert_eq!(done.get("message"), None);
    assert_eq!(refused["who"], "token slurm");
    assert_eq!(refused["outcome"], "denied");
    assert_eq!(refused["message"], "no\nno");
}

#[test]
fn a_file_that_was_moved_away_is_made_anew_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("elsewhere.log");
    let audit = Audit::open(&AuditFile::At(path.clone()), dir.path(), "").unwrap();
    let event = |n: usize| AuditedRequest::change("pin", format!("a@{n}"));
    audit.record(&uid(0), &event(1), Ok(()));
    wait_for(&path, 1);
    let old = dir.path().join("elsewhere.log.1");
    fs::rename(&path, &old).unwrap();
    audit.reopen();
    audit.record(&uid(0), &event(2), Ok(()));
    let new = wait_for(&path, 1);
    assert_eq!(new[0]["on"], "a@2");
    // Without a call to `reopen`, too.
    fs::remove_file(&path).unwrap();
    audit.record(&uid(0), &event(3), Ok(()));
    assert_eq!(wait_for(&path, 1)[0]["on"], "a@3");
    assert_eq!(lines(&old).len(), 1);
    assert_eq!(audit.lost(), 0);
}

#[test]
fn a_file_that_cannot_be_written_is_counted_and_noted_when_it_can_be_again() {
    let dir = tempfile::tempdir().unwrap();
    let parent = dir.path().join("mount");
    fs::create_dir(&parent).unwrap();
    let path = parent.join("audit.log");
    let audit = Audit::open(&AuditFile::At(path.clone()), dir.path(), "").unwrap();
    let event = AuditedRequest::change("pin", "a@1");
    audit.record(&uid(0), &event, Ok(()));
    wait_for(&path, 1);
    // The disk is gone: requests are answered all the same.
    fs::rename(&parent, dir.path().join("gone")).unwrap();
    for _ in 0..5 {
        audit.record(&uid(0), &event, Ok(()));
    }
    for _ in 0..6000 {
        if audit.lost() == 5 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(audit.lost(), 5);
    fs::create_dir(&parent).unwrap();
    audit.record(&uid(0), &event, Ok(()));
    let found = wait_for(&path, 2);
    assert_eq!(found[0]["action"], "lines-lost");
    assert_eq!(found[0]["left_out"], 5);
    assert_eq!(found[1]["on"], "a@1");
}

#[test]
fn a_link_or_a_device_is_no_audit_log() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.log");
    std::os::unix::fs::symlink("/dev/full", &path).unwrap();
    assert!(Audit::open(&AuditFile::InDataDir, dir.path(), "").is_err());
    assert!(Audit::open(&AuditFile::At("/dev/full".into()), dir.path(), "").is_err());
}

#[test]
fn a_file_that_others_can_write_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.log");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o622)).unwrap();
    let error = Audit::open(&AuditFile::InDataDir, dir.path(), "")
        .map(drop)
        .unwrap_err();
    assert!(error.to_string().contains("chmod 0600"), "{error}");
    // An operator may let a group read it.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    Audit::open(&AuditFile::InDataDir, dir.path(), "").unwrap();
}

#[test]
fn tokens_stay_out_of_the_log() {
    let cancel = request::Body::CancelReservation(request::CancelReservation {
        token: "a-secret".into(),
        node: "n2".into(),
    });
    let reserved = request::Body::Open(request::Open {
        job: "train".into(),
        reservation: "a-secret".into(),
        ..request::Open::default()
    });
    for body in [cancel, reserved] {
        let event = AuditedRequest::of_control(&body);
        assert!(!format!("{event:?}").contains("a-secret"), "{event:?}");
    }
}
