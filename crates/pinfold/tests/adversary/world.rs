//! The state that owners and devices share: the present mappings, recent mappings, and the
//! violations caught.

use pinfold_core::access::Access;
use pinfold_core::addr::Iova;
use pinfold_core::mem::DmaMemory;
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
    /// Requests without payloads, and with two that are for different accesses.
    pub(crate) without_payloads: AtomicU64,
    pub(crate) mixed: AtomicU64,
    /// Requests that were lost with their unit.
    pub(crate) lost: AtomicU64,
    /// Payloads that were at the device when their loop was dropped.
    pub(crate) quarantined: AtomicU64,
}

pub(crate) struct World {
    live: Box<[Slot]>,
    recent: [AtomicU64; RECENT],
    recent_next: AtomicU64,
    generation: AtomicU64,
    /// By owner, the number of begun and ended calls that map: odd during one.
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

    /// Returns the number of slots for mappings that are live.
    pub(crate) fn slots(&self) -> usize {
        self.live.len()
    }

    /// Records that an owner begins or ends a call that maps. After its end it has reported whether
    /// one of its buffers was lost.
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

pub(crate) const PAGE: u64 = 4096;
/// Bytes from one tagged word of a page to the next.
pub(crate) const STEP: u64 = 512;
pub(crate) const WORDS: u64 = PAGE / STEP;

const KIND: u32 = 60;
const GENERATION: u32 = 36;
const NUMBER: u64 = (1 << GENERATION) - 1;
const GENERATIONS: u64 = (1 << (KIND - GENERATION)) - 1;

/// The owner of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Never tagged.
    Blank = 0,
    /// The owner's: no device may read or write it. The number is that of the page in this process.
    Owned = 1,
    /// About to be mapped, at an address not yet known. The number is that of the page in this
    /// process.
    Leaving = 2,
    /// Mapping. The number is that of the page in the address space of the device.
    Mapping = 3,
    /// Written by a device. The number is that of the page that the device addressed.
    Device = 4,
    /// The target of poisoned table entries.
    Trap = 5,
    /// None of these.
    Other = 15,
}

/// A tagged word, taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tag {
    pub(crate) kind: Kind,
    pub(crate) generation: u64,
    pub(crate) number: u64,
}

impl Tag {
    pub(crate) fn word(self) -> u64 {
        (self.kind as u64) << KIND
            | (self.generation & GENERATIONS) << GENERATION
            | (self.number & NUMBER)
    }

    pub(crate) fn of(word: u64) -> Self {
        let kind = match word >> KIND {
            0 if word == 0 => Kind::Blank,
            1 => Kind::Owned,
            2 => Kind::Leaving,
            3 => Kind::Mapping,
            4 => Kind::Device,
            5 => Kind::Trap,
            _ => Kind::Other,
        };
        Self { kind, generation: word >> GENERATION & GENERATIONS, number: word & NUMBER }
    }

    pub(crate) fn device(at: Iova) -> Self {
        Self { kind: Kind::Device, generation: 0, number: at.raw() / PAGE }
    }

    pub(crate) fn mapped(at: Iova, generation: u64) -> Self {
        Self { kind: Kind::Mapping, generation: generation & GENERATIONS, number: at.raw() / PAGE }
    }
}

/// Returns whether generation `a` is older than `b`, although the numbers wrap.
pub(crate) fn is_older(a: u64, b: u64) -> bool {
    let behind = b.wrapping_sub(a) & GENERATIONS;
    behind != 0 && behind <= GENERATIONS / 2
}

/// Tags every page of `memory` as `tag` says of its number there.
pub(crate) fn write(memory: DmaMemory, tag: impl Fn(u64) -> Tag) {
    each(memory, |page, offset| memory.write_u64(offset, tag(page).word()).unwrap());
}

/// Tags `memory` by its addresses in this process.
pub(crate) fn write_kind(memory: DmaMemory, kind: Kind) {
    let first = memory.addr() as u64 / PAGE;
    write(memory, |page| Tag { kind, generation: 0, number: first + page });
}

/// Returns the first word of `memory` that is not `right`: its page, and what it says.
pub(crate) fn find(memory: DmaMemory, right: impl Fn(u64, Tag) -> bool) -> Option<(u64, Tag)> {
    let mut wrong = None;
    each(memory, |page, offset| {
        let tag = Tag::of(memory.read_u64(offset).unwrap());
        if wrong.is_none() && !right(page, tag) {
            wrong = Some((page, tag));
        }
    });
    wrong
}

/// Returns the first word that says something else than `kind` and the page's address in this
/// process.
pub(crate) fn find_not(memory: DmaMemory, kind: Kind) -> Option<(u64, Tag)> {
    let first = memory.addr() as u64 / PAGE;
    find(memory, |page, tag| tag.kind == kind && tag.number == (first + page) & NUMBER)
}

fn each(memory: DmaMemory, mut act: impl FnMut(u64, usize)) {
    for offset in (0..memory.len()).step_by(STEP as usize) {
        act(offset as u64 / PAGE, offset);
    }
}
