//! The memory of payloads: an event loop's share of the arena, never exceeded.

use pinfold::{ArenaLocal, ArenaMemory, Buffer};

/// The largest buffer. Longer payloads take several, so that a write starts at the target before
/// all of it has arrived.
pub(crate) const PIECE: usize = 256 << 10;
/// A frame: the smallest buffer.
pub(crate) const PAGE: usize = 4096;
/// How many pages are taken in bulk.
const PAGES: usize = 64;

/// Returns how much memory the buffers for `bytes` bytes take.
pub(crate) fn rounded(bytes: usize) -> usize {
    match bytes % PIECE {
        0 => bytes,
        rest => bytes - rest + rest.next_multiple_of(PAGE).next_power_of_two(),
    }
}

/// The memory of one event loop's payloads.
///
/// Pages are kept in an array: a request empties slots, and one bulk call fills those that are
/// empty. Larger buffers come from the arena one by one.
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
        Self {
            arena: arena.clone(),
            local: arena.local(),
            pages,
            full: 0,
            budget,
            used: 0,
            lost: 0,
        }
    }

    /// Takes a buffer for `bytes` bytes, at most [`PIECE`], for a client that has `held` bytes
    /// already: a smaller one where its share is less or the arena is fragmented; `None` if memory
    /// must be returned first. The contents are undefined.
    pub(crate) fn take(&mut self, bytes: usize, held: usize) -> Option<Buffer> {
        let share = self.share(held);
        let mut wanted = rounded(bytes.clamp(1, PIECE));
        loop {
            let fits = wanted <= share;
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

    /// Returns how many bytes a client that holds `held` may take now: so many that afterwards as
    /// much is free as it holds. Alone it gets nearly half of the budget, and the next one finds as
    /// much, however long the others keep theirs.
    ///
    /// One that holds nothing gets a page as long as there is any; an eighth of the budget is for
    /// that.
    pub(crate) fn share(&self, held: usize) -> usize {
        let free = self.budget.saturating_sub(self.used);
        let share = free.saturating_sub(self.budget / 8 / PAGE * PAGE).saturating_sub(held) / 2;
        if held == 0 { share.max(PAGE).min(free) } else { share }
    }

    /// Returns how many bytes there are for all clients.
    pub(crate) fn budget(&self) -> usize {
        self.budget
    }

    /// Returns whether all memory is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.budget.saturating_sub(self.lost) < PAGE
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
        let mut payloads = Payloads::new(&arena, 4 << 20);
        let mut out = Vec::new();
        for bytes in [1, 4096, 4097, 100_000, PIECE, PIECE + 1, 1 << 30] {
            let buffer = payloads.take(bytes, 0).unwrap();
            assert_eq!(buffer.len(), bytes.min(PIECE).next_power_of_two().max(PAGE));
            out.push(buffer);
        }
        // Clients that hold nothing take the rest of the budget in smaller buffers, and then
        // nothing.
        while let Some(buffer) = payloads.take(PIECE, 0) {
            out.push(buffer);
        }
        assert_eq!((payloads.used(), out.iter().map(Buffer::len).sum()), (4 << 20, 4 << 20));
        assert!(payloads.take(1, 0).is_none());
        out.drain(..).for_each(|buffer| payloads.put(buffer));
        assert_eq!(payloads.used(), 0);
        for _ in 0..3 {
            out.extend((0..1024).map(|_| payloads.take(PAGE, 0).unwrap()));
            assert!(payloads.take(1, 0).is_none());
            out.drain(..).for_each(|buffer| payloads.put(buffer));
        }
        drop(payloads);
        assert_eq!(arena.stats().frames_in_use, 0);
    }

    /// However many clients keep what they have, there is some for the next one.
    #[test]
    fn the_next_client_finds_memory_however_many_there_are() {
        let arena = Arena::builder().size(16 << 20).source(Source::Plain).build_unmapped().unwrap();
        let mut payloads = Payloads::new(&arena, 8 << 20);
        let mut out = Vec::new();
        for clients in 1..200 {
            let mut held = vec![0; clients];
            // Each takes what it can, in turn.
            while {
                let before = out.len();
                for held in &mut held {
                    if let Some(buffer) = payloads.take(PIECE, *held) {
                        *held += buffer.len();
                        out.push(buffer);
                    }
                }
                out.len() > before
            } {}
            let next = payloads.take(PIECE, 0).unwrap();
            assert!(clients > 4 || next.len() >= 128 << 10, "{clients}: {next:?}");
            out.push(next);
            out.drain(..).for_each(|buffer| payloads.put(buffer));
        }
    }
}
