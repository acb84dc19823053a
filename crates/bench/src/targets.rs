//! What Pinfold is to reach, beside what a run measured.
//!
//! A ratio is one of medians of the same run, because the machine drifts; an absolute figure is the best of the runs.

use crate::record::{Metric, Record};
use std::fmt;

/// The targets that `records` tell something about. Nothing where they tell of none.
///
/// Nothing where the run was a quick one either: its workloads are smaller, and some targets depend on their size.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'r> {
    /// The records of a run.
    pub records: &'r [Record],
    /// Whether it was a quick one.
    pub quick: bool,
}

/// Which way is better.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Better {
    More,
    Less,
}

struct Row {
    what: &'static str,
    figure: Option<f64>,
    better: Better,
    must: f64,
    aim: f64,
    unit: &'static str,
}

impl Row {
    fn reaches(&self, figure: f64, limit: f64) -> bool {
        match self.better {
            Better::More => figure >= limit,
            Better::Less => figure <= limit,
        }
    }
}

fn at_least(what: &'static str, figure: Option<f64>, must: f64, aim: f64) -> Row {
    Row { what, figure, better: Better::More, must, aim, unit: "x" }
}

fn at_most(what: &'static str, figure: Option<f64>, must: f64, aim: f64, unit: &'static str) -> Row {
    Row { what, figure, better: Better::Less, must, aim, unit }
}

/// What the quick ways to memory must do without: read-modify-writes, one case and one subject of each.
const QUIET: [(&str, &str, &str); 9] = [
    ("pool", "mpt3sas-alloc", "pinfold"),
    ("pool", "mpt3sas-free", "pinfold"),
    ("pool", "pair-64", "pinfold"),
    ("pool", "pair-64-2t", "pinfold"),
    ("pool", "bulk-32", "pinfold"),
    ("frame", "pair-4k", "pinfold"),
    ("frame", "fill-64", "pinfold"),
    ("page-pool", "local", "pinfold"),
    ("page-pool", "ring", "pinfold-bulk"),
];

