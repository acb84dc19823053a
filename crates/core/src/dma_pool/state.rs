//! The state byte of a block.

use crate::sync::{AtomicU8, Ordering};

/// The state byte of a block.
///
/// The number of a free block is in exactly one place: a magazine, the depot, or with the
/// thread that has just taken it out or claimed it. That thread changes the byte by a plain store,
/// as does the holder of a [`Block`](super::Block). A raw free holds nothing but an address, so it
/// must [claim](Self::claim) the block.
///
/// A number moves between threads through the depot's lock, which orders the accesses; the program
/// orders its own alloc and free of a block. So they are relaxed.
#[derive(Debug)]
pub(super) struct State(AtomicU8);

impl State {
    /// No chunk has such a block.
    pub(super) const ABSENT: u8 = 0;
    pub(super) const FREE: u8 = 1;
    /// Freed by address.
    pub(super) const RAW: u8 = 2;
    /// Freed by its [`Block`](super::Block).
    pub(super) const OWNED: u8 = 3;
    /// Free, and its number is set aside by a shrink, which may remove its chunk.
    pub(super) const LISTED: u8 = 4;

    pub(super) fn new(state: u8) -> Self {
        Self(AtomicU8::new(state))
    }

    #[inline(always)]
    pub(super) fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }

    /// Changes the state of a block that the caller holds exclusively.
    #[inline(always)]
    pub(super) fn set(&self, state: u8) {
        self.0.store(state, Ordering::Relaxed);
    }

    /// Frees a raw block; `false` if it is not one. Of several callers for one allocation exactly
    /// one succeeds, and holds the block's number from then on.
    ///
    /// A load and a store would not do: a thread that is preempted between the two would free the
    /// block under its next owner.
    #[inline(always)]
    pub(super) fn claim(&self) -> bool {
        self.0.compare_exchange(Self::RAW, Self::FREE, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}
