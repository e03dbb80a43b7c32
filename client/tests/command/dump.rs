//! Tests of dumps: the requests to CRIU and the daemon, and the messages and files after a failure of either.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_criu::origin::{self, ProcessStat};
use permafrost_criu::verdict::{SealBy, Verdict};
use permafrost_protocol::control::{
    Done, ErrorCode, ServerStatus, SessionOpened, SessionStatus, reply, request,
};
use permafrost_protocol::manifest::Origin;

use crate::fake::{Daemon, Victim, assert_exit, json, refusal, remove_log, stderr};
use crate::for_dumps::{
    DUMPS, SEALS, for_dumps, for_dumps_into, job_of, left_behind, names, opened, sealed,
};

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
    assert_eq!(report["way"], "page-server");
    assert_eq!(report["way_reason"], "old-daemon");
    assert_eq!(report["restore_needs"][0], "--external=dev[1/2]:x");
    assert_eq!(names(&daemon), ["show", "open"]);

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
fn a_process_that_is_larger_than_the_daemons_pipes_is_not_streamed() {
    let (daemon, _pages) = for_dumps_into(1, None, sealed());
    daemon.criu(DUMPS);
    daemon.script("action", SEALS);
    let victim = Victim::start();
    let pid = victim.pid();
    let dump = ["dump", "--leave-running", "--job=train", "--pid", &pid];
    let output = daemon.run(&[&["--json"], &dump[..]].concat());
    assert_exit(&output, 0);
    let report = json(&output.stdout);
    assert_eq!(report["way"], "page-server");
    assert_eq!(report["way_reason"], "few-pipes");
    let output = daemon.run(&[&dump[..], &["--page-server"]].concat());
    assert_exit(&output, 0);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("protocol (--page-server)"), "{said}");
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
    // The action script never ran, and the process is gone.
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

    // While the process exists, no images have to be kept.
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
    daemon.script("action", "cp @HERE@/sealed \"$1/../verdict\"");
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
    let text = String::from_utf8(named.clone()).unwrap();
    let expected = format!("5e55\0{}\0", daemon.socket().display());
    let seal_by = text.strip_prefix(&expected).unwrap();
    let seal_by = seal_by.strip_suffix('\0').unwrap();
    let remaining = seal_by.parse::<SealBy>().unwrap().remaining();
    assert!(
        (80..=100).contains(&remaining.as_secs()),
        "the default limit is two minutes, 20 s of it for a rollback: {remaining:?}"
    );
    let modes = fs::read_to_string(daemon.path().join("modes")).unwrap();
    assert_eq!(modes, format!("600 {}\n600 0\n", named.len()));
    assert!(!names(&daemon).contains(&"seal"), "{:?}", names(&daemon));
}

/// The script keeps the freeze limit by itself. CRIU may have rolled back by the time at which its guard would say so.
#[test]
fn a_limit_at_which_the_script_gave_up_first_is_told_and_counted() {
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu("\"${PERMAFROST_ACTION}\" \"$images\"\nexit 1");
    daemon.script("action", "cp @HERE@/late \"$PERMAFROST_VERDICT\"");
    fs::write(daemon.path().join("late"), Verdict::too_late().encode()).unwrap();
    let victim = Victim::start();
    let output = daemon.run(&["--json", "dump", "--pid", &victim.pid(), "--job", "train"]);
    assert_exit(&output, 10);
    let error = &json(&output.stderr)["error"];
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("within the freeze limit of"), "{error}");
    let counted = daemon
        .requests()
        .into_iter()
        .filter(|(request, _)| {
            matches!(request, request::Body::Abort(abort) if abort.freeze_limit_reached)
        })
        .count();
    assert_eq!(counted, 1);
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
                socket: endpoint.lock().clone(),
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
    *pages.lock() = daemon
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
            socket: endpoint.lock().clone(),
            ..SessionOpened::default()
        })],
        _ => panic!("gone"),
    });
    *pages.lock() = daemon
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
fn work_done_before_a_restore_is_carried_over() {
    let victim = Victim::start();
    let origin_of_dump = |daemon: &Daemon, options: &[&str]| {
        daemon.criu(DUMPS);
        daemon.script("action", SEALS);
        let pid = victim.pid();
        let dump = ["dump", "--pid", &pid, "--job", "train", "--leave-running"];
        assert_exit(&daemon.run(&[&dump[..], options].concat()), 0);
        opened(daemon).origin.unwrap()
    };
    // The job's newest checkpoint is of another process, so this one was restored from it.
    let restored = Origin {
        worked_us: 7_000_000,
        carried_us: 4_000_000,
        start_ticks: 1,
        boot_id: "another".to_owned(),
        ..Origin::default()
    };
    let (daemon, _pages) = for_dumps(Some((7, restored.clone())), sealed());
    for options in [&[][..], &["--full"]] {
        let origin = origin_of_dump(&daemon, options);
        assert_eq!(origin.carried_us, 7_000_000, "{options:?}");
        assert!(origin.worked_us >= origin.carried_us);
    }
    // The job's checkpoint is of this very process, which went on.
    let pid = victim.pid().parse().unwrap();
    let same = Origin {
        worked_us: 7_000_000,
        carried_us: 4_000_000,
        ..origin::collect(pid).unwrap()
    };
    let (daemon, _pages) = for_dumps(Some((7, same)), sealed());
    assert_eq!(origin_of_dump(&daemon, &[]).carried_us, 4_000_000);
    let (daemon, _pages) = for_dumps(None, sealed());
    assert_eq!(origin_of_dump(&daemon, &[]).carried_us, 0);
}

