//! Queues of a controller: requests in, completions out, for one thread at a time.
//!
//! A request ends in three steps: its command completes at the controller, its memory is revoked as
//! the queue's protection says, and it is reported. The program owns the memory again with the
//! report, and not before.

mod descriptor;
mod report;
mod submit;
pub(crate) mod transfer;

use crate::admin::pf_nvme_command;
use crate::domain::Lookup;
use crate::failure::{Counted, Failure, call, check_out, fail, store};
use crate::handed::Handed;
use crate::handle::Table;
use crate::nvme::{Device, Lease, NVMES, pf_nvme_t};
use crate::options::{Options, read_needed};
use crate::trace::{Caller, Site, pass_caller};
use libc::iovec;
use pinfold::Arena;
use pinfold::requests::{Ended, Limits, NewError, Policy, Requests, Token};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{Namespace, Queue, QueueStats};
use std::collections::{TryReserveError, VecDeque};
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use transfer::{Attempt, Scattered};

/// For pf_queue_opts.protect: the memory is mapped for its request, and revoked when that has
/// completed; pf_complete() waits for the flush, one for all that it finds. Use memory that
/// pf_alloc() or pf_frames_fill() returns for an arena of PF_POLICY_PER_USE: what stays mapped
/// (that of PF_POLICY_WHOLE, of registrations, and of pools) is EINVAL, as it could not be revoked.
/// The default: 0 is the same.
pub const PF_PROTECT_STRICT: u32 = 1;
/// For pf_queue_opts.protect: the same without waiting: a request is reported by a later call, when
/// its flush has completed.
pub const PF_PROTECT_REVOKE: u32 = 2;
/// For pf_queue_opts.protect: as PF_PROTECT_REVOKE, with one flush for all that a call finds.
pub const PF_PROTECT_BATCH: u32 = 3;
/// For pf_queue_opts.protect: no protection: the device reaches the memory for as long as that is
/// in the domain, also after its request. It must stay mapped (PF_POLICY_WHOLE, registered, or a
/// pool's).
pub const PF_PROTECT_STATIC: u32 = 4;

/// For pf_queue_opts.flags: the controller raises an interrupt, so that pf_queue_wait() sleeps and
/// pf_queue_fd() has a descriptor.
pub const PF_QUEUE_INTERRUPT: u32 = 1 << 0;

/// Reads from the controller into the memory of `iov`.
pub const PF_READ: u32 = 1;
/// Writes the memory of `iov` to the controller.
pub const PF_WRITE: u32 = 2;
/// Makes the data of reported writes durable. After an error earlier writes may be lost, and a
/// later flush that succeeds does not prove the contrary.
pub const PF_FLUSH: u32 = 3;
/// Discards `len` bytes from `offset`. The controller may still keep them.
pub const PF_DISCARD: u32 = 4;
/// Sends `command`, an NVM command of the program's own, with the memory of `iov` for its data.
pub const PF_COMMAND: u32 = 5;

/// In pf_completion.status: the device may still reach the memory of the request, which stays in
/// use: pf_free() and pf_reg_destroy() refuse it. The request was given up, and the memory is in
/// use until pf_nvme_destroy() has disabled the controller; or its flush has failed, and it is for
/// good; or, with PF_LATE, for less.
pub const PF_LOST: u32 = 0x8000_0000;

/// In pf_completion.status, with PF_LOST: the device has ended the request, but the flush of its
/// access is late: the memory stays in use until a call for the queue finds that it has completed,
/// without another report.
pub const PF_LATE: u32 = 0x4000_0000;

