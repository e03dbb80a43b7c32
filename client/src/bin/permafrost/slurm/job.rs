//! The Slurm job: its environment from slurmd, its state from slurmctld, and requeueing it.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use permafrost_protocol::manifest::check_job_name;
use permafrost_terminal::failure::{Code, Failure};

/// Time limit for slurmctld to answer. Its own limit (`MessageTimeout`) is 10 s by default, and `scontrol` asks
/// more than once; a grace time is soon over.
const PATIENCE: Duration = Duration::from_secs(15);

/// Interval at which the end of `scontrol` is polled.
const TICK: Duration = Duration::from_millis(10);

/// States of a job that runs, as slurmctld names them (`job_state_string` in its `slurm_protocol_defs.c`): a flag goes
/// before RUNNING. SIGNALING is the job's as long as a SIGCONT is on its way, which goes with each signal of a
/// preemption.
const RUNNING: [&str; 6] = [
    "RUNNING",
    "SIGNALING",
    "CONFIGURING",
    "RESIZING",
    "STOPPED",
    "SUSPENDED",
];

/// The batch job that this command runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    /// Number of the job; in an array, that of the array's task.
    pub(super) id: u32,
    /// Number of requeues before this run.
    pub(super) restarts: u32,
    /// Permafrost job that the checkpoints belong to.
    pub(super) lineage: String,
    /// True if a user chose the lineage's name: then another job may continue it.
    pub(super) named: bool,
    /// Pid of the batch script, which Slurm signals.
    process: Option<u32>,
}

/// State of a job, as slurmctld reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    /// False once the job is being ended, or has ended.
    pub(super) is_running: bool,
    /// Number of requeues, including one that is under way.
    pub(super) restarts: u32,
    /// True if the job is in its grace time, or past it.
    pub(super) preempted: bool,
    /// End of the grace time or of the time limit, Unix seconds.
    pub(super) ends_unix_s: Option<u64>,
    /// Time by which the job is to have ended (`sbatch --deadline`), Unix seconds.
    pub(super) deadline_unix_s: Option<u64>,
    /// True if the job has used up its time limit.
    pub(super) timed_out: bool,
}

impl Job {
    /// Reads the job from the environment of a batch job.
    ///
    /// # Errors
    /// [`Code::Invalid`]: there is no batch job, or its name is not a valid job name.
    pub(super) fn of_environment(
        variable: impl Fn(&str) -> Option<String>,
        lineage: Option<&str>,
    ) -> Result<Self, Failure> {
        let number = |name: &str| -> Option<u32> {
            variable(name).and_then(|text| text.trim().parse().ok())
        };
        let id = number("SLURM_JOB_ID").ok_or_else(|| {
            Failure::new(Code::Invalid, "this is no Slurm job: SLURM_JOB_ID is not set")
                .hint("run it in a batch script; outside of Slurm use permafrost dump and permafrost restore")
        })?;
        if variable("SLURM_STEP_ID").is_some() {
            return Err(Failure::new(
                Code::Invalid,
                "this is a step of a Slurm job, all of whose processes get Slurm's signals",
            )
            .hint("run it in the batch script itself, without srun: exec permafrost slurm run -- COMMAND"));
        }
        if number("SLURM_JOB_NUM_NODES").is_some_and(|nodes| nodes > 1) {
            return Err(Failure::new(
                Code::Invalid,
                "the job has more than one node: only what runs on one can be checkpointed",
            )
            .hint("ask for --nodes=1"));
        }
        let own = || {
            let cluster = variable("SLURM_CLUSTER_NAME").unwrap_or_else(|| "cluster".to_owned());
            match (number("SLURM_ARRAY_JOB_ID"), number("SLURM_ARRAY_TASK_ID")) {
                (Some(array), Some(task)) => format!("slurm/{cluster}/{array}_{task}"),
                _ => format!("slurm/{cluster}/{id}"),
            }
        };
        let named = lineage.is_some();
        let lineage = lineage.map_or_else(own, str::to_owned);
        check_job_name(&lineage).map_err(|error| {
            Failure::new(
                Code::Invalid,
                format!("{lineage:?} is no job name: {error}"),
            )
            .hint("name one with --job")
        })?;
        Ok(Self {
            id,
            restarts: number("SLURM_RESTART_COUNT").unwrap_or(0),
            lineage,
            named,
            process: number("SLURM_TASK_PID"),
        })
    }

    /// Checks that `own` is the batch script's process. Otherwise the signal would end a shell that waits for
    /// this command.
    ///
    /// # Errors
    /// [`Code::Invalid`]: another process is the batch script's.
    pub(super) fn check_process(&self, own: u32) -> Result<(), Failure> {
        match self.process {
            Some(process) if process != own => Err(Failure::new(
                Code::Invalid,
                "Slurm's signals would not come here: the batch script still runs, and would be ended by them",
            )
            .hint("let it become this command: exec permafrost slurm run -- COMMAND")),
            _ => Ok(()),
        }
    }

