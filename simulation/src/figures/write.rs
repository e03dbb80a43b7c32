//! Writes figures and outcomes as text, CSV and SVG.

use plotters::prelude::*;
use thiserror::Error;

use super::{PaperFigure, Row};
use crate::engine::Outcome;

/// A file that cannot be made.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The table cannot be written.
    #[error("write CSV: {0}")]
    Csv(#[from] csv::Error),
    /// The table cannot be finished.
    #[error("write CSV: {0}")]
    Finish(String),
    /// The picture cannot be drawn.
    #[error("draw SVG: {0}")]
    Svg(String),
}

fn number(value: f64) -> String {
    format!("{value:.1}")
}

/// Formats a figure as a table: what, the paper's number, ours, and the deviation.
#[must_use]
pub fn text(figure: &PaperFigure) -> String {
    let mut lines = vec![[
        "".to_owned(),
        "paper".to_owned(),
        "ours".to_owned(),
        "deviation".to_owned(),
    ]];
    for row in &figure.rows {
        let unit = |text: String| match row.unit {
            "" => text,
            unit => format!("{text} {unit}"),
        };
        lines.push([
            row.what.clone(),
            row.paper
                .map_or_else(|| "-".to_owned(), |paper| unit(number(paper))),
            unit(number(row.ours)),
            row.deviation()
                .map_or_else(|| "-".to_owned(), |by| format!("{by:+.1}")),
        ]);
    }
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths = [width(0), width(1), width(2), width(3)];
    let mut text = format!(
        "{}: {}\nWorkload: {}\n",
        figure.id, figure.title, figure.workload
    );
    for remark in &figure.remarks {
        text.push_str(&format!("  {remark}\n"));
    }
    for [what, paper, ours, deviation] in &lines {
        let [first, second, third, fourth] = widths;
        text.push_str(&format!(
            "{what:<first$}  {paper:>second$}  {ours:>third$}  {deviation:>fourth$}\n"
        ));
    }
    text
}

fn finish(writer: csv::Writer<Vec<u8>>) -> Result<Vec<u8>, WriteError> {
    writer
        .into_inner()
        .map_err(|error| WriteError::Finish(error.to_string()))
}

/// Formats a figure as CSV.
///
/// # Errors
///
/// [`WriteError::Csv`].
pub fn csv(figure: &PaperFigure) -> Result<Vec<u8>, WriteError> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record([
        "figure",
        "workload",
        "what",
        "unit",
        "paper",
        "ours",
        "deviation",
    ])?;
    for row in &figure.rows {
        let optional =
            |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
        writer.write_record([
            figure.id,
            &figure.workload,
            &row.what,
            row.unit,
            &optional(row.paper),
            &row.ours.to_string(),
            &optional(row.deviation()),
        ])?;
    }
    finish(writer)
}

/// Formats outcomes as CSV, one a line.
///
/// # Errors
///
/// [`WriteError::Csv`].
pub fn outcomes_csv(outcomes: &[&Outcome]) -> Result<Vec<u8>, WriteError> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record([
        "workload",
        "synthetic",
        "policy",
        "medium",
        "tasks",
        "makespan_s",
        "waste",
        "waste_of_capacity",
        "lost_core_h",
        "starting_core_h",
        "leaving_core_h",
        "energy_kwh",
        "cpu_overhead",
        "io_overhead",
        "storage",
        "preemptions",
        "low_mean_s",
        "low_p95_s",
        "medium_mean_s",
        "medium_p95_s",
        "high_mean_s",
        "high_p95_s",
    ])?;
    for outcome in outcomes {
        let mut record = vec![
            outcome.workload.clone(),
            outcome.synthetic.to_string(),
            outcome.policy.clone(),
            outcome.medium.clone(),
            outcome.tasks.to_string(),
        ];
        let numbers = [
            outcome.makespan_s,
            outcome.waste,
            outcome.waste_of_capacity,
            outcome.lost_core_h,
            outcome.starting_core_h,
            outcome.leaving_core_h,
            outcome.energy_kwh,
            outcome.cpu_overhead,
            outcome.io_overhead,
            outcome.storage,
        ];
        record.extend(numbers.map(|number| number.to_string()));
        record.push(outcome.counts.preemptions().to_string());
        for band in crate::workload::Band::ALL {
            let of = outcome.band(band);
            record.push(of.map_or_else(String::new, |of| of.mean_s.to_string()));
            record.push(of.map_or_else(String::new, |of| of.p95_s.to_string()));
        }
        writer.write_record(record)?;
    }
    finish(writer)
}

const FONT: &str = "sans-serif";
const BLUE_OF_OURS: RGBColor = RGBColor(0, 114, 178);
const GREY_OF_THE_PAPER: RGBColor = RGBColor(150, 150, 150);

/// Draws a figure as horizontal bars: the paper's numbers grey, the simulation's blue.
///
/// # Errors
///
/// [`WriteError::Svg`].
pub fn svg(figure: &PaperFigure) -> Result<String, WriteError> {
    let mut picture = String::new();
    draw(figure, &mut picture).map_err(WriteError::Svg)?;
    Ok(picture)
}

fn reason(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn draw(figure: &PaperFigure, picture: &mut String) -> Result<(), String> {
    let rows = u32::try_from(figure.rows.len())
        .unwrap_or(u32::MAX)
        .min(200);
    let canvas = SVGBackend::with_string(picture, (900, 90 + 26 * rows)).into_drawing_area();
    canvas.fill(&WHITE).map_err(reason)?;
    let values = || {
        let numbers = figure
            .rows
            .iter()
            .flat_map(|row| [Some(row.ours), row.paper]);
        numbers.flatten().filter(|value| value.is_finite())
    };
    let most = values().fold(0.0, f64::max) * 1.1;
    let least = values().fold(0.0, f64::min) * 1.1;
    let most = if most > least { most } else { least + 1.0 };
    let count = f64::from(rows);
    let mut chart = ChartBuilder::on(&canvas)
        .caption(
            format!("{}: {}, {}", figure.id, figure.title, figure.workload),
            (FONT, 15),
        )
        .margin(12)
        .margin_left(290)
        .x_label_area_size(30)
        .build_cartesian_2d(least..most, 0.0..count)
        .map_err(reason)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .draw()
        .map_err(reason)?;
    for (index, row) in figure.rows.iter().enumerate().take(200) {
        let top = count - index as f64;
        let bars = [
            (row.paper, 0.1, 0.45, GREY_OF_THE_PAPER),
            (Some(row.ours), 0.5, 0.85, BLUE_OF_OURS),
        ];
        for (value, from, to, colour) in bars {
            let Some(value) = value else { continue };
            let corners = [(0.0, top - from), (value, top - to)];
            chart
                .draw_series(std::iter::once(Rectangle::new(corners, colour.filled())))
                .map_err(reason)?;
        }
        let style = (FONT, 12).into_font().color(&BLACK);
        let label = EmptyElement::at((least, top - 0.5)) + Text::new(label(row), (-280, -6), style);
        chart.draw_series(std::iter::once(label)).map_err(reason)?;
    }
    canvas.present().map_err(reason)
}

fn label(row: &Row) -> String {
    let unit = row.unit;
    match row.paper {
        Some(paper) => format!("{}: {paper:.1}, {:.1} {unit}", row.what, row.ours),
        None => format!("{}: {:.1} {unit}", row.what, row.ours),
    }
}
