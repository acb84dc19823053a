//! `ahci-driver`, unmodified, on a model controller in this process, behind the software IOMMU, where
//! a device attacks what the driver has freed.
#![expect(clippy::unwrap_used, reason = "tests")]

#[path = "../attack/mod.rs"]
mod attack;
#[path = "../../examples/block/mod.rs"]
mod block;
#[path = "../../examples/ahci_driver_vfio/disk.rs"]
mod disk;
mod hba;
mod in_process;
