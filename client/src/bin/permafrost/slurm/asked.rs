//! Advice of `permafrostd`: `POST /v1/preempt` with the task alone and the grace time as the longest delay.

use permafrost_api_types::cost::{Mechanism, ReplyDetail};
use permafrost_api_types::estimate::{EstimateAnswer, EstimateRequest};
use permafrost_api_types::preempt::{Preempt, PreemptAnswer};
use permafrost_api_types::quantity::Seconds;
use permafrost_api_types::task::Task;
use permafrost_criu::origin::ProcessStat;
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
    let request = Preempt {
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
    match victim.mechanism {
        Mechanism::IncrementalDump
        | Mechanism::FullDump
        | Mechanism::PreCopiedDump
        | Mechanism::SuspendInMemory
        | Mechanism::Wait => Ok(Advice::Checkpoint(why)),
        // The API also gives this answer if nothing is known of dumps: a kill always has a cost.
        Mechanism::Kill | Mechanism::Rollback => {
            cost_of_dump(&client, task)?;
            Ok(Advice::End(why))
        }
    }
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
