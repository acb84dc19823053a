//! Mappings: memory that a device reaches until it is revoked.

use crate::domain::{DOMAINS, Lost, pf_domain_t};
use crate::failure::{Counted, Failure, call, check_out, fail, store, store_text};
use crate::options::{Options, fill};
use crate::owner::{OWNERS, no_room, pf_owner_t, pf_ticket_t};
use crate::region::Span;
use crate::slots::{Slots, Stale, pf_map_t};
use crate::trace::{Caller, Site, hook, pass_caller, pf_event_kind};
use libc::iovec;
use pinfold::core::domain::MapManyError;
use pinfold::{
    BackendError, Bidirectional, DomainLocal, FromDevice, MapError, ToDevice, Unrevoked,
};
use std::ffi::{c_char, c_int, c_uint, c_void};

#[cfg(test)]
mod tests;

/// The return value of calls that end a mapping if devices still reach the memory: it is of an
/// arena of PF_POLICY_WHOLE, or registered.
pub const PF_STAYS_MAPPED: c_int = 1;

/// The access of a device to mapped memory.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum pf_dir {
    /// Read it.
    PF_TO_DEVICE = 1,
    /// Write it.
    PF_FROM_DEVICE = 2,
    /// Both.
    PF_BIDIR = 3,
}

impl pf_dir {
    pub(crate) fn of(value: c_uint) -> Result<Self, Failure> {
        match value {
            1 => Ok(Self::PF_TO_DEVICE),
            2 => Ok(Self::PF_FROM_DEVICE),
            3 => Ok(Self::PF_BIDIR),
            _ => Err(fail!(
                EINVAL,
                "direction {value}: pass PF_TO_DEVICE, PF_FROM_DEVICE or PF_BIDIR"
            )),
        }
    }

    fn map(self, local: &mut DomainLocal, span: Span) -> Result<Unrevoked<Span>, MapError<Span>> {
        match self {
            Self::PF_TO_DEVICE => local.map(span, ToDevice).map(Unrevoked::from),
            Self::PF_FROM_DEVICE => local.map(span, FromDevice).map(Unrevoked::from),
            Self::PF_BIDIR => local.map(span, Bidirectional).map(Unrevoked::from),
        }
    }

    fn map_many(
        self,
        local: &mut DomainLocal,
        spans: Vec<Span>,
        mapped: impl FnMut(Unrevoked<Span>),
    ) -> Result<(), MapManyError<Span>> {
        match self {
            Self::PF_TO_DEVICE => {
                let mappings = local.map_many(spans, ToDevice)?;
                mappings.into_iter().map(Unrevoked::from).for_each(mapped);
            }
            Self::PF_FROM_DEVICE => {
                let mappings = local.map_many(spans, FromDevice)?;
                mappings.into_iter().map(Unrevoked::from).for_each(mapped);
            }
            Self::PF_BIDIR => {
                let mappings = local.map_many(spans, Bidirectional)?;
                mappings.into_iter().map(Unrevoked::from).for_each(mapped);
            }
        }
        Ok(())
    }
}

/// Maps memory for a device: until it is revoked, the device reaches it, in this direction, at the
/// address that is stored. pf_free() of it is EBUSY until then.
///
/// A device reaches the whole pages of 4096 bytes around it. Memory of PF_POLICY_WHOLE, and
/// registered memory, is mapped for its lifetime: of such memory a mapping costs next to nothing,
/// and its end does not keep the device from the memory: it returns PF_STAYS_MAPPED. Memory of
/// pools in an arena of PF_POLICY_PER_USE stays mapped too, at the addresses in its blocks and
/// pages, and is refused here.
///
/// @owner: the owner, of the memory's domain.
/// @va: the memory: any bytes of one allocation of an arena in the domain, or of registered memory.
/// @len: bytes, at least 1.
/// @dir: enum pf_dir: the access of the device.
/// @map: where the mapping's name is stored, for pf_unmap() or pf_revoke_many() of this owner.
/// @iova: where the device's address of `va` is stored.
///
/// Return: 0, or -errno: ENXIO (not in this domain's memory); EINVAL (not allocated, not `len`
/// bytes of it, 0 bytes, a pool's that stays mapped, or no direction); ENOMEM, ENOSPC (the domain's
/// limits, or no address left); EIO, ETIMEDOUT (the IOMMU); EFAULT; EBADF; EBUSY (another thread is
/// in a call with the owner). Nothing is mapped then.
/// Thread: the owner's; no lock is taken that other owners take. Allocates when the owner has more
/// mappings than ever. Since 0.2.
///
/// # Safety
/// `map` and `iova` are null or can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_map(
    owner: *mut pf_owner_t,
    va: *mut c_void,
    len: usize,
    dir: c_uint,
    map: *mut pf_map_t,
    iova: *mut u64,
) -> c_int {
    pass_caller!(6, map_one);
}

