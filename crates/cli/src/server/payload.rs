//! The memory of payloads: an event loop's share of the arena, never exceeded.

use pinfold::{ArenaLocal, ArenaMemory, Buffer};

/// The largest buffer. Longer payloads take several, so that a write starts at the target before all of it has arrived.
pub(crate) const PIECE: usize = 256 << 10;
/// A frame: the smallest buffer.
pub(crate) const PAGE: usize = 4096;
/// How many pages are taken in bulk.
const PAGES: usize = 64;

/// The memory of one event loop's payloads.
///
/// Pages are kept in an array: a request empties slots, and one bulk call fills those that are empty. Larger buffers come
/// from the arena one by one.
pub(crate) struct Payloads {
    arena: ArenaMemory,
    local: ArenaLocal,
    pages: [Option<Buffer>; PAGES],
    /// The slots from here on are empty.
    full: usize,
    budget: usize,
    used: usize,
    /// Bytes that count as used for ever.
    lost: usize,
}

impl Payloads {
    /// Creates the share of an event loop: at most `budget` bytes of `arena` at any time.
    pub(crate) fn new(arena: &ArenaMemory, budget: usize) -> Self {
        let pages = [const { None }; PAGES];
        Self { arena: arena.clone(), local: arena.local(), pages, full: 0, budget, used: 0, lost: 0 }
    }

    /// Takes a buffer for `bytes` bytes, at most [`PIECE`], or a smaller one where the arena is fragmented; `None` if memory must
    /// be returned first. The contents are undefined.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Buffer> {
        let mut wanted = bytes.clamp(1, PIECE).next_multiple_of(PAGE).next_power_of_two();
        loop {
            let fits = self.used + wanted <= self.budget;
            if let Some(buffer) = fits.then(|| self.allocate(wanted)).flatten() {
                self.used += buffer.len();
                return Some(buffer);
            }
            if wanted == PAGE {
                return None;
            }
            wanted /= 2;
        }
    }

    fn allocate(&mut self, bytes: usize) -> Option<Buffer> {
        if bytes > PAGE {
            return self.arena.alloc(bytes).ok();
        }
        if self.full == 0 {
            self.full = self.local.fill(&mut self.pages);
            // A partial fill fills the first empty slots: all were empty.
        }
        self.full = self.full.checked_sub(1)?;
        self.pages.get_mut(self.full)?.take()
    }

    /// Returns a buffer.
    pub(crate) fn put(&mut self, buffer: Buffer) {
        self.used = self.used.saturating_sub(buffer.len());
        match self.pages.get_mut(self.full) {
            Some(slot) if buffer.len() == PAGE => {
                *slot = Some(buffer);
                self.full += 1;
            }
            _ => self.local.free(buffer),
        }
    }

    /// Notes that buffers of `bytes` bytes will not return: a controller may still reach them.
    pub(crate) fn lose(&mut self, bytes: usize) {
        self.lost += bytes;
    }

    /// Returns whether `bytes` bytes can ever be out at the same time, in buffers of at most [`PIECE`].
    pub(crate) fn can_ever_take(&self, bytes: usize) -> bool {
        let rest = (bytes % PIECE).next_multiple_of(PAGE);
        let rounded = if rest == 0 { 0 } else { rest.next_power_of_two() };
        bytes - bytes % PIECE + rounded <= self.budget.saturating_sub(self.lost)
    }

    /// Returns how many bytes are out.
    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::{Arena, Source};

    #[test]
    fn the_budget_is_never_exceeded_and_comes_back() {
        let arena = Arena::builder().size(16 << 20).source(Source::Plain).build_unmapped().unwrap();
        let mut payloads = Payloads::new(&arena, 1 << 20);
        let mut out = Vec::new();
        for bytes in [1, 4096, 4097, 100_000, PIECE, PIECE + 1, 1 << 30] {
            let buffer = payloads.take(bytes).unwrap();
            assert_eq!(buffer.len(), bytes.min(PIECE).next_power_of_two().max(PAGE));
            out.push(buffer);
        }
        // The rest of the budget comes in smaller buffers, and then nothing.
        while let Some(buffer) = payloads.take(PIECE) {
            out.push(buffer);
        }
        assert_eq!((payloads.used(), out.iter().map(Buffer::len).sum()), (1 << 20, 1 << 20));
        assert!(payloads.take(1).is_none());
        out.drain(..).for_each(|buffer| payloads.put(buffer));
        assert_eq!(payloads.used(), 0);
        for _ in 0..3 {
            out.extend((0..256).map(|_| payloads.take(PAGE).unwrap()));
            assert!(payloads.take(1).is_none());
            out.drain(..).for_each(|buffer| payloads.put(buffer));
        }
        drop(payloads);
        assert_eq!(arena.stats().frames_in_use, 0);
    }
}
