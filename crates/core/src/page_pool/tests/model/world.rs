//! A pool beside a list of what is out of it: each step is made in both.

use super::super::*;
use super::count::Count;
use super::{HEAP, Step, Way};
use proptest::prelude::*;
use proptest::sample::Index;

/// What is out, and how.
pub(super) enum Thing {
    Page(Page<Heap>, u8),
    Raw(RawPage, u8),
    Fragment(Fragment<Heap>),
}

/// A pool, and what is out of it.
pub(super) struct World {
    pub(super) pool: PagePool<Heap>,
    pub(super) remote: Remote<Heap>,
    tags: [Tag; 3],
    pub(super) out: Vec<Thing>,
    /// Each page that is out, and how many fragments of it are; the one of which more may be cut has one more.
    pub(super) pages: BTreeMap<u64, usize>,
    pub(super) open: Option<u64>,
    freed: Vec<RawPage>,
    count: Count,
}

pub(super) type Checked = Result<(), TestCaseError>;

impl World {
    pub(super) fn new(heap: &Heap, order: Order, ring: u32) -> Self {
        let pool = heap.pool(Config { order, ring, ..Config::default() });
        let count = Count {
            magazine: 0,
            ring: 0,
            below: 0,
            fresh: 0,
            capacity: u64::from(ring),
            order: order.get(),
            total: 0,
            counts: Counts::default(),
        };
        Self {
            remote: pool.remote(),
            tags: [Tag::NONE, pool.tag("one").unwrap(), pool.tag("two").unwrap()],
            pool,
            out: Vec::new(),
            pages: BTreeMap::new(),
            open: None,
            freed: Vec::new(),
            count,
        }
    }

    pub(super) fn start_of(&self, iova: Iova) -> u64 {
        iova.raw() & !(self.pool.page_bytes() as u64 - 1)
    }

    /// A page was allocated: it has no other owner.
    fn new_page(&mut self, iova: Iova) -> Checked {
        if self.open == Some(iova.raw()) {
            // All its fragments are back, and it is the last: nothing more is cut of it.
            prop_assert_eq!(self.pages.remove(&iova.raw()), Some(1));
            self.open = None;
            self.none_left()?;
            self.count.reopened();
        } else {
            self.count.taken();
        }
        prop_assert_eq!(self.start_of(iova), iova.raw());
        prop_assert!(self.pages.insert(iova.raw(), 1).is_none(), "allocated twice: {}", iova);
        Ok(())
    }

    fn page_back(&mut self, iova: u64, way: Way) {
        self.pages.remove(&iova);
        self.count.back(way);
    }

    fn alloc(&mut self, tag: u8) -> Checked {
        let Ok(page) = self.pool.alloc_for(self.tags[usize::from(tag)]) else { return self.none_left() };
        self.new_page(page.iova())?;
        prop_assert_eq!(page.memory().len(), self.pool.page_bytes());
        self.out.push(Thing::Page(page, tag));
        Ok(())
    }

    fn alloc_raw(&mut self, tag: u8) -> Checked {
        let Ok(page) = self.pool.alloc_raw_for(self.tags[usize::from(tag)]) else { return self.none_left() };
        self.new_page(page.iova())?;
        self.freed.retain(|freed| freed.iova() != page.iova());
        self.out.push(Thing::Raw(page, tag));
        Ok(())
    }

    /// The heap has no page more: it was looked for everywhere.
    fn none_left(&mut self) -> Checked {
        self.count.counts.empty += 1;
        let count = &self.count;
        prop_assert_eq!((count.magazine, count.ring, count.below, count.fresh), (0, 0, 0, 0));
        prop_assert_eq!(count.total << count.order, HEAP as u64 / 4096);
        let idle = self.open.is_some_and(|open| self.pages[&open] == 1);
        prop_assert!(!idle, "the open page has no fragments");
        Ok(())
    }

