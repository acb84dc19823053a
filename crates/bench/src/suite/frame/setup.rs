//! What the subjects of the suite share.

use crate::baseline::buddy::Buddy;
use pinfold_core::frame::Zone;
use pinfold_core::mem::DmaMemory;

/// How many frames the subjects have: 1 GiB.
pub(super) const FRAMES: u32 = 1 << 18;

/// How many frames of memory back the words that are written: offsets are used modulo 64 MiB.
pub(super) const WRITTEN: u32 = 1 << 14;

#[derive(Clone, Copy)]
pub(super) struct Parts<'s> {
    pub(super) zone: &'s Zone,
    pub(super) buddy: &'s Buddy,
    pub(super) memory: DmaMemory<'s>,
}
