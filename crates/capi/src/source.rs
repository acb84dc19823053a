//! [`Marked`]: an arena as the source of a pool's chunks, whose memory is marked as the pool's.

use crate::arena::pf_arena_t;
use crate::failure::{Counted, Failure, fail};
use crate::process::Uncancelled;
use crate::region::{Hold, PAGE, Region};
use pinfold::core::domain::DomainId;
use pinfold::core::frame::{Frame, Order};
use pinfold::dma_pool::{ChunkSource, SourceError};
use pinfold::page_pool::RevocableSource;
use pinfold::{Arena, Iova};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An arena that a pool acquires chunks from. Chunks are marked in the region while the pool has
/// them, so that devices may be given memory of its blocks, and `pf_free` refuses it. A chunk that
/// the pool releases while a mapping or a request still uses it goes back to the arena later: with
/// the next call of the pool that acquires or releases one.
///
/// It keeps the arena, which `pf_arena_destroy` refuses to end meanwhile, whether the pool has a
/// chunk or not: memory that the pool acquires later is still found by its address.
pub(crate) struct Marked {
    arena: Arena,
    chunks: Mutex<Chunks>,
    hold: Hold,
}

/// The runs of frames that are the pool's, and those that were, which a mapping or a request uses.
#[derive(Default)]
struct Chunks {
    own: BTreeMap<Frame, Order>,
    released: Vec<(Frame, Order)>,
}

impl Marked {
    pub(crate) fn new(arena: &pf_arena_t) -> Arc<Self> {
        Arc::new(Self {
            arena: arena.arena.clone(),
            chunks: Mutex::default(),
            hold: Hold::new(&arena.region),
        })
    }

    /// Returns the arena's memory.
    pub(crate) fn region(&self) -> &Region {
        self.hold.region()
    }

    /// Checks that no mapping or request uses memory of the pool. O(pages) where one uses memory of
    /// any pool of the arena, else O(1).
    ///
    /// # Errors
    /// `EBUSY`, with the address of a page that is in use.
    pub(crate) fn check_unused(&self) -> Result<(), Failure> {
        if self.region().uses() == 0 {
            return Ok(());
        }
        let chunks = self.chunks();
        let released = chunks.released.iter().copied();
        for (frame, order) in
            chunks.own.iter().map(|(&frame, &order)| (frame, order)).chain(released)
        {
            let (addr, len) = self.place(frame, order);
            if let Some((page, uses)) = self.region().first_use(addr, len) {
                return Err(fail!(
                    EBUSY,
                    "{page:#x}, memory of the pool, is in use by {}: unmap it, or wait for their end, first",
                    Counted(uses, "mapping or request")
                ));
            }
        }
        Ok(())
    }

    fn chunks(&self) -> MutexGuard<'_, Chunks> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the address and the length of a run.
    fn place(&self, frame: Frame, order: Order) -> (usize, usize) {
        // Inside the region: frames of its arena.
        let at = usize::try_from(frame.offset()).unwrap_or(usize::MAX);
        (self.region().addr().saturating_add(at), order.frames() as usize * PAGE)
    }

    /// Returns to the arena the chunks that the pool has released and no device uses.
    fn sweep(&self, chunks: &mut Chunks) {
        chunks.released.retain(|&(frame, order)| {
            let (addr, len) = self.place(frame, order);
            if !self.region().unmark_pool(addr, len) {
                return true;
            }
            // SAFETY: acquired with this order; the pool has released it, so it does not access it
            // any more, and it is released to the arena here, once: it is removed with this.
            unsafe { self.arena.release(frame, order) };
            false
        });
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        // Memory that a device still uses stays allocated, so the arena stays.
        self.sweep(&mut self.chunks());
    }
}

// SAFETY: the span and the address are the arena's, which the value owns. So are the runs, which
// the arena allocates to no other caller until they are released to it: that is after `release`.
unsafe impl ChunkSource for Marked {
    fn span(&self) -> NonNull<[u8]> {
        self.arena.span()
    }

    fn iova(&self) -> Iova {
        self.arena.iova()
    }

    fn domain(&self) -> Option<DomainId> {
        self.arena.domain()
    }

    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        // An error that names a limit has read it from files.
        let _uncancelled = Uncancelled::new();
        let mut chunks = self.chunks();
        self.sweep(&mut chunks);
        let frame = self.arena.acquire(order)?;
        chunks.own.insert(frame, order);
        let (addr, len) = self.place(frame, order);
        self.region().mark_pool(addr, len);
        Ok(frame)
    }

    unsafe fn release(&self, frame: Frame, _order: Order) {
        let mut chunks = self.chunks();
        let order = chunks.own.remove(&frame);
        chunks.released.extend(order.map(|order| (frame, order)));
        self.sweep(&mut chunks);
    }
}

// SAFETY: it cannot revoke, so there is nothing to guarantee.
unsafe impl RevocableSource for Marked {}