    fn fragment(&mut self, len: usize) -> Checked {
        let Ok(fragment) = self.pool.alloc_fragment(len) else { return self.none_left() };
        let start = self.start_of(fragment.iova());
        if fragment.iova().raw() == start {
            self.new_page(Iova::new(start))?;
            if let Some(open) = self.open.replace(start) {
                self.share_back(open, Way::Consumer);
            }
        }
        let end = fragment.iova().raw() + fragment.memory().len() as u64;
        prop_assert!(
            fragment.iova().raw().is_multiple_of(64) && end <= start + self.pool.page_bytes() as u64
        );
        let overlaps = self.out.iter().any(|thing| match thing {
            Thing::Fragment(other) => {
                let from = other.iova().raw();
                from < end && fragment.iova().raw() < from + other.memory().len() as u64
            }
            _ => false,
        });
        prop_assert!(!overlaps);
        *self.pages.get_mut(&start).unwrap() += 1;
        self.out.push(Thing::Fragment(fragment));
        Ok(())
    }

    fn share_back(&mut self, start: u64, way: Way) {
        let shares = self.pages.get_mut(&start).unwrap();
        *shares -= 1;
        if *shares == 0 {
            self.page_back(start, way);
        }
    }

    fn free(&mut self, at: Index, way: Way) -> Checked {
        if self.out.is_empty() { Ok(()) } else { self.take_back(at.index(self.out.len()), way) }
    }

    pub(super) fn take_back(&mut self, at: usize, way: Way) -> Checked {
        match (self.out.swap_remove(at), way) {
            (Thing::Page(page, _), way) => {
                self.page_back(page.iova().raw(), way);
                match way {
                    Way::Consumer => self.pool.recycle(page),
                    Way::Remote => drop(page),
                }
            }
            (Thing::Raw(page, _), way) => {
                self.page_back(page.iova().raw(), way);
                prop_assert_eq!(self.free_raw(page, way), Ok(()));
                self.freed.push(page);
            }
            (Thing::Fragment(fragment), way) => {
                self.share_back(self.start_of(fragment.iova()), way);
                match way {
                    Way::Consumer => self.pool.recycle_fragment(fragment),
                    Way::Remote => drop(fragment),
                }
            }
        }
        Ok(())
    }

    fn free_raw(&mut self, page: RawPage, way: Way) -> Result<(), FreeError> {
        match way {
            Way::Consumer => self.pool.free_raw(page),
            Way::Remote => self.remote.free_raw(page),
        }
    }

    fn fill(&mut self, n: usize, raw: bool) -> Checked {
        // Every third slot is full already.
        let held = self.pool.alloc_raw().ok();
        if let Some(held) = held {
            self.new_page(held.iova())?;
            self.freed.retain(|freed| freed.iova() != held.iova());
            self.out.push(Thing::Raw(held, 0));
        } else {
            self.none_left()?;
        }
        if raw {
            let mut slots: Vec<_> = (0..n).map(|i| held.filter(|_| i % 3 == 0)).collect();
            let full = self.pool.fill_raw(&mut slots);
            prop_assert_eq!(full, slots.iter().flatten().count());
            for (i, slot) in slots.into_iter().enumerate() {
                match slot {
                    Some(page) if held.is_some() && i % 3 == 0 => prop_assert_eq!(Some(page), held),
                    Some(page) => {
                        self.new_page(page.iova())?;
                        self.freed.retain(|freed| freed.iova() != page.iova());
                        self.out.push(Thing::Raw(page, 0));
                    }
                    None => self.none_left()?,
                }
            }
        } else {
            let mut slots: Vec<_> = (0..n).map(|_| None).collect();
            let full = self.pool.fill(&mut slots);
            prop_assert_eq!(full, slots.iter().flatten().count());
            for slot in slots {
                let Some(page) = slot else {
                    self.none_left()?;
                    continue;
                };
                self.new_page(page.iova())?;
                self.out.push(Thing::Page(page, 0));
            }
        }
        Ok(())
    }

