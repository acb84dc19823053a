//! The pool against a list of the pages in use, and counters that are computed from the documented
//! rules alone.

use super::*;
use proptest::prelude::*;
use proptest::sample::Index;

/// The size of the heap in bytes.
const HEAP: usize = 16 << 20;

/// Through which handle a page or a fragment is freed.
#[derive(Clone, Copy, Debug)]
enum FreeBy {
    Consumer,
    Remote,
}

#[derive(Clone, Debug)]
enum Step {
    Alloc(u8),
    AllocRaw(u8),
    Fragment(usize),
    Free(Index, FreeBy),
    Fill(usize, bool),
    /// Frees so many pages, raw or not, at once through a `Remote`.
    FreeMany(usize, bool),
    DoubleFree(Index, FreeBy),
    WrongFree(Index, isize, FreeBy),
    Tag(Index, u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = || any::<Index>();
    let by = || prop_oneof![Just(FreeBy::Consumer), Just(FreeBy::Remote)];
    let step = prop_oneof![
        6 => (0u8..3).prop_map(Step::Alloc),
        4 => (0u8..3).prop_map(Step::AllocRaw),
        4 => (1usize..3000).prop_map(Step::Fragment),
        10 => (index(), by()).prop_map(|(at, by)| Step::Free(at, by)),
        2 => (1usize..200, any::<bool>()).prop_map(|(n, raw)| Step::Fill(n, raw)),
        2 => (1usize..200, any::<bool>()).prop_map(|(n, raw)| Step::FreeMany(n, raw)),
        1 => (index(), by()).prop_map(|(at, by)| Step::DoubleFree(at, by)),
        1 => (index(), -9000isize..9000, by()).prop_map(|(at, offset, by)| Step::WrongFree(at, offset, by)),
        1 => (index(), 0u8..3).prop_map(|(at, tag)| Step::Tag(at, tag)),
    ];
    prop::collection::vec((step, 1usize..60), 50).prop_map(|runs| {
        runs.into_iter().flat_map(|(step, n)| std::iter::repeat_n(step, n)).collect()
    })
}

fn by_name(holders: Vec<Holder>) -> BTreeMap<Option<String>, u64> {
    holders.into_iter().map(|holder| (holder.name, holder.pages)).collect()
}

proptest! {
    // About 1,500 steps per case.
    #![proptest_config(ProptestConfig { cases: crate::testing::cases(80), max_shrink_iters: 500, ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_a_list_of_pages_in_use(
        steps in steps(), order in 0u8..3, ring in 0u32..10, keep in any::<bool>(), destroy in any::<bool>(),
        limit in prop_oneof![Just(u64::MAX), 1u64..900],
    ) {
        let heap = Heap::new(HEAP);
        let mut harness = Harness::new(&heap, Order::new(order).unwrap(), 1 << ring, limit);
        for (number, step) in steps.into_iter().enumerate() {
            harness.step(step)?;
            if number % 16 == 0 {
                harness.check()?;
            }
        }
        harness.check()?;
        while !keep && !harness.in_use.is_empty() {
            harness.free_at(0, FreeBy::Remote)?;
        }
        if let Some(open) = harness.open.take() {
            // Taking the pool down closes the open page.
            let cut = harness.in_use.iter().any(|held| {
                matches!(held, Held::Fragment(fragment) if harness.start_of(fragment.iova()) == open)
            });
            if !cut {
                harness.pages.remove(&open);
            }
        }
        let expected = harness.holders();
        let held: u64 = expected.values().sum();
        let Harness { pool, remote, in_use, .. } = harness;
        let end = if destroy { pool.destroy() } else { pool.close() };
        prop_assert_eq!(by_name(end.holders()), expected);
        prop_assert_eq!(end.pages_out(), held);
        prop_assert_eq!(heap.count(if destroy { Use::Mapped } else { Use::Hidden }), 0);
        // Pages freed late are released; a second free is an error.
        for held in in_use {
            if let Held::Raw(page, _) = held {
                prop_assert_eq!(remote.free_raw(page), Ok(()));
                prop_assert!(remote.free_raw(page).is_err());
            }
        }
        prop_assert_eq!((end.pages_out(), end.counts().released_refcnt), (0, held));
        prop_assert_eq!(heap.count(Use::Free), HEAP / 4096);
        drop((end, remote));
        prop_assert_eq!(heap.handles(), 1, "the shared state is freed");
    }
}

/// The number of pages in the magazine, the ring, the spill list and the fresh rest of a chunk, and
/// the counters.
struct Expected {
    magazine: u64,
    ring: u64,
    spill: u64,
    fresh: u64,
    capacity: u64,
    order: u8,
    /// All pages.
    total: u64,
    /// The most pages in use, and the number of failures because of it.
    limit: u64,
    limited: u64,
    counts: Counts,
}

