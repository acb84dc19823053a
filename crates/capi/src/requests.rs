//! The protected request loop (`pinfold::requests`), for drivers in C of queues that are not the
//! library's.

use crate::domain::{DOMAINS, pf_domain_t};
use crate::failure::{Failure, call, check_out, fail, store};
use crate::handed::Handed;
use crate::handle::Table;
use crate::map::PF_STAYS_MAPPED;
use crate::options::{Options, read_needed};
use crate::trace::{Caller, Site, pass_caller, pf_event_kind};
use kept::{not_at_device, page_bytes};
use pinfold::requests::{End, TokenError};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::time::Duration;

mod kept;
mod names;
#[cfg(test)]
mod tests;

pub use kept::pf_requests_t;

/// The most payloads of a request.
pub const PF_MOST_PAYLOADS: u32 = 8;
const MOST: usize = PF_MOST_PAYLOADS as usize;

/// In pf_done.end: no device reaches the payloads of the request by its mappings. Devices reach whole
/// pages of 4096 bytes: bytes of a page of which another request or mapping has a part are reached
/// until that has ended too.
pub const PF_END_QUIESCED: u32 = 0;
/// In pf_done.end: the device no longer works on the request, and its memory is the program's
/// again; devices still reach at least one of its payloads, which is mapped for its lifetime (its
/// arena has PF_POLICY_WHOLE, or it is registered, or a pool's). The value of PF_STAYS_MAPPED.
pub const PF_END_STAYS_MAPPED: u32 = 1;
/// In pf_done.end: the flush has not completed in time, and a device may still reach the payloads,
/// which stay in use. The request is reported again, with another end.
pub const PF_END_LATE: u32 = 2;
/// In pf_done.end: the flush never completes, and a device may reach the payloads for good: they
/// stay in use, and pf_quarantine() counts them.
pub const PF_END_LOST: u32 = 3;

/// The time limit of a flush, unless the options set another.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);

static REQUESTS: Table<pf_requests_t> = Table::new(12, "request loop");

/// Options of a request loop. Set `struct_size` to its sizeof, and unused fields to 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_requests_opts {
    /// sizeof(struct pf_requests_opts).
    pub struct_size: usize,
    /// The nanoseconds that a flush may take before its request is late; 0: 5 s.
    pub flush_ns: u64,
    /// The most requests at the device, at least 1.
    pub depth: u32,
    /// The number of further requests that may wait for their flush, be late or lost; 0: as many as
    /// `depth`. Both together are at most 1048576, and each needs some 1.2 kB, which are allocated
    /// at once.
    pub held: u32,
    /// When access ends: PF_PROTECT_*; 0: PF_PROTECT_STRICT. Memory that stays mapped for its
    /// lifetime may be a payload with each of them, and is then reported as PF_END_STAYS_MAPPED.
    /// PF_PROTECT_STATIC accepts no other memory.
    pub protect: u32,
    /// 0.
    pub flags: u32,
}

// SAFETY: a size, a word and four halves of words, without padding.
unsafe impl Options for pf_requests_opts {
    const DEFAULT: Self =
        Self { struct_size: 0, flush_ns: 0, depth: 0, held: 0, protect: 0, flags: 0 };
}

/// Memory of a request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_payload {
    /// The memory: any bytes of one allocation of an arena in the domain, of one block, or of one
    /// registration. Of a block it is checked that they are its pool's, not where it ends: the
    /// device reaches the whole pages of 4096 bytes around them in any case.
    pub va: *mut c_void,
    /// Bytes, at least 1.
    pub len: usize,
    /// The device's access to it: enum pf_dir.
    pub dir: u32,
    /// 0.
    pub reserved: u32,
}

/// The report of a request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pf_done {
    /// The request. Unless it is PF_END_LATE, no call takes the token any more.
    pub token: u64,
    /// The result passed to pf_requests_completed(); else 0.
    pub result: u64,
    /// The way the device's access ended: PF_END_*.
    pub end: u32,
    /// 0, or -errno for PF_END_LATE and PF_END_LOST: ETIMEDOUT, EIO.
    pub error: i32,
}

