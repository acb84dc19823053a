//! Arenas: pinned memory, and its allocation by address.

use crate::domain::{DOMAINS, State, pf_domain_t};
use crate::failure::{Failure, brief_call, call, call_pointer, check_out, fail, store};
use crate::handle::Table;
use crate::options::{Options, read};
use crate::region::Region;
use crate::trace::{Caller, Site, hook, pass_caller, pf_event_kind};
use pinfold::memory::Source;
use pinfold::{Arena, ArenaMemory, Buffer, MappingPolicy};
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Pinned memory.
pub struct pf_arena_t {
    pub(crate) arena: Arena,
    pub(crate) region: Arc<Region>,
    /// Its first domain, and those that it was mapped into.
    pub(crate) domains: Mutex<Vec<Arc<State>>>,
}

pub(crate) static ARENAS: Table<pf_arena_t> = Table::new(2, "arena");

/// Bits of pf_arena_opts.sources: what the memory may come from. Tried in the order of the bits.
pub const PF_SOURCE_HUGETLB_1G: u32 = 1 << 0;
/// 2 MiB pages of the hugetlb pool.
pub const PF_SOURCE_HUGETLB_2M: u32 = 1 << 1;
/// Transparent hugepages.
pub const PF_SOURCE_THP: u32 = 1 << 2;
/// 4 KiB pages.
pub const PF_SOURCE_PLAIN: u32 = 1 << 3;
/// A memfd of 4 KiB pages: pf_arena_region() has its file descriptor.
pub const PF_SOURCE_MEMFD: u32 = 1 << 4;
/// A memfd of 2 MiB pages.
pub const PF_SOURCE_MEMFD_2M: u32 = 1 << 5;
/// A memfd of 1 GiB pages.
pub const PF_SOURCE_MEMFD_1G: u32 = 1 << 6;

const SOURCES: [Source; 7] = [
    Source::Hugetlb1G,
    Source::Hugetlb2M,
    Source::Thp,
    Source::Plain,
    Source::Memfd,
    Source::Memfd2M,
    Source::Memfd1G,
];

/// For pf_arena_opts.policy: a device reaches only what pf_map() or a request maps, and the memory
/// of pools, at the addresses in their blocks. The default: 0 is the same.
pub const PF_POLICY_PER_USE: u32 = 1;
/// For pf_arena_opts.policy: all of the arena is mapped while it lives, so an address for the
/// device is known at once, and devices reach also what is not mapped, or not any more.
pub const PF_POLICY_WHOLE: u32 = 2;

/// Options of an arena. Set `opts_size` to its sizeof, and what is not needed to 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_arena_opts {
    /// sizeof(struct pf_arena_opts).
    pub opts_size: usize,
    /// Bytes; rounded up to the page size of the source.
    pub size: u64,
    /// The caller's own memory, at a multiple of 4096, `size` bytes; NULL: from `sources`. The
    /// caller keeps it mapped until pf_arena_put() has returned 0.
    pub va: *mut c_void,
    /// PF_SOURCE_*; 0: hugepages if there are any, else plain pages.
    pub sources: u32,
    /// PF_POLICY_*; 0: PF_POLICY_PER_USE.
    pub policy: u32,
    /// One more than the number of the NUMA node; 0: any.
    pub numa_node_plus_one: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: a size, a word, a pointer and four halves of words, without padding.
unsafe impl Options for pf_arena_opts {
    const DEFAULT: Self = Self {
        opts_size: 0,
        size: 0,
        va: std::ptr::null_mut(),
        sources: 0,
        policy: 0,
        numa_node_plus_one: 0,
        reserved: 0,
    };
}

/// A region of memory, as libblkio's `struct blkio_mem_region` describes it, with its address for
/// devices.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_region {
    /// Its address in this process.
    pub addr: *mut c_void,
    /// Bytes.
    pub len: usize,
    /// Its address for the devices of the arena's first domain; 0 unless it is mapped as a whole.
    pub iova: u64,
    /// Where it begins in the file.
    pub fd_offset: i64,
    /// The file descriptor, which stays the arena's: duplicate it to keep it. -1: none.
    pub fd: c_int,
    /// 0.
    pub flags: u32,
}

