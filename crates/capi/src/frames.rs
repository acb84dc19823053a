//! Frames: one thread's handle of an arena, for memory of 4096 bytes, many at a time.

use crate::arena::{ARENAS, pf_arena_t};
use crate::failure::{Failure, brief_call, call, check_out, count, fail, store};
use crate::handle::Table;
use crate::region::{Hold, PAGE};
use crate::trace::{Caller, Site, Tracer, hook, pass_caller, pf_event_kind};
use pinfold::{ArenaLocal, ArenaMemory, Buffer, MappingPolicy};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};

/// One thread's handle of an arena.
pub struct pf_frames_t {
    /// Before `hold`: its frames go back to the arena first.
    local: ArenaLocal,
    memory: ArenaMemory,
    /// The arena's address for the devices of its first domain, if it is mapped as a whole.
    iova: Option<u64>,
    hold: Hold,
}

static FRAMES: Table<pf_frames_t> = Table::new(3, "frames handle");

/// The number of frames moved between the caller's array and the arena at once.
const BATCH: usize = 64;

/// Creates one thread's handle of an arena, for allocating and freeing frames of 4096 bytes without
/// a lock. It caches frames, which go back when it ends or the arena runs short.
///
/// @arena: the arena.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EBADF; EFAULT; ENFILE.
/// Thread: any; then one thread at a time uses the handle. Allocates. Ends with
/// pf_frames_destroy(), and the arena not before. Since 0.2.
///
/// # Safety
/// `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_frames_create(
    arena: *mut pf_arena_t,
    out: *mut *mut pf_frames_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let arena = ARENAS.get(arena)?;
        let whole = arena.arena.mapping_policy() == MappingPolicy::Whole;
        let handle = FRAMES.insert(pf_frames_t {
            local: arena.arena.local(),
            memory: ArenaMemory::clone(&arena.arena),
            iova: whole.then(|| arena.arena.iova().raw()),
            hold: Hold::new(&arena.region),
        })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Ends a handle. Frames that were allocated through it stay allocated: pf_free() or another handle
/// of the arena frees them.
///
/// @frames: the handle; NULL does nothing.
///
/// Return: 0, or -errno: EBADF; EBUSY (another thread is in a call with it).
/// Thread: any. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_frames_destroy(frames: *mut pf_frames_t) -> c_int {
    call(|| {
        if !frames.is_null() {
            drop(FRAMES.remove(frames, |_| Ok(()))?);
        }
        Ok(0)
    })
}

/// Allocates a frame for each slot that is NULL, until the arena runs short. Slots that are not
/// NULL stay as they are. The content is what the last user left.
///
/// In an arena of 64 MiB or more, a call stops before the last 1/800 (at most 80 MiB) of it, which
/// is for pf_alloc(); but it allocates one frame, while there is one.
///
/// @frames: the handle.
/// @slots: the slots.
/// @n: how many; at most INT_MAX.
///
/// Return: how many slots are full now; or -errno: EINVAL (`n`); EFAULT; EBADF; EBUSY (another
/// thread is in a call with the handle).
/// Thread: the handle's. Ownership: the caller's, until pf_frames_free() or pf_free(). Since 0.2.
///
/// # Safety
/// `slots` is null or `n` pointers that can be read and written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_frames_fill(
    frames: *mut pf_frames_t,
    slots: *mut *mut c_void,
    n: c_uint,
) -> c_int {
    pass_caller!(3, fill_slots);
}

unsafe extern "C" fn fill_slots(
    handle: *mut pf_frames_t,
    slots: *mut *mut c_void,
    n: c_uint,
    caller: Caller,
) -> c_int {
    brief_call(|| {
        let mut frames = FRAMES.get_mut(handle)?;
        let n = count(n, slots, "slots")?;
        let trace = hook().map(|hook| (hook, Site::new(caller, handle)));
        let slot = |index| slots.wrapping_add(index);
        // SAFETY: one of the `n` slots of the caller, here and below.
        let is_empty = |index: usize| unsafe { slot(index).read_unaligned() }.is_null();
        let (mut missing, mut first) = (0, 0);
        while first < n {
            let end = n.min(first + BATCH);
            let wanted = (first..end).filter(|&index| is_empty(index)).count();
            let mut empty = (first..end).filter(|&index| is_empty(index));
            let taken = if missing > 0 {
                0
            } else {
                frames.take(wanted, trace, |va| {
                    if let Some(index) = empty.next() {
                        // SAFETY: one of the slots.
                        unsafe { slot(index).write_unaligned(va.as_ptr().cast()) };
                    }
                })
            };
            missing += wanted - taken;
            first = end;
        }
        // At most `n`, which a `c_int` holds.
        Ok(c_int::try_from(n - missing).unwrap_or(c_int::MAX))
    })
}

/// Allocates `n` frames and links them: the first word of each is the address of the next, NULL in
/// the last. Fewer if the arena runs short.
///
/// @frames: the handle.
/// @n: how many; at most INT_MAX.
/// @head: where the address of the first is stored: NULL if there is none.
///
/// Return: how many there are; or -errno, as for pf_frames_fill().
/// Thread: the handle's. Ownership: the caller's, each until pf_frames_free() or pf_free(). Since
/// 0.2.
///
/// # Safety
/// `head` is null or can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_frames_list(
    frames: *mut pf_frames_t,
    n: c_uint,
    head: *mut *mut c_void,
) -> c_int {
    pass_caller!(3, list);
}

