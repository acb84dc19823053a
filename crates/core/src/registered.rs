//! Registered buffers: a program's own memory, described in as few pieces as the device sees.
//!
//! A [`Registered`] is a buffer as *folios*: pieces of one size, a power of two, each contiguous for the device. The
//! folios divide the process's addresses evenly, so the first and the last may be partial and those between are
//! full, and any offset is found by a shift and a mask, never by a walk. The folio is as large as the memory allows:
//! hugepages stay whole, neighbours that the device sees side by side grow into larger folios, and a buffer that is
//! contiguous for the device is one folio, whatever its length.
//!
//! In a mixture, a folio whose inside is not contiguous for the device is divided evenly once more, as finely as it
//! alone needs; the others stay whole. One 4 KiB page amid hugepages thus costs one divided folio, and any offset is
//! found by two shifts. Which division makes the smallest table is reckoned when the buffer is described.
//!
//! A [`Registry`] numbers buffers as a ring or a device does. Nothing here pins memory or asks for its address:
//! where each page is for the device comes in from outside.

mod registry;
mod runs;
mod table;
#[cfg(test)]
mod tests;

pub use registry::{BufferIndex, Hold, IndexError, RegisterError, Registry, Unregistered};

use crate::addr::{Iova, IovaRange, PageSize, RangeError, Segment};
use core::iter::FusedIterator;
use runs::Runs;
use table::Table;

/// Why a buffer could not be described. Nothing has changed when one is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// A buffer has at least one byte.
    #[error("an empty buffer at {addr:#x}: a buffer has at least 1 byte")]
    Empty {
        /// Where it was to start.
        addr: usize,
    },
    /// A buffer must end before the end of the address space.
    #[error("a buffer of {len:#x} bytes at {addr:#x} wraps around the end of the address space")]
    Wraps {
        /// Where it was to start.
        addr: usize,
        /// How many bytes it was to have.
        len: u64,
    },
    /// A buffer has a largest size.
    #[error(
        "a buffer of at least {len} bytes is longer than {limit}: register it as several",
        limit = Registered::MAX_BYTES
    )]
    TooLong {
        /// How many bytes it was to have, as far as they were counted.
        len: u64,
    },
    /// One device address is needed for each page that the buffer touches.
    #[error("the buffer touches {pages} pages of {page}, but {given} device addresses were given")]
    PageCount {
        /// How many pages the buffer touches.
        pages: u64,
        /// Their size.
        page: PageSize,
        /// How many addresses there were; one too many where there were more.
        given: u64,
    },
    /// A page starts at a multiple of 4 KiB for the device too.
    #[error("page {index} of the buffer is at {iova} for the device, which is no multiple of 4 KiB")]
    PageAddress {
        /// Which page, from 0.
        index: u64,
        /// Where it was said to be.
        iova: Iova,
    },
    /// Memory can stop being contiguous for the device only where a page ends.
    #[error("a piece of the buffer ends at {addr:#x}, where no 4 KiB page ends, and the next is elsewhere")]
    Ragged {
        /// Where the next piece begins in the process.
        addr: u64,
    },
    /// A piece is no range of device addresses.
    #[error("a piece of the buffer: {0}")]
    Piece(#[from] RangeError),
    /// The table of folios could not be allocated.
    #[error("no memory for a table of {folios} folios of {bytes} bytes each")]
    NoMemory {
        /// How many folios.
        folios: u64,
        /// Bytes of table for each.
        bytes: usize,
    },
}

/// A range that is not inside a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{len} bytes at offset {offset} are not inside a registered buffer of {size} bytes")]
pub struct OutsideBuffer {
    /// Where it starts, in bytes from the start of the buffer.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
    /// How many bytes the buffer has.
    pub size: u64,
}

/// A buffer as folios. See the [module](self).
///
/// It owns no memory; it is the account of where memory is: 8 bytes a folio where all are equal, at most 16 in a
/// mixture.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Registered {
    addr: usize,
    len: u64,
    table: Table,
}

impl AsRef<Self> for Registered {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Registered {
    /// The longest buffer: 1 TiB.
    pub const MAX_BYTES: u64 = 1 << 40;

    /// The buffer of `len` bytes at `addr` in this process, in pages of `page` bytes: `device` yields what the device
    /// calls the start of each page that the buffer touches, in order.
    ///
    /// Where a page's size is not known, say [`PageSize::Size4K`]: pages that turn out to be neighbours grow together.
    ///
    /// Takes time in proportion to the number of pages, and memory in proportion to that of folios.
    ///
    /// # Errors
    /// [`BufferError`] where the buffer is empty, wraps or is longer than [`MAX_BYTES`](Self::MAX_BYTES), where there
    /// are more or fewer device addresses than pages, or one that is no multiple of 4 KiB, or no memory for the table.
    pub fn from_pages(
        addr: usize,
        len: u64,
        page: PageSize,
        device: impl IntoIterator<Item = Iova>,
    ) -> Result<Self, BufferError> {
        check_extent(addr, len)?;
        let head = addr as u64 & page.mask();
        let pages = (head + len).div_ceil(page.bytes());
        let mut runs = Runs::new(addr);
        let mut device = device.into_iter();
        let (mut skip, mut left) = (head, len);
        for index in 0..pages {
            let count = BufferError::PageCount { pages, page, given: index };
            let start = device.next().ok_or(count)?;
            if !start.is_aligned(PageSize::Size4K.bytes()) {
                return Err(BufferError::PageAddress { index, iova: start });
            }
            let piece = IovaRange::new(start, page.bytes())?.start().raw() + skip;
            let bytes = (page.bytes() - skip).min(left);
            runs.push(Segment { iova: Iova::new(piece), len: bytes })?;
            left -= bytes;
            skip = 0;
        }
        if device.next().is_some() {
            return Err(BufferError::PageCount { pages, page, given: pages + 1 });
        }
        runs.finish()
    }

