//! Without memory for what follows a caller's number, a call fails and the process goes on.
#![expect(clippy::unwrap_used, reason = "tests")]

use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::dma_pool::{AllocError, ChunkSource, DmaPool, RawBlock, SourceError};
use pinfold_core::frame::{Frame, FrameError, Order, Zone};
use pinfold_core::iova::{IovaError, IovaSpace};
use pinfold_core::page_pool::{Config, CreateError, PagePool, RawPage, RevocableSource};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;

struct Limited;

// Of the thread, since the one that runs the tests allocates at any time.
thread_local! {
    /// Larger ones fail.
    static LARGEST: Cell<usize> = const { Cell::new(usize::MAX) };
    /// The number of further allocations that succeed, of those that are not small.
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
    /// Smaller ones, of fixed sizes, succeed.
    static SMALL: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded to the system's allocator, or fails.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let left = if layout.size() < SMALL.get() { u64::MAX } else { LEFT.get() };
        let fails = layout.size() > LARGEST.get() || left == 0;
        if !fails && left != u64::MAX {
            LEFT.set(left - 1);
        }
        // SAFETY: the caller upholds the same contract.
        if fails { std::ptr::null_mut() } else { unsafe { System.alloc(layout) } }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Calls `f` while no more than `largest` bytes can be allocated at once, and `left` times.
fn with<R>(largest: usize, left: u64, f: impl FnOnce() -> R) -> R {
    LARGEST.set(largest);
    LEFT.set(left);
    let result = f();
    LARGEST.set(usize::MAX);
    LEFT.set(u64::MAX);
    result
}

/// The same where no allocation of less than `small` bytes fails or counts.
fn with_small<R>(small: usize, left: u64, f: impl FnOnce() -> R) -> R {
    SMALL.set(small);
    let result = with(usize::MAX, left, f);
    SMALL.set(0);
    result
}

/// Memory of which nothing is touched, and its frames.
struct Heap {
    memory: NonNull<u8>,
    zone: Zone,
}

const HEAP: usize = 512 << 20;

impl Heap {
    const LAYOUT: Layout = match Layout::from_size_align(HEAP, 2 << 20) {
        Ok(layout) => layout,
        Err(_) => panic!("a multiple of a power of two"),
    };

    fn new() -> Arc<Self> {
        // SAFETY: the size is not 0.
        let memory = NonNull::new(unsafe { System.alloc(Self::LAYOUT) }).unwrap();
        Arc::new(Self { memory, zone: Zone::new(u32::try_from(HEAP / 4096).unwrap()).unwrap() })
    }

    /// Returns the frames that pools have.
    fn taken(&self) -> u64 {
        self.zone.stats().in_use
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and its pools have ended.
        unsafe { System.dealloc(self.memory.as_ptr(), Self::LAYOUT) };
    }
}

// SAFETY: an address, which is freed by the last owner, and a zone, which is both.
unsafe impl Send for Heap {}
// SAFETY: as for `Send`.
unsafe impl Sync for Heap {}

// SAFETY: one allocation as long as the heap; runs are aligned and disjoint, as the zone's are.
unsafe impl ChunkSource for Heap {
    fn span(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.memory, HEAP)
    }
    fn iova(&self) -> Iova {
        Iova::new(0)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        Ok(self.zone.alloc(order)?)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        self.zone.free(frame, order).unwrap();
    }
}

// SAFETY: `hide` refuses, by default.
unsafe impl RevocableSource for Heap {}

#[test]
fn a_page_pool_is_refused_without_memory() {
    let (heap, ring) = (Heap::new(), 1 << 12);
    let new = || PagePool::new(heap.clone(), "pages", Config { ring, ..Config::default() });
    // The ring, and the table of the span: 8 bytes for each 2 MiB. The state itself is smaller.
    for (left, needed) in [(0, HEAP >> 18), (1, 8 << 12)] {
        let refused = with_small(1500, left, || new().err());
        let Some(CreateError::NoMemory { bytes }) = refused else { panic!("{left}: {refused:?}") };
        assert_eq!(bytes, needed, "{left}");
    }
    drop(with_small(1500, 2, new).unwrap());
}