    fn free_many(&mut self, n: usize, raw: bool) -> Checked {
        let (mut pages, mut raws, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for thing in self.out.drain(..) {
            match thing {
                Thing::Page(page, _) if !raw && pages.len() < n => pages.push(page),
                Thing::Raw(page, _) if raw && raws.len() < n => raws.push(page),
                other => kept.push(other),
            }
        }
        self.out = kept;
        let iovas = pages.iter().map(Page::iova).chain(raws.iter().map(RawPage::iova));
        iovas.collect::<Vec<_>>().into_iter().for_each(|iova| self.page_back(iova.raw(), Way::Remote));
        self.remote.recycle_all(pages);
        prop_assert_eq!(self.remote.free_bulk(&raws), Ok(()));
        self.freed.extend(raws);
        Ok(())
    }

    fn wrong(&mut self, page: RawPage, way: Way) -> Checked {
        let right = self.out.iter().any(|thing| matches!(thing, Thing::Raw(raw, _) if *raw == page));
        if !right {
            prop_assert!(self.free_raw(page, way).is_err());
        }
        Ok(())
    }

    pub(super) fn step(&mut self, step: Step) -> Checked {
        match step {
            Step::Alloc(tag) => self.alloc(tag),
            Step::AllocRaw(tag) => self.alloc_raw(tag),
            Step::Fragment(len) => self.fragment(len),
            Step::Free(at, way) => self.free(at, way),
            Step::Fill(n, raw) => self.fill(n, raw),
            Step::FreeMany(n, raw) => self.free_many(n, raw),
            Step::DoubleFree(at, way) if !self.freed.is_empty() => {
                self.wrong(self.freed[at.index(self.freed.len())], way)
            }
            Step::Crooked(at, by, way) if !self.out.is_empty() => {
                let Thing::Raw(page, _) = self.out[at.index(self.out.len())] else { return Ok(()) };
                let ptr = NonNull::new(page.as_ptr().as_ptr().wrapping_offset(by)).unwrap();
                self.wrong(
                    RawPage::from_parts(ptr, Iova::new(page.iova().raw().wrapping_add_signed(by as i64))),
                    way,
                )?;
                self.wrong(RawPage::from_parts(ptr, page.iova()), way)
            }
            Step::Tag(at, new) if !self.out.is_empty() => {
                let at = at.index(self.out.len());
                if let Thing::Page(page, tag) = &mut self.out[at] {
                    page.tag(self.tags[usize::from(new)]);
                    *tag = new;
                }
                Ok(())
            }
            Step::DoubleFree(..) | Step::Crooked(..) | Step::Tag(..) => Ok(()),
        }
    }

    pub(super) fn check(&self) -> Checked {
        let (stats, count) = (self.pool.stats(), &self.count);
        prop_assert_eq!((stats.in_use, stats.pages), (self.pages.len() as u64, count.total));
        prop_assert_eq!((stats.in_magazine, stats.in_ring), (count.magazine, count.ring));
        prop_assert_eq!(stats.below, count.below + count.fresh);
        prop_assert_eq!(self.pool.counts(), count.counts);
        Ok(())
    }

    /// By name, how many pages the model says are held. `open`: also the one of which nothing more is cut after the end.
    pub(super) fn holders(&self) -> BTreeMap<Option<String>, u64> {
        let mut held: BTreeMap<u64, u8> = self.pages.keys().map(|&start| (start, 0)).collect();
        for thing in &self.out {
            let _ = match thing {
                Thing::Page(page, tag) => held.insert(page.iova().raw(), *tag),
                Thing::Raw(page, tag) => held.insert(page.iova().raw(), *tag),
                Thing::Fragment(_) => None,
            };
        }
        let mut names = BTreeMap::new();
        for tag in held.into_values() {
            let name = [None, Some("one"), Some("two")][usize::from(tag)];
            *names.entry(name.map(str::to_owned)).or_default() += 1;
        }
        names
    }
}