    /// The buffer at `addr` in this process that the device sees as `segments`, in order: for memory that is mapped
    /// already, and for mixtures of page sizes. Its length is the sum of theirs.
    ///
    /// Folios are as large as the places where the device's view jumps allow; where these are far finer in some part
    /// of the buffer than in the rest, only the folios there are divided. Takes time in proportion to the numbers of
    /// segments and of folios.
    ///
    /// # Errors
    /// [`BufferError`] where there is no segment or an empty or wrapping one, where the buffer wraps or is longer than
    /// [`MAX_BYTES`](Self::MAX_BYTES), where the device's view jumps within a 4 KiB page, or no memory for the table.
    pub fn from_segments(
        addr: usize,
        segments: impl IntoIterator<Item = Segment>,
    ) -> Result<Self, BufferError> {
        let mut runs = Runs::new(addr);
        segments.into_iter().try_for_each(|segment| runs.push(segment))?;
        runs.finish()
    }

    /// The address of the first byte in this process.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// How many bytes, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a registered buffer is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// log2 of a folio's size in bytes (of one that is not divided): at least 12; 63 where the whole buffer is one.
    pub fn folio_shift(&self) -> u32 {
        self.table.shift()
    }

    /// The bits of an offset (counted from the start of the first folio) that lie within a folio.
    pub fn folio_mask(&self) -> u64 {
        self.table.mask()
    }

    /// How many folios the buffer touches; of a divided one, each part counts.
    pub fn folios(&self) -> usize {
        self.table.folios()
    }

    /// How many of the larger folios are divided: 0 where all are equal.
    pub fn divided(&self) -> usize {
        self.table.divided()
    }

    /// How many bytes the table of folios has: 8 a folio where all are equal, at most 16 in a mixture.
    pub fn table_bytes(&self) -> usize {
        self.table.bytes()
    }

    /// Where the byte at `offset` is for the device, and how many bytes follow it in the same folio and buffer.
    ///
    /// Constant time: a shift, a mask and a load; in a divided folio, once more.
    ///
    /// # Errors
    /// [`OutsideBuffer`] where `offset` is not inside.
    #[inline]
    pub fn locate(&self, offset: u64) -> Result<Segment, OutsideBuffer> {
        let outside = OutsideBuffer { offset, len: 1, size: self.len };
        if offset >= self.len {
            return Err(outside);
        }
        let piece = self.table.locate(self.table.head() + offset).ok_or(outside)?;
        Ok(Segment { iova: piece.iova, len: piece.len.min(self.len - offset) })
    }

    /// The `len` bytes from `offset` as the device sees them; folios that are neighbours for the device come as one.
    ///
    /// Allocates nothing; the first segment is found in constant time.
    ///
    /// # Errors
    /// [`OutsideBuffer`] where they are not all inside, or are none.
    #[inline]
    pub fn segments(&self, offset: u64, len: u64) -> Result<Segments<'_>, OutsideBuffer> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if len == 0 || !inside {
            return Err(OutsideBuffer { offset, len, size: self.len });
        }
        Ok(Segments::new(&self.table, self.table.head() + offset, len))
    }

    /// How many segments the whole buffer is for the device. Linear in the number of folios.
    pub fn segment_count(&self) -> usize {
        Segments::new(&self.table, self.table.head(), self.len).count()
    }
}

/// The segments of a part of a buffer: [`Registered::segments`].
#[derive(Clone, Debug)]
pub struct Segments<'a> {
    table: &'a Table,
    /// Where what is behind `ahead` begins, from the start of the first folio.
    at: u64,
    /// How much that is.
    left: u64,
    /// What comes next, or the first part of it: it is seen before it is known where it ends.
    ahead: Option<Segment>,
}

impl<'a> Segments<'a> {
    #[inline]
    fn new(table: &'a Table, at: u64, left: u64) -> Self {
        let mut segments = Self { table, at, left, ahead: None };
        segments.ahead = segments.piece();
        segments
    }

    /// The rest of the folio that `at` lies in, as far as it is asked for.
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

fn check_extent(addr: usize, len: u64) -> Result<(), BufferError> {
    if len == 0 {
        return Err(BufferError::Empty { addr });
    }
    if len > Registered::MAX_BYTES {
        return Err(BufferError::TooLong { len });
    }
    let end = usize::try_from(len).ok().and_then(|len| addr.checked_add(len));
    end.map(|_| ()).ok_or(BufferError::Wraps { addr, len })
}
