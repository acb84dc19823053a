//! [`Plan`]: the layout with which an allocation or a mapping satisfies its constraints.

use core::alloc::{Layout, LayoutError};
use dma_api::{DmaAddr, DmaConstraints, DmaError};
use pinfold_core::addr::Iova;
use pinfold_core::domain::BackendError;

pub(crate) const PAGE: usize = 4096;

/// Why memory is refused. Nothing has changed then, except that memory which a device may still
/// reach is quarantined.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("an alignment of {align} bytes is not a power of two")]
    Align { align: usize },
    #[error("{size} bytes are more than the largest segment of the device, {max}")]
    Segment { size: usize, max: usize },
    #[error(
        "{size} bytes cannot avoid a boundary every {boundary} bytes, which must be a power of two \
         and not smaller"
    )]
    Boundary { size: usize, boundary: usize },
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("the source of memory has no {bytes} bytes: make the arena larger, or free something")]
    NoMemory { bytes: usize },
    #[error(
        "the source returned {len} bytes at {addr:#x} where {bytes} of whole pages in one piece were asked for"
    )]
    Source { addr: usize, len: usize, bytes: usize },
    #[error(
        "the memory of the source stays mapped for its lifetime, so that a free could not revoke it: build the arena with \
         MappingPolicy::PerUse"
    )]
    MappedWhole,
    #[error(transparent)]
    Domain(#[from] BackendError),
}

impl From<Refused> for DmaError {
    fn from(refused: Refused) -> Self {
        // Refused before there was an address.
        let none = DmaAddr::from(0);
        match refused {
            Refused::Align { align } => Self::AlignMismatch { required: align, address: none },
            Refused::Segment { size, max } => Self::SegmentTooLarge { size, max },
            Refused::Boundary { size, boundary } => {
                Self::BoundaryCross { addr: none, size, boundary }
            }
            Refused::Layout(error) => Self::LayoutError(error),
            _ => Self::NoMemory,
        }
    }
}

/// Whole pages at an address of the device that satisfies all constraints, whatever pages they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    /// The length and alignment that were asked for, for the processor and the device alike.
    pub(crate) layout: Layout,
    /// The whole pages that are mapped.
    pub(crate) bytes: usize,
    /// The alignment of the device's address.
    pub(crate) iova_align: u64,
    /// The last address that the device reaches.
    pub(crate) limit: Iova,
}

impl Plan {
    /// Plans `layout`, of at least one byte.
    pub(crate) fn new(constraints: &DmaConstraints, layout: Layout) -> Result<Self, Refused> {
        let DmaConstraints { addr_mask, align, boundary, max_segment_size } = *constraints;
        let size = layout.size();
        if !align.max(1).is_power_of_two() {
            return Err(Refused::Align { align });
        }
        if let Some(max) = max_segment_size.filter(|max| size > *max) {
            return Err(Refused::Segment { size, max });
        }
        // A block aligned to a power of two of at least its size crosses no multiple of a larger
        // one.
        let undivided = match boundary {
            Some(boundary) if size > boundary || !boundary.is_power_of_two() => {
                return Err(Refused::Boundary { size, boundary });
            }
            Some(_) => size.next_power_of_two(),
            None => 1,
        };
        let layout = Layout::from_size_align(size, layout.align().max(align))?;
        // Does not overflow: no layout exceeds isize::MAX.
        let bytes = size.next_multiple_of(PAGE);
        let iova_align = layout.align().max(undivided).max(PAGE) as u64;
        Ok(Self { layout, bytes, iova_align, limit: Iova::new(addr_mask) })
    }

    /// Returns how many bytes contain the pages at their alignment, wherever they begin.
    pub(crate) fn bytes_to_align(&self) -> usize {
        self.bytes.saturating_add(self.layout.align().saturating_sub(PAGE))
    }
}
