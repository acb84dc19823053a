//! What a line of a trace says.

use super::fields::{Damage, List};
use pinfold_core::access::Access;

/// A line of a trace.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Line<'l> {
    /// A line of the tracer itself, or an empty one.
    Header,
    /// Events were lost here: the buffer of a processor was full.
    Lost {
        /// How many, where the kernel knows it.
        events: Option<u64>,
    },
    /// An event of the DMA interface or of the IOMMU.
    Event(Event<'l>),
    /// An event of something else, or one that maps nothing (`dma_sync_*`).
    Other,
    /// It cannot be read.
    Damaged(Damage),
}

/// An event.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Event<'l> {
    /// When it happened, if the trace has its times in seconds.
    pub time_ns: Option<u64>,
    /// The processor.
    pub cpu: u32,
    /// The task that ran there: what it was interrupted by has the same number.
    pub pid: u32,
    /// What happened.
    pub action: Action<'l>,
}

/// What happened.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum Action<'l> {
    /// One range was mapped or allocated: `dma_map_page`, `dma_map_phys`, `dma_map_resource`,
    /// `dma_alloc`, `dma_alloc_pages`, `dma_alloc_sgt`.
    Map {
        /// The device.
        device: &'l str,
        /// Whether the memory was allocated for it; `dma_free*` frees it.
        allocated: bool,
        /// What it may do.
        access: Access,
        /// Where the device finds it.
        address: u64,
        /// The size in bytes.
        size: u64,
        /// The physical address, if it is recorded; of several segments, the list.
        memory: Recorded<'l>,
    },
    /// A scatter list was mapped: `dma_map_sg`.
    MapList {
        /// The device.
        device: &'l str,
        /// What it may do.
        access: Access,
        /// Where the device finds its segments.
        addresses: List<'l>,
        /// Their sizes in bytes.
        sizes: List<'l>,
        /// The physical addresses of what was mapped: at least as many.
        memory: List<'l>,
        /// Whether the lists were longer than the kernel records.
        truncated: bool,
    },
    /// One range was unmapped or freed: `dma_unmap_page`, `dma_unmap_phys`, `dma_unmap_resource`,
    /// `dma_free`, `dma_free_pages`, `dma_free_sgt`.
    Unmap {
        /// The device.
        device: &'l str,
        /// Whether the memory was freed too.
        allocated: bool,
        /// Where the device found it.
        address: u64,
    },
    /// A scatter list was unmapped: `dma_unmap_sg`.
    UnmapList {
        /// The device.
        device: &'l str,
        /// The physical addresses that were given to the map.
        memory: List<'l>,
    },
    /// A map or an allocation failed: `dma_map_sg_err`, `dma_alloc_sgt_err`, or without an address.
    Failed {
        /// The device.
        device: &'l str,
    },
    /// The IOMMU's driver mapped a range: `iommu:map`. The device is not recorded.
    IommuMap {
        /// Where devices find it.
        iova: u64,
        /// The physical address.
        memory: u64,
        /// The size in bytes.
        size: u64,
    },
    /// The IOMMU's driver unmapped a range: `iommu:unmap`. The device is not recorded.
    IommuUnmap {
        /// Where devices found it.
        iova: u64,
        /// The size in bytes.
        size: u64,
        /// How much was unmapped.
        unmapped: u64,
    },
    /// A device was attached to a domain: `iommu:attach_device_to_domain`.
    Attach {
        /// The device.
        device: &'l str,
    },
    /// A device accessed an address that is not mapped: `iommu:io_page_fault`.
    Fault {
        /// The device.
        device: &'l str,
    },
}

/// The memory of a range.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Recorded<'l> {
    /// Not recorded, as for most allocations.
    No,
    /// At one physical address.
    At(u64),
    /// In segments, whose sizes are not recorded.
    Segments(List<'l>),
}
