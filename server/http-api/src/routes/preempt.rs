//! Route `POST /v1/preempt`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use permafrost_api_types::cost::ReplyDetail;
use permafrost_api_types::preempt::{
    Next, OnUnknownNode, Preempt, PreemptAnswer, Total, Undecided, Victim,
};
use permafrost_api_types::task::Task;
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::TaskResources;
use permafrost_scheduling::preempt::{self, Candidate, Choice, PreemptionPlan, Site, Terms};

use crate::body::{Asked, Stop, answered, parse, to_json};
use crate::caller::Caller;
use crate::problem::RequestProblem;
use crate::responses::Unread;
use crate::{Api, say, tasks};

/// Chooses the tasks to preempt for wanted resources, and the way; or the way in which to preempt each of the
/// candidates.
#[utoipa::path(
    post,
    path = "/v1/preempt",
    tag = "costs",
    operation_id = "preempt",
    request_body(content = Preempt, example = json!({
        "wanted": {"cpu_millis": 2000, "memory_bytes": 4_000_000_000_i64},
        "candidates": [
            {"id": "k-means", "node": "a", "job": "team/k-means", "resident_bytes": 5_000_000_000_i64,
             "progress_s": 30, "holds": {"cpu_millis": 2000, "memory_bytes": 5_000_000_000_i64}},
            {"id": "fresh", "node": "a", "full_bytes": 1_000_000_000, "progress_s": 2,
             "holds": {"cpu_millis": 1000, "memory_bytes": 1_000_000_000}}
        ]
    })),
    responses(
        (status = 200, description = "Victims, and what could not be had or decided on.", body = PreemptAnswer),
        Unread
    )
)]
pub(crate) async fn preempt(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, RequestProblem> {
    answered(api, caller, request, answer).await
}

fn answer(asked: &Asked<'_>, body: &[u8]) -> Result<Vec<u8>, Stop> {
    let request: Preempt<'_> = parse(body)?;
    asked.answers("/candidates", request.candidates.len())?;
    let swaps = tasks::swaps(asked, &request.swaps)?;
    let terms = terms(&request);
    let mut candidates = Vec::with_capacity(request.candidates.len());
    let mut unknown_node = Vec::new();
    for (index, task) in request.candidates.iter().enumerate() {
        match tasks::node_of(asked, task) {
            Some(node) => candidates.push(Candidate {
                node,
                task: tasks::known(asked, index, task),
            }),
            None => unknown_node.push(OnUnknownNode {
                task: task.id.borrowed(),
                node: task.node.as_ref().map(|node| node.borrowed()),
            }),
        }
    }
    let nodes = candidates.iter().map(|candidate| candidate.node);
    let sites = tasks::sites(asked, nodes, terms.copies, &swaps);
    let (plan, wanted) = match request.wanted {
        Some(wanted) => {
            let wanted = tasks::resources(wanted);
            (preempt::plan(wanted, &candidates, &sites, &terms), wanted)
        }
        None => (each(&candidates, &sites, &terms), TaskResources::ZERO),
    };
    let said = Said {
        asked,
        candidates: &request.candidates,
        detail: request.detail,
    };
    let answer = said.answer(&plan, wanted, unknown_node);
    let each = if request.detail == ReplyDetail::Full {
        900
    } else {
        450
    };
    Ok(to_json(&answer, 512 + plan.victims.len() * each)?)
}

fn terms(request: &Preempt<'_>) -> Terms {
    Terms {
        copies: request.copies,
        by: request.by,
        delay_weight: request.delay_weight,
        longest_delay: request.longest_delay_s,
        may_wait: request.may_wait,
    }
}

/// Returns the choice for each candidate, as if it were the only one.
fn each(
    candidates: &[Candidate],
    sites: &BTreeMap<NodeId, Site<'_>>,
    terms: &Terms,
) -> PreemptionPlan {
    let mut plan = PreemptionPlan::default();
    for candidate in candidates {
        let Some(site) = sites.get(&candidate.node) else {
            plan.unknown_node.push(candidate.task.id);
            continue;
        };
        match preempt::choose(&candidate.task, site, terms) {
            Ok(choice) => {
                plan.frees = plan.frees.plus(candidate.task.holds);
                plan.victims.push(preempt::PlannedVictim {
                    task: candidate.task.id,
                    node: candidate.node,
                    frees: candidate.task.holds,
                    choice,
                });
            }
            Err(undecided) => plan.undecided.push(undecided),
        }
    }
    plan
}

/// Formats a plan with the names of the request.
struct Said<'a> {
    asked: &'a Asked<'a>,
    candidates: &'a [Task<'a>],
    detail: ReplyDetail,
}

impl<'a> Said<'a> {
    fn answer(
        &self,
        plan: &PreemptionPlan,
        wanted: TaskResources,
        mut unknown_node: Vec<OnUnknownNode<'a>>,
    ) -> PreemptAnswer<'a> {
        let world = self.asked.world;
        let tasks = plan.unknown_node.iter().filter_map(|task| self.task(*task));
        unknown_node.extend(tasks.map(|task| OnUnknownNode {
            task: task.id.borrowed(),
            node: task.node.as_ref().map(|node| node.borrowed()),
        }));
        let undecided = plan.undecided.iter().filter_map(|undecided| {
            Some(Undecided {
                task: self.task(undecided.task)?.id.borrowed(),
                reason: format!("kill: {}; dump: {}", undecided.kill, undecided.dump),
            })
        });
        let lacking = wanted.less(plan.frees);
        PreemptAnswer {
            answered_by: world.own_name().into(),
            age_s: world.age_s(),
            victims: plan
                .victims
                .iter()
                .filter_map(|victim| self.victim(victim))
                .collect(),
            frees: total(plan.frees),
            lacking: total(lacking),
            enough: lacking.is_none(),
            undecided: undecided.collect(),
            unknown_node,
        }
    }

    fn task(&self, task: permafrost_scheduling::TaskId) -> Option<&'a Task<'a>> {
        self.candidates.get(usize::try_from(task.0).ok()?)
    }

    fn victim(&self, victim: &preempt::PlannedVictim) -> Option<Victim<'a>> {
        let Choice {
            mechanism,
            cost,
            score,
            next,
        } = &victim.choice;
        let task = self.task(victim.task)?;
        let world = self.asked.world;
        let said = say::cost_alone(cost, self.detail, world.age_s());
        Some(Victim {
            task: task.id.borrowed(),
            node: world.name(victim.node).into(),
            mechanism: say::mechanism(*mechanism),
            frees: task.holds,
            score_s: say::rounded(score.value()),
            cost: said,
            next: next.map(|(mechanism, score)| Next {
                mechanism: say::mechanism(mechanism),
                score_s: say::rounded(score.value()),
            }),
            // The reason of the cost is part of it.
            reason: say::reason(&victim.choice, self.detail),
        })
    }
}

const fn total(of: TaskResources) -> Total {
    Total {
        cpu_millis: of.cpu_millis,
        memory_bytes: of.memory.count(),
    }
}
