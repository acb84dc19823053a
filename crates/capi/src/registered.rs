//! Registered memory: any memory of the program, mapped for the devices of a domain until it is
//! unregistered, and handed to the program's io_uring.

use crate::arena::refuse_use;
use crate::block::{Addresses, pf_block_t, write_block};
use crate::domain::{DOMAINS, State, pf_domain_t};
use crate::failure::{Counted, Failure, call, check_out, fail, store};
use crate::handle::Table;
use crate::lists::{self, Lists};
use crate::region::Region;
use crate::rings::Rings;
use pinfold::memory;
use pinfold::{MappingPolicy, OwnedMemory, Segment};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory that the program already has, in a domain.
pub struct pf_reg_t {
    memory: OwnedMemory,
    /// It has the only piece of the memory.
    region: Arc<Region>,
    state: Arc<State>,
    /// The rings that have it.
    rings: Rings,
}

static REGS: Table<pf_reg_t> = Table::new(8, "registration");

const PAGE: usize = 4096;

/// Registers memory of the program with a domain: whole pages, of any origin. Until
/// pf_reg_destroy() all of it is mapped there, for reading and writing, so that pf_iova(),
/// pf_segments() and requests find it by its address.
///
/// The pages are faulted in; no other attribute of theirs (mlock(), madvise()) is changed. Where
/// they are hugepages, the addresses are such that leaves of 2 MiB or 1 GiB map them, also where
/// the memory begins within one. A real device's mapping pins them, and RLIMIT_MEMLOCK is charged
/// `len` bytes for each domain; the table of a ring is charged hugepages whole, once.
///
/// Memory may be registered with several domains, by one call for each, always as the same bytes:
/// it stays one memory of the program, which has it back when the last of the registrations has
/// ended. What is part of an arena, or overlaps with other bytes that are registered, in any domain
/// of the process, is refused: such bytes would have two owners, of which one could free them while
/// the device of the other reaches them. pf_arena_map_into() shares an arena between domains.
///
/// @domain: the domain.
/// @va: the memory, at a multiple of 4096.
/// @len: bytes, a multiple of 4096.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EINVAL (no whole pages, or 0 bytes); EFAULT (a page is not mapped, not
/// readable and writable, beyond the end of its file, or has no hugepage left: the message has the
/// first; or `out` is NULL); EEXIST (it is registered in this domain, or part of it is an arena's
/// or registered otherwise, in any domain: the message says what); ENOMEM, ENOSPC (RLIMIT_MEMLOCK,
/// or the domain's limits); EIO (the IOMMU); EBADF; ENFILE. Nothing is registered then.
/// Thread: any. Allocates; linear in the pages; waits for the handler of a userfaultfd. Ownership:
/// the caller's, which keeps the memory mapped and of this process until pf_reg_destroy() has
/// returned 0 for each registration of it. Since 0.2.
///
/// # Safety
/// `out` is null or can be written; the memory stays mapped until it has been unregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_register(
    domain: *mut pf_domain_t,
    va: *mut c_void,
    len: usize,
    out: *mut *mut pf_reg_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let state = Arc::clone(&DOMAINS.get(domain)?.state);
        let memory = check_memory(va, len)?;
        // SAFETY: the caller keeps the memory mapped until it is unregistered, and is C: no
        // reference into it exists, and none is made of it here.
        let owned = unsafe { OwnedMemory::joint(memory, ()) };
        let owned = owned.map_err(|error| match &error.in_use {
            Some(in_use) => refuse_use(in_use),
            None => fail!(EINVAL, "{error}"),
        })?;
        if state.has(va.addr(), len) {
            return Err(registered_here(va, len));
        }
        // Once it is known to be no other's, which is not touched.
        memory::populate(memory).map_err(|error| Failure::from(&error))?;
        let mapped = owned.map_into(&state.domain, MappingPolicy::Whole);
        mapped.map_err(|error| Failure::from(&error))?;
        let piece = owned.take().ok_or_else(|| fail!(EINVAL, "the memory is in use"))?;
        let region = Arc::new(Region::registered(piece, &[state.domain.id()]));
        let added = Arc::clone(&region);
        let reg =
            pf_reg_t { memory: owned, region, state: Arc::clone(&state), rings: Rings::default() };
        let handle = REGS.insert(reg)?;
        // Added last: from here on other threads use it.
        state.add(&added);
        drop(added);
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }.map(|()| 0)
    })
}