unsafe extern "C" fn map_one(
    handle: *mut pf_owner_t,
    va: *mut c_void,
    len: usize,
    dir: c_uint,
    map: *mut pf_map_t,
    iova: *mut u64,
    caller: Caller,
) -> c_int {
    call(|| {
        check_out(map, "map")?;
        check_out(iova, "iova")?;
        let dir = pf_dir::of(dir)?;
        let mut owner = OWNERS.get_mut(handle)?;
        let owner = &mut *owner;
        owner.mappings.reserve(1).map_err(|error| no_room("map", 1, &error))?;
        let span = owner.lookup.begin().span(va.addr(), len)?;
        let stays = span.check_mappable(owner.state.domain.id())?;
        let at = span.part().0 as u64;
        let mapping =
            dir.map(&mut owner.local, span).map_err(|refused| Failure::from(&refused.error))?;
        let address = mapping.iova().start().raw() + at;
        let name = owner.mappings.add(mapping, va.addr(), len, stays);
        // SAFETY: as the caller of `pf_map` promises.
        unsafe { store(map, name, "map") }?;
        // SAFETY: as the caller of `pf_map` promises.
        unsafe { store(iova, address, "iova") }?;
        report(pf_event_kind::PF_EVENT_MAP, handle, caller, || [(va, address, len)]);
        Ok(0)
    })
}

/// Maps many pieces of memory, all or none. Up to 1 MiB altogether, with the rest of their pages,
/// they have consecutive addresses where the domain has room, so that a device may take them as
/// one.
///
/// @owner: the owner, of the memory's domain.
/// @iov: the pieces, each as for pf_map().
/// @n: how many; 0 does nothing.
/// @dir: enum pf_dir: the access of the device to all of them.
/// @maps: where the `n` names are stored.
/// @iovas: where the `n` addresses are stored.
///
/// Return: 0, or -errno: as pf_map(); the message names the index of the piece; ENOMEM also where
/// there is no memory for some 200 bytes for each piece. Nothing is mapped then, and nothing is
/// stored.
/// Thread: the owner's, as for pf_map(). Allocates. Since 0.2.
///
/// # Safety
/// `iov` is null or has `n` elements; `maps` and `iovas` are null, or as many can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_map_many(
    owner: *mut pf_owner_t,
    iov: *const iovec,
    n: c_uint,
    dir: c_uint,
    maps: *mut pf_map_t,
    iovas: *mut u64,
) -> c_int {
    pass_caller!(6, map_many);
}

unsafe extern "C" fn map_many(
    handle: *mut pf_owner_t,
    iov: *const iovec,
    n: c_uint,
    dir: c_uint,
    maps: *mut pf_map_t,
    iovas: *mut u64,
    caller: Caller,
) -> c_int {
    call(|| {
        let dir = pf_dir::of(dir)?;
        let mut owner = OWNERS.get_mut(handle)?;
        if n == 0 {
            return Ok(0);
        }
        check_out(iov, "iov")?;
        check_out(maps, "maps")?;
        check_out(iovas, "iovas")?;
        let owner = &mut *owner;
        let (mut spans, mut stay) = (Vec::new(), Vec::new());
        let (mut parts, mut addresses) = (Vec::new(), Vec::new());
        let count = n as usize;
        let room = spans.try_reserve_exact(count).and_then(|()| stay.try_reserve_exact(count));
        room.and_then(|()| parts.try_reserve_exact(count))
            .and_then(|()| addresses.try_reserve_exact(count))
            .and_then(|()| owner.mappings.reserve(count))
            .map_err(|error| no_room("map", count, &error))?;
        let lookups = owner.lookup.begin();
        for index in 0..n as usize {
            // SAFETY: one of the `n` elements, as the caller of `pf_map_many` promises.
            let piece = unsafe { iov.wrapping_add(index).read_unaligned() };
            let span = lookups.span(piece.iov_base.addr(), piece.iov_len).and_then(|span| {
                stay.push(span.check_mappable(owner.state.domain.id())?);
                Ok(span)
            });
            spans.push(span.map_err(|failure| failure.of(format_args!("piece {index}")))?);
        }
        drop(lookups);
        parts.extend(spans.iter().map(|span| (span.addr(), span.part())));
        let mut stored = 0;
        let mappings = &mut owner.mappings;
        let mapped = dir.map_many(&mut owner.local, spans, |mapping| {
            let (addr, (at, len)) = parts.get(stored).copied().unwrap_or_default();
            let address = mapping.iova().start().raw() + at as u64;
            let stays = stay.get(stored).copied().unwrap_or_default();
            let name = mappings.add(mapping, addr, len, stays);
            // SAFETY: one of the `n` elements, as the caller of `pf_map_many` promises.
            unsafe { maps.wrapping_add(stored).write_unaligned(name) };
            // SAFETY: as for the names.
            unsafe { iovas.wrapping_add(stored).write_unaligned(address) };
            addresses.push(address);
            stored += 1;
        });
        if let Err(refused) = mapped {
            let what = format!("piece {}", refused.index);
            return Err(Failure::from(&refused.error).of(&what));
        }
        report(pf_event_kind::PF_EVENT_MAP, handle, caller, || {
            let pieces = parts.iter().zip(&addresses);
            pieces.map(|((addr, (_, len)), iova)| (pointer(*addr), *iova, *len))
        });
        Ok(0)
    })
}

