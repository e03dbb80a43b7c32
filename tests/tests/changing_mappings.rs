//! A process that moves, removes and replaces its memory, and forks, while a lazy restore brings the rest of it.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::process::{Command, Stdio};

use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process;
use permafrost_tests::script::Script;

/// Bytes of the task's memory, and of a part that it changes as a whole.
const LEN: usize = 192 << 20;
const PART: usize = 256 << 10;

/// Task that reads its memory from a file, and once it is asked to changes one part after another, in a random order:
/// part `n` by way `n % 5`, see [`expected`]. Children write one part of their memory each, as it is after the fork. At
/// the end the task writes all of it. System calls are those of x86-64.
const TASK: &str = r#"
use strict;
my ($dir, $len, $part) = @ARGV;
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
    if ($way == 4 && $n % 35 == 4) {
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

#[test]
fn memory_is_what_it_was_wherever_it_went_meanwhile() {
    const TEST: &str = "memory_is_what_it_was_wherever_it_went_meanwhile";
    if !cfg!(target_arch = "x86_64") {
        eprintln!("{TEST}: skipped: its task makes system calls of x86-64");
        return;
    }
    if criu::for_test(TEST).is_none() {
        return;
    }
    process::adopt_orphans().unwrap();
    let work = tempfile::tempdir().unwrap();
    let options = Options {
        region_mib: 512,
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let mut pattern = vec![0; LEN];
    let mut random = File::open("/dev/urandom").unwrap();
    random.read_exact(&mut pattern).unwrap();
    fs::write(work.path().join("pattern"), &pattern).unwrap();
    let mut perl = Command::new("setsid");
    perl.arg("perl");
    let lengths = [LEN as u64, PART as u64];
    let mut task = Script::start(work.path(), TASK, &mut perl, &lengths).unwrap();
    let pid = task.pid().to_string();
    let dumped = ["dump", "--job", "a", "--pid", &pid];
    daemon.run(&dumped).unwrap();
    task.wait_until_gone().unwrap();
    fs::write(work.path().join("go"), []).unwrap();
    for option in ["--lazy", "--hybrid", "--touched-only"] {
        let _ = fs::remove_file(work.path().join("memory"));
        let mut restore = daemon.command().unwrap();
        restore.args(["restore", "a", option]);
        restore.stdout(Stdio::null()).stderr(Stdio::piped());
        let restore = restore.spawn().unwrap();
        task.wait_for("memory").unwrap();
        let memory = fs::read(work.path().join("memory")).unwrap();
        let children = File::open(work.path().join("children")).unwrap();
        for (part, was) in pattern.chunks(PART).enumerate() {
            let is = &memory[part * PART..][..PART];
            assert!(is == expected(part, was), "{option}, part {part}");
            if part % 35 == 4 {
                let mut childs = vec![0; PART];
                children
                    .read_exact_at(&mut childs, (part * PART) as u64)
                    .unwrap();
                assert!(childs == was, "{option}, part {part} of a child");
            }
        }
        process::kill(&[pid.parse().unwrap()]);
        let ended = restore.wait_with_output().unwrap();
        assert!(ended.status.success(), "{option}: {ended:?}");
    }
}
