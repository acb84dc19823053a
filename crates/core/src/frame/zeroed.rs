//! Frames with zeroed memory.

use super::error::FrameError;
use super::local::Local;
use super::number::{Frame, Order};
use super::zone::Zone;
use crate::mem::{AccessError, DmaMemory};
use core::ops::Deref;

/// Why a frame's memory was not zeroed. No frame is allocated when one is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZeroError {
    /// No frame is free.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The memory is shorter than the zone, so it is not the zone's.
    #[error("{frame} lies outside the memory that was passed for the zone")]
    Outside {
        /// The frame.
        frame: Frame,
        /// The refused access.
        source: AccessError,
    },
}

impl Frame {
    /// Zeroes the frame in the zone's memory, which starts with frame 0.
    ///
    /// A zone does not record which frames are zero: a bit per frame would double its map, and a device may write to any
    /// frame that it can reach.
    ///
    /// # Errors
    /// [`AccessError`] if the frame does not lie in `memory`; then nothing is written.
    pub fn zero(self, memory: &DmaMemory<'_>) -> Result<(), AccessError> {
        let outside = AccessError { offset: usize::MAX, len: BYTES, size: memory.len(), aligned: true };
        let offset = usize::try_from(self.offset()).map_err(|_| outside)?;
        memory.fill(offset, BYTES, 0)
    }
}

/// [`Frame::BYTES`] as a length in memory.
const BYTES: usize = 4096;
const _: () = assert!(BYTES as u64 == Frame::BYTES);

/// Zeroes a run, all of it or up to the first frame that does not lie in `memory`.
fn zero_run(first: Frame, order: Order, memory: &DmaMemory<'_>) -> Result<(), ZeroError> {
    (first.index()..first.index() + order.frames())
        .filter_map(Frame::new)
        .try_for_each(|frame| frame.zero(memory).map_err(|source| ZeroError::Outside { frame, source }))
}

impl Zone {
    /// Allocates as [`alloc`](Self::alloc) does, with zeroed memory; `memory` is the zone's.
    ///
    /// # Errors
    /// [`ZeroError`]; then the run is free again.
    pub fn alloc_zeroed(&self, order: Order, memory: &DmaMemory<'_>) -> Result<Frame, ZeroError> {
        let first = self.alloc(order)?;
        zero_run(first, order, memory).inspect_err(|_| _ = self.free(first, order))?;
        Ok(first)
    }

    /// Fills as [`fill`](Self::fill) does and zeroes the memory of the new frames; full slots and their memory are not
    /// touched.
    ///
    /// # Errors
    /// [`ZeroError::Outside`]: slots before that frame's are filled and zeroed, its own and later ones are unchanged.
    pub fn fill_zeroed(
        &self,
        slots: &mut [Option<Frame>],
        memory: &DmaMemory<'_>,
    ) -> Result<usize, ZeroError> {
        fill_zeroed(
            slots,
            memory,
            self,
            |zone, slots| zone.fill(slots),
            |zone, frame| {
                _ = zone.free(frame, Order::PAGE);
            },
        )
    }
}

impl<H: Deref<Target = Zone>> Local<H> {
    /// As [`Zone::fill_zeroed`].
    ///
    /// # Errors
    /// As there.
    pub fn fill_zeroed(
        &mut self,
        slots: &mut [Option<Frame>],
        memory: &DmaMemory<'_>,
    ) -> Result<usize, ZeroError> {
        fill_zeroed(
            slots,
            memory,
            self,
            |local, slots| local.fill(slots),
            |local, frame| {
                _ = local.free(frame, Order::PAGE);
            },
        )
    }
}

/// Fills each run of empty slots, so that the new frames are known, and zeroes those.
fn fill_zeroed<S>(
    slots: &mut [Option<Frame>],
    memory: &DmaMemory<'_>,
    mut source: S,
    mut fill: impl FnMut(&mut S, &mut [Option<Frame>]) -> usize,
    mut free: impl FnMut(&mut S, Frame),
) -> Result<usize, ZeroError> {
    let (mut at, mut full) = (0, 0);
    while let Some(rest) = slots.get_mut(at..).filter(|rest| !rest.is_empty()) {
        let kept = rest.iter().take_while(|slot| slot.is_some()).count();
        let holes = rest.iter().skip(kept).take_while(|slot| slot.is_none()).count();
        let holes = rest.get_mut(kept..kept + holes).unwrap_or_default();
        let got = if holes.is_empty() { 0 } else { fill(&mut source, holes) };
        for index in 0..got {
            let zeroed = holes.get(index).copied().flatten().map(|frame| (frame, frame.zero(memory)));
            if let Some((frame, Err(error))) = zeroed {
                for slot in holes.get_mut(index..).unwrap_or_default() {
                    if let Some(frame) = slot.take() {
                        free(&mut source, frame);
                    }
                }
                return Err(ZeroError::Outside { frame, source: error });
            }
        }
        full += kept + got;
        at += kept + holes.len();
    }
    Ok(full)
}
