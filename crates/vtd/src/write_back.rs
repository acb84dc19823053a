//! Memory that the unit reads: the write-back that makes a store visible to it, and the format of
//! second-stage tables that uses it.

use core::marker::PhantomData;
use core::sync::atomic::AtomicU64;
use pinfold_core::access::Access;
use pinfold_core::addr::PhysAddr;
use pinfold_core::table::{Entry, Format, VtdSecondStage};

/// Makes stores visible to a unit that does not look into the processor's caches (ECAP, C = 0).
///
/// For x86, `clflush` of each line and a fence. A kernel has it; this crate has no `unsafe`.
pub trait WriteBack: Send + Sync + 'static {
    /// Whether it serves a unit that does not snoop. If not, [`Unit::new`](crate::Unit::new) refuses
    /// such a unit.
    const FOR_NON_COHERENT: bool;
    /// Returns when the words are in memory. Called for each, in the order of the stores.
    fn write_back(words: &[AtomicU64]);
}

/// For units that look into the caches (ECAP, C = 1), and for emulated ones: nothing is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Coherent;

impl WriteBack for Coherent {
    const FOR_NON_COHERENT: bool = false;
    fn write_back(_: &[AtomicU64]) {}
}

/// [`VtdSecondStage`], written back by `W`.
#[derive(Clone, Copy, Debug)]
pub struct SecondStage<W>(PhantomData<W>);

impl<W: WriteBack> Format for SecondStage<W> {
    const NAME: &'static str = VtdSecondStage::NAME;
    const MIN_LEVELS: u8 = VtdSecondStage::MIN_LEVELS;
    const MAX_LEVELS: u8 = VtdSecondStage::MAX_LEVELS;
    const PHYS_BITS: u32 = VtdSecondStage::PHYS_BITS;

    #[inline]
    fn leaf(phys: PhysAddr, access: Access, level: u8) -> u64 {
        VtdSecondStage::leaf(phys, access, level)
    }
    #[inline]
    fn link(page: PhysAddr) -> u64 {
        VtdSecondStage::link(page)
    }
    #[inline]
    fn retired(page: PhysAddr) -> u64 {
        VtdSecondStage::retired(page)
    }
    #[inline]
    fn parse(entry: u64, level: u8) -> Entry {
        VtdSecondStage::parse(entry, level)
    }
    #[inline]
    fn is_leaf(entry: u64, level: u8) -> bool {
        VtdSecondStage::is_leaf(entry, level)
    }
    #[inline]
    fn write_back(entries: &[AtomicU64]) {
        W::write_back(entries);
    }
}
