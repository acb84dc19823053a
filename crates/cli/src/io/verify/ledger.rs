//! What every block of a region must hold, and which blocks are being read or written.

use crate::copy::digest::Hash;
use crate::copy::error::PumpError;
use crate::targets::{Bytes, IoDirection, TargetError};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// How much is made or compared at a time: it stays in the cache.
const PIECE: usize = 32 << 10;
/// So many places are tried before a request waits until something is over.
const TRIES: usize = 16;
/// How many blocks of all jobs have a count of their writes: 256 MiB. What lies behind them is written once, and read.
pub(crate) const COUNTED: u64 = 64 << 20;

/// Blocks one behind the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    /// The first.
    pub(super) first: u64,
    /// How many, at least one.
    pub(super) blocks: usize,
}

/// What the blocks of a region must hold: it follows from where they are and how often they were written. Its memory is
/// bounded: a count of writes for each of the first blocks, and the requests in flight.
pub(super) struct Ledger {
    block: usize,
    blocks: u64,
    /// So many blocks from the start have been written at least once.
    laid: u64,
    /// How often each of the first blocks was written.
    writes: Vec<u32>,
    /// The requests in flight, by first block and length, with how many there are: of writes one.
    flying: BTreeMap<(u64, usize), (IoDirection, u32)>,
    /// The most blocks of a request so far.
    longest: usize,
    random: u64,
    piece: Vec<u8>,
}

impl Ledger {
    /// Of `blocks` blocks, none of which was written yet; `counted` of them at most can be written again.
    pub(super) fn new(blocks: u64, block: usize, counted: u64) -> Self {
        let writes = vec![0; usize::try_from(blocks.min(counted)).unwrap_or(0)];
        let piece = vec![0; block.max(PIECE / block.max(1) * block)];
        // The same order every time, so that what failed can be tried again.
        let random = 0x9e6c_63d0_876a_46ad;
        Self { block, blocks, laid: 0, writes, flying: BTreeMap::new(), longest: 0, random, piece }
    }

    /// How many bytes have been written at least once, from the start.
    pub(super) fn laid_bytes(&self) -> u64 {
        self.laid * self.block as u64
    }

    /// From here on the region is what has been written.
    pub(super) fn cut(&mut self) {
        self.blocks = self.laid;
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
        let left = usize::try_from(self.blocks.checked_sub(at)?).unwrap_or(usize::MAX);
        (left > 0).then(|| Run { first: at, blocks: left.min(most) })
    }

    /// Blocks that a request may use now; `None` if all that were tried are being used. Short lengths are as likely as
    /// long ones: first the power of two is drawn, then the length below the next one. Writes are among the blocks with a
    /// count.
    pub(super) fn anywhere(&mut self, way: IoDirection, (least, most): (usize, usize)) -> Option<Run> {
        let region =
            if way == IoDirection::Write { self.blocks.min(self.writes.len() as u64) } else { self.blocks };
        let most = (most as u64).min(region).max(1);
        let least = (least as u64).clamp(1, most);
        for _ in 0..TRIES {
            let powers = u64::from(most.ilog2() - least.ilog2()) + 1;
            let power = 1u64 << (u64::from(least.ilog2()) + self.random(powers));
            let blocks = (power + self.random(power)).clamp(least, most);
            let first = self.random(region.saturating_sub(blocks) + 1);
            let run = Run { first, blocks: usize::try_from(blocks).unwrap_or(usize::MAX) };
            if !self.is_used(way, run) {
                return Some(run);
            }
        }
        None
    }

    /// Whether a request in flight contradicts one of `way`: O(log n) for n in flight, and those nearby.
    fn is_used(&self, way: IoDirection, run: Run) -> bool {
        let end = run.first + run.blocks as u64;
        let nearby = (run.first.saturating_sub(self.longest as u64), 0)..(end, 0);
        let reaches = |(first, blocks): (u64, usize)| first + blocks as u64 > run.first;
        let used = |other: IoDirection| way == IoDirection::Write || other == IoDirection::Write;
        self.flying.range(nearby).any(|(&other, &(others, _))| reaches(other) && used(others))
    }

    /// How often the block was written.
    fn count(&self, number: u64) -> u32 {
        let counted = usize::try_from(number).ok().and_then(|number| self.writes.get(number));
        counted.copied().unwrap_or(u32::from(number < self.laid))
    }

    /// Where the blocks are, and how many bytes they have.
    pub(super) fn bytes(&self, run: Run) -> (u64, usize) {
        (run.first * self.block as u64, run.blocks * self.block)
    }

    /// Nobody else may use the blocks for what contradicts `way` until they are given back.
    pub(super) fn take(&mut self, way: IoDirection, run: Run) {
        self.longest = self.longest.max(run.blocks);
        self.flying.entry((run.first, run.blocks)).or_insert((way, 0)).1 += 1;
    }

    /// The request is over.
    pub(super) fn give_back(&mut self, run: Run) {
        let key = (run.first, run.blocks);
        if let Some((_, requests)) = self.flying.get_mut(&key) {
            *requests -= 1;
            if *requests == 0 {
                self.flying.remove(&key);
            }
        }
    }

    /// Counts one more write of each of the blocks, and puts into `buffer` what they hold from now on.
    pub(super) fn write<B: Bytes>(&mut self, run: Run, buffer: &mut B) -> Result<(), TargetError> {
        let first = usize::try_from(run.first).unwrap_or(usize::MAX);
        for writes in self.writes.iter_mut().skip(first).take(run.blocks) {
            *writes = writes.wrapping_add(1);
        }
        self.laid = self.laid.max(run.first + run.blocks as u64);
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
        let writes = self.count(at / self.block as u64);
        Err(PumpError::Wrong { target: target.to_owned(), at, block: self.block, writes })
    }

    /// The SHA-256 of what the region must hold; `None` where `ended` says so before it is made.
    pub(super) fn hash(&mut self, ended: impl Fn() -> bool) -> Option<Hash> {
        let mut hasher = Sha256::new();
        let whole = Run { first: 0, blocks: usize::try_from(self.blocks).ok()? };
        let hashed = self.pieces(whole, |_, piece| {
            hasher.update(piece);
            if ended() { Err(()) } else { Ok(()) }
        });
        hashed.ok().map(|()| Hash::from(hasher))
    }

    /// Hands what the blocks must hold to `each`, with where it stands among them.
    fn pieces<E>(&mut self, run: Run, mut each: impl FnMut(usize, &[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut piece = std::mem::take(&mut self.piece);
        let at_once = piece.len() / self.block;
        let mut done = 0;
        let mut result = Ok(());
        while done < run.blocks && result.is_ok() {
            let blocks = at_once.min(run.blocks - done);
            for (block, number) in
                piece.chunks_exact_mut(self.block).take(blocks).zip(run.first + done as u64..)
            {
                make(block, number, self.count(number));
            }
            result = each(done * self.block, piece.get(..blocks * self.block).unwrap_or_default());
            done += blocks;
        }
        self.piece = piece;
        result
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
