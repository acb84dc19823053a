//! Growing and shrinking: one thread at a time acquires or releases chunks, while others allocate
//! and free.
//!
//! The source may make a system call and sleep, so no lock is held while it runs, only the
//! *permit*: a flag that only threads wait for which need a chunk too. Between two attempts to take
//! it they look for free blocks.

use super::directory::{Chunk, EnterError, Span};
use super::error::{AllocError, CreateError, RangeError};
use super::inner::{Inner, Permit};
use super::layout::bytes_of;
use super::source::ChunkSource;
use super::state::State;
use crate::addr::Iova;
use crate::drop_guard::for_all;
use crate::frame::{Frame, Order};
use crate::sync::relax;
use core::ptr::NonNull;

impl Inner {
    /// Repeats `attempt`, growing the pool, until it succeeds.
    #[cold]
    pub(super) fn or_grow<T>(
        &self,
        mut attempt: impl FnMut() -> Option<T>,
    ) -> Result<T, AllocError> {
        let mut attempts = 0;
        loop {
            if let Some(done) = attempt() {
                return Ok(done);
            }
            let Some(permit) = self.growth.try_permit() else {
                relax(attempts);
                attempts = attempts.saturating_add(1);
                continue;
            };
            // The chunk of the previous holder of the permit is in the depot by now.
            if let Some(done) = attempt() {
                return Ok(done);
            }
            self.grow(&permit).inspect_err(|_| self.raise_pressure())?;
        }
    }

    /// Acquires a chunk of the next order, or of the largest smaller one available, within the
    /// maximum.
    fn grow(&self, permit: &Permit<'_>) -> Result<(), AllocError> {
        let (blocks, bytes) = self.size_now();
        let Some(source) = &self.source else { return Err(AllocError::Ranges { blocks }) };
        let maximum = self.maximum;
        let wanted = self.layout.order_within(self.layout.next_order(bytes), blocks, maximum);
        let wanted = wanted.ok_or(AllocError::Maximum { maximum, blocks })?;
        let scarce = permit.state().scarce;
        let twice = scarce.and_then(|order| Order::new(order.get() + 1)).unwrap_or(wanted);
        let asked = wanted.min(twice);
        let (frame, order) = self.acquire(source.as_ref(), asked)?;
        permit.state().scarce = if order < wanted { Some(order) } else { None };
        self.enter(permit, source.as_ref(), (frame, order))
    }

    /// Acquires chunks until the pool has its minimum.
    pub(super) fn reserve(&self) -> Result<(), CreateError> {
        let (minimum, permit) = (self.minimum, self.growth.permit());
        let mut order = self.layout.most();
        loop {
            let (available, _) = self.size_now();
            let Some(next) = self.layout.order_within(order, available, minimum) else {
                return Ok(());
            };
            let refused = |error| CreateError::Minimum { minimum, available, error };
            let source =
                self.source.as_ref().ok_or(refused(AllocError::Ranges { blocks: available }))?;
            let run = self.acquire(source.as_ref(), next).map_err(refused)?;
            // A larger one was refused.
            order = run.1;
            self.enter(&permit, source.as_ref(), run).map_err(refused)?;
        }
    }

    fn size_now(&self) -> (u64, u64) {
        let depot = self.depot.lock();
        (depot.blocks, depot.bytes)
    }

    /// Acquires a run of this order, or of the largest smaller one available, for the holder of the
    /// permit.
    fn acquire(
        &self,
        source: &dyn ChunkSource,
        first: Order,
    ) -> Result<(Frame, Order), AllocError> {
        let mut order = first;
        let frame = loop {
            match source.acquire(order) {
                Ok(frame) => break frame,
                Err(error) => order = self.layout.smaller(order).ok_or(error)?,
            }
        };
        let end = frame.offset().checked_add(bytes_of(order));
        let inside = end.is_some_and(|end| end <= self.units.first_span().len as u64);
        if !inside || !frame.offset().is_multiple_of(bytes_of(order)) {
            // SAFETY: just acquired with this order, and not used.
            unsafe { source.release(frame, order) };
            return Err(AllocError::Misplaced { frame, order });
        }
        Ok((frame, order))
    }

    /// Adds an acquired run to the pool, with all its blocks free.
    fn enter(
        &self,
        permit: &Permit<'_>,
        source: &dyn ChunkSource,
        (frame, order): (Frame, Order),
    ) -> Result<(), AllocError> {
        let place = (frame.offset(), bytes_of(order));
        let entered = self.depot.lock().reserve(1).map_err(EnterError::from).and_then(|()| {
            let kept = &mut permit.state().kept;
            self.units.enter(&self.layout, NonNull::from(self).cast(), kept, place, (frame, order))
        });
        let error = match entered {
            Ok(chunk) => {
                chunk.into_iter().for_each(|chunk| self.add(chunk));
                return Ok(());
            }
            Err(EnterError::Numbers) => AllocError::Numbers {
                size: self.layout.size(),
                limit: self.units.limit(&self.layout),
            },
            Err(EnterError::NoMemory) => {
                AllocError::NoMemory { bytes: bytes_of(order), size: self.layout.size() }
            }
        };
        // SAFETY: just acquired with this order, and not used.
        unsafe { source.release(frame, order) };
        Err(error)
    }

