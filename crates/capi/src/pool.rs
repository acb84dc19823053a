//! Pools: blocks of one size that a device can reach, and one thread's cache of them.

use crate::arena::{ARENAS, pf_arena_t, refuse_use};
use crate::block::{Addresses, free_each, pf_block_t, read_block, write_block, write_va};
use crate::domain::{spans_of_all, text};
use crate::failure::{Failure, brief_call, call, check_out, fail, store};
use crate::handle::Table;
use crate::options::{Options, fill, read};
use crate::region::Span;
use crate::source::Marked;
use crate::trace::{Caller, Site, Tracer, hook, pass_caller, pf_event_kind};
use pinfold::Iova;
use pinfold::dma_pool::{AllocError, DmaPool, DmaPoolStats, FreeError, PoolLocal, RawBlock};
use pinfold::memory::{self, Claim, ClaimedFor, InUse};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// A pool of blocks of one size.
pub struct pf_pool_t {
    pool: DmaPool,
    /// Where its chunks come from; none: from `ranges` only.
    source: Option<Arc<Marked>>,
    /// Memory of the caller, by its start. Dropped after the pool.
    ranges: Mutex<BTreeMap<usize, Added>>,
    block_bytes: u32,
}

/// Memory of the caller that a pool has.
struct Added {
    end: usize,
    /// Uses of the arena or the registrations that it lies in, which it keeps from ending.
    #[expect(dead_code, reason = "held")]
    within: Vec<Span>,
    /// It is no other pool's.
    #[expect(dead_code, reason = "held")]
    claim: Claim,
}

/// One thread's cache of a pool's blocks.
pub struct pf_cache_t {
    local: PoolLocal,
    source: Option<Arc<Marked>>,
    block_bytes: u32,
}

pub(crate) static POOLS: Table<pf_pool_t> = Table::new(4, "pool");
static CACHES: Table<pf_cache_t> = Table::new(5, "cache");

/// For pf_pool_opts.flags: free blocks are filled with a pattern, and writes to them counted
/// (pf_pool_stats.damaged). Each call takes a lock, and time proportional to the block.
pub const PF_POOL_DEBUG: u32 = 1 << 0;

/// Options of a pool. Set `struct_size` to its sizeof, and what is not needed to 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_pool_opts {
    /// sizeof(struct pf_pool_opts).
    pub struct_size: usize,
    /// What reports and messages call the pool; NULL: "pool".
    pub name: *const c_char,
    /// Bytes of a block, 1 to 1 GiB: raised to 16, and rounded up to `align`.
    pub size: usize,
    /// The alignment of blocks: a power of two; 0: none.
    pub align: usize,
    /// Blocks do not cross a multiple of it: a power of two of at least a block; 0: no boundary.
    pub boundary: usize,
    /// Blocks that the pool acquires at once, and keeps.
    pub minimum: u64,
    /// Blocks after which it acquires no more memory; the last chunk may exceed it by less than the
    /// blocks of a page. 0: no maximum.
    pub maximum: u64,
    /// Bytes of free blocks that a cache keeps at most: at least one block, at most 1,024 blocks.
    /// 0: 512 KiB.
    pub cached_bytes: u64,
    /// PF_POOL_DEBUG.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: words, pointers and two halves of a word, without padding.
unsafe impl Options for pf_pool_opts {
    const DEFAULT: Self = Self {
        struct_size: 0,
        name: std::ptr::null(),
        size: 0,
        align: 0,
        boundary: 0,
        minimum: 0,
        maximum: 0,
        cached_bytes: 0,
        flags: 0,
        reserved: 0,
    };
}

