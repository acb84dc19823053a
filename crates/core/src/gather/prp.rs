//! Physical region pages (PRP): how an NVMe command describes its memory.
//!
//! NVM Express Base Specification 2.0, section 4.1.1. A transfer is cut at the controller's pages.
//! PRP1 is the first piece, which may begin within a page (at a multiple of 4 bytes); PRP2 is the
//! second page, or, for more than two, the address of a list of all but the first. If a list does
//! not fit into a page, the last entry of the page is the address of the next list page. A list
//! that exactly fills its page does not chain.
//!
//! List pages are blocks of a [`DmaPool`](crate::dma_pool::DmaPool). Which ones a command holds is
//! recorded here, outside memory that the controller can write, and they are released when the
//! command has completed ([`Prps::release`]).

use super::LayoutError;
use super::list::Held;
pub use super::list::{ListPage, ListPages};
use super::profile::Merged;
use crate::addr::{Iova, IovaRange, RangeError, Segment};

/// The controller's page size (`CC.MPS`): 4 KiB to 128 MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControllerPage(u32);

impl ControllerPage {
    /// 4 KiB, the usual size.
    pub const SIZE_4K: Self = Self(12);

    /// Returns the page size that the field `CC.MPS` encodes, 2^(12 + mps) bytes; `None` if it
    /// exceeds the field's four bits (section 3.1.3.5).
    pub const fn from_mps(mps: u8) -> Option<Self> {
        if mps < 16 { Some(Self(12 + mps as u32)) } else { None }
    }

    /// Returns the size in bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.0
    }

    /// Returns the number of entries of a list page.
    const fn entries(self) -> usize {
        1 << (self.0 - 3)
    }
}

/// The two PRP fields of a command, and the list pages behind them.
///
/// `LISTS` is the capacity for list pages: 8 of 4 KiB reach 16 MiB. Dropping it without
/// [`release`](Self::release) quarantines the pages: right for a command that may still be in
/// flight.
#[derive(Debug)]
#[must_use = "list pages are released by `release`"]
pub struct Prps<P: ListPage, const LISTS: usize = 8> {
    prp1: Iova,
    /// PRP2: the second page, or the address of the list.
    prp2: Option<Iova>,
    entries: u64,
    held: Held<P, LISTS>,
}

impl<P: ListPage, const LISTS: usize> Prps<P, LISTS> {
    /// Lays out the segments, in order, for a controller with this page size.
    ///
    /// Linear in the number of pages. Allocates nothing but list pages, and no more of them than
    /// needed.
    ///
    /// # Errors
    /// [`LayoutError`]; the list pages acquired until then have been released.
    pub fn new<L: ListPages<Page = P>>(
        page: ControllerPage,
        segments: impl IntoIterator<Item = Segment>,
        pages: &mut L,
    ) -> Result<Self, LayoutError<L::TakeError>> {
        let prps = Self { prp1: Iova::new(0), prp2: None, entries: 0, held: Held::none() };
        let mut layout = Layout { page, pages, prps, list: None, end: None };
        match layout.all(segments) {
            Ok(()) => Ok(layout.prps),
            Err(error) => {
                let Layout { prps, pages, .. } = layout;
                prps.release(pages);
                Err(error)
            }
        }
    }

    /// Returns the field PRP1 of the command (section 3.3.3.1, bytes 24 to 31).
    pub fn prp1(&self) -> u64 {
        self.prp1.raw()
    }

    /// Returns the field PRP2 of the command (bytes 32 to 39); 0 for a transfer of one page.
    pub fn prp2(&self) -> u64 {
        self.prp2.map_or(0, Iova::raw)
    }

    /// Returns how many pages the transfer touches.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Returns how many list pages it holds.
    pub fn list_pages(&self) -> usize {
        self.held.count()
    }

    /// Releases the list pages to `pages`, the source that they are of. The command must have
    /// completed: the controller reads them until then.
    pub fn release<L: ListPages<Page = P>>(self, pages: &mut L) {
        self.held.give(pages);
    }
}

/// The list page that is being written.
struct List {
    /// The number of the list page, among those that the command holds.
    at: usize,
    used: usize,
    /// A copy of the last entry: memory that the controller can write is not read back.
    last: Iova,
}

