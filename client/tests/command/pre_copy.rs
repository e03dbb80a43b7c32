//! Tests of `dump --pre-copy`: its rounds, a kernel without soft-dirty bits, and failures at each step.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_criu::verdict::Verdict;
use permafrost_protocol::control::{
    Done, ErrorCode, Exported, ServerStatus, SessionOpened, reply, request,
};
use permafrost_protocol::manifest::Origin;

use crate::fake::{
    Daemon, Victim, assert_exit, checkpoint, detail, json, refusal, remove_log, stderr,
};
use crate::for_dumps::{DUMPS, SEALS};

/// Newest checkpoint of the job, and the origin of the open session.
#[derive(Default)]
struct State {
    newest: Option<(u64, Origin)>,
    opened: Option<Origin>,
    seals: u32,
}

/// Starts a daemon that keeps the job's newest checkpoint, and refuses the seal of that round, from 1.
fn daemon(refused_seal: Option<u32>) -> Daemon {
    let pages = Arc::new(Mutex::new(String::new()));
    let endpoint = Arc::clone(&pages);
    let state = Mutex::new(State::default());
    let daemon = Daemon::start(move |request| {
        let mut state = state.lock();
        let generation = state
            .newest
            .as_ref()
            .map_or(0, |(generation, _)| *generation);
        vec![match request {
            request::Body::Show(_) => match &state.newest {
                Some((generation, origin)) => detail(*generation, Some(origin.clone())),
                None => refusal(ErrorCode::NotFound),
            },
            request::Body::Open(open) => {
                state.opened.clone_from(&open.origin);
                reply::Body::SessionOpened(SessionOpened {
                    session: "5e55".to_owned(),
                    socket: endpoint.lock().clone(),
                    parent_generation: generation,
                    ..SessionOpened::default()
                })
            }
            request::Body::Seal(_) => {
                state.seals += 1;
                if refused_seal == Some(state.seals) {
                    refusal(ErrorCode::NoSpace)
                } else {
                    let origin = state.opened.take().unwrap();
                    state.newest = Some((generation + 1, origin));
                    reply::Body::Checkpoint(checkpoint("train", generation + 1))
                }
            }
            request::Body::Export(_) => reply::Body::Exported(Exported::default()),
            request::Body::Abort(_) | request::Body::Remove(_) | request::Body::Took(_) => {
                reply::Body::Done(Done { count: 1 })
            }
            request::Body::Status(_) => reply::Body::Status(ServerStatus::default()),
            other => panic!("{other:?}"),
        }]
    });
    *pages.lock() = daemon
        .path()
        .join("pages.sock")
        .to_str()
        .unwrap()
        .to_owned();
    let verdict = Verdict::sealed(&checkpoint("train", 7), Duration::from_micros(812));
    fs::write(daemon.path().join("sealed"), verdict.encode()).unwrap();
    daemon.script("action", SEALS);
    daemon
}

/// Requests that matter, in order.
fn steps(daemon: &Daemon) -> Vec<String> {
    let requests = daemon.requests();
    let step = |body: &request::Body| match body {
        request::Body::Open(open) if open.pre_copy => {
            assert!(open.pre_dump && open.bound_to_connection && open.seal_follows);
            Some("round".to_owned())
        }
        request::Body::Open(_) => Some("dump".to_owned()),
        request::Body::Export(_) => Some("export".to_owned()),
        request::Body::Seal(_) => Some("seal".to_owned()),
        request::Body::Remove(remove) => Some(format!("rm {}", remove.checkpoint)),
        _ => None,
    };
    requests.iter().filter_map(|(body, _)| step(body)).collect()
}

/// Returns the steps of a pre-copy with that many rounds.
fn expected(rounds: usize) -> Vec<String> {
    let mut steps = Vec::new();
    for round in 1..=rounds {
        steps.push("round".to_owned());
        if round > 1 {
            steps.push("export".to_owned());
        }
        steps.push("seal".to_owned());
        if round > 1 {
            steps.push(format!("rm train@{}", round - 1));
        }
    }
    steps.extend(["dump".to_owned(), "export".to_owned()]);
    steps.push(format!("rm train@{rounds}"));
    steps
}

