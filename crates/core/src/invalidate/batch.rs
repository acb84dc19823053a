//! Requests; the batch in which they gather, and the aligned blocks that cover it; and batches on
//! their way: the one that is being submitted, taken out of the lock that requesters need and owned
//! by one thread at a time, and how long those in the queue have been in flight.

use super::queue::{Block, Descriptor, FlushCosts, PAGE_SHIFT, Scope, Ticket};
use crate::addr::IovaRange;
use crate::sync::{AtomicBool, AtomicU64, Ordering, UnsafeCell, count_steps};
use alloc::vec::Vec;

/// A request: what to drop from the IOMMU's caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flush {
    /// The addresses whose entries have changed; a page of which any part is inside is flushed.
    pub range: IovaRange,
    /// Whether only leaf entries changed. A flush that is not leaf-only also drops cached table
    /// pages; it is needed if one of them was retired.
    pub leaf_only: bool,
}

/// A flush of the leaf entries of a range.
impl From<IovaRange> for Flush {
    fn from(range: IovaRange) -> Self {
        Self { range, leaf_only: true }
    }
}

/// The pages `first..end` of a request, or of several that abut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pages {
    pub(super) first: u64,
    pub(super) end: u64,
    pub(super) leaf_only: bool,
}

impl Pages {
    #[inline]
    pub(super) fn new(flush: &Flush) -> Self {
        let (first, last) =
            (flush.range.start().raw() >> PAGE_SHIFT, flush.range.last().raw() >> PAGE_SHIFT);
        Self { first, end: last + 1, leaf_only: flush.leaf_only }
    }

    pub(super) const fn count(&self) -> u64 {
        self.end - self.first
    }

    /// Extends `self` to cover `next` too, if the two abut or overlap. Returns whether they do.
    #[inline]
    pub(super) fn join(&mut self, next: &Self) -> bool {
        if self.first > next.end || next.first > self.end {
            return false;
        }
        self.first = self.first.min(next.first);
        self.end = self.end.max(next.end);
        self.leaf_only &= next.leaf_only;
        true
    }
}

/// The number of requests, and of their pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Requested {
    pub(super) flushes: u64,
    /// The number of requests that are not leaf-only.
    pub(super) tables: u64,
    pub(super) pages: u64,
}

impl Requested {
    /// Returns what one request is.
    #[inline]
    pub(super) fn of(pages: &Pages) -> Self {
        Self { flushes: 1, tables: u64::from(!pages.leaf_only), pages: pages.count() }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.flushes += other.flushes;
        self.tables += other.tables;
        self.pages += other.pages;
    }
}

/// Requests that one owner gathers without a lock, merged with their neighbours, before it appends
/// them all at once to the open batch.
#[derive(Clone, Debug)]
pub(super) struct FlushList {
    pages: [Pages; Self::CAPACITY],
    len: usize,
    pub(super) requested: Requested,
}

impl FlushList {
    /// The most requests in a list that do not abut.
    pub(super) const CAPACITY: usize = 16;

    /// Creates an empty list.
    pub(super) const fn new() -> Self {
        let none = Pages { first: 0, end: 0, leaf_only: true };
        let requested = Requested { flushes: 0, tables: 0, pages: 0 };
        Self { pages: [none; Self::CAPACITY], len: 0, requested }
    }

    /// Whether the list is empty.
    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a request, whose entries have been cleared. Constant time: it is merged with the last
    /// one if they abut.
    ///
    /// # Errors
    /// The request, if the list is full.
    pub(super) fn push(&mut self, flush: Flush) -> Result<(), Flush> {
        let pages = Pages::new(&flush);
        let last = self.len.checked_sub(1).and_then(|last| self.pages.get_mut(last));
        if !last.is_some_and(|last| last.join(&pages)) {
            *self.pages.get_mut(self.len).ok_or(flush)? = pages;
            self.len += 1;
        }
        self.requested.add(&Requested::of(&pages));
        Ok(())
    }

