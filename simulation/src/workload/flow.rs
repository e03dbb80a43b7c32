//! Experiments of paper 003: dataflows on nodes that are taken away, and a few that stay.
//!
//! **Given.** 40 transient and 5 reserved containers of 4 cores; the lifetimes of transient ones (Table 1), a new one
//! for each that is taken away (§5.1.1). ALS: 10 iterations, 279 GB of shuffled data in all, 1.8 million users, 136,000
//! songs, rank 50, 13 min on Spark without evictions (§5.1.3, §5.2.1). MLR: 5 iterations of 550 gradients of 323 MB
//! and 22 aggregations, 303 aggregated vectors on Pado (§5.2.2). MR: 280 GB of input (§5.1.3).
//!
//! **Assumed.** 1 Gbit/s for a container; times and numbers of tasks where the paper has none. They are fitted to nothing.

use std::collections::BTreeMap;

use permafrost_scheduling::place::NodeClass;
use permafrost_scheduling::policy::pado::{
    BadDataflow, Dataflow, DataflowOperator, Dependency, Edge,
};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};

use super::{JobSpec, NodeChange, NodeSpec, TaskSpec, Workload, resources};
use crate::random::Random;

const GB: u64 = 1_000_000_000;
const MB: u64 = 1_000_000;

/// Time for which containers are taken away, seconds: longer than any run of the paper.
const EVICTIONS_S: f64 = 4.0 * 3600.0;

/// Dataflow of a job, and the output of a task of each operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowSpec {
    dataflow: Dataflow,
    outputs: Vec<Bytes>,
}

impl FlowSpec {
    /// Makes a dataflow of operators with the output of one of their tasks.
    ///
    /// # Errors
    ///
    /// [`BadDataflow`]: an edge names no operator, or the edges lead in a circle.
    pub fn new(
        operators: Vec<(DataflowOperator, Bytes)>,
        edges: Vec<Edge>,
    ) -> Result<Self, BadDataflow> {
        let (operators, outputs) = operators.into_iter().unzip();
        let dataflow = Dataflow::new(operators, edges)?;
        Ok(Self { dataflow, outputs })
    }

    /// Returns the operators and their edges.
    #[must_use]
    pub const fn dataflow(&self) -> &Dataflow {
        &self.dataflow
    }

    /// Returns the output of a task of an operator.
    #[must_use]
    pub fn output(&self, operator: u32) -> Bytes {
        let at = usize::try_from(operator).ok();
        let output = at.and_then(|at| self.outputs.get(at));
        output.copied().unwrap_or(Bytes::ZERO)
    }
}

/// Application of paper 003 (§5.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Application {
    /// Alternating least squares.
    Als,
    /// Multinomial logistic regression.
    Mlr {
        /// True if gradients of a node are added up before they leave it.
        aggregated: bool,
    },
    /// Sum of page views by map and reduce.
    MapReduce,
}

/// Rate at which transient containers are taken away (Table 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// No container is taken away.
    None,
    /// Safety margin of 5 %.
    Low,
    /// Safety margin of 1 %.
    Medium,
    /// Safety margin of 0.1 %.
    High,
}

impl Eviction {
    /// All rates, the lowest first.
    pub const ALL: [Self; 4] = [Self::None, Self::Low, Self::Medium, Self::High];

    /// Returns the name of the rate.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }

    /// Returns the minutes of the 10th, 50th and 90th percentile of a container's life.
    const fn percentiles(self) -> Option<[f64; 3]> {
        match self {
            Self::None => None,
            Self::Low => Some([1.0, 20.0, 276.0]),
            Self::Medium => Some([1.0, 10.0, 64.0]),
            Self::High => Some([1.0, 2.0, 19.0]),
        }
    }

    /// Draws the life of a container, seconds: uniform up to the 10th percentile, and uniform in its logarithm between
    /// the percentiles and beyond the last one.
    fn life(self, random: &mut Random) -> Option<f64> {
        let [p10, p50, p90] = self.percentiles()?;
        let part = random.uniform();
        let between = |from: f64, to: f64, share: f64| (from.ln() + (to / from).ln() * share).exp();
        let minutes = match part {
            part if part < 0.1 => p10 * (part / 0.1),
            part if part < 0.5 => between(p10, p50, (part - 0.1) / 0.4),
            part => between(p50, p90, (part - 0.5) / 0.4),
        };
        Some(minutes * 60.0)
    }
}

