//! The table of folios: the device address of each, found by one shift or two.
//!
//! The buffer's addresses are divided evenly into *cells* of `2^shift` bytes. A cell that is
//! contiguous for the device is a folio, and its entry is the device's address of its start. Any
//! other cell is divided evenly once more, by a shift of its own, and its entry is the position of
//! its folios in a second list. One bit per cell distinguishes the two; a table without divided
//! cells has no bits and no second list.
//!
//! [`Runs`] collects the runs of a buffer, from which the table is computed, and merges those that
//! are adjacent for the device.

use super::error::{BufferError, check_extent};
use crate::addr::{Iova, IovaRange, PageSize, Segment};
use alloc::boxed::Box;
use alloc::vec::Vec;

/// The shift of a buffer that is contiguous for the device: it is one cell.
const ONE_CELL: u32 = 63;
/// Shifts that are tried besides the finest: 64 KiB (a common size of large folios in Linux), and
/// hugepages.
const SHIFTS: [u32; 3] = [16, PageSize::Size2M.shift(), PageSize::Size1G.shift()];
/// The bits of a divided cell's entry that hold its shift; the bits above are the position of its
/// folios.
const SHIFT_BITS: u32 = 6;

/// A run that is contiguous in the process and for the device.
pub(super) struct Run {
    pub(super) addr: u64,
    pub(super) segment: Segment,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Table {
    shift: u32,
    mask: u64,
    /// The buffer's offset in its first cell.
    head: u64,
    /// The device's address of the start of each cell, or the position of the folios of a divided
    /// one. The start of a partial first cell or folio is extrapolated and may wrap below 0, and so
    /// may the position of a divided first cell's folios; only addresses inside the buffer are
    /// returned.
    cells: Box<[u64]>,
    /// One bit per cell: whether it is divided. Empty if none is.
    divided: Box<[u64]>,
    /// The device's address of the start of each folio of the divided cells.
    fine: Box<[u64]>,
    /// log2 of the smallest folio.
    finest: u32,
}

/// A division of the buffer by a shift.
#[derive(Clone, Copy)]
struct Plan {
    shift: u32,
    cells: u64,
    fine: u64,
}

impl Plan {
    /// Returns the length of the bit list in words.
    fn bits(&self) -> u64 {
        if self.fine == 0 { 0 } else { self.cells.div_ceil(64) }
    }

    fn words(&self) -> u64 {
        self.cells.saturating_add(self.fine).saturating_add(self.bits())
    }
}

/// The part of a buffer that one cell or folio of `2^shift` bytes has: first and last address.
#[derive(Clone, Copy)]
struct Part {
    first: u64,
    last: u64,
}

impl Part {
    /// Returns the part of it in the piece of `2^shift` bytes around `at`.
    fn around(self, at: u64, shift: u32) -> Self {
        if shift == ONE_CELL {
            return self;
        }
        let mask = (1 << shift) - 1;
        Self { first: self.first.max(at & !mask), last: self.last.min(at | mask) }
    }

    /// Returns how many pieces of `2^shift` bytes it touches.
    fn pieces(self, shift: u32) -> u64 {
        if shift == ONE_CELL { 1 } else { (self.last >> shift) - (self.first >> shift) + 1 }
    }
}

impl Table {
    /// Builds the table of these runs: at least one, in the order of their addresses and without
    /// gaps, each except the first at a multiple of 4 KiB, at most 1 TiB in all without wrapping.
    pub(super) fn new(runs: &[Run]) -> Result<Self, BufferError> {
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else {
            return Err(BufferError::Empty { addr: 0 });
        };
        let whole = Part { first: first.addr, last: last.addr + (last.segment.len - 1) };
        let jumps = runs.get(1..).unwrap_or(&[]);
        let finest = jumps.iter().map(|run| run.addr.trailing_zeros()).min().unwrap_or(ONE_CELL);
        let plan = plan(whole, jumps, finest);
        let mask = (1u64 << plan.shift) - 1;
        // A buffer of one cell needs no head, and that of an address in the upper half would not
        // fit.
        let head = if plan.shift == ONE_CELL { 0 } else { whole.first & mask };
        let mut build = Build::new(plan)?;
        let mut rest = runs;
        let mut at = whole.first;
        for _ in 0..plan.cells {
            let part = whole.around(at, plan.shift);
            build.cell(&mut rest, part);
            at = part.last.wrapping_add(1);
        }
        Ok(Self {
            shift: plan.shift,
            mask,
            head,
            cells: build.cells.into_boxed_slice(),
            divided: build.divided.into_boxed_slice(),
            fine: build.fine.into_boxed_slice(),
            finest,
        })
    }

