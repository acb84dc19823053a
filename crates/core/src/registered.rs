//! Registered buffers: a program's own memory, described in as few pieces as the device sees.
//!
//! A [`Registered`] is a buffer as *folios*: pieces of one size, a power of two, each contiguous for the device. The
//! folios divide the process's addresses evenly, so the first and the last may be partial and those between are
//! full, and any offset is found by a shift and a mask, never by a walk. The folio is as large as the memory allows:
//! hugepages stay whole, neighbours that the device sees side by side grow into larger folios, and a buffer that is
//! contiguous for the device is one folio, whatever its length.
//!
//! In a mixture, a folio whose inside is not contiguous for the device is divided evenly once more, as finely as it
//! alone needs; the others stay whole. One 4 KiB page amid hugepages thus costs one divided folio, and any offset is
//! found by two shifts. The division with the smallest table is computed when the buffer is described.
//!
//! A [`Registry`] numbers buffers as a ring or a device does. Nothing here pins memory or looks up its address:
//! the caller supplies the device address of each page.
//!
//! ```
//! use pinfold_core::addr::{Iova, PageSize};
//! use pinfold_core::registered::Registered;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let hugepages = [0x4000_0000, 0x4020_0000, 0x8000_0000].map(Iova::new);
//! let buffer = Registered::from_pages(0x7f00_0000_0000, 6 << 20, PageSize::Size2M, hugepages)?;
//! assert_eq!(buffer.segment_count(), 2); // the first two are adjacent for the device
//! assert_eq!(buffer.locate(5 << 20)?.iova, Iova::new(0x8010_0000));
//! # Ok(())
//! # }
//! ```

mod buffer;
mod error;
mod registry;
mod runs;
mod table;
#[cfg(test)]
mod tests;

pub use buffer::{Registered, Segments};
pub use error::{BufferError, OutsideBuffer};
pub use registry::{BufferIndex, Hold, IndexError, RegisterError, Registry, Unregistered};
