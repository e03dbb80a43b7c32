//! The `permafrost` command against a daemon that is a thread of the test, and a CRIU that is a shell
//! script: which requests a command sends, what it prints, and what it exits with.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use permafrost_client::framing;
use permafrost_protocol::control::{
    self, Checkpoint, Checkpoints, Detail, Done, ErrorCode, Exported, Progress, Reply, Request,
    ServerStatus, SessionOpened, SessionStatus, Verified, reply, request,
};
use permafrost_protocol::manifest::{Manifest, Origin};
use serde_json::Value;

/// Writes a program that is started at once. A shell of its own does: were this process to write it, a child
/// that another test is just forking could hold it open for writing, and the kernel would not start it (ETXTBSY).
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

struct Daemon {
    directory: tempfile::TempDir,
    /// Requests with whether a directory came along.
    seen: Arc<Mutex<Vec<(request::Body, bool)>>>,
    /// Control connections that ended.
    ended: Arc<Mutex<usize>>,
    _pages: UnixListener,
}

impl Daemon {
    fn start(handler: impl Fn(&request::Body) -> Vec<reply::Body> + Send + Sync + 'static) -> Self {
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
                    *ends.lock().unwrap() += 1;
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

    fn refusing(code: ErrorCode) -> Self {
        Self::start(move |_| vec![refusal(code)])
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("control.sock")
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_permafrost"));
        command
            .arg("--socket")
            .arg(self.socket())
            .args(arguments)
            .env_remove("PERMAFROST_SOCKET")
            .env("PERMAFROST_CRIU", self.path().join("criu"))
            .env("PERMAFROST_ACTION", self.path().join("action"))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn requests(&self) -> Vec<(request::Body, bool)> {
        self.seen.lock().unwrap().clone()
    }

    fn only_request(&self) -> (request::Body, bool) {
        let mut requests = self.requests();
        assert_eq!(requests.len(), 1, "{requests:?}");
        requests.remove(0)
    }

    fn script(&self, name: &str, text: &str) {
        let path = self.path().join(name);
        let text = text.replace("@HERE@", self.path().to_str().unwrap());
        write_program(&path, &format!("#!/bin/sh\n{text}\n"));
    }

    /// A CRIU whose dump and restore are `body`, with `$images` and `$work` set.
    fn criu(&self, body: &str) {
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
        assert_eq!(request.version, control::VERSION);
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
        all.lock().unwrap().push((body, !fds.is_empty()));
        for body in answers {
            if framing::send(stream, &Reply { body: Some(body) }, &[]).is_err() {
                return;
            }
        }
    }
}

fn refusal(code: ErrorCode) -> reply::Body {
    reply::Body::Error(control::Error {
        code: code.into(),
        message: "the daemon's reason".to_owned(),
        hint: "the daemon's hint".to_owned(),
    })
}

fn checkpoint(job: &str, generation: u64) -> Checkpoint {
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

fn detail(generation: u64, origin: Option<Origin>) -> reply::Body {
    reply::Body::Detail(Detail {
        checkpoint: Some(checkpoint("train", generation)),
        manifest: Some(Manifest {
            origin,
            ..Manifest::default()
        }),
        ..Detail::default()
    })
}

#[track_caller]
fn assert_exit(output: &Output, code: i32) {
    assert_eq!(
        output.status.code(),
        Some(code),
        "stdout: {}\nstderr: {}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(bytes));
    })
}

/// Removes the log that a failure left.
fn remove_log(output: &Output) {
    let text = stderr(output);
    if let Some(log) = text.lines().find_map(|line| line.strip_prefix("  log: ")) {
        fs::remove_dir_all(Path::new(log).parent().unwrap()).unwrap();
    }
}

/// A process to dump, ended with the test.
struct Victim(Child);

impl Victim {
    fn start() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn every_refusal_has_its_exit_code() {
    for code in [
        ErrorCode::Internal,
        ErrorCode::Invalid,
        ErrorCode::NotFound,
        ErrorCode::Conflict,
        ErrorCode::NoSpace,
        ErrorCode::Corrupt,
        ErrorCode::SessionFailed,
        ErrorCode::Denied,
    ] {
        let daemon = Daemon::refusing(code);
        let output = daemon.run(&["show", "train"]);
        assert_exit(&output, code.into());
        assert_eq!(
            stderr(&output),
            "permafrost: the daemon's reason\n  hint: the daemon's hint\n"
        );
        let output = daemon.run(&["show", "train", "--json"]);
        assert_exit(&output, code.into());
        assert!(output.stdout.is_empty());
        let error = json(&output.stderr);
        assert_eq!(error["error"]["exit_code"], i32::from(code));
        assert_eq!(error["error"]["message"], "the daemon's reason");
        assert_eq!(error["error"]["hint"], "the daemon's hint");
    }
}

#[test]
fn without_a_daemon_there_is_an_exit_code_and_a_hint() {
    let daemon = Daemon::start(|_| vec![]);
    fs::remove_file(daemon.socket()).unwrap();
    let output = daemon.run(&["status"]);
    assert_exit(&output, 10);
    assert!(
        stderr(&output).contains("start permafrostd"),
        "{}",
        stderr(&output)
    );
    let output = daemon.run(&["no-such-command"]);
    assert_exit(&output, 2);
}

#[test]
fn ls_lists_checkpoints_and_parked_sessions() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::Checkpoints(Checkpoints {
            checkpoints: vec![
                Checkpoint {
                    pinned: true,
                    ..checkpoint("train", 1)
                },
                Checkpoint {
                    parent_generation: 1,
                    ..checkpoint("train", 2)
                },
                Checkpoint {
                    kind: "parked".to_owned(),
                    session: "5".repeat(32),
                    ..checkpoint("", 0)
                },
            ],
        })]
    });
    let output = daemon.run(&["ls", "train"]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("CHECKPOINT  KIND"), "{text}");
    assert!(
        lines[1].starts_with("train@1     full") && lines[1].ends_with("pinned"),
        "{text}"
    );
    assert!(
        lines[2].contains("8.0 MiB  1.0 MiB") && lines[2].ends_with("@1"),
        "{text}"
    );
    assert!(
        lines[5].starts_with(&"5".repeat(32)) && lines[5].ends_with("never"),
        "{text}"
    );
    assert_eq!(
        daemon.only_request(),
        (
            request::Body::List(request::List {
                job: "train".to_owned()
            }),
            false
        )
    );
    let listed = json(&daemon.run(&["--json", "ls"]).stdout);
    assert_eq!(listed["checkpoints"][1]["generation"], 2);
    assert_eq!(listed["checkpoints"][0]["memory_bytes"], 8 << 20);
}

