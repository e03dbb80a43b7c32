//! Route `POST /v1/preempt`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use permafrost_api_types::cost::ReplyDetail;
use permafrost_api_types::policy::PolicyAction;
use permafrost_api_types::preempt::{
    Next, OnUnknownNode, Preempt, PreemptAnswer, Total, Undecided, Victim,
};
use permafrost_api_types::problem::ProblemKind;
use permafrost_api_types::quantity::{Bytes, Count};
use permafrost_api_types::task::{Resources, Task};
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::{Copies, TaskResources};
use permafrost_scheduling::policy::{Decision, Name};
use permafrost_scheduling::preempt::{self, Candidate, Choice, PreemptionPlan, Site, Terms};

use crate::body::{Asked, Stop, answered, parse, to_json};
use crate::caller::Caller;
use crate::nodes::Nodes;
use crate::problem::RequestProblem;
use crate::responses::Unread;
use crate::view::{self, Cluster, Seen};
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
    tasks::check_ids("/candidates", &request.candidates)?;
    let nodes = Nodes::new(asked, &request.figures, &request.swaps)?;
    let terms = terms(&request);
    let policy = view::named(request.policy.as_ref())?;
    if let Some(policy) = policy {
        check(&request, policy, &terms)?;
    }
    let sets = sets(&request)?;
    let known = tasks::Known::new(asked);
    let mut candidates = Vec::with_capacity(request.candidates.len());
    let mut unknown_node = Vec::new();
    for (index, task) in request.candidates.iter().enumerate() {
        match nodes.of_task(task) {
            Some(node) => candidates.push(Candidate {
                node,
                task: known.known(index, task),
            }),
            None => unknown_node.push(OnUnknownNode {
                task: task.id.borrowed(),
                node: task.node.as_ref().map(|node| node.borrowed()),
            }),
        }
    }
    let cluster = Cluster {
        asked,
        nodes: &nodes,
        running: &candidates,
        described: &request.candidates,
        pointer: "/candidates",
    };
    let of_candidates = candidates.iter().map(|candidate| candidate.node);
    let sites = nodes.sites(of_candidates, terms.copies);
    let (plan, wanted) = match request.wanted {
        Some(wanted) if policy.is_some_and(|policy| !policy.is_adaptive()) => {
            (PreemptionPlan::default(), tasks::resources(wanted))
        }
        Some(wanted) => {
            let wanted = tasks::resources(wanted);
            (preempt::plan(wanted, &candidates, &sites, &terms), wanted)
        }
        None => {
            let plan = each(&candidates, &sets, &sites, &terms);
            (plan, TaskResources::ZERO)
        }
    };
    let said = Said {
        asked,
        nodes: &nodes,
        candidates: &request.candidates,
        detail: request.detail,
    };
    let mut answer = said.answer(&plan, wanted, unknown_node);
    let seen;
    if let Some(policy) = policy {
        seen = cluster.seen(policy)?;
        let settings = view::settings(request.seed.map(Count::value), terms);
        let decisions = seen.decide(policy, &settings, wanted);
        said.decided(&mut answer, &seen, &decisions, (policy, wanted));
        answer.undecided.extend(seen.undecided(policy));
    }
    let each = if request.detail == ReplyDetail::Full {
        900
    } else {
        450
    };
    Ok(to_json(&answer, 512 + plan.victims.len() * each)?)
}

