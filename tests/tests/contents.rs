//! `permafrost show --maps` and `diff`, of a process that does a known number of things between two dumps.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::{criu, process};
use serde_json::Value;

/// Addresses far from each other, so that the kernel does not join the mappings.
const KEPT: u64 = 0x2000_0000_0000;
const UNMAPPED: u64 = 0x2100_0000_0000;
const MAPPED: u64 = 0x2200_0000_0000;

/// Maps 64 pages that it keeps and 16 that it unmaps later, and fills both with random bytes. At SIGUSR1 it fills 5 of
/// the 64 anew, unmaps the 16, maps 32 others, fills 8 of these, closes a file and reads 10 bytes of another one.
const TASK: &str = r#"
sub map_pages { my ($at, $pages) = @_;
    syscall(9, $at, $pages * 4096, 3, 0x100022, -1, 0) == $at or die "mmap"; }
sub fill { my ($at, $pages) = @_;
    for my $page (0 .. $pages - 1) { syscall(0, fileno($random), $at + $page * 4096, 4096) == 4096 or die "fill"; } }
sub note { my ($name) = @_; open my $file, ">", "$name.new"; close $file; rename "$name.new", $name; }
open $random, "<", "/dev/urandom";
open $closed, "<", "closed";
map_pages(0x200000000000, 64); fill(0x200000000000, 64);
map_pages(0x210000000000, 16); fill(0x210000000000, 16);
$SIG{USR1} = sub {
    fill(0x200000000000 + 20 * 4096, 5);
    syscall(11, 0x210000000000, 16 * 4096) == 0 or die "munmap";
    map_pages(0x220000000000, 32); fill(0x220000000000, 8);
    close $closed;
    open $opened, "<", "opened"; sysread $opened, my $some, 10;
    note("changed");
};
note("ready");
sleep 1 while 1;
"#;

struct Task(Child);

impl Task {
    fn start(work: &Path) -> Self {
        for name in ["closed", "opened"] {
            std::fs::write(work.join(name), "0123456789abcdef").unwrap();
        }
        let child = Command::new("setsid")
            .args(["perl", "-e", TASK])
            .current_dir(work)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let task = Self(child.unwrap());
        wait_for(work, "ready");
        task
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        process::kill(&[self.0.id()]);
        let _ = self.0.wait();
    }
}

fn wait_for(work: &Path, name: &str) {
    process::wait_for(name, Duration::from_secs(60), || {
        Ok(work.join(name).exists().then_some(()))
    })
    .unwrap();
}

fn dump(daemon: &Daemon, task: &Task, job: &str) {
    let pid = task.pid();
    let dump = ["dump", "--pid", &pid, "--job", job, "--leave-running"];
    daemon.run(&dump).unwrap();
}

#[track_caller]
fn mapping(mappings: &Value, start: u64) -> &Value {
    let all = mappings.as_array().unwrap();
    let found = all.iter().find(|mapping| mapping["start"] == start);
    found.unwrap_or_else(|| panic!("no mapping at {start:#x}: {mappings:#}"))
}

#[track_caller]
fn refused(output: &Output, code: i32, says: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(says), "{text}");
}

