//! What every block of a region must hold, and which blocks are being read or written.

use crate::copy::digest::Hash;
use crate::copy::error::PumpError;
use crate::target::{Bytes, TargetError, Way};
use sha2::{Digest, Sha256};

/// How much is made or compared at a time: it stays in the cache.
const PIECE: usize = 32 << 10;
/// So many places are tried before a request waits until something is over.
const TRIES: usize = 16;
/// Set in `users` while a block is being written; below it stands how many reads there are.
const WRITTEN: u16 = 1 << 15;

/// Blocks one behind the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    /// The first.
    pub(super) first: u64,
    /// How many, at least one.
    pub(super) blocks: usize,
}

/// What the blocks of a region must hold: it follows from where they are and how often they were written.
pub(super) struct Ledger {
    block: usize,
    writes: Vec<u32>,
    users: Vec<u16>,
    random: u64,
    piece: Vec<u8>,
}

impl Ledger {
    /// Of `blocks` blocks, none of which was written yet.
    pub(super) fn new(blocks: u64, block: usize) -> Self {
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
        let piece = vec![0; block.max(PIECE / block.max(1) * block)];
        // The same order every time, so that what failed can be tried again.
        Self { block, writes: vec![0; blocks], users: vec![0; blocks], random: 0x9e6c_63d0_876a_46ad, piece }
    }

    /// Marsaglia's xorshift64*.
    pub(super) fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let wide = u128::from(self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)) * u128::from(below);
        // The upper half of a product of two 64-bit numbers is less than each of them.
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    /// Up to `most` blocks from `at` to the end of the region; `None` at the end.
    pub(super) fn from(&self, at: u64, most: usize) -> Option<Run> {
        let left = usize::try_from((self.writes.len() as u64).checked_sub(at)?).unwrap_or(usize::MAX);
        (left > 0).then(|| Run { first: at, blocks: left.min(most) })
    }

    /// Blocks that a request may use now; `None` if all that were tried are being used. Short lengths are as likely as
    /// long ones: first the power of two is drawn, then the length below the next one.
    pub(super) fn anywhere(&mut self, way: Way, (least, most): (usize, usize)) -> Option<Run> {
        let most = most.min(self.writes.len()).max(1) as u64;
        let least = (least as u64).clamp(1, most);
        for _ in 0..TRIES {
            let powers = u64::from(most.ilog2() - least.ilog2()) + 1;
            let power = 1u64 << (u64::from(least.ilog2()) + self.random(powers));
            let blocks = (power + self.random(power)).clamp(least, most);
            let first = self.random(self.writes.len() as u64 - blocks + 1);
            let run = Run { first, blocks: usize::try_from(blocks).unwrap_or(usize::MAX) };
            let used = |&users: &u16| users >= WRITTEN || (way == Way::Write && users > 0);
            if !self.users.get(self.range(run)).unwrap_or_default().iter().any(used) {
                return Some(run);
            }
        }
        None
    }

    fn range(&self, run: Run) -> std::ops::Range<usize> {
        let first = usize::try_from(run.first).unwrap_or(usize::MAX);
        first..first.saturating_add(run.blocks)
    }

    /// Where the blocks are, and how many bytes they have.
    pub(super) fn bytes(&self, run: Run) -> (u64, usize) {
        (run.first * self.block as u64, run.blocks * self.block)
    }

    /// Nobody else may use the blocks for what contradicts `way` until they are given back.
    pub(super) fn take(&mut self, way: Way, run: Run) {
        let range = self.range(run);
        for users in self.users.get_mut(range).unwrap_or_default() {
            *users = if way == Way::Write { WRITTEN } else { *users + 1 };
        }
    }

    /// The request is over.
    pub(super) fn give_back(&mut self, way: Way, run: Run) {
        let range = self.range(run);
        for users in self.users.get_mut(range).unwrap_or_default() {
            *users = if way == Way::Write { 0 } else { users.saturating_sub(1) };
        }
    }

    /// Counts one more write of each of the blocks, and puts into `buffer` what they hold from now on.
    pub(super) fn write<B: Bytes>(&mut self, run: Run, buffer: &mut B) -> Result<(), TargetError> {
        let range = self.range(run);
        for writes in self.writes.get_mut(range).unwrap_or_default() {
            *writes = writes.wrapping_add(1);
        }
        self.pieces(run, |at, piece| buffer.write_at(at, piece))
    }

    /// Makes sure that `buffer` holds in no block what a read of `run` must find.
    pub(super) fn spoil<B: Bytes>(&mut self, run: Run, buffer: &mut B) -> Result<(), TargetError> {
        (0..run.blocks).try_for_each(|at| buffer.write_at(at * self.block, &[0; 8]))
    }

    /// Whether `buffer` holds what it must after a read of `run` from `target`.
    pub(super) fn compare<B: Bytes>(&mut self, run: Run, buffer: &B, target: &str) -> Result<(), PumpError> {
        let start = self.bytes(run).0;
        let mut found = vec![0; self.piece.len()];
        let mut wrong = None;
        self.pieces(run, |at, piece| {
            let found = found.get_mut(..piece.len()).unwrap_or_default();
            buffer.read_at(at, found)?;
            if wrong.is_none() && found != piece {
                wrong =
                    found.iter().zip(piece).position(|(found, held)| found != held).map(|first| at + first);
            }
            Ok::<_, TargetError>(())
        })?;
        let Some(at) = wrong else { return Ok(()) };
        let at = start + at as u64;
        let block = usize::try_from(at / self.block as u64).unwrap_or(usize::MAX);
        let writes = self.writes.get(block).copied().unwrap_or(0);
        Err(PumpError::Wrong { target: target.to_owned(), at, block: self.block, writes })
    }

    /// The SHA-256 of what the region must hold.
    pub(super) fn hash(&mut self) -> Hash {
        let mut hasher = Sha256::new();
        let whole = Run { first: 0, blocks: self.writes.len() };
        let hashed: Result<(), std::convert::Infallible> = self.pieces(whole, |_, piece| {
            hasher.update(piece);
            Ok(())
        });
        let Ok(()) = hashed;
        Hash::from(hasher)
    }

    /// Hands what the blocks must hold to `each`, with where it stands among them.
    fn pieces<E>(&mut self, run: Run, mut each: impl FnMut(usize, &[u8]) -> Result<(), E>) -> Result<(), E> {
        let range = self.range(run);
        let mut at = 0;
        let mut number = run.first;
        for writes in self.writes.get(range).unwrap_or_default().chunks(self.piece.len() / self.block) {
            for (block, &writes) in self.piece.chunks_exact_mut(self.block).zip(writes) {
                make(block, number, writes);
                number += 1;
            }
            let len = writes.len() * self.block;
            each(at, self.piece.get(..len).unwrap_or_default())?;
            at += len;
        }
        Ok(())
    }
}

/// What block `number` holds after its write `writes`: words that are far from those of any other block and write.
fn make(block: &mut [u8], number: u64, writes: u32) {
    // Steele's splitmix64: each input bit changes half of the output's.
    let mut mixed = (number << 24).wrapping_add(u64::from(writes)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // Odd, so that the first word of a block is never the zero that spoils a buffer.
    let mut word = (mixed ^ (mixed >> 31)) | 1;
    for bytes in block.chunks_exact_mut(8) {
        bytes.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(0xd6e8_feb8_6659_fd93);
    }
}
