//! Ranges of addresses, of a device or of a process.

/// A range of addresses: the first and the last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Span {
    /// Returns the range of `len` bytes at `at`; `None` if it is empty or wraps.
    pub(crate) fn new(at: u64, len: u64) -> Option<Self> {
        Some(Self { first: at, last: at.checked_add(len.checked_sub(1)?)? })
    }

    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    pub(crate) fn contains(&self, at: u64) -> bool {
        (self.first..=self.last).contains(&at)
    }

    pub(crate) fn holds(&self, other: &Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }

    /// Returns the number of bytes; that of all addresses is not a `u64`, and no map has it.
    pub(crate) fn len(&self) -> u64 {
        (self.last - self.first).saturating_add(1)
    }
}

impl std::fmt::Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x} to {:#x}", self.first, self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_wrap() {
        assert_eq!(Span::new(1, 0), None);
        assert_eq!(Span::new(u64::MAX, 2), None);
        assert_eq!(Span::new(u64::MAX, 1).map(|span| span.len()), Some(1));
    }
}
