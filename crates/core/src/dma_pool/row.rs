//! A row: the account of up to 64 neighbouring blocks of a chunk, kept by one owner at a time.
//!
//! # Who may write what
//!
//! `owner` says who keeps the row: an owner's number, the depot, or nobody. Only the keeper writes `avail` and the
//! links, and moves a block's state between `FREE` and `LIVE`, by plain loads and stores. Everybody else may do one
//! thing: *post* a free, which moves a block's state from `LIVE` to `POSTED` by compare-and-swap and sets its bit in
//! `posted`. The keeper collects posted bits when it comes by.
//!
//! A row without a block to hand out is of no use to its keeper, who lets go of it (`NOBODY`). Whoever frees the next
//! block of it becomes the keeper by compare-and-swap. So blocks that are always freed by another owner than the
//! one who allocates them change keepers 64 at a time.
//!
//! # Double frees
//!
//! Every free reads the state first, and one that finds no `LIVE` is refused. Two frees that post are told apart by the
//! compare-and-swap. The keeper's own free is a load and a store; to make it exclude a post in the same instant
//! would need an atomic read-modify-write on every free (Attiya et al., "Laws of Order", POPL 2011), which is as much
//! as all the rest costs. Instead the store wins: the posted bit then stands over a state that is not `POSTED`,
//! the keeper finds it when it collects, frees nothing, and counts it (`late`). So in that instant alone both frees
//! return `Ok`; the block is still freed once, and the second free is still found.

use crate::sync::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use core::ptr::NonNull;

/// How many blocks a row has at most. A model checker tries all interleavings of two as well as of 64.
pub(super) const ROW_BLOCKS: u32 = if cfg!(loom) { 2 } else { 64 };
/// The same, to measure arrays with.
pub(super) const ROW: usize = ROW_BLOCKS as usize;
/// log2 of it.
pub(super) const ROW_SHIFT: u32 = ROW.trailing_zeros();

/// Nobody keeps the row: all its blocks are out.
const NOBODY: u32 = 0;
/// The row is in the depot.
const DEPOT: u32 = 1;
/// The first number that an owner can have.
pub(super) const FIRST_OWNER: u32 = 2;

/// In nobody's use: in its row's `avail`, or in the magazine of the row's keeper.
const FREE: u8 = 0;
/// Handed out.
const LIVE: u8 = 1;
/// Freed by somebody who does not keep the row; not yet collected.
const POSTED: u8 = 2;

/// See the module.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Row {
    /// Bit set: the block can be drawn from the row. Written by the keeper.
    avail: AtomicU64,
    /// Bit set: the block's free was posted. Set by anybody, cleared by the keeper.
    posted: AtomicU64,
    /// Links of the list that the row stands in. Written by the keeper.
    pub(super) next: AtomicPtr<Row>,
    pub(super) prev: AtomicPtr<Row>,
    owner: AtomicU32,
    /// Which row of its chunk this is.
    number: u32,
    /// `avail` when all blocks are free.
    full: u64,
    /// Where the chunk starts, in bytes from the start of the span.
    chunk: u64,
    state: [AtomicU8; ROW],
}

/// How many bytes a row has: with 64 blocks of 64 bytes each this is 2 bytes of account for a block.
#[cfg(not(any(loom, feature = "count-rmw")))]
const _: () = assert!(size_of::<Row>() == 128);

impl Row {
    /// Row `number` of the chunk at `chunk`, with `blocks` free blocks, in the depot.
    pub(super) fn new(chunk: u64, number: u32, blocks: u32) -> Self {
        let full = if blocks >= 64 { u64::MAX } else { (1 << blocks) - 1 };
        Self {
            avail: AtomicU64::new(full),
            posted: AtomicU64::new(0),
            next: AtomicPtr::new(core::ptr::null_mut()),
            prev: AtomicPtr::new(core::ptr::null_mut()),
            owner: AtomicU32::new(DEPOT),
            number,
            full,
            chunk,
            state: core::array::from_fn(|_| AtomicU8::new(FREE)),
        }
    }

    #[inline(always)]
    fn state(&self, bit: u32) -> &AtomicU8 {
        &self.state[bit as usize & (ROW - 1)]
    }

