//! Returning addresses, and holding what a device may still reach.

use super::addresses::{Addresses, Origin};
use super::owner::{Anyone, Caller};
use super::pending::PendingRelease;
use super::space::Domain;
use crate::invalidate::Ticket;
use crate::known_bad::{self, Mistake};
use alloc::boxed::Box;
use core::mem::ManuallyDrop;

impl Domain {
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

    /// Takes over a buffer that a device may still reach: until its flush completes if that is `late`, else for good
    /// (quarantined). `mapped` is false for what is left of a map that was refused.
    pub(super) fn keep_reachable<P: Send + 'static>(
        &self,
        payload: P,
        addresses: Addresses,
        late: Option<Ticket>,
        mapped: bool,
    ) {
        let Some(ticket) = late else {
            core::mem::forget(payload);
            return self.count_quarantined(addresses.iova.len());
        };
        let payload = ManuallyDrop::new(Box::new(payload) as Box<dyn Send>);
        self.pending.push(PendingRelease { payload, addresses, ticket, mapped });
    }

    /// Drops the buffers whose late flush has completed, and returns how many are still held. O(1) while none is.
    ///
    /// Maps, revocations and waits do this too; a program that makes none calls it to recover its memory.
    #[inline]
    pub fn release_late(&self) -> u64 {
        match self.pending.first() {
            Ticket::NEVER => 0,
            first => self.release_from(first),
        }
    }

    /// Drops what is late and has completed, if the `first` of it has.
    #[cold]
    fn release_from(&self, mut first: Ticket) -> u64 {
        while first != Ticket::NEVER {
            let failed = self.backend().has_failed();
            if !failed && !self.backend().is_completed(first) {
                break;
            }
            let Some(releasing) = self.pending.try_begin() else { break };
            // One by one: a drop may do anything, so it runs without the lock.
            while let Some(release) = self.pending.pop(|ticket| self.backend().is_completed(ticket)) {
                if release.mapped {
                    self.counts().count_unmapped();
                }
                self.finish_unmap(&mut Anyone, release.addresses);
                drop(ManuallyDrop::into_inner(release.payload));
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
