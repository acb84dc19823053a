//! Arenas: pinned memory, and its allocation by address.

use crate::domain::{DOMAINS, State, pf_domain_t};
use crate::failure::{Counted, Failure, brief_call, call, call_pointer, check_out, fail, store};
use crate::handed::Handed;
use crate::handle::Table;
use crate::options::{Options, fill, read_needed};
use crate::region::Region;
use crate::rings::Rings;
use crate::trace::{Caller, Site, hook, pass_caller, pf_event_kind};
use pinfold::arena::BuildError;
use pinfold::memory::{ClaimedFor, InUse, Source};
use pinfold::{Arena, ArenaMemory, Buffer, MappingPolicy};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Pinned memory.
pub struct pf_arena_t {
    /// The descriptor of pf_arena_region(). Before the arena, whose descriptor it is.
    handed: Mutex<Option<Handed>>,
    pub(crate) arena: Arena,
    pub(crate) region: Arc<Region>,
    /// Its first domain, and those that it was mapped into.
    pub(crate) domains: Mutex<Vec<Arc<State>>>,
    /// The rings that have it.
    rings: Rings,
}

pub(crate) static ARENAS: Table<pf_arena_t> = Table::new(2, "arena");

/// Bits of pf_arena_opts.sources: the sources of the memory. Tried in the order of the bits.
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

/// For pf_arena_opts.policy: a device reaches only memory that pf_map() or a request maps, and the
/// memory of pools, at the addresses in their blocks. The default: 0 is the same.
pub const PF_POLICY_PER_USE: u32 = 1;
/// For pf_arena_opts.policy: all of the arena is mapped while it lives, so an address for the
/// device is known at once, and devices also reach memory that is not mapped, or no longer.
pub const PF_POLICY_WHOLE: u32 = 2;

/// Options of an arena. Set `struct_size` to its sizeof, and unused fields to 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_arena_opts {
    /// sizeof(struct pf_arena_opts).
    pub struct_size: usize,
    /// Bytes; rounded up to the page size of the source.
    pub size: u64,
    /// The caller's own memory, at a multiple of 4096, `size` bytes; NULL: from `sources`. All of
    /// its pages are faulted in, and must be readable and writable. Until pf_arena_destroy() has
    /// returned 0 the caller keeps it mapped so, and its bytes are no other arena's, no
    /// registration's and no pool's of this process, in any domain.
    ///
    /// It is not copied to children (MADV_DONTFORK), locked (mlock2() with MLOCK_ONFAULT) where
    /// RLIMIT_MEMLOCK allows it and the domain's mappings do not pin it, and bound to the NUMA node
    /// that is asked for. pf_arena_destroy() undoes that, and a call that is refused does: except
    /// where the caller had set it before pf_arena_create(), by /proc/self/smaps. What the caller
    /// sets between the two may be undone with it.
    pub va: *mut c_void,
    /// PF_SOURCE_*; 0: hugepages if there are any, else plain pages.
    pub sources: u32,
    /// PF_POLICY_*; 0: PF_POLICY_PER_USE.
    pub policy: u32,
    /// The number of the NUMA node plus one; 0: any.
    pub numa_node_plus_one: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: a size, a word, a pointer and four halves of words, without padding.
unsafe impl Options for pf_arena_opts {
    const DEFAULT: Self = Self {
        struct_size: 0,
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
    /// sizeof(struct pf_region): the caller sets it.
    pub struct_size: usize,
    /// Its address in this process.
    pub addr: *mut c_void,
    /// Bytes.
    pub len: usize,
    /// Its address for the devices of the arena's first domain; 0 unless it is mapped as a whole.
    pub iova: u64,
    /// The offset of the memory in the file.
    pub fd_offset: i64,
    /// The file descriptor, which stays the arena's: duplicate it to keep it. -1: none.
    pub fd: c_int,
    /// 0.
    pub flags: u32,
}

// SAFETY: words, pointers and two halves of a word, without padding.
unsafe impl Options for pf_region {
    const DEFAULT: Self = Self {
        struct_size: 0,
        addr: std::ptr::null_mut(),
        len: 0,
        iova: 0,
        fd_offset: 0,
        fd: -1,
        flags: 0,
    };
}

/// Obtains pinned memory and maps it into a domain.
///
/// @domain: the domain.
/// @opts: the options; `size` at least.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EINVAL (no size; unknown sources, policy or reserved fields; `va` or
/// `size` is not a multiple of 4096; no such NUMA node); EOVERFLOW (more than 1 TiB); E2BIG (fields
/// of a newer version); EEXIST (part of `va` is an arena's, registered or a pool's, in any domain
/// of the process: pf_arena_map_into() shares an arena between domains); ENOMEM (the message lists
/// each source that was tried, and what it lacks; or the 8 bytes that describe each page); EBADF;
/// EFAULT (a page of `va` is not mapped, not readable and writable, beyond the end of its file, or
/// has no hugepage left: the message has the first); ENFILE.
/// Thread: any. Allocates: 8 bytes for each 4096 of the arena, ENOMEM without them. Faults in `va`,
/// for which it waits for the handler of a userfaultfd. Ends with pf_arena_destroy(). Since 0.2.
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
        let opts = unsafe { read_needed(opts) }?;
        // SAFETY: as the caller promises of `va`.
        let arena = unsafe { build(&opts, &state) }?;
        let region = Arc::new(Region::arena(&arena)?);
        if arena.mapping_policy() == MappingPolicy::Whole {
            region.add_place(state.domain.id(), arena.iova());
        }
        let domains = Mutex::new(vec![Arc::clone(&state)]);
        let made = pf_arena_t {
            handed: Mutex::default(),
            arena,
            region: Arc::clone(&region),
            domains,
            rings: Rings::default(),
        };
        let handle = ARENAS.insert(made)?;
        // Last: it is taken out by its handle.
        state.add(&region);
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }.map(|()| 0)
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
    builder.build(&state.domain).map_err(|error| match error {
        BuildError::InUse(in_use) => refuse_use(&in_use),
        error => Failure::from(&error),
    })
}