/// Returns the memory, if it is whole pages.
fn check_memory(va: *mut c_void, len: usize) -> Result<NonNull<[u8]>, Failure> {
    let Some(base) = NonNull::new(va) else {
        return Err(fail!(EFAULT, "`va` is NULL: pass the memory's address"));
    };
    if (va.addr() | len).is_multiple_of(PAGE) && va.addr().checked_add(len).is_none() {
        return Err(fail!(
            EINVAL,
            "cannot register {len:#x} bytes at {va:p}: they end beyond the last address"
        ));
    }
    let whole =
        len > 0 && (va.addr() | len).is_multiple_of(PAGE) && va.addr().checked_add(len).is_some();
    if !whole || isize::try_from(len).is_err() {
        return Err(fail!(
            EINVAL,
            "cannot register {len:#x} bytes at {va:p}: address and length must be multiples of 4096, the length at \
             least that; allocate it with aligned_alloc or mmap"
        ));
    }
    Ok(NonNull::slice_from_raw_parts(base.cast(), len))
}

#[cold]
fn registered_here(va: *mut c_void, len: usize) -> Failure {
    fail!(
        EEXIST,
        "cannot register {len:#x} bytes at {va:p}: they are registered in this domain already; call pf_reg_destroy for \
         those first"
    )
}

/// Unregisters memory: no device of its domain reaches it afterwards. Those of other domains that
/// it is registered with still do.
///
/// @reg: the registration; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (mappings, requests or a pool use it, or it is in the table of a
/// ring: the message says how many; or another thread is in a call with it); EBADF; EIO (the device
/// could not be kept from it: the registration is gone, but keep the memory mapped until the
/// process ends).
/// Thread: any. Constant time where it is refused, but for late flushes that have completed; it
/// waits for a pf_uring_register() of another thread with it. Calls of other threads with the
/// registration are not refused for it. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_reg_destroy(reg: *mut pf_reg_t) -> c_int {
    call(|| {
        if reg.is_null() {
            return Ok(0);
        }
        // Most that are refused are so here, where no other thread waits for it.
        REGS.get(reg)?.check_all_released()?;
        let removed = REGS.remove(reg, |reg| {
            let reg = &*reg;
            State::take_out(std::slice::from_ref(&reg.state), &reg.region, &|| reg.check_unused())
        })?;
        let pf_reg_t { memory, region, .. } = removed;
        drop(region);
        memory
            .reclaim::<()>()
            .map_err(|error| fail!(EIO, "{error}; keep it mapped: a device may still reach it"))?;
        Ok(0)
    })
}

impl pf_reg_t {
    /// Like [`check_unused`](Self::check_unused), when late revocations have released what they can.
    fn check_all_released(&self) -> Result<(), Failure> {
        if self.region.uses() > 0 {
            self.state.domain.release_late();
        }
        self.check_unused()
    }

    /// Refuses while anything uses it. O(1).
    fn check_unused(&self) -> Result<(), Failure> {
        let (uses, rings) = (self.region.uses(), self.rings.count());
        if rings == 0 && uses == 0 {
            return Ok(());
        }
        Err(fail!(
            EBUSY,
            "the memory is in use by {}, and in {}: end them first, the latter with pf_uring_unregister",
            Counted(uses, "mapping or request or pool piece"),
            Counted(rings as u64, "ring table")
        ))
    }