#[cfg(test)]
#[cfg(not(handle_model))]
mod tests {
    use super::*;
    use crate::arena::{
        ARENAS, PF_POLICY_PER_USE, pf_arena_create, pf_arena_destroy, pf_arena_opts, pf_arena_t,
    };
    use crate::block::pf_block_t;
    use crate::cache::{pf_cache_destroy, pf_get_bulk, pf_pool_cache, pf_put, pf_put_bulk};
    use crate::domain::{DOMAINS, State, pf_domain_destroy, pf_domain_soft, pf_domain_t};
    use crate::failure::brief_call;
    use crate::options::Options;
    use crate::pages::{
        pf_pages_create, pf_pages_destroy, pf_pages_fill, pf_pages_recycle, pf_pages_return,
    };
    use crate::pool::{pf_pool_create, pf_pool_destroy, pf_pool_opts, pf_pool_shrink};
    use crate::process::tests::with_cancel_pending;
    use crate::region::Span;
    use pinfold::dma_pool::DmaPool;
    use std::ptr::null_mut;
    use std::time::Duration;

    const EMPTY: pf_block_t = pf_block_t { va: null_mut(), iova: 0, len: 0, tag: 0 };

    struct Memory {
        domain: *mut pf_domain_t,
        arena: *mut pf_arena_t,
        state: Arc<State>,
    }

    impl Memory {
        fn new() -> Self {
            let (mut domain, mut arena) = (null_mut(), null_mut());
            // SAFETY: it can be written.
            assert_eq!(unsafe { pf_domain_soft(&raw mut domain) }, 0);
            let opts = pf_arena_opts {
                struct_size: size_of::<pf_arena_opts>(),
                size: 4 << 20,
                policy: PF_POLICY_PER_USE,
                ..Options::DEFAULT
            };
            // SAFETY: the options have their size; the handle can be written.
            assert_eq!(unsafe { pf_arena_create(domain, &raw const opts, &raw mut arena) }, 0);
            let state = Arc::clone(&DOMAINS.get(domain).unwrap().state);
            Self { domain, arena, state }
        }

        /// Uses these bytes as a mapping or a request does.
        fn used(&self, block: &pf_block_t, at: usize, len: usize) -> Span {
            self.state.span(block.va.addr() + at, len).unwrap()
        }

        fn end(self) {
            assert_eq!(pf_arena_destroy(self.arena), 0);
            assert_eq!(pf_domain_destroy(self.domain), 0);
        }
    }

    #[test]
    fn a_block_that_a_device_uses_is_not_freed_and_its_chunk_not_released() {
        let memory = Memory::new();
        let (mut pool, mut cache) = (null_mut(), null_mut());
        // Blocks of two pages, at half pages.
        let opts =
            pf_pool_opts { struct_size: size_of::<pf_pool_opts>(), size: 8192, ..Options::DEFAULT };
        // SAFETY: the options have their size; the handles can be written.
        assert_eq!(unsafe { pf_pool_create(memory.arena, &raw const opts, &raw mut pool) }, 0);
        // SAFETY: as above.
        assert_eq!(unsafe { pf_pool_cache(pool, &raw mut cache) }, 0);
        let mut blocks = [EMPTY; 8];
        // SAFETY: it has 8 blocks.
        assert_eq!(unsafe { pf_get_bulk(cache, blocks.as_mut_ptr(), 8) }, 0);
        for at in [0, 4095, 4096, 8191] {
            let used = memory.used(&blocks[3], at, 1);
            // SAFETY: a block.
            assert_eq!(unsafe { pf_put(cache, &raw const blocks[3]) }, -libc::EBUSY);
            drop(used);
        }
        let (first, last) = (memory.used(&blocks[3], 100, 8000), memory.used(&blocks[3], 0, 8192));
        drop(first);
        let mut bad = 99;
        // SAFETY: it has 8 blocks.
        let refused = unsafe { pf_put_bulk(cache, blocks.as_ptr(), 8, &raw mut bad) };
        assert_eq!((refused, bad), (-libc::EBUSY, 3));
        drop(last);
        // SAFETY: as above.
        assert_eq!(unsafe { pf_put_bulk(cache, blocks[3..].as_ptr(), 5, null_mut()) }, 0);
        // Of a block that is free: the program's mistake, and the memory stays the pool's.
        let late = memory.used(&blocks[0], 5000, 2);
        assert_eq!(pf_cache_destroy(cache), 0);
        assert_eq!(pf_pool_destroy(pool), -libc::EBUSY);
        assert!(pf_pool_shrink(pool) > 0);
        assert_eq!(pf_pool_destroy(pool), -libc::EBUSY);
        assert!(memory.state.span(blocks[0].va.addr(), 1).is_ok());
        drop(late);
        assert_eq!(pf_pool_destroy(pool), 0);
        assert!(memory.state.span(blocks[0].va.addr(), 1).is_err());
        memory.end();
    }

