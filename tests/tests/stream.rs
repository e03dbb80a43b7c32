//! Dumps whose images and pages come through pipes: `permafrost dump --stream`.

mod common;

use std::io::{Write as _, pipe};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use permafrost_protocol::control::{ErrorCode, request};

use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process::{self, wait_for};
use permafrost_tests::workload::{self, Workload};
use permafrost_transport::control::{Connection, ControlError};
use rustix::process::Signal;

use common::piped::{self, hand_over, hand_over_memory, pagemap, take};
use common::{PAGE_SIZE, exported_pages, fake_images, listing, pages};

/// Longer than a socket's path, with a directory that has its name.
const JOB: &str =
    "models/a-large-one-that-is-trained-for-weeks/with-a-rate-of-0.001/and-a-seed-of-42/try-3";

const LIMIT: Duration = Duration::from_secs(60);

/// Returns the command line of a dump by stream.
fn arguments(workload: &Workload) -> Vec<String> {
    let pid = workload.pid().to_string();
    let words = ["dump", "--stream", "--job", JOB, "--pid", &pid];
    words.map(str::to_owned).to_vec()
}

fn assert_lives(workload: &Workload, output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    assert!(workload.is_running());
    assert!(workload.verify().unwrap().is_sound());
}

/// Writes a script.
fn script(work: &Path, name: &str, text: &str) -> PathBuf {
    let path = work.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_tree_with_shared_memory_is_streamed_and_restored_exactly() {
    if criu::for_test("a_tree_with_shared_memory_is_streamed_and_restored_exactly").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut workload = Workload::start(work.path(), &workload::Options::tree(24)).unwrap();
    let mut added = Vec::new();
    for generation in 1..=2 {
        let modified = workload.modify().unwrap();
        let dumped = daemon.json(&arguments(&workload)).unwrap();
        assert_eq!(dumped["way"], "stream", "{dumped}");
        assert_eq!(dumped["checkpoint"]["generation"], generation, "{dumped}");
        added.push(dumped["checkpoint"]["added_bytes"].as_u64().unwrap());
        workload.wait_until_gone().unwrap();
        daemon.run(&["restore", JOB]).unwrap();
        let after = workload.verify().unwrap();
        assert!(after.is_sound(), "{after:?}");
        assert_eq!(after.generation, modified.generation);
    }
    // A tenth is modified: the rest equals the first dump's.
    assert!(added[1] * 3 < added[0], "{added:?}");
    let verified = daemon.json(&["verify"]).unwrap();
    assert_eq!(
        verified["damage"].as_array().map(Vec::len),
        Some(0),
        "{verified}"
    );
    // The other way finds the same pages, and pipes are taken unless it is asked for.
    let pid = workload.pid().to_string();
    let plain = ["dump", "--job", JOB, "--pid", &pid, "--leave-running"];
    for (force, way, reason) in [
        (&["--page-server"][..], "page-server", "requested"),
        (&[], "stream", "fastest"),
    ] {
        let dumped = daemon.json(&[&plain, force].concat()).unwrap();
        assert_eq!(dumped["way"], way, "{dumped}");
        assert_eq!(dumped["way_reason"], reason, "{dumped}");
        let next = dumped["checkpoint"]["added_bytes"].as_u64().unwrap();
        assert!(next * 3 < added[0], "{dumped}");
    }
}

#[test]
fn a_refused_stream_leaves_the_process_running_and_nothing_sealed() {
    let Some(criu) =
        criu::for_test("a_refused_stream_leaves_the_process_running_and_nothing_sealed")
    else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let small = Options {
        region_mib: 16,
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &small).unwrap();
    let workload = Workload::start(work.path(), &workload::Options::tree(24)).unwrap();
    let arguments = arguments(&workload);

    // The region is full in the middle of the pages.
    let output = daemon.try_run(&arguments).unwrap();
    assert_lives(&workload, &output, 6);

    // CRIU's post-dump script has a veto, too.
    let veto = script(
        work.path(),
        "veto",
        "[ \"$CRTOOLS_SCRIPT_ACTION\" != post-dump ]",
    );
    let mut command = daemon.command().unwrap();
    let output = command
        .args(&arguments)
        .env("PERMAFROST_ACTION", veto)
        .output();
    let output = output.unwrap();
    assert_ne!(output.status.code(), Some(0));
    assert!(workload.is_running() && workload.verify().unwrap().is_sound());

    // The command is killed before CRIU has sent anything: nobody takes its images.
    let held = work.path().join("held");
    let go = work.path().join("go");
    let waiting = format!(
        "if [ \"$1\" = dump ]; then : >{}; until [ -e {} ]; do sleep 0.05; done; fi\nexec {} \"$@\"",
        held.display(),
        go.display(),
        criu.path.display()
    );
    let waiting = script(work.path(), "criu", &waiting);
    let mut command = daemon.command().unwrap();
    let mut dump = command
        .args(&arguments)
        .env("PERMAFROST_CRIU", waiting)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("the start of CRIU", LIMIT, || {
        Ok(held.exists().then_some(()))
    })
    .unwrap();
    dump.kill().unwrap();
    let output = dump.wait_with_output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());
    std::fs::write(&go, "").unwrap();
    wait_until_idle(&daemon);
    assert!(workload.is_running() && workload.verify().unwrap().is_sound());
    assert_eq!(listing(&daemon).len(), 0);
}

