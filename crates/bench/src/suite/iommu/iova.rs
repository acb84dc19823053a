//! Addresses alone: `iova-pair`, `iova-128`, `iova-worst`, `static-50k`.

use super::addresses::{Addresses, Cached, Mapped, Owner, Shared, Tree2015, TreeMerged};
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Cost, Harness, Samples, Subject};
use crate::policy::static_maps;
use crate::record::{Metric, Record};
use crate::suite::handle::Rng;
use std::hint::black_box;
use std::time::Instant;

/// How many ranges are in use in `iova-128`, and mappings are kept in `static-50k`.
const LIVE: usize = 50_000;
/// How many are in `iova-worst`: all but 48,574 of the pages below 4 GiB.
const WORST: usize = 1_000_000;

type Outcome = Result<(), BenchError>;

pub(super) fn pairs(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let times = harness.scale(400_000);
    let mut records = harness.interleave(vec![
        Subject::countable("pinfold", pair::<Owner>("iova-pair", 1, times)),
        Subject::countable("pinfold-mapping", pair::<Mapped>("iova-pair", 1, times)),
        Subject::countable("pinfold-shared", pair::<Shared>("iova-pair", 1, times)),
        Subject::new("magazines", pair::<Cached>("iova-pair", 1, times)),
        Subject::new("tree-2015", pair::<Tree2015>("iova-pair", 1, times)),
        Subject::new("tree-merged", pair::<TreeMerged>("iova-pair", 1, times)),
    ])?;
    let (live, times) = (harness.scale(LIVE), harness.scale(40_000));
    records.extend(harness.interleave(vec![
        Subject::countable("pinfold", among::<Owner>(live, times)),
        Subject::countable("pinfold-mapping", among::<Mapped>(live, times)),
        Subject::countable("pinfold-shared", among::<Shared>(live, times)),
        Subject::new("magazines", among::<Cached>(live, times)),
        Subject::new("tree-2015", among::<Tree2015>(live, times)),
        Subject::new("tree-merged", among::<TreeMerged>(live, times)),
    ])?);
    Ok(records)
}

/// Returns a run that allocates and frees a range of `pages` pages.
fn pair<A: Addresses>(
    case: &'static str,
    pages: u64,
    times: usize,
) -> impl FnMut(&mut Samples) -> Outcome {
    move |out| {
        let mut addresses = A::new()?;
        repeat(&mut addresses, pages, 1000)?;
        out.cost(case, repeat(&mut addresses, pages, times)?, times);
        Ok(())
    }
}

#[inline(always)]
fn repeat<A: Addresses>(addresses: &mut A, pages: u64, times: usize) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for _ in 0..times {
            let range = addresses.alloc(pages)?;
            // The address alone is used: a whole range, which some subjects keep in registers,
            // would pass through memory.
            black_box(A::start(&range));
            addresses.free(range)?;
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Returns a run that allocates and frees 128 pages beside `live` ranges of 8 pages with as many
/// holes between them.
fn among<A: Addresses>(live: usize, times: usize) -> impl FnMut(&mut Samples) -> Outcome {
    move |out| {
        let mut addresses = A::new()?;
        let all: Vec<A::Range> =
            (0..2 * live).map(|_| addresses.alloc(8)).collect::<Result<_, _>>()?;
        let mut kept = Vec::with_capacity(live);
        for (i, range) in all.into_iter().enumerate() {
            if i % 2 == 0 {
                kept.push(range);
            } else {
                addresses.free(range)?;
            }
        }
        repeat(&mut addresses, 128, 100)?;
        out.cost("iova-128", repeat(&mut addresses, 128, times)?, times);
        kept.into_iter().try_for_each(|range| addresses.free(range))
    }
}

/// Measures single allocations below 4 GiB among a million ranges: the 99.9th percentile of those
/// of one page, which succeed, and of those of two, which seldom do and search everything.
pub(super) fn worst(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    let live = harness.scale(WORST);
    harness.once().interleave(vec![
        Subject::new("pinfold-shared", worst_of::<Shared>(live, harness.scale(20_000))),
        // A search takes milliseconds.
        Subject::new("tree-2015", worst_of::<Tree2015>(live, harness.scale(16))),
    ])
}

fn worst_of<A: Addresses>(live: usize, samples: usize) -> impl FnMut(&mut Samples) -> Outcome {
    move |out| {
        let mut addresses = A::new()?;
        let mut used: Vec<A::Range> = Vec::with_capacity(live);
        for _ in 0..live {
            used.push(addresses.alloc_low(1)?.ok_or(BenchError::Addresses)?);
        }
        // The rest is taken too, so that only what is freed at random is free.
        let mut rest = Vec::new();
        for order in (0..=16).rev() {
            while let Some(range) = addresses.alloc_low(1 << order)? {
                rest.push(range);
            }
        }
        let mut rng = Rng::new();
        let mut times = Vec::with_capacity(2 * samples);
        let mut timed = |addresses: &mut A, pages| {
            let start = Instant::now();
            let range = addresses.alloc_low(pages);
            times.push(start.elapsed());
            range
        };
        for _ in 0..samples {
            addresses.free(used.swap_remove(rng.below(used.len())))?;
            if let Some(two) = timed(&mut addresses, 2)? {
                addresses.free(two)?;
            }
            used.push(timed(&mut addresses, 1)?.ok_or(BenchError::Addresses)?);
        }
        times.sort_unstable();
        let at = times.len() - 1 - times.len() / 1000;
        let ns = times.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e9);
        out.figure("iova-worst", Metric::Time, "ns/op, p99.9", ns);
        used.into_iter().chain(rest).try_for_each(|range| addresses.free(range))
    }
}

/// Counts the entries that 50,000 mappings of four drivers need.
pub(super) fn static_50k(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    harness.once().interleave(vec![
        Subject::new("pinfold", keep::<Owner>),
        Subject::new("pinfold-shared", keep::<Shared>),
        Subject::new("magazines", keep::<Cached>),
        Subject::new("tree-2015", keep::<Tree2015>),
        Subject::new("tree-merged", keep::<TreeMerged>),
    ])
}

fn keep<A: Addresses>(out: &mut Samples) -> Outcome {
    let mut addresses = A::new()?;
    let kept: Vec<A::Range> =
        static_maps(LIVE).map(|pages| addresses.alloc(pages)).collect::<Result<_, _>>()?;
    #[expect(clippy::cast_precision_loss, reason = "at most some megabytes")]
    let figure = |count: usize| count as f64;
    out.figure("static-50k", Metric::Count, "entries", figure(addresses.entries()));
    if let Some(bytes) = addresses.metadata_bytes() {
        out.figure("static-50k", Metric::Bytes, "bytes", figure(bytes));
    }
    kept.into_iter().try_for_each(|range| addresses.free(range))
}
