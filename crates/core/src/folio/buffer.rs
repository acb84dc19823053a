//! [`Folios`]: a buffer's folios, and an iterator over its segments.

use super::error::{BufferError, MAX_BYTES, OutsideBuffer};
use super::table::{Runs, Table};
use crate::addr::Segment;
use core::iter::FusedIterator;

/// The folios of a buffer, by a shift and a mask. See the [module](super).
///
/// It owns no memory; it describes where memory is, in 8 bytes per folio if all are equal, at most
/// 16 in a mixture.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Folios {
    len: u64,
    table: Table,
}

impl AsRef<Self> for Folios {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Folios {
    /// The longest buffer: 1 TiB.
    pub const MAX_BYTES: u64 = MAX_BYTES;

    /// Describes the buffer at `addr` in this process that consists of `segments` for the device,
    /// in order: one for each page, of whatever size, or longer where pages are adjacent. Its length is
    /// the sum of theirs.
    ///
    /// Folios are as large as the boundaries between segments allow; if the boundaries are much
    /// denser in some part of the buffer, only the folios there are divided. Time proportional to
    /// the numbers of segments and folios.
    ///
    /// # Errors
    /// [`BufferError`] if there is no segment, if one is empty or wraps, if the buffer wraps or is
    /// longer than [`MAX_BYTES`](Self::MAX_BYTES), if segments are not adjacent within a 4 KiB
    /// page, or if the table cannot be allocated.
    pub fn from_segments(
        addr: usize,
        segments: impl IntoIterator<Item = Segment>,
    ) -> Result<Self, BufferError> {
        let mut runs = Runs::new(addr);
        segments.into_iter().try_for_each(|segment| runs.push(segment))?;
        let (len, table) = runs.finish()?;
        Ok(Self { len, table })
    }

    /// Returns the length in bytes, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a registered buffer is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns log2 of the size in bytes of a folio that is not divided: at least 12; 63 if the
    /// whole buffer is one.
    pub fn folio_shift(&self) -> u32 {
        self.table.shift()
    }

    /// Returns how many folios the buffer touches; of a divided one, each part counts.
    pub fn folios(&self) -> usize {
        self.table.folios()
    }

    /// Returns how many of the larger folios are divided: 0 if all are equal.
    #[cfg(test)]
    pub(super) fn divided(&self) -> usize {
        self.table.divided()
    }

    /// Returns the size of the table of folios in bytes: 8 per folio if all are equal, at most 16
    /// in a mixture.
    pub fn table_bytes(&self) -> usize {
        self.table.bytes()
    }

    /// Returns where the device finds the byte at `offset`, and how many bytes follow it in the
    /// same folio and buffer.
    ///
    /// Constant time: a shift, a mask and a load; in a divided folio, once more.
    ///
    /// # Errors
    /// [`OutsideBuffer`] if `offset` is not inside.
    #[inline]
    pub fn locate(&self, offset: u64) -> Result<Segment, OutsideBuffer> {
        let outside = OutsideBuffer { offset, len: 1, size: self.len };
        if offset >= self.len {
            return Err(outside);
        }
        let piece = self.table.locate(self.table.head() + offset).ok_or(outside)?;
        Ok(Segment { iova: piece.iova, len: piece.len.min(self.len - offset) })
    }

    /// Returns the `len` bytes from `offset` as the device sees them; folios adjacent for the
    /// device are merged.
    ///
    /// Allocates nothing; the first segment is found in constant time.
    ///
    /// # Errors
    /// [`OutsideBuffer`] if they are not all inside, or if `len` is 0.
    #[inline]
    pub fn segments(&self, offset: u64, len: u64) -> Result<Segments<'_>, OutsideBuffer> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if len == 0 || !inside {
            return Err(OutsideBuffer { offset, len, size: self.len });
        }
        Ok(Segments::new(&self.table, self.table.head() + offset, len))
    }
}

/// The segments of a part of a buffer: [`Folios::segments`].
#[derive(Clone, Debug)]
pub struct Segments<'a> {
    table: &'a Table,
    /// The offset of what follows `ahead`, from the start of the first folio.
    at: u64,
    /// Its length.
    left: u64,
    /// The start of the next segment: the folios after it may extend it.
    ahead: Option<Segment>,
}

impl<'a> Segments<'a> {
    #[inline]
    fn new(table: &'a Table, at: u64, left: u64) -> Self {
        let mut segments = Self { table, at, left, ahead: None };
        segments.ahead = segments.piece();
        segments
    }

    /// Returns the rest of the folio around `at`, up to the requested length.
    #[inline]
    fn piece(&mut self) -> Option<Segment> {
        if self.left == 0 {
            return None;
        }
        let piece = self.table.locate(self.at)?;
        let len = piece.len.min(self.left);
        (self.at, self.left) = (self.at + len, self.left - len);
        Some(Segment { iova: piece.iova, len })
    }
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    #[inline]
    fn next(&mut self) -> Option<Segment> {
        let mut segment = self.ahead.take()?;
        while let Some(next) = self.piece() {
            if segment.iova.checked_add(segment.len) != Some(next.iova) {
                self.ahead = Some(next);
                break;
            }
            segment.len += next.len;
        }
        Some(segment)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let most = (self.left >> self.table.finest()) + 3;
        (usize::from(self.ahead.is_some()), usize::try_from(most).ok())
    }
}

impl FusedIterator for Segments<'_> {}
