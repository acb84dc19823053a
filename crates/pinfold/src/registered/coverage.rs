//! Which bytes are covered by at least one of many ranges.

use std::collections::BTreeMap;

/// Ranges that may overlap, each added and removed as a whole, and the number of bytes that they
/// cover together.
#[derive(Clone, Default, Debug)]
pub(super) struct Coverage {
    /// By start: the end, and how many of the ranges cover it. They do not overlap.
    runs: BTreeMap<u64, (u64, u64)>,
    bytes: u64,
}

impl Coverage {
    /// Returns the number of covered bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of bytes of the range that are not covered. Logarithmic, and linear in
    /// the runs that it touches.
    pub(super) fn missing(&self, start: u64, end: u64) -> u64 {
        let before = self.runs.range(..start).next_back().map(|(_, &(end, _))| (start, end));
        let inside = self.runs.range(start..end).map(|(&start, &(end, _))| (start, end));
        let covered = |(from, to): (u64, u64)| to.min(end).saturating_sub(from);
        (end - start) - before.into_iter().chain(inside).map(covered).sum::<u64>()
    }

    /// Adds a range, not empty.
    pub(super) fn add(&mut self, start: u64, end: u64) {
        self.cut(start);
        self.cut(end);
        let mut at = start;
        let mut gaps = Vec::new();
        for (&from, (to, count)) in self.runs.range_mut(start..end) {
            if at < from {
                gaps.push((at, from));
            }
            *count += 1;
            at = *to;
        }
        if at < end {
            gaps.push((at, end));
        }
        for (from, to) in gaps {
            self.bytes += to - from;
            self.runs.insert(from, (to, 1));
        }
        self.join(start, end);
    }

    /// Removes a range that was added; returns the parts of it that are no longer covered.
    pub(super) fn remove(&mut self, start: u64, end: u64) -> Vec<(u64, u64)> {
        self.cut(start);
        self.cut(end);
        let mut uncovered = Vec::new();
        for (&from, (to, count)) in self.runs.range_mut(start..end) {
            *count -= 1;
            if *count == 0 {
                uncovered.push((from, *to));
            }
        }
        for (from, to) in &uncovered {
            self.bytes -= to - from;
            self.runs.remove(from);
        }
        self.join(start, end);
        uncovered
    }

    /// Splits a run that crosses `at`.
    fn cut(&mut self, at: u64) {
        if let Some((_, (end, count))) = self.runs.range_mut(..at).next_back()
            && *end > at
        {
            let rest = (*end, *count);
            *end = at;
            self.runs.insert(at, rest);
        }
    }

    /// Joins neighbours that are covered equally often.
    fn join(&mut self, start: u64, end: u64) {
        let first = self.runs.range(..start).next_back().map_or(start, |(&from, _)| from);
        let mut keys: Vec<u64> = self.runs.range(first..=end).map(|(&from, _)| from).collect();
        keys.reverse();
        // From the last: each is joined with its successor, which is complete by then.
        for pair in keys.windows(2) {
            let [next, from] = *pair else { continue };
            let Some(&(to, count)) = self.runs.get(&next) else { continue };
            if let Some(run) = self.runs.get_mut(&from)
                && *run == (next, count)
            {
                run.0 = to;
                self.runs.remove(&next);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_a_count_for_each_byte(
            steps in proptest::collection::vec((any::<bool>(), 0u64..60, 1u64..20), 1..120)
        ) {
            let mut coverage = Coverage::default();
            let mut model = [0u32; 80];
            let mut present: Vec<(u64, u64)> = Vec::new();
            for (add, start, len) in steps {
                if add || present.is_empty() {
                    present.push((start, start + len));
                    coverage.add(start, start + len);
                } else {
                    let (start, end) = present.swap_remove(usize::try_from(start).unwrap() % present.len());
                    coverage.remove(start, end);
                }
                model.fill(0);
                for &(start, end) in &present {
                    (start..end).for_each(|byte| model[usize::try_from(byte).unwrap()] += 1);
                }
                let covered = model.iter().filter(|count| **count > 0).count() as u64;
                prop_assert_eq!(coverage.bytes(), covered);
                for start in (0..70).step_by(7) {
                    let range = &model[start..start + 9];
                    let missing = range.iter().filter(|count| **count == 0).count() as u64;
                    prop_assert_eq!(coverage.missing(start as u64, start as u64 + 9), missing);
                }
                // As few runs as can be: neighbours differ.
                let changes = model.windows(2).filter(|pair| pair[0] != pair[1] && pair[1] != 0).count();
                prop_assert_eq!(coverage.runs.len(), changes + usize::from(model[0] != 0));
            }
        }
    }
}
