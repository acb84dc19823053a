//! Queues of a controller: requests in, completions out, for one thread at a time.
//!
//! A request ends in three steps: its command completes at the controller, its memory is revoked as
//! the queue's protection says, and it is reported. What it names is the program's again with the
//! report, and not before.

use crate::errno::Errno;
use crate::failure::{Failure, call, check_out, fail, store};
use crate::handle::Table;
use crate::nvme::{Device, Lease, MAX_TRANSFER, NVMES, pf_nvme_t};
use crate::options::{Options, read};
use crate::region::Span;
use crate::trace::{Caller, hook, pass_caller, pf_event_kind};
use crate::transfer::{Attempt, Data, Ended, Fixed, Scattered, Site};
use libc::{ECANCELED, EINVAL, EIO, ENODEV, ENXIO, ESTALE, ETIMEDOUT, iovec};
use pinfold::Arena;
use pinfold::core::access::{FromDevice, ToDevice};
use pinfold::core::domain::{DomainLocal, NotQuiesced, Revoked, Unrevoked};
use pinfold::core::invalidate::{Ticket, WaitLimit};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{
    CommandError, Completion, LayoutError, Namespace, Queue, Reject, Rejected,
};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For pf_queue_opts.protect: the device reaches the memory for as long as that is in the domain;
/// it must be mapped as a whole (PF_POLICY_WHOLE, or registered).
pub const PF_PROTECT_STATIC: u32 = 0;
/// For pf_queue_opts.protect: the memory is mapped for its request, and revoked when that has
/// completed; pf_complete() waits for one flush after the other.
pub const PF_PROTECT_STRICT: u32 = 1;
/// For pf_queue_opts.protect: the same without waiting: a request is reported by a later call, when
/// its flush has completed.
pub const PF_PROTECT_REVOKE: u32 = 2;
/// For pf_queue_opts.protect: as PF_PROTECT_REVOKE, with one flush for all that a call finds.
pub const PF_PROTECT_BATCH: u32 = 3;

/// For pf_queue_opts.flags: the controller raises an interrupt, so that pf_queue_wait() sleeps and
/// pf_queue_fd() has a descriptor.
pub const PF_QUEUE_INTERRUPT: u32 = 1 << 0;

/// Reads from the controller into the memory of `iov`.
pub const PF_READ: u32 = 1;
/// Writes the memory of `iov` to the controller.
pub const PF_WRITE: u32 = 2;
/// Makes durable what writes that were reported have written. After an error earlier writes may be
/// lost, and a later flush that succeeds does not prove the contrary.
pub const PF_FLUSH: u32 = 3;
/// Discards `len` bytes from `offset`. The controller may keep them all the same.
pub const PF_DISCARD: u32 = 4;

/// In pf_completion.status: the request was given up, and the device may still reach its memory,
/// which stays in use: pf_free() and pf_unregister() refuse it, until pf_nvme_put() has disabled
/// the controller.
pub const PF_LOST: u32 = 0x8000_0000;

/// The most entries of a request's `iov`.
const MAX_IOVECS: u32 = 1024;
/// How long a request may wait for its flush before it is reported as lost.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// The longest sleep. A device that is gone raises no interrupt.
const SLEEP: Duration = Duration::from_millis(50);
/// A wait without an interrupt spins for so many polls, then yields to other threads for so many,
/// and then pauses between two polls.
const SPINS: u32 = 64;
const YIELDS: u32 = 10_000;
/// One with an interrupt yields so often before it sleeps: a sleep and its wake-up take longer, and
/// what completes meanwhile is found together.
const YIELDS_BEFORE_SLEEP: u32 = 4;
const PAUSE: Duration = Duration::from_micros(50);

