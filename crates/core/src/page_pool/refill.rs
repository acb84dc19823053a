//! Refilling the consumer's magazine: from the ring, the spill list, the rest of the newest chunk,
//! and the source.

use super::consumer::PagePool;
use super::error::AllocError;
use super::magazine::{BULK, BULK_PAGES};
use crate::frame::Order;

impl PagePool {
    #[cold]
    pub(super) fn take_slow(&mut self) -> Result<u32, AllocError> {
        if let Some(frame) = self.refill_from_ring() {
            self.counts.refill += 1;
            return Ok(frame);
        }
        self.counts.empty += 1;
        let frame = match self.refill_from_spill() {
            Some(frame) => frame,
            None => match self.refill_from_chunk() {
                Ok(frame) => frame,
                Err(error) => self.take_idle_open_page().ok_or_else(|| {
                    self.limited += u64::from(matches!(error, AllocError::Limit { .. }));
                    error
                })?,
            },
        };
        if self.shared.config.order == Order::PAGE {
            self.counts.slow += 1;
        } else {
            self.counts.slow_high_order += 1;
        }
        Ok(frame)
    }

    fn refill_from_ring(&mut self) -> Option<u32> {
        let (shared, magazine, waive) = (&self.shared, &mut self.magazine, &mut self.counts.waive);
        loop {
            let mut seen = false;
            shared.ring.drain(BULK as u64, |entry| {
                seen = true;
                // There is room: the magazine is empty and holds twice as many.
                let placed = shared.accept(entry) && magazine.put_uncounted(entry.frame());
                *waive += u64::from(!placed);
            });
            let frame = magazine.take_uncounted();
            if frame.is_some() || !seen {
                return frame;
            }
        }
    }

    fn refill_from_spill(&mut self) -> Option<u32> {
        if self.shared.ring_full() == self.spill_taken {
            return None;
        }
        let (shared, magazine, waive) = (&self.shared, &mut self.magazine, &mut self.counts.waive);
        let spill_taken = &mut self.spill_taken;
        loop {
            let mut seen = false;
            shared.take_spilled(BULK, |entry| {
                seen = true;
                *spill_taken += 1;
                let placed = shared.accept(entry) && magazine.put_uncounted(entry.frame());
                *waive += u64::from(!placed);
            });
            let frame = magazine.take_uncounted();
            if frame.is_some() || !seen {
                return frame;
            }
        }
    }

    /// Pages that were allocated once stay in circulation: held, in the ring, the spill list or the
    /// magazine. So the limit on pages in use is a limit on the pages that are brought into
    /// circulation here, and costs nothing elsewhere: the other places are empty now, so when no
    /// more may be, all of them are held.
    fn refill_from_chunk(&mut self) -> Result<u32, AllocError> {
        let limit = self.shared.config.max_in_use;
        let left = limit.saturating_sub(self.pages - self.fresh_pages());
        if left == 0 {
            return Err(AllocError::Limit { limit });
        }
        if self.fresh.0 == self.fresh.1 {
            let (first, frames) = self.shared.acquire(self.next_order(left))?;
            self.fresh = (first, first + frames);
            self.pages += u64::from(frames >> self.shared.config.order.get());
        }
        let step = self.shared.config.order.frames();
        let (first, end) = self.fresh;
        // At least one: a chunk has at least the order of a page.
        let most = u32::try_from(left).unwrap_or(u32::MAX).min(BULK_PAGES);
        let count = ((end - first) / step).min(most);
        let pages = (0..count).map(|page| first + page * step);
        // First: if one of them panics, all of these pages stay fresh.
        pages.clone().for_each(|frame| self.shared.sync_for_device(frame, self.written as usize));
        self.fresh.0 = first + count * step;
        // In descending order, so that they leave the magazine in ascending order.
        for frame in pages.skip(1).rev() {
            // There is room, as above.
            let _ = self.magazine.put_uncounted(frame);
        }
        Ok(first)
    }

    /// Returns how many pages of the newest chunk were never allocated.
    pub(super) fn fresh_pages(&self) -> u64 {
        u64::from((self.fresh.1 - self.fresh.0) >> self.shared.config.order.get())
    }

    /// Returns the order of the next chunk: 64 pages, or as many as the pool has, up to 2 MiB; but
    /// no more than a chunk of `left` pages needs.
    fn next_order(&self, left: u64) -> Order {
        let page = self.shared.config.order.get();
        // At most 2^9 pages.
        let needed = u8::try_from(left.clamp(1, 512).next_power_of_two().ilog2()).unwrap_or(0);
        let pool = u8::try_from(self.pages.max(1).ilog2()).unwrap_or(0);
        let max = if cfg!(loom) { 1 } else { Order::HUGE.get() };
        let min = if cfg!(loom) { 0 } else { 6 };
        Order::new((page + pool.max(min).min(needed)).min(max)).unwrap_or(Order::HUGE)
    }
}
