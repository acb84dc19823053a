//! Page frames in bulk: which 4 KiB pages of a zone are free.
//!
//! A [`Zone`] keeps no memory, only the account of it: a frame is a number, and what it stands for is the caller's
//! business. An owner works through its [`Local`], whose common path has no atomic read-modify-write.
//!
//! # How it is kept
//!
//! One bit a frame says whether it is taken, and nothing else decides who owns it. The 512 bits of a *region*
//! (2 MiB) are eight words on one cache line, so that one compare-and-swap claims up to 64 frames. Above the map
//! stand two sets of hints, each a bit a region and a bit above 64 of those: regions that are partly free and
//! regions that are wholly free. A search reads at most 128 words to find a region in 1 TiB, and takes partly free
//! regions first, so that whole 2 MiB stay whole. A hint may be stale, never missing: whoever clears one looks at
//! the map afterwards, whoever frees looks at the hints afterwards.
//!
//! The idea of a map per 2 MiB, a level above it and regions reserved by owners is LLFree's (Wrenger et al.,
//! "LLFree: Scalable and Optionally-Persistent Page-Frame Allocation", USENIX ATC 2023).
//!
//! # How far it may be emptied
//!
//! Single calls take what there is. Bulk calls stop at the [`Watermarks`] and then take one ordinary frame. A zone that
//! has run short is *pressed* ([`Zone::pressed`]) until enough is free again; owners then keep nothing back.
//!
//! # What wrong frees are caught
//!
//! Frames outside the zone, runs that are not aligned to their size, and every frame whose bit says that it is free
//! already. A frame that lies in the magazine of the *same* [`Local`] is caught too. A frame that lies in the
//! magazine of *another* `Local` is not: its bit says taken, as if a third party owned it. Nor is a free of a run
//! in other pieces than those in which it was handed out: that is allowed.

mod bulk;
mod counters;
mod error;
mod hints;
mod list;
mod local;
mod magazine;
mod map;
mod number;
mod pressure;
mod run;
mod slots;
mod watermark;
mod zeroed;
mod zone;

#[cfg(test)]
#[cfg(loom)]
mod loom_models;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use counters::FrameStats;
pub use error::FrameError;
pub use list::FrameList;
pub use local::Local;
pub use number::{Frame, Order};
pub use watermark::{Urgency, Watermarks};
pub use zeroed::ZeroError;
pub use zone::Zone;