/// Ends a mapping: revokes the device's access, and waits until it cannot reach the memory.
///
/// @owner: the owner that made the mapping.
/// @map: its name. It names nothing from then on, also after EIO and ETIMEDOUT.
///
/// Other mappings and requests of the memory, or of its pages of 4096 bytes, still let devices reach
/// it until they have ended.
///
/// Return: 0: no device reaches the memory by this mapping; PF_STAYS_MAPPED: the mapping has ended,
/// and devices still reach the memory, as it is mapped for its lifetime; or -errno: ESTALE (it has
/// ended before, or is another owner's: nothing has changed); ETIMEDOUT (the flush is past its
/// deadline: the memory stays in use until it completes, see pf_quarantine(); pf_revoke_many()
/// keeps a ticket to wait with); EIO (it never completes: the memory is quarantined, and pf_free()
/// of it stays EBUSY); EBADF; EBUSY (another thread is in a call with the owner).
/// Thread: the owner's. May allocate in a software domain. Since 0.2.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn pf_unmap(owner: *mut pf_owner_t, map: pf_map_t) -> c_int {
    pass_caller!(3, unmap);
}

extern "C" fn unmap(handle: *mut pf_owner_t, map: pf_map_t, caller: Caller) -> c_int {
    call(|| {
        let mut owner = OWNERS.get_mut(handle)?;
        let owner = &mut *owner;
        owner.mappings.reserve_claims(1).map_err(|error| no_room("end", 1, &error))?;
        owner.mappings.claim(std::iter::once(map)).map_err(stale)?;
        let Some(mapping) = owner.mappings.take_claimed().next() else { return Ok(0) };
        let start = mapping.iova().start().raw();
        let unmapped = owner.local.unmap(mapping);
        let revoked = || owner.mappings.claimed_parts().map(|part| revoked_part(part, start));
        report(pf_event_kind::PF_EVENT_REVOKE, handle, caller, revoked);
        match unmapped {
            Ok(span) => drop(span),
            Err(error) => return Err(not_unmapped(&error)),
        }
        Ok(stays_mapped(&owner.mappings))
    })
}

/// Returns the result of the end of the claimed mappings.
fn stays_mapped<M>(mappings: &Slots<M>) -> c_int {
    if mappings.claimed_stays() { PF_STAYS_MAPPED } else { 0 }
}

#[cold]
fn not_unmapped(error: &BackendError) -> Failure {
    if error.late_ticket().is_some() {
        return fail!(
            ETIMEDOUT,
            "the flush of the mapping has not completed in time, and a device may still reach its memory: it stays in \
             use until the flush completes; pf_quarantine counts it"
        );
    }
    fail!(
        EIO,
        "the flush of the mapping never completes, so a device may reach its memory for good: it is quarantined, and \
         pf_free and pf_reg_destroy refuse it; pf_quarantine counts it"
    )
}

