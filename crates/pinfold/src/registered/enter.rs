//! The way into the table, and out of it.

use super::footprint::Footprint;
use super::registration::{self, Keeper};
use super::survey::Survey;
use super::{Buffers, Left, Registered, Registration, RegistrationError, account, pin};
use crate::memory::OwnedMemory;
use crate::sys::bytes;
use crate::sys::limits::MemlockLimit;
use pinfold_core::access::Access;
use pinfold_core::mem::DmaMemory;
use pinfold_core::registered::{BufferIndex, Unregistered};

/// What is to be registered.
pub(super) struct Extent {
    pub(super) addr: usize,
    pub(super) len: u64,
    pub(super) lent: Option<DmaMemory<'static>>,
    pub(super) owned: Option<OwnedMemory>,
}

impl From<DmaMemory<'_>> for Extent {
    fn from(memory: DmaMemory<'_>) -> Self {
        // SAFETY: it is used by `Buffers::memory` only, which lends it for no longer than the table may have it.
        let lent = unsafe { memory.extend() };
        Self { addr: memory.addr(), len: memory.len() as u64, lent: Some(lent), owned: None }
    }
}

impl Buffers<'_> {
    /// # Safety
    /// As for `register_addresses`.
    pub(super) unsafe fn enter(
        &mut self,
        index: Option<BufferIndex>,
        extent: Extent,
        access: Access,
    ) -> Result<(BufferIndex, Left), RegistrationError> {
        let Extent { addr, len, lent, owned } = extent;
        self.check_process()?;
        let before = Survey::of_mappings(&mut self.eyes, addr, len, access)?;
        let index = self.table.prepare(index, addr, len)?;
        self.check_limit(&before)?;
        let keeper = self.keep(&before)?;
        // Known for good only now that the pages are there and stay.
        let registration = Survey::of_mappings(&mut self.eyes, addr, len, access)
            .map_err(RegistrationError::from)
            .and_then(|survey| Ok((self.view.describe(&self.eyes, &survey)?, survey)));
        let (described, survey) = match registration {
            Ok(both) => both,
            Err(error) => {
                self.let_go(&keeper);
                return Err(error);
            }
        };
        let footprint = Footprint::of(&self.eyes, &survey);
        let registration =
            Registration { lent, owned, ..self.account_for(described, survey, footprint, keeper, access) };
        // Prepared above, so it succeeds.
        let left = self.table.update(index, registration)?;
        Ok((index, left.map_or(Left::Now, |left| self.left(left))))
    }

    /// A child has the same rings as its parent, whose they are.
    pub(super) fn check_process(&self) -> Result<(), RegistrationError> {
        if self.process == std::process::id() { Ok(()) } else { Err(RegistrationError::Forked) }
    }

    /// Refuses what would be too much, before any page is brought in for it.
    fn check_limit(&self, survey: &Survey) -> Result<(), RegistrationError> {
        if self.lifted || survey.is_read_only() {
            return Ok(());
        }
        let asked = self.asked(survey);
        let (limit, used) = account::limit_for_rings();
        // What the process has pinned in all may be charged to nobody, so only this table's own part is sure.
        let sure = self.rings.charged().saturating_add(asked);
        match limit.soft.filter(|allowed| sure > *allowed) {
            Some(_) => Err(account::refusal(limit, asked, used)),
            None => Ok(()),
        }
    }

    fn asked(&self, survey: &Survey) -> u64 {
        let places = pin::pieces(survey.addr(), bytes(survey.len())).count();
        self.rings.charge(&Footprint::of(&self.eyes, survey), places)
    }

    /// Pins or locks it; the pages are there afterwards.
    fn keep(&mut self, survey: &Survey) -> Result<Keeper, RegistrationError> {
        let (addr, len) = (survey.addr(), survey.len());
        let kept = if survey.is_read_only() {
            let (first, last) = survey.page_bounds();
            registration::lock(first, last).map(|()| Keeper::Locked { first, last })
        } else {
            self.rings.pin(addr, bytes(len)).map(Keeper::Pinned)
        };
        kept.map_err(|errno| match errno.raw() {
            libc::ENOMEM if survey.is_read_only() => {
                let limit = MemlockLimit::here();
                account::refusal(limit, survey.touched_bytes(), limit.used.unwrap_or(0))
            }
            libc::ENOMEM if !self.lifted => {
                let (limit, used) = account::limit_for_rings();
                // The attempt has brought the pages in, so that they are known better than before.
                let again = Survey::of_mappings(&mut self.eyes, addr, len, Access::empty());
                account::refusal(limit, again.map_or(len, |survey| self.asked(&survey)), used)
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
        mut keeper: Keeper,
        access: Access,
    ) -> Registration {
        match &mut keeper {
            Keeper::Pinned(pins) => self.rings.account(pins, &footprint),
            Keeper::Locked { first, last } => self.locked.add(*first as u64, *last as u64),
        }
        footprint.ranges().for_each(|(start, end)| self.pinned.add(start, end));
        let range = (survey.addr(), survey.end());
        let watched = match &mut self.watch {
            Ok(watch) => watch.watch(range, survey.page_bounds()),
            Err(errno) => Err(*errno),
        };
        Registration { table, survey, footprint, keeper, access, watched, lent: None, owned: None }
    }

    /// Undoes `keep`, where nothing was accounted for yet.
    fn let_go(&mut self, keeper: &Keeper) {
        match keeper {
            Keeper::Pinned(pins) => self.rings.release(pins),
            Keeper::Locked { first, last } => {
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

    pub(super) fn left(&mut self, left: Unregistered<Registration>) -> Left {
        match left {
            Unregistered::Free(registration) => {
                self.end(registration);
                Left::Now
            }
            Unregistered::Held { holds } => Left::AfterIo { holds },
        }
    }

    /// The end of a registration: what it kept is let go.
    pub(super) fn end(&mut self, registration: Registration) {
        let Registration { keeper, footprint, watched, owned, .. } = registration;
        for (start, end) in footprint.ranges() {
            self.pinned.remove(start, end);
        }
        match &keeper {
            Keeper::Pinned(pins) => self.rings.unpin(pins, &footprint),
            Keeper::Locked { first, last } => self.unlock(*first, *last),
        }
        if let (Ok(watch), Ok(watched)) = (&mut self.watch, watched) {
            watch.forget(watched);
        }
        // Unpinned before it may be freed.
        drop(owned);
    }
}