    pub(super) fn pages(&self) -> &[Pages] {
        self.pages.get(..self.len).unwrap_or_default()
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
        self.requested = Requested::default();
    }
}

/// Requests that gather until they are submitted together, followed by one wait.
#[derive(Debug)]
pub(super) struct Batch {
    pages: Vec<Pages>,
    domain_flush: bool,
    merged: u64,
    /// The pages requested.
    requested: u64,
}

/// The state that requesters change, under a lock.
pub(super) struct Open {
    pub(super) batch: Batch,
    /// The ticket of the open batch.
    pub(super) ticket: u64,
    /// All that was ever requested.
    pub(super) requested: Requested,
}

impl Open {
    pub(super) fn new() -> Self {
        Self { batch: Batch::new(), ticket: 1, requested: Requested::default() }
    }
}

impl Batch {
    /// The most unmerged requests in a batch. One more merges those that abut, or makes it a flush
    /// of the whole domain.
    pub(super) const CAPACITY: usize = 256;
    /// The room that a merge has to make at least, because it happens under the lock that all
    /// requesters need: so there is one for a list of requests at most. That many descriptors cost
    /// about as much as a flush of the domain.
    const ROOM: usize = FlushList::CAPACITY;

    pub(super) fn new() -> Self {
        Self {
            pages: Vec::with_capacity(Self::CAPACITY),
            domain_flush: false,
            merged: 0,
            requested: 0,
        }
    }

    /// Returns the pages to flush. Once [merged](Self::merge), in ascending order, and no two abut.
    /// Empty if the whole domain is to be flushed.
    pub(super) fn pages(&self) -> &[Pages] {
        &self.pages
    }

    /// Whether everything cached for the domain is to be dropped, table pages included.
    pub(super) const fn is_domain_flush(&self) -> bool {
        self.domain_flush
    }

    /// Whether the batch requests nothing.
    pub(super) const fn is_empty(&self) -> bool {
        self.pages.is_empty() && !self.domain_flush
    }

    /// Returns how many requests were merged into others.
    pub(super) const fn merged(&self) -> u64 {
        self.merged
    }

    /// Returns how many pages were requested, those requested twice counted twice.
    pub(super) const fn requested(&self) -> u64 {
        self.requested
    }

    /// Adds a request. Constant time, unless the batch is full: then neighbours are merged first.
    #[inline]
    pub(super) fn push(&mut self, pages: Pages) {
        count_steps(1);
        self.requested = self.requested.saturating_add(pages.count());
        if self.domain_flush || self.pages.last_mut().is_some_and(|last| last.join(&pages)) {
            self.merged += 1;
            return;
        }
        if self.pages.len() == Self::CAPACITY {
            self.merge_all();
            if self.pages.len() > Self::CAPACITY - Self::ROOM {
                // This one is covered, too.
                self.flush_domain();
                return;
            }
        }
        self.pages.push(pages);
    }

    /// Requests a single flush, of the whole domain, for all that the batch has.
    pub(super) fn flush_domain(&mut self) {
        self.merged += self.pages.len() as u64;
        self.pages.clear();
        self.domain_flush = true;
    }

    /// Counts requests that were merged into others before they were pushed.
    pub(super) fn count_merged(&mut self, merged: u64) {
        self.merged += merged;
    }

    /// Merges what abuts or overlaps.
    #[inline]
    pub(super) fn merge(&mut self) {
        if self.pages.len() > 1 {
            self.merge_all();
        }
    }

    fn merge_all(&mut self) {
        let before = self.pages.len();
        count_steps(before);
        self.pages.sort_unstable_by_key(|pages| pages.first);
        self.pages.dedup_by(|next, kept| kept.join(next));
        self.merged += (before - self.pages.len()) as u64;
    }

    pub(super) fn clear(&mut self) {
        self.pages.clear();
        (self.domain_flush, self.merged, self.requested) = (false, 0, 0);
    }
}

/// The most blocks under consideration at a time.
pub(super) const MAX_BLOCKS: usize = 512;

