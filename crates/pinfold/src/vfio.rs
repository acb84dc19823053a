//! Real devices by VFIO: opened by their address, in a [`Domain`](crate::Domain) that the kernel's IOMMU driver keeps.
//!
//! ```no_run
//! use pinfold::vfio::{Device, Options};
//! use pinfold::{Arena, MappingPolicy};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open("0000:01:00.0", &Options::new())?; // `pinfold bind 0000:01:00.0` before
//! let arena = Arena::builder().size(64 << 20).mapping_policy(MappingPolicy::Whole).build(device.domain())?;
//! let bar = device.bar(0)?;
//! let capabilities = bar.read64(0)?; // of an NVMe controller: CAP
//! device.set_bus_master(true)?;
//! # let _ = (arena, capabilities);
//! # Ok(())
//! # }
//! ```
//!
//! A map is a system call that pins the memory and a revocation one that waits for the IOMMU's flush: tens of
//! microseconds. So what is used again and again is mapped once: an arena that is exposed whole is one entry.
//!
//! # What must hold
//! Memory that a device can reach is not given back. The domain keeps an account of what is mapped; whatever is left
//! of a piece of memory is unmapped when it is expelled, which an arena does before it unmaps itself. A process that is
//! killed leaves nothing behind: the kernel closes its descriptors, and with the last one the table goes.

mod bar;
mod bdf;
mod bind;
pub(crate) mod choice;
mod claim;
mod device;
mod error;
#[cfg(test)]
pub(crate) mod fake;
mod in_use;
mod iommufd;
mod irq;
pub(crate) mod lookup;
mod mapper;
mod noiommu;
pub(crate) mod open;
mod table;
mod type1;

pub use bar::Bar;
pub use bdf::{Bdf, NotBdf};
pub use bind::{After, BindError, Binder, Files, Handed, SysFiles};
pub use choice::IommuInterface;
pub use device::{Device, Ids};
pub use error::{DeviceError, Neighbour, OpenError};
pub use in_use::InUse;
pub use irq::Irq;
pub use mapper::Limits;
pub use open::{Chosen, Options};