/// A pool's counters. Exact while no other thread allocates or frees.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_pool_stats {
    /// sizeof(struct pf_pool_stats): set by the caller.
    pub struct_size: usize,
    /// Bytes of a block, after rounding.
    pub block_bytes: u64,
    /// All blocks.
    pub blocks: u64,
    /// Blocks that are allocated.
    pub in_use: u64,
    /// Free blocks: `cached` and those that every cache can have at once.
    pub free: u64,
    /// Free blocks that caches keep for their threads.
    pub cached: u64,
    /// The most blocks that were in use or cached at a time.
    pub peak: u64,
    /// Pieces of memory: chunks of the arena, and what was added.
    pub chunks: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Free blocks that were found overwritten; 0 without PF_POOL_DEBUG.
    pub damaged: u64,
}

// SAFETY: words, without padding.
unsafe impl Options for pf_pool_stats {
    const DEFAULT: Self = Self {
        struct_size: 0,
        block_bytes: 0,
        blocks: 0,
        in_use: 0,
        free: 0,
        cached: 0,
        peak: 0,
        chunks: 0,
        bytes: 0,
        damaged: 0,
    };
}

/// Creates a pool of blocks of one size. Devices of the arena's first domain reach its memory, for
/// reading and writing, for as long as the pool has it, also with PF_POLICY_PER_USE.
///
/// @arena: where its memory comes from, as it is needed; NULL: only from pf_pool_add().
/// @opts: the options; `size` at least.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EINVAL (size, align, boundary, limits, unknown flags, or a minimum without
/// an arena: the message has the value and its limit); ENOMEM (the arena has less than the
/// minimum); E2BIG (fields of a newer version); EBADF; EFAULT; ENFILE.
/// Thread: any. Allocates. Ends with pf_pool_destroy(), and the arena not before. Since 0.2.
///
/// # Safety
/// `opts` is null or points to as many bytes as its first field says; `opts->name` is null or a C
/// string; `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_pool_create(
    arena: *mut pf_arena_t,
    opts: *const pf_pool_opts,
    out: *mut *mut pf_pool_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let source =
            if arena.is_null() { None } else { Some(Marked::new(&*ARENAS.get_waiting(arena)?)) };
        // SAFETY: as the caller promises.
        let opts = unsafe { read(opts) }?;
        // SAFETY: as the caller promises.
        let pool = unsafe { build(&opts, source.as_ref()) }?;
        // At most `i32::MAX`.
        let block_bytes = u32::try_from(pool.stats().block_bytes).unwrap_or(u32::MAX);
        let handle =
            POOLS.insert(pf_pool_t { pool, source, ranges: Mutex::default(), block_bytes })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// The most bytes of a block.
const LARGEST: usize = 1 << 30;

/// # Safety
/// As for [`pf_pool_create`].
unsafe fn build(opts: &pf_pool_opts, source: Option<&Arc<Marked>>) -> Result<DmaPool, Failure> {
    if opts.flags & !PF_POOL_DEBUG != 0 || opts.reserved != 0 {
        let (flags, reserved) = (opts.flags, opts.reserved);
        return Err(fail!(
            EINVAL,
            "flags {flags:#x}, reserved {reserved:#x}: set PF_POOL_DEBUG or 0, and reserved to 0"
        ));
    }
    // SAFETY: a C string, as the caller promises.
    let name = if opts.name.is_null() { "pool" } else { unsafe { text(opts.name, "name") }? };
    if name.contains(char::is_control) {
        return Err(fail!(
            EINVAL,
            "the pool's name {name:?} has a control character: a report is lines"
        ));
    }
    if !(1..=LARGEST).contains(&opts.size) {
        let size = opts.size;
        return Err(fail!(
            EINVAL,
            "cannot create blocks of {size} bytes: a block has 1 to {LARGEST} bytes"
        ));
    }
    let mut builder = DmaPool::builder(name)
        .block(opts.size)
        .align(opts.align)
        .boundary(opts.boundary)
        .minimum(opts.minimum);
    if opts.maximum != 0 {
        builder = builder.maximum(opts.maximum);
    }
    if opts.cached_bytes != 0 {
        builder = builder.cached_bytes(opts.cached_bytes);
    }
    if opts.flags & PF_POOL_DEBUG != 0 {
        builder = builder.debug();
    }
    match source {
        Some(source) => builder.build(source),
        None if opts.minimum != 0 => {
            let minimum = opts.minimum;
            return Err(fail!(
                EINVAL,
                "minimum {minimum}: a pool without an arena has only the blocks of pf_pool_add; set it to 0"
            ));
        }
        None => builder.build_empty(),
    }
    .map_err(|error| Failure::from(&error))
}

