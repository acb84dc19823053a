//! [`Geometry`]: the layout of blocks in a chunk, and conversion between offsets and block numbers.

use super::error::CreateError;
use crate::addr::Iova;
use crate::frame::{Frame, Order};
use core::num::NonZero;

/// Division by a run-time constant as one multiplication and one shift.
///
/// Exact for every dividend below 2^31: with `l = ceil(log2 d)` and `magic = ceil(2^(31 + l) / d)`, the error of
/// `x * magic / 2^(31 + l)` is less than `1 / d` for all `x < 2^31` (Granlund and Montgomery, "Division by
/// Invariant Integers using Multiplication", PLDI 1994, theorem 4.2).
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Divider {
    magic: u64,
    shift: u32,
}

impl Divider {
    /// `divisor` is 1 to 2^31.
    fn new(divisor: u64) -> Self {
        let shift = 31 + divisor.next_power_of_two().trailing_zeros();
        Self { magic: (1u64 << shift).div_ceil(divisor), shift }
    }

    /// Returns the quotient of a dividend below 2^31; an arbitrary number for a larger one.
    #[inline(always)]
    pub(super) fn quotient(self, dividend: u64) -> u64 {
        dividend.wrapping_mul(self.magic) >> self.shift
    }
}

/// Division of what may be a multiple of a run-time constant, and the check whether it is one, by one multiplication.
///
/// With `d = odd * 2^zeros` and `odd * inverse = 1 (mod 2^64)`, a multiple `q * d` becomes `q * 2^zeros` by the
/// multiplication, and `q` by the rotation. Both are bijections, so no other number becomes one of the `(2^64 - 1) / d + 1`
/// quotients: it becomes a larger one (Warren, "Hacker's Delight", 2nd edition, section 10-17).
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct ExactDivider {
    inverse: u64,
    zeros: u32,
}

impl ExactDivider {
    /// `divisor` is 1 to 2^31.
    fn new(divisor: u64) -> Self {
        let zeros = divisor.trailing_zeros();
        let odd = divisor >> zeros;
        // Newton's method: an odd number is its own inverse modulo 8, and each step doubles the bits.
        let inverse = (0..5)
            .fold(odd, |inverse: u64, _| inverse.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(inverse))));
        Self { inverse, zeros }
    }

    /// Returns the quotient of a multiple of the divisor; of any other number at least 2^33, which no quotient of an offset
    /// in a chunk reaches.
    #[inline(always)]
    pub(super) fn quotient(self, dividend: u64) -> u64 {
        dividend.wrapping_mul(self.inverse).rotate_right(self.zeros)
    }
}

/// The layout of blocks in a chunk, the same for chunks of every size.
///
/// Blocks are numbered consecutively from the start of the chunk. If they would cross the boundary, they form *groups* of one
/// boundary each, and the rest of the bytes of each group is unused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    /// The distance between blocks; also how many bytes of a block may be used.
    size: u64,
    by_size: ExactDivider,
    /// log2 of a group's bytes; 31, more than any chunk, without groups.
    group_shift: u32,
    /// How many blocks a group has.
    group_blocks: u64,
    by_group: Divider,
    /// The first chunk's order, and the smallest and the largest that are used.
    first: Order,
    least: Order,
    most: Order,
    /// What is prefetched for writing with the block at offset 0, if blocks are prefetched.
    ahead: Option<NonZero<usize>>,
}

/// The largest chunk in bytes.
const LARGEST: u64 = 1 << 30;
const NO_GROUPS: u32 = 31;