#[test]
fn ls_of_an_unknown_job_is_not_found() {
    let daemon = Daemon::start(|_| vec![reply::Body::Checkpoints(Checkpoints::default())]);
    assert_exit(&daemon.run(&["ls", "train"]), 3);
    let output = daemon.run(&["ls"]);
    assert_exit(&output, 0);
    assert_eq!(stdout(&output), "no checkpoints\n");
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let daemon = Daemon::start(|_| {
        let checkpoints = (1..20_000)
            .map(|generation| checkpoint("train", generation))
            .collect();
        vec![reply::Body::Checkpoints(Checkpoints { checkpoints })]
    });
    let mut child = daemon
        .command(&["ls"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut some = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_exit(&output, 0);
    assert!(output.stderr.is_empty(), "{}", stderr(&output));
}

#[test]
fn rm_wants_a_generation_or_all() {
    let daemon = Daemon::start(|_| vec![reply::Body::Done(Done { count: 3 })]);
    assert_exit(&daemon.run(&["rm", "train"]), 2);
    assert!(daemon.requests().is_empty());
    let output = daemon.run(&["rm", "train", "--all", "--force"]);
    assert_eq!(stdout(&output), "3 checkpoints removed\n");
    assert_eq!(
        daemon.only_request().0,
        request::Body::Remove(request::Remove {
            checkpoint: "train".to_owned(),
            all_generations: true,
            force: true,
        })
    );
}

#[test]
fn pin_and_unpin_say_what_they_want() {
    let daemon = Daemon::start(|request| {
        let request::Body::Pin(pin) = request else {
            panic!()
        };
        vec![reply::Body::Checkpoint(Checkpoint {
            pinned: pin.pinned,
            ..checkpoint("train", 2)
        })]
    });
    assert_eq!(
        stdout(&daemon.run(&["pin", "train@2"])),
        "train@2 is pinned\n"
    );
    assert_eq!(
        stdout(&daemon.run(&["pin", "train@2", "--unpin"])),
        "train@2 is not pinned\n"
    );
    assert_eq!(
        stdout(&daemon.run(&["unpin", "train"])),
        "train@2 is not pinned\n"
    );
}

#[test]
fn verify_exits_with_corrupt_when_something_is() {
    let damage = "train@2: process 7: page 0x7f0000001000: checksum".to_owned();
    let result = move |request: &request::Body| {
        let request::Body::Verify(verify) = request else {
            panic!()
        };
        let mut verified = Verified {
            checkpoints: 2,
            pages: 4096,
            damage: vec![],
        };
        if verify.checkpoint.is_empty() {
            verified.damage.push(damage.clone());
        }
        vec![
            reply::Body::Progress(Progress {
                done_bytes: 1,
                total_bytes: 2,
            }),
            reply::Body::Verified(verified),
        ]
    };
    let daemon = Daemon::start(result);
    let output = daemon.run(&["verify", "train@1"]);
    assert_exit(&output, 0);
    assert_eq!(
        stdout(&output),
        "2 checkpoints and 4096 pages read: every checksum matches\n"
    );
    let output = daemon.run(&["verify"]);
    assert_exit(&output, 7);
    assert!(stdout(&output).contains("page 0x7f0000001000"));
}

#[test]
fn get_makes_a_private_directory_and_spares_a_full_one() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::Exported(Exported {
            checkpoint: Some(checkpoint("train", 1)),
            files: 1,
            ..Exported::default()
        })]
    });
    let target = daemon.path().join("images");
    let target = target.to_str().unwrap();
    let output = daemon.run(&["get", "train", target]);
    assert_exit(&output, 0);
    assert!(
        stdout(&output).contains("criu restore --images-dir"),
        "{}",
        stdout(&output)
    );
    assert_eq!(fs::metadata(target).unwrap().mode() & 0o777, 0o700);
    assert!(Path::new(target).join("inventory.img").exists());
    let (request, directory) = daemon.only_request();
    assert!(directory);
    assert_eq!(
        request,
        request::Body::Export(request::Export {
            checkpoint: "train".to_owned(),
            small_images_only: false,
        })
    );
    assert_exit(&daemon.run(&["get", "train", target]), 4);
    assert_exit(&daemon.run(&["get", "train", target, "--force"]), 0);
}

