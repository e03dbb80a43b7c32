//! `permafrost restore`: the daemon places most pages in the processes before they run; or CRIU reads the images from the
//! daemon while it runs (`--stream`), or from a whole images directory that is built in memory first (`--no-stream`,
//! `--keep-images`, `--work-dir`).
//!
//! With `--lazy` the process runs at once, and gets most of its pages while it runs.
//!
//! With streaming, CRIU may take incomplete images for whole ones and succeed although the daemon found damage
//! or went away. So the daemon's result counts too, and such a restore has failed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, thread};

use clap::Args;
use permafrost_agent::host::arguments::parse_time;
use permafrost_criu::options::{Operation, PassedOn};
use permafrost_criu::origin::ProcessStat;
use permafrost_criu::restore_way::{
    ChosenRestoreWay, RestoreWay, RestoreWayConditions, RestoreWayReason,
};
use permafrost_criu::scratch::Scratch;
use permafrost_criu::{Criu, CriuRun, Finished, processes};
use permafrost_protocol::control::{Checkpoint, Detail, request};
use permafrost_protocol::images::RestoreStats;
use permafrost_protocol::manifest::{Manifest, SpaceType};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::{checkpoint_name, name_of};
use permafrost_terminal::table::facts;
use permafrost_transport::control::{Connection, ControlError};
use rustix::process::{Pid, WaitOptions};
use serde::Serialize;

use crate::arguments::TurnArguments;
use crate::delivery::{self, Delivered, Delivery, HeldRestore, Tasks, Wanted};
use crate::lazy::{LazyOptions, LazyReport};
use permafrost_terminal::action;
use permafrost_terminal::trust::{self, Rule};

pub(crate) const RESTORE_EXAMPLES: &str = "\
permafrostd places the memory in the processes before they run, or CRIU reads it from pipes; the output says which way was \
taken. The other images are built in memory and removed when CRIU is done. CRIU options of the dump that the restore \
must repeat (--shell-job, --tcp-established, …) are repeated; yours win over them.

Examples:
    permafrost restore train                 the newest checkpoint, detached; prints the pid
    permafrost restore train@3 --foreground  an older one, and wait until it ends
    permafrost restore train --lazy          it runs at once, its memory follows
";

#[derive(Debug, Args)]
pub(crate) struct RestoreArguments {
    /// JOB or JOB@GEN.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: String,
    #[command(flatten)]
    pub(crate) turn: TurnArguments,
    /// CRIU program.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_CRIU")]
    pub(crate) criu: Option<PathBuf>,
    /// Wait until the process ends.
    #[arg(long)]
    pub(crate) foreground: bool,
    /// Let CRIU read all images through pipes, also where permafrostd could place the memory in the processes.
    #[arg(
        long,
        conflicts_with_all = ["no_stream", "keep_images", "work_dir", "lazy", "touched_only", "hybrid"]
    )]
    pub(crate) stream: bool,
    /// Build a whole images directory first. Takes memory for all pages once more; for a CRIU that can neither stream
    /// nor wait for its memory.
    #[arg(long)]
    pub(crate) no_stream: bool,
    /// Leave the images directory and the log, and print where. Implies --no-stream.
    #[arg(long)]
    pub(crate) keep_images: bool,
    /// Build the images directory in this one instead of in memory. Implies --no-stream.
    #[arg(long, value_name = "DIR")]
    pub(crate) work_dir: Option<PathBuf>,
    /// Let the process run at once, and bring its pages while it runs: first those that it accesses.
    #[arg(long, conflicts_with = "no_stream")]
    pub(crate) lazy: bool,
    /// Bring only pages that the process accesses, until it ends. Implies --lazy.
    #[arg(long, conflicts_with = "no_stream")]
    pub(crate) touched_only: bool,
    /// Bring first the pages that the last lazy restore of this checkpoint on this node accessed, in that order.
    /// Implies --lazy.
    #[arg(long, conflicts_with_all = ["no_stream", "touched_only"])]
    pub(crate) hybrid: bool,
    /// Time for permafrostd to come back if it ends before all pages of a lazily restored process are there. The process
    /// waits for its pages meanwhile, and is ended after that time.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "60s")]
    pub(crate) daemon_timeout: Duration,
    /// Restore only what was dumped by these: node, agent:NAME, uid:UID, namespace:NAME or any [default: node on a
    /// storage node, any through an agent]. A restore runs whatever the dump contains.
    #[arg(
        long,
        value_name = "ORIGIN",
        value_delimiter = ',',
        env = "PERMAFROST_TRUST"
    )]
    pub(crate) trust: Vec<Rule>,
    /// Repeat none of the CRIU options that the checkpoint records, only those given here.
    #[arg(long)]
    pub(crate) no_recorded_options: bool,
    /// Program that CRIU calls to wait for the memory; next to this one unless told otherwise.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_ACTION", hide = true)]
    pub(crate) action: Option<PathBuf>,
    /// Options for CRIU.
    #[arg(last = true, value_name = "CRIU ARGS")]
    pub(crate) criu_arguments: Vec<String>,
}

