//! What Pinfold sets out to reach, beside what a run reached.
//!
//! A target is a ratio between two subjects of one run, or a figure of Pinfold alone. Ratios are between medians; of a
//! figure alone the best of the runs counts, because a shared machine is slower at one time than at another and never
//! faster than it is.

mod rows;

use crate::record::{Metric, Record};
use std::fmt;

/// On which side of its limit a figure must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    AtMost,
    AtLeast,
}

/// One row: what is held against which limits.
struct Target {
    what: &'static str,
    side: Side,
    must: f64,
    aim: Option<f64>,
    unit: &'static str,
    /// The figure, where the run has what it takes.
    figure: fn(Figures<'_>) -> Option<f64>,
}

/// The records of a run, by name.
#[derive(Clone, Copy)]
struct Figures<'r>(&'r [Record]);

impl<'r> Figures<'r> {
    fn record(self, suite: &str, case: &str, subject: &str, metric: Metric) -> Option<&'r Record> {
        self.0.iter().find(|r| (r.suite, r.case, r.subject, r.metric) == (suite, case, subject, metric))
    }

    fn median(self, suite: &str, case: &str, subject: &str) -> Option<f64> {
        self.record(suite, case, subject, Metric::Time).map(|r| r.median)
    }

    fn best(self, suite: &str, case: &str, subject: &str) -> Option<f64> {
        self.record(suite, case, subject, Metric::Time).map(|r| r.min)
    }

    /// How many times as long `other` takes as Pinfold does.
    fn times(self, suite: &str, case: &str, other: &str) -> Option<f64> {
        Some(self.median(suite, case, other)? / self.median(suite, case, "pinfold")?)
    }

    /// The median of another metric than time.
    fn other(self, suite: &str, case: &str, subject: &str, metric: Metric) -> Option<f64> {
        self.record(suite, case, subject, metric).map(|r| r.median)
    }
}

impl Target {
    fn verdict(&self, figure: f64) -> &'static str {
        let within = |limit: f64| match self.side {
            Side::AtMost => figure <= limit,
            Side::AtLeast => figure >= limit,
        };
        match self.aim {
            Some(aim) if within(aim) => "as aimed",
            _ if within(self.must) => "reached",
            _ => "short",
        }
    }
}

/// The targets that `records` say something of. Nothing where they say nothing.
///
/// Where the run was a quick one nothing is said either: the work is too short to be held against a limit.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'r> {
    /// The records of a run.
    pub records: &'r [Record],
    /// Whether it was a quick one.
    pub quick: bool,
}

impl fmt::Display for Targets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let figures = Figures(if self.quick { &[] } else { self.records });
        let mut rows = rows::TARGETS.iter().filter_map(|t| Some((t, (t.figure)(figures)?))).peekable();
        if rows.peek().is_none() {
            return Ok(());
        }
        writeln!(f, "\n{:<66}{:>10}{:>10}{:>10}", "target", "must", "aim", "here")?;
        rows.try_for_each(|(target, figure)| {
            let sign = if target.side == Side::AtMost { "<=" } else { ">=" };
            let limit = |limit: f64| format!("{sign} {limit}");
            writeln!(
                f,
                "{:<66}{:>10}{:>10}{:>10} {:<10}{}",
                target.what,
                limit(target.must),
                target.aim.map_or_else(String::new, limit),
                digits(figure),
                target.unit,
                target.verdict(figure)
            )
        })
    }
}

/// Three digits that count.
fn digits(figure: f64) -> String {
    match figure.abs() {
        100.0.. => format!("{figure:.0}"),
        10.0.. => format!("{figure:.1}"),
        1.0.. => format!("{figure:.2}"),
        _ => format!("{figure:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(case: &'static str, subject: &'static str, min: f64, median: f64) -> Record {
        let (suite, metric, unit, max) = ("pool", Metric::Time, "ns/op", median);
        Record { suite, case, subject, metric, unit, median, min, max, runs: 3, modelled: false }
    }

    fn verdicts(records: &[Record], quick: bool) -> Vec<String> {
        let text = Targets { records, quick }.to_string();
        text.lines().skip(2).map(str::to_owned).collect()
    }

    #[test]
    fn a_ratio_is_of_medians_and_a_figure_the_best() {
        let records = [
            record("mpt3sas-alloc", "pinfold", 1.0, 4.0),
            record("mpt3sas-alloc", "inblock", 9.0, 20.0),
            record("mpt3sas-free", "pinfold", 2.0, 4.0),
            record("mpt3sas-free", "inblock", 9.0, 44.0),
        ];
        let rows = verdicts(&records, false);
        let ends = |row: &str, end: [&str; 3]| {
            let words: Vec<_> = row.split_whitespace().collect();
            assert_eq!(words[words.len() - 3..], end, "{row}");
        };
        assert_eq!(rows.len(), 2);
        ends(&rows[0], ["8.00", "x", "reached"]);
        assert!(rows[1].ends_with("3.00 ns        as aimed"), "{}", rows[1]);
        assert!(verdicts(&records, true).is_empty());
    }

    #[test]
    fn what_falls_short_is_said() {
        let records = [record("pair-64", "pinfold", 3.0, 3.0), record("pair-64", "inblock", 9.0, 9.0)];
        let rows = verdicts(&records, false);
        assert!(rows.iter().any(|row| row.contains("inblock") && row.ends_with("short")), "{rows:?}");
    }
}
