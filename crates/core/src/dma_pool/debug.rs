//! Debug mode: [`History`], the hook that sees each alloc and free of a pool with the block, its
//! memory and the owner. It fills free blocks with a pattern, checks the pattern, and records the
//! owners.

use super::unit::RawBlock;
use crate::mem::DmaMemory;
use crate::sync::Mutex;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::fmt;

/// Every byte of a free block in debug mode.
pub const FREE_PATTERN: u8 = 0xa7;
/// Every byte of a newly allocated block in debug mode, unless it is zeroed.
pub const FRESH_PATTERN: u8 = 0xa9;

/// The number of reports that a pool keeps; all are counted.
const MAX_REPORTS: usize = 64;

/// The owners that had a block last, by their [numbers](super::PoolLocal::number); the pool's front
/// has 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LastUse {
    /// The owner that allocated it.
    pub allocated_by: u32,
    /// The owner that freed it.
    pub freed_by: u32,
}

/// A free block that was written to: through a stale address, or by a device that was not stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the free block at {addr:p} ({iova}) was written to: byte {offset} is {found:#04x} instead of {expected:#04x}, {wrong_bytes} bytes are wrong; {last}",
    addr = block.as_ptr(), iova = block.iova(), last = Last(last_use)
)]
pub struct Damage {
    /// The block.
    pub block: RawBlock,
    /// The first wrong byte.
    pub offset: usize,
    /// Its expected value.
    pub expected: u8,
    /// Its value.
    pub found: u8,
    /// The number of wrong bytes.
    pub wrong_bytes: usize,
    /// The owners that had it last; `None` if it has not been allocated since its chunk was
    /// acquired.
    pub last_use: Option<LastUse>,
}

struct Last<'a>(&'a Option<LastUse>);

impl fmt::Display for Last<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(LastUse { allocated_by, freed_by }) => {
                write!(f, "last allocated by owner {allocated_by}, freed by owner {freed_by}")
            }
            None => f.write_str("it was never allocated"),
        }
    }
}

/// The hook. Its lock is the last that is taken.
#[derive(Default, Debug)]
pub(super) struct History(Mutex<Records>);

#[derive(Default, Debug)]
struct Records {
    /// Keyed by the block's address.
    uses: BTreeMap<usize, LastUse>,
    damages: Vec<Damage>,
    damaged: u64,
}

impl History {
    /// Checks a block that was taken from an owner's magazine, before it is allocated, and fills
    /// it.
    pub(super) fn on_alloc(&self, block: RawBlock, memory: DmaMemory<'_>, owner: u32) {
        let mut records = self.0.lock();
        records.inspect(block, memory);
        fill(memory, FRESH_PATTERN);
        records.uses.insert(block.addr(), LastUse { allocated_by: owner, freed_by: owner });
    }

    /// Fills a block that was freed, before another owner can have it. Allocates no memory: the
    /// block has its entry since it was allocated.
    pub(super) fn on_free(&self, block: RawBlock, memory: DmaMemory<'_>, owner: u32) {
        let mut records = self.0.lock();
        fill(memory, FREE_PATTERN);
        if let Some(last) = records.uses.get_mut(&block.addr()) {
            last.freed_by = owner;
        }
    }

    /// Fills a chunk that was just acquired, and forgets the history of its blocks.
    pub(super) fn on_chunk(&self, memory: DmaMemory<'_>) {
        fill(memory, FREE_PATTERN);
        let mut records = self.0.lock();
        let mut later = records.uses.split_off(&memory.addr());
        let mut beyond = later.split_off(&(memory.addr() + memory.len()));
        records.uses.append(&mut beyond);
    }

    /// Checks a free block.
    pub(super) fn inspect(&self, block: RawBlock, memory: DmaMemory<'_>) {
        self.0.lock().inspect(block, memory);
    }

    /// Returns the owner that allocated a block last.
    pub(super) fn holder(&self, block: RawBlock) -> Option<u32> {
        self.0.lock().uses.get(&block.addr()).map(|last| last.allocated_by)
    }

    pub(super) fn damages(&self) -> Vec<Damage> {
        self.0.lock().damages.clone()
    }

    pub(super) fn damaged(&self) -> u64 {
        self.0.lock().damaged
    }
}

impl Records {
    /// Checks a free block; wrong bytes are reported and reset.
    fn inspect(&mut self, block: RawBlock, memory: DmaMemory<'_>) {
        let byte = |offset| memory.read_u8(offset).unwrap_or(FREE_PATTERN);
        let mut wrong = (0..memory.len()).filter(|&offset| byte(offset) != FREE_PATTERN);
        let Some(offset) = wrong.next() else { return };
        let (found, wrong_bytes) = (byte(offset), 1 + wrong.count());
        let last_use = self.uses.get(&block.addr()).copied();
        self.damaged += 1;
        if self.damages.len() < MAX_REPORTS {
            self.damages.push(Damage {
                block,
                offset,
                expected: FREE_PATTERN,
                found,
                wrong_bytes,
                last_use,
            });
        }
        fill(memory, FREE_PATTERN);
    }
}

pub(super) fn fill(memory: DmaMemory<'_>, value: u8) {
    // Never out of range.
    let _ = memory.fill(0, memory.len(), value);
}
