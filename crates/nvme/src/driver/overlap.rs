//! Requests to the same blocks, of which at least one changes them: the later one waits until the
//! older one has ended.
//!
//! NVMe gives no order to commands in flight, and a command that is sent again may come seconds
//! after one that was submitted later and acknowledged. [`Extents`] therefore orders the requests
//! of a queue before they are sent. The queues of a controller share only [`Retries`], the requests
//! that wait for a retry: as long as there are none, a submission costs them one load.

use super::slots::{Operation, Request, list, room};
use std::collections::TryReserveError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The blocks of a request, and whether it changes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    nsid: u32,
    changes: bool,
    first: u64,
    end: u64,
}

impl Extent {
    /// Returns the extent of a request inside of its namespace. That of a flush is empty; that of a
    /// command which does not name its blocks as a read does is all of the namespace.
    pub(super) fn new(request: &Request) -> Self {
        let &Request { operation, nsid, slba: first, blocks } = request;
        let end = match operation {
            Operation::Raw(command, _) if command.blocks().is_none() => u64::MAX,
            _ => first.saturating_add(blocks.into()),
        };
        Self { nsid, changes: operation.changes_blocks(), first, end }
    }

    fn is_empty(&self) -> bool {
        self.first == self.end
    }

    /// Returns whether one of both requests depends on the order of both. An empty extent overlaps
    /// with none.
    pub(super) fn conflicts(&self, other: &Self) -> bool {
        (self.changes || other.changes)
            && self.nsid == other.nsid
            && self.first.max(other.first) < self.end.min(other.end)
    }
}

/// log2 of the blocks in a group: more than most requests have.
const GROUP_SHIFT: u32 = 4;
/// The most groups that are counted for one extent; a longer one is *wide*.
const MAX_GROUPS: u64 = 4;
/// Counters for each request of a queue, so that few groups of different requests share one.
const COUNTERS: usize = 8;

/// The number of extents in each group of blocks, by a hash of the group. Two overlapping extents
/// have a group in common, so an extent that is alone in its groups overlaps with none.
#[derive(Debug)]
struct Groups {
    counts: Box<[u32]>,
    /// The upper bits of a hash that number a counter begin here.
    shift: u32,
    /// The number of wide extents. Each may be in any group.
    wide: usize,
}

impl Groups {
    fn new(depth: usize) -> Result<Self, TryReserveError> {
        let counters = (depth * COUNTERS).next_power_of_two();
        let counts = list(counters, |_| 0)?.into();
        Ok(Self { counts, shift: u64::BITS - counters.trailing_zeros(), wide: 0 })
    }

    /// Returns the groups of an extent that is not empty; `None` if it is wide.
    fn of(extent: &Extent) -> Option<std::ops::RangeInclusive<u64>> {
        let (first, last) = (extent.first >> GROUP_SHIFT, (extent.end - 1) >> GROUP_SHIFT);
        (last - first < MAX_GROUPS).then_some(first..=last)
    }

    /// Returns the counter of a group of a namespace.
    fn counter(&self, nsid: u32, group: u64) -> usize {
        // Neighbours are far apart, and so are the same groups of two namespaces.
        let hash = (group ^ u64::from(nsid).rotate_left(48)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        usize::try_from(hash >> self.shift).unwrap_or(0)
    }

    /// Adds or removes an extent that is not empty.
    fn count(&mut self, extent: &Extent, more: bool) {
        let Some(groups) = Self::of(extent) else {
            self.wide = if more { self.wide + 1 } else { self.wide - 1 };
            return;
        };
        for group in groups {
            let counter = self.counter(extent.nsid, group);
            if let Some(count) = self.counts.get_mut(counter) {
                *count = if more { *count + 1 } else { *count - 1 };
            }
        }
    }

    /// Returns whether one of those counted may overlap with `extent`, which is not empty.
    fn may_overlap(&self, extent: &Extent) -> bool {
        let is_shared =
            |group| self.counts.get(self.counter(extent.nsid, group)).is_none_or(|n| *n > 0);
        self.wide > 0 || Self::of(extent).is_none_or(|mut groups| groups.any(is_shared))
    }
}

/// The extents of the requests of a queue that have not ended.
#[derive(Debug)]
pub(super) struct Extents {
    /// Unordered: a scan reads the requests in flight and nothing else.
    live: Vec<(Extent, u16)>,
    groups: Groups,
    /// The position of each tag in `live`; meaningful while it is there.
    places: Box<[usize]>,
    /// The number of extents whose requests change their blocks.
    changing: usize,
}

impl Extents {
    /// Creates an empty set for tags below `depth`.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(super) fn new(depth: usize) -> Result<Self, TryReserveError> {
        let places = list(depth, |_| usize::MAX)?.into();
        Ok(Self { live: room(depth)?, groups: Groups::new(depth)?, places, changing: 0 })
    }