    pub(super) fn shift(&self) -> u32 {
        self.shift
    }

    #[inline]
    pub(super) fn head(&self) -> u64 {
        self.head
    }

    pub(super) fn finest(&self) -> u32 {
        self.finest
    }

    pub(super) fn divided(&self) -> usize {
        self.divided.iter().map(|bits| bits.count_ones() as usize).sum()
    }

    pub(super) fn folios(&self) -> usize {
        self.cells.len() - self.divided() + self.fine.len()
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.cells) + size_of_val(&*self.divided) + size_of_val(&*self.fine)
    }

    /// Locates the byte `at` bytes after the start of the first cell; returns its address and how
    /// many bytes follow in its folio.
    #[inline]
    pub(super) fn locate(&self, at: u64) -> Option<Segment> {
        let cell = usize::try_from(at >> self.shift).ok()?;
        let entry = *self.cells.get(cell)?;
        let within = at & self.mask;
        if self.divided.get(cell / 64).is_some_and(|bits| bits >> (cell % 64) & 1 == 1) {
            return self.locate_fine(entry, within);
        }
        Some(Segment { iova: Iova::new(entry.wrapping_add(within)), len: self.mask - within + 1 })
    }

    #[inline]
    fn locate_fine(&self, entry: u64, within: u64) -> Option<Segment> {
        let shift = entry & ((1 << SHIFT_BITS) - 1);
        let place =
            (entry.cast_signed() >> SHIFT_BITS).cast_unsigned().wrapping_add(within >> shift);
        let start = *self.fine.get(usize::try_from(place).ok()?)?;
        let mask = (1u64 << shift) - 1;
        let within = within & mask;
        Some(Segment { iova: Iova::new(start.wrapping_add(within)), len: mask - within + 1 })
    }
}

/// Chooses the shift with the smallest table.
fn plan(whole: Part, jumps: &[Run], finest: u32) -> Plan {
    let even = Plan { shift: finest, cells: whole.pieces(finest), fine: 0 };
    // Each cell is a run: no table is smaller.
    if even.cells <= jumps.len() as u64 + 1 {
        return even;
    }
    let larger = SHIFTS.into_iter().filter(|&shift| shift > finest);
    let plans = larger.map(|shift| Plan {
        shift,
        cells: whole.pieces(shift),
        fine: fine(whole, jumps, shift),
    });
    plans.fold(even, |best, plan| if plan.words() < best.words() { plan } else { best })
}

/// Counts the folios of the divided cells for cells of `2^shift` bytes.
fn fine(whole: Part, jumps: &[Run], shift: u32) -> u64 {
    let same = |a: &Run, b: &Run| a.addr >> shift == b.addr >> shift;
    let of_cell = |group: &[Run]| {
        let first = group.first()?;
        let finest = inner_shift(group, shift)?;
        Some(whole.around(first.addr, shift).pieces(finest))
    };
    jumps.chunk_by(same).filter_map(of_cell).sum()
}

/// Returns the shift by which a cell with these jumps is divided; `None` if they are all at its
/// start.
fn inner_shift(jumps: &[Run], shift: u32) -> Option<u32> {
    jumps.iter().map(|run| run.addr.trailing_zeros()).filter(|&zeros| zeros < shift).min()
}

struct Build {
    shift: u32,
    cells: Vec<u64>,
    divided: Vec<u64>,
    fine: Vec<u64>,
}

