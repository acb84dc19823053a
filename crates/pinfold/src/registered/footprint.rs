//! The pages that memory touches, each whole and each once, and the counters of pinned ones.

use super::survey::{FrameRun, Inspector, Piece, RegistrationError, Survey};
use crate::sys::files;
use crate::sys::limits::MemlockLimit;
use pinfold_core::addr::PageSize;
use std::collections::BTreeMap;
use std::fmt;

/// Pages that are not shared, and those of unknown frame, are identified by their address in this
/// process, in a range of numbers without frames.
const BY_ADDRESS: u64 = 1 << 63;

/// The pages that memory touches, as ranges.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Footprint {
    /// Plain pages: the kernel charges each to every registration.
    pub(super) plain: Vec<(u64, u64)>,
    /// Pages of several frames: the kernel charges each whole, to the first registration that
    /// touches it.
    pub(super) larger: Vec<(u64, u64)>,
}

impl Footprint {
    /// O(mappings and hugepages), and O(pages of 4 KiB) where their frames are visible to the
    /// process.
    pub(super) fn of(inspector: &Inspector, survey: &Survey) -> Self {
        let mut footprint = Self::default();
        for piece in survey.pieces() {
            if piece.page != PageSize::Size4K && !piece.shared {
                footprint.by_address(piece);
                continue;
            }
            let mut found = Self::default();
            let known = FrameRun::each(inspector, piece, |run| found.run(inspector, piece, run));
            if known {
                found.plain.into_iter().for_each(|(start, end)| footprint.add_plain(start, end));
                footprint.larger.append(&mut found.larger);
            } else {
                footprint.by_address(piece);
            }
        }
        footprint
    }

    /// Adds a piece by its addresses.
    fn by_address(&mut self, piece: &Piece) {
        let (start, mask) = (piece.addr as u64, piece.page.mask());
        let (first, last) =
            (start & !mask | BY_ADDRESS, (start + piece.len + mask) & !mask | BY_ADDRESS);
        match piece.page {
            PageSize::Size4K => self.add_plain(first, last),
            _ => self.larger.push((first, last)),
        }
    }

    /// Adds pages of consecutive frames.
    fn run(&mut self, inspector: &Inspector, piece: &Piece, run: FrameRun) {
        let by_address = (run.start as u64 | BY_ADDRESS, run.end as u64 | BY_ADDRESS);
        let length = by_address.1 - by_address.0;
        let Some(frame) = run.frame else {
            return match piece.page {
                PageSize::Size4K => self.add_plain(by_address.0, by_address.1),
                _ => self.larger.push(by_address),
            };
        };
        let first = frame * 4096;
        if piece.page != PageSize::Size4K {
            self.larger.push((first, first + length));
            return;
        }
        // Plain pages may be parts of larger folios that are not mapped as such.
        let folios = inspector.pagemap.folios(frame, length / 4096).unwrap_or_default();
        let mut plain = |from: u64, to: u64| match piece.shared {
            true => self.add_plain(from, to),
            false => self.add_plain(by_address.0 + (from - first), by_address.0 + (to - first)),
        };
        let mut at = first;
        for &(frame, frames) in &folios {
            plain(at, (frame * 4096).max(at));
            at = at.max((frame + frames) * 4096);
        }
        plain(at.min(first + length), first + length);
        let ranges =
            folios.into_iter().map(|(frame, frames)| (frame * 4096, (frame + frames) * 4096));
        self.larger.extend(ranges);
    }

    fn add_plain(&mut self, start: u64, end: u64) {
        match self.plain.last_mut().filter(|last| last.1 == start) {
            Some(last) => last.1 = end,
            None if start < end => self.plain.push((start, end)),
            None => {}
        }
    }

    /// Returns all ranges.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.plain.iter().chain(&self.larger).copied()
    }

    pub(super) fn plain_bytes(&self) -> u64 {
        self.plain.iter().map(|(start, end)| end - start).sum()
    }
}

// The bytes that are covered by at least one of many ranges.

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

// The counters of pinned pages, and the limit that each counts against.

/// The memory that a table of buffers keeps pinned. It prints as a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinnedStats {
    /// The number of buffers.
    pub buffers: usize,
    /// Unregistered buffers whose I/O is in flight.
    pub leaving: usize,
    /// Bytes of the buffers in the table.
    pub bytes: u64,
    /// Bytes of their folio tables.
    pub table_bytes: u64,
    /// Bytes of the pages that are pinned or locked for them: each page whole, and once. If the
    /// frames are not visible to the process, shared memory that is mapped twice counts twice.
    pub pinned_bytes: u64,
    /// Bytes that the kernel charges: plain pages to each registration, larger ones once per table.
    pub charged_bytes: u64,
    /// Bytes that the whole process has pinned according to the kernel (`VmPin`), if it reports
    /// them.
    pub kernel_bytes: Option<u64>,
    /// `RLIMIT_MEMLOCK`; `used` is what is locked (`mlock`), which is charged separately from what
    /// is pinned.
    pub limit: MemlockLimit,
    /// Whether nothing is charged, because `CAP_IPC_LOCK` was effective when the table was created.
    pub lifted: bool,
}

impl fmt::Display for PinnedStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { buffers, leaving, bytes, table_bytes, pinned_bytes, charged_bytes, .. } = self;
        writeln!(f, "buffers            {buffers:>14}")?;
        writeln!(f, "buffers leaving    {leaving:>14}")?;
        writeln!(f, "bytes              {bytes:>14}")?;
        writeln!(f, "bytes of tables    {table_bytes:>14}")?;
        writeln!(f, "bytes pinned       {pinned_bytes:>14}")?;
        writeln!(f, "bytes charged      {charged_bytes:>14}")?;
        match self.limit.soft {
            _ if self.lifted => write!(f, "limit of the charge  none (CAP_IPC_LOCK)"),
            Some(limit) => write!(f, "limit of the charge{limit:>14}"),
            None => write!(f, "limit of the charge          none"),
        }
    }
}

/// Returns the limit, and what this process has pinned according to the kernel.
pub(super) fn limit_and_pinned() -> (MemlockLimit, Option<u64>) {
    let status = std::fs::read("/proc/self/status").unwrap_or_default();
    (MemlockLimit::here(), files::field_kib(&status, "VmPin"))
}

/// Returns the limit for what rings pin: `used` is what they have pinned.
pub(super) fn limit_for_rings() -> (MemlockLimit, u64) {
    let (limit, pinned) = limit_and_pinned();
    (MemlockLimit { used: pinned, ..limit }, pinned.unwrap_or(0))
}

pub(super) fn memlock_error(limit: MemlockLimit, requested: u64, used: u64) -> RegistrationError {
    RegistrationError::Memlock {
        requested,
        used,
        allowed: limit.soft.unwrap_or(u64::MAX),
        command: limit.raise_command_for_user(requested),
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
