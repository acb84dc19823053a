//! The callers of a domain: any thread, or the owner of a handle, which has windows of addresses of
//! its own; and the limit on what an owner holds.
//!
//! A window's addresses are allocated in order, so a burst of mappings is contiguous: it shares a
//! table page and a flush. Those of a window that is used up are allocated again when all of them
//! have returned; parts of one only when the owner holds more than [`LIVE_FACTOR`] times what is
//! live and [`SPARE`] windows.
//!
//! Windows in which nothing is live are kept where the domain can reclaim them
//! ([`OwnerShared::idle`]): another owner that finds no addresses, or no table page, closes those
//! of all owners. It does not close the window of the current run, nor ranges that other threads
//! have returned and the owner has not collected.

use super::error::BackendError;
use super::space::{Hit, Space, held_bytes};
use super::stats::{Counts, Sum};
use super::window::{
    Addresses, FreeRuns, GRANULES, IDLE, Origin, OwnerShared, Slot, SlotBox, WINDOW_BYTES, Window,
    WindowShare,
};
use crate::access::Access;
use crate::addr::{Iova, IovaRange};
use crate::invalidate::Ticket;
use crate::iova::IovaSpace;
use crate::mem::DmaMemory;
use crate::share::{Shared, Stock};
use crate::sync::Ordering;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

