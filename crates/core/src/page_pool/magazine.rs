//! The consumer's magazine.

/// How many pages are moved at a time: half a magazine.
pub(super) const BULK: usize = 64;
/// `BULK` as a number of pages.
pub(super) const BULK_PAGES: u32 = 64;

const CAPACITY: usize = 2 * BULK;
/// The bits of the word that hold the number of pages, 0 to 128.
const LEN: u64 = 0xff;
/// One more page, and one more counted put.
const COUNTED: u64 = 1 << 8 | 1;

/// The consumer's pages: a stack that counts puts and takes at no cost.
///
/// One word holds the number of pages and the number of puts, so a put adds one constant to one
/// word. The number of takes follows from what was put in and what is left.
#[derive(Debug)]
pub(super) struct Magazine {
    word: u64,
    /// Uncounted puts less uncounted takes, modulo 2^64.
    moved: u64,
    pages: [u32; CAPACITY],
}

impl Magazine {
    pub(super) fn new() -> Self {
        Self { word: 0, moved: 0, pages: [0; CAPACITY] }
    }

    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        (self.word & LEN) as usize
    }

    /// Takes the page that was put in last, and counts it.
    #[inline(always)]
    pub(super) fn take(&mut self) -> Option<u32> {
        let page = *self.pages.get(self.len().checked_sub(1)?)?;
        self.word -= 1;
        Some(page)
    }

    /// Puts a page in, and counts it. A full magazine returns it.
    #[inline(always)]
    pub(super) fn put(&mut self, page: u32) -> Result<(), u32> {
        self.push(page, COUNTED)
    }

    /// Puts a page in without counting it, for a refill; returns whether there was room.
    #[inline(always)]
    pub(super) fn put_uncounted(&mut self, page: u32) -> bool {
        let placed = self.push(page, 1).is_ok();
        self.moved = self.moved.wrapping_add(u64::from(placed));
        placed
    }

    #[inline(always)]
    fn push(&mut self, page: u32, added: u64) -> Result<(), u32> {
        let at = self.len();
        let slot = self.pages.get_mut(at).ok_or(page)?;
        *slot = page;
        self.word += added;
        Ok(())
    }

    /// Takes a page without counting it.
    pub(super) fn take_uncounted(&mut self) -> Option<u32> {
        let page = self.take()?;
        self.moved = self.moved.wrapping_sub(1);
        Some(page)
    }

    /// Takes the upper half of a full magazine without counting it, in the order in which it was
    /// put in.
    pub(super) fn take_half_uncounted(&mut self) -> &[u32] {
        let old = self.len();
        let first = old.saturating_sub(BULK);
        let taken = (old - first) as u64;
        self.word -= taken;
        self.moved = self.moved.wrapping_sub(taken);
        self.pages.get(first..old).unwrap_or_default()
    }

    /// Returns the number of counted puts.
    pub(super) fn cached(&self) -> u64 {
        self.word >> 8
    }

    /// Returns the number of counted takes.
    pub(super) fn fast(&self) -> u64 {
        (self.cached().wrapping_add(self.moved)).wrapping_sub(self.len() as u64)
    }
}
