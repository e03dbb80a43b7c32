//! Route `GET /v1/nodes`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use permafrost_api_types::figure::Figure as ApiFigure;
use permafrost_api_types::nodes::{
    Link, ListedNode, NodeMemory, NodeTier, NodesAnswer, NodesQuery, Queue, RateOfSize,
};
use permafrost_api_types::problem::{Problem, ProblemKind};
use permafrost_scheduling::cost::TierRoom;
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::{Estimate, Figure, Missing};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};

use super::paging;
use crate::body::no_world;
use crate::problem::RequestProblem;
use crate::responses::Unasked;
use crate::source::{NodeEntry, QueueLength};
use crate::world::{self, World};
use crate::{Api, say};

/// Lists the nodes that keep images: their rates, the lengths of their queues, and the age of both.
#[utoipa::path(
    get,
    path = "/v1/nodes",
    tag = "nodes",
    operation_id = "nodes",
    params(NodesQuery),
    responses(
        (status = 200, description = "Nodes, by name.", body = NodesAnswer),
        (status = 404, description = "There is no node of that name.", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "A parameter is wrong.", body = Problem, content_type = "application/problem+json"),
        Unasked
    )
)]
pub(crate) async fn nodes(
    State(api): State<Arc<Api>>,
    uri: Uri,
) -> Result<Json<NodesAnswer>, RequestProblem> {
    let query: NodesQuery = paging::query(&uri)?;
    let limit = paging::limit(query.limit)?;
    let world = api.world().ok_or_else(no_world)?;
    let names = world.names();
    let (ids, next) = match (&query.name, &query.after) {
        (Some(name), _) => {
            let id = names.id(name);
            let missing =
                || RequestProblem::new(ProblemKind::NotFound, format!("there is no node {name:?}"));
            (vec![id.ok_or_else(missing)?], None)
        }
        (None, Some(after)) => page(names.after(after), limit),
        (None, None) => page(names.in_order(), limit),
    };
    let age_s = world.age_s();
    let nodes = ids.into_iter().filter_map(|id| world.node(id));
    Ok(Json(NodesAnswer {
        answered_by: world.own_name().to_owned(),
        age_s,
        nodes: nodes.map(|node| told(node, &world)).collect(),
        next,
    }))
}

fn page<'a, I: Copy>(
    names: impl Iterator<Item = (&'a str, I)>,
    limit: usize,
) -> (Vec<I>, Option<String>) {
    let (page, next) = paging::page(names, limit, |(name, _)| (*name).to_owned());
    (page.into_iter().map(|(_, id)| id).collect(), next)
}

fn told(node: &world::Node, world: &World) -> ListedNode {
    let entry = &node.entry;
    let age_s = world.age_s();
    let links = node.links.named().map(|(to, rates)| Link {
        to: to.to_owned(),
        bytes_per_s: say::rate(&rates.sustained(), age_s),
    });
    ListedNode {
        name: entry.name.clone(),
        address: entry.address.clone(),
        state: entry.state,
        live: entry.live,
        stopping: entry.stopping,
        class: entry.class,
        zone: entry.zone.clone(),
        rack: entry.rack.clone(),
        host: if entry.host.is_empty() {
            entry.name.clone()
        } else {
            entry.host.clone()
        },
        version: entry.version.clone(),
        speaks: entry.speaks.clone(),
        age_s: entry.age.map(|age| say::rounded(age.as_secs_f64() + age_s)),
        tiers: tiers(entry, age_s),
        links: links.collect(),
        memory: entry.swap.as_ref().map(|swap| NodeMemory {
            free_bytes: swap.free_memory.count(),
            free_swap_bytes: swap.free_swap.count(),
            page_out_bytes_per_s: say::rate(&swap.write, age_s),
            page_in_bytes_per_s: say::rate(&swap.read, age_s),
        }),
        doubts: entry.doubts.clone(),
    }
}

fn tier(entry: &NodeEntry, age_s: f64) -> NodeTier {
    let figures = &entry.figures;
    NodeTier {
        tier: entry.tier.clone(),
        emulated: entry.emulated.clone(),
        capacity_bytes: entry.capacity_bytes,
        free_bytes: entry.free_bytes,
        write_bytes_per_s: say::rate(&figures.write.sustained(), age_s),
        read_bytes_per_s: say::rate(&figures.read.sustained(), age_s),
        write_by_size: by_size(&figures.write, age_s),
        read_by_size: by_size(&figures.read, age_s),
        dump_start_s: say::time(&figures.dump_start, age_s),
        restore_start_s: say::time(&figures.restore_start, age_s),
        lazy_bytes_per_s: say::rate(&figures.lazy.sustained(), age_s),
        lazy_start_s: say::time(&figures.lazy_start, age_s),
        write_queue: queue(
            &figures.write_queue,
            &figures.write_drain,
            figures.write_wait(Bytes::ZERO),
            entry.write_queue,
            age_s,
        ),
        read_queue: queue(
            &figures.read_queue,
            &figures.read_drain,
            figures.read_wait(),
            entry.read_queue,
            age_s,
        ),
    }
}

/// Returns the tiers of a node, the fastest first. What is measured of dumps is of the tier that they go to.
fn tiers(entry: &NodeEntry, age_s: f64) -> Vec<NodeTier> {
    let Some(of_dumps) = TierRoom::of_dumps(&entry.tiers).filter(|_| entry.tiers.len() > 1) else {
        return vec![tier(entry, age_s)];
    };
    let tiers = entry.tiers.iter().map(|room| {
        let mut tier = NodeTier {
            tier: room.tier.clone(),
            capacity_bytes: room.capacity_bytes,
            free_bytes: room.free_bytes,
            ..tier(entry, age_s)
        };
        if room.cold {
            let recall = &entry.figures.recall;
            tier.read_bytes_per_s = say::rate(&recall.sustained(), age_s);
            tier.read_by_size = by_size(recall, age_s);
        }
        if room != of_dumps {
            let why = format!("dumps go to the tier {}", of_dumps.tier);
            tier.write_bytes_per_s = ApiFigure::unknown(&why);
            tier.dump_start_s = ApiFigure::unknown(&why);
            tier.write_by_size = Vec::new();
        }
        tier
    });
    tiers.collect()
}

fn by_size(rates: &SizedRates, age_s: f64) -> Vec<RateOfSize> {
    let classes = rates.classes().map(|(end, figure)| RateOfSize {
        below_bytes: end.map(Bytes::count),
        bytes_per_s: say::rate(&figure, age_s),
    });
    classes.collect()
}

fn queue(
    queued: &Figure<Bytes>,
    drain: &Figure<BytesPerSecond>,
    wait: Result<Estimate<Seconds>, Missing>,
    length: Option<QueueLength>,
    age_s: f64,
) -> Queue {
    let time = wait.map_or_else(Figure::from, Figure::from);
    Queue {
        bytes: say::bytes(queued, age_s),
        bytes_per_s: say::rate(drain, age_s),
        running: length.map(|length| length.running),
        waiting: length.map(|length| length.waiting),
        reserved: length.map(|length| length.reserved),
        slots: length.map(|length| length.slots),
        time_s: say::time(&time, age_s),
    }
}
