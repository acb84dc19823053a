//! Returning addresses, and holding what a device may still reach.

use super::addresses::{Addresses, Origin};
use super::owner::{Anyone, Caller};
use super::pending::{Due, PendingRelease};
use super::space::{Domain, Space};
use crate::drop_guard::{CleanUp, DropGuard};
use crate::invalidate::Ticket;
use crate::known_bad::{self, Mistake};
use alloc::boxed::Box;
use core::mem::ManuallyDrop;
use core::task::Poll;

/// A buffer of the domain while the backend is called for it.
struct Abandoned<'d>(&'d Space, PendingRelease);

impl CleanUp for Abandoned<'_> {
    fn clean_up(self) {
        // What is dropped stays leaked.
        self.0.count_quarantined(self.1.addresses.iova.len());
    }
}

impl Domain {
    /// Drops the buffers whose late flush has completed, and returns how many are still held. O(1)
    /// while none is.
    ///
    /// Maps, revocations and waits do this too; a program that makes none calls it to recover its
    /// memory.
    pub fn release_late(&self) -> u64 {
        self.space.release_late()
    }
}

impl Space {
    /// Returns the addresses of a mapping that no device can reach.
    #[inline(always)]
    pub(super) fn finish_unmap(&self, caller: &mut impl Caller, addresses: Addresses) {
        match addresses.origin {
            Origin::Space if known_bad::makes(Mistake::IovaEarly) => {}
            Origin::Window(share) if known_bad::makes(Mistake::WindowEarly) => {
                self.close_window(share.into_shared().into_inner());
            }
            _ => caller.release(self, addresses),
        }
    }

    /// Releases the addresses of a mapping that is not quiesced, if that mistake is switched on.
    pub(super) fn release_if_mistaken(&self, Addresses { iova, origin }: &Addresses) {
        match origin {
            Origin::Space if known_bad::makes(Mistake::IovaEarly) => self.free_iova(*iova),
            Origin::Window(share) if known_bad::makes(Mistake::WindowEarly) => {
                share.window().give_back(*iova)
            }
            _ => {}
        }
    }

    /// Takes over a buffer that a device may still reach: until it is `due`, or for good
    /// (quarantined). `mapped` is false for what is left of a map that was refused.
    pub(super) fn keep_reachable<P: Send + 'static>(
        &self,
        payload: P,
        addresses: Addresses,
        due: Due,
        mapped: bool,
    ) {
        if matches!(due, Due::Never) {
            core::mem::forget(payload);
            return self.count_quarantined(addresses.iova.len());
        }
        let payload = ManuallyDrop::new(Box::new(payload) as Box<dyn Send>);
        self.pending.push(PendingRelease { payload, addresses, due, mapped });
    }

    /// Does what a panic of the backend has left undone, and returns the buffer. Should it
    /// panic again, the buffer is quarantined.
    fn make_up_for(&self, release: PendingRelease) -> PendingRelease {
        let mut release = DropGuard::new(Abandoned(self, release));
        let PendingRelease { addresses, due, .. } = &mut release.1;
        *due = match *due {
            Due::Revocation => {
                self.counts().count_revoked(0);
                let revoked = self.call(|backend| {
                    backend.revoke(&mut core::iter::once((addresses.iova, addresses.pin())))
                });
                revoked.map_or(Due::Never, Due::At)
            }
            known => known,
        };
        release.into_inner().1
    }

    /// Drops what is late and has completed, as [`Domain::release_late`] does.
    #[inline]
    pub(super) fn release_late(&self) -> u64 {
        match self.pending.first() {
            Ticket::NEVER => 0,
            first => self.release_from(first),
        }
    }

    /// Drops what is late and has completed, if the `first` of it has.
    #[cold]
    fn release_from(&self, mut first: Ticket) -> u64 {
        while first != Ticket::NEVER {
            let failed = match self.call(|backend| backend.check(first)) {
                Poll::Ready(Ok(())) => false,
                Poll::Ready(Err(error)) if error.late_ticket().is_none() => true,
                Poll::Ready(Err(_)) | Poll::Pending => break,
            };
            let Some(releasing) = self.pending.try_begin() else { break };
            while let Some(release) = self.pending.pop_unfinished() {
                let release = self.make_up_for(release);
                if matches!(release.due, Due::Never) {
                    self.count_quarantined(release.addresses.iova.len());
                } else {
                    self.pending.push(release);
                }
            }
            // One by one: a drop may do anything, so it runs without the lock.
            while let Some(release) = self.pending.pop(|ticket| self.has_completed(ticket)) {
                if release.mapped {
                    self.counts().count_unmapped();
                }
                // Dropped after its addresses are returned, also if the backend panics meanwhile.
                let _payload = ManuallyDrop::into_inner(release.payload);
                self.finish_unmap(&mut Anyone, release.addresses);
            }
            while failed && let Some(release) = self.pending.pop(|_| true) {
                self.count_quarantined(release.addresses.iova.len());
            }
            drop(releasing);
            // What another call found due meanwhile, it left to this one.
            first = self.pending.first();
        }
        self.pending.len()
    }
}
