//! The command blocks of README.md and of the book (docs/), as they stand: those of one page are pasted one after
//! another into the shell of a machine of its own, with its processes, its network, its /etc, /run and /var/lib.
//!
//! What a page takes for granted (a daemon, a process, a container) is in `tests/book/PAGE.sh`, which runs before the
//! first block. A function `check` in it runs behind the last one.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use permafrost_tests::criu::Criu;
use permafrost_tests::{binaries, criu, etcd, runc, slurm};

/// Time limit of a page in seconds, for a busy machine; an idle one takes 20 s at most.
const LIMIT_S: &str = "200";

/// Pages that run at once: they wait for leases and timers more than they compute.
const AT_ONCE: usize = 4;

/// Beginning of the comment behind a command that is to fail; the exit code follows.
const EXIT_CODE: &str = "  # exit code ";

/// Languages of blocks that are not for a shell.
const DATA: [&str; 6] = ["text", "text crates", "json", "yaml", "toml", "diff"];

/// Language of commands that the test cannot run. The line before such a block is a comment with the reason.
const NOT_RUN: &str = "console";

/// Beginning of that comment.
const REASON: &str = "<!-- not run: ";

/// Most blocks of commands that are not run. Lower it when some go; it never grows.
const MOST_NOT_RUN: usize = 5;

/// Stand-in for `cargo`: everything is already built and fetched, so it only prints the path of CRIU.
const CARGO: &str = r#"#!/bin/sh
case "$*" in
    "xtask setup --env") echo "export PERMAFROST_CRIU='$REAL_CRIU'" ;;
    "build --release" | "xtask demo" | "xtask demo --lazy" | "xtask test" | "xtask package") ;;
    *) echo "cargo $*: not known here" >&2; exit 1 ;;
esac
"#;

/// Stand-in for `apt`: `cargo xtask package --check` installs the packages in a clean Debian; here their programs are
/// on PATH already.
const APT: &str = r#"#!/bin/sh
[ "$1" = install ] || { echo "apt $1: not known here" >&2; exit 1; }
shift
for package; do
    case $package in
        # The package has systemd start the daemon.
        ./permafrost*.deb) [ -e /run/permafrostd.pid ] || systemctl start permafrostd ;;
        criu | curl | procps | etcd-server | etcd-client) ;;
        *) echo "apt: $package is not known here" >&2; exit 1 ;;
    esac
done
"#;

/// Stand-in for `systemctl`: starts and stops `permafrostd` as its unit does, but as root.
const SYSTEMCTL: &str = r#"#!/bin/bash
[ "$*" = "disable --now etcd" ] && exit
verb=$1; shift
[ "$1" = --now ] && shift
[ "$verb" = daemon-reload ] || [ "$1" = permafrostd ] || { echo "systemctl $verb $*: not known here" >&2; exit 1; }
stop() {
    [ -e /run/permafrostd.pid ] || return 0
    kill "$(cat /run/permafrostd.pid)" && tail --pid="$(cat /run/permafrostd.pid)" -f /dev/null
    rm /run/permafrostd.pid
}
start() {
    [ ! -e /run/permafrostd.pid ] || return 0
    setsid permafrostd </dev/null >/run/permafrostd.log 2>&1 &
    echo $! >/run/permafrostd.pid
    permafrost status --wait 60s >/dev/null || { cat /run/permafrostd.log >&2; exit 1; }
}
case $verb in
    start | enable) start ;;
    stop) stop ;;
    restart) stop; start ;;
    daemon-reload) ;;
    reload) permafrostd --check-config && kill -HUP "$(cat /run/permafrostd.pid)" ;;
    status) kill -0 "$(cat /run/permafrostd.pid)" ;;
    *) echo "systemctl $verb: not known here" >&2; exit 1 ;;
esac
"#;

