//! Route `POST /v1/resume`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;

use permafrost_api_types::cost::ReplyDetail;
use permafrost_api_types::problem::ProblemKind;
use permafrost_api_types::resume::{
    Preference, RankedNode, Restart, Resume, ResumeAnswer, Resumption, UnknownNode,
};
use permafrost_api_types::text::Text;
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::manifest::CheckpointRef;
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::{LazyRestore, MissingPages, NodeFigures, Recall};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::{Figure, Missing};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};
use permafrost_scheduling::resume::{Offer, rank};

use crate::body::{Asked, Stop, answered, parse, to_json};
use crate::caller::Caller;
use crate::problem::RequestProblem;
use crate::responses::Unread;
use crate::world::{Jobs, is_resumable};
use crate::{Api, limits, say, tasks, view};

/// Number of candidates that are evaluated beyond those that are answered: their order does not include the
/// time that an image takes to reach them.
const MORE: usize = 8;

/// Bandwidth of a link where there is no holder.
static NO_HOLDER: SizedRates = SizedRates::uniform(Figure::Unknown {
    why: Missing::NodeGone,
});

/// Ranks the nodes to resume each checkpoint on: those that hold it, and the quickest of the others.
#[utoipa::path(
    post,
    path = "/v1/resume",
    tag = "costs",
    operation_id = "resume",
    request_body(content = Resume, example = json!({
        "checkpoints": ["team/k-means", "team/sort@3"], "preference": "none", "limit": 3
    })),
    responses(
        (status = 200, description = "Nodes, or that the task begins anew.", body = ResumeAnswer),
        Unread
    )
)]
pub(crate) async fn resume(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, RequestProblem> {
    answered(api, caller, request, answer).await
}

fn answer(asked: &Asked<'_>, body: &[u8]) -> Result<Vec<u8>, Stop> {
    let request: Resume<'_> = parse(body)?;
    let named = match &request.nodes {
        Some(names) => Some(nodes(asked, names)?),
        None => None,
    };
    let limit = match (request.limit, &named) {
        (Some(limit), _) if !(1..=limits::LONGEST_PAGE).contains(&limit) => {
            let most = limits::LONGEST_PAGE;
            let detail = format!("{limit} is no limit: 1 to {most} is");
            return Err(RequestProblem::at(ProblemKind::Invalid, "/limit", detail).into());
        }
        (Some(limit), _) => limit as usize,
        (None, Some(named)) => named.len(),
        (None, None) => limits::RESUME_NODES as usize,
    };
    let of_each = named.as_ref().map_or(limit, Vec::len).max(1);
    let count = request.checkpoints.len().saturating_mul(of_each);
    asked.answers("/checkpoints", count)?;
    let ranking = Ranking {
        asked,
        preference: preference(&request)?,
        request: &request,
        named,
        limit,
    };
    let answers = request
        .checkpoints
        .iter()
        .map(|name| ranking.resumption(name))
        .collect::<Result<_, _>>()?;
    let answer = ResumeAnswer {
        answered_by: asked.world.own_name().into(),
        age_s: asked.world.age_s(),
        answers,
    };
    let each = if request.detail == ReplyDetail::Full {
        500
    } else {
        250
    };
    Ok(to_json(
        &answer,
        256 + request.checkpoints.len() * (100 + limit.min(8) * each),
    )?)
}

fn nodes(asked: &Asked<'_>, names: &[Text<'_>]) -> Result<Vec<NodeId>, RequestProblem> {
    let ids = names.iter().enumerate();
    ids.map(|(index, name)| tasks::named(asked, &format!("/nodes/{index}"), name))
        .collect()
}

/// Returns the preference of a request, or of the policy that it names.
fn preference(request: &Resume<'_>) -> Result<Preference, RequestProblem> {
    let Some(policy) = view::named(request.policy.as_ref())? else {
        return Ok(request.preference);
    };
    let invalid = |field, detail| Err(RequestProblem::at(ProblemKind::Invalid, field, detail));
    match policy.preference() {
        None => invalid(
            "/policy",
            format!("the policy {policy} does not choose nodes by what a restore costs"),
        ),
        Some(_) if request.preference != Preference::None => invalid(
            "/preference",
            format!("the policy {policy} has a preference of its own"),
        ),
        Some(preference) => Ok(preference),
    }
}

struct Ranking<'a> {
    asked: &'a Asked<'a>,
    preference: Preference,
    request: &'a Resume<'a>,
    named: Option<Vec<NodeId>>,
    limit: usize,
}

