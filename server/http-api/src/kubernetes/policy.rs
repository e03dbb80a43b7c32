//! Policy that the operator of a kube-scheduler has put into the paths of its extender.
//!
//! kube-scheduler has chosen the victims of each node, and all of a node go. So what is left to a policy is how they
//! go, which is what their loss follows from, or, where a policy chooses the job first, whose task goes first.

use std::collections::BTreeMap;
use std::time::Duration;

use permafrost_api_types::batch::MOST;
use permafrost_api_types::cost::ReplyDetail;
use permafrost_api_types::preempt::{Preempt, PreemptAnswer};
use permafrost_api_types::problem::ProblemKind;
use permafrost_api_types::quantity::{Count, Seconds};
use permafrost_api_types::task::{Resources, Task};
use permafrost_scheduling::policy::{Name, VictimFate};
use permafrost_store::clock::unix_ms;

use super::inner::{Inner, Refused, read};
use super::preempt::rank;
use super::types::{MetaVictims, Pod, Victims};

/// Returns the policy of a path.
///
/// # Errors
/// There is none of this name, or it does not end pods, as kube-scheduler does.
pub(super) fn named(name: &str) -> Result<Name, Refused> {
    let policy: Name = name
        .parse()
        .map_err(|unknown| Refused::new(ProblemKind::Invalid, format!("{unknown}")))?;
    if policy.victims() == VictimFate::Stays {
        let detail = format!(
            "kube-scheduler ends the pods that it preempts, and the policy {policy} lets them stay on their node"
        );
        return Err(Refused::new(ProblemKind::Invalid, detail));
    }
    Ok(policy)
}

/// Returns the losses of the victims of one machine under a policy, by their ids: none where the policy lacks a figure.
pub(super) async fn of_machine(
    inner: &Inner,
    policy: Name,
    victims: &[Task<'_>],
) -> Result<BTreeMap<String, Loss>, Refused> {
    let candidates: Vec<Task<'_>> = victims.iter().map(alike).collect();
    let all = Count::try_from(candidates.len() as u64).unwrap_or(Count::MAX);
    let Some(answer) = decisions(inner, policy, candidates, all).await? else {
        return Ok(BTreeMap::new());
    };
    let answer: PreemptAnswer<'_> = read(&answer)?;
    let decisions = answer.decisions.iter().flatten();
    Ok(decisions
        .filter_map(|decision| {
            let cost = decision.cost.as_ref()?;
            let loss = Loss {
                overhead_s: cost.overhead_s.p50,
                delay_s: cost.delay_s.p95,
            };
            Some((decision.task.to_string(), loss))
        })
        .collect())
}

/// Cost of the way in which a policy preempts a victim.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Loss {
    /// Time that the victim loses, seconds.
    pub(super) overhead_s: f64,
    /// Time until it has left its node, seconds, at the 95th percentile.
    pub(super) delay_s: f64,
}

/// Keeps, of machines that the scheduler ranks as equal, the one whose victim the policy takes first, by its choice of
/// a job and then of a task. Where it lacks a figure of a victim all of these machines are kept.
pub(super) async fn first(
    inner: &Inner,
    policy: Name,
    victims: &BTreeMap<String, Victims>,
) -> Result<BTreeMap<String, MetaVictims>, Refused> {
    let now = Duration::from_millis(unix_ms());
    // The choice does not depend on the node.
    let (_, own) = inner.nodes().await?;
    let mut ranks: BTreeMap<(i64, i64), Vec<(&str, &Victims)>> = BTreeMap::new();
    for (machine, of_machine) in victims {
        let equal = ranks.entry(rank(of_machine)).or_default();
        equal.push((machine, of_machine));
    }
    let mut kept = BTreeMap::new();
    for machines in ranks.into_values() {
        let first = first_of(inner, policy, &machines, &own, now).await?;
        for (machine, of_machine) in machines {
            if first.as_deref().is_none_or(|first| first == machine) {
                kept.insert(machine.to_owned(), of_machine.meta());
            }
        }
    }
    Ok(kept)
}

/// Returns the machine whose victim the policy takes first.
async fn first_of(
    inner: &Inner,
    policy: Name,
    machines: &[(&str, &Victims)],
    node: &str,
    now: Duration,
) -> Result<Option<String>, Refused> {
    let mut candidates = Vec::new();
    let mut machine_of = BTreeMap::new();
    for (machine, of_machine) in machines {
        for pod in of_machine.pods.iter().flatten() {
            candidates.push(alike(&of_job(pod, node, now)));
            machine_of.insert(pod.metadata.uid.as_str(), *machine);
        }
    }
    let Some(answer) = decisions(inner, policy, candidates, Count::ONE).await? else {
        return Ok(None);
    };
    let answer: PreemptAnswer<'_> = read(&answer)?;
    let first = answer.decisions.iter().flatten().next();
    let machine = first.and_then(|first| machine_of.get(first.task.as_str()));
    Ok(machine.map(|machine| (*machine).to_owned()))
}