impl RestoreArguments {
    /// Returns the way that an option asks for.
    fn requested_way(&self) -> Option<RestoreWay> {
        if self.lazy || self.touched_only || self.hybrid {
            Some(RestoreWay::Lazy)
        } else if self.no_stream || self.keep_images || self.work_dir.is_some() {
            Some(RestoreWay::Directory)
        } else {
            self.stream.then_some(RestoreWay::Stream)
        }
    }
}

/// Time limit for dead processes to free the pids that a restore needs.
const REAP_PATIENCE: Duration = Duration::from_secs(3);

/// Report that a restore prints with `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Root of the restored tree.
    pub(crate) pid: u32,
    /// The restored checkpoint.
    pub(crate) checkpoint: Checkpoint,
    /// True if CRIU read the images from the store, and not from a directory.
    streamed: bool,
    /// Way by which the pages came to the processes.
    way: RestoreWay,
    /// Reason for that way.
    way_reason: RestoreWayReason,
    /// Duration of building the images directory, in which most pages are missing if they are placed.
    fetch_us: u64,
    /// Wait until the dumped processes were reaped and their pids were free.
    wait_us: u64,
    /// Duration of CRIU's run.
    criu_us: u64,
    /// Duration of this command, from start to end.
    pub(crate) total_us: u64,
    /// Pages that were brought while the process ran, with `--lazy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    lazy: Option<LazyReport>,
    /// Statistics that CRIU measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    stats: Option<RestoreStats>,
    /// Exit status of the process, with `--foreground`.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_status: Option<i32>,
    /// Signal that ended the process, with `--foreground`.
    #[serde(skip_serializing_if = "Option::is_none")]
    signal: Option<i32>,
    /// Path of the images directory, with `--keep-images`.
    #[serde(skip_serializing_if = "Option::is_none")]
    images_dir: Option<PathBuf>,
}

pub(crate) fn restore(context: &Context, arguments: &RestoreArguments) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    let mut report = bring_back(context, arguments, &interrupts)?;
    if arguments.foreground {
        if !context.json {
            context.print(&report, human_report)?;
        }
        wait(report.pid, &interrupts, &mut report)?;
        return context.print(&report, human_end);
    }
    context.print(&report, human_report)
}

/// Requests a checkpoint. If a job's newest is a round of a dump that is under way or was broken off, it is the newest
/// before those rounds.
fn show(connection: &mut Connection, reference: &str) -> Result<Detail, ControlError> {
    let show = |reference: String| request::Show {
        checkpoint: reference,
    };
    let newest = connection.call(show(reference.to_owned()))?;
    let generation = match &newest.checkpoint {
        Some(round) if round.kind == "pre-copy" && !reference.contains('@') => round.generation,
        _ => return Ok(newest),
    };
    let mut list = request::List {
        job: reference.to_owned(),
        ..request::List::default()
    };
    let mut before = 0;
    loop {
        let listed = connection.call(list.clone())?;
        let others = listed
            .checkpoints
            .iter()
            .filter(|other| other.kind != "pre-copy");
        let older = others
            .map(|other| other.generation)
            .filter(|other| *other < generation);
        before = older.fold(before, u64::max);
        if listed.next.is_empty() {
            break;
        }
        list.after = listed.next;
    }
    if before == 0 {
        return Ok(newest);
    }
    connection.call(show(format!("{reference}@{before}")))
}

