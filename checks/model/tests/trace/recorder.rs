//! The real stack, with a table format and a queue that record what is done.

use pinfold_core::access::{Access, FromDevice};
use pinfold_core::addr::{Iova, IovaRange, PhysAddr, PhysRange};
use pinfold_core::domain::{
    Backend, BackendError, Domain, DomainId, Generation, Generations, Mapping, PhysExtent,
    PhysTranslator, Pinned, TableBackend,
};
use pinfold_core::invalidate::{
    Descriptor, FlushCosts, InvalidationQueue, QueueError, Scope, Ticket, WaitLimit,
};
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{Entry, Format, Table, TablePage, TablePages, VtdSecondStage};
use pinfold_model::Mistake;
use pinfold_model::state::{BUFFERS, Flushes, WINDOWS, add, all_of, leaf_of};
use std::cell::{RefCell, UnsafeCell};
use std::collections::{BTreeSet, VecDeque};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const PAGE: u64 = 4096;
const WINDOW: u64 = 2 << 20;

/// The visible effect of a step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Event {
    /// A table page is linked below a window.
    Link(u8),
    /// A leaf is written: a buffer at an address.
    Leaf(u8, u8),
    /// A leaf is cleared.
    Clear(u8),
    /// A window's table page is retired.
    Retire(u8),
    /// It is free.
    Reclaim(u8),
    /// The queue gets a batch: the flushes of the IOTLB before its fence, and behind it those of the
    /// device's TLB.
    Submit { iotlb: Flushes, device: Flushes },
    /// The unit has carried out the oldest batch.
    Carried,
    /// The unit has aborted what is in flight.
    Aborted,
    /// The program has the buffer.
    Returned(u8),
}

/// The state of the recording, and its events.
#[derive(Default)]
struct Recording {
    on: bool,
    /// The addresses of the table pages of level 2 and 1.
    level_2: BTreeSet<u64>,
    level_1: BTreeSet<u64>,
    /// The window of each page of level 1.
    homes: Vec<(u64, u8)>,
    /// The first I/O virtual address of each window.
    windows: Vec<u64>,
    events: Vec<Event>,
}

thread_local! {
    static RECORDING: RefCell<Recording> = RefCell::default();
    static ROOT: RefCell<u64> = const { RefCell::new(0) };
}

pub fn record(event: Event) {
    RECORDING.with_borrow_mut(|recording| {
        if recording.on {
            recording.events.push(event);
        }
    });
}

/// Returns what has been recorded.
pub fn taken() -> Vec<Event> {
    RECORDING.with_borrow_mut(|recording| std::mem::take(&mut recording.events))
}

impl Recording {
    fn written(&mut self, at: u64, value: u64) {
        let page = at & !(PAGE - 1);
        let parse = |level| VtdSecondStage::parse(value, level);
        if page == ROOT.with_borrow(|root| *root) {
            if let Entry::Link(child) = parse(3) {
                self.level_2.insert(child.raw());
            }
        } else if self.level_2.contains(&page) {
            let index = (at - page) / 8;
            let window = self.windows.iter().zip(0..).find(|(start, _)| **start / WINDOW == index);
            let window = window.map(|(_, number)| number);
            let entry = parse(2);
            if let Entry::Link(child) = entry {
                self.level_1.insert(child.raw());
                self.homes.retain(|(page, _)| *page != child.raw());
                self.homes.extend(window.map(|window| (child.raw(), window)));
            }
            if let (true, Some(window)) = (self.on, window) {
                self.events.push(match entry {
                    Entry::Link(_) => Event::Link(window),
                    Entry::Retired(_) => Event::Retire(window),
                    _ => Event::Reclaim(window),
                });
            }
        } else if let Some((_, window)) = self.homes.iter().find(|(home, _)| *home == page)
            && self.on
        {
            let window = *window;
            self.events.push(match parse(1) {
                Entry::Leaf { phys, .. } => Event::Leaf(window, Memory::number(phys.raw())),
                _ => Event::Clear(window),
            });
        }
    }

    fn window(&self, iova: Iova) -> Option<u8> {
        let at = |start: &u64| *start / WINDOW == iova.raw() / WINDOW;
        self.windows.iter().zip(0..).find(|(start, _)| at(start)).map(|(_, number)| number)
    }
}

/// VT-d's second stage, recorded. Entries of pages that are linked nowhere are not of interest.
pub struct Recorded;

impl Format for Recorded {
    const NAME: &'static str = "recorded";
    const MIN_LEVELS: u8 = 3;
    const MAX_LEVELS: u8 = 3;
    const PHYS_BITS: u32 = 52;
    fn leaf(phys: PhysAddr, access: Access, level: u8) -> u64 {
        VtdSecondStage::leaf(phys, access, level)
    }
    fn link(page: PhysAddr) -> u64 {
        VtdSecondStage::link(page)
    }
    fn retired(page: PhysAddr) -> u64 {
        VtdSecondStage::retired(page)
    }
    fn parse(entry: u64, level: u8) -> Entry {
        VtdSecondStage::parse(entry, level)
    }
    fn write_back(entries: &[AtomicU64]) {
        // A page that is filled is linked only afterwards.
        if entries.len() == 512 {
            return;
        }
        RECORDING.with_borrow_mut(|recording| {
            for entry in entries {
                let at = std::ptr::from_ref(entry).addr() as u64;
                recording.written(at, entry.load(Ordering::Relaxed));
            }
        });
    }
}