    /// Queries slurmctld. If it does not answer, the error is the reason as text.
    pub(super) fn state(&self) -> Result<State, String> {
        let mut command = Command::new("scontrol");
        command.args(["show", "job", &self.id.to_string()]);
        // Otherwise local time without a zone.
        command.env("SLURM_TIME_FORMAT", "%s");
        let said = output(command)?;
        State::parse(&said).ok_or_else(|| format!("scontrol says of job {}: {said:?}", self.id))
    }

    /// Requeues the job: from now on Slurm ends it, and will start it again.
    pub(super) fn requeue(&self) -> Result<(), String> {
        let mut command = Command::new("scontrol");
        command.args(["requeue", &self.id.to_string()]);
        output(command).map(drop)
    }
}

impl State {
    /// Parses the output of `scontrol show job` with times in Unix seconds. Text of the user (the job's name,
    /// its comment) is on lines of its own or behind other keys, so only the beginnings of known lines are
    /// parsed.
    fn parse(said: &str) -> Option<Self> {
        let line = |first: &str| {
            said.lines()
                .map(str::trim)
                .find(|line| line.starts_with(first))
        };
        let word = |line: Option<&str>, key: &str| -> Option<String> {
            line?
                .split_whitespace()
                .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
                .map(str::to_owned)
        };
        let seconds =
            |line: Option<&str>, key: &str| -> Option<u64> { word(line, key)?.parse().ok() };
        let times = line("StartTime=");
        let ends_unix_s = seconds(times, "EndTime");
        let ran_s = ends_unix_s
            .zip(seconds(times, "StartTime"))
            .and_then(|(end, start)| end.checked_sub(start));
        let limit_s = word(line("RunTime="), "TimeLimit").and_then(|limit| limit_s(&limit));
        let state = word(line("JobState="), "JobState")?;
        let is_running = RUNNING.contains(&state.as_str());
        Some(Self {
            is_running,
            restarts: seconds(line("Requeue="), "Restarts")
                .and_then(|restarts| u32::try_from(restarts).ok())
                .unwrap_or(0),
            preempted: seconds(line("PreemptEligibleTime="), "PreemptTime").is_some(),
            ends_unix_s,
            deadline_unix_s: seconds(times, "Deadline"),
            timed_out: !is_running
                && ran_s
                    .zip(limit_s)
                    .is_some_and(|(ran_s, limit_s)| ran_s >= limit_s),
        })
    }

    /// Returns the time left until the job is ended.
    pub(super) fn left(&self) -> Option<Duration> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
        Some(Duration::from_secs(self.ends_unix_s?).saturating_sub(now))
    }
}

/// Parses `[DAYS-]HOURS:MINUTES:SECONDS`, in seconds; `None` for `UNLIMITED`.
fn limit_s(text: &str) -> Option<u64> {
    let (days, clock) = text.split_once('-').unwrap_or(("0", text));
    let mut total_s: u64 = days.parse::<u64>().ok()?.checked_mul(24)?;
    let mut parts = 0;
    for part in clock.split(':') {
        let part: u64 = part.parse().ok()?;
        total_s = match parts {
            0 => total_s.checked_add(part)?,
            _ => total_s.checked_mul(60)?.checked_add(part)?,
        };
        parts += 1;
    }
    (parts == 3).then_some(total_s)
}

