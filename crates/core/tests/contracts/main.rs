//! The open traits of the core, implemented from their documentation alone: a backend that holds the
//! domain to every sentence of `Backend`'s page, and keeps what was mapped by its first address; the
//! one of the example `own_backend`, in static memory; a format, a queue and table memory of one's
//! own under a `TableBackend`; the sources of pools and of list pages; and a `Payload`.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test")]

mod lists;
mod payload;
mod source;
/// The backend of the example, which is `no_std`.
#[path = "../../examples/own_backend/unit.rs"]
mod unit;

use pinfold_core::access::{Access, Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::{Iova, IovaRange, PhysAddr, PhysRange, Segment};
use pinfold_core::domain::{
    Backend, BackendError, Domain, DomainId, Generation, Generations, PhysExtent, PhysTranslator,
    Pinned, Properties, Revocation, Revoked, TableBackend, Unrevoked, Wait, WindowToken,
};
use pinfold_core::invalidate::{
    Descriptor, InvalidationQueue, QueueError, Ticket, WaitError, WaitLimit,
};
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{Entry, Format, Table, TableMemory, TablePage, TablePages};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

/// Whole pages from the heap, in one piece or in two.
struct Memory(Vec<NonNull<u8>>, usize);

impl Memory {
    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * 4096, 4096).unwrap()
    }
    fn new(pieces: usize, pages: usize) -> Self {
        // SAFETY: at least one page is asked for.
        let piece = || unsafe { std::alloc::alloc_zeroed(Self::layout(pages)) };
        Self((0..pieces).map(|_| NonNull::new(piece()).unwrap()).collect(), pages)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for piece in &self.0 {
            // SAFETY: from `new`, with this layout.
            unsafe { std::alloc::dealloc(piece.as_ptr(), Self::layout(self.1)) };
        }
    }
}

// SAFETY: the memory is the value's own.
unsafe impl Send for Memory {}
// SAFETY: the pieces are the value's own until its drop, do not move, and nothing refers into them.
unsafe impl Pinned for Memory {
    fn memory(&self) -> DmaMemory<'_> {
        self.piece(0).unwrap()
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
    fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        // SAFETY: as for the trait.
        self.0.get(index).map(|piece| unsafe { DmaMemory::from_raw(*piece, self.1 * 4096) })
    }
}

/// Memory that is mapped, and the access to it.
struct Map {
    range: IovaRange,
    base: NonNull<u8>,
    len: usize,
    access: Access,
}

// SAFETY: an address. The memory is accessed by `Shared::reach` alone, while it is mapped.
unsafe impl Send for Map {}

/// Holds the domain to the page of `Backend`. What was mapped is kept by its first address.
#[derive(Default)]
struct Strict {
    maps: BTreeMap<u64, Map>,
    /// Revoked, and not known to be completed.
    in_flight: Vec<(Ticket, IovaRange)>,
    last: u64,
    completed: u64,
    /// Ranges that were revoked, and maps that they ended.
    revoked: (usize, usize),
    wakers: Vec<(Ticket, Waker)>,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Strict>>);

