//! Collects the parts of a report.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::net::TcpStream;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use permafrost_criu::Criu;
use permafrost_protocol::control::{ServerStatus, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
use permafrost_transport::api::TOKEN_VARIABLE;
use serde::{Deserialize, Serialize};

use super::{LOG_LINES, ReportArguments};
use crate::doctor;

/// Longest part of a log, of a configuration file and of metrics, bytes.
const MAX_BYTES: u64 = 4 << 20;

/// Longest wait for metrics.
const PATIENCE: Duration = Duration::from_secs(5);

/// Purposes of the daemon's files whose contents are looked for in all texts.
const SECRETS: [&str; 3] = ["tokens", "registry-user", "key"];

/// Options of the daemon that name such files.
const SECRET_OPTIONS: [&str; 4] = [
    "api-tokens",
    "catalog-user-file",
    "key-file",
    "old-key-file",
];

/// Files of a report, and what is missing.
#[derive(Default)]
pub(super) struct Collected {
    files: Vec<(String, String)>,
    missing: Vec<String>,
}

impl Collected {
    fn add(&mut self, name: &str, text: Result<String, String>) {
        match text {
            Ok(text) => self.files.push((name.to_owned(), text)),
            Err(why) => self.missing.push(format!("{name}: {why}")),
        }
    }

    fn add_json<T: Serialize>(&mut self, name: &str, value: Result<T, String>) {
        let text = value.and_then(|value| {
            serde_json::to_string_pretty(&value).map_err(|error| error.to_string())
        });
        self.add(name, text);
    }

    /// Returns the files, of which one lists what is missing, and that list.
    pub(super) fn finish(mut self) -> (Vec<(String, String)>, Vec<String>) {
        let mut list = self.missing.join("\n");
        list.push('\n');
        self.files.push(("missing.txt".to_owned(), list));
        (self.files, self.missing)
    }
}

/// Collects everything, and returns the secrets that are to be removed from it. What fails is recorded as missing.
pub(super) fn all(
    collected: &mut Collected,
    context: &Context,
    arguments: &ReportArguments,
) -> Vec<String> {
    let said = |failure: Failure| failure.message;
    let criu = Criu::new(arguments.doctor.criu().cloned());
    let system = rustix::system::uname();
    let versions = serde_json::json!({
        "permafrost": env!("CARGO_PKG_VERSION"),
        "criu": criu.version().unwrap_or_else(|error| error.to_string()),
        "kernel": system.release().to_string_lossy(),
        "machine": system.machine().to_string_lossy(),
        "distribution": fs::read_to_string("/etc/os-release").unwrap_or_default(),
    });
    collected.add_json("versions.json", Ok(versions));
    collected.add_json(
        "doctor.json",
        Ok(doctor::examine(context, &arguments.doctor)),
    );
    let status = doctor::status(context);
    let found = status.as_ref().ok().cloned();
    collected.add_json("status.json", status.map_err(said));
    let nodes = context.connect().and_then(|mut connection| {
        let nodes = request::Nodes::default();
        Ok(connection.call(nodes)?)
    });
    collected.add_json("nodes.json", nodes.map_err(said));
    let api = arguments.doctor.api().client(context).and_then(|client| {
        let answer = client.get("/v1/nodes", &[])?;
        Ok(String::from_utf8_lossy(answer.bytes()).into_owned())
    });
    collected.add("api-nodes.json", api.map_err(said));
    let address = found.as_ref().map_or("", |status| status.metrics.as_str());
    collected.add("metrics.txt", metrics(address));
    let options = configuration(found.as_ref(), &arguments.config);
    let (secrets, unknown) = secrets(found.as_ref(), options.as_ref(), arguments);
    collected.add("config.json", options.map(|options| options.text));
    // Whatever a log repeats has to be known to be removed.
    let left_out =
        unknown.map(|why| format!("left out, as secrets in it would not be found: {why}"));
    let take = |text: &dyn Fn() -> Result<String, String>| left_out.clone().map_or_else(text, Err);
    for (number, log) in arguments.log.iter().enumerate() {
        let name = format!("log-{number}.txt");
        let text = take(&|| tail_of(log).map(|text| last_lines(&text)));
        collected.add(&name, text);
    }
    if arguments.log.is_empty() {
        collected.add("journal.txt", take(&journal));
    }
    secrets
}

/// Returns the contents of the daemon's secret files and of credentials, to be removed from all texts; and why not all of
/// them are known, if so: it is not known which files there are, or one cannot be read.
fn secrets(
    status: Option<&ServerStatus>,
    options: Result<&DaemonOptions, &String>,
    arguments: &ReportArguments,
) -> (Vec<String>, Option<String>) {
    let mut unknown = options.err().cloned();
    let mut paths = options.map_or_else(|_| Vec::new(), DaemonOptions::secret_files);
    let of_daemon = status.map_or(&[][..], |status| &status.files).iter();
    let of_daemon = of_daemon.filter(|file| SECRETS.contains(&file.purpose.as_str()));
    paths.extend(of_daemon.map(|file| PathBuf::from(&file.path)));
    paths.extend(arguments.doctor.secrets().iter().cloned());
    paths.extend(arguments.doctor.api().api_token_file.clone());
    paths.sort();
    paths.dedup();
    let mut secrets = Vec::new();
    for path in paths {
        match whole(&path) {
            Ok(text) => secrets.push(text),
            Err(why) => unknown = Some(why),
        }
    }
    secrets.extend(std::env::var(TOKEN_VARIABLE));
    (secrets, unknown)
}

/// Options of the daemon, as it prints them itself, without values that may be secret.
struct DaemonOptions {
    /// JSON of `permafrostd --print-config --json`.
    text: String,
    options: Vec<DaemonOption>,
    /// Directory that relative paths in it begin in.
    dir: PathBuf,
}

/// An option in that JSON.
#[derive(Deserialize)]
struct DaemonOption {
    name: String,
    values: Vec<String>,
}

impl DaemonOptions {
    /// Returns the paths of the files that have secrets in them.
    fn secret_files(&self) -> Vec<PathBuf> {
        let named = self.options.iter();
        let named = named.filter(|option| SECRET_OPTIONS.contains(&option.name.as_str()));
        let paths = named.flat_map(|option| &option.values);
        paths.map(|path| self.dir.join(path)).collect()
    }
}

/// Asks the daemon's program for its options: that of the daemon that runs, with its command line and its variables, or
/// else the one that is installed, with this file.
fn configuration(status: Option<&ServerStatus>, file: &Path) -> Result<DaemonOptions, String> {
    let (mut command, dir) = match status {
        Some(status) => of_process(status.pid)?,
        None => {
            let mut command = Command::new(daemon_program());
            // The daemon's own default may be missing: it then has no file.
            if file.exists() {
                command.arg("--config").arg(file);
            }
            (command, PathBuf::from("."))
        }
    };
    let output = command
        .args(["--print-config", "--json"])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("permafrostd --print-config: {error}"))?;
    if !output.status.success() {
        // Its words may repeat a value.
        return Err(format!(
            "permafrostd --print-config fails ({}): see what it says",
            output.status
        ));
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    #[derive(Deserialize)]
    struct Printed {
        options: Vec<DaemonOption>,
    }
    let printed: Printed = serde_json::from_str(&text)
        .map_err(|error| format!("permafrostd --print-config: {error}"))?;
    Ok(DaemonOptions {
        text,
        options: printed.options,
        dir,
    })
}

/// Returns the program of a daemon that runs, with its arguments, its variables and its working directory.
fn of_process(pid: u32) -> Result<(Command, PathBuf), String> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let read = |name: &str| {
        let path = process.join(name);
        fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
    };
    let texts = |bytes: Vec<u8>| -> Vec<OsString> {
        let texts = bytes
            .split(|byte| *byte == 0)
            .filter(|text| !text.is_empty());
        texts
            .map(|text| OsString::from_vec(text.to_vec()))
            .collect()
    };
    let dir = process.join("cwd");
    let mut command = Command::new(process.join("exe"));
    command.current_dir(&dir).env_clear();
    command.args(texts(read("cmdline")?).into_iter().skip(1));
    for variable in texts(read("environ")?) {
        let bytes = variable.as_bytes();
        let Some(at) = bytes.iter().position(|byte| *byte == b'=') else {
            continue;
        };
        let (name, value) = bytes.split_at(at);
        if name.starts_with(b"PERMAFROSTD_") || name == b"RUST_LOG" {
            let value = value.get(1..).unwrap_or_default();
            command.env(OsStr::from_bytes(name), OsStr::from_bytes(value));
        }
    }
    Ok((command, dir))
}

