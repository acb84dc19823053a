//! The targets of the suite `serve`.

use super::figures::Figures;
use super::row::{Row, at_least, at_most};

/// The servers of the same file: Pinfold is compared with the best of them in each figure.
const OTHERS: [&str; 3] = ["nbdkit-file", "qemu-nbd", "qemu-nbd-uring"];

/// The unit of the refills of `rpc-259`.
pub(crate) const REFILL: &str = "ns/page refilled";

/// Returns the targets.
pub(super) fn rows(figures: Figures<'_>) -> Vec<Row> {
    let of = |case, subject, unit| figures.of_unit("serve", case, subject, unit);
    let ratio = |case, unit, better: fn(f64, f64) -> f64| {
        let others = OTHERS.iter().filter_map(|other| of(case, other, unit)).reduce(better)?;
        Some(of(case, "pinfold", unit)? / others)
    };
    let refill = |over, under| Some(of("rpc-259", over, REFILL)? / of("rpc-259", under, REFILL)?);
    vec![
        at_least(
            "read-4k-64: requests, pinfold / the best",
            ratio("read-4k-64", "requests/s", f64::max),
            1.3,
            2.0,
        ),
        at_most(
            "read-4k-64: CPU time, pinfold / the best",
            ratio("read-4k-64", "us CPU/request", f64::min),
            0.8,
            0.5,
            "x",
        ),
        at_least(
            "read-1m-16: bandwidth, pinfold / the best",
            ratio("read-1m-16", "MiB/s", f64::max),
            1.2,
            1.5,
        ),
        at_most(
            "rpc-259, socket: refill, array, a page",
            of("rpc-259", "array", REFILL),
            1.5,
            0.7,
            "ns",
        ),
        at_least("rpc-259, socket: refill, single / array", refill("single", "array"), 1.0, 5.45),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Metric, Record};

    #[test]
    fn pinfold_is_compared_with_the_best_of_the_others_in_each_figure() {
        let record = |case, subject, metric, unit, median| Record {
            unit,
            ..Record::of_runs("serve", case, subject, metric, median)
        };
        let requests = |subject, rate, cpu| {
            [
                record("read-4k-64", subject, Metric::Rate, "requests/s", rate),
                record("read-4k-64", subject, Metric::Count, "us CPU/request", cpu),
            ]
        };
        let records = [
            requests("pinfold", 300.0, 4.0),
            requests("nbdkit-file", 200.0, 10.0),
            requests("qemu-nbd", 100.0, 8.0),
            requests("qemu-nbd-uring", 150.0, 9.0),
            requests("nbdkit-memory", 900.0, 1.0),
        ];
        let rows = rows(Figures(records.as_flattened()));
        assert_eq!(
            rows.iter().map(|row| row.figure).collect::<Vec<_>>(),
            [Some(1.5), Some(0.5), None, None, None]
        );
    }
}
