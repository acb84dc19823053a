//! The interleaved runner.

use crate::record::{Metric, Record};
use std::hint::black_box;
use std::time::Instant;

/// How thorough a measurement is.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How many runs of each subject are counted, after one that is not.
    pub runs: usize,
    /// Less work a run, for a quick look: figures are rougher.
    pub quick: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { runs: 9, quick: false }
    }
}

/// One figure of one run.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The case that the figure belongs to.
    pub case: &'static str,
    /// What kind of figure.
    pub metric: Metric,
    /// Its unit.
    pub unit: &'static str,
    /// The figure.
    pub value: f64,
    /// Whether it comes out of a model of the hardware.
    pub modelled: bool,
}

impl Sample {
    /// Nanoseconds an operation.
    pub fn ns_per_op(case: &'static str, total_ns: f64, operations: usize) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 operations a run")]
        let value = total_ns / operations.max(1) as f64;
        Self { case, metric: Metric::Time, unit: "ns/op", value, modelled: false }
    }
}

/// Makes one run from the beginning and puts its figures into the list.
pub type Run<'s, E> = Box<dyn FnMut(&mut Vec<Sample>) -> Result<(), E> + 's>;

/// Who is measured, and how one run of it is made.
pub struct Subject<'s, E> {
    /// The name in the records.
    pub name: &'static str,
    /// One run.
    pub run: Run<'s, E>,
}

impl<E> std::fmt::Debug for Subject<'_, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subject").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Runs subjects in turn and keeps their figures.
#[derive(Debug)]
pub struct Harness {
    suite: &'static str,
    options: Options,
}

impl Harness {
    /// A runner for a suite.
    pub fn new(suite: &'static str, options: Options) -> Self {
        Self { suite, options }
    }

    /// How thorough it is.
    pub fn options(&self) -> Options {
        self.options
    }

    /// Runs the subjects in turn, A B C A B C ..., first once without counting; returns a record for each case and
    /// subject, cases in the order in which they first came up, subjects in the order given.
    ///
    /// # Errors
    /// What a subject returned; then there are no records.
    pub fn interleave<E>(&self, mut subjects: Vec<Subject<'_, E>>) -> Result<Vec<Record>, E> {
        let mut kept: Vec<(&'static str, Sample, Vec<f64>)> = Vec::new();
        let mut samples = Vec::new();
        for round in 0..=self.options.runs.max(1) {
            for subject in &mut subjects {
                samples.clear();
                (subject.run)(&mut samples)?;
                if round == 0 {
                    continue;
                }
                for sample in &samples {
                    keep(&mut kept, subject.name, *sample);
                }
            }
        }
        Ok(self.records(&subjects, kept))
    }

    fn records<E>(
        &self,
        subjects: &[Subject<'_, E>],
        kept: Vec<(&'static str, Sample, Vec<f64>)>,
    ) -> Vec<Record> {
        let rank = |name| subjects.iter().position(|s| s.name == name);
        let mut cases: Vec<(&str, Metric)> = Vec::new();
        for (_, sample, _) in &kept {
            if !cases.contains(&(sample.case, sample.metric)) {
                cases.push((sample.case, sample.metric));
            }
        }
        let mut records: Vec<Record> = kept
            .into_iter()
            .map(|(subject, sample, values)| record(self.suite, subject, sample, values))
            .collect();
        records.sort_by_key(|r| (cases.iter().position(|c| *c == (r.case, r.metric)), rank(r.subject)));
        records
    }
}

fn keep(kept: &mut Vec<(&'static str, Sample, Vec<f64>)>, subject: &'static str, sample: Sample) {
    let same = |(name, s, _): &&mut (&'static str, Sample, Vec<f64>)| {
        *name == subject && s.case == sample.case && s.metric == sample.metric
    };
    match kept.iter_mut().find(same) {
        Some((_, _, values)) => values.push(sample.value),
        None => kept.push((subject, sample, vec![sample.value])),
    }
}

fn record(suite: &'static str, subject: &'static str, sample: Sample, mut values: Vec<f64>) -> Record {
    values.sort_by(f64::total_cmp);
    let at = |i: usize| values.get(i).copied().unwrap_or(f64::NAN);
    let last = values.len().saturating_sub(1);
    let median = f64::midpoint(at(last / 2), at(last.div_ceil(2)));
    Record {
        suite,
        case: sample.case,
        subject,
        metric: sample.metric,
        unit: sample.unit,
        median,
        min: at(0),
        max: at(last),
        runs: values.len(),
        modelled: sample.modelled,
    }
}

/// How many nanoseconds `work` takes. What it returns is kept from the optimiser.
pub fn time_ns<R>(work: impl FnOnce() -> R) -> f64 {
    let start = Instant::now();
    black_box(work());
    #[expect(clippy::cast_precision_loss, reason = "a run is far shorter than 2^52 ns, 52 days")]
    let ns = start.elapsed().as_nanos() as f64;
    ns
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::convert::Infallible;

    #[test]
    fn subjects_take_turns_and_the_first_round_does_not_count() {
        let order = RefCell::new(Vec::new());
        let subject = |name: &'static str, values: &'static [f64]| {
            let mut values = values.iter();
            let order = &order;
            Subject {
                name,
                run: Box::new(move |out: &mut Vec<Sample>| -> Result<(), Infallible> {
                    order.borrow_mut().push(name);
                    let value = *values.next().unwrap();
                    out.push(Sample { case: "c", metric: Metric::Count, unit: "n", value, modelled: false });
                    Ok(())
                }),
            }
        };
        let harness = Harness::new("s", Options { runs: 4, quick: false });
        let records = harness
            .interleave(vec![
                subject("a", &[99.0, 4.0, 1.0, 3.0, 2.0]),
                subject("b", &[99.0, 7.0, 7.0, 7.0, 8.0]),
            ])
            .unwrap();
        assert_eq!(order.borrow()[..4], ["a", "b", "a", "b"]);
        let figures: Vec<_> = records.iter().map(|r| (r.subject, r.median, r.min, r.max, r.runs)).collect();
        assert_eq!(figures, [("a", 2.5, 1.0, 4.0, 4), ("b", 7.0, 7.0, 8.0, 4)]);
    }

    #[test]
    fn a_record_is_one_line_of_json() {
        let sample = Sample { case: "c", metric: Metric::Time, unit: "ns/op", value: 0.0, modelled: false };
        let line = record("pool", "pinfold", sample, vec![2.0, 1.5, 3.0]).to_json();
        assert_eq!(
            line,
            r#"{"suite":"pool","case":"c","subject":"pinfold","metric":"time","unit":"ns/op","median":2.0,"min":1.5,"max":3.0,"runs":3}"#
        );
    }
}
