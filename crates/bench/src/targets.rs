//! The targets, beside what a run measured.
//!
//! Nearly every target is a ratio of medians of the same run, because the speed of the machine
//! drifts, or a figure that does not depend on the machine; those in nanoseconds and microseconds
//! are for a processor of 2.5 GHz and more. Nearly all allocators are compared with `thread-list`,
//! an unchecked list of one thread, which is the floor: a ratio to a lock, or to a slow baseline,
//! would mostly show what that one costs.

mod figures;
mod iommu;
mod receive;
mod row;
mod scale;
mod serve;

pub(crate) use serve::REFILL;

use crate::record::{Metric, Record};
use figures::Figures;
use row::{Better, Row, at_least, at_most};
use std::fmt;

/// The targets for which `records` has figures. Empty after a quick run: some targets depend on the
/// size of the workload.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'r> {
    /// The records of a run.
    pub records: &'r [Record],
    /// Whether it was a quick run.
    pub quick: bool,
}

/// The limit and the aim for the cost over the floor of checks, out-of-band state and frees from
/// any thread, in every case.
const OVER_FLOOR: (f64, f64) = (3.0, 2.0);

/// The cases that copy bytes into DMA memory and out of it.
const COPIES: [&str; 6] = ["copy-64", "copy-512", "copy-4k", "copy-64k", "copy-1m", "copy-8m"];

/// The hot paths, which are to do without read-modify-writes: suite, case and subject of each. Of
/// an owner of a domain that is a batch; what revokes one mapping at a time has a row of its own,
/// as have frees of many objects at random.
const HOT_PATHS: [(&str, &str, &str); 12] = [
    ("pool", "mpt3sas-alloc", "pinfold"),
    ("pool", "mpt3sas-free", "pinfold"),
    ("pool", "pair-64", "pinfold"),
    ("pool", "pair-64-2t", "pinfold"),
    ("pool", "bulk-32", "pinfold"),
    ("pool", "owners-64", "pinfold"),
    ("frame", "pair-4k", "pinfold"),
    ("frame", "fill-64", "pinfold"),
    ("frame", "owners-64", "pinfold"),
    ("page-pool", "local", "pinfold"),
    ("page-pool", "ring", "pinfold-bulk"),
    ("iommu", "domain-4k-batch", "pinfold"),
];

/// Likewise, freed in random order.
const AT_RANDOM: [(&str, &str, &str); 4] = [
    ("pool", "mpt3sas-free-random", "pinfold"),
    ("pool", "random-4096", "pinfold"),
    ("frame", "random-4096", "pinfold"),
    ("frame", "random-free-all", "pinfold"),
];

