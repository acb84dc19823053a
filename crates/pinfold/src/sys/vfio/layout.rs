//! Numbers and structures of `linux/vfio.h`. A test compares them with those that bindgen made of it (`vfio-bindings`).

/// `_IO(';', 100 + n)`: VFIO encodes no size, each structure says its own in `argsz`.
const fn vfio(n: u32) -> u32 {
    ((b';' as u32) << 8) | (100 + n)
}

pub(crate) const GET_API_VERSION: u32 = vfio(0);
pub(crate) const CHECK_EXTENSION: u32 = vfio(1);
pub(crate) const SET_IOMMU: u32 = vfio(2);
pub(crate) const GROUP_GET_STATUS: u32 = vfio(3);
pub(crate) const GROUP_SET_CONTAINER: u32 = vfio(4);
pub(crate) const GROUP_GET_DEVICE_FD: u32 = vfio(6);
pub(crate) const DEVICE_GET_INFO: u32 = vfio(7);
pub(crate) const DEVICE_GET_REGION_INFO: u32 = vfio(8);
pub(crate) const DEVICE_GET_IRQ_INFO: u32 = vfio(9);
pub(crate) const DEVICE_SET_IRQS: u32 = vfio(10);
pub(crate) const DEVICE_RESET: u32 = vfio(11);
pub(crate) const IOMMU_GET_INFO: u32 = vfio(12);
pub(crate) const IOMMU_MAP_DMA: u32 = vfio(13);
pub(crate) const IOMMU_UNMAP_DMA: u32 = vfio(14);

/// What `GET_API_VERSION` answers since the beginning.
pub(crate) const API_VERSION: i32 = 0;
/// `VFIO_TYPE1v2_IOMMU`: one entry a map, and an unmap cuts none.
pub(crate) const TYPE1_V2: u32 = 3;
/// `VFIO_NOIOMMU_IOMMU`: nothing is translated (Linux 4.5).
pub(crate) const NOIOMMU: u32 = 8;

pub(crate) const GROUP_VIABLE: u32 = 1;

/// `vfio_group_status`.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub(crate) struct GroupStatus {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
}

/// The device can be reset.
pub(crate) const DEVICE_RESETS: u32 = 1;

/// `vfio_device_info`.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub(crate) struct DeviceInfo {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) num_regions: u32,
    pub(crate) num_irqs: u32,
    pub(crate) cap_offset: u32,
    pub(crate) pad: u32,
}

pub(crate) const REGION_READ: u32 = 1;
pub(crate) const REGION_WRITE: u32 = 2;
pub(crate) const REGION_MMAP: u32 = 4;
pub(crate) const REGION_CAPS: u32 = 8;
/// Which parts of a region can be mapped, where not all can.
pub(crate) const CAP_SPARSE_MMAP: u16 = 1;

/// `vfio_region_info`.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub(crate) struct RegionInfo {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) index: u32,
    pub(crate) cap_offset: u32,
    pub(crate) size: u64,
    pub(crate) offset: u64,
}

/// `VFIO_PCI_CONFIG_REGION_INDEX`.
pub(crate) const CONFIG_REGION: u32 = 7;
/// `VFIO_PCI_MSI_IRQ_INDEX`.
pub(crate) const IRQ_MSI: u32 = 1;
/// `VFIO_PCI_MSIX_IRQ_INDEX`.
pub(crate) const IRQ_MSIX: u32 = 2;
/// `VFIO_PCI_REQ_IRQ_INDEX` (Linux 4.0): the kernel asks for the device back.
pub(crate) const IRQ_REQUEST: u32 = 4;

pub(crate) const IRQ_EVENTFD: u32 = 1;

/// `vfio_irq_info`.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub(crate) struct IrqInfo {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) index: u32,
    pub(crate) count: u32,
}

/// No data: the count alone. With a trigger and a count of 0 it switches the interrupts off.
pub(crate) const IRQ_DATA_NONE: u32 = 1;
/// Data are eventfds.
pub(crate) const IRQ_DATA_EVENTFD: u32 = 1 << 2;
pub(crate) const IRQ_ACTION_TRIGGER: u32 = 1 << 5;

/// `vfio_irq_set`, without its data.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub(crate) struct IrqSet {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) index: u32,
    pub(crate) start: u32,
    pub(crate) count: u32,
}

pub(crate) const INFO_PGSIZES: u32 = 1;
pub(crate) const INFO_CAPS: u32 = 2;
/// Which I/O virtual addresses may be used (Linux 5.4).
pub(crate) const CAP_IOVA_RANGE: u16 = 1;
/// How many more mappings are allowed (Linux 5.10).
pub(crate) const CAP_DMA_AVAIL: u16 = 3;

/// `vfio_iommu_type1_info`.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub(crate) struct Type1Info {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) iova_pgsizes: u64,
    pub(crate) cap_offset: u32,
    pub(crate) pad: u32,
}

pub(crate) const DMA_READ: u32 = 1;
pub(crate) const DMA_WRITE: u32 = 2;

/// `vfio_iommu_type1_dma_map`.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub(crate) struct DmaMap {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) vaddr: u64,
    pub(crate) iova: u64,
    pub(crate) size: u64,
}

/// `vfio_iommu_type1_dma_unmap`, without its data.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub(crate) struct DmaUnmap {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) iova: u64,
    pub(crate) size: u64,
}

#[cfg(test)]
mod tests;
