//! README's command blocks, pasted one after another into a shell of a machine of their own: its processes, its
//! network, and what it keeps under /var/lib and /run.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use permafrost_tests::{binaries, criu, etcd};

/// Time limit in seconds, for a busy machine; an idle one takes a minute.
const LIMIT_S: &str = "400";

/// Commands whose exit code is an answer: a plan for an idle process reports that it frees too little.
const ANSWERS: [&str; 1] = ["permafrost plan preempt"];

/// Stand-in for `cargo`: everything is already built and fetched, so it only prints the path of CRIU.
const CARGO: &str = r#"#!/bin/sh
case "$*" in
    "xtask setup --env") echo "export PERMAFROST_CRIU='$REAL_CRIU'" ;;
    "build --release" | "xtask demo" | "xtask test") ;;
    *) echo "cargo $*: not known here" >&2; exit 1 ;;
esac
"#;

/// Loopback, empty /var/lib and /run, no files of the outer mount namespace, which CRIU could not dump, and a line for
/// every command that fails.
const PRELUDE: &str = r#"
set -E
exec </dev/null
for fd in {3..99}; do eval "exec $fd>&-"; done
ip link set lo up
mount -t tmpfs -o size=512m,mode=755 tmpfs /var/lib
mount -t tmpfs -o size=64m,mode=755 tmpfs /run
trap 'printf "%s: %s\n" "$?" "$BASH_COMMAND" >>"$FAILED"' ERR
"#;

/// Returns the `sh` blocks, in order.
fn blocks(markdown: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut current: Option<String> = None;
    for line in markdown.lines() {
        match (&mut current, line) {
            (None, "```sh") => current = Some(String::new()),
            (None, _) => {}
            (Some(_), "```") => blocks.extend(current.take()),
            (Some(block), line) => {
                block.push_str(line);
                block.push('\n');
            }
        }
    }
    blocks
}

fn write_program(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn readme() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md")
}

#[test]
fn every_command_block_of_the_readme_runs_as_it_stands() {
    let test = "every_command_block_of_the_readme_runs_as_it_stands";
    let (Some(criu), Some(etcd)) = (criu::for_test(test), etcd::for_test(test)) else {
        return;
    };
    let blocks = blocks(&fs::read_to_string(readme()).unwrap());
    assert_eq!(blocks.len(), 6, "{blocks:#?}");

    // On a disk: regions of several nodes would fill a memory.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let scratch = tempfile::tempdir_in(target).unwrap();
    let scratch = fs::canonicalize(scratch.path()).map(|path| (scratch, path));
    let (_removed, scratch) = scratch.unwrap();
    let (release, shims) = (scratch.join("target/release"), scratch.join("shims"));
    for dir in [&release, &shims] {
        fs::create_dir_all(dir).unwrap();
    }
    for program in ["permafrost", "permafrostd", "permafrost-action"] {
        let built = fs::canonicalize(binaries::path(program).unwrap()).unwrap();
        symlink(built, release.join(program)).unwrap();
    }
    write_program(&shims.join("cargo"), CARGO);
    symlink(fs::canonicalize(&etcd).unwrap(), shims.join("etcd")).unwrap();

    let script = scratch.join("script");
    let mut file = fs::File::create(&script).unwrap();
    writeln!(file, "{PRELUDE}").unwrap();
    for (number, block) in blocks.iter().enumerate() {
        writeln!(file, "echo '=== block {number}' >&2\n{block}").unwrap();
    }
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
        .current_dir(&scratch)
        .env("PATH", format!("{}:{path}", shims.display()))
        .env("REAL_CRIU", &criu.path)
        .env("FAILED", &failed)
        .env_remove("PERMAFROST_CRIU")
        .stdin(Stdio::null())
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .status()
        .unwrap();
    let said = fs::read_to_string(scratch.join("output")).unwrap();
    let failures = fs::read_to_string(&failed).unwrap();
    let failures: Vec<&str> = failures
        .lines()
        .filter(|line| !ANSWERS.iter().any(|answer| line.contains(answer)))
        .collect();
    assert!(failures.is_empty(), "{failures:#?}\n{said}");
    assert!(said.contains("=== block 5"), "{said}");
    // The last command may be one whose exit code is an answer.
    assert!(
        status.code().is_some_and(|code| code < 100),
        "{status}\n{said}"
    );
}