impl Expected {
    /// A page is allocated.
    fn alloc(&mut self) {
        if self.magazine > 0 {
            self.magazine -= 1;
            self.counts.fast += 1;
            return;
        }
        if self.ring > 0 {
            let refill = self.ring.min(64);
            self.ring -= refill;
            self.magazine = refill - 1;
            self.counts.refill += 1;
            return;
        }
        if self.spill + self.fresh == 0 {
            // 64 pages, or as many as there are already (a power of two), and no more than 2 MiB.
            let left = (self.limit - self.total).min(512).next_power_of_two();
            self.fresh = self.total.max(64).min(left).min(512 >> self.order);
            self.total += self.fresh;
        }
        let left = self.limit - (self.total - self.fresh);
        let (from, most) =
            if self.spill > 0 { (&mut self.spill, 64) } else { (&mut self.fresh, left.min(64)) };
        let refill = (*from).min(most);
        *from -= refill;
        self.magazine = refill - 1;
        self.counts.empty += 1;
        self.slow();
    }

    /// The idle open page is allocated; `empty` has been counted.
    fn alloc_open(&mut self) {
        self.counts.cached += 1;
        self.slow();
    }

    fn slow(&mut self) {
        *(if self.order > 0 { &mut self.counts.slow_high_order } else { &mut self.counts.slow }) +=
            1;
    }

    fn put_in_ring(&mut self, pages: u64) {
        let room = pages.min(self.capacity - self.ring);
        self.ring += room;
        self.counts.ring += room;
        self.spill += pages - room;
        self.counts.ring_full += pages - room;
    }

    /// A page is freed.
    fn free(&mut self, by: FreeBy) {
        match by {
            FreeBy::Remote => self.put_in_ring(1),
            FreeBy::Consumer => {
                self.counts.cached += 1;
                if self.magazine == 128 {
                    self.counts.cache_full += 1;
                    self.magazine -= 64;
                    self.put_in_ring(64);
                }
                self.magazine += 1;
            }
        }
    }
}

/// A page that a test holds, with its tag.
enum Held {
    Page(Page, u8),
    Raw(RawPage, u8),
    Fragment(Fragment),
}

/// A pool and its model.
struct Harness {
    pool: PagePool,
    remote: Remote,
    tags: [Tag; 3],
    in_use: Vec<Held>,
    /// The number of shares of each page in use: 1, or its fragments; the open page has one more.
    pages: BTreeMap<u64, usize>,
    /// The page that fragments are being cut from.
    open: Option<u64>,
    /// Raw pages that were freed and not allocated raw again.
    freed: Vec<RawPage>,
    expected: Expected,
}

type Checked = Result<(), TestCaseError>;

impl Harness {
    fn new(heap: &Heap, order: Order, ring: u32, max_in_use: u64) -> Self {
        let pool = heap.pool(Config { order, ring, max_in_use, ..Config::default() });
        let expected = Expected {
            magazine: 0,
            ring: 0,
            spill: 0,
            fresh: 0,
            capacity: u64::from(ring),
            order: order.get(),
            total: 0,
            limit: max_in_use,
            limited: 0,
            counts: Counts::default(),
        };
        Self {
            remote: pool.remote(),
            tags: [Tag::NONE, pool.tag("one").unwrap(), pool.tag("two").unwrap()],
            pool,
            in_use: Vec::new(),
            pages: BTreeMap::new(),
            open: None,
            freed: Vec::new(),
            expected,
        }
    }

    fn start_of(&self, iova: Iova) -> u64 {
        iova.raw() & !(self.pool.page_bytes() as u64 - 1)
    }

    /// A page was allocated: checks that it has no other owner.
    fn new_page(&mut self, iova: Iova) -> Checked {
        if self.open == Some(iova.raw()) {
            // The open page, idle, is the last free one: no more is cut from it.
            prop_assert_eq!(self.pages.remove(&iova.raw()), Some(1));
            self.open = None;
            let limited = self.expected.limited;
            self.none_left()?;
            self.expected.limited = limited;
            self.expected.alloc_open();
        } else {
            self.expected.alloc();
        }
        prop_assert_eq!(self.start_of(iova), iova.raw());
        prop_assert!(self.pages.insert(iova.raw(), 1).is_none(), "allocated twice: {}", iova);
        Ok(())
    }

    fn page_freed(&mut self, iova: u64, by: FreeBy) {
        self.pages.remove(&iova);
        self.expected.free(by);
    }

