//! Debug mode: patterns in what is free, and a book of who had it.

use super::raw::RawBlock;
use crate::mem::DmaMemory;
use crate::sync::Mutex;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::fmt;

/// What every byte of a free block is in debug mode.
pub const FREE_PATTERN: u8 = 0xa7;
/// What every byte of a block is in debug mode when it is handed out (but zeroed ones).
pub const FRESH_PATTERN: u8 = 0xa9;

/// How many reports a pool keeps; all are counted.
const KEPT: usize = 64;

/// Who asked for something: an owner's number, and what its user calls it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OwnerTag {
    /// [`Local::number`](super::Local::number); the pool's own owner has 2.
    pub number: u32,
    /// What [`Local::set_tag`](super::Local::set_tag) was given, or "".
    pub tag: &'static str,
}

impl fmt::Display for OwnerTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "owner {}", self.number)?;
        if self.tag.is_empty() { Ok(()) } else { write!(f, " ({})", self.tag) }
    }
}

/// Who had a block last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LastUse {
    /// Whom it was handed out to.
    pub allocated_by: OwnerTag,
    /// Who freed it.
    pub freed_by: OwnerTag,
}

/// A free block that somebody wrote into: a processor through a stale address, or a device that was not stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the free block at {addr:p} ({iova}) was written to: byte {offset} is {found:#04x} and should be {expected:#04x}, {wrong_bytes} bytes are wrong; {last}",
    addr = block.as_ptr(), iova = block.iova(), last = Last(last_use)
)]
pub struct Damage {
    /// The block.
    pub block: RawBlock,
    /// Which byte of it is the first that is wrong.
    pub offset: usize,
    /// What that byte should be.
    pub expected: u8,
    /// What it is.
    pub found: u8,
    /// How many bytes are wrong.
    pub wrong_bytes: usize,
    /// Who had it last; `None` where nobody had it since the pool got its chunk.
    pub last_use: Option<LastUse>,
}

struct Last<'a>(&'a Option<LastUse>);

impl fmt::Display for Last<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(LastUse { allocated_by, freed_by }) => {
                write!(f, "{allocated_by} had it last and {freed_by} freed it")
            }
            None => f.write_str("nobody had it yet"),
        }
    }
}

/// The book. Its lock is the last that is taken, and orders all operations of a pool in debug mode.
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
    /// The book, to look at the state of a block and change it as one step.
    pub(super) fn book(&self) -> impl core::ops::DerefMut<Target = BlockHistory> + '_ {
        self.0.lock()
    }
}

impl BlockHistory {
    /// Looks at a block that is about to be handed out, and fills it.
    pub(super) fn hand_out(&mut self, at: u64, block: RawBlock, memory: DmaMemory<'_>, who: OwnerTag) {
        self.inspect(at, block, memory);
        fill(memory, FRESH_PATTERN);
        self.uses.insert(at, LastUse { allocated_by: who, freed_by: who });
    }

    /// Fills a block that is about to be free. Allocates nothing: it has its line since it was handed out.
    pub(super) fn take_back(&mut self, at: u64, memory: DmaMemory<'_>, who: OwnerTag) {
        fill(memory, FREE_PATTERN);
        if let Some(last) = self.uses.get_mut(&at) {
            last.freed_by = who;
        }
    }

    /// Looks at a free block; what is wrong is reported and put right.
    pub(super) fn inspect(&mut self, at: u64, block: RawBlock, memory: DmaMemory<'_>) {
        let byte = |offset| memory.read_u8(offset).unwrap_or(FREE_PATTERN);
        let mut wrong = (0..memory.len()).filter(|&offset| byte(offset) != FREE_PATTERN);
        let Some(offset) = wrong.next() else { return };
        let (found, wrong_bytes) = (byte(offset), 1 + wrong.count());
        let last_use = self.uses.get(&at).copied();
        self.damaged += 1;
        if self.damages.len() < KEPT {
            self.damages.push(Damage { block, offset, expected: FREE_PATTERN, found, wrong_bytes, last_use });
        }
        fill(memory, FREE_PATTERN);
    }

    /// Fills a chunk that the pool has just got, and forgets who had its blocks before.
    pub(super) fn enter(&mut self, start: u64, memory: DmaMemory<'_>) {
        fill(memory, FREE_PATTERN);
        let mut later = self.uses.split_off(&start);
        let mut beyond = later.split_off(&(start + memory.len() as u64));
        self.uses.append(&mut beyond);
    }

    pub(super) fn damages(&self) -> &[Damage] {
        &self.damages
    }

    pub(super) fn damaged(&self) -> u64 {
        self.damaged
    }
}

fn fill(memory: DmaMemory<'_>, value: u8) {
    // All of it is inside of it.
    let _ = memory.fill(0, memory.len(), value);
}