    #[test]
    fn a_chunk_that_was_used_goes_back_with_the_next_chunk() {
        let memory = Memory::new();
        let (mut pool, mut cache, mut block) = (null_mut(), null_mut(), EMPTY);
        let opts =
            pf_pool_opts { struct_size: size_of::<pf_pool_opts>(), size: 8192, ..Options::DEFAULT };
        // SAFETY: the options have their size; the handles can be written.
        assert_eq!(unsafe { pf_pool_create(memory.arena, &raw const opts, &raw mut pool) }, 0);
        let mut in_use = [0; 2];
        for round in &mut in_use {
            // SAFETY: the handle can be written.
            assert_eq!(unsafe { pf_pool_cache(pool, &raw mut cache) }, 0);
            // SAFETY: one block.
            assert_eq!(unsafe { pf_get_bulk(cache, &raw mut block, 1) }, 0);
            *round = ARENAS.get(memory.arena).unwrap().arena.stats().frames_in_use;
            // SAFETY: a block.
            assert_eq!(unsafe { pf_put(cache, &raw const block) }, 0);
            assert_eq!(pf_cache_destroy(cache), 0);
            let late = memory.used(&block, 0, 1);
            assert!(pf_pool_shrink(pool) > 0);
            drop(late);
        }
        assert!(in_use[0] > 0 && in_use[0] == in_use[1], "{in_use:?}");
        assert_eq!(pf_pool_destroy(pool), 0);
        memory.end();
    }

    #[test]
    fn blocks_that_share_a_page_are_not_looked_at() {
        let memory = Memory::new();
        let (mut pool, mut cache) = (null_mut(), null_mut());
        let opts =
            pf_pool_opts { struct_size: size_of::<pf_pool_opts>(), size: 64, ..Options::DEFAULT };
        // SAFETY: the options have their size; the handles can be written.
        assert_eq!(unsafe { pf_pool_create(memory.arena, &raw const opts, &raw mut pool) }, 0);
        // SAFETY: as above.
        assert_eq!(unsafe { pf_pool_cache(pool, &raw mut cache) }, 0);
        let mut blocks = [EMPTY; 2];
        // SAFETY: it has 2 blocks.
        assert_eq!(unsafe { pf_get_bulk(cache, blocks.as_mut_ptr(), 2) }, 0);
        let used = memory.used(&blocks[0], 0, 64);
        // SAFETY: a block.
        assert_eq!(unsafe { pf_put(cache, &raw const blocks[1]) }, 0);
        drop(used);
        // SAFETY: a block.
        assert_eq!(unsafe { pf_put(cache, &raw const blocks[0]) }, 0);
        assert_eq!(pf_cache_destroy(cache), 0);
        assert_eq!(pf_pool_destroy(pool), 0);
        memory.end();
    }

    #[test]
    fn a_cancelled_thread_waits_for_the_growth_of_another() {
        let memory = Memory::new();
        let source = Marked::new(&ARENAS.get(memory.arena).unwrap());
        let pool = DmaPool::builder("blocks").block(64).build(&source).unwrap();
        let alloc =
            || brief_call(|| pool.local().alloc().map(|_| 7).map_err(|e| Failure::from(&e)));
        let held = source.chunks();
        std::thread::scope(|scope| {
            let grows = scope.spawn(alloc);
            std::thread::sleep(Duration::from_millis(20));
            let waits = scope.spawn(|| with_cancel_pending(alloc));
            std::thread::sleep(Duration::from_millis(50));
            drop(held);
            assert_eq!((grows.join().unwrap(), waits.join().unwrap()), (7, 7));
        });
        drop((pool, source));
        memory.end();
    }

    #[test]
    fn a_page_that_a_device_uses_is_not_recycled() {
        let memory = Memory::new();
        let mut pages = null_mut();
        // SAFETY: the handle can be written.
        assert_eq!(unsafe { pf_pages_create(memory.arena, 4096, 0, &raw mut pages) }, 0);
        let mut slots = [EMPTY; 2];
        // SAFETY: it has 2 slots.
        assert_eq!(unsafe { pf_pages_fill(pages, slots.as_mut_ptr(), 2) }, 2);
        let used = memory.used(&slots[1], 4095, 1);
        let mut bad = 99;
        // SAFETY: it has 2 blocks.
        let refused = unsafe { pf_pages_return(pages, slots.as_ptr(), 2, &raw mut bad) };
        assert_eq!((refused, bad), (-libc::EBUSY, 1));
        // SAFETY: a block.
        let refused = unsafe { pf_pages_recycle(pages, &raw const slots[1], 1, &raw mut bad) };
        assert_eq!((refused, bad), (-libc::EBUSY, 0));
        drop(used);
        // SAFETY: a block.
        assert_eq!(unsafe { pf_pages_recycle(pages, &raw const slots[1], 1, null_mut()) }, 0);
        let late = memory.used(&slots[1], 0, 1);
        assert_eq!(pf_pages_destroy(pages), -libc::EBUSY);
        drop(late);
        assert_eq!(pf_pages_destroy(pages), 0);
        memory.end();
    }
}