/// The longest wait of a request for its flush before it is reported as late.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// One thread's queue of a controller.
pub struct pf_queue_t {
    queue: Queue<Arc<dyn Registers>, Arena>,
    /// Maps the memory of requests, and returns it; of [`PF_PROTECT_STATIC`] it has the requests
    /// without their memory, which stays mapped.
    requests: Requests<Scattered, 1>,
    is_static: bool,
    namespaces: Vec<Namespace>,
    /// Requests at the controller, by the driver's number.
    in_flight: Vec<Option<Pending>>,
    /// The report of each unreported request, by the slot of its token.
    reports: Vec<Option<pf_completion>>,
    /// Empty between two calls.
    ended: Vec<Ended<Scattered, 1>>,
    /// Completions that can be reported.
    ready: VecDeque<pf_completion>,
    /// Requests that were accepted and have not been reported: at most the queue's depth.
    outstanding: usize,
    /// Why the controller is not used any more.
    failed: Option<String>,
    /// The descriptor of pf_queue_fd().
    descriptor: Option<(Handed, OwnedFd)>,
    /// Its own: threads with a queue each share no lock.
    lookup: Lookup,
    /// Dropped after the queue.
    lease: Lease,
}

pub(crate) static QUEUES: Table<pf_queue_t> = Table::new(10, "queue");

/// Creates the loop of a queue.
///
/// # Errors
/// `EINVAL`, `ENOMEM`.
fn requests_of(
    device: &Device,
    protect: u32,
    depth: usize,
    flush: Duration,
) -> Result<Requests<Scattered, 1>, Failure> {
    let policy = match protect {
        PF_PROTECT_STATIC => Policy::Static,
        0 | PF_PROTECT_STRICT => Policy::Strict,
        PF_PROTECT_REVOKE => Policy::Revoke,
        _ => Policy::Batch,
    };
    let limits = Limits { flush, ..Limits::default() };
    Requests::new(&device.state.domain, policy, depth, limits).map_err(|error| match error {
        NewError::NoMemory { .. } => fail!(ENOMEM, "{error}"),
        _ => fail!(EINVAL, "{error}"),
    })
}

/// A request at the controller.
struct Pending {
    token: Token,
    attempt: Attempt,
}

/// Options of a queue. Set `struct_size` to its sizeof, and unused fields to 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_queue_opts {
    /// sizeof(struct pf_queue_opts).
    pub struct_size: usize,
    /// The most requests between pf_submit() and their report by pf_complete(): 1 to
    /// pf_nvme_info.max_depth.
    /// A request that waits for its flush counts. With PF_PROTECT_REVOKE or PF_PROTECT_BATCH, give the
    /// queue more than the program keeps at the controller, so that flushes overlap.
    pub depth: u32,
    /// PF_PROTECT_*; 0: PF_PROTECT_STRICT.
    pub protect: u32,
    /// PF_QUEUE_* bits.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: a size and four halves of words, without padding.
unsafe impl Options for pf_queue_opts {
    const DEFAULT: Self = Self { struct_size: 0, depth: 0, protect: 0, flags: 0, reserved: 0 };
}

/// A request. Memory that it points to is read by pf_submit() only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_request {
    /// PF_READ, PF_WRITE, PF_FLUSH, PF_DISCARD or PF_COMMAND.
    pub op: u32,
    /// The namespace, from 1.
    pub nsid: u32,
    /// Its first byte: a multiple of the block. PF_FLUSH, PF_COMMAND: 0.
    pub offset: u64,
    /// PF_DISCARD: bytes, a multiple of the block; else 0, or the sum of `iov`.
    pub len: u64,
    /// The memory of PF_READ, PF_WRITE and PF_COMMAND: a multiple of the block in all, and at most
    /// pf_nvme_info.max_transfer. Each entry is inside one allocation of the domain or one
    /// registration. A controller without SGLs (a model has none) can use scattered memory if the
    /// first entry begins at a multiple of 4, the others at a multiple of 4096, and all but the
    /// last end at one.
    pub iov: *const iovec,
    /// Entries of it: 1 to 1024; PF_FLUSH, PF_DISCARD, and PF_COMMAND without data: 0.
    pub iovcnt: u32,
    /// 0.
    pub flags: u32,
    /// The caller's; its completion has it.
    pub user_data: u64,
    /// Of PF_COMMAND, for the namespace `nsid` (its own `nsid` is that, or 0), with PRPs or an SGL
    /// for `iov` as the library chooses; else NULL. It is one command at the controller, of at most
    /// pf_nvme_info.max_command bytes, and not sent again after it may have been carried out. A
    /// read, a write, a comparison, and write zeroes, write uncorrectable and verify are ordered
    /// with other requests by their blocks, and must have the memory of these; any other command
    /// counts as one for all of the namespace, and the program is responsible for the length in it:
    /// memory beyond `iov` is not mapped for it.
    pub command: *const pf_nvme_command,
}

