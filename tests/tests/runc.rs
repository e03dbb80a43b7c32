//! Containers of runc: checkpointed into the store, and restored from it by runc itself (docs/runc.md).

mod common;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::listing;
use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options, tail};
use permafrost_tests::{binaries, runc};
use runc::Container;

/// Time limit for actions that take moments on an idle machine.
const LIMIT: Duration = Duration::from_secs(30);

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn wait_for_count(container: &Container, above: u64) {
    let until = Instant::now() + LIMIT;
    while container.count().is_ok_and(|count| count <= above) || container.count().is_err() {
        assert!(Instant::now() < until, "it does not count");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn checkpoint(container: &Container, daemon: &Daemon, images: &Path, work: &Path) -> Command {
    container.command(&[
        "checkpoint",
        "--image-path",
        text(images),
        "--work-path",
        text(work),
        "--page-server",
        daemon.address(),
        container.name(),
    ])
}

fn restore(container: &Container, images: &Path, work: &Path) {
    let before = container.count().unwrap();
    let bundle = container.bundle();
    let arguments = [
        "restore",
        "--detach",
        "--image-path",
        text(images),
        "--work-path",
        text(work),
        "--bundle",
        text(&bundle),
        container.name(),
    ];
    if let Err(error) = container.runc(&arguments) {
        panic!("{error:#}\n{}", tail(&work.join("restore.log")));
    }
    assert_eq!(container.status().unwrap(), "running");
    wait_for_count(container, before);
}

#[test]
fn a_container_is_checkpointed_adopted_and_restored_by_runc() {
    let test = "a_container_is_checkpointed_adopted_and_restored_by_runc";
    let Some(criu) = criu::for_test(test).filter(|_| runc::for_test(test)) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), &Options::default()).unwrap();
    let container = Container::run(dir.path(), &criu, &[]).unwrap();
    wait_for_count(&container, 1);

    let [images, work, back] = ["images", "work", "back"].map(|name| dir.path().join(name));
    let status = checkpoint(&container, &daemon, &images, &work)
        .status()
        .unwrap();
    assert!(status.success(), "{}", tail(&work.join("dump.log")));
    daemon
        .run(&["adopt", "--job", "web", "--images-dir", text(&images)])
        .unwrap();
    daemon.run(&["get", "web", text(&back)]).unwrap();
    // runc writes it beside CRIU's images, and restores nothing without it.
    let descriptors = std::fs::read(images.join("descriptors.json")).unwrap();
    assert_eq!(
        std::fs::read(back.join("descriptors.json")).unwrap(),
        descriptors
    );
    restore(&container, &back, &work);

    // A directory that runc has filled with pages and all is taken as it is.
    let whole = dir.path().join("whole");
    let arguments = [
        "checkpoint",
        "--image-path",
        text(&whole),
        "--work-path",
        text(&work),
    ];
    container
        .runc(&[&arguments[..], &[container.name()]].concat())
        .unwrap();
    daemon.run(&["put", "web", text(&whole)]).unwrap();
    let again = dir.path().join("again");
    daemon.run(&["get", "web@2", text(&again)]).unwrap();
    restore(&container, &again, &work);
}

#[test]
fn the_action_script_seals_a_container_or_lets_it_live() {
    let test = "the_action_script_seals_a_container_or_lets_it_live";
    let Some(criu) = criu::for_test(test).filter(|_| runc::for_test(test)) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), &Options::default()).unwrap();
    let configuration = dir.path().join("criu.conf");
    let action = binaries::path("permafrost-action").unwrap();
    std::fs::write(
        &configuration,
        format!("action-script {}\n", action.display()),
    )
    .unwrap();
    let annotations = [("org.criu.config", text(&configuration))];
    let container = Container::run(dir.path(), &criu, &annotations).unwrap();
    wait_for_count(&container, 1);

    let [images, work, back] = ["images", "work", "back"].map(|name| dir.path().join(name));
    // Images of a dump that was refused stay where they are, and would be none of the next one's.
    let refused = checkpoint(&container, &daemon, &dir.path().join("refused"), &work)
        .env("PERMAFROST_JOB", "web")
        .env("PERMAFROST_SOCKET", dir.path().join("nowhere"))
        .status()
        .unwrap();
    assert!(!refused.success());
    assert_eq!(
        container.status().unwrap(),
        "running",
        "nobody has sealed it"
    );
    for parked in listing(&daemon) {
        daemon
            .run(&["abort", parked["session"].as_str().unwrap()])
            .unwrap();
    }

    let status = checkpoint(&container, &daemon, &images, &work)
        .env("PERMAFROST_JOB", "web")
        .env("PERMAFROST_SOCKET", daemon.control())
        .status()
        .unwrap();
    assert!(status.success(), "{}", tail(&work.join("dump.log")));
    daemon.run(&["get", "web", text(&back)]).unwrap();
    restore(&container, &back, &work);
}

/// Settings by name: annotations of a bundle, or variables of a command.
type Settings = Vec<(&'static str, String)>;

/// Checkpoints a container with nothing but the annotations and variables of `prepare`, and has runc restore what the
/// store has.
fn store_by_itself(test: &str, prepare: impl FnOnce(&Path, &Daemon) -> (Settings, Settings)) {
    let Some(criu) = criu::for_test(test).filter(|_| runc::for_test(test)) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), &Options::default()).unwrap();
    let (annotations, variables) = prepare(dir.path(), &daemon);
    let annotations: Vec<_> = annotations
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    let container = Container::run(dir.path(), &criu, &annotations).unwrap();
    wait_for_count(&container, 1);
    let [images, work, back] = ["images", "work", "back"].map(|name| dir.path().join(name));
    let checkpoint = |socket: &Path, images: &Path| {
        let arguments = [
            "checkpoint",
            "--image-path",
            text(images),
            "--work-path",
            text(&work),
            container.name(),
        ];
        let mut command = container.command(&arguments);
        command
            .env("PERMAFROST_SOCKET", socket)
            .envs(variables.clone());
        command.status().unwrap()
    };
    assert!(!checkpoint(&dir.path().join("nowhere"), &dir.path().join("refused")).success());
    assert_eq!(
        container.status().unwrap(),
        "running",
        "nobody has stored it"
    );
    let status = checkpoint(&daemon.control(), &images);
    assert!(status.success(), "{}", tail(&work.join("dump.log")));
    // The container's id is the name of its cgroup.
    std::fs::remove_dir_all(&images).unwrap();
    daemon.run(&["get", container.name(), text(&back)]).unwrap();
    restore(&container, &back, &work);
}

#[test]
fn runc_needs_a_line_of_configuration_and_nothing_else() {
    let test = "runc_needs_a_line_of_configuration_and_nothing_else";
    store_by_itself(test, |dir, daemon| {
        // CRIU reads it as it reads /etc/criu/default.conf, which is every test's.
        let configuration = dir.join(".criu");
        daemon
            .run(&["install-criu-hooks", "--dir", text(&configuration)])
            .unwrap();
        (Vec::new(), vec![("HOME", text(dir).to_owned())])
    });
}

#[test]
fn runc_needs_the_plugin_and_nothing_else() {
    let test = "runc_needs_the_plugin_and_nothing_else";
    store_by_itself(test, |dir, _| {
        let libraries = binaries::install_plugin(dir).unwrap();
        (
            Vec::new(),
            vec![("CRIU_LIBS_DIR", text(&libraries).to_owned())],
        )
    });
}