/// Appends to `out` the descriptors that cover `pages`, which are in ascending order and do not
/// abut, in ascending order, and returns how many pages they flush. `None`, with nothing appended,
/// if a flush of the domain costs less, or if there would be too many.
#[inline(always)]
pub(super) fn cover(
    pages: &[Pages],
    costs: &FlushCosts,
    max_order: u32,
    out: &mut Vec<Descriptor>,
) -> Option<u64> {
    if let [one] = pages {
        // A block as it is, as most single requests are.
        let order = one.count().trailing_zeros();
        if one.count().is_power_of_two()
            && one.first.is_multiple_of(one.count())
            && order <= max_order
        {
            let scope = Scope::Block(Block::containing(one.first, order));
            out.push(Descriptor::Iotlb { scope, leaf_only: one.leaf_only });
            return Some(one.count());
        }
    }
    cover_all(pages, costs, max_order, out)
}

/// Covers ranges that are not one block, as [`cover`] does. Outlined, so that the common case makes
/// no call.
#[inline(never)]
fn cover_all(
    pages: &[Pages],
    costs: &FlushCosts,
    max_order: u32,
    out: &mut Vec<Descriptor>,
) -> Option<u64> {
    let mark = out.len();
    let (Some(first), Some(last)) = (pages.first(), pages.last()) else { return Some(0) };
    let mut cover = Cover { costs, max_order, limit: mark + MAX_BLOCKS, out };
    let covered = cover.within(pages, first.first, last.end);
    let descriptors = (out.len() - mark) as u64;
    let cheap = descriptors.saturating_mul(costs.descriptor_ns)
        <= costs.descriptor_ns.saturating_add(costs.domain_ns);
    let covered = covered.filter(|_| cheap);
    if covered.is_none() {
        out.truncate(mark);
    }
    covered.map(|covered| covered.requested + covered.extra)
}

struct Cover<'a> {
    costs: &'a FlushCosts,
    max_order: u32,
    limit: usize,
    out: &'a mut Vec<Descriptor>,
}

/// The extent that the blocks of a part of the ranges cover.
struct Covered {
    requested: u64,
    /// Pages that were not requested.
    extra: u64,
}

impl Cover<'_> {
    /// Covers what of `pages` is in `from..to`: each of them is, in part. Halves the smallest block
    /// around it, down to blocks that were requested as a whole, and puts one block for two halves
    /// where that costs less. The depth of the recursion is at most the number of bits of a page
    /// number.
    fn within(&mut self, pages: &[Pages], from: u64, to: u64) -> Option<Covered> {
        let (head, tail) = (pages.first()?, pages.last()?);
        let (first, last) = (head.first.max(from), tail.end.min(to) - 1);
        let order = u64::BITS - (first ^ last).leading_zeros();
        let block = Block::containing(first, order);
        let (start, size) = (block.start().raw() >> super::queue::PAGE_SHIFT, block.pages());
        let allowed = order <= self.max_order;
        if pages.len() == 1 && last - first + 1 == size && allowed {
            return self
                .push(block, head.leaf_only)
                .then_some(Covered { requested: size, extra: 0 });
        }
        let (mark, middle) = (self.out.len(), start + size / 2);
        let split = pages.partition_point(|pages| pages.first < middle);
        // The last range that begins in the lower half may reach into the upper one.
        let reaches =
            split.checked_sub(1).is_some_and(|i| pages.get(i).is_some_and(|p| p.end > middle));
        let low = self.within(pages.get(..split)?, first, middle)?;
        let high = self.within(pages.get(split - usize::from(reaches)..)?, middle, last + 1)?;
        let halves =
            Covered { requested: low.requested + high.requested, extra: low.extra + high.extra };
        let whole = Covered { requested: halves.requested, extra: size - halves.requested };
        // Both halves push at least one block.
        let saved = (self.out.len() - mark - 1) as u64;
        let more = whole.extra - halves.extra;
        let pays = saved.saturating_mul(self.costs.descriptor_ns)
            >= more.saturating_mul(self.costs.refill_ns);
        if !(allowed && pays && whole.extra <= whole.requested) {
            return Some(halves);
        }
        self.out.truncate(mark);
        self.push(block, pages.iter().all(|pages| pages.leaf_only)).then_some(whole)
    }

    /// Returns false if there are too many blocks.
    fn push(&mut self, block: Block, leaf_only: bool) -> bool {
        let room = self.out.len() < self.limit;
        if room {
            self.out.push(Descriptor::Iotlb { scope: Scope::Block(block), leaf_only });
        }
        room
    }
}