    fn alloc(&mut self, tag: u8) -> Checked {
        let Ok(page) = self.pool.alloc_for(self.tags[usize::from(tag)]) else {
            return self.none_left();
        };
        self.new_page(page.iova())?;
        prop_assert_eq!(page.memory().len(), self.pool.page_bytes());
        self.in_use.push(Held::Page(page, tag));
        Ok(())
    }

    fn alloc_raw(&mut self, tag: u8) -> Checked {
        let Ok(page) = self.pool.alloc_raw_for(self.tags[usize::from(tag)]) else {
            return self.none_left();
        };
        self.new_page(page.iova())?;
        self.freed.retain(|freed| freed.iova() != page.iova());
        self.in_use.push(Held::Raw(page, tag));
        Ok(())
    }

    /// An allocation failed: checks that the heap has no free page.
    fn none_left(&mut self) -> Checked {
        self.expected.counts.empty += 1;
        let expected = &mut self.expected;
        prop_assert_eq!((expected.magazine, expected.ring, expected.spill), (0, 0, 0));
        if expected.total - expected.fresh == expected.limit {
            expected.limited += 1;
        } else {
            prop_assert_eq!(
                (expected.fresh, expected.total << expected.order),
                (0, HEAP as u64 / 4096)
            );
        }
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
                self.share_freed(open, FreeBy::Consumer);
            }
        }
        let end = fragment.iova().raw() + fragment.memory().len() as u64;
        prop_assert!(
            fragment.iova().raw().is_multiple_of(64)
                && end <= start + self.pool.page_bytes() as u64
        );
        let overlaps = self.in_use.iter().any(|held| match held {
            Held::Fragment(other) => {
                let from = other.iova().raw();
                from < end && fragment.iova().raw() < from + other.memory().len() as u64
            }
            _ => false,
        });
        prop_assert!(!overlaps);
        *self.pages.get_mut(&start).unwrap() += 1;
        self.in_use.push(Held::Fragment(fragment));
        Ok(())
    }

    fn share_freed(&mut self, start: u64, by: FreeBy) {
        let shares = self.pages.get_mut(&start).unwrap();
        *shares -= 1;
        if *shares == 0 {
            self.page_freed(start, by);
        }
    }

    fn free(&mut self, at: Index, by: FreeBy) -> Checked {
        if self.in_use.is_empty() { Ok(()) } else { self.free_at(at.index(self.in_use.len()), by) }
    }

    fn free_at(&mut self, at: usize, by: FreeBy) -> Checked {
        match (self.in_use.swap_remove(at), by) {
            (Held::Page(page, _), by) => {
                self.page_freed(page.iova().raw(), by);
                match by {
                    FreeBy::Consumer => self.pool.recycle(page),
                    FreeBy::Remote => drop(page),
                }
            }
            (Held::Raw(page, _), by) => {
                self.page_freed(page.iova().raw(), by);
                prop_assert_eq!(self.free_raw(page, by), Ok(()));
                self.freed.push(page);
            }
            (Held::Fragment(fragment), by) => {
                self.share_freed(self.start_of(fragment.iova()), by);
                match by {
                    FreeBy::Consumer => self.pool.recycle_fragment(fragment),
                    FreeBy::Remote => drop(fragment),
                }
            }
        }
        Ok(())
    }

    fn free_raw(&mut self, page: RawPage, by: FreeBy) -> Result<(), FreeError> {
        match by {
            FreeBy::Consumer => self.pool.free_raw(page),
            FreeBy::Remote => self.remote.free_raw(page),
        }
    }

    fn fill(&mut self, n: usize, raw: bool) -> Checked {
        // Every third slot of an array of raw pages is already full.
        let held = self.pool.alloc_raw().ok();
        if let Some(held) = held {
            self.new_page(held.iova())?;
            self.freed.retain(|freed| freed.iova() != held.iova());
            self.in_use.push(Held::Raw(held, 0));
        } else {
            self.none_left()?;
        }
        if raw {
            let mut slots: Vec<_> = (0..n).map(|i| held.filter(|_| i % 3 == 0)).collect();
            let full = self.pool.fill_raw(&mut slots);
            prop_assert_eq!(full, slots.iter().flatten().count());
            // It asks for no further page after the first that there was not.
            let first_empty = slots.iter().position(Option::is_none);
            for (i, slot) in slots.into_iter().enumerate() {
                match slot {
                    Some(page) if held.is_some() && i % 3 == 0 => prop_assert_eq!(Some(page), held),
                    Some(page) => {
                        self.new_page(page.iova())?;
                        self.freed.retain(|freed| freed.iova() != page.iova());
                        self.in_use.push(Held::Raw(page, 0));
                    }
                    None if first_empty == Some(i) => self.none_left()?,
                    None => {}
                }
            }
        } else {
            let mut slots: Vec<_> = (0..n).map(|_| None).collect();
            let full = self.pool.fill(&mut slots);
            prop_assert_eq!(full, slots.iter().flatten().count());
            prop_assert!(slots.iter().skip(full).all(Option::is_none));
            for page in slots.into_iter().flatten() {
                self.new_page(page.iova())?;
                self.in_use.push(Held::Page(page, 0));
            }
            if full < n {
                self.none_left()?;
            }
        }
        Ok(())
    }

    fn free_many(&mut self, n: usize, raw: bool) -> Checked {
        let (mut pages, mut raws, mut rest) = (Vec::new(), Vec::new(), Vec::new());
        for held in self.in_use.drain(..) {
            match held {
                Held::Page(page, _) if !raw && pages.len() < n => pages.push(page),
                Held::Raw(page, _) if raw && raws.len() < n => raws.push(page),
                other => rest.push(other),
            }
        }
        self.in_use = rest;
        let iovas = pages.iter().map(Page::iova).chain(raws.iter().map(RawPage::iova));
        iovas
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|iova| self.page_freed(iova.raw(), FreeBy::Remote));
        self.remote.recycle_all(pages);
        for raw in &raws {
            prop_assert_eq!(self.remote.free_raw(*raw), Ok(()));
        }
        self.freed.extend(raws);
        Ok(())
    }

    fn wrong_free(&mut self, page: RawPage, by: FreeBy) -> Checked {
        let valid =
            self.in_use.iter().any(|held| matches!(held, Held::Raw(raw, _) if *raw == page));
        if !valid {
            prop_assert!(self.free_raw(page, by).is_err());
        }
        Ok(())
    }

    fn step(&mut self, step: Step) -> Checked {
        match step {
            Step::Alloc(tag) => self.alloc(tag),
            Step::AllocRaw(tag) => self.alloc_raw(tag),
            Step::Fragment(len) => self.fragment(len),
            Step::Free(at, by) => self.free(at, by),
            Step::Fill(n, raw) => self.fill(n, raw),
            Step::FreeMany(n, raw) => self.free_many(n, raw),
            Step::DoubleFree(at, by) if !self.freed.is_empty() => {
                self.wrong_free(self.freed[at.index(self.freed.len())], by)
            }
            Step::WrongFree(at, offset, by) if !self.in_use.is_empty() => {
                let Held::Raw(page, _) = self.in_use[at.index(self.in_use.len())] else {
                    return Ok(());
                };
                let ptr = NonNull::new(page.as_ptr().as_ptr().wrapping_offset(offset)).unwrap();
                self.wrong_free(
                    RawPage::from_parts(
                        ptr,
                        Iova::new(page.iova().raw().wrapping_add_signed(offset as i64)),
                    ),
                    by,
                )?;
                self.wrong_free(RawPage::from_parts(ptr, page.iova()), by)
            }
            Step::Tag(at, new) if !self.in_use.is_empty() => {
                let at = at.index(self.in_use.len());
                if let Held::Page(page, tag) = &mut self.in_use[at] {
                    page.tag(self.tags[usize::from(new)]);
                    *tag = new;
                }
                Ok(())
            }
            Step::DoubleFree(..) | Step::WrongFree(..) | Step::Tag(..) => Ok(()),
        }
    }

    fn check(&self) -> Checked {
        let (stats, expected) = (self.pool.stats(), &self.expected);
        prop_assert_eq!((stats.in_use, stats.pages), (self.pages.len() as u64, expected.total));
        prop_assert!(stats.in_use <= expected.limit && stats.limited == expected.limited);
        prop_assert_eq!((stats.in_magazine, stats.in_ring), (expected.magazine, expected.ring));
        prop_assert_eq!(stats.below, expected.spill + expected.fresh);
        prop_assert_eq!(self.pool.counts(), expected.counts);
        Ok(())
    }

    /// Returns how many pages each named holder holds according to the model.
    fn holders(&self) -> BTreeMap<Option<String>, u64> {
        let mut tags: BTreeMap<u64, u8> = self.pages.keys().map(|&start| (start, 0)).collect();
        for held in &self.in_use {
            let _ = match held {
                Held::Page(page, tag) => tags.insert(page.iova().raw(), *tag),
                Held::Raw(page, tag) => tags.insert(page.iova().raw(), *tag),
                Held::Fragment(_) => None,
            };
        }
        let mut names = BTreeMap::new();
        for tag in tags.into_values() {
            let name = [None, Some("one"), Some("two")][usize::from(tag)];
            *names.entry(name.map(str::to_owned)).or_default() += 1;
        }
        names
    }
}