/// Builder of a job with a dataflow.
#[derive(Default)]
struct Flow {
    operators: Vec<(DataflowOperator, Bytes)>,
    stages: Vec<Vec<TaskSpec>>,
    edges: Vec<Edge>,
}

impl Flow {
    /// Adds an operator, and returns its number.
    fn add(
        &mut self,
        random: &mut Random,
        tasks: u32,
        seconds: f64,
        output: u64,
        from: &[(u32, Dependency)],
    ) -> u32 {
        let number = u32::try_from(self.operators.len()).unwrap_or(u32::MAX);
        // What has no input, reads it; the first model alone is created.
        let creates = from.is_empty() && tasks == 1;
        let operator = DataflowOperator { tasks, creates };
        self.operators.push((operator, Bytes::new(output)));
        let stage = (0..tasks).map(|_| TaskSpec {
            work: Seconds::clamped(random.log_normal(seconds, 0.1)),
            asks: resources(1000, Bytes::new(3 * GB)),
            memory: Bytes::new(3 * GB),
            dirty_rate: None,
        });
        self.stages.push(stage.collect());
        let edge = |(from, dependency): &(u32, Dependency)| Edge {
            from: *from,
            to: number,
            dependency: *dependency,
        };
        self.edges.extend(from.iter().map(edge));
        number
    }
}

fn als(flow: &mut Flow, random: &mut Random) {
    /// Shuffles: the input, and two in each iteration.
    const SHUFFLES: u64 = 21;
    const TASKS: u32 = 160;
    const GATHERS: u32 = 20;
    let shuffled = 279 * GB / SHUFFLES / u64::from(TASKS);
    // Rank 50, eight bytes each.
    let factors = [1_800_000 * 50 * 8, 136_000 * 50 * 8];
    let mut last = None;
    for (step, factor) in (0..SHUFFLES).zip(factors.into_iter().cycle()) {
        let from: Vec<_> = (last.iter())
            .map(|last| (*last, Dependency::OneToMany))
            .collect();
        let seconds = if step == 0 { 20.0 } else { 28.0 };
        let compute = flow.add(random, TASKS, seconds, shuffled, &from);
        let gathered = factor / u64::from(GATHERS);
        let all = [(compute, Dependency::ManyToMany)];
        last = Some(flow.add(random, GATHERS, 4.0, gathered, &all));
    }
}

fn mlr(flow: &mut Flow, random: &mut Random, aggregated: bool) {
    let vector = 323 * MB;
    let sent = if aggregated {
        vector * 303 / 550
    } else {
        vector
    };
    let mut model = flow.add(random, 1, 1.0, vector, &[]);
    for _ in 0..5 {
        let from = [(model, Dependency::OneToMany)];
        let gradients = flow.add(random, 550, 60.0, sent, &from);
        let all = [(gradients, Dependency::ManyToMany)];
        let sums = flow.add(random, 22, 5.0, vector, &all);
        let from = [(model, Dependency::OneToOne), (sums, Dependency::ManyToOne)];
        model = flow.add(random, 1, 1.0, vector, &from);
    }
}

fn map_reduce(flow: &mut Flow, random: &mut Random) {
    const BLOCK: u64 = 125 * MB;
    let maps = u32::try_from(280 * GB / BLOCK).unwrap_or(u32::MAX);
    let map = flow.add(random, maps, 10.0, BLOCK, &[]);
    flow.add(random, 160, 30.0, 0, &[(map, Dependency::ManyToMany)]);
}