/// The source of addresses, to which they also return, and the counters of that.
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

    /// Releases memory and addresses that this caller keeps for later. Returns whether there was
    /// anything.
    fn give_up_idle(&mut self, domain: &Space) -> bool {
        let _ = domain;
        false
    }

    /// Whether the caller has seen `ticket` complete, or a later one.
    #[inline(always)]
    fn has_seen(&self, ticket: Ticket) -> bool {
        let _ = ticket;
        false
    }

    /// Remembers that `ticket` has completed, and with it all before.
    #[inline(always)]
    fn note_completed(&mut self, ticket: Ticket) {
        let _ = ticket;
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

/// The state that one owner has to itself.
pub(super) struct Owner {
    pub(super) shared: Arc<OwnerShared>,
    windows: Windows,
    /// The static mapping that was found last.
    hit: Option<Hit>,
    /// The last ticket that a wait or poll of this owner has seen complete.
    completed: Ticket,
}

impl Owner {
    pub(super) fn new() -> Self {
        let shared = Arc::new(OwnerShared::new());
        let windows = Windows::new(Arc::clone(&shared));
        Self { windows, shared, hit: None, completed: Ticket::COMPLETED }
    }

    /// Prepares for allocations of `bytes` altogether, which are to be contiguous, until
    /// [`end_batch`](Self::end_batch).
    pub(super) fn prepare(&mut self, domain: &Space, bytes: u64) {
        if domain.translates() {
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

    /// Releases the unused addresses of a batch.
    pub(super) fn end_batch(&mut self, domain: &Space) {
        self.windows.end_batch(domain);
    }

    /// Abandons all windows.
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
        if domain.translates()
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
    fn has_seen(&self, ticket: Ticket) -> bool {
        ticket <= self.completed
    }

    #[inline(always)]
    fn note_completed(&mut self, ticket: Ticket) {
        // Never with `NEVER`, even if a backend returns it: every ticket would count as completed.
        if ticket != Ticket::NEVER {
            self.completed = self.completed.max(ticket);
        }
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

    /// Closes the owner's windows that are empty, leaves the others to their mappings, and keeps
    /// its counts.
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

    /// Waits for `ticket` if more bytes are held than allowed. A failed wait changes nothing: the
    /// next one reports it.
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
        let _ = self.wait(ticket, None);
    }
}

/// The longest range that comes from a window: half of one.
pub(super) const MAX_BYTES: u64 = super::window::WINDOW_BYTES / 2;
/// An owner holds at most this multiple of the addresses that are live in its windows, and
/// [`SPARE`] windows.
const LIVE_FACTOR: u64 = 2;
/// The number of windows that an owner may hold in addition: 128 MiB of addresses.
const SPARE: u64 = 64;
/// The number of windows searched for a sufficient run before one is requested from the address
/// space.
const SEARCHED: usize = 32;
/// The number of windows up to which an owner always collects.
const FEW: usize = 16;
/// Returned addresses are collected as soon as they are this fraction of those held: that repays
/// the visit to each window.
const COLLECT_FRACTION: u64 = 16;

/// The free granules that are allocated next, in order.
struct Run {
    slot: u32,
    next: Iova,
    end: Iova,
    /// A share of the window for each of them, so that handing one out needs neither the slot nor
    /// the window, which another owner's work may have driven out of the cache. `None` if there is
    /// no window.
    stock: Option<Stock<Window>>,
}

impl Run {
    fn bytes(&self) -> u64 {
        self.end.raw() - self.next.raw()
    }
}

/// No window.
const NONE: Run = Run { slot: u32::MAX, next: Iova::new(0), end: Iova::new(0), stock: None };

/// The windows of one owner.
pub(super) struct Windows {
    owner: Arc<OwnerShared>,
    /// Boxed: a list that grows moves eight bytes for each window, and not its map.
    slots: Vec<Option<SlotBox>>,
    /// Slots without a window.
    vacant: Vec<u32>,
    run: Run,
    /// The remaining addresses of a batch that no window has room for.
    batch: Option<IovaRange>,
    /// Windows held, without those that are idle.
    held: u64,
    /// Granules live in all of them, those of the current run and those not collected included.
    live: u64,
    /// Granules collected so far.
    collected: u64,
    /// The position at which the next search for a run begins.
    cursor: usize,
}

impl Windows {
    pub(super) fn new(owner: Arc<OwnerShared>) -> Self {
        Self {
            owner,
            slots: Vec::new(),
            vacant: Vec::new(),
            run: NONE,
            batch: None,
            held: 0,
            live: 0,
            collected: 0,
            cursor: 0,
        }
    }

    /// Allocates `bytes`, whole granules and at most [`MAX_BYTES`], behind the last allocation if
    /// they fit there. `None` if no window has room and the domain has none left. O(1), and a check
    /// of every window once in as many allocations.
    #[inline(always)]
    pub(super) fn alloc(&mut self, domain: &Space, bytes: u64) -> Option<(IovaRange, WindowShare)> {
        if !bytes.is_multiple_of(IovaSpace::GRANULE)
            || (self.run.bytes() < bytes && !self.refill(domain, bytes))
        {
            return None;
        }
        let stock = self.run.stock.as_mut()?;
        let range = IovaRange::new(self.run.next, bytes).ok()?;
        // Counted as live with the run.
        self.run.next = range.end();
        Some((range, WindowShare::new(stock.issue(), self.run.slot)))
    }

    /// Begins a run of at least `bytes`, so that the allocations that follow are contiguous: in a
    /// window or, if none has room and no more may be held, in the address space.
    pub(super) fn prepare(&mut self, domain: &Space, bytes: u64) {
        self.end_batch(domain);
        let fits = bytes <= MAX_BYTES && bytes.is_multiple_of(IovaSpace::GRANULE);
        if fits && self.run.bytes() < bytes && !self.refill(domain, bytes) {
            self.batch = domain.alloc_iova(bytes, IovaSpace::GRANULE, None).ok();
        }
    }

    /// Allocates the next `bytes` of the address space that a batch has there, if one has.
    pub(super) fn next_of_batch(&mut self, bytes: u64) -> Option<IovaRange> {
        let rest = self.batch?;
        let range = rest.part(0, bytes)?;
        self.batch = rest.part(bytes, rest.len() - bytes);
        Some(range)
    }

    /// Frees what is left of the addresses that a batch has in the address space.
    pub(super) fn end_batch(&mut self, domain: &Space) {
        if let Some(rest) = self.batch.take() {
            domain.free_iova(rest);
        }
    }

    /// Takes back addresses of one of these windows.
    ///
    /// # Errors
    /// The share, if it is of another owner's window.
    #[inline(always)]
    pub(super) fn free(
        &mut self,
        domain: &Space,
        iova: IovaRange,
        share: WindowShare,
    ) -> Result<(), WindowShare> {
        let number = share.slot();
        let Some(slot) = self.slots.get_mut(number as usize).and_then(Option::as_deref_mut) else {
            return Err(share);
        };
        if !share.is_of(&slot.stock) {
            return Err(share);
        }
        let (first, count) = slot.stock.granules(iova);
        slot.stock.take_back(share.into_shared());
        slot.granules.free(first, count);
        slot.live -= count;
        self.live -= u64::from(count);
        if slot.live == 0 && number != self.run.slot {
            self.emptied(domain, number);
        }
        Ok(())
    }

    /// Abandons all windows, to be closed by the domain: each with the last of its mappings. Calls
    /// no backend.
    pub(super) fn abandon(&mut self, domain: &Space) {
        self.end_batch(domain);
        let _ = self.give_up_run();
        let mut abandoned = domain.abandoned.lock();
        abandoned.append(&mut self.owner.idle.lock());
        abandoned.extend(self.slots.drain(..).flatten());
        (self.held, self.live) = (0, 0);
    }

    /// Closes the windows in which nothing is live, which releases their table pages. Returns
    /// whether there was one.
    #[cold]
    pub(super) fn close_idle(&mut self, domain: &Space) -> bool {
        self.collect(domain);
        // The window of the current run too, unless addresses allocated there are in use: a batch
        // is contiguous.
        let rest = self.run.bytes() / IovaSpace::GRANULE;
        let slot = self.slots.get(self.run.slot as usize).and_then(Option::as_deref);
        if slot.is_some_and(|slot| u64::from(slot.live) == rest) {
            self.end_run(domain);
        }
        domain.abandoned.lock().append(&mut self.owner.idle.lock());
        domain.close_abandoned()
    }

    /// Begins another run of at least `bytes`. Returns false if there is none, or a batch continues
    /// outside of windows.
    #[cold]
    fn refill(&mut self, domain: &Space, bytes: u64) -> bool {
        if self.batch.is_some() {
            return false;
        }
        // At most half a window: see `MAX_BYTES`.
        let count = u32::try_from(bytes / IovaSpace::GRANULE).unwrap_or(u32::MAX);
        if self.next_run(count) || self.take_idle() {
            return true;
        }
        let over = self.is_over_bound();
        if self.uncollected() > 0 && (over || self.repays_collection()) {
            self.collect(domain);
            if self.take_idle() {
                return true;
            }
        }
        if over && self.is_over_bound() {
            return self.search(count, SEARCHED);
        }
        if let Some(window) = domain.open_window(&self.owner) {
            let stock = Shared::new(window).stock();
            return self.begin(Box::new(Slot { stock, granules: FreeRuns::new(), live: 0 }));
        }
        // The space is exhausted: use any free run here, however long the search takes.
        self.collect(domain);
        self.take_idle() || self.search(count, self.slots.len())
    }

    fn held_granules(&self) -> u64 {
        self.held * u64::from(GRANULES)
    }

    /// Returns how many granules others have returned since they were collected last: none that is
    /// not live.
    fn uncollected(&self) -> u64 {
        // A granule may be collected before it is counted.
        let more =
            self.owner.returned.load(Ordering::Acquire).wrapping_sub(self.collected).cast_signed();
        u64::try_from(more).unwrap_or(0)
    }

    fn repays_collection(&self) -> bool {
        self.slots.len() <= FEW || self.uncollected() >= self.held_granules() / COLLECT_FRACTION
    }

    fn is_over_bound(&self) -> bool {
        let live = self.live - self.uncollected();
        self.held_granules() > LIVE_FACTOR * live + SPARE * u64::from(GRANULES)
    }

    /// Begins the run of at least `count` free granules at or behind `from` in window `number`, if
    /// there is one.
    fn run_behind(&mut self, from: u32, number: u32, count: u32) -> bool {
        let Some(Some(slot)) = self.slots.get_mut(number as usize) else { return false };
        let Some(run) = slot.granules.take(from, count) else { return false };
        let Some(iova) = slot.stock.part(&run) else { return false };
        let granules = run.end - run.start;
        slot.live += granules;
        self.live += u64::from(granules);
        // One for each granule, and one that stays: the last that is allocated takes no more from
        // the window's count.
        let stock = Some(slot.stock.split(granules + 1));
        self.run = Run { slot: number, next: iova.start(), end: iova.end(), stock };
        true
    }

    /// Replaces the rest of the current run by the next one of its window, or closes the run if the
    /// window has none.
    fn next_run(&mut self, count: u32) -> bool {
        let Some((number, end, is_empty)) = self.give_up_run() else { return false };
        if self.run_behind(end, number, count) {
            return true;
        }
        // All of it is free: it is begun again, without a visit to the list of idle ones.
        is_empty && self.run_behind(0, number, GRANULES)
    }

    /// Ends the current run.
    fn end_run(&mut self, domain: &Space) {
        if let Some((number, _, true)) = self.give_up_run() {
            self.emptied(domain, number);
        }
    }

    /// Frees the rest of the current run, if there is one. Returns its window, its end, and whether
    /// nothing else is live there.
    fn give_up_run(&mut self) -> Option<(u32, u32, bool)> {
        let run = core::mem::replace(&mut self.run, NONE);
        let slot = self.slots.get_mut(run.slot as usize)?.as_deref_mut()?;
        let (next, end) = (slot.stock.granule(run.next), slot.stock.granule(run.end));
        if let Some(stock) = run.stock {
            slot.stock.merge(stock);
        }
        slot.granules.free(next, end - next);
        slot.live -= end - next;
        self.live -= u64::from(end - next);
        Some((run.slot, end, slot.live == 0))
    }

    /// Begins a run in an idle window, if another owner has not had it closed.
    fn take_idle(&mut self) -> bool {
        let idle = self.owner.idle.lock().pop();
        idle.is_some_and(|slot| self.begin(slot))
    }

    /// Begins a run in a window that is all free.
    fn begin(&mut self, slot: Box<Slot>) -> bool {
        let number = match self.vacant.pop() {
            Some(number) => number,
            None => {
                self.slots.push(None);
                // Room for all of them, so that emptying a window allocates nothing.
                self.vacant.reserve(self.slots.len());
                u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
            }
        };
        if let Some(vacant) = self.slots.get_mut(number as usize) {
            *vacant = Some(slot);
            self.held += 1;
        }
        self.run_behind(0, number, GRANULES)
    }

    /// Keeps the window `number`, in which nothing is live, or closes it if enough are kept.
    fn emptied(&mut self, domain: &Space, number: u32) {
        let Some(slot) = self.slots.get_mut(number as usize).and_then(Option::take) else { return };
        self.held -= 1;
        self.vacant.push(number);
        let mut idle = self.owner.idle.lock();
        if idle.len() < IDLE {
            return idle.push(slot);
        }
        drop(idle);
        domain.close_window(slot.into_window());
    }

    /// Collects what others have returned to any window.
    fn collect(&mut self, domain: &Space) {
        for number in 0..self.slots.len() {
            let Some(Some(slot)) = self.slots.get_mut(number) else { continue };
            let returned = slot.stock.collect();
            let count = slot.granules.free_all(&returned);
            slot.live -= count;
            self.live -= u64::from(count);
            self.collected = self.collected.wrapping_add(count.into());
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            if count > 0 && slot.live == 0 && number != self.run.slot {
                self.emptied(domain, number);
            }
        }
    }

    /// Begins the first run of at least `count` granules in the next `windows` windows.
    fn search(&mut self, count: u32, windows: usize) -> bool {
        for _ in 0..windows.min(self.slots.len()) {
            self.cursor = if self.cursor + 1 < self.slots.len() { self.cursor + 1 } else { 0 };
            if u32::try_from(self.cursor).is_ok_and(|number| self.run_behind(0, number, count)) {
                return true;
            }
        }
        false
    }
}

impl Space {
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
        Some(Window::new(range, self.prepare(range), Arc::clone(owner)))
    }

    /// Closes a window whose last share was given up, if there is one: nothing is mapped in it.
    pub(super) fn close_window(&self, window: Option<Window>) {
        if let Some(window) = window {
            let (range, token) = window.into_parts();
            self.windows.fetch_sub(1, Ordering::Relaxed);
            if let Some(token) = token {
                // If it panics, the addresses stay in use.
                self.call(|_| token.close());
            }
            self.free_iova(range);
        }
    }
}
