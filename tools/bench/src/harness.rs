//! The interleaved runner.

use crate::error::BenchError;
use crate::record::{Metric, Record};
use std::fmt;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Whether this build counts read-modify-writes and locks (feature `count-rmw`).
///
/// Counting costs time, so such a build takes counts only, and only of subjects whose atomics are
/// all Pinfold's.
pub(crate) const COUNTS_RMW: bool = cfg!(feature = "count-rmw");

/// Returns the processor time that this thread has used.
pub(crate) fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    // Neither is negative, and nanoseconds are below 10^9.
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The options of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// The number of counted runs of each subject, after one warm-up run.
    pub(crate) runs: usize,
    /// Whether runs are small: faster, with rougher figures.
    pub(crate) quick: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { runs: 9, quick: false }
    }
}

/// One figure of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// The case.
    pub(crate) case: &'static str,
    /// The kind of figure.
    pub(crate) metric: Metric,
    /// The unit.
    pub(crate) unit: &'static str,
    /// The figure.
    pub(crate) value: f64,
    /// Whether it comes from a model of the hardware.
    pub(crate) modelled: bool,
}

/// The effects of a thread's calls of Pinfold that other cores observe; zero in a build that does
/// not count.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Counts {
    /// Read-modify-writes, those of locks included.
    pub(crate) rmw: u64,
    /// Locks acquired.
    pub(crate) locks: u64,
}

impl Counts {
    fn of_thread() -> Self {
        #[cfg(feature = "count-rmw")]
        return Self {
            rmw: pinfold_core::sync::rmw_count(),
            locks: pinfold_core::sync::lock_count(),
        };
        #[cfg(not(feature = "count-rmw"))]
        return Self::default();
    }

    fn since(self, before: Self) -> Self {
        Self { rmw: self.rmw - before.rmw, locks: self.locks - before.locks }
    }
}

impl std::ops::Add for Counts {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { rmw: self.rmw + other.rmw, locks: self.locks + other.locks }
    }
}

/// The cost of some work.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Cost {
    /// Its duration.
    pub(crate) ns: f64,
    /// The effects of the thread that other cores observe.
    pub(crate) counts: Counts,
}

impl Cost {
    /// Measures one call of `work`; its result passes through `black_box`.
    #[inline]
    pub(crate) fn of<R>(work: impl FnOnce() -> R) -> (Self, R) {
        let before = Counts::of_thread();
        let start = Instant::now();
        let result = black_box(work());
        #[expect(
            clippy::cast_precision_loss,
            reason = "a run is far shorter than 2^52 ns, 52 days"
        )]
        let ns = start.elapsed().as_nanos() as f64;
        (Self { ns, counts: Counts::of_thread().since(before) }, result)
    }

    /// Adds what another thread did meanwhile.
    #[must_use]
    pub(crate) fn with(self, counts: Counts) -> Self {
        Self { counts: self.counts + counts, ..self }
    }
}

impl std::ops::Add for Cost {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { ns: self.ns + other.ns, counts: self.counts + other.counts }
    }
}

/// The figures of one run.
#[derive(Default, Debug)]
pub(crate) struct Samples(Vec<Sample>);

impl Samples {
    /// Records the cost per operation: the time, or read-modify-writes and locks in a build that
    /// counts them.
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 operations a run")]
    pub(crate) fn cost(&mut self, case: &'static str, cost: Cost, operations: usize) {
        let each = 1.0 / operations.max(1) as f64;
        if COUNTS_RMW {
            self.figure(case, Metric::Count, "rmw/op", cost.counts.rmw as f64 * each);
            self.figure(case, Metric::Count, "locks/op", cost.counts.locks as f64 * each);
        } else {
            self.figure(case, Metric::Time, "ns/op", cost.ns * each);
        }
    }

    /// Records any other figure.
    pub(crate) fn figure(
        &mut self,
        case: &'static str,
        metric: Metric,
        unit: &'static str,
        value: f64,
    ) {
        self.0.push(Sample { case, metric, unit, value, modelled: false });
    }

    /// Records a figure that depends on a model of the hardware.
    pub(crate) fn modelled(
        &mut self,
        case: &'static str,
        metric: Metric,
        unit: &'static str,
        value: f64,
    ) {
        self.0.push(Sample { case, metric, unit, value, modelled: true });
    }
}

/// Makes one complete run and records its figures.
pub(crate) type Run<'s, E> = Box<dyn FnMut(&mut Samples) -> Result<(), E> + 's>;

/// A subject: its name, and how to make one run of it.
pub(crate) struct Subject<'s, E> {
    name: &'static str,
    countable: bool,
    run: Run<'s, E>,
}

impl<'s, E> Subject<'s, E> {
    /// Creates a subject with this name in the records.
    pub(crate) fn new(
        name: &'static str,
        run: impl FnMut(&mut Samples) -> Result<(), E> + 's,
    ) -> Self {
        Self { name, countable: false, run: Box::new(run) }
    }

    /// Creates a subject whose shared state is only Pinfold's atomics, so its read-modify-writes
    /// can be counted.
    pub(crate) fn countable(
        name: &'static str,
        run: impl FnMut(&mut Samples) -> Result<(), E> + 's,
    ) -> Self {
        Self { countable: true, ..Self::new(name, run) }
    }
}

impl<E> fmt::Debug for Subject<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subject").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A run that is about to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    /// The subject.
    pub(crate) subject: &'static str,
    /// The round; round 0 does not count.
    pub(crate) round: usize,
    /// The last round.
    pub(crate) rounds: usize,
}

/// Runs subjects in turn and collects their figures.
#[derive(Clone, Copy)]
pub(crate) struct Harness<'w> {
    suite: &'static str,
    options: Options,
    first_round: usize,
    /// The cases that are measured; all if there are none.
    cases: &'w [&'static str],
    progress: &'w dyn Fn(Progress),
}

