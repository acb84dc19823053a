//! [`ChunkSource`], [`RevocableSource`] and [`SyncOps`], which hold pools to every sentence of their
//! pages: runs are released once, as they were acquired, from any thread; panics lose nothing; runs
//! that are never released stay valid.

use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, DmaPool, SourceError};
use pinfold_core::frame::{Frame, FrameError, Order};
use pinfold_core::mem::DmaMemory;
use pinfold_core::page_pool::{Config, PagePool, RevocableSource, RevokeError, SyncOps};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

const FRAMES: u32 = 2048;
const IOVA: Iova = Iova::new(1 << 40);

/// The outcome of a `hide`.
#[derive(Clone, Copy, PartialEq)]
enum Hide {
    Hides,
    NotAsked,
    Fails,
}

#[derive(Default)]
struct Runs {
    /// The order of each run that is acquired, and whether it is hidden.
    acquired: BTreeMap<u32, (Order, bool)>,
    /// Runs whose `hide` has failed.
    quarantined: BTreeMap<u32, Order>,
    acquires: u64,
    releases: u64,
    hidden: u64,
    /// Each such call of `acquire` and of `release` panics; 0 for none.
    panics: u64,
}

/// A span of the heap. It is leaked with runs that are not released.
struct Strict {
    base: NonNull<u8>,
    hide: Hide,
    runs: Mutex<Runs>,
}

// SAFETY: the memory is accessed through runs alone, each of which has one owner.
unsafe impl Send for Strict {}
// SAFETY: as for `Send`; what changes is behind a lock.
unsafe impl Sync for Strict {}

impl Strict {
    fn layout() -> Layout {
        Layout::from_size_align(FRAMES as usize * 4096, 2 << 20).unwrap()
    }

    fn new(hide: Hide, panics: u64) -> Arc<Self> {
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(Self::layout()) }).unwrap();
        Arc::new(Self { base, hide, runs: Mutex::new(Runs { panics, ..Runs::default() }) })
    }

    fn runs(&self) -> std::sync::MutexGuard<'_, Runs> {
        // Panics that are meant come with the lock held, after the change.
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a run; returns whether this release panics.
    fn end(&self, frame: Frame, order: Order, hidden: bool) -> bool {
        let mut runs = self.runs();
        let ended = runs.acquired.remove(&frame.index());
        assert_eq!(ended, Some((order, hidden)), "released once, as it was acquired");
        runs.releases += 1;
        runs.panics > 0 && runs.releases.is_multiple_of(runs.panics)
    }
}

impl Drop for Strict {
    fn drop(&mut self) {
        let runs = self.runs.get_mut().unwrap_or_else(PoisonError::into_inner);
        if runs.acquired.is_empty() && runs.quarantined.is_empty() {
            // SAFETY: from `new`, with this layout, and no run of it is in use.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), Self::layout()) };
        }
    }
}

// SAFETY: one allocation; a run is aligned to its size, and in `acquired` until it is released.
unsafe impl ChunkSource for Strict {
    fn span(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.base, Self::layout().size())
    }
    fn iova(&self) -> Iova {
        IOVA
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let mut runs = self.runs();
        runs.acquires += 1;
        // It keeps no run for a call that panics.
        assert!(runs.panics == 0 || !runs.acquires.is_multiple_of(runs.panics), "as planned");
        let all = runs.acquired.iter().map(|(&at, &(order, _))| (at, order));
        let used: Vec<_> = all.chain(runs.quarantined.iter().map(|(&a, &o)| (a, o))).collect();
        let free = |at: u32| {
            used.iter()
                .all(|&(other, its)| at + order.frames() <= other || other + its.frames() <= at)
        };
        let mut places = (0..FRAMES).step_by(order.frames() as usize);
        let Some(at) = places.find(|&at| free(at)) else {
            return Err(FrameError::Exhausted { order, frames: FRAMES }.into());
        };
        runs.acquired.insert(at, (order, false));
        Ok(Frame::new(at).unwrap())
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        let panics = self.end(frame, order, false);
        assert!(!panics, "as planned");
    }
}

// SAFETY: a run that is hidden stays in `acquired`, and one whose `hide` failed in `quarantined`.
unsafe impl RevocableSource for Strict {
    unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError> {
        let mut runs = self.runs();
        let run = runs.acquired.get_mut(&frame.index()).expect("it is acquired");
        assert_eq!(*run, (order, false), "hidden once, as it was acquired");
        match self.hide {
            Hide::Hides => {
                run.1 = true;
                runs.hidden += 1;
                Ok(())
            }
            Hide::NotAsked => Err(RevokeError::NotAsked),
            Hide::Fails => {
                runs.acquired.remove(&frame.index());
                runs.quarantined.insert(frame.index(), order);
                Err(RevokeError::Unmap("as planned".into()))
            }
        }
    }
    unsafe fn release_hidden(&self, frame: Frame, order: Order) {
        self.end(frame, order, true);
    }
}

