//! The targets of the suite `iommu`.

use super::figures::Figures;
use super::row::{Row, at_least, at_most};

const SUITE: &str = "iommu";
/// The unit of the rates.
const RATE: &str = "transactions/s";
/// The unit of the longest call of any pass: what the limits are for, interruptions included.
const ONCE: &str = "us, longest once";

/// Returns the targets, those without figures too.
pub(super) fn rows(figures: Figures<'_>) -> Vec<Row> {
    let mut rows = Vec::from(protection(figures));
    rows.extend(parts(figures));
    rows.extend(scale(figures));
    rows
}

/// The request/response loops of 200 threads.
fn protection(figures: Figures<'_>) -> [Row; 3] {
    let rate = |subject| figures.of_unit(SUITE, "rr-200", subject, RATE);
    let ratio = |over, under| Some(rate(over)? / rate(under)?);
    // Of the time of a transaction, what is left when that of its copies alone is subtracted.
    let time = |subject| Some(1.0 / rate(subject)? - 1.0 / rate("copies")?);
    let beside = |over, under| Some(time(under)? / time(over)?);
    [
        at_least(
            "rr-200: pinfold-revoke / magazines (lazy)",
            ratio("pinfold-revoke", "magazines"),
            1.0,
            1.2,
        ),
        at_least(
            "rr-200: pinfold-batch / none, without the copying",
            beside("pinfold-batch", "none"),
            0.9,
            0.97,
        ),
        at_least(
            "rr-200: pinfold-strict / magazines-strict",
            ratio("pinfold-strict", "magazines-strict"),
            3.0,
            5.0,
        ),
    ]
}

/// Addresses, tables and domains in nanoseconds.
fn parts(figures: Figures<'_>) -> Vec<Row> {
    let row = |what, case, must, aim| {
        at_most(what, figures.median(SUITE, case, "pinfold"), must, aim, "ns")
    };
    let worst = figures.median(SUITE, "iova-worst", "pinfold-shared");
    vec![
        row("iova-pair, through an owner", "iova-pair", 10.0, 5.0),
        row("iova-128, through an owner", "iova-128", 40.0, 20.0),
        at_most("iova-worst, p99.9", worst, 2000.0, 1000.0, "ns"),
        row("map-4k", "map-4k", 40.0, 20.0),
        row("clear-4k", "clear-4k", 40.0, 20.0),
        row("map-1m", "map-1m", 345.0, 200.0),
        row("clear-1m", "clear-1m", 210.0, 130.0),
        row("domain-4k, through an owner", "domain-4k", 100.0, 60.0),
        row("domain-1m, through an owner", "domain-1m", 900.0, 500.0),
    ]
}

/// What must not grow.
fn scale(figures: Figures<'_>) -> Vec<Row> {
    let of = |case, subject, unit| figures.of_unit(SUITE, case, subject, unit);
    let cycled = |subject| of("tables-16t", subject, "ns/2 MiB");
    let never_freed =
        cycled("pinfold").zip(cycled("never-freed")).map(|(pinfold, never)| pinfold / never);
    let live = figures.ratio(SUITE, ("live-1m", "pinfold-revoke"), ("live-1k", "pinfold-revoke"));
    let flushed = ["pinfold-strict", "pinfold-revoke", "pinfold-batch"]
        .map(|subject| of("rr-200", subject, "flushed/cleared"))
        .into_iter()
        .try_fold(0.0, |worst: f64, figure| Some(worst.max(figure?)));
    let longest = of("live-1m", "pinfold-revoke", ONCE);
    let beside = of("revoke-many-1m", "pinfold", ONCE);
    vec![
        at_most(
            "static-50k, entries",
            of("static-50k", "pinfold-shared", "entries"),
            10.0,
            7.0,
            "",
        ),
        at_most(
            "static-50k, bytes",
            of("static-50k", "pinfold-shared", "bytes"),
            65536.0,
            65536.0,
            "B",
        ),
        at_most("rr-200: pages flushed / requested, the worst", flushed, 2.0, 1.1, "x"),
        at_most(
            "tables-16t, bytes left",
            of("tables-16t", "pinfold", "bytes left"),
            1048576.0,
            1048576.0,
            "B",
        ),
        at_most("tables-16t: pinfold / never-freed", never_freed, 1.05, 1.05, "x"),
        at_most(
            "flush-64p, invalidations",
            of("flush-64p", "pinfold", "invalidations"),
            1.0,
            1.0,
            "",
        ),
        at_most(
            "flush-64p, waits per page",
            of("flush-64p", "pinfold", "waits/page"),
            0.0625,
            0.0625,
            "",
        ),
        at_most("random unmap and map: live-1m / live-1k", live, 2.0, 1.5, "x"),
        at_most("live-1m, longest once", longest, 200.0, 50.0, "us"),
        at_most("revoke-many-1m, longest once beside it", beside, 50.0, 10.0, "us"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Metric, Record};

    fn row(records: &[Record], what: &str) -> Row {
        let found = rows(Figures(records)).into_iter().find(|row| row.what.starts_with(what));
        found.unwrap_or_else(|| panic!("no target {what}"))
    }

    #[test]
    fn rates_are_compared_by_unit() {
        let of = |subject, metric, unit, median| Record {
            unit,
            ..Record::of_runs(SUITE, "rr-200", subject, metric, median)
        };
        let records = [
            of("magazines", Metric::Rate, RATE, 200.0),
            of("magazines", Metric::Count, "entries", 7.0),
            of("pinfold-revoke", Metric::Count, "entries", 70.0),
            of("pinfold-revoke", Metric::Rate, RATE, 220.0),
        ];
        let lazy = row(&records, "rr-200: pinfold-revoke");
        let figure = lazy.figure.unwrap();
        assert!(
            (figure - 1.1).abs() < 1e-9
                && lazy.reaches(figure, lazy.must)
                && !lazy.reaches(figure, lazy.aim)
        );
        assert_eq!(
            row(&records, "rr-200: pinfold-batch").figure,
            None,
            "targets without figures are omitted"
        );
    }

    #[test]
    fn times_of_other_units_are_not_taken_for_ns() {
        let longest = Record {
            unit: ONCE,
            ..Record::of_runs(SUITE, "live-1m", "pinfold-revoke", Metric::Time, 90.0)
        };
        let time =
            |case, median| Record::of_runs(SUITE, case, "pinfold-revoke", Metric::Time, median);
        let records = [time("live-1m", 300.0), longest, time("live-1k", 200.0)];
        assert_eq!(row(&records, "random unmap").figure, Some(1.5));
        assert_eq!(row(&records, "live-1m, longest").figure, Some(90.0));
        let pair = Record::of_runs(SUITE, "iova-pair", "pinfold", Metric::Time, 11.0);
        let row = row(&[pair], "iova-pair");
        assert_eq!((row.figure, row.must, row.unit), (Some(11.0), 10.0, "ns"));
    }
}
