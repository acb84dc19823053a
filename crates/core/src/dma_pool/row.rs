//! [`Row`]: the state of up to 64 neighbouring blocks of a chunk, with one owner at a time.
//!
//! # Who writes what
//!
//! `owner` is an owner's number, the depot, or none and whose the row was last. Only the row's owner writes `avail` and the links, and moves a
//! block's state between `FREE` and one of the two allocated states, `RAW` and `OWNED`, by plain loads and stores. (A block in
//! a [stash](super::stash) is its holder's, who allocates it by a plain store even if the row has another owner by then, or marks
//! it as `REMOTE_FREED` by one to return it to that owner: the state of a block that is free and not in `avail` concerns nobody
//! else.) Other owners may do one thing: free a block *remotely*, which moves its state from the allocated one to `REMOTE_FREED`, `RAW` by
//! compare-and-swap, and then sets its bit in `remote_freed`. The row's owner collects those bits later.
//!
//! An owner releases a row that has no free block (`RELEASED`). The next owner that frees a block of it adopts it by
//! compare-and-swap. Blocks that one owner allocates and another frees thus change owners 64 at a time.
//!
//! # Raw and owned blocks
//!
//! A free names the state that it expects: a raw free `RAW`, the drop of a [`Block`](super::Block) `OWNED`. Only the
//! `Block` leaves `OWNED`: by its drop, or by [`into_raw`](super::Block::into_raw) with a plain store, since no other transition
//! competes. So a raw free of the same address is refused in every interleaving and changes nothing. This costs no
//! instruction: the state that alloc stores and free compares is a constant either way.
//!
//! # Double frees
//!
//! Every free reads the state first and is refused if it is another. Of two remote frees, one compare-and-swap succeeds. The free of the row's owner is a load and a store; to exclude a remote free in the same instant it would need
//! an atomic read-modify-write on every free (Attiya et al., "Laws of Order", POPL 2011), which would double its
//! cost. Instead the store wins: the bit in `remote_freed` then belongs to a state that is not `REMOTE_FREED`; the row's
//! owner detects it when it collects, frees nothing, and counts it (`late`). Only in this case do both frees return `Ok`;
//! the block is freed once, and the second free is detected.

use super::bits::lowest;
use super::state::{FREE, Form, FreeRefusal, REMOTE_FREED, State, allocate_run, free_run, is_live};
use crate::sync::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// The most blocks of a row. Two under the model checker.
pub(super) const ROW_BLOCKS: u32 = if cfg!(loom) { 2 } else { 64 };
/// `ROW_BLOCKS` as a `usize`.
pub(super) const ROW: usize = ROW_BLOCKS as usize;
/// log2 of `ROW_BLOCKS`.
pub(super) const ROW_SHIFT: u32 = ROW.trailing_zeros();

/// The row is in the depot.
const DEPOT: u32 = 1;
/// The first number that an owner can have.
pub(super) const FIRST_OWNER: u32 = 2;
/// The row has no owner: all its blocks are allocated. The other bits are the number of the owner that it had.
const RELEASED: u32 = 1 << 31;

/// See the [module](self).
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Row {
    /// First, so that the address of a state says which row it is in (`row_ref::Spot`).
    state: [AtomicU8; ROW],
    /// Bit set: the block is free in the row. Written by the row's owner.
    avail: AtomicU64,
    /// Bit set: the block was freed remotely. Set by any owner, cleared by the row's owner.
    remote_freed: AtomicU64,
    /// Links of the list that the row is in. Written by the row's owner.
    pub(super) next: AtomicPtr<Row>,
    pub(super) prev: AtomicPtr<Row>,
    owner: AtomicU32,
    /// How many blocks may be freed before the row belongs in another list of its owner, with the last one counted; 0 if it is
    /// in none, or the current one. Written by the row's owner.
    until_moved: AtomicU32,
    /// The chunk's offset in the span, in bytes.
    chunk: u64,
    /// The row's number in its chunk.
    number: u32,
    /// How many blocks the row has.
    blocks: u32,
    /// Which list of its owner the row was settled for. Written by the row's owner.
    listed: AtomicU8,
}

/// With 64 blocks this is 2 bytes of state for each.
#[cfg(not(loom))]
const _: () = assert!(size_of::<Row>() == 128);

