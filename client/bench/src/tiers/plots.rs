//! Draws the plots of a report, as SVG: text stays text, so that no fonts are needed here.

use std::ops::Range;
use std::path::Path;

use permafrost_scheduling::sensitivity::Policy;
use permafrost_terminal::failure::{Code, Failure};
use plotters::coord::Shift;
use plotters::coord::combinators::IntoLogRange;
use plotters::prelude::*;

use super::arguments::Copies;
use super::jobs::JobRun;
use super::model::Model;
use super::paper::TABLE_3_GB;
use super::plan::Plan;
use super::report::replace;
use super::results::{Results, SecondDump, TierFit, label};

const SIZE: (u32, u32) = (860, 520);
const FONT: &str = "sans-serif";
/// Colours that the colour-blind can distinguish too (Okabe and Ito 2008).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];
const GREY: RGBColor = RGBColor(150, 150, 150);

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn colour(index: usize) -> RGBColor {
    COLOURS.get(index % COLOURS.len()).copied().unwrap_or(BLACK)
}

/// Draws a plot and writes the file atomically.
fn draw(path: &Path, paint: impl FnOnce(&Canvas<'_>) -> Result<(), String>) -> Result<(), Failure> {
    let mut svg = String::new();
    {
        let canvas = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        canvas
            .fill(&WHITE)
            .map_err(text)
            .and_then(|()| paint(&canvas))
            .and_then(|()| canvas.present().map_err(text))
            .map_err(|error| {
                Failure::new(Code::Internal, format!("draw {}: {error}", path.display()))
            })?;
    }
    replace(path, svg.as_bytes())
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A curve: its label, its points, and the points of its line, if one is drawn.
struct Curve {
    name: String,
    points: Vec<(f64, f64)>,
    line: Vec<(f64, f64)>,
}

/// Returns an axis limit with room above the largest value.
fn up_to(values: impl Iterator<Item = f64>) -> f64 {
    let largest = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
    if largest > 0.0 { largest * 1.08 } else { 1.0 }
}

/// Returns a range for a logarithmic axis around some values.
fn around(values: impl Iterator<Item = f64> + Clone) -> Range<f64> {
    let positive = values.filter(|value| value.is_finite() && *value > 0.0);
    let least = positive.clone().fold(f64::MAX, f64::min);
    let most = positive.fold(f64::MIN_POSITIVE, f64::max);
    if least > most {
        return 0.1..10.0;
    }
    least / 2.0..most * 2.0
}

/// Draws Figure 2 and Table 3.
pub(super) fn tiers(out: &Path, results: &Results) -> Result<(), Failure> {
    for copies in [Copies::Local, Copies::Replicated] {
        let of_copies = |fit: &&TierFit| fit.copies == copies;
        let fits: Vec<&TierFit> = results.fits.iter().filter(of_copies).collect();
        if !fits.is_empty() {
            let path = out.join(format!("suspend-resume-{copies}.svg"));
            draw(&path, |canvas| figure_2(canvas, copies, &fits))?;
        }
        let dumps: Vec<&SecondDump> = results
            .second_dumps
            .iter()
            .filter(|dump| dump.copies == copies)
            .collect();
        if !dumps.is_empty() {
            let path = out.join(format!("second-dump-{copies}.svg"));
            draw(&path, |canvas| table_3(canvas, copies, &dumps))?;
        }
    }
    Ok(())
}

fn any_emulated(emulated: bool) -> &'static str {
    if emulated {
        ", emulated where it says so"
    } else {
        ""
    }
}

fn figure_2(canvas: &Canvas<'_>, copies: Copies, fits: &[&TierFit]) -> Result<(), String> {
    let curves: Vec<Curve> = fits
        .iter()
        .map(|fit| {
            let gb = |bytes: u64| bytes as f64 / 1e9;
            let largest = fit.points.last().map_or(0, |(bytes, _)| *bytes);
            let line = fit.suspend_and_resume.map(|line| {
                let ends = [0, largest].map(|bytes| (gb(bytes), line.at(bytes).max(0.0)));
                ends.to_vec()
            });
            Curve {
                name: label(&fit.tier, fit.emulated),
                points: fit
                    .points
                    .iter()
                    .map(|&(bytes, s)| (gb(bytes), s))
                    .collect(),
                line: line.unwrap_or_default(),
            }
        })
        .collect();
    let emulated = any_emulated(fits.iter().any(|fit| fit.emulated));
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let title = format!("Suspend and resume, {copies}{emulated}");
    let mut chart = ChartBuilder::on(canvas)
        .caption(title, (FONT, 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(
            0.0..up_to(all().map(|point| point.0)),
            0.0..up_to(all().map(|point| point.1)),
        )
        .map_err(text)?;
    chart
        .configure_mesh()
        .max_light_lines(2)
        .x_desc("memory, GB")
        .y_desc("suspend and resume of a full dump, s")
        .draw()
        .map_err(text)?;
    for (index, curve) in curves.iter().enumerate() {
        let colour = colour(index);
        chart
            .draw_series(LineSeries::new(
                curve.line.iter().copied(),
                colour.stroke_width(2),
            ))
            .map_err(text)?;
        chart
            .draw_series(
                curve
                    .points
                    .iter()
                    .map(|&at| Circle::new(at, 4, colour.filled())),
            )
            .map_err(text)?
            .label(curve.name.clone())
            .legend(move |(x, y)| Circle::new((x + 8, y), 4, colour.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(GREY)
        .label_font((FONT, 15))
        .draw()
        .map_err(text)
}

/// A bar: its label, its height, and whether it is the paper's.
struct Bar {
    name: String,
    s_per_gb: f64,
    colour: RGBColor,
    paper: bool,
}

/// Draws first and further dumps, seconds for a GB: the paper's program has another size.
fn table_3(canvas: &Canvas<'_>, copies: Copies, dumps: &[&SecondDump]) -> Result<(), String> {
    let mut bars: Vec<Bar> = Vec::new();
    let mut tiers: Vec<&str> = Vec::new();
    for dump in dumps {
        let gb = dump.size_bytes as f64 / 1e9;
        let known = tiers.iter().position(|tier| *tier == dump.tier);
        let index = known.unwrap_or(tiers.len());
        let name = label(&dump.tier, dump.emulated);
        let bar = |name: String, s_per_gb: f64, paper: bool| Bar {
            name,
            s_per_gb,
            colour: if paper { GREY } else { colour(index) },
            paper,
        };
        if known.is_none() {
            tiers.push(&dump.tier);
            bars.push(bar(format!("{name}: first"), dump.first_s / gb, false));
        }
        let percent = dump.dirty_percent;
        bars.push(bar(
            format!("{name}: {percent} % dirty"),
            dump.second_s / gb,
            false,
        ));
        if let Some(paper) = dump.paper {
            let storage = paper.storage;
            bars.push(bar(
                format!("the paper's {storage}: first"),
                paper.first_s / TABLE_3_GB,
                true,
            ));
            bars.push(bar(
                format!("the paper's {storage}: {percent} % dirty"),
                paper.second_s / TABLE_3_GB,
                true,
            ));
        }
    }
    let emulated = any_emulated(dumps.iter().any(|dump| dump.emulated));
    horizontal_bars(
        canvas,
        &format!("First and further dumps, {copies}{emulated}"),
        &bars,
    )
}

/// Draws horizontal bars, which leave room for their labels; the axis is logarithmic, as tiers differ by orders
/// of magnitude.
fn horizontal_bars(canvas: &Canvas<'_>, title: &str, bars: &[Bar]) -> Result<(), String> {
    let range = around(bars.iter().map(|bar| bar.s_per_gb));
    let (least, count) = (range.start, bars.len() as f64);
    let mut chart = ChartBuilder::on(canvas)
        .caption(title, (FONT, 20))
        .margin(16)
        .margin_left(250)
        .x_label_area_size(44)
        .build_cartesian_2d(range.log_scale(), 0.0..count)
        .map_err(text)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_desc("suspend, s a GB (logarithmic)")
        .draw()
        .map_err(text)?;
    let style = |colour: &RGBColor| (FONT, 13).into_font().color(colour);
    for (index, bar) in bars.iter().enumerate() {
        // The first on top.
        let top = count - index as f64;
        let corners = [(least, top - 0.85), (bar.s_per_gb, top - 0.15)];
        let fill = if bar.paper {
            bar.colour.mix(0.5).filled()
        } else {
            bar.colour.filled()
        };
        chart
            .draw_series(std::iter::once(Rectangle::new(corners, fill)))
            .map_err(text)?;
        let value = EmptyElement::at((bar.s_per_gb, top - 0.5))
            + Text::new(format!("{:.3}", bar.s_per_gb), (5, -6), style(&BLACK));
        chart.draw_series(std::iter::once(value)).map_err(text)?;
        let name = EmptyElement::at((least, top - 0.5))
            + Text::new(bar.name.clone(), (-240, -6), style(&BLACK));
        chart.draw_series(std::iter::once(name)).map_err(text)?;
    }
    Ok(())
}

/// Returns the joules of a run: by the machine's meter, or from the watts given and the processors'
/// utilisation.
pub(super) fn energy(plan: &Plan, job: &JobRun) -> Option<f64> {
    job.energy_j.or_else(|| {
        let (idle_w, busy_w) = plan.power?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let utilisation = (job.busy_s / (job.makespan_s * processors)).clamp(0.0, 1.0);
        Some((idle_w + (busy_w - idle_w) * utilisation) * job.makespan_s)
    })
}

/// Draws Figures 4 and 6 from the measurements.
pub(super) fn jobs(out: &Path, plan: &Plan, results: &Results) -> Result<(), Failure> {
    let jobs = &results.jobs;
    let bandwidths: Vec<f64> = jobs
        .iter()
        .filter_map(|job| job.bandwidth_bytes_per_s)
        .map(|rate| rate as f64 / 1e6)
        .collect();
    if bandwidths.is_empty() {
        return Ok(());
    }
    let span = around(bandwidths.iter().copied());
    let measured = |pick: &dyn Fn(&JobRun) -> f64| -> Vec<Curve> {
        let policies = Policy::ALL.into_iter();
        policies
            .map(|policy| {
                let of_policy = jobs.iter().filter(|job| job.policy == policy);
                let mut points: Vec<(f64, f64)> = of_policy
                    .flat_map(|job| match job.bandwidth_bytes_per_s {
                        Some(rate) => vec![(rate as f64 / 1e6, pick(job))],
                        // Without a checkpoint the value is the same at every bandwidth.
                        None => vec![(span.start, pick(job)), (span.end, pick(job))],
                    })
                    .collect();
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                Curve {
                    name: policy.to_string(),
                    line: points.clone(),
                    points,
                }
            })
            .collect()
    };
    let by_meter = jobs.iter().all(|job| energy(plan, job).is_some());
    let energy_name = if by_meter {
        "energy, J"
    } else {
        "processor time, s (for energy: no power meter)"
    };
    let pictures: [(&str, &str, Vec<Curve>); 3] = [
        (
            "sensitivity-high",
            "response of the job of high priority, s",
            measured(&|job| job.high_response_s),
        ),
        (
            "sensitivity-low",
            "response of the job of low priority, s",
            measured(&|job| job.low_response_s),
        ),
        (
            "sensitivity-energy",
            energy_name,
            measured(&|job| energy(plan, job).filter(|_| by_meter).unwrap_or(job.busy_s)),
        ),
    ];
    for (file, name, curves) in pictures {
        let path = out.join(format!("{file}.svg"));
        let title = "Two jobs, measured; checkpoints on emulated storage";
        draw(&path, |canvas| {
            against_bandwidth(canvas, title, name, &curves)
        })?;
    }
    Ok(())
}

/// Draws Figures 4 and 6 from the model.
pub(super) fn model(out: &Path, model: &Model) -> Result<(), Failure> {
    type Pick = fn(&super::model::Row) -> f64;
    let energy = format!("energy, {}", model.energy_unit);
    let pictures: [(&str, &str, Pick); 3] = [
        (
            "model-high",
            "response of the job of high priority, s",
            |row| row.high_response_s,
        ),
        (
            "model-low",
            "response of the job of low priority, s",
            |row| row.low_response_s,
        ),
        ("model-energy", &energy, |row| row.energy),
    ];
    for (file, name, pick) in pictures {
        let curves: Vec<Curve> = Policy::ALL
            .into_iter()
            .map(|policy| {
                let rows = model.rows.iter().filter(|row| row.policy == policy);
                let line: Vec<_> = rows
                    .map(|row| (row.bandwidth_bytes_per_s / 1e6, pick(row)))
                    .collect();
                Curve {
                    name: policy.to_string(),
                    points: Vec::new(),
                    line,
                }
            })
            .collect();
        let path = out.join(format!("{file}.svg"));
        let title = "Two jobs of 60 s and 5 GB, calculated";
        draw(&path, |canvas| {
            against_bandwidth(canvas, title, name, &curves)
        })?;
    }
    Ok(())
}

fn against_bandwidth(
    canvas: &Canvas<'_>,
    title: &str,
    y_name: &str,
    curves: &[Curve],
) -> Result<(), String> {
    let all = curves.iter().flat_map(|curve| &curve.line);
    let mut chart = ChartBuilder::on(canvas)
        .caption(title, (FONT, 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(
            around(all.clone().map(|point| point.0)).log_scale(),
            0.0..up_to(all.map(|point| point.1)),
        )
        .map_err(text)?;
    chart
        .configure_mesh()
        .max_light_lines(2)
        .x_desc("bandwidth of checkpoints, MB/s (logarithmic)")
        .y_desc(y_name)
        .draw()
        .map_err(text)?;
    for (index, curve) in curves.iter().enumerate() {
        let colour = colour(index);
        chart
            .draw_series(LineSeries::new(
                curve.line.iter().copied(),
                colour.stroke_width(2),
            ))
            .map_err(text)?
            .label(curve.name.clone())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        chart
            .draw_series(
                curve
                    .points
                    .iter()
                    .map(|&at| Circle::new(at, 3, colour.filled())),
            )
            .map_err(text)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(GREY)
        .label_font((FONT, 15))
        .draw()
        .map_err(text)
}

#[cfg(test)]
mod tests;
