//! `permafrost top` and `permafrost report` of a real daemon; `top` on a terminal of its own.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process;

/// Prints the settings of the terminal before and after a command, and the command's exit code.
const AROUND: &str = r#"stty rows "$1" cols "$2"; shift 2
echo "before=$(stty -g)"
"$@"
echo "code=$?"
echo "after=$(stty -g)"
"#;

/// A pseudo-terminal with a shell on it, which util-linux's `script` makes.
struct Terminal {
    child: Child,
    keys: ChildStdin,
    shown: Arc<Mutex<String>>,
}

impl Terminal {
    fn start(daemon: &Daemon, arguments: &[&str], size: (u16, u16)) -> Self {
        let command = daemon.command().unwrap();
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words: Vec<&str> = words
            .map(|word| word.to_str().unwrap())
            .chain(arguments.iter().copied())
            .collect();
        Self::run(&words, size)
    }

    fn run(words: &[&str], (columns, lines): (u16, u16)) -> Self {
        let size = [lines.to_string(), columns.to_string()];
        let all = ["sh", "-c", AROUND, "sh", &size[0], &size[1]];
        let quoted: Vec<_> = (all.iter().chain(words))
            .map(|word| format!("'{}'", word.replace('\'', "'\\''")))
            .collect();
        let mut child = Command::new("script")
            .args([
                "--quiet",
                "--return",
                "--command",
                &quoted.join(" "),
                "/dev/null",
            ])
            .env("TERM", "xterm")
            .env("SHELL", "/bin/sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let shown: Arc<Mutex<String>> = Arc::default();
        let (mut out, filled) = (child.stdout.take().unwrap(), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = out.read(&mut bytes) {
                filled
                    .lock()
                    .push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        Self {
            keys: child.stdin.take().unwrap(),
            child,
            shown,
        }
    }

    #[track_caller]
    fn wait_for(&self, text: &str) {
        let until = Instant::now() + Duration::from_secs(30);
        while !self.shown.lock().contains(text) {
            assert!(
                Instant::now() < until,
                "no {text:?}: {:?}",
                self.shown.lock()
            );
            std::thread::sleep(process::POLL);
        }
    }

    fn press(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).unwrap();
        self.keys.flush().unwrap();
    }

    /// Waits until the command has ended with that code, and checks that the terminal is as it was.
    #[track_caller]
    fn ended(&self, code: i32) {
        self.wait_for("after=");
        self.wait_for(&format!("code={code}"));
        std::thread::sleep(Duration::from_millis(200));
        let shown = self.shown.lock();
        let setting = |name: &str| {
            let found = shown.split(name).nth(1).unwrap_or_default();
            found.lines().next().unwrap_or_default().trim().to_owned()
        };
        assert!(setting("before=").len() > 20, "{shown:?}");
        assert_eq!(setting("before="), setting("after="), "{shown:?}");
        let (entered, left) = (shown.rfind("\x1b[?1049h"), shown.rfind("\x1b[?1049l"));
        assert!(entered.is_some() && entered < left, "{shown:?}");
        let (hidden, there) = (shown.rfind("\x1b[?25l"), shown.rfind("\x1b[?25h"));
        assert!(hidden.is_some() && hidden < there, "{shown:?}");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn top_leaves_the_terminal_as_it_was() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    for keys in [&b"q"[..], b"\x03", b"\x1b"] {
        let mut terminal = Terminal::start(&daemon, &["top", "--interval", "0.2"], (120, 40));
        terminal.wait_for("QUEUE");
        terminal.wait_for("NODE");
        terminal.press(keys);
        terminal.ended(0);
    }
}

#[test]
fn a_signal_ends_top_and_leaves_the_terminal_as_it_was() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let line = "(sleep 5; kill -TERM $$) & exec \"$@\"";
    let command = daemon.command().unwrap();
    let program = command.get_program().to_str().unwrap().to_owned();
    let terminal = Terminal::run(
        &[
            "sh",
            "-c",
            line,
            "sh",
            &program,
            "--socket",
            daemon.control().to_str().unwrap(),
            "top",
        ],
        (120, 40),
    );
    terminal.wait_for("NODE");
    terminal.ended(130);
}

#[test]
fn a_terminal_that_is_too_small_is_told_so() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut terminal = Terminal::start(&daemon, &["top", "--interval", "0.2"], (40, 5));
    terminal.wait_for("too small");
    terminal.press(b"q");
    terminal.ended(0);
}

#[test]
fn one_frame_is_text_and_without_a_terminal_there_is_no_other() {
    let work = tempfile::tempdir().unwrap();
    let options = Options {
        extra: ["--listen-api", "127.0.0.1:0", "--api-tokens"]
            .map(str::to_owned)
            .into_iter()
            .chain([work.path().join("tokens").to_string_lossy().into_owned()])
            .collect(),
        ..Options::default()
    };
    let (token, line) = token();
    std::fs::write(work.path().join("tokens"), line).unwrap();
    private(&work.path().join("tokens"));
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let text = daemon.run(&["top", "--once"]).unwrap();
    for part in [
        "QUEUE",
        "dumps",
        "restores",
        "no transfers run",
        "NODE",
        "up",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains('\x1b'), "{text:?}");
    let view = daemon.json(&["top", "--once"]).unwrap();
    assert_eq!(view["queues"][0]["running"], 0, "{view}");
    let output = daemon.try_run(&["top"]).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--once"));

    std::fs::write(work.path().join("token"), &token).unwrap();
    private(&work.path().join("token"));
    let token_file = work.path().join("token");
    let url = format!("http://{}", daemon.api());
    let over_api = [
        "top",
        "--once",
        "--api",
        &url,
        "--api-token-file",
        token_file.to_str().unwrap(),
    ];
    let mut command = Command::new(permafrost_tests::binaries::path("permafrost").unwrap());
    let output = command
        .args(["--socket", "/nowhere/control.sock"])
        .args(over_api)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("NODE") && !text.contains("QUEUE"), "{text}");
}

