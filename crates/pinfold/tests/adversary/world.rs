//! What owners and devices know of each other: where something is mapped now, where something was, and what was caught.

use pinfold_core::access::Access;
use pinfold_core::addr::Iova;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

pub(crate) const OWNERS: usize = 3;
/// Mappings of one owner at most.
pub(crate) const LIVE: usize = 8;
const RECENT: usize = 32;

/// A mapping that is live for as long as its slot keeps its generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live {
    pub(crate) slot: usize,
    pub(crate) generation: u64,
    pub(crate) iova: Iova,
    pub(crate) pages: u64,
    pub(crate) access: Access,
}

/// A sequence lock of one writer: the generation is 0 while nothing is mapped.
#[derive(Default)]
struct Slot {
    generation: AtomicU64,
    iova: AtomicU64,
    /// Pages, and the access above bit 32.
    rest: AtomicU64,
}

/// What a run has done.
#[derive(Default)]
pub(crate) struct Counts {
    /// Accesses of devices.
    pub(crate) accesses: AtomicU64,
    /// Of these, ones that landed.
    pub(crate) landed: AtomicU64,
    pub(crate) maps: AtomicU64,
    /// Maps refused for want of table pages.
    pub(crate) no_pages: AtomicU64,
    /// Waits that reached their deadline.
    pub(crate) late: AtomicU64,
    /// Buffers of 2 MiB that were mapped by one leaf's alignment.
    pub(crate) large: AtomicU64,
}

#[derive(Default)]
pub(crate) struct World {
    live: [Slot; OWNERS * LIVE],
    recent: [AtomicU64; RECENT],
    recent_next: AtomicU64,
    generation: AtomicU64,
    pub(crate) stop: AtomicBool,
    /// Whether a buffer may have gone back to the arena without its owner's tag.
    pub(crate) untagged: AtomicBool,
    caught: Mutex<Option<String>>,
    pub(crate) counts: Counts,
}

impl World {
    pub(crate) fn next_generation(&self) -> u64 {
        // Never 0, also where the numbers wrap.
        (self.generation.fetch_add(1, Ordering::Relaxed) % 0xff_fffe) + 1
    }

    /// Says that a mapping is live. Its pages are tagged.
    pub(crate) fn publish(&self, live: &Live) {
        let slot = &self.live[live.slot];
        fence(Ordering::Release);
        slot.iova.store(live.iova.raw(), Ordering::Relaxed);
        slot.rest.store(live.pages | u64::from(live.access.bits()) << 32, Ordering::Relaxed);
        slot.generation.store(live.generation, Ordering::Release);
        let next = self.recent_next.fetch_add(1, Ordering::Relaxed) as usize % RECENT;
        self.recent[next].store(live.iova.raw() | live.pages, Ordering::Relaxed);
    }

    /// Says that it is not, before it is revoked.
    pub(crate) fn withdraw(&self, slot: usize) {
        self.live[slot].generation.store(0, Ordering::SeqCst);
    }

    pub(crate) fn live(&self, slot: usize) -> Option<Live> {
        let from = &self.live[slot % self.live.len()];
        let generation = from.generation.load(Ordering::Acquire);
        let (iova, rest) = (from.iova.load(Ordering::Relaxed), from.rest.load(Ordering::Relaxed));
        let live = Live {
            slot: slot % self.live.len(),
            generation,
            iova: Iova::new(iova),
            pages: rest & 0xffff_ffff,
            access: Access::from_bits_truncate((rest >> 32) as u8),
        };
        (generation != 0 && self.is_live(&live)).then_some(live)
    }

    pub(crate) fn is_live(&self, live: &Live) -> bool {
        fence(Ordering::Acquire);
        self.live[live.slot].generation.load(Ordering::Acquire) == live.generation
    }

    /// Where something was mapped lately, and how many pages.
    pub(crate) fn recent(&self, n: usize) -> (u64, u64) {
        let packed = self.recent[n % RECENT].load(Ordering::Relaxed);
        (packed & !0xfff, (packed & 0xfff).max(1))
    }

    pub(crate) fn catch(&self, what: impl FnOnce() -> String) {
        let mut caught = self.caught.lock().unwrap();
        if caught.is_none() {
            *caught = Some(what());
        }
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn caught(&self) -> Option<String> {
        self.caught.lock().unwrap().clone()
    }
}

/// xorshift64*.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number from 0 to `end`, which it is not.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % end
    }

    pub(crate) fn index(&mut self, end: usize) -> usize {
        self.below(end as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }
}
