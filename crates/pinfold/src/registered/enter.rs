//! Registers and unregisters buffers.

use super::buffers::Buffers;
use super::footprint::Footprint;
use super::registration::{self, Extent, PinKind, Registration, Released};
use super::survey::{RegistrationError, Survey};
use super::{footprint, pin};
use crate::sys::bytes;
use crate::sys::limits::{MemlockLimit, MemlockRefusal};
use pinfold_core::access::Access;
use pinfold_core::folio::{BufferIndex, Registered, Unregistered};

impl Buffers<'_> {
    /// # Safety
    /// As for `register_addresses`.
    pub(super) unsafe fn enter(
        &mut self,
        index: Option<BufferIndex>,
        extent: Extent,
        access: Access,
    ) -> Result<(BufferIndex, Released), RegistrationError> {
        let Extent { addr, len, lent, owned } = extent;
        self.check_process()?;
        let before = Survey::of_mappings(&mut self.inspector, addr, len, access)?;
        let index = self.table.prepare(index, addr, len)?;
        self.check_limit(&before)?;
        let pin = self.pin(&before)?;
        // Final only now that the pages are resident and pinned.
        let registration = Survey::of_mappings(&mut self.inspector, addr, len, access)
            .map_err(RegistrationError::from)
            .and_then(|survey| Ok((self.view.describe(&self.inspector, &survey)?, survey)));
        let (described, survey) = match registration {
            Ok(both) => both,
            Err(error) => {
                self.undo_pin(&pin);
                return Err(error);
            }
        };
        let footprint = Footprint::of(&self.inspector, &survey);
        let registration = Registration {
            lent,
            owned,
            ..self.account_for(described, survey, footprint, pin, access)
        };
        match self.table.update(index, registration) {
            Ok(before) => Ok((index, before.map_or(Released::Now, |buffer| self.finish(buffer)))),
            // Prepared above, so it succeeds; otherwise nothing stays pinned.
            Err(refused) => {
                self.end(refused.buffer);
                Err(refused.error.into())
            }
        }
    }

    /// Fails in a child process: the rings are its parent's.
    pub(super) fn check_process(&self) -> Result<(), RegistrationError> {
        if self.process == std::process::id() { Ok(()) } else { Err(RegistrationError::Forked) }
    }

    /// Refuses memory beyond the limit before any page is faulted in for it.
    fn check_limit(&self, survey: &Survey) -> Result<(), RegistrationError> {
        if self.lifted || survey.is_read_only() {
            return Ok(());
        }
        let requested = self.charge(survey);
        let (limit, used) = footprint::limit_for_rings();
        // Not everything that the process has pinned is charged, so only this table's own charges
        // are certain.
        let certain = self.rings.charged().saturating_add(requested);
        match limit.soft.filter(|allowed| certain > *allowed) {
            Some(_) => Err(footprint::memlock_error(limit, requested, used)),
            None => Ok(()),
        }
    }

    fn charge(&self, survey: &Survey) -> u64 {
        let places = pin::pieces(survey.addr(), bytes(survey.len())).count();
        self.rings.charge(&Footprint::of(&self.inspector, survey), places)
    }

    /// Pins or locks the memory; the pages are resident afterwards.
    fn pin(&mut self, survey: &Survey) -> Result<PinKind, RegistrationError> {
        let (addr, len) = (survey.addr(), survey.len());
        let pinned = if survey.is_read_only() {
            let (first, last) = survey.page_bounds();
            registration::lock(first, last).map(|()| PinKind::Locked { first, last })
        } else {
            self.rings.pin(addr, bytes(len)).map(PinKind::Pinned)
        };
        pinned.map_err(|errno| match errno.raw() {
            // `mlock` is counted by process, so what it refuses is known.
            libc::ENOMEM
                if survey.is_read_only()
                    && MemlockLimit::here()
                        .left()
                        .is_some_and(|left| left < survey.touched_bytes()) =>
            {
                let limit = MemlockLimit::here();
                footprint::memlock_error(limit, survey.touched_bytes(), limit.used.unwrap_or(0))
            }
            libc::ENOMEM
                if !survey.is_read_only()
                    && !self.lifted
                    && MemlockLimit::here().soft.is_some() =>
            {
                let (limit, used) = footprint::limit_for_rings();
                // The attempt has faulted the pages in, so their sizes are known better than
                // before.
                let again = Survey::of_mappings(&mut self.inspector, addr, len, Access::empty());
                let requested = again.map_or(len, |survey| self.charge(&survey));
                match MemlockRefusal::of(errno, requested) {
                    Some(_) => footprint::memlock_error(limit, requested, used),
                    None => RegistrationError::NotPinned { addr, len, errno },
                }
            }
            libc::EBADF | libc::ENXIO | libc::EBADFD | libc::EOPNOTSUPP if !self.rings.alive() => {
                RegistrationError::RingGone { errno }
            }
            _ => RegistrationError::NotPinned { addr, len, errno },
        })
    }

    fn account_for(
        &mut self,
        table: Registered,
        survey: Survey,
        footprint: Footprint,
        mut pin: PinKind,
        access: Access,
    ) -> Registration {
        match &mut pin {
            PinKind::Pinned(pins) => self.rings.account(pins, &footprint),
            PinKind::Locked { first, last } => self.locked.add(*first as u64, *last as u64),
        }
        footprint.ranges().for_each(|(start, end)| self.pinned.add(start, end));
        let range = (survey.addr(), survey.end());
        let monitored = match &mut self.monitor {
            Ok(monitor) => monitor.monitor(range, survey.page_bounds()),
            Err(errno) => Err(*errno),
        };
        Registration { table, survey, footprint, pin, access, monitored, lent: None, owned: None }
    }

    /// Undoes `pin` before anything was accounted for.
    fn undo_pin(&mut self, pin: &PinKind) {
        match pin {
            PinKind::Pinned(pins) => self.rings.release(pins),
            PinKind::Locked { first, last } => {
                self.locked.add(*first as u64, *last as u64);
                self.unlock(*first, *last);
            }
        }
    }

    /// Unlocks those of the pages that are locked for no other buffer.
    fn unlock(&mut self, first: usize, last: usize) {
        for (start, end) in self.locked.remove(first as u64, last as u64) {
            registration::unlock(bytes(start), bytes(end));
        }
    }

    /// Releases an unregistered buffer, unless I/O on it is in flight.
    pub(super) fn finish(&mut self, buffer: Unregistered<Registration>) -> Released {
        match buffer {
            Unregistered::Free(registration) => {
                self.end(registration);
                Released::Now
            }
            Unregistered::Held { holds } => Released::AfterIo { holds },
        }
    }

    /// Releases what a registration keeps.
    pub(super) fn end(&mut self, registration: Registration) {
        let Registration { pin, footprint, monitored, owned, .. } = registration;
        for (start, end) in footprint.ranges() {
            self.pinned.remove(start, end);
        }
        match &pin {
            PinKind::Pinned(pins) => self.rings.unpin(pins, &footprint),
            PinKind::Locked { first, last } => self.unlock(*first, *last),
        }
        if let (Ok(monitor), Ok(monitored)) = (&mut self.monitor, monitored) {
            monitor.forget(monitored);
        }
        // Unpinned before it may be freed.
        drop(owned);
    }
}