/// Creates a protected request loop for a driver of the program's own. It has the memory of
/// requests for as long as the device may reach it, and returns it when the device cannot. It does
/// not know the device: the driver tells it what has become of a request. Retries and deadlines of
/// commands are the driver's.
///
/// @domain: the domain that the device is in.
/// @opts: the options; `depth` at least.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EINVAL (depth, held, unknown protection or flags); ENOMEM; E2BIG; EBADF;
/// EFAULT; ENFILE.
/// Thread: any. A loop is used by one thread at a time: a call beside another's gives EBUSY.
/// Ownership: it keeps the domain. Allocates all that it needs. Ends with pf_requests_destroy().
/// Since 0.2.
///
/// # Safety
/// `opts` is null or points to as many bytes as its first field says; `out` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_requests_create(
    domain: *mut pf_domain_t,
    opts: *const pf_requests_opts,
    out: *mut *mut pf_requests_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let state = Arc::clone(&DOMAINS.get(domain)?.state);
        // SAFETY: as the caller promises.
        let opts = unsafe { read_needed(opts) }?;
        let handle = REQUESTS.insert(pf_requests_t::new(state, &opts)?)?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Destroys a request loop. Requests that are lost are quarantined for good: their device may still
/// work on them. Memory of those that are late is handed back when their flush completes.
///
/// @requests: the loop; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (requests are at the device or have not been reported: the message
/// counts them; or another thread is in a call with it); EBADF.
/// Thread: any. It may wait 50 ms for flushes. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_requests_destroy(requests: *mut pf_requests_t) -> c_int {
    call(|| {
        if !requests.is_null() {
            drop(REQUESTS.remove(requests, |requests| {
                let at_device = requests.requests.in_flight();
                let unreported = requests.requests.held() + requests.ready.len();
                if at_device + unreported == 0 {
                    return Ok(());
                }
                Err(fail!(
                    EBUSY,
                    "the loop has requests (at the device: {at_device}; not reported: {unreported}): say what has become of \
                     those at the device, and call pf_requests_poll for all"
                ))
            })?);
        }
        Ok(0)
    })
}

/// Begins a request: maps each payload, all or none. Until the request is reported its memory is in
/// use, and pf_free() refuses it.
///
/// @requests: the loop.
/// @payloads: the memory; what they point to is read by this call only.
/// @n: how many: 0 to PF_MOST_PAYLOADS.
/// @token: where the name of the request is stored: never 0. pf_token_slot() of it is below the sum
/// of `depth` and `held`, and no other request has that slot before this one is reported: the index
/// in a driver's table.
/// @iovas: where the device's address of each payload is stored, `n` of them; NULL if `n` is 0.
///
/// Return: 0, or -errno: EAGAIN (as many requests as `depth` are at the device, or no slot is left:
/// poll first); ENXIO (memory that is not in the domain, or with PF_PROTECT_STATIC does not stay
/// mapped); EINVAL (memory that is not allocated, 0 bytes, no direction, reserved fields, too many
/// payloads: the message has the index); ENOMEM, ENOSPC (mapping it); EIO, ETIMEDOUT (the IOMMU);
/// EFAULT; EBADF; EBUSY. Nothing is mapped then.
/// Thread: one at a time. Allocates for more than two payloads. Ownership: the memory is lent until
/// the report. Since 0.2.
///
/// # Safety
/// `payloads` is null or has `n` elements; `token` is null or can be written; `iovas` is null or
/// can be written for `n` elements.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_requests_begin(
    requests: *mut pf_requests_t,
    payloads: *const pf_payload,
    n: c_uint,
    token: *mut u64,
    iovas: *mut u64,
) -> c_int {
    pass_caller!(5, begin);
}

unsafe extern "C" fn begin(
    handle: *mut pf_requests_t,
    payloads: *const pf_payload,
    n: c_uint,
    token: *mut u64,
    iovas: *mut u64,
    caller: Caller,
) -> c_int {
    call(|| {
        check_out(token, "token")?;
        if n > PF_MOST_PAYLOADS {
            return Err(fail!(
                EINVAL,
                "{n} payloads: a request has at most {PF_MOST_PAYLOADS} (PF_MOST_PAYLOADS)"
            ));
        }
        if n > 0 {
            check_out(payloads, "payloads")?;
            check_out(iovas, "iovas")?;
        }
        let mut requests = REQUESTS.get_mut(handle)?;
        // SAFETY: each is one of the `n` elements, as the caller of `pf_requests_begin` promises.
        let payload = |index: usize| unsafe { payloads.wrapping_add(index).read_unaligned() };
        let name = requests.begin((0..n as usize).map(payload))?;
        for (index, (_, iova, _)) in requests.parts(name).enumerate() {
            // SAFETY: one of the `n` elements, as the caller of `pf_requests_begin` promises.
            unsafe { iovas.wrapping_add(index).write_unaligned(iova) };
        }
        requests.report(name, pf_event_kind::PF_EVENT_MAP, Site::new(caller, handle));
        // SAFETY: as the caller of `pf_requests_begin` promises.
        unsafe { store(token, name, "token") }?;
        Ok(0)
    })
}

