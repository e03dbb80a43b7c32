//! `permafrost bench tiers`.

mod arguments;
mod jobs;
mod journal;
mod measure;
mod model;
mod paper;
mod plan;
mod plots;
mod power;
mod progress;
mod report;
mod results;
mod sensitivity;
mod site;

use permafrost_criu::Criu;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;

use self::journal::Journal;
use self::plan::{Case, Plan};
use self::progress::Progress;
use self::results::Results;
use super::machine::Machine;

pub(super) use self::arguments::parse_size;
pub(crate) use self::arguments::{EXAMPLES, TiersArguments};

pub(super) fn tiers(context: &Context, arguments: &TiersArguments) -> Result<(), Failure> {
    let plan = Plan::new(arguments)?;
    if plan.tiers.is_empty() {
        // The model alone: nothing is started, nothing can be cut off.
        let model = model::Model::run(&plan)?;
        report::write_model(&plan, &model)?;
        return context.print(&model, model::Model::human);
    }
    let interrupts = Interrupts::install()?;
    let machine = machine(&plan)?;
    let mut journal = Journal::open(&plan, &machine)?;
    if journal.is_resumed() {
        context.remark(&format!(
            "goes on where it stopped: {} of {} measured",
            journal.runs().len(),
            plan.cases().count()
        ));
    }
    let outcome = measure_all(context, &plan, &machine, &mut journal, &interrupts);
    // The results so far are reported, however the run ended.
    let (skipped, end) = match outcome {
        Ok(skipped) => (skipped, Ok(())),
        Err(failure) => (Vec::new(), Err(failure)),
    };
    let results = Results::new(&plan, machine, &journal, skipped)?;
    if end.is_ok() || !results.measurements.is_empty() {
        report::write(&plan, &results)?;
    }
    if let Err(failure) = end {
        let hint = if failure.hint.is_empty() {
            String::new()
        } else {
            format!("{}; ", failure.hint)
        };
        let message = format!(
            "{} ({} of {} measured)",
            failure.message,
            journal.runs().len(),
            plan.cases().count()
        );
        return Err(Failure { message, ..failure }.hint(format!(
            "{hint}the same command goes on where this one stopped; what is there is in {}",
            plan.out.display()
        )));
    }
    context.print(&results, |results| report::human(&plan, results))
}

/// Checks CRIU and returns the machine's properties, before anything is started.
fn machine(plan: &Plan) -> Result<Machine, Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::new(
            Code::Denied,
            "CRIU freezes and restores processes as root only",
        )
        .hint("run it as root; `permafrost bench tiers --model` needs nobody's rights"));
    }
    let criu = Criu::new(plan.criu.clone());
    Ok(Machine::here(
        criu.version()?,
        criu.has_feature("mem_dirty_track")?,
    ))
}

/// Measures the cases that the journal lacks. Returns the cases that were left out, with the reasons.
fn measure_all(
    context: &Context,
    plan: &Plan,
    machine: &Machine,
    journal: &mut Journal,
    interrupts: &Interrupts,
) -> Result<Vec<plan::Skipped>, Failure> {
    let mut skipped = Vec::new();
    let open = |journal: &Journal| -> Vec<Case> {
        plan.cases().filter(|case| !journal.has(case)).collect()
    };
    let mut progress = Progress::new(context, plan, &open(journal));
    while let Some(first) = open(journal)
        .into_iter()
        .find(|case| !skipped.iter().any(|skip: &plan::Skipped| skip.is_of(case)))
    {
        interrupts.check()?;
        if let Err(reason) = plan.room_for(&first) {
            context.remark(&format!("skipped: {first}: {reason}"));
            progress.skip(plan, &first);
            skipped.push(plan::Skipped::new(&first, reason));
            continue;
        }
        // All runs of a case share one daemon.
        let mut site = site::Site::start(plan, &first, interrupts)?;
        for case in open(journal)
            .into_iter()
            .filter(|case| case.is_like(&first))
        {
            let measured =
                measure::run(plan, machine, &mut site, &case, interrupts, &mut progress)?;
            journal.add_run(&case, measured)?;
        }
        site.end()?;
    }
    if plan.sensitivity.is_some() {
        sensitivity::run(context, plan, journal, interrupts)?;
    }
    Ok(skipped)
}