/// Adds memory of the caller to a pool, in any number of pieces: the way to have a pool in memory
/// that is mapped for the device already.
///
/// Blocks follow one another from `va` at a distance of pf_pool_stats.block_bytes, which is the
/// size of the options if that is a multiple of `align`, and at least 16. In each 2 MiB from `va`
/// on (1 GiB if a block is larger than 2 MiB) there are as many as fit, so that a piece of `len`
/// bytes has `len / block_bytes` blocks if `len` is at most 2 MiB, or the size divides 2 MiB; and
/// one less for each 2 MiB at most otherwise.
///
/// @pool: the pool.
/// @va: the memory. A multiple of the pool's `align`, and of its `boundary` (or of 2 MiB, if that
/// is less); not of 4096. It may be in one allocation of an arena, or in registered memory, which
/// is in use until the pool has ended; else in none of these, in any domain. Its pages are faulted
/// in, and no other attribute of theirs is changed.
/// @len: bytes, of at least one block. The rest behind the last block stays unused.
/// @iova: its address for the device, aligned as `va`; what follows is linear. The library passes
/// it on, and does not map anything.
///
/// Return: how many blocks were added; or -errno, and none was: EINVAL (alignment, no block fits,
/// or the end is beyond 64 bits: the message has the values; or part of an arena that is not all
/// allocated); EEXIST (part of it is in this pool or in another already, or it is only in part an
/// arena's or registered); ENOSPC (the maximum, or the 32 bits that number the blocks, of which
/// each piece takes those of whole 2 MiB: 32,767 pieces of blocks of 16 bytes at most); EFAULT (a
/// page of it is not mapped, not readable and writable, beyond the end of its file, or has no
/// hugepage left: the message has the first; or NULL); EBADF.
/// Thread: any. Allocates; linear in the pages. Ownership: the pool's, until pf_pool_destroy() has
/// returned 0. Since 0.2.
///
/// # Safety
/// `va` is valid for reads and writes of `len` bytes, and nothing else uses it, until the pool has
/// ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_pool_add(
    pool: *mut pf_pool_t,
    va: *mut c_void,
    len: usize,
    iova: u64,
) -> i64 {
    let mut added = 0;
    let code = call(|| {
        let pool = POOLS.get(pool)?;
        check_out(va, "va")?;
        let Some(base) = NonNull::new(va.cast::<u8>()) else { return Ok(0) };
        let start = base.addr().get();
        let end = start.checked_add(len).filter(|_| isize::try_from(len).is_ok());
        let Some(end) = end else {
            return Err(fail!(EINVAL, "{len} bytes at {va:p} end beyond 64 bits"));
        };
        let mut ranges = pool.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((start, end)) = pool.overlap(&ranges, start, end) {
            return Err(fail!(
                EEXIST,
                "{len} bytes at {va:p} are the pool's already, in {start:#x} to {end:#x}: add each piece once"
            ));
        }
        if len == 0 {
            return Err(fail!(EINVAL, "0 bytes at {va:p}: pass memory of at least one block"));
        }
        let (claim, inside) = Claim::pool(start, len).map_err(|in_use| refuse_use(&in_use))?;
        let within = spans_of_all(start, len)?;
        // Of a chunk of another pool; or of memory that is being created, or that is no C object's.
        if within.iter().any(Span::is_pools) || (within.is_empty() && inside.is_some()) {
            let by = inside.filter(|_| within.is_empty()).unwrap_or(ClaimedFor::Pool);
            let (addr, other, other_len) = (start, start, len);
            return Err(refuse_use(&InUse { addr, len, other, other_len, by }));
        }
        let memory = NonNull::slice_from_raw_parts(base, len);
        memory::populate(memory).map_err(|error| Failure::from(&error))?;
        // SAFETY: as the caller promises; no part of it was added before.
        let blocks = unsafe { pool.pool.add_range(memory, Iova::new(iova)) }
            .map_err(|error| Failure::from(&error))?;
        ranges.insert(start, Added { end, within, claim });
        // Of 32 bits.
        added = i64::try_from(blocks).unwrap_or(i64::MAX);
        Ok(0)
    });
    if code < 0 { code.into() } else { added }
}