/// Loopback, directories of the machine's own, no files of the outer mount namespace, which CRIU could not dump, and a
/// line for every command or part of a pipeline that fails.
const PRELUDE: &str = r#"
set -E -o pipefail
exec </dev/null
for fd in {3..99}; do eval "exec $fd>&-"; done
ip link set lo up
mkdir "$SCRATCH/etc" && cp -a /etc/. "$SCRATCH/etc" && mount --bind "$SCRATCH/etc" /etc
mount -t tmpfs -o size=512m,mode=755 tmpfs /var/lib
mount -t tmpfs -o size=64m,mode=755 tmpfs /run
# A process that can be dumped: $PID.
start_process() { sleep 1000 </dev/null >/dev/null 2>&1 & PID=$!; disown; }
# The cluster of cluster-by-hand.md, with shorter times, and a checkpoint of the job naps.
start_etcd() { etcd --data-dir etcd >>etcd.log 2>&1 & }
start_node() {
    case $1 in a) port=7120 ;; b) port=7121 ;; c) port=7122 ;; esac
    permafrostd --config none --data-dir data-$1 --run-dir run-$1 --listen none --region-size 256M --identity $1 \
        --listen-peers 127.0.0.1:$port --catalog etcd://127.0.0.1:2379 --copies 2 --count-volatile-copies \
        --lease 2s --repair-grace 3s 2>>log-$1 >/dev/null &
}
three_nodes() {
    permafrost pki init --dir ca
    start_etcd
    for n in a b c; do
        permafrost pki issue --dir ca --name $n --role node --host 127.0.0.1 --out $n
        start_node $n
    done
    for n in a b c; do permafrost --socket run-$n/control.sock status --wait 60s; done
    start_process
    permafrost --socket run-a/control.sock dump --pid $PID --job naps --shell-job
}
trap 'printf "%s: %s\n" "$?" "$BASH_COMMAND" >>"$FAILED"' ERR
"#;

/// A fenced block of a page.
struct Block {
    /// Language, and all that is behind it.
    language: String,
    text: String,
    /// Number of the line of its fence.
    line: usize,
    /// Line before its fence.
    before: String,
}

/// Returns the fenced blocks, in order.
fn blocks(markdown: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut inside = false;
    let mut before = "";
    for (index, line) in markdown.lines().enumerate() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            if !inside {
                blocks.push(Block {
                    language: language.to_owned(),
                    text: String::new(),
                    line: index + 1,
                    before: before.to_owned(),
                });
            }
            inside = !inside;
        } else if inside && let Some(block) = blocks.last_mut() {
            block.text.push_str(line);
            block.text.push('\n');
        }
        before = line;
    }
    blocks
}

/// Returns a block as the shell runs it: a command with [`EXIT_CODE`] behind it has to exit with that.
fn commands(text: &str) -> String {
    let mut commands = String::new();
    for line in text.lines() {
        let code = line.split_once(EXIT_CODE).map(|(command, comment)| {
            let digits = comment.split(|c: char| !c.is_ascii_digit()).next();
            (command, digits.unwrap_or_default().parse::<u8>().unwrap())
        });
        match code {
            Some((command, code)) => {
                commands += &format!("if {command}; then false; else [ $? = {code} ]; fi\n");
            }
            None => commands += &format!("{line}\n"),
        }
    }
    commands
}