/// Refuses what goes with no policy, or not with this one.
fn check(request: &Preempt<'_>, policy: Name, terms: &Terms) -> Result<(), RequestProblem> {
    let invalid =
        |pointer: &str, detail: String| RequestProblem::at(ProblemKind::Invalid, pointer, detail);
    if request.wanted.is_none() {
        let detail = format!("the policy {policy} chooses victims for what is wanted");
        return Err(invalid("/wanted", detail));
    }
    if terms.copies != Copies::Local {
        let detail =
            "policies compare dumps that are stored on the task's node: leave one of both out";
        return Err(invalid("/copies", detail.to_owned()));
    }
    if !policy.is_adaptive() && *terms != Terms::default() {
        let detail = format!(
            "by, delay_weight, longest_delay_s and may_wait are terms of adaptive, and not of {policy}"
        );
        return Err(invalid("/policy", detail));
    }
    let mut candidates = request.candidates.iter();
    if !policy.is_adaptive()
        && let Some(at) = candidates.position(|task| task.grace_s.is_some())
    {
        let detail = format!("adaptive alone heeds grace_s, and not {policy}");
        return Err(invalid(&format!("/candidates/{at}/grace_s"), detail));
    }
    Ok(())
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

/// Returns the set of each candidate, if it is in one.
fn sets(request: &Preempt<'_>) -> Result<Vec<Option<usize>>, RequestProblem> {
    let invalid =
        |pointer: String, detail: &str| RequestProblem::at(ProblemKind::Invalid, pointer, detail);
    if request.wanted.is_some() && !request.together.is_empty() {
        let detail = "with wanted the victims are chosen, and all of them go together";
        return Err(invalid("/together".to_owned(), detail));
    }
    let mut sets = vec![None; request.candidates.len()];
    for (set, members) in request.together.iter().enumerate() {
        for (at, &member) in members.iter().enumerate() {
            let pointer = || format!("/together/{set}/{at}");
            match sets.get_mut(member as usize) {
                Some(free @ None) => *free = Some(set),
                Some(Some(_)) => {
                    return Err(invalid(pointer(), "this candidate is in a set already"));
                }
                None => {
                    return Err(invalid(
                        pointer(),
                        "there is no such candidate; the first is 0",
                    ));
                }
            }
        }
    }
    Ok(sets)
}

/// Returns the choices for all candidates: for those of a set together, for each other as if it were the only one.
fn each(
    candidates: &[Candidate],
    set_of: &[Option<usize>],
    sites: &BTreeMap<NodeId, Site<'_>>,
    terms: &Terms,
) -> PreemptionPlan {
    let mut sets: BTreeMap<usize, Vec<Candidate>> = BTreeMap::new();
    let mut alone = Vec::new();
    for candidate in candidates {
        let index = usize::try_from(candidate.task.id.0);
        match index.ok().and_then(|index| *set_of.get(index)?) {
            Some(set) => sets.entry(set).or_default().push(*candidate),
            None => alone.push(candidate),
        }
    }
    let mut plan = PreemptionPlan::default();
    for members in sets.values() {
        let of_set = preempt::together(members, sites, terms);
        plan.frees = plan.frees.plus(of_set.frees);
        plan.victims.extend(of_set.victims);
        plan.undecided.extend(of_set.undecided);
        plan.unknown_node.extend(of_set.unknown_node);
    }
    for candidate in alone {
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
    nodes: &'a Nodes<'a>,
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
            decisions: None,
            undecided: undecided.collect(),
            unknown_node,
        }
    }

    /// Adds the decisions of a policy, and the victims among them unless the plan has chosen these.
    fn decided(
        &self,
        answer: &mut PreemptAnswer<'a>,
        seen: &Seen<'a>,
        decisions: &[Decision],
        (policy, wanted): (Name, TaskResources),
    ) {
        let (decisions, frees) = seen.said(decisions, wanted, self.detail);
        if !policy.is_adaptive() {
            answer.victims = decisions.iter().filter_map(victim_of).collect();
            let lacking = wanted.less(frees);
            answer.frees = total(frees);
            answer.lacking = total(lacking);
            answer.enough = lacking.is_none();
        }
        answer.decisions = Some(decisions);
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
            node: self.nodes.name(victim.node).into(),
            mechanism: say::mechanism(*mechanism),
            frees: resources(victim.frees),
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

/// Returns the victim of a decision that preempts it at a known cost.
fn victim_of<'a>(
    decision: &permafrost_api_types::policy::PolicyDecision<'a>,
) -> Option<Victim<'a>> {
    let PolicyAction::Preempt(mechanism) = decision.action else {
        return None;
    };
    let cost = decision.cost.clone()?;
    Some(Victim {
        task: decision.task.clone(),
        node: decision.node.clone(),
        mechanism,
        frees: resources(TaskResources {
            cpu_millis: decision.frees.cpu_millis,
            memory: Bytes::new(decision.frees.memory_bytes),
        }),
        score_s: cost.overhead_s.p50,
        cost,
        next: None,
        reason: Some(decision.reason.clone()),
    })
}

/// Returns resources that are no more than those of a request, in its types.
fn resources(of: TaskResources) -> Resources {
    Resources {
        cpu_millis: Count::try_from(of.cpu_millis).unwrap_or_default(),
        memory_bytes: of.memory,
    }
}

const fn total(of: TaskResources) -> Total {
    Total {
        cpu_millis: of.cpu_millis,
        memory_bytes: of.memory.count(),
    }
}
