//! A process that moves, removes and replaces its memory, and forks, while a lazy restore brings the rest of it, also where
//! the daemon is killed meanwhile.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use permafrost_protocol::control::request;
use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process;
use permafrost_tests::script::Script;
use permafrost_transport::control::Connection;
use permafrost_transport::framing;
use permafrost_userfault::{EventLog, SUBJECT_BYTES};
use rustix::process::Signal;

/// Time for what comes soon if all is well.
const LIMIT: Duration = Duration::from_secs(60);

/// Bytes of the task's memory, and of a part that it changes as a whole.
const LEN: usize = 192 << 20;
const PART: usize = 256 << 10;

/// Of so many parts, one is written by a child.
const FORKS: usize = 35;

/// Task that reads its memory from a file, and once it is asked to changes one part after another, in a random order:
/// part `n` by way `n % 5`, see [`expected`]. Children write one part of their memory each, as it is after the fork, unless
/// `forks` is 0. At the end the task writes all of it. System calls are those of x86-64.
const TASK: &str = r#"
use strict;
my ($dir, $len, $part, $forks) = @ARGV;
my ($read, $pwrite, $mmap, $munmap, $mremap, $madvise) = (0, 18, 9, 11, 25, 28);
my ($private, $fixed, $dontneed) = (0x22, 0x32, 4);
sub call { my $got = syscall($_[0], map { $_ + 0 } @_[1 .. $#_]); die "call $_[0]: $!" if $got == -1; return $got; }
sub put {
    my ($out, $from, $len, $at) = @_;
    while ($len > 0) {
        my $put = call($pwrite, fileno($out), $from, $len, $at);
        ($from, $len, $at) = ($from + $put, $len - $put, $at + $put);
    }
}
my $memory = call($mmap, 0, $len, 3, $private, -1, 0);
open(my $in, '<', "$dir/pattern") or die "pattern: $!";
for (my $done = 0; $done < $len;) { $done += call($read, fileno($in), $memory + $done, $len - $done) or die "short"; }
close $in;
open(my $ready, '>', "$dir/ready") or die "ready: $!";
close $ready;
select(undef, undef, undef, 0.002) until -e "$dir/go";
my $elsewhere = call($mmap, 0, $len, 3, $private, -1, 0);
my @order = 0 .. $len / $part - 1;
srand($$);
for (my $n = @order; --$n;) { my $m = int rand($n + 1); @order[$n, $m] = @order[$m, $n]; }
open(my $children, '>', "$dir/children") or die "children: $!";
for my $n (@order) {
    my ($at, $way) = ($memory + $n * $part, $n % 5);
    if ($way == 0) { call($mremap, $at, $part, $part, 3, $elsewhere + $n * $part); }
    if ($way == 1) { call($munmap, $at, $part); call($mmap, $at, $part, 3, $fixed, -1, 0); }
    if ($way == 2) { call($madvise, $at, $part, $dontneed); }
    if ($way == 3) { call($mmap, $at, $part, 3, $fixed, -1, 0); }
    if ($way == 4 && $forks && $n % $forks == 4) {
        my $child = fork;
        die "fork: $!" if !defined $child;
        if (!$child) { put($children, $at, $part, $n * $part); require POSIX; POSIX::_exit(0); }
        waitpid($child, 0) == $child && $? == 0 or die "child: $?";
    }
}
open(my $out, '>', "$dir/memory.new") or die "memory: $!";
for my $n (0 .. $#order) { put($out, ($n % 5 ? $memory : $elsewhere) + $n * $part, $part, $n * $part); }
close $out;
rename("$dir/memory.new", "$dir/memory") or die "rename: $!";
sleep 1 while 1;
"#;

/// Returns a part of the memory as it must be after the change.
fn expected(part: usize, was: &[u8]) -> Vec<u8> {
    match part % 5 {
        // Moved; or left as it was, and forked.
        0 | 4 => was.to_vec(),
        // Removed and mapped anew; given up; mapped over.
        _ => vec![0; was.len()],
    }
}

/// A task and its daemon.
struct Site {
    daemon: Daemon,
    pattern: Vec<u8>,
    task: Script,
    work: tempfile::TempDir,
}

impl Site {
    /// Dumps the task `script`, which has `len` bytes of random memory, as job `a`.
    fn with_dump(test: &str, script: &str, len: usize, forks: usize) -> Option<Self> {
        if !cfg!(target_arch = "x86_64") {
            eprintln!("{test}: skipped: its task makes system calls of x86-64");
            return None;
        }
        criu::for_test(test)?;
        process::adopt_orphans().unwrap();
        let work = tempfile::tempdir().unwrap();
        let daemon = Self::start_daemon(work.path());
        let mut pattern = vec![0; len];
        let mut random = File::open("/dev/urandom").unwrap();
        random.read_exact(&mut pattern).unwrap();
        fs::write(work.path().join("pattern"), &pattern).unwrap();
        let mut perl = Command::new("setsid");
        perl.arg("perl");
        let numbers = [len as u64, PART as u64, forks as u64];
        let mut task = Script::start(work.path(), script, &mut perl, &numbers).unwrap();
        let pid = task.pid().to_string();
        daemon.run(&["dump", "--job", "a", "--pid", &pid]).unwrap();
        task.wait_until_gone().unwrap();
        fs::write(work.path().join("go"), []).unwrap();
        Some(Self {
            daemon,
            pattern,
            task,
            work,
        })
    }

    fn start_daemon(work: &Path) -> Daemon {
        let options = Options {
            region_mib: 512,
            ..Options::default()
        };
        Daemon::start(work, &options).unwrap()
    }

    /// Kills the daemon, and starts another one.
    fn replace_daemon(&mut self) {
        process::signal(self.daemon.pid(), Signal::KILL).unwrap();
        process::wait_for("the end of the daemon", LIMIT, || {
            Ok((!self.daemon.is_running()).then_some(()))
        })
        .unwrap();
        self.daemon = Self::start_daemon(self.work.path());
    }

    fn begin_restore(&self, option: &str) -> Child {
        let mut restore = self.daemon.command().unwrap();
        restore.args(["restore", "a", option]);
        restore.stdout(Stdio::null()).stderr(Stdio::piped());
        restore.spawn().unwrap()
    }

    fn has(&self, file: &str) -> bool {
        self.work.path().join(file).exists()
    }

    fn read(&self, file: &str) -> Vec<u8> {
        fs::read(self.work.path().join(file)).unwrap()
    }

    /// Ends the task, and checks that its restore was a success.
    fn end(&self, restore: Child) {
        process::kill(&[self.task.pid()]);
        let ended = restore.wait_with_output().unwrap();
        assert!(ended.status.success(), "{ended:?}");
    }

    /// Checks what [`TASK`] has written.
    fn assert_changed(&self, what: &str) {
        let memory = self.read("memory");
        for (part, was) in self.pattern.chunks(PART).enumerate() {
            let is = &memory[part * PART..][..PART];
            assert!(is == expected(part, was), "{what}, part {part}");
        }
    }

    /// Checks what the children of [`TASK`] have written.
    fn assert_forked(&self, what: &str) {
        let children = File::open(self.work.path().join("children")).unwrap();
        for (part, was) in self.pattern.chunks(PART).enumerate() {
            if part % FORKS == 4 {
                let mut childs = vec![0; PART];
                let at = (part * PART) as u64;
                children.read_exact_at(&mut childs, at).unwrap();
                assert!(childs == was, "{what}, part {part} of a child");
            }
        }
    }
}

#[test]
fn memory_is_what_it_was_wherever_it_went_meanwhile() {
    const TEST: &str = "memory_is_what_it_was_wherever_it_went_meanwhile";
    let Some(site) = Site::with_dump(TEST, TASK, LEN, FORKS) else {
        return;
    };
    for option in ["--lazy", "--hybrid", "--touched-only"] {
        let _ = fs::remove_file(site.work.path().join("memory"));
        let restore = site.begin_restore(option);
        site.task.wait_for("memory").unwrap();
        site.assert_changed(option);
        site.assert_forked(option);
        site.end(restore);
    }
}

/// A fork that a daemon was about to pass on when it was killed would end the task, so that this one has no children.
#[test]
fn memory_is_what_it_was_although_the_daemon_was_killed_again_and_again() {
    const TEST: &str = "memory_is_what_it_was_although_the_daemon_was_killed_again_and_again";
    let Some(mut site) = Site::with_dump(TEST, TASK, LEN, 0) else {
        return;
    };
    let pid = site.task.pid();
    for option in ["--touched-only", "--lazy"] {
        let _ = fs::remove_file(site.work.path().join("memory"));
        let restore = site.begin_restore(option);
        process::wait_for("the first pages", LIMIT, || {
            Ok((process::own_memory_bytes(pid) > 8 << 20).then_some(()))
        })
        .unwrap();
        let mut kills = 0;
        while !site.has("memory") {
            site.replace_daemon();
            kills += 1;
            thread::sleep(Duration::from_millis(30 * (1 + kills % 5)));
        }
        eprintln!("{option}: {kills} daemons were killed");
        assert!(kills > 0);
        site.assert_changed(option);
        site.end(restore);
    }
    let log = fs::read_to_string(site.work.path().join("run/lazy-keeper.log")).unwrap();
    assert!(log.contains("lazy-daemon-awaited"), "{log}");
}

/// Task with a child that is forked while memory is missing. Both write their memory when they are asked to.
const FORKING_TASK: &str = r#"
use strict;
my ($dir, $len) = @ARGV;
open(my $in, '<', "$dir/pattern") or die "pattern: $!";
read($in, my $memory, $len) == $len or die "short: $!";
close $in;
sub wait_for { select(undef, undef, undef, 0.002) until -e "$dir/$_[0]"; }
sub put {
    open(my $out, '>', "$dir/$_[0].new") or die "$_[0]: $!";
    print $out $_[1] or die "$_[0]: $!";
    close $out or die "$_[0]: $!";
    rename("$dir/$_[0].new", "$dir/$_[0]") or die "rename: $!";
}
put('ready', 'y');
wait_for('go');
my $child = fork;
die "fork: $!" if !defined $child;
if ($child) { put('forked', $child); }
wait_for('write');
put($child ? 'memory' : 'childs', $memory);
sleep 1 while 1;
"#;

#[test]
fn a_child_that_was_forked_is_taken_over_too() {
    const TEST: &str = "a_child_that_was_forked_is_taken_over_too";
    let Some(mut site) = Site::with_dump(TEST, FORKING_TASK, 16 << 20, 0) else {
        return;
    };
    let restore = site.begin_restore("--touched-only");
    site.task.wait_for("forked").unwrap();
    let log = site.work.path().join("run/lazy-keeper.log");
    process::wait_for("the child in the keeper", LIMIT, || {
        let log = fs::read_to_string(&log)?;
        Ok(log.contains("lazy-process-forked").then_some(()))
    })
    .unwrap();
    for _ in 0..2 {
        site.replace_daemon();
    }
    fs::write(site.work.path().join("write"), []).unwrap();
    for file in ["memory", "childs"] {
        site.task.wait_for(file).unwrap();
        assert!(site.read(file) == site.pattern, "{file}");
    }
    let child = String::from_utf8(site.read("forked")).unwrap();
    process::kill(&[child.parse().unwrap()]);
    site.end(restore);
}

/// Says on the socket what a keeper says: numbers of processes, each with a descriptor.
fn hand_over(
    mut socket: &UnixStream,
    numbers: &[i32],
    descriptor: BorrowedFd<'_>,
) -> std::io::Result<()> {
    let begin: i32 = 0x544B_4F56;
    socket.write_all(&begin.to_ne_bytes())?;
    for number in numbers {
        socket.write_all(&number.to_ne_bytes())?;
        framing::send_fd(socket, descriptor)?;
    }
    let complete: i32 = 0x5253_5446;
    socket.write_all(&complete.to_ne_bytes())
}

#[test]
fn a_takeover_that_does_not_fit_is_refused_and_the_daemon_lives_on() {
    const TEST: &str = "a_takeover_that_does_not_fit_is_refused_and_the_daemon_lives_on";
    let Some(site) = Site::with_dump(TEST, FORKING_TASK, 1 << 20, 0) else {
        return;
    };
    let pid = site.task.pid();
    let listed = site.daemon.json(&["ls", "a"]).unwrap();
    let id = listed["checkpoints"][0]["id"].as_str().unwrap();
    let own = EventLog::create(id.as_bytes().try_into().unwrap(), &[]).unwrap();
    let other = EventLog::create([b'0'; SUBJECT_BYTES], &[]).unwrap();
    let file = File::open("/dev/zero").unwrap();
    let (own, other) = (own.descriptor().unwrap(), other.descriptor().unwrap());
    let refusal = |pids: &[u32], forks, log: Option<BorrowedFd<'_>>, numbers: &[i32]| {
        let mut connection = Connection::connect(&site.daemon.control()).unwrap();
        let (socket, theirs) = UnixStream::pair().unwrap();
        let thaw = request::Thaw {
            checkpoint: "a@1".to_owned(),
            touched_only: true,
            takeover: Some(request::Takeover {
                pids: pids.to_vec(),
                forks,
            }),
            ..request::Thaw::default()
        };
        let descriptors = std::iter::once(theirs.as_fd()).chain(log);
        let descriptors: Vec<_> = descriptors.collect();
        connection.begin_with_all(thaw, &descriptors).unwrap();
        // A daemon that has refused already does not read it.
        let _ = hand_over(&socket, numbers, file.as_fd());
        let refused = connection.finish::<request::Thaw>(&mut |_| {});
        refused.unwrap_err().to_string()
    };
    for (told, expected) in [
        (refusal(&[pid], 0, None, &[]), "descriptor"),
        (
            refusal(&[pid], 0, Some(file.as_fd()), &[]),
            "no log of events",
        ),
        (refusal(&[pid], 0, Some(other), &[]), "not of this restore"),
        (
            refusal(&[pid; 99], 0, Some(own), &[]),
            "not of this restore",
        ),
        (refusal(&[pid + 1], 0, Some(own), &[]), "does not have"),
        (refusal(&[pid], 1, Some(own), &[]), "forked"),
        (refusal(&[pid], 0, Some(own), &[0]), "no userfaultfd"),
        (refusal(&[pid], 0, Some(own), &[-1]), "number of a process"),
        (refusal(&[pid], 0, Some(own), &[1]), "number of a process"),
    ] {
        assert!(told.contains(expected), "{expected}: {told}");
    }
    let restore = site.begin_restore("--touched-only");
    fs::write(site.work.path().join("write"), []).unwrap();
    site.task.wait_for("memory").unwrap();
    assert!(site.read("memory") == site.pattern);
    let child = String::from_utf8(site.read("forked")).unwrap();
    process::kill(&[child.parse().unwrap()]);
    site.end(restore);
}
