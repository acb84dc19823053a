//! Structures and numbers against those that bindgen generates from the kernel's header.

use super::*;
use std::mem::{align_of, offset_of, size_of};
use vfio_bindings::bindings::vfio as theirs;

/// The same size, alignment, and place of every field.
macro_rules! same {
    ($ours:ty, $theirs:ty: $($field:ident),*) => {
        assert_eq!(size_of::<$ours>(), size_of::<$theirs>(), stringify!($ours));
        assert_eq!(align_of::<$ours>(), align_of::<$theirs>(), stringify!($ours));
        $(assert_eq!(offset_of!($ours, $field), offset_of!($theirs, $field), stringify!($ours.$field));)*
    };
}

#[test]
fn structures_are_laid_out_as_the_kernel_has_them() {
    same!(GroupStatus, theirs::vfio_group_status: argsz, flags);
    same!(DeviceInfo, theirs::vfio_device_info: argsz, flags, num_regions, num_irqs, cap_offset, pad);
    same!(RegionInfo, theirs::vfio_region_info: argsz, flags, index, cap_offset, size, offset);
    same!(IrqInfo, theirs::vfio_irq_info: argsz, flags, index, count);
    same!(IrqSet, theirs::vfio_irq_set: argsz, flags, index, start, count);
    same!(Type1Info, theirs::vfio_iommu_type1_info: argsz, flags, iova_pgsizes, cap_offset, pad);
    same!(DmaMap, theirs::vfio_iommu_type1_dma_map: argsz, flags, vaddr, iova, size);
    same!(DmaUnmap, theirs::vfio_iommu_type1_dma_unmap: argsz, flags, iova, size);
}

#[test]
fn constants_equal_the_kernels() {
    let base = (u32::from(theirs::VFIO_TYPE) << 8) | theirs::VFIO_BASE;
    let calls = [
        GET_API_VERSION,
        CHECK_EXTENSION,
        SET_IOMMU,
        GROUP_GET_STATUS,
        GROUP_SET_CONTAINER,
        base + 5,
        GROUP_GET_DEVICE_FD,
        DEVICE_GET_INFO,
        DEVICE_GET_REGION_INFO,
        DEVICE_GET_IRQ_INFO,
        DEVICE_SET_IRQS,
        DEVICE_RESET,
        IOMMU_GET_INFO,
        IOMMU_MAP_DMA,
        IOMMU_UNMAP_DMA,
    ];
    assert!(calls.into_iter().eq((0..15).map(|n| base + n)));
    let pairs = [
        (API_VERSION.cast_unsigned(), theirs::VFIO_API_VERSION),
        (TYPE1_V2, theirs::VFIO_TYPE1v2_IOMMU),
        (NOIOMMU, theirs::VFIO_NOIOMMU_IOMMU),
        (GROUP_VIABLE, theirs::VFIO_GROUP_FLAGS_VIABLE),
        (DEVICE_RESETS, theirs::VFIO_DEVICE_FLAGS_RESET),
        (REGION_READ, theirs::VFIO_REGION_INFO_FLAG_READ),
        (REGION_WRITE, theirs::VFIO_REGION_INFO_FLAG_WRITE),
        (REGION_MMAP, theirs::VFIO_REGION_INFO_FLAG_MMAP),
        (REGION_CAPS, theirs::VFIO_REGION_INFO_FLAG_CAPS),
        (CAP_SPARSE_MMAP.into(), theirs::VFIO_REGION_INFO_CAP_SPARSE_MMAP),
        (CONFIG_REGION, theirs::VFIO_PCI_CONFIG_REGION_INDEX),
        (IRQ_MSI, theirs::VFIO_PCI_MSI_IRQ_INDEX),
        (IRQ_MSIX, theirs::VFIO_PCI_MSIX_IRQ_INDEX),
        (IRQ_REQUEST, theirs::VFIO_PCI_REQ_IRQ_INDEX),
        (IRQ_EVENTFD, theirs::VFIO_IRQ_INFO_EVENTFD),
        (IRQ_DATA_NONE, theirs::VFIO_IRQ_SET_DATA_NONE),
        (IRQ_DATA_EVENTFD, theirs::VFIO_IRQ_SET_DATA_EVENTFD),
        (IRQ_ACTION_TRIGGER, theirs::VFIO_IRQ_SET_ACTION_TRIGGER),
        (INFO_PGSIZES, theirs::VFIO_IOMMU_INFO_PGSIZES),
        (INFO_CAPS, theirs::VFIO_IOMMU_INFO_CAPS),
        (CAP_IOVA_RANGE.into(), theirs::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE),
        (CAP_DMA_AVAIL.into(), theirs::VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL),
        (DMA_READ, theirs::VFIO_DMA_MAP_FLAG_READ),
        (DMA_WRITE, theirs::VFIO_DMA_MAP_FLAG_WRITE),
    ];
    for (at, (ours, theirs)) in pairs.into_iter().enumerate() {
        assert_eq!(ours, theirs, "pair {at}");
    }
}