/// Says that the device no longer works on a request: the next pf_requests_poll() revokes its
/// access. One that was said to be lost may complete after all.
///
/// @requests: the loop.
/// @token: the request.
/// @result: the caller's: its report has it.
///
/// Return: 0, or -errno: ESTALE (it has ended, is another loop's, or none: nothing has changed);
/// EBADF; EBUSY.
/// Thread: one at a time. Since 0.2.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn pf_requests_completed(
    requests: *mut pf_requests_t,
    token: u64,
    result: u64,
) -> c_int {
    pass_caller!(3, completed);
}

extern "C" fn completed(
    handle: *mut pf_requests_t,
    name: u64,
    result: u64,
    caller: Caller,
) -> c_int {
    call(|| {
        let mut requests = REQUESTS.get_mut(handle)?;
        let token = requests.at_device(name)?;
        requests.report(name, pf_event_kind::PF_EVENT_REVOKE, Site::new(caller, handle));
        requests.requests.completed(token).map_err(|error| not_at_device(name, &error))?;
        requests.found(name);
        if let Some(request) = requests.names.get_mut(name) {
            request.result = result;
        }
        Ok(0)
    })
}

/// Says that a request was never submitted: revokes its access, and waits for the flush, whatever
/// the protection. The request has ended then, without a report.
///
/// @requests: the loop.
/// @token: the request.
///
/// Return: 0: no device reaches the payloads; PF_STAYS_MAPPED: one is mapped for its lifetime; or
/// -errno: ETIMEDOUT (the flush is late, and the memory stays in use: pf_requests_poll() reports
/// the request when it ends); EIO (the flush never completes, and the memory is quarantined);
/// ESTALE (it has ended, was said to be lost, is another loop's, or none: nothing has changed);
/// EBADF; EBUSY.
/// Thread: one at a time. May allocate small amounts: in a software domain, and for a request that
/// is lost. Since 0.2.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn pf_requests_refused(requests: *mut pf_requests_t, token: u64) -> c_int {
    pass_caller!(2, refused);
}

extern "C" fn refused(handle: *mut pf_requests_t, name: u64, caller: Caller) -> c_int {
    call(|| {
        let mut requests = REQUESTS.get_mut(handle)?;
        let token = requests.at_device(name)?;
        if requests.names.get(name).is_some_and(|request| request.lost.is_some()) {
            return Err(not_at_device(name, &TokenError::Lost { token }));
        }
        requests.report(name, pf_event_kind::PF_EVENT_REVOKE, Site::new(caller, handle));
        let ended =
            requests.requests.refused(token).map_err(|error| not_at_device(name, &error))?;
        match ended.end {
            End::Late(_) => Err(fail!(
                ETIMEDOUT,
                "the flush of a request that was refused has not completed in time, and a device may still reach its \
                 memory: it stays in use; pf_requests_poll reports the request when it has ended"
            )),
            End::Quiesced => {
                let request = requests.names.free(name);
                let stays = request.is_some_and(|request| request.stays_mapped());
                Ok(if stays { PF_STAYS_MAPPED } else { 0 })
            }
            End::Lost(_) => {
                requests.names.free(name);
                Err(fail!(
                    EIO,
                    "the flush of a request that was refused never completes, so a device may reach its memory for good: \
                     it is quarantined; pf_quarantine counts it"
                ))
            }
        }
    })
}

/// Says that a request was given up, and the device may still work on it: its memory stays mapped
/// and in use, so that a late access reaches nothing else. It takes no place of the depth any more,
/// and keeps its slot until pf_requests_completed() or pf_requests_stopped().
///
/// @requests: the loop.
/// @token: the request.
///
/// Return: 0, or -errno: ESTALE (it has ended or is lost, is another loop's, or none: nothing has
/// changed); EBADF; EBUSY.
/// Thread: one at a time. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_requests_lost(requests: *mut pf_requests_t, token: u64) -> c_int {
    call(|| {
        let (name, mut requests) = (token, REQUESTS.get_mut(requests)?);
        let token = requests.at_device(name)?;
        requests.requests.lost(token).map_err(|error| not_at_device(name, &error))?;
        let parts = requests.parts(name);
        let bytes = parts.map(|(_, iova, len)| page_bytes(iova, len)).sum();
        if let Some(request) = requests.names.get_mut(name) {
            request.lost = Some(bytes);
        }
        requests.state.count_lost(|lost| {
            lost.open.requests += 1;
            lost.open.bytes += bytes;
        });
        Ok(0)
    })
}