#[test]
fn a_stream_knows_no_parents_of_crius() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    for other in ["--pre-dump", "--pre-copy", "--page-server"] {
        let words = ["dump", "--stream", other, "--job", JOB, "--pid", "1"];
        let output = daemon.try_run(&words).unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
}

/// Waits until no session is under way.
fn wait_until_idle(daemon: &Daemon) {
    wait_for("the end of the sessions", LIMIT, || {
        let status = daemon.json(&["status"])?;
        let sessions = status["sessions"].as_array().map_or(0, |sessions| {
            let open = sessions.iter().filter(|one| one["state"] != "failed");
            open.count()
        });
        Ok((sessions == 0).then_some(()))
    })
    .unwrap();
}

/// Returns true if CRIU holds the process.
fn is_traced(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let tracer = status
        .lines()
        .find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.is_some_and(|tracer| tracer.trim() != "0")
}

/// Begins a dump by stream, and returns when its process is frozen, its pages are in CRIU's pipes and the daemon, which
/// is stopped, takes none of them.
fn held_in_its_pages(daemon: &Daemon, workload: &Workload, criu: &Path) -> Child {
    let work = tempfile::tempdir().unwrap();
    let begun = work.path().join("begun");
    let go = work.path().join("go");
    let text = format!(
        "if [ \"$1\" = dump ]; then : >{}; until [ -e {} ]; do sleep 0.05; done; fi\nexec {} \"$@\"",
        begun.display(),
        go.display(),
        criu.display()
    );
    let mut command = daemon.command().unwrap();
    let dump = command
        .args(arguments(workload))
        .env("PERMAFROST_CRIU", script(work.path(), "criu", &text))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for("the start of CRIU", LIMIT, || {
        Ok(begun.exists().then_some(()))
    })
    .unwrap();
    process::stop(daemon.pid()).unwrap();
    std::fs::write(&go, "").unwrap();
    wait_for("the freeze", LIMIT, || {
        Ok(is_traced(workload.pid()).then_some(()))
    })
    .unwrap();
    // Until CRIU waits for room in its pipe.
    std::thread::sleep(Duration::from_millis(300));
    assert!(is_traced(workload.pid()));
    dump
}

#[test]
fn a_killed_command_or_daemon_leaves_the_process_running() {
    const TEST: &str = "a_killed_command_or_daemon_leaves_the_process_running";
    let Some(criu) = criu::for_test(TEST) else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let workload = Workload::start(work.path(), &workload::Options::tree(24)).unwrap();

    let mut dump = held_in_its_pages(&daemon, &workload, &criu.path);
    dump.kill().unwrap();
    process::signal(daemon.pid(), Signal::CONT).unwrap();
    dump.wait().unwrap();
    wait_for("the end of the freeze", LIMIT, || {
        Ok((!is_traced(workload.pid())).then_some(()))
    })
    .unwrap();
    assert!(workload.verify().unwrap().is_sound());
    wait_until_idle(&daemon);
    assert_eq!(listing(&daemon).len(), 0);

    let dump = held_in_its_pages(&daemon, &workload, &criu.path);
    daemon.kill().unwrap();
    let output = dump.wait_with_output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    assert!(workload.is_running() && workload.verify().unwrap().is_sound());

    // Nothing of it is in the way of the next one.
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut leaving = arguments(&workload);
    leaving.push("--leave-running".to_owned());
    let dumped = daemon.json(&leaving).unwrap();
    assert_eq!(dumped["checkpoint"]["generation"], 1, "{dumped}");
}

