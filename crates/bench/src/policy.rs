//! Policies: how DMA addresses are made for memory, and taken back.
//!
//! What Linux did in 2015, what it does since, and what Pinfold does, each over the same software
//! IOMMU, so that they can be compared on one workload ([`suite::iommu`](crate::suite::iommu)) or
//! on a recorded trace. The baselines have the locks and the per-CPU state of the originals and are
//! written from public descriptions.
//!
//! | policy | addresses | after an unmap |
//! | --- | --- | --- |
//! | `tree-2015` | one tree per device, one entry per mapping | a queue of 250 ranges; when it is full, or after 10 ms, a flush of each with the tree locked |
//! | `tree-merged` | the same, entries that abut merged | the same |
//! | `magazines` | per-CPU caches over a locked tree | a flush of the whole domain per 256 unmaps of a CPU, or after 10 ms |
//! | `magazines-strict` | the same | a flush and a wait for each |
//! | `identity` | the physical address, counted per page | a flush and a wait when a page's count reaches 0 |
//! | `pinfold-strict` | an owner of a domain | waits |
//! | `pinfold-revoke` | the same | holds the memory until its flush has completed |
//! | `pinfold-batch` | the same, 16 mappings revoked at a time | the same |
//! | `none` | the physical address, all memory mapped once | nothing: the device reaches everything, always |
//!
//! With `tree-2015`, `tree-merged` and `magazines` memory is reused while a device can still reach
//! it; that time is reported ([`PolicyStats::reachable_ns`]). Flushes are those of a model: they
//! cost time, as configured.
//!
//! ```
//! use pinfold::soft::SoftConfig;
//! use pinfold_bench::policy::{Memory, PolicyKind};
//! use pinfold_core::access::Access;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = Memory::new(1 << 20)?;
//! let page = memory.range(0x3000, 0x1000).ok_or("outside")?;
//! for kind in PolicyKind::ALL {
//!     let policy = kind.create(&memory, &SoftConfig::default())?;
//!     let device = policy.port();
//!     let mut thread = policy.thread();
//!     let dma = thread.map(page, Access::WRITE)?;
//!     device.write(dma.iova().start(), b"from the device")?;
//!     let mut freed = Vec::new();
//!     thread.unmap(dma, &mut freed)?;
//!     thread.settle(&mut freed)?; // waits for what is still held
//!     assert_eq!(freed, [page]);
//!     println!("{}: {}", kind.name(), policy.stats());
//! }
//! # Ok(())
//! # }
//! ```

mod api;
mod cpu;
mod flush_queue;
mod identity;
mod iommu;
mod kind;
mod locked;
mod magazine;
mod magazines;
mod memory;
mod none;
mod owned;
mod payload;
mod static_maps;
mod stats;
mod table;
#[cfg(test)]
mod tests;
mod timer;
mod tree;

pub use api::{Dma, Policy, PolicyError, PolicyThread};
pub use kind::PolicyKind;
pub use memory::Memory;
pub use stats::PolicyStats;

pub(crate) use magazine::Magazines;
pub(crate) use static_maps::static_maps;
pub(crate) use tree::Tree;
