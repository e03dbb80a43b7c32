//! The configuration file of a running daemon: what it sets, what SIGHUP applies, and what is refused.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use permafrost_tests::binaries;
use permafrost_tests::daemon::{Daemon, Options};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longest time that a reload takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn permafrostd(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(binaries::path("permafrostd").unwrap());
    command.args(arguments).env_remove("RUST_LOG");
    command.envs(environment.iter().copied()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Writes a configuration file with mode 0600.
fn write(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

fn hang_up(daemon: &Daemon) {
    let pid = Pid::from_raw(daemon.pid().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
}

/// Waits until `found` returns something; panics with `state` otherwise.
fn wait_for<T>(state: impl Fn() -> String, found: impl Fn() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < until, "{}", state());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A daemon with a configuration file.
struct Site {
    work: tempfile::TempDir,
    daemon: Daemon,
}

impl Site {
    fn new(configuration: &str) -> Self {
        let work = tempfile::tempdir().unwrap();
        let file = work.path().join("permafrostd.toml");
        write(&file, configuration);
        let options = Options {
            extra: vec![format!("--config={}", file.display())],
            // It would go before the file.
            prefix: ["env", "-u", "RUST_LOG"].map(str::to_owned).to_vec(),
            ..Options::default()
        };
        let daemon = Daemon::start(work.path(), &options).unwrap();
        Self { work, daemon }
    }

    fn file(&self) -> PathBuf {
        self.work.path().join("permafrostd.toml")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.work.path().join("permafrostd.log")).unwrap_or_default()
    }

    /// Returns the audit log's lines for reloads.
    fn reloads(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.work.path().join("data/audit.log"));
        let text = text.unwrap_or_default();
        let lines = text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        lines
            .filter(|line: &Value| line["action"] == "reload")
            .collect()
    }

    /// Sends SIGHUP with a new file, and returns the audit log's line of it.
    fn reload(&self, configuration: &str) -> Value {
        let before = self.reloads().len();
        write(&self.file(), configuration);
        hang_up(&self.daemon);
        wait_for(|| self.log(), || self.reloads().into_iter().nth(before))
    }

    fn slots(&self) -> Vec<u64> {
        let status = self.daemon.json(&["status"]).unwrap();
        let queues = status["queues"].as_array().unwrap();
        queues
            .iter()
            .map(|queue| queue["slots"].as_u64().unwrap())
            .collect()
    }
}

#[test]
fn sighup_applies_limits_and_names_what_needs_a_restart() {
    let site = Site::new(
        "dumps-at-once = 3\nrestores-at-once = 2\npark-ttl = '2h'\nlog-level = 'error'\n",
    );
    assert_eq!(site.slots(), [3, 2]);
    assert!(!site.log().contains("INFO"), "{}", site.log());
    let line = site.reload("dumps-at-once = 5\nrestores-at-once = 2\npark-ttl = '3h'\n");
    assert_eq!(line["via"], "signal", "{line}");
    assert_eq!(line["who"], "SIGHUP", "{line}");
    assert_eq!(line["outcome"], "done", "{line}");
    assert_eq!(line["on"], "log-level, dumps-at-once", "{line}");
    assert_eq!(site.slots(), [5, 2]);
    let log = site.log();
    assert!(log.contains("dumps-at-once was 3, is 5"), "{log}");
    assert!(
        log.contains("park-ttl was 2h, is 3h: needs a restart"),
        "{log}"
    );
    assert_eq!(site.daemon.json(&["status"]).unwrap()["park_ttl_s"], 7200);

    // A slip changes nothing, and is named with its line.
    let line = site.reload("dumps-at-once = 7\npark-tll = '1h'\n");
    assert_eq!(line["outcome"], "invalid", "{line}");
    let message = line["message"].as_str().unwrap();
    assert!(
        message.contains("permafrostd.toml:2:1: there is no option park-tll"),
        "{message}"
    );
    assert_eq!(site.slots(), [5, 2]);

    // A node that is in no cluster takes no limits of repair before it is one.
    let joins =
        "listen-peers = '127.0.0.1:0'\nidentity = '/i'\ncatalog = 'etcd://h'\nrepair-rate = '1M'\n";
    let line = site.reload(joins);
    assert_eq!(line["outcome"], "done", "{line}");
    assert!(!line["on"].to_string().contains("repair"), "{line}");
    let log = site.log();
    assert!(
        log.contains("repair-rate was nothing, is 1M: needs a restart"),
        "{log}"
    );
    assert!(
        log.contains("catalog was nothing, is etcd://h: needs a restart"),
        "{log}"
    );

    // What is no longer in the file has its default again.
    let line = site.reload("");
    assert_eq!(line["outcome"], "done", "{line}");
    let status = site.daemon.json(&["status"]).unwrap();
    assert!(
        status["queues"][0]["automatic"].as_bool().unwrap(),
        "{status}"
    );
}

#[test]
fn a_configuration_is_checked_and_printed_without_a_start() {
    let work = tempfile::tempdir().unwrap();
    let file = work.path().join("permafrostd.toml");
    let config = format!("--config={}", file.display());
    write(
        &file,
        "data-dir = '/nonexistent/data'\ncopies = 99\nwrong = 1\n",
    );
    let done = permafrostd(&[&config, "--check-config"], &[]);
    let errors = text(&done.stderr);
    assert_eq!(done.status.code(), Some(2), "{errors}");
    let expected = [
        ":2:10: copies: 99 is not in 1..=16",
        ":3:1: there is no option wrong",
    ];
    assert!(
        expected.iter().all(|part| errors.contains(part)),
        "{errors}"
    );
    // A start is refused with the same words, and nothing is made.
    let started = permafrostd(&[&config], &[]);
    assert_eq!(text(&started.stderr), errors);
    assert_eq!(started.status.code(), Some(2));

    let tokens = work.path().join("tokens");
    let listen = format!(
        "listen-api = '127.0.0.1:0'\napi-tokens = '{}'\n",
        tokens.display()
    );
    write(&file, &listen);
    let done = permafrostd(&[&config, "--check-config"], &[]);
    assert_eq!(done.status.code(), Some(2));
    assert!(
        text(&done.stderr).contains("tokens"),
        "{}",
        text(&done.stderr)
    );
    write(&tokens, "");
    let done = permafrostd(&[&config, "--check-config"], &[]);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));

    write(&file, "listen = 'none'\nkey-command = 'hunter2'\n");
    let environment = [
        ("PERMAFROSTD_COOL_ABOVE", "70"),
        ("PERMAFROSTD_COOL_ABVE", "70"),
    ];
    let done = permafrostd(
        &[&config, "--print-config", "--json", "--accept-loss"],
        &environment,
    );
    let printed = text(&done.stdout);
    assert!(!printed.contains("hunter2"), "{printed}");
    let printed: Value = serde_json::from_str(&printed).unwrap();
    let option = |name: &str| {
        let mut all = printed["options"].as_array().unwrap().iter();
        all.find(|option| option["name"] == name).unwrap().clone()
    };
    assert_eq!(option("listen")["from"], "file");
    assert_eq!(option("listen")["line"], 1);
    assert_eq!(option("listen")["values"][0], "none");
    assert_eq!(option("cool-above")["from"], "environment");
    assert_eq!(option("cool-above")["reloadable"], true);
    assert_eq!(option("accept-loss")["from"], "command-line");
    assert_eq!(option("park-ttl")["from"], "default");
    assert_eq!(option("key-command")["hidden"], true);
    assert_eq!(printed["unknown_variables"][0], "PERMAFROSTD_COOL_ABVE");
    let plain = text(&permafrostd(&[&config, "--print-config"], &environment).stdout);
    assert!(
        plain.contains("environment, PERMAFROSTD_COOL_ABOVE"),
        "{plain}"
    );
    assert!(plain.contains("permafrostd.toml:1"), "{plain}");

    // The default file is one that a daemon takes.
    let printed = permafrostd(&["--print-default-config"], &[]);
    write(&file, &text(&printed.stdout));
    let done = permafrostd(&[&config, "--check-config"], &[]);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
}

#[test]
fn the_service_manager_is_told_when_the_daemon_is_ready() {
    use std::os::unix::net::UnixDatagram;

    let work = tempfile::tempdir().unwrap();
    let path = work.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let options = Options {
        prefix: vec![
            "env".to_owned(),
            format!("NOTIFY_SOCKET={}", path.display()),
        ],
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let mut state = [0; 64];
    let length = manager.recv(&mut state).unwrap();
    assert_eq!(&state[..length], b"READY=1");
    daemon.stop().unwrap();
    let length = manager.recv(&mut state).unwrap();
    assert_eq!(&state[..length], b"STOPPING=1");
}