impl<'a> Ranking<'a> {
    fn resumption(&self, name: &'a Text<'_>) -> Result<Resumption<'a>, Stop> {
        Ok(match self.find(name)? {
            Ok((checkpoint, jobs)) => Resumption::Ranked(self.ranked(name, checkpoint, jobs)),
            Err(why) => Resumption::Restart(Restart {
                checkpoint: name.borrowed(),
                restart: true,
                why,
            }),
        })
    }

    /// Returns a checkpoint, or the reason why the name is none. A checkpoint sealed before the request came is
    /// found: otherwise work would be lost.
    fn find(&self, name: &str) -> Result<Result<(&'a Checkpoint, &'a Jobs), String>, Stop> {
        let reference: CheckpointRef = match name.parse() {
            Ok(reference) => reference,
            Err(error) => return Ok(Err(format!("{name:?} names no checkpoint: {error}"))),
        };
        let find = |jobs: &'a Jobs| {
            let found = jobs.find(&reference)?;
            let sees = self.asked.caller.sees(&found.job);
            sees.then_some((found, jobs))
        };
        let Some((checkpoint, jobs)) = self.asked.world.jobs().and_then(find) else {
            self.asked.jobs()?;
            return Ok(Err(match reference.generation {
                Some(_) => format!("there is no checkpoint {name}"),
                None => format!("the job {name} has no checkpoint that can be resumed"),
            }));
        };
        if is_resumable(checkpoint) {
            Ok(Ok((checkpoint, jobs)))
        } else {
            let kind = &checkpoint.kind;
            Ok(Err(format!("{name} is a {kind}, which cannot be resumed")))
        }
    }

    fn ranked(
        &self,
        name: &'a Text<'_>,
        checkpoint: &'a Checkpoint,
        jobs: &'a Jobs,
    ) -> permafrost_api_types::resume::Ranked<'a> {
        let world = self.asked.world;
        let image = Image::new(self.asked, checkpoint, jobs);
        let nodes = match &self.named {
            Some(named) => named.clone(),
            None => self.likely(&image),
        };
        let mut unknown = Vec::new();
        let mut offers = Vec::with_capacity(nodes.len());
        for node in nodes {
            let Some(of) = world.node(node) else { continue };
            if !of.restores() {
                let why = if of.entry.live {
                    "the node is stopping or removed"
                } else {
                    "the node is not there"
                };
                unknown.push(UnknownNode {
                    node: world.name(node).into(),
                    why: why.to_owned(),
                });
                continue;
            }
            let lacks = image.lacks(self.asked, node);
            let source = lacks.as_ref().map_or(Some(node), |(holder, _)| *holder);
            let lacks = lacks.map(|(_, lacks)| lacks);
            let figures = &of.entry.figures;
            offers.push(Offer {
                node: figures,
                lazy: self
                    .request
                    .lazy
                    .map(|how| lazy(how, image.size, figures, lacks.as_ref())),
                lacks,
                recall: source.and_then(|holder| image.recall(self.asked, holder)),
            });
        }
        let ranking = rank(image.size, &offers, self.preference);
        unknown.extend(ranking.unknown.iter().map(|(node, why)| UnknownNode {
            node: world.name(*node).into(),
            why: why.to_string(),
        }));
        let ranked = ranking.nodes.iter().take(self.limit);
        permafrost_api_types::resume::Ranked {
            checkpoint: name.borrowed(),
            generation: checkpoint.generation,
            size_bytes: image.size.count(),
            nodes: ranked
                .map(|ranked| RankedNode {
                    node: world.name(ranked.node).into(),
                    local: ranked.local,
                    cost: say::cost(&ranked.cost, self.request.detail, world.age_s()),
                })
                .collect(),
            unknown,
        }
    }

    /// Returns the nodes that hold a copy or the parent, and the quickest of the others, without evaluating all
    /// nodes.
    fn likely(&self, image: &Image) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = image.holders.clone();
        nodes.extend(
            image
                .of_parent
                .iter()
                .filter(|node| !image.holders.contains(node)),
        );
        let quickest = self.asked.world.readers().quickest(image.size);
        let others: Vec<NodeId> = quickest
            .map(|(node, _)| node)
            .filter(|node| !nodes.contains(node))
            .take(self.limit + MORE)
            .collect();
        nodes.extend(others);
        nodes
    }
}

/// An image and its holders.
struct Image {
    /// Bytes that a restore reads.
    size: Bytes,
    /// Bytes of zero pages, and of pages that are the parent's: the first need not be sent, the others not to a
    /// node that holds the parent.
    zero: Bytes,
    of_parent_bytes: Bytes,
    /// Nodes that hold the whole image.
    holders: Vec<NodeId>,
    /// Bytes of holders' copies that are in an object store.
    cold: Vec<(NodeId, Bytes)>,
    /// Nodes that hold its parent.
    of_parent: Vec<NodeId>,
}

impl Image {
    fn new(asked: &Asked<'_>, checkpoint: &Checkpoint, jobs: &Jobs) -> Self {
        let parent = match checkpoint.parent_generation {
            0 => None,
            generation => jobs
                .get(&checkpoint.job)
                .and_then(|job| job.generation(generation)),
        };
        Self {
            size: Bytes::new(checkpoint.memory_bytes),
            zero: Bytes::new(checkpoint.zero_bytes),
            of_parent_bytes: Bytes::new(checkpoint.parent_bytes),
            holders: holders(asked, checkpoint),
            cold: cold(asked, checkpoint),
            of_parent: parent
                .map(|parent| holders(asked, parent))
                .unwrap_or_default(),
        }
    }