/// Restores and prints nothing. With `--foreground`, the restored process is a child of this one, and the
/// caller waits for it.
pub(crate) fn bring_back(
    context: &Context,
    arguments: &RestoreArguments,
    interrupts: &Interrupts,
) -> Result<Report, Failure> {
    let started = Instant::now();
    let passed_on = PassedOn::parse(&arguments.criu_arguments, Operation::Restore)?;
    let criu = Criu::new(arguments.criu.clone());
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;

    let detail = show(&mut connection, &arguments.checkpoint)
        .map_err(|error| interrupts.explain(error.into()))?;
    let checkpoint = detail.checkpoint.clone();
    let checkpoint = checkpoint
        .ok_or_else(|| Failure::new(Code::Internal, "the checkpoint has no description"))?;
    let name = name_of(&checkpoint);
    if checkpoint.kind != "full" {
        return Err(Failure::new(
            Code::Invalid,
            format!("{name} is a {}: it holds memory only", checkpoint.kind),
        )
        .hint("restore a full checkpoint of the job: permafrost ls"));
    }
    trust::check(&arguments.trust, &name, &detail)?;
    let daemon_places = detail.places;
    let manifest = detail.manifest.unwrap_or_default();
    let options = criu_options(&passed_on, &manifest, arguments.no_recorded_options)
        .map_err(|failure| failure.during(format!("restore {name}")))?;

    let purpose = format!("restore-{}", checkpoint.job);
    let action = action::program(arguments.action.as_deref());
    let conditions = RestoreWayConditions {
        requested: arguments.requested_way(),
        daemon_places,
        has_action_program: action.is_ok(),
        has_userfaultfd: permafrost_lazy::try_open().is_ok(),
        manifest: &manifest,
    };
    let mut chosen = conditions.choose();
    let scratch = match &arguments.work_dir {
        // CRIU's log is all that a streamed restore writes, and those without most pages write little more.
        None if chosen.way != RestoreWay::Directory => Scratch::in_memory(&purpose, 0)?,
        None => Scratch::in_memory(&purpose, checkpoint.memory_bytes)?,
        Some(directory) => {
            let directory = fs::canonicalize(directory)
                .map_err(|error| Failure::io("use", directory, &error))?;
            Scratch::within(&directory, &purpose)?
        }
    };
    let make = |part: &str| {
        scratch
            .subdirectory(part)
            .map_err(|error| Failure::io("create", &scratch.path().join(part), &error))
    };
    let (images, work) = (make("images")?, make("work")?);

    let delivery = match (chosen.way, action) {
        (RestoreWay::Lazy, action) => {
            let action = action.map_err(|failure| failure.during(format!("restore {name}")))?;
            let options = LazyOptions {
                touched_only: arguments.touched_only,
                hybrid: arguments.hybrid,
                daemon_timeout: arguments.daemon_timeout,
            };
            let held = HeldRestore::prepare(scratch.path(), &work, action)?;
            Delivery::Lazy(held, options)
        }
        (RestoreWay::Place, Ok(action)) => {
            Delivery::Place(HeldRestore::prepare(scratch.path(), &work, action)?)
        }
        (RestoreWay::Stream | RestoreWay::Place, _) => Delivery::stream(&images)?,
        (RestoreWay::Directory, _) => Delivery::Directory,
    };
    if delivery.way() != chosen.way {
        chosen = ChosenRestoreWay {
            way: delivery.way(),
            reason: RestoreWayReason::LongPath,
        };
    }

    let waited = wait_until_reaped(&manifest, interrupts);
    interrupts.check()?;
    let pidfile = work.join("pid");
    let mut run = CriuRun::new(&criu, "restore", &images, &work);
    run.arg("--restore-detached").arg("--pidfile").arg(&pidfile);
    if arguments.foreground {
        // The restored process becomes a child of this one, so that it can be waited for, and the images can
        // be removed meanwhile.
        run.arg("--restore-sibling");
    }
    if !options.iter().any(|option| option == "--shell-job") {
        // A terminal's Ctrl-C reaches only us, and CRIU is ended in order. A shell job is restored into CRIU's
        // group, which has to be the terminal's.
        run.own_process_group();
    }
    run.args(options);
    let Delivered {
        finished,
        turn,
        fetch,
        refusal,
        transfer,
        instead,
    } = delivery.run(
        context,
        interrupts,
        connection,
        Wanted {
            name: &name,
            images: &images,
            memory_bytes: checkpoint.memory_bytes,
            turn: &arguments.turn,
        },
        (
            run,
            &criu,
            &Tasks {
                pids: tasks_of(&manifest),
                ..Tasks::default()
            },
        ),
    )?;
    let chosen = instead.unwrap_or(chosen);
    let pid = finished
        .status
        .success()
        .then(|| read_pid(&pidfile))
        .flatten();
    if interrupts.came() {
        // The interrupt may have come after CRIU had finished.
        pid.into_iter().for_each(end_tree);
        return Err(Failure::interrupted(format!(
            "restore {name}: interrupted, nothing of it runs"
        )));
    }
    let refusal = match (chosen.way, pid, refusal) {
        (RestoreWay::Place, Some(pid), Some(refusal)) => {
            // CRIU did not wait for the memory, or nobody knows whether all of it came.
            end_tree(pid);
            let what = format!("restore {name}: process {pid} was ended");
            return Err(Failure::from(refusal).during(what));
        }
        (_, _, refusal) => refusal.filter(delivery::counts),
    };
    let Some(pid) = pid else {
        // A program that is not CRIU ends without a request for any image.
        criu.version()?;
        if let Some(refusal) = refusal {
            return Err(Failure::from(refusal).during(format!("restore {name}")));
        }
        return Err(failed(
            &name,
            &checkpoint,
            &finished,
            scratch,
            arguments.keep_images,
        ));
    };
    if let Some(refusal) = refusal {
        return Err(unreliable(&name, pid, refusal));
    }
    let stats = fs::read(finished.work_dir.join("stats-restore"))
        .ok()
        .and_then(|bytes| RestoreStats::read(&bytes).ok());
    let images_dir = if arguments.keep_images {
        Some(scratch.keep().join("images"))
    } else {
        drop(scratch);
        None
    };
    let running = started.elapsed();
    // What a lazy restore reads before it runs, and what comes back from an object store for it, is priced by itself.
    let read = if transfer.is_some() {
        fetch
    } else {
        Duration::ZERO
    };
    if chosen.way != RestoreWay::Directory {
        context.tell_took(&request::Took {
            checkpoint: checkpoint.id.clone(),
            restored: true,
            elapsed_us: human::whole_micros(running.saturating_sub(turn + waited + read)),
            lazy: transfer.is_some(),
        });
    }
    let lazy = match transfer {
        Some(transfer) if arguments.foreground => {
            transfer.finish_beside(&name, pid);
            None
        }
        Some(transfer) => {
            let served = transfer.finish(context, interrupts, &name, pid)?;
            Some(LazyReport {
                running_us: human::whole_micros(running),
                faults: served.requests,
                bytes: served.bytes,
            })
        }
        None => None,
    };
    let elapsed = started.elapsed();
    Ok(Report {
        pid,
        checkpoint,
        streamed: chosen.way == RestoreWay::Stream,
        way: chosen.way,
        way_reason: chosen.reason,
        fetch_us: human::whole_micros(fetch),
        wait_us: human::whole_micros(waited),
        criu_us: human::whole_micros(finished.elapsed),
        lazy,
        total_us: human::whole_micros(elapsed),
        stats,
        exit_status: None,
        signal: None,
        images_dir,
    })
}

