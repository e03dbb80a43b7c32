//! `permafrost simulate --against`: a daemon chooses the victims instead of the library, and is compared with it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use permafrost_api_types::cost::{Mechanism, ReplyDetail};
use permafrost_api_types::figures::StartRate;
use permafrost_api_types::policy::{NodeGiven, PolicyAction, PolicyDecision, PolicyScore};
use permafrost_api_types::preempt::{Preempt, PreemptAnswer};
use permafrost_api_types::quantity::{Count, OutOfRange};
use permafrost_api_types::task::{Resources, Swap, Task};
use permafrost_scheduling::cost::{Copies, Dump, PreemptionMechanism, TaskResources};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::policy::{
    ChooseVictims, Decision, Name, Policy, PolicySettings, Score, TaskAction, VictimFate,
    VictimQuestion,
};
use permafrost_scheduling::quantity::{Bytes, Seconds};
use permafrost_scheduling::{NodeId, TaskId};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_transport::api::{ApiClient, ApiOptions, TOKEN_VARIABLE};
use serde::Serialize;

/// Number of differences that are described.
const DESCRIBED: usize = 5;

/// A daemon that is compared with the library.
pub(crate) struct Against {
    url: String,
    client: Arc<ApiClient>,
    compared: Arc<Mutex<Comparison>>,
}

/// Result of a comparison.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Comparison {
    /// API that was asked.
    url: String,
    /// Choices of victims that it was asked for.
    asked: u64,
    /// Choices that differ from the library's.
    different: u64,
    /// The first ones that differ.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    differences: Vec<String>,
    /// The first error; nothing is asked after it.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Against {
    /// Prepares to ask the API at `url`, or beside the control socket for `socket`.
    ///
    /// # Errors
    /// A bad URL, CA or token.
    pub(crate) fn new(context: &Context, url: &str, ca: Option<PathBuf>) -> Result<Self, Failure> {
        let beside = ApiOptions::beside(&context.socket);
        let client = match url {
            "socket" => ApiClient::new(&beside)?,
            _ => ApiClient::new(&ApiOptions {
                url: Some(url.to_owned()),
                token: std::env::var(TOKEN_VARIABLE)
                    .ok()
                    .filter(|token| !token.is_empty()),
                ca,
                ..beside
            })?,
        };
        Ok(Self {
            url: url.to_owned(),
            client: Arc::new(client),
            compared: Arc::default(),
        })
    }

    /// Checks that the daemon can be asked for the choices of these policies.
    ///
    /// # Errors
    /// [`Code::Invalid`] names one for which it cannot.
    pub(crate) fn check(policies: impl Iterator<Item = Name>) -> Result<(), Failure> {
        for policy in policies {
            if !policy.may_ask() && policy.victims() != VictimFate::Untouched {
                let message = format!(
                    "the policy {policy} chooses by what it remembers, and a daemon sees a question for the first time"
                );
                let hint = "--against compares kill, basic, li2015 and adaptive; leave the others out of --policy";
                return Err(Failure::new(Code::Invalid, message).hint(hint));
            }
        }
        Ok(())
    }

    /// Builds a policy whose victims the daemon chooses.
    pub(crate) fn build(&self, policy: Name, settings: &PolicySettings) -> Box<dyn Policy> {
        let asked = Asked {
            client: Arc::clone(&self.client),
            policy,
            compared: Arc::clone(&self.compared),
        };
        policy.build_asking(settings, Box::new(asked))
    }

    /// Returns what came of it.
    pub(crate) fn comparison(&self) -> Comparison {
        let mut comparison = locked(&self.compared).clone();
        comparison.url.clone_from(&self.url);
        comparison
    }
}

impl Comparison {
    /// Formats it as a line for each difference, and one for all.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for difference in &self.differences {
            text.push_str(&format!("{difference}\n"));
        }
        let same = self.asked - self.different;
        let of = format!("{same} of {} choices of victims", self.asked);
        text.push_str(&format!("{} decided as the library in {of}\n", self.url));
        text
    }

    /// Fails unless the daemon has decided everything as the library.
    ///
    /// # Errors
    /// [`Code::Conflict`] for a difference; [`Code::Unavailable`] where it could not be asked, or there was nothing to
    /// ask.
    pub(crate) fn judge(&self) -> Result<(), Failure> {
        let unavailable = |message: String| Err(Failure::new(Code::Unavailable, message));
        match &self.error {
            Some(error) => unavailable(format!("{}: {error}", self.url)),
            None if self.different > 0 => {
                let message = format!(
                    "{} decided {} of {} choices otherwise than the library",
                    self.url, self.different, self.asked
                );
                let hint = "compare the versions of both; the first differences are above";
                Err(Failure::new(Code::Conflict, message).hint(hint))
            }
            None if self.asked == 0 => {
                unavailable("no task was preempted, so that nothing was compared".to_owned())
            }
            None => Ok(()),
        }
    }
}

