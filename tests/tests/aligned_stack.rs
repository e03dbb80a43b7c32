//! A process whose stack pointer is the address of a page: `is_stack` in `criu/mem.c` takes each of its pages for one
//! of the stack, and CRIU marks none of them as lazy. It is restored lazily all the same.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process;
use permafrost_tests::script::Script;

const LIMIT: Duration = Duration::from_secs(30);

/// Bytes of the task's memory.
const LEN: usize = 16 << 20;

const PAGE: u64 = 4096;

/// Task that reads a file into its memory, and writes the memory to another file when it is asked to.
const TASK: &str = r#"
use strict;
my ($dir) = @ARGV;
open(my $in, '<:raw', "$dir/pattern") or die "pattern: $!";
my $memory = do { local $/; <$in> };
close $in;
open(my $ready, '>', "$dir/ready") or die "ready: $!";
close $ready;
select(undef, undef, undef, 0.5) until -e "$dir/go";
open(my $out, '>:raw', "$dir/part") or die "part: $!";
print $out $memory or die "write: $!";
close $out or die "close: $!";
rename("$dir/part", "$dir/memory") or die "rename: $!";
sleep 1 while 1;
"#;

/// Starts the task below an environment that is longer by `padding` bytes. Its stack has the same address each time.
fn start(dir: &Path, padding: u64) -> Script {
    let _ = fs::remove_file(dir.join("ready"));
    let mut perl = Command::new("setsid");
    perl.args(["setarch", "--addr-no-randomize", "perl"]);
    perl.env_clear().env("PATH", "/usr/bin:/bin");
    perl.env("PADDING", "x".repeat(usize::try_from(padding).unwrap()));
    Script::start(dir, TASK, &mut perl, &[]).unwrap()
}

/// Returns the stack pointer in the system call in which a process waits.
fn stack_pointer(pid: u32) -> u64 {
    let path = format!("/proc/{pid}/syscall");
    process::wait_for("the task to wait", LIMIT, || {
        // "running", or: number, six arguments, stack pointer, instruction pointer.
        let line = fs::read_to_string(&path)?;
        let pointer = line.split_whitespace().nth(7);
        let pointer = pointer.and_then(|word| word.strip_prefix("0x"));
        Ok(pointer.map(|digits| u64::from_str_radix(digits, 16).unwrap()))
    })
    .unwrap()
}

#[test]
fn a_process_with_an_aligned_stack_pointer_is_restored_lazily() {
    const TEST: &str = "a_process_with_an_aligned_stack_pointer_is_restored_lazily";
    if criu::for_test(TEST).is_none() {
        return;
    }
    process::adopt_orphans().unwrap();
    let work = tempfile::tempdir().unwrap();
    let dir = work.path();
    let daemon = Daemon::start(dir, &Options::default()).unwrap();
    let mut pattern = vec![0; LEN];
    let mut random = File::open("/dev/urandom").unwrap();
    random.read_exact(&mut pattern).unwrap();
    fs::write(dir.join("pattern"), &pattern).unwrap();

    let first = start(dir, 0);
    let padding = stack_pointer(first.pid()) % PAGE;
    drop(first);
    let mut task = start(dir, padding);
    assert_eq!(stack_pointer(task.pid()) % PAGE, 0);
    let pid = task.pid().to_string();
    daemon.run(&["dump", "--job", "a", "--pid", &pid]).unwrap();
    task.wait_until_gone().unwrap();

    let restored = daemon.json(&["restore", "a", "--lazy"]).unwrap();
    let lazy = restored["lazy"]["bytes"].as_u64().unwrap();
    assert!(lazy >= LEN as u64, "{restored}");
    fs::write(dir.join("go"), []).unwrap();
    task.wait_for("memory").unwrap();
    assert!(fs::read(dir.join("memory")).unwrap() == pattern);
}