    /// Returns `len` bytes from `off` as the device addresses them.
    fn segment(&self, off: usize, len: usize) -> Result<Segment, Failure> {
        let bytes = self.region.len();
        let inside = off.checked_add(len).is_some_and(|end| len > 0 && end <= bytes);
        let place = self.region.place(self.state.domain.id());
        match place.and_then(|place| place.checked_add(off as u64)).filter(|_| inside) {
            Some(iova) => Ok(Segment { iova, len: len as u64 }),
            None if len == 0 => Err(fail!(EINVAL, "0 bytes from {off}: pass at least 1")),
            None => Err(fail!(
                EINVAL,
                "{len} bytes from {off} are not inside the {bytes} bytes that are registered"
            )),
        }
    }
}

/// Cuts a part of registered memory into segments that a device can address in one piece, of less
/// than 4 GiB each.
///
/// @reg: the registration.
/// @off: where the part begins.
/// @len: bytes, at least 1.
/// @segments: where the segments are stored; their `tag` is not changed.
/// @max: how many can be stored.
///
/// Return: how many there are, or -errno: ENOSPC (more than `max`: the message says how many);
/// EINVAL (not inside the memory, or 0 bytes); EFAULT; EBADF. Nothing is stored then.
/// Thread: any. Since 0.2.
///
/// # Safety
/// `segments` is null, or `max` elements can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_segments(
    reg: *mut pf_reg_t,
    off: usize,
    len: usize,
    segments: *mut pf_block_t,
    max: c_uint,
) -> c_int {
    call(|| {
        check_out(segments, "segments")?;
        let reg = REGS.get(reg)?;
        // Their number follows `len`: counted first, so that nothing is stored where they do not fit.
        let whole = reg.segment(off, len)?;
        for segment in lists::segments([whole], max)? {
            segment?;
        }
        let cut = lists::segments([whole], max)?.filter_map(Result::ok);
        let mut count = 0;
        let mut addr = reg.region.addr() + off;
        for segment in cut {
            let to = segments.wrapping_add(count as usize);
            count += 1;
            let len = u32::try_from(segment.len).unwrap_or(u32::MAX);
            let block =
                Addresses { va: reg.region.pointer(addr).as_ptr(), iova: segment.iova.raw() };
            // SAFETY: one of the `max` elements, all of which the caller promises.
            unsafe { write_block(to, block, len) };
            addr += len as usize;
        }
        Ok(count)
    })
}

/// Lays out a part of registered memory as the PRP entries of an NVMe command, for a controller
/// with pages of 4096 bytes (NVM Express Base Specification, section 4.1.1).
///
/// @reg: the registration, of the controller's domain.
/// @off: where the part begins: a multiple of 4.
/// @len: bytes, at least 1.
/// @lists: pages for PRP lists, each 4096 bytes and aligned for the controller, as pf_get() of a
/// pool of such blocks gives them. They are in use until the command has completed. At most 64 are
/// used: 127 MiB.
/// @n_lists: how many. Nothing changes the array meanwhile, so it is in none of the pages.
/// @prp: where PRP1 and PRP2 are stored.
///
/// Return: how many list pages are used, the first of those passed; or -errno: ENOSPC (too few list
/// pages); EINVAL (not inside the memory, 0 bytes, `off`, or a list page that is not as above);
/// EFAULT; EBADF. Then nothing is stored, except in list pages.
/// Thread: any. Since 0.2.
///
/// # Safety
/// `lists` is null or has `n_lists` elements, which nothing changes meanwhile, of memory that can be
/// written; `prp` is null, or two
/// elements can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_prp(
    reg: *mut pf_reg_t,
    off: usize,
    len: usize,
    lists: *const pf_block_t,
    n_lists: c_uint,
    prp: *mut u64,
) -> c_int {
    call(|| {
        check_out(prp, "prp")?;
        let reg = REGS.get(reg)?;
        // SAFETY: as the caller promises.
        let pages = unsafe { Lists::new(lists, n_lists) }?;
        let (entries, used) = lists::prp([reg.segment(off, len)?], pages)?;
        // SAFETY: as the caller promises.
        unsafe { store(prp.cast::<[u64; 2]>(), entries, "prp") }?;
        Ok(c_int::try_from(used).unwrap_or(c_int::MAX))
    })
}

