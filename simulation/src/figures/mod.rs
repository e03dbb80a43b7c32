//! Figures of the papers: their numbers, those of the simulation, and the deviation.

mod bigc;
mod li2015;
mod natjam;
mod natjam_traces;
mod pado;
mod spark;
mod suspend;
mod write;

use std::path::Path;

use permafrost_scheduling::policy::pado::BadDataflow;
use permafrost_scheduling::policy::{Name, PolicySettings, UnknownPolicy};
use serde::Serialize;
use thiserror::Error;

use crate::engine::{EngineConfig, Run, SimulationError};
use crate::medium::StorageMedium;
use crate::sweep::{Case, SweepProgress, sweep};
use crate::workload::{TraceError, Workload};
pub use li2015::YARN_TASK_S;
pub use write::{WriteError, csv, outcomes_csv, svg, text};

/// A number of a figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Name of the number.
    pub what: String,
    /// Unit of the number.
    pub unit: &'static str,
    /// The paper's, as printed there; none where the paper has a curve without numbers.
    pub paper: Option<f64>,
    /// Number that the simulation gives.
    pub ours: f64,
}

impl Row {
    fn new(what: impl Into<String>, unit: &'static str, paper: Option<f64>, ours: f64) -> Self {
        Self {
            what: what.into(),
            unit,
            paper,
            ours,
        }
    }

    /// Returns the simulation's number less the paper's.
    #[must_use]
    pub fn deviation(&self) -> Option<f64> {
        Some(self.ours - self.paper?)
    }
}

/// A figure with its numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PaperFigure {
    /// Paper and figures, such as `000-F3`.
    pub id: &'static str,
    /// Title of the figure.
    pub title: &'static str,
    /// Workload, marked if it is synthetic.
    pub workload: String,
    /// Assumptions that its workload makes, one sentence each.
    pub remarks: Vec<String>,
    /// Numbers, in the paper's order.
    pub rows: Vec<Row>,
}

/// A figure that cannot be made.
#[derive(Debug, Error)]
pub enum FigureError {
    /// There is no such figure.
    #[error("there is no figure {id:?}; there are {}", ids().join(", "))]
    Unknown {
        /// Id that was given.
        id: String,
    },
    /// It is made of the trace FB-2009, which was not given.
    #[error("figure {id} is made of the trace FB-2009, which is not part of this program")]
    NoTrace {
        /// Id that was given.
        id: &'static str,
    },
    /// The trace cannot be replayed.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A policy that it compares is missing.
    #[error(transparent)]
    Policy(#[from] UnknownPolicy),
    /// A job of its workload has no right dataflow.
    #[error(transparent)]
    Dataflow(#[from] BadDataflow),
    /// A run has no outcome.
    #[error(transparent)]
    Simulation(#[from] SimulationError),
}

type Make = fn(seed: u64, watch: &mut dyn FnMut(SweepProgress)) -> Result<PaperFigure, FigureError>;

type MakeOfTrace =
    fn(&Path, u64, &mut dyn FnMut(SweepProgress)) -> Result<PaperFigure, FigureError>;

/// Figures of the trace FB-2009: id, and how it is made.
const OF_TRACE: [(&str, MakeOfTrace); 7] = [
    ("002-F7", natjam_traces::figure_7),
    ("002-F8", natjam_traces::figure_8),
    ("002-F9", natjam_traces::figure_9),
    ("002-F12", natjam_traces::figure_12),
    ("002-F13", natjam_traces::figure_13),
    ("002-F14", natjam_traces::figure_14),
    ("002-F15", natjam_traces::figure_15),
];

/// Figures that need no trace: id, and how it is made.
const FIGURES: [(&str, Make); 20] = [
    ("000-F3", li2015::figure_3),
    ("000-F4", li2015::figures_4_and_6),
    ("000-F5", li2015::figure_5),
    ("000-F8", li2015::figures_8_to_12),
    ("001-F2", suspend::figure_2),
    ("001-F3", suspend::figure_3),
    ("001-F4", suspend::figure_4),
    ("002-F4", natjam::figure_4),
    ("002-F5", natjam::figure_5),
    ("002-F6", natjam::figure_6),
    ("002-F10", natjam::figure_10),
    ("002-F11", natjam::figure_11),
    ("003-F5", pado::figure_5),
    ("003-F6", pado::figure_6),
    ("003-F7", pado::figure_7),
    ("003-F8", pado::figure_8),
    ("003-F9", pado::figure_9),
    ("004-F5", bigc::figure_5),
    ("004-F7", bigc::figure_7),
    ("004-F8", bigc::figure_8),
];

/// Returns the ids of all figures; those of the trace FB-2009 come last.
#[must_use]
pub fn ids() -> Vec<&'static str> {
    let of_trace = OF_TRACE.iter().map(|(id, _)| *id);
    FIGURES.iter().map(|(id, _)| *id).chain(of_trace).collect()
}

/// Returns true if a figure is made of the trace FB-2009.
#[must_use]
pub fn needs_trace(id: &str) -> bool {
    (OF_TRACE.iter()).any(|(known, _)| known.eq_ignore_ascii_case(id))
}

/// Makes a figure; some are made of the trace FB-2009, in the file `fb2009`.
///
/// # Errors
///
/// [`FigureError`].
pub fn make(
    id: &str,
    seed: u64,
    fb2009: Option<&Path>,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let mut of_trace = OF_TRACE.iter();
    if let Some((id, make)) = of_trace.find(|(known, _)| known.eq_ignore_ascii_case(id)) {
        return make(fb2009.ok_or(FigureError::NoTrace { id })?, seed, watch);
    }
    let found = FIGURES
        .iter()
        .find(|(known, _)| known.eq_ignore_ascii_case(id));
    let (_, make) = found.ok_or_else(|| FigureError::Unknown { id: id.to_owned() })?;
    make(seed, watch)
}

/// Runs a workload under policies on media; the results are in the same order.
fn runs(
    workload: &Workload,
    cases: &[(&str, StorageMedium)],
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<Vec<Run>, FigureError> {
    let cases = cases.iter().map(|(policy, medium)| {
        Ok(Case {
            workload,
            policy: policy.parse::<Name>()?,
            config: EngineConfig::with(medium.clone()),
            settings: PolicySettings {
                seed,
                ..PolicySettings::default()
            },
        })
    });
    let cases = cases.collect::<Result<Vec<_>, UnknownPolicy>>()?;
    let results = sweep(&cases, watch);
    Ok(results.into_iter().collect::<Result<_, _>>()?)
}

/// Returns by how many per cent a number is larger than another.
fn percent_more(ours: f64, than: f64) -> f64 {
    if than == 0.0 {
        return 0.0;
    }
    (ours / than - 1.0) * 100.0
}
