//! A software IOMMU for tests of drivers and device models, as hostile as the specification allows.
//!
//! Device models access memory through a [`Port`], which translates every access as an IOMMU does:
//!
//! - its IOTLB keeps every entry until it is invalidated or evicted;
//! - a device may have a TLB of its own (ATS), which is filled from the IOTLB and flushed after it;
//! - its walk caches hold table pages of every level, and a flush of leaves alone leaves them
//!   there;
//! - each request of a batch takes effect at a time of its own, and batches complete late and out
//!   of order if so [configured](SoftConfig); completions are published in order, as the sequence
//!   of an invalidation queue is;
//! - devices may be spread over several [units](SoftConfig::units), with a queue each;
//! - with caching mode it also caches entries that are not present, at every level;
//! - it decodes table entries itself, not with the code that wrote them.
//!
//! It does no harm that a real IOMMU could not do: it accesses only memory that was registered with
//! it, so a wrong entry is a [`Fault`] and not a wild access. Faults are also
//! [recorded](SoftBus::take_faults) as VT-d does. Physical addresses are addresses in this process.
//!
//! Its cost model is a timeline, not a thread: a batch submitted at t completes `cost` and a random
//! delay after the later of t and the end of the one before it. Effects that are due happen when a waiter polls. A waiter therefore
//! really waits, also on two cores. A task that awaits a flush, and a domain that holds buffers
//! dropped in flight, are woken by a thread, which an IOMMU starts for the first of them. Table
//! walks may cost time too ([`SoftConfig::walk_cost`]): time of the device, which delays a program
//! that [waits](Port::wait_for_walks) for it.
//!
//! ```
//! use pinfold_core::access::FromDevice;
//! use pinfold_soft::{FaultKind, SoftConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut config = SoftConfig::default();
//! config.late_by = std::time::Duration::from_micros(50); // flushes complete late and out of order
//! let (domain, bus) = pinfold_soft::domain(config)?;
//! let device = bus.port();
//!
//! let pages = bus.alloc_pages(1)?;
//! let mapping = domain.map(pages, FromDevice)?;
//! let iova = mapping.iova().start();
//! device.write_u32_release(iova, 42)?;
//! assert_eq!(device.read_u32_acquire(iova).map_err(|fault| fault.kind), Err(FaultKind::NoRead));
//!
//! let pages = mapping.unmap()?; // waits for the flush
//! assert_eq!(pages.memory().read_u32(0)?, 42);
//! assert!(device.write_u32_release(iova, 43).is_err());
//! println!("{}", bus.stats());
//! # Ok(())
//! # }
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]

mod config;
mod device;
mod iommu;
mod lane;
mod memory;
mod nic;
mod port;
mod record;
#[cfg(test)]
mod tests;
mod thread;
mod timeline;
mod timer;
mod tlb;
mod unit;

pub use config::{Effect, Fault, FaultKind, PortStats, SoftConfig, Stage};
pub use iommu::{Pages, SoftBus, SoftIommu, SoftQueue, SoftTableMemory, domain, domain_over};
pub use lane::UnitQueue;
pub use nic::{Nic, NicEvent};
pub use port::Port;
pub use record::{FaultReason, FaultRecord, FaultReport};
pub use timeline::Random;