impl pf_pool_t {
    pub(crate) fn stats(&self) -> DmaPoolStats {
        self.pool.stats()
    }

    /// Returns memory of the pool that overlaps with this.
    fn overlap(
        &self,
        ranges: &BTreeMap<usize, Added>,
        start: usize,
        end: usize,
    ) -> Option<(usize, usize)> {
        let added = ranges.range(..end).next_back().map(|(&start, added)| (start, added.end));
        let arena = self.source.as_ref().map(|source| {
            let region = source.region();
            (region.addr(), region.addr() + region.len())
        });
        [added, arena].into_iter().flatten().find(|other| other.0 < end && start < other.1)
    }
}

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

/// Allocates a block. Its content is what the last user left.
///
/// @cache: the cache.
/// @block: where the addresses and the length are stored; its tag stays.
///
/// Return: 0, or -errno: ENOMEM (the pool has no free block and no more memory: the message says
/// which limit); EFAULT; EBADF; EBUSY (another thread is in a call with the cache).
/// Thread: the cache's. Allocates when the pool takes more memory, and where it is refused: its
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

/// How many blocks are moved between the caller's array and the pool at once.
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

/// Returns a pool's counters. O(blocks).
///
/// @pool: the pool.
/// @stats: where they are stored; its `struct_size` is set before.
///
/// Return: 0, or -errno: EINVAL (`struct_size`); EFAULT; EBADF.
/// Thread: any. Since 0.2.
///
/// # Safety
/// `stats` is null, or as many bytes can be written as its first field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_pool_stats(pool: *mut pf_pool_t, stats: *mut pf_pool_stats) -> c_int {
    call(|| {
        let now = POOLS.get(pool)?.pool.stats();
        let described = pf_pool_stats {
            struct_size: 0,
            block_bytes: now.block_bytes,
            blocks: now.blocks,
            in_use: now.in_use,
            free: now.cached + now.in_depot,
            cached: now.cached,
            peak: now.peak,
            chunks: now.chunks,
            bytes: now.bytes,
            damaged: now.damaged,
        };
        // SAFETY: as the caller promises.
        unsafe { fill(stats, &described, "stats") }?;
        Ok(0)
    })
}

/// Writes the pool's report, in the format of the kernel's `pools` file: a line "poolinfo - 0.1",
/// then one of name, blocks in use, all blocks, bytes of a block, chunks.
///
/// @pool: the pool.
/// @text: where it is written, with a NUL at its end; NULL with `size` 0: only the length is
/// needed.
/// @size: bytes of `text`; what does not fit is left out.
///
/// Return: the length of all of the report, without the NUL; or -errno: EFAULT; EBADF.
/// Thread: any. Since 0.2.
///
/// # Safety
/// `text` is null or `size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_pool_report(
    pool: *mut pf_pool_t,
    text: *mut c_char,
    size: usize,
) -> c_int {
    call(|| {
        let report = POOLS.get(pool)?.pool.stats().to_string();
        if let Some(room) = size.checked_sub(1) {
            check_out(text, "text")?;
            let len = report.len().min(room);
            // SAFETY: `text` has `size` bytes, more than `len`, and the report at least `len`.
            unsafe { std::ptr::copy_nonoverlapping(report.as_ptr(), text.cast::<u8>(), len) };
            // SAFETY: within `text`.
            unsafe { text.wrapping_add(len).write(0) };
        }
        Ok(c_int::try_from(report.len()).unwrap_or(c_int::MAX))
    })
}

