//! Plots records as SVG: a panel per case, a row per subject.
//!
//! Marks, bars and labels need a few elements of SVG, no fonts and no layout, and therefore no
//! dependency.

mod scale;

use crate::record::{Metric, Record};
use scale::{LEFT, RIGHT, Scale};
use std::fmt;

const WIDTH: f64 = 900.0;
/// The title and the legend.
const TOP: f64 = 62.0;
const ROW: f64 = 18.0;
/// The name of a case and the label of its axis, above its rows.
const HEADING: f64 = 32.0;
/// The labels of the ticks, below the rows.
const TICKS: f64 = 20.0;
const OURS: &str = "#1f5f99";
const OTHERS: &str = "#e08a2e";

/// The records of one suite as an SVG picture, with a panel for each case and unit.
///
/// Figures of one unit share a scale in all panels: logarithmic, as the label then says, where they
/// spread over more than a factor of 30, else linear from 0. A logarithmic axis has no 0, so a
/// median is a mark there and not a bar. The line through it extends from the minimum to the
/// maximum of the runs.
#[derive(Clone, Copy, Debug)]
pub struct Plot<'r> {
    /// The title.
    pub title: &'r str,
    /// The records, with those of a case adjacent.
    pub records: &'r [Record],
}

/// Text with the characters that XML reserves replaced.
pub(crate) struct Escaped<'a>(pub(crate) &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            c => fmt::Write::write_char(f, c),
        })
    }
}

impl fmt::Display for Plot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let panels = || {
            let all = self.records.chunk_by(|a, b| (a.case, a.unit) == (b.case, b.unit));
            all.filter(|records| records.iter().all(Record::is_measured))
        };
        let height = panels().fold(TOP, |y, panel| y + height_of(panel)) + ROW;
        let title = Escaped(self.title);
        writeln!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12" role="img">"#
        )?;
        writeln!(f, "<title>{title}</title>")?;
        writeln!(f, r#"<rect width="{WIDTH}" height="{height}" fill="white"/>"#)?;
        writeln!(f, r#"<text x="12" y="24" font-size="15">{title}</text>"#)?;
        legend(f, 46.0)?;
        let mut y = TOP;
        for records in panels() {
            self.panel(f, records, y)?;
            y += height_of(records);
        }
        f.write_str("</svg>\n")
    }
}

fn height_of(records: &[Record]) -> f64 {
    rows(records.len()).mul_add(ROW, HEADING + TICKS)
}

/// Draws what the colours and lines mean.
fn legend(f: &mut fmt::Formatter<'_>, y: f64) -> fmt::Result {
    for (x, colour, words) in [(12.0, OURS, "Pinfold"), (92.0, OTHERS, "baselines")] {
        writeln!(f, r#"<circle cx="{}" cy="{}" r="5" fill="{colour}"/>"#, x + 5.0, y - 4.0)?;
        writeln!(f, r#"<text x="{}" y="{y}">{words}</text>"#, x + 16.0)?;
    }
    let (from, to, at) = (282.0, 312.0, y - 4.0);
    writeln!(f, r#"<line x1="{from}" x2="{to}" y1="{at}" y2="{at}" stroke="black"/>"#)?;
    writeln!(
        f,
        r#"<text x="{}" y="{y}">minimum to maximum of the runs; the mark or the end of the bar is the median</text>"#,
        to + 8.0
    )
}

impl Plot<'_> {
    fn panel(&self, f: &mut fmt::Formatter<'_>, records: &[Record], y: f64) -> fmt::Result {
        let Some(first) = records.first() else { return Ok(()) };
        let scale = Scale::of(self.records, first.unit);
        let (top, bottom) = (y + HEADING, rows(records.len()).mul_add(ROW, y + HEADING));
        writeln!(
            f,
            r#"<text x="12" y="{}" font-weight="bold">{}</text><text x="{LEFT}" y="{}" fill="dimgray">{}{}{}</text>"#,
            y + 22.0,
            Escaped(first.case),
            y + 22.0,
            Escaped(first.unit),
            if scale.is_log() { ", log axis" } else { "" },
            if first.metric == Metric::Rate { ", more is better" } else { "" },
        )?;
        for tick in scale.ticks() {
            let x = scale.x(tick);
            writeln!(
                f,
                r##"<line x1="{x:.1}" x2="{x:.1}" y1="{top}" y2="{}" stroke="#ccc"/>"##,
                bottom + 4.0
            )?;
            writeln!(
                f,
                r#"<text x="{x:.1}" y="{}" font-size="10" fill="dimgray" text-anchor="middle">{}</text>"#,
                bottom + 14.0,
                Tick(tick)
            )?;
        }
        writeln!(
            f,
            r#"<line x1="{LEFT}" x2="{RIGHT}" y1="{bottom}" y2="{bottom}" stroke="dimgray"/>"#
        )?;
        records
            .iter()
            .enumerate()
            .try_for_each(|(i, record)| mark(f, scale, record, rows(i).mul_add(ROW, top)))
    }
}

fn mark(f: &mut fmt::Formatter<'_>, scale: Scale, record: &Record, y: f64) -> fmt::Result {
    let ours = record.subject.starts_with("pinfold")
        || ["array", "list", "whole"].contains(&record.subject);
    let colour = if ours { OURS } else { OTHERS };
    let (end, least, most) = (scale.x(record.median), scale.x(record.min), scale.x(record.max));
    let middle = y + ROW / 2.0;
    writeln!(
        f,
        r#"<g><title>{}, {}: {} ({} to {}, {} runs) {}</title><text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
        Escaped(record.case),
        Escaped(record.subject),
        Figure(record.median),
        Figure(record.min),
        Figure(record.max),
        record.runs,
        Escaped(record.unit),
        LEFT - 8.0,
        y + 13.0,
        Escaped(record.subject),
    )?;
    if scale.is_log() {
        writeln!(f, r#"<circle cx="{end:.1}" cy="{middle:.1}" r="5" fill="{colour}"/>"#)?;
    } else {
        let (width, height) = (end - LEFT, ROW - 6.0);
        writeln!(
            f,
            r#"<rect x="{LEFT}" y="{:.1}" width="{width:.1}" height="{height:.1}" fill="{colour}"/>"#,
            y + 3.0
        )?;
    }
    writeln!(
        f,
        r#"<line x1="{least:.1}" x2="{most:.1}" y1="{middle:.1}" y2="{middle:.1}" stroke="black"/><text x="{:.1}" y="{:.1}">{}{}</text></g>"#,
        end.max(most) + 9.0,
        y + 13.0,
        Figure(record.median),
        if record.modelled { " (modelled)" } else { "" },
    )
}

/// The label of a tick, without insignificant digits.
struct Tick(f64);

impl fmt::Display for Tick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            v if v >= 1e9 => write!(f, "{}G", v / 1e9),
            v if v >= 1e6 => write!(f, "{}M", v / 1e6),
            v if v >= 1e4 => write!(f, "{}k", v / 1e3),
            // A power of ten or a round multiple of one: further digits are rounding errors.
            v => write!(f, "{}", (v * 1e6).round() / 1e6),
        }
    }
}

/// A figure with about three digits.
struct Figure(f64);

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            v if v >= 100.0 => write!(f, "{v:.0}"),
            v if v >= 10.0 => write!(f, "{v:.1}"),
            v if v >= 0.1 => write!(f, "{v:.2}"),
            v => write!(f, "{v:.4}"),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a suite has far fewer records than 2^52")]
fn rows(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests;
