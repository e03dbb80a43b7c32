//! `permafrost simulate`: replays workloads through the policies that are deployed.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use permafrost_scheduling::policy::{Name, PolicySettings};
use permafrost_scheduling::quantity::{Bytes, Seconds};
use permafrost_scheduling::sensitivity::Jobs;
use permafrost_simulation::engine::{EngineConfig, Outcome, Run, run};
use permafrost_simulation::figures::{self, FigureError, PaperFigure};
use permafrost_simulation::medium::StorageMedium;
use permafrost_simulation::sweep::{Case, SweepProgress, sweep};
use permafrost_simulation::workload::{
    self, Band, Bursts, Fb2009, Google, Research, TraceError, Workload, natjam_deadlines,
    natjam_victims,
};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::table::{Align, Table};
use serde::Serialize;

use crate::against::{Against, Comparison};

/// Examples for the help of `permafrost simulate`.
pub const SIMULATE_EXAMPLES: &str = "\
WASTE is the processor time of work that was undone, of dumps and restores and of waiting for them, as a share of all \
that tasks held. LOW, MEDIUM and HIGH are mean response times of jobs by priority (0-1, 2-8, 9-11). A synthetic \
workload is marked wherever its results are shown; docs/simulation.md says what is assumed, and what was measured.

The same command gives the same bytes. With --out, tables (CSV), pictures (SVG) and results (JSON) go there too.

Traces are not part of this program: FB-2009 is in SWIMProjectUCB/SWIM, workloadSuite/; openb in alibaba/clusterdata, \
cluster-trace-gpu-v2023/csv/ (the list of nodes is to be beside that of the pods).

Examples:
    permafrost simulate --figure 000-F3 --figure 000-F5 --out figures
    permafrost simulate --workload google --policy kill,basic,adaptive --medium hdd,ssd,nvm
    permafrost simulate --workload fb2009 --trace FB-2009_samples_24_times_1hr_0.tsv --policy kill,li2015
    permafrost simulate --workload two-jobs --medium 500M --json
    permafrost simulate --workload yarn --policy kill,li2015 --medium ssd --against http://127.0.0.1:7119
";

/// Options of `permafrost simulate`.
#[derive(Debug, Args)]
pub struct SimulateArguments {
    /// Nodes and jobs.
    #[arg(long, value_enum, default_value = "google")]
    workload: WorkloadName,
    /// Trace of fb2009 or openb; FB-2009 for the figures 002-F7 to F9 and F12 to F15.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Policies that decide, compared with each other; or `all`.
    #[arg(long, value_name = "POLICIES", value_delimiter = ',', default_value = "wait,kill,basic,li2015,adaptive", value_parser = parse_policies)]
    policy: Vec<Policies>,
    /// hdd, ssd and nvm of Li et al. (Middleware '15, Table 3), or a bandwidth in bytes a second such as 500M.
    #[arg(
        long,
        value_name = "MEDIA",
        value_delimiter = ',',
        default_value = "nvm"
    )]
    medium: Vec<StorageMedium>,
    /// Swap of each node, bytes such as 4G: tasks can be suspended in memory there. Default: that of the workload.
    #[arg(long, value_name = "SIZE", value_parser = crate::tiers::parse_size, conflicts_with = "figure")]
    swap: Option<u64>,
    /// Seed of synthetic workloads, and of policies that draw.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Capacity or task time: machines of google [default: 763], median seconds of a task of yarn [default: 100].
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    fit: Option<u32>,
    /// Figure of a paper, beside its numbers; or `all` for which no trace is missing. Repeatable.
    #[arg(long, value_name = "ID", value_delimiter = ',', conflicts_with = "fit")]
    figure: Vec<String>,
    /// Have a running daemon choose the victims instead of the library, at each decision, and compare both: the URL of
    /// its API, or `socket` for the one beside --socket. A token is taken from PERMAFROST_API_TOKEN. For kill, basic,
    /// li2015 and adaptive.
    #[arg(long, value_name = "URL", conflicts_with = "figure")]
    against: Option<String>,
    /// File with the CA that the daemon's certificate is of.
    #[arg(long, value_name = "FILE", requires = "against")]
    api_ca: Option<PathBuf>,
    /// Directory for tables and pictures.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WorkloadName {
    /// A day calibrated on Google's aggregates of 2011; synthetic
    Google,
    /// FB-2009, read from --trace
    Fb2009,
    /// openb, read from --trace
    Openb,
    /// Two jobs on one machine (Li et al., Figures 4 and 6)
    TwoJobs,
    /// Eight nodes, 40 jobs, 7,000 tasks (Li et al., Figures 8 to 12); synthetic
    Yarn,
    /// Research-XL and Production-S (Natjam, Figure 5); synthetic
    Natjam,
    /// Three jobs with deadlines (Natjam, Figure 10); synthetic
    Deadlines,
    /// Two tasks of 2 GB on a machine of 4 GB with swap (OS-assisted preemption, Figure 3); synthetic
    Suspended,
    /// Long jobs and bursts of short ones (BIG-C, Figure 5, high load); synthetic
    Bursts,
    /// 3.8 hours of Google's trace by BIG-C's aggregates (BIG-C, Figure 8); synthetic
    GoogleHours,
}

