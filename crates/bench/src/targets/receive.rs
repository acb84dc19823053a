//! The targets of the suite `receive`.

use super::figures::Figures;
use super::row::{Row, at_least, at_most};

const SUITE: &str = "receive";

/// Returns the targets, those without figures too.
pub(super) fn rows(figures: Figures<'_>) -> [Row; 3] {
    let time = |subject| figures.of_unit(SUITE, "rx-64", subject, "ns CPU/packet");
    // Packets per second of processor time.
    let beside = |subject| Some(time(subject)? / time("page-pool")?);
    let share = || {
        let calls = figures.of_unit(SUITE, "pool-calls", "page-pool", "ns CPU/page")?;
        Some(100.0 * calls / time("page-pool")?)
    };
    [
        at_least("rx-64: CPU time, single / page-pool", beside("single"), 1.13, 1.3),
        at_least("rx-64: CPU time, static-umem / page-pool", beside("static-umem"), 0.98, 1.0),
        at_most("rx-64: the pool's calls, of the processor time", share(), 5.0, 2.0, "%"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Metric, Record};

    #[test]
    fn packets_are_compared_by_processor_time() {
        let of = |case, subject, unit, median| Record {
            unit,
            ..Record::of_runs(SUITE, case, subject, Metric::Rate, median)
        };
        let records = [
            of("rx-64", "page-pool", "packets/s", 300.0),
            of("rx-64", "single", "packets/s", 400.0),
            of("rx-64-2t", "static-umem", "ns CPU/packet", 1.0),
            of("rx-64", "page-pool", "ns CPU/packet", 250.0),
            of("rx-64", "single", "ns CPU/packet", 375.0),
            of("pool-calls", "page-pool", "ns CPU/page", 10.0),
        ];
        let [single, fixed, share] = rows(Figures(&records));
        assert_eq!((single.figure, fixed.figure, share.figure), (Some(1.5), None, Some(4.0)));
        assert!(
            single.reaches(1.5, single.aim)
                && share.reaches(4.0, share.must)
                && !share.reaches(4.0, share.aim)
        );
    }
}