impl Shared {
    fn complete(&self, up_to: u64) {
        let mut state = self.0.lock().unwrap();
        state.completed = state.completed.max(up_to.min(state.last));
        let done = state.completed;
        state.in_flight.retain(|(ticket, _)| ticket.0 > done);
        let due = state.wakers.extract_if(.., |(ticket, _)| ticket.0 <= done).collect::<Vec<_>>();
        drop(state);
        due.into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// Has a device access bytes by `access`, if a map with that access has them all.
    fn reach(&self, segment: Segment, access: Access, by: impl FnOnce(DmaMemory<'_>)) -> bool {
        let state = self.0.lock().unwrap();
        let Ok(range) = IovaRange::new(segment.iova, segment.len) else { return false };
        let before = state.maps.range(..=segment.iova.raw()).next_back();
        let map = before.map(|(_, map)| map).filter(|map| map.range.covers(&range));
        let Some(map) = map.filter(|map| map.access.contains(access)) else { return false };
        let offset = usize::try_from(segment.iova.raw() - map.range.start().raw()).unwrap();
        let len = usize::try_from(segment.len).unwrap();
        // SAFETY: mapped, so that the domain holds its owner; the lock is held meanwhile.
        let memory = unsafe { DmaMemory::from_raw(map.base, map.len) };
        by(memory.part(offset, len).unwrap());
        true
    }
}

impl Backend for Shared {
    fn properties(&self) -> Properties {
        Properties::new("strict")
    }
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn map(
        &self,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        let mut state = self.0.lock().unwrap();
        assert_eq!(iova.len(), memory.len() as u64, "as long as the memory");
        assert!(iova.is_aligned(4096) && memory.addr().is_multiple_of(4096), "whole pages");
        assert!(
            !state.maps.values().any(|map| map.range.overlaps(&iova)),
            "nothing is mapped there"
        );
        let held = state.in_flight.iter().any(|(_, range)| range.overlaps(&iova));
        assert!(!held, "the flush of what was mapped there has completed");
        if memory.len() == 7 * 4096 {
            return Err(BackendError::Refused { iova, reason: "seven pages are unlucky".into() });
        }
        let (base, len) = (memory.as_ptr(), memory.len());
        state.maps.insert(iova.start().raw(), Map { range: iova, base, len, access });
        Ok(())
    }
    fn revoke<'w>(
        &self,
        first: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        let mut state = self.0.lock().unwrap();
        let ticket = Ticket(state.last + 1);
        for Revocation { range, window } in std::iter::once(first).chain(rest) {
            assert!(window.is_none(), "this backend has no windows");
            let inside = range.start().raw()..range.end().raw();
            let maps: Vec<_> = state.maps.range(inside).map(|(_, map)| map.range).collect();
            let bytes: u64 = maps.iter().map(IovaRange::len).sum();
            assert!(bytes == range.len() && maps.iter().all(|map| range.covers(map)), "whole maps");
            for map in &maps {
                state.maps.remove(&map.start().raw());
            }
            state.in_flight.push((ticket, range));
            state.revoked.0 += 1;
            state.revoked.1 += maps.len();
        }
        state.last = ticket.0;
        Ok(ticket)
    }
    fn wait(&self, ticket: Ticket, wait: Wait<'_>) -> Poll<Result<(), BackendError>> {
        // A caller that has no limit waits until the deadline, and one with a limit for less.
        if let Wait::ToDeadline = wait {
            self.complete(ticket.0);
        }
        let mut state = self.0.lock().unwrap();
        let last = Ticket(state.last);
        if ticket.0 <= state.completed {
            return Poll::Ready(Ok(()));
        }
        if ticket > last {
            return Poll::Ready(Err(WaitError::Unknown { ticket, last }.into()));
        }
        match wait {
            Wait::Not => Poll::Pending,
            Wait::Wake(_, waker) => {
                state.wakers.push((ticket, waker.clone()));
                Poll::Pending
            }
            Wait::ToDeadline | Wait::For(_) => {
                Poll::Ready(Err(WaitError::TimedOut { ticket, waited_ns: 1, polls: 1 }.into()))
            }
        }
    }
}

/// Pseudo-random numbers (an LCG).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        usize::try_from(self.0 >> 33).unwrap() % end
    }
}

/// Owners and the domain itself, single maps, pieces and batches, refused ones too, ended in every
/// way: the domain keeps what the page says, and the backend neither leaks a map nor misses one.
#[test]
fn a_domain_keeps_what_the_page_of_backend_says() {
    let backend = Shared::default();
    let domain = Domain::new(Arc::new(backend.clone()), IovaSpace::new(39).unwrap());
    let mut random = Random(38);
    let mut owners = [domain.local(), domain.local()];
    let mut mapped: Vec<Unrevoked<Memory>> = Vec::new();
    let mut revoked: Vec<Revoked<Memory>> = Vec::new();
    for round in 0..4_000 {
        let (owner, pages) = (&mut owners[random.below(2)], 1 + random.below(8));
        match random.below(10) {
            0 => mapped.extend(domain.map(Memory::new(1, pages), FromDevice).map(Into::into)),
            1 | 2 => mapped.extend(owner.map(Memory::new(1, pages), ToDevice).map(Into::into)),
            3 => mapped.extend(owner.map(Memory::new(2, pages), Bidirectional).map(Into::into)),
            4 => {
                let many: Vec<_> = (0..12).map(|_| Memory::new(1, 1 + random.below(7))).collect();
                match owner.map_many(many, FromDevice) {
                    Ok(many) => mapped.extend(many.into_iter().map(Unrevoked::from)),
                    Err(refused) => assert_eq!(refused.payloads.len(), 12),
                }
            }
            5 => {
                let from = random.below(mapped.len() + 1);
                owner.revoke_many(mapped.drain(from..), &mut revoked);
            }
            6 if !mapped.is_empty() => {
                let one = mapped.swap_remove(random.below(mapped.len()));
                drop(if round % 2 == 0 { owner.unmap(one) } else { domain.unmap(one) }.unwrap());
            }
            7 if !mapped.is_empty() => {
                let one = mapped.swap_remove(random.below(mapped.len())).revoke();
                if round % 2 == 0 { drop(one.quiesced()) } else { revoked.push(one) }
            }
            8 if !revoked.is_empty() => {
                let limit = WaitLimit { time_ns: 1, polls: 1 };
                drop(revoked.swap_remove(random.below(revoked.len())).wait_for(limit));
            }
            _ => {
                let last = backend.0.lock().unwrap().last;
                backend.complete(last - (random.below(4) as u64).min(last));
            }
        }
    }
    drop((mapped, revoked, owners));
    backend.complete(u64::MAX);
    let state = backend.0.lock().unwrap();
    assert!(state.maps.is_empty() && state.in_flight.is_empty());
    let (ranges, maps) = state.revoked;
    assert!(maps > ranges + 1_000, "{ranges} ranges for {maps} maps: they are joined");
    drop(state);
    let stats = domain.stats();
    assert_eq!((stats.live, stats.deferred, stats.quarantined), (0, 0, 0));
}

