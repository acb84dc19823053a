//! [`Packet`], a chunk that the kernel has written to and where in it the packet is, and its page
//! as the payload of a device.

use super::ring::Chunk;
use pinfold::DmaMemory;
use pinfold::page_pool::{Page, Tag};
use pinfold_core::addr::Iova;
use pinfold_core::domain::{DomainId, Pinned};
use std::fmt;

/// A packet, from the header of the link layer on. Its memory returns to the pool when it is
/// dropped, on any thread; [`Socket::recycle`](crate::Socket::recycle) is faster on the socket's
/// own.
pub struct Packet {
    chunk: Chunk,
    /// Its offset in its chunk, and its length: inside the chunk.
    offset: u32,
    len: u32,
}

impl Packet {
    /// Returns a packet without bytes in a chunk.
    #[inline]
    pub(crate) fn empty(chunk: Chunk) -> Self {
        Self { chunk, offset: 0, len: 0 }
    }

    /// Says where in its chunk of `room` bytes the packet is; cut to the chunk.
    #[inline]
    pub(crate) fn place(&mut self, offset: u32, len: u32, room: u32) {
        self.offset = offset.min(room);
        self.len = len.min(room - self.offset);
    }

    #[inline]
    pub(crate) fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    /// Returns where in its chunk it starts, and its length.
    #[inline]
    pub(crate) fn placed(&self) -> (u32, u32) {
        (self.offset, self.len)
    }

    #[inline]
    pub(crate) fn into_chunk(self) -> Chunk {
        self.chunk
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
        // `place` has checked the range.
        self.chunk
            .memory()
            .part(self.offset as usize, self.len as usize)
            .unwrap_or(DmaMemory::EMPTY)
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
    /// The packet, if its memory is only a part of a page
    /// ([`ChunkSize::HalfPage`](crate::ChunkSize::HalfPage)): a device would reach the other parts.
    pub fn into_page(self) -> Result<PacketPage, Self> {
        match self.chunk {
            Chunk::Page(page) => Ok(PacketPage::new(page, self.offset, self.len)),
            Chunk::Part(_) => Err(self),
        }
    }

    /// Names the holder of its page for [`SocketReport::holders`](crate::SocketReport). Parts of
    /// pages have no holder of their own, so this has no effect in chunks smaller than a page.
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

// A received page as the payload of a device.

/// The page of a packet, as memory that can be mapped into a domain or given to a queue: a disk
/// reads the packet from where the network wrote it. See
/// [`Packet::into_page`](crate::Packet::into_page).
///
/// Dropping it returns the page to its pool, on any thread.
pub struct PacketPage {
    page: Page,
    offset: u32,
    len: u32,
}

impl PacketPage {
    /// Takes a page with `len` bytes of a packet at `offset`, which lie inside it.
    pub(crate) fn new(page: Page, offset: u32, len: u32) -> Self {
        Self { page, offset, len }
    }

    pub(crate) fn into_parts(self) -> (Page, u32, u32) {
        (self.page, self.offset, self.len)
    }

    /// Returns where in the page the packet starts, in bytes. The bytes before it are free for the
    /// program's own header.
    pub fn offset(&self) -> usize {
        self.offset as usize
    }

    /// Returns the length of the packet in bytes.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Names the holder of the page for [`SocketReport::holders`](crate::SocketReport).
    pub fn hold_for(&self, holder: Tag) {
        self.page.tag(holder);
    }

    /// Returns whether the packet has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[allow(unsafe_code)] // A page is memory that can be mapped.
// SAFETY: the page is its owner's alone until it is dropped, and never reused if it is leaked; it
// lies in the UMEM's arena, which its pool keeps mapped, and does not move. It is not in a ring:
// `Rings` gave it away with the packet, and takes chunks by value. It lends no reference, only
// `DmaMemory`. A page of a pool is one frame, so start and length are multiples of 4096.
unsafe impl Pinned for PacketPage {
    fn memory(&self) -> DmaMemory<'_> {
        self.page.memory()
    }
    fn fixed_iova(&self, _domain: DomainId) -> Option<Iova> {
        None
    }
}

impl fmt::Debug for PacketPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PacketPage")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
