//! Registered buffers: a program's own memory, described in as few pieces as the device sees.
//!
//! A [`Registered`] is a buffer as *folios*: pieces of one size, a power of two, each contiguous for the device. The
//! folios divide the process's addresses evenly, so the first and the last may be partial and those between are
//! full, and any offset is found by a shift and a mask, never by a walk. The folio is as large as the memory allows:
//! hugepages stay whole, neighbours that the device sees side by side grow into larger folios, and a buffer that is
//! contiguous for the device is one folio, whatever its length.
//!
//! A [`Registry`] numbers buffers as a ring or a device does. Nothing here pins memory or asks for its address:
//! where each page is for the device comes in from outside.

mod registry;
#[cfg(test)]
mod tests;

pub use registry::{BufferIndex, IndexError, RegisterError, Registry};

use crate::addr::{Iova, IovaRange, PageSize, RangeError, Segment};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::iter::FusedIterator;

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

/// A buffer as equal folios. See the [module](self).
///
/// It owns no memory; it is the account of where memory is. 8 bytes a folio.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Registered {
    addr: usize,
    len: u64,
    shift: u32,
    mask: u64,
    /// How far into its first folio the buffer begins.
    head: u64,
    /// What the device calls the start of each folio. That of a partial first folio is a reckoning (it may lie
    /// below 0, hence wraps) of which only the part inside the buffer is ever given out.
    folios: Box<[u64]>,
}

/// A run that is contiguous in the process and for the device.
struct Run {
    addr: u64,
    segment: Segment,
}

impl Registered {
    /// The longest buffer: 1 TiB.
    pub const MAX_BYTES: u64 = 1 << 40;

    /// The shift of a buffer that is contiguous for the device: everything lies in folio 0.
    const ONE_FOLIO: u32 = 63;

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
    /// The folio is the largest that fits between all places where the device's view jumps. One 4 KiB page amid
    /// hugepages thus makes 4 KiB folios of them all.
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

    /// log2 of the folio's size in bytes: at least 12; 63 where the whole buffer is one folio.
    pub fn folio_shift(&self) -> u32 {
        self.shift
    }

    /// The bits of an offset (counted from the start of the first folio) that lie within a folio.
    pub fn folio_mask(&self) -> u64 {
        self.mask
    }

    /// How many folios the buffer touches.
    pub fn folios(&self) -> usize {
        self.folios.len()
    }

    /// How many bytes the table of folios has: 8 a folio.
    pub fn table_bytes(&self) -> usize {
        size_of_val(&*self.folios)
    }

    /// Where the byte at `offset` is for the device, and how many bytes follow it in the same folio and buffer.
    ///
    /// Constant time: a shift, a mask and one load.
    ///
    /// # Errors
    /// [`OutsideBuffer`] where `offset` is not inside.
    #[inline]
    pub fn locate(&self, offset: u64) -> Result<Segment, OutsideBuffer> {
        let outside = OutsideBuffer { offset, len: 1, size: self.len };
        if offset >= self.len {
            return Err(outside);
        }
        // No wrap: `head` is below 2^63 and `offset` below 2^40.
        let at = self.head + offset;
        let within = at & self.mask;
        let folio = self.folio(at).ok_or(outside)?;
        let len = (self.mask - within + 1).min(self.len - offset);
        Ok(Segment { iova: Iova::new(folio.wrapping_add(within)), len })
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
        Ok(Segments { buffer: self, at: self.head + offset, left: len })
    }

    /// How many segments the whole buffer is for the device. Linear in the number of folios.
    pub fn segment_count(&self) -> usize {
        Segments { buffer: self, at: self.head, left: self.len }.count()
    }

    #[inline]
    fn folio(&self, at: u64) -> Option<u64> {
        let index = usize::try_from(at >> self.shift).ok()?;
        self.folios.get(index).copied()
    }
}