fn write_program(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the name and the blocks of README and of each page of the book.
fn pages() -> BTreeMap<String, Vec<Block>> {
    let docs = fs::read_dir(workspace().join("docs")).unwrap();
    let mut paths: Vec<PathBuf> = docs.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    paths.push(workspace().join("README.md"));
    let page = |path: &PathBuf| {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        (name, blocks(&fs::read_to_string(path).unwrap()))
    };
    paths.iter().map(page).collect()
}

#[test]
fn every_block_has_a_language_and_few_commands_are_not_run() {
    let mut not_run = Vec::new();
    for (page, blocks) in pages() {
        for block in blocks {
            let place = format!("{page}.md:{}", block.line);
            match block.language.as_str() {
                "sh" => {}
                NOT_RUN => {
                    let reason = block.before.strip_prefix(REASON);
                    assert!(
                        reason.is_some(),
                        "{place}: no line {REASON}REASON --> before"
                    );
                    not_run.push(place);
                }
                language => assert!(DATA.contains(&language), "{place}: {language:?}"),
            }
        }
    }
    assert!(not_run.len() <= MOST_NOT_RUN, "{not_run:#?}");
}

#[test]
fn a_command_that_is_to_fail_is_checked() {
    let status = |text: &str| {
        let mut bash = Command::new("bash");
        bash.args(["-e", "-c", &commands(text)]);
        bash.status().unwrap().code()
    };
    assert_eq!(status("(exit 4)    # exit code 4: so it is\n"), Some(0));
    assert_eq!(status("(exit 3)    # exit code 4\n"), Some(1));
    assert_eq!(status("true        # exit code 4\n"), Some(1));
    assert_eq!(status("(exit 4)    # no code\n"), Some(4));
}

#[test]
fn setups_belong_to_pages_with_commands() {
    let pages = pages();
    for entry in fs::read_dir(workspace().join("tests/book")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        let blocks = pages.get(name).unwrap_or_else(|| panic!("no page {name}"));
        assert!(blocks.iter().any(|block| block.language == "sh"), "{name}");
    }
}

/// A directory with the programs that pages call by name.
fn install_programs(dir: &Path, criu: &Criu, etcd: &Path) {
    fs::create_dir_all(dir).unwrap();
    for program in ["permafrost", "permafrostd", "permafrost-action"] {
        let built = fs::canonicalize(binaries::path(program).unwrap()).unwrap();
        symlink(built, dir.join(program)).unwrap();
    }
    let plugins = binaries::install_plugin(dir).unwrap();
    fs::rename(plugins, dir.join("criu-plugins")).unwrap();
    symlink(&criu.path, dir.join("criu")).unwrap();
    symlink(fs::canonicalize(etcd).unwrap(), dir.join("etcd")).unwrap();
    let etcdctl = etcd::client();
    if let Ok(etcdctl) = fs::canonicalize(etcdctl) {
        symlink(etcdctl, dir.join("etcdctl")).unwrap();
    }
    symlink(fs::canonicalize(runc::program()).unwrap(), dir.join("runc")).unwrap();
    symlink(
        fs::canonicalize(runc::busybox()).unwrap(),
        dir.join("busybox"),
    )
    .unwrap();
    write_program(&dir.join("cargo"), CARGO);
    write_program(&dir.join("apt"), APT);
    write_program(&dir.join("systemctl"), SYSTEMCTL);
}

/// Runs the commands of a page. Returns what failed, with all output.
fn run(page: &str, blocks: &[Block], criu: &Criu, etcd: &Path) -> Result<(), String> {
    // On a disk: regions of several nodes would fill a memory.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let removed = tempfile::tempdir_in(target).unwrap();
    let scratch = fs::canonicalize(removed.path()).unwrap();
    let (work, programs) = (scratch.join("work"), scratch.join("bin"));
    fs::create_dir(&work).unwrap();
    install_programs(&programs, criu, etcd);
    if page == "building" {
        let release = work.join("target");
        fs::create_dir_all(&release).unwrap();
        symlink(&programs, release.join("release")).unwrap();
    }
    if page == "slurm" {
        let rig = slurm::for_test(page);
        let dir = scratch.join("slurm");
        rig.install(&dir, &programs, Duration::from_secs(120), 2)
            .unwrap();
    }

    let script = scratch.join("script");
    let mut file = fs::File::create(&script).unwrap();
    writeln!(file, "{PRELUDE}").unwrap();
    let setup = workspace().join(format!("tests/book/{page}.sh"));
    if let Ok(setup) = fs::read_to_string(setup) {
        writeln!(file, "{setup}").unwrap();
    }
    for block in blocks.iter().filter(|block| block.language == "sh") {
        let commands = commands(&block.text);
        writeln!(file, "echo '=== {page}.md:{}' >&2\n{commands}", block.line).unwrap();
    }
    writeln!(file, "if declare -F check >/dev/null; then check; fi").unwrap();
    writeln!(file, "echo '=== end' >&2").unwrap();
    drop(file);
    let failed = scratch.join("failed");
    fs::write(&failed, "").unwrap();
    let output = fs::File::create(scratch.join("output")).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let status = Command::new("timeout")
        .args(["--kill-after=10", LIMIT_S])
        .args([
            "unshare",
            "--mount",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ])
        // A session of the namespace's own, as a login has.
        .args(["setsid", "bash"])
        .arg(&script)
        .current_dir(&work)
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("HOME", &work)
        .env("REAL_CRIU", &criu.path)
        .env("SCRATCH", &scratch)
        .env("FAILED", &failed)
        .env_remove("PERMAFROST_CRIU")
        .stdin(Stdio::null())
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .status()
        .unwrap();
    let said = String::from_utf8_lossy(&fs::read(scratch.join("output")).unwrap()).into_owned();
    let failures = fs::read_to_string(&failed).unwrap();
    let failures: Vec<&str> = failures.lines().collect();
    if failures.is_empty() && status.success() && said.ends_with("=== end\n") {
        return Ok(());
    }
    Err(format!("{page}.md: {status}: {failures:#?}\n{said}"))
}

#[test]
fn every_command_block_runs_as_it_stands() {
    let test = "every_command_block_runs_as_it_stands";
    let (Some(criu), Some(etcd)) = (criu::for_test(test), etcd::for_test(test)) else {
        return;
    };
    if !runc::for_test(test) {
        return;
    }
    // To run one page by hand.
    let only = std::env::var("PERMAFROST_BOOK_PAGE").ok();
    let mut pages: Vec<_> = pages().into_iter().collect();
    pages.retain(|(page, blocks)| {
        only.as_ref().is_none_or(|only| only == page)
            && blocks.iter().any(|block| block.language == "sh")
    });
    assert!(!pages.is_empty());
    let next = AtomicUsize::new(0);
    let faults = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((page, blocks)) = pages.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let begun = Instant::now();
                    let outcome = run(page, blocks, &criu, &etcd);
                    println!("{page}: {:.1} s", begun.elapsed().as_secs_f64());
                    faults.lock().unwrap().extend(outcome.err());
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