struct Layout<'l, L: ListPages, const LISTS: usize> {
    page: ControllerPage,
    pages: &'l mut L,
    prps: Prps<L::Page, LISTS>,
    list: Option<List>,
    /// The end of the last segment.
    end: Option<Iova>,
}

impl<L: ListPages, const LISTS: usize> Layout<'_, L, LISTS> {
    fn all(
        &mut self,
        segments: impl IntoIterator<Item = Segment>,
    ) -> Result<(), LayoutError<L::TakeError>> {
        for run in Merged::new(segments) {
            self.run(run.map_err(RangeError::from)?)?;
        }
        if self.end.is_none() { Err(LayoutError::Empty) } else { Ok(()) }
    }

    fn run(&mut self, run: IovaRange) -> Result<(), LayoutError<L::TakeError>> {
        let (start, bytes) = (run.start(), self.page.bytes());
        match self.end {
            None if !start.is_aligned(4) => return Err(LayoutError::Offset { iova: start }),
            None => {}
            Some(end) => {
                if let Some(&iova) = [end, start].iter().find(|iova| !iova.is_aligned(bytes)) {
                    return Err(LayoutError::Ragged { iova, page: bytes });
                }
            }
        }
        self.end = Some(run.end());
        self.entry(start)?;
        let within = start.raw() & (bytes - 1);
        let pages = (within + (run.len() - 1)) / bytes;
        // Does not wrap, here and below: each is the start of a page that holds a byte of the run.
        let mut next = 1;
        while next <= pages {
            let entry = start.raw() - within + next * bytes;
            next += self.fill(entry, pages - next + 1)?;
        }
        Ok(())
    }

    /// Adds entries for up to `count` pages from the one at `entry`; returns for how many, at least
    /// one. Fills the rest of the current list page at once.
    fn fill(&mut self, entry: u64, count: u64) -> Result<u64, LayoutError<L::TakeError>> {
        let (bytes, room) = (self.page.bytes(), self.page.entries());
        let Some(list) = self.list.as_mut().filter(|list| list.used < room) else {
            self.entry(Iova::new(entry))?;
            return Ok(1);
        };
        let (filled, memory) =
            (count.min((room - list.used) as u64), self.prps.held.memory(list.at));
        for i in 0..filled {
            let entry = Iova::new(entry + i * bytes);
            memory.write_u64(list.used * 8, entry.raw().to_le()).map_err(LayoutError::Memory)?;
            (list.used, list.last) = (list.used + 1, entry);
        }
        self.prps.entries += filled;
        Ok(filled)
    }

    fn entry(&mut self, entry: Iova) -> Result<(), LayoutError<L::TakeError>> {
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

    fn append(&mut self, entry: Iova) -> Result<(), LayoutError<L::TakeError>> {
        let room = self.page.entries();
        let Some(list) = &self.list else { return Ok(()) };
        if list.used == room {
            // The list needs another page: the last entry of this one moves there and is replaced
            // by its address.
            let (full, last) = (list.at, list.last);
            let next = self.start_list(last)?;
            self.write(full, room - 1, next)?;
        }
        let Some(list) = &mut self.list else { return Ok(()) };
        let (page, at) = (list.at, list.used);
        (list.used, list.last) = (at + 1, entry);
        self.write(page, at, entry)
    }

    /// Starts a new list page with this first entry; returns its address.
    fn start_list(&mut self, first: Iova) -> Result<Iova, LayoutError<L::TakeError>> {
        let (at, iova, bytes) = self.prps.held.take(self.pages)?;
        let page = self.page.bytes();
        if !iova.is_aligned(page) || (bytes as u64) < page {
            return Err(LayoutError::ListPage { iova, bytes, needed: page, align: page });
        }
        self.list = Some(List { at, used: 1, last: first });
        self.write(at, 0, first)?;
        Ok(iova)
    }

    /// Writes an entry of a list page.
    fn write(&self, page: usize, at: usize, entry: Iova) -> Result<(), LayoutError<L::TakeError>> {
        // Entries are little-endian.
        self.prps
            .held
            .memory(page)
            .write_u64(at * 8, entry.raw().to_le())
            .map_err(LayoutError::Memory)
    }
}
