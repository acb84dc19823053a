//! The I/O virtual addresses of a domain whose table the kernel keeps.

use super::context::Limits;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::BackendError;
use pinfold_core::iova::IovaSpace;

/// The usable ranges of a kernel that does not report them: the narrowest IOMMU of x86, without its
/// interrupt window.
const DEFAULT_RANGES: [(u64, u64); 2] = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];

/// Returns the addresses that may be allocated: those that the kernel translates, within the `bits`
/// that the device reaches.
pub(crate) fn iova_space(limits: &Limits, bits: u32) -> Result<IovaSpace, BackendError> {
    let reach =
        usable(limits).iter().map(|(_, last)| u64::BITS - last.leading_zeros()).max().unwrap_or(0);
    // A width below the minimum of `IovaSpace` is an error; one above its maximum is used in part.
    let space = IovaSpace::new(reach.min(bits).min(57))?;
    for gap in gaps(limits, bits) {
        space.reserve(gap)?;
    }
    Ok(space)
}

/// Returns what lies between the usable ranges, after them, and beyond `bits`.
pub(crate) fn gaps(limits: &Limits, bits: u32) -> Vec<IovaRange> {
    let mut gaps = Vec::new();
    let mut free_from = 0u64;
    let beyond = 1u64.checked_shl(bits).unwrap_or(u64::MAX);
    for (first, last) in usable(limits).into_iter().chain([(u64::MAX, u64::MAX)]) {
        // A range need not begin or end at a page: the granules that it does not fill are reserved
        // with the gap.
        let gap = first.saturating_sub(free_from);
        gaps.extend(IovaRange::new(Iova::new(free_from), gap));
        free_from = free_from.max(last.saturating_add(1));
    }
    gaps.extend(IovaRange::new(Iova::new(beyond), u64::MAX - beyond));
    gaps
}

/// Returns the usable ranges in ascending order.
fn usable(limits: &Limits) -> Vec<(u64, u64)> {
    let mut ranges = limits.ranges.clone().unwrap_or_else(|| DEFAULT_RANGES.to_vec());
    ranges.retain(|(first, last)| first <= last);
    ranges.sort_unstable();
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limits(ranges: &[(u64, u64)]) -> Limits {
        Limits { ranges: Some(ranges.to_vec()), ..Limits::default() }
    }

    #[test]
    fn the_interrupt_window_is_never_allocated() {
        for limits in [limits(&DEFAULT_RANGES), Limits::default()] {
            let space = iova_space(&limits, 32).unwrap();
            let window = IovaRange::new(Iova::new(0xfee0_0000), 0x10_0000).unwrap();
            assert!(space.alloc_at(window).is_err());
            let mut got = 0u64;
            while let Ok(range) = space.alloc(1 << 20, 4096, None) {
                assert!(!range.overlaps(&window) && range.end().raw() <= 1 << 32, "{range}");
                got += range.len();
            }
            assert_eq!(
                got,
                (1 << 32) - (2 << 20),
                "all but the window and the piece that the null page breaks"
            );
        }
    }

    #[test]
    fn the_width_is_the_smaller_of_iommu_and_device() {
        assert_eq!(iova_space(&limits(&DEFAULT_RANGES), 64).unwrap().bits(), 39);
        assert_eq!(iova_space(&limits(&DEFAULT_RANGES), 36).unwrap().bits(), 36);
        assert_eq!(iova_space(&limits(&[(0, u64::MAX)]), 64).unwrap().bits(), 57);
        assert!(iova_space(&limits(&[]), 64).is_err(), "nothing is translated");
    }

    proptest! {
        #[test]
        fn nothing_outside_the_ranges_is_allocated(ranges in proptest::collection::vec((0u64..1 << 24, 0u64..1 << 24), 1..6)) {
            let limits = limits(&ranges);
            if let Ok(space) = iova_space(&limits, 24) {
                while let Ok(got) = space.alloc(0x4000, 0x1000, None) {
                    let inside = |at: u64| ranges.iter().any(|(first, last)| (*first..=*last).contains(&at));
                    prop_assert!((got.start().raw()..got.end().raw()).step_by(0x400).all(inside), "{got}");
                }
            }
        }
    }
}