/// Returns CRIU's options: the recorded ones, unless `none_recorded`, and the user's own.
fn criu_options(
    passed_on: &PassedOn,
    manifest: &Manifest,
    none_recorded: bool,
) -> Result<Vec<String>, Failure> {
    let origin = manifest.origin.as_ref().filter(|_| !none_recorded);
    let recorded = origin.map_or(&[][..], |origin| &origin.restore_options);
    passed_on.on_top_of(recorded).map_err(|error| {
        Failure::new(Code::Denied, error.to_string()).hint(
            "find out who dumped it; --no-recorded-options restores without what is recorded, and what you give behind `--` counts",
        )
    })
}

/// Returns the failure for a restore in which CRIU succeeded but the daemon did not. The process is not killed,
/// so that the caller can examine it first.
fn unreliable(name: &str, pid: u32, refusal: ControlError) -> Failure {
    let cause = Failure::from(refusal);
    Failure::new(
        Code::Corrupt,
        format!(
            "restore {name}: {}; process {pid} runs from damaged or incomplete images",
            cause.message
        ),
    )
    .hint(format!(
        "end process {pid} (kill -9 {pid}, and its children); restore an older generation, see permafrost verify"
    ))
}

fn failed(
    name: &str,
    checkpoint: &Checkpoint,
    finished: &Finished,
    scratch: Scratch,
    keep_images: bool,
) -> Failure {
    let mut digest = finished.digest();
    if digest.reason.contains("Can't fork for") {
        // CRIU does not report which process has the pid.
        let pid = digest
            .reason
            .split(' ')
            .find_map(|word| word.trim_end_matches(':').parse().ok());
        if let Some(stat) = pid.and_then(|pid| ProcessStat::read(pid).ok()) {
            let whose = if stat.state == 'Z' {
                "a dead process that nobody waited for"
            } else {
                "a running process"
            };
            digest.hint = format!(
                "pid {} belongs to {}, {whose}; {}",
                pid.unwrap_or_default(),
                stat.name,
                digest.hint
            );
        }
    }
    let mut failure = Failure::criu(format!("CRIU could not restore {name}"), digest);
    if failure.hint.is_empty() && checkpoint.processes > 1 {
        failure.hint =
            "the whole tree is restored or nothing; the log names the process".to_owned();
    }
    let evidence = finished.evidence().to_owned();
    failure.log = if keep_images {
        let relative = evidence.strip_prefix(scratch.path()).map(Path::to_owned);
        let kept = scratch.keep();
        Some(relative.map_or(evidence, |relative| kept.join(relative)))
    } else {
        scratch.keep_only(&evidence).ok()
    };
    failure
}

