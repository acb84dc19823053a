//! The targets that hold for any size: of the zone, of the pool, and of the number of its owners.

use super::figures::Figures;
use super::row::{Row, at_least, at_most};
use crate::suite::longest::LONGEST;

/// Returns the targets.
pub(super) fn rows(figures: Figures<'_>) -> Vec<Row> {
    let of = |case, unit| figures.of_unit("pool", case, "pinfold", unit);
    let ratio = |over, under| figures.ratio("pool", (over, "pinfold"), (under, "pinfold"));
    let grown = ["grow-full-1g", "grow-full-256g"].map(|case| of(case, LONGEST));
    let held = ["held-2t-pipe", "held-2t-random", "held-2t-waves"]
        .map(|case| of(case, "(held-const)/live"));
    let worst = |figures: &[Option<f64>]| figures.iter().flatten().copied().reduce(f64::max);
    let passed = |subject| figures.of_unit("pool", "remote-free", subject, "rmw/op");
    let refused = figures.of_unit("frame", "refused-1t", "pinfold", LONGEST);
    vec![
        at_most(
            "grow-full: 256 GiB / 1 GiB",
            ratio("grow-full-256g", "grow-full-1g"),
            2.0,
            1.2,
            "x",
        ),
        at_most("grow-full-*, longest call", worst(&grown), 100.0, 20.0, "us"),
        at_most("refused-1t, longest call", refused, 20.0, 2.0, "us"),
        Row {
            unit: "",
            ..at_least(
                "locals-1024, owners with a block",
                of("locals-1024", "owners with one"),
                1024.0,
                1024.0,
            )
        },
        at_most(
            "a random free: of 10^7 / of 10^5",
            ratio("free-random-10m", "free-random-100k"),
            2.0,
            1.3,
            "x",
        ),
        at_most("held-2t-*, the worst: (held - constant) / live", worst(&held), 2.0, 2.0, "x"),
        at_most(
            "pool metadata, bytes per block of 64",
            figures.bytes("pool", "metadata", "pinfold"),
            5.5,
            5.1,
            "B",
        ),
        at_most("remote-free, rmw a block: a Block", passed("pinfold"), 0.1, 0.03, ""),
        at_most("remote-free, rmw a block: raw", passed("pinfold-raw"), 1.1, 1.03, ""),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Metric, Record};

    #[test]
    fn the_worst_counts_and_figures_are_told_apart_by_unit() {
        let of = |case, unit, median| Record {
            unit,
            ..Record::of_runs("pool", case, "pinfold", Metric::Time, median)
        };
        let records = [
            of("grow-full-1g", "ns/op", 40.0),
            of("grow-full-1g", LONGEST, 60.0),
            of("grow-full-256g", "ns/op", 60.0),
            of("grow-full-256g", LONGEST, 30.0),
            of("held-2t-pipe", "MiB held", 70.0),
            of("held-2t-pipe", "(held-const)/live", 0.5),
            of("held-2t-waves", "(held-const)/live", 2.5),
            of("locals-1024", "held/live", 3000.0),
            of("locals-1024", "owners with one", 1023.0),
            of("remote-free", "rmw/op", 0.05),
            Record { subject: "pinfold-raw", ..of("remote-free", "rmw/op", 1.2) },
        ];
        let rows = rows(Figures(&records));
        let figures: Vec<_> = rows.iter().map(|row| row.figure).collect();
        let sizes = [Some(1.5), Some(60.0), None, Some(1023.0), None, Some(2.5), None];
        assert_eq!(figures, [&sizes[..], &[Some(0.05), Some(1.2)]].concat());
        assert!(
            !rows.iter().any(|row| row.what.starts_with("locals") && row.reaches(1023.0, row.must))
        );
    }
}
