//! Route `POST /v1/estimate`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use permafrost_api_types::cost::{Mechanism, ReplyDetail};
use permafrost_api_types::estimate::{EstimateAnswer, EstimateRequest, Estimated};
use permafrost_api_types::text::Text;
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::{Copies, NoCost, NodeFigures, TaskCost};
use permafrost_scheduling::preempt::{Site, cost_of};
use permafrost_scheduling::quantity::Bytes;

use crate::body::{Asked, Stop, answered, parse, to_json};
use crate::caller::Caller;
use crate::nodes::Nodes;
use crate::problem::RequestProblem;
use crate::responses::Unread;
use crate::{Api, say, tasks};

/// Estimates the cost of each way of preempting each task on each node.
#[utoipa::path(
    post,
    path = "/v1/estimate",
    tag = "costs",
    operation_id = "estimate",
    request_body(content = EstimateRequest, example = json!({
        "tasks": [{"id": "k-means", "node": "a", "full_bytes": 5_000_000_000_i64, "progress_s": 30}],
        "mechanisms": ["full_dump", "kill"]
    })),
    responses(
        (status = 200, description = "Costs, or why there is none.", body = EstimateAnswer),
        Unread
    )
)]
pub(crate) async fn estimate(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, RequestProblem> {
    answered(api, caller, request, answer).await
}

fn answer(asked: &Asked<'_>, body: &[u8]) -> Result<Vec<u8>, Stop> {
    let request: EstimateRequest<'_> = parse(body)?;
    let mechanisms = request.mechanisms.as_deref().unwrap_or(&Mechanism::ALL);
    let named = match &request.nodes {
        Some(names) => Some(named(asked, names)?),
        None => None,
    };
    let of_each = mechanisms
        .len()
        .saturating_mul(named.as_ref().map_or(1, Vec::len));
    tasks::check_ids("/tasks", &request.tasks)?;
    let count = request.tasks.len().saturating_mul(of_each);
    asked.answers("/tasks", count)?;
    let nodes = Nodes::new(asked, &[], &request.swaps)?;
    let copies = request.copies;
    let named: Option<Vec<Place<'_>>> = named.map(|ids| {
        let places = ids.into_iter().zip(request.nodes.iter().flatten());
        places
            .map(|(id, name)| place(&nodes, Some(id), Some(name), copies))
            .collect()
    });
    let known = tasks::Known::new(asked);
    let mut answers = Vec::with_capacity(count);
    for (index, task) in request.tasks.iter().enumerate() {
        let known = known.known(index, task);
        let own;
        let places = match &named {
            Some(named) => named,
            None => {
                let node = nodes.of_task(task);
                own = place(&nodes, node, task.node.as_ref(), copies);
                std::slice::from_ref(&own)
            }
        };
        for place in places {
            for &mechanism in mechanisms {
                let way = say::way(mechanism, copies);
                let cost = cost_of(&known, &place.site, Bytes::ZERO, way);
                let (task, detail) = (&task.id, request.detail);
                answers.push(estimated(asked, task, place, mechanism, detail, cost));
            }
        }
    }
    let answer = EstimateAnswer {
        answered_by: asked.world.own_name().into(),
        age_s: asked.world.age_s(),
        answers,
    };
    let each = if request.detail == ReplyDetail::Full {
        700
    } else {
        300
    };
    Ok(to_json(&answer, 256 + count * each)?)
}

/// Figures of a node for tasks that name none: all unknown.
static NOWHERE: NodeFigures = NodeFigures::unknown(NodeId(u32::MAX));

/// Place where a task would be dumped.
struct Place<'a> {
    /// Name of the node; `None` if the request names none.
    name: Option<Text<'a>>,
    site: Site<'a>,
    /// Reason why there is no such place.
    missing: Option<&'static str>,
}

fn place<'a>(
    nodes: &'a Nodes<'_>,
    node: Option<NodeId>,
    name: Option<&'a Text<'_>>,
    copies: Copies,
) -> Place<'a> {
    let site = node.and_then(|node| nodes.site(node, copies));
    let missing = match (&site, name) {
        (Some(_), _) => None,
        (None, Some(_)) => Some("there is no such node"),
        (None, None) => Some("the task names no node, and there are several"),
    };
    let own_name = node.map(|node| Text::from(nodes.name(node)));
    Place {
        name: name.map(Text::borrowed).or(own_name),
        // Mechanisms that need no node have a cost without one.
        site: site.unwrap_or(Site {
            node: &NOWHERE,
            replica: None,
            swap: None,
        }),
        missing,
    }
}

fn estimated<'a>(
    asked: &Asked<'a>,
    task: &'a Text<'_>,
    place: &Place<'a>,
    mechanism: Mechanism,
    detail: ReplyDetail,
    cost: Result<TaskCost, NoCost>,
) -> Estimated<'a> {
    // Waiting and killing need no node: then the cost lacks something else.
    let takes_a_node = !matches!(mechanism, Mechanism::Wait | Mechanism::Kill);
    let (cost, unknown) = match cost {
        Ok(cost) => (Some(say::cost(&cost, detail, asked.world.age_s())), None),
        Err(_) if takes_a_node && place.missing.is_some() => (None, place.missing.map(Text::from)),
        Err(why) => (None, Some(Text::from(why.to_string()))),
    };
    Estimated {
        task: task.borrowed(),
        node: place.name.clone(),
        mechanism,
        cost,
        unknown,
    }
}

fn named(asked: &Asked<'_>, names: &[Text<'_>]) -> Result<Vec<NodeId>, RequestProblem> {
    let ids = names.iter().enumerate();
    ids.map(|(index, name)| tasks::named(asked, &format!("/nodes/{index}"), name))
        .collect()
}