#[test]
fn a_stream_is_encrypted_with_the_key_of_its_namespace() {
    const TEST: &str = "a_stream_is_encrypted_with_the_key_of_its_namespace";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let key = work.path().join("key");
    std::fs::write(&key, [7; 32]).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let options = Options {
        extra: vec![format!("--key-file={}", key.display())],
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let mut workload = Workload::start(work.path(), &workload::Options::tree(8)).unwrap();
    daemon.run(&arguments(&workload)).unwrap();
    workload.wait_until_gone().unwrap();
    let keys = daemon.json(&["keys", "ls"]).unwrap();
    assert_eq!(keys["keys"][0]["namespace"], "models", "{keys}");
    daemon.run(&["restore", JOB]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
}

/// Checks that a request is refused with these words, and that the session has failed for that reason.
#[track_caller]
fn refused<T: std::fmt::Debug>(outcome: Result<T, ControlError>, words: &str) -> ErrorCode {
    let Err(ControlError::Refused { code, message, .. }) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(message.contains(words), "{message}");
    code
}

#[test]
fn what_is_handed_over_is_not_trusted() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let connect = || Connection::connect(&daemon.control()).unwrap();
    let descriptors = || {
        let path = format!("/proc/{}/fd", daemon.pid());
        std::fs::read_dir(path).unwrap().count()
    };
    let a_pipe = || OwnedFd::from(pipe().unwrap().0);
    let before = descriptors();

    // Files, also one that would grow for ever, sockets and write ends in the place of pipes; one descriptor, or none.
    let file = || OwnedFd::from(tempfile::tempfile().unwrap());
    let zeros = || OwnedFd::from(std::fs::File::open("/dev/zero").unwrap());
    let socket = || OwnedFd::from(UnixStream::pair().unwrap().0);
    let writer = || OwnedFd::from(pipe().unwrap().1);
    for other in [file(), zeros(), socket(), writer()] {
        let mut connection = connect();
        let session = piped::open(&mut connection, "job");
        let handed = hand_over(&mut connection, take(&session), [a_pipe(), other]);
        refused(handed, "pages of process 4711: the descriptor is no pipe");
        let end = request::EndPages { session };
        refused(connection.call(end), "takes no other connection");
    }
    let mut connection = connect();
    let session = piped::open(&mut connection, "job");
    refused(connection.call(take(&session)), "without the descriptor");
    let one = connection.call_with_all(take(&session), &[a_pipe().as_fd()]);
    refused(one, "without the descriptor");
    // Another session, a space that is none, pages without their session.
    let other = hand_over(&mut connection, take("0123"), [a_pipe(), a_pipe()]);
    assert_eq!(refused(other, "no session 0123"), ErrorCode::NotFound);
    let odd = request::TakeSpace {
        space_type: 9,
        ..take(&session)
    };
    let odd = hand_over(&mut connection, odd, [a_pipe(), a_pipe()]);
    refused(odd, "no address space");
    // One space twice.
    hand_over_memory(&mut connection, &session, 0x1000, &pages(1, 4)).unwrap();
    let again = hand_over_memory(&mut connection, &session, 0x9000, &pages(2, 4));
    refused(again, "opened");
    drop(connection);

    // Ten thousand descriptors: a request has as many as it needs, and the rest is closed.
    let mut connection = connect();
    let session = piped::open(&mut connection, "job");
    let many: Vec<OwnedFd> = (0..100).map(|_| a_pipe()).collect();
    let stream = UnixStream::connect(daemon.control()).unwrap();
    for _ in 0..100 {
        send_descriptors(&stream, &many);
    }
    drop(stream);

    // The client goes, in the middle of the pages and before the end.
    let (entries, mut entries_in) = pipe().unwrap();
    entries_in.write_all(&pagemap(0x1000, 8)).unwrap();
    let (half, mut half_in) = pipe().unwrap();
    half_in.write_all(&pages(1, 4)).unwrap();
    let canceller = connection.canceller().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            canceller.cancel();
        });
        let handed = hand_over(
            &mut connection,
            take(&session),
            [entries.into(), half.into()],
        );
        assert!(handed.is_err(), "{handed:?}");
    });
    drop((connection, entries_in, half_in));
    wait_until_idle(&daemon);
    let mut connection = connect();
    let session = piped::open(&mut connection, "job");
    hand_over_memory(&mut connection, &session, 0x1000, &pages(1, 4)).unwrap();
    drop(connection);
    wait_until_idle(&daemon);
    wait_for("the end of the descriptors", LIMIT, || {
        Ok((descriptors() <= before + 2).then_some(()))
    })
    .unwrap();

    // And one that keeps to the rules.
    let memory = pages(3, 700);
    let mut connection = connect();
    let session = piped::open(&mut connection, "job");
    hand_over_memory(&mut connection, &session, 0x40_0000, &memory).unwrap();
    let end = request::EndPages {
        session: session.clone(),
    };
    connection.call(end).unwrap();
    let images = work.path().join("images");
    fake_images(&images);
    let images = std::fs::File::open(images).unwrap();
    let seal = request::Seal { session };
    let sealed = connection
        .call_with(seal, Some(images.as_fd()), &mut |_| {})
        .unwrap();
    assert_eq!((sealed.generation, &*sealed.job), (1, "job"));
    assert!(exported_pages(&daemon, work.path(), "job") == memory);
    assert_eq!(memory.len(), 700 * PAGE_SIZE);
}