#[test]
fn put_and_adopt_hand_the_directory_over() {
    let daemon = Daemon::start(|_| vec![reply::Body::Checkpoint(checkpoint("train", 4))]);
    let images = daemon.path().to_str().unwrap().to_owned();
    let output = daemon.run(&["put", "train", &images]);
    assert!(
        stdout(&output).starts_with("train@4 is sealed\n"),
        "{}",
        stdout(&output)
    );
    let output = daemon.run(&[
        "adopt",
        "--job",
        "train",
        "--images-dir",
        &images,
        "abc",
        "--",
        "--file-locks",
    ]);
    assert_exit(&output, 0);
    let requests = daemon.requests();
    assert!(requests.iter().all(|(_, directory)| *directory));
    match &requests[1].0 {
        request::Body::Adopt(adopt) => {
            assert_eq!(
                (adopt.session.as_str(), adopt.job.as_str()),
                ("abc", "train")
            );
            let origin = adopt.origin.as_ref().unwrap();
            assert_eq!(origin.restore_options, ["--file-locks"]);
            assert_eq!(origin.pid, 0);
        }
        other => panic!("{other:?}"),
    }
    assert_exit(&daemon.run(&["put", "train", "/nonexistent"]), 3);
    assert_exit(
        &daemon.run(&["put", "train", daemon.socket().to_str().unwrap()]),
        1,
    );
}

#[test]
fn open_prints_what_criu_needs_and_outlives_the_command() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::SessionOpened(SessionOpened {
            session: "77".to_owned(),
            socket: "/run/s".to_owned(),
            address: "127.0.0.1:4000".to_owned(),
            ..SessionOpened::default()
        })]
    });
    let output = daemon.run(&["open", "--job", "train"]);
    assert!(
        stdout(&output).contains("--address 127.0.0.1 --port 4000"),
        "{}",
        stdout(&output)
    );
    match daemon.only_request().0 {
        request::Body::Open(open) => {
            assert!(!open.bound_to_connection && !open.seal_follows && !open.no_parent);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn status_shows_regions_and_sessions() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::Status(ServerStatus {
            version: "0.1.0".to_owned(),
            regions: vec![control::RegionStatus {
                path: "/data/region".to_owned(),
                capacity_bytes: 4 << 30,
                free_bytes: 3 << 30,
                ..control::RegionStatus::default()
            }],
            sessions: vec![SessionStatus {
                session: "77".to_owned(),
                state: "receiving".to_owned(),
                ..SessionStatus::default()
            }],
            ..ServerStatus::default()
        })]
    });
    let text = stdout(&daemon.run(&["status"]));
    assert!(
        text.contains("1.0 GiB of 4.0 GiB used (25 %), 3.0 GiB free"),
        "{text}"
    );
    assert!(text.contains("77       -    receiving"), "{text}");
}

/// A daemon for dumps of `train`, whose newest checkpoint is `parent`.
fn for_dumps(parent: Option<(u64, Origin)>, seal: reply::Body) -> (Daemon, Arc<Mutex<String>>) {
    let pages = Arc::new(Mutex::new(String::new()));
    let endpoint = pages.clone();
    let daemon = Daemon::start(move |request| {
        vec![match request {
            request::Body::Show(show) if show.checkpoint == "train" => match &parent {
                Some((generation, origin)) => detail(*generation, Some(origin.clone())),
                None => refusal(ErrorCode::NotFound),
            },
            request::Body::Show(_) => detail(7, None),
            request::Body::Open(_) => reply::Body::SessionOpened(SessionOpened {
                session: "5e55".to_owned(),
                socket: endpoint.lock().unwrap().clone(),
                parent_generation: parent.as_ref().map_or(0, |(generation, _)| *generation),
                ..SessionOpened::default()
            }),
            request::Body::Seal(_) => seal.clone(),
            request::Body::Export(_) => reply::Body::Exported(Exported::default()),
            request::Body::Abort(_) => reply::Body::Done(Done { count: 1 }),
            request::Body::Status(_) => reply::Body::Status(ServerStatus::default()),
            other => panic!("{other:?}"),
        }]
    });
    *pages.lock().unwrap() = daemon
        .path()
        .join("pages.sock")
        .to_str()
        .unwrap()
        .to_owned();
    (daemon, pages)
}

fn sealed() -> reply::Body {
    reply::Body::Checkpoint(checkpoint("train", 7))
}

fn names(daemon: &Daemon) -> Vec<&'static str> {
    daemon
        .requests()
        .iter()
        .map(|(request, _)| match request {
            request::Body::Show(_) => "show",
            request::Body::Open(_) => "open",
            request::Body::Seal(_) => "seal",
            request::Body::Abort(_) => "abort",
            request::Body::Export(_) => "export",
            request::Body::Status(_) => "status",
            _ => "other",
        })
        .collect()
}

fn opened(daemon: &Daemon) -> request::Open {
    daemon
        .requests()
        .into_iter()
        .find_map(|(request, _)| match request {
            request::Body::Open(open) => Some(open),
            _ => None,
        })
        .unwrap()
}