/// Returns a pod as a task of its controller (a Job, a ReplicaSet), with what its annotations tell of its end.
fn of_job<'a>(pod: &'a Pod, node: &'a str, now: Duration) -> Task<'a> {
    let age = pod.age(now);
    let seconds = |time: Duration| Seconds::new(time.as_secs_f64()).ok();
    let remaining = pod.work().zip(age);
    Task {
        id: pod.metadata.uid.as_str().into(),
        node: Some(node.into()),
        group: Some(pod.controller().into()),
        progress_s: age.and_then(seconds),
        remaining_s: remaining.and_then(|(work, age)| seconds(work.saturating_sub(age))),
        deadline_s: pod.deadline(now).and_then(seconds),
        ..Task::default()
    }
}

/// Returns a task that counts as much as any other, as all that are chosen go: it holds a thousandth of a processor.
/// A policy heeds no grace time; the caller does.
fn alike<'a>(task: &Task<'a>) -> Task<'a> {
    Task {
        holds: Resources {
            cpu_millis: Count::ONE,
            ..Resources::default()
        },
        grace_s: None,
        ..task.clone()
    }
}

/// Asks for the decisions of a policy that takes as many of these tasks; none where it lacks a figure of one.
async fn decisions(
    inner: &Inner,
    policy: Name,
    candidates: Vec<Task<'_>>,
    cpu_millis: Count,
) -> Result<Option<axum::body::Bytes>, Refused> {
    if candidates.is_empty() {
        return Ok(None);
    }
    // Refused as a missing figure is, with another meaning.
    if candidates.len() > MOST {
        let detail = format!("{} victims, at most {MOST} are taken", candidates.len());
        return Err(Refused::new(ProblemKind::TooMany, detail));
    }
    let request = Preempt {
        candidates,
        wanted: Some(Resources {
            cpu_millis,
            ..Resources::default()
        }),
        policy: Some(policy.as_str().into()),
        detail: ReplyDetail::Totals,
        ..Preempt::default()
    };
    match inner.post("/v1/preempt", &request).await {
        Ok(answer) => Ok(Some(answer)),
        Err(refused) if refused.is_invalid() => Ok(None),
        Err(refused) => Err(refused),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hyper_util::service::TowerToHyperService;
    use serde_json::{Value, json};

    use super::super::tests::{Three, ago, pod, posted, six, victim};
    use super::*;
    use crate::caller::Caller;
    use crate::{Api, router};

    fn policy(name: &str) -> Name {
        name.parse().unwrap()
    }

    async fn kept(policy: &str, victims: &Value) -> Vec<String> {
        let body = json!({"Pod": pod(json!({})), "NodeNameToVictims": victims});
        let verb = format!("policies/{policy}/preempt");
        let (status, answer) = posted(false, &verb, &body.to_string()).await;
        assert_eq!(status, 200, "{answer}");
        let kept = answer["NodeNameToMetaVictims"].as_object().unwrap();
        kept.keys().cloned().collect()
    }

    fn of(pods: Value) -> Value {
        json!({"Pods": pods, "NumPDBViolations": 0})
    }

    /// Makes a pod with a job that has worked for a time.
    fn working(uid: &str, seconds: u64, memory: &str) -> Value {
        let mut pod = victim(uid, &ago(seconds), 0, Some("other"));
        pod["spec"]["containers"] = json!([{"resources": {"requests": {"memory": memory}}}]);
        pod["spec"]["terminationGracePeriodSeconds"] = json!(3600);
        pod
    }

    #[tokio::test]
    async fn a_name_that_is_no_policy_and_one_that_ends_no_pod_are_refused() {
        for (name, why) in [
            ("fifo", "there is no policy"),
            ("mdf+llf", "undo"),
            ("", "there is no policy"),
            ("gp", "lets them stay"),
            ("ip", "lets them stay"),
            ("suspend", "lets them stay"),
        ] {
            for verb in ["filter", "prioritize", "preempt"] {
                let path = format!("policies/{name}/{verb}");
                let (status, problem) = posted(false, &path, "{}").await;
                assert_eq!(status, 422, "{path}: {problem}");
                let detail = problem["detail"].as_str().unwrap();
                assert!(detail.contains(why), "{path}: {detail}");
            }
        }
    }

    #[tokio::test]
    async fn the_policy_says_how_victims_go() {
        // 20 s for a dump and a restore on n1, 2 s on n3.
        let victims = json!({
            "n1": of(json!([working("a", 5, "10Gi")])),
            "n3": of(json!([working("b", 60, "1Gi")])),
        });
        assert_eq!(kept("kill", &victims).await, ["n1"]);
        assert_eq!(kept("basic", &victims).await, ["n3"]);
        // Algorithm 1 kills the first for 5 s, and dumps the second for 2 s.
        assert_eq!(kept("li2015+local", &victims).await, ["n3"]);
        assert_eq!(kept("adaptive", &victims).await, ["n3"]);
        for name in ["wait", "reserve", "pado"] {
            assert!(kept(name, &victims).await.is_empty(), "{name}");
        }
    }

    #[tokio::test]
    async fn dumps_of_a_policy_wait_for_each_other_and_end_within_the_grace_period() {
        let victims = json!({"n1": six("a", json!(30)), "n3": six("b", json!(3600))});
        let victims = serde_json::from_value(victims).unwrap();
        let losses = async |name: &str| {
            let api = router(Api::looked_once(Arc::new(Three { lost: false })));
            let inner = Inner::new(TowerToHyperService::new(api), Caller::local("root"));
            let losses = super::super::preempt::losses(&inner, Some(policy(name)), &victims).await;
            let Ok(losses) = losses else {
                panic!("refused");
            };
            (losses["n1"], losses["n3"])
        };
        let close = |lost: f64, expected: f64| (expected..expected + 30.0).contains(&lost);
        // As without a policy: 10 s a dump, three of which end within 30 s.
        let (n1, n3) = losses("basic").await;
        assert!(close(n1, 4_050.0) && close(n3, 270.0), "{n1}, {n3}");
        let (n1, n3) = losses("kill").await;
        assert!(close(n1, 7_920.0) && close(n3, 7_920.0), "{n1}, {n3}");
    }

    #[tokio::test]
    async fn a_policy_that_chooses_a_job_keeps_the_machine_of_the_task_it_takes_first() {
        let of_job = |uid: &str, controller: &str, work: Value| {
            let mut pod = victim(uid, &ago(100), 0, None);
            let owner = json!({"uid": controller, "controller": true});
            pod["metadata"]["ownerReferences"] = json!([{"uid": "x"}, owner]);
            pod["metadata"]["annotations"] =
                json!({"permafrost.io/work-seconds": work, "permafrost.io/deadline": ago(0)});
            pod
        };
        let victims = |work: Value| {
            json!({
                "n1": of(json!([of_job("a", "large", json!("900"))])),
                "n2": of(json!([of_job("b", "large", work)])),
                "n3": of(json!([of_job("c", "small", json!("300"))])),
            })
        };
        let known = victims(json!("500"));
        assert_eq!(kept("mr+srt", &known).await, ["n2"]);
        assert_eq!(kept("mr+lrt", &known).await, ["n1"]);
        assert_eq!(kept("lr+random", &known).await, ["n3"]);
        // What is left of a task is not known: the scheduler chooses.
        let unknown = victims(json!("some"));
        assert_eq!(kept("mr+srt", &unknown).await, ["n1", "n2", "n3"]);
        assert_eq!(kept("lr+random", &unknown).await, ["n3"]);
    }

    #[tokio::test]
    async fn a_policy_that_stores_sets_the_kind_of_node_that_is_best() {
        let names = json!(["n1", "n2", "n3"]);
        let pod = pod(json!({"permafrost.io/job": "train"}));
        let body = json!({"Pod": pod, "NodeNames": names}).to_string();
        let scores = async |policy: &str| -> Vec<i64> {
            let verb = format!("policies/{policy}/prioritize");
            let (_, answer) = posted(false, &verb, &body).await;
            let scores = answer.as_array().unwrap().iter();
            scores.map(|one| one["Score"].as_i64().unwrap()).collect()
        };
        // n3 holds no copy.
        let [n1, n2, n3] = scores("basic+local").await[..] else {
            panic!()
        };
        assert!(
            n1 == 10 && (5..10).contains(&n2) && n3 == 4,
            "{n1} {n2} {n3}"
        );
        let [n1, n2, n3] = scores("remote").await[..] else {
            panic!()
        };
        assert!(n3 == 10 && n1 == 4 && n2 < 4, "{n1} {n2} {n3}");
        let [n1, n2, n3] = scores("kill").await[..] else {
            panic!()
        };
        assert!(n1 == 10 && n3 > n2, "{n1} {n2} {n3}");
    }
}