/// Starts a daemon that has the kernel's limit on pipes, as one of the packages: without the capabilities that lift it.
fn with_few_pipes(work: &Path) -> Daemon {
    let drop = "--bounding-set=-sys_admin,-sys_resource";
    let options = Options {
        prefix: ["setpriv", drop, "--"].map(str::to_owned).to_vec(),
        ..Options::default()
    };
    Daemon::start(work, &options).unwrap()
}

/// The first dumps do not fit together, so the second one is told of less room than it needs, until the first has ended.
#[test]
fn dumps_that_begin_together_do_not_have_the_same_room_in_pipes() {
    const MIB: u64 = 1 << 20;
    let work = tempfile::tempdir().unwrap();
    let daemon = with_few_pipes(work.path());
    let connect = || Connection::connect(&daemon.control()).unwrap();
    let free = || daemon.json(&["status"]).unwrap()["pipe_bytes"].as_u64();
    let all = free().expect("the daemon has no limit on its pipes");
    let large = all * 3 / 4;
    let is_free_again = || {
        wait_for("the room in pipes", LIMIT, || {
            Ok((free() == Some(all)).then_some(()))
        })
        .unwrap();
    };

    let mut first = connect();
    let opened = piped::open_for(&mut first, "first", large);
    assert!(opened.pipe_bytes >= large, "{opened:?}");
    let mut second = connect();
    let crowded = piped::open_for(&mut second, "second", large);
    assert!(crowded.pipe_bytes < large, "{crowded:?}");
    assert_eq!(free(), Some(crowded.pipe_bytes));
    // A smaller one fits beside the first, and one that asks for nothing takes nothing.
    let mut third = connect();
    assert!(piped::open_for(&mut third, "third", MIB).pipe_bytes >= MIB);
    assert!(free() < Some(crowded.pipe_bytes));
    let mut fourth = connect();
    let told = piped::open_for(&mut fourth, "fourth", 0).pipe_bytes;
    assert_eq!(free(), Some(told));
    drop((second, third, fourth));

    // The connection is lost in the middle of the pages.
    let (entries, _entries_in) = pipe().unwrap();
    let (half, mut half_in) = pipe().unwrap();
    half_in.write_all(&pages(1, 4)).unwrap();
    let canceller = first.canceller().unwrap();
    let session = opened.session;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            canceller.cancel();
        });
        let pipes = [entries.into(), half.into()];
        assert!(hand_over(&mut first, take(&session), pipes).is_err());
    });
    drop(first);
    is_free_again();

    // A dump is aborted by somebody else.
    let mut first = connect();
    let opened = piped::open_for(&mut first, "first", large);
    assert!(opened.pipe_bytes >= large, "{opened:?}");
    let abort = request::Abort {
        session: opened.session,
        ..request::Abort::default()
    };
    connect().call(abort).unwrap();
    is_free_again();

    // A dump has all of its pages, and waits for its seal.
    let opened = piped::open_for(&mut first, "first", large);
    assert!(opened.pipe_bytes >= large, "{opened:?}");
    let session = opened.session;
    hand_over_memory(&mut first, &session, 0x1000, &pages(1, 700)).unwrap();
    first.call(request::EndPages { session }).unwrap();
    is_free_again();

    // Whoever is not bound to a connection may never end.
    let unbound = request::Open {
        job: "unbound".to_owned(),
        pipe_bytes: large,
        ..request::Open::default()
    };
    let unbound = connect().call(unbound).unwrap();
    assert_eq!(unbound.pipe_bytes, all);
    assert_eq!(free(), Some(all));
}

/// Sends a byte with all of these descriptors. It is no failure if the daemon has hung up.
fn send_descriptors(stream: &UnixStream, descriptors: &[OwnedFd]) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(100))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptors.iter().map(OwnedFd::as_fd).collect();
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let byte = [std::io::IoSlice::new(&[0])];
    let _ = sendmsg(stream, &byte, &mut control, SendFlags::NOSIGNAL);
}
