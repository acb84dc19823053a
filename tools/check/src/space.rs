//! One I/O address space: what the devices of a container or of an IOAS reach.

use crate::process::{Memory, Site};
pub(crate) use crate::span::Span;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// How many ended mappings, and refused ones, are remembered for reports.
const REMEMBERED: usize = 1024;

/// The size of a page of the processor, and of the IOMMU.
pub(crate) const PAGE: u64 = 4096;

/// A mapping.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) span: Span,
    pub(crate) vaddr: u64,
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) memory: Arc<Memory>,
    /// Its number among the changes of the space.
    pub(crate) serial: u64,
    pub(crate) site: Site,
}

/// A mapping that has ended, or that was refused.
#[derive(Clone, Debug)]
pub(crate) struct Past {
    pub(crate) span: Span,
    pub(crate) site: Site,
    /// The error, of a refused one.
    pub(crate) refused: Option<i32>,
}

/// Why a device's access failed.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// Nothing is mapped at this address. The mapping that was there, or was refused, if known.
    Unmapped(u64, Option<Past>),
    /// What is mapped there is not for this kind of access.
    Direction(u64, Entry),
    /// The process has no memory there any more.
    Gone(u64, Entry),
}

/// Addresses of a device, and the memory of a process that they are mapped to, of the same length.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) span: Span,
    memory: Arc<Memory>,
    own: Span,
}

impl Target {
    /// Returns what of two targets is the same memory, at the addresses of each.
    pub(crate) fn shared(&self, other: &Self) -> Option<[Span; 2]> {
        if !Arc::ptr_eq(&self.memory, &other.memory) || !self.own.overlaps(&other.own) {
            return None;
        }
        let first = self.own.first.max(other.own.first);
        let len = self.own.last.min(other.own.last) - first + 1;
        let at = |target: &Self| Span::new(target.span.first + (first - target.own.first), len);
        Some([at(self)?, at(other)?])
    }
}

/// Pages that several mappings share: one and its copies.
#[derive(Clone, Copy, Debug)]
struct Shares {
    mappings: usize,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Inner {
    maps: BTreeMap<u64, Entry>,
    past: VecDeque<Past>,
    serial: u64,
    /// The bytes that each process has mapped, each time that it has, but for copies.
    charged: HashMap<u32, u64>,
    /// Which pages a mapping shares, by its number; pages have the number of their first mapping.
    sharing: HashMap<u64, u64>,
    shared: HashMap<u64, Shares>,
    /// How many mappings there are of a page of a process.
    copies: HashMap<(u32, u64), usize>,
    /// No page below it is free, but page 0.
    packed: u64,
}

impl Inner {
    fn count(&mut self, entry: &Entry, added: bool) {
        let pid = entry.memory.pid;
        let len = if added { entry.span.len() } else { self.released(entry) };
        let charged = self.charged.entry(pid).or_default();
        *charged = if added { charged.saturating_add(len) } else { charged.saturating_sub(len) };
        let copies = self.copies.entry((pid, entry.vaddr)).or_default();
        *copies = if added { *copies + 1 } else { copies.saturating_sub(1) };
        if *copies == 0 {
            self.copies.remove(&(pid, entry.vaddr));
        }
    }
}

impl Inner {
    /// Has a mapping share the pages of another one: they stay locked until all of them have ended.
    fn share(&mut self, entry: &Entry, source: &Entry) {
        let bytes = source.span.len();
        let pages = *self.sharing.entry(source.serial).or_insert(source.serial);
        let shares = self.shared.entry(pages).or_insert(Shares { mappings: 1, bytes });
        shares.mappings += 1;
        self.sharing.insert(entry.serial, pages);
        // It has been counted as a mapping of its own.
        if let Some(charged) = self.charged.get_mut(&entry.memory.pid) {
            *charged = charged.saturating_sub(entry.span.len());
        }
    }