impl Targets<'_> {
    fn find(&self, suite: &str, case: &str, subject: &str, metric: Metric) -> Option<&Record> {
        self.records.iter().find(|r| (r.suite, r.case, r.subject, r.metric) == (suite, case, subject, metric))
    }

    fn median(&self, suite: &str, case: &str, subject: &str) -> Option<f64> {
        self.find(suite, case, subject, Metric::Time).map(|r| r.median)
    }

    fn best(&self, suite: &str, case: &str, subject: &str) -> Option<f64> {
        self.find(suite, case, subject, Metric::Time).map(|r| r.min)
    }

    fn bytes(&self, suite: &str, case: &str, subject: &str) -> Option<f64> {
        self.find(suite, case, subject, Metric::Bytes).map(|r| r.median)
    }

    /// The first over the second, of one suite, each a case and a subject.
    fn ratio(&self, suite: &str, over: (&str, &str), under: (&str, &str)) -> Option<f64> {
        Some(self.median(suite, over.0, over.1)? / self.median(suite, under.0, under.1)?)
    }

    /// Alloc and free of one block of the workload together.
    fn workload(&self, subject: &str) -> Option<f64> {
        Some(self.median("pool", "mpt3sas-alloc", subject)? + self.median("pool", "mpt3sas-free", subject)?)
    }

    fn workload_best(&self, subject: &str) -> Option<f64> {
        Some(self.best("pool", "mpt3sas-alloc", subject)? + self.best("pool", "mpt3sas-free", subject)?)
    }

    fn rows(&self) -> Vec<Row> {
        let mut rows = self.pool_rows();
        rows.extend(self.frame_rows());
        rows.extend(self.page_pool_rows());
        rows.extend(self.buffer_rows());
        rows.extend(self.vfio_rows());
        rows.extend(self.quiet_row());
        rows
    }

    fn pool_rows(&self) -> Vec<Row> {
        let pool = |over, under| self.ratio("pool", over, under);
        let workload = |over, under| Some(self.workload(over)? / self.workload(under)?);
        let of = |case, subject| pool((case, subject), (case, "pinfold"));
        let pair = ("pair-64", "pinfold");
        vec![
            at_least("mpt3sas, alloc + free: inblock / pinfold", workload("inblock", "pinfold"), 8.0, 15.0),
            at_most("mpt3sas, alloc + free of one block", self.workload_best("pinfold"), 8.0, 4.0, "ns"),
            at_least("mpt3sas-alloc: linear / pinfold", of("mpt3sas-alloc", "linear"), 120.0, 250.0),
            at_least("mpt3sas-free: linear / pinfold", of("mpt3sas-free", "linear"), 2500.0, 5000.0),
            at_most("mpt3sas: Block / raw", workload("pinfold-block", "pinfold"), 2.0, 1.3, "x"),
            at_most("pair-64: pinfold / inblock", pool(pair, ("pair-64", "inblock")), 0.25, 0.12, "x"),
            at_most(
                "pair-4096 / pair-16",
                pool(("pair-4096", "pinfold"), ("pair-16", "pinfold")),
                1.2,
                1.0,
                "x",
            ),
            at_most(
                "bulk-32, alloc + free of one block",
                self.best("pool", "bulk-32", "pinfold"),
                3.0,
                1.5,
                "ns",
            ),
            at_most("pair-64: checks on / off", pool(pair, ("pair-64", "pinfold-unchecked")), 1.3, 1.1, "x"),
            at_least("pool, two threads / one", pool(pair, ("pair-64-2t", "pinfold")), 1.9, 2.0),
        ]
    }

    fn frame_rows(&self) -> Vec<Row> {
        let best = |case, subject| self.best("frame", case, subject);
        let ratio = |over, under| self.ratio("frame", over, under);
        vec![
            at_most("pair-4k", best("pair-4k", "pinfold"), 8.0, 4.0, "ns"),
            at_most("pair-4k, shared", best("pair-4k", "pinfold-shared"), 40.0, 25.0, "ns"),
            at_most("fill-64, a frame", best("fill-64", "pinfold"), 2.5, 1.2, "ns"),
            at_most("fill-512, a frame", best("fill-512", "pinfold"), 1.5, 0.7, "ns"),
            at_least(
                "rpc-259: single / array",
                ratio(("rpc-259", "single"), ("rpc-259", "array")),
                5.5,
                10.0,
            ),
            at_least(
                "zone, two threads / one",
                ratio(("pair-4k", "pinfold"), ("pair-4k-2t", "pinfold")),
                1.9,
                2.0,
            ),
            at_most("1 TiB zone, bytes a frame", self.bytes("frame", "zone-1t", "pinfold"), 0.16, 0.16, "B"),
            at_most("1 TiB zone, construction", best("zone-1t", "pinfold"), 100.0, 30.0, "ms"),
        ]
    }

    fn page_pool_rows(&self) -> Vec<Row> {
        let best = |case| self.best("page-pool", case, "pinfold");
        let counters = self.ratio("page-pool", ("local-64", "pinfold"), ("local-64", "pinfold-uncounted"));
        vec![
            at_most("page pool, local", best("local"), 8.0, 4.0, "ns"),
            at_most("page pool, ring", best("ring"), 25.0, 12.0, "ns"),
            at_most("page pool, local-64: counters on / off", counters, 1.03, 1.03, "x"),
        ]
    }

    fn buffer_rows(&self) -> Vec<Row> {
        let best = |case| self.best("buffer", case, "pinfold");
        let pages = |case| self.ratio("buffer", (case, "pages-4k"), (case, "pinfold"));
        let bytes = |subject| self.bytes("buffer", "register-1g", subject);
        let table = || Some(bytes("pages-4k")? / bytes("pinfold")?);
        let segments = self.find("buffer", "gather-8m", "pinfold", Metric::Segments).map(|r| r.median);
        vec![
            at_least("register-1g: pages-4k / pinfold", pages("register-1g"), 20.0, 20.0),
            at_least("register-1g: table of pages-4k / pinfold", table(), 500.0, 500.0),
            at_most("locate", best("locate"), 5.0, 5.0, "ns"),
            at_most("gather-8m", best("gather-8m"), 40.0, 40.0, "ns"),
            at_least("gather-8m: pages-4k / pinfold", pages("gather-8m"), 60.0, 60.0),
            at_most("gather-8m, segments", segments, 4.0, 1.0, ""),
            at_least("io-submit of 8 MiB: pages-4k / pinfold", pages("io-submit"), 20.0, 20.0),
        ]
    }

    /// Requests a second beside the kernel's driver.
    fn vfio_rows(&self) -> Vec<Row> {
        let rate = |subject| Some(self.find("vfio", "randread-4k-64", subject, Metric::Rate)?.median);
        let row =
            |what, over, under| at_least(what, rate(over).zip(rate(under)).map(|(o, u)| o / u), 1.0, 1.0);
        vec![
            row("4 KiB reads, 64 at a time: static / fio", "pinfold-static", "fio"),
            row("4 KiB reads, 64 at a time: polled / fio", "pinfold-polled", "fio"),
            row("4 KiB reads, 64 at a time: revoke / fio", "pinfold-revoke", "fio"),
            row("4 KiB reads, 64 at a time: strict / fio", "pinfold-strict", "fio"),
            row("the same: static / fio-batched", "pinfold-static", "fio-batched"),
        ]
    }

    /// The worst of the hot paths, in a build that counts.
    fn quiet_row(&self) -> Option<Row> {
        let count = |(suite, case, subject): &(&str, &str, &str)| {
            let record = self.find(suite, case, subject, Metric::Count)?;
            Some(record.max)
        };
        let worst = QUIET.iter().filter_map(count).reduce(f64::max);
        Some(at_most("read-modify-writes an operation, the worst", worst, 0.02, 0.005, ""))
    }
}

