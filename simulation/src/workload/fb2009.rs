//! FB-2009: 24 hours of a Facebook Hadoop cluster (SWIMProjectUCB/SWIM, `workloadSuite/`).

use std::path::Path;

use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};

use super::trace::{MOST_TASKS, TraceError, lines};
use super::{JobSpec, NodeSpec, TaskSpec, Workload, resources};
use crate::random::Random;

/// Data that the trace lacks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fb2009 {
    /// Seed of priorities and times.
    pub seed: u64,
    /// Share of the jobs that have high priority.
    pub high_share: f64,
    /// Median time of a map of 128 MiB, seconds.
    pub map_s: f64,
    /// Median time of a reduce of 1 GiB, seconds.
    pub reduce_s: f64,
    /// Nodes of 24 containers of one core and 2 GB, as in paper 000, §5.3.1.
    pub nodes: usize,
}

impl Default for Fb2009 {
    fn default() -> Self {
        Self {
            seed: 1,
            high_share: 0.3,
            map_s: 30.0,
            reduce_s: 120.0,
            nodes: 8,
        }
    }
}

/// Input of a map.
const MAP_BYTES: u64 = 128 << 20;
/// Shuffled bytes of a reduce.
const REDUCE_BYTES: u64 = 1 << 30;
/// Most tasks of one job: one of a petabyte has 8 million.
const MOST_TASKS_OF_A_JOB: u64 = 8_000_000;

const UNSORTED: &str = "sort the file by its second column, as by sort -s -n -k2,2";

/// Reads the trace: six columns, separated by tabs: job, submit time (s), gap to the job before (s), bytes of map
/// input, of shuffle, of reduce output. A job has one map for each 128 MiB of input, at least one, and then one reduce
/// for each GiB of shuffle, none if nothing is shuffled. The whole trace has 227,608 tasks so.
///
/// # Errors
///
/// [`TraceError`] names the line, and what to do.
pub fn read(path: &Path, missing: &Fb2009) -> Result<Workload, TraceError> {
    let mut random = Random::new(missing.seed);
    let node = NodeSpec::new(resources(24_000, Bytes::new(48_000_000_000)));
    let mut workload = Workload::on("fb2009", vec![node; missing.nodes]);
    let (mut no_input, mut before, mut tasks) = (0_u64, 0.0, 0_usize);
    lines(path, |place, text| {
        let mut columns = text.split('\t');
        let name = columns.next().unwrap_or_default();
        let submitted = place.number("submit time", columns.next())?;
        place.number("gap", columns.next())?;
        let input = place.whole("number of bytes of map input", columns.next())?;
        let shuffle = place.whole("number of bytes of shuffle", columns.next())?;
        place.number("number of bytes of reduce output", columns.next())?;
        if columns.next().is_some() {
            return Err(place.refuse(
                "it has more than six columns",
                "two lines may be joined: fetch the trace again",
            ));
        }
        if submitted < before {
            let what = format!("{name} was submitted at {submitted} s, before the job before it");
            return Err(place.refuse(what, UNSORTED));
        }
        before = submitted;
        no_input += u64::from(input == 0);
        let maps = input.div_ceil(MAP_BYTES).max(1);
        let reduces = shuffle.div_ceil(REDUCE_BYTES);
        if maps.saturating_add(reduces) > MOST_TASKS_OF_A_JOB {
            let what = format!("{name} has {maps} maps and {reduces} reduces");
            return Err(place.refuse(what, "no job moves a petabyte: correct the sizes"));
        }
        let mut stage = |count: u64, median: f64| -> Vec<TaskSpec> {
            let task = |_| TaskSpec {
                work: Seconds::clamped(random.log_normal(median, 0.3)),
                asks: resources(1000, Bytes::new(2_000_000_000)),
                memory: Bytes::new(1_800_000_000),
                dirty_rate: Some(BytesPerSecond::clamped(3e6)),
            };
            (0..count).map(task).collect()
        };
        let stages = vec![stage(maps, missing.map_s), stage(reduces, missing.reduce_s)];
        tasks += stages.iter().map(Vec::len).sum::<usize>();
        if tasks > MOST_TASKS {
            return Err(TraceError::TooManyTasks {
                path: path.to_owned(),
                line: place.line,
                limit: MOST_TASKS,
            });
        }
        workload.jobs.push(JobSpec {
            submitted: Moment::default().after(Seconds::clamped(submitted)),
            priority: if random.uniform() < missing.high_share {
                9
            } else {
                0
            },
            deadline: None,
            flow: None,
            stages,
        });
        Ok(())
    })?;
    let jobs = workload.jobs.len();
    workload.remarks = vec![
        format!(
            "{jobs} jobs and {tasks} tasks of 1.8 GB; {no_input} jobs without map input have one map all the same."
        ),
        format!(
            "The trace has no priorities, times and nodes. Assumed: {} % of the jobs have high priority; a map takes \
             {} s at the median, a reduce {} s; {} nodes of 24 containers.",
            missing.high_share * 100.0,
            missing.map_s,
            missing.reduce_s,
            missing.nodes
        ),
    ];
    Ok(workload)
}
