//! Prints the table, and writes the files in --out.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use permafrost_scheduling::preempt::Decision;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::table::{Align, Table};
use serde::Serialize;

use super::measure::dump;
use super::model::Model;
use super::plan::Plan;
use super::plots;
use super::results::{Results, label};

/// Writes all result files into the plan's directory.
pub(super) fn write(plan: &Plan, results: &Results) -> Result<(), Failure> {
    let json = serde_json::to_vec_pretty(results)
        .map_err(|error| Failure::new(Code::Internal, format!("write JSON: {error}")))?;
    replace(&plan.out.join("results.json"), &json)?;
    write_csv(&plan.out.join("results.csv"), &results.measurements)?;
    if !results.jobs.is_empty() {
        write_csv(&plan.out.join("sensitivity.csv"), &results.jobs)?;
    }
    plots::tiers(&plan.out, results)?;
    plots::jobs(&plan.out, plan, results)?;
    match &results.model {
        Some(model) => write_model(plan, model),
        None => Ok(()),
    }
}

/// Writes the files of the model.
pub(super) fn write_model(plan: &Plan, model: &Model) -> Result<(), Failure> {
    fs::create_dir_all(&plan.out).map_err(|error| Failure::io("create", &plan.out, &error))?;
    write_csv(&plan.out.join("model.csv"), &model.rows)?;
    plots::model(&plan.out, model)
}

/// Replaces a file atomically: if the run is cut off, the file is the old one or the new one.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let new = path.with_extension("new");
    fs::write(&new, bytes)
        .and_then(|()| fs::rename(&new, path))
        .map_err(|error| Failure::io("write", path, &error))
}

fn write_csv<T: Serialize>(path: &Path, rows: &[T]) -> Result<(), Failure> {
    replace(path, &csv_of(rows)?)
}

fn csv_of<T: Serialize>(rows: &[T]) -> Result<Vec<u8>, Failure> {
    let failed =
        |error: &dyn std::fmt::Display| Failure::new(Code::Internal, format!("write CSV: {error}"));
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(row).map_err(|error| failed(&error))?;
    }
    writer.into_inner().map_err(|error| failed(&error))
}

/// Formats the results as text.
pub(super) fn human(plan: &Plan, results: &Results) -> String {
    let mut text = medians(results);
    text.push_str(&second_dumps(results));
    text.push_str(&fits(results));
    text.push_str(&jobs(plan, results));
    if let Some(model) = &results.model {
        let _ = write!(text, "\n{}", model.human());
    }
    text.push_str(&remarks(plan, results));
    text
}

fn seconds(seconds: f64) -> String {
    if seconds < 10.0 {
        format!("{seconds:.3} s")
    } else {
        format!("{seconds:.2} s")
    }
}

fn medians(results: &Results) -> String {
    let mut table = Table::new([
        ("TIER", Align::Left),
        ("MEMORY", Align::Right),
        ("COPIES", Align::Left),
        ("DUMP", Align::Left),
        ("SUSPEND", Align::Right),
        ("+/-", Align::Right),
        ("FROZEN", Align::Right),
        ("RESUME", Align::Right),
        ("STORED", Align::Right),
        ("RUNS", Align::Right),
    ]);
    for median in &results.medians {
        table.row([
            label(&median.tier, median.emulated),
            human::bytes(median.size_bytes),
            median.copies.to_string(),
            dump(median.dirty_percent),
            seconds(median.suspend_s),
            seconds(median.suspend_spread_s),
            seconds(median.frozen_s),
            seconds(median.resume_s),
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a median of sizes"
            )]
            human::bytes(median.stored_bytes as u64),
            median.runs.to_string(),
        ]);
    }
    table.render()
}

fn second_dumps(results: &Results) -> String {
    if results.second_dumps.is_empty() {
        return String::new();
    }
    let mut table = Table::new([
        ("FURTHER DUMPS", Align::Left),
        ("MEMORY", Align::Right),
        ("COPIES", Align::Left),
        ("DIRTY", Align::Right),
        ("FIRST", Align::Right),
        ("SECOND", Align::Right),
        ("TIMES FASTER", Align::Right),
        ("TIMES LESS STORED", Align::Right),
        ("THE PAPER'S (TABLE 3, 5 GB)", Align::Left),
    ]);
    for second in &results.second_dumps {
        table.row([
            label(&second.tier, second.emulated),
            human::bytes(second.size_bytes),
            second.copies.to_string(),
            format!("{} %", second.dirty_percent),
            seconds(second.first_s),
            seconds(second.second_s),
            format!("{:.1}", second.ratio),
            format!("{:.1}", second.stored_ratio),
            second.paper.map_or_else(String::new, |paper| {
                format!(
                    "{} s, {} s: {:.1} times",
                    paper.first_s,
                    paper.second_s,
                    paper.ratio()
                )
            }),
        ]);
    }
    format!("\n{}", table.render())
}