impl Targets<'_> {
    fn figures(&self) -> Figures<'_> {
        Figures(self.records)
    }

    /// Returns the time to allocate and free one block of the workload, with the frees of this
    /// case.
    fn workload(&self, free: &str, subject: &str) -> Option<f64> {
        Some(
            self.figures().median("pool", "mpt3sas-alloc", subject)?
                + self.figures().median("pool", free, subject)?,
        )
    }

    /// Compares a subject with `thread-list`.
    fn floor(&self, what: &'static str, suite: &str, case: &str, subject: &str) -> Row {
        at_most(
            what,
            self.figures().ratio(suite, (case, subject), (case, "thread-list")),
            OVER_FLOOR.0,
            OVER_FLOOR.1,
            "x",
        )
    }

    fn rows(&self) -> Vec<Row> {
        let mut rows = self.pool_rows();
        rows.extend(self.frame_rows());
        rows.extend(scale::rows(self.figures()));
        rows.extend(self.page_pool_rows());
        rows.extend(self.buffer_rows());
        rows.extend(self.vfio_rows());
        rows.extend(iommu::rows(self.figures()));
        rows.extend(receive::rows(self.figures()));
        rows.extend(serve::rows(self.figures()));
        rows.extend(self.hot_path_rows());
        rows
    }

    fn pool_rows(&self) -> Vec<Row> {
        let ratio = |over, under| self.figures().ratio("pool", over, under);
        let floor = |what, case| self.floor(what, "pool", case, "pinfold");
        let (ordered, random) = ("mpt3sas-free", "mpt3sas-free-random");
        let workload =
            |free, over, under| Some(self.workload(free, over)? / self.workload(free, under)?);
        let all = |what, free| {
            at_most(what, workload(free, "pinfold", "thread-list"), OVER_FLOOR.0, OVER_FLOOR.1, "x")
        };
        let pair = ("pair-64", "pinfold");
        vec![
            all("mpt3sas, in order: pinfold / thread-list", ordered),
            all("mpt3sas, at random: pinfold / thread-list", random),
            floor("pair-64: pinfold / thread-list", "pair-64"),
            floor("pair-64-nowrite: pinfold / thread-list", "pair-64-nowrite"),
            floor("bulk-32: pinfold / thread-list", "bulk-32"),
            floor("bulk-512: pinfold / thread-list", "bulk-512"),
            floor("random-4096: pinfold / thread-list", "random-4096"),
            floor("out-4096: pinfold / thread-list", "out-4096"),
            at_most(
                "mpt3sas-free-random: pinfold / inblock",
                ratio((random, "pinfold"), (random, "inblock")),
                0.4,
                0.2,
                "x",
            ),
            at_most(
                "pair-4096 / pair-16",
                ratio(("pair-4096", "pinfold"), ("pair-16", "pinfold")),
                1.2,
                1.0,
                "x",
            ),
            at_least("pool, two threads / one", ratio(pair, ("pair-64-2t", "pinfold")), 1.9, 2.0),
            at_least(
                "pool, producer and consumer / one",
                ratio(("remote-free", "pinfold-alone"), ("remote-free", "pinfold")),
                1.9,
                2.0,
            ),
        ]
    }

    fn frame_rows(&self) -> Vec<Row> {
        let ratio = |over, under| self.figures().ratio("frame", over, under);
        let floor = |what, case| self.floor(what, "frame", case, "pinfold");
        vec![
            floor("pair-4k: pinfold / thread-list", "pair-4k"),
            floor("pair-2m: pinfold / thread-list", "pair-2m"),
            floor("fill-64: pinfold / thread-list", "fill-64"),
            floor("fill-512: pinfold / thread-list", "fill-512"),
            floor("random-4096, frames: pinfold / thread-list", "random-4096"),
            floor("random-free-all: pinfold / thread-list", "random-free-all"),
            at_most(
                "zone's own calls: random-free-all / free-all",
                ratio(("random-free-all", "pinfold-shared"), ("free-all", "pinfold-shared")),
                2.5,
                1.5,
                "x",
            ),
            at_most(
                "an owner: random-free-all / free-all",
                ratio(("random-free-all", "pinfold"), ("free-all", "pinfold")),
                2.5,
                1.5,
                "x",
            ),
            at_most(
                "fill-64, a frame",
                self.figures().median("frame", "fill-64", "pinfold"),
                0.8,
                0.5,
                "ns",
            ),
            at_most(
                "pair-2m, a run",
                self.figures().median("frame", "pair-2m", "pinfold"),
                50.0,
                25.0,
                "ns",
            ),
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
            at_most(
                "1 TiB zone, bytes per frame",
                self.figures().bytes("frame", "zone-1t", "pinfold"),
                0.16,
                0.16,
                "B",
            ),
        ]
    }

    fn page_pool_rows(&self) -> Vec<Row> {
        let floor = |what, case, subject| self.floor(what, "page-pool", case, subject);
        let counters = self.figures().ratio(
            "page-pool",
            ("local-64", "pinfold"),
            ("local-64", "pinfold-uncounted"),
        );
        vec![
            floor("page pool, local: pinfold / thread-list", "local", "pinfold"),
            floor("page pool, ring: pinfold / thread-list", "ring", "pinfold"),
            floor("page pool, ring: in bulk / thread-list", "ring", "pinfold-bulk"),
            at_most("page pool, local-64: counters on / off", counters, 1.03, 1.03, "x"),
        ]
    }

    fn buffer_rows(&self) -> Vec<Row> {
        let pages = |case| self.figures().ratio("buffer", (case, "pages-4k"), (case, "pinfold"));
        let bytes = |subject| self.figures().bytes("buffer", "register-1g-model", subject);
        let table = || Some(bytes("pages-4k")? / bytes("pinfold")?);
        let segments = self
            .figures()
            .find("buffer", "gather-8m", "pinfold", Metric::Segments)
            .map(|r| r.median);
        let locate = self.figures().ratio("buffer", ("locate", "pinfold"), ("locate-1", "pinfold"));
        let copy =
            |case: &&str| self.figures().ratio("buffer", (*case, "pinfold"), (*case, "memcpy"));
        let copies = COPIES.iter().filter_map(copy).reduce(f64::max);
        vec![
            // Both pin the same memory, which takes most of the time.
            at_least("register-1g: pages-4k / pinfold", pages("register-1g"), 0.95, 1.0),
            at_least(
                "register-1g-model: pages-4k / pinfold",
                pages("register-1g-model"),
                20.0,
                20.0,
            ),
            at_least("register-1g-model: table of pages-4k / pinfold", table(), 500.0, 500.0),
            at_most("locate, among 10^5 segments / in one", locate, 2.0, 1.2, "x"),
            at_least("gather-8m: pages-4k / pinfold", pages("gather-8m"), 60.0, 60.0),
            at_most("gather-8m, segments", segments, 4.0, 1.0, ""),
            at_most("copy-*, the worst: pinfold / memcpy", copies, 1.1, 1.05, "x"),
            at_least("io-submit, 64 in flight: pages-4k / pinfold", pages("io-submit"), 20.0, 20.0),
            at_least(
                "io-submit-1, 1 in flight: pages-4k / pinfold",
                pages("io-submit-1"),
                20.0,
                20.0,
            ),
        ]
    }

    /// Requests per second, beside the kernel's driver.
    fn vfio_rows(&self) -> Vec<Row> {
        let rate = |subject| {
            Some(self.figures().find("vfio", "randread-4k-64", subject, Metric::Rate)?.median)
        };
        let row = |what, over, under| {
            at_least(what, rate(over).zip(rate(under)).map(|(o, u)| o / u), 1.0, 1.0)
        };
        vec![
            row("4 KiB reads, 64 in flight: static / fio", "pinfold-static", "fio"),
            row("4 KiB reads, 64 in flight: polled / fio", "pinfold-polled", "fio"),
            row("4 KiB reads, 64 in flight: revoke / fio", "pinfold-revoke", "fio"),
            row("4 KiB reads, 64 in flight: strict / fio", "pinfold-strict", "fio"),
            row("the same: static / fio-batched", "pinfold-static", "fio-batched"),
        ]
    }

    /// The worst hot path, the worst of those at random, and a mapping that is revoked by itself,
    /// in a build that counts.
    fn hot_path_rows(&self) -> [Row; 4] {
        let single = self.figures().of_unit("iommu", "domain-4k", "pinfold", "rmw/op");
        let worst = |paths: &[(&str, &str, &str)], unit| {
            let of = |(suite, case, subject): &(&str, &str, &str)| {
                let same = |r: &&Record| {
                    (r.suite, r.case, r.subject, r.unit) == (*suite, *case, *subject, unit)
                };
                self.records.iter().find(same).map(|record| record.max)
            };
            paths.iter().filter_map(of).reduce(f64::max)
        };
        let rmw = |paths| worst(paths, "rmw/op");
        [
            at_most(
                "read-modify-writes per operation, the worst",
                rmw(&HOT_PATHS),
                0.02,
                0.005,
                "",
            ),
            at_most(
                "read-modify-writes, freed at random, the worst",
                rmw(&AT_RANDOM),
                0.02,
                0.005,
                "",
            ),
            at_most(
                "locks per operation, the worst",
                worst(&HOT_PATHS, "locks/op"),
                0.005,
                0.001,
                "",
            ),
            at_most("read-modify-writes, revoked one by one", single, 0.02, 0.005, ""),
        ]
    }
}