#[derive(Clone, Debug)]
struct Policies(Vec<Name>);

fn parse_policies(text: &str) -> Result<Policies, String> {
    if text == "all" {
        return Ok(Policies(Name::ALL.to_vec()));
    }
    let name = text.parse::<Name>().map_err(|error| error.to_string())?;
    Ok(Policies(vec![name]))
}

/// Results of a command.
#[derive(Debug, Serialize)]
struct Results {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    remarks: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    outcomes: Vec<Outcome>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    figures: Vec<PaperFigure>,
    /// Decisions of the daemon beside those of the library.
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<Comparison>,
    /// Reasons of the runs that have no outcome.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    failed: Vec<String>,
}

/// Runs `permafrost simulate`.
///
/// # Errors
/// A bad option or trace; a policy that starts nothing any more; a file that cannot be written.
pub fn simulate(context: &Context, arguments: &SimulateArguments) -> Result<(), Failure> {
    let mut watch = Watch::new(context);
    let mut results = Results {
        remarks: Vec::new(),
        outcomes: Vec::new(),
        figures: Vec::new(),
        against: None,
        failed: Vec::new(),
    };
    let against = against(context, arguments)?;
    if arguments.figure.is_empty() {
        let mut workload = workload(arguments)?;
        if let Some(swap) = arguments.swap {
            workload = workload.with_swap(Bytes::new(swap));
        }
        let (runs, failed) = run_all(&workload, arguments, against.as_ref(), &mut watch);
        watch.clear();
        results.against = against.map(|against| against.comparison());
        results.failed = failed;
        tell_decision_times(context, &runs);
        results.remarks = workload.remarks;
        results.outcomes = runs.into_iter().map(|run| run.outcome).collect();
    } else {
        let trace = arguments.trace.as_deref();
        for id in figure_ids(&arguments.figure, trace) {
            let progress = &mut |progress| watch.update(progress);
            let figure = figures::make(&id, arguments.seed, trace, progress);
            watch.clear();
            results.figures.push(figure.map_err(figure_failure)?);
        }
    }
    if let Some(out) = &arguments.out {
        write_files(out, &results)?;
    }
    context.print(&results, text)?;
    if let Some(against) = &results.against {
        against.judge()?;
    }
    if results.failed.is_empty() {
        return Ok(());
    }
    Err(Failure::new(Code::Internal, results.failed.join("; ")))
}

/// Returns the daemon that is to be asked, if there is one.
fn against(context: &Context, arguments: &SimulateArguments) -> Result<Option<Against>, Failure> {
    let Some(url) = &arguments.against else {
        return Ok(None);
    };
    Against::check(arguments.policies())?;
    Against::new(context, url, arguments.api_ca.clone()).map(Some)
}

impl SimulateArguments {
    fn policies(&self) -> impl Iterator<Item = Name> + '_ {
        self.policy.iter().flat_map(|policies| &policies.0).copied()
    }
}

/// Returns the figures that are wanted; all of them are those that can be made.
fn figure_ids(given: &[String], trace: Option<&Path>) -> Vec<String> {
    if given.iter().any(|id| id == "all") {
        let ids = figures::ids().into_iter();
        let possible = ids.filter(|id| trace.is_some() || !figures::needs_trace(id));
        return possible.map(str::to_owned).collect();
    }
    given.to_vec()
}

fn figure_failure(error: FigureError) -> Failure {
    let code = match error {
        FigureError::Trace(error) => return trace_failure(error),
        FigureError::NoTrace { .. } => {
            return Failure::new(Code::Invalid, error.to_string())
                .hint("fetch it, and pass its path with --trace; see permafrost simulate --help");
        }
        FigureError::Unknown { .. } | FigureError::Policy(_) => Code::Invalid,
        FigureError::Simulation(_) | FigureError::Dataflow(_) => Code::Internal,
    };
    Failure::new(code, error.to_string())
}

