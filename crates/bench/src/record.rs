//! What a measurement leaves: one record a line, as JSON or as a row of a table.

use serde::Serialize;
use std::fmt;

/// What kind of figure a record holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Metric {
    /// How long something takes.
    Time,
    /// How often something is done, per second.
    Rate,
    /// How much memory something takes.
    Bytes,
    /// How many of something there are.
    Count,
    /// How many segments a device is given.
    Segments,
}

/// One figure of one subject in one case.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Record {
    /// The suite: `pool`, `frame` ...
    pub suite: &'static str,
    /// The case within the suite.
    pub case: &'static str,
    /// Who was measured: `pinfold`, or a baseline's name.
    pub subject: &'static str,
    /// What kind of figure.
    pub metric: Metric,
    /// The unit of the figures.
    pub unit: &'static str,
    /// The median of the runs.
    pub median: f64,
    /// The least of the runs.
    pub min: f64,
    /// The greatest of the runs.
    pub max: f64,
    /// How many runs were counted.
    pub runs: usize,
    /// Whether the figure comes out of a model of the hardware.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub modelled: bool,
}

impl Record {
    /// The record as one line of JSON, without the line's end.
    pub fn to_json(&self) -> String {
        // A record is strings and finite numbers: there is nothing in it that JSON cannot say.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Records as a table for people, the ratio of each to its case's first subject beside it.
#[derive(Clone, Copy, Debug)]
pub struct Table<'r>(pub &'r [Record]);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<22}{:<20}{:>12}{:>12}{:>12}{:>6}  {:<14}{:>9}",
            "case", "subject", "median", "min", "max", "runs", "unit", "ratio"
        )?;
        let mut first: Option<&Record> = None;
        for record in self.0 {
            let same_case =
                first.is_some_and(|f| (f.suite, f.case, f.unit) == (record.suite, record.case, record.unit));
            if !same_case {
                first = Some(record);
            }
            let base = first.map_or(record.median, |f| f.median);
            writeln!(
                f,
                "{:<22}{:<20}{:>12}{:>12}{:>12}{:>6}  {:<14}{:>8.2}x{}",
                if same_case { "" } else { record.case },
                record.subject,
                digits(record.median),
                digits(record.min),
                digits(record.max),
                record.runs,
                record.unit,
                if base == 0.0 { f64::NAN } else { record.median / base },
                if record.modelled { "  modelled" } else { "" },
            )?;
        }
        Ok(())
    }
}

/// A figure with two digits behind the point, or with four where it is small.
fn digits(figure: f64) -> String {
    if figure.abs() < 1.0 { format!("{figure:.4}") } else { format!("{figure:.2}") }
}
