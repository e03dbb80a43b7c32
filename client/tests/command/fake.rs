//! A daemon that is a thread, a CRIU that is a script, a process to dump, and checks of a command's output.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::{fs, thread};

use parking_lot::Mutex;
use permafrost_protocol::control::{
    self, Checkpoint, Detail, ErrorCode, Reply, Request, Work, reply, request,
};
use permafrost_protocol::manifest::{Manifest, Origin};
use permafrost_protocol::versions;
use permafrost_transport::framing;
use serde_json::Value;

/// Writes a program that is started immediately. A shell process writes it: if this process wrote it, a child
/// that another test is forking at that time could hold it open for writing, and the kernel would not start it
/// (ETXTBSY).
fn write_program(path: &Path, text: &str) {
    let mut shell = Command::new("sh")
        .args(["-c", "cat >\"$1\" && chmod 755 \"$1\"", "sh"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = shell.stdin.take().unwrap();
    input.write_all(text.as_bytes()).unwrap();
    drop(input);
    assert!(shell.wait().unwrap().success());
}

type Handler = dyn Fn(&request::Body) -> Vec<reply::Body> + Send + Sync;

pub(crate) struct Daemon {
    directory: tempfile::TempDir,
    /// Requests, each with true if a directory came along.
    seen: Arc<Mutex<Vec<(request::Body, bool)>>>,
    /// Number of control connections that ended.
    pub(crate) ended: Arc<Mutex<usize>>,
    _pages: UnixListener,
}

impl Daemon {
    pub(crate) fn start(
        handler: impl Fn(&request::Body) -> Vec<reply::Body> + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("control.sock")).unwrap();
        let pages = UnixListener::bind(directory.path().join("pages.sock")).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let ended = Arc::new(Mutex::new(0));
        let handler: Arc<Handler> = Arc::new(handler);
        let (all, ends) = (seen.clone(), ended.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, handler) = (stream.unwrap(), handler.clone());
                let (all, ends) = (all.clone(), ends.clone());
                thread::spawn(move || {
                    serve(&stream, &handler, &all);
                    *ends.lock() += 1;
                });
            }
        });
        Self {
            directory,
            seen,
            ended,
            _pages: pages,
        }
    }

    pub(crate) fn refusing(code: ErrorCode) -> Self {
        Self::start(move |_| vec![refusal(code)])
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("control.sock")
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_permafrost"));
        command
            .arg("--socket")
            .arg(self.socket())
            .args(arguments)
            .env_remove("PERMAFROST_SOCKET")
            .env_remove("PERMAFROST_API")
            .env("PERMAFROST_CRIU", self.path().join("criu"))
            .env("PERMAFROST_ACTION", self.path().join("action"))
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    pub(crate) fn requests(&self) -> Vec<(request::Body, bool)> {
        self.seen.lock().clone()
    }

    pub(crate) fn only_request(&self) -> (request::Body, bool) {
        let mut requests = self.requests();
        assert_eq!(requests.len(), 1, "{requests:?}");
        requests.remove(0)
    }

    pub(crate) fn script(&self, name: &str, text: &str) {
        let path = self.path().join(name);
        let text = text.replace("@HERE@", self.path().to_str().unwrap());
        write_program(&path, &format!("#!/bin/sh\n{text}\n"));
    }

    /// Installs a CRIU whose dump and restore are `body`, with `$images` and `$work` set.
    pub(crate) fn criu(&self, body: &str) {
        self.script(
            "criu",
            &format!(
                r#"case "$1" in --version) echo "Version: 4.2.1"; exit 0;; esac
echo "$@" >>@HERE@/criu-arguments
case "$1" in check) exit ${{NO_SOFT_DIRTY:-0}};; esac
images=$3; work=$5
{body}"#
            ),
        );
    }
}

fn serve(stream: &UnixStream, handler: &Arc<Handler>, all: &Mutex<Vec<(request::Body, bool)>>) {
    while let Ok(Some((request, fds))) = framing::recv::<Request>(stream) {
        assert!(request.known("the fake", versions::own()).is_ok());
        let body = request.body.unwrap();
        if let (request::Body::Export(_), Some(directory)) = (&body, fds.first()) {
            // The daemon writes where the descriptor points.
            let file = rustix::fs::openat(
                directory,
                "inventory.img",
                rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY,
                rustix::fs::Mode::RUSR,
            );
            drop(file.unwrap());
        }
        let answers = handler(&body);
        if let request::Body::Stream(_) = &body {
            // The request is admitted.
            let begins = reply::Body::Progress(control::Progress::default());
            if framing::send(stream, &Reply { body: Some(begins) }, &[]).is_err() {
                return;
            }
        }
        all.lock().push((body, !fds.is_empty()));
        for body in answers {
            if framing::send(stream, &Reply { body: Some(body) }, &[]).is_err() {
                return;
            }
        }
    }
}

pub(crate) fn refusal(code: ErrorCode) -> reply::Body {
    reply::Body::Error(control::Error {
        code: code.into(),
        message: "the daemon's reason".to_owned(),
        hint: "the daemon's hint".to_owned(),
    })
}

pub(crate) fn checkpoint(job: &str, generation: u64) -> Checkpoint {
    Checkpoint {
        job: job.to_owned(),
        generation,
        id: format!("{generation:032x}"),
        kind: "full".to_owned(),
        created_unix_ms: 1_795_223_069_000,
        memory_bytes: 8 << 20,
        added_bytes: 1 << 20,
        processes: 1,
        ..Checkpoint::default()
    }
}

pub(crate) fn detail(generation: u64, origin: Option<Origin>) -> reply::Body {
    reply::Body::Detail(Detail {
        checkpoint: Some(Checkpoint {
            work: origin.as_ref().and_then(Work::of),
            ..checkpoint("train", generation)
        }),
        manifest: Some(Manifest {
            origin,
            taken_by: "node".to_owned(),
            ..Manifest::default()
        }),
        ..Detail::default()
    })
}

#[track_caller]
pub(crate) fn assert_exit(output: &Output, code: i32) {
    assert_eq!(
        output.status.code(),
        Some(code),
        "stdout: {}\nstderr: {}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

pub(crate) fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(bytes));
    })
}

/// Removes the log that a failure has left.
pub(crate) fn remove_log(output: &Output) {
    let text = stderr(output);
    if let Some(log) = text.lines().find_map(|line| line.strip_prefix("  log: ")) {
        fs::remove_dir_all(Path::new(log).parent().unwrap()).unwrap();
    }
}

/// A process to dump, which ends with the test.
pub(crate) struct Victim(Child);

impl Victim {
    pub(crate) fn start() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }

    pub(crate) fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
