//! A row: the account of up to 64 neighbouring blocks of a chunk, kept by one owner at a time.
//!
//! # Who may write what
//!
//! `owner` says who keeps the row: an owner's number, the depot, or nobody. Only the keeper writes `avail` and the
//! links, and moves a block's state between `FREE` and one of the two states in use, `RAW` and `OWNED`, by plain loads
//! and stores. Other owners may do one thing: *post* a free, which moves a block's state from the one in use to `POSTED`
//! by compare-and-swap and sets its bit in `posted`. The keeper collects posted bits when it comes by.
//!
//! A row without a block to hand out is of no use to its keeper, who lets go of it (`NOBODY`). Whoever frees the next
//! block of it becomes the keeper by compare-and-swap. So blocks that are always freed by another owner than the
//! one who allocates them change keepers 64 at a time.
//!
//! # Raw and owned blocks
//!
//! A free names the state that it expects: a raw free `RAW`, the drop of a [`Block`](super::Block) `OWNED`. Only the
//! `Block` leads out of `OWNED`: its drop, once, or [`into_raw`](super::Block::into_raw) by a plain store, which no other
//! transition competes with. So a raw free of the same address is refused in every interleaving and changes nothing.
//! This costs no instruction: the state that alloc stores and free compares is a constant either way.
//!
//! # Double frees
//!
//! Every free reads the state first, and one that finds another is refused. Two frees that post are told apart by the
//! compare-and-swap. The keeper's own free is a load and a store; to make it exclude a post in the same instant
//! would need an atomic read-modify-write on every free (Attiya et al., "Laws of Order", POPL 2011), which is as much
//! as all the rest costs. Instead the store wins: the posted bit then stands over a state that is not `POSTED`,
//! the keeper finds it when it collects, frees nothing, and counts it (`late`). So in that instant alone both frees
//! return `Ok`; the block is still freed once, and the second free is still found.

use crate::sync::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

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
/// Freed by an owner that does not keep the row; not yet collected.
const POSTED: u8 = 3;

/// How a block that is in use was handed out. A free takes effect only if it names the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Form {
    /// As a [`RawBlock`](super::RawBlock): the program frees it by address.
    Raw = 1,
    /// As a [`Block`](super::Block), which alone may free it.
    Owned = 2,
}

/// Why a free was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FreeRefusal {
    /// The block is not in use.
    Free,
    /// A [`Block`](super::Block) owns it.
    Owned,
}

impl FreeRefusal {
    fn from_state(state: u8) -> Self {
        if state == Form::Owned as u8 { Self::Owned } else { Self::Free }
    }
}

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

    /// How much of the row can be drawn: for the keeper, who enters it into the list of that name. A row is sparse from
    /// so many eighths of its blocks on.
    #[inline]
    pub(super) fn fill(&self, sparse_eighths: u32) -> Fill {
        let avail = self.avail();
        if avail == 0 {
            Fill::Spent
        } else if avail == self.full {
            Fill::Whole
        } else if avail.count_ones() * 8 >= self.full.count_ones() * sparse_eighths {
            Fill::Sparse
        } else {
            Fill::Open
        }
    }

    /// Marks a block of the keeper's as handed out.
    #[inline(always)]
    pub(super) fn hand_out(&self, bit: u32, form: Form) {
        self.state(bit).store(form as u8, Ordering::Relaxed);
    }

    /// Marks a block of the keeper's as free, after [`is_out`](Self::is_out) has said that it is in use.
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
        // before this and left the row to us (see `is_quarantined`) has set its bit before it looked.
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

    /// Whether a block is handed out in this form.
    #[inline(always)]
    pub(super) fn is_out(&self, bit: u32, form: Form) -> bool {
        self.state(bit).load(Ordering::Relaxed) == form as u8
    }

    /// Whether a block is handed out, in either form.
    pub(super) fn is_live(&self, bit: u32) -> bool {
        is_live(self.state(bit).load(Ordering::Relaxed))
    }

    /// Why a free of the block is refused now.
    pub(super) fn refusal(&self, bit: u32) -> FreeRefusal {
        FreeRefusal::from_state(self.state(bit).load(Ordering::Relaxed))
    }

    /// Turns an owned block into a raw one. Only the block's owner calls this, and nobody else moves the state out of
    /// `OWNED`, so a store is enough.
    pub(super) fn disown(&self, bit: u32) {
        self.state(bit).store(Form::Raw as u8, Ordering::Relaxed);
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

    /// Posts the free of a block.
    ///
    /// # Errors
    /// [`FreeRefusal`] where it is not handed out in this form.
    pub(super) fn post(&self, bit: u32, form: Form) -> Result<Posted, FreeRefusal> {
        let state = self.state(bit);
        state
            .compare_exchange(form as u8, POSTED, Ordering::AcqRel, Ordering::Relaxed)
            .map_err(FreeRefusal::from_state)?;
        let before = self.posted.fetch_or(1 << bit, Ordering::AcqRel);
        Ok(Posted { first: before == 0, late: before & (1 << bit) != 0 })
    }

    /// Whether the row has nobody who will collect what was just posted.
    ///
    /// A read-modify-write, so that it stands in one order with the swap in `let_go`: either it comes after that
    /// and finds `NOBODY`, or that comes after it and sees the posted bit.
    #[must_use]
    pub(super) fn is_quarantined(&self) -> bool {
        self.owner.fetch_add(0, Ordering::AcqRel) == NOBODY
    }

    /// Whether no block is handed out. Requires exclusive access to the pool.
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
                state if is_live(state) => {
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

fn is_live(state: u8) -> bool {
    state == Form::Raw as u8 || state == Form::Owned as u8
}

/// How much of a row can be drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fill {
    /// Nothing.
    Spent,
    /// Some of its blocks.
    Open,
    /// Most of its blocks, by the [terms](super::depot::Terms): it counts against what its owner may keep.
    Sparse,
    /// All of its blocks: likewise.
    Whole,
}

/// What became of a post.
#[derive(Debug)]
pub(super) struct Posted {
    /// It is the first since the last collection: its poster must look whether somebody will collect
    /// ([`Row::is_quarantined`]).
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
