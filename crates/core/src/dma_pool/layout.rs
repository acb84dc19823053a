//! [`Layout`]: where blocks lie in a chunk and in a unit, and the conversion between places and
//! slots.
//!
//! A *unit* is an aligned 2 MiB of the span, or 1 GiB if a block is larger than 2 MiB; a chunk
//! never crosses one. Its blocks lie on a fixed grid, whatever its chunks: the block of *slot* `i`
//! starts at `i * size`. A chunk has those blocks that lie in it as a whole, so up to a block's
//! bytes of it are unused where it starts at no multiple of the size. Place and slot determine each
//! other for as long as the pool lives: a late free, whose chunk has been released, finds its own
//! block or none. Blocks that would cross the boundary form *groups* of one boundary each; then each
//! group has a grid of its own, and the rest of a group is unused. In a span that is aligned to
//! less than the boundary, they cross no multiple of its alignment instead.

use super::error::{CreateError, LARGEST};
use crate::addr::Iova;
use crate::frame::{Frame, Order};

/// Division by a run-time constant as one multiplication and one shift.
///
/// Exact for every dividend below 2^31: with `l = ceil(log2 d)` and `magic = ceil(2^(31 + l) / d)`,
/// the error of `x * magic / 2^(31 + l)` is less than `1 / d` for all `x < 2^31` (Granlund and
/// Montgomery, "Division by Invariant Integers using Multiplication", PLDI 1994, theorem 4.2).
#[derive(Clone, Copy, Debug)]
struct Divider {
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
    fn quotient(self, dividend: u64) -> u64 {
        dividend.wrapping_mul(self.magic) >> self.shift
    }
}

/// Division of a multiple of a run-time constant, and the check whether it is one, by one
/// multiplication.
///
/// With `d = odd * 2^zeros` and `odd * inverse = 1 (mod 2^64)`, a multiple `q * d` becomes
/// `q * 2^zeros` by the multiplication, and `q` by the rotation. Both are bijections, so no other
/// number becomes one of the `(2^64 - 1) / d + 1` quotients: it becomes a larger one (Warren,
/// "Hacker's Delight", 2nd edition, section 10-17).
#[derive(Clone, Copy, Debug)]
struct ExactDivider {
    inverse: u64,
    zeros: u32,
}

impl ExactDivider {
    /// `divisor` is 1 to 2^31.
    fn new(divisor: u64) -> Self {
        let zeros = divisor.trailing_zeros();
        let odd = divisor >> zeros;
        // Newton's iteration doubles the number of correct bits, of which `odd` itself has three.
        let inverse =
            (0..5).fold(odd, |x, _| x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x))));
        Self { inverse, zeros }
    }

    /// Returns the quotient of a multiple of the divisor; of any other number at least 2^33, more
    /// than any slot.
    #[inline(always)]
    fn quotient(self, dividend: u64) -> u64 {
        dividend.wrapping_mul(self.inverse).rotate_right(self.zeros)
    }
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// The distance between blocks; also how many bytes of a block may be used.
    size: u64,
    by_size: ExactDivider,
    /// log2 of a group's bytes; of a unit's without groups.
    group_shift: u32,
    /// The number of blocks in a group.
    group_blocks: u64,
    by_group: Divider,
    /// Whether a block's place is its slot times its size: no groups.
    plain: bool,
    /// log2 of a unit's bytes.
    unit_shift: u32,
    /// The number of slots in a unit.
    slots: u32,
    /// The alignment of ranges of the caller.
    range_align: u64,
    /// The first chunk's order, and the smallest and the largest that are used.
    first: Order,
    least: Order,
    most: Order,
}