impl Geometry {
    /// Applies the rules of Linux's `dma_pool_create`: at least 16 bytes, rounded up to `align`; `align` 0 means 1, `boundary` 0 none.
    pub(super) fn new(
        size: usize,
        align: usize,
        boundary: usize,
        addr: usize,
        iova: Iova,
    ) -> Result<Self, CreateError> {
        if size == 0 || i32::try_from(size).is_err() {
            return Err(CreateError::Size { size });
        }
        let align_bytes = align.max(1) as u64;
        if !align_bytes.is_power_of_two() {
            return Err(CreateError::Align { align });
        }
        let rounded = (size.max(16) as u64).checked_next_multiple_of(align_bytes).unwrap_or(u64::MAX);
        let too_large = CreateError::TooLarge { size: rounded, limit: LARGEST };
        let least = Order::for_bytes(rounded).ok_or(too_large)?;
        let limit = boundary as u64;
        if boundary != 0 && !(limit.is_power_of_two() && limit >= rounded) {
            return Err(CreateError::Boundary { boundary, size: rounded });
        }
        let grouped = boundary != 0 && !limit.is_multiple_of(rounded) && limit < LARGEST;
        let group_shift = if grouped { limit.trailing_zeros() } else { NO_GROUPS };
        let group_blocks = if grouped { limit / rounded } else { 1 << NO_GROUPS };
        let mut geometry = Self {
            size: rounded,
            by_size: ExactDivider::new(rounded),
            group_shift,
            group_blocks,
            by_group: Divider::new(group_blocks),
            first: least,
            least,
            most: least,
            ahead: None,
        };
        geometry.choose_orders(align_bytes, limit, addr, iova)?;
        Ok(geometry)
    }

    /// Sets the orders of chunks: the first is the smallest that wastes at most an eighth of itself, the largest 2 MiB, unless
    /// blocks are larger, or the span is aligned to less than a boundary that blocks must not cross.
    fn choose_orders(
        &mut self,
        align: u64,
        boundary: u64,
        addr: usize,
        iova: Iova,
    ) -> Result<(), CreateError> {
        let start = addr as u64 | iova.raw();
        let have = 1 << start.trailing_zeros().min(63);
        let least_bytes = bytes_of(self.least);
        let needed = align.max(if boundary == 0 { 1 } else { boundary.min(least_bytes) });
        if needed > have {
            return Err(CreateError::Base { needed, have, addr, iova });
        }
        if self.least > Order::HUGE {
            return Ok(());
        }
        let keeps = |order: &Order| boundary.min(bytes_of(*order)) <= have;
        let orders = || (self.least.get()..=Order::HUGE.get()).filter_map(Order::new).filter(keeps);
        let waste = |order: Order| bytes_of(order) - u64::from(self.blocks_in(order)) * self.size;
        let frugal = orders().find(|&order| waste(order) * 8 <= bytes_of(order));
        let largest = orders().next_back().unwrap_or(self.least);
        self.first = frugal.unwrap_or(self.least);
        self.most = largest;
        Ok(())
    }

    /// Returns how many bytes of a block may be used.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Has memory prefetched this many blocks on from a fresh one, in a span at this address.
    pub(super) fn prefetch(&mut self, addr: usize, blocks: u64) {
        // No more than a hint, so it may be at any address.
        let bytes = usize::try_from(self.size.saturating_mul(blocks)).unwrap_or(0);
        self.ahead = NonZero::new(addr.wrapping_add(bytes));
    }

    /// Returns the address of what is prefetched for writing with the block at offset 0, if blocks are prefetched.
    #[inline(always)]
    pub(super) fn ahead(&self) -> Option<NonZero<usize>> {
        self.ahead
    }

    /// Returns whether blocks are contiguous, without groups.
    pub(super) fn is_even(&self) -> bool {
        self.group_shift == NO_GROUPS
    }