/// Where scratch directories of the test's dumps lie.
fn left_behind(daemon: &Daemon) -> Vec<PathBuf> {
    let job = job_of(daemon);
    let uid = rustix::process::geteuid().as_raw();
    let parents = [
        format!("/run/permafrost-{uid}"),
        format!("/dev/shm/permafrost-{uid}"),
        "/dev/shm".to_owned(),
    ];
    parents
        .iter()
        .filter_map(|parent| fs::read_dir(parent).ok())
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_str().unwrap().contains(&job))
        .collect()
}

/// A job name that no other test uses.
fn job_of(daemon: &Daemon) -> String {
    daemon
        .path()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .replace('.', "")
}

const SEALS: &str = r#"test "$PERMAFROST_SESSION" = 5e55 || exit 9
echo "$PERMAFROST_SOCKET" >@HERE@/action-socket
echo "sealed train@7 00000000000000000000000000000007 812" >"$PERMAFROST_VERDICT""#;

const DUMPS: &str = r#"test -d "$images" || exit 8
stat -c %a "$images" >@HERE@/mode
test -S /proc/self/fd/0 || exit 7
CRTOOLS_SCRIPT_ACTION=post-dump CRTOOLS_IMAGE_DIR="$images" "$PERMAFROST_ACTION""#;

#[test]
fn dump_opens_runs_criu_and_reports_the_sealed_checkpoint() {
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu(DUMPS);
    daemon.script("action", SEALS);
    let victim = Victim::start();
    let output = daemon.run(&[
        "--json",
        "dump",
        "--pid",
        &victim.pid(),
        "--job",
        "train",
        "--shell-job",
        "--leave-running",
        "--",
        "--file-locks",
        "--external",
        "dev[1/2]:x",
    ]);
    assert_exit(&output, 0);
    let report = json(&output.stdout);
    assert_eq!(report["checkpoint"]["generation"], 7);
    assert_eq!(report["seal_us"], 812);
    assert_eq!(report["incremental"], false);
    assert_eq!(report["restore_needs"][0], "--external=dev[1/2]:x");
    assert_eq!(names(&daemon), ["show", "open", "show"]);

    let open = opened(&daemon);
    assert!(open.seal_follows && open.bound_to_connection && !open.pre_dump && !open.no_parent);
    let origin = open.origin.unwrap();
    assert_eq!(origin.pid.to_string(), victim.pid());
    assert_eq!(origin.criu_version, "4.2.1");
    assert!(origin.start_ticks > 0 && !origin.boot_id.is_empty() && !origin.tracked);
    assert_eq!(origin.restore_options, ["--file-locks", "--shell-job"]);

    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    for part in [
        format!("--tree {}", victim.pid()),
        "--page-server --ps-socket 0".to_owned(),
        "--leave-running".to_owned(),
        format!("--action-script {}", daemon.path().join("action").display()),
        "--file-locks --external=dev[1/2]:x --shell-job".to_owned(),
    ] {
        assert!(arguments.contains(&part), "{part} in {arguments}");
    }
    assert!(!arguments.contains("--track-mem"), "{arguments}");
    assert_eq!(
        fs::read_to_string(daemon.path().join("mode")).unwrap(),
        "700\n"
    );
    assert_eq!(
        fs::read_to_string(daemon.path().join("action-socket"))
            .unwrap()
            .trim(),
        daemon.socket().to_str().unwrap()
    );
}

#[test]
fn a_refused_seal_rolls_back_and_says_why() {
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu(DUMPS);
    daemon.script(
        "action",
        "printf 'refused 6\\nregion is full\\nhint: remove a checkpoint\\n' >\"$PERMAFROST_VERDICT\"; exit 1",
    );
    let victim = Victim::start();
    let output = daemon.run(&["dump", "--pid", &victim.pid(), "--job", "train"]);
    assert_exit(&output, 6);
    let text = stderr(&output);
    assert!(
        text.contains("the process goes on: seal: region is full"),
        "{text}"
    );
    assert!(text.contains("hint: remove a checkpoint"), "{text}");
    assert_eq!(names(&daemon), ["show", "open", "abort"]);
}