/// The report of a request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_completion {
    /// The request's.
    pub user_data: u64,
    /// 0, or -errno: EIO (the controller's `status`); ETIMEDOUT (given up); ECANCELED (aborted
    /// because it took too long, or the controller was disabled); ENODEV (the controller is gone);
    /// ESTALE (the namespace has changed); EINVAL (the controller cannot be given a part of it).
    pub result: i32,
    /// The controller's status: bits 31:17 of the completion's DW3; and PF_LOST, PF_LATE.
    pub status: u32,
    /// DW0 of the completion of its last command.
    pub value: u32,
    /// 0.
    pub reserved: u32,
}

/// Creates a queue of a controller, for one thread at a time.
///
/// @nvme: the controller.
/// @opts: the options; `depth` at least.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EINVAL (depth; unknown protection, flags or reserved fields); ENOSPC (no
/// queue or no interrupt of the controller is left); ENOMEM (of its arena; or some 2 kB for each
/// request of the depth); EIO, ETIMEDOUT (the controller refuses it, or does not answer); E2BIG;
/// EBADF; EFAULT; ENFILE.
/// Thread: any. Allocates. Ends with pf_queue_destroy(). Since 0.2.
///
/// # Safety
/// `opts` is null or points to as many bytes as its first field says; `out` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_queue_create(
    nvme: *mut pf_nvme_t,
    opts: *const pf_queue_opts,
    out: *mut *mut pf_queue_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let nvme = NVMES.get(nvme)?;
        // SAFETY: as the caller promises.
        let opts = unsafe { read_needed(opts) }?;
        let handle = QUEUES.insert(pf_queue_t::new(&nvme.device, &opts)?)?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Deletes a queue.
///
/// @queue: the queue; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (requests have not been reported yet: the message says how many; or
/// another thread is in a call with it); EBADF.
/// Thread: any, when no other is in a call with it. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_queue_destroy(queue: *mut pf_queue_t) -> c_int {
    call(|| {
        if !queue.is_null() {
            drop(QUEUES.remove(queue, |queue| match queue.outstanding {
                0 => Ok(()),
                left => Err(fail!(
                    EBUSY,
                    "the queue has {} not reported: call pf_complete first",
                    Counted(left as u64, "request")
                )),
            })?);
        }
        Ok(0)
    })
}

/// Submits requests, in their order, up to the first that is refused. Their memory is in use until
/// they are reported: pf_free() refuses it meanwhile.
///
/// @queue: the queue.
/// @requests: the requests.
/// @n: how many.
///
/// Return: how many were accepted; or -errno if the first was refused: EAGAIN (as many are
/// unreported as the queue is deep, or too many flushes are late); EINVAL (an offset or a length
/// that is no multiple of the block, beyond the end of the namespace, or 0; more than the largest
/// transfer; an unknown operation or flag; memory that is not allocated, or that the controller
/// cannot be given: the message has the entry of `iov`; memory that is mapped as a whole, unless
/// PF_PROTECT_STATIC); ENXIO (memory that is not in the domain, or not mapped as a whole for
/// PF_PROTECT_STATIC); ENODEV (no such namespace); EACCES (a command that the library relies on:
/// cancel); EOPNOTSUPP (the controller cannot discard); ESTALE (the namespace was formatted or
/// detached); EIO (the controller has failed); ENOMEM or ENOSPC (mapping it, or describing it to
/// the controller); EBADF; EFAULT; EBUSY (another thread is in a call with it).
/// Thread: one at a time. Allocates for a request with several entries in `iov` (some 100 bytes for
/// each, ENOMEM), for more segments than before (16 bytes each), and in a software domain.
/// Ownership: the memory is lent until the report. Since 0.2.
///
/// # Safety
/// `requests` is null or `n` requests; `iov` of each is null or `iovcnt` entries, and `command` is
/// null or has as many bytes as its first field says.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_submit(
    queue: *mut pf_queue_t,
    requests: *const pf_request,
    n: u32,
) -> c_int {
    pass_caller!(3, submit);
}

