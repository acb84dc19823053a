//! One thread's cache of a pool's blocks: allocating and freeing.

use crate::block::{Addresses, free_each, pf_block_t, read_block, write_block, write_va};
use crate::failure::{Failure, brief_call, call, check_out, fail, store};
use crate::handle::Table;
use crate::pool::{POOLS, pf_pool_t};
use crate::source::Marked;
use crate::trace::{Caller, Site, Tracer, hook, pass_caller, pf_event_kind};
use pinfold::Iova;
use pinfold::dma_pool::{AllocError, FreeError, PoolLocal, RawBlock};
use std::ffi::{c_int, c_uint};
use std::ptr::NonNull;
use std::sync::Arc;

/// One thread's cache of a pool's blocks.
pub struct pf_cache_t {
    local: PoolLocal,
    source: Option<Arc<Marked>>,
    block_bytes: u32,
}

static CACHES: Table<pf_cache_t> = Table::new(5, "cache");

/// Creates one thread's cache of a pool: allocating and freeing through it takes no lock, as long
/// as it has blocks.
///
/// @pool: the pool.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EBADF; EFAULT; ENFILE.
/// Thread: any; then one thread at a time uses the cache. Allocates. Ends with pf_cache_destroy().
/// Since 0.2.
///
/// # Safety
/// `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_pool_cache(pool: *mut pf_pool_t, out: *mut *mut pf_cache_t) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let pool = POOLS.get(pool)?;
        let handle = CACHES.insert(pf_cache_t {
            local: pool.pool.local(),
            source: pool.source.clone(),
            block_bytes: pool.block_bytes,
        })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Ends a cache: its free blocks go back to the pool. Blocks that were allocated through it stay
/// allocated; any cache of the pool frees them.
///
/// @cache: the cache; NULL does nothing.
///
/// Return: 0, or -errno: EBADF; EBUSY (another thread is in a call with it).
/// Thread: any. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_cache_destroy(cache: *mut pf_cache_t) -> c_int {
    call(|| {
        if !cache.is_null() {
            drop(CACHES.remove(cache, |_| Ok(()))?);
        }
        Ok(0)
    })
}

/// Allocates a block. It holds the last user's content.
///
/// @cache: the cache.
/// @block: where the addresses and the length are stored; its tag stays.
///
/// Return: 0, or -errno: ENOMEM (the pool has no free block and no more memory: the message says
/// which limit); EFAULT; EBADF; EBUSY (another thread is in a call with the cache).
/// Thread: the cache's. Allocates when the pool takes more memory (ENOMEM without the byte for the
/// state of each block), when blocks are allocated for the first time, and where it is refused: its
/// message. Ownership: the caller's, until pf_put(). Since 0.2.
///
/// # Safety
/// `block` is null or can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_get(cache: *mut pf_cache_t, block: *mut pf_block_t) -> c_int {
    pass_caller!(2, get);
}

unsafe extern "C" fn get(handle: *mut pf_cache_t, out: *mut pf_block_t, caller: Caller) -> c_int {
    brief_call(|| {
        let mut cache = CACHES.get_mut(handle)?;
        check_out(out, "block")?;
        let block = cache.local.alloc_raw().map_err(|error| exhausted(&error))?;
        // SAFETY: not null, so the caller promises that it can be written.
        unsafe { write_block(out, addresses(block), cache.block_bytes) };
        if let Some(hook) = hook() {
            cache.report(
                hook,
                pf_event_kind::PF_EVENT_ALLOC,
                addresses(block),
                Site::new(caller, handle),
            );
        }
        Ok(0)
    })
}

/// Frees a block, whichever cache of the pool allocated it.
///
/// @cache: a cache of the block's pool.
/// @block: the block: its two addresses as they were returned.
///
/// Return: 0, or -errno: EINVAL (it is free already, of another pool, not where a block begins, or
/// its addresses do not belong together); EBUSY (a mapping or a request uses a page of the arena
/// that is the block's alone: not seen of blocks that share their pages; or another thread is in a
/// call with the cache); nothing has changed then. EFAULT; EBADF.
/// Thread: the cache's. Allocates where it is refused: its message. Since 0.2.
///
/// # Safety
/// `block` is null or can be read.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_put(cache: *mut pf_cache_t, block: *const pf_block_t) -> c_int {
    pass_caller!(2, put);
}

unsafe extern "C" fn put(
    handle: *mut pf_cache_t,
    block: *const pf_block_t,
    caller: Caller,
) -> c_int {
    brief_call(|| {
        let mut cache = CACHES.get_mut(handle)?;
        check_out(block, "block")?;
        // SAFETY: not null, so the caller promises that it can be read.
        let block = unsafe { read_block(block) };
        cache.free(block)?;
        if let Some(hook) = hook() {
            cache.report(hook, pf_event_kind::PF_EVENT_FREE, block, Site::new(caller, handle));
        }
        Ok(0)
    })
}

/// The number of blocks moved between the caller's array and the pool at once.
const BATCH: usize = 32;

/// Allocates `n` blocks, all or none.
///
/// @cache: the cache.
/// @blocks: where they are stored: addresses and lengths; the tags stay.
/// @n: how many.
///
/// Return: 0; or -errno: ENOMEM (the message says how many there are), and each `va` is NULL then;
/// EFAULT; EBADF; EBUSY (another thread is in a call with the cache).
/// Thread: the cache's. Allocates as pf_get(). Ownership: the caller's, until pf_put() or
/// pf_put_bulk(). Since 0.2.
///
/// # Safety
/// `blocks` is null or `n` blocks that can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_get_bulk(
    cache: *mut pf_cache_t,
    blocks: *mut pf_block_t,
    n: c_uint,
) -> c_int {
    pass_caller!(3, get_bulk);
}

