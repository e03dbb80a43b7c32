//! `preempt`: of the nodes where others could be preempted for a pod, keeps those where least would be lost.
//!
//! kube-scheduler has chosen the victims of each node, and of the nodes takes one by itself: the fewest
//! violated disruption budgets, then the least important victim, then sums and counts of priorities and
//! starting times. The first two criteria are kept; the victims' losses replace the others. So dearer nodes are
//! left out only among nodes that are equal in the first two. A policy may say how the victims go, or whose go first
//! ([`super::policy`]).

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use permafrost_api_types::cost::{Mechanism, ReplyDetail};
use permafrost_api_types::estimate::{EstimateAnswer, EstimateRequest};
use permafrost_api_types::preempt::{Preempt, PreemptAnswer};
use permafrost_api_types::quantity::{Bytes, Seconds};
use permafrost_api_types::task::{Swap, Task};
use permafrost_api_types::text::Text;
use permafrost_scheduling::policy::{Name, VictimFate};
use permafrost_store::clock::unix_ms;

use super::inner::{Inner, Refused, read};
use super::policy;
use super::sites::Sites;
use super::types::{ExtenderPreemptionArgs, ExtenderPreemptionResult, MetaVictims, Pod, Victims};

/// Factor up to which a node's cost counts as equal to that of the cheapest: predictions are no more precise.
const AS_GOOD: f64 = 1.1;

pub(super) async fn preempt(
    inner: &Inner,
    policy: Option<Name>,
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
    let kept = match policy {
        Some(policy) if policy.victims() == VictimFate::Untouched => BTreeMap::new(),
        Some(policy) if policy.chooses_job() => policy::first(inner, policy, victims).await?,
        _ => spared(victims, &losses(inner, policy, victims).await?),
    };
    Ok(ExtenderPreemptionResult {
        node_name_to_meta_victims: kept,
    })
}

/// Returns the total loss of the victims of each machine, seconds: they all go, so their dumps wait for each other, and
/// of a long queue only the dumps that end within the grace period save anything. The policy says how each goes, by
/// default the way that costs least. Machines with a victim of unknown loss are left out.
pub(super) async fn losses<'a>(
    inner: &Inner,
    policy: Option<Name>,
    victims: &'a BTreeMap<String, Victims>,
) -> Result<HashMap<&'a str, f64>, Refused> {
    let (nodes, own) = inner.nodes().await?;
    let sites = Sites::new(&nodes);
    let now = Duration::from_millis(unix_ms());
    // Pods with a job are dumped if that costs less; the others are killed.
    let (mut dumped, mut killed) = (Vec::new(), Vec::new());
    let mut together = Vec::with_capacity(victims.len());
    for (machine, victims) in victims {
        // A machine that keeps no images dumps to a node that does; only its agent knows which.
        let node = sites.on(machine).map_or(own.as_str(), |node| &node.name);
        let before = dumped.len();
        for pod in victims.pods.iter().flatten() {
            let tasks = if pod.job().is_some() {
                &mut dumped
            } else {
                &mut killed
            };
            tasks.push(task(pod, node, now));
        }
        // A request has at most 10,000 candidates, or is refused.
        let of_machine = before..dumped.len();
        together.push(of_machine.filter_map(|at| u32::try_from(at).ok()).collect());
    }
    let mut of_pod = match policy.filter(|policy| !policy.is_adaptive()) {
        None => of_dumped(inner, dumped, together).await?,
        Some(policy) => under(inner, policy, dumped, &together, &mut killed).await?,
    };
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

/// Returns the losses of tasks under a policy, those of a machine together. Tasks whose way would not end within their
/// grace period go to `killed`.
async fn under<'a>(
    inner: &Inner,
    policy: Name,
    tasks: Vec<Task<'a>>,
    together: &[Vec<u32>],
    killed: &mut Vec<Task<'a>>,
) -> Result<HashMap<String, f64>, Refused> {
    let mut tasks = tasks.into_iter();
    let mut losses = HashMap::new();
    for places in together {
        let of_machine: Vec<Task<'a>> = tasks.by_ref().take(places.len()).collect();
        let of = policy::of_machine(inner, policy, &of_machine).await?;
        for task in of_machine {
            let Some(loss) = of.get(task.id.as_str()) else {
                continue;
            };
            if task
                .grace_s
                .is_some_and(|grace| loss.delay_s > grace.value())
            {
                killed.push(task);
            } else {
                losses.insert(task.id.to_string(), loss.overhead_s);
            }
        }
    }
    Ok(losses)
}

/// Returns the cost of the best mechanism for each task, those of a machine together.
async fn of_dumped(
    inner: &Inner,
    candidates: Vec<Task<'_>>,
    together: Vec<Vec<u32>>,
) -> Result<HashMap<String, f64>, Refused> {
    if candidates.is_empty() {
        return Ok(HashMap::new());
    }
    let preempt = Preempt {
        swaps: not_suspended(&candidates),
        candidates,
        together,
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

/// Returns machines without swap for the nodes of these tasks: kube-scheduler ends pods, and stops none in memory.
fn not_suspended<'a>(tasks: &[Task<'a>]) -> Vec<Swap<'a>> {
    let nodes = tasks.iter().filter_map(|task| task.node.as_ref());
    let nodes: BTreeMap<&str, &Text<'a>> = nodes.map(|node| (node.as_str(), node)).collect();
    let swap = |node: &Text<'a>| Swap {
        node: node.clone(),
        free_memory_bytes: Bytes::ZERO,
        free_swap_bytes: Bytes::ZERO,
        write_bytes_per_s: None,
        read_bytes_per_s: None,
    };
    nodes.into_values().map(swap).collect()
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

/// Returns what kube-scheduler ranks nodes by before anything that depends on the victims' losses; the least is best.
pub(super) fn rank(victims: &Victims) -> (i64, i64) {
    (victims.pdb_violations, victims.highest_priority())
}

/// Leaves out the nodes that cost more than others which the scheduler ranks as equal.
fn spared(
    victims: &BTreeMap<String, Victims>,
    losses: &HashMap<&str, f64>,
) -> BTreeMap<String, MetaVictims> {
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