unsafe extern "C" fn submit(
    handle: *mut pf_queue_t,
    requests: *const pf_request,
    n: u32,
    caller: Caller,
) -> c_int {
    call(|| {
        let mut queue = QUEUES.get_mut(handle)?;
        let site = Site::new(caller, handle);
        if n > 0 {
            check_in(requests, "requests")?;
        }
        let mut accepted = 0;
        for at in 0..n as usize {
            // SAFETY: the caller promises `n` requests. C need not align them.
            let request = unsafe { requests.wrapping_add(at).read_unaligned() };
            // SAFETY: as the caller promises of `iov` and `command`.
            match unsafe { queue.submit(&request, site) } {
                Ok(()) => accepted += 1,
                Err(failure) if accepted == 0 => return Err(failure),
                Err(_) => break,
            }
        }
        queue.queue.ring_doorbell();
        Ok(accepted)
    })
}

/// Reports requests that have completed and whose memory no device can reach any more (except with
/// PF_PROTECT_STATIC). Revokes requests that are found completed.
///
/// @queue: the queue.
/// @completions: where the reports are stored.
/// @max: how many fit.
///
/// Return: how many were stored; or -errno: EFAULT; EBADF; EBUSY (another thread is in a call with
/// it). An error of a request is its own `result`.
/// Thread: one at a time. It waits for flushes with PF_PROTECT_STRICT, and for a controller that
/// has failed to be disabled; else never. May allocate small amounts: in a software domain; for
/// requests that are aborted, lost, or of a namespace that has changed; and when the controller
/// fails. Ownership: the memory of what is reported is the caller's again, unless PF_LOST. Since
/// 0.2.
///
/// # Safety
/// `completions` is null or can be written for `max` reports.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_complete(
    queue: *mut pf_queue_t,
    completions: *mut pf_completion,
    max: u32,
) -> c_int {
    pass_caller!(3, complete);
}

unsafe extern "C" fn complete(
    handle: *mut pf_queue_t,
    completions: *mut pf_completion,
    max: u32,
    caller: Caller,
) -> c_int {
    call(|| {
        let mut queue = QUEUES.get_mut(handle)?;
        if max > 0 {
            check_out(completions, "completions")?;
        }
        let queue = &mut *queue;
        queue.step(Site::new(caller, handle));
        let found = queue.ready.len().min(max as usize);
        for (at, completion) in queue.ready.drain(..found).enumerate() {
            // SAFETY: `found` is at most `max`, for which the caller promises room.
            unsafe { completions.wrapping_add(at).write_unaligned(completion) };
        }
        queue.outstanding -= found;
        if queue.descriptor.is_some() && found == 0 {
            queue.arm();
        }
        Ok(c_int::try_from(found).unwrap_or(c_int::MAX))
    })
}

/// Waits until a request can be reported: sleeps, for a queue with PF_QUEUE_INTERRUPT, else polls.
///
/// @queue: the queue.
/// @ns: nanoseconds to wait at most; 0: only looks once.
///
/// Return: how many requests pf_complete() reports now; 0 when the time is over, and at once if
/// none is outstanding (where late requests leave no room for another, when one of them has ended:
/// then pf_submit() accepts one); or -errno: EBADF; EBUSY (another thread is in a call with it).
/// Thread: one at a time. With PF_PROTECT_STRICT it waits for the flushes of what it finds, at most
/// 5 s, whatever `ns` is; as it does for a controller that has failed to be disabled. May allocate
/// as pf_complete(). Since 0.2.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn pf_queue_wait(queue: *mut pf_queue_t, ns: u64) -> c_int {
    pass_caller!(2, wait);
}