fn trace_failure(error: TraceError) -> Failure {
    match error {
        TraceError::Io { path, error } => Failure::io("read", &path, &error),
        error => Failure::new(Code::Invalid, error.to_string()),
    }
}

fn workload(arguments: &SimulateArguments) -> Result<Workload, Failure> {
    let seed = arguments.seed;
    let trace = || {
        arguments.trace.as_deref().ok_or_else(|| {
            Failure::new(Code::Invalid, "this workload is read from a trace")
                .hint("fetch it, and pass its path with --trace; see permafrost simulate --help")
        })
    };
    let takes_trace = matches!(
        arguments.workload,
        WorkloadName::Fb2009 | WorkloadName::Openb
    );
    if arguments.trace.is_some() && !takes_trace {
        return Err(
            Failure::new(Code::Invalid, "this workload is not read from a trace")
                .hint("add --workload fb2009 or --workload openb, or leave --trace away"),
        );
    }
    let takes_fit = matches!(
        arguments.workload,
        WorkloadName::Google | WorkloadName::Yarn
    );
    if arguments.fit.is_some() && !takes_fit {
        return Err(Failure::new(
            Code::Invalid,
            "--fit is for google and yarn alone",
        ));
    }
    Ok(match arguments.workload {
        WorkloadName::Google => {
            let default = Google::default();
            let machines = arguments.fit.and_then(|fit| usize::try_from(fit).ok());
            workload::google(&Google {
                seed,
                machines: machines.unwrap_or(default.machines),
                ..default
            })
        }
        WorkloadName::Fb2009 => {
            let missing = Fb2009 {
                seed,
                ..Fb2009::default()
            };
            workload::fb2009(trace()?, &missing).map_err(trace_failure)?
        }
        WorkloadName::Openb => workload::openb(trace()?, None).map_err(trace_failure)?,
        WorkloadName::TwoJobs => workload::two_jobs(&Jobs::PAPER),
        WorkloadName::Yarn => {
            let task = arguments.fit.map_or(figures::YARN_TASK_S, f64::from);
            workload::yarn(seed, Seconds::clamped(task))
        }
        WorkloadName::Natjam => natjam_victims(Research::ExtraLarge, seed),
        WorkloadName::Deadlines => natjam_deadlines(),
        WorkloadName::Suspended => {
            let memory = Bytes::new(2_000_000_000);
            workload::suspended(memory, memory, 0.5)
        }
        WorkloadName::Bursts => workload::short_bursts(seed, Bursts::High),
        WorkloadName::GoogleHours => workload::google_hours(seed),
    })
}

fn run_all(
    workload: &Workload,
    arguments: &SimulateArguments,
    against: Option<&Against>,
    watch: &mut Watch<'_>,
) -> (Vec<Run>, Vec<String>) {
    let media = |policy: Name| {
        arguments.medium.iter().map(move |medium| Case {
            workload,
            policy,
            config: EngineConfig::with(medium.clone()),
            settings: PolicySettings {
                seed: arguments.seed,
                ..PolicySettings::default()
            },
        })
    };
    let cases: Vec<Case<'_>> = arguments.policies().flat_map(media).collect();
    let results = match against {
        None => sweep(&cases, |progress| watch.update(progress)),
        // One after the other: so the first differences are the same each time.
        Some(against) => {
            let one = |case: &Case<'_>| {
                let mut policy = against.build(case.policy, &case.settings);
                run(case.workload, &mut *policy, &case.config, None)
            };
            cases.iter().map(one).collect()
        }
    };
    let (mut runs, mut failed) = (Vec::new(), Vec::new());
    for (result, case) in results.into_iter().zip(&cases) {
        match result {
            Ok(run) => runs.push(run),
            Err(error) => failed.push(format!("{}: {error}", case.policy)),
        }
    }
    (runs, failed)
}

/// Tells on standard error how long decisions took: that differs between runs, and is no part of the results.
fn tell_decision_times(context: &Context, runs: &[Run]) {
    for run in runs {
        let (decided, outcome) = (&run.decided, &run.outcome);
        context.remark(&format!(
            "{} on {}: {} decisions took {}, half of them below {}, 99 % below {}",
            outcome.policy,
            outcome.medium,
            decided.count(),
            human::duration(decided.total()),
            human::duration(decided.quantile(0.5)),
            human::duration(decided.quantile(0.99)),
        ));
    }
}