    /// Where the chunk starts, in bytes from the start of the span.
    pub(super) fn chunk(&self) -> u64 {
        self.chunk
    }

    /// The number in the chunk of the row's first block.
    pub(super) fn first_index(&self) -> u64 {
        u64::from(self.number) << ROW_SHIFT
    }

    /// How many blocks the row has.
    pub(super) fn blocks(&self) -> u64 {
        u64::from(self.full.count_ones())
    }

    /// Whether this owner keeps the row.
    #[inline(always)]
    pub(super) fn is_kept_by(&self, owner: u32) -> bool {
        // Relaxed: nobody else writes this owner's number, so if it is there the owner put it there itself.
        self.owner.load(Ordering::Relaxed) == owner
    }

    /// Whether the row is in the depot. Only under the depot's lock is this so for longer.
    pub(super) fn is_in_depot(&self) -> bool {
        self.is_kept_by(DEPOT)
    }

    /// Whether the row is in the depot with all its blocks free. Only under the depot's lock is this so for longer.
    pub(super) fn is_whole_in_depot(&self) -> bool {
        self.is_kept_by(DEPOT) && self.is_whole()
    }

    // What the keeper does.

    /// Which blocks can be drawn. Keeper only (for others: a glimpse).
    #[inline]
    pub(super) fn avail(&self) -> u64 {
        self.avail.load(Ordering::Relaxed)
    }

    /// Keeper only.
    #[inline]
    pub(super) fn set_avail(&self, avail: u64) {
        self.avail.store(avail, Ordering::Relaxed);
    }

    /// Whether all blocks are free and none is in a magazine.
    pub(super) fn is_whole(&self) -> bool {
        self.avail() == self.full
    }

    /// Marks a block of the keeper's as handed out.
    #[inline(always)]
    pub(super) fn hand_out(&self, bit: u32) {
        self.state(bit).store(LIVE, Ordering::Relaxed);
    }

    /// Marks a block of the keeper's as free, after [`is_live`](Self::is_live) has said that it is in use.
    #[inline(always)]
    pub(super) fn set_free(&self, bit: u32) {
        self.state(bit).store(FREE, Ordering::Relaxed);
    }

    /// Collects what others posted: `avail` has it afterwards. Returns how many posts were second frees.
    #[must_use]
    pub(super) fn collect(&self) -> u64 {
        if self.posted.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        // Acquire: what the others did with the blocks comes before their next use.
        let mut posted = self.posted.swap(0, Ordering::Acquire);
        let (mut avail, mut late) = (self.avail(), 0);
        while posted != 0 {
            let bit = posted.trailing_zeros();
            posted &= posted - 1;
            // The store of a keeper's free that coincides with a post comes after it in the state's modification
            // order (a compare-and-swap follows at once upon what it read), so `POSTED` here excludes it. `avail` is
            // looked at for loom, which does not order a store against another thread's compare-and-swap.
            if self.state(bit).load(Ordering::Relaxed) == POSTED && avail & (1 << bit) == 0 {
                self.state(bit).store(FREE, Ordering::Relaxed);
                avail |= 1 << bit;
            } else {
                late += 1;
            }
        }
        self.set_avail(avail);
        late
    }

    /// Lets go of a row all of whose blocks are out. `false` where a free was posted meanwhile and the row is the
    /// keeper's again (to be collected).
    pub(super) fn let_go(&self, owner: u32) -> bool {
        // Release: the next keeper sees `avail`, the links and the states. Acquire: a poster who looked at `owner`
        // before this and left the row to us (see `was_abandoned`) has set its bit before it looked.
        self.owner.swap(NOBODY, Ordering::AcqRel);
        self.posted.load(Ordering::Relaxed) == 0 || !self.adopt(owner)
    }

    /// Puts the row into the depot's keeping, or takes it out. By the keeper, under the depot's lock.
    pub(super) fn pass_to(&self, owner: u32) {
        self.owner.store(owner, Ordering::Release);
    }

    /// The same, into the depot.
    pub(super) fn pass_to_depot(&self) {
        self.pass_to(DEPOT);
    }

    // What anybody does.

    /// Whether a block is handed out.
    #[inline(always)]
    pub(super) fn is_live(&self, bit: u32) -> bool {
        self.state(bit).load(Ordering::Relaxed) == LIVE
    }