/// Gives memory of which all blocks are free back to the arena, as far as the minimum allows.
/// Blocks that caches keep stay; what was added with pf_pool_add() stays. What a mapping or a
/// request uses still goes back with a later call.
///
/// @pool: the pool.
///
/// Return: how many bytes; or -errno: EBADF.
/// Thread: any. Takes time proportional to the blocks. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_pool_shrink(pool: *mut pf_pool_t) -> i64 {
    let mut bytes = 0;
    let code = call(|| {
        // Less than the address space.
        bytes = i64::try_from(POOLS.get(pool)?.pool.shrink()).unwrap_or(i64::MAX);
        Ok(0)
    });
    if code < 0 { code.into() } else { bytes }
}

/// Gives a pool back: its memory goes back to the arena, and what was added to it is the caller's
/// again.
///
/// @pool: the pool; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (blocks are allocated, caches exist, or a mapping or a request uses
/// memory of the arena that the pool has: the message says how many); EBADF. The pool is as before
/// then.
/// Thread: any. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_pool_destroy(pool: *mut pf_pool_t) -> c_int {
    call(|| {
        if !pool.is_null() {
            drop(POOLS.remove(pool, |pool| pool.check_unused())?);
        }
        Ok(0)
    })
}

impl pf_pool_t {
    /// Refuses while blocks are allocated, caches exist, or a device uses memory of it.
    fn check_unused(&self) -> Result<(), Failure> {
        // Of a second handle, so it is refused in any case, with what there is.
        let Err(busy) = self.pool.clone().destroy() else { return Ok(()) };
        // But for this one.
        let (blocks, caches) = (busy.blocks, busy.handles.saturating_sub(1));
        if blocks == 0 && caches == 0 {
            return self.source.as_ref().map_or(Ok(()), |source| source.check_unused());
        }
        let name = self.pool.name();
        let one = match (busy.first, busy.holder) {
            (Some(block), Some(holder)) => {
                format!(", one of them at {:p} by cache {holder}", block.as_ptr())
            }
            (Some(block), None) => format!(", one of them at {:p}", block.as_ptr()),
            _ => String::new(),
        };
        Err(fail!(
            EBUSY,
            "{blocks} blocks of pool \"{name}\" are in use{one}, and {caches} caches of it exist: free the blocks with \
             pf_put_bulk, then pf_cache_destroy"
        ))
    }
}

#[cfg(test)]
#[cfg(not(handle_model))]
mod tests {
    use super::*;
    use pinfold::OwnedMemory;
    use std::ptr::null_mut;

    /// Of Rust code in the same process, or of a call that is not done yet.
    #[test]
    fn memory_of_an_owner_that_is_no_c_object_is_refused() {
        let opts =
            pf_pool_opts { struct_size: size_of::<pf_pool_opts>(), size: 64, ..Options::DEFAULT };
        let mut pool = null_mut();
        // SAFETY: the options have their size; the handle can be written.
        assert_eq!(unsafe { pf_pool_create(null_mut(), &raw const opts, &raw mut pool) }, 0);
        let memory = OwnedMemory::from_vec(vec![0; 64 << 10]).unwrap();
        let piece = memory.take().unwrap();
        let base: *mut c_void = piece.memory().as_ptr().as_ptr().cast();
        // SAFETY: it is refused.
        let add = || unsafe { pf_pool_add(pool, base, 4096, 0) };
        assert_eq!(add(), -i64::from(libc::EEXIST));
        drop(piece);
        let owner: Vec<u8> = memory.reclaim().unwrap();
        // Now nothing else uses it.
        assert_eq!(add(), 64);
        assert_eq!(pf_pool_destroy(pool), 0);
        drop(owner);
    }
}
