//! The cached entries: found by address, in the order in which they were let go. Frees need no memory.

use crate::buffer::Buffer;
use pinfold_core::addr::IovaRange;
use pinfold_core::domain::StaticMapping;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Memory that is mapped by one entry of the domain's table.
pub(super) struct Entry {
    pub(super) addr: usize,
    pub(super) len: usize,
    pub(super) mapping: StaticMapping,
    /// The cache made the memory known to the domain.
    pub(super) foreign: bool,
    /// Whose memory it is: kept until it has been taken back.
    pub(super) owners: Vec<Arc<Buffer>>,
    pub(super) holds: usize,
    /// Its neighbours among those that nobody holds.
    older: Option<usize>,
    younger: Option<usize>,
}

impl Entry {
    pub(super) fn new(
        addr: usize,
        len: usize,
        mapping: StaticMapping,
        foreign: bool,
        owners: Vec<Arc<Buffer>>,
    ) -> Self {
        Self { addr, len, mapping, foreign, owners, holds: 0, older: None, younger: None }
    }
}

#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Option<Entry>>,
    /// Empty places, with room for all of them.
    vacant: Vec<usize>,
    by_addr: BTreeMap<usize, usize>,
    /// The ends of the chain of entries that nobody holds.
    oldest: Option<usize>,
    youngest: Option<usize>,
    held: usize,
    bytes: u64,
}

impl Slots {
    /// Entries, how many of them are held, and bytes of all.
    pub(super) fn counts(&self) -> (usize, usize, u64) {
        (self.by_addr.len(), self.held, self.bytes)
    }

    /// The entry that the `len` bytes at `addr` lie in.
    pub(super) fn find(&self, addr: usize, len: usize) -> Option<usize> {
        let (_, &slot) = self.by_addr.range(..=addr).next_back()?;
        let entry = self.get(slot)?;
        let end = addr.checked_add(len)?;
        (end <= entry.addr.checked_add(entry.len)?).then_some(slot)
    }

    /// The longest unused of those that nobody holds.
    pub(super) fn oldest(&self) -> Option<usize> {
        self.oldest
    }

    /// Puts in an entry that is held.
    pub(super) fn insert(&mut self, entry: Entry) -> usize {
        let addr = entry.addr;
        self.bytes += entry.len as u64;
        self.held += 1;
        let slot = match self.vacant.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(None);
                self.vacant.reserve(self.slots.len());
                self.slots.len() - 1
            }
        };
        if let Some(place) = self.slots.get_mut(slot) {
            *place = Some(entry);
        }
        self.by_addr.insert(addr, slot);
        slot
    }

    /// Holds it once more; where the `len` bytes at `addr` are.
    pub(super) fn hold(&mut self, slot: usize, addr: usize, len: u64) -> Option<IovaRange> {
        let entry = self.get(slot)?;
        let offset = addr.checked_sub(entry.addr)? as u64;
        let range = entry.mapping.iova().part(offset, len)?;
        if entry.holds == 0 {
            self.unlink(slot);
            self.held += 1;
        }
        self.get_mut(slot)?.holds += 1;
        Some(range)
    }

    /// Holds it once less.
    pub(super) fn release(&mut self, slot: usize) {
        let Some(entry) = self.get_mut(slot) else { return };
        entry.holds = entry.holds.saturating_sub(1);
        if entry.holds == 0 {
            self.held -= 1;
            self.link_youngest(slot);
        }
    }

    /// Takes it out, if nobody holds it.
    pub(super) fn remove(&mut self, slot: usize) -> Option<Entry> {
        if self.get(slot)?.holds > 0 {
            return None;
        }
        self.unlink(slot);
        let entry = self.slots.get_mut(slot)?.take()?;
        self.vacant.push(slot);
        self.by_addr.remove(&entry.addr);
        self.bytes -= entry.len as u64;
        Some(entry)
    }

    fn get(&self, slot: usize) -> Option<&Entry> {
        self.slots.get(slot)?.as_ref()
    }

    fn get_mut(&mut self, slot: usize) -> Option<&mut Entry> {
        self.slots.get_mut(slot)?.as_mut()
    }

    fn link_youngest(&mut self, slot: usize) {
        let before = self.youngest.replace(slot);
        if let Some(entry) = self.get_mut(slot) {
            (entry.older, entry.younger) = (before, None);
        }
        match before.and_then(|before| self.get_mut(before)) {
            Some(before) => before.younger = Some(slot),
            None => self.oldest = Some(slot),
        }
    }

    fn unlink(&mut self, slot: usize) {
        let Some((older, younger)) = self.get_mut(slot).map(|e| (e.older.take(), e.younger.take())) else {
            return;
        };
        match older.and_then(|older| self.get_mut(older)) {
            Some(entry) => entry.younger = younger,
            None => self.oldest = younger,
        }
        match younger.and_then(|younger| self.get_mut(younger)) {
            Some(entry) => entry.older = older,
            None => self.youngest = older,
        }
    }
}