/// A batch on its way into the queue, which may take several parts.
#[derive(Debug)]
pub(super) struct Flight {
    /// Its ticket; 0 if there is no batch.
    pub(super) ticket: u64,
    pub(super) batch: Batch,
    pub(super) descriptors: Vec<Descriptor>,
    /// The number of descriptors that the queue has accepted.
    pub(super) next: usize,
    pub(super) pages_flushed: u64,
}

impl Flight {
    /// Expresses the batch in descriptors: IOTLBs first, and the TLBs of devices behind a fence,
    /// because a device may fill its TLB from the IOTLB until that has been flushed (VT-d,
    /// "Device-TLB Invalidate"). It has none yet.
    #[inline(always)]
    pub(super) fn prepare(&mut self, costs: &FlushCosts, max_order: u32, device_tlbs: bool) {
        self.batch.merge();
        let out = &mut self.descriptors;
        let covered = (!self.batch.is_domain_flush())
            .then(|| cover(self.batch.pages(), costs, max_order, out))
            .flatten();
        if covered.is_none() {
            out.push(Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false });
        }
        self.pages_flushed = covered.unwrap_or(self.batch.requested());
        if device_tlbs {
            append_device_tlbs(out);
        }
    }

    /// Returns the descriptors that the queue has not accepted yet.
    pub(super) fn rest(&self) -> &[Descriptor] {
        self.descriptors.get(self.next..).unwrap_or_default()
    }

    pub(super) fn clear(&mut self) {
        self.ticket = 0;
        self.batch.clear();
        self.descriptors.clear();
        self.next = 0;
    }
}

/// Appends, behind a fence, the flushes of device TLBs that correspond to those of the IOTLB.
pub(super) fn append_device_tlbs(descriptors: &mut Vec<Descriptor>) {
    let count = descriptors.len();
    descriptors.push(Descriptor::Fence);
    descriptors.extend_from_within(..count);
    for descriptor in descriptors.iter_mut().skip(count + 1) {
        if let Descriptor::Iotlb { scope, .. } = *descriptor {
            *descriptor = Descriptor::DeviceTlb(scope);
        }
    }
}

/// A [`Flight`] that one thread at a time claims.
#[derive(Debug)]
pub(super) struct FlightCell {
    /// Set with the lock of `Open` held, so by a load and a store.
    claimed: AtomicBool,
    flight: UnsafeCell<Flight>,
}

// SAFETY: the flight is `Send`, and accessed by the one `Claim` that exists only (`try_claim`).
unsafe impl Sync for FlightCell {}

impl FlightCell {
    pub(super) fn new() -> Self {
        let flight = Flight {
            ticket: 0,
            batch: Batch::new(),
            // Blocks of the IOTLB and of device TLBs, and the fence between them.
            descriptors: Vec::with_capacity(2 * MAX_BLOCKS + 1),
            next: 0,
            pages_flushed: 0,
        };
        Self { claimed: AtomicBool::new(false), flight: UnsafeCell::new(flight) }
    }

    /// Whether a thread has claimed it at this moment.
    pub(super) fn is_claimed(&self) -> bool {
        // Acquire: a thread that finds it released sees everything that the claim has submitted and
        // published.
        self.claimed.load(Ordering::Acquire)
    }

