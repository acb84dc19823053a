//! `nvme-driver`, unmodified, on a model controller: in this process, behind the software IOMMU,
//! where a device attacks what the driver has freed; and through VFIO, under check, which reports
//! what the driver does wrong.
#![expect(clippy::unwrap_used, reason = "tests")]

#[path = "../attack/mod.rs"]
mod attack;
#[path = "../../examples/block/mod.rs"]
mod block;
#[path = "../../examples/nvme_driver_vfio/disk.rs"]
mod disk;
mod in_process;
