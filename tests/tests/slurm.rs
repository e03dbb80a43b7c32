//! Batch jobs of a real Slurm under `permafrost slurm run`: preempted, requeued, resumed, ended, cancelled.

mod common;

use std::path::{Path, PathBuf};
use std::time::Duration;

use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::slurm::{self, HIGH, LOW, Slurm};
use permafrost_tests::status::Status;
use permafrost_tests::{binaries, criu, process};
use permafrost_transport::api::{ApiClient, ApiOptions};

use common::listing;

/// Grace time, far longer than a scenario: a waiting job gets the node because the preempted one leaves, not because
/// its time is up.
const GRACE: Duration = Duration::from_secs(600);

/// Time that a task may take to answer.
const ANSWER: Duration = Duration::from_secs(60);

/// Option that makes Slurm signal a preemption to the wrapper only.
const WARN: &str = "--signal=B:USR1@600";

/// A daemon, a Slurm, and the directory of the tasks' reports.
struct Site {
    slurm: Slurm,
    daemon: Option<Daemon>,
    dir: tempfile::TempDir,
}

impl Site {
    fn start(test: &str) -> Option<Self> {
        Self::start_with(test, 1)
    }

    /// Starts a Slurm whose node has so many processors.
    fn start_with(test: &str, processors: u32) -> Option<Self> {
        let programs = slurm::for_test(test);
        criu::for_test(test)?;
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::start(dir.path(), &Options::default()).unwrap();
        let slurm_dir = dir.path().join("slurm");
        std::fs::create_dir(&slurm_dir).unwrap();
        Some(Self {
            slurm: Slurm::start(&programs, &slurm_dir, GRACE, processors).unwrap(),
            daemon: Some(daemon),
            dir,
        })
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    /// Returns a batch script that becomes `permafrost slurm run` with these options over this command.
    fn script(&self, options: &str, command: &str) -> String {
        let criu = criu::find().unwrap().path;
        format!(
            "{}={} exec {} --socket {}/run/control.sock slurm run {options} -- {command}",
            criu::CRIU,
            criu.display(),
            binaries::path("permafrost").unwrap().display(),
            self.dir.path().display(),
        )
    }

    /// Returns the command of a tree with two processes, shared memory, and memory that it can verify.
    fn workload(&self) -> String {
        format!(
            "{} --dir {} --size-mib 16 --members 1 --shared-mib 2 --threads 1",
            binaries::path("permafrost-workload").unwrap().display(),
            self.dir.path().display()
        )
    }

    fn report_path(&self) -> PathBuf {
        self.dir.path().join("workload.status")
    }

    /// Returns the report that a workload writes when it starts.
    fn first_report(&self, job: u32) -> Status {
        process::wait_for("the task's first report", ANSWER, || {
            Status::read(&self.report_path())
        })
        .unwrap_or_else(|error| panic!("{error:#}; the job says:\n{}", self.slurm.output(job)))
    }

    /// Has the task verify itself, by a signal to the wrapper.
    fn verify(&self, job: u32) -> Status {
        let _ = std::fs::remove_file(self.report_path());
        self.slurm.signal(job, "USR2").unwrap();
        self.first_report(job)
    }

    /// Submits a job that needs the node of `job`, and waits until it has run.
    fn preempt(&self, job: u32) {
        let wanting = self.slurm.submit(HIGH, &[], "exit 0").unwrap();
        self.slurm
            .wait_for(wanting, "COMPLETED")
            .unwrap_or_else(|error| panic!("{error:#}; the job says:\n{}", self.slurm.output(job)));
    }

    /// Waits until a job runs for the second time.
    fn wait_for_second_run(&self, job: u32) {
        process::wait_for("the second run", Duration::from_secs(90), || {
            let restarts = self.slurm.field(job, "Restarts")?;
            let state = self.slurm.field(job, "JobState")?;
            Ok((restarts == "1" && state == "RUNNING").then_some(()))
        })
        .unwrap_or_else(|error| panic!("{error:#}; the job says:\n{}", self.slurm.output(job)));
    }

    /// Makes the daemon treat its medium as one on which no dump fits a grace time.
    fn slow_medium(&self) {
        let client = ApiClient::new(&ApiOptions::beside(&self.daemon().control())).unwrap();
        let slow = serde_json::json!([{"size_bytes": 1_000_000, "p50_bytes_per_s": 20_000}]);
        client
            .put(
                "/v1/figures",
                &serde_json::json!({"write": slow, "read": slow}),
            )
            .unwrap();
        process::wait_for("the figures to be known", ANSWER, || {
            let nodes: serde_json::Value = client.get("/v1/nodes", &[])?.into()?;
            let rate = nodes.pointer("/nodes/0/tiers/0/write_bytes_per_s/p50");
            Ok((rate.and_then(serde_json::Value::as_f64) == Some(20_000.0)).then_some(()))
        })
        .unwrap_or_else(|error| {
            let nodes = client.get("/v1/nodes", &[]).unwrap();
            panic!("{error:#}: {}", String::from_utf8_lossy(nodes.bytes()))
        });
    }

    fn checkpoints(&self) -> usize {
        listing(self.daemon()).len()
    }
}

#[test]
fn a_preempted_job_goes_on_where_it_was() {
    let Some(site) = Site::start("a_preempted_job_goes_on_where_it_was") else {
        return;
    };
    let script = site.script("", &site.workload());
    let job = site.slurm.submit(LOW, &[WARN], &script).unwrap();
    site.first_report(job);
    let before = site.verify(job);
    assert!(before.is_sound(), "{before:?}");
    assert_eq!(site.checkpoints(), 0);

    site.preempt(job);
    assert_eq!(site.checkpoints(), 1, "{}", site.slurm.output(job));
    let lineage = format!("slurm/{}/{job}", slurm::CLUSTER);
    assert_eq!(listing(site.daemon())[0]["job"], lineage);

    site.wait_for_second_run(job);
    let resumed = format!("resumed from {lineage}@1");
    process::wait_for("the task to be resumed", ANSWER, || {
        Ok(site.slurm.output(job).contains(&resumed).then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error:#}; the job says:\n{}", site.slurm.output(job)));
    let after = site.verify(job);
    assert!(after.is_sound(), "{after:?}");
    assert!(
        after.counter > before.counter && after.thread_ticks > before.thread_ticks,
        "it goes on: {before:?} then {after:?}"
    );
    assert_eq!(after.checksum_kept, before.checksum_kept);
    assert_eq!((after.pid, &after.members), (before.pid, &before.members));

    // Once more by hand, and then it ends by itself.
    site.slurm.signal(job, "USR1").unwrap();
    process::wait_for("a second checkpoint", ANSWER, || {
        Ok((site.checkpoints() == 2).then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error:#}; the job says:\n{}", site.slurm.output(job)));
    let resumed = format!("resumed from {lineage}@2");
    process::wait_for("the third run", Duration::from_secs(90), || {
        Ok(site.slurm.output(job).contains(&resumed).then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error:#}; the job says:\n{}", site.slurm.output(job)));
    let last = site.verify(job);
    assert!(last.is_sound() && last.counter > after.counter, "{last:?}");
    site.slurm.signal(job, "INT").unwrap();
    site.slurm.wait_for(job, "COMPLETED").unwrap();
    assert_eq!(site.slurm.field(job, "ExitCode").unwrap(), "0:0");
    assert_eq!(site.slurm.field(job, "Restarts").unwrap(), "2");
    assert_eq!(site.checkpoints(), 0, "removed when it was done");
}

#[test]
fn a_task_that_is_not_worth_a_dump_is_ended_and_starts_again() {
    let Some(mut site) = Site::start("a_task_that_is_not_worth_a_dump_is_ended_and_starts_again")
    else {
        return;
    };
    site.slow_medium();
    let script = site.script("", &site.workload());
    let job = site.slurm.submit(LOW, &[WARN], &script).unwrap();
    let first = site.first_report(job);
    std::fs::remove_file(site.report_path()).unwrap();
    site.preempt(job);
    assert!(
        site.slurm.output(job).contains("no checkpoint"),
        "{}",
        site.slurm.output(job)
    );
    assert_eq!(site.checkpoints(), 0);
    site.wait_for_second_run(job);
    let second = site.first_report(job);
    assert_eq!((first.counter, second.counter), (0, 0), "it starts anew");
    site.slurm.cancel(job).unwrap();
    site.slurm.wait_for(job, "CANCELLED").unwrap();

    // The same where nobody is there to ask, or to take a dump.
    std::fs::remove_file(site.report_path()).unwrap();
    let script = site.script("", &site.workload());
    let job = site.slurm.submit(LOW, &[WARN], &script).unwrap();
    site.first_report(job);
    std::fs::remove_file(site.report_path()).unwrap();
    site.daemon.take().expect("it runs").stop().unwrap();
    site.preempt(job);
    let said = site.slurm.output(job);
    assert!(said.contains("it is ended without a checkpoint"), "{said}");
    // The second run waits for the daemon, which might have a checkpoint.
    site.wait_for_second_run(job);
    assert!(!site.report_path().exists(), "not started without it");
    site.daemon = Some(Daemon::start(site.dir.path(), &Options::default()).unwrap());
    site.first_report(job);
    site.slurm.signal(job, "INT").unwrap();
    site.slurm.wait_for(job, "COMPLETED").unwrap();
}

#[test]
fn a_cancelled_job_leaves_nothing() {
    let Some(site) = Site::start("a_cancelled_job_leaves_nothing") else {
        return;
    };
    let script = site.script("--every 1s", &site.workload());
    let job = site.slurm.submit(LOW, &[WARN], &script).unwrap();
    process::wait_for("periodic checkpoints", ANSWER, || {
        let listed = listing(site.daemon());
        let third = listed
            .iter()
            .any(|one| one["generation"].as_u64() >= Some(3));
        Ok(third.then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error:#}; the job says:\n{}", site.slurm.output(job)));
    assert!(site.checkpoints() <= 3, "old ones go");
    assert!(site.verify(job).is_sound(), "they do not disturb it");
    site.slurm.cancel(job).unwrap();
    site.slurm.wait_for(job, "CANCELLED").unwrap();
    process::wait_for("the checkpoints to be removed", ANSWER, || {
        Ok((site.checkpoints() == 0).then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error:#}; the job says:\n{}", site.slurm.output(job)));
    assert!(!tasks_of(site.dir.path()), "no process of the job is left");
}

/// Returns true if a workload that reports into `dir` is running.
fn tasks_of(dir: &Path) -> bool {
    !processes_of(dir).is_empty()
}

/// Returns the directories in `/proc` of the processes of a workload that reports into `dir`.
fn processes_of(dir: &Path) -> Vec<PathBuf> {
    let wanted = format!("permafrost-workload\0--dir\0{}\0", dir.display());
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let is_of = |path: &PathBuf| {
        let line = std::fs::read(path.join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&wanted)
    };
    entries.map(|entry| entry.path()).filter(is_of).collect()
}

/// Returns the processor time that the processes of a workload have used, in ticks.
fn ticks_of(dir: &Path) -> u64 {
    let ticks = |process: PathBuf| -> u64 {
        let stat = std::fs::read_to_string(process.join("stat")).unwrap_or_default();
        // The name may hold blanks; fields 14 and 15 are those of user and system time.
        let behind_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let fields = behind_name.split_whitespace().skip(11).take(2);
        fields.map(|ticks| ticks.parse::<u64>().unwrap_or(0)).sum()
    };
    processes_of(dir).into_iter().map(ticks).sum()
}

#[test]
fn a_job_that_shares_the_node_is_suspended_or_shrunk_by_the_next_and_goes_on_after_it() {
    let test = "a_job_that_shares_the_node_is_suspended_or_shrunk_by_the_next_and_goes_on_after_it";
    let Some(site) = Site::start_with(test, 2) else {
        return;
    };
    // The workload starts a session, which the batch script's process cannot; so that hands the signals on.
    let script = format!(
        "setsid {} & task=$!\ntrap 'kill -USR2 $task' USR2\ntrap 'kill -INT $task' INT\n\
         while kill -0 $task 2>/dev/null; do wait $task; done",
        site.workload()
    );
    let low = site.slurm.submit(LOW, &[], &script).unwrap();
    site.first_report(low);
    let mut before = site.verify(low);
    assert!(before.is_sound(), "{before:?}");
    let permafrost = binaries::path("permafrost").unwrap();
    let (taken, release) = (
        site.dir.path().join("taken"),
        site.dir.path().join("release"),
    );
    for (take, give) in [
        ("suspend --grace 200ms", "resume"),
        ("suspend --freeze", "resume"),
        ("shrink --cpu 0.05 --immediate", "grow"),
        ("shrink --cpu 0.05 --step 0.5,1G --interval 50ms", "grow"),
    ] {
        let _ = std::fs::remove_file(&taken);
        let _ = std::fs::remove_file(&release);
        // As docs/slurm.md has it: the first process of a job is its batch script's.
        let script = format!(
            "set -e\npid=$(scontrol listpids {low} | awk 'NR == 2 {{print $1}}')\n\
             trap '{bin} {give} --pid '$pid EXIT\n{bin} {take} --pid $pid\ntouch {taken}\n\
             while ! [ -e {release} ]; do sleep 0.05; done\n",
            bin = permafrost.display(),
            taken = taken.display(),
            release = release.display(),
        );
        let high = site.slurm.submit(HIGH, &[], &script).unwrap();
        let said = || {
            format!(
                "{take}: {}\n{}",
                site.slurm.output(high),
                site.slurm.output(low)
            )
        };
        process::wait_for("the node to be taken", ANSWER, || {
            Ok(taken.exists().then_some(()))
        })
        .unwrap_or_else(|error| panic!("{error:#}; {}", said()));
        assert_eq!(site.slurm.field(low, "JobState").unwrap(), "RUNNING");
        let used = ticks_of(site.dir.path());
        std::thread::sleep(Duration::from_secs(2));
        let used = ticks_of(site.dir.path()) - used;
        // A twentieth of a processor over two seconds is ten ticks, and the quota is checked each 100 ms.
        let most = if give == "resume" { 0 } else { 40 };
        assert!(used <= most, "{used} ticks while taken; {}", said());
        std::fs::write(&release, "").unwrap();
        site.slurm
            .wait_for(high, "COMPLETED")
            .unwrap_or_else(|error| panic!("{error:#}; {}", said()));
        let after = site.verify(low);
        assert!(after.is_sound(), "{after:?}; {}", said());
        assert!(after.counter >= before.counter, "{before:?} then {after:?}");
        assert_eq!((after.pid, &after.members), (before.pid, &before.members));
        before = after;
    }
    site.slurm.signal(low, "INT").unwrap();
    site.slurm.wait_for(low, "COMPLETED").unwrap();
    assert_eq!(site.slurm.field(low, "Restarts").unwrap(), "0");
}

#[test]
fn the_policy_of_a_job_decides_between_checkpoint_and_kill() {
    let Some(site) = Site::start("the_policy_of_a_job_decides_between_checkpoint_and_kill") else {
        return;
    };
    // A checkpoint, although the task has done hardly anything.
    let script = site.script("--policy basic", &site.workload());
    let job = site.slurm.submit(LOW, &[WARN], &script).unwrap();
    site.first_report(job);
    let before = site.verify(job);
    site.preempt(job);
    let said = site.slurm.output(job);
    assert!(
        said.contains("a checkpoint: the policy basic+cheaper"),
        "{said}"
    );
    assert_eq!(site.checkpoints(), 1, "{said}");
    site.wait_for_second_run(job);
    let resumed = format!("resumed from slurm/{}/{job}@1", slurm::CLUSTER);
    process::wait_for("the task to be resumed", ANSWER, || {
        Ok(site.slurm.output(job).contains(&resumed).then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error:#}; the job says:\n{}", site.slurm.output(job)));
    let after = site.verify(job);
    assert!(
        after.is_sound() && after.counter > before.counter,
        "{after:?}"
    );
    site.slurm.cancel(job).unwrap();
    site.slurm.wait_for(job, "CANCELLED").unwrap();
    process::wait_for("the task's end", ANSWER, || {
        Ok((!tasks_of(site.dir.path())).then_some(()))
    })
    .unwrap();

    // A kill, although a dump would be quick.
    std::fs::remove_file(site.report_path()).unwrap();
    let script = site.script("--policy kill", &site.workload());
    let job = site.slurm.submit(LOW, &[WARN], &script).unwrap();
    site.first_report(job);
    std::fs::remove_file(site.report_path()).unwrap();
    site.preempt(job);
    let said = site.slurm.output(job);
    assert!(said.contains("no checkpoint: the policy kill"), "{said}");
    site.wait_for_second_run(job);
    assert_eq!(site.first_report(job).counter, 0, "it starts anew");
    site.slurm.signal(job, "INT").unwrap();
    site.slurm.wait_for(job, "COMPLETED").unwrap();
}

#[test]
fn exit_codes_are_the_tasks_unless_it_never_ran() {
    let Some(site) = Site::start("exit_codes_are_the_tasks_unless_it_never_ran") else {
        return;
    };
    let run = site.script("", "");
    let without_exec = run.replace(" exec ", " ") + " true; exit $?";
    for (script, state, code) in [
        (format!("{run} sh -c 'exit 42'"), "FAILED", "42:0"),
        (format!("{run} sh -c 'kill -KILL $$'"), "FAILED", "137:0"),
        (format!("{run} /nonexistent/program"), "FAILED", "127:0"),
        (format!("{run} sh -c 'echo done'"), "COMPLETED", "0:0"),
        (without_exec, "FAILED", "125:0"),
        (site.script("--job 'a b'", "true"), "FAILED", "125:0"),
        (
            site.script("--policy mr+srt", "echo done"),
            "FAILED",
            "125:0",
        ),
        (site.script("--policy mdf", "echo done"), "FAILED", "125:0"),
        (site.script("--policy gp", "echo done"), "FAILED", "125:0"),
        (site.script("--policy fifo", "echo done"), "FAILED", "2:0"),
        (
            site.script("--policy mr+srt --work 1h", "echo done"),
            "COMPLETED",
            "0:0",
        ),
    ] {
        let job = site.slurm.submit(LOW, &[WARN], &script).unwrap();
        site.slurm.wait_for(job, state).unwrap();
        let is = site.slurm.field(job, "ExitCode").unwrap();
        let said = site.slurm.output(job);
        assert_eq!(is, code, "{script}:\n{said}");
        assert_eq!(state == "COMPLETED", said.contains("done"), "{said}");
        for (policy, word) in [
            ("mr+srt -- ", "remaining_s"),
            ("mdf", "deadline_s"),
            ("gp", "stay on their node"),
            ("fifo", "there is no policy"),
        ] {
            let is_of = script.contains(&format!("--policy {policy}"));
            assert!(!is_of || said.contains(word), "{said}");
        }
    }
}
