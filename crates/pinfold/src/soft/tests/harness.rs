//! A device that does DMA at random, and an owner of pages that looks whether any of it lands where it must not.
//!
//! - A page that the owner holds says SECRET and its number. No device may see that, and none may change it.
//! - A page that is mapped for reading says PUBLIC and its number; the device may see it, and may not change it.
//! - A page that is mapped for writing says anything.

use crate::soft::{Port, SoftIommu};
use pinfold_core::access::{FromDevice, ToDevice};
use pinfold_core::addr::Iova;
use pinfold_core::domain::{Domain, Mapped, Pinned, Revoked};
use pinfold_core::mem::DmaMemory;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(super) const PAGE: usize = 4096;
const SECRET: u64 = 0x5ec3_0000_0000_0000;
const PUBLIC: u64 = 0x0b11_0000_0000_0000;
const ROGUE: u64 = 0xbad0_bad0_bad0_bad0;
const KIND: u64 = 0xffff_0000_0000_0000;

/// Pages that outlive every device.
pub(super) struct Arena {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is reached through `DmaMemory` only.
unsafe impl Send for Arena {}
// SAFETY: as for `Send`.
unsafe impl Sync for Arena {}

impl Arena {
    pub(super) fn new(pages: usize) -> Arc<Self> {
        Self::aligned(pages, PAGE)
    }

    pub(super) fn aligned(pages: usize, align: usize) -> Arc<Self> {
        let layout = Layout::from_size_align(pages * PAGE, align).unwrap();
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Arc::new(Self { base, layout })
    }

    pub(super) fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: allocated until drop; no reference into it is made.
        unsafe { DmaMemory::from_raw(self.base, self.layout.size()) }
    }

    pub(super) fn page(self: &Arc<Self>, page: usize) -> Page {
        Page { arena: Arc::clone(self), first: page, pages: 1 }
    }

    pub(super) fn pages(self: &Arc<Self>, first: usize, pages: usize) -> Page {
        Page { arena: Arc::clone(self), first, pages }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: from `alloc_zeroed` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// Pages of an arena.
pub(super) struct Page {
    arena: Arc<Arena>,
    pub(super) first: usize,
    pages: usize,
}

// SAFETY: the arena lives as long as the page; the tests hand each page out once; no reference into it is made.
unsafe impl Pinned for Page {
    fn memory(&self) -> DmaMemory<'_> {
        self.arena.memory().part(self.first * PAGE, self.pages * PAGE).unwrap()
    }
    fn fixed_iova(&self) -> Option<Iova> {
        None
    }
}

/// xorshift64*.
pub(super) struct Random(pub(super) u64);

impl Random {
    /// A number from 0 to `end`, which it is not.
    pub(super) fn index(&mut self, end: usize) -> usize {
        crate::soft::to_usize(self.below(end as u64))
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The high bits of a product: the low ones of the state itself go in step.
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % end
    }
}

/// Where something is or was mapped lately: the rogue has seen the addresses go by.
type Seen = [AtomicU64; 32];

/// The device. What it sees that it must not is counted.
pub(super) struct Rogue {
    port: Port,
    seen: Arc<Seen>,
    random: Random,
    pub(super) landed: u64,
    pub(super) leaks: u64,
}

impl Rogue {
    fn step(&mut self) {
        let at = self.seen[self.random.index(32)].load(Ordering::Relaxed);
        let iova = Iova::new(at + self.random.below(512) * 8);
        if self.random.below(2) == 0 {
            self.landed += u64::from(self.port.write(iova, &ROGUE.to_ne_bytes()).is_ok());
        } else {
            let mut word = [0; 8];
            if self.port.read(iova, &mut word).is_ok() {
                self.landed += 1;
                self.leaks += u64::from(u64::from_ne_bytes(word) & KIND == SECRET);
            }
        }
    }

    fn steps(&mut self, n: usize) {
        (0..n).for_each(|_| self.step());
    }
}

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    /// Accesses that landed, rightly or wrongly.
    pub(super) landed: u64,
    /// A device saw what it must not.
    pub(super) leaks: u64,
    /// A device changed what it must not.
    pub(super) damaged: u64,
}