#[test]
fn what_a_process_did_between_two_dumps_is_told() {
    if criu::for_test("what_a_process_did_between_two_dumps_is_told").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let task = Task::start(work.path());
    dump(&daemon, &task, "job");
    process::signal(task.0.id(), rustix::process::Signal::USR1).unwrap();
    wait_for(work.path(), "changed");
    dump(&daemon, &task, "job");

    let change = daemon.json(&["diff", "job@1", "job@2"]).unwrap();
    assert_eq!(
        (&change["before"], &change["after"]),
        (&"job@1".into(), &"job@2".into())
    );
    let [process] = change["processes"].as_array().unwrap().as_slice() else {
        panic!("{change:#}");
    };
    assert_eq!(process["pid"].to_string(), task.pid());
    assert_eq!(process["program"], "perl");
    let pages = |mapping: &Value| {
        ["changed", "new", "gone", "equal"].map(|kind| mapping["pages"][kind].as_u64().unwrap())
    };
    let kept = mapping(&process["mappings"], KEPT);
    assert_eq!(
        (&kept["change"], pages(kept)),
        (&"changed".into(), [5, 0, 0, 59])
    );
    let unmapped = mapping(&process["mappings"], UNMAPPED);
    assert_eq!(
        (&unmapped["change"], pages(unmapped)),
        (&"gone".into(), [0, 0, 16, 0])
    );
    let mapped = mapping(&process["mappings"], MAPPED);
    assert_eq!(
        (&mapped["change"], pages(mapped)),
        (&"new".into(), [0, 8, 0, 0])
    );
    let files = process["files"].as_array().unwrap();
    let file = |name: &str| {
        let path = work.path().join(name).to_string_lossy().into_owned();
        let found = files.iter().find(|file| file["path"] == path.as_str());
        found.unwrap_or_else(|| panic!("{name}: {files:#?}"))
    };
    // The lowest descriptor is used again.
    let opened = file("opened");
    assert_eq!(opened["position_bytes"], 10);
    if opened["change"] == "replaced" {
        assert!(opened["path_before"].as_str().unwrap().ends_with("closed"));
    } else {
        assert_eq!(file("closed")["change"], "closed");
    }
    let text = daemon.run(&["diff", "job@1", "job"]).unwrap();
    assert!(text.contains("job@1 to job@2"), "{text}");

    // Nothing differs from itself, and the other direction is the mirror image.
    let same = daemon.json(&["diff", "job@2", "job@2"]).unwrap();
    assert_eq!(same["processes"], Value::Array(vec![]), "{same:#}");
    let back = daemon.json(&["diff", "job@2", "job@1"]).unwrap();
    assert_eq!(back["pages"]["new"], change["pages"]["gone"]);
    assert_eq!(back["pages"]["changed"], change["pages"]["changed"]);

    let maps = daemon.json(&["show", "job@2", "--maps"]).unwrap();
    let shown = &maps["processes"][0];
    assert_eq!(
        shown["executable"]
            .as_str()
            .map(|path| path.contains("perl")),
        Some(true)
    );
    let kept = mapping(&shown["mappings"], KEPT);
    assert_eq!(kept["permissions"], "rw-p");
    assert_eq!(kept["kind"], "anonymous");
    assert_eq!(
        (&kept["pages"]["pages"], &kept["pages"]["equal"]),
        (&64.into(), &59.into())
    );
    let mappings = shown["mappings"].as_array().unwrap();
    assert!(mappings.iter().any(|mapping| mapping["kind"] == "stack"));
    let libc = mappings.iter().any(|mapping| {
        let path = mapping["path"].as_str().unwrap_or_default();
        path.contains("libc") && mapping["kind"] == "file"
    });
    assert!(libc, "no file is named: {shown:#}");
    let first = daemon.json(&["show", "job@1", "--maps"]).unwrap();
    let before = mapping(&first["processes"][0]["mappings"], UNMAPPED);
    assert_eq!(before["pages"]["pages"], 16);
    assert_eq!(before["pages"]["equal"], Value::Null, "there is no parent");
    let text = daemon.run(&["show", "job@2", "--maps"]).unwrap();
    assert!(
        text.contains("compared with job@1") && text.contains("200000000000-"),
        "{text}"
    );

    bad_input(&daemon, &task, work.path());
}

/// Asks for what is not there, for what is not to be compared, and for images that are damaged.
fn bad_input(daemon: &Daemon, task: &Task, work: &Path) {
    dump(daemon, task, "other/job");
    let run = |arguments: &[&str]| daemon.try_run(arguments).unwrap();
    refused(
        &run(&["diff", "job@1", "other/job@1"]),
        2,
        "are not of one job",
    );
    refused(&run(&["diff", "job@1", "job@9"]), 3, "job@9");
    refused(&run(&["show", "--maps", "none"]), 3, "none");
    refused(
        &run(&["show", "--maps", "job@1", "--pid", "1"]),
        3,
        "no process 1",
    );
    daemon.run(&["rm", "job@1"]).unwrap();
    refused(&run(&["diff", "job@1", "job@2"]), 3, "job@1");
    // Without its parent a checkpoint is whole, and what they shared is not known.
    let maps = daemon.json(&["show", "job@2", "--maps"]).unwrap();
    assert_eq!(maps["compared_with"], Value::Null);

    let images = work.join("images");
    let images = images.to_str().unwrap();
    daemon.run(&["get", "job@2", images]).unwrap();
    let core = format!("core-{}.img", task.pid());
    let path = Path::new(images).join(&core);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(bytes.len() / 2);
    std::fs::write(&path, bytes).unwrap();
    daemon.run(&["put", "damaged", images]).unwrap();
    refused(&run(&["show", "--maps", "damaged"]), 7, &core);
}