    /// Becomes the keeper of a row that nobody keeps.
    #[must_use]
    pub(super) fn adopt(&self, owner: u32) -> bool {
        let Err(now) = self.owner.compare_exchange(NOBODY, owner, Ordering::AcqRel, Ordering::Relaxed) else {
            return true;
        };
        debug_assert!(now != owner, "an owner adopts what it keeps already");
        false
    }

    /// Whether nobody keeps the row.
    pub(super) fn is_nobodys(&self) -> bool {
        self.is_kept_by(NOBODY)
    }

    /// Posts the free of a block. `None` where it is not in use.
    #[must_use]
    pub(super) fn post(&self, bit: u32) -> Option<Posted> {
        self.state(bit).compare_exchange(LIVE, POSTED, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        let before = self.posted.fetch_or(1 << bit, Ordering::AcqRel);
        Some(Posted { first: before == 0, late: before & (1 << bit) != 0 })
    }

    /// Whether the row has nobody who will collect what was just posted.
    ///
    /// A read-modify-write, so that it stands in one order with the swap in `let_go`: either it comes after that
    /// and finds `NOBODY`, or that comes after it and sees the posted bit.
    #[must_use]
    pub(super) fn was_abandoned(&self) -> bool {
        self.owner.fetch_add(0, Ordering::AcqRel) == NOBODY
    }

    /// Whether no block is handed out. By who has all the pool for himself.
    pub(super) fn is_idle(&self) -> bool {
        self.is_whole() || self.census().live == 0
    }

    /// How many blocks are handed out, drawn but free, and free in the row: a glimpse while others are at work.
    pub(super) fn census(&self) -> Census {
        let mut census = Census { in_depot: self.is_kept_by(DEPOT), ..Census::default() };
        let (avail, posted) = (self.avail(), self.posted.load(Ordering::Relaxed));
        for bit in 0..self.full.count_ones() {
            let state = self.state(bit).load(Ordering::Relaxed);
            census.late +=
                u64::from(posted & (1 << bit) != 0 && (state != POSTED || avail & (1 << bit) != 0));
            match state {
                LIVE => {
                    census.live += 1;
                    census.first_live = census.first_live.or(Some(bit));
                }
                FREE if avail & (1 << bit) == 0 => census.in_magazines += 1,
                _ => census.in_row += 1,
            }
        }
        census
    }
}

/// What became of a post.
#[derive(Debug)]
pub(super) struct Posted {
    /// It is the first since the last collection: its poster must look whether somebody will collect
    /// ([`Row::was_abandoned`]).
    pub(super) first: bool,
    /// It stands where a second free stood that nobody has collected.
    pub(super) late: bool,
}

/// What a row's blocks are doing.
#[derive(Default, Debug)]
pub(super) struct Census {
    pub(super) live: u64,
    pub(super) in_magazines: u64,
    pub(super) in_row: u64,
    /// Second frees that nobody has collected.
    pub(super) late: u64,
    pub(super) in_depot: bool,
    pub(super) first_live: Option<u32>,
}

/// A row, wherever it is kept: valid as long as the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RowRef(NonNull<Row>);

// SAFETY: it is a shared reference to a `Row`, which is `Sync`.
unsafe impl Send for RowRef {}

impl RowRef {
    /// # Safety
    /// The row must stay where it is, alive, as long as any copy of the value is used.
    #[inline(always)]
    pub(super) unsafe fn new(row: &Row) -> Self {
        Self(NonNull::from(row))
    }

    /// The row as a link of a [`List`](super::list::List).
    pub(super) fn link(row: Option<Self>) -> *mut Row {
        row.map_or(core::ptr::null_mut(), |row| row.0.as_ptr())
    }

    /// The row that a link leads to: links are only ever made by [`link`](Self::link), from a `RowRef`.
    pub(super) fn follow(at: &AtomicPtr<Row>) -> Option<Self> {
        NonNull::new(at.load(Ordering::Relaxed)).map(Self)
    }
}

impl core::ops::Deref for RowRef {
    type Target = Row;
    #[inline(always)]
    fn deref(&self) -> &Row {
        // SAFETY: the row is alive by the contract of `new`, the only way to a value.
        unsafe { self.0.as_ref() }
    }
}