/// Lays out a part of registered memory as the SGL of an NVMe command (NVM Express Base
/// Specification, section 4.1.2).
///
/// @reg: the registration, of the controller's domain.
/// @off: where the part begins.
/// @len: bytes, at least 1.
/// @lists: memory for arrays of descriptors, each at least 32 bytes and aligned to 8. They are in
/// use until the command has completed. At most 64 are used.
/// @n_lists: how many. None is needed for less than 4 GiB: the memory is one piece for the device.
/// @sgl1: where the 16 bytes of the command's descriptor are stored.
///
/// Return: how many list pages are used, the first of those passed; or -errno: ENOSPC (too few list
/// pages); EINVAL (not inside the memory, 0 bytes, or a list page that is not as above); EFAULT;
/// EBADF. Then nothing is stored, except in list pages.
/// Thread: any. Since 0.2.
///
/// # Safety
/// `lists` is null or has `n_lists` elements, which nothing changes meanwhile, of memory that can be
/// written; `sgl1` is null, or 16
/// bytes can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_sgl(
    reg: *mut pf_reg_t,
    off: usize,
    len: usize,
    lists: *const pf_block_t,
    n_lists: c_uint,
    sgl1: *mut u8,
) -> c_int {
    call(|| {
        check_out(sgl1, "sgl1")?;
        let reg = REGS.get(reg)?;
        // SAFETY: as the caller promises.
        let pages = unsafe { Lists::new(lists, n_lists) }?;
        let (descriptor, used) = lists::sgl([reg.segment(off, len)?], pages)?;
        // SAFETY: as the caller promises.
        unsafe { store(sgl1.cast::<[u8; 16]>(), descriptor, "sgl1") }?;
        Ok(c_int::try_from(used).unwrap_or(c_int::MAX))
    })
}

/// Hands registered memory to an io_uring of the program: READ_FIXED and WRITE_FIXED with this
/// index then use it, without the kernel pinning it for each. For an arena:
/// pf_uring_register_arena().
///
/// @reg: the registration, of at most 1 GiB.
/// @ring_fd: the ring, with a table of buffers (io_uring_register_buffers_sparse() makes one). It
/// is kept open until pf_uring_unregister().
/// @index: the place in the table; what is there is replaced, and is not in the table any more.
///
/// Return: 0, or -errno: EBADF (no ring, or no registration); ENXIO (the ring has no table); EINVAL
/// (no such place, or more than 1 GiB); ENOMEM (RLIMIT_MEMLOCK: the message says the command);
/// EFAULT (the kernel cannot pin it); EEXIST (the ring is another thread's). Nothing has changed
/// then.
/// Thread: any, unless the ring is one thread's. Linux 5.13. Allocates. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_uring_register(reg: *mut pf_reg_t, ring_fd: c_int, index: c_uint) -> c_int {
    call(|| {
        let reg = REGS.get(reg)?;
        reg.rings.register(reg.memory.fixed(), ring_fd, index).map(|()| 0)
    })
}

/// Removes registered memory from the table of a ring. Requests in flight keep the pages until they
/// have completed: the program waits for them before it uses the memory otherwise.
///
/// @reg: the registration.
/// @ring_fd: the ring, as pf_uring_register() got it; it may have been closed.
/// @index: the place in the table.
///
/// Return: 0, also where the ring's table is gone; or -errno: ENOENT (it is not there); EEXIST (the
/// ring is another thread's); EBADF.
/// Thread: any, unless the ring is one thread's. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_uring_unregister(reg: *mut pf_reg_t, ring_fd: c_int, index: c_uint) -> c_int {
    call(|| REGS.get(reg)?.rings.unregister(ring_fd, index).map(|()| 0))
}
