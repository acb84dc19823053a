//! The scale of an axis.

use crate::record::Record;

/// Where the axes begin, right of the names of the subjects.
pub(super) const LEFT: f64 = 170.0;
/// Where the axes end; the figures of the marks are to the right.
pub(super) const RIGHT: f64 = 740.0;

/// The spread above which an axis is logarithmic.
const SPREAD: f64 = 30.0;

/// An axis.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Scale {
    /// From 0 to `end`, with a tick at each multiple of `step`.
    Linear { end: f64, step: f64 },
    /// From 10^`low`, over `decades` decades.
    Log { low: f64, decades: f64 },
}

impl Scale {
    /// Returns the axis for all records of this unit.
    pub(super) fn of(records: &[Record], unit: &str) -> Self {
        let same = || records.iter().filter(|r| r.unit == unit);
        let figures = || same().flat_map(|r| [r.min, r.median, r.max]).filter(|v| v.is_finite());
        let most = figures().fold(0.0, f64::max);
        // A logarithmic axis has no 0.
        let least = figures().fold(f64::INFINITY, f64::min);
        if least > 0.0 && most / least > SPREAD {
            // A little below the minimum, so that its mark is clear of the end of the axis.
            let low = (least * 0.8).log10().floor();
            return Self::Log { low, decades: (most.log10().ceil() - low).max(1.0) };
        }
        let most = if most > 0.0 { most } else { 1.0 };
        // 1, 2 or 5 times a power of ten, so that there are 4 to 10 ticks.
        let power = 10f64.powf((most / 4.0).log10().floor());
        let step = [5.0, 2.0, 1.0].map(|by| by * power).into_iter().find(|step| most / step >= 4.0);
        let step = step.unwrap_or(power);
        Self::Linear { end: (most / step).ceil() * step, step }
    }

    pub(super) fn is_log(self) -> bool {
        matches!(self, Self::Log { .. })
    }

    pub(super) fn x(self, value: f64) -> f64 {
        let share = match self {
            Self::Linear { end, .. } => value / end,
            Self::Log { low, decades } => (value.max(f64::MIN_POSITIVE).log10() - low) / decades,
        };
        LEFT + if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) } * (RIGHT - LEFT)
    }

    pub(super) fn ticks(self) -> impl Iterator<Item = f64> {
        let (steps, tick): (f64, Box<dyn Fn(f64) -> f64>) = match self {
            Self::Linear { end, step } => ((end / step).round(), Box::new(move |i| i * step)),
            Self::Log { low, decades } => (decades, Box::new(move |i| 10f64.powf(low + i))),
        };
        std::iter::successors(Some(0.0), |i| Some(i + 1.0))
            .take_while(move |i| *i <= steps)
            .map(tick)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Metric, Record};

    fn record(figure: f64) -> Record {
        Record::of_runs("s", "a", "x", Metric::Time, figure)
    }

    #[test]
    fn a_small_spread_gives_a_linear_axis_from_0() {
        let scale = Scale::of(&[record(3.0), record(9.0)], "ns/op");
        assert_eq!(scale, Scale::Linear { end: 18.0, step: 2.0 }, "9 with a greatest of 18");
        assert_eq!(
            (scale.x(0.0), scale.x(18.0), scale.x(9.0)),
            (LEFT, RIGHT, f64::midpoint(LEFT, RIGHT))
        );
        assert_eq!(scale.ticks().collect::<Vec<_>>().len(), 10);
    }

    #[test]
    fn a_large_spread_gives_a_logarithmic_axis() {
        let scale = Scale::of(&[record(2.0), record(400.0)], "ns/op");
        assert_eq!(
            scale,
            Scale::Log { low: -1.0, decades: 4.0 },
            "from 1 to 800, and a little room"
        );
        assert_eq!(scale.ticks().collect::<Vec<_>>(), [0.1, 1.0, 10.0, 100.0, 1000.0]);
        let steps = [0.1, 1.0, 10.0, 100.0].map(|v| scale.x(v * 10.0) - scale.x(v));
        assert!(
            steps.iter().all(|step| (step - steps[0]).abs() < 1e-9),
            "tenfold is equally far: {steps:?}"
        );
    }

    #[test]
    fn zero_and_non_finite_figures_stay_on_the_axis() {
        for figures in [[0.0, 0.0], [f64::NAN, 1.0], [f64::INFINITY, 1.0], [0.0, 1e9]] {
            let scale = Scale::of(&figures.map(record), "ns/op");
            assert!(!scale.is_log() && scale.ticks().count() <= 11, "{scale:?}");
            assert!(figures.iter().all(|figure| (LEFT..=RIGHT).contains(&scale.x(*figure))));
        }
    }
}