/// One thread's queue of a controller.
pub struct pf_queue_t {
    queue: Queue<Arc<dyn Registers>, Arena>,
    protection: Protection,
    namespaces: Vec<Namespace>,
    /// What the controller has; the index is the driver's number of it.
    in_flight: Vec<Option<Pending>>,
    /// What waits for its flush, in the order of the flushes.
    held: VecDeque<Held>,
    /// What can be reported.
    ready: VecDeque<pf_completion>,
    /// Requests that were accepted and have not been reported: at most the queue's depth, which
    /// bounds all of the above.
    outstanding: usize,
    /// Why the controller is not used any more.
    failed: Option<String>,
    /// The program waits for the descriptor.
    has_fd: bool,
    /// Dropped after the queue.
    lease: Lease,
}

pub(crate) static QUEUES: Table<pf_queue_t> = Table::new(10, "queue");

/// When the device can reach the memory of requests.
enum Protection {
    Static,
    Strict(DomainLocal),
    Revoke(DomainLocal),
    Batch(DomainLocal, Found),
}

/// What one call has found; empty between two calls.
struct Found {
    mapped: Vec<Unrevoked<Scattered>>,
    /// Their reports, in the same order.
    completions: Vec<pf_completion>,
    revoked: Vec<Revoked<Scattered>>,
}

impl Found {
    fn new(depth: usize) -> Self {
        Self {
            mapped: Vec::with_capacity(depth),
            completions: Vec::with_capacity(depth),
            revoked: Vec::with_capacity(depth),
        }
    }
}

impl Protection {
    fn domain(&mut self) -> Option<&mut DomainLocal> {
        match self {
            Self::Static => None,
            Self::Strict(domain) | Self::Revoke(domain) | Self::Batch(domain, ..) => Some(domain),
        }
    }
}

/// A request at the controller.
struct Pending {
    attempt: Attempt,
    user_data: u64,
}

/// A request whose memory is revoked, until the flush has completed.
struct Held {
    revoked: Revoked<Scattered>,
    completion: pf_completion,
    since: Instant,
}

/// Options of a queue. Set `opts_size` to its sizeof, and what is not needed to 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_queue_opts {
    /// sizeof(struct pf_queue_opts).
    pub opts_size: usize,
    /// The most requests between pf_submit() and their report by pf_complete(): 1 to
    /// pf_nvme_info.max_depth.
    pub depth: u32,
    /// PF_PROTECT_*.
    pub protect: u32,
    /// PF_QUEUE_* bits.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: a size and four halves of words, without padding.
unsafe impl Options for pf_queue_opts {
    const DEFAULT: Self =
        Self { opts_size: 0, depth: 0, protect: PF_PROTECT_STATIC, flags: 0, reserved: 0 };
}

/// A request. What it points to is read by pf_submit() only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_request {
    /// PF_READ, PF_WRITE, PF_FLUSH or PF_DISCARD.
    pub op: u32,
    /// The namespace, from 1.
    pub nsid: u32,
    /// Its first byte: a multiple of the block. PF_FLUSH: 0.
    pub offset: u64,
    /// PF_DISCARD: bytes, a multiple of the block; else 0, or the sum of `iov`.
    pub len: u64,
    /// The memory of PF_READ and PF_WRITE: a multiple of the block in all, and at most
    /// pf_nvme_info.max_transfer. Each entry is inside one allocation of the domain or one
    /// registration. A controller without SGLs (a model has none) can use scattered memory if the
    /// first entry begins at a multiple of 4, the others at a multiple of 4096, and all but the
    /// last end at one.
    pub iov: *const iovec,
    /// Entries of it: 1 to 1024.
    pub iovcnt: u32,
    /// 0.
    pub flags: u32,
    /// The caller's; its completion has it.
    pub user_data: u64,
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
    /// The controller's status: bits 31:17 of the completion's DW3; and PF_LOST.
    pub status: u32,
}