/// Commands that CRIU was started with: `check`, `pre-dump`, `dump`.
fn runs(daemon: &Daemon) -> Vec<String> {
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap_or_default();
    let words = arguments.lines().filter_map(|line| line.split(' ').next());
    words.map(str::to_owned).collect()
}

/// The process goes on: the script in the place of CRIU ends none.
fn arguments<'a>(pid: &'a str, pre_copy: &'a str) -> [&'a str; 8] {
    [
        "--json",
        "dump",
        "--leave-running",
        "--pid",
        pid,
        "--job",
        "train",
        pre_copy,
    ]
}

fn assert_runs(victim: &Victim) {
    let stat = fs::read_to_string(format!("/proc/{}/stat", victim.pid())).unwrap();
    assert!(stat.contains(" S ") || stat.contains(" R "), "{stat}");
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn rounds_come_before_the_dump_and_go_after_it() {
    if !is_root() {
        return;
    }
    for limit in [1, 2] {
        let victim = Victim::start();
        let daemon = daemon(None);
        daemon.criu(&format!("case \"$1\" in pre-dump) exit 0;; esac\n{DUMPS}"));
        let pre_copy = format!("--pre-copy={limit}");
        let output = daemon.run(&arguments(&victim.pid(), &pre_copy));
        assert_exit(&output, 0);
        let report = json(&output.stdout);
        let rounds = report["pre_copy"]["rounds"].as_array().unwrap();
        // A process that sleeps modifies few pages, where the kernel can tell.
        let known = rounds[0]["modified_pages"].is_number();
        assert_eq!(rounds.len(), if known { 1 } else { limit });
        assert_eq!(rounds[0]["pages"], 2048);
        let ended = match (known, limit) {
            (true, _) => "few-modified",
            (false, 1) => "limit",
            (false, _) => "not-shrinking",
        };
        assert_eq!(report["pre_copy"]["ended"], ended);
        assert_eq!(report["clean_pages_left_out"], true);
        assert_eq!(steps(&daemon), expected(rounds.len()));
        let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
        let last = arguments.lines().last().unwrap();
        assert!(
            last.contains("--track-mem --prev-images-dir ../prev"),
            "{last}"
        );
    }
}

#[test]
fn a_kernel_without_soft_dirty_bits_gets_a_plain_dump_and_no_pre_dump() {
    if !is_root() {
        return;
    }
    for as_json in [true, false] {
        let victim = Victim::start();
        let daemon = daemon(None);
        daemon.criu(DUMPS);
        let pid = victim.pid();
        let arguments = arguments(&pid, "--pre-copy");
        let output = daemon
            .command(&arguments[usize::from(!as_json)..])
            .env("NO_SOFT_DIRTY", "1")
            .output()
            .unwrap();
        assert_exit(&output, 0);
        if as_json {
            let pre_copy = &json(&output.stdout)["pre_copy"];
            assert_eq!(pre_copy["rounds"].as_array().map(Vec::len), Some(0));
            let why = pre_copy["not_done"].as_str().unwrap();
            assert!(why.contains("CONFIG_MEM_SOFT_DIRTY"), "{why}");
        } else {
            assert!(
                stderr(&output).contains("no pre-copy: this kernel"),
                "{}",
                stderr(&output)
            );
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(text.contains("not done: this kernel"), "{text}");
        }
        assert_eq!(runs(&daemon), ["check", "dump"]);
        assert_eq!(steps(&daemon), ["dump"]);
    }
}

#[test]
fn a_failure_at_any_step_removes_the_rounds_and_acknowledges_nothing() {
    if !is_root() {
        return;
    }
    // CRIU's run that fails, whether it is killed, and the steps until then.
    let cases: [(u32, &str, &[&str]); 6] = [
        (1, "kill -9 $$", &["round"]),
        (1, "exit 1", &["round"]),
        (
            2,
            "kill -9 $$",
            &["round", "seal", "round", "export", "rm train@1"],
        ),
        (
            2,
            "exit 1",
            &["round", "seal", "round", "export", "rm train@1"],
        ),
        (0, "kill -9 $$", &[]),
        (0, "exit 1", &[]),
    ];
    for (at, failing, expected) in cases {
        let victim = Victim::start();
        let daemon = daemon(None);
        // 0 is the dump. One round is enough to see what becomes of it.
        daemon.criu(&format!(
            r#"case "$1" in
pre-dump) [ "$(grep -c ^pre-dump @HERE@/criu-arguments)" != {at} ] || {failing}; exit 0;;
esac
[ {at} != 0 ] || {failing}
{DUMPS}"#
        ));
        let pid = victim.pid();
        let output = daemon.run(&arguments(&pid, "--pre-copy=3"));
        // Where the kernel can tell that nothing was modified, there is no second round.
        let has_second = runs(&daemon)
            .iter()
            .filter(|run| *run == "pre-dump")
            .count()
            > 1;
        if at == 2 && !has_second {
            continue;
        }
        assert_exit(&output, 5);
        assert!(output.stdout.is_empty(), "{output:?}");
        assert!(
            stderr(&output).contains("the process goes on"),
            "{}",
            stderr(&output)
        );
        let taken = steps(&daemon);
        if at == 0 {
            assert!(taken.last().unwrap().starts_with("rm train@"), "{taken:?}");
            let sealed = taken.iter().filter(|step| *step == "seal").count();
            let removed = taken.iter().filter(|step| step.starts_with("rm ")).count();
            assert_eq!(sealed, removed, "{taken:?}");
        } else {
            assert_eq!(taken, expected, "{failing} at {at}");
        }
        assert_runs(&victim);
        remove_log(&output);
    }
}

