//! `prioritize`: the sooner a pod's checkpoint runs on a node, the higher the node's score.

use std::collections::HashMap;

use permafrost_api_types::cost::ReplyDetail;
use permafrost_api_types::resume::{Preference, RankedNode, Resume, ResumeAnswer, Resumption};
use permafrost_scheduling::policy::Name;

use super::inner::{Inner, Refused, read};
use super::sites::Sites;
use super::types::{ExtenderArgs, HostPriority, MAX_PRIORITY};

/// A node's way to resume a pod.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ResumeTime {
    /// Time until the checkpoint would run, seconds.
    until_running_s: f64,
    /// False for a node of the kind that the policy does not prefer.
    preferred: bool,
}

/// Scores the nodes: the best has 10, one that takes twice as long 5. Nodes that keep no images, and those of
/// which nothing is known, have 0; if there is nothing to resume, all nodes have 0. Where the policy prefers a kind of
/// node, those have 5 to 10 and the others up to 4: they are for when there is no room on the preferred ones.
pub(super) async fn prioritize(
    inner: &Inner,
    policy: Option<Name>,
    arguments: &ExtenderArgs,
) -> Result<Vec<HostPriority>, Refused> {
    let machines = arguments.names();
    let preference = policy
        .and_then(Name::preference)
        .unwrap_or(Preference::None);
    let job = arguments.pod.as_ref().and_then(|pod| pod.job());
    let times = match job {
        Some(job) => times(inner, preference, job, &machines).await?,
        None => HashMap::new(),
    };
    Ok(scores(&machines, &times, preference))
}

/// Returns the time until the job would run on each machine.
async fn times<'a>(
    inner: &Inner,
    preference: Preference,
    job: &str,
    machines: &[&'a str],
) -> Result<HashMap<&'a str, ResumeTime>, Refused> {
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
        preference,
        detail: ReplyDetail::Totals,
        ..Resume::default()
    };
    let answer = inner.post("/v1/resume", &resume).await?;
    let answer: ResumeAnswer<'_> = read(&answer)?;
    let Some(Resumption::Ranked(ranked)) = answer.answers.first() else {
        // The job starts without a checkpoint, which it may do anywhere.
        return Ok(HashMap::new());
    };
    let time = |ranked: &RankedNode<'_>| ResumeTime {
        until_running_s: ranked.cost.until_running_s.p50,
        preferred: match preference {
            Preference::Local => ranked.local,
            Preference::Remote => !ranked.local,
            Preference::None => true,
        },
    };
    let nodes = ranked.nodes.iter();
    let of_node: HashMap<&str, ResumeTime> = nodes
        .map(|ranked| (ranked.node.as_str(), time(ranked)))
        .collect();
    let timed = on.into_iter();
    Ok(timed
        .filter_map(|(machine, node)| Some((machine, *of_node.get(node)?)))
        .collect())
}

fn scores(
    machines: &[&str],
    times: &HashMap<&str, ResumeTime>,
    preference: Preference,
) -> Vec<HostPriority> {
    let best = |preferred: bool| {
        let of_kind = times.values().filter(|time| time.preferred == preferred);
        let times = of_kind.map(|time| time.until_running_s);
        times.fold(f64::INFINITY, f64::min)
    };
    let (best_preferred, best_other) = (best(true), best(false));
    let score = |time: &ResumeTime| {
        let half = MAX_PRIORITY / 2;
        match (preference, time.preferred) {
            (Preference::None, _) => of_best(best_preferred, time.until_running_s),
            (_, true) => half + of_best(best_preferred, time.until_running_s) / 2,
            (_, false) => (of_best(best_other, time.until_running_s) / 2).min(half - 1),
        }
    };
    let score = |machine: &&str| HostPriority {
        host: (*machine).to_owned(),
        score: times.get(machine).map_or(0, score),
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
        let of = |until_running_s: f64, preferred| ResumeTime {
            until_running_s,
            preferred,
        };
        let times = |is: [bool; 4]| {
            let times = [("a", 2.0), ("b", 4.0), ("c", 200.0), ("d", 2.01)];
            let times = times.into_iter().zip(is);
            HashMap::from_iter(times.map(|((name, time), is)| (name, of(time, is))))
        };
        let machines = ["a", "b", "c", "d", "e"];
        let scored = |is, preference| -> Vec<i64> {
            let scores = scores(&machines, &times(is), preference);
            scores.iter().map(|one| one.score).collect()
        };
        assert_eq!(scored([true; 4], Preference::None), [10, 5, 0, 10, 0]);
        let local = [false, true, true, false];
        assert_eq!(scored(local, Preference::Local), [4, 10, 5, 4, 0]);
        assert_eq!(of_best(0.0, 0.0), 10);
        assert_eq!(of_best(0.0, 1.0), 0);
    }
}
