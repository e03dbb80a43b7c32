//! Dumps by a bare `criu dump`, stored by a line in CRIU's configuration or by the plugin alone.

use std::path::Path;
use std::process::{Command, ExitStatus};

use permafrost_tests::daemon::{Daemon, Options, tail};
use permafrost_tests::workload::{self, Workload};
use permafrost_tests::{binaries, criu};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Dumps the workload into the directory `images` of `dir`, which is made.
fn dump(
    dir: &Path,
    images: &str,
    workload: &Workload,
    daemon: &Path,
    set: impl FnOnce(&mut Command),
) -> ExitStatus {
    let criu = criu::find().unwrap();
    let images = dir.join(images);
    std::fs::create_dir(&images).unwrap();
    let mut command = Command::new(&criu.path);
    command
        .args([
            "dump",
            "-t",
            &workload.pid().to_string(),
            "-o",
            "dump.log",
            "-v4",
            "--images-dir",
        ])
        .arg(&images)
        .env("PERMAFROST_SOCKET", daemon);
    set(&mut command);
    command.status().unwrap()
}

/// Returns the job of the only checkpoint.
fn only_job(daemon: &Daemon) -> String {
    let listed = daemon.json(&["ls"]).unwrap();
    let checkpoints = listed["checkpoints"].as_array().unwrap();
    assert_eq!(checkpoints.len(), 1, "{listed}");
    checkpoints[0]["job"].as_str().unwrap().to_owned()
}

#[test]
fn a_line_of_configuration_stores_a_bare_dump_or_lets_the_process_live() {
    let test = "a_line_of_configuration_stores_a_bare_dump_or_lets_the_process_live";
    if criu::for_test(test).is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), &Options::default()).unwrap();
    let configuration = dir.path().join("criu");
    let install = ["install-criu-hooks", "--dir", text(&configuration)];
    daemon.run(&install).unwrap();
    let line = configuration.join("default.conf");
    let mut workload = Workload::start(dir.path(), &workload::Options::tree(16)).unwrap();

    let refused = dump(
        dir.path(),
        "refused",
        &workload,
        &dir.path().join("nowhere"),
        |command| {
            command.env("CRIU_CONFIG_FILE", &line);
        },
    );
    assert!(!refused.success());
    assert!(workload.verify().unwrap().is_sound());

    let status = dump(
        dir.path(),
        "images",
        &workload,
        &daemon.control(),
        |command| {
            command.env("CRIU_CONFIG_FILE", &line);
        },
    );
    assert!(
        status.success(),
        "{}",
        tail(&dir.path().join("images/dump.log"))
    );
    workload.wait_until_gone().unwrap();
    let job = only_job(&daemon);
    assert!(job.ends_with(&format!(".pid-{}", workload.pid())), "{job}");
    std::fs::remove_dir_all(dir.path().join("images")).unwrap();
    daemon.run(&["restore", &job]).unwrap();
    assert!(workload.verify().unwrap().is_sound());

    // `permafrost dump` names a script of its own: CRIU runs both, and one checkpoint is sealed.
    let mut command = daemon.command().unwrap();
    command.env("CRIU_CONFIG_FILE", &line);
    let pid = workload.pid().to_string();
    let output = command
        .args(["--json", "dump", "--pid", &pid, "--job", &job])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    workload.wait_until_gone().unwrap();
    let listed = daemon.json(&["ls"]).unwrap();
    assert_eq!(
        listed["checkpoints"].as_array().unwrap().len(),
        2,
        "{listed}"
    );
    daemon.run(&["restore", &job]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
}

#[test]
fn the_plugin_alone_stores_a_bare_dump() {
    if criu::for_test("the_plugin_alone_stores_a_bare_dump").is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), &Options::default()).unwrap();
    let libraries = binaries::install_plugin(dir.path()).unwrap();
    let mut workload = Workload::start(dir.path(), &workload::Options::default()).unwrap();

    // Without a daemon it fails before anything is dumped.
    let refused = dump(
        dir.path(),
        "refused",
        &workload,
        &dir.path().join("nowhere"),
        |command| {
            command.arg("-L").arg(&libraries);
        },
    );
    assert!(!refused.success());
    assert!(!dir.path().join("refused/pstree.img").exists());
    assert!(workload.verify().unwrap().is_sound());

    let status = dump(
        dir.path(),
        "images",
        &workload,
        &daemon.control(),
        |command| {
            command
                .arg("-L")
                .arg(&libraries)
                .env("PERMAFROST_JOB", "train");
        },
    );
    assert!(
        status.success(),
        "{}",
        tail(&dir.path().join("images/dump.log"))
    );
    workload.wait_until_gone().unwrap();
    assert_eq!(only_job(&daemon), "train");
    daemon.run(&["restore", "train"]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
}
