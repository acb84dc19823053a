//! Gather: cuts memory into the segments that a device accepts.
//!
//! The input is a sequence of [`Segment`](crate::addr::Segment)s: a part of a
//! [registered](crate::folio) buffer, a mapping, or any list of them. Neighbours are merged
//! first; then a [`Profile`] cuts them by the device's largest segment, its boundary, its alignment
//! and its number of segments. [`prp`] and [`sgl`] lay them out for an NVMe controller, in lists
//! whose pages come from a DMA pool.
//!
//! Nothing here allocates.
//!
//! ```
//! use pinfold_core::addr::{Iova, Segment};
//! use pinfold_core::gather::Profile;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // 16 segments of 64 KiB, no boundary, aligned to 4
//! let device = Profile::new(16, 64 << 10, 0, 4)?;
//! let memory = [
//!     Segment { iova: Iova::new(0x1000), len: 4096 },
//!     Segment { iova: Iova::new(0x2000), len: 1 << 17 },
//! ];
//! let segments = device.gather(memory).collect::<Result<Vec<_>, _>>()?; // the two are neighbours
//! assert_eq!(segments.len(), 3);
//! # Ok(())
//! # }
//! ```

mod error;
mod list;
mod profile;
pub mod prp;
pub mod sgl;
#[cfg(test)]
mod tests;

pub use error::LayoutError;
pub use profile::{Gather, GatherError, Profile, ProfileError};
