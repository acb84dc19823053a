//! An NVMe driver over Pinfold.
//!
//! | module | contents |
//! | --- | --- |
//! | [`driver`] | reset, identify, queue pairs, read, write, flush, discard; payloads are moved in and returned |
//! | [`spec`] | registers, commands, completions, identify data and log pages of the specification |
//! | [`registers`] | the trait through which the driver accesses a controller's registers |
//! | [`interrupt`] | the trait for the interrupt that a queue's owner waits for, and eventfds |
//! | [`vfio`] | registers and interrupts of a real controller behind VFIO |
//! | `vtd` | registers of a real controller behind a VT-d unit of the program's own (feature `vtd`) |
//!
//! The crate contains no `unsafe`: memory shared with a device is accessed through
//! [`DmaMemory`](pinfold_core::mem::DmaMemory), which checks every access. To test without
//! hardware, run the driver against the model controller of the crate `pinfold-nvme-model`:
//!
//! ```
//! use pinfold::{Arena, Domain};
//! use pinfold_core::access::{FromDevice, ToDevice};
//! use pinfold_nvme::driver::{Config, Controller, Outcome};
//! use pinfold_nvme_model::{MemoryMedia, ModelConfig, ModelController, Namespace};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(8 << 20).build(&domain)?;
//! let port = domain.port().ok_or("not a software IOMMU")?;
//! let namespace = Namespace::new(Arc::new(MemoryMedia::new(64 << 20)?), 512)?;
//! let model = ModelController::spawn(port, ModelConfig::new(vec![namespace]))?;
//!
//! let controller = Controller::start(model.registers(), arena.clone(), Config::default())?;
//! let mut queue = controller.create_queue(32)?;
//! let payload = domain.map(arena.alloc_zeroed(4096)?, ToDevice)?;
//! let in_flight = queue.write(1, 0, 8, payload)?;
//! queue.ring_doorbell();
//! let completion = queue.wait()?.ok_or("nothing in flight")?;
//! let Outcome::Completed { payload, result } = in_flight.finish(completion) else {
//!     return Err("quarantined".into());
//! };
//! result?;
//! let buffer = payload.unmap()?; // no device can access it
//! # drop(buffer);
//! # Ok(())
//! # }
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod driver;
pub mod interrupt;
pub mod registers;
pub mod spec;
pub mod vfio;
#[cfg(feature = "vtd")]
pub mod vtd;

pub use interrupt::{EventFd, Interrupt};
pub use registers::Registers;