/// Returns a token, and the line for the daemon's file.
fn token() -> (String, String) {
    let output = Command::new(permafrost_tests::binaries::path("permafrost").unwrap())
        .args([
            "token",
            "new",
            "--name",
            "planted",
            "--scopes",
            "read,operate",
            "--namespace",
            "default",
            "--json",
        ])
        .output()
        .unwrap();
    let made: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let text = |field: &str| made[field].as_str().unwrap().to_owned();
    (text("token"), text("line") + "\n")
}

fn private(path: &std::path::Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

#[test]
fn a_report_has_what_is_needed_and_no_secret() {
    let work = tempfile::tempdir().unwrap();
    let path = |name: &str| work.path().join(name).to_string_lossy().into_owned();
    let (token, line) = token();
    std::fs::write(path("tokens"), &line).unwrap();
    private(&work.path().join("tokens"));
    let options = Options {
        extra: [
            "--listen-metrics",
            "127.0.0.1:0",
            "--listen-api",
            "127.0.0.1:0",
            "--api-tokens",
            &path("tokens"),
        ]
        .map(str::to_owned)
        .to_vec(),
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let log = format!(
        "line 1\nAuthorization: Bearer planted-bearer\npassword = \"planted-password\"\nurl https://user:planted-url@h/\n--key-command vault planted-vault\nlast {token}\n-----BEGIN PRIVATE KEY-----\nplanted-key\n-----END PRIVATE KEY-----\n"
    );
    std::fs::write(path("log"), log).unwrap();
    let out = path("report.tar");
    let arguments = ["report", "--out", &out, "--log", &path("log")];
    let written = daemon.json(&arguments).unwrap();
    let files = written["files"].to_string();
    for file in [
        "versions.json",
        "doctor.json",
        "status.json",
        "metrics.txt",
        "config.json",
        "log-0.txt",
    ] {
        assert!(files.contains(file), "{file}: {written:#}");
    }
    let bytes = std::fs::read(&out).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    let hash = line
        .split_whitespace()
        .max_by_key(|word| word.len())
        .unwrap();
    for secret in [
        "planted-password",
        "planted-url",
        "planted-vault",
        "planted-bearer",
        "planted-key",
        &token,
        hash,
    ] {
        assert!(!text.contains(secret), "{secret} is in the report");
    }
    // What is to be there is there.
    for part in [
        "permafrost-report/doctor.json",
        "permafrost_region_free_bytes",
        "line 1",
        "\"data-dir\"",
        "\"listen-metrics\"",
        "127.0.0.1:0",
        "(removed)",
    ] {
        assert!(text.contains(part), "{part} is missing");
    }
    let mode = std::fs::metadata(&out).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let listed = Command::new("tar").args(["tf", &out]).output().unwrap();
    assert!(
        listed.status.success(),
        "{}",
        String::from_utf8_lossy(&listed.stderr)
    );
    // It does not overwrite, and without a daemon there is a report, too.
    let again = daemon.try_run(&arguments).unwrap();
    assert_eq!(again.status.code(), Some(4));

    // A secret that cannot be read may be in the log: it is left out.
    std::fs::remove_file(path("tokens")).unwrap();
    let out = path("closed.tar");
    let arguments = ["report", "--out", &out, "--log", &path("log")];
    let written = daemon.json(&arguments).unwrap();
    assert!(
        !written["files"].to_string().contains("log-0"),
        "{written:#}"
    );
    let missing = written["missing"].to_string();
    assert!(missing.contains("log-0.txt: left out"), "{missing}");
    let text = std::fs::read(&out).unwrap();
    let text = String::from_utf8_lossy(&text);
    assert!(!text.contains("line 1") && text.contains("config.json"));
    daemon.kill().unwrap();
}
