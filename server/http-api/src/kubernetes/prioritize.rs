//! `prioritize`: the sooner a pod's checkpoint runs on a node, the higher the node's score.

use std::collections::HashMap;

use permafrost_api_types::cost::ReplyDetail;
use permafrost_api_types::resume::{Resume, ResumeAnswer, Resumption};

use super::inner::{Inner, Refused, read};
use super::sites::Sites;
use super::types::{ExtenderArgs, HostPriority, MAX_PRIORITY};

/// Scores the nodes: the best has 10, one that takes twice as long 5. Nodes that keep no images, and those of
/// which nothing is known, have 0; if there is nothing to resume, all nodes have 0.
pub(super) async fn prioritize(
    inner: &Inner,
    arguments: &ExtenderArgs,
) -> Result<Vec<HostPriority>, Refused> {
    let machines = arguments.names();
    let job = arguments.pod.as_ref().and_then(|pod| pod.job());
    let times = match job {
        Some(job) => times(inner, job, &machines).await?,
        None => HashMap::new(),
    };
    Ok(scores(&machines, &times))
}

/// Returns the time until the job would run on each machine, seconds.
async fn times<'a>(
    inner: &Inner,
    job: &str,
    machines: &[&'a str],
) -> Result<HashMap<&'a str, f64>, Refused> {
    let (nodes, _) = inner.nodes().await?;
    let sites = Sites::new(&nodes);
    let on: Vec<(&str, &str)> = machines
        .iter()
        .filter_map(|machine| Some((*machine, sites.on(machine)?.name.as_str())))
        .collect();
    if on.is_empty() {
        return Ok(HashMap::new());
    }
    let mut asked: Vec<&str> = on.iter().map(|(_, node)| *node).collect();
    asked.sort_unstable();
    asked.dedup();
    let resume = Resume {
        checkpoints: vec![job.into()],
        nodes: Some(asked.into_iter().map(Into::into).collect()),
        detail: ReplyDetail::Totals,
        ..Resume::default()
    };
    let answer = inner.post("/v1/resume", &resume).await?;
    let answer: ResumeAnswer<'_> = read(&answer)?;
    let Some(Resumption::Ranked(ranked)) = answer.answers.first() else {
        // The job starts without a checkpoint, which it may do anywhere.
        return Ok(HashMap::new());
    };
    let of_node: HashMap<&str, f64> = ranked
        .nodes
        .iter()
        .map(|ranked| (ranked.node.as_str(), ranked.cost.until_running_s.p50))
        .collect();
    let timed = on.into_iter();
    Ok(timed
        .filter_map(|(machine, node)| Some((machine, *of_node.get(node)?)))
        .collect())
}

fn scores(machines: &[&str], times: &HashMap<&str, f64>) -> Vec<HostPriority> {
    let best = times.values().copied().fold(f64::INFINITY, f64::min);
    let score = |machine: &&str| HostPriority {
        host: (*machine).to_owned(),
        score: times.get(machine).map_or(0, |time| of_best(best, *time)),
    };
    machines.iter().map(score).collect()
}

/// Returns the best time as a part of this one, in tenths.
fn of_best(best: f64, time: f64) -> i64 {
    if time <= best {
        return MAX_PRIORITY;
    }
    let tenths = (best / time * 10.0).round();
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a cast of floats to integers saturates, and it is clamped"
    )]
    (tenths as i64).clamp(0, MAX_PRIORITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_is_the_best_time_as_a_part() {
        let times = HashMap::from([("a", 2.0), ("b", 4.0), ("c", 200.0), ("d", 2.01)]);
        let machines = ["a", "b", "c", "d", "e"];
        let scores: Vec<i64> = scores(&machines, &times)
            .iter()
            .map(|one| one.score)
            .collect();
        assert_eq!(scores, [10, 5, 0, 10, 0]);
        assert_eq!(of_best(0.0, 0.0), 10);
        assert_eq!(of_best(0.0, 1.0), 0);
    }
}
