//! Locating an offset.

use super::setup::ADDR;
use crate::baseline::page_segments::PageSegments;
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::handle::Rng;
use pinfold_core::addr::{Iova, PageSize};
use pinfold_core::registered::Registered;

const PAGE: u64 = 4096;
/// How many offsets are drawn beforehand and used in turn.
const OFFSETS: usize = 4096;

pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let mut records = case(harness, "locate", 100_000)?;
    records.extend(case(harness, "locate-1", 1)?);
    Ok(records)
}

/// Returns the device address of page `i`: no two consecutive ones are adjacent.
fn page(i: u64) -> Iova {
    Iova::new((1 << 40) + (i * 7919 % 100_003) * 2 * PAGE)
}

fn case(harness: &Harness<'_>, case: &'static str, pages: u64) -> Result<Vec<Record>, BenchError> {
    let (times, walks) =
        (harness.scale(8_000_000), harness.scale(if pages == 1 { 8_000_000 } else { 4096 }));
    let buffer =
        Registered::from_pages(ADDR, pages * PAGE, PageSize::Size4K, (0..pages).map(page))?;
    let list = PageSegments::register(usize::try_from(pages).unwrap_or(0), (0..pages).map(page));
    let (mut rng, bytes) = (Rng::new(), usize::try_from(pages * PAGE).unwrap_or(usize::MAX));
    let offsets: Vec<u64> = (0..OFFSETS).map(|_| rng.below(bytes) as u64).collect();
    let (buffer, list, offsets) = (&buffer, &list, &offsets);
    // The results are summed up, so that no look-up is optimised away.
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