impl Layout {
    /// Applies the rules of Linux's `dma_pool_create`: at least 16 bytes, rounded up to `align`;
    /// `align` 0 means 1, `boundary` 0 none. `start` is where the span begins, for the processor
    /// and for the device.
    pub(super) fn new(
        size: usize,
        align: usize,
        boundary: usize,
        (addr, iova): (usize, Iova),
    ) -> Result<Self, CreateError> {
        if size == 0 || size as u64 > LARGEST {
            return Err(CreateError::Size { size });
        }
        let align_bytes = align.max(1) as u64;
        if !align_bytes.is_power_of_two() {
            return Err(CreateError::Align { align });
        }
        let rounded =
            (size.max(16) as u64).checked_next_multiple_of(align_bytes).unwrap_or(u64::MAX);
        let too_large = CreateError::TooLarge { size: rounded, limit: LARGEST };
        let fits = Order::for_bytes(rounded).ok_or(too_large)?;
        let limit = boundary as u64;
        if boundary != 0 && !(limit.is_power_of_two() && limit >= rounded) {
            return Err(CreateError::Boundary { boundary, size: rounded });
        }
        let have = 1 << (addr as u64 | iova.raw()).trailing_zeros().min(63);
        let needed = align_bytes.max(if boundary == 0 { 1 } else { limit.min(bytes_of(fits)) });
        if needed > have {
            return Err(CreateError::Base { needed, have, addr, iova });
        }
        let unit_shift = if fits > Order::HUGE { 30 } else { 21 };
        let unit = 1u64 << unit_shift;
        let within = limit.min(have);
        let grouped = boundary != 0 && !within.is_multiple_of(rounded) && within < unit;
        let group_shift = if grouped { within.trailing_zeros() } else { unit_shift };
        let group_blocks = (1 << group_shift) / rounded;
        let slots = (unit >> group_shift) * group_blocks;
        let mut layout = Self {
            size: rounded,
            by_size: ExactDivider::new(rounded),
            group_shift,
            group_blocks,
            by_group: Divider::new(group_blocks),
            plain: !grouped,
            unit_shift,
            // At most 2^17.
            slots: u32::try_from(slots).unwrap_or(u32::MAX),
            range_align: align_bytes.max(limit.min(unit)),
            first: fits,
            least: fits,
            most: fits,
        };
        layout.choose_orders();
        Ok(layout)
    }

    /// Sets the orders of chunks. The smallest one always has a block, wherever it lies; at most a
    /// quarter of the first one can be unused; the largest has 2 MiB, unless blocks are larger.
    fn choose_orders(&mut self) {
        // None if a block is larger than 2 MiB.
        let orders = (self.least.get()..=Order::HUGE.get()).filter_map(Order::new);
        let mut holding = orders.filter(|&order| self.fewest_in(order) > 0).peekable();
        let Some(&least) = holding.peek() else { return };
        let unused = |order: Order| bytes_of(order) - self.fewest_in(order) * self.size;
        let first = holding.find(|&order| unused(order) * 4 <= bytes_of(order));
        (self.least, self.first, self.most) = (least, first.unwrap_or(least), Order::HUGE);
    }

    /// Returns how many blocks a chunk of this order has at least, wherever it lies.
    fn fewest_in(&self, order: Order) -> u64 {
        let bytes = bytes_of(order);
        if bytes >> self.group_shift > 0 {
            return self.blocks_in(bytes).into();
        }
        // A chunk starts at a multiple of its bytes. From there to the next multiple of the size,
        // all but their common divisor can lie.
        let common = 1 << self.size.trailing_zeros().min(bytes.trailing_zeros());
        bytes.saturating_sub(self.size - common) / self.size
    }

    /// Returns how many bytes of a block may be used.
    #[inline(always)]
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    #[inline(always)]
    pub(super) fn unit_shift(&self) -> u32 {
        self.unit_shift
    }

    /// Returns how many slots a unit has.
    pub(super) fn slots(&self) -> u32 {
        self.slots
    }

    pub(super) fn range_align(&self) -> u64 {
        self.range_align
    }

