//! Who maps and unmaps: any thread, or the owner of a handle; and the limit on what is held.

use super::error::BackendError;
use super::space::{Space, held_bytes};
use super::statics::Hit;
use super::stats::{Counts, Sum};
use super::table_backend::phys::ExtentCache;
use super::window::{Addresses, Origin, OwnerShared};
use super::windows::{MAX_BYTES, Windows};
use crate::access::Access;
use crate::addr::{Iova, IovaRange};
use crate::invalidate::Ticket;
use crate::mem::DmaMemory;
use crate::sync::Ordering;
use alloc::sync::Arc;

/// Where addresses come from and return to, and where that is counted.
pub(super) trait Caller {
    /// Allocates `len` bytes of addresses, a multiple of `align()` where they are not an owner's.
    fn alloc(
        &mut self,
        domain: &Space,
        len: u64,
        align: impl FnOnce() -> u64,
    ) -> Result<Addresses, BackendError>;

    /// Returns addresses that no device can reach.
    fn release(&mut self, domain: &Space, addresses: Addresses);

    /// Returns the counters of what this caller does.
    fn counts<'a>(&'a self, domain: &'a Space) -> &'a Counts;

    /// Gives up what this caller keeps for later. Returns whether there was anything.
    fn give_up_idle(&mut self, domain: &Space) -> bool {
        let _ = domain;
        false
    }

    /// Returns what an owner keeps about the memory that it mapped last. Only an owner has
    /// addresses in pinned windows.
    #[inline(always)]
    fn extents(&mut self) -> Option<&mut ExtentCache> {
        None
    }

    /// Returns where `memory` is mapped for its lifetime, if the domain has it at `start`.
    fn static_at(
        &mut self,
        domain: &Space,
        start: Iova,
        memory: DmaMemory,
        access: Access,
    ) -> Option<IovaRange>;
}

/// Any thread, without a handle.
pub(super) struct Anyone;

impl Caller for Anyone {
    fn alloc(
        &mut self,
        domain: &Space,
        len: u64,
        align: impl FnOnce() -> u64,
    ) -> Result<Addresses, BackendError> {
        Ok(Addresses { iova: domain.alloc_iova(len, align(), None)?, origin: Origin::Space })
    }

    #[inline(always)]
    fn release(&mut self, domain: &Space, Addresses { iova, origin }: Addresses) {
        match origin {
            Origin::Fixed => {}
            Origin::Space => domain.free_iova(iova),
            Origin::Window(share) => {
                share.window().give_back(iova);
                domain.close_window(share.into_shared().into_inner());
            }
        }
    }

    #[inline(always)]
    fn counts<'a>(&'a self, domain: &'a Space) -> &'a Counts {
        domain.counts()
    }

    fn static_at(
        &mut self,
        domain: &Space,
        start: Iova,
        memory: DmaMemory,
        access: Access,
    ) -> Option<IovaRange> {
        domain.statics.find(start, memory, access)
    }
}

/// What one owner has to itself.
pub(super) struct Owner {
    pub(super) shared: Arc<OwnerShared>,
    windows: Windows,
    /// The static mapping that was found last.
    hit: Option<Hit>,
    /// The registered memory that was mapped last.
    extents: ExtentCache,
}

impl Owner {
    pub(super) fn new() -> Self {
        let shared = Arc::new(OwnerShared::new());
        let windows = Windows::new(Arc::clone(&shared));
        Self { windows, shared, hit: None, extents: ExtentCache::new() }
    }

    /// Prepares for allocations of `bytes` altogether, which are to be contiguous, until
    /// [`end_batch`](Self::end_batch).
    pub(super) fn prepare(&mut self, domain: &Space, bytes: u64) {
        if domain.translates {
            self.windows.prepare(domain, bytes);
        }
    }

    /// Allocates what does not come from a window.
    #[cold]
    fn alloc_elsewhere(
        &mut self,
        domain: &Space,
        len: u64,
        align: u64,
    ) -> Result<Addresses, BackendError> {
        match self.windows.next_of_batch(len) {
            Some(iova) => Ok(Addresses { iova, origin: Origin::Space }),
            None => Anyone.alloc(domain, len, || align),
        }
    }

    /// Gives up what is left of the addresses for a batch.
    pub(super) fn end_batch(&mut self, domain: &Space) {
        self.windows.end_batch(domain);
    }

    /// Gives up all windows.
    pub(super) fn abandon(&mut self, domain: &Space) {
        self.windows.abandon(domain);
    }
}

impl Caller for Owner {
    #[inline(always)]
    fn alloc(
        &mut self,
        domain: &Space,
        len: u64,
        align: impl FnOnce() -> u64,
    ) -> Result<Addresses, BackendError> {
        if domain.translates
            && len <= MAX_BYTES
            && let Some((iova, share)) = self.windows.alloc(domain, len)
        {
            return Ok(Addresses { iova, origin: Origin::Window(share) });
        }
        self.alloc_elsewhere(domain, len, align())
    }

    #[inline(always)]
    fn release(&mut self, domain: &Space, Addresses { iova, origin }: Addresses) {
        let origin = match origin {
            Origin::Window(share) => match self.windows.free(domain, iova, share) {
                Ok(()) => return,
                Err(of_another_owner) => Origin::Window(of_another_owner),
            },
            other => other,
        };
        Anyone.release(domain, Addresses { iova, origin });
    }

    #[inline(always)]
    fn counts<'a>(&'a self, _: &'a Space) -> &'a Counts {
        &self.shared.counts
    }

    fn give_up_idle(&mut self, domain: &Space) -> bool {
        self.windows.close_idle(domain)
    }

    #[inline(always)]
    fn extents(&mut self) -> Option<&mut ExtentCache> {
        Some(&mut self.extents)
    }

    fn static_at(
        &mut self,
        domain: &Space,
        start: Iova,
        memory: DmaMemory,
        access: Access,
    ) -> Option<IovaRange> {
        domain.statics.find_cached(start, memory, access, &mut self.hit)
    }
}

impl Space {
    /// Returns a new owner, whose counters and idle windows the domain finds. Takes a lock.
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
}
