//! The suite `buffer`: registered buffers that keep their hugepages whole, beside a segment for every 4 KiB page.
//!
//! | cases | an operation |
//! | --- | --- |
//! | `register-1g` | describing 1 GiB on 2 MiB pages, none beside another for the device: the program's own work, without pinning; the bytes of its table |
//! | `locate`, `locate-1` | a random offset to its segment, of 10^5 segments and of one |
//! | `gather-8m` | 8 MiB of that 1 GiB to what a device takes, and how many segments that is |
//! | `gather-8m-prp` | the same to PRP lists of a controller with pages of 4 KiB, list pages taken and given back |
//! | `copy-64` ... `copy-8m` | that many bytes into a buffer and out of it again, between it and memory that no device has |
//! | `io-submit`, `io-submit-1` | handing the kernel a read of 8 MiB, O_DIRECT, by io_uring, with 64 under way and with one; the read itself does not count, waiting for room in the device's queue does |
//!
//! | subject | what it is |
//! | --- | --- |
//! | `pinfold` | equal folios; in `io-submit` hugepages, registered with the ring; in `copy-*` shared DMA memory, which a device may write meanwhile |
//! | `pages-4k` | a segment for every 4 KiB page; in `io-submit` pages of 4 KiB, registered |
//! | `memcpy` | the same memory as a slice that one owner has, copied by the standard library |
//! | `walk` | a list of segments, gone along from its start |
//! | `unregistered`, `pages-4k-unregistered` | the same memory as in `pinfold` and `pages-4k`, not registered |

mod copy;
mod gather;
mod locate;
mod register;
mod submit;

use super::BenchError;
use crate::harness::{COUNTS_RMW, Harness};
use crate::record::Record;
use pinfold_core::addr::{Iova, PageSize};
use pinfold_core::registered::Registered;

/// How many hugepages the large buffer has.
const HUGEPAGES: u64 = 512;
/// Where it begins in the process: nothing is ever read there.
const ADDR: usize = 1 << 40;

/// Measures the suite.
///
/// # Errors
/// Where the memory or the file cannot be had, or a subject fails.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        // One thread describes a buffer, and nobody else writes where it does.
        return Ok(Vec::new());
    }
    let mut records = register::run(harness)?;
    records.extend(locate::run(harness)?);
    records.extend(gather::run(harness)?);
    records.extend(copy::run(harness)?);
    records.extend(submit::run(harness)?);
    Ok(records)
}

/// Where hugepage `i` is for the device: no two that follow one another are side by side.
fn hugepage(i: u64) -> u64 {
    (1 << 32) + (i * 181 % HUGEPAGES) * 2 * PageSize::Size2M.bytes()
}

/// Where each 4 KiB page of the same memory is.
fn pages() -> impl Iterator<Item = Iova> {
    let in_each = PageSize::Size2M.bytes() / PageSize::Size4K.bytes();
    (0..HUGEPAGES * in_each)
        .map(move |page| Iova::new(hugepage(page / in_each) + page % in_each * PageSize::Size4K.bytes()))
}

/// The large buffer, as Pinfold has it.
fn large() -> Result<Registered, BenchError> {
    let device = (0..HUGEPAGES).map(|i| Iova::new(hugepage(i)));
    Ok(Registered::from_pages(ADDR, HUGEPAGES * PageSize::Size2M.bytes(), PageSize::Size2M, device)?)
}
