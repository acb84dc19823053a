//! A received page as the payload of a device.
// The one `unsafe impl` of the crate: a page is memory that can be mapped.
#![allow(unsafe_code)]

use pinfold::DmaMemory;
use pinfold::page_pool::{Page, Tag};
use pinfold::xdp::Umem;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{DomainId, Pinned};
use std::fmt;

/// The page of a packet, as memory that can be mapped into a domain or given to a queue: a disk
/// reads the packet from where the network wrote it. See
/// [`Packet::into_page`](crate::Packet::into_page).
///
/// Dropping it returns the page to its pool, on any thread.
pub struct PacketPage {
    page: Page<Umem>,
    offset: u32,
    len: u32,
}

impl PacketPage {
    /// Takes a page with `len` bytes of a packet at `offset`, which lie inside it.
    pub(crate) fn new(page: Page<Umem>, offset: u32, len: u32) -> Self {
        Self { page, offset, len }
    }

    pub(crate) fn into_parts(self) -> (Page<Umem>, u32, u32) {
        (self.page, self.offset, self.len)
    }

    /// Returns where in the page the packet starts, in bytes. What precedes it is free for the
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
