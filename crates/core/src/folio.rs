//! A program's own memory, described by as few segments as possible.
//!
//! [`Folios`] are a buffer in pieces of one size, a power of two, each contiguous for the device. They
//! divide the process's addresses evenly: the first and the last may be
//! partial, those between are full, and any offset is located by a shift and a mask, never by a
//! walk. A folio is as large as the memory allows: hugepages stay whole, pages that are adjacent
//! for the device form larger folios, and a buffer that is contiguous for the device is one folio
//! of any length.
//!
//! With several page sizes, a folio that is not contiguous for the device is divided evenly once
//! more, as finely as it needs; the others stay whole. One 4 KiB page among hugepages thus costs
//! one divided folio, and any offset is located by two shifts. The division with the smallest table
//! is computed when the buffer is described.
//!
//! Nothing here pins memory or looks up its address: the caller supplies the device addresses.
//!
//! ```
//! use pinfold_core::addr::{Iova, Segment};
//! use pinfold_core::folio::Folios;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let hugepage = |at| Segment { iova: Iova::new(at), len: 2 << 20 };
//! let hugepages = [0x4000_0000, 0x4020_0000, 0x8000_0000].map(hugepage);
//! let buffer = Folios::from_segments(0x7f00_0000_0000, hugepages)?;
//! // The first two are adjacent for the device.
//! assert_eq!(buffer.segments(0, buffer.len())?.count(), 2);
//! assert_eq!(buffer.locate(5 << 20)?.iova, Iova::new(0x8010_0000));
//! # Ok(())
//! # }
//! ```

mod buffer;
mod error;
mod table;
#[cfg(test)]
mod tests;

pub use buffer::{Folios, Segments};
pub use error::{BufferError, OutsideBuffer};