/// Refuses memory of the program that another object of the process uses.
#[cold]
pub(crate) fn refuse_use(in_use: &InUse) -> Failure {
    let InUse { addr, len, other, other_len, by } = in_use;
    let next = match by {
        ClaimedFor::Arena => {
            "take other memory; pf_arena_map_into shares an arena between domains, and pf_uring_register_arena with a \
             ring"
        }
        ClaimedFor::Registration | ClaimedFor::Owned => {
            "call pf_reg_destroy for those first, or register exactly those in another domain"
        }
        ClaimedFor::Pool => "call pf_pool_destroy for the pool first, or take other memory",
    };
    fail!(
        EEXIST,
        "cannot take {len:#x} bytes at {addr:#x}: {other_len:#x} bytes at {other:#x} {by}; {next}"
    )
}

/// Maps an arena into another domain, too: a device there reaches it as well.
///
/// @arena: the arena.
/// @domain: the domain.
/// @iova: where the arena's address for its devices is stored (0 unless PF_POLICY_WHOLE); NULL: not
/// needed.
///
/// Return: 0, or -errno: EEXIST (part of its memory is registered in this domain); ENOMEM, ENOSPC
/// (the domain's limits); EBADF.
/// Thread: any. Allocates. It stays mapped until pf_arena_destroy(). Since 0.2.
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
            state.add_again(&arena.region);
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

/// Puts an arena in the table of an io_uring of the program: READ_FIXED and WRITE_FIXED with this
/// index then use its memory, without the kernel pinning it for each. The arena stays what it is,
/// in its domains.
///
/// @arena: the arena, of at most 1 GiB.
/// @ring_fd: the ring, with a table of buffers (io_uring_register_buffers_sparse() makes one). It
/// is kept open until pf_uring_unregister_arena().
/// @index: the place in the table; what is there is replaced, and is not in the table any more.
///
/// Return: 0, or -errno, as pf_uring_register(). Nothing has changed then.
/// Thread: any, unless the ring is one thread's. Linux 5.13. Allocates. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_uring_register_arena(
    arena: *mut pf_arena_t,
    ring_fd: c_int,
    index: c_uint,
) -> c_int {
    call(|| {
        let arena = ARENAS.get(arena)?;
        arena.rings.register(arena.arena.fixed(), ring_fd, index).map(|()| 0)
    })
}

/// Removes an arena from the table of a ring. Requests in flight keep its pages until they have
/// completed: the program waits for them before it frees their memory.
///
/// @arena: the arena.
/// @ring_fd: the ring, as pf_uring_register_arena() got it; it may have been closed.
/// @index: the place in the table.
///
/// Return: 0, or -errno, as pf_uring_unregister().
/// Thread: any, unless the ring is one thread's. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_uring_unregister_arena(
    arena: *mut pf_arena_t,
    ring_fd: c_int,
    index: c_uint,
) -> c_int {
    call(|| ARENAS.get(arena)?.rings.unregister(ring_fd, index).map(|()| 0))
}