    /// Returns how many blocks a chunk of this order has.
    pub(super) fn blocks_in(&self, order: Order) -> u32 {
        let bytes = bytes_of(order);
        let groups = bytes >> self.group_shift;
        let blocks = if groups == 0 { bytes / self.size } else { groups * self.group_blocks };
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// Returns the order of the next chunk of a pool of `bytes` bytes: it doubles the pool, up to 2 MiB.
    pub(super) fn next_order(&self, bytes: u64) -> Order {
        let doubling = Order::for_bytes(bytes.min(bytes_of(Order::HUGE)).max(1)).unwrap_or(self.most);
        doubling.clamp(self.first, self.most)
    }

    /// Returns the next smaller order to try when `order` is unavailable.
    pub(super) fn smaller(&self, order: Order) -> Option<Order> {
        order.get().checked_sub(1).and_then(Order::new).filter(|&order| order >= self.least)
    }

    /// Returns the largest order up to `order` whose chunk takes a pool of `blocks` blocks to at most `cap`, or past it by
    /// less than a chunk of the smallest size has: so the pool can reach every `cap`. `None` if it has that many.
    pub(super) fn order_within(&self, order: Order, blocks: u64, cap: u64) -> Option<Order> {
        let left = cap.checked_sub(blocks).filter(|&left| left > 0)?;
        let room = left.saturating_add(u64::from(self.blocks_in(self.least)).saturating_sub(1));
        let mut orders = core::iter::successors(Some(order), |&order| self.smaller(order));
        orders.find(|&order| u64::from(self.blocks_in(order)) <= room)
    }

    /// Refuses a span of `len` bytes in which not even the smallest chunk lies.
    pub(super) fn check_span(&self, len: u64) -> Result<(), CreateError> {
        let chunk = bytes_of(self.least);
        if len < chunk {
            return Err(CreateError::SpanTooSmall { size: self.size, chunk, len });
        }
        Ok(())
    }

    /// Returns the largest order of a chunk.
    pub(super) fn most(&self) -> Order {
        self.most
    }

    /// Returns the number of the block that starts at `within` bytes in the chunk, if blocks are at equal distances; at least 2^31,
    /// the number of no block, if none does.
    #[inline(always)]
    pub(super) fn quick_index_of(&self, within: u64) -> u64 {
        self.by_size.quotient(within)
    }

    /// Returns the number of the block that starts at `within` bytes (below 2^31) in the chunk; at least 2^31, the number of no
    /// block, if none does.
    #[inline(always)]
    pub(super) fn index_of(&self, within: u64) -> u64 {
        if self.is_even() {
            return self.quick_index_of(within);
        }
        let group = within >> self.group_shift;
        let block = self.by_size.quotient(within & ((1 << self.group_shift) - 1));
        if block < self.group_blocks { group * self.group_blocks + block } else { u64::MAX }
    }

    /// Returns the offset of block `index` (below 2^31) in the chunk, in bytes.
    #[inline(always)]
    pub(super) fn offset_of(&self, index: u64) -> u64 {
        if self.is_even() {
            return index * self.size;
        }
        let group = self.by_group.quotient(index);
        (group << self.group_shift) + (index - group * self.group_blocks) * self.size
    }
}

/// Returns the size of a run of this order in bytes.
pub(super) fn bytes_of(order: Order) -> u64 {
    u64::from(order.frames()) * Frame::BYTES
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry(size: usize, align: usize, boundary: usize) -> Result<Geometry, CreateError> {
        Geometry::new(size, align, boundary, 1 << 30, Iova::new(1 << 32))
    }

    #[test]
    fn impossible_layouts_are_refused() {
        assert_eq!(geometry(0, 1, 0).unwrap_err(), CreateError::Size { size: 0 });
        assert!(matches!(geometry(1 << 31, 1, 0), Err(CreateError::Size { .. })));
        assert!(matches!(
            geometry(i32::MAX as usize, 1, 0),
            Err(CreateError::TooLarge { limit: LARGEST, .. })
        ));
        assert!(matches!(geometry(64, 1 << 63, 0), Err(CreateError::TooLarge { .. })));
        assert!(matches!(geometry(64, 3, 0), Err(CreateError::Align { align: 3 })));
        assert!(matches!(geometry(64, 1, 48), Err(CreateError::Boundary { .. })));
        assert!(matches!(geometry(64, 1, 32), Err(CreateError::Boundary { .. })));
        let misaligned = Geometry::new(64, 64, 0, 4096 + 16, Iova::new(0));
        assert!(matches!(misaligned, Err(CreateError::Base { needed: 64, have: 16, .. })));
        let boundary = Geometry::new(5000, 1, 8192, 4096, Iova::new(0));
        assert!(matches!(boundary, Err(CreateError::Base { needed: 8192, have: 4096, .. })));
    }

    #[test]
    fn a_span_aligned_to_less_than_the_boundary_gets_chunks_that_cannot_cross_it() {
        let geometry = Geometry::new(64, 0, 1 << 20, 4096, Iova::new(0)).unwrap();
        assert_eq!(geometry.next_order(1 << 30), Order::PAGE);
    }

    #[test]
    fn sizes_are_rounded_as_the_kernel_does() {
        for (size, align, rounded) in [(1, 0, 16), (17, 0, 17), (17, 8, 24), (128, 128, 128), (3, 64, 64)] {
            assert_eq!(geometry(size, align, 0).unwrap().size(), rounded);
        }
    }

    #[test]
    fn a_cap_is_reached_by_chunks_that_exceed_it_by_less_than_the_smallest() {
        for (size, cap) in [(64, 1), (64, 64), (64, 65), (192, 21), (192, 10_923), (3000, 7), (5 << 20, 3)] {
            let geometry = geometry(size, 0, 0).unwrap();
            let (mut blocks, mut order, mut chunks) = (0, geometry.most(), 0);
            while let Some(next) = geometry.order_within(order, blocks, cap) {
                assert!(next <= order);
                (blocks, order, chunks) = (blocks + u64::from(geometry.blocks_in(next)), next, chunks + 1);
            }
            assert!((cap..cap + u64::from(geometry.blocks_in(geometry.least))).contains(&blocks));
            assert!(chunks <= 12, "{chunks} chunks for {cap} blocks of {size}");
            assert_eq!(geometry.order_within(order, cap + 1, cap), None);
            assert_eq!(geometry.order_within(order, 0, u64::MAX), Some(order));
        }
    }

    #[test]
    fn chunks_double_up_to_two_mebibytes() {
        let small = geometry(128, 128, 0).unwrap();
        let orders = [0, 4096, 8192, 12288, 1 << 20, 2 << 20, 1 << 40].map(|b| small.next_order(b).get());
        assert_eq!(orders, [0, 0, 1, 2, 8, 9, 9]);
        assert_eq!(geometry(2100, 0, 0).unwrap().next_order(0).get(), 2);
        assert_eq!(geometry(2 << 20, 0, 0).unwrap().next_order(0).get(), 9);
        assert_eq!(geometry((2 << 20) + 1, 0, 0).unwrap().next_order(0).get(), 18);
        assert_eq!(geometry(1 << 30, 0, 0).unwrap().next_order(1 << 30).get(), 18);
    }

    proptest! {
        #[test]
        fn division_is_exact(divisor in 1u64..=1 << 31, dividend in 0u64..1 << 31) {
            let by = Divider::new(divisor);
            for x in [dividend, dividend / divisor * divisor, (dividend / divisor * divisor).saturating_sub(1)] {
                prop_assert_eq!(by.quotient(x), x / divisor);
            }
        }

        #[test]
        fn only_multiples_have_exact_quotients(divisor in 1u64..=1 << 31, dividend: u64, factor in 0u64..1 << 31) {
            let by = ExactDivider::new(divisor);
            prop_assert_eq!(by.quotient(factor * divisor), factor);
            let quotient = by.quotient(dividend);
            match dividend % divisor {
                0 => prop_assert_eq!(quotient, dividend / divisor),
                _ => prop_assert!(quotient > u64::MAX / divisor),
            }
        }

        #[test]
        fn blocks_lie_apart_aligned_and_within_the_boundary(
            size in 1usize..9000, align in 0u32..8, boundary in 4u32..24, order in 0u8..=9,
        ) {
            let align = if align == 0 { 0 } else { 1usize << align };
            let Ok(geometry) = geometry(size, align, 1 << boundary) else { return Ok(()) };
            let order = Order::new(order).unwrap();
            let blocks = u64::from(geometry.blocks_in(order));
            let mut end = 0;
            for index in 0..blocks {
                let at = geometry.offset_of(index);
                let last = at + geometry.size() - 1;
                prop_assert!(at >= end && last < bytes_of(order));
                prop_assert!(at.is_multiple_of(align.max(1) as u64));
                prop_assert_eq!(at >> boundary, last >> boundary);
                prop_assert_eq!(geometry.index_of(at), index);
                prop_assert!(geometry.index_of(at + 1) >= 1 << 31);
                prop_assert!(geometry.index_of(last) >= 1 << 31);
                end = last + 1;
            }
        }
    }
}