/// A queue of two batches that the test has carried out.
#[derive(Default)]
pub struct Queue {
    /// The tickets of the batches in flight.
    in_flight: Mutex<VecDeque<u64>>,
    completed: AtomicU64,
    aborted: AtomicBool,
    /// Whether a batch is carried out whenever a thread waits.
    carries: AtomicBool,
    /// A mistake of the stack that is made here: in what it submits, or in what it believes.
    mistake: Option<Mistake>,
    generations: Generations,
}

impl Queue {
    fn in_flight(&self) -> std::sync::MutexGuard<'_, VecDeque<u64>> {
        self.in_flight.lock().expect("no thread has panicked")
    }

    /// Carries out the oldest batch, if there is one.
    pub fn carry(&self) {
        if let Some(ticket) = self.in_flight().pop_front() {
            record(Event::Carried);
            self.completed.store(ticket, Ordering::Relaxed);
        }
    }

    /// Aborts what is in flight, if anything is.
    pub fn abort(&self) {
        let Some(last) = self.in_flight().drain(..).next_back() else { return };
        record(Event::Aborted);
        if self.mistake == Some(Mistake::AbortIsCompletion) {
            self.completed.store(last, Ordering::Relaxed);
        } else {
            self.aborted.store(true, Ordering::Relaxed);
        }
    }

    /// Carries a batch out whenever a thread waits, or no longer.
    pub fn carry_for_waits(&self, carries: bool) {
        self.carries.store(carries, Ordering::Relaxed);
    }
}

/// The queue, which the test keeps a handle to.
#[derive(Clone, Default)]
pub struct Shared(pub Arc<Queue>);

impl Shared {
    fn new(mistake: Option<Mistake>) -> Self {
        Self(Arc::new(Queue { mistake, ..Queue::default() }))
    }
}

/// The bits of the windows that a flush concerns, each by `bit`.
fn windows_of(scope: Scope, bit: impl Fn(u8) -> Flushes) -> Flushes {
    let Some(range) = scope.range() else {
        return (0..WINDOWS as u8).map(bit).fold(0, |all, one| all | one);
    };
    RECORDING.with_borrow(|recording| recording.window(range.start())).map_or(0, bit)
}

impl InvalidationQueue for Shared {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        if self.0.aborted.load(Ordering::Relaxed) {
            return Err(QueueError::Full);
        }
        let mut descriptors = descriptors.to_vec();
        match self.0.mistake {
            Some(Mistake::NoFlush) => descriptors.clear(),
            Some(Mistake::DeviceTlbFirst) => descriptors.reverse(),
            _ => {}
        }
        let leaves = self.0.mistake == Some(Mistake::LeafFlushForTablePage);
        let (mut iotlb, mut device, mut behind_fence) = (0, 0, false);
        for descriptor in descriptors {
            match descriptor {
                Descriptor::Fence => behind_fence = true,
                Descriptor::Iotlb { scope, leaf_only } if !behind_fence => {
                    let of_leaf = leaf_only || leaves;
                    let bit = |window| if of_leaf { leaf_of(window) } else { all_of(window) };
                    add(&mut iotlb, windows_of(scope, bit));
                }
                Descriptor::DeviceTlb(scope) if behind_fence => {
                    device |= windows_of(scope, leaf_of);
                }
                // On the wrong side of the fence.
                Descriptor::Iotlb { .. } | Descriptor::DeviceTlb(_) => {}
            }
        }
        record(Event::Submit { iotlb, device });
        let ticket = wait.expect("a batch in one part");
        self.0.in_flight().push_back(ticket.0);
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket(self.0.completed.load(Ordering::Relaxed))
    }
    fn limit(&self) -> WaitLimit {
        let polls = if self.0.carries.load(Ordering::Relaxed) { 100 } else { 1 };
        WaitLimit { time_ns: u64::MAX, polls }
    }
    fn relax(&self, _: u64) {
        if self.0.carries.load(Ordering::Relaxed) {
            self.0.carry();
        }
    }
    fn wake(&self, _: Option<Ticket>, _: u64, _: &std::task::Waker) {}
    fn queue_depth(&self) -> u64 {
        2
    }
    fn costs(&self) -> FlushCosts {
        FlushCosts::EXACT
    }
    fn has_device_tlbs(&self) -> bool {
        true
    }
    fn has_aborted(&self) -> bool {
        self.0.aborted.load(Ordering::Relaxed)
    }
    fn restart(&self) {
        self.0.aborted.store(false, Ordering::Relaxed);
    }
}

impl PhysTranslator for Shared {
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        self.0.generations.advance();
        Ok(())
    }
    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        if !Memory::page(addr as u64).is_multiple_of(2) {
            return Err(BackendError::NotRegistered { addr, len });
        }
        let phys = PhysRange::new(PhysAddr::new(addr as u64), PAGE);
        Ok(PhysExtent::new(addr, phys.expect("an address")))
    }
    fn generation(&self) -> Generation {
        self.0.generations.current()
    }
}