fn locked(compared: &Mutex<Comparison>) -> MutexGuard<'_, Comparison> {
    // The counts are right after a panic, too: each is changed in one step.
    compared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The daemon as the one that chooses.
struct Asked {
    client: Arc<ApiClient>,
    policy: Name,
    compared: Arc<Mutex<Comparison>>,
}

impl ChooseVictims for Asked {
    fn choose(&mut self, question: &VictimQuestion<'_>, own: Vec<Decision>) -> Vec<Decision> {
        if locked(&self.compared).error.is_some() {
            return own;
        }
        match self.ask(question, &own) {
            Ok(decisions) => {
                let what = |decision: &Decision| (decision.task, decision.action, decision.node);
                let is_same = decisions.iter().map(what).eq(own.iter().map(what));
                let mut compared = locked(&self.compared);
                compared.asked += 1;
                if is_same {
                    return own;
                }
                compared.different += 1;
                if compared.differences.len() < DESCRIBED {
                    let difference = self.difference(question, &own, &decisions);
                    compared.differences.push(difference);
                }
                decisions
            }
            Err(error) => {
                locked(&self.compared).error = Some(error);
                own
            }
        }
    }
}

impl Asked {
    fn ask(
        &self,
        question: &VictimQuestion<'_>,
        own: &[Decision],
    ) -> Result<Vec<Decision>, String> {
        let request = request(self.policy, question)
            .map_err(|error| format!("the cluster cannot be described: {error}"))?;
        let answer = self.client.post("/v1/preempt", &request);
        let answer = answer.map_err(|error| error.to_string())?;
        let answer: PreemptAnswer<'_> = answer.read().map_err(|error| error.to_string())?;
        let reason = own.first().map(|decision| decision.reason);
        let reason = reason.ok_or("nothing was to be decided")?;
        let decisions = answer.decisions.iter().flatten();
        let decision = |said: &PolicyDecision<'_>| {
            let unexpected = || format!("it decided {:?} about {}", said.action, said.task);
            Ok(Decision {
                action: action(&said.action).ok_or_else(unexpected)?,
                task: TaskId(said.task.parse().map_err(|_| unexpected())?),
                node: question.node,
                score: score(said.score),
                runner_up: None,
                reason,
            })
        };
        decisions.map(decision).collect()
    }

    fn difference(
        &self,
        question: &VictimQuestion<'_>,
        own: &[Decision],
        decisions: &[Decision],
    ) -> String {
        let all = |decisions: &[Decision]| {
            let one = |decision: &Decision| format!("{} of {}", decision.action, decision.task.0);
            let all: Vec<String> = decisions.iter().map(one).collect();
            all.join(", ")
        };
        format!(
            "{} at {} s on node {}: the library decides {}; the daemon {}",
            self.policy,
            question.now.micros() as f64 / 1e6,
            question.node.0,
            all(own),
            all(decisions)
        )
    }
}

fn node_name(node: NodeId) -> String {
    format!("simulated-{}", node.0)
}

