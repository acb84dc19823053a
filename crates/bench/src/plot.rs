//! Records as a picture: a bar for each case and subject, as SVG.
//!
//! Written by hand: bars and words need a few elements of SVG, no fonts and no layout, and so no dependency.

use crate::record::{Metric, Record};
use std::fmt;

const WIDTH: f64 = 900.0;
/// Where the bars begin; the subjects' names stand before.
const LEFT: f64 = 170.0;
/// Where the longest bar ends; the figures stand behind.
const RIGHT: f64 = 740.0;
const TOP: f64 = 40.0;
const ROW: f64 = 18.0;
const HEADING: f64 = 34.0;

/// The records of one suite as an SVG picture. Bars are logarithmic, in one scale for each unit; the line on a bar goes
/// from the least of the runs to the greatest. Pinfold's bars are dark, the baselines' light.
#[derive(Clone, Copy, Debug)]
pub struct Plot<'r> {
    /// What is written above it.
    pub title: &'r str,
    /// The records, those of a case side by side.
    pub records: &'r [Record],
}

/// Where a figure lies on a logarithmic scale from one power of ten to another.
#[derive(Clone, Copy)]
struct Scale {
    low: f64,
    decades: f64,
}

impl Scale {
    /// The scale for all records of the same unit.
    fn of(records: &[Record], like: &Record) -> Self {
        let same = || records.iter().filter(|r| (r.metric, r.unit) == (like.metric, like.unit));
        let bounds = same().flat_map(|r| [r.min, r.median, r.max]).filter(|v| v.is_finite() && *v > 0.0);
        let (least, most) = bounds.fold((f64::INFINITY, 0.0), |(a, b), v: f64| (v.min(a), v.max(b)));
        if most == 0.0 {
            return Self { low: 0.0, decades: 1.0 };
        }
        // A little below the least, so that its bar is still to be seen.
        let low = (least * 0.8).log10().floor();
        Self { low, decades: (most.log10().ceil() - low).max(1.0) }
    }

    fn x(self, value: f64) -> f64 {
        let share = (value.max(f64::MIN_POSITIVE).log10() - self.low) / self.decades;
        LEFT + share.clamp(0.0, 1.0) * (RIGHT - LEFT)
    }
}

/// A word with what XML has a use for itself replaced.
struct Escaped<'a>(&'a str);

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
        let cases = || self.records.chunk_by(|a, b| (a.case, a.metric) == (b.case, b.metric));
        let height = cases().fold(TOP, |y, case| rows(case.len()).mul_add(ROW, y + HEADING)) + ROW;
        let title = Escaped(self.title);
        writeln!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12" role="img">"#
        )?;
        writeln!(f, "<title>{title}</title>")?;
        writeln!(f, r#"<rect width="{WIDTH}" height="{height}" fill="white"/>"#)?;
        writeln!(f, r#"<text x="12" y="24" font-size="16">{title}</text>"#)?;
        let mut y = TOP;
        for case in cases() {
            self.case(f, case, y)?;
            y = rows(case.len()).mul_add(ROW, y + HEADING);
        }
        f.write_str("</svg>\n")
    }
}

impl Plot<'_> {
    fn case(&self, f: &mut fmt::Formatter<'_>, records: &[Record], y: f64) -> fmt::Result {
        let Some(first) = records.first() else { return Ok(()) };
        let scale = Scale::of(self.records, first);
        let bottom = rows(records.len()).mul_add(ROW, y + HEADING);
        writeln!(
            f,
            r#"<text x="12" y="{}" font-weight="bold">{}</text><text x="{LEFT}" y="{}" fill="dimgray">{}{}</text>"#,
            y + 24.0,
            Escaped(first.case),
            y + 24.0,
            Escaped(first.unit),
            if first.metric == Metric::Rate { ", more is better" } else { "" },
        )?;
        let mut decade = scale.low;
        while decade <= scale.low + scale.decades {
            let x = scale.x(10f64.powf(decade));
            writeln!(
                f,
                r##"<line x1="{x:.1}" x2="{x:.1}" y1="{}" y2="{bottom}" stroke="#ddd"/>"##,
                y + HEADING - 4.0
            )?;
            decade += 1.0;
        }
        records
            .iter()
            .enumerate()
            .try_for_each(|(i, record)| bar(f, scale, record, rows(i).mul_add(ROW, y + HEADING)))
    }
}

fn bar(f: &mut fmt::Formatter<'_>, scale: Scale, record: &Record, y: f64) -> fmt::Result {
    let ours = record.subject.starts_with("pinfold") || record.subject == "array" || record.subject == "list";
    let (end, least, most) = (scale.x(record.median), scale.x(record.min), scale.x(record.max));
    writeln!(
        f,
        r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text><rect x="{LEFT}" y="{:.1}" width="{:.1}" height="{:.1}" fill="{}"/><line x1="{least:.1}" x2="{most:.1}" y1="{:.1}" y2="{:.1}" stroke="black"/><text x="{:.1}" y="{:.1}">{}{}</text>"#,
        LEFT - 8.0,
        y + 12.0,
        Escaped(record.subject),
        y + 2.0,
        end - LEFT,
        ROW - 4.0,
        if ours { "#1f5f99" } else { "#b9c7d4" },
        y + ROW / 2.0,
        y + ROW / 2.0,
        end.max(most) + 6.0,
        y + 12.0,
        Figure(record.median),
        if record.modelled { " (modelled)" } else { "" },
    )
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
