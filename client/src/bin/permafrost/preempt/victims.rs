//! The victims of a plan as processes of this machine.

use std::collections::{BTreeMap, BTreeSet};

use permafrost_api_types::cost::Mechanism;
use permafrost_api_types::preempt::PreemptAnswer;
use permafrost_api_types::task::{Resources, Task};
use permafrost_criu::handles::ProcessHandle;
use permafrost_criu::origin;
use permafrost_terminal::failure::{Code, Failure};
use rustix::io::Errno;
use serde_json::Value;

use super::{Outcome, PreemptedVictim};
use crate::candidate::PidOfJob;
use crate::plan::decisions as plan;
use permafrost_terminal::words;

/// Jobs and processes of tasks, by the ids of the tasks.
#[derive(Debug, Default)]
pub(super) struct Known(BTreeMap<String, KnownTask>);

#[derive(Debug, Default)]
struct KnownTask {
    job: Option<String>,
    /// Process as the request describes it, `BOOT_ID/START_TICKS`.
    process: Option<String>,
}

/// A victim that may be preempted.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) task: String,
    node: String,
    pub(super) mechanism: Mechanism,
    frees: Resources,
    /// Root of its tree, or the reason why nothing can be done to it.
    pub(super) pid: Result<u32, String>,
    pub(super) job: Option<String>,
    /// Process that is meant, as the request describes it, else as it was when the plan was read; `None` if it had
    /// ended by then.
    process: Option<String>,
}

/// Opens the process that has a pid now, and describes it as a request does. Returns `None` if it has ended, reaped or
/// not; every other reason why it cannot be opened is a failure.
fn open(pid: u32) -> Result<Option<(ProcessHandle, String)>, Failure> {
    let handle = match ProcessHandle::open(pid) {
        Ok(handle) => handle,
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return Ok(None),
        Err(error) => {
            let message = format!("open process {pid}: {error}");
            return Err(Failure::new(Code::Internal, message));
        }
    };
    let process = origin::process(pid);
    // While the opened process lives, its pid is not another's: what was read is of it.
    if handle.has_ended() {
        return Ok(None);
    }
    Ok(Some((handle, process?)))
}

/// Reads a plan.
pub(super) fn read(answer: &Value) -> Result<PreemptAnswer<'static>, Failure> {
    // From text: an answer borrows from it where it can.
    let text = answer.to_string();
    let plan: PreemptAnswer<'_> = serde_json::from_str(&text).map_err(|error| {
        Failure::new(Code::Invalid, format!("this is no plan: {error}"))
            .hint("permafrost plan preempt --json prints one")
    })?;
    let carried_out = |task: &permafrost_api_types::text::Text<'_>| {
        (plan.victims.iter()).any(|victim| victim.task.as_str() == task.as_str())
    };
    let mut decisions = plan.decisions.iter().flatten();
    if let Some(other) = decisions.find(|decision| !carried_out(&decision.task)) {
        let (task, action) = (&other.task, plan::action(&other.action));
        let message =
            format!("this command does not carry out what is decided on {task}: {action}");
        return Err(Failure::new(Code::Invalid, message)
            .hint("permafrost shrink takes resources of a task that runs on"));
    }
    let owned = |text: &permafrost_api_types::text::Text<'_>| text.as_str().to_owned().into();
    let victims = plan.victims.into_iter().map(|victim| {
        let (task, node) = (owned(&victim.task), owned(&victim.node));
        permafrost_api_types::preempt::Victim {
            task,
            node,
            mechanism: victim.mechanism,
            frees: victim.frees,
            score_s: victim.score_s,
            cost: victim.cost,
            next: victim.next,
            reason: victim.reason,
        }
    });
    Ok(PreemptAnswer {
        answered_by: owned(&plan.answered_by),
        age_s: plan.age_s,
        victims: victims.collect(),
        frees: plan.frees,
        lacking: plan.lacking,
        enough: plan.enough,
        decisions: None,
        undecided: Vec::new(),
        unknown_node: Vec::new(),
    })
}

impl Known {
    /// Adds the processes of `--pid`, whose tasks are named by their pids.
    pub(super) fn add_pids(&mut self, pids: &[PidOfJob]) {
        for one in pids {
            let task = self.0.entry(one.pid.to_string()).or_default();
            task.job.clone_from(&one.job);
        }
    }

    /// Adds the candidates of a request.
    pub(super) fn add_request(&mut self, request: &Value) -> Result<(), Failure> {
        let candidates = request
            .get("candidates")
            .cloned()
            .unwrap_or_default()
            .to_string();
        let tasks: Vec<Task<'_>> = serde_json::from_str(&candidates)
            .map_err(|error| Failure::new(Code::Invalid, format!("the candidates: {error}")))?;
        for task in tasks {
            let known = self.0.entry(task.id.as_str().to_owned()).or_default();
            known.job = task
                .job
                .map(|job| job.as_str().to_owned())
                .or(known.job.take());
            known.process = task.process.map(|process| process.as_str().to_owned());
        }
        Ok(())
    }