/// A refusal of a backend of one's own speaks its words, and gives the payload back.
#[test]
fn a_backend_refuses_in_its_own_words() {
    let domain = Domain::new(Arc::new(Shared::default()), IovaSpace::new(39).unwrap());
    let refused = domain.map(Memory::new(1, 7), FromDevice).unwrap_err();
    assert!(refused.payload.is_some() && !refused.error.stays_reachable());
    assert!(refused.to_string().contains("seven pages are unlucky"), "{refused}");
    assert!(refused.to_string().starts_with("cannot map "), "{refused}");
}

/// Bit 63: present; 62: a link; 61 and 60: the access; 59: retired. Below: the address.
struct Own;

impl Format for Own {
    const NAME: &'static str = "own";
    const MIN_LEVELS: u8 = 3;
    const MAX_LEVELS: u8 = 4;
    const PHYS_BITS: u32 = 48;
    fn leaf(phys: PhysAddr, access: Access, _: u8) -> u64 {
        let read = u64::from(access.contains(Access::READ)) << 61;
        let write = u64::from(access.contains(Access::WRITE)) << 60;
        1 << 63 | read | write | phys.raw()
    }
    fn link(page: PhysAddr) -> u64 {
        1 << 63 | 1 << 62 | page.raw()
    }
    fn retired(page: PhysAddr) -> u64 {
        1 << 59 | page.raw()
    }
    fn parse(entry: u64, level: u8) -> Entry {
        let phys = PhysAddr::new(entry & ((1 << 48) - 1) & !0xfff);
        match (entry >> 63, entry >> 62 & 1, entry >> 59 & 1) {
            (1, 1, _) if level > 1 => Entry::Link(phys),
            (1, 0, _) => {
                let read = if entry >> 61 & 1 == 1 { Access::READ } else { Access::empty() };
                let write = if entry >> 60 & 1 == 1 { Access::WRITE } else { Access::empty() };
                Entry::Leaf { phys, access: read | write }
            }
            (0, _, 1) if level > 1 => Entry::Retired(phys),
            _ => Entry::Empty,
        }
    }
}

/// Table pages from the heap, one at a time.
struct Heap;

impl Heap {
    fn pages(pages: u32) -> TablePages {
        let pages: Vec<_> = (0..pages).map(|_| TablePage::filled(u64::MAX)).collect();
        let pages: &'static [TablePage] = pages.leak();
        let phys = PhysAddr::new(pages.as_ptr().addr() as u64);
        // SAFETY: no hardware walks the table, and the pages are nobody else's.
        unsafe { TablePages::new(pages, phys) }.unwrap()
    }
}

impl TableMemory for Heap {
    fn grow(&self, pages: u32) -> Option<TablePages> {
        Some(Self::pages(pages.min(1)))
    }
    fn advice(&self) -> &'static str {
        "add memory"
    }
}

/// A unit whose flushes complete at the next look: it publishes the last wait that it was given.
#[derive(Default)]
struct Queue {
    submitted: AtomicU64,
    completed: AtomicU64,
    descriptors: AtomicU64,
    generations: Generations,
}

impl InvalidationQueue for Queue {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        self.descriptors.fetch_add(descriptors.len() as u64, Ordering::Relaxed);
        if let Some(ticket) = wait {
            assert!(ticket.0 > self.submitted.swap(ticket.0, Ordering::AcqRel), "in order");
        }
        Ok(())
    }
    fn completed(&self) -> Ticket {
        let before = self.completed.swap(self.submitted.load(Ordering::Acquire), Ordering::AcqRel);
        Ticket(before)
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: 1_000 }
    }
}