    /// Returns how many bytes are no longer locked when a mapping has ended.
    fn released(&mut self, entry: &Entry) -> u64 {
        let Some(pages) = self.sharing.remove(&entry.serial) else { return entry.span.len() };
        let Some(shares) = self.shared.get_mut(&pages) else { return 0 };
        shares.mappings -= 1;
        if shares.mappings > 0 {
            return 0;
        }
        self.shared.remove(&pages).map_or(0, |shares| shares.bytes)
    }
}

/// Returns the first mapping that overlaps `span`.
fn overlapping(inner: &Inner, span: Span) -> Option<&Entry> {
    let before = inner.maps.range(..=span.last).next_back();
    // Mappings do not overlap, so the last one that begins before the end decides, unless an
    // earlier one is wanted.
    before.filter(|(_, map)| map.span.overlaps(&span))?;
    let first = inner.maps.range(..=span.first).next_back();
    let first = first.filter(|(_, map)| map.span.overlaps(&span));
    first.or_else(|| inner.maps.range(span.first..).next()).map(|(_, map)| map)
}

/// Returns the page behind a mapping.
fn page_behind(map: &Entry) -> Option<u64> {
    map.span.last.checked_add(1)?.checked_next_multiple_of(PAGE)
}

/// An address space. An access holds off changes until it is over: what is unmapped is not accessed
/// any more.
#[derive(Debug, Default)]
pub(crate) struct Space(RwLock<Inner>);

impl Space {
    // After a panic under the lock the map has all entries or lacks the one that was added.
    fn inner(&self) -> RwLockReadGuard<'_, Inner> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
    fn inner_mut(&self) -> RwLockWriteGuard<'_, Inner> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the last change.
    pub(crate) fn serial(&self) -> u64 {
        self.inner().serial
    }

    /// Returns the number of mappings.
    pub(crate) fn count(&self) -> usize {
        self.inner().maps.len()
    }

    /// Returns the bytes that a process has mapped, each time that it has, but for copies.
    pub(crate) fn charged(&self, pid: u32) -> u64 {
        self.inner().charged.get(&pid).copied().unwrap_or(0)
    }

    /// Returns the first mapping that overlaps `span`.
    pub(crate) fn overlapping(&self, span: Span) -> Option<Entry> {
        overlapping(&self.inner(), span).cloned()
    }

    /// Returns the first page, but page 0, from which on `len` bytes are free inside one of `ranges`.
    pub(crate) fn gap(&self, len: u64, ranges: &[Span]) -> Option<u64> {
        let mut inner = self.inner_mut();
        let mut packed = inner.packed.max(PAGE);
        // Remembered: a search of each map from the start would take longer with each one.
        while let Some(taken) = overlapping(&inner, Span::new(packed, PAGE)?) {
            packed = page_behind(taken)?;
        }
        inner.packed = packed;
        for range in ranges {
            let mut at = range.first.max(packed);
            while let Some(span) = Span::new(at, len).filter(|span| range.holds(span)) {
                match overlapping(&inner, span) {
                    Some(taken) => at = page_behind(taken)?,
                    None => return Some(at),
                }
            }
        }
        None
    }

    /// Returns the mappings whose memory overlaps `memory` of an address space: not those that the
    /// process has made before it executed another program.
    pub(crate) fn of_memory(&self, owner: &Arc<Memory>, memory: Span) -> Vec<Entry> {
        let inner = self.inner();
        if inner.charged.get(&owner.pid).is_none_or(|bytes| *bytes == 0) {
            return Vec::new();
        }
        let is_it = |entry: &&Entry| {
            let own = Span::new(entry.vaddr, entry.span.len());
            Arc::ptr_eq(&entry.memory, owner) && own.is_some_and(|own| own.overlaps(&memory))
        };
        inner.maps.values().filter(is_it).cloned().collect()
    }

    /// Returns the address that is mapped to `vaddr` of a process, if one is.
    pub(crate) fn mapped_to(&self, vaddr: u64) -> Option<u64> {
        let inner = self.inner();
        let mut starts = inner.maps.values().filter_map(|entry| {
            let own = Span::new(entry.vaddr, entry.span.len())?;
            own.contains(vaddr).then(|| entry.span.first + (vaddr - own.first))
        });
        starts.next()
    }

    /// Returns what of `span` is mapped, each piece with its memory.
    pub(crate) fn targets(&self, span: Span) -> Vec<Target> {
        let inner = self.inner();
        let before = lookup(&inner, span.first).map_or(span.first, |map| map.span.first);
        let piece = |map: &Entry| {
            let first = map.span.first.max(span.first);
            let len = map.span.last.min(span.last) - first + 1;
            Some(Target {
                span: Span::new(first, len)?,
                memory: map.memory.clone(),
                own: Span::new(map.vaddr.wrapping_add(first - map.span.first), len)?,
            })
        };
        inner.maps.range(before..=span.last).filter_map(|(_, map)| piece(map)).collect()
    }

    /// Returns how many mappings there are of the page at `vaddr` of a process.
    pub(crate) fn copies(&self, pid: u32, vaddr: u64) -> usize {
        self.inner().copies.get(&(pid, vaddr)).copied().unwrap_or(0)
    }

