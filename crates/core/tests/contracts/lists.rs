//! [`ListPages`] and [`ListPage`] of a source that is no pool, which hold the lists of a command to
//! every sentence of their pages: pages of one's own memory, with addresses that are far apart, are
//! freed once or quarantined once, each to the source that it came from, and read until then.

use pinfold_core::addr::{Iova, Segment};
use pinfold_core::gather::prp::{ControllerPage, ListPage, ListPages, Prps};
use pinfold_core::gather::sgl::{Kind, Sgl};
use pinfold_core::gather::{LayoutError, Profile};
use pinfold_core::mem::DmaMemory;
use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::rc::Rc;

/// What became of the pages that were taken, by address.
#[derive(Default)]
struct Record {
    taken: u64,
    out: BTreeMap<Iova, NonNull<u8>>,
    quarantined: Vec<Iova>,
}

/// A page from the heap.
pub(super) struct Page {
    iova: Iova,
    base: NonNull<u8>,
    layout: Layout,
    record: Rc<RefCell<Record>>,
}

impl ListPage for Page {
    fn iova(&self) -> Iova {
        self.iova
    }
    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: the page's own memory, freed by `Pages::give` alone, which consumes it.
        unsafe { DmaMemory::from_raw(self.base, self.layout.size()) }
    }
    fn quarantine(self) {
        self.record.borrow_mut().quarantined.push(self.iova);
    }
}

/// Pages of `layout`, each 1 TiB from the last and `offset` from a multiple of that, at most `limit`
/// at a time.
pub(super) struct Pages {
    layout: Layout,
    limit: u64,
    offset: u64,
    record: Rc<RefCell<Record>>,
}

/// More pages than there are.
#[derive(Debug, PartialEq)]
pub(super) struct Used(u64);

impl ListPages for Pages {
    type Page = Page;
    type TakeError = Used;

    fn take(&mut self) -> Result<Page, Used> {
        let mut record = self.record.borrow_mut();
        if record.out.len() as u64 == self.limit {
            return Err(Used(self.limit));
        }
        record.taken += 1;
        let iova = Iova::new((record.taken << 40) + self.offset);
        // SAFETY: a page is not empty.
        let base = NonNull::new(unsafe { std::alloc::alloc(self.layout) }).unwrap();
        record.out.insert(iova, base);
        Ok(Page { iova, base, layout: self.layout, record: Rc::clone(&self.record) })
    }

    fn give(&mut self, page: Page) {
        assert!(Rc::ptr_eq(&page.record, &self.record), "of another source");
        let base = self.record.borrow_mut().out.remove(&page.iova);
        assert_eq!(base, Some(page.base), "given twice, or never taken");
        // SAFETY: of `take`, with this layout, and recorded once.
        unsafe { std::alloc::dealloc(page.base.as_ptr(), page.layout) };
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for base in self.record.borrow().out.values() {
            // SAFETY: of `take`, and not given back; nothing reads it any more.
            unsafe { std::alloc::dealloc(base.as_ptr(), self.layout) };
        }
    }
}

impl Pages {
    pub(super) fn new(size: usize, align: usize, limit: u64) -> Self {
        let layout = Layout::from_size_align(size, align).unwrap();
        Self { layout, limit, offset: 0, record: Rc::default() }
    }

    /// A word of the page at `iova`, as the controller reads it.
    fn word(&self, iova: Iova, at: usize) -> u64 {
        let base = self.record.borrow().out[&iova];
        // SAFETY: a page that was taken, and not given back.
        let memory = unsafe { DmaMemory::from_raw(base, self.layout.size()) };
        u64::from_le(memory.read_u64(at * 8).unwrap())
    }

    /// Returns how many pages were taken, how many of them are out, and how many are quarantined.
    pub(super) fn counts(&self) -> (u64, usize, usize) {
        let record = self.record.borrow();
        (record.taken, record.out.len(), record.quarantined.len())
    }
}

/// `count` pages of data, every second one: no two are adjacent.
fn scattered(count: u64) -> impl Iterator<Item = Segment> {
    (0..count).map(|i| Segment { iova: Iova::new(i << 13), len: 4096 })
}

/// The pages that a controller finds from PRP1 and PRP2.
fn walk_prps(pages: &Pages, prps: &Prps<Page>) -> Vec<u64> {
    let mut found = vec![prps.prp1()];
    let mut rest = prps.entries() - 1;
    let mut list = Iova::new(prps.prp2());
    while rest > 0 {
        let here = rest.min(512);
        let chains = rest > 512;
        let entries =
            (0..here - u64::from(chains)).map(|at| pages.word(list, usize::try_from(at).unwrap()));
        found.extend(entries);
        rest = prps.entries() - found.len() as u64;
        if chains {
            list = Iova::new(pages.word(list, 511));
        }
    }
    found
}

