//! [`Region`]: memory that a C program passes by address, an arena or a registration; its
//! allocations; and [`Span`], a part of one that a device uses.
//!
//! A Rust program cannot free a buffer that a mapping or a request has; a C program passes an
//! address and keeps it. So each 4096 bytes of an arena have a word that says to which allocation
//! they belong, and an allocation counts the mappings and requests that use it: `pf_free` refuses
//! one that is in use, or that was freed before.

use crate::failure::{self, Failure, fail};
use pinfold::core::dma_pool::ChunkSource;
use pinfold::core::domain::DomainId;
use pinfold::{Arena, ArenaMemory, DmaMemory, Iova, OwnedPiece, Pinned};
use std::alloc::Layout;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

pub(crate) const PAGE: usize = 4096;

/// The owner that keeps the memory valid.
#[expect(dead_code, reason = "held, and dropped with the region")]
enum Keep {
    /// An arena.
    Arena(ArenaMemory),
    /// Memory that the program registered.
    Registered(OwnedPiece),
}

/// Memory with an address in this process, in any number of domains.
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    #[expect(dead_code, reason = "held, and dropped with the region")]
    keep: Keep,
    places: Places,
    /// The address at which the memory of its pools is mapped for as long as they have it, counted
    /// from its start.
    pools_at: Option<(DomainId, Iova)>,
    /// Mappings and requests that use any of it, without those that the words of allocations count.
    uses: AtomicU64,
    /// Pools, handles and controllers that allocate from it.
    holders: Arc<AtomicU64>,
    /// The allocation state of its pages; empty for a registration.
    pages: Box<[AtomicU64]>,
}

// SAFETY: the pointer is that of memory which `keep` holds; it is accessed as `DmaMemory` only.
unsafe impl Send for Region {}
// SAFETY: as for `Send`.
unsafe impl Sync for Region {}

/// The kinds of the word of a page: not allocated; the first page of an allocation, with its number
/// of pages and of uses; a later page, with its distance from the first; or a page that a pool cuts
/// into blocks, with its own number of uses.
const KIND_BITS: u64 = 3;
const FIRST: u64 = 1;
const LATER: u64 = 2;
const POOL: u64 = 3;
const NUMBER_SHIFT: u32 = 2;
const NUMBER_BITS: u64 = (1 << 30) - 1;
const ONE_USE: u64 = 1 << 32;
/// An allocation of one page that nothing uses.
const ONE_PAGE: u64 = FIRST | 1 << NUMBER_SHIFT;

/// The number in a word: of pages, or the distance from the first page.
fn number(word: u64) -> usize {
    usize::try_from(word >> NUMBER_SHIFT & NUMBER_BITS).unwrap_or(0)
}

impl Region {
    /// Describes an arena's memory.
    ///
    /// # Errors
    /// `ENOMEM`: 8 bytes for each page are not available.
    pub(crate) fn arena(arena: &Arena) -> Result<Self, Failure> {
        let span = arena.span();
        let (base, len) = (span.cast(), span.len());
        let pages = zeroes(len / PAGE).ok_or_else(|| {
            let bytes = len / PAGE * size_of::<AtomicU64>();
            fail!(
                ENOMEM,
                "cannot allocate {bytes} bytes that describe an arena of {len}: raise RLIMIT_AS, or create a smaller \
                 arena"
            )
        })?;
        Ok(Self {
            base,
            len,
            keep: Keep::Arena(ArenaMemory::clone(arena)),
            places: Places::default(),
            pools_at: arena.domain().map(|domain| (domain, arena.iova())),
            uses: AtomicU64::new(0),
            holders: Arc::default(),
            pages,
        })
    }

    /// Describes memory that the program registered, with its places in these domains.
    pub(crate) fn registered(piece: OwnedPiece, domains: &[DomainId]) -> Self {
        let memory = Pinned::memory(&piece);
        let (base, len) = (memory.as_ptr(), memory.len());
        let places = Places::default();
        for (id, iova) in domains.iter().filter_map(|&id| Some((id, piece.fixed_iova(id)?))) {
            places.add(id, iova);
        }
        let keep = Keep::Registered(piece);
        Self {
            base,
            len,
            keep,
            places,
            pools_at: None,
            uses: AtomicU64::new(0),
            holders: Arc::default(),
            pages: Box::default(),
        }
    }