fn text(results: &Results) -> String {
    let mut text = String::new();
    for figure in &results.figures {
        text.push_str(&figures::text(figure));
        text.push('\n');
    }
    let Some(first) = results.outcomes.first() else {
        return text;
    };
    let mark = if first.synthetic { ", synthetic" } else { "" };
    text.push_str(&format!("Workload {}{mark}\n", first.workload));
    for remark in &results.remarks {
        text.push_str(&format!("  {remark}\n"));
    }
    if first.misfits > 0 {
        let jobs = human::count(first.misfits, "job", "jobs");
        text.push_str(&format!(
            "  {jobs} with a task that fits no node left out.\n"
        ));
    }
    let mut table = Table::new([
        ("POLICY", Align::Left),
        ("MEDIUM", Align::Left),
        ("WASTE", Align::Right),
        ("ENERGY", Align::Right),
        ("LOW", Align::Right),
        ("MEDIUM", Align::Right),
        ("HIGH", Align::Right),
        ("MAKESPAN", Align::Right),
        ("PREEMPTED", Align::Right),
        ("KILLED", Align::Right),
    ]);
    for outcome in &results.outcomes {
        let mean = |band| {
            outcome
                .band(band)
                .map_or_else(|| "-".to_owned(), |of| human::seconds(of.mean_s))
        };
        table.row([
            outcome.policy.clone(),
            outcome.medium.clone(),
            format!("{:.1} %", outcome.waste * 100.0),
            format!("{:.1} kWh", outcome.energy_kwh),
            mean(Band::Low),
            mean(Band::Medium),
            mean(Band::High),
            human::seconds(outcome.makespan_s),
            outcome.counts.preemptions().to_string(),
            (outcome.counts.kills + outcome.counts.rollbacks).to_string(),
        ]);
    }
    text.push_str(&table.render());
    if let Some(against) = &results.against {
        text.push_str(&against.text());
    }
    text
}

fn write_files(out: &Path, results: &Results) -> Result<(), Failure> {
    std::fs::create_dir_all(out).map_err(|error| Failure::io("create", out, &error))?;
    let write = |name: &str, bytes: &[u8]| {
        let path = out.join(name);
        std::fs::write(&path, bytes).map_err(|error| Failure::io("write", &path, &error))
    };
    let made = |error: figures::WriteError| Failure::new(Code::Internal, error.to_string());
    for figure in &results.figures {
        write(
            &format!("{}.txt", figure.id),
            figures::text(figure).as_bytes(),
        )?;
        write(
            &format!("{}.csv", figure.id),
            &figures::csv(figure).map_err(made)?,
        )?;
        write(
            &format!("{}.svg", figure.id),
            figures::svg(figure).map_err(made)?.as_bytes(),
        )?;
    }
    if !results.outcomes.is_empty() {
        let outcomes: Vec<&Outcome> = results.outcomes.iter().collect();
        write(
            "outcomes.csv",
            &figures::outcomes_csv(&outcomes).map_err(made)?,
        )?;
    }
    let json = serde_json::to_vec_pretty(results);
    let json =
        json.map_err(|error| Failure::new(Code::Internal, format!("write JSON: {error}")))?;
    write("results.json", &json)
}

/// Shows on standard error how far the simulations have come: on a terminal one line, else a line every 5 s.
struct Watch<'a> {
    context: &'a Context,
    began: Instant,
    shown: Option<Instant>,
    terminal: bool,
}

impl<'a> Watch<'a> {
    fn new(context: &'a Context) -> Self {
        Self {
            context,
            began: Instant::now(),
            shown: None,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    fn update(&mut self, progress: SweepProgress) {
        if self.context.json || self.context.quiet || self.began.elapsed() < Duration::from_secs(1)
        {
            return;
        }
        let every = Duration::from_millis(if self.terminal { 200 } else { 5000 });
        if self.shown.is_some_and(|shown| shown.elapsed() < every) {
            return;
        }
        self.shown = Some(Instant::now());
        let line = format!(
            "permafrost: {} of {} simulations done, {} of {} tasks ended",
            progress.done, progress.cases, progress.ended, progress.tasks
        );
        let (before, after) = if self.terminal {
            ("\r", "\x1b[K")
        } else {
            ("", "\n")
        };
        // A closed standard error is ignored.
        let _ = write!(std::io::stderr(), "{before}{line}{after}");
    }

    fn clear(&mut self) {
        if self.terminal && self.shown.take().is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
        self.began = Instant::now();
    }
}
