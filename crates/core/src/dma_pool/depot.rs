//! [`Depot`]: rows with free blocks that have no owner. They are exchanged many at a time, under a lock.
//!
//! # How many rows an owner keeps
//!
//! A row is *sparse* when at least half of its blocks are free. An owner keeps at most as many sparse and whole rows as the
//! [`Terms`] allow, and moves the others to the depot when its current row changes: the emptiness rule of Berger et al.,
//! "Hoard", ASPLOS 2000. The number is a quarter of the pool's rows divided by the owners, but 8 to 32, and at most all of them
//! divided by the owners. An owner that needs a row gets as many, but no more than its share of those that are in the depot: so a thousand
//! owners of a few thousand rows find one each.
//!
//! In a pool that never had two [`Local`](super::Local)s at a time, a row is sparse from 7/8 on. A free of a block whose
//! row is in the depot is remote, which costs two read-modify-writes: for frees in random order that is an eighth of them
//! instead of half.
//!
//! In a pool that has been at its maximum, and had two `Local`s at a time, every row with a free block is sparse. Otherwise an
//! idle owner of rows that are less than half free would keep as many blocks as are in use, and others be refused: a refusal is
//! worse than the two read-modify-writes. Such an owner also keeps no more spent rows than others, since blocks that others
//! free in them are not noticed until it makes a call.

use super::list::List;
use super::owner::Owner;
use super::row::FIRST_OWNER;
use super::row_ref::RowRef;
use super::terms::{FULL, KEEP, News, SHARED, Tally, Terms};
use crate::sync::{AtomicU32, Mutex, Ordering};
use alloc::vec::Vec;

/// See the module.
#[derive(Debug)]
pub(super) struct Depot {
    shelves: Mutex<Shelves>,
    /// The terms, in one word. Written under the lock.
    terms: AtomicU32,
    /// How many remote frees were announced: those that were the first since their row was last collected.
    notices: AtomicU32,
}

#[derive(Debug)]
struct Shelves {
    /// Rows with some free blocks.
    open: List,
    /// Rows all of whose blocks are free: used ones first, then fresh ones in ascending order.
    whole: List,
    /// Blocks in use, as far as owners have reported.
    in_use: i64,
    high_water: i64,
    late: u64,
    /// Numbers of dropped owners. Its capacity is the number of all owners.
    free_ids: Vec<u32>,
    next_id: u32,
    /// Rows of all chunks of the pool, in the depot or not, and their blocks.
    rows: usize,
    blocks: i64,
}

impl Shelves {
    /// Adds an owner's counts. Its peak may be of an earlier time than what the others have in use now, so the sum is an estimate;
    /// but it is never more than there are.
    fn note(&mut self, tally: &Tally) {
        self.high_water = self.high_water.max((self.in_use + tally.peak).min(self.blocks));
        self.in_use += tally.in_use;
        self.late += tally.late;
    }

    /// Collects the remote frees of a row, if it is in the depot.
    fn collect(&mut self, row: RowRef) {
        if !row.is_in_depot() || row.is_whole() {
            return;
        }
        let late = row.collect();
        self.late += late;
        self.in_use += late.cast_signed();
        if row.is_whole() {
            self.open.remove(row);
            self.whole.push_front(row);
        }
    }

    /// Returns how many owners there are, with the pool's own.
    fn owners(&self) -> usize {
        (self.next_id - FIRST_OWNER) as usize - self.free_ids.len()
    }

    fn put(&mut self, row: RowRef) {
        if row.is_whole() {
            self.whole.push_front(row)
        } else {
            self.open.push_front(row)
        }
        row.pass_to_depot();
    }
}

impl Depot {
    pub(super) fn new() -> Self {
        let shelves = Mutex::new(Shelves {
            open: List::default(),
            whole: List::default(),
            in_use: 0,
            high_water: 0,
            late: 0,
            free_ids: Vec::new(),
            next_id: FIRST_OWNER,
            rows: 0,
            blocks: 0,
        });
        Self { shelves, terms: AtomicU32::new(KEEP.0), notices: AtomicU32::new(0) }
    }

    /// Returns the current terms.
    #[inline]
    pub(super) fn terms(&self) -> Terms {
        self.news().terms()
    }

    /// Returns what owners must learn from time to time.
    #[inline(always)]
    pub(super) fn news(&self) -> News {
        News { terms: self.terms.load(Ordering::Relaxed), notices: self.notices.load(Ordering::Relaxed) }
    }

    /// Returns how many remote frees were announced, modulo 2^32.
    #[cfg(all(test, not(loom)))]
    pub(super) fn notices(&self) -> u32 {
        self.news().notices
    }

    /// Announces remote frees to all owners. Relaxed, because it is only a hint to check rows.
    pub(super) fn notify(&self, remote_frees: u32) {
        if remote_frees != 0 {
            self.notices.fetch_add(remote_frees, Ordering::Relaxed);
        }
    }