#[test]
fn a_page_pool_grows_by_nothing_without_memory() {
    let heap = Heap::new();
    let mut pool = PagePool::new(heap.clone(), "pages", Config { ring: 2, ..Config::default() });
    let pool = pool.as_mut().unwrap();
    let mut slots: Vec<Option<RawPage>> = vec![None; 1 << 14];
    let mut refused = 0;
    for left in 0.. {
        let full = with(usize::MAX, left, || pool.fill_raw(&mut slots));
        // A chunk that the pool has no room for is the source's again.
        assert_eq!(heap.taken() * 4096, pool.stats().bytes, "{left}");
        if full == slots.len() {
            break;
        }
        refused += 1;
        assert_eq!(pool.stats().in_use, full as u64);
        let error = with(usize::MAX, 0, || pool.alloc_raw());
        assert!(matches!(error, Err(AllocError::NoMemory { size: 4096, .. })), "{error:?}");
    }
    assert!(refused > 3, "{refused}");
    // Room for the return of each page was made with its chunk.
    let remote = pool.remote();
    with(usize::MAX, 0, || {
        for page in slots.iter().flatten() {
            remote.free_raw(*page).unwrap();
        }
    });
    assert_eq!(pool.stats().in_use, 0);
}

#[test]
fn a_pool_shrinks_and_is_counted_without_memory() {
    let heap = Heap::new();
    for left in 0..4 {
        let pool = DmaPool::builder("blocks").block(64 << 10).build(&heap).unwrap();
        let blocks: Vec<RawBlock> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
        let counted = |left| {
            let stats = with_small(4096, left, || pool.stats());
            (stats.blocks, stats.in_use, stats.chunks, stats.free_chunks)
        };
        assert!(counted(u64::MAX).2 > 200, "a list of 200 chunks is larger than 4 KiB");
        assert_eq!(counted(0), counted(u64::MAX));
        with_small(4096, 0, || {
            for block in &blocks {
                pool.free_raw(*block).unwrap();
            }
        });
        // As many chunks at a time as there is memory for.
        let mut calls = 0;
        while with_small(4096, left, || pool.shrink()) > 0 {
            calls += 1;
        }
        assert!(calls > 0 && (left > 0 || calls > 1), "{left}: {calls}");
        assert_eq!((counted(0).2, heap.taken()), (0, 0), "{left}");
        let mut visited = 0;
        let again: Vec<RawBlock> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
        with_small(4096, 0, || pool.for_each_block(|_, _| visited += 1));
        assert_eq!(visited, again.len());
        for block in again {
            pool.free_raw(block).unwrap();
        }
    }
}

#[test]
fn what_follows_a_callers_number_is_refused_without_memory() {
    // Each allocation of a zone in turn: two of the map, four of the hints, owners' slots, and three
    // of the limits. The last is the zone itself, of a fixed size.
    for left in 0..10 {
        let refused = with(usize::MAX, left, || Zone::new(1 << 22).err());
        assert!(
            matches!(refused, Some(FrameError::NoMemory { bytes }) if bytes > 0),
            "{left}: {refused:?}"
        );
    }
    with(usize::MAX, 11, || Zone::new(1 << 22)).unwrap();
    let bytes = with(1 << 20, u64::MAX, || Zone::new(Zone::MAX_FRAMES).err());
    let bytes = bytes.map(|error| error.to_string()).unwrap();
    assert!(bytes.starts_with("no memory for 33554496 bytes"), "{bytes}");

    // Lists of frames, which are scattered, so that each takes a place.
    let zone = Zone::new(1 << 15).unwrap();
    let run = zone.alloc_run(1 << 15, 1).unwrap();
    for index in (0..1 << 15).step_by(64) {
        zone.free_run(pinfold_core::frame::Frame::new(run.index() + index).unwrap(), 1).unwrap();
    }
    let mut local = zone.local();
    let mut slots = vec![None; 400];
    let before = zone.stats();
    let got = with(usize::MAX, 0, || local.fill_all(&mut slots));
    assert!(matches!(got, Err(FrameError::NoMemory { .. })), "{got:?}");
    assert!(slots.iter().all(Option::is_none));
    let after = zone.stats();
    assert_eq!((after.in_use, after.held), (before.in_use, before.held));
    let list = with(usize::MAX, 0, || local.take_list(400));
    assert_eq!(list.len(), 12, "as many as need no memory");
    drop(list);
    assert_eq!(local.fill_all(&mut slots), Ok(()));
    assert!(local.alloc(Order::PAGE).is_ok());

    // Address spaces: their nodes and maps.
    for left in 0..2 {
        let refused = with(usize::MAX, left, || IovaSpace::new(48).err());
        assert!(matches!(refused, Some(IovaError::NoMemory { .. })), "{left}: {refused:?}");
    }
    let space = IovaSpace::new(48).unwrap();
    let range = IovaRange::new(Iova::new(1 << 40), 4096).unwrap();
    let refused = with(usize::MAX, 0, || space.alloc_at(range));
    assert!(refused.is_ok() || matches!(refused, Err(IovaError::NoMemory { .. })), "{refused:?}");
}
