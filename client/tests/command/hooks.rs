//! Tests of `install-criu-hooks`, in a directory of their own.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use permafrost_protocol::control::ErrorCode;

use crate::fake::{Daemon, assert_exit, json, stderr, stdout};

/// A command, and the directory of CRIU's configuration.
struct Machine {
    daemon: Daemon,
    dir: PathBuf,
}

impl Machine {
    fn new() -> Self {
        // The command asks no daemon.
        let daemon = Daemon::refusing(ErrorCode::Internal);
        daemon.script("action", "exit 0");
        let dir = daemon.path().join("criu-conf");
        Self { daemon, dir }
    }

    fn run(&self, options: &[&str], code: i32) -> std::process::Output {
        let dir = self.dir.to_str().unwrap();
        let output = self
            .daemon
            .run(&[&["install-criu-hooks", "--dir", dir], options].concat());
        assert_exit(&output, code);
        output
    }

    fn configuration(&self) -> PathBuf {
        self.dir.join("default.conf")
    }

    fn text(&self) -> String {
        fs::read_to_string(self.configuration()).unwrap()
    }

    fn line(&self) -> String {
        format!("action-script {}/permafrost-hook\n", self.dir.display())
    }
}

#[test]
fn hooks_are_installed_once_and_removed_without_a_trace() {
    let machine = Machine::new();
    let dry = machine.run(&["--dry-run"], 0);
    assert!(stdout(&dry).contains("would link"), "{}", stdout(&dry));
    assert!(!machine.dir.exists());
    let output = machine.run(&["--json"], 0);
    let changes = json(&output.stdout);
    assert_eq!(changes["installed"], true);
    assert_eq!(changes["changes"].as_array().unwrap().len(), 2, "{changes}");
    assert!(
        machine.text().contains(&machine.line()),
        "{}",
        machine.text()
    );
    let link = fs::read_link(machine.dir.join("permafrost-hook")).unwrap();
    assert_eq!(
        link,
        machine.daemon.path().join("action").canonicalize().unwrap()
    );

    let before = machine.text();
    assert_eq!(stdout(&machine.run(&[], 0)), "nothing to change\n");
    assert_eq!(machine.text(), before);
    machine.run(&["--undo", "--dry-run"], 0);
    assert_eq!(machine.text(), before);
    machine.run(&["--undo"], 0);
    assert_eq!(fs::read_dir(&machine.dir).unwrap().count(), 0);
    let again = json(&machine.run(&["--undo", "--json"], 0).stdout);
    assert_eq!(again["installed"], false);
    assert_eq!(again["changes"].as_array().unwrap().len(), 0);
    assert!(machine.daemon.requests().is_empty());
}

#[test]
fn lines_of_others_stay_as_they_are() {
    let machine = Machine::new();
    fs::create_dir(&machine.dir).unwrap();
    for theirs in ["tcp-established\n# a remark\n", "tcp-established", ""] {
        fs::write(machine.configuration(), theirs).unwrap();
        fs::set_permissions(machine.configuration(), fs::Permissions::from_mode(0o640)).unwrap();
        machine.run(&[], 0);
        assert!(machine.text().starts_with(theirs) && machine.text().contains(&machine.line()));
        let mode = fs::metadata(machine.configuration())
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o640);
        // What was added since stays, too.
        fs::write(machine.configuration(), machine.text() + "shell-job\n").unwrap();
        machine.run(&["--undo"], 0);
        assert_eq!(
            machine.text(),
            [theirs.trim_end(), "shell-job\n"].join(if theirs.is_empty() { "" } else { "\n" })
        );
        fs::remove_file(machine.configuration()).unwrap();
    }
}

