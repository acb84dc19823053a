//! The translation of a C program's request to the driver's: the memory, the blocks, and the
//! checks.

use super::transfer::{Attempt, Fixed, Parts, Scattered, parts, report};
use super::{PF_COMMAND, PF_DISCARD, PF_FLUSH, PF_READ, PF_WRITE};
use super::{Pending, check_in, pf_completion, pf_queue_t, pf_request};
use crate::admin::pf_nvme_command;
use crate::domain::Lookup;
use crate::failure::{Failure, fail};
use crate::nvme::MAX_TRANSFER;
use crate::options;
use crate::region::Span;
use crate::trace::{Site, hook, pf_event_kind};
use libc::{EINVAL, ENXIO, iovec};
use pinfold::core::access::{Access, FromDevice, ToDevice};
use pinfold::core::domain::Payload;
use pinfold::requests::{BeginError, Refusal, Token};
use pinfold_nvme::driver::{DataDirection, InFlight, LayoutError, RawCommand, Reject, Rejected};

/// The most entries of a request's `iov`.
const MAX_IOVECS: u32 = 1024;

/// The operation on the memory of a request.
#[derive(Clone, Copy)]
enum What {
    /// The namespace, the first block, and how many.
    Blocks(u32, u64, u32),
    /// A command of the program's own, and the bytes of its data.
    Command(RawCommand, u64),
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

