//! The figures of a run, by suite, case and subject.

use crate::record::{Metric, Record};

/// The records of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures<'r>(pub(super) &'r [Record]);

impl<'r> Figures<'r> {
    pub(super) fn find(
        &self,
        suite: &str,
        case: &str,
        subject: &str,
        metric: Metric,
    ) -> Option<&'r Record> {
        let mut measured = self.0.iter().filter(|r| r.is_measured());
        measured.find(|r| (r.suite, r.case, r.subject, r.metric) == (suite, case, subject, metric))
    }

    pub(super) fn median(&self, suite: &str, case: &str, subject: &str) -> Option<f64> {
        self.find(suite, case, subject, Metric::Time).map(|r| r.median)
    }

    pub(super) fn bytes(&self, suite: &str, case: &str, subject: &str) -> Option<f64> {
        self.find(suite, case, subject, Metric::Bytes).map(|r| r.median)
    }

    /// Returns the ratio of two figures of one suite, each a case and a subject.
    pub(super) fn ratio(
        &self,
        suite: &str,
        over: (&str, &str),
        under: (&str, &str),
    ) -> Option<f64> {
        Some(self.median(suite, over.0, over.1)? / self.median(suite, under.0, under.1)?)
    }

    /// Returns the median of the figures in one unit.
    pub(super) fn of_unit(
        &self,
        suite: &str,
        case: &str,
        subject: &str,
        unit: &str,
    ) -> Option<f64> {
        let mut measured = self.0.iter().filter(|r| r.is_measured());
        let same =
            |r: &&Record| (r.suite, r.case, r.subject, r.unit) == (suite, case, subject, unit);
        measured.find(same).map(|r| r.median)
    }
}