    /// Returns how many requests conflict with `extent`. Linear in the requests in flight; constant
    /// for reads while none of them changes blocks, and, mostly, for a request of few blocks that
    /// conflicts with none while none has many.
    pub(super) fn conflicts(&self, extent: &Extent) -> usize {
        let none = extent.is_empty() || (self.changing == 0 && !extent.changes);
        if none || !self.groups.may_overlap(extent) {
            return 0;
        }
        self.live.iter().filter(|(other, _)| extent.conflicts(other)).count()
    }

    /// Yields the requests that conflict with `extent`.
    pub(super) fn conflicting(&self, extent: &Extent) -> impl Iterator<Item = u16> {
        self.live.iter().filter(|(other, _)| extent.conflicts(other)).map(|(_, tag)| *tag)
    }

    /// Adds the request `tag`.
    pub(super) fn insert(&mut self, tag: u16, extent: Extent) {
        if extent.is_empty() {
            return;
        }
        if let Some(place) = self.places.get_mut(usize::from(tag)) {
            *place = self.live.len();
            self.groups.count(&extent, true);
            self.live.push((extent, tag));
            self.changing += usize::from(extent.changes);
        }
    }

    /// Returns the extent of the request `tag`, if it has one.
    pub(super) fn get(&self, tag: u16) -> Option<&Extent> {
        let place = self.places.get(usize::from(tag))?;
        self.live.get(*place).map(|(extent, _)| extent)
    }

    /// Removes the request `tag`, which has ended, and returns its extent, if it has one.
    pub(super) fn remove(&mut self, tag: u16) -> Option<Extent> {
        let place = std::mem::replace(self.places.get_mut(usize::from(tag))?, usize::MAX);
        if place >= self.live.len() {
            return None;
        }
        let (extent, _) = self.live.swap_remove(place);
        self.groups.count(&extent, false);
        self.changing -= usize::from(extent.changes);
        if let Some((_, moved)) = self.live.get(place)
            && let Some(other) = self.places.get_mut(usize::from(*moved))
        {
            *other = place;
        }
        Some(extent)
    }
}

/// A request that waits for a retry, has been sent again, or waits for such a request.
#[derive(Clone, Copy, Debug)]
struct Retried {
    /// The position in the order of all retries of the controller. Two of one queue may have the
    /// same.
    age: u64,
    /// The serial number of its queue.
    queue: u64,
    tag: u16,
    /// The generation of the controller: after a reset it is not sent again.
    generation: u64,
    extent: Extent,
}

#[derive(Debug, Default)]
struct RetryList {
    requests: Vec<Retried>,
    /// The number of requests that all queues can have together: the most entries of the list.
    most: usize,
    /// The age of the next entry.
    next_age: u64,
}

/// The requests of all queues of a controller of which a command was or will be sent again, and what
/// waits for those, until they have completed.
#[derive(Debug, Default)]
pub(super) struct Retries {
    /// The number of listed requests. A submission that the program orders after the poll that saw
    /// the failure, in whatever way, sees it counted.
    count: AtomicUsize,
    list: Mutex<RetryList>,
}

impl Retries {
    fn list(&self) -> MutexGuard<'_, RetryList> {
        // Each change is a single push or removal, so a panic leaves it consistent.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves space for the requests of one more queue.
    ///
    /// # Errors
    /// There is no memory for it; nothing has changed.
    pub(super) fn add_queue(&self, depth: usize) -> Result<(), TryReserveError> {
        let mut list = self.list();
        let most = list.most + depth;
        let more = most.saturating_sub(list.requests.len());
        list.requests.try_reserve(more)?;
        list.most = most;
        Ok(())
    }

    /// Removes all requests of a queue, which sends nothing more.
    pub(super) fn remove_queue(&self, queue: u64, depth: usize) {
        self.retain(|other| other.queue != queue);
        self.list().most -= depth;
    }

    /// Adds a request of a queue of a generation, once; returns its age: `age`, of another request
    /// of the queue, or that of the youngest. Allocates nothing.
    pub(super) fn insert(
        &self,
        (queue, tag, generation): (u64, u16, u64),
        extent: Extent,
        age: Option<u64>,
    ) -> u64 {
        let mut list = self.list();
        let age = age.unwrap_or(list.next_age);
        list.next_age = list.next_age.max(age.saturating_add(1));
        list.requests.push(Retried { age, queue, tag, generation, extent });
        self.count.store(list.requests.len(), Ordering::Release);
        age
    }

