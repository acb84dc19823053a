//! Others' drivers on Pinfold's memory: a [`Hal`](virtio_drivers::Hal) for the drivers of `virtio-drivers`.
//!
//! `virtio-drivers` asks its platform by functions without a receiver, so there must be a place where they find the
//! memory and the domain: a [`Place`], which is a type. [`install`] puts a stack there, which an [`Installed`] keeps;
//! [`Installed::finish`] takes it away and says whether anything was left.
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
//! driver.write_blocks(0, &[7; 512])?; // from the heap: by way of a copy
//! let mut buffer = stack.arena().alloc(8192)?;
//! driver.read_blocks(0, buffer.as_mut_slice()?)?; // Pinfold's: mapped where it is, for as long as the request takes
//! assert_eq!(&buffer.as_slice()?[..512], [7; 512]);
//! drop((driver, buffer));
//! let account = stack.finish()?; // an error where the driver kept something
//! assert!(account.is_clean());
//! # Ok(()) }
//! ```
//!
//! # What a device reaches
//!
//! | what | how it is given | what the device may do |
//! | --- | --- | --- |
//! | rings (`dma_alloc`) | frames, mapped from `dma_alloc` to `dma_dealloc` | what their direction says: it can not write descriptors |
//! | payload in whole pages of the stack's arena | mapped where it lies, from `share` to `unshare` | what its direction says |
//! | payload of at most [`SMALL_BYTES`] elsewhere | a copy, in a block of a pool | reads and writes the pool, which holds such copies alone |
//! | other payload | a copy, in frames of its own, mapped from `share` to `unshare` | what its direction says |
//!
//! After `unshare` no access of the device reaches the program's memory, and what the program reads no longer changes.
//! A payload that is not in whole pages is copied, since a device reaches whole pages: its neighbours are not its own.
//!
//! # What the trait can not say
//!
//! `share` and `unshare` can not fail, and a request that is sent in spite of it would either hang (`virtio-drivers` waits
//! without end) or be answered into memory of somebody else. So where there is no memory for the copy they panic
//! and say what is missing; nothing is half shared then. Where a device may still reach a payload that it was given in place,
//! they say so and abort the process, since unwinding would give the payload back to its owner. `dma_alloc` has a way to say
//! no, and uses it.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod account;
mod hal;
mod mapping;
pub mod model;
pub mod pci;
mod slot;
mod stack;
mod translated;

pub use account::Stats;
pub use hal::PinfoldHal;
pub use slot::{InstallError, Installed, Leak, Place, Process, Slot, install};
pub use stack::{SMALL_BYTES, ShareError};
pub use translated::{ACCESS_PLATFORM, Translated};