/// Revokes a device's access to many mappings, with one flush, and does not wait for it: until the
/// ticket has completed the device may still reach the memory, which stays in use.
///
/// @owner: the owner that made the mappings.
/// @maps: their names, which name nothing from then on.
/// @n: how many. With 0 the ticket has completed.
/// @ticket: where the ticket is stored, for pf_quiesced() and pf_wait() of this owner: one of them
/// hands the memory back.
///
/// Return: 0; PF_STAYS_MAPPED: devices reach the memory of at least one of them also when the
/// ticket has completed, as it is mapped for its lifetime; or -errno: ESTALE (one has ended before,
/// is another owner's, or is there twice: the message names its index, and nothing is revoked);
/// ENOMEM (nothing is revoked); EFAULT; EBADF; EBUSY (another thread is in a call with the owner).
/// Thread: the owner's. Allocates when more tickets are pending than ever, or one has more
/// mappings. Since 0.2.
///
/// # Safety
/// `maps` is null or has `n` elements; `ticket` is null or can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_revoke_many(
    owner: *mut pf_owner_t,
    maps: *const pf_map_t,
    n: c_uint,
    ticket: *mut pf_ticket_t,
) -> c_int {
    pass_caller!(4, revoke_many);
}

unsafe extern "C" fn revoke_many(
    handle: *mut pf_owner_t,
    maps: *const pf_map_t,
    n: c_uint,
    ticket: *mut pf_ticket_t,
    caller: Caller,
) -> c_int {
    call(|| {
        check_out(ticket, "ticket")?;
        if n > 0 {
            check_out(maps, "maps")?;
        }
        let mut owner = OWNERS.get_mut(handle)?;
        owner.reserve_ticket(n as usize)?;
        // SAFETY: each is one of the `n` elements, as the caller of `pf_revoke_many` promises.
        let names = (0..n as usize).map(|at| unsafe { maps.wrapping_add(at).read_unaligned() });
        owner.mappings.claim(names).map_err(stale)?;
        let issued = owner.revoke_claimed();
        // SAFETY: as the caller of `pf_revoke_many` promises.
        unsafe { store(ticket, issued, "ticket") }?;
        report(pf_event_kind::PF_EVENT_REVOKE, handle, caller, || {
            let parts = owner.mappings.claimed_parts().zip(owner.last_revoked());
            parts.map(|(part, start)| revoked_part(part, start))
        });
        Ok(stays_mapped(&owner.mappings))
    })
}

/// Returns the traced part of a mapping whose pages begin at `start` for the device.
fn revoked_part((addr, len): (usize, usize), start: u64) -> (*mut c_void, u64, usize) {
    (pointer(addr), start + (addr % 4096) as u64, len)
}

/// An address that is shown, not followed.
fn pointer(addr: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(addr)
}

/// Reports the parts if the hook is set.
#[inline(always)]
fn report<I: IntoIterator<Item = (*mut c_void, u64, usize)>>(
    kind: pf_event_kind,
    handle: *mut pf_owner_t,
    caller: Caller,
    parts: impl FnOnce() -> I,
) {
    let Some(hook) = hook() else { return };
    for (va, iova, len) in parts() {
        hook.report(kind, va, iova, len as u64, Site::new(caller, handle));
    }
}

