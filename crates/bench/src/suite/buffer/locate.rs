//! Finding an offset.

use super::{ADDR, BenchError};
use crate::baseline::page_segments::PageSegments;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::Rng;
use pinfold_core::addr::{Iova, PageSize};
use pinfold_core::registered::Registered;

const PAGE: u64 = 4096;
/// How many offsets are drawn beforehand; they are gone through again and again.
const OFFSETS: usize = 4096;

pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let mut records = case(harness, "locate", 100_000)?;
    records.extend(case(harness, "locate-1", 1)?);
    Ok(records)
}

/// Page `i` of a buffer for the device: no two that follow one another are side by side.
fn page(i: u64) -> Iova {
    Iova::new((1 << 40) + (i * 7919 % 100_003) * 2 * PAGE)
}

fn case(harness: &Harness<'_>, case: &'static str, pages: u64) -> Result<Vec<Record>, BenchError> {
    let (times, walks) = (harness.scale(8_000_000), harness.scale(if pages == 1 { 8_000_000 } else { 4096 }));
    let buffer = Registered::from_pages(ADDR, pages * PAGE, PageSize::Size4K, (0..pages).map(page))?;
    let list = PageSegments::register(usize::try_from(pages).unwrap_or(0), (0..pages).map(page));
    let (mut dice, bytes) = (Rng::new(), usize::try_from(pages * PAGE).unwrap_or(usize::MAX));
    let offsets: Vec<u64> = (0..OFFSETS).map(|_| dice.below(bytes) as u64).collect();
    let (buffer, list, offsets) = (&buffer, &list, &offsets);
    // What is found is summed up, so that each look is made.
    harness.interleave(vec![
        Subject::new("pinfold", move |out: &mut Samples| {
            let (cost, sum) = Cost::of(|| {
                offsets.iter().cycle().take(times).try_fold(0u64, |sum, &offset| {
                    Ok::<_, BenchError>(sum.wrapping_add(buffer.locate(offset)?.iova.raw()))
                })
            });
            out.cost(case, cost, times);
            sum.map(|_| ())
        }),
        Subject::new("walk", move |out: &mut Samples| {
            let (cost, sum) = Cost::of(|| {
                let found = offsets.iter().cycle().take(walks).map(|&offset| list.walk(offset));
                found.fold(0u64, |sum, iova| sum.wrapping_add(iova.map_or(0, Iova::raw)))
            });
            std::hint::black_box(sum);
            out.cost(case, cost, walks);
            Ok(())
        }),
    ])
}
