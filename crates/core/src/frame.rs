//! Page frames in bulk: the allocator of the 4 KiB pages of a zone.
//!
//! A [`Zone`] holds state, not memory: a frame is a number, and the caller maps it to a page. An
//! owner allocates through its [`ZoneLocal`], whose common path makes no atomic read-modify-write.
//!
//! ```
//! use pinfold_core::frame::{Order, Zone};
//!
//! let zone = Zone::new(16 << 10)?; // 64 MiB
//! let mut owner = zone.local(); // one per thread
//! let frame = owner.alloc(Order::PAGE)?;
//! let huge = owner.alloc(Order::HUGE)?; // 512 frames, aligned
//!
//! // Bulk is the primary interface: it fills the empty slots, and partial success is normal.
//! let mut ring = [None; 256];
//! assert_eq!(owner.fill(&mut ring), 256);
//! assert_eq!(owner.free_bulk(&mut ring)?, 256);
//!
//! owner.free(frame, Order::PAGE)?;
//! owner.free(huge, Order::HUGE)?;
//! # Ok::<(), pinfold_core::frame::FrameError>(())
//! ```
//!
//! # How it works
//!
//! One bit per frame records whether it is allocated, and it alone decides who owns the frame. The
//! 512 bits of a *region* (2 MiB) are eight words on one cache line, so one compare-and-swap claims
//! up to 64 frames. Above the map are two sets of hints, each with a bit per region and a bit per
//! 64 of those: partly free regions and wholly free ones. A search reads at most 128 words to find
//! a region in 1 TiB, and takes partly free regions first, so that whole 2 MiB stay whole. A hint
//! may be stale but is never missing: clearing a hint is followed by reading the map, and freeing a
//! frame by reading the hints. Each region also has an upper bound on the runs that are free in it,
//! and so have groups of 64 and of 4,096: a run that does not exist is refused after some hundred
//! bytes, without reading every region.
//!
//! A region that is wholly free has a second way to be claimed: one compare-and-swap of a byte,
//! which allocates all its frames and leaves their bits clear. A run of 2 MiB is freed the same
//! way. The bits are set first if a part of such a run is freed separately.
//!
//! The map per 2 MiB, the level above it and the regions reserved by owners follow LLFree (Wrenger
//! et al., "LLFree: Scalable and Optionally-Persistent Page-Frame Allocation", USENIX ATC 2023).
//!
//! # Watermarks
//!
//! Calls for a single frame or run may use the last frame. Bulk calls stop at the [`Watermarks`]
//! and then take one more frame. A zone that has run short is *under pressure*
//! until enough frames are free again; meanwhile owners hold no cached
//! frames.
//!
//! # Which wrong frees are detected
//!
//! Frames outside the zone, runs that are not aligned to their size, and frames that are free in
//! the map or in the magazine of the *same* [`ZoneLocal`]. A frame in the magazine of *another* is
//! not, because its bit is set. A run may be freed in other pieces than it was allocated in.

mod arrays;
mod bulk;
mod counters;
mod hints;
mod inner;
mod magazine;
mod map;
mod number;
mod owner;
mod regions;
mod storage;
mod zone;

#[cfg(test)]
#[cfg(loom)]
mod loom_models;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use bulk::FrameList;
pub use counters::{FrameStats, Urgency, Watermarks};
pub use number::{Frame, FrameError, Order};
pub use owner::ZoneLocal;
pub use zone::Zone;
