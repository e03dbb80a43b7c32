//! `cargo xtask bench replicas`: a dump that is on two nodes when it is acknowledged, beside CRIU's own ways to bring
//! one to another machine, and beside the raw speed of QUIC over the same link.
//!
//! Two hosts, each a network namespace. The process runs, and is dumped, on the first; its memory is to be on the
//! second.

mod child;
mod contenders;
mod progress;
pub(super) mod repair;
mod report;
mod site;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use permafrost_tests::contents::Contents;
use permafrost_tests::workload::{self, Workload};

use self::contenders::{Contender, Sample};
use self::progress::Progress;
use self::site::{Site, Size};
use crate::rig::{self, Interrupt};

const ABOUT: &str = "\
Contenders, in turn:
    page-server        `criu dump --page-server` to `criu page-server`, TCP: one copy, on the other host's tmpfs
    page-server --tls  the same through TLS
    permafrost         `permafrost dump` on one of two nodes, --copies 2 --durability all: two copies
    bare QUIC          as many bytes on one stream of a quinn pair, nothing stored: what the link gives

Needs root, CRIU, etcd and iproute2. Everything is on one machine, whose processors all of them share: only the
ratios of one run hold. The first dump of each kind is brought back from the other host's copy, and checked.

Examples:
    cargo xtask bench replicas
    cargo xtask bench replicas --sizes 512 --mtus 9000 --contents heap --runs 3
    cargo xtask bench replicas --only page-server-tls,bare-quic --json
";

/// Options of the bench.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = ABOUT)]
pub(crate) struct Options {
    /// Sizes of the dumped process, MiB.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 2048])]
    sizes: Vec<u64>,
    /// Contents of the process: random, heap, zero-rich (three pages of four are zero), text.
    #[arg(long, value_delimiter = ',', default_values_t = [Contents::Random, Contents::Heap, Contents::ZeroRich])]
    contents: Vec<Contents>,
    /// MTUs of the link, bytes.
    #[arg(long, value_delimiter = ',', default_values_t = [1500, 9000], value_parser = clap::value_parser!(u32).range(1280..=9000))]
    mtus: Vec<u32>,
    /// Speed of the link, Mbit/s; not limited unless told.
    #[arg(long)]
    mbit: Option<u32>,
    /// Dumps of each kind by each contender, in turn.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Only these contenders.
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Contender>,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
}

/// Setting of the measurements in one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setting {
    mtu: u32,
    size_mib: u64,
    contents: Contents,
}

impl std::fmt::Display for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} MiB, {}, MTU {}",
            self.size_mib, self.contents, self.mtu
        )
    }
}

/// All measurements in one setting.
struct Measured {
    setting: Setting,
    samples: Vec<(Contender, Vec<Sample>)>,
}

impl Options {
    fn contenders(&self) -> Vec<Contender> {
        let wanted = |contender: &Contender| self.only.is_empty() || self.only.contains(contender);
        Contender::ALL.into_iter().filter(wanted).collect()
    }

    fn settings(&self, mtu: u32) -> Vec<Setting> {
        let of_size = |&size_mib| {
            self.contents.iter().map(move |&contents| Setting {
                mtu,
                size_mib,
                contents,
            })
        };
        self.sizes.iter().flat_map(of_size).collect()
    }
}

/// Runs the benches and prints what they found, also when they do not come to their end.
///
/// # Errors
/// Fails where CRIU, etcd or network namespaces cannot be had, and when a dump fails or a process that was restored
/// from the other host's copy is not sound.
pub(crate) fn run(options: &Options) -> Result<()> {
    let criu = super::criu()?;
    ensure!(options.runs > 0, "no runs: nothing to measure");
    rig::build_release()?;
    let interrupt = Interrupt::catch()?;
    let mut measured = Vec::new();
    let outcome = measure_all(options, &criu, &interrupt, &mut measured);
    if outcome.is_err() && measured.is_empty() {
        return outcome;
    }
    // After Ctrl-C, or a failure, what there is so far: it may have taken an hour.
    let report = report::Report {
        criu: &criu,
        mbit: options.mbit,
        measured: &measured,
    };
    super::show(options.json, || report.json(), || report.text())?;
    outcome
}

/// Adds each setting to `measured` when all of its runs are done.
fn measure_all(
    options: &Options,
    criu: &Path,
    interrupt: &Interrupt,
    measured: &mut Vec<Measured>,
) -> Result<()> {
    let contenders = options.contenders();
    let work: u64 = options
        .mtus
        .iter()
        .flat_map(|&mtu| options.settings(mtu))
        .map(|setting| progress::weight(setting.size_mib))
        .sum();
    let runs = u64::try_from(contenders.len() * options.runs).unwrap_or(u64::MAX);
    let mut progress = Progress::begin(work.saturating_mul(runs));
    let largest_mib = options.sizes.iter().max().copied().unwrap_or(0);
    for &mtu in &options.mtus {
        let with_nodes = contenders.contains(&Contender::Permafrost);
        let size = Size {
            hosts: 2,
            mtu,
            mbit: options.mbit,
            node_mib: with_nodes.then_some(largest_mib),
            images_mib: largest_mib,
        };
        let site = Site::new(criu, &size)?;
        for setting in options.settings(mtu) {
            let mut samples: Vec<_> = contenders
                .iter()
                .map(|&contender| (contender, Vec::new()))
                .collect();
            for run in 0..options.runs {
                for (contender, samples) in &mut samples {
                    interrupt.check()?;
                    progress.step(&format!(
                        "{setting}: {contender}, run {} of {}",
                        run + 1,
                        options.runs
                    ));
                    let sample = measure(&site, setting, *contender, run == 0, interrupt)
                        .with_context(|| format!("{setting}: {contender}"))?;
                    progress.done(setting.size_mib, &sample.to_string());
                    samples.push(sample);
                }
            }
            measured.push(Measured { setting, samples });
        }
        site.stop()?;
    }
    Ok(())
}

/// Measures one sample. With `verify`, also checks that the copy restores to a sound process.
fn measure(
    site: &Site,
    setting: Setting,
    contender: Contender,
    verify: bool,
    interrupt: &Interrupt,
) -> Result<Sample> {
    if contender == Contender::BareQuic {
        return contenders::bare_quic(site, setting.size_mib, interrupt);
    }
    let work = site.work_dir()?;
    let wanted = workload::Options {
        size_mib: setting.size_mib,
        contents: setting.contents,
        ..workload::Options::default()
    };
    let mut task = site
        .here()
        .run(|| Workload::start(work.path(), &wanted))
        .context("start a process to dump")?;
    let sample = contenders::dump(contender, site, work.path(), &mut task, verify, interrupt)?;
    if verify {
        ensure!(
            task.verify()?.is_sound(),
            "the process that comes back is not sound"
        );
    }
    Ok(sample)
}
