//! `cargo xtask bench clients`: measures dumps while clients query the HTTP API without pause, compared with dumps
//! beside the same clients of a stand-in.
//!
//! In turn, within one run: a process is dumped alone, beside clients of a stand-in that has only recorded answers,
//! and beside clients of the daemon. The clients check every answer, which takes a processor more time than to make
//! it; they are scheduled behind everything else, but on a small machine their part shows. So the time beside the
//! stand-in is what the API's is compared with: the clients of a real cluster are on other machines.

mod load;
mod questions;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::process;
use permafrost_tests::workload::{self, Workload};
use serde_json::{Value, json};

use self::load::{Load, StandIn, Tally};
use self::questions::Question;
use super::figures::{as_f64, median};
use crate::rig::{self, Interrupt};
use crate::{table, ui};

/// Name of the dumped job.
const JOB: &str = "beside-clients";

/// Options of the bench.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Number of full dumps, and of incremental dumps, in each of the three settings.
    #[arg(long, default_value_t = 15)]
    runs: usize,
    /// Size of the dumped process, MiB.
    #[arg(long, default_value_t = 256)]
    size: u64,
    /// Number of clients; each has a request under way at all times.
    #[arg(long, default_value_t = 64)]
    clients: usize,
    /// Tasks in a request, one number for each client in turn.
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 100, 1000, 1])]
    tasks: Vec<usize>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Activity beside which a dump is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    StandIn,
    Api,
}

const ALL: [Beside; 3] = [Beside::Nothing, Beside::StandIn, Beside::Api];

/// Dumps beside the same activity.
#[derive(Default)]
struct Dumps {
    full_s: Vec<f64>,
    incremental_s: Vec<f64>,
    /// Latencies that the clients measured meanwhile.
    tally: Tally,
}

/// Runs it and prints what it found.
///
/// # Errors
/// Fails when a dump fails, an answer is wrong, or the process is not sound afterwards.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.runs == 0 || options.clients == 0 || options.tasks.is_empty() {
        bail!("--runs, --clients and --tasks take at least 1");
    }
    super::criu()?;
    rig::build_release()?;
    let interrupt = Interrupt::catch()?;
    let region_mib = options.size * 4 + 256;
    let dir = rig::memory_dir(region_mib + options.size * 2)?;
    let region = daemon::Options {
        region_mib,
        ..daemon::Options::default()
    };
    let daemon = Daemon::start(dir.path(), &region)?;
    super::settle(&daemon)?;
    let mut dumps = [(); 3].map(|()| Dumps::default());
    measure(options, &daemon, dir.path(), &interrupt, &mut dumps)?;
    daemon.stop()?;
    super::show(options.json, || json(options, &dumps), || text(&dumps))
}

fn measure(
    options: &Options,
    daemon: &Daemon,
    dir: &Path,
    interrupt: &Interrupt,
    dumps: &mut [Dumps; 3],
) -> Result<()> {
    let wanted = workload::Options {
        size_mib: options.size,
        ..workload::Options::default()
    };
    let mut task = Workload::start(dir, &wanted)?;
    // What the answers are made of: dumps of both kinds, and restores.
    for full in [true, true, false, false] {
        dump(daemon, &task, full, None)?;
    }
    for _ in 0..2 {
        task.kill();
        daemon.json(&["restore", JOB])?;
    }
    // The API looks at the daemon each second.
    process::wait_for("the figures", Duration::from_secs(30), || {
        let nodes = daemon.json(&["nodes"])?;
        let read = rig::field(&nodes, "read_bytes_per_s");
        Ok(read.and_then(|read| read.get("p50")).map(|_| ()))
    })?;
    let questions = Question::all(daemon, &options.tasks)?;
    let stand_in = StandIn::start(&dir.join("stand-in.sock"), daemon, &questions)?;
    // How long the clients of the API wait beside a dump, before the first run.
    let mut load = Load::start(&api_of(daemon), options.clients, &questions)?;
    let warmed = dump(daemon, &task, true, Some(&mut load));
    stand_in.as_slow_as(&load.stop()?);
    warmed?;
    for run in 0..options.runs {
        for turn in 0..ALL.len() {
            interrupt.check()?;
            // None is always the first after another one.
            let index = (run + turn) % ALL.len();
            let of = &mut dumps[index];
            let place = match ALL[index] {
                Beside::Nothing => None,
                Beside::StandIn => Some(stand_in.path().to_owned()),
                Beside::Api => Some(api_of(daemon)),
            };
            let load = place.map(|place| Load::start(&place, options.clients, &questions));
            let mut load = load.transpose()?;
            let measured = [true, false].map(|full| dump(daemon, &task, full, load.as_mut()));
            if let Some(load) = load {
                of.tally.add(load.stop()?);
                if let Beside::Api = ALL[index] {
                    stand_in.as_slow_as(&of.tally);
                }
            }
            let [full, incremental] = measured;
            of.full_s.push(full?);
            of.incremental_s.push(incremental?);
            ui::say(&format!("run {run}, beside {:?}: {}", ALL[index], last(of)));
        }
    }
    if !task.verify()?.is_sound() {
        bail!("the process is not sound");
    }
    task.kill();
    Ok(())
}