impl Verdict {
    pub(super) fn is_clean(&self) -> bool {
        self.leaks == 0 && self.damaged == 0
    }
}

fn fill(memory: DmaMemory, word: u64) {
    for at in (0..memory.len()).step_by(8) {
        memory.write_u64(at, word).unwrap();
    }
}

fn says(memory: DmaMemory, word: u64) -> bool {
    (0..memory.len()).step_by(8).all(|at| memory.read_u64(at).unwrap() == word)
}

enum Held<'d> {
    Read(Mapped<'d, Page, ToDevice>),
    Write(Mapped<'d, Page, FromDevice>),
}

/// An owner of pages who maps, revokes and unmaps at random, while a rogue does what it likes.
pub(super) struct Game<'d> {
    domain: &'d Domain,
    free: Vec<Page>,
    mapped: Vec<Held<'d>>,
    revoked: Vec<(bool, Revoked<'d, Page>)>,
    seen: Arc<Seen>,
    random: Random,
    damaged: u64,
    turn: usize,
}

const PAGES: usize = 24;

impl<'d> Game<'d> {
    fn new(domain: &'d Domain, arena: &Arc<Arena>, seed: u64) -> Self {
        let free: Vec<Page> = (0..PAGES).map(|page| arena.page(page)).collect();
        free.iter().for_each(|page| fill(page.memory(), SECRET | page.first as u64));
        Self {
            domain,
            free,
            mapped: Vec::new(),
            revoked: Vec::new(),
            seen: Arc::default(),
            random: Random(seed),
            damaged: 0,
            turn: 0,
        }
    }

    fn play(&mut self) {
        match self.random.below(8) {
            0..=3 => self.map(),
            4 => self.take().into_iter().for_each(|held| self.unmap(held)),
            5 => self.take().into_iter().for_each(|held| self.revoke(held)),
            6 => self.revoke_all(),
            _ => {}
        }
        for (read, held) in std::mem::take(&mut self.revoked) {
            match held.poll() {
                Ok(page) => self.quiesced(page, read),
                Err(held) => self.revoked.push((read, held)),
            }
        }
    }

    fn map(&mut self) {
        if self.free.is_empty() {
            return;
        }
        let page = self.free.swap_remove(self.random.index(self.free.len()));
        let (number, memory) = (page.first as u64, page.memory());
        // It was the owner's since it was quiesced: nobody else may have touched it.
        self.damaged += u64::from(!says(memory, SECRET | number));
        let read = self.random.below(2) == 0;
        let held = if read {
            fill(memory, PUBLIC | number);
            self.domain.map(page, ToDevice).map(Held::Read)
        } else {
            self.domain.map(page, FromDevice).map(Held::Write)
        }
        .unwrap();
        let iova = match &held {
            Held::Read(mapped) => mapped.iova(),
            Held::Write(mapped) => mapped.iova(),
        };
        self.turn += 1;
        self.seen[self.turn % 32].store(iova.start().raw(), Ordering::Relaxed);
        self.mapped.push(held);
    }

    fn take(&mut self) -> Option<Held<'d>> {
        let n = self.mapped.len();
        (n > 0).then(|| self.mapped.swap_remove(self.random.index(n)))
    }

    fn unmap(&mut self, held: Held<'d>) {
        match held {
            Held::Read(mapped) => self.quiesced(mapped.unmap().unwrap(), true),
            Held::Write(mapped) => self.quiesced(mapped.unmap().unwrap(), false),
        }
    }

    fn revoke(&mut self, held: Held<'d>) {
        self.revoked.push(match held {
            Held::Read(mapped) => (true, mapped.revoke()),
            Held::Write(mapped) => (false, mapped.revoke()),
        });
    }

    fn revoke_all(&mut self) {
        let mut reads = Vec::new();
        for held in std::mem::take(&mut self.mapped) {
            match held {
                Held::Read(mapped) => reads.push(mapped),
                Held::Write(mapped) => self.mapped.push(Held::Write(mapped)),
            }
        }
        let mut revoked = Vec::new();
        self.domain.revoke_all(reads, &mut revoked);
        self.revoked.extend(revoked.into_iter().map(|held| (true, held)));
    }

    /// The page is the owner's again: from here on no device reaches it.
    fn quiesced(&mut self, page: Page, read: bool) {
        let number = page.first as u64;
        self.damaged += u64::from(read && !says(page.memory(), PUBLIC | number));
        fill(page.memory(), SECRET | number);
        self.free.push(page);
    }

    fn end(mut self) -> u64 {
        while let Some(held) = self.take() {
            self.unmap(held);
        }
        for (read, held) in std::mem::take(&mut self.revoked) {
            let page = held.wait().unwrap();
            self.quiesced(page, read);
        }
        self.damaged
    }

    fn check_free(&mut self) {
        let bad = |page: &&Page| !says(page.memory(), SECRET | page.first as u64);
        self.damaged += self.free.iter().filter(bad).count() as u64;
    }
}