/// The `count` data blocks that a controller finds from SGL1.
pub(super) fn walk_sgl(pages: &Pages, sgl: &Sgl<Page>, count: usize) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let first = sgl.sgl1();
    if first.kind() == Kind::DataBlock {
        return vec![(first.iova().raw(), first.len().into())];
    }
    let mut array = (first.iova(), first.len() as usize / 16);
    while found.len() < count {
        let (iova, len) = array;
        for at in 0..len {
            let (address, word) = (pages.word(iova, at * 2), pages.word(iova, at * 2 + 1));
            match word >> 60 {
                0 => found.push((address, word & 0xffff_ffff)),
                _ => array = (Iova::new(address), (word & 0xffff_ffff) as usize / 16),
            }
        }
    }
    found
}

#[test]
fn a_prp_list_is_read_in_pages_of_any_source_until_they_are_given_back() {
    let mut pages = Pages::new(4096, 4096, 8);
    for count in [3, 513, 514, 1024, 1025, 2000] {
        let before = pages.counts().0;
        let prps = Prps::new(ControllerPage::SIZE_4K, scattered(count), &mut pages).unwrap();
        let expected: Vec<_> = (0..count).map(|i| i << 13).collect();
        assert_eq!(walk_prps(&pages, &prps), expected);
        let (taken, out, _) = pages.counts();
        assert_eq!((taken - before, out), (prps.list_pages() as u64, prps.list_pages()));
        prps.release(&mut pages);
        assert_eq!(pages.counts().1, 0);
    }
    assert_eq!(pages.counts().2, 0);
}

#[test]
fn an_sgl_is_read_in_pages_of_any_size_until_they_are_given_back() {
    // The least that a page has.
    for size in [32, 48, 4096] {
        let mut pages = Pages::new(size, 8, 8);
        let profile = Profile::new(u32::MAX, u64::MAX, 0, 1).unwrap();
        let sgl = Sgl::<_, 8>::new(&profile, scattered(5), &mut pages).unwrap();
        let found = walk_sgl(&pages, &sgl, 5);
        assert_eq!(found, (0..5).map(|i| (i << 13, 4096)).collect::<Vec<_>>());
        assert_eq!(pages.counts().1, sgl.list_pages());
        sgl.release(&mut pages);
        assert_eq!((pages.counts().1, pages.counts().2), (0, 0));
    }
}

#[test]
fn the_error_of_a_source_is_passed_on_and_what_was_taken_is_given_back() {
    let mut pages = Pages::new(4096, 4096, 2);
    let refused = Prps::<_, 8>::new(ControllerPage::SIZE_4K, scattered(2000), &mut pages);
    assert!(matches!(refused, Err(LayoutError::Take(Used(2)))));
    assert_eq!(pages.counts(), (2, 0, 0));
    // More than the command has room for.
    pages.limit = 8;
    let refused = Prps::<_, 2>::new(ControllerPage::SIZE_4K, scattered(2000), &mut pages);
    assert!(matches!(refused, Err(LayoutError::TooLong { limit: 2 })));
    assert_eq!(pages.counts(), (4, 0, 0));
    let profile = Profile::new(u32::MAX, u64::MAX, 0, 1).unwrap();
    pages.limit = 1;
    let refused = Sgl::<_, 8>::new(&profile, scattered(2000), &mut pages);
    assert!(matches!(refused, Err(LayoutError::Take(Used(1)))));
    assert_eq!(pages.counts(), (5, 0, 0));
}

#[test]
fn a_page_that_is_shorter_or_aligned_less_is_refused_and_given_back() {
    let profile = Profile::new(u32::MAX, u64::MAX, 0, 1).unwrap();
    for (size, offset, of_prps) in
        [(2048, 0, true), (4096, 2048, true), (16, 0, false), (32, 4, false)]
    {
        let mut pages = Pages::new(size, 4096, 8);
        pages.offset = offset;
        let error = if of_prps {
            Prps::<_, 8>::new(ControllerPage::SIZE_4K, scattered(3), &mut pages).err()
        } else {
            Sgl::<_, 8>::new(&profile, scattered(3), &mut pages).err()
        };
        assert!(matches!(error, Some(LayoutError::ListPage { bytes, .. }) if bytes == size));
        assert_eq!(pages.counts(), (1, 0, 0));
    }
}

/// A command that may still be in flight: its pages are not given back, and stay as they are.
#[test]
fn pages_of_a_command_that_is_dropped_are_quarantined_once() {
    let mut pages = Pages::new(4096, 4096, 8);
    let prps = Prps::<_, 8>::new(ControllerPage::SIZE_4K, scattered(1025), &mut pages).unwrap();
    let (list, before) = (Iova::new(prps.prp2()), prps.list_pages());
    drop(prps);
    assert_eq!(pages.counts(), (3, 3, before));
    assert_eq!(pages.word(list, 0), 1 << 13);
    let profile = Profile::new(u32::MAX, u64::MAX, 0, 1).unwrap();
    drop(Sgl::<_, 8>::new(&profile, scattered(5), &mut pages).unwrap());
    assert_eq!(pages.counts(), (4, 4, before + 1));
    let mut all = pages.record.borrow().quarantined.clone();
    all.dedup();
    assert_eq!(all.len(), 4);
}