impl fmt::Display for Targets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        let mut measured = rows.iter().filter_map(|row| Some((row, row.figure?))).peekable();
        if self.quick || measured.peek().is_none() {
            return Ok(());
        }
        writeln!(f, "\n{:<44}{:>12}{:>10}{:>10}", "target", "here", "must", "aim")?;
        for (row, figure) in measured {
            let verdict = if row.reaches(figure, row.aim) {
                "aim reached"
            } else if row.reaches(figure, row.must) {
                "holds"
            } else {
                "FALLS SHORT"
            };
            let (sign, digits) =
                (if row.better == Better::More { ">=" } else { "<=" }, if figure < 0.1 { 4 } else { 2 });
            writeln!(
                f,
                "{:<44}{:>12}{:>10}{:>10}  {verdict}",
                row.what,
                format!("{figure:.digits$} {}", row.unit),
                format!("{sign} {}", row.must),
                row.aim,
            )?;
        }
        if !crate::COUNTS_RMW {
            writeln!(f, "Read-modify-writes an operation are counted by a build with --features count-rmw.")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(case: &'static str, subject: &'static str, metric: Metric, figures: [f64; 3]) -> Record {
        let [min, median, max] = figures;
        Record { suite: "pool", case, subject, metric, unit: "", median, min, max, runs: 3, modelled: false }
    }

    fn lines(records: &[Record]) -> String {
        Targets { records, quick: false }.to_string()
    }

    #[test]
    fn ratios_are_of_medians_and_absolutes_are_the_best() {
        let time = |case, subject, figures| record(case, subject, Metric::Time, figures);
        let text = lines(&[
            time("mpt3sas-alloc", "pinfold", [1.0, 2.0, 9.0]),
            time("mpt3sas-free", "pinfold", [1.0, 3.0, 9.0]),
            time("mpt3sas-alloc", "inblock", [1.0, 20.0, 99.0]),
            time("mpt3sas-free", "inblock", [1.0, 30.0, 99.0]),
            time("pair-64", "pinfold", [1.0, 4.0, 9.0]),
            time("pair-64", "inblock", [1.0, 8.0, 9.0]),
        ]);
        let line = |what: &str| text.lines().find(|line| line.starts_with(what)).unwrap();
        assert!(
            line("mpt3sas, alloc + free: inblock").contains("10.00 x")
                && line("mpt3sas, alloc + free: inblock").ends_with("holds")
        );
        assert!(
            line("mpt3sas, alloc + free of one").contains("2.00 ns")
                && line("mpt3sas, alloc + free of one").ends_with("aim reached")
        );
        assert!(
            line("pair-64: pinfold / inblock").contains("0.50 x")
                && line("pair-64: pinfold / inblock").ends_with("FALLS SHORT")
        );
        assert_eq!(
            text.lines().filter(|line| line.contains("linear")).count(),
            0,
            "what was not measured is left out"
        );
    }

    #[test]
    fn of_rates_more_is_better() {
        let rate = |subject, median| Record {
            suite: "vfio",
            ..record("randread-4k-64", subject, Metric::Rate, [1.0, median, 9e9])
        };
        let text = lines(&[rate("fio", 100.0), rate("pinfold-static", 283.0), rate("pinfold-strict", 99.0)]);
        let line = |what: &str| text.lines().find(|line| line.contains(what)).unwrap();
        assert!(line("static / fio").contains("2.83 x") && line("static / fio").ends_with("aim reached"));
        assert!(line("strict / fio").contains(">= 1") && line("strict / fio").ends_with("FALLS SHORT"));
        assert!(!text.contains("polled") && !text.contains("batched"), "{text}");
    }

    #[test]
    fn counts_are_the_worst_and_nothing_is_said_of_nothing() {
        let text = lines(&[
            record("pair-64", "pinfold", Metric::Count, [0.0, 0.0, 0.001]),
            record("mpt3sas-free", "pinfold", Metric::Count, [0.01, 0.01, 0.016]),
        ]);
        assert!(text.contains("0.0160") && text.contains("holds"), "{text}");
        assert_eq!(lines(&[]), "");
        let quick =
            Targets { records: &[record("pair-64", "pinfold", Metric::Count, [0.0; 3])], quick: true };
        assert_eq!(quick.to_string(), "");
    }
}