#[test]
fn a_seal_that_fails_when_the_task_is_gone_leaves_the_images() {
    let (daemon, _pages) = for_dumps(None, refusal(ErrorCode::NoSpace));
    // Its action script never ran, and the process is gone.
    daemon.criu(
        "echo secret >\"$images/core-1.img\"\nps=$(echo \"$@\" | sed 's/.*--tree \\([0-9]*\\).*/\\1/')\nkill -9 $ps\nuntil grep -q ') Z' /proc/$ps/stat; do sleep 0.01; done",
    );
    daemon.script("action", SEALS);
    let mut victim = Command::new("sleep").arg("600").spawn().unwrap();
    let pid = victim.id().to_string();
    let output = daemon.run(&["dump", "--pid", &pid, "--job", "train"]);
    victim.wait().unwrap();
    assert_exit(&output, 6);
    let text = stderr(&output);
    assert!(
        text.contains("the process is gone: seal: the daemon's reason"),
        "{text}"
    );
    let (_, images) = text
        .lines()
        .next()
        .unwrap()
        .split_once("images are left in ")
        .unwrap();
    assert!(Path::new(images).join("core-1.img").exists(), "{text}");
    fs::remove_dir_all(Path::new(images).parent().unwrap()).unwrap();

    // With the process there, nothing has to stay.
    daemon.criu("echo secret >\"$images/core-1.img\"");
    let victim = Victim::start();
    let pid = victim.pid();
    let output = daemon.run(&["dump", "--pid", &pid, "--job", "train", "--leave-running"]);
    assert_exit(&output, 6);
    assert!(
        !stderr(&output).contains("images are left"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn the_session_is_named_beside_the_images_too() {
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu("cp \"$images/../session\" @HERE@/session\nstat -c '%a %s' \"$images/../session\" \"$images/../verdict\" >@HERE@/modes\nenv -i \"${PERMAFROST_ACTION}\" \"$images\"");
    daemon.script(
        "action",
        "echo 'sealed train@7 00000000000000000000000000000007 812' >\"$1/../verdict\"",
    );
    let victim = Victim::start();
    let output = daemon.run(&[
        "dump",
        "--pid",
        &victim.pid(),
        "--job",
        "train",
        "--leave-running",
    ]);
    assert_exit(&output, 0);
    let named = fs::read(daemon.path().join("session")).unwrap();
    assert_eq!(
        named,
        format!("5e55\0{}\0", daemon.socket().display()).as_bytes()
    );
    let modes = fs::read_to_string(daemon.path().join("modes")).unwrap();
    assert_eq!(modes, format!("600 {}\n600 0\n", named.len()));
    assert!(!names(&daemon).contains(&"seal"), "{:?}", names(&daemon));
}

#[test]
fn a_failure_of_criu_is_told_from_its_log_which_is_kept_alone() {
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu(
        r#"echo secret >"$images/core-1.img"
echo '(00.045726) Error (criu/sk-inet.c:200): inet: Connected TCP socket, consider using --tcp-established option.' >"$work/dump.log"
exit 1"#,
    );
    daemon.script("action", SEALS);
    let victim = Victim::start();
    let output = daemon.run(&["--json", "dump", "--pid", &victim.pid(), "--job", "train"]);
    assert_exit(&output, 5);
    let error = &json(&output.stderr)["error"];
    assert_eq!(error["code"], "criu-failed");
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("Connected TCP socket"),
        "{error}"
    );
    assert!(
        error["hint"]
            .as_str()
            .unwrap()
            .contains("--tcp-established"),
        "{error}"
    );
    let log = Path::new(error["log"].as_str().unwrap());
    assert!(fs::read_to_string(log).unwrap().contains("Connected TCP"));
    let kept = log.parent().unwrap();
    assert_eq!(fs::read_dir(kept).unwrap().count(), 1);
    fs::remove_dir_all(kept).unwrap();
}

#[test]
fn a_session_that_failed_is_told_by_the_daemon() {
    let pages = Arc::new(Mutex::new(String::new()));
    let endpoint = pages.clone();
    let daemon = Daemon::start(move |request| {
        vec![match request {
            request::Body::Show(_) => refusal(ErrorCode::NotFound),
            request::Body::Open(_) => reply::Body::SessionOpened(SessionOpened {
                session: "5e55".to_owned(),
                socket: endpoint.lock().unwrap().clone(),
                ..SessionOpened::default()
            }),
            request::Body::Status(_) => reply::Body::Status(ServerStatus {
                sessions: vec![SessionStatus {
                    session: "5e55".to_owned(),
                    state: "failed".to_owned(),
                    error: "region is full".to_owned(),
                    ..SessionStatus::default()
                }],
                ..ServerStatus::default()
            }),
            request::Body::Seal(_) => refusal(ErrorCode::NoSpace),
            _ => reply::Body::Done(Done { count: 1 }),
        }]
    });
    *pages.lock().unwrap() = daemon
        .path()
        .join("pages.sock")
        .to_str()
        .unwrap()
        .to_owned();
    daemon.criu("exit 1");
    daemon.script("action", SEALS);
    let victim = Victim::start();
    let output = daemon.run(&["dump", "--pid", &victim.pid(), "--job", "train"]);
    assert_exit(&output, 6);
    assert!(
        stderr(&output).contains("the daemon's reason"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_daemon_that_goes_away_in_mid_dump_is_unreachable() {
    let pages = Arc::new(Mutex::new(String::new()));
    let endpoint = pages.clone();
    let daemon = Daemon::start(move |request| match request {
        request::Body::Show(_) => vec![refusal(ErrorCode::NotFound)],
        request::Body::Open(_) => vec![reply::Body::SessionOpened(SessionOpened {
            session: "5e55".to_owned(),
            socket: endpoint.lock().unwrap().clone(),
            ..SessionOpened::default()
        })],
        _ => panic!("gone"),
    });
    *pages.lock().unwrap() = daemon
        .path()
        .join("pages.sock")
        .to_str()
        .unwrap()
        .to_owned();
    daemon.criu(
        r#"echo "(00.04) Error (criu/page-xfer.c:191): page-xfer: Can't write pages to socket: Broken pipe" >"$work/dump.log"
exit 1"#,
    );
    daemon.script("action", SEALS);
    let victim = Victim::start();
    let output = daemon.run(&["dump", "--pid", &victim.pid(), "--job", "train"]);
    assert_exit(&output, 10);
    assert!(
        stderr(&output).contains("the process goes on"),
        "{}",
        stderr(&output)
    );
    remove_log(&output);
}

/// Whether soft-dirty bits may be used here; if not, that they are refused.
fn may_track() -> bool {
    if rustix::process::geteuid().is_root() {
        return true;
    }
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu("exit 0");
    let victim = Victim::start();
    let pid = victim.pid();
    assert_exit(
        &daemon.run(&["dump", "--pid", &pid, "--job", "train", "--pre-dump"]),
        9,
    );
    assert!(daemon.requests().is_empty());
    false
}

/// A tracked dump of `pid` for a job that has generation 7 of it already; whether it left clean pages out.
fn next_is_incremental(pid: &str, origin: &Origin) -> bool {
    let (daemon, _pages) = for_dumps(Some((7, origin.clone())), sealed());
    daemon.criu(DUMPS);
    daemon.script("action", SEALS);
    let output = daemon.run(&[
        "--json",
        "dump",
        "--pid",
        pid,
        "--job",
        "train",
        "--leave-running",
    ]);
    assert_exit(&output, 0);
    json(&output.stdout)["incremental"] == true
}

#[test]
fn a_tracked_dump_of_a_part_or_of_a_larger_tree_outdates_the_last_one() {
    if !may_track() {
        return;
    }
    let mut shell = Command::new("sh")
        .args(["-c", "sleep 600 & echo $!; read line; kill $!"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = [0; 16];
    let len = shell.stdout.as_mut().unwrap().read(&mut line).unwrap();
    let child = std::str::from_utf8(&line[..len]).unwrap().trim().to_owned();
    let root = shell.id().to_string();
    let track = |pid: &str| {
        let (daemon, _pages) = for_dumps(None, sealed());
        daemon.criu("exit 0");
        assert_exit(
            &daemon.run(&["dump", "--pid", pid, "--job", "train", "--pre-dump"]),
            0,
        );
        opened(&daemon).origin.unwrap()
    };

    let of_root = track(&root);
    let of_child = track(&child);
    assert!(
        !next_is_incremental(&root, &of_root),
        "the child's bits were reset since"
    );
    assert!(next_is_incremental(&child, &of_child));

    track(&root);
    assert!(
        !next_is_incremental(&child, &of_child),
        "the whole tree's were"
    );
    track(&root);
    assert!(next_is_incremental(&root, &of_root));

    drop(shell.stdin.take());
    shell.wait().unwrap();
}

#[test]
fn pre_dump_seals_by_itself_and_the_next_dump_leaves_clean_pages_out() {
    if !may_track() {
        return;
    }
    let victim = Victim::start();
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu("exit 0");
    let output = daemon.run(&[
        "--json",
        "dump",
        "--pid",
        &victim.pid(),
        "--job",
        "train",
        "--pre-dump",
    ]);
    assert_exit(&output, 0);
    assert_eq!(names(&daemon), ["show", "open", "seal"]);
    assert!(
        daemon.requests()[2].1,
        "the seal carries the images directory"
    );
    let open = opened(&daemon);
    assert!(open.pre_dump && open.seal_follows && !open.parent_images);
    let origin = open.origin.unwrap();
    assert!(origin.tracked);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(
        arguments.starts_with("check --feature mem_dirty_track\npre-dump "),
        "{arguments}"
    );
    assert!(arguments.contains("--track-mem") && !arguments.contains("--prev-images-dir"));

    // Generation 7 was the last to reset the bits.
    let (daemon, _pages) = for_dumps(Some((7, origin.clone())), sealed());
    daemon.criu(&format!(
        "test -e \"$images/../prev/inventory.img\" || exit 6\n{DUMPS}"
    ));
    daemon.script("action", SEALS);
    let output = daemon.run(&["--json", "dump", "--pid", &victim.pid(), "--job", "train"]);
    assert_exit(&output, 0);
    assert_eq!(json(&output.stdout)["incremental"], true);
    assert_eq!(names(&daemon), ["show", "open", "export", "show"]);
    assert!(opened(&daemon).parent_images);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(
        arguments.contains("--track-mem --prev-images-dir ../prev"),
        "{arguments}"
    );

    // A tracked dump fails after it may have reset the bits: nothing may be left out any more.
    daemon.criu("exit 1");
    assert_exit(
        &daemon.run(&["dump", "--pid", &victim.pid(), "--job", "train"]),
        5,
    );
    daemon.criu(DUMPS);
    let output = daemon.run(&["--json", "dump", "--pid", &victim.pid(), "--job", "train"]);
    assert_exit(&output, 0);
    assert_eq!(json(&output.stdout)["incremental"], false);
}

#[test]
fn pre_dump_is_refused_beforehand_without_soft_dirty_bits() {
    if !may_track() {
        return;
    }
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu("exit 0");
    let victim = Victim::start();
    let output = daemon
        .command(&[
            "dump",
            "--pid",
            &victim.pid(),
            "--job",
            "train",
            "--pre-dump",
        ])
        .env("NO_SOFT_DIRTY", "1")
        .output()
        .unwrap();
    assert_exit(&output, 5);
    assert!(
        stderr(&output).contains("CONFIG_MEM_SOFT_DIRTY"),
        "{}",
        stderr(&output)
    );
    assert!(daemon.requests().is_empty());
}

#[test]
fn what_cannot_be_dumped_is_refused_before_the_daemon_is_asked() {
    let daemon = Daemon::refusing(ErrorCode::Internal);
    daemon.criu(DUMPS);
    daemon.script("action", SEALS);
    let victim = Victim::start();
    let output = daemon.run(&["dump", "--pid", "5000000", "--job", "train"]);
    assert_exit(&output, 3);
    assert!(stderr(&output).starts_with("permafrost: no process 5000000\n"));
    let own = std::process::id().to_string();
    assert_exit(&daemon.run(&["dump", "--pid", &own, "--job", "train"]), 2);
    let pid = victim.pid();
    for reserved in ["--stream", "--images-dir=/x", "--lazy-pages"] {
        assert_exit(
            &daemon.run(&["dump", "--pid", &pid, "--job", "train", "--", reserved]),
            2,
        );
    }
    fs::remove_file(daemon.path().join("action")).unwrap();
    let output = daemon.run(&["dump", "--pid", &pid, "--job", "train"]);
    assert_exit(&output, 3);
    assert!(
        stderr(&output).contains("permafrost-action"),
        "{}",
        stderr(&output)
    );
    fs::remove_file(daemon.path().join("criu")).unwrap();
    let output = daemon.run(&["dump", "--pid", &pid, "--job", "train"]);
    assert_exit(&output, 5);
    assert!(
        stderr(&output).contains("install criu"),
        "{}",
        stderr(&output)
    );
    assert!(daemon.requests().is_empty());
}

#[test]
fn an_interrupt_ends_the_session_and_lets_criu_roll_back() {
    let job;
    let (daemon, _pages) = for_dumps(None, sealed());
    {
        job = job_of(&daemon);
        // Rolls back when told that the session is gone, and would die of a Ctrl-C itself.
        daemon.criu("touch @HERE@/running\nuntil test -e @HERE@/gone; do sleep 0.02; done\necho rolled back >@HERE@/rolled-back\nexit 1");
        daemon.script("action", SEALS);
    }
    let victim = Victim::start();
    // The daemon knows no job but train; any other name is as good for a session.
    let mut child = daemon
        .command(&["dump", "--pid", &victim.pid(), "--full", "--job", &job])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while !daemon.path().join("running").exists() {
        thread::sleep(Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    // The control connection ends, and with it the session.
    while *daemon.ended.lock().unwrap() == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(child.try_wait().unwrap().is_none(), "waits for CRIU");
    File::create(daemon.path().join("gone")).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_exit(&output, 130);
    assert!(
        stderr(&output).contains("the process goes on: interrupted"),
        "{}",
        stderr(&output)
    );
    assert!(daemon.path().join("rolled-back").exists());
    assert!(
        left_behind(&daemon).is_empty(),
        "{:?}",
        left_behind(&daemon)
    );
}

fn with_options(detail: reply::Body, options: &[String]) -> reply::Body {
    let reply::Body::Detail(mut detail) = detail else {
        panic!("{detail:?}")
    };
    detail.manifest.get_or_insert_default().origin = Some(Origin {
        restore_options: options.to_vec(),
        ..Origin::default()
    });
    reply::Body::Detail(detail)
}

fn for_restores(options: &[&str]) -> Daemon {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    Daemon::start(move |request| {
        vec![match request {
            request::Body::Show(_) => with_options(detail(3, None), &options),
            request::Body::Export(_) | request::Body::Stream(_) => {
                reply::Body::Exported(Exported::default())
            }
            other => panic!("{other:?}"),
        }]
    })
}

#[test]
fn restore_repeats_the_options_of_the_dump_and_prints_the_pid() {
    let daemon = for_restores(&["--shell-job", "--manage-cgroups=full"]);
    daemon.criu(
        "test -e \"$images/inventory.img\" || exit 6\nprintf 4242 >\"$work/pid\"\necho \"$images\" >@HERE@/images",
    );
    let output = daemon.run(&[
        "restore",
        "train",
        "--no-stream",
        "--json",
        "--",
        "--manage-cgroups=soft",
    ]);
    assert_exit(&output, 0);
    let report = json(&output.stdout);
    assert_eq!(report["pid"], 4242);
    assert_eq!(report["checkpoint"]["generation"], 3);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(
        arguments.starts_with("restore --images-dir "),
        "{arguments}"
    );
    assert!(
        arguments
            .trim()
            .ends_with("--shell-job --manage-cgroups=soft"),
        "{arguments}"
    );
    match &daemon.requests()[1].0 {
        // The generation that was looked at, whatever is sealed meanwhile.
        request::Body::Export(export) => assert_eq!(export.checkpoint, "train@3"),
        other => panic!("{other:?}"),
    }
    let images = fs::read_to_string(daemon.path().join("images")).unwrap();
    assert!(!Path::new(images.trim()).exists(), "images are removed");
}

#[test]
fn a_restore_is_streamed_unless_told_otherwise() {
    let daemon = for_restores(&[]);
    daemon.criu("test -S \"$images/streamer-serve.sock\" || exit 6\nprintf 4242 >\"$work/pid\"");
    let output = daemon.run(&["restore", "train", "--json"]);
    assert_exit(&output, 0);
    assert_eq!(json(&output.stdout)["streamed"], true);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(arguments.contains(" --stream"), "{arguments}");
    let (request, carries) = &daemon.requests()[1];
    assert!(matches!(request, request::Body::Stream(stream) if stream.checkpoint == "train@3"));
    assert!(*carries, "the listening socket rides along");
}

#[test]
fn damage_found_while_streaming_is_the_reason_of_a_failed_restore() {
    let daemon = Daemon::start(|request| {
        vec![match request {
            request::Body::Show(_) => detail(3, None),
            _ => reply::Body::Error(control::Error {
                code: ErrorCode::Corrupt.into(),
                message: "train@3: process 7 address 0x1000: damaged".to_owned(),
                hint: String::new(),
            }),
        }]
    });
    daemon.criu("exit 1");
    let output = daemon.run(&["restore", "train"]);
    assert_exit(&output, 7);
    assert!(
        stderr(&output).contains("address 0x1000"),
        "{}",
        stderr(&output)
    );
}

/// Fails like CRIU when nobody listens on the streamer's socket any more, which `/proc/net/unix` says; gives up
/// after 10 s.
const COMES_FOR_IMAGES: &str = r#"for i in $(seq 500); do
grep -q "$images/streamer-serve.sock" /proc/net/unix || exit 1
sleep 0.02
done
printf 4242 >"$work/pid""#;

#[test]
fn a_daemon_that_does_not_serve_the_images_fails_the_restore() {
    let daemon = Daemon::start(|request| {
        vec![match request {
            request::Body::Show(_) => detail(3, None),
            _ => refusal(ErrorCode::NotFound),
        }]
    });
    daemon.criu(COMES_FOR_IMAGES);
    let output = daemon.run(&["restore", "train"]);
    assert_exit(&output, 3);
    assert!(
        stderr(&output).contains("the daemon's reason"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_restore_that_criu_makes_of_damaged_images_has_failed() {
    let daemon = Daemon::start(|request| {
        vec![match request {
            request::Body::Show(_) => detail(3, None),
            _ => refusal(ErrorCode::Internal),
        }]
    });
    // No number of a process: nothing is killed, but if it were it would not be a stranger.
    daemon.criu("printf 5000000 >\"$work/pid\"");
    let output = daemon.run(&["restore", "train"]);
    assert_exit(&output, 7);
    assert!(output.stdout.is_empty());
    let text = stderr(&output);
    assert!(
        text.contains("the daemon's reason; process 5000000 runs from damaged"),
        "{text}"
    );
    assert!(text.contains("end process 5000000"), "{text}");
}

#[test]
fn an_interrupt_ends_a_restore_and_all_of_it() {
    for how in ["--no-stream", "--quiet"] {
        let daemon = for_restores(&[]);
        daemon
            .criu("sleep 600 & echo $! $$ >@HERE@/pids.new; mv @HERE@/pids.new @HERE@/pids; wait");
        let child = daemon
            .command(&["restore", "train", how])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pids = loop {
            match fs::read_to_string(daemon.path().join("pids")) {
                Ok(pids) => break pids,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        let pid = rustix::process::Pid::from_child(&child);
        let group = |pid| rustix::process::getpgid(Some(pid)).unwrap();
        let mut criu = pids
            .split_whitespace()
            .rev()
            .map(|pid| pid.parse::<i32>().unwrap());
        let criu = rustix::process::Pid::from_raw(criu.next().unwrap()).unwrap();
        assert_ne!(
            group(pid),
            group(criu),
            "a terminal's Ctrl-C is not for CRIU"
        );
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_exit(&output, 130);
        for pid in pids.split_whitespace() {
            // A killed process takes its moment to die.
            let mut state = String::new();
            let gone = (0..1000).any(|_| {
                thread::sleep(Duration::from_millis(5));
                state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                state.is_empty() || state.contains(") Z ")
            });
            assert!(gone, "{state}");
        }
    }
}

#[test]
fn restore_in_the_foreground_waits_for_its_child() {
    let daemon = for_restores(&[]);
    // Stands in for CRIU's --restore-sibling: the "restored" process is this very one.
    daemon.criu("printf $$ >\"$work/pid\"");
    let output = daemon.run(&["restore", "train", "--foreground"]);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(arguments.contains("--restore-sibling"), "{arguments}");
    // It ended with CRIU, so there is nothing left to wait for: said, not hung.
    assert_exit(&output, 1);
    assert!(
        stderr(&output).contains("wait for process"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_failed_restore_keeps_the_log_and_removes_the_images() {
    let daemon = for_restores(&[]);
    daemon.criu(
        "echo \"(00.03) Error (criu/cr-restore.c:1237): Can't fork for $PPID: File exists\" >\"$work/restore.log\"\nexit 1",
    );
    let output = daemon.run(&["--json", "restore", "train"]);
    assert_exit(&output, 5);
    let error = &json(&output.stderr)["error"];
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("Can't fork for"),
        "{error}"
    );
    assert!(
        error["hint"]
            .as_str()
            .unwrap()
            .contains("belongs to permafrost"),
        "{error}"
    );
    let log = Path::new(error["log"].as_str().unwrap());
    let kept = log.parent().unwrap();
    assert_eq!(fs::read_dir(kept).unwrap().count(), 1);
    fs::remove_dir_all(kept).unwrap();
}

#[test]
fn a_pre_dump_is_not_restored() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::Detail(Detail {
            checkpoint: Some(Checkpoint {
                kind: "pre-dump".to_owned(),
                ..checkpoint("train", 3)
            }),
            ..Detail::default()
        })]
    });
    let output = daemon.run(&["restore", "train"]);
    assert_exit(&output, 2);
    assert!(
        stderr(&output).contains("train@3 is a pre-dump"),
        "{}",
        stderr(&output)
    );
}
