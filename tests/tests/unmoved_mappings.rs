//! Memory that CRIU restores at its own address without moving it there, and so does not register with a userfaultfd
//! (`vma_remap` in `criu/pie/restorer.c`): its missing pages would read as zeros.
//!
//! CRIU gathers all private mappings in one place first, in the order of their addresses. Without randomised addresses
//! that place depends only on their sizes. So one restore shows where a mapping has to be for the next one.

use std::fs::{self, File, Permissions};
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use permafrost_protocol::control::request;
use permafrost_tests::criu::{self, Criu};
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process;
use permafrost_tests::script::Script;
use permafrost_transport::control::Connection;

const LIMIT: Duration = Duration::from_secs(30);

/// Bytes of the task's memory.
const LEN: u64 = 16 << 20;

/// Address at which the first task has its memory: one that is free in most programs.
const FIRST_ADDRESS: u64 = 0x7FFF_F000_0000;

/// Task that has a file in memory at a given address, and writes the memory to another file when it is asked to.
/// System calls are those of x86-64: mmap, read and write.
const TASK: &str = r#"
use strict;
my ($dir, $at, $len) = @ARGV;
my $mapped = syscall(9, $at + 0, $len + 0, 3, 0x100022, -1, 0);
die "mmap: $mapped $!" if $mapped != $at;
open(my $in, '<', "$dir/pattern") or die "pattern: $!";
for (my $done = 0; $done < $len;) {
    my $read = syscall(0, fileno($in), $at + $done, $len - $done);
    die "read: $!" if $read <= 0;
    $done += $read;
}
close $in;
open(my $ready, '>', "$dir/ready") or die "ready: $!";
close $ready;
select(undef, undef, undef, 0.02) until -e "$dir/go";
open(my $out, '>', "$dir/part") or die "part: $!";
for (my $done = 0; $done < $len;) {
    my $written = syscall(1, fileno($out), $at + $done, $len - $done);
    die "write: $!" if $written <= 0;
    $done += $written;
}
close $out;
rename("$dir/part", "$dir/memory") or die "rename: $!";
sleep 1 while 1;
"#;

struct Site {
    work: tempfile::TempDir,
    daemon: Daemon,
    /// CRIU, whose restores have addresses that are not random, and leave a log.
    criu: PathBuf,
}

impl Site {
    fn start(test: &str) -> Option<Self> {
        if !cfg!(target_arch = "x86_64") {
            eprintln!("{test}: skipped: its task makes system calls of x86-64");
            return None;
        }
        let Criu { path } = criu::for_test(test)?;
        process::adopt_orphans().unwrap();
        let work = tempfile::tempdir().unwrap();
        let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
        let mut pattern = vec![0; usize::try_from(LEN).unwrap()];
        let mut random = File::open("/dev/urandom").unwrap();
        random.read_exact(&mut pattern).unwrap();
        fs::write(work.path().join("pattern"), pattern).unwrap();
        let criu = work.path().join("criu");
        let text = format!(
            "#!/bin/sh\n[ \"$1\" = restore ] || exec {path} \"$@\"\nexec setarch -R {path} \"$@\" -v4 -o {log}\n",
            path = path.display(),
            log = work.path().join("restore.log").display(),
        );
        fs::write(&criu, text).unwrap();
        fs::set_permissions(&criu, Permissions::from_mode(0o700)).unwrap();
        Some(Self { work, daemon, criu })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.work.path().join(name)
    }

    /// Starts a task with its memory at an address, and dumps it as job `a`.
    fn dump_task_at(&self, address: u64) -> Script {
        for name in ["ready", "go", "memory", "restore.log"] {
            let _ = fs::remove_file(self.path(name));
        }
        let mut perl = Command::new("setsid");
        perl.args(["setarch", "-R", "perl"]);
        let mut task = Script::start(self.work.path(), TASK, &mut perl, &[address, LEN]).unwrap();
        let pid = task.pid().to_string();
        self.daemon
            .run(&["dump", "--job", "a", "--pid", &pid])
            .unwrap();
        task.wait_until_gone().unwrap();
        task
    }

