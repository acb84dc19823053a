//! Expresses ranges of pages in aligned blocks.

use super::costs::FlushCosts;
use super::descriptor::{Block, Descriptor, Scope};
use super::flush::Pages;
use alloc::vec::Vec;

/// How many blocks may be under consideration at a time.
pub(super) const MAX_BLOCKS: usize = 512;

/// Appends to `out` the descriptors that cover `pages`, which are in ascending order and do not
/// abut, in ascending order, and returns how many pages they flush. `None`, with nothing appended,
/// if a flush of the domain costs less, or if there would be too many.
#[inline(always)]
pub(super) fn cover(
    pages: &[Pages],
    costs: &FlushCosts,
    max_order: u32,
    out: &mut Vec<Descriptor>,
) -> Option<u64> {
    if let [one] = pages {
        // A block as it is, as most single requests are.
        let order = one.count().trailing_zeros();
        if one.count().is_power_of_two()
            && one.first.is_multiple_of(one.count())
            && order <= max_order
        {
            let scope = Scope::Block(Block::containing(one.first, order));
            out.push(Descriptor::Iotlb { scope, leaf_only: one.leaf_only });
            return Some(one.count());
        }
    }
    cover_all(pages, costs, max_order, out)
}

/// Covers what is not one block as it is, as [`cover`] does. A call of its own, so that the common
/// case needs none.
#[inline(never)]
fn cover_all(
    pages: &[Pages],
    costs: &FlushCosts,
    max_order: u32,
    out: &mut Vec<Descriptor>,
) -> Option<u64> {
    let mark = out.len();
    let (Some(first), Some(last)) = (pages.first(), pages.last()) else { return Some(0) };
    let mut cover = Cover { costs, max_order, limit: mark + MAX_BLOCKS, out };
    let covered = cover.within(pages, first.first, last.end);
    let descriptors = (out.len() - mark) as u64;
    let cheap = descriptors.saturating_mul(costs.descriptor_ns)
        <= costs.descriptor_ns.saturating_add(costs.domain_ns);
    let covered = covered.filter(|_| cheap);
    if covered.is_none() {
        out.truncate(mark);
    }
    covered.map(|covered| covered.requested + covered.extra)
}

struct Cover<'a> {
    costs: &'a FlushCosts,
    max_order: u32,
    limit: usize,
    out: &'a mut Vec<Descriptor>,
}

/// What the blocks of a part of the ranges cover.
struct Covered {
    requested: u64,
    /// Pages that were not requested.
    extra: u64,
}

impl Cover<'_> {
    /// Covers what of `pages` is in `from..to`: each of them is, in part. Halves the smallest block
    /// around it, down to blocks that were requested as a whole, and puts one block for two halves
    /// where that costs less. The depth of the recursion is at most the number of bits of a page
    /// number.
    fn within(&mut self, pages: &[Pages], from: u64, to: u64) -> Option<Covered> {
        let (head, tail) = (pages.first()?, pages.last()?);
        let (first, last) = (head.first.max(from), tail.end.min(to) - 1);
        let order = u64::BITS - (first ^ last).leading_zeros();
        let block = Block::containing(first, order);
        let (start, size) = (block.start().raw() >> super::descriptor::PAGE_SHIFT, block.pages());
        let allowed = order <= self.max_order;
        if pages.len() == 1 && last - first + 1 == size && allowed {
            return self
                .push(block, head.leaf_only)
                .then_some(Covered { requested: size, extra: 0 });
        }
        let (mark, middle) = (self.out.len(), start + size / 2);
        let split = pages.partition_point(|pages| pages.first < middle);
        // The last range that begins in the lower half may reach into the upper one.
        let reaches =
            split.checked_sub(1).is_some_and(|i| pages.get(i).is_some_and(|p| p.end > middle));
        let low = self.within(pages.get(..split)?, first, middle)?;
        let high = self.within(pages.get(split - usize::from(reaches)..)?, middle, last + 1)?;
        let halves =
            Covered { requested: low.requested + high.requested, extra: low.extra + high.extra };
        let whole = Covered { requested: halves.requested, extra: size - halves.requested };
        // Both halves push at least one block.
        let saved = (self.out.len() - mark - 1) as u64;
        let more = whole.extra - halves.extra;
        let pays = saved.saturating_mul(self.costs.descriptor_ns)
            >= more.saturating_mul(self.costs.refill_ns);
        if !(allowed && pays && whole.extra <= whole.requested) {
            return Some(halves);
        }
        self.out.truncate(mark);
        self.push(block, pages.iter().all(|pages| pages.leaf_only)).then_some(whole)
    }

    /// Returns false if there are too many blocks.
    fn push(&mut self, block: Block, leaf_only: bool) -> bool {
        let room = self.out.len() < self.limit;
        if room {
            self.out.push(Descriptor::Iotlb { scope: Scope::Block(block), leaf_only });
        }
        room
    }
}