impl fmt::Debug for Harness<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Harness")
            .field("suite", &self.suite)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl<'w> Harness<'w> {
    /// Creates a runner for these cases of a suite, or for all; `progress` is called before each
    /// run.
    pub(crate) fn new(
        suite: &'static str,
        options: Options,
        cases: &'w [&'static str],
        progress: &'w dyn Fn(Progress),
    ) -> Self {
        Self { suite, options, first_round: 0, cases, progress }
    }

    /// Returns whether a case is to be measured.
    pub(crate) fn wants(&self, case: &str) -> bool {
        self.cases.is_empty() || self.cases.contains(&case)
    }

    /// Measures cases that belong together, if one of them is wanted.
    ///
    /// # Errors
    /// The cases of `measure`.
    pub(crate) fn cases(
        &self,
        cases: &[&str],
        measure: impl FnOnce() -> Result<Vec<Record>, BenchError>,
    ) -> Result<Vec<Record>, BenchError> {
        if cases.iter().any(|case| self.wants(case)) { measure() } else { Ok(Vec::new()) }
    }

    /// Returns a runner that makes one run of each subject and counts it: for runs that take
    /// seconds, and for figures that are the same in every run.
    #[must_use]
    pub(crate) fn once(self) -> Self {
        Self { options: Options { runs: 1, ..self.options }, first_round: 1, ..self }
    }

    /// Returns a runner that makes `runs` runs of each subject: for runs that take long.
    #[must_use]
    pub(crate) fn with_runs(self, runs: usize) -> Self {
        Self { options: Options { runs, ..self.options }, ..self }
    }

    /// Returns the options.
    pub(crate) fn options(&self) -> Options {
        self.options
    }

    /// Returns `full`, or a part of it in a quick run.
    pub(crate) fn scale(&self, full: usize) -> usize {
        if self.options.quick { (full / Self::QUICK).max(1) } else { full }
    }

    /// The factor by which a quick run is smaller. Without optimisation it only shows that the
    /// suites work.
    const QUICK: usize = if cfg!(debug_assertions) { 256 } else { 16 };

    /// Runs the subjects in turn, first once without counting. Each round starts with the next
    /// subject (A B C, B C A, C A B, ...), so none always follows the same other. Returns a record
    /// per case and subject, in the order given.
    ///
    /// # Errors
    /// The error of the first subject that fails; there are no records then.
    pub(crate) fn interleave<E>(
        &self,
        mut subjects: Vec<Subject<'_, E>>,
    ) -> Result<Vec<Record>, E> {
        subjects.retain(|subject| subject.countable || !COUNTS_RMW);
        let mut collected: Vec<Collected> = Vec::new();
        let mut samples = Samples::default();
        let rounds = self.options.runs.max(1);
        for round in self.first_round..=rounds {
            for place in 0..subjects.len() {
                let at = (round + place) % subjects.len();
                let Some(subject) = subjects.get_mut(at) else { continue };
                (self.progress)(Progress { subject: subject.name, round, rounds });
                samples.0.clear();
                touch_heap();
                (subject.run)(&mut samples)?;
                if round == 0 {
                    continue;
                }
                for sample in &samples.0 {
                    collect(&mut collected, at, subject.name, *sample);
                }
            }
        }
        Ok(self.records(collected))
    }

    /// Returns the record of a case that this machine cannot measure.
    pub(crate) fn skipped(&self, case: &'static str, why: &str) -> Record {
        let sample =
            Sample { case, metric: Metric::Time, unit: "", value: f64::NAN, modelled: false };
        Record { note: Some(why.to_owned()), ..record(self.suite, "pinfold", sample, Vec::new()) }
    }

    fn records(&self, mut collected: Vec<Collected>) -> Vec<Record> {
        // Sorted in the order of the subjects, whichever ran first.
        collected.sort_by_key(|one| one.at);
        let mut cases: Vec<Key> = Vec::new();
        for one in &collected {
            if !cases.contains(&one.sample.key()) {
                cases.push(one.sample.key());
            }
        }
        collected.sort_by_key(|one| cases.iter().position(|case| *case == one.sample.key()));
        collected
            .into_iter()
            .map(|one| record(self.suite, one.subject, one.sample, one.values))
            .collect()
    }
}

/// The properties that distinguish figures.
type Key = (&'static str, Metric, &'static str);

impl Sample {
    fn key(&self) -> Key {
        (self.case, self.metric, self.unit)
    }
}

/// The figures of a subject so far.
struct Collected {
    /// The index of the subject.
    at: usize,
    subject: &'static str,
    sample: Sample,
    values: Vec<f64>,
}

/// Touches 16 MiB of the process's heap, where subjects keep their metadata. Otherwise the next
/// subject would pay, in page faults, for what the one before it returned to the kernel.
fn touch_heap() {
    // After one large block has been freed, glibc's allocator keeps as much memory when small ones
    // are freed.
    drop(black_box(Vec::<u8>::with_capacity(24 << 20)));
    let pages: Vec<Vec<u8>> = (0..4096).map(|_| vec![1; 4096]).collect();
    drop(black_box(pages));
}

fn collect(collected: &mut Vec<Collected>, at: usize, subject: &'static str, sample: Sample) {
    match collected
        .iter_mut()
        .find(|one| one.subject == subject && one.sample.key() == sample.key())
    {
        Some(one) => one.values.push(sample.value),
        None => collected.push(Collected { at, subject, sample, values: vec![sample.value] }),
    }
}

fn record(
    suite: &'static str,
    subject: &'static str,
    sample: Sample,
    mut values: Vec<f64>,
) -> Record {
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
        note: None,
    }
}

#[cfg(test)]
mod tests;