/// Returns the daemon's program beside this one, or else the one on PATH.
fn daemon_program() -> PathBuf {
    let name = "permafrostd";
    let beside = std::env::current_exe().map(|own| own.with_file_name(name));
    let beside = beside.ok().filter(|path| path.is_file());
    beside.unwrap_or_else(|| PathBuf::from(name))
}

/// Reads a secret file.
///
/// # Errors
/// It cannot be read, or is longer than [`MAX_BYTES`].
fn whole(path: &Path) -> Result<String, String> {
    match path.metadata() {
        Ok(found) if found.len() > MAX_BYTES => Err(format!("{} is too long", path.display())),
        _ => tail_of(path),
    }
}

/// Reads the end of a file, [`MAX_BYTES`] at most.
fn tail_of(path: &Path) -> Result<String, String> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("not a file"));
        }
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(MAX_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let first = lines.len().saturating_sub(LOG_LINES);
    let mut last = lines[first..].join("\n");
    last.push('\n');
    last
}

fn metrics(address: &str) -> Result<String, String> {
    if address.is_empty() {
        return Err("permafrostd serves none (--listen-metrics), or does not answer".to_owned());
    }
    let ask = || -> io::Result<String> {
        let address = address.parse().map_err(io::Error::other)?;
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
        let mut bytes = Vec::new();
        stream.take(MAX_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let answer = ask().map_err(|error| format!("{address}: {error}"))?;
    let body = answer
        .split_once("\r\n\r\n")
        .map(|(_, body)| body.to_owned());
    body.ok_or_else(|| format!("{address} does not speak HTTP"))
}

fn journal() -> Result<String, String> {
    let lines = LOG_LINES.to_string();
    let output = Command::new("journalctl")
        .args([
            "--unit",
            "permafrostd",
            "--no-pager",
            "--quiet",
            "--lines",
            &lines,
        ])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("journalctl: {error}; name a log with --log"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if text.trim().is_empty() {
        return Err("the journal has nothing of permafrostd; name a log with --log".to_owned());
    }
    Ok(text)
}