/// What a known-bad variant calls in its gap, so that the device gets its turn there.
pub(super) type Gap = Arc<Mutex<Option<Box<dyn FnMut() + Send>>>>;

/// Owner and rogue take turns in one thread: the same every time.
pub(super) fn take_turns(domain: &Domain, iommu: &SoftIommu, gap: &Gap, turns: usize) -> Verdict {
    let arena = Arena::new(PAGES);
    // SAFETY: the arena lives until it is expelled below.
    unsafe { domain.admit(arena.memory()) }.unwrap();
    let mut game = Game::new(domain, &arena, 0x1234_5678_9abc_def1);
    let rogue = Rogue {
        port: iommu.port(),
        seen: Arc::clone(&game.seen),
        random: Random(0xfeed_beef),
        landed: 0,
        leaks: 0,
    };
    let rogue = Arc::new(Mutex::new(rogue));
    let in_gap = Arc::clone(&rogue);
    *gap.lock().unwrap() = Some(Box::new(move || in_gap.lock().unwrap().steps(64)));
    for _ in 0..turns {
        game.play();
        rogue.lock().unwrap().steps(16);
    }
    let damaged = game.end();
    domain.expel(arena.memory());
    let rogue = rogue.lock().unwrap();
    Verdict { landed: rogue.landed, leaks: rogue.leaks, damaged }
}

/// Owner and rogues run at the same time, for a number of the owner's turns at least, and until each rogue has landed
/// a few hundred times (on a busy machine it may come late; the verdict says if it never came).
pub(super) fn at_once(domain: &Domain, iommu: &SoftIommu, rogues: u64, turns: usize) -> Verdict {
    let arena = Arena::new(PAGES);
    // SAFETY: the arena lives until it is expelled below.
    unsafe { domain.admit(arena.memory()) }.unwrap();
    let mut game = Game::new(domain, &arena, 0x9e37_79b9_7f4a_7c15);
    let (stop, busy) = (AtomicBool::new(false), AtomicU64::new(0));
    let verdict = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=rogues)
            .map(|seed| {
                let (port, seen) = (iommu.port(), Arc::clone(&game.seen));
                let mut rogue = Rogue { port, seen, random: Random(seed * 77), landed: 0, leaks: 0 };
                let (stop, busy) = (&stop, &busy);
                scope.spawn(move || {
                    let mut idle = true;
                    while !stop.load(Ordering::Relaxed) {
                        rogue.steps(64);
                        if idle && rogue.landed > 300 {
                            idle = false;
                            busy.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    (rogue.landed, rogue.leaks)
                })
            })
            .collect();
        let start = Instant::now();
        let waiting = || busy.load(Ordering::Relaxed) < rogues && start.elapsed() < Duration::from_secs(20);
        for turn in 0.. {
            if turn >= turns && !waiting() {
                break;
            }
            game.play();
            // The rogues' turn, while there is something to be reached: they may have no other processor.
            if turn >= turns && !game.mapped.is_empty() {
                std::thread::yield_now();
            }
            if turn % 64 == 0 {
                game.check_free();
            }
        }
        let damaged = game.end();
        stop.store(true, Ordering::Relaxed);
        let mut verdict = Verdict { damaged, ..Verdict::default() };
        for thread in threads {
            let (landed, leaks) = thread.join().unwrap();
            verdict.landed += landed;
            verdict.leaks += leaks;
        }
        verdict
    });
    domain.expel(arena.memory());
    verdict
}
