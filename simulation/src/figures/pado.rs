//! Figures of paper 003.

use std::sync::atomic::{AtomicU64, Ordering};

use permafrost_scheduling::policy::{Name, Policy, PolicySettings};

use super::spark::Spark;
use super::{FigureError, PaperFigure, Row};
use crate::engine::{EngineConfig, Run, TaskOutput, run};
use crate::medium::StorageMedium;
use crate::sweep::{SweepProgress, each};
use crate::workload::{Application, Eviction, pado};

/// Runs that a number is the mean of: the paper's five (§5.1.3).
const RUNS: u64 = 5;

/// Reserved containers of Figures 5 to 7.
const TRANSIENT: u32 = 40;
const CONTAINERS: (u32, u32) = (TRANSIENT, 5);

/// Engines that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Spark,
    SparkCheckpoint,
    Pado,
}

const ENGINES: [(Engine, &str); 3] = [
    (Engine::Spark, "Spark"),
    (Engine::SparkCheckpoint, "Spark-checkpoint"),
    (Engine::Pado, "Pado"),
];

/// Time of a job, minutes, and the tasks that were started more than once, per cent.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    minutes: f64,
    relaunched: f64,
}

/// A number of runs of one engine.
#[derive(Clone, Copy, Debug)]
struct Experiment {
    engine: Engine,
    application: Application,
    eviction: Eviction,
    /// Transient and reserved ones.
    containers: (u32, u32),
}

impl Experiment {
    /// Returns the number of tasks of a run.
    fn tasks(self) -> u64 {
        let workload = pado(self.application, Eviction::None, self.containers, 0);
        workload.map_or(0, |workload| workload.tasks().count() as u64)
    }

    fn run(self, seed: u64) -> Result<Run, FigureError> {
        let application = match self.application {
            Application::Mlr { .. } => Application::Mlr {
                aggregated: self.engine == Engine::Pado,
            },
            other => other,
        };
        let workload = pado(application, self.eviction, self.containers, seed)?;
        let mut policy: Box<dyn Policy> = match self.engine {
            Engine::Spark => Box::new(Spark::new(false)),
            Engine::SparkCheckpoint => Box::new(Spark::new(true)),
            Engine::Pado => "pado".parse::<Name>()?.build(&PolicySettings::default()),
        };
        let [.., ssd, _] = StorageMedium::of_the_paper();
        let config = EngineConfig {
            outputs: match self.engine {
                Engine::Spark => TaskOutput::Kept,
                Engine::SparkCheckpoint | Engine::Pado => TaskOutput::Pushed,
            },
            ..EngineConfig::with(ssd)
        };
        Ok(run(&workload, &mut *policy, &config, None)?)
    }
}