/// Pages, of which every second one is a payload, and the one behind it is not registered.
const PAGES: usize = 2 * (BUFFERS + 1);

#[repr(C, align(4096))]
struct Pages(UnsafeCell<[u8; PAGES * 4096]>);
// SAFETY: nothing accesses it.
unsafe impl Sync for Pages {}

/// The memory of the payloads, and of what stays mapped: never accessed.
static MEMORY: Pages = Pages(UnsafeCell::new([0; PAGES * 4096]));

/// A payload, whose drop is recorded: the program then has it.
pub struct Memory(pub u8);

impl Memory {
    fn page(addr: u64) -> u64 {
        (addr - MEMORY.0.get().addr() as u64) / PAGE
    }
    fn number(phys: u64) -> u8 {
        (Self::page(phys) / 2) as u8
    }
    fn part(&self, pages: usize) -> DmaMemory<'static> {
        let page = NonNull::from(&MEMORY.0).cast();
        // SAFETY: static memory, which nothing accesses.
        let all = unsafe { DmaMemory::from_raw(page, PAGES * 4096) };
        all.part(usize::from(self.0) * 2 * 4096, pages * 4096).expect("pages of it")
    }
    pub fn pages(&self) -> DmaMemory<'static> {
        self.part(1)
    }
    /// The payload, and a page that is not registered: a map of both fails halfway.
    pub fn and_unregistered(&self) -> DmaMemory<'static> {
        self.part(2)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        record(Event::Returned(self.0));
    }
}

// SAFETY: static memory, which nothing else uses.
unsafe impl Pinned for Memory {
    fn memory(&self) -> DmaMemory<'_> {
        self.pages()
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// A page of level 3 and one of level 2, which stay, and of level 1 one that stays and two more.
fn backend(queue: &Shared) -> TableBackend<Recorded, Shared> {
    let pages: Vec<TablePage> = (0..5).map(|_| TablePage::filled(0)).collect();
    let pages: &'static [TablePage] = pages.leak();
    let phys = PhysAddr::new(pages.as_ptr().addr() as u64);
    // SAFETY: no hardware walks the table, and the pages are nobody else's.
    let pages = unsafe { TablePages::new(pages, phys) }.expect("pages");
    let table = Table::<Recorded>::new(pages, 3).expect("a table");
    ROOT.with_borrow_mut(|root| *root = table.root().raw());
    RECORDING.with_borrow_mut(|recording| *recording = Recording::default());
    TableBackend::new("recorded", queue.clone(), table)
}

/// Records from here on. The windows are those of the addresses.
fn begin(windows: impl IntoIterator<Item = u64>) {
    RECORDING.with_borrow_mut(|recording| {
        recording.windows = windows.into_iter().collect();
        assert_eq!(recording.windows.len(), WINDOWS);
        recording.on = true;
    });
}

/// A domain that has one free page in each of two windows, and the mapping that keeps its table of
/// level 2.
pub fn domain(mistake: Option<Mistake>) -> (Domain, Shared, Mapping<Memory, FromDevice>) {
    let queue = Shared::new(mistake);
    let domain = Domain::new(Arc::new(backend(&queue)), IovaSpace::new(39).expect("39 bits"));
    let reserve = |from: u64, to: u64| {
        let range = IovaRange::new(Iova::new(from), to - from).expect("a range");
        let _ = domain.reserve_range(range);
    };
    let free = [1, 2, 3].map(|window| window * WINDOW);
    reserve(PAGE, free[0]);
    reserve(free[0] + PAGE, free[1]);
    reserve(free[1] + PAGE, free[2]);
    reserve(free[2] + PAGE, 1 << 39);
    let kept = domain.map(Memory(BUFFERS as u8), FromDevice).expect("a map");
    let taken = kept.iova().start().raw();
    begin(free.into_iter().filter(|start| *start != taken));
    (domain, queue, kept)
}

/// A backend with two windows, and their addresses.
pub fn pinned(
    mistake: Option<Mistake>,
) -> (TableBackend<Recorded, Shared>, Shared, [IovaRange; WINDOWS]) {
    let queue = Shared::new(mistake);
    let backend = backend(&queue);
    let range = |window: u64| IovaRange::new(Iova::new(window * WINDOW), PAGE).expect("a range");
    let access = Access::READ | Access::WRITE;
    backend.map(range(3), Memory(BUFFERS as u8).pages(), access, None).expect("a map");
    begin([WINDOW, 2 * WINDOW]);
    (backend, queue, [range(1), range(2)])
}

/// The page of a range and the next one.
pub fn two_pages(range: IovaRange) -> IovaRange {
    IovaRange::new(range.start(), 2 * PAGE).expect("a range")
}

/// The window of 2 MiB around an address.
pub fn window_of(range: IovaRange) -> IovaRange {
    IovaRange::new(Iova::new(range.start().raw() & !(WINDOW - 1)), WINDOW).expect("a range")
}