/// Obtains pinned memory and maps it into a domain.
///
/// @domain: the domain.
/// @opts: the options; `size` at least.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EINVAL (no size; unknown sources, policy or reserved fields; `va` or
/// `size` is not a multiple of 4096; no such NUMA node); EOVERFLOW (more than 1 TiB); E2BIG (fields
/// of a newer version); EEXIST (part of `va` is an arena's or registered in this domain); ENOMEM
/// (the message lists each source that was tried, and what it lacks); EBADF; EFAULT; ENFILE.
/// Thread: any. Allocates. Ends with pf_arena_put(). Since 0.1.
///
/// # Safety
/// `opts` is null or points to as many bytes as its first field says; `out` is null or can be
/// written; `opts->va` is null or memory that stays mapped until the arena has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_arena_create(
    domain: *mut pf_domain_t,
    opts: *const pf_arena_opts,
    out: *mut *mut pf_arena_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let state = Arc::clone(&DOMAINS.get(domain)?.state);
        // SAFETY: as the caller promises.
        let opts = unsafe { read(opts) }?;
        // SAFETY: as the caller promises of `va`.
        let arena = unsafe { build(&opts, &state) }?;
        let region = Arc::new(Region::arena(&arena));
        if arena.mapping_policy() == MappingPolicy::Whole {
            region.add_place(state.domain.id(), arena.iova());
        }
        state.add(&region);
        let domains = Mutex::new(vec![Arc::clone(&state)]);
        match ARENAS.insert(pf_arena_t { arena, region: Arc::clone(&region), domains }) {
            // SAFETY: as the caller promises.
            Ok(handle) => unsafe { store(out, handle, "out") }.map(|()| 0),
            Err(failure) => {
                state.regions_mut().remove(&region.addr());
                Err(failure)
            }
        }
    })
}

/// # Safety
/// As for [`pf_arena_create`].
unsafe fn build(opts: &pf_arena_opts, state: &State) -> Result<Arena, Failure> {
    let policy = match opts.policy {
        0 | PF_POLICY_PER_USE => MappingPolicy::PerUse,
        PF_POLICY_WHOLE => MappingPolicy::Whole,
        other => {
            return Err(fail!(EINVAL, "policy {other}: pass PF_POLICY_WHOLE or PF_POLICY_PER_USE"));
        }
    };
    if opts.sources >> SOURCES.len() != 0 || opts.reserved != 0 {
        let (sources, reserved) = (opts.sources, opts.reserved);
        return Err(fail!(
            EINVAL,
            "sources {sources:#x}, reserved {reserved:#x}: set PF_SOURCE_* bits only, and reserved to 0"
        ));
    }
    if opts.size == 0 {
        return Err(fail!(EINVAL, "an arena of 0 bytes: set pf_arena_opts.size"));
    }
    let mut builder = Arena::builder().size(opts.size).mapping_policy(policy);
    if let Some(node) = opts.numa_node_plus_one.checked_sub(1) {
        builder = builder.numa_node(node);
    }
    if let Some(base) = NonNull::new(opts.va) {
        let len =
            usize::try_from(opts.size).map_err(|_| fail!(EOVERFLOW, "{} bytes", opts.size))?;
        // SAFETY: the caller keeps the memory mapped until the arena has ended, and uses it as
        // the arena's.
        builder = unsafe { builder.caller(base.cast(), len) };
    } else if opts.sources != 0 {
        let named = SOURCES.iter().enumerate().filter(|(bit, _)| opts.sources >> bit & 1 == 1);
        builder = builder.sources(named.map(|(_, source)| *source));
    }
    builder.build(&state.domain).map_err(|error| Failure::from(&error))
}