fn last(of: &Dumps) -> String {
    let ms = |times: &[f64]| times.last().map_or(0.0, |time| time * 1e3);
    let [full, incremental] = [ms(&of.full_s), ms(&of.incremental_s)];
    format!("full {full:.0} ms, incremental {incremental:.0} ms")
}

/// Returns the path of the daemon's API socket, for schedulers of its own machine.
fn api_of(daemon: &Daemon) -> std::path::PathBuf {
    daemon.control().with_file_name("api.sock")
}

/// Makes a dump and returns its duration in seconds. The previous checkpoint is removed.
fn dump(daemon: &Daemon, task: &Workload, full: bool, load: Option<&mut Load>) -> Result<f64> {
    task.modify()?;
    let pid = task.pid().to_string();
    let mut arguments = vec!["dump", "--leave-running", "--job", JOB, "--pid", &pid];
    if full {
        arguments.push("--full");
    }
    let run = || daemon.json(&arguments);
    let dumped = match load {
        Some(load) => load.beside(run),
        None => run(),
    }?;
    let compared = dumped["checkpoint"]["parent_bytes"].as_u64() > Some(0);
    if compared == full {
        bail!("asked for a dump that is full: {full}, and got {dumped}");
    }
    let generation = dumped["checkpoint"]["generation"].as_u64();
    let generation = generation.context("a generation")?;
    if generation > 1 {
        daemon.run(&["rm", &format!("{JOB}@{}", generation - 1)])?;
    }
    let took = dumped["total_us"].as_u64().context("a dump's time")?;
    Ok(as_f64(took) / 1e6)
}

fn sorted_median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    median(&sorted).unwrap_or(f64::NAN)
}

/// Returns the ratios of the API's median dump times to those of the stand-in: full, incremental.
fn ratios(dumps: &[Dumps; 3]) -> [f64; 2] {
    let [_, stand_in, api] = dumps;
    [
        sorted_median(&api.full_s) / sorted_median(&stand_in.full_s),
        sorted_median(&api.incremental_s) / sorted_median(&stand_in.incremental_s),
    ]
}

fn text(dumps: &[Dumps; 3]) -> String {
    let heads = [
        "beside",
        "full dump",
        "incremental dump",
        "requests/s",
        "tasks/s",
        "p50",
        "p99",
    ];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let names = ["nothing", "clients of a stand-in", "clients of the API"];
    for (name, of) in names.into_iter().zip(dumps) {
        let ms = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        let mut row = vec![
            name.to_owned(),
            ms(sorted_median(&of.full_s)),
            ms(sorted_median(&of.incremental_s)),
        ];
        row.extend(match of.tally.rates() {
            None => [(); 4].map(|()| "–".to_owned()),
            Some(rates) => [
                format!("{:.0}", rates.requests_per_s),
                format!("{:.0}", rates.tasks_per_s),
                ms(rates.p50_s),
                ms(rates.p99_s),
            ],
        });
        rows.push(row);
    }
    let [full, incremental] = ratios(dumps).map(|ratio| (ratio - 1.0) * 1e2);
    let checked = dumps[2].tally.answers();
    format!(
        "{}\nThe API's part: full dumps {full:+.1} %, incremental {incremental:+.1} %; {checked} answers, all right\n",
        table::render(&rows)
    )
}

fn json(options: &Options, dumps: &[Dumps; 3]) -> Value {
    let [nothing, stand_in, api] = [0, 1, 2].map(|index| {
        let of: &Dumps = &dumps[index];
        let rates = of.tally.rates();
        json!({
            "full_s": of.full_s,
            "incremental_s": of.incremental_s,
            "full_median_s": sorted_median(&of.full_s),
            "incremental_median_s": sorted_median(&of.incremental_s),
            "answers": of.tally.answers(),
            "requests_per_s": rates.map(|rates| rates.requests_per_s),
            "tasks_per_s": rates.map(|rates| rates.tasks_per_s),
            "answer_p50_s": rates.map(|rates| rates.p50_s),
            "answer_p99_s": rates.map(|rates| rates.p99_s),
        })
    });
    let [full, incremental] = ratios(dumps);
    json!({
        "clients": options.clients,
        "tasks": options.tasks,
        "size_mib": options.size,
        "beside_nothing": nothing,
        "beside_stand_in": stand_in,
        "beside_api": api,
        "full_api_to_stand_in": full,
        "incremental_api_to_stand_in": incremental,
    })
}
