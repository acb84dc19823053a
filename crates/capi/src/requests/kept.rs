//! The state of a C program's request loop: its requests with their names, from their memory to the
//! reports that the program fetches.

use super::names::Names;
use super::{
    FLUSH_LIMIT, MOST, PF_END_LATE, PF_END_LOST, PF_END_QUIESCED, PF_END_STAYS_MAPPED, pf_done,
    pf_payload, pf_requests_opts,
};
use crate::domain::{Lookup, State};
use crate::errno::Errno;
use crate::failure::{Failure, fail};
use crate::handed::Handed;
use crate::map::pf_dir;
use crate::queue::{PF_PROTECT_BATCH, PF_PROTECT_REVOKE, PF_PROTECT_STATIC, PF_PROTECT_STRICT};
use crate::region::Span;
use crate::trace::{Site, hook, pf_event_kind};
use pinfold::Access;
use pinfold::requests::{
    End, Ended, Limits, NewError, Policy, Refusal, Requests, Token, TokenError,
};
use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::time::Duration;

/// A protected request loop.
pub struct pf_requests_t {
    /// The descriptor of pf_requests_fd(). Before the loop, whose descriptor it is.
    pub(super) handed: Option<Handed>,
    /// Owns the memory that is mapped for requests, but not memory that stays mapped.
    pub(super) requests: Requests<Span, MOST>,
    is_static: bool,
    pub(super) names: Names<Request>,
    /// Empty between two calls.
    ended: Vec<Ended<Span, MOST>>,
    /// Reports that the program has not fetched: at most two of each request.
    pub(super) ready: VecDeque<pf_done>,
    lookup: Lookup,
    /// Dropped after the loop.
    pub(super) state: Arc<State>,
}

/// The record of a request until it is reported.
pub(super) struct Request {
    token: Token,
    pub(super) result: u64,
    memory: [Option<Memory>; MOST],
    /// For a request that was given up: the bytes of the pages of its payloads.
    pub(super) lost: Option<u64>,
}

/// A payload of a request.
pub(super) enum Memory {
    /// The loop has it; the address is the program's.
    Mapped(usize),
    /// It stays mapped at this address, and is in use until it is dropped.
    Kept(Span, u64),
}

impl Request {
    pub(super) fn stays_mapped(&self) -> bool {
        self.memory.iter().flatten().any(|memory| matches!(memory, Memory::Kept(..)))
    }
}

impl Drop for pf_requests_t {
    /// The device may still work on requests that are lost: as their payloads in the loop, those
    /// that stay mapped stay in use.
    fn drop(&mut self) {
        for request in self.names.drain() {
            let Ok(segments) = self.requests.segments(request.token) else { continue };
            if let Some(bytes) = request.lost {
                let (mut mappings, mut mapped_bytes) = (0, 0);
                for segment in segments {
                    mappings += 1;
                    mapped_bytes += page_bytes(segment.iova.raw(), segment.len);
                }
                self.state.count_lost(|lost| {
                    lost.open.requests -= 1;
                    lost.open.bytes -= bytes;
                    lost.ended.requests += 1;
                    lost.ended.bytes += bytes;
                    lost.mappings += mappings;
                    lost.mapped_bytes += mapped_bytes;
                });
            }
            request.memory.into_iter().flatten().for_each(std::mem::forget);
        }
    }
}

/// Returns the bytes of the pages of `len` bytes at `at`.
pub(super) fn page_bytes(at: u64, len: u64) -> u64 {
    const PAGE: u64 = 4096;
    (at % PAGE).saturating_add(len).div_ceil(PAGE).saturating_mul(PAGE)
}

/// Returns what a protection is to a loop.
fn policy(protect: u32) -> Result<Policy, Failure> {
    match protect {
        0 | PF_PROTECT_STRICT => Ok(Policy::Strict),
        PF_PROTECT_REVOKE => Ok(Policy::Revoke),
        PF_PROTECT_BATCH => Ok(Policy::Batch),
        PF_PROTECT_STATIC => Ok(Policy::Static),
        _ => Err(fail!(EINVAL, "protection {protect}: pass one of PF_PROTECT_*")),
    }
}

