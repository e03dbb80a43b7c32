//! openb: pods and nodes of a GPU cluster (alibaba/clusterdata, `cluster-trace-gpu-v2023/csv/`).

use std::path::Path;

use permafrost_scheduling::quantity::{Bytes, Moment, Seconds};

use super::trace::{TraceError, lines};
use super::{JobSpec, NodeSpec, TaskSpec, Workload, resources};

/// Reads the pods, and the nodes from `openb_node_list_all_node.csv` beside them or from `nodes`. Each pod is a job of
/// one task, which works from when it was scheduled until it was deleted. GPUs are not simulated.
///
/// # Errors
///
/// [`TraceError`] names the line, and what to do.
pub fn read(pods: &Path, nodes: Option<&Path>) -> Result<Workload, TraceError> {
    let beside = pods.with_file_name("openb_node_list_all_node.csv");
    let mut workload = Workload::on("openb", read_nodes(nodes.unwrap_or(&beside))?);
    let (mut never, mut gpus) = (0_u64, 0_u64);
    lines(pods, |place, text| {
        if place.line == 1 && text.starts_with("name,") {
            return Ok(());
        }
        let columns: Vec<&str> = text.split(',').collect();
        if columns.len() != 11 {
            return Err(place.refuse(
                format!("it has {} columns and not 11", columns.len()),
                "the line is torn, or the file is no openb_pod_list: fetch it again",
            ));
        }
        let column = |index: usize| columns.get(index).copied();
        let cpu_millis = place.whole("cpu_milli", column(1))?;
        let memory = Bytes::mib(place.whole("memory_mib", column(2))?);
        gpus += u64::from(place.whole("num_gpu", column(3))? > 0);
        let created = place.number("creation_time", column(8))?;
        if column(10).is_none_or(|text| text.trim().is_empty()) {
            never += 1;
            return Ok(());
        }
        let deleted = place.number("deletion_time", column(9))?;
        let scheduled = place.number("scheduled_time", column(10))?;
        if scheduled < created || deleted < scheduled {
            return Err(place.refuse(
                format!("created at {created} s, scheduled at {scheduled} s, deleted at {deleted} s"),
                "a pod is created, scheduled and deleted in this order: correct the line, or remove it",
            ));
        }
        workload.jobs.push(JobSpec {
            submitted: Moment::default().after(Seconds::clamped(created)),
            priority: match column(6) {
                Some("LS" | "Guaranteed") => 9,
                Some("Burstable") => 4,
                _ => 0,
            },
            deadline: None,
            flow: None,
            stages: vec![vec![TaskSpec {
                work: Seconds::clamped(deleted - scheduled),
                asks: resources(cpu_millis, memory),
                memory,
                dirty_rate: None,
            }]],
        });
        Ok(())
    })?;
    // The trace is sorted by pods, not by time.
    workload.jobs.sort_by_key(|job| job.submitted);
    workload.heartbeat = Seconds::clamped(60.0);
    workload.remarks = vec![
        format!("{never} pods that were never scheduled have no time, and are left out."),
        format!(
            "{gpus} pods asked for GPUs, which are not simulated: there is more room than there was."
        ),
        "LS and Guaranteed pods have high priority, Burstable ones medium, BE low.".to_owned(),
    ];
    Ok(workload)
}

fn read_nodes(path: &Path) -> Result<Vec<NodeSpec>, TraceError> {
    let mut nodes = Vec::new();
    lines(path, |place, text| {
        if place.line == 1 && text.starts_with("sn,") {
            return Ok(());
        }
        let mut columns = text.split(',').skip(1);
        let cpu_millis = place.whole("cpu_milli", columns.next())?;
        let memory = Bytes::mib(place.whole("memory_mib", columns.next())?);
        nodes.push(NodeSpec::new(resources(cpu_millis, memory)));
        Ok(())
    })?;
    Ok(nodes)
}
