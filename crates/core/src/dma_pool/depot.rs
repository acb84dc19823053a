//! The depot: rows with free blocks that no owner keeps. They are exchanged many at a time, under a lock.

use super::list::List;
use super::owner::{Owner, Tally};
use super::row::{FIRST_OWNER, RowRef};
use crate::sync::Mutex;
use alloc::vec::Vec;

/// How many rows an owner gets at a time.
const BATCH: usize = 16;

/// See the module.
#[derive(Debug)]
pub(super) struct Depot(Mutex<Shelves>);

#[derive(Debug)]
struct Shelves {
    /// Rows of which some blocks can be drawn.
    open: List,
    /// Rows all of whose blocks can be drawn: used ones first, then fresh ones in ascending order.
    whole: List,
    /// Blocks in use, by what owners have told.
    in_use: i64,
    high_water: i64,
    late: u64,
    /// Numbers of owners that are gone. It has room for every number that was given out.
    free_ids: Vec<u32>,
    next_id: u32,
}

impl Shelves {
    fn note(&mut self, tally: &Tally) {
        self.high_water = self.high_water.max(self.in_use + tally.peak);
        self.in_use += tally.in_use;
        self.late += tally.late;
    }

    /// Collects what was posted to a row, if it is here.
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
        let shelves = Shelves {
            open: List::default(),
            whole: List::default(),
            in_use: 0,
            high_water: 0,
            late: 0,
            free_ids: Vec::new(),
            next_id: FIRST_OWNER,
        };
        Self(Mutex::new(shelves))
    }

    /// A new owner, with a number that no other has now. Allocates where there were never as many.
    pub(super) fn enrol(&self) -> Owner {
        let mut shelves = self.0.lock();
        let id = shelves.free_ids.pop().unwrap_or_else(|| {
            let id = shelves.next_id;
            shelves.next_id += 1;
            let room = (id - FIRST_OWNER + 1) as usize;
            shelves.free_ids.reserve(room);
            id
        });
        Owner::new(id)
    }

    /// Gives an owner rows, those first that are partly used. Returns whether there were any. Constant time.
    pub(super) fn lend(&self, owner: &mut Owner) -> bool {
        let tally = owner.tally();
        let mut shelves = self.0.lock();
        shelves.note(&tally);
        let mut lent = 0;
        while lent < BATCH {
            let Some(row) = shelves.open.pop_front().or_else(|| shelves.whole.pop_front()) else { break };
            row.pass_to(owner.id);
            owner.receive(row);
            lent += 1;
        }
        lent != 0
    }

    /// Lets an owner tell what it did.
    pub(super) fn take_tally(&self, owner: &mut Owner) {
        let tally = owner.tally();
        self.0.lock().note(&tally);
    }

    /// Takes whole rows that an owner has too many of. Constant time.
    pub(super) fn take_surplus(&self, owner: &mut Owner) {
        let tally = owner.tally();
        let mut shelves = self.0.lock();
        shelves.note(&tally);
        for _ in 0..owner.surplus() {
            let Some(row) = owner.whole.pop_front() else { break };
            shelves.put(row);
        }
    }

    /// Takes everything that an owner has. Time proportional to its rows.
    pub(super) fn take_all(&self, owner: &mut Owner) {
        owner.retire();
        let tally = owner.tally();
        let mut shelves = self.0.lock();
        shelves.note(&tally);
        while let Some(row) = owner.open.pop_front().or_else(|| owner.whole.pop_front()) {
            shelves.put(row);
        }
    }

    /// Takes everything that an owner has, and its number.
    pub(super) fn dismiss(&self, owner: &mut Owner) {
        self.take_all(owner);
        self.0.lock().free_ids.push(owner.id);
    }

    /// Enters the rows of a fresh chunk, to be handed out in this order.
    pub(super) fn add(&self, rows: impl Iterator<Item = RowRef>) {
        let mut shelves = self.0.lock();
        rows.for_each(|row| shelves.whole.push_back(row));
    }

    /// Takes out all the rows of a chunk, if they are all here with all their blocks free. Nobody draws from the
    /// chunk afterwards.
    pub(super) fn remove_if_whole(&self, rows: impl Iterator<Item = RowRef> + Clone) -> bool {
        let mut shelves = self.0.lock();
        rows.clone().for_each(|row| shelves.collect(row));
        let whole = rows.clone().all(|row| row.is_whole_in_depot());
        if whole {
            rows.for_each(|row| shelves.whole.remove(row));
        }
        whole
    }

    /// The most blocks in use at a time, and the number of second frees that were found late.
    pub(super) fn counts(&self, in_use: u64) -> (u64, u64) {
        let mut shelves = self.0.lock();
        shelves.high_water = shelves.high_water.max(i64::try_from(in_use).unwrap_or(i64::MAX));
        (shelves.high_water.unsigned_abs(), shelves.late)
    }
}
