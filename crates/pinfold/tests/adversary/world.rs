//! The state that owners and devices share: the present mappings, recent mappings, and the
//! violations caught.

use pinfold_core::access::Access;
use pinfold_core::addr::Iova;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// The most mappings of one owner.
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

/// Counters of a run.
#[derive(Default)]
pub(crate) struct Counts {
    /// Accesses of devices.
    pub(crate) accesses: AtomicU64,
    /// The accesses that did not fault.
    pub(crate) landed: AtomicU64,
    pub(crate) maps: AtomicU64,
    /// Maps that failed for lack of table pages.
    pub(crate) no_pages: AtomicU64,
    /// Waits that reached their deadline.
    pub(crate) late: AtomicU64,
    /// Buffers of 2 MiB that were mapped by one leaf's alignment.
    pub(crate) large: AtomicU64,
    /// Mappings that ended at another owner than the one that made them.
    pub(crate) remote: AtomicU64,
}

pub(crate) struct World {
    live: Box<[Slot]>,
    recent: [AtomicU64; RECENT],
    recent_next: AtomicU64,
    generation: AtomicU64,
    /// By owner, how many calls that map have begun and ended: odd during one.
    calls: Box<[AtomicU64]>,
    pub(crate) stop: AtomicBool,
    /// Whether a buffer may have been freed without its owner's tag.
    pub(crate) untagged: AtomicBool,
    caught: Mutex<Option<String>>,
    pub(crate) counts: Counts,
}

impl World {
    pub(crate) fn new(owners: usize) -> Self {
        Self {
            live: (0..owners * LIVE).map(|_| Slot::default()).collect(),
            recent: Default::default(),
            recent_next: AtomicU64::new(0),
            generation: AtomicU64::new(0),
            calls: (0..owners).map(|_| AtomicU64::new(0)).collect(),
            stop: AtomicBool::new(false),
            untagged: AtomicBool::new(false),
            caught: Mutex::new(None),
            counts: Counts::default(),
        }
    }

    /// The number of slots for mappings that are live.
    pub(crate) fn slots(&self) -> usize {
        self.live.len()
    }

    /// Notes that an owner begins or ends a call that maps, after which it has said whether one of
    /// its buffers was lost.
    pub(crate) fn begin_or_end_call(&self, owner: usize) {
        self.calls[owner].fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until the calls have ended that others are in.
    pub(crate) fn wait_for_calls(&self) {
        for call in &self.calls {
            let now = call.load(Ordering::SeqCst);
            while now % 2 == 1 && call.load(Ordering::SeqCst) == now {
                std::thread::yield_now();
            }
        }
    }

    pub(crate) fn next_generation(&self) -> u64 {
        // Never 0, also when the numbers wrap.
        (self.generation.fetch_add(1, Ordering::Relaxed) % 0xff_fffe) + 1
    }

    /// Publishes a live mapping, whose pages are tagged.
    pub(crate) fn publish(&self, live: &Live) {
        let slot = &self.live[live.slot];
        fence(Ordering::Release);
        slot.iova.store(live.iova.raw(), Ordering::Relaxed);
        slot.rest.store(live.pages | u64::from(live.access.bits()) << 32, Ordering::Relaxed);
        slot.generation.store(live.generation, Ordering::Release);
        let next = self.recent_next.fetch_add(1, Ordering::Relaxed) as usize % RECENT;
        self.recent[next].store(live.iova.raw() | live.pages, Ordering::Relaxed);
    }

    /// Withdraws it, before it is revoked.
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

    /// Returns where something was mapped recently, and how many pages.
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
