//! Compares the running server with its OpenAPI document: schemathesis makes valid and invalid requests from the
//! document, and checks the replies against it.
//!
//! A daemon of its own, with a dump in it where CRIU can run, is asked over TCP with a token of all scopes. The seed is
//! fixed, so that a run finds what the one before found; `cargo xtask schema --seed` tries others.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use permafrost_tests::binaries;
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::workload::{self, Workload};

use crate::ci::{self, Count};
use crate::setup::{self, Criu};
use crate::{tools, ui};

/// Release of schemathesis.
const RELEASE: &str = "4.32.5";

/// Requests for each route in CI: enough for every constraint of the document once. `cargo xtask schema` makes more.
pub(crate) const CI_EXAMPLES: u32 = 40;

/// Seed that CI uses.
pub(crate) const CI_SEED: u64 = 1;

/// Builds the daemon under test. Not needed if everything is built already.
///
/// # Errors
/// The build fails.
pub(crate) fn build() -> Result<()> {
    let built = ci::cargo_command()
        .args(["build", "--quiet", "--workspace", "--bins"])
        .status()
        .context("run cargo")?;
    if !built.success() {
        bail!("the build fails ({built})");
    }
    Ok(())
}

/// Checks the document with so many requests for each route. The result is one passed or failed test, or a skipped
/// one if schemathesis is not available.
///
/// # Errors
/// The daemon does not start.
pub(crate) fn run(examples: u32, seed: u64) -> Result<Count> {
    let program = match tools::from_pypi("schemathesis", RELEASE, "schemathesis") {
        Ok(program) => program,
        Err(why) => {
            ui::say("############################################################");
            ui::say(&format!(
                "THE OPENAPI DOCUMENT IS NOT CHECKED: no schemathesis: {why:#}"
            ));
            ui::say("############################################################");
            return Ok(Count {
                skipped: 1,
                ..Count::default()
            });
        }
    };
    let dir = tempfile::tempdir().context("create a directory")?;
    let tokens = dir.path().join("tokens");
    let token = new_token(&tokens)?;
    let daemon = Daemon::start(
        dir.path(),
        &daemon::Options {
            extra: ["--listen-api", "127.0.0.1:0", "--api-tokens"]
                .map(str::to_owned)
                .into_iter()
                .chain([tokens.to_string_lossy().into_owned()])
                .collect(),
            ..daemon::Options::default()
        },
    )?;
    if let Criu::Works(_) = setup::criu()? {
        dump_something(&daemon, dir.path())?;
    }
    let document = dir.path().join("openapi.json");
    fs::write(&document, fetch(daemon.api(), &token)?).context("write the document")?;
    println!("schemathesis {RELEASE}: seed {seed}, {examples} requests for each route");
    let status = Command::new(program)
        .arg("run")
        .arg(&document)
        .args(["--url", &format!("http://{}", daemon.api())])
        .args(["--header", &format!("Authorization: Bearer {token}")])
        // A stream of events does not end.
        .args(["--exclude-path", "/v1/events"])
        .args(["--max-examples", &examples.to_string()])
        .args(["--seed", &seed.to_string()])
        .args(["--checks", "all", "--request-timeout", "20"])
        // Which nodes there are is in no document: a request that names one that is not there is sound, and refused.
        .args(["--exclude-checks", "positive_data_acceptance"])
        .args(["--phases", "examples,coverage,fuzzing"])
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .status()
        .context("run schemathesis")?;
    let is_sound = status.success();
    daemon.stop()?;
    Ok(Count {
        passed: u64::from(is_sound),
        failed: u64::from(!is_sound),
        skipped: 0,
    })
}

/// Makes a token of all scopes, and the file that admits it.
fn new_token(file: &Path) -> Result<String> {
    let output = Command::new(binaries::path("permafrost")?)
        .args(["token", "new", "--name", "schema"])
        .args(["--scopes", "read,reserve,operate", "--json"])
        .output()
        .context("run permafrost")?;
    let made: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("read the token")?;
    let field = |name: &str| {
        let field = made.get(name).and_then(serde_json::Value::as_str);
        field.with_context(|| format!("`permafrost token new` names no {name}"))
    };
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file)
        .and_then(|mut file| writeln!(file, "{}", field("line").unwrap_or_default()))
        .context("write the tokens")?;
    Ok(field("token")?.to_owned())
}

/// Fetches the document from the daemon, with a token of scope `read`.
fn fetch(address: &str, token: &str) -> Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).context("connect to the API")?;
    write!(
        stream,
        "GET /openapi.json HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    )
    .context("ask for the document")?;
    let mut answer = Vec::new();
    stream
        .read_to_end(&mut answer)
        .context("read the document")?;
    let body = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    match body {
        Some(head) if answer.starts_with(b"HTTP/1.1 200 ") => Ok(answer.split_off(head + 4)),
        _ => bail!(
            "the document is not given:\n{}",
            String::from_utf8_lossy(&answer)
        ),
    }
}

/// Makes a dump, so that requests can name a job.
fn dump_something(daemon: &Daemon, dir: &Path) -> Result<()> {
    let mut workload = Workload::start(dir, &workload::Options::default())?;
    let pid = workload.pid().to_string();
    for job in ["train", "team-a/eval"] {
        daemon.run(&["dump", "--pid", &pid, "--job", job, "--leave-running"])?;
    }
    workload.kill();
    Ok(())
}