/// The segments of a part of a buffer: [`Registered::segments`].
#[derive(Clone, Debug)]
pub struct Segments<'a> {
    buffer: &'a Registered,
    /// Where the rest begins, from the start of the first folio.
    at: u64,
    left: u64,
}

impl Segments<'_> {
    /// The rest of the folio that `at` lies in, as far as it is asked for.
    #[inline]
    fn piece(&self) -> Option<Segment> {
        let within = self.at & self.buffer.mask;
        let len = (self.buffer.mask - within + 1).min(self.left);
        let iova = Iova::new(self.buffer.folio(self.at)?.wrapping_add(within));
        (len > 0).then_some(Segment { iova, len })
    }

    #[inline]
    fn advance(&mut self, bytes: u64) {
        self.at += bytes;
        self.left -= bytes;
    }
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    #[inline]
    fn next(&mut self) -> Option<Segment> {
        let mut segment = self.piece()?;
        self.advance(segment.len);
        while let Some(next) = self.piece() {
            if segment.iova.checked_add(segment.len) != Some(next.iova) {
                break;
            }
            segment.len += next.len;
            self.advance(next.len);
        }
        Some(segment)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (usize::from(self.left > 0), usize::try_from((self.left >> self.buffer.shift) + 2).ok())
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

/// Collects runs, merging neighbours, and lays out the folios.
struct Runs {
    addr: usize,
    len: u64,
    shift: u32,
    list: Vec<Run>,
}

impl Runs {
    fn new(addr: usize) -> Self {
        Self { addr, len: 0, shift: Registered::ONE_FOLIO, list: Vec::new() }
    }

    fn push(&mut self, segment: Segment) -> Result<(), BufferError> {
        IovaRange::new(segment.iova, segment.len)?;
        let len = self.len.saturating_add(segment.len);
        check_extent(self.addr, len)?;
        // No wrap: `check_extent` saw that the end, which lies further on, fits.
        let addr = self.addr as u64 + self.len;
        self.len = len;
        if let Some(last) = self.list.last_mut() {
            if last.segment.iova.checked_add(last.segment.len) == Some(segment.iova) {
                last.segment.len += segment.len;
                return Ok(());
            }
            self.shift = self.shift.min(addr.trailing_zeros());
            if self.shift < PageSize::Size4K.shift() {
                return Err(BufferError::Ragged { addr });
            }
        }
        let no_memory = BufferError::NoMemory { folios: self.list.len() as u64 + 1, bytes: size_of::<Run>() };
        self.list.try_reserve(1).map_err(|_| no_memory)?;
        self.list.push(Run { addr, segment });
        Ok(())
    }

    fn finish(self) -> Result<Registered, BufferError> {
        check_extent(self.addr, self.len)?;
        let shift = self.shift;
        let mask = (1u64 << shift) - 1;
        // A buffer of one folio needs no head, and one high in a kernel's half would not fit in it.
        let head = if shift == Registered::ONE_FOLIO { 0 } else { self.addr as u64 & mask };
        let count = ((head + (self.len - 1)) >> shift) + 1;
        let no_memory = BufferError::NoMemory { folios: count, bytes: size_of::<u64>() };
        let mut folios = Vec::new();
        folios.try_reserve_exact(usize::try_from(count).map_err(|_| no_memory)?).map_err(|_| no_memory)?;
        for run in &self.list {
            // Runs begin where folios begin, save the first, which begins `head` bytes into one.
            let skipped = if run.addr == self.addr as u64 { head } else { 0 };
            let bytes = skipped + run.segment.len;
            let start = run.segment.iova.raw().wrapping_sub(skipped);
            folios.extend((0..bytes.div_ceil(mask + 1)).map(|i| start.wrapping_add(i << shift)));
        }
        Ok(Registered {
            addr: self.addr,
            len: self.len,
            shift,
            mask,
            head,
            folios: folios.into_boxed_slice(),
        })
    }
}