#[test]
fn a_dump_returns_when_its_processes_are_gone() {
    let (daemon, _pages) = for_dumps(None, sealed());
    // Processes with much memory take their time to end after CRIU has.
    daemon.criu(&format!(
        "{DUMPS}\nps=$(echo \"$@\" | sed 's/.*--tree \\([0-9]*\\).*/\\1/')\n(sleep 0.5; kill -9 $ps) >/dev/null 2>&1 &"
    ));
    daemon.script("action", SEALS);
    let victim = Victim::start();
    let pid = victim.pid();
    let output = daemon.run(&["dump", "--pid", &pid, "--job", "train"]);
    assert_exit(&output, 0);
    // The tree's parent is this process, which has not waited for it.
    let stat = ProcessStat::read(pid.parse().unwrap()).unwrap();
    assert_eq!(stat.state, 'Z');
}

#[test]
fn a_tree_that_serves_what_the_daemon_needs_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = listener.local_addr().unwrap().to_string();
    let pages = Arc::new(Mutex::new(String::new()));
    let (socket, needed) = (pages.clone(), endpoint.clone());
    let daemon = Daemon::start(move |request| {
        vec![match request {
            request::Body::Show(_) => refusal(ErrorCode::NotFound),
            request::Body::Open(_) => reply::Body::SessionOpened(SessionOpened {
                session: "5e55".to_owned(),
                socket: socket.lock().clone(),
                depends_on: vec![needed.clone()],
                ..SessionOpened::default()
            }),
            _ => reply::Body::Done(Done { count: 1 }),
        }]
    });
    *pages.lock() = daemon
        .path()
        .join("pages.sock")
        .to_str()
        .unwrap()
        .to_owned();
    daemon.criu("touch @HERE@/frozen; exit 1");
    daemon.script("action", SEALS);
    let mut etcd = Command::new("sleep")
        .arg("600")
        .stdin(OwnedFd::from(listener))
        .spawn()
        .unwrap();
    let pid = etcd.id().to_string();
    let output = daemon.run(&["dump", "--pid", &pid, "--job", "train"]);
    assert_exit(&output, 2);
    let text = stderr(&output);
    let named = format!("process {pid} is sleep, which serves {endpoint}");
    assert!(text.contains(&named), "{text}");
    assert!(!daemon.path().join("frozen").exists());
    etcd.kill().unwrap();
    etcd.wait().unwrap();
}

#[test]
fn an_interrupt_ends_the_session_and_lets_criu_roll_back() {
    let job;
    let (daemon, _pages) = for_dumps(None, sealed());
    {
        job = job_of(&daemon);
        // This CRIU rolls back when it finds that the session is gone, and would die of a Ctrl-C itself.
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
    while *daemon.ended.lock() == 0 {
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

#[test]
fn a_dump_by_a_program_that_is_not_criu_begins_nothing() {
    let (daemon, _pages) = for_dumps(None, sealed());
    let victim = Victim::start();
    let output = daemon.run(&[
        "dump",
        "--pid",
        &victim.pid(),
        "--job=train",
        "--criu=/bin/true",
    ]);
    assert_exit(&output, 5);
    assert!(stderr(&output).contains("/bin/true is not CRIU"));
    assert!(daemon.requests().is_empty());
}
