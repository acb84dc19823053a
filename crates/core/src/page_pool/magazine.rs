//! The consumer's magazine, which counts what goes through it at no cost.
//!
//! How many pages are in it and how many were ever put back stand in one word, so that a put adds one number to one word
//! whether it is counted or not. How many were taken follows from what went in and what is there.

/// How many pages are moved at a time: half a magazine.
pub(super) const BULK: usize = 64;
/// The same, to count pages with.
pub(super) const BULK_PAGES: u32 = 64;

/// How many pages it holds.
const CAPACITY: usize = 2 * BULK;
/// The low bits of the word: how many pages there are, 0 to 128.
const LEN: u64 = 0xff;
/// One more page, and one more that was put back.
const COUNTED: u64 = 1 << 8 | 1;

/// A stack of pages.
#[derive(Debug)]
pub(super) struct Magazine {
    word: u64,
    /// What else went in, less what else went out, modulo 2^64.
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

    /// Takes the page that was put in last: it is counted.
    #[inline(always)]
    pub(super) fn take(&mut self) -> Option<u32> {
        let page = *self.pages.get(self.len().checked_sub(1)?)?;
        self.word -= 1;
        Some(page)
    }

    /// Puts a page back; where there is no room it comes back itself. `COUNT`: it is counted.
    #[inline(always)]
    pub(super) fn put<const COUNT: bool>(&mut self, page: u32) -> Result<(), u32> {
        let at = self.len();
        match self.pages.get_mut(at) {
            Some(slot) => {
                *slot = page;
                self.word += if COUNT { COUNTED } else { 1 };
                Ok(())
            }
            None => Err(page),
        }
    }

    /// Puts a page in that comes from below: returns whether there is room.
    #[inline(always)]
    pub(super) fn stock(&mut self, page: u32) -> bool {
        let placed = self.put::<false>(page).is_ok();
        self.moved = self.moved.wrapping_add(u64::from(placed));
        placed
    }

    /// Takes a page that is counted elsewhere, or not at all.
    pub(super) fn draw(&mut self) -> Option<u32> {
        let page = self.take()?;
        self.moved = self.moved.wrapping_sub(1);
        Some(page)
    }

    /// Takes the upper half of a full one, in the order in which it was put in.
    pub(super) fn draw_half(&mut self) -> &[u32] {
        let old = self.len();
        let first = old.saturating_sub(BULK);
        let drawn = (old - first) as u64;
        self.word -= drawn;
        self.moved = self.moved.wrapping_sub(drawn);
        self.pages.get(first..old).unwrap_or_default()
    }

    /// How many pages were put back.
    pub(super) fn cached(&self) -> u64 {
        self.word >> 8
    }

    /// How many pages were taken.
    pub(super) fn fast(&self) -> u64 {
        (self.cached().wrapping_add(self.moved)).wrapping_sub(self.len() as u64)
    }
}