/// Runs all experiments five times, and returns their means in the same order.
fn means(
    experiments: &[Experiment],
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<Vec<Mean>, FigureError> {
    let cases = experiments
        .iter()
        .flat_map(|experiment| (0..RUNS).map(move |run| (*experiment, seed + run)));
    let cases: Vec<(Experiment, u64)> = cases.collect();
    let run_one = |(experiment, seed): &(Experiment, u64), ended: &AtomicU64| {
        let run = experiment.run(*seed)?;
        ended.fetch_add(run.outcome.tasks, Ordering::Relaxed);
        Ok(run)
    };
    let tasks = |(experiment, _): &(Experiment, u64)| experiment.tasks();
    let runs = each(&cases, tasks, run_one, watch);
    let runs = runs
        .into_iter()
        .collect::<Result<Vec<Run>, FigureError>>()?;
    let of = |runs: &[Run]| {
        let mut mean = Mean::default();
        for run in runs {
            let tasks = run.outcome.tasks as f64;
            let again = run.started as f64 / tasks.max(1.0) - 1.0;
            mean.minutes += run.outcome.makespan_s / 60.0 / RUNS as f64;
            mean.relaunched += again * 100.0 / RUNS as f64;
        }
        mean
    };
    let count = usize::try_from(RUNS).unwrap_or(1);
    Ok(runs.chunks(count).map(of).collect())
}

/// The paper's numbers of one application under the high eviction rate.
struct Paper {
    /// Times as long as Pado: Spark, Spark-checkpoint.
    on_pado: [f64; 2],
    /// Minutes of Spark without evictions, and its relaunched tasks under the high rate, per cent.
    spark: Option<(f64, f64)>,
}

fn by_eviction(
    (id, title): (&'static str, &'static str),
    application: Application,
    paper: &Paper,
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let mut experiments = Vec::new();
    for eviction in Eviction::ALL {
        experiments.extend(ENGINES.map(|(engine, _)| Experiment {
            engine,
            application,
            eviction,
            containers: CONTAINERS,
        }));
    }
    let means = means(&experiments, seed, watch)?;
    let mut rows = Vec::new();
    for (eviction, means) in Eviction::ALL.into_iter().zip(means.chunks(ENGINES.len())) {
        let of_spark = |of: fn(&(f64, f64)) -> f64, at: Eviction, engine| {
            let is_its = eviction == at && engine == Engine::Spark;
            paper.spark.as_ref().filter(|_| is_its).map(of)
        };
        let name = eviction.name();
        for (mean, (engine, engine_name)) in means.iter().zip(ENGINES) {
            let what = format!("{name} evictions: time, {engine_name}");
            let paper = of_spark(|spark| spark.0, Eviction::None, engine);
            rows.push(Row::new(what, "min", paper, mean.minutes));
            let what = format!("{name} evictions: relaunched tasks, {engine_name}");
            let paper = of_spark(|spark| spark.1, Eviction::High, engine);
            rows.push(Row::new(what, "%", paper, mean.relaunched));
        }
        if let [spark, checkpoint, pado] = means {
            let others = [("Spark", spark), ("Spark-checkpoint", checkpoint)];
            for ((other, mean), number) in others.into_iter().zip(paper.on_pado) {
                let what = format!("{name} evictions: {other} on Pado");
                let number = (eviction == Eviction::High).then_some(number);
                let ours = mean.minutes / pado.minutes.max(1e-9);
                rows.push(Row::new(what, "times", number, ours));
            }
        }
    }
    let workload = pado(application, Eviction::High, CONTAINERS, seed)?;
    Ok(PaperFigure {
        id,
        title,
        workload: workload.title(),
        remarks: workload.remarks,
        rows,
    })
}

/// Alternating least squares.
pub(super) fn figure_5(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let paper = Paper {
        on_pado: [4.1, 2.1],
        spark: Some((13.0, 31.0)),
    };
    let title = "Pado: alternating least squares by eviction rate";
    by_eviction(("003-F5", title), Application::Als, &paper, seed, watch)
}

/// Multinomial logistic regression.
pub(super) fn figure_6(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let paper = Paper {
        on_pado: [3.5, 2.7],
        spark: None,
    };
    let title = "Pado: multinomial logistic regression by eviction rate";
    let application = Application::Mlr { aggregated: false };
    by_eviction(("003-F6", title), application, &paper, seed, watch)
}

/// Map and reduce.
pub(super) fn figure_7(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let paper = Paper {
        on_pado: [5.1, 1.3],
        spark: None,
    };
    let title = "Pado: map and reduce by eviction rate";
    by_eviction(
        ("003-F7", title),
        Application::MapReduce,
        &paper,
        seed,
        watch,
    )
}

/// Numbers of reserved containers of Figures 8 and 9.
const NUMBERS: [u32; 5] = [3, 4, 5, 6, 7];

const APPLICATIONS: [(Application, &str); 3] = [
    (Application::Als, "ALS"),
    (Application::Mlr { aggregated: false }, "MLR"),
    (Application::MapReduce, "MR"),
];

/// Makes a figure of all three applications, by numbers of containers; `containers` says which these are.
fn by_containers(
    (id, title): (&'static str, &'static str),
    containers: &str,
    rows: Vec<Row>,
    seed: u64,
) -> Result<PaperFigure, FigureError> {
    let mut remarks = pado(Application::MapReduce, Eviction::High, CONTAINERS, seed)?.remarks;
    if let Some(first) = remarks.first_mut() {
        *first = format!("Paper 003, {containers}");
    }
    Ok(PaperFigure {
        id,
        title,
        workload: "als, mlr, map-reduce (synthetic)".to_owned(),
        remarks,
        rows,
    })
}

/// Numbers of reserved containers, under the high eviction rate.
pub(super) fn figure_8(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let engines = [Engine::SparkCheckpoint, Engine::Pado];
    let mut experiments = Vec::new();
    for (application, _) in APPLICATIONS {
        for reserved in NUMBERS {
            experiments.extend(engines.map(|engine| Experiment {
                engine,
                application,
                eviction: Eviction::High,
                containers: (TRANSIENT, reserved),
            }));
        }
    }
    let means = means(&experiments, seed, watch)?;
    let mut rows = Vec::new();
    let of_application = means.chunks(NUMBERS.len() * engines.len());
    for ((_, name), means) in APPLICATIONS.into_iter().zip(of_application) {
        let (mut slowest, mut fastest, mut most) = (0.0_f64, f64::MAX, 0.0_f64);
        for (reserved, means) in NUMBERS.into_iter().zip(means.chunks(engines.len())) {
            let [checkpoint, pado] = means else { continue };
            let what = format!("{name}, {reserved} reserved: time, Spark-checkpoint");
            rows.push(Row::new(what, "min", None, checkpoint.minutes));
            let what = format!("{name}, {reserved} reserved: time, Pado");
            rows.push(Row::new(what, "min", None, pado.minutes));
            slowest = slowest.max(pado.minutes);
            fastest = fastest.min(pado.minutes);
            most = most.max(checkpoint.minutes / pado.minutes.max(1e-9));
        }
        let what = format!("{name}: Pado with 3 reserved on 7");
        let paper = (name == "MR").then_some(2.6);
        rows.push(Row::new(what, "times", paper, slowest / fastest.max(1e-9)));
        let what = format!("{name}: Spark-checkpoint on Pado, at most");
        let paper = (name == "MLR").then_some(3.8);
        rows.push(Row::new(what, "times", paper, most));
    }
    let title = "Pado: numbers of reserved containers under the high eviction rate";
    let containers = "§5.3: 40 transient containers of 4 cores, and 3 to 7 reserved ones.";
    by_containers(("003-F8", title), containers, rows, seed)
}

/// Numbers of containers, eight transient ones for each reserved one, under the high eviction rate.
///
/// The paper shows curves without numbers that fall with more containers.
pub(super) fn figure_9(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let mut experiments = Vec::new();
    for (application, _) in APPLICATIONS {
        experiments.extend(NUMBERS.map(|reserved| Experiment {
            engine: Engine::Pado,
            application,
            eviction: Eviction::High,
            containers: (8 * reserved, reserved),
        }));
    }
    let means = means(&experiments, seed, watch)?;
    let mut rows = Vec::new();
    for ((_, name), means) in APPLICATIONS.into_iter().zip(means.chunks(NUMBERS.len())) {
        for (reserved, mean) in NUMBERS.into_iter().zip(means) {
            let what = format!("{name}, {} and {reserved} containers: time", 8 * reserved);
            rows.push(Row::new(what, "min", None, mean.minutes));
        }
        if let [fewest, .., most] = means {
            let ours = fewest.minutes / most.minutes.max(1e-9);
            let what = format!("{name}: 24 and 3 on 56 and 7");
            rows.push(Row::new(what, "times", None, ours));
        }
    }
    let title = "Pado: numbers of containers under the high eviction rate";
    let containers = "§5.4: eight transient containers of 4 cores for each reserved one.";
    by_containers(("003-F9", title), containers, rows, seed)
}