    /// Adds a mapping, which overlaps no other.
    pub(crate) fn insert(&self, entry: Entry) {
        self.insert_copy(entry, None);
    }

    /// Adds a mapping, which overlaps no other, of the pages of the mapping at `source` if there is one:
    /// they count once.
    pub(crate) fn insert_copy(&self, mut entry: Entry, source: Option<u64>) {
        let mut inner = self.inner_mut();
        inner.serial += 1;
        entry.serial = inner.serial;
        inner.count(&entry, true);
        let source = source.and_then(|at| lookup(&inner, at).cloned());
        if let Some(source) = source {
            inner.share(&entry, &source);
        }
        inner.maps.insert(entry.span.first, entry);
    }

    /// Remembers a mapping that was refused.
    pub(crate) fn refused(&self, span: Span, site: Site, errno: i32) {
        let mut inner = self.inner_mut();
        remember(&mut inner.past, Past { span, site, refused: Some(errno) });
    }

    /// Returns the mapping at an address.
    pub(crate) fn at(&self, at: u64) -> Option<Entry> {
        lookup(&self.inner(), at).cloned()
    }

    /// Returns whether nothing is mapped at an address, and no mapping of it is remembered that has
    /// ended or was refused.
    pub(crate) fn is_unknown(&self, at: u64) -> bool {
        let inner = self.inner();
        lookup(&inner, at).is_none() && !inner.past.iter().any(|past| past.span.contains(at))
    }

    /// Removes all mappings that begin inside `span`, and returns them.
    pub(crate) fn remove(&self, span: Span, site: &Site) -> Vec<Entry> {
        let mut inner = self.inner_mut();
        let starts: Vec<u64> =
            inner.maps.range(span.first..=span.last).map(|(start, _)| *start).collect();
        let removed: Vec<Entry> =
            starts.iter().filter_map(|start| inner.maps.remove(start)).collect();
        inner.serial += 1;
        for entry in &removed {
            inner.count(entry, false);
            inner.packed = inner.packed.min(entry.span.first / PAGE * PAGE);
            let past = Past { span: entry.span, site: site.clone(), refused: None };
            remember(&mut inner.past, past);
        }
        removed
    }

    /// Has `access` carry out a device's access to `len` bytes at `at`, in pieces that are each
    /// inside a mapping: the mapping, the address in the process, the offset and the length.
    pub(crate) fn access(
        &self,
        at: u64,
        len: usize,
        write: bool,
        mut access: impl FnMut(&Entry, u64, usize, usize) -> std::io::Result<()>,
    ) -> Result<(), Fault> {
        let inner = self.inner();
        let mut done = 0usize;
        while done < len {
            let from = at.wrapping_add(done as u64);
            let Some(entry) = lookup(&inner, from) else {
                let past = inner.past.iter().rev().find(|past| past.span.contains(from));
                return Err(Fault::Unmapped(from, past.cloned()));
            };
            if !(if write { entry.write } else { entry.read }) {
                return Err(Fault::Direction(from, entry.clone()));
            }
            let room = usize::try_from(entry.span.last - from).unwrap_or(usize::MAX);
            let piece = (len - done).min(room.saturating_add(1));
            let vaddr = entry.vaddr.wrapping_add(from - entry.span.first);
            if access(entry, vaddr, done, piece).is_err() {
                return Err(Fault::Gone(from, entry.clone()));
            }
            done += piece;
        }
        Ok(())
    }