/// Three threads allocate, free and shrink one pool, whose source panics in every seventh acquire
/// and release.
#[test]
#[cfg_attr(not(feature = "std"), ignore = "without std the first panic ends the release of a pool")]
fn a_dma_pool_releases_each_run_once_whatever_panics() {
    let source = Strict::new(Hide::NotAsked, 7);
    let pool = DmaPool::builder("strict").block(8192).build(&source).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3_usize {
            let pool = &pool;
            scope.spawn(move || {
                let (mut local, mut held) = (pool.local(), Vec::new());
                for round in 0..400 {
                    let count = (round * 7 + thread * 3) % 40;
                    for _ in 0..count {
                        // A panic of the source passes through the call.
                        let block = catch_unwind(AssertUnwindSafe(|| local.alloc()));
                        held.extend(block.ok().and_then(Result::ok));
                    }
                    held.truncate(held.len() / 3);
                    if round % 20 == thread {
                        local.flush();
                        let _ = catch_unwind(AssertUnwindSafe(|| pool.shrink()));
                    }
                }
            });
        }
    });
    assert_eq!(pool.stats().in_use, 0);
    // Of eight releases one panics, however the threads met.
    while source.runs().releases < 8 {
        let _ = catch_unwind(AssertUnwindSafe(|| pool.alloc().map(drop)));
        let _ = catch_unwind(AssertUnwindSafe(|| pool.shrink()));
    }
    let _ = catch_unwind(AssertUnwindSafe(|| drop(pool)));
    let runs = source.runs();
    assert!(runs.acquired.is_empty(), "{:?}", runs.acquired);
}

#[test]
fn memory_of_runs_that_are_never_released_stays_valid() {
    let source = Strict::new(Hide::NotAsked, 0);
    let weak = Arc::downgrade(&source);
    let pool = DmaPool::builder("raw").block(4096).build(&source).unwrap();
    drop(source);
    let block = pool.alloc_raw().unwrap();
    drop(pool);
    assert!(weak.upgrade().is_none(), "the pool has dropped its source");
    // SAFETY: the run is not released, so that its memory is valid.
    let memory = unsafe { DmaMemory::from_raw(block.as_ptr(), 4096) };
    memory.write_u64(8, 7).unwrap();
    assert_eq!(memory.read_u64(8).unwrap(), 7);
}

/// The chunks of a page pool that is taken down with pages in use.
#[test]
fn a_page_pool_hides_each_chunk_once_and_releases_it_after_its_last_page() {
    for hide in [Hide::Hides, Hide::NotAsked, Hide::Fails] {
        let source = Strict::new(hide, 0);
        let config = Config { ring: 64, ..Config::default() };
        let mut pool = PagePool::new(Arc::clone(&source), "pages", config).unwrap();
        let mut pages: Vec<_> = (0..300).map(|_| pool.alloc().unwrap()).collect();
        let chunks = source.runs().acquired.len();
        assert!(chunks > 1);
        drop(pool.destroy());
        {
            let runs = source.runs();
            assert_eq!(runs.hidden, if hide == Hide::Hides { chunks as u64 } else { 0 });
            let quarantined = if hide == Hide::Fails { chunks } else { 0 };
            assert_eq!((runs.quarantined.len(), runs.releases), (quarantined, 0));
        }
        // The last pages return on another thread.
        std::thread::spawn(move || pages.drain(..).for_each(drop)).join().unwrap();
        let runs = source.runs();
        assert!(runs.acquired.is_empty());
        assert_eq!(runs.releases, if hide == Hide::Fails { 0 } else { chunks as u64 });
    }
}

/// Records the bytes that changed owner, as offsets in their page, and the direction.
struct Syncs(Arc<Mutex<Vec<(bool, u64, usize)>>>);

impl Syncs {
    fn note(&self, for_device: bool, memory: DmaMemory<'_>, iova: Iova) {
        assert_eq!(memory.addr() % 4096, (iova.raw() % 4096) as usize, "the same bytes");
        self.0.lock().unwrap().push((for_device, iova.raw() % 4096, memory.len()));
    }
}

impl SyncOps for Syncs {
    fn for_device(&self, memory: DmaMemory<'_>, iova: Iova) {
        self.note(true, memory, iova);
    }
    fn for_cpu(&self, memory: DmaMemory<'_>, iova: Iova) {
        self.note(false, memory, iova);
    }
}

#[test]
fn only_bytes_that_a_device_may_have_written_are_synced() {
    let (source, log) = (Strict::new(Hide::Hides, 0), Arc::default());
    let config = Config { offset: 256, max_len: 2048, ..Config::default() };
    let sync = Box::new(Syncs(Arc::clone(&log)));
    let mut pool = PagePool::with_sync(source, "synced", config, sync).unwrap();
    let mut page = pool.alloc().unwrap();
    page.sync_for_cpu(100);
    pool.recycle(page);
    let mut page = pool.alloc().unwrap();
    page.sync_for_cpu(usize::MAX);
    drop(page);
    let log = log.lock().unwrap();
    assert!(log.iter().all(|&(_, at, _)| at == 256), "{log:?}");
    let lengths: Vec<_> = log.iter().map(|&(for_device, _, len)| (for_device, len)).collect();
    // Fresh pages come several at a time, each of them synced once.
    let fresh = lengths.iter().take_while(|&&sync| sync == (true, 2048)).count();
    assert!(fresh > 0, "{lengths:?}");
    assert_eq!(lengths[fresh..], [(false, 100), (true, 100), (false, 2048), (true, 2048)]);
}