    /// Returns the victims of a plan, with what is known of them. `is_answer` is true for the answer to a request that
    /// is known here: a victim that it did not name is not touched.
    pub(super) fn planned(
        &self,
        plan: &PreemptAnswer<'_>,
        own_node: &str,
        is_answer: bool,
    ) -> Result<Vec<Planned>, Failure> {
        if plan.victims.is_empty() {
            return Err(Failure::new(Code::NotEnough, "the plan has no victim"));
        }
        let mut tasks = BTreeSet::new();
        if let Some(twice) = (plan.victims.iter()).find(|one| !tasks.insert(one.task.as_str())) {
            let message = format!("task {} appears twice in the plan", twice.task.as_str());
            return Err(Failure::new(Code::Invalid, message)
                .hint("permafrost plan preempt --json prints each victim once"));
        }
        let planned = plan.victims.iter().map(|victim| {
            let known = self.0.get(victim.task.as_str());
            let mut planned = Planned {
                task: victim.task.as_str().to_owned(),
                node: victim.node.as_str().to_owned(),
                mechanism: victim.mechanism,
                frees: victim.frees,
                pid: Err(String::new()),
                job: known.and_then(|known| known.job.clone()),
                process: known.and_then(|known| known.process.clone()),
            };
            planned.pid = match known {
                None if is_answer => Err("it was not asked about".to_owned()),
                _ => pid_of(&planned, own_node),
            };
            if let (Ok(pid), None) = (&planned.pid, &planned.process) {
                match open(*pid) {
                    Ok(opened) => planned.process = opened.map(|(_, process)| process),
                    Err(failure) => planned.pid = Err(failure.message),
                }
            }
            planned
        });
        Ok(planned.collect())
    }
}

fn pid_of(planned: &Planned, own_node: &str) -> Result<u32, String> {
    if planned.node != own_node {
        return Err(format!(
            "it is on node {}, and this machine is {own_node}: run the plan there, too",
            planned.node
        ));
    }
    match planned.task.parse() {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => Err(format!(
            "{:?} is no pid: tasks of a plan that is carried out are named by their pids",
            planned.task
        )),
    }
}

impl Planned {
    pub(super) fn is_waited_for(&self) -> bool {
        self.mechanism == Mechanism::Wait
    }

    /// Opens the process that is meant. Returns `None` if it has ended, also if its pid has passed to another process.
    pub(super) fn open(&self, pid: u32) -> Result<Option<ProcessHandle>, Failure> {
        let is_meant = |(_, process): &(_, String)| self.process.as_ref() == Some(process);
        Ok(open(pid)?.filter(is_meant).map(|(handle, _)| handle))
    }