    /// Returns the right to access the flight, unless another thread has it. Never waits.
    ///
    /// `open` proves that the caller holds its lock: claims exclude each other by that.
    pub(super) fn try_claim(&self, open: &mut Open) -> Option<Claim<'_>> {
        let _ = open;
        // Acquire: the work of the previous claim comes before this one.
        if self.claimed.load(Ordering::Acquire) {
            return None;
        }
        self.claimed.store(true, Ordering::Relaxed);
        Some(Claim(self))
    }
}

/// The right to access a [`Flight`], until it is dropped.
pub(super) struct Claim<'a>(&'a FlightCell);

impl Claim<'_> {
    pub(super) fn with<R>(&mut self, act: impl FnOnce(&mut Flight) -> R) -> R {
        self.0.flight.with_mut(|flight| {
            // SAFETY: `try_claim` found `claimed` false and set it for this claim, with the one
            // lock of `Open` held that all calls hold, so no other claim exists until its drop; the
            // acquire of that load orders this after the release of the previous one. `&mut self`
            // excludes itself.
            act(unsafe { &mut *flight })
        })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.claimed.store(false, Ordering::Release);
    }
}

const ENTRIES: usize = if cfg!(loom) { 2 } else { 16 };

/// The limit on batches in flight, for any
/// [`InvalidationQueue::queue_depth`](super::InvalidationQueue::queue_depth).
pub const MAX_IN_FLIGHT: u64 = ENTRIES as u64;

/// One entry per batch that can be in flight, by ticket modulo their number.
///
/// The entry of ticket `t` is restarted for `t + MAX_IN_FLIGHT` only after `t` has completed. A
/// waiter that still reads it for `t` reads a later start at worst, so it waits longer and never
/// times out early.
#[derive(Debug)]
pub(super) struct Clock([Entry; ENTRIES]);

#[derive(Debug)]
struct Entry {
    ticket: AtomicU64,
    since_ns: AtomicU64,
    polls: AtomicU64,
}

/// The time that a batch has been in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Age {
    pub(super) ns: u64,
    pub(super) polls: u64,
}

impl Clock {
    pub(super) fn new() -> Self {
        let entry = |_| Entry {
            ticket: AtomicU64::new(0),
            since_ns: AtomicU64::new(0),
            polls: AtomicU64::new(0),
        };
        Self(core::array::from_fn(entry))
    }

    fn entry(&self, ticket: u64) -> &Entry {
        &self.0[(ticket % MAX_IN_FLIGHT) as usize]
    }

    /// Records the first attempt to submit `ticket`; later ones change nothing. Under the lock of
    /// the queue.
    pub(super) fn start(&self, ticket: Ticket, now_ns: Option<u64>) {
        let entry = self.entry(ticket.0);
        if entry.ticket.load(Ordering::Relaxed) != ticket.0 {
            entry.since_ns.store(now_ns.unwrap_or(0), Ordering::Relaxed);
            entry.polls.store(0, Ordering::Relaxed);
            entry.ticket.store(ticket.0, Ordering::Release);
        }
    }

    /// Returns how long `ticket` has been in flight; `None` if no attempt to submit it is recorded.
    pub(super) fn age(&self, ticket: Ticket, now_ns: Option<u64>) -> Option<Age> {
        let entry = self.entry(ticket.0);
        (entry.ticket.load(Ordering::Acquire) == ticket.0).then(|| Age {
            ns: now_ns.map_or(0, |now| now.saturating_sub(entry.since_ns.load(Ordering::Relaxed))),
            polls: entry.polls.load(Ordering::Relaxed),
        })
    }

    /// Returns when `ticket` was submitted, if that is recorded.
    pub(super) fn since_ns(&self, ticket: Ticket) -> Option<u64> {
        let entry = self.entry(ticket.0);
        (entry.ticket.load(Ordering::Acquire) == ticket.0)
            .then(|| entry.since_ns.load(Ordering::Relaxed))
    }

    /// Counts a poll of a waiter behind `ticket`.
    pub(super) fn count_poll(&self, ticket: Ticket) {
        self.entry(ticket.0).polls.fetch_add(1, Ordering::Relaxed);
    }
}
