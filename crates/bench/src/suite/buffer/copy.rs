//! Copies into DMA memory and out of it.

use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use pinfold::{Arena, Domain};
use std::cell::RefCell;
use std::hint::black_box;

/// The cases, and how many bytes each copies.
const SIZES: [(&str, usize); 6] = [
    ("copy-64", 64),
    ("copy-512", 512),
    ("copy-4k", 4 << 10),
    ("copy-64k", 64 << 10),
    ("copy-1m", 1 << 20),
    ("copy-8m", LARGEST),
];
const LARGEST: usize = 8 << 20;
/// How many bytes a run copies each way, within the limit of copies.
const BYTES: usize = 256 << 20;
/// The most copies of a run.
const MAX_COPIES: usize = 1 << 20;

pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let domain = Domain::soft()?;
    let arena = Arena::builder().size(3 * LARGEST as u64).build(&domain)?;
    // Both subjects copy from and to the same host memory, and their own memory is from the same
    // arena, touched before.
    let dma = arena.alloc_zeroed(LARGEST)?;
    let (mut plain, mut host) = (arena.alloc_zeroed(LARGEST)?, arena.alloc_zeroed(LARGEST)?);
    let (plain, host) = (plain.as_mut_slice()?, RefCell::new(host.as_mut_slice()?));
    let (dma, host) = (dma.memory(), &host);
    let mut records = Vec::new();
    for (case, len) in SIZES {
        let times = harness.scale((BYTES / len).min(MAX_COPIES));
        records.extend(harness.interleave(vec![
            Subject::new("pinfold", |out: &mut Samples| {
                let mut host = host.borrow_mut();
                let host = host.get_mut(..len).unwrap_or_default();
                copies(out, case, times, || {
                    dma.copy_from_slice(0, black_box(&*host))?;
                    Ok(dma.copy_to_slice(0, black_box(&mut *host))?)
                })
            }),
            Subject::new("memcpy", |out: &mut Samples| {
                let mut host = host.borrow_mut();
                let (host, plain) = (
                    host.get_mut(..len).unwrap_or_default(),
                    plain.get_mut(..len).unwrap_or_default(),
                );
                copies(out, case, times, || {
                    black_box(&mut *plain).copy_from_slice(black_box(&*host));
                    black_box(&mut *host).copy_from_slice(black_box(&*plain));
                    Ok(())
                })
            }),
        ])?);
    }
    Ok(records)
}

/// Measures `times` copies in and out, after a few that do not count.
#[inline(always)]
fn copies(
    out: &mut Samples,
    case: &'static str,
    times: usize,
    mut copy: impl FnMut() -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let mut work = |times| (0..times).try_for_each(|_| copy());
    work(times.div_ceil(16))?;
    let (cost, result) = Cost::of(|| work(times));
    out.cost(case, cost, times);
    result
}