#[test]
fn what_others_have_put_there_is_refused() {
    let machine = Machine::new();
    fs::create_dir(&machine.dir).unwrap();
    let hook = machine.dir.join("permafrost-hook");
    let refused = |options: &[&str]| {
        let output = machine.run(options, 4);
        assert!(stderr(&output).contains("by hand"), "{}", stderr(&output));
    };
    // Another script that seals.
    let other = "action-script /opt/permafrost-action\n";
    fs::write(machine.configuration(), other).unwrap();
    refused(&[]);
    assert_eq!(machine.text(), other);
    assert!(!hook.exists(), "half of it was installed");
    fs::remove_file(machine.configuration()).unwrap();
    // Lines that were changed since.
    machine.run(&[], 0);
    let changed = machine
        .text()
        .replace(&machine.line(), "action-script /bin/true\n");
    fs::write(machine.configuration(), &changed).unwrap();
    refused(&[]);
    refused(&["--undo"]);
    assert_eq!(machine.text(), changed);
    assert!(hook.exists(), "half of it was removed");
    fs::remove_file(machine.configuration()).unwrap();
    fs::remove_file(&hook).unwrap();
    // A program or another link in its place; a configuration that is a link.
    symlink("/bin/true", &hook).unwrap();
    refused(&[]);
    fs::remove_file(&hook).unwrap();
    fs::write(&hook, "").unwrap();
    refused(&[]);
    refused(&["--undo"]);
    fs::remove_file(&hook).unwrap();
    symlink("elsewhere", machine.configuration()).unwrap();
    refused(&[]);
    fs::remove_file(machine.configuration()).unwrap();
    // A program that others may change.
    let action = machine.daemon.path().join("action");
    fs::set_permissions(&action, fs::Permissions::from_mode(0o777)).unwrap();
    machine.run(&[], 9);
    fs::remove_file(&action).unwrap();
    machine.run(&[], 3);
    assert_eq!(fs::read_dir(&machine.dir).unwrap().count(), 0);
}

#[test]
fn a_program_or_hook_that_others_may_replace_is_refused() {
    let machine = Machine::new();
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let install = |dir: &Path, action: &Path, code| {
        let mut command = machine.daemon.command(&["install-criu-hooks", "--dir"]);
        let output = command.arg(dir).env("PERMAFROST_ACTION", action).output();
        let output = output.unwrap();
        assert_exit(&output, code);
        stderr(&output)
    };
    let above = machine.daemon.path().join("above");
    let programs = above.join("programs");
    fs::create_dir_all(&programs).unwrap();
    let action = programs.join("action");
    fs::copy(machine.daemon.path().join("action"), &action).unwrap();
    for open in [0o777, 0o775] {
        for directory in [&above, &programs] {
            mode(directory, open);
            let said = install(&machine.dir, &action, 9);
            assert!(said.contains(directory.to_str().unwrap()), "{said}");
            mode(directory, 0o755);
        }
    }
    // The directory of the hook itself, one above it, and one that is reached by a link.
    let conf = above.join("conf");
    fs::create_dir(&conf).unwrap();
    symlink(&conf, machine.daemon.path().join("link")).unwrap();
    for open in [&conf, &above] {
        mode(open, 0o777);
        install(&conf, &machine.daemon.path().join("action"), 9);
        let linked = machine.daemon.path().join("link/new");
        install(&linked, &machine.daemon.path().join("action"), 9);
        mode(open, 0o755);
    }
    assert_eq!(fs::read_dir(&conf).unwrap().count(), 0);
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&above, Some(65_534), None).unwrap();
        install(&machine.dir, &action, 9);
        std::os::unix::fs::chown(&above, Some(0), None).unwrap();
    }
    // Nobody may rename what is another's in a directory with the sticky bit. The line names the directory, not the link.
    mode(&above, 0o1777);
    install(&machine.daemon.path().join("link"), &action, 0);
    let text = fs::read_to_string(conf.join("default.conf")).unwrap();
    let hook = conf.canonicalize().unwrap().join("permafrost-hook");
    assert!(text.contains(hook.to_str().unwrap()), "{text}");
}

#[test]
fn a_link_in_place_of_the_new_configuration_is_not_followed() {
    let machine = Machine::new();
    fs::create_dir(&machine.dir).unwrap();
    let other = machine.daemon.path().join("other");
    fs::write(&other, "theirs").unwrap();
    symlink(&other, machine.dir.join("default.conf.permafrost")).unwrap();
    machine.run(&[], 0);
    assert_eq!(fs::read_to_string(&other).unwrap(), "theirs");
    assert!(!machine.configuration().is_symlink());
    assert!(machine.text().contains(&machine.line()));
}