impl fmt::Display for Targets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        let mut measured = rows.iter().filter_map(|row| Some((row, row.figure?))).peekable();
        if self.quick || measured.peek().is_none() {
            return Ok(());
        }
        writeln!(f, "\n{:<50}{:>13}{:>12}{:>10}", "target", "here", "must", "aim")?;
        for (row, figure) in measured {
            let verdict = if row.reaches(figure, row.aim) {
                "aim reached"
            } else if row.reaches(figure, row.must) {
                "holds"
            } else {
                "FALLS SHORT"
            };
            let (sign, digits) = (
                if row.better == Better::More { ">=" } else { "<=" },
                if figure < 0.1 { 4 } else { 2 },
            );
            writeln!(
                f,
                "{:<50}{:>13}{:>12}{:>10}  {verdict}",
                row.what,
                format!("{figure:.digits$} {}", row.unit),
                format!("{sign} {}", row.must),
                row.aim,
            )?;
        }
        if !crate::COUNTS_RMW {
            writeln!(
                f,
                "Read-modify-writes and locks per operation are counted by a build with --features count-rmw."
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(
        case: &'static str,
        subject: &'static str,
        metric: Metric,
        figures: [f64; 3],
    ) -> Record {
        let [min, median, max] = figures;
        Record { unit: "", min, max, ..Record::of_runs("pool", case, subject, metric, median) }
    }

    fn lines(records: &[Record]) -> String {
        Targets { records, quick: false }.to_string()
    }

    #[test]
    fn ratios_are_of_medians_and_to_the_floor() {
        let time = |case, subject, figures| record(case, subject, Metric::Time, figures);
        let text = lines(&[
            time("mpt3sas-alloc", "pinfold", [1.0, 2.0, 9.0]),
            time("mpt3sas-free", "pinfold", [1.0, 3.0, 9.0]),
            time("mpt3sas-alloc", "thread-list", [1.0, 1.0, 99.0]),
            time("mpt3sas-free", "thread-list", [1.0, 1.0, 99.0]),
            time("pair-64", "pinfold", [1.0, 4.0, 9.0]),
            time("pair-64", "inblock", [1.0, 800.0, 900.0]),
            time("pair-64", "thread-list", [0.5, 1.0, 9.0]),
            time("bulk-32", "pinfold", [1.0, 1.0, 1.0]),
            time("bulk-32", "thread-list", [1.0, 1.0, 1.0]),
        ]);
        let line = |what: &str| text.lines().find(|line| line.starts_with(what)).unwrap();
        assert!(
            line("mpt3sas, in order").contains("2.50 x")
                && line("mpt3sas, in order").ends_with("holds")
        );
        assert!(
            line("pair-64: pinfold").contains("4.00 x")
                && line("pair-64: pinfold").ends_with("FALLS SHORT")
        );
        assert!(line("bulk-32").contains("1.00 x") && line("bulk-32").ends_with("aim reached"));
        assert!(!text.contains("inblock"), "ratios to a lock are not targets");
        assert!(!text.contains("at random"), "targets without figures are omitted");
    }

    #[test]
    fn the_worst_copy_is_reported() {
        let time = |case, subject, median| Record {
            suite: "buffer",
            ..record(case, subject, Metric::Time, [0.5, median, 9.0])
        };
        let text = lines(&[
            time("copy-64", "pinfold", 3.0),
            time("copy-64", "memcpy", 2.0),
            time("copy-8m", "pinfold", 4.0),
            time("copy-8m", "memcpy", 4.0),
        ]);
        let line = text.lines().find(|line| line.starts_with("copy-*")).unwrap();
        assert!(line.contains("1.50 x") && line.ends_with("FALLS SHORT"), "{text}");
    }

    #[test]
    fn names_leave_a_gap_before_the_figure() {
        // scripts/headline separates columns at two spaces.
        for row in (Targets { records: &[], quick: false }).rows() {
            assert!(row.what.len() <= 50 && !row.what.contains("  "), "{}", row.what);
            assert!(format!(">= {}", row.must).len() <= 11, "{}", row.what);
        }
    }

    #[test]
    fn skipped_cases_have_no_target() {
        let skipped = |subject| Record {
            suite: "buffer",
            runs: 0,
            ..record("gather-8m", subject, Metric::Time, [f64::NAN; 3])
        };
        let text = lines(&[skipped("pinfold"), skipped("pages-4k")]);
        assert_eq!(text, "");
    }

    #[test]
    fn higher_rates_are_better() {
        let rate = |subject, median| Record {
            suite: "vfio",
            ..record("randread-4k-64", subject, Metric::Rate, [1.0, median, 9e9])
        };
        let text = lines(&[
            rate("fio", 100.0),
            rate("pinfold-static", 283.0),
            rate("pinfold-strict", 99.0),
        ]);
        let line = |what: &str| text.lines().find(|line| line.contains(what)).unwrap();
        assert!(
            line("static / fio").contains("2.83 x")
                && line("static / fio").ends_with("aim reached")
        );
        assert!(
            line("strict / fio").contains(">= 1") && line("strict / fio").ends_with("FALLS SHORT")
        );
        assert!(!text.contains("polled") && !text.contains("batched"), "{text}");
    }

    #[test]
    fn counts_are_maxima_and_no_figures_give_no_table() {
        let count = |case, unit, figures| Record {
            unit,
            ..record(case, "pinfold", Metric::Count, figures)
        };
        let text = lines(&[
            count("pair-64", "rmw/op", [0.0, 0.0, 0.001]),
            count("pair-64", "locks/op", [0.0, 0.0, 0.0]),
            count("mpt3sas-free", "rmw/op", [0.01, 0.01, 0.016]),
            count("mpt3sas-free", "locks/op", [0.5, 0.5, 0.5]),
        ]);
        let line = |what: &str| text.lines().find(|line| line.starts_with(what)).unwrap();
        assert!(
            line("read-modify-writes").contains("0.0160")
                && line("read-modify-writes").ends_with("holds")
        );
        assert!(line("locks").contains("0.50") && line("locks").ends_with("FALLS SHORT"), "{text}");
        assert_eq!(lines(&[]), "");
        let quick = Targets {
            records: &[record("pair-64", "pinfold", Metric::Count, [0.0; 3])],
            quick: true,
        };
        assert_eq!(quick.to_string(), "");
    }
}
