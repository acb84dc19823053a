//! What a domain keeps for its owners: their counters, their windows, and the limit on what they
//! hold.

use super::counts::{Counts, Sum};
use super::owner::{Caller, Owner};
use super::space::{Domain, Space};
use super::stats::DomainStats;
use super::window::{OwnerShared, WINDOW_BYTES, Window};
use crate::invalidate::Ticket;
use crate::sync::Ordering;
use alloc::sync::Arc;

impl Domain {
    /// Limits what may be revoked and not yet returned to `bytes`: a revocation that exceeds it
    /// waits for its flush, as a strict one does, and is counted ([`DomainStats::limited`]). At 0
    /// all of them wait. By default there is no limit; with one, each revocation takes a lock.
    ///
    /// What is quiesced and not returned counts too, so a caller that collects
    /// [`Revoked`](super::Revoked)s without polling them is slowed down as well; likewise what
    /// callers have left to the domain ([`DomainStats::deferred_bytes`]). A wait that reaches its
    /// deadline ends, and what it waited for stays held: the limit bounds nothing while the unit
    /// completes no flush.
    pub fn set_held_limit(&self, bytes: u64) {
        self.space.held_limit.store(bytes, Ordering::Relaxed);
    }

    /// Returns the statistics. O(owners).
    pub fn stats(&self) -> DomainStats {
        let (sum, owners) = self.space.count_all();
        let (deferred, deferred_bytes) = self.space.pending.counts();
        DomainStats {
            maps: sum.maps,
            maps_fixed: sum.maps_fixed,
            revokes: sum.revokes,
            unmaps: sum.unmaps,
            live: sum.maps.saturating_sub(sum.revokes),
            held_bytes: held_bytes(&sum),
            limited: sum.limited,
            refused: sum.refused,
            owners,
            windows: self.space.windows.load(Ordering::Relaxed),
            deferred,
            deferred_bytes,
            quarantined: self.space.quarantined.load(Ordering::Relaxed),
            quarantined_bytes: self.space.quarantined_bytes.load(Ordering::Relaxed),
            static_mappings: self.space.statics.len() as u64,
            iova_extents: self.space.iovas.stats().free as u64,
            backend: self.space.call(|backend| backend.stats()),
        }
    }
}

impl Space {
    /// Waits for `ticket` if more bytes are held than allowed. A wait that fails leaves what it is:
    /// the next one reports it.
    #[inline(always)]
    pub(super) fn limit_held(&self, caller: &mut impl Caller, ticket: Ticket) {
        let limit = self.held_limit.load(Ordering::Relaxed);
        if limit != u64::MAX {
            self.limit_held_to(limit, caller, ticket);
        }
    }

    #[cold]
    fn limit_held_to(&self, limit: u64, caller: &mut impl Caller, ticket: Ticket) {
        if limit > 0
            && held_bytes(&self.count_all().0).saturating_add(self.pending.counts().1) <= limit
        {
            return;
        }
        caller.counts(self).count_limited();
        let _ = self.call(|backend| backend.wait(ticket, None));
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Returns the sum of all counters, and the number of owners.
    pub(super) fn count_all(&self) -> (Sum, u64) {
        // With the lock, so that no owner is counted twice or not at all while it is dropped.
        let owners = self.owners.lock();
        let all =
            || core::iter::once(&self.counts).chain(owners.iter().map(|owner| &*owner.counts));
        let mut sum = Sum::default();
        all().for_each(|counts| counts.add_revokes_to(&mut sum));
        all().for_each(|counts| counts.add_rest_to(&mut sum));
        (sum, owners.len() as u64)
    }

    pub(super) fn register_owner(&self) -> Owner {
        let owner = Owner::new();
        self.owners.lock().push(Arc::clone(&owner.shared));
        owner
    }

    /// Closes the owner's windows that are empty, leaves the others to their mappings, and keeps its
    /// counts.
    pub(super) fn retire_owner(&self, owner: &mut Owner) {
        let mut sum = Sum::default();
        let mut owners = self.owners.lock();
        owner.shared.counts.add_revokes_to(&mut sum);
        owner.shared.counts.add_rest_to(&mut sum);
        self.counts.add_all(&sum);
        owners.retain(|other| !Arc::ptr_eq(other, &owner.shared));
        drop(owners);
        owner.abandon(self);
        // Should the backend panic, others close the windows.
        if !self.is_unwinding() {
            self.close_abandoned();
        }
    }

    /// Closes the idle windows of all owners. Returns whether there were any. O(owners).
    #[cold]
    pub(super) fn reclaim_idle(&self) -> bool {
        let owners = self.owners.lock();
        let mut abandoned = self.abandoned.lock();
        owners.iter().for_each(|owner| abandoned.append(&mut owner.idle.lock()));
        drop((abandoned, owners));
        self.close_abandoned()
    }

    /// Closes windows that no owner uses. Returns whether there were any. If the backend panics,
    /// the others stay in the list.
    pub(super) fn close_abandoned(&self) -> bool {
        let mut any = false;
        loop {
            // Closed without the lock.
            let Some(slot) = self.abandoned.lock().pop() else { return any };
            self.close_window(slot.into_window());
            any = true;
        }
    }

    /// Opens a window for an owner; `None` if there are no addresses.
    pub(super) fn open_window(&self, owner: &Arc<OwnerShared>) -> Option<Window> {
        let range = self.alloc_iova(WINDOW_BYTES, WINDOW_BYTES, None).ok()?;
        self.windows.fetch_add(1, Ordering::Relaxed);
        // Without a pin it is mapped as any other range.
        let pin = self.call(|backend| backend.windows()?.pin(range).ok());
        Some(Window::new(range, pin, Arc::clone(owner)))
    }

    /// Closes a window whose last share was given up, if there is one: nothing is mapped in it.
    pub(super) fn close_window(&self, window: Option<Window>) {
        if let Some(window) = window {
            let (range, pin) = window.into_parts();
            self.windows.fetch_sub(1, Ordering::Relaxed);
            if let Some(pin) = pin {
                // If it panics, the addresses stay in use.
                self.call(|backend| backend.windows().map(|windows| windows.unpin(pin)));
            }
            self.free_iova(range);
        }
    }
}

/// Returns how many bytes are held by a sum of counters that were read one after another.
fn held_bytes(sum: &Sum) -> u64 {
    u64::try_from(sum.held_bytes.cast_signed()).unwrap_or(0)
}