/// Returns a choice as a request: with the figures of the node and of the candidates as the view has them.
fn request(policy: Name, question: &VictimQuestion<'_>) -> Result<Preempt<'static>, OutOfRange> {
    let (view, now) = (question.view, question.now);
    let name = node_name(question.node);
    let node = view.node(question.node);
    let figures = node.map(|node| &node.figures);
    let known = |figure: Option<Figure<Bytes>>| figure.and_then(|figure| known(&figure));
    let time = |figure: Option<Figure<Seconds>>| figure.and_then(|figure| self::known(&figure));
    let given = NodeGiven {
        node: name.clone().into(),
        write_by_size: by_size(figures.map(|figures| figures.write)),
        read_by_size: by_size(figures.map(|figures| figures.read)),
        write_queue_bytes: known(figures.map(|figures| figures.write_queue)),
        read_queue_bytes: known(figures.map(|figures| figures.read_queue)),
        dump_start_s: time(figures.map(|figures| figures.dump_start)),
        restore_start_s: time(figures.map(|figures| figures.restore_start)),
        ..NodeGiven::default()
    };
    let swaps = node.and_then(|node| node.swap).map(|swap| Swap {
        node: name.clone().into(),
        free_memory_bytes: swap.free_memory,
        free_swap_bytes: swap.free_swap,
        write_bytes_per_s: self::known(&swap.write),
        read_bytes_per_s: self::known(&swap.read),
    });
    let tasks = question.candidates.iter().filter_map(|id| {
        let task = view.task(*id)?;
        let figures = task.figures(*id, now);
        let described = |holds| Task {
            id: id.0.to_string().into(),
            node: Some(name.clone().into()),
            resident_bytes: self::known(&figures.resident),
            full_bytes: self::known(&figures.full),
            incremental_bytes: self::known(&figures.incremental),
            dirty_bytes_per_s: self::known(&figures.dirty_rate),
            progress_s: self::known(&figures.progress),
            since_checkpoint_s: self::known(&figures.since_checkpoint),
            remaining_s: self::known(&figures.remaining),
            start_s: self::known(&figures.start),
            priority: Some(task.priority),
            holds,
            ..Task::default()
        };
        Some(resources(figures.holds).map(described))
    });
    Ok(Preempt {
        candidates: tasks.collect::<Result<_, _>>()?,
        wanted: Some(resources(question.wanted)?),
        policy: Some(policy.as_str().into()),
        detail: ReplyDetail::Totals,
        swaps: swaps.into_iter().collect(),
        figures: vec![given],
        ..Preempt::default()
    })
}

fn known<T: Copy>(figure: &Figure<T>) -> Option<T> {
    figure.known().ok().map(|known| known.p50)
}

fn by_size(rates: Option<SizedRates>) -> Vec<StartRate> {
    let rates = rates.iter().flat_map(SizedRates::by_class);
    let known = rates.filter_map(|(size_bytes, figure)| {
        let rate = figure.known().ok()?;
        Some(StartRate {
            size_bytes,
            p50_bytes_per_s: rate.p50,
            p95_bytes_per_s: Some(rate.p95),
        })
    });
    known.collect()
}

fn resources(of: TaskResources) -> Result<Resources, OutOfRange> {
    Ok(Resources {
        cpu_millis: Count::try_from(of.cpu_millis)?,
        memory_bytes: Bytes::try_from(of.memory.count())?,
    })
}

/// Returns the action on a task that runs.
fn action(of: &PolicyAction<'_>) -> Option<TaskAction> {
    let dump = |dump| PreemptionMechanism::Checkpoint {
        dump,
        copies: Copies::Local,
    };
    match of {
        PolicyAction::Preempt(mechanism) => Some(TaskAction::Preempt(match mechanism {
            Mechanism::Wait => PreemptionMechanism::Wait,
            Mechanism::Kill => PreemptionMechanism::Kill,
            Mechanism::Rollback => PreemptionMechanism::Rollback,
            Mechanism::SuspendInMemory => PreemptionMechanism::SuspendInMemory,
            Mechanism::IncrementalDump => dump(Dump::Incremental),
            Mechanism::FullDump => dump(Dump::Full),
            Mechanism::PreCopiedDump => dump(Dump::PreCopied),
        })),
        PolicyAction::Resize(to) => Some(TaskAction::Resize(TaskResources {
            cpu_millis: to.cpu_millis,
            memory: Bytes::new(to.memory_bytes),
        })),
        PolicyAction::Start | PolicyAction::Restore(_) | PolicyAction::Continue => None,
    }
}

fn score(of: PolicyScore) -> Score {
    match of {
        PolicyScore::LostS(time) => Score::Lost(Seconds::clamped(time)),
        PolicyScore::LeftS(time) => Score::Left(Seconds::clamped(time)),
        PolicyScore::Order(order) => Score::Order(order),
        PolicyScore::MovedBytes(bytes) => Score::Moved(Bytes::new(bytes)),
        PolicyScore::Containers(count) => Score::Containers(count),
        PolicyScore::LaterS(time) => Score::Later(Seconds::clamped(time)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policies(names: &[&str]) -> Result<(), Failure> {
        Against::check(names.iter().map(|name| name.parse().unwrap()))
    }

    #[test]
    fn policies_that_remember_are_refused() {
        assert!(policies(&["wait", "kill", "basic+local", "li2015", "adaptive"]).is_ok());
        for name in ["mr+srt", "gp", "suspend", "mlf"] {
            let refused = policies(&["kill", name]).unwrap_err();
            assert_eq!(refused.code, Code::Invalid);
            assert!(refused.message.contains(name), "{}", refused.message);
        }
    }

    #[test]
    fn a_comparison_fails_unless_all_decisions_were_the_same() {
        let comparison = |asked, different, error: Option<&str>| Comparison {
            url: "http://n".to_owned(),
            asked,
            different,
            differences: vec!["kill at 3 s".to_owned()],
            error: error.map(str::to_owned),
        };
        assert!(comparison(3, 0, None).judge().is_ok());
        for (of, code) in [
            (comparison(3, 1, None), Code::Conflict),
            (comparison(3, 0, Some("gone")), Code::Unavailable),
            (comparison(0, 0, None), Code::Unavailable),
        ] {
            assert_eq!(of.judge().unwrap_err().code, code);
        }
        let text = comparison(3, 1, None).text();
        assert!(text.starts_with("kill at 3 s\n"), "{text}");
        assert!(text.contains("as the library in 2 of 3"), "{text}");
    }
}
