//! Records of measurements, as lines of JSON or as rows of a table.

use serde::Serialize;
use std::fmt;

/// The kind of a figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Metric {
    /// A duration.
    Time,
    /// Operations per second.
    Rate,
    /// An amount of memory.
    Bytes,
    /// A count.
    Count,
    /// Segments given to a device.
    Segments,
}

/// The note of a row whose runs disagree.
pub(crate) const SPREAD: &str = "spread above a tenth: not published";

/// One figure of one subject in one case.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Record {
    /// The suite, for instance `pool`.
    pub(crate) suite: &'static str,
    /// The case within the suite.
    pub(crate) case: &'static str,
    /// The subject: `pinfold`, or the name of a baseline.
    pub(crate) subject: &'static str,
    /// The kind of figure.
    pub(crate) metric: Metric,
    /// The unit of the figures.
    pub(crate) unit: &'static str,
    /// The median of the runs.
    pub(crate) median: f64,
    /// The minimum of the runs.
    pub(crate) min: f64,
    /// The maximum of the runs.
    pub(crate) max: f64,
    /// The number of counted runs; 0 if the case was skipped, whose figures are not numbers (`null`
    /// in JSON).
    pub(crate) runs: usize,
    /// Whether the figure comes from a model of the hardware.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) modelled: bool,
    /// The influence of this machine on the figure, for instance the size of the pages; or why the
    /// case was skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
}

impl Record {
    /// Returns whether the case was measured, not skipped.
    pub(crate) fn is_measured(&self) -> bool {
        self.runs > 0
    }

    /// Marks the row if the runs disagree by more than a tenth of the median: such a row is not
    /// published.
    pub(crate) fn check_spread(&mut self) {
        if self.max - self.min > self.median / 10.0 {
            self.note = Some(SPREAD.to_owned());
        }
    }

    /// Returns the record as one line of JSON, without a line end.
    pub(crate) fn to_json(&self) -> String {
        // A record has only strings and numbers, which JSON can represent; what is not a number
        // becomes `null`.
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
impl Record {
    /// Returns a record of three runs: half of `median`, `median`, and twice that.
    pub(crate) fn of_runs(
        suite: &'static str,
        case: &'static str,
        subject: &'static str,
        metric: Metric,
        median: f64,
    ) -> Self {
        let (min, max) = (median / 2.0, median * 2.0);
        let (runs, modelled, note) = (3, false, None);
        Self { suite, case, subject, metric, unit: "ns/op", median, min, max, runs, modelled, note }
    }
}

/// Records as a table, with the ratio of each to the first subject of its case, and the notes
/// below.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table<'r>(pub(crate) &'r [Record]);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<22}{:<20}{:>12}{:>12}{:>12}{:>6}  {:<18}{:>9}",
            "case", "subject", "median", "min", "max", "runs", "unit", "ratio"
        )?;
        let mut first: Option<&Record> = None;
        for record in self.0.iter().filter(|record| record.is_measured()) {
            let same_case = first.is_some_and(|f| {
                (f.suite, f.case, f.unit) == (record.suite, record.case, record.unit)
            });
            if !same_case {
                first = Some(record);
            }
            let base = first.map_or(record.median, |f| f.median);
            writeln!(
                f,
                "{:<22}{:<20}{:>12}{:>12}{:>12}{:>6}  {:<18}{:>9}{}",
                if same_case { "" } else { record.case },
                record.subject,
                digits(record.median),
                digits(record.min),
                digits(record.max),
                record.runs,
                record.unit,
                if base == 0.0 { "-".to_owned() } else { format!("{:.2}x", record.median / base) },
                if record.modelled { "  modelled" } else { "" },
            )?;
        }
        // Each note once, with all of its cases.
        let mut noted: Vec<(&str, bool, Vec<&str>)> = Vec::new();
        for record in self.0 {
            let Some(note) = record.note.as_deref() else { continue };
            match noted.iter_mut().find(|(known, ..)| *known == note) {
                Some((.., cases)) if cases.contains(&record.case) => {}
                Some((.., cases)) => cases.push(record.case),
                None => noted.push((note, record.is_measured(), vec![record.case])),
            }
        }
        noted.into_iter().try_for_each(|(note, measured, cases)| {
            writeln!(f, "{}{}: {note}", cases.join(", "), if measured { "" } else { ", skipped" })
        })
    }
}

/// Formats a figure with two decimals; with four if it is below 1, and none from a million on, so
/// that a column holds it.
fn digits(figure: f64) -> String {
    let decimals = match figure.abs() {
        below if below < 1.0 => 4,
        below if below < 1e6 => 2,
        _ => 0,
    };
    format!("{figure:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stay_apart() {
        for figure in [0.0, 0.00001, 0.99999, 1.0, 999_999.994, 264_037_071.69, 13_107_200.0, 9.9e9]
        {
            for unit in ["transactions/s", "invalidations/op", "us, longest call"] {
                let record = Record {
                    unit,
                    ..Record::of_runs("iommu", "rr-200", "pinfold", Metric::Rate, figure)
                };
                let text = Table(std::slice::from_ref(&record)).to_string();
                let line = text.lines().nth(1).unwrap();
                let words = line.split_whitespace().count();
                assert_eq!(words, 7 + unit.split(' ').count(), "{line}");
            }
        }
    }
}
