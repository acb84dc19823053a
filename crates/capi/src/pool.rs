//! Pools: blocks of one size that a device can reach.

use crate::arena::{ARENAS, pf_arena_t, refuse_use};
use crate::domain::{spans_of_all, text};
use crate::failure::{Failure, call, check_out, fail, store};
use crate::handle::Table;
use crate::options::{Options, fill, read_needed};
use crate::region::Span;
use crate::source::Marked;
use pinfold::Iova;
use pinfold::dma_pool::{DmaPool, DmaPoolStats};
use pinfold::memory::{self, Claim, ClaimedFor, InUse};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// A pool of blocks of one size.
pub struct pf_pool_t {
    pub(crate) pool: DmaPool,
    /// The source of its chunks; `None`: `ranges` only.
    pub(crate) source: Option<Arc<Marked>>,
    /// Memory of the caller, by its start. Dropped after the pool.
    ranges: Mutex<BTreeMap<usize, Added>>,
    /// Locked while it is looked for what is in use.
    checking: Mutex<()>,
    pub(crate) block_bytes: u32,
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

pub(crate) static POOLS: Table<pf_pool_t> = Table::new(4, "pool");

/// For pf_pool_opts.flags: free blocks are filled with a pattern, and writes to them counted
/// (pf_pool_stats.damaged). Each call takes a lock, and time proportional to the block.
pub const PF_POOL_DEBUG: u32 = 1 << 0;

/// Options of a pool. Set `struct_size` to its sizeof, and unused fields to 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_pool_opts {
    /// sizeof(struct pf_pool_opts).
    pub struct_size: usize,
    /// The name of the pool in reports and messages; NULL: "pool".
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
    /// Pieces of memory: chunks of the arena, and added memory.
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
/// @arena: the source of its memory, which is taken as needed; NULL: only from pf_pool_add().
/// @opts: the options; `size` at least.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EINVAL (size, align, boundary, limits, unknown flags, or a minimum without
/// an arena: the message has the value and its limit); ENOMEM (the arena has less than the minimum;
/// or there is no memory for the state of its blocks, a byte each, or for 8 bytes for each 2 MiB of
/// the arena); E2BIG (fields of a newer version); EBADF; EFAULT; ENFILE.
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
        let source = if arena.is_null() { None } else { Some(Marked::new(&*ARENAS.get(arena)?)) };
        // SAFETY: as the caller promises.
        let opts = unsafe { read_needed(opts) }?;
        // SAFETY: as the caller promises.
        let pool = unsafe { build(&opts, source.as_ref()) }?;
        // At most `i32::MAX`.
        let block_bytes = u32::try_from(pool.stats().block_bytes).unwrap_or(u32::MAX);
        let (ranges, checking) = (Mutex::default(), Mutex::default());
        let handle = POOLS.insert(pf_pool_t { pool, source, ranges, checking, block_bytes })?;
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
/// hugepage left: the message has the first; or NULL); ENOMEM (for the state of its blocks, a byte
/// each, and some 100 bytes for each 2 MiB); EBADF.
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
        // Refused: a chunk of another pool, memory that is being created, or memory of no C object.
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
        // The number has 32 bits.
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

/// Returns a pool's counters. O(blocks).
///
/// @pool: the pool.
/// @stats: where they are stored; its `struct_size` is set before.
///
/// Return: 0, or -errno: EINVAL (`struct_size`); EFAULT; EBADF.
/// Thread: any. Allocates. Since 0.2.
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
/// Thread: any. Allocates. Since 0.2.
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

/// Returns memory whose blocks are all free to the arena, as far as the minimum allows. Blocks in
/// caches stay, and so does memory added with pf_pool_add(). Memory that a mapping or a request
/// still uses is returned by a later call.
///
/// @pool: the pool.
///
/// Return: how many bytes; or -errno: EBADF.
/// Thread: any. Takes time proportional to the blocks. Allocates some 80 bytes for each chunk that
/// is free; one for which there is no memory is returned by a later call. Since 0.2.
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

/// Destroys a pool: its memory returns to the arena, and memory added to it is the caller's again.
///
/// @pool: the pool; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (blocks are allocated, caches exist, or a mapping or a request uses
/// memory of the arena that the pool has: the message says how many; or another thread is in a call
/// with it); EBADF. The pool is as before then.
/// Thread: any. Takes time proportional to the blocks. Calls of other threads with the pool and its
/// caches are not refused for it, and caches keep their blocks. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_pool_destroy(pool: *mut pf_pool_t) -> c_int {
    call(|| {
        if pool.is_null() {
            return Ok(0);
        }
        // Most that are refused are so here, where no other thread waits for it.
        POOLS.get(pool)?.check_unused()?;
        drop(POOLS.remove(pool, |pool| pool.check_unused())?);
        Ok(0)
    })
}

impl pf_pool_t {
    /// Refuses while blocks are allocated, caches exist, or a device uses memory of it.
    fn check_unused(&self) -> Result<(), Failure> {
        // One at a time: each counts the handle of the other.
        let _checking = self.checking.lock().unwrap_or_else(PoisonError::into_inner);
        // This destroys a second handle, so it is refused in any case, and reports the live blocks.
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

    /// The owner is Rust code in the same process, or a call in progress.
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