    /// Recomputes the terms after the number of owners or rows has changed.
    fn set_terms(&self, shelves: &Shelves) {
        let owners = shelves.owners();
        let each = u32::try_from(shelves.rows / owners.max(1)).unwrap_or(u32::MAX);
        let keep = (each / 4).clamp(each.clamp(1, KEEP.0), KEEP.1);
        // More than the pool's own owner and one other.
        let shared = if owners > 2 { SHARED } else { 0 };
        let noted = self.terms.load(Ordering::Relaxed) & (SHARED | FULL);
        self.terms.store(keep | shared | noted, Ordering::Relaxed);
    }

    /// Notes that the pool is at its maximum.
    pub(super) fn note_full(&self) {
        let _shelves = self.shelves.lock();
        self.terms.store(self.terms.load(Ordering::Relaxed) | FULL, Ordering::Relaxed);
    }

    /// Creates an owner with a number that no other owner has. Allocates memory if there are more owners than ever before.
    pub(super) fn register(&self) -> Owner {
        let mut shelves = self.shelves.lock();
        let id = shelves.free_ids.pop().unwrap_or_else(|| {
            let id = shelves.next_id;
            shelves.next_id += 1;
            shelves.free_ids.reserve((id - FIRST_OWNER + 1) as usize);
            id
        });
        self.set_terms(&shelves);
        Owner::new(id)
    }

    /// Moves rows to an owner, partly used ones first. Returns whether there were any. Constant time.
    pub(super) fn lend(&self, owner: &mut Owner) -> bool {
        let tally = owner.tally();
        let mut shelves = self.shelves.lock();
        shelves.note(&tally);
        let mut lent = 0;
        let share = (shelves.open.len() + shelves.whole.len()) / shelves.owners().max(1);
        while lent < self.terms().keep.min(share.max(1)) {
            let Some(row) = shelves.open.pop_front().or_else(|| shelves.whole.pop_front()) else { break };
            row.pass_to(owner.id);
            owner.receive(row);
            lent += 1;
        }
        lent != 0
    }

    /// Adds an owner's counts.
    pub(super) fn record(&self, owner: &mut Owner) {
        let tally = owner.tally();
        self.shelves.lock().note(&tally);
    }

    /// Takes an owner's surplus of sparse and whole rows. Constant time.
    pub(super) fn take_surplus(&self, owner: &mut Owner) {
        let tally = owner.tally();
        let mut shelves = self.shelves.lock();
        shelves.note(&tally);
        for _ in 0..owner.surplus() {
            let Some(row) = owner.pop_surplus() else { break };
            shelves.put(row);
        }
    }

    /// Takes all rows of an owner. Time proportional to their number.
    pub(super) fn drain(&self, owner: &mut Owner) {
        owner.retire();
        // Of the stash, to rows of other owners.
        self.notify(core::mem::take(&mut owner.remote_frees));
        let tally = owner.tally();
        let mut shelves = self.shelves.lock();
        shelves.note(&tally);
        while let Some(row) = owner.pop_free() {
            shelves.put(row);
        }
    }

    /// Ends an owner: takes all its rows, and its number.
    pub(super) fn retire(&self, owner: &mut Owner) {
        self.drain(owner);
        let mut shelves = self.shelves.lock();
        shelves.free_ids.push(owner.id);
        self.set_terms(&shelves);
    }

    /// Adds the rows of a new chunk, which are used in this order.
    pub(super) fn add(&self, rows: impl Iterator<Item = RowRef>) {
        let mut shelves = self.shelves.lock();
        for row in rows {
            shelves.whole.push_back(row);
            shelves.rows += 1;
            shelves.blocks += row.blocks().cast_signed();
        }
        self.set_terms(&shelves);
    }

    /// Removes all rows of a chunk, if they are all here with all their blocks free, and then `may` allows it. No owner can
    /// allocate from the chunk afterwards, nor while `may` runs.
    pub(super) fn remove_if_whole(
        &self,
        rows: impl Iterator<Item = RowRef> + Clone,
        may: impl FnOnce() -> bool,
    ) -> bool {
        let mut shelves = self.shelves.lock();
        rows.clone().for_each(|row| shelves.collect(row));
        let leave = rows.clone().all(|row| row.is_whole_in_depot()) && may();
        if leave {
            for row in rows {
                shelves.whole.remove(row);
                shelves.rows -= 1;
                shelves.blocks -= row.blocks().cast_signed();
            }
            self.set_terms(&shelves);
        }
        leave
    }

    /// Returns how many blocks are in use, as far as owners have reported.
    pub(super) fn reported_in_use(&self) -> u64 {
        u64::try_from(self.shelves.lock().in_use).unwrap_or(0)
    }

    /// Returns the maximum of blocks in use, and the number of second frees that were detected late.
    pub(super) fn counts(&self, in_use: u64) -> (u64, u64) {
        let mut shelves = self.shelves.lock();
        let in_use = i64::try_from(in_use).unwrap_or(i64::MAX).min(shelves.blocks);
        shelves.high_water = shelves.high_water.max(in_use);
        (shelves.high_water.unsigned_abs(), shelves.late)
    }
}