impl Row {
    /// Creates row `number` of the chunk at `chunk`, with `blocks` free blocks, in the depot.
    pub(super) fn new(chunk: u64, number: u32, blocks: u32) -> Self {
        Self {
            state: core::array::from_fn(|_| AtomicU8::new(FREE)),
            avail: AtomicU64::new(lowest(blocks as usize)),
            remote_freed: AtomicU64::new(0),
            next: AtomicPtr::new(core::ptr::null_mut()),
            prev: AtomicPtr::new(core::ptr::null_mut()),
            owner: AtomicU32::new(DEPOT),
            until_moved: AtomicU32::new(0),
            chunk,
            number,
            blocks,
            listed: AtomicU8::new(Fill::Whole as u8),
        }
    }

    #[inline(always)]
    pub(super) fn state(&self, bit: u32) -> &AtomicU8 {
        &self.state[bit as usize & (ROW - 1)]
    }

    /// Marks free blocks of the row as allocated raw ones: `count` from this one on, or as far as the row goes. For the row's
    /// owner.
    #[inline(always)]
    pub(super) fn allocate_run(&self, from: u32, count: usize) {
        let (_, rest) = self.state.split_at(from as usize & (ROW - 1));
        allocate_run(rest.split_at(count.min(rest.len())).0, from);
    }

    /// Frees the first of at most `most` blocks from this one on, up to one that is not an allocated raw block; for the row's
    /// owner. Returns how many.
    #[inline(always)]
    pub(super) fn free_run(&self, from: u32, most: usize) -> usize {
        let (_, rest) = self.state.split_at(from as usize & (ROW - 1));
        free_run(rest.split_at(most.min(rest.len())).0, from)
    }

    /// Returns the chunk's offset in the span, in bytes.
    pub(super) fn chunk(&self) -> u64 {
        self.chunk
    }

    /// Returns the number of the row's first block in the chunk.
    pub(super) fn first_index(&self) -> u64 {
        u64::from(self.number) << ROW_SHIFT
    }