#[cold]
fn stale(stale: Stale) -> Failure {
    let Stale { index, name: pf_map_t { id, r#gen }, repeated } = stale;
    let why = if repeated {
        "it is there twice"
    } else {
        "it has ended before, or this owner never made it"
    };
    fail!(
        ESTALE,
        "mapping {index} (id {id}, gen {gen:#x}): {why}; nothing is revoked: pass each name that pf_map stored once"
    )
}

/// Memory of a domain that a device may still reach although its mapping has ended. Set
/// `struct_size` to its sizeof.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_held {
    /// sizeof(struct pf_held).
    pub struct_size: usize,
    /// Mappings whose flush is late: their memory stays in use until it completes.
    pub deferred: u64,
    /// The bytes of their pages.
    pub deferred_bytes: u64,
    /// Mappings whose flush never completes: their memory stays in use for good.
    pub quarantined: u64,
    /// The bytes of their pages.
    pub quarantined_bytes: u64,
    /// Bytes of whole arenas and registrations, of any domain, that could not be unmapped.
    pub process_bytes: u64,
    /// Requests that a program has given up (pf_requests_lost()), which their device may still work
    /// on: their memory stays in use until pf_requests_completed() or pf_requests_stopped(), and for
    /// good where their loop has ended.
    pub lost: u64,
    /// The bytes of the pages of their payloads.
    pub lost_bytes: u64,
}

// SAFETY: eight words.
unsafe impl Options for pf_held {
    const DEFAULT: Self = Self {
        struct_size: 0,
        deferred: 0,
        deferred_bytes: 0,
        quarantined: 0,
        quarantined_bytes: 0,
        process_bytes: 0,
        lost: 0,
        lost_bytes: 0,
    };
}

/// Describes the memory of a domain that is held because a device may still reach it. Memory whose
/// late flush has completed meanwhile is handed back first. For a controller that the library
/// drives, the controller's counters have the memory of lost requests (pf_stats(): `quarantined`).
///
/// @domain: the domain.
/// @held: where the counts are stored; its `struct_size` is set before. NULL: not needed.
/// @why: where a sentence is stored, with its end (NUL), cut off to fit; NULL: not needed.
/// @why_len: the bytes of `why`.
///
/// Return: the length of the whole sentence without its end, or -errno: EINVAL (`struct_size`);
/// EBADF.
/// Thread: any. Takes locks. Allocates. Since 0.2.
///
/// # Safety
/// `held` is null or can be written, for as many bytes as its first field says; `why` is null or
/// `why_len` bytes can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_quarantine(
    domain: *mut pf_domain_t,
    held: *mut pf_held,
    why: *mut c_char,
    why_len: usize,
) -> c_int {
    call(|| {
        let state = std::sync::Arc::clone(&DOMAINS.get(domain)?.state);
        state.domain.release_late();
        let lost = state.lost();
        let stats = state.domain.stats();
        let value = pf_held {
            struct_size: 0,
            deferred: stats.deferred,
            deferred_bytes: stats.deferred_bytes,
            quarantined: stats.quarantined.saturating_sub(lost.mappings),
            quarantined_bytes: stats.quarantined_bytes.saturating_sub(lost.mapped_bytes),
            // Without the bytes of mappings, which each domain counts.
            process_bytes: pinfold::quarantined_bytes()
                .saturating_sub(pinfold::core::domain::quarantined_bytes()),
            lost: lost.open.requests + lost.ended.requests,
            lost_bytes: lost.open.bytes + lost.ended.bytes,
        };
        if !held.is_null() {
            // SAFETY: as the caller promises.
            unsafe { fill(held, &value, "held") }?;
        }
        // SAFETY: as the caller promises.
        Ok(unsafe { store_text(&sentence(&value, stats.held_bytes, &lost), why, why_len) })
    })
}

fn sentence(held: &pf_held, revoked_bytes: u64, lost: &Lost) -> String {
    let mut parts = Vec::new();
    if revoked_bytes > 0 {
        parts.push(format!(
            "{} were revoked, and are in use until their loop, owner or queue finds that the flush has completed: call \
             pf_requests_poll, pf_wait or pf_complete",
            Counted(revoked_bytes, "byte")
        ));
    }
    if held.deferred > 0 {
        parts.push(format!(
            "a flush is late for {} ({} bytes): their memory is handed back when it completes",
            Counted(held.deferred, "mapping"),
            held.deferred_bytes
        ));
    }
    if held.quarantined > 0 {
        parts.push(format!(
            "{} ({} bytes) could not be revoked, because the invalidation unit has failed: a device may reach their \
             memory for good, so it is never freed; reset the device and restart the process",
            Counted(held.quarantined, "mapping"),
            held.quarantined_bytes
        ));
    }
    if held.process_bytes > 0 {
        parts.push(format!(
            "{} of arenas and registrations could not be unmapped, and are kept until the process ends",
            Counted(held.process_bytes, "byte")
        ));
    }
    if lost.open.requests > 0 {
        parts.push(format!(
            "given up: {} ({} bytes), on which the device may still work: reset it and call pf_requests_stopped, or \
             pf_requests_completed for what completes after all",
            Counted(lost.open.requests, "request"),
            lost.open.bytes
        ));
    }
    if lost.ended.requests > 0 {
        parts.push(format!(
            "{} ({} bytes) had been given up when their loop was destroyed, and the device may still work on them, so their \
             memory is never freed: reset the device and restart the process",
            Counted(lost.ended.requests, "request"),
            lost.ended.bytes
        ));
    }
    if parts.is_empty() {
        return "no memory is held: no device reaches what is not mapped".to_owned();
    }
    parts.join("; ")
}