/// Destroys an arena: its memory is unmapped and freed, or is the caller's again.
///
/// @arena: the arena; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (memory of it is allocated, mapped, in a request, in a pool, or in
/// the table of a ring, or a pool, a controller or a handle of frames exists that may allocate from
/// it: the message says how many bytes, and how many of these; or another thread is in a call with
/// it); EBADF.
/// Thread: any. Constant time where it is refused. Calls of other threads with the arena are not
/// refused for it: they wait while it is decided, and are EBADF if it has ended. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_arena_destroy(arena: *mut pf_arena_t) -> c_int {
    call(|| {
        if arena.is_null() {
            return Ok(0);
        }
        // Most that are refused are so here, where no other thread waits for it.
        ARENAS.get(arena)?.check_unused()?;
        let ended = ARENAS.remove(arena, |arena| {
            let domains = arena.domains.lock().unwrap_or_else(PoisonError::into_inner);
            State::take_out(&domains, &arena.region, &|| arena.check_unused())
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
/// Thread: any. Allocates where it is refused: its message. Ownership: the caller's, until
/// pf_free(). Since 0.2.
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
/// Thread: any. Allocates where it is refused: its message. Since 0.2.
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
    /// Refuses while any of it is in use. O(1): an allocation, what a mapping or a request of it
    /// uses, and the memory of pools are frames in use.
    fn check_unused(&self) -> Result<(), Failure> {
        let used = self.arena.stats().frames_in_use * 4096;
        let (holders, rings) = (self.region.holders(), self.rings.count());
        if used == 0 && holders == 0 && rings == 0 {
            return Ok(());
        }
        Err(fail!(
            EBUSY,
            "{used} bytes of the arena are in use: allocated, mapped, or in pools and queues; {holders} pools, controllers and \
             handles of frames allocate from it, and it is in {}: free, unmap and destroy them first",
            Counted(rings as u64, "ring table")
        ))
    }

    /// Passes a buffer to the C program, which owns its address from then on.
    pub(crate) fn hand_out(&self, buffer: Buffer, iova: u64, site: Site) -> NonNull<u8> {
        let memory = buffer.into_raw();
        let (va, len) = (memory.cast::<u8>(), memory.len());
        self.region.mark_allocated(va.addr().get(), len);
        if let Some(hook) = hook() {
            hook.report(pf_event_kind::PF_EVENT_ALLOC, va.as_ptr(), iova, len as u64, site);
        }
        va
    }

    /// Takes ownership of a buffer back from the C program.
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
/// Thread: any. Since 0.2.
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
/// Another mapping of the file has addresses of its own, which the library treats as other memory:
/// a program that registers them guarantees that memory freed by the arena is not in use.
///
/// @arena: the arena.
/// @region: where the description is stored; its `struct_size` is set before.
///
/// Return: 0, or -errno: EINVAL (`struct_size`); EMFILE; EFAULT; EBADF.
/// Thread: any. Since 0.2.
///
/// # Safety
/// `region` is null, or as many bytes can be written as its first field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_arena_region(arena: *mut pf_arena_t, region: *mut pf_region) -> c_int {
    call(|| {
        let arena = ARENAS.get(arena)?;
        let whole = arena.arena.mapping_policy() == MappingPolicy::Whole;
        let mut handed = arena.handed.lock().unwrap_or_else(PoisonError::into_inner);
        let fd = arena.arena.memfd().map(|own| Handed::of(&mut handed, own)).transpose();
        let fd = fd.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
            Failure::new(errno, format!("cannot duplicate the arena's descriptor: {error}"))
        })?;
        let described = pf_region {
            struct_size: 0,
            addr: arena.region.pointer(arena.region.addr()).as_ptr().cast(),
            len: arena.region.len(),
            iova: if whole { arena.arena.iova().raw() } else { 0 },
            fd_offset: 0,
            fd: fd.unwrap_or(-1),
            flags: 0,
        };
        // SAFETY: as the caller promises.
        unsafe { fill(region, &described, "region") }?;
        Ok(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{pf_domain_destroy, pf_domain_soft};
    use std::ptr::null_mut;

    /// A program may map it for each request: what the arena keeps of its domains does not grow.
    #[test]
    fn an_arena_keeps_each_of_its_domains_once() {
        let mut made = [null_mut(); 2];
        for domain in &mut made {
            // SAFETY: the result is a local.
            assert_eq!(unsafe { pf_domain_soft(domain) }, 0);
        }
        let opts = pf_arena_opts {
            struct_size: size_of::<pf_arena_opts>(),
            size: 4096,
            policy: PF_POLICY_WHOLE,
            ..pf_arena_opts::DEFAULT
        };
        let mut arena = null_mut();
        // SAFETY: options and result are locals.
        assert_eq!(unsafe { pf_arena_create(made[0], &raw const opts, &raw mut arena) }, 0);
        for _ in 0..3 {
            for domain in made {
                // SAFETY: NULL is allowed.
                assert_eq!(unsafe { pf_arena_map_into(arena, domain, null_mut()) }, 0);
            }
        }
        assert_eq!(ARENAS.get(arena).unwrap().domains.lock().unwrap().len(), 2);
        assert_eq!(pf_arena_destroy(arena), 0);
        made.into_iter().for_each(|domain| assert_eq!(pf_domain_destroy(domain), 0));
    }
}