    /// Removes the request `tag` of a queue.
    pub(super) fn remove(&self, queue: u64, tag: u16) {
        self.retain(|other| (other.queue, other.tag) != (queue, tag));
    }

    fn retain(&self, keep: impl Fn(&Retried) -> bool) {
        let mut list = self.list();
        list.requests.retain(keep);
        self.count.store(list.requests.len(), Ordering::Release);
    }

    /// Returns an age that all requests on the list are older than, and all later ones are not.
    pub(super) fn next_age(&self) -> u64 {
        self.list().next_age
    }

    /// Returns whether `extent`, of a queue with this serial number and generation, conflicts with
    /// a request that is older than `age`, of another queue of the same generation.
    #[inline]
    pub(super) fn conflict(
        &self,
        (queue, generation, age): (u64, u64, u64),
        extent: &Extent,
    ) -> bool {
        self.count.load(Ordering::Acquire) > 0
            && self.list().requests.iter().any(|other| {
                other.queue != queue
                    && other.generation == generation
                    && other.age < age
                    && other.extent.conflicts(extent)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::passthrough::RawCommand;
    use crate::spec::nvm;
    use proptest::prelude::*;

    fn extent() -> impl Strategy<Value = Extent> {
        let operation = proptest::sample::select(vec![
            Operation::Read,
            Operation::Write,
            Operation::WriteZeroes,
            Operation::Discard,
            Operation::Flush,
        ]);
        // Some are wide, and most of these overlap.
        let blocks = prop_oneof![4 => 1u32..8, 1 => 1u32..120];
        (operation, 1u32..3, 0u64..200, blocks).prop_map(|(operation, nsid, slba, blocks)| {
            let blocks = if operation == Operation::Flush { 0 } else { blocks };
            Extent::new(&Request { operation, nsid, slba, blocks })
        })
    }

    /// Block by block, as the specification of a conflict.
    fn share_a_block(a: &Extent, b: &Extent) -> bool {
        let blocks = |extent: &Extent| extent.first..extent.end;
        a.nsid == b.nsid && (a.changes || b.changes) && blocks(a).any(|at| blocks(b).contains(&at))
    }

    proptest! {
        #[test]
        fn conflicts_are_those_of_the_live_requests(
            steps in proptest::collection::vec((0u16..6, extent()), 1..60),
        ) {
            let mut extents = Extents::new(6).unwrap();
            let mut model: [Option<Extent>; 6] = [None; 6];
            for (tag, extent) in steps {
                let at = usize::from(tag);
                let expected = model.iter().flatten().filter(|o| share_a_block(&extent, o)).count();
                prop_assert_eq!(extents.conflicts(&extent), expected);
                if model[at].is_some() {
                    prop_assert_eq!(extents.get(tag), model[at].as_ref());
                    prop_assert_eq!(extents.remove(tag), model[at].take());
                } else if extent.is_empty() {
                    extents.insert(tag, extent);
                } else {
                    extents.insert(tag, extent);
                    model[at] = Some(extent);
                }
                prop_assert_eq!(extents.live.len(), model.iter().flatten().count());
                prop_assert_eq!(extents.get(5), model[5].as_ref());
            }
        }
    }

    fn write(slba: u64, blocks: u32) -> Extent {
        Extent::new(&Request { operation: Operation::Write, nsid: 1, slba, blocks })
    }

    #[test]
    fn a_command_that_does_not_name_its_blocks_is_ordered_with_all() {
        let raw = |opcode, slba| {
            let command = RawCommand { opcode, nsid: 1, cdw: [slba, 0, 7, 0, 0, 0] };
            let (slba, blocks) = command.blocks().unwrap_or((0, 0));
            let operation = Operation::Raw(command, 0);
            Extent::new(&Request { operation, nsid: 1, slba, blocks })
        };
        let [read, compare] = [nvm::READ, nvm::COMPARE].map(|opcode| raw(opcode, 100));
        for changing in [nvm::WRITE, nvm::WRITE_ZEROES, nvm::WRITE_UNCORRECTABLE] {
            assert!(raw(changing, 100).conflicts(&read) && !raw(changing, 108).conflicts(&read));
            assert!(write(107, 1).conflicts(&raw(changing, 100)));
        }
        assert!(!read.conflicts(&compare) && write(107, 1).conflicts(&compare));
        assert!(!write(108, 1).conflicts(&compare) && !raw(nvm::VERIFY, 100).conflicts(&read));
        // Dataset management, and one of a vendor that only reads.
        let (dsm, vendor) = (raw(nvm::DATASET_MANAGEMENT, 0), raw(0x82, 0));
        assert!(dsm.conflicts(&read) && dsm.conflicts(&write(1 << 40, 1)));
        assert!(!vendor.conflicts(&read) && vendor.conflicts(&write(1 << 40, 1)));
    }

    /// A scan would be right, too: this is what makes it rare.
    #[test]
    fn few_requests_to_other_blocks_need_a_scan() {
        let mut extents = Extents::new(128).unwrap();
        (0..128).for_each(|tag| extents.insert(tag, write(u64::from(tag) * 8000, 8)));
        let scans = |extents: &Extents| {
            (0..1000)
                .filter(|at| extents.groups.may_overlap(&write(at * 56 + 4_000_000, 8)))
                .count()
        };
        assert!(scans(&extents) < 250, "{} of 1000", scans(&extents));
        assert!(extents.groups.may_overlap(&write(8004, 8)));
        // One that is wide is in every group, for as long as it is there.
        extents.remove(0);
        extents.insert(0, write(0, 1 << 16));
        assert_eq!(scans(&extents), 1000);
        extents.remove(0);
        assert!(scans(&extents) < 250);
        assert!(extents.groups.may_overlap(&write(0, 1 << 16)), "it may be in any, too");
        // Nothing is left of those that have ended.
        (1..128).for_each(|tag| _ = extents.remove(tag));
        assert_eq!(scans(&extents), 0);
    }

    #[test]
    fn the_last_blocks_of_a_namespace_overlap() {
        let at =
            |slba| Extent::new(&Request { operation: Operation::Write, nsid: 1, slba, blocks: 8 });
        assert!(at(u64::MAX - 8).conflicts(&at(u64::MAX - 1)));
        assert!(!at(u64::MAX - 16).conflicts(&at(u64::MAX - 8)));
    }

    #[test]
    fn older_retries_of_other_queues_of_this_generation_count() {
        let write =
            |slba| Extent::new(&Request { operation: Operation::Write, nsid: 1, slba, blocks: 8 });
        let retries = Retries::default();
        let conflict =
            |queue, generation, age, slba| retries.conflict((queue, generation, age), &write(slba));
        let age = retries.insert((1, 3, 7), write(0), None);
        assert_eq!(
            (retries.insert((1, 4, 7), write(100), None), retries.next_age()),
            (age + 1, age + 2)
        );
        assert!(conflict(2, 7, u64::MAX, 4) && conflict(2, 7, age + 1, 4));
        assert!(!conflict(2, 7, age, 4), "it is no older");
        assert!(!conflict(1, 7, u64::MAX, 4), "its own are ordered otherwise");
        assert!(!conflict(2, 8, u64::MAX, 4), "a reset has ended it");
        assert!(!conflict(2, 7, u64::MAX, 8));
        retries.insert((2, 3, 7), write(50), None);
        retries.remove(1, 2);
        retries.remove(2, 3);
        assert!(conflict(2, 7, u64::MAX, 4) && !conflict(1, 7, u64::MAX, 50));
        retries.remove_queue(2, 0);
        assert!(conflict(2, 7, u64::MAX, 4));
        retries.remove_queue(1, 0);
        assert!(!conflict(2, 7, u64::MAX, 4));
        assert_eq!(retries.count.load(Ordering::Acquire), 0);
    }
    /// A request is added by a poll, which allocates nothing.
    #[test]
    fn there_is_room_for_all_requests_of_all_queues() {
        let retries = Retries::default();
        let capacity = || retries.list().requests.capacity();
        retries.add_queue(100).unwrap();
        retries.add_queue(60).unwrap();
        let before = capacity();
        (0..100).for_each(|tag| _ = retries.insert((1, tag, 0), write(0, 8), None));
        (0..60).for_each(|tag| _ = retries.insert((2, tag, 0), write(0, 8), None));
        assert_eq!(capacity(), before);
        // The room of a queue that has ended is another's.
        retries.remove_queue(1, 100);
        retries.add_queue(100).unwrap();
        assert_eq!((capacity(), retries.list().most), (before, 160));
        // Beside those that are there.
        retries.add_queue(1000).unwrap();
        assert!(capacity() >= 1160);
    }
}
