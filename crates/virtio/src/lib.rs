//! A [`Hal`](virtio_drivers::Hal) over Pinfold for the drivers of `virtio-drivers`.
//!
//! The functions of `Hal` have no receiver, so they find memory and domain through a type, a
//! [`Place`]. [`install`] puts a stack there for as long as its [`Installed`] lives;
//! [`Installed::finish`] removes it and reports leaks.
//!
//! ```
//! use pinfold::{Arena, Domain};
//! use pinfold_virtio::{PinfoldHal, Process, Translated, install, model::Disk};
//! use virtio_drivers::device::blk::VirtIOBlk;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let stack = install::<Process>(&domain, Arena::builder().size(4 << 20))?;
//! # let disk = Disk::new(domain.port().ok_or("no device")?, 1 << 20);
//! let mut driver = VirtIOBlk::<PinfoldHal, _>::new(Translated::new(disk))?;
//! driver.write_blocks(0, &[7; 512])?; // from the heap: copied
//! let mut buffer = stack.arena().alloc(8192)?;
//! driver.read_blocks(0, buffer.as_mut_slice()?)?; // Pinfold's: mapped in place during the request
//! assert_eq!(&buffer.as_slice()?[..512], [7; 512]);
//! drop((driver, buffer));
//! let stats = stack.finish()?; // an error where the driver leaked something
//! assert!(stats.is_clean());
//! # Ok(()) }
//! ```
//!
//! # What a device can access
//!
//! | memory | how it is shared | what the device may do |
//! | --- | --- | --- |
//! | rings (`dma_alloc`) | frames, mapped from `dma_alloc` to `dma_dealloc` | what their direction allows: it cannot write descriptors |
//! | payload in whole pages of the stack's arena | mapped in place, from `share` to `unshare` | what its direction allows |
//! | payload of at most [`BOUNCED_BYTES`] elsewhere | [bounced](pinfold::memory::bounce): a copy, in pages that stay mapped, an eighth of the arena at most for each direction | what its direction allows, with the other bounced payloads of that direction |
//! | other payload | a copy, in frames of its own, mapped from `share` to `unshare` | what its direction allows |
//!
//! After `unshare` the device cannot access the program's memory, and what the program reads no
//! longer changes; a bounced copy is zeroed, because its page stays mapped. A payload that is not
//! in whole pages is copied, since mappings are whole pages and its neighbours must stay out of
//! reach.
//!
//! # Failures
//!
//! `share` and `unshare` cannot return errors, and a request sent regardless would hang
//! (`virtio-drivers` waits forever) or be completed into other memory. Without memory for a copy
//! they therefore panic and name what is missing; nothing is half shared. Where a device may still
//! access a payload in place, they report it and abort the process, since unwinding would return
//! the payload to its owner. `dma_alloc` can report failure, and does.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod hal;
mod mapping;
pub mod model;
pub mod pci;
mod slot;
mod stack;

pub use hal::{ACCESS_PLATFORM, PinfoldHal, Translated};
pub use slot::{InstallError, Installed, Leak, Place, Process, Slot, install};
pub use stack::{BOUNCED_BYTES, ShareError, Stats};
