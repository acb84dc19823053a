//! [`Map`]: the ownership of frames: a bit per frame, and a state per region of 2 MiB.

use super::number::{AlreadyFree, Frame, FrameError};
use super::storage::zeroed;
use crate::sync::{AtomicU8, AtomicU64, Ordering, relax};
use alloc::boxed::Box;

/// The frames of a region.
pub(super) const REGION: u32 = 512;
/// The words of a region's map.
pub(super) const WORDS: u32 = REGION / 64;

/// Some frames of one word of the map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Part {
    /// The word's number in the map.
    pub(super) word: u32,
    /// A bit for each of its frames that belongs to the part.
    pub(super) mask: u64,
}

impl Part {
    pub(super) const NONE: Self = Self { word: u32::MAX, mask: 0 };

    /// Returns the part that consists of this frame.
    #[inline(always)]
    pub(super) fn of(frame: Frame) -> Self {
        Self { word: frame.index() / 64, mask: 1 << (frame.index() % 64) }
    }

    pub(super) fn len(self) -> u32 {
        self.mask.count_ones()
    }

    pub(super) fn region(self) -> u32 {
        self.word / WORDS
    }

    /// Returns the lowest frame of the part.
    #[inline(always)]
    pub(super) fn first(self) -> Frame {
        Frame::inside(self.word * 64 + self.mask.trailing_zeros())
    }

    /// Removes the lowest frame from the part.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<Frame> {
        if self.mask == 0 {
            return None;
        }
        let frame = Frame::new(self.word * 64 + self.mask.trailing_zeros());
        self.mask &= self.mask - 1;
        frame
    }

    /// Splits off the lowest `n` frames.
    pub(super) fn split(&mut self, n: u32) -> Self {
        let low = Self { word: self.word, mask: lowest(self.mask, n) };
        self.mask &= !low.mask;
        low
    }
}

/// Returns the lowest `n` set bits.
fn lowest(bits: u64, n: u32) -> u64 {
    if n >= bits.count_ones() {
        return bits;
    }
    let mut rest = bits;
    for _ in 0..n {
        rest &= rest - 1;
    }
    bits & !rest
}

/// For each order, the bits of a word at which an aligned run can start.
const STARTS: [u64; 7] = [
    !0,
    0x5555_5555_5555_5555,
    0x1111_1111_1111_1111,
    0x0101_0101_0101_0101,
    0x0001_0001_0001_0001,
    0x0000_0001_0000_0001,
    1,
];
/// The order of a whole word.
pub(super) const MAX_INNER: u8 = 6;

/// Returns the bits at which an aligned run of 2^order set bits starts; order 0..=6.
fn run_starts(bits: u64, order: u8) -> u64 {
    let mut starts = bits;
    for step in 0..order {
        starts &= starts >> (1 << step);
    }
    starts & STARTS.get(usize::from(order)).copied().unwrap_or(0)
}

/// Returns the highest order of an aligned run of set bits; `None` if there are none.
pub(super) fn max_order_of(bits: u64) -> Option<u8> {
    let (mut starts, mut order) = (bits, None);
    for (step, aligned) in (0..).zip(STARTS) {
        starts &= aligned;
        if starts == 0 {
            break;
        }
        order = Some(step);
        starts &= starts >> (1_u32 << step).min(63);
    }
    order
}

/// Returns the parts, word by word, of `frames` frames from `first`.
pub(super) fn parts(first: u32, frames: u32) -> impl Iterator<Item = Part> + Clone {
    let end = first + frames;
    (first / 64..end.div_ceil(64)).map(move |word| {
        let low = first.saturating_sub(word * 64);
        let high = (end - word * 64).min(64);
        Part { word, mask: (!0 >> (64 - (high - low))) << low }
    })
}

/// The result of a claim.
pub(super) struct Claimed {
    pub(super) mask: u64,
    /// Whether all 64 frames of the word were free before.
    pub(super) was_whole: bool,
}

/// The words of the region decide who owns its frames.
const OPEN: u8 = 0;
/// A thread checks whether all words are 0, to claim the region as a whole.
const CLAIMING: u8 = 1;
/// All frames are allocated, as one run: the words are 0, apart from claims that will be undone.
const WHOLE: u8 = 2;
/// A thread sets all bits, because a part of the run is freed separately.
const OPENING: u8 = 3;