    /// Returns how many blocks the row has.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks.into()
    }

    /// Whether the row is this owner's.
    #[inline(always)]
    pub(super) fn is_owned_by(&self, owner: u32) -> bool {
        // Relaxed: only the owner itself writes its number.
        self.owner.load(Ordering::Relaxed) == owner
    }

    /// Whether the row is in the depot. Stable only under the depot's lock.
    pub(super) fn is_in_depot(&self) -> bool {
        self.is_owned_by(DEPOT)
    }

    /// Whether the row is in the depot with all its blocks free. Stable only under the depot's lock.
    pub(super) fn is_whole_in_depot(&self) -> bool {
        self.is_owned_by(DEPOT) && self.is_whole()
    }

    // For the row's owner.

    /// Which blocks are free in the row. For others than the row's owner a snapshot.
    #[inline]
    pub(super) fn avail(&self) -> u64 {
        self.avail.load(Ordering::Relaxed)
    }

    /// Sets which blocks are free in the row.
    #[inline]
    pub(super) fn set_avail(&self, avail: u64) {
        self.avail.store(avail, Ordering::Relaxed);
    }

    /// Whether all blocks are free and none is in a magazine.
    pub(super) fn is_whole(&self) -> bool {
        self.avail() == self.full()
    }

    /// The value of `avail` when all blocks are free.
    #[inline(always)]
    fn full(&self) -> u64 {
        lowest(self.blocks as usize)
    }

    /// Decides which list the row belongs in, and after how many further frees another one. It is sparse from this many eighths of
    /// free blocks on.
    pub(super) fn settle(&self, sparse_eighths: u32) -> Fill {
        let avail = self.avail();
        // Without POPCNT a count takes 20 instructions; in order rows are empty or whole.
        let (fill, until_moved) = if avail == 0 {
            (Fill::Spent, 1)
        } else if avail == self.full() {
            (Fill::Whole, 0)
        } else {
            let (free, sparse) = (avail.count_ones(), (self.blocks * sparse_eighths).div_ceil(8));
            if free < sparse { (Fill::Open, sparse - free) } else { (Fill::Sparse, self.blocks - free) }
        };
        self.until_moved.store(until_moved, Ordering::Relaxed);
        self.listed.store(fill as u8, Ordering::Relaxed);
        fill
    }

    /// Returns the list that the row was last settled for.
    pub(super) fn listed(&self) -> Fill {
        let listed = self.listed.load(Ordering::Relaxed);
        Fill::ALL.into_iter().find(|&fill| fill as u8 == listed).unwrap_or(Fill::Whole)
    }

    /// Notes that the row is in no list of its owner that a free could change.
    pub(super) fn unsettle(&self) {
        self.until_moved.store(0, Ordering::Relaxed);
    }

    /// Adds this many blocks, which are marked as free, to those that are free in the row. Returns false, and adds nothing, if
    /// the row would belong in another list then.
    #[inline(always)]
    pub(super) fn put_settled(&self, blocks: u64, count: u32) -> bool {
        let until = self.until_moved.load(Ordering::Relaxed);
        if until <= count {
            return false;
        }
        self.until_moved.store(until - count, Ordering::Relaxed);
        self.set_avail(self.avail() | blocks);
        true
    }

    /// Marks a block as allocated.
    #[inline(always)]
    pub(super) fn set_allocated(&self, bit: u32, form: Form) {
        State::new(self.state(bit)).set_allocated(form);
    }

    /// Marks a block as free, after [`is_allocated_as`](Self::is_allocated_as) has returned true.
    #[inline(always)]
    pub(super) fn set_free(&self, bit: u32) {
        State::new(self.state(bit)).set_free();
    }

    /// Collects remote frees into `avail`. Returns how many were second frees.
    #[must_use]
    pub(super) fn collect(&self) -> u64 {
        if self.remote_freed.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        // Acquire: the other owners' accesses to the blocks happen before the next use.
        let mut remote_freed = self.remote_freed.swap(0, Ordering::Acquire);
        let (mut avail, mut late) = (self.avail(), 0);
        while remote_freed != 0 {
            let bit = remote_freed.trailing_zeros();
            remote_freed &= remote_freed - 1;
            // The store of a local free that coincides with a remote one comes after it in the state's modification
            // order (a compare-and-swap follows at once upon what it read), so `REMOTE_FREED` here excludes it. `avail` is
            // checked for loom, which does not order a store against another thread's compare-and-swap.
            if self.state(bit).load(Ordering::Relaxed) == REMOTE_FREED && avail & (1 << bit) == 0 {
                self.state(bit).store(FREE, Ordering::Relaxed);
                avail |= 1 << bit;
            } else {
                late += 1;
            }
        }
        self.set_avail(avail);
        late
    }

    /// Releases a row all of whose blocks are allocated. Returns false if there was a remote free and the owner has kept the
    /// row, or adopted it again, to collect it.
    pub(super) fn release(&self, owner: u32) -> bool {
        if self.remote_freed.load(Ordering::Relaxed) != 0 {
            return false;
        }
        // Release: the next owner sees `avail`, the links and the states. Acquire: a remote free that read `owner` before
        // this and left the row to this owner (see `lacks_owner`) has set its bit before.
        self.owner.swap(RELEASED | owner, Ordering::AcqRel);
        self.remote_freed.load(Ordering::Relaxed) == 0 || self.adopt(owner).is_none()
    }

    /// Moves the row to an owner, or to the depot. Under the depot's lock.
    pub(super) fn pass_to(&self, owner: u32) {
        if cfg!(loom) {
            // As in `State::set_free`: loom does not order a store behind the read-modify-write of `lacks_owner`.
            self.owner.swap(owner, Ordering::Release);
        } else {
            self.owner.store(owner, Ordering::Release);
        }
    }

    /// The same, into the depot.
    pub(super) fn pass_to_depot(&self) {
        self.pass_to(DEPOT);
    }

    // For any owner.

    /// Whether a block is allocated in this form.
    #[inline(always)]
    pub(super) fn is_allocated_as(&self, bit: u32, form: Form) -> bool {
        self.state(bit).load(Ordering::Relaxed) == form as u8
    }

    /// Whether a block is allocated, in either form.
    pub(super) fn is_live(&self, bit: u32) -> bool {
        is_live(self.state(bit).load(Ordering::Relaxed))
    }

    /// Why a free of the block is refused now.
    pub(super) fn refusal(&self, bit: u32) -> FreeRefusal {
        FreeRefusal::from_state(self.state(bit).load(Ordering::Relaxed))
    }

    /// Turns an owned block into a raw one. Only the block's `Block` calls this, and nothing else moves the state out of
    /// `OWNED`, so a store is enough.
    pub(super) fn make_raw(&self, bit: u32) {
        self.state(bit).store(Form::Raw as u8, Ordering::Relaxed);
    }

    /// Makes `owner` the owner of the row, if it has none. Returns the owner that released it.
    #[must_use]
    pub(super) fn adopt(&self, owner: u32) -> Option<u32> {
        let word = self.owner.load(Ordering::Relaxed);
        if !is_released(word) {
            debug_assert!(word != owner, "an owner adopts its own row");
            return None;
        }
        let adopted = self.owner.compare_exchange(word, owner, Ordering::AcqRel, Ordering::Relaxed);
        adopted.is_ok().then_some(word & !RELEASED)
    }

    /// Marks a block of a row that is not the caller's as freed. The caller [announces](Self::announce) it.
    ///
    /// # Errors
    /// [`FreeRefusal`] if it is not allocated in this form.
    pub(super) fn mark_remotely(&self, bit: u32, form: Form) -> Result<(), FreeRefusal> {
        let state = self.state(bit);
        if form == Form::Owned && state.load(Ordering::Relaxed) == form as u8 {
            // Only the block's `Block` calls this, and nothing else moves the state out of `OWNED`.
            self.return_remotely(bit);
            return Ok(());
        }
        state
            .compare_exchange(form as u8, REMOTE_FREED, Ordering::AcqRel, Ordering::Relaxed)
            .map(|_| ())
            .map_err(FreeRefusal::from_state)
    }

    /// The same for a block that the caller has in its [stash](super::stash::Stash), free by its state and not in `avail`, or as
    /// its [`Block`](super::Block).
    pub(super) fn return_remotely(&self, bit: u32) {
        let state = self.state(bit);
        if cfg!(loom) {
            // As in `State::set_free`.
            state.swap(REMOTE_FREED, Ordering::Relaxed);
        } else {
            // A store is enough: nothing else moves the state of such a block.
            state.store(REMOTE_FREED, Ordering::Relaxed);
        }
    }

    /// Makes the marks of these blocks known to the row's owner.
    pub(super) fn announce(&self, blocks: u64) -> RemoteFree {
        // Release: the marks, and the accesses to the blocks, come before.
        let before = self.remote_freed.fetch_or(blocks, Ordering::AcqRel);
        RemoteFree { first: before == 0, late: (before & blocks).count_ones() }
    }

    /// Whether no owner will collect what was just freed remotely.
    ///
    /// A read-modify-write, so that it has one order with the swap in `release`: either it comes after that
    /// and finds `RELEASED`, or that comes after it and sees the bit.
    #[must_use]
    pub(super) fn lacks_owner(&self) -> bool {
        is_released(self.owner.fetch_add(0, Ordering::AcqRel))
    }

    /// Whether the row has no owner.
    #[cfg(all(test, not(loom)))]
    pub(super) fn is_unowned(&self) -> bool {
        is_released(self.owner.load(Ordering::Relaxed))
    }

    /// After how many frees the row has to move.
    #[cfg(all(test, not(loom)))]
    pub(super) fn until_moved(&self) -> u32 {
        self.until_moved.load(Ordering::Relaxed)
    }

    /// Whether no block is allocated. Requires exclusive access to the pool.
    pub(super) fn is_idle(&self) -> bool {
        self.is_whole() || self.census().live == 0
    }

    /// How many blocks are allocated, in a magazine, and free in the row. A snapshot while others use the pool.
    pub(super) fn census(&self) -> Census {
        let mut census = Census { in_depot: self.is_owned_by(DEPOT), ..Census::default() };
        let (avail, remote_freed) = (self.avail(), self.remote_freed.load(Ordering::Relaxed));
        for bit in 0..self.blocks {
            let state = self.state(bit).load(Ordering::Relaxed);
            census.late += u64::from(
                remote_freed & (1 << bit) != 0 && (state != REMOTE_FREED || avail & (1 << bit) != 0),
            );
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

/// Whether a row with this word for its owner has none.
fn is_released(word: u32) -> bool {
    word & RELEASED != 0
}

/// How much of a row is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Fill {
    /// Nothing.
    Spent,
    /// Some of its blocks.
    Open,
    /// Most of its blocks, by the [terms](super::terms::Terms): it counts against what its owner may have.
    Sparse,
    /// All of its blocks: it counts likewise.
    Whole,
}

impl Fill {
    const ALL: [Self; 4] = [Self::Spent, Self::Open, Self::Sparse, Self::Whole];
}

/// The result of a remote free.
#[derive(Debug)]
pub(super) struct RemoteFree {
    /// It is the first since the last collection: the caller must check whether an owner will collect
    /// ([`Row::lacks_owner`]).
    pub(super) first: bool,
    /// How many bits were set already, by second frees that have not been collected.
    pub(super) late: u32,
}

/// The states of a row's blocks.
#[derive(Default, Debug)]
pub(super) struct Census {
    pub(super) live: u64,
    pub(super) in_magazines: u64,
    pub(super) in_row: u64,
    /// Second frees that have not been collected.
    pub(super) late: u64,
    pub(super) in_depot: bool,
    pub(super) first_live: Option<u32>,
}