unsafe extern "C" fn list(
    handle: *mut pf_frames_t,
    n: c_uint,
    head: *mut *mut c_void,
    caller: Caller,
) -> c_int {
    brief_call(|| {
        let mut frames = FRAMES.get_mut(handle)?;
        check_out(head, "head")?;
        let n = count(n, head, "head")?;
        let trace = hook().map(|hook| (hook, Site::new(caller, handle)));
        let (mut listed, mut next) = (0, head);
        while listed < n {
            let wanted = BATCH.min(n - listed);
            let taken = frames.take(wanted, trace, |va| {
                // SAFETY: where the caller wants the head, or the first word of the frame before,
                // which is this call's.
                unsafe { next.write_unaligned(va.as_ptr().cast()) };
                next = va.as_ptr().cast();
            });
            listed += taken;
            if taken < wanted {
                break;
            }
        }
        // SAFETY: as above.
        unsafe { next.write_unaligned(null_mut()) };
        Ok(c_int::try_from(listed).unwrap_or(c_int::MAX))
    })
}

/// Frees the memory in each slot that is not NULL, and makes the slot NULL, until one is refused.
///
/// @frames: a handle of the memory's arena.
/// @slots: memory of pf_frames_fill(), pf_frames_list() or pf_alloc(), of any handle.
/// @n: how many; at most INT_MAX.
///
/// Return: 0, or -errno: EINVAL (it is not allocated: freed before, or never; or it is inside an
/// allocation, or of another arena); EBUSY (a mapping or a request uses it, or another thread is in
/// a call with the handle). The message has the index of the slot, which stays with those behind
/// it. EFAULT; EBADF.
/// Thread: the handle's. Allocates where it is refused: its message. Since 0.2.
///
/// # Safety
/// `slots` is null or `n` pointers that can be read and written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_frames_free(
    frames: *mut pf_frames_t,
    slots: *mut *mut c_void,
    n: c_uint,
) -> c_int {
    pass_caller!(3, free_slots);
}

unsafe extern "C" fn free_slots(
    handle: *mut pf_frames_t,
    slots: *mut *mut c_void,
    n: c_uint,
    caller: Caller,
) -> c_int {
    brief_call(|| {
        let mut frames = FRAMES.get_mut(handle)?;
        let n = count(n, slots, "slots")?;
        let trace = hook().map(|hook| (hook, Site::new(caller, handle)));
        for index in 0..n {
            let slot = slots.wrapping_add(index);
            // SAFETY: one of the `n` slots of the caller.
            let va = unsafe { slot.read_unaligned() };
            if va.is_null() {
                continue;
            }
            if let Err(failure) = frames.free(va.addr(), trace) {
                return Err(failure.of(format!("slot {index} of {n} was refused")));
            }
            // SAFETY: as above.
            unsafe { slot.write_unaligned(null_mut()) };
        }
        Ok(0)
    })
}

/// The hook, and where the call comes from.
type Trace = Option<(Tracer, Site)>;

impl pf_frames_t {
    /// Allocates up to `wanted` frames, at most [`BATCH`], and passes each to `put`. Returns how
    /// many there were.
    fn take(&mut self, wanted: usize, trace: Trace, mut put: impl FnMut(NonNull<u8>)) -> usize {
        let Self { local, hold, .. } = self;
        let mut taken = [None; BATCH];
        let mut free = taken.iter_mut();
        let filled = local.fill_raw(wanted, |va| {
            hold.region().mark_page(va.addr().get());
            put(va);
            if trace.is_some()
                && let Some(place) = free.next()
            {
                *place = Some(va);
            }
        });
        for va in taken.into_iter().flatten() {
            self.report(trace, pf_event_kind::PF_EVENT_ALLOC, va, PAGE);
        }
        filled
    }

    /// Takes ownership of memory back from the C program.
    ///
    /// # Errors
    /// As [`Region::claim`](crate::region::Region::claim).
    #[inline(always)]
    fn free(&mut self, addr: usize, trace: Trace) -> Result<(), Failure> {
        let region = self.hold.region();
        let len = region.claim(addr)?;
        let va = region.pointer(addr);
        if trace.is_some() {
            self.report(trace, pf_event_kind::PF_EVENT_FREE, va, len);
        }
        if len == PAGE {
            // SAFETY: `claim` has given the allocation, which was a buffer of this arena before, or
            // came from `fill_raw` of a handle, to this call alone; no mapping or request uses it.
            unsafe { self.local.free_raw(va) };
            return Ok(());
        }
        let memory = NonNull::slice_from_raw_parts(va, len);
        // SAFETY: `claim` has given the allocation, which was made of a buffer of this arena, to
        // this call alone, and no mapping or request uses it.
        let Some(buffer) = (unsafe { Buffer::from_raw(&self.memory, memory) }) else {
            return Err(fail!(EINVAL, "{addr:#x} is not whole pages of its arena"));
        };
        self.local.free(buffer);
        Ok(())
    }

    #[cold]
    fn report(&self, trace: Trace, kind: pf_event_kind, va: NonNull<u8>, len: usize) {
        let Some((hook, site)) = trace else { return };
        let offset = va.addr().get() - self.hold.region().addr();
        let iova = self.iova.map_or(0, |start| start + offset as u64);
        hook.report(kind, va.as_ptr(), iova, len as u64, site);
    }
}
