//! An NVMe driver over Pinfold, and a model controller to run it against.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`driver`] | reset, identify, queues, read, write, flush, discard: payloads move in and come back |
//! | [`model`] | a controller in this process, on memory or a file, that can be told to do wrong |
//! | [`spec`] | registers, commands, completions, identify data, by the specification |
//! | [`registers`] | the seam between the first two; a real controller's registers fit it as well |
//! | [`interrupt`] | what a queue's owner sleeps on |
//! | [`vfio`] | a real controller's registers and interrupts, by VFIO |
//!
//! There is no `unsafe` in this crate: memory that a device shares is reached through
//! [`DmaMemory`](pinfold_core::mem::DmaMemory), which checks every access.
//!
//! ```
//! use pinfold::{Arena, Domain};
//! use pinfold_core::access::{FromDevice, ToDevice};
//! use pinfold_nvme::driver::{Config, Controller, Finished};
//! use pinfold_nvme::model::{MemoryMedia, ModelConfig, ModelController, Namespace};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(8 << 20).build(&domain)?;
//! let port = domain.port().ok_or("only models have ports")?;
//! let namespace = Namespace::new(Arc::new(MemoryMedia::new(64 << 20)), 512)?;
//! let model = ModelController::spawn(port, ModelConfig::new(vec![namespace]))?;
//!
//! let controller = Controller::start(model.registers(), arena.clone(), Config::default())?;
//! let mut queue = controller.create_queue(32)?;
//! let payload = domain.map(arena.alloc_zeroed(4096)?, ToDevice)?;
//! let in_flight = queue.write(1, 0, 8, payload).map_err(|rejected| rejected.reason)?;
//! queue.ring();
//! let completion = queue.wait()?.ok_or("nothing was under way")?;
//! let Finished::Done { payload, result } = in_flight.finish(completion) else {
//!     return Err("quarantined".into());
//! };
//! result?;
//! let buffer = payload.unmap()?; // no device reaches it any more
//! # drop(buffer);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod driver;
pub mod interrupt;
pub mod model;
pub mod registers;
pub mod spec;
pub mod vfio;

pub use interrupt::{EventFd, Interrupt};
pub use registers::Registers;