/// Maps an arena into another domain, too: a device there reaches it as well.
///
/// @arena: the arena.
/// @domain: the domain.
/// @iova: where the arena's address for its devices is stored (0 unless PF_POLICY_WHOLE); NULL: not
/// needed.
///
/// Return: 0, or -errno: EEXIST (part of its memory is registered in this domain); ENOMEM, ENOSPC (the
/// domain's limits); EBADF.
/// Thread: any. Allocates. It stays mapped until pf_arena_put(). Since 0.1.
///
/// # Safety
/// `iova` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_arena_map_into(
    arena: *mut pf_arena_t,
    domain: *mut pf_domain_t,
    iova: *mut u64,
) -> c_int {
    call(|| {
        let arena = ARENAS.get(arena)?;
        let state = Arc::clone(&DOMAINS.get(domain)?.state);
        let mut domains = arena.domains.lock().unwrap_or_else(PoisonError::into_inner);
        let mapped = arena.arena.map_into(&state.domain).map_err(|error| Failure::from(&error))?;
        let whole = mapped.mapping_policy() == MappingPolicy::Whole;
        if !domains.iter().any(|other| Arc::ptr_eq(other, &state)) {
            if whole {
                arena.region.add_place(state.domain.id(), mapped.iova());
            }
            state.add(&arena.region);
            domains.push(state);
        }
        if !iova.is_null() {
            let address = if whole { mapped.iova().raw() } else { 0 };
            // SAFETY: as the caller promises.
            unsafe { store(iova, address, "iova") }?;
        }
        Ok(0)
    })
}

/// Gives an arena back: its memory is unmapped and freed.
///
/// @arena: the arena; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (memory of it is allocated, mapped, in a request, or in a pool, or a
/// pool, a controller or a handle of frames exists that may allocate from it: the message says how
/// much of each); EBADF.
/// Thread: any. While it looks, calls of other threads with the arena give EBUSY, also pf_alloc() and
/// pf_free(). Since 0.1.
#[unsafe(no_mangle)]
pub extern "C" fn pf_arena_put(arena: *mut pf_arena_t) -> c_int {
    call(|| {
        if arena.is_null() {
            return Ok(0);
        }
        let ended = ARENAS.remove(arena, |arena| {
            let domains = arena.domains.lock().unwrap_or_else(PoisonError::into_inner);
            State::take_out(&domains, &arena.region, |region| {
                let (allocations, uses) = (region.allocations(), region.uses());
                let (holders, used) = (region.holders(), arena.arena.stats().frames_in_use * 4096);
                if allocations > 0 || uses > 0 || holders > 0 || used > 0 {
                    return Err(fail!(
                        EBUSY,
                        "{used} bytes of the arena are in use, in {allocations} allocations, the rest in pools and \
                         queues; {holders} pools, controllers and handles of frames allocate from it, {uses} mappings \
                         or requests use it: free, unmap and destroy them first"
                    ));
                }
                Ok(())
            })
        })?;
        drop(ended);
        Ok(0)
    })
}

/// Allocates memory of an arena: whole pages of 4096 bytes, zeroed, contiguous for the device.
///
/// @arena: the arena.
/// @len: bytes, at least 1; rounded up to pages.
/// @iova: where its address for the devices of the arena's first domain is stored (0 unless
/// PF_POLICY_WHOLE); NULL: not needed.
///
/// Return: the address; or NULL, and errno: ENOMEM (the message says how much is in use); EINVAL
/// (0 bytes); EBADF.
/// Thread: any. Ownership: the caller's, until pf_free(). Since 0.1.
///
/// # Safety
/// `iova` is null or can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_alloc(
    arena: *mut pf_arena_t,
    len: usize,
    iova: *mut u64,
) -> *mut c_void {
    pass_caller!(3, alloc);
}

unsafe extern "C" fn alloc(
    handle: *mut pf_arena_t,
    len: usize,
    iova: *mut u64,
    caller: Caller,
) -> *mut c_void {
    call_pointer(|| {
        let arena = ARENAS.get(handle)?;
        let buffer = arena.arena.alloc_zeroed(len).map_err(|error| Failure::from(&error))?;
        let address = arena.arena.iova_of(&buffer).map_or(0, |iova| iova.raw());
        if !iova.is_null() {
            // SAFETY: as the caller of `pf_alloc` promises.
            unsafe { store(iova, address, "iova") }?;
        }
        Ok(arena.hand_out(buffer, address, Site::new(caller, handle)).as_ptr().cast())
    })
}

/// Frees memory of pf_alloc() or of pf_frames_fill().
///
/// @arena: the arena that allocated it.
/// @va: its address, as it was returned; NULL does nothing.
///
/// Return: 0, or -errno: EINVAL (it is not allocated: freed before, or never; or it is inside an
/// allocation, or of another arena); EBUSY (a mapping or a request uses it). Nothing has changed
/// then. EBADF.
/// Thread: any. Since 0.1.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn pf_free(arena: *mut pf_arena_t, va: *mut c_void) -> c_int {
    pass_caller!(2, free);
}

