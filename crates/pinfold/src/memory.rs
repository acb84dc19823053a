//! Memory for devices: its sources, arenas and buffers.
//!
//! ```
//! use pinfold::{Arena, Domain, access::ToDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(4 << 20).build(&domain)?;
//! let mut buffer = arena.alloc(8192)?;
//! buffer.as_mut_slice()?.fill(7);
//! let mapping = domain.map(buffer, ToDevice)?; // the device may read it ...
//! let buffer = mapping.unmap()?; // ... until here
//! # drop(buffer);
//! println!("{}\n{}", arena.report(), arena.stats());
//! # Ok(()) }
//! ```

pub mod arena;
mod attachment;
pub mod bounce;
mod buffer;
mod fixed;
mod obtain;
mod owned;
mod policy;
mod quarantine;
mod source;

pub use bounce::{BounceError, BouncePool, Bounced};
pub use buffer::Buffer;
pub use fixed::Fixed;
pub use owned::{CutError, OwnedMemory, OwnedMemoryError, OwnedPiece, OwnedPieces, Reclaim, SharingError};
pub use policy::MappingPolicy;
pub use quarantine::quarantined_bytes;
pub use source::{NotLocked, Residency, Source, SourceUnavailable, UnavailableReason, UnknownSource};