    /// Returns the bytes that a node lacks, and the live holder from which they come soonest with the link to it.
    /// `None` for a holder.
    fn lacks<'a>(
        &self,
        asked: &Asked<'a>,
        node: NodeId,
    ) -> Option<(Option<NodeId>, MissingPages<'a>)> {
        if self.holders.contains(&node) {
            return None;
        }
        let mut bytes = self.size.less(self.zero);
        if self.of_parent.contains(&node) {
            bytes = bytes.less(self.of_parent_bytes);
        }
        let time = |holder: NodeId, link: &SizedRates| {
            let sent = bytes.at(link.of(bytes).known().ok()?.p50);
            let Some(recall) = self.recall(asked, holder) else {
                return Some(sent);
            };
            let rate = recall.rates.of(recall.bytes).known().ok()?.p50;
            Some(sent.plus(recall.bytes.at(rate)))
        };
        let mut best: Option<(Seconds, NodeId, &SizedRates)> = None;
        let mut first = None;
        for holder in &self.holders {
            if !asked
                .world
                .node(*holder)
                .is_some_and(|holder| holder.restores())
            {
                continue;
            }
            let link = asked.world.link(*holder, node);
            match time(*holder, link) {
                Some(time) if best.is_none_or(|(other, ..)| time < other) => {
                    best = Some((time, *holder, link));
                }
                _ => {}
            }
            first = first.or(Some((*holder, link)));
        }
        let source = best.map(|(_, holder, link)| (holder, link)).or(first);
        let lacks = MissingPages {
            bytes,
            link: source.map_or(&NO_HOLDER, |(_, link)| link),
        };
        Some((source.map(|(holder, _)| holder), lacks))
    }

    /// Returns what comes back from a holder's object store before its copy is read.
    fn recall<'a>(&self, asked: &Asked<'a>, holder: NodeId) -> Option<Recall<'a>> {
        let (_, bytes) = *self.cold.iter().find(|(node, _)| *node == holder)?;
        let rates = &asked.world.node(holder)?.entry.figures.recall;
        Some(Recall { bytes, rates })
    }
}

/// Returns the nodes with a copy that is not known to be damaged. A store without a cluster names no nodes, and is the
/// only holder.
fn holders(asked: &Asked<'_>, checkpoint: &Checkpoint) -> Vec<NodeId> {
    let world = asked.world;
    let own = world.names().id(world.own_name());
    let mut holders: Vec<NodeId> = if checkpoint.nodes.is_empty() {
        own.into_iter().collect()
    } else {
        let whole = |name: &&String| !checkpoint.damaged_nodes.contains(name);
        let names = checkpoint.nodes.iter().filter(whole);
        names.filter_map(|name| world.names().id(name)).collect()
    };
    if !checkpoint.damaged.is_empty() {
        // The field describes this node's copy only.
        holders.retain(|holder| Some(*holder) != own);
    }
    holders
}

/// Returns the nodes with a part of their copy in an object store, and its bytes.
fn cold(asked: &Asked<'_>, checkpoint: &Checkpoint) -> Vec<(NodeId, Bytes)> {
    let world = asked.world;
    let copies = checkpoint.cold.iter();
    copies
        .filter_map(|copy| {
            // A store without a cluster names no nodes.
            let name = match copy.node.as_str() {
                "" => world.own_name(),
                name => name,
            };
            Some((world.names().id(name)?, Bytes::new(copy.bytes)))
        })
        .collect()
}

/// Returns the rate at which pages follow: that of the node's lazy restores of as many bytes, or if none was measured,
/// that of its smallest transfers; over a link no more than that of the link's smallest.
fn lazy(
    how: permafrost_api_types::resume::Lazy,
    size: Bytes,
    figures: &NodeFigures,
    lacks: Option<&MissingPages<'_>>,
) -> LazyRestore {
    let page = Bytes::new(4096);
    let here = match figures.lazy.of(size.less(how.eager_bytes)) {
        Figure::Unknown { .. } => figures.read.of(page),
        known @ Figure::Known(_) => known,
    };
    let slower = |a: Figure<BytesPerSecond>, b: Figure<BytesPerSecond>| match (a.known(), b.known())
    {
        (Ok(a_known), Ok(b_known)) if a_known.p50 <= b_known.p50 => a,
        (Ok(_), _) => b,
        (Err(_), _) => a,
    };
    let rate = match (how.bytes_per_s, lacks) {
        (Some(rate), _) => Figure::given(rate),
        (None, None) => here,
        (None, Some(lacks)) => slower(here, lacks.link.of(page)),
    };
    LazyRestore {
        eager: how.eager_bytes,
        rate,
    }
}
