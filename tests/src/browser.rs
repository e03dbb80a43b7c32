//! Debian's Chromium, driven by WebDriver (W3C), for one test. Its requests are few and plain: so they are made here.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::binaries;

/// Environment variable that turns a skipped test into a failed one.
pub const REQUIRE_BROWSER: &str = "PERMAFROST_REQUIRE_BROWSER";

/// Environment variable that names a directory for pictures of pages.
pub const PICTURES: &str = "PERMAFROST_PICTURES";

/// Packages that are needed.
pub const PACKAGES: [&str; 4] = [
    "chromium",
    "chromium-driver",
    "fontconfig-config",
    "fonts-dejavu-core",
];

/// Time limit for the browser's start, and for what a page shows by itself, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the directory into which `cargo xtask` unpacks the packages.
#[must_use]
pub fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).join("target/browser/root")
}

fn program(name: &str) -> Command {
    let root = root();
    let mut command = binaries::unpacked(&root, name);
    command
        .env("FONTCONFIG_FILE", root.with_file_name("fonts.conf"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

const DRIVER: &str = "usr/bin/chromedriver";
const CHROMIUM: &str = "usr/lib/chromium/chromium";

/// Starts both programs.
///
/// # Errors
/// Gives the reason in one line.
pub fn check() -> Result<(), String> {
    let fonts = root().join("usr/share/fonts");
    let configuration = format!("<fontconfig><dir>{}</dir></fontconfig>\n", fonts.display());
    fs::write(root().with_file_name("fonts.conf"), configuration)
        .map_err(|error| format!("{}: {error}", root().display()))?;
    for name in [DRIVER, CHROMIUM] {
        let status = program(name)
            .arg("--version")
            .status()
            .map_err(|error| format!("{name}: {error}"))?;
        if !status.success() {
            return Err(format!("{name} --version: {status}"));
        }
    }
    Ok(())
}

/// Returns true if there is a browser; otherwise prints loudly that `test` was skipped.
///
/// # Panics
/// If there is none and [`REQUIRE_BROWSER`] is set to anything but 0.
#[must_use]
pub fn for_test(test: &str) -> bool {
    let Err(why) = check() else { return true };
    let required = std::env::var_os(REQUIRE_BROWSER).is_some_and(|value| value != "0");
    assert!(!required, "{test} needs Chromium: {why}");
    let _ = writeln!(
        std::io::stderr(),
        "SKIPPED: {test}: no Chromium (`cargo xtask setup` fetches one): {why}"
    );
    false
}

/// A browser with one window and a profile of its own. It ends when it is dropped.
#[derive(Debug)]
pub struct Browser {
    driver: Child,
    port: u16,
    session: String,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts a browser without a display.
    ///
    /// # Errors
    /// Fails with the words of the driver.
    pub fn start() -> Result<Self> {
        let profile = tempfile::tempdir().context("make a profile")?;
        let free = std::net::TcpListener::bind(("127.0.0.1", 0)).context("find a port")?;
        let port = free.local_addr().context("find a port")?.port();
        drop(free);
        let driver = program(DRIVER)
            .arg(format!("--port={port}"))
            .env("HOME", profile.path())
            .spawn()
            .context("start chromedriver")?;
        let mut browser = Self {
            driver,
            port,
            session: String::new(),
            _profile: profile,
        };
        let until = Instant::now() + LIMIT;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if Instant::now() > until {
                bail!("chromedriver does not listen");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // Tests run as root, without a display or a large /dev/shm, and what they open is their own.
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1400,1000",
        ];
        let wanted = json!({"capabilities": {"alwaysMatch": {
            // Of authorities that tests make.
            "acceptInsecureCerts": true,
            "goog:chromeOptions": {"binary": root().join(CHROMIUM), "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }}});
        let made = browser.ask("POST", "/session", &wanted)?;
        let session = made["sessionId"].as_str().context("a session")?;
        session.clone_into(&mut browser.session);
        Ok(browser)
    }

    /// Opens a page, and waits until it is loaded.
    ///
    /// # Errors
    /// Fails with the words of the driver.
    pub fn open(&self, url: &str) -> Result<()> {
        self.in_session("POST", "url", &json!({"url": url}))?;
        Ok(())
    }

    /// Runs the body of a function in the page; returns what it returns, or what its promise resolves to.
    ///
    /// # Errors
    /// It throws.
    pub fn run(&self, script: &str, arguments: &[Value]) -> Result<Value> {
        let body = json!({"script": script, "args": arguments});
        self.in_session("POST", "execute/sync", &body)
    }

    /// Runs the body of a function in the page until it returns true.
    ///
    /// # Errors
    /// It throws, or does not return true in time: then with what the page shows.
    pub fn wait(&self, what: &str, script: &str) -> Result<()> {
        let until = Instant::now() + LIMIT;
        while self.run(script, &[])? != true {
            if Instant::now() > until {
                let text = self.run("return document.body.innerText", &[])?;
                bail!("{what} does not come; the page shows:\n{text}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Presses a key, by its WebDriver code or as a letter, where the focus is.
    ///
    /// # Errors
    /// Fails with the words of the driver.
    pub fn press(&self, key: char) -> Result<()> {
        let actions = json!({"actions": [{"type": "key", "id": "keyboard", "actions": [
            {"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]}]});
        self.in_session("POST", "actions", &actions)?;
        Ok(())
    }

    /// Writes a picture of the page, PNG, into the directory that [`PICTURES`] names; none if it names none. `dark` chooses
    /// the scheme.
    ///
    /// # Errors
    /// Fails with the words of the driver; the file cannot be written.
    pub fn picture(&self, name: &str, dark: bool, size: [u32; 2]) -> Result<()> {
        let Some(directory) = std::env::var_os(PICTURES) else {
            return Ok(());
        };
        let scheme = if dark { "dark" } else { "light" };
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        let [width, height] = size;
        for (command, parameters) in [
            ("Emulation.setEmulatedMedia", json!({"features": features})),
            (
                "Emulation.setDeviceMetricsOverride",
                json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}),
            ),
        ] {
            let command = json!({"cmd": command, "params": parameters});
            self.in_session("POST", "goog/cdp/execute", &command)?;
        }
        std::thread::sleep(Duration::from_millis(300));
        let shot = json!({"cmd": "Page.captureScreenshot", "params": {"format": "png"}});
        let shot = self.in_session("POST", "goog/cdp/execute", &shot)?;
        let text = shot["data"].as_str().context("a picture")?;
        let path = Path::new(&directory).join(name);
        fs::write(&path, of_base64(text)).with_context(|| path.display().to_string())?;
        for command in [
            "Emulation.clearDeviceMetricsOverride",
            "Emulation.setEmulatedMedia",
        ] {
            let command = json!({"cmd": command, "params": {}});
            self.in_session("POST", "goog/cdp/execute", &command)?;
        }
        Ok(())
    }

    /// Returns the messages of the browser's console since the last call: faults of scripts, what a policy forbade.
    ///
    /// # Errors
    /// Fails with the words of the driver.
    pub fn console(&self) -> Result<Vec<String>> {
        let entries = self.in_session("POST", "se/log", &json!({"type": "browser"}))?;
        let entries = entries.as_array().cloned().unwrap_or_default();
        let messages = entries
            .iter()
            .filter_map(|entry| entry["message"].as_str().map(str::to_owned));
        Ok(messages.collect())
    }

    fn in_session(&self, method: &str, command: &str, body: &Value) -> Result<Value> {
        self.ask(
            method,
            &format!("/session/{}/{command}", self.session),
            body,
        )
    }

    /// Sends a command; returns the `value` of the answer (WebDriver, section 6.3).
    fn ask(&self, method: &str, path: &str, body: &Value) -> Result<Value> {
        let body = body.to_string();
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).context("chromedriver")?;
        stream.set_read_timeout(Some(2 * LIMIT)).context("limit")?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            self.port,
            body.len()
        );
        stream
            .write_all((head + &body).as_bytes())
            .context("ask chromedriver")?;
        // It does not end the connection with its answer.
        let mut lines = BufReader::new(stream);
        let (mut head, mut length) = (String::new(), 0);
        while !head.ends_with("\r\n\r\n") {
            let begin = head.len();
            if lines.read_line(&mut head).context("read the head")? == 0 {
                bail!("{method} {path}: chromedriver answers with {head:?}");
            }
            let header = head.get(begin..).and_then(|line| line.split_once(':'));
            if let Some((name, value)) = header
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().context("a length")?;
            }
        }
        let mut body = String::new();
        lines
            .take(length)
            .read_to_string(&mut body)
            .with_context(|| format!("{method} {path}"))?;
        let answer: Value = serde_json::from_str(&body).with_context(|| body.clone())?;
        if !head.starts_with("HTTP/1.1 200") {
            bail!("{path}: {}", answer["value"]["message"]);
        }
        Ok(answer["value"].clone())
    }
}

/// Decodes base64 (RFC 4648, section 4); anything that is no digit of it is left out.
fn of_base64(text: &str) -> Vec<u8> {
    let digits = text.bytes().filter_map(|byte| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    });
    let (mut bytes, mut held, mut bits) = (Vec::new(), 0_u32, 0);
    for digit in digits {
        held = held << 6 | u32::from(digit);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((held >> bits & 0xff) as u8);
            held &= (1 << bits) - 1;
        }
    }
    bytes
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It ends the browser's processes; without it they would outlive the driver.
        let _ = self.ask("DELETE", &format!("/session/{}", self.session), &json!({}));
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
