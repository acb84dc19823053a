//! Debug mode: patterns in free blocks, and a history of the owners that allocated and freed them.

use super::raw::RawBlock;
use crate::mem::DmaMemory;
use crate::sync::Mutex;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::fmt;

/// Every byte of a free block in debug mode.
pub const FREE_PATTERN: u8 = 0xa7;
/// Every byte of a newly allocated block in debug mode, unless it is zeroed.
pub const FRESH_PATTERN: u8 = 0xa9;

/// How many reports a pool keeps; all are counted.
const MAX_REPORTS: usize = 64;

/// An owner: its number, and its user's name for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OwnerTag {
    /// [`Local::number`](super::Local::number); the pool's own owner has 2.
    pub number: u32,
    /// The name given to [`Local::set_tag`](super::Local::set_tag), or "".
    pub tag: &'static str,
}

impl fmt::Display for OwnerTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "owner {}", self.number)?;
        if self.tag.is_empty() { Ok(()) } else { write!(f, " ({})", self.tag) }
    }
}

/// Which owners had a block last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LastUse {
    /// The owner that allocated it.
    pub allocated_by: OwnerTag,
    /// The owner that freed it.
    pub freed_by: OwnerTag,
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
    /// How many bytes are wrong.
    pub wrong_bytes: usize,
    /// The owners that had it last; `None` if it has not been allocated since its chunk was acquired.
    pub last_use: Option<LastUse>,
}

struct Last<'a>(&'a Option<LastUse>);

impl fmt::Display for Last<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(LastUse { allocated_by, freed_by }) => {
                write!(f, "last allocated by {allocated_by}, freed by {freed_by}")
            }
            None => f.write_str("it was never allocated"),
        }
    }
}

/// The history. Its lock is the last that is taken, and orders all operations of a pool in debug mode.
#[derive(Default, Debug)]
pub(super) struct Watch(Mutex<BlockHistory>);

#[derive(Default, Debug)]
pub(super) struct BlockHistory {
    /// By the block's offset in the span.
    uses: BTreeMap<u64, LastUse>,
    damages: Vec<Damage>,
    damaged: u64,
}

impl Watch {
    /// Locks the history, to check and change the state of a block as one step.
    pub(super) fn history(&self) -> impl core::ops::DerefMut<Target = BlockHistory> + '_ {
        self.0.lock()
    }
}

impl BlockHistory {
    /// Checks a block that is about to be allocated, and fills it.
    pub(super) fn on_alloc(&mut self, at: u64, block: RawBlock, memory: DmaMemory<'_>, who: OwnerTag) {
        self.inspect(at, block, memory);
        fill(memory, FRESH_PATTERN);
        self.uses.insert(at, LastUse { allocated_by: who, freed_by: who });
    }

    /// Fills a block that is about to be freed. Allocates no memory: the block has its entry since it was allocated.
    pub(super) fn on_free(&mut self, at: u64, memory: DmaMemory<'_>, who: OwnerTag) {
        fill(memory, FREE_PATTERN);
        if let Some(last) = self.uses.get_mut(&at) {
            last.freed_by = who;
        }
    }

    /// Checks a free block; wrong bytes are reported and reset.
    pub(super) fn inspect(&mut self, at: u64, block: RawBlock, memory: DmaMemory<'_>) {
        let byte = |offset| memory.read_u8(offset).unwrap_or(FREE_PATTERN);
        let mut wrong = (0..memory.len()).filter(|&offset| byte(offset) != FREE_PATTERN);
        let Some(offset) = wrong.next() else { return };
        let (found, wrong_bytes) = (byte(offset), 1 + wrong.count());
        let last_use = self.uses.get(&at).copied();
        self.damaged += 1;
        if self.damages.len() < MAX_REPORTS {
            self.damages.push(Damage { block, offset, expected: FREE_PATTERN, found, wrong_bytes, last_use });
        }
        fill(memory, FREE_PATTERN);
    }

    /// Fills a chunk that was just acquired, and forgets the history of its blocks.
    pub(super) fn enter(&mut self, start: u64, memory: DmaMemory<'_>) {
        fill(memory, FREE_PATTERN);
        let mut later = self.uses.split_off(&start);
        let mut beyond = later.split_off(&(start + memory.len() as u64));
        self.uses.append(&mut beyond);
    }

    /// Fills a free block that its pool's user has written to with permission.
    pub(super) fn refill(&mut self, memory: DmaMemory<'_>) {
        fill(memory, FREE_PATTERN);
    }

    pub(super) fn damages(&self) -> &[Damage] {
        &self.damages
    }

    pub(super) fn damaged(&self) -> u64 {
        self.damaged
    }
}

fn fill(memory: DmaMemory<'_>, value: u8) {
    // Never out of range.
    let _ = memory.fill(0, memory.len(), value);
}