/// Says that the device is proven quiet, as after a pf_device_reset() that has succeeded: all
/// requests that are at the device or lost are completed, with the result 0.
///
/// @requests: the loop.
///
/// Return: 0, or -errno: EBADF; EBUSY.
/// Thread: one at a time. Since 0.2.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn pf_requests_stopped(requests: *mut pf_requests_t) -> c_int {
    pass_caller!(1, stopped);
}

extern "C" fn stopped(handle: *mut pf_requests_t, caller: Caller) -> c_int {
    call(|| {
        let mut requests = REQUESTS.get_mut(handle)?;
        // Not in a list, whose length would follow the depth.
        for name in requests.names.all() {
            requests.report(name, pf_event_kind::PF_EVENT_REVOKE, Site::new(caller, handle));
        }
        requests.requests.stopped();
        for slot in 0..requests.names.slots() {
            if let Some(name) = requests.names.at(slot) {
                requests.found(name);
            }
        }
        Ok(0)
    })
}

/// Revokes access to what was completed, and reports requests whose memory no device can reach any
/// more, and those whose flush has become late. PF_PROTECT_STRICT waits for the flush of what it
/// revokes, for at most `flush_ns`; the others never wait.
///
/// @requests: the loop.
/// @done: where the reports are stored.
/// @max: how many fit; what is left is reported by the next call.
///
/// Return: how many were stored; or -errno: EFAULT; EBADF; EBUSY.
/// Thread: one at a time. May allocate small amounts: in a software domain, and for a request that
/// is lost. Ownership: the memory of what is reported is the caller's again, unless it is
/// PF_END_LATE or PF_END_LOST. Since 0.2.
///
/// # Safety
/// `done` is null or can be written for `max` reports.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_requests_poll(
    requests: *mut pf_requests_t,
    done: *mut pf_done,
    max: c_uint,
) -> c_int {
    call(|| {
        let mut requests = REQUESTS.get_mut(requests)?;
        if max > 0 {
            check_out(done, "done")?;
        }
        requests.poll();
        // SAFETY: as the caller promises.
        Ok(unsafe { requests.tell(done, max) })
    })
}

/// Polls, and if that finds nothing waits until a flush has completed, a request has become late,
/// or the time has passed. It does not wait for the device: where nothing waits for a flush it
/// returns at once.
///
/// @requests: the loop.
/// @ns: nanoseconds to wait at most; they also end the wait of PF_PROTECT_STRICT.
/// @done: where the reports are stored.
/// @max: how many fit; what is left is reported by the next call.
///
/// Return: as pf_requests_poll().
/// Thread: one at a time. May allocate small amounts: in a software domain, and for a request that
/// is lost. Since 0.2.
///
/// # Safety
/// As for pf_requests_poll().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_requests_wait(
    requests: *mut pf_requests_t,
    ns: u64,
    done: *mut pf_done,
    max: c_uint,
) -> c_int {
    call(|| {
        let mut requests = REQUESTS.get_mut(requests)?;
        if max > 0 {
            check_out(done, "done")?;
        }
        match requests.ready.is_empty() {
            true => requests.wait(Duration::from_nanos(ns)),
            false => requests.poll(),
        }
        // SAFETY: as the caller promises.
        Ok(unsafe { requests.tell(done, max) })
    })
}

/// Prepares for a sleep, and returns a descriptor for poll() and epoll, always the same: it becomes
/// readable when pf_requests_poll() may find something, or when a flush has become late; at once
/// where that is so already. Poll then, and call this again before the next sleep, which also
/// clears it. It tells nothing of the device.
///
/// @requests: the loop.
///
/// Return: the descriptor; or -errno: EMFILE, ENFILE; EBADF; EBUSY.
/// Thread: one at a time. Allocates the first time. Ownership: the loop's: do not read, write or
/// close it. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_requests_fd(requests: *mut pf_requests_t) -> c_int {
    call(|| {
        let mut requests = REQUESTS.get_mut(requests)?;
        let pf_requests_t { requests, ready, handed, .. } = &mut *requests;
        let armed = match ready.is_empty() {
            true => requests.arm(),
            false => requests.arm_now(),
        };
        armed.and_then(|own| Handed::of(handed, own)).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
            Failure::new(errno, format!("cannot prepare the loop's timer: {error}"))
        })
    })
}
