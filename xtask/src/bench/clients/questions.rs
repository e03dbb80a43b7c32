//! Requests of the clients, and checks of the replies.

use anyhow::{Context, Result, bail, ensure};
use permafrost_api_types::cost::{Cost, Part};
use permafrost_api_types::estimate::EstimateAnswer;
use permafrost_api_types::preempt::PreemptAnswer;
use permafrost_tests::daemon::Daemon;
use serde_json::{Value, json};

use super::JOB;
use crate::rig;

/// Mechanisms that an estimate asks for.
const WAYS: [&str; 2] = ["kill", "full_dump"];

/// A request that is sent repeatedly.
#[derive(Clone, Debug)]
pub(super) struct Question {
    /// The whole request, including its head.
    pub(super) request: Vec<u8>,
    pub(super) tasks: usize,
    estimate: bool,
}

impl Question {
    /// Makes preemptions and estimates of so many tasks each.
    pub(super) fn all(daemon: &Daemon, sizes: &[usize]) -> Result<Vec<Self>> {
        let nodes = daemon.json(&["nodes"])?;
        let own = rig::field(&nodes, "answered_by").and_then(Value::as_str);
        let own = own.context("a node's name")?.to_owned();
        let questions = sizes
            .iter()
            .flat_map(|&tasks| [false, true].map(|estimate| Self::new(&own, tasks, estimate)));
        Ok(questions.collect())
    }

    fn new(node: &str, tasks: usize, estimate: bool) -> Self {
        let list: Vec<Value> = (0..tasks)
            .map(|n| {
                // Every other one has a checkpoint.
                let job = if n % 2 == 0 { JOB } else { "another" };
                json!({"id": format!("task-{n}"), "node": node, "job": job,
                    "resident_bytes": (n as u64 % 64 + 1) << 24, "progress_s": n % 4000,
                    "start_s": 2, "holds": {"cpu_millis": 1000, "memory_bytes": (n as u64 % 64 + 1) << 24}})
            })
            .collect();
        let (path, body) = if estimate {
            ("/v1/estimate", json!({"tasks": list, "mechanisms": WAYS}))
        } else {
            ("/v1/preempt", json!({"candidates": list}))
        };
        let body = body.to_string();
        let mut request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        request += &body;
        Self {
            request: request.into_bytes(),
            tasks,
            estimate,
        }
    }

    /// Checks that the reply is plausible: it contains all tasks, and the parts of their costs add up.
    pub(super) fn check(&self, head: &str, body: &[u8]) -> Result<()> {
        let excerpt = || String::from_utf8_lossy(body.get(..300).unwrap_or(body)).into_owned();
        ensure!(head.starts_with("HTTP/1.1 200 "), "{head}\n{}", excerpt());
        let answered = if self.estimate {
            let answer: EstimateAnswer<'_> = serde_json::from_slice(body)?;
            for one in &answer.answers {
                adds_up(one.cost.as_ref().with_context(excerpt)?)?;
            }
            answer.answers.len() / WAYS.len()
        } else {
            let answer: PreemptAnswer<'_> = serde_json::from_slice(body)?;
            for victim in &answer.victims {
                adds_up(&victim.cost)?;
                let next = victim.next.as_ref();
                ensure!(next.is_none_or(|next| next.score_s >= victim.score_s));
            }
            answer.victims.len()
        };
        ensure!(
            answered == self.tasks,
            "{answered} answers to {} tasks: {}",
            self.tasks,
            excerpt()
        );
        Ok(())
    }
}

/// Checks that the overhead of a victim is the sum of all parts during which it does not run.
fn adds_up(cost: &Cost) -> Result<()> {
    let parts = cost.parts.as_ref().context("no parts")?;
    let lost = parts
        .iter()
        .filter(|part| !matches!(part.part, Part::PreCopy | Part::Wait));
    let [p50, p95] = lost.fold([0.0, 0.0], |[p50, p95], part| {
        [p50 + part.p50_s, p95 + part.p95_s]
    });
    let said = cost.overhead_s;
    if (said.p50 - p50).abs() > 1e-6 || (said.p95 - p95).abs() > 1e-6 || said.p95 < said.p50 {
        bail!("{said:?} is not the sum of {parts:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "HTTP/1.1 200 OK\r\n";

    fn answer(overhead_s: f64, victims: usize) -> Vec<u8> {
        let spread = json!({"p50": overhead_s, "p95": overhead_s});
        let part = |part, time| json!({"part": part, "p50_s": time, "p95_s": time});
        let victim = json!({"task": "a", "node": "n", "mechanism": "kill", "score_s": 3.0,
            "frees": {"cpu_millis": 0, "memory_bytes": 0},
            "cost": {"overhead_s": spread, "delay_s": spread, "until_running_s": spread, "age_s": 0.0,
                "parts": [part("pre_copy", 7.0), part("lost_work", 1.0), part("start", 2.0)]}});
        let none = json!({"cpu_millis": 0, "memory_bytes": 0});
        json!({"answered_by": "n", "age_s": 0.0, "victims": vec![victim; victims], "frees": none,
            "lacking": none, "enough": true, "undecided": [], "unknown_node": []})
        .to_string()
        .into_bytes()
    }

    #[test]
    fn an_answer_that_cannot_be_right_is_told() {
        let question = Question::new("n", 2, false);
        question.check(HEAD, &answer(3.0, 2)).unwrap();
        assert!(question.check(HEAD, &answer(3.0, 1)).is_err());
        assert!(question.check(HEAD, &answer(10.0, 2)).is_err());
        let head = "HTTP/1.1 503 Service Unavailable\r\n";
        assert!(question.check(head, &answer(3.0, 2)).is_err());
        assert!(question.check(HEAD, b"{}").is_err());
    }
}