#[test]
fn a_round_that_is_not_sealed_ends_the_dump() {
    if !is_root() {
        return;
    }
    let victim = Victim::start();
    let daemon = daemon(Some(1));
    daemon.criu(&format!("case \"$1\" in pre-dump) exit 0;; esac\n{DUMPS}"));
    let output = daemon.run(&arguments(&victim.pid(), "--pre-copy"));
    assert_exit(&output, 6);
    assert_eq!(steps(&daemon), ["round", "seal"]);
    let text = stderr(&output);
    assert!(text.contains("round 1 of the pre-copy"), "{text}");
    assert_runs(&victim);
}

/// Waits until a script has made a file.
fn wait_for_file(path: &Path) {
    let since = Instant::now();
    while !path.exists() {
        assert!(
            since.elapsed() < Duration::from_secs(60),
            "no {}",
            path.display()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_killed_command_ends_the_connections_that_its_rounds_depend_on() {
    if !is_root() {
        return;
    }
    let victim = Victim::start();
    let daemon = daemon(None);
    // CRIU waits in the dump until its page socket is closed: nobody else has an end of it.
    daemon.criu(
        "case \"$1\" in pre-dump) exit 0;; esac\n: >@HERE@/in-the-dump\nuntil [ -e @HERE@/go ]; do sleep 0.05; done\nexit 1",
    );
    let pid = victim.pid();
    let mut command = daemon
        .command(&arguments(&pid, "--pre-copy=1"))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_file(&daemon.path().join("in-the-dump"));
    let before = *daemon.ended.lock();
    command.kill().unwrap();
    let output = command.wait_with_output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());
    // The round's and the dump's.
    let since = Instant::now();
    while *daemon.ended.lock() < before + 2 {
        assert!(since.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(steps(&daemon), ["round", "seal", "dump", "export"]);
    fs::write(daemon.path().join("go"), "").unwrap();
    assert_runs(&victim);
}

#[test]
fn a_wrong_number_of_rounds_is_refused() {
    let daemon = daemon(None);
    for wrong in ["--pre-copy=0", "--pre-copy=11", "--pre-copy=many"] {
        let output = daemon.run(&arguments("1", wrong));
        assert_exit(&output, 2);
        assert!(stderr(&output).contains("1 to 10"), "{}", stderr(&output));
    }
    let both = [
        "dump",
        "--pid",
        "1",
        "--job",
        "train",
        "--pre-copy",
        "--pre-dump",
    ];
    assert_exit(&daemon.run(&both), 2);
}
