//! Descriptors against the pages that were requested.

use super::super::batch::{Batch, Flush, Pages, cover};
use super::super::queue::{Descriptor, FlushCosts, Scope};
use crate::addr::{Iova, IovaRange};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::vec::Vec;

fn pages(first: u64, count: u64, leaf_only: bool) -> Pages {
    let range = IovaRange::new(Iova::new(first << 12), count << 12).unwrap();
    Pages::new(&Flush { range, leaf_only })
}

fn blocks(out: &[Descriptor]) -> Vec<(u64, u32, bool)> {
    out.iter()
        .map(|descriptor| match descriptor {
            Descriptor::Iotlb { scope: Scope::Block(block), leaf_only } => {
                (block.start().raw() >> 12, block.order(), *leaf_only)
            }
            other => panic!("{other:?}"),
        })
        .collect()
}

fn covered(requests: &[Pages], costs: &FlushCosts) -> (Option<u64>, Vec<(u64, u32)>) {
    let mut out = Vec::new();
    let flushed = cover(requests, costs, 18, &mut out);
    (flushed, blocks(&out).into_iter().map(|(page, order, _)| (page, order)).collect())
}

#[test]
fn a_range_is_covered_by_aligned_blocks() {
    let exact = |first, count| covered(&[pages(first, count, true)], &FlushCosts::EXACT).1;
    assert_eq!(
        exact(511, 2),
        [(511, 0), (512, 0)],
        "across 2 MiB: two descriptors, not a thousand pages"
    );
    assert_eq!(exact(64, 64), [(64, 6)]);
    assert_eq!(exact(1, 7), [(1, 0), (2, 1), (4, 2)]);
    assert_eq!(exact((1 << 52) - 2, 1), [((1 << 52) - 2, 0)]);
    assert_eq!(exact(1 << 18, 3 << 18).len(), 3, "no block is larger than a descriptor can name");
}

#[test]
fn a_block_replaces_several_where_that_costs_less() {
    let cost = |ranges: &[(u64, u64)]| {
        let requests: Vec<_> =
            ranges.iter().map(|&(first, count)| pages(first, count, true)).collect();
        covered(&requests, &FlushCosts::default())
    };
    assert_eq!(cost(&[(1, 63)]), (Some(64), vec![(0, 6)]), "one page more saves five descriptors");
    assert_eq!(cost(&[(0, 64)]), (Some(64), vec![(0, 6)]));
    assert_eq!(
        cost(&[(0, 1), (2, 1)]),
        (Some(4), vec![(0, 2)]),
        "two pages more cost less than a descriptor"
    );
    assert_eq!(
        cost(&[(0, 1), (4, 1)]),
        (Some(2), vec![(0, 0), (4, 0)]),
        "most of the block was not requested"
    );
    assert_eq!(cost(&[(511, 2)]).0, Some(2));
}

#[test]
fn a_flush_of_the_domain_replaces_what_costs_more() {
    let apart = |count: u64| (0..count).map(|i| pages(i * 8, 1, true)).collect::<Vec<_>>();
    let costs = FlushCosts::default();
    let most = 1 + costs.domain_ns / costs.descriptor_ns;
    assert_eq!(covered(&apart(most), &costs).0, Some(most));
    assert_eq!(covered(&apart(most + 1), &costs), (None, vec![]));
    // 2^33 blocks of 1 GiB would be needed, and are not tried.
    assert_eq!(covered(&[pages(0, 1 << 51, true)], &FlushCosts::EXACT), (None, vec![]));
}

/// The least number of aligned blocks that are exactly a range: take the largest that begins at its
/// start, and go on.
fn fewest(mut first: u64, end: u64) -> u64 {
    let mut blocks = 0;
    while first < end {
        let aligned = if first == 0 { 63 } else { first.trailing_zeros() };
        first += 1 << aligned.min((end - first).ilog2());
        blocks += 1;
    }
    blocks
}

proptest! {
    #[test]
    fn a_batch_is_covered_as_the_rule_says(
        base in prop_oneof![Just(0u64), 0..1u64 << 40],
        asked in proptest::collection::vec((0u64..400, 1u64..70, any::<bool>()), 1..40),
        (descriptor_ns, refill_ns) in (0u64..500, 0u64..500),
    ) {
        let (mut batch, mut model) = (Batch::new(), BTreeMap::new());
        for &(first, count, leaf_only) in &asked {
            batch.push(pages(base + first, count, leaf_only));
            for page in first..first + count {
                *model.entry(base + page).or_insert(true) &= leaf_only;
            }
        }
        batch.merge();
        prop_assert_eq!(batch.merged() + batch.pages().len() as u64, asked.len() as u64);
        prop_assert!(batch.pages().is_sorted_by(|a, b| a.end < b.first), "in ascending order, and none abut");
        let costs = FlushCosts { descriptor_ns, refill_ns, domain_ns: u64::MAX };
        let mut exact = Vec::new();
        let all = model.len() as u64;
        prop_assert_eq!(cover(batch.pages(), &FlushCosts::EXACT, 18, &mut exact), Some(all));
        prop_assert_eq!(exact.len() as u64, batch.pages().iter().map(|p| fewest(p.first, p.end)).sum::<u64>());
        let mut out = Vec::new();
        let flushed = cover(batch.pages(), &costs, 18, &mut out).unwrap();
        let (out, mut total, mut end) = (blocks(&out), 0, 0);
        for &(first, order, leaf_only) in &out {
            let size = 1u64 << order;
            prop_assert!(first.is_multiple_of(size) && first >= end, "aligned, ascending, apart");
            end = first + size;
            total += size;
            let inside = || model.range(first..end);
            prop_assert!(inside().count() as u64 * 2 >= size, "at least half of a block was requested");
            // More may be flushed beyond leaves than was asked, never less.
            prop_assert!(!leaf_only || inside().all(|(_, leaf)| *leaf));
        }
        let covers = |page: u64| out.iter().any(|&(first, order, _)| page >> order == first >> order);
        prop_assert!(model.keys().all(|page| covers(*page)));
        prop_assert!(total == flushed && flushed <= 2 * all);
        let price = |descriptors: usize, pages: u64| descriptors as u64 * descriptor_ns + (pages - all) * refill_ns;
        prop_assert!(price(out.len(), flushed) <= price(exact.len(), all));
    }
}