impl pf_requests_t {
    pub(super) fn new(state: Arc<State>, opts: &pf_requests_opts) -> Result<Self, Failure> {
        let pf_requests_opts { flush_ns, depth, held, protect, flags, .. } = *opts;
        if flags != 0 {
            return Err(fail!(EINVAL, "flags {flags:#x}: there are none, set them to 0"));
        }
        let limits = Limits {
            held: (held > 0).then_some(held as usize),
            flush: if flush_ns > 0 { Duration::from_nanos(flush_ns) } else { FLUSH_LIMIT },
        };
        let requests = Requests::new(&state.domain, policy(protect)?, depth as usize, limits);
        let requests = requests.map_err(|error| match error {
            NewError::NoMemory { .. } => fail!(ENOMEM, "{error}"),
            _ => fail!(EINVAL, "{error}"),
        })?;
        let slots = requests.slots();
        let (mut ended, mut ready) = (Vec::new(), VecDeque::new());
        let room = ended.try_reserve_exact(slots);
        let room = room.and_then(|()| ready.try_reserve_exact(slots.saturating_mul(2)));
        let names = room.and_then(|()| Names::new(slots)).map_err(|error| {
            fail!(
                ENOMEM,
                "cannot allocate {slots} slots of a request loop: {error}; use a smaller depth"
            )
        })?;
        let is_static = protect == PF_PROTECT_STATIC;
        let lookup = state.lookup();
        Ok(Self { handed: None, requests, is_static, names, ended, ready, lookup, state })
    }

    /// Begins a request, and returns its name.
    ///
    /// # Errors
    /// Those of `pf_requests_begin`; nothing has changed.
    pub(super) fn begin(
        &mut self,
        payloads: impl Iterator<Item = pf_payload>,
    ) -> Result<u64, Failure> {
        // Without a report to fetch, the loop's slots are in use, too, and its error says what for.
        if self.names.is_full() && !self.ready.is_empty() {
            return Err(fail!(
                EAGAIN,
                "all {} slots are in use, and {} reports have not been fetched: call pf_requests_poll first",
                self.requests.slots(),
                self.ready.len()
            ));
        }
        let (lookups, id) = (self.lookup.begin(), self.state.domain.id());
        let mut memory = [const { None }; MOST];
        let (mut first, mut second, mut rest) = (None, None, Vec::new());
        for ((index, payload), place) in payloads.enumerate().zip(&mut memory) {
            let pf_payload { va, len, dir, reserved } = payload;
            let span = || {
                if reserved != 0 {
                    return Err(fail!(EINVAL, "reserved {reserved:#x}: set it to 0"));
                }
                let access = match pf_dir::of(dir)? {
                    pf_dir::PF_TO_DEVICE => Access::READ,
                    pf_dir::PF_FROM_DEVICE => Access::WRITE,
                    pf_dir::PF_BIDIR => Access::all(),
                };
                Ok((lookups.span(va.addr(), len)?, access))
            };
            let (span, access) =
                span().map_err(|failure| failure.of(format_args!("payload {index}")))?;
            match span.fixed(id) {
                Some(iova) => *place = Some(Memory::Kept(span, iova.raw())),
                None if self.is_static => {
                    return Err(fail!(
                        ENXIO,
                        "payload {index}: {len} bytes at {va:p} do not stay mapped, as PF_PROTECT_STATIC requires: allocate \
                         them from an arena of PF_POLICY_WHOLE, or create the loop with another protection"
                    ));
                }
                None => {
                    *place = Some(Memory::Mapped(va.addr()));
                    match (&first, &second) {
                        (None, _) => first = Some((span, access)),
                        (_, None) => second = Some((span, access)),
                        _ => rest.push((span, access)),
                    }
                }
            }
        }
        drop(lookups);
        let token = match (first, second) {
            (Some(first), Some(second)) if !rest.is_empty() => {
                rest.extend([first, second]);
                rest.rotate_right(2);
                begin_all(&mut self.requests, rest)
            }
            (Some(first), Some(second)) => begin_these(&mut self.requests, [first, second]),
            (Some(first), None) => begin_these(&mut self.requests, [first]),
            (None, _) => begin_these(&mut self.requests, []),
        }?;
        let request = Request { token, result: 0, memory, lost: None };
        // A slot is free.
        self.names.add(token.slot(), request).ok_or_else(|| fail!(EAGAIN, "no slot is left"))
    }

    /// Finds the loop's token of a request.
    ///
    /// # Errors
    /// `ESTALE`: there is no such request.
    pub(super) fn at_device(&self, name: u64) -> Result<Token, Failure> {
        self.names.get(name).map(|request| request.token).ok_or_else(|| {
            fail!(
                ESTALE,
                "token {name:#x}: its request was reported, or this loop never began it: pass what pf_requests_begin \
                 stored"
            )
        })
    }

    /// Yields the payloads of a request at the device or lost, with their addresses and lengths.
    pub(super) fn parts(&self, name: u64) -> impl Iterator<Item = (*mut c_void, u64, u64)> {
        let request = self.names.get(name);
        let begun = request.and_then(|request| {
            Some((request.memory.iter().flatten(), self.requests.segments(request.token).ok()?))
        });
        begun.into_iter().flat_map(|(memory, mut segments)| {
            memory.map_while(move |memory| {
                let (addr, iova, len) = match memory {
                    Memory::Mapped(addr) => {
                        let segment = segments.next()?;
                        (*addr, segment.iova.raw(), segment.len)
                    }
                    Memory::Kept(span, iova) => (span.addr(), *iova, span.part().1 as u64),
                };
                Some((std::ptr::without_provenance_mut(addr), iova, len))
            })
        })
    }

