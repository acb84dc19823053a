//! Packets, which own the memory that they are in.
//!
//! ```
//! # fn example(packets: Vec<pinfold_xdp::Packet>) {
//! for packet in packets {
//!     let mut headers = [0; 64];
//!     let headers = packet.peek(&mut headers); // a copy of the first bytes
//!     println!("{} bytes, {headers:x?}", packet.len());
//! } // each page returns to its pool here, on any thread
//! # }
//! ```
//!
//! A packet that has a page of its own becomes the payload of a device, without a copy:
//!
//! ```
//! use pinfold::{DmaMemory, access::ToDevice};
//! use pinfold_core::domain::{Domain, Pinned};
//!
//! # fn example(domain: &Domain, packet: pinfold_xdp::Packet) -> Result<(), Box<dyn std::error::Error>> {
//! let page = packet.into_page().map_err(|_| "a part of a page")?;
//! page.memory().copy_from_slice(0, b"a header")?; // before `page.offset()`
//! let mapping = domain.map(page, ToDevice)?; // for as long as a disk reads it
//! # drop(mapping);
//! # Ok(()) }
//! ```

use crate::rings::Chunk;
pub use crate::rings::PacketPage;
use pinfold::DmaMemory;
use pinfold::page_pool::Tag;
use std::fmt;

/// A packet, from the header of the link layer on. Its memory returns to the pool when it is dropped, on any thread;
/// [`Socket::recycle`](crate::Socket::recycle) is faster on the socket's own.
pub struct Packet {
    chunk: Chunk,
    /// Where it starts in its chunk, and its length: inside the chunk.
    offset: u32,
    len: u32,
}

impl Packet {
    /// Returns the packet at `offset`, cut to its chunk of `room` bytes.
    #[inline]
    pub(crate) fn new(chunk: Chunk, offset: u32, len: u32, room: u32) -> Self {
        let offset = offset.min(room);
        Self { chunk, offset, len: len.min(room - offset) }
    }

    /// Reverses [`into_parts`](Self::into_parts).
    pub(crate) fn from_parts(chunk: Chunk, offset: u32, len: u32) -> Self {
        Self { chunk, offset, len }
    }

    pub(crate) fn into_parts(self) -> (Chunk, u32, u32) {
        (self.chunk, self.offset, self.len)
    }

    /// Returns its length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns its bytes, for access beside the kernel: by copies.
    #[inline]
    pub fn memory(&self) -> DmaMemory<'_> {
        // `new` has checked the range.
        self.chunk.memory().part(self.offset as usize, self.len as usize).unwrap_or(DmaMemory::EMPTY)
    }

    /// Copies as many of its first bytes as fit into `to`, and returns them.
    #[inline]
    pub fn peek<'t>(&self, to: &'t mut [u8]) -> &'t [u8] {
        let len = self.len().min(to.len());
        let to = to.get_mut(..len).unwrap_or_default();
        // The range lies inside the packet, so this does not fail.
        let _ = self.memory().copy_to_slice(0, to);
        to
    }

    /// Appends its bytes to `to`.
    pub fn append_to(&self, to: &mut Vec<u8>) {
        let from = to.len();
        to.resize(from + self.len(), 0);
        self.peek(to.get_mut(from..).unwrap_or_default());
    }

    /// Turns it into the payload of a device.
    ///
    /// # Errors
    /// The packet, if its memory is only a part of a page ([`ChunkSize::HalfPage`](crate::ChunkSize::HalfPage)): a device
    /// would reach the other parts.
    pub fn into_page(self) -> Result<PacketPage, Self> {
        match self.chunk {
            Chunk::Page(page) => Ok(PacketPage::new(page, self.offset, self.len)),
            Chunk::Part(_) => Err(self),
        }
    }

    /// Names the holder of its page for [`SocketReport::holders`](crate::SocketReport). Parts of pages have no holder of
    /// their own, so this has no effect in chunks smaller than a page.
    pub fn hold_for(&self, holder: Tag) {
        if let Chunk::Page(page) = &self.chunk {
            page.tag(holder);
        }
    }
}

impl From<PacketPage> for Packet {
    fn from(page: PacketPage) -> Self {
        let (page, offset, len) = page.into_parts();
        Self { chunk: Chunk::Page(page), offset, len }
    }
}

impl fmt::Debug for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packet").field("len", &self.len).finish_non_exhaustive()
    }
}
