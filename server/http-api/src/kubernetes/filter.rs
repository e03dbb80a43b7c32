//! `filter`: leaves out nodes on which a pod cannot run as required.
//!
//! A checkpoint can be read on any node, so nothing excludes a single one. Only a pod that requires its
//! checkpoint, by its own annotation, waits while no live node holds it: then no node will do, and preempting
//! another pod changes nothing.

use permafrost_api_types::jobs::ListedCheckpoint;
use permafrost_protocol::manifest::CheckpointRef;

use super::inner::{Inner, Refused};
use super::sites::Sites;
use super::types::{ExtenderArgs, ExtenderFilterResult};

pub(super) async fn filter(
    inner: &Inner,
    arguments: ExtenderArgs,
) -> Result<ExtenderFilterResult, Refused> {
    let pod = arguments.pod.as_ref();
    let pod = pod.filter(|pod| pod.must_resume());
    let hindrance = match pod.and_then(|pod| pod.job()) {
        Some(job) => hindrance(inner, job).await?,
        None => pod.and_then(|pod| pod.wrong_job()),
    };
    let Some(why) = hindrance else {
        return Ok(ExtenderFilterResult {
            nodes: arguments.nodes,
            node_names: arguments.node_names,
            ..ExtenderFilterResult::default()
        });
    };
    let refused = arguments.names().into_iter();
    let refused = refused.map(|name| (name.to_owned(), why.clone())).collect();
    Ok(ExtenderFilterResult {
        nodes: arguments.nodes.map(|mut nodes| {
            nodes.items = Some(Vec::new());
            nodes
        }),
        node_names: arguments.node_names.map(|_| Vec::new()),
        failed_and_unresolvable_nodes: refused,
        ..ExtenderFilterResult::default()
    })
}

/// Returns the reason why `job`, a job or a checkpoint, cannot be resumed anywhere now; `None` if it can.
async fn hindrance(inner: &Inner, job: &str) -> Result<Option<String>, Refused> {
    let Ok(name) = job.parse::<CheckpointRef>() else {
        return Ok(Some(format!("{job:?} is no job and no checkpoint")));
    };
    let Some(checkpoint) = find(inner, &name).await? else {
        return Ok(Some(format!("there is no checkpoint of {job} to resume")));
    };
    let (nodes, _) = inner.nodes().await?;
    let sites = Sites::new(&nodes);
    if checkpoint.holders.iter().any(|holder| sites.reads(holder)) {
        return Ok(None);
    }
    let holders = match checkpoint.holders.as_slice() {
        [] => "no node".to_owned(),
        holders => holders.join(", "),
    };
    Ok(Some(format!(
        "no node that is there holds {}: {holders} did",
        checkpoint.checkpoint
    )))
}

async fn find(inner: &Inner, name: &CheckpointRef) -> Result<Option<ListedCheckpoint>, Refused> {
    let Some(generation) = name.generation else {
        let jobs = inner.job(name.job.as_str()).await?;
        let job = jobs.and_then(|jobs| jobs.jobs.into_iter().next());
        return Ok(job.and_then(|job| job.last));
    };
    let checkpoints = inner.checkpoints(name.job.as_str()).await?;
    let mut checkpoints = checkpoints
        .into_iter()
        .flat_map(|answer| answer.checkpoints);
    Ok(checkpoints.find(|one| one.generation == generation && one.kind == "full"))
}
