//! Physical region pages (PRP): how an NVMe command describes its memory.
//!
//! NVM Express Base Specification 2.0, section 4.1.1. A transfer is cut at the controller's pages. PRP1 is the first
//! piece, which may begin within a page (at a multiple of 4 bytes); PRP2 is the second page, or, where there are more
//! than two, the address of a list of all but the first. A list fills a page; where that is not enough, the last entry
//! of the page is the address of the next one. A list that fits its page exactly does not chain.
//!
//! List pages are blocks of a [`DmaPool`](crate::dma_pool::DmaPool). Which ones a command holds is recorded here,
//! outside memory that the controller can write, and they are released when the command has completed
//! ([`Prps::release`]).

use super::list::{Held, ListError};
pub use super::list::{ListPage, ListPages, PoolTakeError};
use super::merged::Merged;
use crate::addr::{Iova, IovaRange, RangeError, Segment};
use crate::mem::{AccessError, DmaMemory};

/// The controller's page size (`CC.MPS`): 4 KiB to 128 MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControllerPage(u32);

impl ControllerPage {
    /// 4 KiB, which nearly every controller is set to.
    pub const SIZE_4K: Self = Self(12);

    /// The page size that the field `CC.MPS` encodes: 2^(12 + mps) bytes. `None` where it does not fit the field's
    /// four bits (section 3.1.3.5).
    pub const fn from_mps(mps: u8) -> Option<Self> {
        if mps < 16 { Some(Self(12 + mps as u32)) } else { None }
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.0
    }

    /// How many entries a list page has.
    const fn entries(self) -> usize {
        1 << (self.0 - 3)
    }
}

/// Why a transfer cannot be laid out. No list page is held when one is returned.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrpError<E> {
    /// There is nothing to transfer.
    #[error("a transfer of 0 bytes has no PRP entries")]
    Empty,
    /// A segment is no range of addresses.
    #[error("a segment to lay out: {0}")]
    Range(#[from] RangeError),
    /// PRP1 begins at a multiple of 4 bytes.
    #[error("a transfer at {iova}: its first byte must be at a multiple of 4")]
    Offset {
        /// Where it begins.
        iova: Iova,
    },
    /// All pages but the first begin at their start, all but the last end at their end.
    #[error(
        "the transfer jumps to or from {iova}, which is no multiple of the controller's page of {page} bytes"
    )]
    Ragged {
        /// Where one segment ends or the next begins, within a page.
        iova: Iova,
        /// The controller's page.
        page: u64,
    },
    /// The capacity for list pages is too small.
    #[error("more than {limit} PRP list pages: split the transfer")]
    TooLong {
        /// The capacity.
        limit: usize,
    },
    /// The pool's blocks cannot be list pages.
    #[error(
        "a list page of {bytes} bytes at {iova}: its pool must have blocks of {page} bytes, aligned to that"
    )]
    ListPage {
        /// Where it is.
        iova: Iova,
        /// How many bytes it has.
        bytes: usize,
        /// The controller's page.
        page: u64,
    },
    /// There was no list page.
    #[error("no PRP list page: {0}")]
    Take(E),
    /// A list page cannot be written.
    #[error("a PRP list page: {0}")]
    Memory(AccessError),
}

impl<E> From<ListError<E>> for PrpError<E> {
    fn from(error: ListError<E>) -> Self {
        match error {
            ListError::Full { limit } => Self::TooLong { limit },
            ListError::Take(error) => Self::Take(error),
        }
    }
}

/// The two PRP fields of a command, and the list pages behind them.
///
/// `LISTS` is the capacity for list pages: 8 of 4 KiB reach 16 MiB. Dropping it without [`release`](Self::release)
/// quarantines the pages: right for a command that may still be in flight.
#[derive(Clone, Debug)]
#[must_use = "list pages are released by `release`"]
pub struct Prps<P, const LISTS: usize = 8> {
    prp1: Iova,
    /// PRP2 as an entry, before and unless there is a list.
    prp2: Option<Iova>,
    entries: u64,
    held: Held<P, LISTS>,
}

impl<P: Copy, const LISTS: usize> Prps<P, LISTS> {
    /// Lays out the segments, in order, for a controller with this page size.
    ///
    /// Linear in the number of pages. Allocates nothing but list pages, and no more of them than needed.
    ///
    /// # Errors
    /// [`PrpError`]; the list pages allocated until then have been freed.
    pub fn new<L: ListPages<Page = P>>(
        page: ControllerPage,
        segments: impl IntoIterator<Item = Segment>,
        pages: &L,
    ) -> Result<Self, PrpError<L::TakeError>> {
        let prps = Self { prp1: Iova::new(0), prp2: None, entries: 0, held: Held::NONE };
        let mut layout = Layout { page, pages, prps, list: None, end: None };
        match layout.all(segments) {
            Ok(()) => Ok(layout.prps),
            Err(error) => {
                // What `take` just gave out, `give` takes back; and if it does not, the first error says more.
                let _ = layout.prps.release(pages);
                Err(error)
            }
        }
    }

    /// The field PRP1 of the command (section 3.3.3.1, bytes 24 to 31).
    pub fn prp1(&self) -> u64 {
        self.prp1.raw()
    }