impl PhysTranslator for Queue {
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        self.generations.advance();
        Ok(())
    }
    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        let phys = PhysRange::new(PhysAddr::new(memory.addr() as u64), memory.len() as u64);
        Ok(PhysExtent::new(memory.addr(), phys.unwrap()))
    }
    fn generation(&self) -> Generation {
        self.generations.current()
    }
}

#[test]
fn a_table_backend_takes_a_format_a_queue_and_memory_of_ones_own() {
    let table = Table::<Own>::new(Heap::pages(1), 3).unwrap().with_memory(Box::new(Heap));
    let backend = TableBackend::new("own", Queue::default(), table);
    let domain = Domain::new(Arc::new(backend), IovaSpace::new(39).unwrap());
    let mut owner = domain.local();
    let (mut random, mut mapped) = (Random(7), Vec::new());
    for _ in 0..500 {
        let pages = 1 + random.below(500);
        mapped.push(owner.map(Memory::new(1, pages), FromDevice).unwrap());
        let runs: Vec<_> = domain.mapped().unwrap().collect();
        for mapping in &mapped {
            let at = |run: &pinfold_core::table::MappedRun| {
                let offset = mapping.iova().start().checked_offset_from(run.iova.start());
                let phys = offset.and_then(|offset| run.phys.checked_add(offset));
                run.iova.covers(&mapping.iova())
                    && phys == Some(PhysAddr::new(mapping.memory().addr() as u64))
            };
            assert!(runs.iter().any(at), "{} of {runs:?}", mapping.iova());
        }
        while mapped.len() > random.below(8) {
            let one = mapped.swap_remove(random.below(mapped.len()));
            drop(owner.unmap(one).unwrap());
        }
    }
    drop(mapped);
    assert_eq!(domain.mapped().unwrap().count(), 0);
    assert_eq!((domain.stats().live, domain.stats().quarantined), (0, 0));
}

#[test]
fn a_unit_in_static_memory_is_mapped_revoked_and_quiesced() {
    let domain = Domain::new(Arc::new(unit::Unit), IovaSpace::new(unit::BITS).unwrap());
    let memory = unit::memory();
    let take = || unit::Page::take().unwrap();
    let early = domain.map(take(), FromDevice).unwrap_err();
    assert!(matches!(early.error, BackendError::NotRegistered { .. }));
    drop(early);
    // SAFETY: the memory is static.
    unsafe { domain.register_memory(memory) }.unwrap();
    // SAFETY: as above.
    let again = unsafe { domain.register_memory(memory) }.unwrap_err();
    assert!(matches!(again, BackendError::AlreadyRegistered { .. }));

    let mut owner = domain.local();
    let mapped = owner.map_many([take(), take()], FromDevice).unwrap();
    let at: Vec<Iova> = mapped.iter().map(|mapping| mapping.iova().start()).collect();
    for (&at, value) in at.iter().zip([5, 6]) {
        assert!(unit::device_writes(at.checked_add(7).unwrap(), value));
    }
    let reader = domain.map(take(), ToDevice).unwrap();
    assert!(!unit::device_writes(reader.iova().start(), 9), "it may read only");
    let [first, second] = [0, 1].map(|n| mapped[n].memory().read_u8(7).unwrap());
    assert_eq!((first, second), (5, 6));

    let mut revoked = Vec::new();
    owner.revoke_many(mapped, &mut revoked); // one range for both
    assert!(revoked.iter().all(Revoked::is_quiesced));
    let pages: Vec<unit::Page> = revoked.into_iter().map(|one| owner.wait(one).unwrap()).collect();
    assert!(at.iter().all(|&at| !unit::device_writes(at, 8)), "nothing reaches what is quiesced");
    assert_eq!(pages.iter().map(|page| page.memory().read_u8(7).unwrap()).sum::<u8>(), 5 + 6);

    // Memory that is unregistered while it is mapped is out of reach.
    let mapping = domain.map(take(), Bidirectional).unwrap();
    let at = mapping.iova().start();
    assert!(unit::device_writes(at, 1));
    domain.unregister_memory(memory).unwrap();
    assert!(!unit::device_writes(at, 2));
    assert!(domain.unregister_memory(memory).is_err());
    drop((mapping, reader, pages));
    assert_eq!((domain.stats().live, domain.stats().quarantined), (0, 0));
}