/// Runs one of Slurm's programs and returns its output; the error is its own message.
fn output(mut command: Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("start {program}: {error}"))?;
    let deadline = Instant::now() + PATIENCE;
    // The output is shorter than a pipe's capacity, so the program does not wait for a reader.
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => thread::sleep(TICK),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!(
                    "{program} has not answered for {} s",
                    PATIENCE.as_secs()
                ));
            }
            Err(error) => return Err(format!("wait for {program}: {error}")),
        }
    };
    let mut said = Vec::new();
    let mut complaint = Vec::new();
    if let Some(mut stdout) = child.stdout.take() {
        let _ = stdout.read_to_end(&mut said);
    }
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_end(&mut complaint);
    }
    let said = String::from_utf8_lossy(&said).into_owned();
    if status.success() {
        return Ok(said);
    }
    let complaint = String::from_utf8_lossy(&complaint);
    let words = format!("{} {}", said.trim(), complaint.trim());
    Err(format!("{program}: {}", words.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns output of scontrol of Slurm 22.05.8 with SLURM_TIME_FORMAT=%s.
    fn shown(state: &str, restarts: u32, end: &str, preempt: &str) -> String {
        format!(
            "JobId=6 JobName=a JobState=CANCELLED\n   UserId=root(0) GroupId=root(0) MCS_label=N/A\n   \
             JobState={state} Reason=None Dependency=(null)\n   \
             Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0\n   \
             RunTime=00:00:03 TimeLimit=00:01:00 TimeMin=N/A\n   \
             SubmitTime=1795258187 EligibleTime=1795258187\n   \
             StartTime=1795258187 EndTime={end} Deadline=N/A\n   \
             PreemptEligibleTime=1795258187 PreemptTime={preempt}\n   Command=/JobState=FAILED\n"
        )
    }

    #[test]
    fn a_preempted_job_is_told_from_a_running_and_a_requeued_one() {
        let running = State::parse(&shown("RUNNING", 0, "1795258247", "None")).unwrap();
        assert_eq!(
            running,
            State {
                is_running: true,
                restarts: 0,
                preempted: false,
                ends_unix_s: Some(1_795_258_247),
                deadline_unix_s: None,
                timed_out: false,
            }
        );
        let preempted = State::parse(&shown("RUNNING", 0, "1795258210", "1795258190")).unwrap();
        assert!(preempted.preempted);
        for (state, is_running) in [
            ("SIGNALING", true),
            ("COMPLETING", false),
            ("REQUEUED", false),
        ] {
            let state = State::parse(&shown(state, 0, "1795258210", "1795258190")).unwrap();
            assert_eq!((state.is_running, state.preempted), (is_running, true));
        }
        let requeued = State::parse(&shown("COMPLETING", 1, "Unknown", "None")).unwrap();
        assert_eq!((requeued.restarts, requeued.ends_unix_s), (1, None));
        assert!(!requeued.timed_out);
        let over = State::parse(&shown("COMPLETING", 0, "1795258250", "None")).unwrap();
        assert!(over.timed_out);
        let cancelled = State::parse(&shown("COMPLETING", 0, "1795258200", "None")).unwrap();
        assert!(!cancelled.timed_out);
        let by = shown("RUNNING", 0, "1795258250", "None")
            .replace("N/A\n   Preempt", "1795258260\n   Preempt");
        let by = State::parse(&by).unwrap();
        assert_eq!(by.deadline_unix_s, Some(1_795_258_260));
        assert_eq!(State::parse("slurm_load_jobs error: Invalid job id"), None);
    }

    #[test]
    fn limits_have_days_or_none() {
        assert_eq!(limit_s("00:05:00"), Some(300));
        assert_eq!(limit_s("365-00:00:00"), Some(365 * 86_400));
        assert_eq!(limit_s("1-02:03:04"), Some(93_784));
        for none in ["UNLIMITED", "", "5", "1:2", "99999999999999999999-0:0:0"] {
            assert_eq!(limit_s(none), None, "{none}");
        }
    }

    fn environment(more: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        let mut all = vec![("SLURM_JOB_ID", "17"), ("SLURM_CLUSTER_NAME", "north")];
        all.extend(more);
        let all: Vec<(String, String)> = all
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        move |wanted| {
            all.iter()
                .rev()
                .find(|(name, _)| name == wanted)
                .map(|(_, value)| value.clone())
        }
    }

    #[test]
    fn a_job_is_named_by_its_number_unless_it_is_named() {
        let name = |more: &[(&str, &str)], given: Option<&str>| {
            Job::of_environment(environment(more), given)
                .map(|job| (job.lineage, job.restarts, job.named))
                .map_err(|failure| failure.message)
        };
        assert_eq!(name(&[], None), Ok(("slurm/north/17".to_owned(), 0, false)));
        let array = [
            ("SLURM_ARRAY_JOB_ID", "16"),
            ("SLURM_ARRAY_TASK_ID", "3"),
            ("SLURM_RESTART_COUNT", "2"),
        ];
        assert_eq!(
            name(&array, None),
            Ok(("slurm/north/16_3".to_owned(), 2, false))
        );
        assert_eq!(name(&[], Some("a/b")), Ok(("a/b".to_owned(), 0, true)));
        assert!(name(&[], Some("a b")).unwrap_err().contains("no job name"));
        assert!(
            name(&[("SLURM_STEP_ID", "0")], None)
                .unwrap_err()
                .contains("step")
        );
        assert!(
            name(&[("SLURM_JOB_NUM_NODES", "2")], None)
                .unwrap_err()
                .contains("node")
        );
        assert!(
            name(&[("SLURM_JOB_ID", "x")], None)
                .unwrap_err()
                .contains("no Slurm job")
        );
    }

    #[test]
    fn the_batch_script_has_to_become_the_command() {
        let job = Job::of_environment(environment(&[("SLURM_TASK_PID", "40")]), None).unwrap();
        assert!(job.check_process(40).is_ok());
        assert!(job.check_process(41).is_err());
        let untold = Job::of_environment(environment(&[]), None).unwrap();
        assert!(untold.check_process(41).is_ok());
    }

    #[test]
    fn a_program_that_fails_or_is_not_there_says_so() {
        let mut failing = Command::new("sh");
        failing.args(["-c", "echo no such job >&2; exit 1"]);
        assert_eq!(output(failing).unwrap_err(), "sh: no such job");
        assert!(
            output(Command::new("/nonexistent/scontrol"))
                .unwrap_err()
                .contains("start")
        );
    }
}