    /// Returns how many blocks the first `bytes` bytes of a unit hold: no chunk of this size has
    /// more, wherever it lies.
    pub(super) fn blocks_in(&self, bytes: u64) -> u32 {
        let (groups, rest) = (bytes >> self.group_shift, bytes & ((1 << self.group_shift) - 1));
        let blocks = groups * self.group_blocks + (rest / self.size).min(self.group_blocks);
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// Returns the first slot and the number of blocks of a chunk of `bytes` bytes at `place` in its
    /// unit.
    pub(super) fn chunk_at(&self, place: u64, bytes: u64) -> (u32, u32) {
        let (group, within) = (place >> self.group_shift, place & ((1 << self.group_shift) - 1));
        let in_group = within.div_ceil(self.size).min(self.group_blocks);
        // At most the number of slots.
        let first = u32::try_from(group * self.group_blocks + in_group).unwrap_or(u32::MAX);
        (first, self.blocks_in(place + bytes).saturating_sub(first))
    }

    /// Returns the slot of a place; `None` if no block starts there.
    #[inline(always)]
    pub(super) fn slot_at(&self, place: u64) -> Option<u32> {
        let (group, within) = if self.plain {
            (0, place)
        } else {
            (place >> self.group_shift, place & ((1 << self.group_shift) - 1))
        };
        let block = self.by_size.quotient(within);
        if block >= self.group_blocks {
            return None;
        }
        #[expect(clippy::cast_possible_truncation, reason = "less than the number of slots")]
        Some((group * self.group_blocks + block) as u32)
    }

    /// Returns the place of a slot.
    #[inline(always)]
    pub(super) fn place_of(&self, slot: u64) -> u64 {
        if self.plain {
            return slot * self.size;
        }
        let group = self.by_group.quotient(slot);
        (group << self.group_shift) + (slot - group * self.group_blocks) * self.size
    }

    /// Returns the order of the next chunk of a pool of `bytes` bytes: it doubles the pool, up to 2
    /// MiB.
    pub(super) fn next_order(&self, bytes: u64) -> Order {
        let doubling =
            Order::for_bytes(bytes.min(bytes_of(Order::HUGE)).max(1)).unwrap_or(self.most);
        doubling.clamp(self.first, self.most)
    }

    /// Returns the next smaller order to try when `order` is unavailable.
    pub(super) fn smaller(&self, order: Order) -> Option<Order> {
        order.get().checked_sub(1).and_then(Order::new).filter(|&order| order >= self.least)
    }

    /// Returns the largest order up to `order` whose chunk takes a pool of `blocks` blocks to at
    /// most `cap`, or past it by less than a chunk of the smallest size has: so the pool can reach
    /// every `cap`. `None` if it has that many.
    pub(super) fn order_within(&self, order: Order, blocks: u64, cap: u64) -> Option<Order> {
        let left = cap.checked_sub(blocks).filter(|&left| left > 0)?;
        let blocks_in = |order| u64::from(self.blocks_in(bytes_of(order)));
        let room = left.saturating_add(blocks_in(self.least).saturating_sub(1));
        core::iter::successors(Some(order), |&order| self.smaller(order))
            .find(|&order| blocks_in(order) <= room)
    }

    /// Refuses a span of `len` bytes that is shorter than the smallest chunk.
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

    fn layout(size: usize, align: usize, boundary: usize) -> Result<Layout, CreateError> {
        Layout::new(size, align, boundary, (1 << 30, Iova::new(1 << 32)))
    }

    #[test]
    fn a_span_aligned_to_less_than_the_boundary_has_blocks_within_its_alignment() {
        let start = (3 * 4096, Iova::new(5 * 4096));
        for size in [64, 192, 1500, 3000, 4096] {
            let layout = Layout::new(size, 0, 8192, start).unwrap();
            assert_eq!((layout.least, layout.most), (Order::PAGE, Order::HUGE));
            for slot in 0..layout.slots().into() {
                let place = layout.place_of(slot);
                for start in [start.0 as u64, start.1.raw()] {
                    let (first, last) = (start + place, start + place + layout.size() - 1);
                    assert_eq!(first >> 13, last >> 13, "{size}, slot {slot}");
                }
            }
        }
        let refused = Layout::new(5000, 1, 8192, (4096, Iova::new(0)));
        assert!(matches!(refused, Err(CreateError::Base { needed: 8192, have: 4096, .. })));
        let refused = Layout::new(64, 64, 0, (4096 + 16, Iova::new(0)));
        assert!(matches!(refused, Err(CreateError::Base { needed: 64, have: 16, .. })));
    }

    #[test]
    fn a_cap_is_exceeded_by_less_than_the_smallest_chunk() {
        for (size, cap) in
            [(64, 1), (64, 64), (64, 65), (192, 21), (192, 10_923), (3000, 7), (5 << 20, 3)]
        {
            let layout = layout(size, 0, 0).unwrap();
            let (mut blocks, mut order, mut chunks) = (0, layout.most(), 0);
            while let Some(next) = layout.order_within(order, blocks, cap) {
                assert!(next <= order);
                (blocks, order) = (blocks + u64::from(layout.blocks_in(bytes_of(next))), next);
                chunks += 1;
            }
            let least = u64::from(layout.blocks_in(bytes_of(layout.least)));
            assert!((cap..cap + least).contains(&blocks));
            assert!(chunks <= 12, "{chunks} chunks for {cap} blocks of {size}");
            assert_eq!(layout.order_within(order, cap + 1, cap), None);
        }
    }

    #[test]
    fn chunks_double_up_to_two_mebibytes() {
        let small = layout(128, 128, 0).unwrap();
        let orders =
            [0, 4096, 8192, 12288, 1 << 20, 2 << 20, 1 << 40].map(|b| small.next_order(b).get());
        assert_eq!(orders, [0, 0, 1, 2, 8, 9, 9]);
        assert_eq!(layout(2100, 0, 0).unwrap().next_order(0).get(), 2);
        // At most a quarter of the first one is unused, wherever it lies.
        let first = [1000, 1500, 40_000].map(|size| layout(size, 0, 0).unwrap().first.get());
        assert_eq!(first, [1, 2, 6]);
        assert_eq!(layout(2 << 20, 0, 0).unwrap().next_order(0).get(), 9);
        assert_eq!(layout((2 << 20) + 1, 0, 0).unwrap().next_order(0).get(), 18);
    }

    /// The rule for the smallest chunk in the documentation of
    /// [`Builder::build`](super::super::Builder::build).
    #[test]
    fn the_smallest_chunk_holds_a_block_wherever_it_lies() {
        for (size, boundary, kib) in [
            (16, 0, 4),
            (1500, 0, 4),
            (2047, 0, 4),
            (2048, 0, 4),
            (2049, 0, 8),
            (3072, 0, 8),
            (3000, 4096, 4),
            (3000, 8192, 8),
            (4096, 0, 4),
            (5000, 0, 16),
            (5000, 8192, 8),
            (5000, 1 << 30, 16),
            (700_000, 0, 2048),
            (1_200_000, 0, 2048),
            (2 << 20, 0, 2048),
            (3 << 20, 0, 1 << 20),
        ] {
            let layout = layout(size, 0, boundary).unwrap();
            assert_eq!(bytes_of(layout.least) >> 10, kib, "{size} bytes, boundary {boundary}");
        }
    }

    /// A chunk that ends within a block has no part of it, nor has the next one.
    #[test]
    fn a_block_that_two_chunks_share_is_in_neither() {
        let layout = layout(1500, 0, 0).unwrap();
        let chunks = [0, 4096, 8192, 12_288].map(|place| layout.chunk_at(place, 4096));
        assert_eq!(chunks, [(0, 2), (3, 2), (6, 2), (9, 1)]);
        assert_eq!((layout.fewest_in(Order::PAGE), layout.blocks_in(4096)), (1, 2));
        // The last group of a boundary ends before its grid does.
        let grouped = self::layout(1500, 0, 8192).unwrap();
        assert_eq!([4096, 12_288].map(|at| grouped.chunk_at(at, 4096)), [(3, 2), (8, 2)]);
    }

    /// A state behind the last would be in no line of states, or that of the next group's block.
    #[test]
    fn no_slot_is_behind_the_last_of_a_unit_or_group() {
        let large = layout(16_700_000, 0, 0).unwrap();
        assert_eq!((large.slots(), large.plain), (64, true));
        assert_eq!(large.slot_at(63 * 16_700_000), Some(63));
        assert_eq!(large.slot_at(64 * 16_700_000), None);
        let grouped = layout(192, 0, 4096).unwrap();
        assert_eq!((grouped.slots(), grouped.plain), (512 * 21, false));
        for (block, slot) in [(20, Some(20)), (21, None)] {
            assert_eq!(grouped.slot_at(block * 192), slot);
            let last_group = 511 * 4096;
            assert_eq!(grouped.slot_at(last_group + block * 192), slot.map(|slot| 511 * 21 + slot));
        }
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

        /// A unit cut into chunks of random orders: slots and places correspond, and no slot is
        /// used twice.
        #[test]
        fn slots_and_places_correspond(
            size in 1usize..9000, align in 0u32..8, boundary in 4u32..24,
            orders in prop::collection::vec(0u8..=9, 600),
        ) {
            let align = if align == 0 { 0 } else { 1usize << align };
            let Ok(layout) = layout(size, align, 1 << boundary) else { return Ok(()) };
            let (mut next_slot, mut start) = (0, 0u64);
            let mut orders = orders.into_iter().cycle();
            while start < 1 << layout.unit_shift() {
                let aligned = orders.find(|&o| start.is_multiple_of(4096 << o)).unwrap();
                let order = Order::new(aligned.max(layout.least.get())).unwrap();
                prop_assume!(start.is_multiple_of(bytes_of(order)));
                let (first, blocks) = layout.chunk_at(start, bytes_of(order));
                prop_assert!(first >= next_slot);
                prop_assert!(u64::from(blocks) >= layout.fewest_in(order).max(1));
                prop_assert!(blocks <= layout.blocks_in(bytes_of(order)));
                for slot in first..first + blocks {
                    let at = layout.place_of(slot.into());
                    prop_assert_eq!(layout.slot_at(at), Some(slot));
                    prop_assert_eq!(layout.slot_at(at + 1), None);
                    prop_assert!(at >= start && at + layout.size() <= start + bytes_of(order));
                    prop_assert_eq!(at >> boundary, (at + layout.size() - 1) >> boundary);
                    prop_assert!(at.is_multiple_of(align.max(1) as u64));
                }
                next_slot = first + blocks;
                prop_assert!(next_slot <= layout.slots());
                start += bytes_of(order);
            }
        }
    }
}
