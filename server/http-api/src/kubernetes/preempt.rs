//! `preempt`: of the nodes where others could be preempted for a pod, keeps those where least would be lost.
//!
//! kube-scheduler has chosen the victims of each node, and of the nodes takes one by itself: the fewest
//! violated disruption budgets, then the least important victim, then sums and counts of priorities and
//! starting times. The first two criteria are kept; the victims' losses replace the others. So dearer nodes are
//! left out only among nodes that are equal in the first two.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use permafrost_api_types::cost::{Mechanism, ReplyDetail};
use permafrost_api_types::estimate::{EstimateAnswer, EstimateRequest};
use permafrost_api_types::preempt::{Preempt, PreemptAnswer};
use permafrost_api_types::quantity::{Bytes, Seconds};
use permafrost_api_types::task::Task;
use permafrost_store::clock::unix_ms;

use super::inner::{Inner, Refused, read};
use super::sites::Sites;
use super::types::{ExtenderPreemptionArgs, ExtenderPreemptionResult, MetaVictims, Pod, Victims};

/// Factor up to which a node's cost counts as equal to that of the cheapest: predictions are no more precise.
const AS_GOOD: f64 = 1.1;

pub(super) async fn preempt(
    inner: &Inner,
    arguments: &ExtenderPreemptionArgs,
) -> Result<ExtenderPreemptionResult, Refused> {
    let Some(victims) = &arguments.node_name_to_victims else {
        // UIDs alone are not enough: the choice is left to the scheduler.
        return Ok(ExtenderPreemptionResult {
            node_name_to_meta_victims: arguments
                .node_name_to_meta_victims
                .clone()
                .unwrap_or_default(),
        });
    };
    let losses = losses(inner, victims).await?;
    Ok(ExtenderPreemptionResult {
        node_name_to_meta_victims: spared(victims, &losses),
    })
}

/// Returns the total loss of the victims of each machine, seconds. Machines with a victim of unknown loss are
/// left out.
async fn losses<'a>(
    inner: &Inner,
    victims: &'a BTreeMap<String, Victims>,
) -> Result<HashMap<&'a str, f64>, Refused> {
    let (nodes, own) = inner.nodes().await?;
    let sites = Sites::new(&nodes);
    let now = Duration::from_millis(unix_ms());
    // Pods with a job are dumped if that costs less; the others are killed.
    let (mut dumped, mut killed) = (Vec::new(), Vec::new());
    for (machine, victims) in victims {
        // A machine that keeps no images dumps to a node that does; only its agent knows which.
        let node = sites.on(machine).map_or(own.as_str(), |node| &node.name);
        for pod in victims.pods.iter().flatten() {
            let tasks = if pod.job().is_some() {
                &mut dumped
            } else {
                &mut killed
            };
            tasks.push(task(pod, node, now));
        }
    }
    let mut of_pod = of_dumped(inner, dumped).await?;
    of_pod.extend(of_killed(inner, killed).await?);
    let mut losses = HashMap::new();
    for (machine, victims) in victims {
        let pods = victims.pods.iter().flatten();
        let sum = pods
            .map(|pod| of_pod.get(&pod.metadata.uid).copied())
            .sum::<Option<f64>>();
        if let Some(sum) = sum {
            losses.insert(machine.as_str(), sum);
        }
    }
    Ok(losses)
}

/// Returns a pod as a task of `node`. Unknown memory is predicted from its job's past.
fn task<'a>(pod: &'a Pod, node: &'a str, now: Duration) -> Task<'a> {
    // The annotation may name a checkpoint: only its job is used.
    let job = pod.job().map(|job| job.split('@').next().unwrap_or(job));
    let resident = pod.requested_bytes().filter(|_| job.is_some());
    let progress = pod.age(now).map(|age| Seconds::new(age.as_secs_f64()));
    Task {
        id: pod.metadata.uid.as_str().into(),
        node: Some(node.into()),
        job: job.map(Into::into),
        program: pod.program().map(Into::into),
        resident_bytes: resident.and_then(|bytes| Bytes::try_from(bytes).ok()),
        // The start of the pod counts as the start of its task.
        progress_s: progress.and_then(Result::ok),
        progress_of_this_run: true,
        grace_s: Seconds::new(pod.grace_s()).ok(),
        ..Task::default()
    }
}

/// Returns the cost of the best mechanism for each task.
async fn of_dumped(
    inner: &Inner,
    candidates: Vec<Task<'_>>,
) -> Result<HashMap<String, f64>, Refused> {
    if candidates.is_empty() {
        return Ok(HashMap::new());
    }
    let preempt = Preempt {
        candidates,
        detail: ReplyDetail::Totals,
        ..Preempt::default()
    };
    let answer = inner.post("/v1/preempt", &preempt).await?;
    let answer: PreemptAnswer<'_> = read(&answer)?;
    let victims = answer.victims.iter();
    Ok(victims
        .map(|victim| (victim.task.to_string(), victim.score_s))
        .collect())
}

/// Returns the cost of a kill for each task.
async fn of_killed(inner: &Inner, tasks: Vec<Task<'_>>) -> Result<HashMap<String, f64>, Refused> {
    if tasks.is_empty() {
        return Ok(HashMap::new());
    }
    let estimate = EstimateRequest {
        tasks,
        mechanisms: Some(vec![Mechanism::Kill]),
        detail: ReplyDetail::Totals,
        ..EstimateRequest::default()
    };
    let answer = inner.post("/v1/estimate", &estimate).await?;
    let answer: EstimateAnswer<'_> = read(&answer)?;
    let answers = answer.answers.iter();
    Ok(answers
        .filter_map(|one| Some((one.task.to_string(), one.cost.as_ref()?.overhead_s.p50)))
        .collect())
}

/// Leaves out the nodes that cost more than others which the scheduler ranks as equal.
fn spared(
    victims: &BTreeMap<String, Victims>,
    losses: &HashMap<&str, f64>,
) -> BTreeMap<String, MetaVictims> {
    let rank = |victims: &Victims| (victims.pdb_violations, victims.highest_priority());
    let mut cheapest: HashMap<(i64, i64), f64> = HashMap::new();
    for (machine, of_machine) in victims {
        if let Some(loss) = losses.get(machine.as_str()) {
            let least = cheapest.entry(rank(of_machine)).or_insert(*loss);
            *least = least.min(*loss);
        }
    }
    let keep = |machine: &str, of_machine: &Victims| match (
        losses.get(machine),
        cheapest.get(&rank(of_machine)),
    ) {
        (Some(loss), Some(least)) => *loss <= least * AS_GOOD,
        // A node of unknown cost is no better than one that is known to be cheap.
        (None, Some(_)) => false,
        (_, None) => true,
    };
    victims
        .iter()
        .filter(|(machine, of_machine)| keep(machine, of_machine))
        .map(|(machine, of_machine)| (machine.clone(), of_machine.meta()))
        .collect()
}