    /// Restores the task with a daemon, but without the keeper that registers its memory: as a release before did. Returns
    /// the daemon's error.
    fn restore_unregistered(&self) -> String {
        let make = |name: &str| {
            let path = self.path(name);
            fs::create_dir(&path).unwrap();
            path
        };
        let (images, work) = (make("images"), make("work"));
        let mut connection = Connection::connect(&self.daemon.control()).unwrap();
        let export = request::Export {
            checkpoint: "a".to_owned(),
            without_lazy_pages: true,
            ..request::Export::default()
        };
        let directory = File::open(&images).unwrap();
        connection
            .call_with(export, Some(directory.as_fd()), &mut |_| {})
            .unwrap();
        let listener = UnixListener::bind(work.join("lazy-pages.socket")).unwrap();
        let mut criu = Command::new(&self.criu);
        criu.args(["restore", "--lazy-pages", "--restore-detached", "-D"]);
        criu.arg(images).arg("-W").arg(work).stdin(Stdio::null());
        let mut criu = criu.spawn().unwrap();
        let (from_criu, _) = listener.accept().unwrap();
        let thaw = request::Thaw {
            checkpoint: "a".to_owned(),
            ..request::Thaw::default()
        };
        connection.begin(thaw, Some(from_criu.as_fd())).unwrap();
        let served = connection.finish::<request::Thaw>(&mut |_| {});
        assert!(criu.wait().unwrap().success());
        served.unwrap_err().to_string()
    }

    /// Restores the task, and returns the way in which its memory came.
    fn restore(&self, option: &[&str]) -> String {
        let mut command = self.daemon.command().unwrap();
        command.args(["--json", "restore", "a"]).args(option);
        let output = command.env("PERMAFROST_CRIU", &self.criu).output().unwrap();
        assert!(output.status.success(), "{option:?}: {output:?}");
        let restored: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        restored["way"].as_str().unwrap().to_owned()
    }

    /// Returns the address at which CRIU had the task's memory before it moved it to this one.
    fn moved_from(&self, address: u64) -> u64 {
        let log = fs::read(self.path("restore.log")).unwrap();
        let log = String::from_utf8_lossy(&log);
        let to = format!("->{address:#x} len {LEN:#x}");
        let line = log.lines().find(|line| line.ends_with(&to));
        let line = line.unwrap_or_else(|| panic!("no line ends with {to}: {log}"));
        let (_, from) = line.strip_suffix(&to).unwrap().rsplit_once("0x").unwrap();
        u64::from_str_radix(from, 16).unwrap()
    }

    /// Has the task write its memory down, and compares it.
    fn assert_sound(&self) {
        fs::write(self.path("go"), []).unwrap();
        let memory = self.path("memory");
        process::wait_for("the task's memory", LIMIT, || {
            Ok(memory.exists().then_some(()))
        })
        .unwrap();
        let is = fs::read(memory).unwrap();
        let was = fs::read(self.path("pattern")).unwrap();
        let equal = is.iter().zip(&was).filter(|(is, was)| is == was);
        assert_eq!(equal.count() as u64, LEN);
    }
}

#[test]
fn memory_that_criu_does_not_move_is_restored_in_every_way() {
    const TEST: &str = "memory_that_criu_does_not_move_is_restored_in_every_way";
    let Some(site) = Site::start(TEST) else {
        return;
    };
    let task = site.dump_task_at(FIRST_ADDRESS);
    assert_eq!(site.restore(&["--lazy"]), "lazy");
    let address = site.moved_from(FIRST_ADDRESS);
    assert_ne!(address, FIRST_ADDRESS);
    site.assert_sound();
    drop(task);
    let ways: [(&[&str], &str); 4] = [
        (&[], "place"),
        (&["--lazy"], "lazy"),
        (&["--hybrid"], "lazy"),
        (&["--stream"], "stream"),
    ];
    for (option, way) in ways {
        let task = site.dump_task_at(address);
        assert_eq!(site.restore(option), way);
        assert_eq!(site.moved_from(address), address, "{option:?}");
        site.assert_sound();
        drop(task);
    }
    // If nobody has registered its memory, the daemon does not take the restore for complete.
    let _task = site.dump_task_at(address);
    let error = site.restore_unregistered();
    assert_eq!(site.moved_from(address), address);
    let expected = format!("no mapping takes the page at {address:#x}");
    assert!(error.contains(&expected), "{error}");
}
