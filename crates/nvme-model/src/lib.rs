//! A model NVMe controller: it runs in this process, with memory or a file as its medium.
//!
//! A driver reaches it through [`ModelRegisters`]; it reaches memory through a [`Bus`] and in no
//! other way. Behind a software IOMMU it can therefore access what a real controller could, and
//! nothing else. It executes commands on a thread of its own, in the order of arrival but for
//! those that [`Faults`] delay or reorder, which it injects on request.
//!
//! ```
//! use pinfold::{Arena, Domain};
//! use pinfold_nvme::driver::{Config, Controller};
//! use pinfold_nvme_model::{MemoryMedia, ModelConfig, ModelController, Namespace};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(8 << 20).build(&domain)?;
//! let namespace = Namespace::new(Arc::new(MemoryMedia::new(64 << 20)?), 512)?;
//! let port = domain.port().ok_or("not a software IOMMU")?;
//! let model = ModelController::spawn(port, ModelConfig::new(vec![namespace]))?;
//!
//! let controller = Controller::start(model.registers(), arena, Config::default())?;
//! assert_eq!(controller.namespaces()[0].block_bytes, 512);
//! # Ok(())
//! # }
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod bus;
mod config;
mod controller;
mod data_pointer;
mod door;
mod engine;
mod faults;
mod identify;
mod media;
mod queues;
mod registers;

pub use bus::{Bus, BusAccess, BusFault};
pub use config::{ModelConfig, ModelError, ModelStats, Namespace};
pub use controller::ModelController;
pub use door::{Door, InterruptSink, ModelEvent, Observer, QueueKind, RegisterWindow};
pub use faults::{CommandInfo, Fault, Faults, Injection, InjectionOutcome, ROGUE_BYTE, Trigger};
pub use media::{FileMedia, Media, MediaError, MemoryMedia, ReadSink, WriteSource};
pub use registers::ModelRegisters;