extern "C" fn free(handle: *mut pf_arena_t, va: *mut c_void, caller: Caller) -> c_int {
    brief_call(|| {
        if !va.is_null() {
            let arena = ARENAS.get(handle)?;
            drop(arena.take_back(va.addr(), Site::new(caller, handle))?);
        }
        Ok(0)
    })
}

impl pf_arena_t {
    /// Gives a buffer to the C program, which has its address from then on.
    pub(crate) fn hand_out(&self, buffer: Buffer, iova: u64, site: Site) -> NonNull<u8> {
        let memory = buffer.into_raw();
        let (va, len) = (memory.cast::<u8>(), memory.len());
        self.region.mark_allocated(va.addr().get(), len);
        if let Some(hook) = hook() {
            hook.report(pf_event_kind::PF_EVENT_ALLOC, va.as_ptr(), iova, len as u64, site);
        }
        va
    }

    /// Takes a buffer back from the C program.
    ///
    /// # Errors
    /// As [`Region::claim`].
    pub(crate) fn take_back(&self, addr: usize, site: Site) -> Result<Buffer, Failure> {
        let len = self.region.claim(addr)?;
        let va = self.region.pointer(addr);
        if let Some(hook) = hook() {
            hook.report(pf_event_kind::PF_EVENT_FREE, va.as_ptr(), 0, len as u64, site);
        }
        let memory: &ArenaMemory = &self.arena;
        // SAFETY: `claim` has given the allocation, which `hand_out` had made of a buffer of this
        // arena, to this call alone, and no mapping or request uses it.
        let buffer = unsafe { Buffer::from_raw(memory, NonNull::slice_from_raw_parts(va, len)) };
        buffer.ok_or_else(|| fail!(EINVAL, "{addr:#x} is not whole pages of its arena"))
    }
}

/// Returns the address of memory for the devices of a domain, as vtophys functions do.
///
/// @domain: the domain.
/// @va: memory that is mapped there as a whole: of an arena of PF_POLICY_WHOLE, or registered. A
/// block or a page of another arena's pool has its address beside it.
/// @len: bytes that the caller needs, all of which are mapped there in one piece.
/// @iova: where the address is stored.
///
/// Return: 0, or -errno: ENXIO (it is not in this domain, or not mapped as a whole); EINVAL (not
/// allocated, or not `len` bytes of it); EFAULT; EBADF.
/// Thread: any. Since 0.1.
///
/// # Safety
/// `iova` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_iova(
    domain: *mut pf_domain_t,
    va: *const c_void,
    len: usize,
    iova: *mut u64,
) -> c_int {
    brief_call(|| {
        check_out(iova, "iova")?;
        let domain = DOMAINS.get(domain)?;
        let span = domain.state.span(va.addr(), len)?;
        let Some(address) = span.fixed(domain.state.domain.id()) else {
            return Err(fail!(ENXIO, "{va:p} is mapped per use: pf_map tells its address"));
        };
        // SAFETY: as the caller promises.
        unsafe { store(iova, address.raw(), "iova") }?;
        Ok(0)
    })
}

/// Describes an arena's memory, for a program that shares it by its file descriptor.
///
/// @arena: the arena.
/// @region: where the description is stored.
///
/// Return: 0, or -errno: EFAULT; EBADF.
/// Thread: any. Since 0.1.
///
/// # Safety
/// `region` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_arena_region(arena: *mut pf_arena_t, region: *mut pf_region) -> c_int {
    call(|| {
        let arena = ARENAS.get(arena)?;
        let whole = arena.arena.mapping_policy() == MappingPolicy::Whole;
        let described = pf_region {
            addr: arena.region.pointer(arena.region.addr()).as_ptr().cast(),
            len: arena.region.len(),
            iova: if whole { arena.arena.iova().raw() } else { 0 },
            fd_offset: 0,
            fd: arena.arena.memfd().map_or(-1, |fd| fd.as_raw_fd()),
            flags: 0,
        };
        // SAFETY: as the caller promises.
        unsafe { store(region, described, "region") }?;
        Ok(0)
    })
}