fn fits(results: &Results) -> String {
    let mut text = String::new();
    for tier in &results.fits {
        if let Some(fit) = tier.suspend_and_resume {
            let _ = writeln!(
                text,
                "{}, {}: suspend and resume of full dumps take {:.3} s + {:.3} s a GB (R² {:.4}, {} sizes)",
                label(&tier.tier, tier.emulated),
                tier.copies,
                fit.fixed_s,
                fit.s_per_gb,
                fit.r_squared,
                tier.points.len()
            );
        }
    }
    if text.is_empty() {
        return text;
    }
    format!(
        "\n{text}The paper's, Figure 2: {}.\n",
        super::paper::FIGURE_2
    )
}

fn jobs(plan: &Plan, results: &Results) -> String {
    let Some(asked) = plan
        .sensitivity
        .as_ref()
        .filter(|_| !results.jobs.is_empty())
    else {
        return String::new();
    };
    let mut table = Table::new([
        ("POLICY", Align::Left),
        ("CHECKPOINTS (EMULATED)", Align::Right),
        ("HIGH PRIORITY", Align::Right),
        ("LOW PRIORITY", Align::Right),
        ("BUSY PROCESSORS", Align::Right),
        ("ENERGY", Align::Right),
        ("DECISION", Align::Left),
    ]);
    for job in &results.jobs {
        table.row([
            job.policy.to_string(),
            job.bandwidth_bytes_per_s
                .map_or("none made".to_owned(), |rate| {
                    format!("{:.0} MB/s", rate as f64 / 1e6)
                }),
            seconds(job.high_response_s),
            seconds(job.low_response_s),
            seconds(job.busy_s),
            plots::energy(plan, job)
                .map_or_else(|| "no meter".to_owned(), |joules| format!("{joules:.0} J")),
            match job.decision {
                None => "",
                Some(Decision::Kill) => "kill",
                Some(Decision::NormalCheckpoint | Decision::IncrementalCheckpoint) => "checkpoint",
            }
            .to_owned(),
        ]);
    }
    let by_meter = results.jobs.iter().any(|job| job.energy_j.is_some());
    let energy = match (by_meter, plan.power) {
        (true, _) => "Energy is what the processors' own meter (RAPL) says.",
        (false, Some(_)) => {
            "Energy is the watts given, at the processors' utilisation, times the time."
        }
        (false, None) => {
            "No power meter here, and no --power: the processors' busy time stands for the energy."
        }
    };
    format!(
        "\nTwo jobs of {} s and {} each, the second after half of the time (after Li et al., Figures 4 and 6):\n{}{energy}\n",
        asked.job_seconds,
        human::bytes(asked.job_bytes),
        table.render()
    )
}

fn remarks(plan: &Plan, results: &Results) -> String {
    let mut text = String::from("\n");
    let mut told: Vec<&str> = Vec::new();
    for measurement in &results.measurements {
        if !told.contains(&measurement.tier.as_str()) {
            told.push(&measurement.tier);
            let _ = writeln!(text, "{}: {}", measurement.tier, measurement.medium);
        }
    }
    for skipped in &results.skipped {
        let _ = writeln!(text, "skipped: {}: {}", skipped.what(), skipped.reason);
    }
    if results
        .measurements
        .iter()
        .any(|m| m.dirty_percent.is_some() && !m.soft_dirty)
    {
        let _ = writeln!(
            text,
            "This kernel has no soft-dirty bits: further dumps send all pages, which are compared with the last dump's; less is stored, and little time is saved."
        );
    }
    let _ = writeln!(text, "Results and pictures are in {}", plan.out.display());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::results::tests::measured;

    #[test]
    fn a_line_of_csv_has_every_field_and_says_emulated() {
        let rows = [
            measured("hdd", 1, None, 1, 30.0),
            measured("disk", 1, Some(10), 2, 3.0),
        ];
        let bytes = csv_of(&rows).unwrap();
        let mut reader = csv::Reader::from_reader(bytes.as_slice());
        let headers = reader.headers().unwrap().clone();
        assert!(headers.iter().any(|name| name == "emulated"));
        let fields: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
        let at = |name: &str| headers.iter().position(|header| header == name).unwrap();
        assert_eq!(&fields[0][at("emulated")], "true");
        assert_eq!(&fields[1][at("emulated")], "false");
        assert_eq!(&fields[0][at("dirty_percent")], "");
        assert_eq!(&fields[1][at("dirty_percent")], "10");
        assert_eq!(&fields[0][at("copies")], "local");
        assert_eq!(&fields[0][at("suspend_s")], "30.0");
    }

    #[test]
    fn a_file_is_replaced_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("results.csv");
        replace(&path, b"old").unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
