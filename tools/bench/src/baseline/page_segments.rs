//! `pages-4k`: a registered buffer with a segment for every 4 KiB page, as io_uring stored buffers
//! on several hugepages before Linux 6.12.

use super::BaselineError;
use pinfold_core::addr::{Iova, Segment};
use pinfold_core::gather::Profile;

/// The bytes of a page.
const PAGE: u64 = 4096;

/// A buffer as a list of its pages, 16 bytes each.
#[derive(Clone, Debug)]
pub(crate) struct PageSegments(Vec<Segment>);

impl PageSegments {
    /// Registers a buffer of `pages` pages at the addresses in `device`.
    pub(crate) fn register(pages: usize, device: impl IntoIterator<Item = Iova>) -> Self {
        let mut segments = Vec::with_capacity(pages);
        segments.extend(device.into_iter().take(pages).map(|iova| Segment { iova, len: PAGE }));
        Self(segments)
    }

    /// Returns the bytes of the list.
    pub(crate) fn table_bytes(&self) -> usize {
        size_of_val(self.0.as_slice())
    }

    /// Returns the segments of a range, the first found by division, one segment per page.
    pub(crate) fn part(&self, offset: u64, len: u64) -> impl Iterator<Item = Segment> {
        let first = usize::try_from(offset / PAGE).unwrap_or(usize::MAX);
        let (mut skip, mut left) = (offset % PAGE, len);
        self.0.get(first..).unwrap_or_default().iter().map_while(move |segment| {
            let len = (segment.len - skip).min(left);
            let iova = segment.iova.checked_add(skip)?;
            (skip, left) = (0, left - len);
            (len > 0).then_some(Segment { iova, len })
        })
    }

    /// Writes the segments of a range to `slots`, one per page, checked against the profile.
    /// Returns their number.
    ///
    /// # Errors
    /// [`BaselineError::Segments`] where there are too few slots or the device does not accept a
    /// segment.
    pub(crate) fn gather(
        &self,
        (offset, len): (u64, u64),
        profile: &Profile,
        slots: &mut [Segment],
    ) -> Result<usize, BaselineError> {
        let (mut used, available) = (0, slots.len());
        let mut slots = slots.iter_mut();
        for segment in self.part(offset, len) {
            let misaligned = (segment.iova.raw() | segment.len) & (profile.align() - 1) != 0;
            let boundary = profile.boundary();
            let crosses = boundary != 0
                && segment.iova.raw() / boundary
                    != (segment.iova.raw() + (segment.len - 1)) / boundary;
            let slot = slots
                .next()
                .filter(|_| !misaligned && !crosses && segment.len <= profile.max_segment_bytes());
            *slot.ok_or(BaselineError::Segments(available))? = segment;
            used += 1;
        }
        Ok(used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_is_a_segment() {
        let pages = [0x1000, 0x2000, 0x9000, 0x8000].map(Iova::new);
        let buffer = PageSegments::register(4, pages);
        assert_eq!(buffer.table_bytes(), 64);
        let part: Vec<_> = buffer.part(4000, 5000).map(|s| (s.iova.raw(), s.len)).collect();
        assert_eq!(part, [(0x1fa0, 96), (0x2000, 4096), (0x9000, 808)]);
        let profile = Profile::new(9, 4096, 0, 4).unwrap();
        let mut slots = [Segment { iova: Iova::new(0), len: 0 }; 4];
        assert_eq!(buffer.gather((0, 16384), &profile, &mut slots), Ok(4));
        assert!(buffer.gather((2, 4096), &profile, &mut slots).is_err());
        assert!(buffer.gather((0, 16384), &profile, &mut slots[..3]).is_err());
    }
}
