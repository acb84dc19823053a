//! The segments of a payload, and how much of them has been sent.

use pinfold_core::addr::Segment;

/// A copy of a payload's segments and the position up to which commands have been built. The
/// allocation is kept from one request to the next.
#[derive(Debug, Default)]
pub(super) struct SegmentCursor {
    segments: Vec<Segment>,
    index: usize,
    offset: u64,
}

impl SegmentCursor {
    /// Copies segments up to `bytes` bytes; returns how many bytes they have, at most `bytes`.
    pub(super) fn set(&mut self, segments: impl Iterator<Item = Segment>, bytes: u64) -> u64 {
        self.segments.clear();
        (self.index, self.offset) = (0, 0);
        let mut total = 0;
        for segment in segments.filter(|segment| segment.len > 0) {
            if total == bytes {
                break;
            }
            let len = segment.len.min(bytes - total);
            total += len;
            self.segments.push(Segment { iova: segment.iova, len });
        }
        total
    }

    pub(super) fn count(&self) -> u64 {
        self.segments.len() as u64
    }

    /// Returns the next `bytes` bytes as segments, without advancing.
    pub(super) fn peek(&self, bytes: u64) -> impl Iterator<Item = Segment> + Clone + '_ {
        let mut left = bytes;
        let mut skip = self.offset;
        self.segments.iter().skip(self.index).map_while(move |segment| {
            if left == 0 {
                return None;
            }
            let len = (segment.len - skip).min(left);
            // A segment that wraps is rejected by the layout.
            let iova = segment.iova.checked_add(skip)?;
            (skip, left) = (0, left - len);
            Some(Segment { iova, len })
        })
    }

    /// Advances by `bytes`.
    pub(super) fn advance(&mut self, bytes: u64) {
        let mut left = bytes;
        while let Some(segment) = self.segments.get(self.index).filter(|_| left > 0) {
            let step = (segment.len - self.offset).min(left);
            self.offset += step;
            left -= step;
            if self.offset == segment.len {
                (self.index, self.offset) = (self.index + 1, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_core::addr::Iova;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_cursor_returns_each_byte_once(
            lens in proptest::collection::vec(0u64..50, 1..6),
            steps in proptest::collection::vec(1u64..40, 1..40),
            want in 1usize..200,
        ) {
            let segments: Vec<_> = (0..)
                .zip(&lens)
                .map(|(i, len)| Segment { iova: Iova::new(i * 1000), len: *len })
                .collect();
            let all: Vec<u64> =
                segments.iter().flat_map(|s| s.iova.raw()..s.iova.raw() + s.len).take(want).collect();
            let mut cursor = SegmentCursor::default();
            prop_assert_eq!(cursor.set(segments.iter().copied(), want as u64), all.len() as u64);
            let mut seen = Vec::new();
            for step in steps {
                seen.extend(cursor.peek(step).flat_map(|s| s.iova.raw()..s.iova.raw() + s.len));
                cursor.advance(step);
                prop_assert_eq!(&seen[..], &all[..seen.len()]);
            }
        }
    }
}