unsafe extern "C" fn get_bulk(
    handle: *mut pf_cache_t,
    out: *mut pf_block_t,
    n: c_uint,
    caller: Caller,
) -> c_int {
    brief_call(|| {
        let mut cache = CACHES.get_mut(handle)?;
        let (n, mut full) = (n as usize, 0);
        if n > 0 {
            check_out(out, "blocks")?;
        }
        let at = |index| out.wrapping_add(index);
        while full < n {
            let mut slots = [None; BATCH];
            let slots = slots.get_mut(..BATCH.min(n - full)).unwrap_or_default();
            cache.local.fill(slots);
            let before = full;
            for block in slots.iter().flatten() {
                // SAFETY: one of the `n` blocks of the caller.
                unsafe { write_block(at(full), addresses(*block), cache.block_bytes) };
                full += 1;
            }
            if full - before == slots.len() {
                continue;
            }
            // Few were left: the next one says why, or goes on.
            match cache.local.alloc_raw() {
                Ok(block) => {
                    // SAFETY: as above.
                    unsafe { write_block(at(full), addresses(block), cache.block_bytes) };
                    full += 1;
                }
                Err(error) => {
                    for index in 0..n {
                        if index < full {
                            // SAFETY: written above.
                            let block = unsafe { read_block(at(index)) };
                            // Only a wrong free by the program can have freed it meanwhile.
                            let _ = cache.free(block);
                        }
                        // SAFETY: one of the `n` blocks of the caller.
                        unsafe { write_va(at(index), std::ptr::null_mut()) };
                    }
                    let why = exhausted(&error);
                    return Err(why.of(format!("{full} of {n} blocks are available")));
                }
            }
        }
        if let Some(hook) = hook() {
            for index in 0..n {
                // SAFETY: written above.
                let block = unsafe { read_block(at(index)) };
                cache.report(hook, pf_event_kind::PF_EVENT_ALLOC, block, Site::new(caller, handle));
            }
        }
        Ok(0)
    })
}

/// Frees `n` blocks, whichever caches of the pool allocated them, until one is refused.
///
/// @cache: a cache of the blocks' pool.
/// @blocks: the blocks.
/// @n: how many.
/// @bad: where the index of the block is stored that was refused; NULL: not needed.
///
/// Return: 0; or -errno: EINVAL or EBUSY, as for pf_put(): those before `*bad` are freed, it and
/// those behind it are as before. EFAULT; EBADF.
/// Thread: the cache's. Allocates where it is refused: its message. Since 0.2.
///
/// # Safety
/// `blocks` is null or `n` blocks that can be read; `bad` is null or can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_put_bulk(
    cache: *mut pf_cache_t,
    blocks: *const pf_block_t,
    n: c_uint,
    bad: *mut c_uint,
) -> c_int {
    pass_caller!(4, put_bulk);
}

unsafe extern "C" fn put_bulk(
    handle: *mut pf_cache_t,
    blocks: *const pf_block_t,
    n: c_uint,
    bad: *mut c_uint,
    caller: Caller,
) -> c_int {
    brief_call(|| {
        let mut cache = CACHES.get_mut(handle)?;
        let (hook, site) = (hook(), Site::new(caller, handle));
        let free = |block| {
            cache.free(block)?;
            if let Some(hook) = hook {
                cache.report(hook, pf_event_kind::PF_EVENT_FREE, block, site);
            }
            Ok(())
        };
        // SAFETY: as the caller promises.
        unsafe { free_each((blocks, n, bad), "block", free) }
    })
}

impl pf_cache_t {
    /// Frees a block by its addresses. Nothing has changed where it is refused.
    #[inline(always)]
    fn free(&mut self, block: Addresses) -> Result<(), Failure> {
        let Some(va) = NonNull::new(block.va) else {
            return Err(fail!(EINVAL, "the block's va is NULL: pass what pf_get stored"));
        };
        if let Some(source) = &self.source {
            source.region().check_unused(va.addr().get(), self.block_bytes as usize)?;
        }
        let block = RawBlock::from_parts(va, Iova::new(block.iova));
        self.local.free_raw(block).map_err(|error| refused(&error))
    }

    #[cold]
    fn report(&self, hook: Tracer, kind: pf_event_kind, block: Addresses, site: Site) {
        hook.report(kind, block.va, block.iova, self.block_bytes.into(), site);
    }
}

/// Returns the addresses of a block for the caller.
#[inline(always)]
fn addresses(block: RawBlock) -> Addresses {
    Addresses { va: block.as_ptr().as_ptr(), iova: block.iova().raw() }
}

/// Why no block can be allocated, in the terms of C.
#[cold]
fn exhausted(error: &AllocError) -> Failure {
    let others = "other caches may keep free blocks: destroy idle caches, put blocks back";
    match error {
        AllocError::Source(source) => {
            fail!(ENOMEM, "no free block: {source}; {others}, or use a larger arena")
        }
        AllocError::Maximum { maximum, blocks } => fail!(
            ENOMEM,
            "no free block: the pool may have {maximum} blocks and has {blocks}; {others}, or raise the maximum"
        ),
        AllocError::Ranges { blocks } => fail!(
            ENOMEM,
            "no free block: {blocks} blocks were added to the pool; {others}, or add memory with pf_pool_add"
        ),
        other => Failure::from(other),
    }
}

/// Why a block is not freed, in the terms of C.
#[cold]
fn refused(error: &FreeError) -> Failure {
    match error {
        FreeError::Foreign { addr, .. } => fail!(
            EINVAL,
            "{addr:#x} is in no memory of this pool: pass a cache of the pool that allocated it"
        ),
        other => Failure::from(other),
    }
}