    /// The field PRP2 of the command (bytes 32 to 39); 0 where there is but one page.
    pub fn prp2(&self) -> u64 {
        self.prp2.map_or(0, Iova::raw)
    }

    /// How many pages the transfer touches.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// How many list pages it holds.
    pub fn list_pages(&self) -> usize {
        self.held.count()
    }

    /// Gives the list pages back. The command must be over: a controller reads them until then.
    ///
    /// # Errors
    /// That of the first page that could not be freed; the others are freed nevertheless.
    pub fn release<L: ListPages<Page = P>>(self, pages: &L) -> Result<(), L::GiveError> {
        self.held.give(pages)
    }
}

/// The list page that is being written.
struct List<'l> {
    memory: DmaMemory<'l>,
    used: usize,
    /// A copy of the last entry: what the controller can write is not read back.
    last: Iova,
}

struct Layout<'l, L: ListPages, const LISTS: usize> {
    page: ControllerPage,
    pages: &'l L,
    prps: Prps<L::Page, LISTS>,
    list: Option<List<'l>>,
    /// Where the last segment ended.
    end: Option<Iova>,
}

impl<L: ListPages, const LISTS: usize> Layout<'_, L, LISTS> {
    fn all(&mut self, segments: impl IntoIterator<Item = Segment>) -> Result<(), PrpError<L::TakeError>> {
        for run in Merged::new(segments) {
            self.run(run.map_err(RangeError::from)?)?;
        }
        if self.end.is_none() { Err(PrpError::Empty) } else { Ok(()) }
    }

    fn run(&mut self, run: IovaRange) -> Result<(), PrpError<L::TakeError>> {
        let (start, bytes) = (run.start(), self.page.bytes());
        match self.end {
            None if !start.is_aligned(4) => return Err(PrpError::Offset { iova: start }),
            None => {}
            Some(end) => {
                if let Some(&iova) = [end, start].iter().find(|iova| !iova.is_aligned(bytes)) {
                    return Err(PrpError::Ragged { iova, page: bytes });
                }
            }
        }
        self.end = Some(run.end());
        self.entry(start)?;
        let within = start.raw() & (bytes - 1);
        let pages = (within + (run.len() - 1)) / bytes;
        // No wrap, here and below: each is the start of a page that holds a byte of the run.
        let mut next = 1;
        while next <= pages {
            let entry = start.raw() - within + next * bytes;
            next += self.fill(entry, pages - next + 1)?;
        }
        Ok(())
    }

    /// Entries for the page at `entry` and those behind it, of `count` in all: says for how many, at least one. What is
    /// left of a list page is filled at once.
    fn fill(&mut self, entry: u64, count: u64) -> Result<u64, PrpError<L::TakeError>> {
        let (bytes, room) = (self.page.bytes(), self.page.entries());
        let Some(list) = self.list.as_mut().filter(|list| list.used < room) else {
            self.entry(Iova::new(entry))?;
            return Ok(1);
        };
        let filled = count.min((room - list.used) as u64);
        for i in 0..filled {
            let entry = Iova::new(entry + i * bytes);
            list.memory.write_u64(list.used * 8, entry.raw().to_le()).map_err(PrpError::Memory)?;
            (list.used, list.last) = (list.used + 1, entry);
        }
        self.prps.entries += filled;
        Ok(filled)
    }

    fn entry(&mut self, entry: Iova) -> Result<(), PrpError<L::TakeError>> {
        match (self.prps.entries, self.prps.prp2) {
            (0, _) => self.prps.prp1 = entry,
            (2, Some(second)) => {
                self.prps.prp2 = Some(self.start_list(second)?);
                self.append(entry)?;
            }
            (1, _) => self.prps.prp2 = Some(entry),
            _ => self.append(entry)?,
        }
        self.prps.entries += 1;
        Ok(())
    }

    fn append(&mut self, entry: Iova) -> Result<(), PrpError<L::TakeError>> {
        let room = self.page.entries();
        let Some(list) = &self.list else { return Ok(()) };
        if list.used == room {
            // Only now is it known that the page does not suffice: its last entry moves to the next page.
            let (memory, last) = (list.memory, list.last);
            let next = self.start_list(last)?;
            self.write(memory, room - 1, next)?;
        }
        let Some(list) = &mut self.list else { return Ok(()) };
        let (memory, at) = (list.memory, list.used);
        (list.used, list.last) = (at + 1, entry);
        self.write(memory, at, entry)
    }

    /// A new list page with this first entry, and where it is.
    fn start_list(&mut self, first: Iova) -> Result<Iova, PrpError<L::TakeError>> {
        let taken = self.prps.held.take(self.pages)?;
        let (bytes, page) = (taken.memory.len(), self.page.bytes());
        if !taken.iova.is_aligned(page) || (bytes as u64) < page {
            return Err(PrpError::ListPage { iova: taken.iova, bytes, page });
        }
        self.list = Some(List { memory: taken.memory, used: 1, last: first });
        self.write(taken.memory, 0, first)?;
        Ok(taken.iova)
    }

    fn write(&self, memory: DmaMemory<'_>, at: usize, entry: Iova) -> Result<(), PrpError<L::TakeError>> {
        // Entries are little-endian.
        memory.write_u64(at * 8, entry.raw().to_le()).map_err(PrpError::Memory)
    }
}