/// Creates a queue of a controller, for one thread at a time.
///
/// @nvme: the controller.
/// @opts: the options; `depth` at least.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EINVAL (depth; unknown protection, flags or reserved fields); ENOSPC (no
/// queue or no interrupt of the controller is left); ENOMEM (of its arena); EIO, ETIMEDOUT (the
/// controller refuses it, or does not answer); E2BIG; EBADF; EFAULT; ENFILE.
/// Thread: any. Allocates. Ends with pf_queue_destroy(). Since 0.1.
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
        let opts = unsafe { read(opts) }?;
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
/// Thread: any, when no other is in a call with it. Since 0.1.
#[unsafe(no_mangle)]
pub extern "C" fn pf_queue_destroy(queue: *mut pf_queue_t) -> c_int {
    call(|| {
        if !queue.is_null() {
            drop(QUEUES.remove(queue, |queue| match queue.outstanding {
                0 => Ok(()),
                left => Err(fail!(
                    EBUSY,
                    "{left} requests of the queue have not been reported: call pf_complete for them first"
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
/// unreported as the queue is deep); EINVAL (an offset or a length that is no multiple of the
/// block, beyond the end of the namespace, or 0; more than the largest transfer; an unknown
/// operation or flag; memory that is not allocated, or that the controller cannot be given: the
/// message has the entry of `iov`; memory that is mapped as a whole, unless PF_PROTECT_STATIC);
/// ENXIO (memory that is not in the domain, or not mapped as a whole for PF_PROTECT_STATIC); ENODEV
/// (no such namespace); EOPNOTSUPP (the controller cannot discard); ESTALE (the namespace was
/// formatted or detached); EIO (the controller has failed); ENOMEM or ENOSPC (mapping it, or
/// describing it to the controller); EBADF; EFAULT; EBUSY (another thread is in a call with it).
/// Thread: one at a time. Ownership: the memory is lent until the report. Since 0.1.
///
/// # Safety
/// `requests` is null or `n` requests, and `iov` of each is null or `iovcnt` entries.
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
        let site = Site { caller, handle: handle.addr() as u64 };
        if n > 0 {
            check_in(requests, "requests")?;
        }
        let mut accepted = 0;
        for at in 0..n as usize {
            // SAFETY: the caller promises `n` requests. C need not align them.
            let request = unsafe { requests.add(at).read_unaligned() };
            // SAFETY: as the caller promises of `iov`.
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
/// PF_PROTECT_STATIC). Revokes what is found to have completed.
///
/// @queue: the queue.
/// @completions: where the reports are stored.
/// @max: how many fit.
///
/// Return: how many were stored; or -errno: EFAULT; EBADF; EBUSY (another thread is in a call with
/// it). An error of a request is its own `result`.
/// Thread: one at a time. It waits for flushes with PF_PROTECT_STRICT, and for a controller that has
/// failed to be disabled; else never. Ownership: the memory of what is reported is the caller's
/// again, unless PF_LOST. Since 0.1.
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
        queue.step(Site { caller, handle: handle.addr() as u64 });
        let found = queue.ready.len().min(max as usize);
        for (at, completion) in queue.ready.drain(..found).enumerate() {
            // SAFETY: `found` is at most `max`, for which the caller promises room.
            unsafe { completions.add(at).write_unaligned(completion) };
        }
        queue.outstanding -= found;
        if queue.has_fd && found == 0 {
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
/// none is outstanding; or -errno: EBADF; EBUSY (another thread is in a call with it).
/// Thread: one at a time. Since 0.1.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn pf_queue_wait(queue: *mut pf_queue_t, ns: u64) -> c_int {
    pass_caller!(2, wait);
}

extern "C" fn wait(handle: *mut pf_queue_t, ns: u64, caller: Caller) -> c_int {
    call(|| {
        let mut queue = QUEUES.get_mut(handle)?;
        let site = Site { caller, handle: handle.addr() as u64 };
        let found = queue.wait(Duration::from_nanos(ns), site);
        Ok(c_int::try_from(found).unwrap_or(c_int::MAX))
    })
}

/// Returns a descriptor for poll() and epoll: readable when requests may be reported. From then on
/// a pf_complete() that returns 0 clears it; so call that until it does, then wait for at most 100
/// ms (a controller that is gone raises no interrupt), and call it again. It stays readable while a
/// request waits for its flush.
///
/// @queue: a queue with PF_QUEUE_INTERRUPT.
///
/// Return: the descriptor; or -errno: ENOTSUP (it has no interrupt); EBADF; EBUSY.
/// Thread: one at a time. Ownership: the queue's: do not read, write or close it. Since 0.1.
#[unsafe(no_mangle)]
pub extern "C" fn pf_queue_fd(queue: *mut pf_queue_t) -> c_int {
    call(|| {
        let mut queue = QUEUES.get_mut(queue)?;
        let Some(fd) = queue.queue.interrupt_fd().map(|fd| fd.as_raw_fd()) else {
            return Err(fail!(
                ENOTSUP,
                "the queue has no interrupt: create it with PF_QUEUE_INTERRUPT"
            ));
        };
        queue.has_fd = true;
        queue.signal();
        Ok(fd)
    })
}

/// Refuses a null pointer to what is to be read.
fn check_in<T>(pointer: *const T, name: &str) -> Result<(), Failure> {
    if pointer.is_null() { Err(fail!(EFAULT, "`{name}` is NULL")) } else { Ok(()) }
}

/// The memory of a request, as the program names it.
struct Memory<'r>(&'r [iovec]);

impl<'r> Memory<'r> {
    /// # Safety
    /// `iov` of the request is null, or `iovcnt` entries that nothing changes meanwhile.
    unsafe fn new(request: &'r pf_request) -> Result<Self, Failure> {
        let pf_request { iov, iovcnt, .. } = *request;
        check_in(iov, "iov")?;
        if !(1..=MAX_IOVECS).contains(&iovcnt) || !iov.is_aligned() {
            return Err(fail!(
                EINVAL,
                "`iov` has {iovcnt} entries at {iov:p}: pass 1 to {MAX_IOVECS}, aligned to 8"
            ));
        }
        // SAFETY: not null, aligned, and `iovcnt` entries, as the caller promises.
        Ok(Self(unsafe { std::slice::from_raw_parts(iov, iovcnt as usize) }))
    }

    /// Returns the bytes of all.
    fn bytes(&self) -> Result<u64, Failure> {
        let mut bytes = 0u64;
        for (index, entry) in self.0.iter().enumerate() {
            if entry.iov_len == 0 {
                let base = entry.iov_base;
                return Err(fail!(EINVAL, "iov[{index}] at {base:p} has 0 bytes: leave it out"));
            }
            bytes = bytes.saturating_add(entry.iov_len as u64);
        }
        Ok(bytes)
    }

    /// Yields the number, the address and the length of each, as one where they follow each other
    /// within a page: so that the device is not given a gap.
    fn pieces(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let mut entries = self.0.iter().enumerate().peekable();
        std::iter::from_fn(move || {
            let (index, entry) = entries.next()?;
            let (addr, mut len) = (entry.iov_base.addr(), entry.iov_len);
            while let Some(end) = addr.checked_add(len)
                && !end.is_multiple_of(4096)
                && let Some((_, next)) = entries.next_if(|(_, next)| next.iov_base.addr() == end)
            {
                len = len.saturating_add(next.iov_len);
            }
            Some((index, addr, len))
        })
    }

    /// Counts each as in use, and yields it.
    fn spans<'m>(&'m self, device: &'m Device) -> impl Iterator<Item = Result<Span, Failure>> + 'm {
        self.pieces().map(|(index, addr, len)| {
            device.state.span(addr, len).map_err(|failure| failure.of(format_args!("iov[{index}]")))
        })
    }
}

impl pf_queue_t {
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
        if protect > PF_PROTECT_BATCH {
            return Err(fail!(EINVAL, "protection {protect}: pass one of PF_PROTECT_*"));
        }
        let (capacity, local) = (depth as usize, || device.state.domain.local());
        let lease = Lease::new(device, flags & PF_QUEUE_INTERRUPT != 0)?;
        let queue = match lease.vector.clone() {
            None => device.controller.create_queue(capacity),
            Some(vector) => device.controller.create_queue_with(capacity, vector),
        };
        let queue = queue.map_err(|error| Failure::from(&error))?;
        let protection = match protect {
            PF_PROTECT_STATIC => Protection::Static,
            PF_PROTECT_STRICT => Protection::Strict(local()),
            PF_PROTECT_REVOKE => Protection::Revoke(local()),
            _ => Protection::Batch(local(), Found::new(capacity)),
        };
        Ok(Self {
            queue,
            protection,
            namespaces: device.controller.namespaces(),
            in_flight: std::iter::repeat_with(|| None).take(capacity).collect(),
            held: VecDeque::with_capacity(capacity),
            ready: VecDeque::with_capacity(capacity),
            outstanding: 0,
            failed: None,
            has_fd: false,
            lease,
        })
    }

    /// Submits a request; the doorbell is not rung.
    ///
    /// # Errors
    /// Those of [`pf_submit`]; nothing has changed.
    ///
    /// # Safety
    /// As for [`Memory::new`].
    unsafe fn submit(&mut self, request: &pf_request, site: Site) -> Result<(), Failure> {
        let depth = self.queue.depth();
        if self.outstanding >= depth {
            return Err(fail!(
                EAGAIN,
                "{depth} requests are unreported, the depth of the queue: call pf_complete first"
            ));
        }
        let pf_request { op, nsid, offset, len, flags, user_data, .. } = *request;
        if flags != 0 {
            return Err(fail!(EINVAL, "flags {flags:#x}: there are none, set them to 0"));
        }
        let attempt = match op {
            PF_READ | PF_WRITE => {
                // SAFETY: as the caller promises.
                let memory = unsafe { Memory::new(request) }?;
                let bytes = memory.bytes()?;
                if len != 0 && len != bytes {
                    return Err(fail!(
                        EINVAL,
                        "`len` is {len}, and `iov` has {bytes} bytes: set `len` to 0"
                    ));
                }
                if bytes > MAX_TRANSFER {
                    return Err(fail!(
                        EINVAL,
                        "{bytes} bytes: a request has at most {MAX_TRANSFER} (pf_nvme_info.max_transfer)"
                    ));
                }
                let (slba, blocks) = self.blocks(nsid, offset, bytes)?;
                self.transfer(&memory, op == PF_READ, (nsid, slba, blocks), site)?
            }
            PF_FLUSH if offset == 0 && len == 0 && request.iovcnt == 0 => {
                let flushing = self.queue.flush(nsid);
                Attempt::Bare(flushing.map_err(|refused| self.refused(&refused.reason))?)
            }
            PF_FLUSH => {
                return Err(fail!(
                    EINVAL,
                    "a flush is of the namespace: set `offset`, `len` and `iovcnt` to 0"
                ));
            }
            PF_DISCARD => {
                let (slba, blocks) = self.blocks(nsid, offset, len)?;
                let discarding = self.queue.discard(nsid, slba, blocks);
                Attempt::Bare(discarding.map_err(|refused| self.refused(&refused.reason))?)
            }
            _ => {
                return Err(fail!(
                    EINVAL,
                    "operation {op}: pass PF_READ, PF_WRITE, PF_FLUSH or PF_DISCARD"
                ));
            }
        };
        self.outstanding += 1;
        if let Some(place) = self.in_flight.get_mut(attempt.tag()) {
            *place = Some(Pending { attempt, user_data });
        }
        Ok(())
    }

    /// Returns the range in blocks.
    fn blocks(&mut self, nsid: u32, offset: u64, bytes: u64) -> Result<(u64, u32), Failure> {
        let known = self.namespaces.iter().find(|namespace| namespace.nsid == nsid);
        let namespace = match known {
            Some(namespace) => *namespace,
            None if nsid == 0 => {
                return Err(fail!(ENODEV, "namespace 0: the first is 1; pf_nvme_info has it"));
            }
            None => {
                let found = self.lease.device.namespace(nsid)?;
                self.namespaces.push(found);
                found
            }
        };
        let (block, capacity) = (u64::from(namespace.block_bytes), namespace.bytes());
        if bytes == 0 || !bytes.is_multiple_of(block) || !offset.is_multiple_of(block) {
            return Err(fail!(
                EINVAL,
                "{bytes} bytes at {offset}: both must be multiples of the block of {block} bytes, and at least one block"
            ));
        }
        if offset.checked_add(bytes).is_none_or(|end| end > capacity) {
            return Err(fail!(
                EINVAL,
                "{bytes} bytes at {offset} reach beyond the end of namespace {nsid}, which has {capacity} bytes"
            ));
        }
        let blocks = bytes / block;
        match u32::try_from(blocks) {
            Ok(blocks) => Ok((offset / block, blocks)),
            Err(_) => Err(fail!(EINVAL, "{blocks} blocks: a request has at most 4294967295")),
        }
    }

    /// Has memory mapped, and read or written.
    fn transfer(
        &mut self,
        memory: &Memory<'_>,
        read: bool,
        (nsid, slba, blocks): (u32, u64, u32),
        site: Site,
    ) -> Result<Attempt, Failure> {
        let device = &self.lease.device;
        let data = match self.protection.domain() {
            None => Fixed::new(memory.spans(device), device.state.domain.id())?.map(Data::Fixed),
            Some(domain) => match Scattered::new(memory.spans(device), device.state.domain.id())? {
                None => None,
                Some(memory) => Some(Data::map(memory, read, domain)?),
            },
        };
        let Some(data) = data else { return Err(fail!(EINVAL, "no memory")) };
        let tracer = hook();
        if let Some(tracer) = tracer {
            data.report(tracer, pf_event_kind::PF_EVENT_MAP, site);
        }
        let submitted = if read {
            self.queue.read::<_, FromDevice>(nsid, slba, blocks, data)
        } else {
            self.queue.write::<_, ToDevice>(nsid, slba, blocks, data)
        };
        submitted.map(Attempt::Data).map_err(|Rejected { payload, reason }| {
            let failure = self.refused_memory(memory, &payload, read, &reason);
            if let Some(tracer) = tracer {
                payload.report(tracer, pf_event_kind::PF_EVENT_REVOKE, site);
            }
            if let (Some(mapped), Some(domain)) =
                (payload.into_unrevoked(), self.protection.domain())
            {
                // What cannot be revoked stays with the domain, and counted.
                drop(domain.unmap(mapped));
            }
            failure
        })
    }

    /// Returns why the driver has refused memory, with the entry that it names.
    #[cold]
    fn refused_memory(
        &self,
        memory: &Memory<'_>,
        data: &Data,
        read: bool,
        reason: &Reject,
    ) -> Failure {
        let Reject::Layout(LayoutError::Prp(error)) = reason else { return self.refused(reason) };
        use pinfold::core::gather::prp::PrpError::{Offset, Ragged};
        let (Offset { iova } | Ragged { iova, .. }) = error else { return self.refused(reason) };
        let named = (0..).map_while(|index| data.segment_at(index, read)).position(|segment| {
            segment.iova == *iova || segment.iova.checked_add(segment.len) == Some(*iova)
        });
        let piece = memory.pieces().nth(named.unwrap_or(0));
        let (index, addr, len) = piece.unwrap_or_default();
        fail!(
            EINVAL,
            "iov[{index}], {len} bytes at {addr:#x}: {error}; without SGLs the first entry begins at a multiple of 4, the \
             others at multiples of 4096, and all but the last end at one"
        )
    }

    /// Returns why the driver has refused a request.
    #[cold]
    fn refused(&self, reason: &Reject) -> Failure {
        match reason {
            Reject::NeedsReset => {
                let why =
                    self.failed.as_deref().unwrap_or("it was disabled, or commands were lost");
                fail!(
                    EIO,
                    "the controller is not used any more: {why}: end it by pf_nvme_put, and open it again"
                )
            }
            Reject::NoSuchNamespace { nsid } => fail!(ENODEV, "there is no namespace {nsid}"),
            Reject::NamespaceChanged { nsid } => fail!(
                ESTALE,
                "namespace {nsid} was detached or formatted: look at it by pf_nvme_info, and create a new queue"
            ),
            Reject::NoDiscard => Failure::new(libc::EOPNOTSUPP, reason.to_string()),
            Reject::Layout(error) if error.is_out_of_pages() => {
                Failure::new(libc::ENOMEM, reason.to_string())
            }
            Reject::QueueFull { .. } => Failure::new(libc::EAGAIN, reason.to_string()),
            Reject::OtherDomain => Failure::new(ENXIO, reason.to_string()),
            _ => Failure::new(EINVAL, reason.to_string()),
        }
    }
}

// From the controller's completions to reports.

impl pf_queue_t {
    /// Takes the controller's completions, revokes their memory, and collects what can be reported.
    fn step(&mut self, site: Site) {
        loop {
            match self.queue.poll() {
                Ok(Some(completion)) => self.take(completion, site),
                Ok(None) => break,
                // Once it has been seen disabled, all that it has completes with an error, and it
                // reaches no memory.
                Err(error) => {
                    self.failed = Some(error.to_string());
                    if self.lease.device.controller.disable().is_err() {
                        self.give_up();
                        break;
                    }
                }
            }
        }
        self.revoke_batch();
        self.release();
    }

    fn take(&mut self, completion: Completion, site: Site) {
        let tag = completion.tag();
        let Some(place) = self.in_flight.get_mut(tag) else { return };
        let Some(Pending { attempt, user_data }) = place.take() else { return };
        match attempt.finish(completion) {
            Ended::Foreign(attempt) => *place = Some(Pending { attempt, user_data }),
            Ended::Lost(data) => {
                let status = if data.is_some() { PF_LOST } else { 0 };
                if let Some(data) = data {
                    self.lease.device.keep_lost(data);
                }
                self.ready.push_back(pf_completion { user_data, result: -ETIMEDOUT, status });
            }
            Ended::Completed(data, result) => {
                let (result, status) = outcome(result);
                let completion = pf_completion { user_data, result, status };
                if let (Some(tracer), Some(data)) = (hook(), &data) {
                    data.report(tracer, pf_event_kind::PF_EVENT_REVOKE, site);
                }
                match data.and_then(Data::into_unrevoked) {
                    None => self.ready.push_back(completion),
                    Some(mapped) => self.revoke(mapped, completion),
                }
            }
        }
    }

    /// Begins the end of a mapping.
    fn revoke(&mut self, mapped: Unrevoked<Scattered>, completion: pf_completion) {
        match &mut self.protection {
            // Nothing is mapped for a request.
            Protection::Static => self.ready.push_back(completion),
            Protection::Strict(domain) => {
                let ended = domain.unmap(mapped).map(drop);
                self.ready.push_back(completion.after(ended.map_err(|error| error.errno())));
            }
            Protection::Revoke(domain) => {
                let (revoked, since) = (domain.revoke(mapped), Instant::now());
                self.held.push_back(Held { revoked, completion, since });
            }
            Protection::Batch(_, found) => {
                found.mapped.push(mapped);
                found.completions.push(completion);
            }
        }
    }

    /// Revokes what this call has found, with one flush.
    fn revoke_batch(&mut self) {
        let Protection::Batch(domain, found) = &mut self.protection else { return };
        if found.mapped.is_empty() {
            return;
        }
        domain.revoke_many(found.mapped.drain(..), &mut found.revoked);
        let since = Instant::now();
        let each = found.revoked.drain(..).zip(found.completions.drain(..));
        self.held.extend(each.map(|(revoked, completion)| Held { revoked, completion, since }));
    }

    /// Collects what no device can reach any more. Flushes complete in the order of their requests.
    fn release(&mut self) {
        let Some(domain) = self.protection.domain() else { return };
        // What could not be revoked has no flush to wait for.
        let ended =
            |held: &mut Held| held.revoked.is_quiesced() || held.revoked.ticket() == Ticket::NEVER;
        while let Some(Held { revoked, completion, .. }) = self.held.pop_front_if(ended) {
            let ended = domain.wait(revoked).map(drop);
            self.ready.push_back(completion.after(ended.map_err(|failed| failed.error.errno())));
        }
        if self.ready.is_empty() && !self.held.is_empty() {
            self.wait_for_flush(Duration::ZERO);
        }
    }

    /// Waits for the first flush, and gives up what has waited for too long: the domain keeps that
    /// memory until its flush has completed.
    fn wait_for_flush(&mut self, limit: Duration) {
        let Some(domain) = self.protection.domain() else { return };
        let late = |held: &Held| held.since.elapsed() >= FLUSH_LIMIT;
        if limit.is_zero() && !self.held.front().is_some_and(late) {
            return;
        }
        let Some(Held { revoked, completion, since }) = self.held.pop_front() else { return };
        let ended = match domain.wait_for(revoked, WaitLimit::within(limit)) {
            Ok(memory) => {
                drop(memory);
                Ok(())
            }
            Err(NotQuiesced { revoked: Some(revoked), .. }) if since.elapsed() < FLUSH_LIMIT => {
                self.held.push_front(Held { revoked, completion, since });
                return;
            }
            Err(failed) => Err(failed.error.errno()),
        };
        self.ready.push_back(completion.after(ended));
    }

    /// Reports all that the controller has as lost: it cannot be disabled.
    #[cold]
    fn give_up(&mut self) {
        for Pending { attempt, user_data } in self.in_flight.iter_mut().filter_map(Option::take) {
            let status = if matches!(attempt, Attempt::Data(_)) { PF_LOST } else { 0 };
            // Its memory is quarantined for the life of the process.
            drop(attempt);
            self.ready.push_back(pf_completion { user_data, result: -ENODEV, status });
        }
    }

    /// Waits until something can be reported, for at most `limit`; returns how much.
    fn wait(&mut self, limit: Duration, site: Site) -> usize {
        let (since, mut polls) = (Instant::now(), 0u32);
        loop {
            self.step(site);
            if !self.ready.is_empty() || self.outstanding == 0 {
                return self.ready.len();
            }
            let Some(left) = limit.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
            else {
                return 0;
            };
            polls = polls.saturating_add(1);
            self.pause(polls, left.min(SLEEP));
        }
    }

    /// Pauses between two polls of a wait; `polls` counts from 1. No interrupt reports the end of a
    /// flush.
    fn pause(&mut self, polls: u32, limit: Duration) {
        let flushing = !self.held.is_empty();
        if self.queue.has_interrupt() && !flushing && polls > YIELDS_BEFORE_SLEEP {
            self.queue.sleep(limit);
        } else if flushing && polls > SPINS && self.queue.in_flight() == 0 {
            self.wait_for_flush(limit);
        } else if polls <= SPINS && (flushing || !self.queue.has_interrupt()) {
            std::hint::spin_loop();
        } else if polls <= SPINS + YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(PAUSE.min(limit));
        }
    }

    /// Has the descriptor become readable with the next completion.
    fn arm(&mut self) {
        let wait = self.queue.arm_interrupt();
        // No interrupt reports the end of a flush, which takes microseconds.
        if self.outstanding > 0 && (wait.is_zero() || !self.held.is_empty()) {
            self.signal();
        }
    }

    /// Has the descriptor be readable now.
    fn signal(&self) {
        let Some(fd) = self.queue.interrupt_fd() else { return };
        let one = 1u64.to_ne_bytes();
        // SAFETY: 8 bytes that are initialized. A full counter is readable already.
        let _ = unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

impl pf_completion {
    /// Returns the report of a request whose mapping has ended so.
    fn after(self, ended: Result<(), c_int>) -> Self {
        match ended {
            Ok(()) => self,
            Err(errno) => {
                let result = if self.result == 0 { -errno } else { self.result };
                Self { result, status: self.status | PF_LOST, ..self }
            }
        }
    }
}

/// Returns `result` and `status` of a request that its controller has completed.
fn outcome(result: Result<(), CommandError>) -> (i32, u32) {
    match result {
        Ok(()) => (0, 0),
        Err(CommandError::Status(status)) => (-EIO, status.bits().into()),
        Err(CommandError::Aborted | CommandError::Reset | CommandError::NotSent) => (-ECANCELED, 0),
        Err(CommandError::NamespaceChanged { .. }) => (-ESTALE, 0),
        Err(CommandError::Layout(_)) => (-EINVAL, 0),
        Err(_) => (-EIO, 0),
    }
}