impl Build {
    fn new(plan: Plan) -> Result<Self, BufferError> {
        let no_memory = BufferError::NoMemory { folios: plan.words(), bytes: size_of::<u64>() };
        let room = |words: u64| -> Result<Vec<u64>, BufferError> {
            let mut list = Vec::new();
            let words = usize::try_from(words).map_err(|_| no_memory)?;
            list.try_reserve_exact(words).map_err(|_| no_memory)?;
            Ok(list)
        };
        let mut divided = room(plan.bits())?;
        divided.extend((0..plan.bits()).map(|_| 0));
        Ok(Self { shift: plan.shift, cells: room(plan.cells)?, divided, fine: room(plan.fine)? })
    }

    /// Adds the next cell, of which the buffer has `part`; `runs` starts with the run in which
    /// `part` begins.
    fn cell(&mut self, runs: &mut &[Run], part: Part) {
        let start = start_of(runs, part.first, self.shift);
        let inside = runs.get(1..).unwrap_or(&[]);
        // Runs passed here are not visited for the next cell, so the whole is linear.
        let count = inside.iter().take_while(|run| run.addr <= part.last).count();
        let inside = inside.get(..count).unwrap_or(&[]);
        let Some(shift) = inner_shift(inside, self.shift) else {
            self.cells.push(start);
            return;
        };
        let place = self.cells.len();
        if let Some(bits) = self.divided.get_mut(place / 64) {
            *bits |= 1 << (place % 64);
        }
        // The folios before the buffer's first are not in the list, so the position may lie before
        // its start.
        let mask = (1u64 << self.shift) - 1;
        let first = (self.fine.len() as u64).wrapping_sub((part.first & mask) >> shift);
        self.cells.push(first << SHIFT_BITS | u64::from(shift));
        let mut at = part.first;
        for _ in 0..part.pieces(shift) {
            self.fine.push(start_of(runs, at, shift));
            at = part.around(at, shift).last.wrapping_add(1);
        }
    }
}

/// Returns the device's address of the start of the piece of `2^shift` bytes around `at`; drops
/// runs that end before `at`.
fn start_of(runs: &mut &[Run], at: u64, shift: u32) -> u64 {
    while let [_, next, ..] = runs
        && next.addr <= at
    {
        *runs = runs.get(1..).unwrap_or(&[]);
    }
    let within = if shift == ONE_CELL { 0 } else { at & ((1 << shift) - 1) };
    let start = runs.first().map_or(0, |run| run.segment.iova.raw().wrapping_add(at - run.addr));
    start.wrapping_sub(within)
}

pub(super) struct Runs {
    addr: usize,
    len: u64,
    list: Vec<Run>,
}

impl Runs {
    pub(super) fn new(addr: usize) -> Self {
        Self { addr, len: 0, list: Vec::new() }
    }

    /// Adds the next run, which follows the last one in the process.
    pub(super) fn push(&mut self, segment: Segment) -> Result<(), BufferError> {
        IovaRange::new(segment.iova, segment.len)?;
        let len = self.len.saturating_add(segment.len);
        check_extent(self.addr, len)?;
        // Does not wrap: `check_extent` has checked the end, which is larger.
        let addr = self.addr as u64 + self.len;
        self.len = len;
        if let Some(last) = self.list.last_mut() {
            if last.segment.iova.checked_add(last.segment.len) == Some(segment.iova) {
                last.segment.len += segment.len;
                return Ok(());
            }
            if addr.trailing_zeros() < PageSize::Size4K.shift() {
                return Err(BufferError::Ragged { addr });
            }
        }
        let no_memory =
            BufferError::NoMemory { folios: self.list.len() as u64 + 1, bytes: size_of::<Run>() };
        self.list.try_reserve(1).map_err(|_| no_memory)?;
        self.list.push(Run { addr, segment });
        Ok(())
    }

    /// Returns length and table of the buffer.
    pub(super) fn finish(self) -> Result<(u64, Table), BufferError> {
        check_extent(self.addr, self.len)?;
        Ok((self.len, Table::new(&self.list)?))
    }
}
