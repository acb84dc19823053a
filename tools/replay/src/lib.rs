//! Replays recorded traces of the kernel's DMA interface through the [policies](crate::policy):
//! what Linux did and does with DMA addresses, and what Pinfold does.
//!
//! The program `pinfold replay` is made of this crate; the benchmarks run the same policies.
//!
//! A [`Trace`] is what Linux's tracer printed for the events `dma:*` and `iommu:*`. Each of its
//! devices is replayed through any policy, in a domain of its own: the memory is that of the trace,
//! the addresses are the policy's. The needs of the policy are an [`Outcome`], and those of the
//! kernel's own allocator are beside it ([`Device::footprint`], [`Counts`]).
//!
//! ```
//! use pinfold::soft::SoftConfig;
//! use pinfold_replay::policy::PolicyKind;
//! use pinfold_replay::{Limits, Places, Timing, Trace, replay};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let text = "\
//!   iperf3-221 [000] b..1. 31.913312: dma_map_page: 0000:00:03.0 dir=TO_DEVICE dma_addr=f0c0a size=54 phys_addr=bd20c0a attrs=
//!   iperf3-221 [000] D.h1. 31.913420: dma_unmap_page: 0000:00:03.0 dir=TO_DEVICE dma_addr=f0c0a size=54 attrs=
//! ";
//! let trace = Trace::read(text.as_bytes(), &Limits::default(), &|_| true)?;
//! let places = Places::new(&trace)?;
//! for device in &trace.devices {
//!     let kind = PolicyKind::Strict;
//!     let outcome = replay(device, kind, &places, &SoftConfig::default(), Timing::Fast, &|_| true)?;
//!     assert_eq!(outcome.maps.count, device.counts.maps);
//!     assert!(outcome.stats.waits >= device.counts.unmaps); // strict
//!     assert_eq!(outcome.footprint.extents_at_peak, device.footprint().extents_at_peak);
//!     let svg = outcome.picture(device).to_string();
//! #   assert!(svg.starts_with("<svg"));
//! }
//! # Ok(())
//! # }
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

mod assign;
mod build;
mod error;
pub mod lock;
pub mod parse;
mod picture;
pub mod policy;
mod read;
mod run;
mod source;
#[cfg(test)]
mod tests;
mod trace;

pub use error::{ReplayError, TraceError};
pub use picture::Picture;
pub use read::{Limits, MAX_BYTES, MAX_OPERATIONS};
pub use run::{Outcome, Places, Timing, replay, replay_all};
pub use source::MAX_LINE;
pub use trace::{Counts, Device, Footprint, Run, Summary, Times, Trace};
