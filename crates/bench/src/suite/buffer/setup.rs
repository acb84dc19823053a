//! A model of 1 GiB on hugepages none of which are adjacent, for `register-1g-model`.

use crate::error::BenchError;
use pinfold_core::addr::{Iova, PageSize};
use pinfold_core::registered::Registered;

/// How many hugepages the buffer has.
pub(super) const HUGEPAGES: u64 = 512;
/// Where it begins in the process; its memory is never accessed.
pub(super) const ADDR: usize = 1 << 40;

/// Returns the device address of hugepage `i`: no two consecutive ones are adjacent.
fn hugepage(i: u64) -> u64 {
    (1 << 32) + (i * 181 % HUGEPAGES) * 2 * PageSize::Size2M.bytes()
}

/// Returns the device address of each 4 KiB page of the same memory.
pub(super) fn pages() -> impl Iterator<Item = Iova> {
    let in_each = PageSize::Size2M.bytes() / PageSize::Size4K.bytes();
    (0..HUGEPAGES * in_each).map(move |page| {
        Iova::new(hugepage(page / in_each) + page % in_each * PageSize::Size4K.bytes())
    })
}

/// Returns the buffer as Pinfold describes it.
pub(super) fn large() -> Result<Registered, BenchError> {
    let device = (0..HUGEPAGES).map(|i| Iova::new(hugepage(i)));
    Ok(Registered::from_pages(
        ADDR,
        HUGEPAGES * PageSize::Size2M.bytes(),
        PageSize::Size2M,
        device,
    )?)
}