    /// Adds a chunk, for which the depot has [room](super::magazine::Depot::reserve).
    fn add(&self, chunk: Chunk) {
        if let Some(history) = &self.history {
            // SAFETY: the chunk was entered, and no owner finds its blocks before it is in the
            // depot.
            history.on_chunk(unsafe { chunk.memory() });
        }
        self.depot.lock().add(chunk);
    }

    /// Adds a range of the caller; returns how many blocks it has.
    ///
    /// # Safety
    /// As for [`DmaPool::add_range`](super::DmaPool::add_range).
    pub(super) unsafe fn add_range(
        &self,
        memory: NonNull<[u8]>,
        iova: Iova,
    ) -> Result<u64, RangeError> {
        let (base, len, size) = (memory.cast::<u8>(), memory.len(), self.layout.size());
        let addr = base.as_ptr().addr();
        let (unit, needed) = (1u64 << self.layout.unit_shift(), self.layout.range_align());
        if !(addr as u64 | iova.raw()).is_multiple_of(needed) {
            return Err(RangeError::Align { addr, iova, needed });
        }
        let (whole, rest) = (len as u64 / unit, len as u64 % unit);
        let in_rest = u64::from(self.layout.blocks_in(rest));
        // At most a sixteenth of `len`.
        let blocks = whole * u64::from(self.layout.blocks_in(unit)) + in_rest;
        if blocks == 0 || iova.checked_add(len as u64).is_none() {
            return Err(RangeError::Size { len, iova, size });
        }
        let permit = self.growth.permit();
        let (have, maximum) = (self.size_now().0, self.maximum);
        if blocks.saturating_add(have) > maximum {
            return Err(RangeError::Maximum { blocks, have, maximum });
        }
        let kept = &mut permit.state().kept;
        // Before anything is allocated for it: a range that is not added costs nothing.
        let (units, left) = (whole + u64::from(in_rest > 0), self.units.left(kept));
        if units > left {
            return Err(RangeError::Numbers { len, size, left: left * unit });
        }
        let no_memory = RangeError::NoMemory { len, size };
        let count = usize::try_from(units).map_err(|_| no_memory)?;
        self.depot.lock().reserve(count).map_err(|_| no_memory)?;
        // SAFETY: one allocation, until the pool has ended (contract).
        let span = unsafe { Span::new(&self.layout, base, len, iova) }.map_err(|_| no_memory)?;
        // The rest has no block.
        let bytes = if in_rest > 0 { len as u64 } else { whole * unit };
        let pool = NonNull::from(self).cast();
        match self.units.enter_range(&self.layout, pool, kept, span, bytes) {
            Ok(chunks) => chunks.into_iter().for_each(|chunk| self.add(chunk)),
            Err(EnterError::Numbers) => {
                return Err(RangeError::Numbers { len, size, left: left * unit });
            }
            Err(EnterError::NoMemory) => return Err(no_memory),
        }
        Ok(blocks)
    }

    /// Releases the chunks whose blocks are all in the depot, down to the minimum; returns their
    /// bytes.
    pub(super) fn shrink(&self) -> u64 {
        let Some(source) = &self.source else { return 0 };
        let permit = self.growth.permit();
        self.raise_pressure();
        self.drain_front();
        let removed = self.take_free_chunks(&permit);
        let chunks = || removed.iter().map(|one| &one.chunk);
        for_all(chunks().filter_map(Chunk::run), |(frame, order)| {
            // SAFETY: the chunk was acquired with this order. All its blocks were in the depot, so
            // no thread has a number or a `Block` of it, and the depot has forgotten it: its memory
            // is not accessed until it is acquired again.
            unsafe { source.release(frame, order) };
        });
        chunks().map(Chunk::bytes).sum()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(source) = &self.source else { return };
        // A device may still write to allocated blocks: their chunks are quarantined.
        let is_free =
            |chunk: &&Chunk| chunk.states().iter().all(|state| state.get() == State::FREE);
        let chunks = core::mem::take(&mut self.depot.lock().chunks);
        for_all(chunks.iter().filter(is_free).filter_map(Chunk::run), |(frame, order)| {
            // SAFETY: acquired with this order and not released since; no handle is left that could
            // access it.
            unsafe { source.release(frame, order) };
        });
    }
}