    /// Reports an event for each payload of a request that is at the device or lost.
    pub(super) fn report(&self, name: u64, kind: pf_event_kind, site: Site) {
        let Some(hook) = hook() else { return };
        for (va, iova, len) in self.parts(name) {
            hook.report(kind, va, iova, len, site);
        }
    }

    /// Counts a request that has ended as lost no more.
    pub(super) fn found(&mut self, name: u64) {
        let request = self.names.get_mut(name);
        if let Some(bytes) = request.and_then(|request| request.lost.take()) {
            self.state.count_lost(|lost| {
                lost.open.requests -= 1;
                lost.open.bytes -= bytes;
            });
        }
    }

    pub(super) fn poll(&mut self) {
        self.requests.poll(&mut self.ended);
        self.collect();
    }

    pub(super) fn wait(&mut self, limit: Duration) {
        self.requests.wait(limit, &mut self.ended);
        self.collect();
    }

    /// Creates reports of the requests that the loop has ended. Their payloads are dropped, which
    /// ends their use.
    fn collect(&mut self) {
        for Ended { token, end, payloads } in self.ended.drain(..) {
            drop(payloads);
            let Some((name, request)) = self.names.by_slot(token.slot()) else { continue };
            let stays = request.stays_mapped();
            if !matches!(end, End::Late(_)) {
                request.memory = [const { None }; MOST];
            }
            let (end, error) = match end {
                End::Quiesced if stays => (PF_END_STAYS_MAPPED, 0),
                End::Quiesced => (PF_END_QUIESCED, 0),
                End::Late(error) => (PF_END_LATE, -error.errno()),
                End::Lost(error) => (PF_END_LOST, -error.errno()),
            };
            self.ready.push_back(pf_done { token: name, result: request.result, end, error });
        }
    }

    /// Stores up to `max` reports, and returns how many.
    ///
    /// # Safety
    /// `done` can be written for `max` reports.
    pub(super) unsafe fn tell(&mut self, done: *mut pf_done, max: c_uint) -> c_int {
        let found = self.ready.len().min(max as usize);
        for (at, report) in self.ready.drain(..found).enumerate() {
            if report.end != PF_END_LATE {
                self.names.free(report.token);
            }
            // SAFETY: `at` is below `max`. C need not align it.
            unsafe { done.wrapping_add(at).write_unaligned(report) };
        }
        c_int::try_from(found).unwrap_or(c_int::MAX)
    }
}

type Payload = (Span, Access);

/// # Errors
/// The loop has not begun it.
fn begin_these<const M: usize>(
    requests: &mut Requests<Span, MOST>,
    payloads: [Payload; M],
) -> Result<Token, Failure> {
    requests.begin(payloads).map_err(|refused| not_begun(&refused.refusal))
}

/// Like [`begin_these`], for more than two.
fn begin_all(
    requests: &mut Requests<Span, MOST>,
    payloads: Vec<Payload>,
) -> Result<Token, Failure> {
    fn begin<const M: usize>(
        requests: &mut Requests<Span, MOST>,
        payloads: Vec<Payload>,
    ) -> Result<Token, Failure> {
        match <[Payload; M]>::try_from(payloads) {
            Ok(payloads) => begin_these(requests, payloads),
            Err(payloads) => Err(fail!(EINVAL, "{} payloads, not {M}", payloads.len())),
        }
    }
    match payloads.len() {
        3 => begin::<3>(requests, payloads),
        4 => begin::<4>(requests, payloads),
        5 => begin::<5>(requests, payloads),
        6 => begin::<6>(requests, payloads),
        7 => begin::<7>(requests, payloads),
        _ => begin::<MOST>(requests, payloads),
    }
}

/// Returns why the loop refuses a token that it knows: the program has its name only.
#[cold]
pub(super) fn not_at_device(name: u64, error: &TokenError) -> Failure {
    match error {
        TokenError::Ended { .. } => fail!(
            ESTALE,
            "token {name:#x}: its request has ended: say once what has become of a request"
        ),
        TokenError::Lost { .. } => fail!(
            ESTALE,
            "token {name:#x}: its request was given up, so that the device may work on it: it ends with \
             pf_requests_completed or pf_requests_stopped"
        ),
        _ => fail!(ESTALE, "token {name:#x}: {error}"),
    }
}

/// Returns why the loop has not begun a request.
#[cold]
fn not_begun(refusal: &Refusal) -> Failure {
    match refusal {
        Refusal::Map { error, .. } => Failure::from(error),
        Refusal::Depth { .. } | Refusal::Slots { .. } => fail!(EAGAIN, "{refusal}"),
        _ => fail!(EINVAL, "{refusal}"),
    }
}