    #[inline(always)]
    pub(crate) fn addr(&self) -> usize {
        self.base.addr().get()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns a pointer to `addr`, an address of the region; to its end for one behind it.
    pub(crate) fn pointer(&self, addr: usize) -> NonNull<u8> {
        let at = addr.saturating_sub(self.addr()).min(self.len);
        // SAFETY: at most the end of the region, which is one allocation.
        unsafe { self.base.add(at) }
    }

    /// Records the address of the region in a domain.
    pub(crate) fn add_place(&self, domain: DomainId, iova: Iova) {
        self.places.add(domain, iova);
    }

    /// Returns the address of its start for the devices of the domain, if all of it is mapped.
    pub(crate) fn place(&self, domain: DomainId) -> Option<Iova> {
        self.places.find(domain)
    }

    /// Returns how many mappings and requests use any of it, without those that the words of
    /// allocations count.
    pub(crate) fn uses(&self) -> u64 {
        self.uses.load(Ordering::Acquire)
    }

    /// Returns how many pools, handles and controllers allocate from it.
    pub(crate) fn holders(&self) -> u64 {
        self.holders.load(Ordering::Acquire)
    }

    #[inline(always)]
    fn page(&self, addr: usize) -> Option<(usize, &AtomicU64)> {
        let page = addr.checked_sub(self.addr())? / PAGE;
        self.pages.get(page).map(|word| (page, word))
    }

    /// Marks memory that was allocated.
    #[inline]
    pub(crate) fn mark_allocated(&self, addr: usize, len: usize) {
        let Some((first, _)) = self.page(addr) else { return };
        let count = len / PAGE;
        // The first page last: until then nothing can be freed or used.
        for distance in (0..count).rev() {
            let word = match distance {
                0 => FIRST | (count as u64) << NUMBER_SHIFT,
                _ => LATER | (distance as u64) << NUMBER_SHIFT,
            };
            if let Some(page) = self.pages.get(first + distance) {
                page.store(word, Ordering::Release);
            }
        }
    }

    /// Marks an allocation of one page.
    #[inline(always)]
    pub(crate) fn mark_page(&self, addr: usize) {
        if let Some((_, page)) = self.page(addr) {
            page.store(ONE_PAGE, Ordering::Release);
        }
    }

    /// Marks memory that a pool has acquired.
    pub(crate) fn mark_pool(&self, addr: usize, len: usize) {
        self.pages_at(addr, len).for_each(|page| page.store(POOL, Ordering::Release));
    }

    /// Marks memory that a pool gives up; false, and nothing has changed, where a mapping or a
    /// request uses any of it.
    pub(crate) fn unmark_pool(&self, addr: usize, len: usize) -> bool {
        for (count, page) in self.pages_at(addr, len).enumerate() {
            // Acquire: what devices did with it comes before its next use.
            if page.compare_exchange(POOL, 0, Ordering::Acquire, Ordering::Relaxed).is_err() {
                self.mark_pool(addr, count * PAGE);
                return false;
            }
        }
        true
    }

    /// Refuses memory of a pool of which a mapping or a request uses a page that lies in it as a
    /// whole: a page that is in part another block's may be used for that.
    ///
    /// # Errors
    /// `EBUSY`.
    #[inline(always)]
    pub(crate) fn check_unused(&self, addr: usize, len: usize) -> Result<(), Failure> {
        if len < PAGE {
            return Ok(());
        }
        // No address in the last page of 64 bits is the region's.
        let first = addr.checked_next_multiple_of(PAGE).unwrap_or(0);
        match self.first_use(first, addr.saturating_add(len).saturating_sub(first)) {
            Some((page, uses)) => Err(Self::in_use(page, uses)),
            None => Ok(()),
        }
    }

    /// Returns the first page of the pool's whose memory a mapping or a request uses, and by how
    /// many.
    #[inline(always)]
    pub(crate) fn first_use(&self, addr: usize, len: usize) -> Option<(usize, u64)> {
        // Acquire: what a device did in a use that has ended comes before the block's next one.
        let mut pages = self.pages_at(addr, len).map(|page| page.load(Ordering::Acquire));
        let at = pages.position(|word| word >= ONE_USE)?;
        let word = self.pages_at(addr, len).nth(at)?.load(Ordering::Relaxed);
        Some((addr + at * PAGE, (word / ONE_USE).max(1)))
    }

    /// Returns the whole pages of `len` bytes at `addr`, as far as they are in the region.
    #[inline(always)]
    fn pages_at(&self, addr: usize, len: usize) -> impl Iterator<Item = &AtomicU64> {
        let first = addr.checked_sub(self.addr()).map(|at| at / PAGE);
        let pages = first.and_then(|first| self.pages.get(first..)).unwrap_or_default();
        pages.iter().take(len / PAGE)
    }

    /// Takes an allocation back from the C program, and returns its length: for exactly one of
    /// several concurrent callers.
    ///
    /// # Errors
    /// `EINVAL`: nothing begins there. `EBUSY`: a mapping or a request uses it.
    #[inline(always)]
    pub(crate) fn claim(&self, addr: usize) -> Result<usize, Failure> {
        // Most are of one page that nothing uses. Acquire: as below.
        if let Some((_, word)) = self.page(addr)
            && addr.is_multiple_of(PAGE)
            && word.compare_exchange(ONE_PAGE, 0, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            return Ok(PAGE);
        }
        self.claim_any(addr)
    }

    #[inline(never)]
    fn claim_any(&self, addr: usize) -> Result<usize, Failure> {
        let Some((first, word)) = self.page(addr) else { return Err(self.not_here(addr)) };
        let seen = word.load(Ordering::Relaxed);
        if seen & KIND_BITS != FIRST || !addr.is_multiple_of(PAGE) {
            return Err(Self::not_allocated(addr, seen));
        }
        if seen >= ONE_USE {
            return Err(Self::in_use(addr, seen / ONE_USE));
        }
        // Acquire: the allocation by another thread comes before.
        if let Err(now) = word.compare_exchange(seen, 0, Ordering::Acquire, Ordering::Relaxed) {
            return Err(if now >= ONE_USE {
                Self::in_use(addr, now / ONE_USE)
            } else {
                Self::not_allocated(addr, now)
            });
        }
        let count = number(seen);
        for page in self.pages.iter().skip(first + 1).take(count.saturating_sub(1)) {
            page.store(0, Ordering::Relaxed);
        }
        Ok(count * PAGE)
    }

    #[cold]
    fn not_here(&self, addr: usize) -> Failure {
        let (base, len) = (self.addr(), self.len);
        fail!(
            EINVAL,
            "{addr:#x} is not in this arena, which has {len:#x} bytes at {base:#x}: pass the arena that allocated it"
        )
    }

    #[cold]
    fn not_allocated(addr: usize, word: u64) -> Failure {
        match word & KIND_BITS {
            LATER => {
                let first = addr - addr % PAGE - number(word) * PAGE;
                fail!(EINVAL, "{addr:#x} is inside the allocation at {first:#x}: pass that address")
            }
            FIRST => fail!(
                EINVAL,
                "{addr:#x} is not where its allocation begins, which is {:#x}",
                addr - addr % PAGE
            ),
            POOL => fail!(
                EINVAL,
                "{addr:#x} is in a block of a pool: free it with pf_put, or pf_pages_recycle"
            ),
            _ => {
                fail!(EINVAL, "{addr:#x} is not allocated: it was freed before, or never allocated")
            }
        }
    }

    #[cold]
    fn in_use(addr: usize, uses: u64) -> Failure {
        fail!(
            EBUSY,
            "{addr:#x} is in use by {}: unmap it, or wait for their end, first; pf_quarantine says whether a device may \
             reach it for good",
            failure::Counted(uses, "mapping or request")
        )
    }

    #[cold]
    fn most_used(addr: usize) -> Failure {
        fail!(
            EBUSY,
            "{addr:#x} is in use by 4,294,967,295 mappings and requests, the most: unmap some first"
        )
    }

    /// Begins a device's use of `len` bytes at `addr`.
    ///
    /// # Errors
    /// `EINVAL`: they are not all in one allocation. `EBUSY`: the number of uses is used up.
    fn enter(&self, addr: usize, len: usize) -> Result<Counted, Failure> {
        if self.pages.is_empty() {
            self.uses.fetch_add(1, Ordering::Relaxed);
            return Ok(Counted::Region);
        }
        let Some((page, word)) = self.page(addr) else { return Err(self.not_here(addr)) };
        let seen = word.load(Ordering::Acquire);
        let first = match seen & KIND_BITS {
            FIRST => page,
            LATER => page.saturating_sub(number(seen)),
            POOL => return self.enter_pool(addr, len),
            _ => return Err(Self::not_allocated(addr, seen)),
        };
        let Some(word) = self.pages.get(first) else { return Err(Self::not_allocated(addr, seen)) };
        let mut seen = word.load(Ordering::Acquire);
        loop {
            let end = (first + number(seen)) * PAGE;
            if seen & KIND_BITS != FIRST || addr - self.addr() + len > end {
                let bytes = number(seen) * PAGE;
                let start = self.addr() + first * PAGE;
                return Err(fail!(
                    EINVAL,
                    "{len} bytes at {addr:#x} are not all allocated: the allocation has {bytes} bytes at {start:#x}"
                ));
            }
            let more = seen.checked_add(ONE_USE).ok_or_else(|| Self::most_used(addr))?;
            match word.compare_exchange_weak(seen, more, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        Ok(Counted::Allocation(u32::try_from(first).unwrap_or(u32::MAX)))
    }

    /// Begins a device's use of memory of a pool: each of its pages is counted.
    ///
    /// Where a block ends is not checked. A device reaches whole pages, so that the end of a block
    /// within one keeps nothing from it, and all pages of the memory count as in use, also those of a
    /// block behind it: `pf_put` refuses that one, too. The word of a page, all that is looked at
    /// here, does not say which pool has it: that would take a look-up with a lock in each map.
    fn enter_pool(&self, addr: usize, len: usize) -> Result<Counted, Failure> {
        let pages = pages_of(addr - self.addr(), len);
        let first = pages.start;
        for (entered, page) in self.pages.get(pages).unwrap_or_default().iter().enumerate() {
            let enter = |word: u64| word.checked_add(ONE_USE).filter(|_| word & KIND_BITS == POOL);
            if let Err(word) = page.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter) {
                self.leave_pages(first..first + entered);
                let page = self.addr() + (first + entered) * PAGE;
                if word & KIND_BITS == POOL {
                    return Err(Self::most_used(page));
                }
                return Err(fail!(
                    EINVAL,
                    "{len} bytes at {addr:#x} reach beyond their pool, which ends at {page:#x}"
                ));
            }
        }
        self.uses.fetch_add(1, Ordering::Relaxed);
        Ok(Counted::Pool)
    }

    /// Ends the use of `len` bytes at offset `at`: as soon as it is counted no more, the region may
    /// be gone. Release: what the program sees of a use comes before another allocation.
    #[inline]
    fn leave(&self, counted: Counted, at: usize, len: usize) {
        match counted {
            Counted::Allocation(first) => {
                if let Some(page) = self.pages.get(first as usize) {
                    page.fetch_sub(ONE_USE, Ordering::Release);
                }
            }
            Counted::Pool => {
                self.leave_pages(pages_of(at, len));
                self.uses.fetch_sub(1, Ordering::Release);
            }
            Counted::Region => {
                self.uses.fetch_sub(1, Ordering::Release);
            }
        }
    }

    fn leave_pages(&self, pages: Range<usize>) {
        for page in self.pages.get(pages).unwrap_or_default() {
            page.fetch_sub(ONE_USE, Ordering::Release);
        }
    }
}

/// Returns words of 0; `None` if there is no memory for them.
fn zeroes(count: usize) -> Option<Box<[AtomicU64]>> {
    let layout = Layout::array::<AtomicU64>(count).ok().filter(|layout| layout.size() > 0)?;
    // Zeroed by the kernel as it is touched: a large arena has many words.
    // SAFETY: the layout has at least a word.
    let words = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
    let words = NonNull::slice_from_raw_parts(words.cast::<AtomicU64>(), count);
    // SAFETY: allocated here, by the global allocator, with the layout of the slice, whose bits are
    // valid words.
    Some(unsafe { Box::from_raw(words.as_ptr()) })
}

/// Returns the pages of `len` bytes at offset `at`.
fn pages_of(at: usize, len: usize) -> Range<usize> {
    at / PAGE..(at + len).div_ceil(PAGE)
}

/// The addresses at which a region is mapped as a whole, by domain: a list that only grows, read
/// without a lock.
#[derive(Default)]
struct Places {
    place: OnceLock<(DomainId, Iova)>,
    next: OnceLock<Box<Self>>,
}

impl Drop for Places {
    fn drop(&mut self) {
        // One after the other: there may be as many as domains, more than the stack has room for.
        let mut next = self.next.take();
        while let Some(mut link) = next {
            next = link.next.take();
        }
    }
}

impl Places {
    fn add(&self, domain: DomainId, iova: Iova) {
        let mut link = self;
        while link.place.set((domain, iova)).is_err() {
            link = link.next.get_or_init(Box::default);
        }
    }

    #[inline]
    fn find(&self, domain: DomainId) -> Option<Iova> {
        let mut link = Some(self);
        while let Some((place, iova)) = link.and_then(|link| link.place.get()) {
            if *place == domain {
                return Some(*iova);
            }
            link = link.and_then(|link| link.next.get()).map(|next| &**next);
        }
        None
    }
}

/// Keeps an arena from being ended: of a pool, a handle or a controller that allocates from it,
/// also while that has nothing of it. Its owner drops what it has of the arena before.
pub(crate) struct Hold {
    region: Arc<Region>,
    /// After `region`: when it is counted no more, nothing of it keeps the arena's memory.
    #[expect(dead_code, reason = "held, and dropped last")]
    counted: Holder,
}

impl Hold {
    /// Holds the region of an arena that a call uses, so that nothing ends it meanwhile.
    pub(crate) fn new(region: &Arc<Region>) -> Self {
        region.holders.fetch_add(1, Ordering::Relaxed);
        Self { region: Arc::clone(region), counted: Holder(Arc::clone(&region.holders)) }
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }
}

/// One that is counted.
struct Holder(Arc<AtomicU64>);

impl Drop for Holder {
    fn drop(&mut self) {
        // Release: what was done through it comes before the arena's end.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// The counters of a use.
#[derive(Clone, Copy)]
enum Counted {
    /// The word of the allocation's first page.
    Allocation(u32),
    /// The words of all its pages, which are a pool's, and the region.
    Pool,
    /// The region alone: of a registration.
    Region,
}

/// Part of a region, for a device: it keeps the region, and the allocation in it.
pub(crate) struct Span {
    region: NonNull<Region>,
    /// The offset of the part in the region.
    at: usize,
    len: usize,
    counted: Counted,
}

// SAFETY: it is a share of the region, which is `Sync` and lives as long; see `Span::region`.
unsafe impl Send for Span {}
// SAFETY: as for `Send`.
unsafe impl Sync for Span {}

impl Span {
    /// Describes `len` bytes at `addr` of a region, which is not taken out of its domains
    /// meanwhile.
    ///
    /// # Errors
    /// `EINVAL`: they are not allocated, or not all in one allocation.
    pub(crate) fn new(region: &Arc<Region>, addr: usize, len: usize) -> Result<Self, Failure> {
        let inside = addr
            .checked_sub(region.addr())
            .filter(|at| at.checked_add(len).is_some_and(|end| end <= region.len));
        if len == 0 {
            return Err(fail!(EINVAL, "0 bytes at {addr:#x}: pass at least 1"));
        }
        let Some(at) = inside else {
            let (base, bytes) = (region.addr(), region.len);
            return Err(fail!(
                EINVAL,
                "{len} bytes at {addr:#x} are not inside the {bytes} bytes at {base:#x}"
            ));
        };
        let counted = region.enter(addr, len)?;
        Ok(Self { region: NonNull::from(&**region), at, len, counted })
    }

    #[inline(always)]
    fn region(&self) -> &Region {
        // SAFETY: the use is counted until the value is dropped. An arena with such an allocation,
        // and a region with such a use, is neither ended nor unregistered (`State::take_out`, whose
        // lock excludes `State::span`), and what is not keeps its region, which is in an `Arc`.
        unsafe { self.region.as_ref() }
    }

    /// Returns whether a pool has allocated the part.
    pub(crate) fn is_pools(&self) -> bool {
        matches!(self.counted, Counted::Pool)
    }

    /// Returns where the part begins in its pages, and its length in bytes.
    #[inline]
    pub(crate) fn part(&self) -> (usize, usize) {
        (self.at % PAGE, self.len)
    }

    /// Returns the address of the part in this process.
    #[inline(always)]
    pub(crate) fn addr(&self) -> usize {
        self.region().addr() + self.at
    }

    /// Returns the address of the part for the devices of the domain, if it stays mapped there: in
    /// a region that is mapped as a whole, or in a pool.
    pub(crate) fn fixed(&self, domain: DomainId) -> Option<Iova> {
        let start = self.region().place(domain).or_else(|| self.pool_place(domain));
        start?.checked_add(self.at as u64)
    }

    /// Returns where the region would begin for the devices of the domain, if the part is a pool's,
    /// which has mapped it there.
    fn pool_place(&self, domain: DomainId) -> Option<Iova> {
        let (own, start) = self.region().pools_at?;
        (matches!(self.counted, Counted::Pool) && own == domain).then_some(start)
    }

    /// Refuses memory that a mapping would not protect: a pool keeps its own mapped.
    ///
    /// # Errors
    /// `EINVAL`.
    pub(crate) fn check_mappable(&self, domain: DomainId) -> Result<bool, Failure> {
        let stays = self.region().place(domain).is_some();
        if stays || self.pool_place(domain).is_none() {
            return Ok(stays);
        }
        let (addr, len) = (self.addr(), self.len);
        Err(fail!(
            EINVAL,
            "{len} bytes at {addr:#x} are a pool's, which stay mapped: use the block's own iova, or memory of pf_alloc"
        ))
    }
}

impl Drop for Span {
    #[inline]
    fn drop(&mut self) {
        self.region().leave(self.counted, self.at, self.len);
    }
}

// SAFETY: the pages are part of a region that the value keeps, where they stay. They are the
// value's alone as far as Rust is concerned: a C program accesses them as it likes, and a `Span`
// lends no reference to them, only `DmaMemory`.
unsafe impl Pinned for Span {
    #[inline]
    fn memory(&self) -> DmaMemory<'_> {
        // A region is whole pages.
        let Range { start, end } = pages_of(self.at, self.len);
        // SAFETY: `start` is inside the region.
        let base = unsafe { self.region().base.add(start * PAGE) };
        // SAFETY: the pages are inside the region, which this value keeps.
        unsafe { DmaMemory::from_raw(base, (end - start) * PAGE) }
    }

    #[inline]
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova> {
        self.region().place(domain)?.checked_add((self.at - self.at % PAGE) as u64)
    }

    #[inline]
    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        (index == 0).then_some(((self.at % PAGE) as u64, self.len as u64))
    }
}

#[cfg(test)]
#[cfg(not(handle_model))]
mod tests {
    use super::*;
    use pinfold::Domain;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_use_that_the_counter_has_no_room_for_is_refused() {
        let arena = Arena::builder().size(1 << 20).build(&Domain::soft().unwrap()).unwrap();
        let region = Region::arena(&arena).unwrap();
        let full = u64::from(u32::MAX) * ONE_USE;
        let words = [ONE_PAGE | (full - ONE_USE), POOL, POOL | (full - ONE_USE)];
        let set = |at: usize, word| region.pages[at].store(word, Ordering::Relaxed);
        let uses = || [0, 1, 2].map(|at| region.pages[at].load(Ordering::Relaxed) / ONE_USE);
        words.into_iter().enumerate().for_each(|(at, word)| set(at, word));
        let (one, pool) = (region.addr(), region.addr() + PAGE);
        assert!(region.enter(one, PAGE).is_ok() && region.enter(pool, 2 * PAGE).is_ok());
        assert_eq!(uses(), [u64::from(u32::MAX), 1, u64::from(u32::MAX)]);
        // The count of the second memory is undone.
        for (addr, len) in [(one, PAGE), (pool, 2 * PAGE)] {
            assert_eq!(region.enter(addr, len).err().unwrap().errno(), libc::EBUSY);
            assert_eq!(uses(), [u64::from(u32::MAX), 1, u64::from(u32::MAX)]);
        }
        assert_eq!(region.uses(), 1);
        (0..3).for_each(|at| set(at, 0));
    }

    /// An arena may be of memory that the program frees when it has ended.
    #[test]
    fn a_hold_that_is_not_counted_keeps_nothing() {
        let domain = Domain::soft().unwrap();
        let arena = Arena::builder().size(1 << 20).build(&domain).unwrap();
        let region = Arc::new(Region::arena(&arena).unwrap());
        let held = AtomicBool::new(false);
        let (region, held) = (&region, &held);
        let mut most = 0;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for _ in 0..100_000 {
                    let hold = Hold::new(region);
                    held.store(true, Ordering::Release);
                    drop(hold);
                    while held.load(Ordering::Acquire) {
                        std::hint::spin_loop();
                    }
                }
            });
            for _ in 0..100_000 {
                while !held.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                while region.holders() > 0 {
                    std::hint::spin_loop();
                }
                most = most.max(Arc::strong_count(region));
                held.store(false, Ordering::Release);
            }
            assert_eq!(most, 1);
        });
    }
}