/// Makes an experiment of paper 003, Figures 5 to 9: so many `transient` and `reserved` containers.
///
/// # Errors
///
/// [`BadDataflow`]: none, as long as the applications here are right.
pub fn pado(
    application: Application,
    eviction: Eviction,
    (transient, reserved): (u32, u32),
    seed: u64,
) -> Result<Workload, BadDataflow> {
    let mut random = Random::new(seed);
    let node = |class: NodeClass, gb: u64| NodeSpec {
        class,
        ..NodeSpec::new(resources(4000, Bytes::new(gb * GB)))
    };
    let taken = node(NodeClass::Transient, 15);
    let count = |of: u32| usize::try_from(of).unwrap_or(0);
    let mut nodes = vec![node(NodeClass::Reserved, 30); count(reserved)];
    nodes.extend(vec![taken; count(transient)]);
    let (name, remark) = match application {
        Application::Als => ("als", "160 tasks of 28 s and 20 of 4 s an iteration's half"),
        Application::Mlr { .. } => ("mlr", "60 s a gradient, 5 s an aggregation"),
        Application::MapReduce => (
            "map-reduce",
            "10 s for 125 MB mapped and as much put out, 160 reduces of 30 s",
        ),
    };
    let mut workload = Workload::on(name, nodes);
    workload.synthetic = true;
    workload.network = BytesPerSecond::clamped(125e6);
    let mut flow = Flow::default();
    match application {
        Application::Als => als(&mut flow, &mut random),
        Application::Mlr { aggregated } => mlr(&mut flow, &mut random, aggregated),
        Application::MapReduce => map_reduce(&mut flow, &mut random),
    }
    workload.jobs = vec![JobSpec {
        submitted: Moment::default(),
        priority: 0,
        deadline: None,
        flow: Some(Box::new(FlowSpec::new(flow.operators, flow.edges)?)),
        stages: flow.stages,
    }];
    evict(&mut workload, eviction, taken, &mut random);
    workload.remarks = vec![
        format!(
            "Paper 003, §5: {transient} transient and {reserved} reserved containers of 4 cores."
        ),
        format!("Assumed: 1 Gbit/s a container, {remark}."),
    ];
    Ok(workload)
}

/// Takes transient nodes away when their lives end, and gives a new one for each.
fn evict(workload: &mut Workload, eviction: Eviction, transient: NodeSpec, random: &mut Random) {
    let at = |seconds: f64| Moment::default().after(Seconds::clamped(seconds));
    let mut ends: BTreeMap<(Moment, u32), f64> = BTreeMap::new();
    for (index, node) in (0..).zip(&workload.nodes) {
        if node.class == NodeClass::Transient
            && let Some(life) = eviction.life(random)
        {
            ends.insert((at(life), index), life);
        }
    }
    let mut next = u32::try_from(workload.nodes.len()).unwrap_or(u32::MAX);
    while let Some(((when, index), seconds)) = ends.pop_first() {
        if seconds > EVICTIONS_S {
            break;
        }
        workload.changes.push((when, NodeChange::Lost(index)));
        workload.changes.push((when, NodeChange::Joined(transient)));
        if let Some(life) = eviction.life(random) {
            ends.insert((at(seconds + life), next), seconds + life);
        }
        next += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lives_have_the_papers_percentiles() {
        let mut random = Random::new(3);
        let mut lives: Vec<f64> = (0..20_000)
            .filter_map(|_| Eviction::High.life(&mut random))
            .collect();
        lives.sort_by(f64::total_cmp);
        let minutes = |part: usize| lives[lives.len() * part / 100] / 60.0;
        assert!((minutes(10) - 1.0).abs() < 0.1);
        assert!((minutes(50) - 2.0).abs() < 0.1);
        assert!((minutes(90) - 19.0).abs() < 2.0);
        assert_eq!(Eviction::None.life(&mut random), None);
    }

    #[test]
    fn a_circle_is_refused() {
        let operator = DataflowOperator {
            tasks: 1,
            creates: false,
        };
        let edge = |from, to| Edge {
            from,
            to,
            dependency: Dependency::OneToOne,
        };
        let operators = vec![(operator, Bytes::ZERO); 2];
        let circle = FlowSpec::new(operators, vec![edge(0, 1), edge(1, 0)]).unwrap_err();
        assert_eq!(circle.to_string(), "operator 0 depends on itself");
    }
}