    /// Reads memory as a device does.
    pub(crate) fn read(&self, at: u64, to: &mut [u8]) -> Result<(), Fault> {
        self.access(at, to.len(), false, |entry, vaddr, done, len| {
            entry.memory.read(vaddr, to.get_mut(done..done + len).unwrap_or_default())
        })
    }
}

fn lookup(inner: &Inner, at: u64) -> Option<&Entry> {
    inner.maps.range(..=at).next_back().map(|(_, map)| map).filter(|map| map.span.contains(at))
}

fn remember(past: &mut VecDeque<Past>, new: Past) {
    if past.len() == REMEMBERED {
        past.pop_front();
    }
    past.push_back(new);
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Space {
        fn write(&self, at: u64, from: &[u8]) -> Result<(), Fault> {
            self.access(at, from.len(), true, |entry, vaddr, done, len| {
                entry.memory.write(vaddr, &from[done..done + len])
            })
        }
    }

    fn entry(at: u64, len: u64, vaddr: u64, memory: &Arc<Memory>) -> Entry {
        Entry {
            span: Span::new(at, len).unwrap(),
            vaddr,
            read: true,
            write: true,
            memory: memory.clone(),
            serial: 0,
            site: Site::default(),
        }
    }

    #[test]
    fn an_access_crosses_adjacent_mappings() {
        let mut value = vec![0u8; 64];
        let at = value.as_mut_ptr().expose_provenance() as u64;
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let space = Space::default();
        space.insert(entry(0x1000, 16, at + 32, &memory));
        space.insert(entry(0x1010, 16, at, &memory));
        space.write(0x100e, &[1, 2, 3, 4]).unwrap();
        assert_eq!(std::hint::black_box(&value)[46..48], [1, 2]);
        assert_eq!(std::hint::black_box(&value)[..2], [3, 4]);
        let mut got = [0; 4];
        space.read(0x100e, &mut got).unwrap();
        assert_eq!(got, [1, 2, 3, 4]);
        assert!(matches!(space.write(0x101f, &[5, 6]), Err(Fault::Unmapped(0x1020, None))));
        assert!(matches!(space.read(u64::MAX, &mut got), Err(Fault::Unmapped(u64::MAX, None))));
    }

    #[test]
    fn what_is_unmapped_is_remembered() {
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let space = Space::default();
        space.insert(entry(0x1000, 0x1000, 0, &memory));
        let removed = space.remove(Span::new(0, 0x2000).unwrap(), &Site::default());
        assert_eq!(removed.len(), 1);
        let fault = space.read(0x1004, &mut [0]).unwrap_err();
        assert!(matches!(fault, Fault::Unmapped(0x1004, Some(past)) if past.refused.is_none()));
        space.refused(Span::new(0x9000, 0x1000).unwrap(), Site::default(), 1);
        space.insert(entry(0x5000, 0x1000, 0, &memory));
        let known = [0x1fff, 0x9000, 0x5000, 0xfff, 0x2000];
        assert_eq!(known.map(|at| space.is_unknown(at)), [false, false, false, true, true]);
    }

    #[test]
    fn a_mapping_has_a_direction_and_a_process() {
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let space = Space::default();
        space.insert(Entry { write: false, ..entry(0, 0x1000, 0, &memory) });
        assert!(matches!(space.write(8, &[1]), Err(Fault::Direction(8, _))));
        assert!(matches!(space.read(8, &mut [1]), Err(Fault::Gone(8, _))), "page 0 is not mapped");
    }

    #[test]
    fn mappings_are_found_by_their_memory() {
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let space = Space::default();
        let of = |at, len| -> Vec<u64> {
            let found = space.of_memory(&memory, Span::new(at, len).unwrap());
            found.iter().map(|entry| entry.span.first).collect()
        };
        assert!(of(0, u64::MAX).is_empty());
        space.insert(entry(0x2000, 0x1000, 0x70000, &memory));
        space.insert(entry(0x5000, 0x2000, 0x70000, &memory));
        assert!(of(0x6ffff, 1).is_empty());
        assert_eq!(of(0x6ffff, 2), [0x2000, 0x5000]);
        assert_eq!(of(0x71000, 1), [0x5000]);
        assert!(of(0x72000, 0x1000).is_empty());
        let mapped = [0x6ffff, 0x70008, 0x71fff, 0x72000].map(|at| space.mapped_to(at));
        assert_eq!(mapped, [None, Some(0x2008), Some(0x6fff), None]);
        // As after an exec.
        let other = Arc::new(Memory::of(std::process::id()).unwrap());
        assert!(space.of_memory(&other, Span::new(0x70000, 1).unwrap()).is_empty());
    }

    #[test]
    fn memory_that_is_mapped_twice_is_the_same() {
        let [memory, other] = [(); 2].map(|()| Arc::new(Memory::of(std::process::id()).unwrap()));
        let space = Space::default();
        space.insert(entry(0x1000, 0x1000, 0x70000, &memory));
        space.insert(entry(0x2000, 0x1000, 0x90000, &memory));
        space.insert(entry(0x5000, 0x2000, 0x70800, &memory));
        space.insert(entry(0x9000, 0x1000, 0x70000, &other));
        let targets = |at, len| space.targets(Span::new(at, len).unwrap());
        let spans = |at, len| -> Vec<(u64, u64)> {
            targets(at, len).iter().map(|target| (target.span.first, target.span.len())).collect()
        };
        assert_eq!(spans(0, 0x1000), []);
        assert_eq!(spans(0x1800, 0x1000), [(0x1800, 0x800), (0x2000, 0x800)]);
        assert_eq!(spans(0x2fff, 0x2002), [(0x2fff, 1), (0x5000, 1)]);
        let shared = |a: (u64, u64), b: (u64, u64)| {
            let [a, b] = [targets(a.0, a.1), targets(b.0, b.1)];
            a[0].shared(&b[0]).map(|spans| spans.map(|span| (span.first, span.len())))
        };
        assert_eq!(
            shared((0x1000, 0x1000), (0x5000, 0x2000)),
            Some([(0x1800, 0x800), (0x5000, 0x800)])
        );
        assert_eq!(shared((0x1000, 0x800), (0x5000, 0x2000)), None);
        assert_eq!(shared((0x1000, 0x801), (0x5000, 0x2000)), Some([(0x1800, 1), (0x5000, 1)]));
        assert_eq!(shared((0x1000, 0x1000), (0x9000, 0x1000)), None);
    }

    #[test]
    fn pages_count_once_until_their_last_copy_ends() {
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let space = Space::default();
        let add = |at, len, source| space.insert_copy(entry(at, len, 0x70000, &memory), source);
        let remove = |at| space.remove(Span::new(at, 1).unwrap(), &Site::default()).len();
        let locked = || space.charged(memory.pid);
        add(0x1000, 0x2000, None);
        add(0x8000, 0x1000, Some(0x1000));
        // A copy of a copy, and the same page mapped again.
        add(0x9000, 0x1000, Some(0x8000));
        assert_eq!(locked(), 0x2000);
        add(0xa000, 0x1000, None);
        assert_eq!(locked(), 0x3000);
        for (at, left) in [(0x1000, 0x3000), (0x9000, 0x3000), (0x8000, 0x1000), (0xa000, 0)] {
            assert_eq!((remove(at), locked()), (1, left), "{at:#x}");
        }
        assert!(space.inner().sharing.is_empty() && space.inner().shared.is_empty());
    }

    #[test]
    fn gaps_are_the_first_that_are_large_enough() {
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let space = Space::default();
        let ranges = [(0, 0x8000), (0x10000, 0x4000)].map(|(at, len)| Span::new(at, len).unwrap());
        let gap = |len| space.gap(len, &ranges);
        let add = |at, len| space.insert(entry(at, len, 0, &memory));
        let remove = |at, len| space.remove(Span::new(at, len).unwrap(), &Site::default()).len();
        assert_eq!([gap(1), gap(0x7000), gap(0x7001)], [Some(0x1000), Some(0x1000), None]);
        add(0x1000, 0x1000);
        add(0x2000, 0x800);
        assert_eq!([gap(0x1000), gap(0x5000), gap(0x5001)], [Some(0x3000), Some(0x3000), None]);
        add(0x4000, 0x1000);
        assert_eq!([gap(0x1000), gap(0x1001)], [Some(0x3000), Some(0x5000)]);
        assert_eq!([gap(0x3000), gap(0x3001), gap(0x4001)], [Some(0x5000), Some(0x10000), None]);
        add(0x3000, 0x1000);
        add(0x5000, 0x3000);
        assert_eq!(gap(1), Some(0x10000));
        // What becomes free is found again, also before and inside of what was searched.
        assert_eq!(remove(0x2000, 0x1000), 1);
        assert_eq!([gap(0x1000), gap(0x1001)], [Some(0x2000), Some(0x10000)]);
        assert_eq!(remove(0x1000, 0x1000), 1);
        assert_eq!(gap(0x2000), Some(0x1000));
        let end = [Span { first: u64::MAX - 0xfff, last: u64::MAX }];
        assert_eq!(space.gap(0x1000, &end), Some(u64::MAX - 0xfff));
        add(u64::MAX - 0xfff, 0x1000);
        assert_eq!(space.gap(0x1000, &end), None);
    }

    #[test]
    fn overlaps_are_found_at_both_ends() {
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let space = Space::default();
        space.insert(entry(0x2000, 0x1000, 0, &memory));
        space.insert(entry(0x5000, 0x1000, 0, &memory));
        let first = |at, len| space.overlapping(Span::new(at, len)?).map(|map| map.span.first);
        assert_eq!(first(0, 0x2000), None);
        assert_eq!(first(0, 0x2001), Some(0x2000));
        assert_eq!(first(0x2fff, 1), Some(0x2000));
        assert_eq!(first(0x3000, 0x2000), None);
        assert_eq!(first(0x2800, 0x8000), Some(0x2000));
        assert_eq!(first(0x3000, 0x8000), Some(0x5000));
        assert_eq!(first(0x5800, 8), Some(0x5000));
        assert_eq!(first(0x6000, 0x1000), None);
    }
}
