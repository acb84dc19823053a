//! PCI devices: their addresses, their users, and their drivers.
//!
//! A driver in user space needs its device bound to `vfio-pci`. [`Binder`] binds it there and back:
//! only if nothing uses it (a mounted file system, swap, RAID, a program, a network interface that
//! is up), and completely or not at all.
//!
//! ```
//! use pinfold::pci::{Bdf, BindError, Binder};
//!
//! let device: Bdf = "ffff:ff:1f.7".parse()?;
//! match Binder::new().bind(device, false) {
//!     Ok(change) => println!("{change}"), // 0000:01:00.0: nvme -> vfio-pci, IOMMU group 7
//!     Err(error @ BindError::InUse { .. }) => println!("{error}"),
//!     Err(error) => println!("{error}"),
//! }
//! # Ok::<(), pinfold::pci::InvalidBdf>(())
//! ```

mod bind;
mod claim;
pub(crate) mod lookup;

pub use bind::{BindError, Binder, DriverChange, Rollback, Sysfs, SysfsWrite};
pub use claim::InUse;
pub use lookup::{Bdf, GroupMember, InvalidBdf, NoDevice};