    /// Returns the report of a victim; `error` where it was not preempted.
    pub(super) fn report(&self, outcome: Outcome, error: Option<String>) -> PreemptedVictim {
        let is_free = matches!(outcome, Outcome::Done | Outcome::Finished);
        let frees = if is_free {
            self.frees
        } else {
            Resources::default()
        };
        PreemptedVictim {
            task: self.task.clone(),
            node: self.node.clone(),
            pid: self.pid.as_ref().ok().copied(),
            mechanism: words::name(self.mechanism),
            outcome,
            cpu_millis: frees.cpu_millis.value(),
            memory_bytes: frees.memory_bytes.count(),
            checkpoint: None,
            error,
            next: None,
            elapsed_us: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plan(victims: &[(&str, &str, &str)]) -> Value {
        let spread = json!({"p50": 1.0, "p95": 1.0});
        let victims: Vec<Value> = (victims.iter())
            .map(|(task, node, mechanism)| {
                json!({
                    "task": task, "node": node, "mechanism": mechanism, "score_s": 1.0,
                    "frees": {"cpu_millis": 500, "memory_bytes": 1 << 20},
                    "cost": {"overhead_s": spread, "delay_s": spread, "until_running_s": spread, "age_s": 0.0}
                })
            })
            .collect();
        let total = json!({"cpu_millis": 0, "memory_bytes": 0});
        json!({
            "answered_by": "n1", "age_s": 0.1, "victims": victims, "frees": total, "lacking": total,
            "enough": true, "undecided": [], "unknown_node": []
        })
    }

    #[test]
    fn victims_are_processes_of_this_node_with_their_jobs() {
        let own = std::process::id();
        let answer = plan(&[
            (&own.to_string(), "n1", "full_dump"),
            ("5000000", "n1", "kill"),
            ("7", "n2", "kill"),
            ("web-1", "n1", "wait"),
        ]);
        let mut known = Known::default();
        known.add_pids(&[PidOfJob {
            pid: own,
            job: Some("train".to_owned()),
        }]);
        let answer = read(&answer).unwrap();
        let planned = known.planned(&answer, "n1", false).unwrap();
        assert_eq!(planned[0].pid, Ok(own));
        assert_eq!(planned[0].job.as_deref(), Some("train"));
        assert!(planned[0].open(own).unwrap().is_some());
        assert!(planned[1].open(5_000_000).unwrap().is_none());
        assert!(planned[2].pid.as_ref().unwrap_err().contains("n2"));
        assert!(planned[3].pid.as_ref().unwrap_err().contains("web-1"));
        assert!(planned[3].is_waited_for());
        // A pid that cannot be opened has not ended for that.
        let answer = read(&plan(&[("4294967295", "n1", "kill")])).unwrap();
        let planned = known.planned(&answer, "n1", false).unwrap();
        let refused = planned[0].pid.as_ref().unwrap_err();
        assert!(refused.contains("open process 4294967295"), "{refused}");
    }

    #[test]
    fn a_victim_that_was_not_asked_about_or_appears_twice_is_refused() {
        let own = std::process::id().to_string();
        let mut known = Known::default();
        known
            .add_request(&json!({"candidates": [{"id": own}]}))
            .unwrap();
        let both = read(&plan(&[(&own, "n1", "kill"), ("1", "n1", "kill")])).unwrap();
        let planned = known.planned(&both, "n1", true).unwrap();
        assert!(planned[0].pid.is_ok());
        assert_eq!(planned[1].pid, Err("it was not asked about".to_owned()));
        // A plan that is read may be of another request.
        assert_eq!(known.planned(&both, "n1", false).unwrap()[1].pid, Ok(1));
        let twice = read(&plan(&[(&own, "n1", "kill"), (&own, "n1", "wait")])).unwrap();
        let failure = known.planned(&twice, "n1", true).unwrap_err();
        assert_eq!(failure.code, Code::Invalid);
        assert!(failure.message.contains("twice"), "{}", failure.message);
    }

    #[test]
    fn a_pid_that_has_passed_on_is_a_task_that_has_ended() {
        let pid = std::process::id();
        let own = pid.to_string();
        let request =
            |process: &str| json!({"candidates": [{"id": own, "job": "a", "process": process}]});
        let answer = read(&plan(&[(&own, "n1", "kill")])).unwrap();
        for (process, has_ended) in [
            (origin::process(pid).unwrap(), false),
            ("0b8e/77".to_owned(), true),
        ] {
            let mut known = Known::default();
            known.add_request(&request(&process)).unwrap();
            let planned = known.planned(&answer, "n1", true).unwrap();
            let opened = planned[0].open(pid).unwrap();
            assert_eq!(opened.is_none(), has_ended, "{process}");
        }
    }

    #[test]
    fn a_plan_with_a_decision_that_is_not_carried_out_is_refused() {
        let mut decided = plan(&[("7", "n1", "kill")]);
        let decision = |task: &str, action: Value| {
            json!({"task": task, "node": "n1", "action": action, "score": {"order": 0},
                   "reason": "so it is", "frees": {"cpu_millis": 1, "memory_bytes": 0}})
        };
        let kill = decision("7", json!({"preempt": "kill"}));
        decided["decisions"] = json!([kill.clone()]);
        assert_eq!(read(&decided).unwrap().victims.len(), 1);
        let to = json!({"resize": {"cpu_millis": 2000, "memory_bytes": 0}});
        decided["decisions"] = json!([kill, decision("8", to)]);
        let failure = read(&decided).unwrap_err();
        assert_eq!(failure.code, Code::Invalid);
        assert!(
            failure.message.contains("8: resize to 2 cpus"),
            "{}",
            failure.message
        );
    }

    #[test]
    fn what_is_no_plan_is_refused() {
        for bad in [
            json!({}),
            json!({"victims": []}),
            json!([]),
            json!({"victims": "x"}),
        ] {
            assert_eq!(read(&bad).unwrap_err().code, Code::Invalid, "{bad}");
        }
        let mut torn = plan(&[("7", "n1", "kill")]);
        torn["victims"][0]["mechanism"] = json!("melt");
        assert!(read(&torn).unwrap_err().message.contains("melt"));
        let none = Known::default()
            .planned(&read(&plan(&[])).unwrap(), "n1", false)
            .unwrap_err();
        assert_eq!(none.code, Code::NotEnough);
        let mut known = Known::default();
        assert!(
            known
                .add_request(&json!({"candidates": [{"id": 7}]}))
                .is_err()
        );
    }
}
