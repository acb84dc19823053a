//! Real devices through VFIO, opened by their PCI address, in a [`Domain`](crate::Domain) whose
//! table the kernel keeps.
//!
//! ```no_run
//! use pinfold::vfio::{Device, Options};
//! use pinfold::{Arena, MappingPolicy};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // After `pinfold bind 0000:01:00.0`:
//! let device = Device::open("0000:01:00.0", &Options::new())?;
//! let arena = Arena::builder().size(64 << 20).mapping_policy(MappingPolicy::Whole);
//! let arena = arena.build(device.domain())?;
//! let bar = device.bar(0)?;
//! let capabilities = bar.read64(0)?; // of an NVMe controller: CAP
//! device.set_bus_master(true)?;
//! # let _ = (arena, capabilities);
//! # Ok(())
//! # }
//! ```
//!
//! A map is a system call that pins the memory, and a revocation one that waits for the IOMMU's
//! flush: tens of microseconds. Map memory that is used repeatedly once: an arena that is mapped as
//! a whole is one entry.
//!
//! # Lifetime of mapped memory
//! Memory that a device can reach is never released. The domain records its mappings; unregistering
//! memory, which an arena does before it unmaps itself, unmaps the rest of them. A killed process
//! leaves nothing behind: the kernel closes its descriptors, and frees the table with the last one.

mod bar;
mod device;
mod irq;
mod open;

pub use crate::backend::context::IommuInterface;
pub use crate::backend::context::Limits;
pub use crate::backend::error::{DeviceError, OpenError};
pub use bar::Bar;
pub use device::{Attachment, Device, Ids, Options};
pub use irq::Irq;