    /// Returns the bytes of all, which `len` says, too, unless it is 0.
    fn same_bytes(&self, len: u64) -> Result<u64, Failure> {
        let bytes = self.bytes()?;
        if len != 0 && len != bytes {
            return Err(fail!(
                EINVAL,
                "`len` is {len}, and `iov` has {bytes} bytes: set `len` to 0"
            ));
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

    /// Returns the parts of regions that the entries name, each counted as in use.
    ///
    /// # Errors
    /// Those of `Lookups::span`, with the number of the entry; `ENOMEM`.
    #[inline]
    fn spans(&self, lookup: &Lookup) -> Result<Parts<Span>, Failure> {
        let lookups = lookup.begin();
        let span = |(index, addr, len)| {
            let span = lookups.span(addr, len);
            span.map_err(|failure| failure.of(format_args!("iov[{index}]")))
        };
        match self.0 {
            [one] => span((0, one.iov_base.addr(), one.iov_len)).map(Parts::One),
            many => {
                let mut spans = parts(many.len())?;
                for piece in self.pieces() {
                    spans.push(span(piece)?);
                }
                Ok(Parts::Many(spans))
            }
        }
    }
}

impl pf_queue_t {
    /// Submits a request; the doorbell is not rung.
    ///
    /// # Errors
    /// Those of `pf_submit`; nothing has changed.
    ///
    /// # Safety
    /// As for [`Memory::new`]; `command` is null or has as many bytes as its first field says.
    pub(super) unsafe fn submit(
        &mut self,
        request: &pf_request,
        site: Site,
    ) -> Result<(), Failure> {
        let depth = self.queue.depth();
        if self.outstanding >= depth {
            return Err(fail!(
                EAGAIN,
                "{depth} requests are unreported, the depth of the queue: call pf_complete first"
            ));
        }
        let pf_request { op, nsid, offset, len, flags, user_data, command, .. } = *request;
        if flags != 0 {
            return Err(fail!(EINVAL, "flags {flags:#x}: there are none, set them to 0"));
        }
        if (op == PF_COMMAND) == command.is_null() {
            return Err(fail!(EINVAL, "`command` {command:p}: PF_COMMAND has one, others none"));
        }
        let pending = match op {
            PF_COMMAND => {
                // SAFETY: as the caller promises.
                let raw = unsafe { raw_command(command, nsid) }?;
                if offset != 0 || (request.iovcnt == 0 && len != 0) {
                    return Err(fail!(
                        EINVAL,
                        "offset {offset}, {len} bytes: a command has its own words; set `offset` to 0, and `len` to 0 \
                         or what `iov` has"
                    ));
                }
                if request.iovcnt == 0 {
                    let token = self.begin_bare()?;
                    let sent = self.queue.raw(&raw);
                    self.bare(token, sent)?
                } else {
                    // SAFETY: as the caller promises.
                    let memory = unsafe { Memory::new(request) }?;
                    let bytes = memory.same_bytes(len)?;
                    let read = raw.direction() == DataDirection::FromController;
                    self.transfer(&memory, read, What::Command(raw, bytes), site)?
                }
            }
            PF_READ | PF_WRITE => {
                // SAFETY: as the caller promises.
                let memory = unsafe { Memory::new(request) }?;
                let bytes = memory.same_bytes(len)?;
                if bytes > MAX_TRANSFER {
                    return Err(fail!(
                        EINVAL,
                        "{bytes} bytes: a request has at most {MAX_TRANSFER} (pf_nvme_info.max_transfer)"
                    ));
                }
                let (slba, blocks) = self.blocks(nsid, offset, bytes)?;
                self.transfer(&memory, op == PF_READ, What::Blocks(nsid, slba, blocks), site)?
            }
            PF_FLUSH if offset == 0 && len == 0 && request.iovcnt == 0 => {
                let token = self.begin_bare()?;
                let flushing = self.queue.flush(nsid);
                self.bare(token, flushing)?
            }
            PF_FLUSH => {
                return Err(fail!(
                    EINVAL,
                    "a flush is of the namespace: set `offset`, `len` and `iovcnt` to 0"
                ));
            }
            PF_DISCARD => {
                let (slba, blocks) = self.blocks(nsid, offset, len)?;
                let token = self.begin_bare()?;
                let discarding = self.queue.discard(nsid, slba, blocks);
                self.bare(token, discarding)?
            }
            _ => {
                return Err(fail!(
                    EINVAL,
                    "operation {op}: pass PF_READ, PF_WRITE, PF_FLUSH, PF_DISCARD or PF_COMMAND"
                ));
            }
        };
        self.outstanding += 1;
        if let Some(place) = self.reports.get_mut(pending.token.slot()) {
            *place = Some(pf_completion { user_data, ..pf_completion::NONE });
        }
        if let Some(place) = self.in_flight.get_mut(pending.attempt.tag()) {
            *place = Some(pending);
        }
        Ok(())
    }

    /// Begins a request of which the loop has no memory.
    fn begin_bare(&mut self) -> Result<Token, Failure> {
        self.requests.begin([]).map_err(|BeginError { refusal, .. }| not_begun(&refusal))
    }

    /// Returns a flush or a discard at the controller.
    fn bare(
        &mut self,
        token: Token,
        submitted: Result<InFlight<()>, Rejected<()>>,
    ) -> Result<Pending, Failure> {
        submitted.map(|attempt| Pending { token, attempt: Attempt::Bare(attempt) }).map_err(
            |Rejected { reason, .. }| {
                self.end_refused(token);
                self.refused(&reason)
            },
        )
    }

    /// Ends a request that the driver has refused.
    fn end_refused(&mut self, token: Token) {
        // Begun by the same call. What is late stays with the loop, and counted.
        drop(self.requests.refused(token));
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

    /// Maps memory, and reads or writes it.
    fn transfer(
        &mut self,
        memory: &Memory<'_>,
        read: bool,
        what: What,
        site: Site,
    ) -> Result<Pending, Failure> {
        let (spans, id) = (memory.spans(&self.lookup)?, self.lease.device.state.domain.id());
        if self.is_static {
            let fixed = Fixed::new(spans, id)?;
            let token = self.begin_bare()?;
            return self.transfer_fixed(token, fixed, memory, read, what);
        }
        let access = if read { Access::WRITE } else { Access::READ };
        let begun = self.requests.begin_lent([(Scattered::new(spans, id)?, access)]);
        let lent = begun.map_err(|BeginError { refusal, .. }| not_begun(&refusal))?;
        let token = lent.token();
        let tracer = hook();
        if let Some(tracer) = tracer {
            report(&lent, tracer, pf_event_kind::PF_EVENT_MAP, site);
        }
        match self.start(lent, read, what) {
            Ok(attempt) => Ok(Pending { token, attempt: Attempt::Mapped(attempt) }),
            Err(Rejected { payload, reason }) => {
                let failure = self.refused_memory(memory, &payload, read, &reason);
                if let Some(tracer) = tracer {
                    report(&payload, tracer, pf_event_kind::PF_EVENT_REVOKE, site);
                }
                // The payload is of this loop, and was lent until now.
                let _ = self.requests.take_back(payload);
                self.end_refused(token);
                Err(failure)
            }
        }
    }

    fn transfer_fixed(
        &mut self,
        token: Token,
        fixed: Fixed,
        memory: &Memory<'_>,
        read: bool,
        what: What,
    ) -> Result<Pending, Failure> {
        match self.start(fixed, read, what) {
            Ok(attempt) => Ok(Pending { token, attempt: Attempt::Fixed(attempt) }),
            Err(Rejected { payload, reason }) => {
                self.end_refused(token);
                Err(self.refused_memory(memory, &payload, read, &reason))
            }
        }
    }

    /// Starts a read, a write or a command at the driver.
    #[inline]
    fn start<P: Payload<FromDevice> + Payload<ToDevice>>(
        &mut self,
        payload: P,
        read: bool,
        what: What,
    ) -> Result<InFlight<P>, Rejected<P>> {
        match (what, read) {
            (What::Blocks(nsid, slba, blocks), true) => {
                self.queue.read::<_, FromDevice>(nsid, slba, blocks, payload)
            }
            (What::Blocks(nsid, slba, blocks), false) => {
                self.queue.write::<_, ToDevice>(nsid, slba, blocks, payload)
            }
            (What::Command(raw, bytes), true) => {
                self.queue.raw_read::<_, FromDevice>(&raw, bytes, payload)
            }
            (What::Command(raw, bytes), false) => {
                self.queue.raw_write::<_, ToDevice>(&raw, bytes, payload)
            }
        }
    }

    /// Returns why the driver has refused memory, with the entry that it names.
    #[cold]
    fn refused_memory<P: Payload<FromDevice> + Payload<ToDevice>>(
        &self,
        memory: &Memory<'_>,
        payload: &P,
        read: bool,
        reason: &Reject,
    ) -> Failure {
        let Reject::Layout(error) = reason else { return self.refused(reason) };
        let Some(iova) = error.iova() else { return self.refused(reason) };
        let segment = |index| match read {
            true => Payload::<FromDevice>::segment(payload, index),
            false => Payload::<ToDevice>::segment(payload, index),
        };
        let named = (0..).map_while(segment).position(|segment| {
            segment.iova == iova || segment.iova.checked_add(segment.len) == Some(iova)
        });
        let piece = memory.pieces().nth(named.unwrap_or(0));
        let (index, addr, len) = piece.unwrap_or_default();
        let rule = match error {
            LayoutError::Offset { .. } | LayoutError::Ragged { .. } => {
                "; without SGLs the first entry begins at a multiple of 4, the others at multiples of 4096, and all but \
                 the last end at one"
            }
            _ => "",
        };
        fail!(EINVAL, "iov[{index}], {len} bytes at {addr:#x}: {error}{rule}")
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
                    "the controller is not used any more: {why}: end it by pf_nvme_destroy, and open it again"
                )
            }
            Reject::NoSuchNamespace { nsid } => fail!(ENODEV, "there is no namespace {nsid}"),
            Reject::NamespaceChanged { nsid } => fail!(
                ESTALE,
                "namespace {nsid} was detached or formatted: look at it by pf_nvme_info, and create a new queue"
            ),
            Reject::OwnedByDriver { .. } => Failure::new(libc::EACCES, reason.to_string()),
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

/// Returns a command of the program's own, for a namespace.
///
/// # Safety
/// `command` is not null, and has as many bytes as its first field says.
unsafe fn raw_command(command: *const pf_nvme_command, nsid: u32) -> Result<RawCommand, Failure> {
    // SAFETY: as the caller promises.
    let command = unsafe { options::read(command) }?;
    if ![0, nsid].contains(&command.nsid) {
        return Err(fail!(
            EINVAL,
            "the command's `nsid` is {}, and the request's {nsid}: set it to 0",
            command.nsid
        ));
    }
    command.raw(nsid)
}

/// Returns why the loop has not begun a request.
#[cold]
fn not_begun(refusal: &Refusal) -> Failure {
    match refusal {
        Refusal::Map { error, .. } => Failure::from(error),
        // That many flushes are late.
        Refusal::Depth { .. } | Refusal::Slots { .. } => fail!(EAGAIN, "{refusal}"),
        _ => fail!(EINVAL, "{refusal}"),
    }
}
