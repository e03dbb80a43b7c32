//! Advice of `permafrostd`: `POST /v1/preempt` with the task alone and the grace time as the longest delay.

use std::time::Duration;

use permafrost_api_types::cost::{Mechanism, ReplyDetail};
use permafrost_api_types::estimate::{EstimateAnswer, EstimateRequest};
use permafrost_api_types::policy::PolicyAction;
use permafrost_api_types::preempt::{Preempt, PreemptAnswer};
use permafrost_api_types::quantity::{Bytes, Count, Seconds};
use permafrost_api_types::task::{Swap, Task};
use permafrost_api_types::text::Text;
use permafrost_criu::origin::ProcessStat;
use permafrost_scheduling::policy::Name;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_transport::api::{ApiClient, ApiOptions};

use super::advice::{Advice, Situation};
use crate::api;
use crate::candidate::{self, Known};

/// Requests advice from the daemon beside the control socket.
///
/// # Errors
/// The daemon does not reply, or does not know the cost of a dump; the latter is no reason to go without one.
pub(super) fn ask(context: &Context, situation: &Situation) -> Result<Advice, Failure> {
    let client = ApiClient::new(&ApiOptions::beside(&context.socket))?;
    let node = api::own_node(&client)?;
    let task = candidate(situation, &node)?;
    match situation.policy.filter(|policy| !policy.is_adaptive()) {
        None => cheapest(&client, situation, task),
        Some(policy) => decided(&client, situation, policy, task),
    }
}

/// Returns the way that costs least within the grace time.
fn cheapest(
    client: &ApiClient,
    situation: &Situation,
    task: Task<'static>,
) -> Result<Advice, Failure> {
    let request = Preempt {
        swaps: leaves_memory(&task),
        candidates: vec![task.clone()],
        longest_delay_s: situation
            .within
            .map(|time| of(time.as_secs_f64()))
            .transpose()?,
        detail: ReplyDetail::Full,
        ..Preempt::default()
    };
    let answer = client.post("/v1/preempt", &request)?;
    let plan: PreemptAnswer<'_> = answer.read()?;
    let Some(victim) = plan.victims.first() else {
        let why = plan.undecided.first().map(|one| one.reason.clone());
        return Err(unknown(&why.unwrap_or_default()));
    };
    let why = victim
        .reason
        .clone()
        .or_else(|| victim.cost.reason.clone())
        .unwrap_or_default();
    if is_stored(victim.mechanism) {
        return Ok(Advice::Checkpoint(why));
    }
    // The API also gives this answer if nothing is known of dumps: a kill always has a cost.
    cost_of_dump(client, task)?;
    Ok(Advice::End(why))
}

/// Returns the decision of a policy. A policy heeds no grace time: a dump that would not end within it is not begun.
fn decided(
    client: &ApiClient,
    situation: &Situation,
    policy: Name,
    mut task: Task<'static>,
) -> Result<Advice, Failure> {
    // A task that has used no processor so far would free nothing.
    task.holds.cpu_millis = task.holds.cpu_millis.max(Count::ONE);
    let time = |time: Option<Duration>| time.map(|time| of(time.as_secs_f64())).transpose();
    task.remaining_s = time(situation.remaining)?;
    task.deadline_s = time(situation.deadline)?;
    let request = Preempt {
        wanted: Some(task.holds),
        policy: Some(policy.as_str().into()),
        swaps: leaves_memory(&task),
        candidates: vec![task],
        detail: ReplyDetail::Full,
        ..Preempt::default()
    };
    let answer = client.post("/v1/preempt", &request)?;
    let answer: PreemptAnswer<'_> = answer.read()?;
    let Some(decision) = answer.decisions.iter().flatten().next() else {
        let why = answer.undecided.first().map(|one| one.reason.clone());
        return Err(unknown(&why.unwrap_or_default()));
    };
    let cost = decision.cost.as_ref();
    let reason = cost.and_then(|cost| cost.reason.as_deref());
    let why = format!(
        "the policy {policy}: {}",
        reason.unwrap_or("its node is wanted")
    );
    let PolicyAction::Preempt(mechanism) = decision.action else {
        return Err(unknown("the policy does not preempt it"));
    };
    if !is_stored(mechanism) {
        return Ok(Advice::End(why));
    }
    let takes_s = cost.map(|cost| cost.delay_s.p95);
    match (takes_s, situation.within) {
        (Some(takes_s), Some(within)) if takes_s > within.as_secs_f64() => {
            Ok(Advice::End(format!(
                "the policy {policy} takes one, which would last {takes_s:.1} s, and {:.1} s are left",
                within.as_secs_f64()
            )))
        }
        _ => Ok(Advice::Checkpoint(why)),
    }
}

/// Returns true if the task is stored by the mechanism. What would wait or stay in memory is stored, too, as its node
/// is taken.
const fn is_stored(mechanism: Mechanism) -> bool {
    match mechanism {
        Mechanism::IncrementalDump
        | Mechanism::FullDump
        | Mechanism::PreCopiedDump
        | Mechanism::SuspendInMemory
        | Mechanism::Wait => true,
        Mechanism::Kill | Mechanism::Rollback => false,
    }
}

/// Returns the machine as one without swap: the job leaves it, so that suspension in its memory is no way.
fn leaves_memory(task: &Task<'static>) -> Vec<Swap<'static>> {
    let swap = |node: &Text<'static>| Swap {
        node: node.clone(),
        free_memory_bytes: Bytes::ZERO,
        free_swap_bytes: Bytes::ZERO,
        write_bytes_per_s: None,
        read_bytes_per_s: None,
    };
    task.node.iter().map(swap).collect()
}

fn candidate(situation: &Situation, node: &str) -> Result<Task<'static>, Failure> {
    let known = Known {
        // The same name as in a dump.
        program: ProcessStat::read(situation.pid).ok().map(|stat| stat.name),
        // The job has the node whether it computes or waits for its files.
        progress: Some(situation.progress),
        ..Known::default()
    };
    let mut task = candidate::task(situation.pid, Some(&situation.job), node, &known)?;
    task.progress_of_this_run = true;
    task.since_checkpoint_s = Some(of(situation.since_checkpoint.as_secs_f64())?);
    Ok(task)
}

/// Fails if the cost of a dump of the task is unknown.
fn cost_of_dump(client: &ApiClient, task: Task<'_>) -> Result<(), Failure> {
    let request = EstimateRequest {
        tasks: vec![task],
        mechanisms: Some(vec![Mechanism::FullDump]),
        ..EstimateRequest::default()
    };
    let answer = client.post("/v1/estimate", &request)?;
    let estimate: EstimateAnswer<'_> = answer.read()?;
    let known = estimate.answers.iter().any(|one| one.cost.is_some());
    if known {
        return Ok(());
    }
    let why = estimate.answers.iter().find_map(|one| one.unknown.as_ref());
    Err(unknown(why.map_or("", |why| why.as_str())))
}

fn unknown(why: &str) -> Failure {
    Failure::new(
        Code::Unavailable,
        format!("what a dump costs is not known: {why}"),
    )
}

fn of(value_s: f64) -> Result<Seconds, Failure> {
    Seconds::new(value_s).map_err(|error| Failure::new(Code::Internal, error.to_string()))
}