/// Returns the pids of the processes in a checkpoint, each in its own namespace.
fn tasks_of(manifest: &Manifest) -> Vec<u32> {
    let spaces = manifest.spaces.iter();
    spaces
        .filter(|space| space.space_type() == SpaceType::Process)
        .filter_map(|space| u32::try_from(space.id).ok())
        .collect()
}

/// Waits, in bounds, until the dead processes of the dump are reaped: right after a dump their parent may not
/// have done so yet, and until then they hold their pids.
fn wait_until_reaped(manifest: &Manifest, interrupts: &Interrupts) -> Duration {
    let start = Instant::now();
    let dead = |pid: u32| matches!(ProcessStat::read(pid), Ok(stat) if stat.state == 'Z');
    for pid in tasks_of(manifest) {
        while dead(pid) && !interrupts.came() && start.elapsed() < REAP_PATIENCE {
            thread::sleep(Duration::from_millis(10));
        }
    }
    start.elapsed()
}

/// Kills a restored process and its descendants.
fn end_tree(root: u32) {
    processes::tree(root).into_iter().for_each(processes::kill);
}

/// Reads the pid that CRIU wrote; the file has no newline.
fn read_pid(pidfile: &Path) -> Option<u32> {
    fs::read_to_string(pidfile).ok()?.trim().parse().ok()
}

fn wait(pid: u32, interrupts: &Interrupts, report: &mut Report) -> Result<(), Failure> {
    let internal = |what: String| Failure::new(Code::Internal, what);
    let process = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| internal(format!("CRIU restored an impossible pid {pid}")))?;
    interrupts.pass_on_to(process);
    let status = loop {
        match rustix::process::waitpid(Some(process), WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(Some((_, status))) => break status,
            Ok(None) => {}
            Err(error) => return Err(internal(format!("wait for process {pid}: {error}"))),
        }
    };
    report.exit_status = status.exit_status();
    report.signal = status.terminating_signal();
    Ok(())
}

fn human_report(report: &Report) -> String {
    facts(
        &format!(
            "{} runs again as process {}",
            name_of(&report.checkpoint),
            report.pid
        ),
        &[
            ("memory", human::bytes(report.checkpoint.memory_bytes)),
            (
                "in all",
                format!(
                    "{}: {}{}CRIU {}",
                    human::micros(report.total_us),
                    if report.streamed {
                        String::new()
                    } else {
                        format!("fetching {}, ", human::micros(report.fetch_us))
                    },
                    if report.wait_us < 10_000 {
                        String::new()
                    } else {
                        format!("until its pid was free {}, ", human::micros(report.wait_us))
                    },
                    human::micros(report.criu_us),
                ),
            ),
            (
                "its memory came",
                ChosenRestoreWay {
                    way: report.way,
                    reason: report.way_reason,
                }
                .describe(),
            ),
            (
                "lazily",
                report.lazy.as_ref().map_or_else(String::new, |lazy| {
                    format!(
                        "ran after {}; {} brought since, {}",
                        human::micros(lazy.running_us),
                        human::bytes(lazy.bytes),
                        human::count(lazy.faults, "page was waited for", "pages were waited for"),
                    )
                }),
            ),
            (
                "images",
                report
                    .images_dir
                    .as_ref()
                    .map(|dir| dir.display().to_string())
                    .unwrap_or_default(),
            ),
        ],
    )
}

fn human_end(report: &Report) -> String {
    match (report.exit_status, report.signal) {
        (Some(status), _) => format!("process {} exited with {status}", report.pid),
        (None, Some(signal)) => format!("process {} was ended by signal {signal}", report.pid),
        (None, None) => format!("process {} ended", report.pid),
    }
}