/// The words of a zone, of which a set bit is an allocated frame, and the states of its regions.
///
/// A region whose frames are all free is claimed as a whole by one compare-and-swap of its state,
/// and freed by another, so runs of 2 MiB leave its words alone. A claim of single frames changes a
/// word and then reads the state; a claim of the region changes the state and then reads the words.
/// All four are sequentially consistent, so at least one of two sees the other, and undoes its own.
#[derive(Debug)]
pub(super) struct Map {
    words: Box<[AtomicU64]>,
    /// The index of the first region, so that each is one cache line.
    start: usize,
    states: Box<[AtomicU8]>,
}

impl Map {
    /// Creates the map of `regions` regions, all free.
    pub(super) fn new(regions: u32) -> Result<Self, FrameError> {
        // One more region than needed, so that the first one can start at a cache line.
        let len = (regions as usize + 1) * WORDS as usize;
        let words = zeroed::<AtomicU64>(len)?;
        let start = words.as_ptr().align_offset(64).min(WORDS as usize);
        Ok(Self { words, start, states: zeroed(regions as usize)? })
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.words) + size_of_val(&*self.states)
    }

    #[inline(always)]
    fn state(&self, region: u32) -> &AtomicU8 {
        &self.states[region as usize]
    }

    /// Returns whether the region is claimed as a whole, or about to be. Sequentially consistent.
    #[inline(always)]
    pub(super) fn is_claimed(&self, region: u32) -> bool {
        self.state(region).load(Ordering::SeqCst) != OPEN
    }

    #[inline(always)]
    fn word(&self, word: u32) -> &AtomicU64 {
        &self.words[self.start + word as usize]
    }

    fn region(&self, region: u32) -> &[AtomicU64] {
        let start = self.start + (region * WORDS) as usize;
        &self.words[start..start + WORDS as usize]
    }

    /// Returns which frames of `part` are free, unless their region is [claimed](Self::is_claimed).
    #[inline(always)]
    pub(super) fn free_of(&self, part: Part) -> u64 {
        part.mask & !self.word(part.word).load(Ordering::Relaxed)
    }

    /// Returns whether no frame of the region is allocated. Sequentially consistent: see
    /// [`Hints`](super::hints::Hints).
    pub(super) fn is_whole(&self, region: u32) -> bool {
        !self.is_claimed(region) && self.words_are_free(region)
    }

    fn words_are_free(&self, region: u32) -> bool {
        self.region(region).iter().all(|word| word.load(Ordering::SeqCst) == 0)
    }

    /// Returns whether a frame of the region is free. Sequentially consistent, like `is_whole`.
    pub(super) fn has_free(&self, region: u32) -> bool {
        !self.is_claimed(region)
            && self.region(region).iter().any(|word| word.load(Ordering::SeqCst) != !0)
    }

    /// Returns the highest order of an aligned run of free frames in a region, at most that of half
    /// of it; 0 if there is none. Sequentially consistent, like `is_whole`.
    pub(super) fn max_order(&self, region: u32) -> u8 {
        // Not in another state: bits may be set or cleared meanwhile.
        if self.state(region).load(Ordering::SeqCst) == WHOLE {
            return 0;
        }
        let words = self.region(region);
        let free = |word: &AtomicU64| !word.load(Ordering::SeqCst);
        let mut order = words.iter().filter_map(|word| max_order_of(free(word))).max().unwrap_or(0);
        while (MAX_INNER..MAX_INNER + 2).contains(&order) {
            let run = 2 << (order - MAX_INNER);
            if !words.chunks_exact(run).any(|run| run.iter().all(|word| free(word) == !0)) {
                break;
            }
            order += 1;
        }
        order
    }

    /// Returns how many frames of the region are allocated.
    #[cfg(test)]
    pub(super) fn taken_in(&self, region: u32) -> u32 {
        if self.is_claimed(region) {
            return REGION;
        }
        self.region(region).iter().map(|word| word.load(Ordering::Relaxed).count_ones()).sum()
    }

    /// Claims what `choose` picks from the free frames of a word; 0 claims nothing.
    ///
    /// Acquire: the last owner's accesses happen before the claim. Sequentially consistent: the
    /// hints are read next.
    #[inline(always)]
    fn claim_with(&self, word: u32, choose: impl Fn(u64) -> u64) -> Claimed {
        let word = self.word(word);
        let mut old = word.load(Ordering::Relaxed);
        loop {
            let mask = choose(!old);
            if mask == 0 {
                return Claimed { mask: 0, was_whole: false };
            }
            match word.compare_exchange_weak(old, old | mask, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return Claimed { mask, was_whole: old == 0 },
                Err(now) => old = now,
            }
        }
    }

    /// Claims at most `n` frames of a word, the lowest ones, by one compare-and-swap.
    #[inline(always)]
    pub(super) fn claim(&self, word: u32, n: u32) -> Claimed {
        match n {
            1 => self.claim_with(word, |free| free & free.wrapping_neg()),
            64.. => self.claim_with(word, |free| free),
            _ => self.claim_with(word, |free| lowest(free, n)),
        }
    }

    /// Claims the lowest aligned run of 2^order frames of a word, order 0..=6.
    pub(super) fn claim_order(&self, word: u32, order: u8) -> Claimed {
        let frames = 1_u32 << order;
        self.claim_with(word, |free| match run_starts(free, order) {
            0 => 0,
            starts => (!0 >> (64 - frames)) << starts.trailing_zeros(),
        })
    }

    /// Claims exactly these frames, or none.
    pub(super) fn claim_exactly(&self, part: Part) -> Claimed {
        let all = |free| if free & part.mask == part.mask { part.mask } else { 0 };
        self.claim_with(part.word, all)
    }

    /// Frees frames. Returns which frames of the word are free now.
    ///
    /// # Errors
    /// The first frame of `part` that is already free. Nothing has changed then.
    #[inline(always)]
    pub(super) fn release(&self, part: Part) -> Result<u64, AlreadyFree> {
        let word = self.word(part.word);
        let mut old = word.load(Ordering::Relaxed);
        loop {
            let already = part.mask & !old;
            if already != 0 {
                return Err(AlreadyFree(Part { word: part.word, mask: already }.first()));
            }
            // Sequentially consistent: the hints are read next.
            match word.compare_exchange_weak(
                old,
                old & !part.mask,
                Ordering::SeqCst,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(!old | part.mask),
                Err(now) => old = now,
            }
        }
    }

    /// Claims all frames of a region by its state. Returns false if any is allocated, or another
    /// thread changes the region at the same moment.
    pub(super) fn claim_region(&self, region: u32) -> bool {
        let state = self.state(region);
        // Acquire: as for `claim_with`.
        let begun = self.words_are_free(region)
            && state.compare_exchange(OPEN, CLAIMING, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        if !begun {
            return false;
        }
        let free = self.words_are_free(region);
        state.store(if free { WHOLE } else { OPEN }, Ordering::SeqCst);
        free
    }

    /// Frees all frames of a region that was claimed as a whole. Returns false if it was not, or if
    /// a part of it has been freed since.
    pub(super) fn release_region(&self, region: u32) -> bool {
        let state = self.state(region);
        state.compare_exchange(WHOLE, OPEN, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Sets the bits of a region that was claimed as a whole, so that a part of it can be freed.
    /// Returns true if this call has set them: then frames that were freed meanwhile were not visible.
    /// If there is no such claim, the words decide already. `begun` is called while no frame of the
    /// region can be free.
    ///
    /// Waits for claims of single frames that will be undone, and for another thread that does the
    /// same: each a few instructions from its end.
    #[cold]
    pub(super) fn split(&self, region: u32, begun: impl FnOnce()) -> bool {
        let state = self.state(region);
        let mut attempts = 0;
        loop {
            match state.compare_exchange(WHOLE, OPENING, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => break,
                Err(OPENING) => relax(attempts),
                // Frames that were freed meanwhile are made visible by the thread that has set the
                // bits.
                Err(_) => return false,
            }
            attempts += 1;
        }
        begun();
        for word in self.region(region) {
            // The bits that this thread has set. Those that others have set will be undone; those
            // that it has set and that are clear again have been freed.
            let (mut set, mut attempts) = (0, 0);
            while set != !0 {
                let old = word.load(Ordering::Relaxed);
                let next = !(old | set);
                if next == 0 {
                    relax(attempts);
                    attempts += 1;
                } else if word
                    .compare_exchange(old, old | next, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
                {
                    set |= next;
                }
            }
        }
        state.store(OPEN, Ordering::SeqCst);
        true
    }

    /// Marks frames that the zone does not have as allocated.
    pub(super) fn exclude(&mut self, part: Part) {
        _ = self.claim_exactly(part);
    }
}

const _: () = assert!(OPEN == 0, "regions are created open");