extern "C" fn wait(handle: *mut pf_queue_t, ns: u64, caller: Caller) -> c_int {
    call(|| {
        let mut queue = QUEUES.get_mut(handle)?;
        let site = Site::new(caller, handle);
        let found = queue.wait(Duration::from_nanos(ns), site);
        Ok(c_int::try_from(found).unwrap_or(c_int::MAX))
    })
}

/// Returns a descriptor for poll() and epoll: readable when requests may be reported. From then on
/// a pf_complete() that returns 0 clears it; so call that until it does, then wait for at most 100
/// ms (a controller that is gone raises no interrupt), and call it again. The end of a flush makes
/// it readable, too.
///
/// @queue: a queue with PF_QUEUE_INTERRUPT.
///
/// Return: the descriptor; or -errno: ENOTSUP (it has no interrupt); EMFILE, ENFILE; EBADF; EBUSY.
/// Thread: one at a time. Allocates the first time. Ownership: the queue's: do not read, write or
/// close it. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_queue_fd(queue: *mut pf_queue_t) -> c_int {
    call(|| {
        let mut queue = QUEUES.get_mut(queue)?;
        let fd = queue.descriptor()?;
        queue.signal();
        Ok(fd)
    })
}

/// Refuses a null pointer to memory that is read.
fn check_in<T>(pointer: *const T, name: &str) -> Result<(), Failure> {
    if pointer.is_null() { Err(fail!(EFAULT, "`{name}` is NULL")) } else { Ok(()) }
}

impl pf_queue_t {
    pub(crate) fn stats(&self) -> QueueStats {
        self.queue.stats()
    }

    /// Creates the queue.
    ///
    /// # Errors
    /// Those of [`pf_queue_create`].
    pub(crate) fn new(device: &Arc<Device>, opts: &pf_queue_opts) -> Result<Self, Failure> {
        let pf_queue_opts { depth, protect, flags, reserved, .. } = *opts;
        if flags & !PF_QUEUE_INTERRUPT != 0 || reserved != 0 {
            return Err(fail!(
                EINVAL,
                "flags {flags:#x}, reserved {reserved:#x}: set PF_QUEUE_INTERRUPT only, and reserved to 0"
            ));
        }
        if protect > PF_PROTECT_STATIC {
            return Err(fail!(EINVAL, "protection {protect}: pass one of PF_PROTECT_*"));
        }
        let capacity = depth as usize;
        let lease = Lease::new(device, flags & PF_QUEUE_INTERRUPT != 0)?;
        let queue = match lease.vector.clone() {
            None => device.controller.create_queue(capacity),
            Some(vector) => device.controller.create_queue_with(capacity, vector),
        };
        let queue = queue.map_err(|error| Failure::from(&error))?;
        let requests = requests_of(device, protect, capacity, FLUSH_LIMIT)?;
        let slots = requests.slots();
        let no_memory = |error: TryReserveError| {
            fail!(ENOMEM, "cannot create a queue of {depth} requests: {error}; use a smaller depth")
        };
        let (mut in_flight, mut reports) = (Vec::new(), Vec::new());
        let (mut ended, mut ready) = (Vec::new(), VecDeque::new());
        in_flight.try_reserve_exact(capacity).map_err(no_memory)?;
        in_flight.resize_with(capacity, || None);
        reports.try_reserve_exact(slots).map_err(no_memory)?;
        reports.resize(slots, None);
        ended.try_reserve_exact(slots).map_err(no_memory)?;
        ready.try_reserve_exact(capacity).map_err(no_memory)?;
        Ok(Self {
            queue,
            requests,
            is_static: protect == PF_PROTECT_STATIC,
            namespaces: device.controller.namespaces(),
            in_flight,
            reports,
            ended,
            ready,
            outstanding: 0,
            failed: None,
            descriptor: None,
            lookup: device.state.lookup(),
            lease,
        })
    }
}

#[cfg(test)]
mod tests;
