//! Guest memory over an arena: [`vm_memory`]'s traits.
//!
//! A virtual machine monitor, or one of its device models, accesses the memory by
//! [`VolatileSlice`]s and as [`Bytes`](::vm_memory::Bytes); no reference into it is ever made, so
//! any arena is accepted. With [`MappingPolicy::Whole`](crate::MappingPolicy::Whole) a device of
//! the arena's domain reaches all of it at [`GuestRegion::iova`], as a device that is passed
//! through to the guest must.
//!
//! vm-memory's accesses are volatile, or atomics of the width of an object, and those of a software
//! IOMMU's [`Port`](crate::soft::Port) are atomics of one byte. Rust orders neither with the other:
//! a model device that is a thread of this process must access bytes only while the monitor does
//! not, as the indices of a virtio ring ensure when they are read with acquire and written with
//! release ordering. A real device has no such condition.
//!
//! ```
//! use pinfold::adapters::vm_memory::{GuestArena, GuestRegion};
//! use pinfold::{Arena, Domain, MappingPolicy};
//! use vm_memory::{Bytes, GuestAddress};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(4 << 20).mapping_policy(MappingPolicy::Whole).build(&domain)?;
//! let region = GuestRegion::new(arena.alloc_zeroed(2 << 20)?, GuestAddress(0))?;
//! let guest = GuestArena::from_regions(vec![region])?;
//! guest.write_slice(b"kernel", GuestAddress(0x1000))?;
//! # Ok(()) }
//! ```

use crate::{Arena, Buffer, Source};
use ::vm_memory::bitmap::BS;
use ::vm_memory::guest_memory::Result as GuestResult;
use ::vm_memory::{
    Address, GuestAddress, GuestMemoryError, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionCollection, GuestUsize, MemoryRegionAddress, VolatileSlice,
};
use pinfold_core::addr::Iova;
use std::fmt;

/// Guest memory of several regions, in the order of their addresses, which implements
/// [`GuestMemory`](::vm_memory::GuestMemory).
pub type GuestArena = GuestRegionCollection<GuestRegion>;

/// A buffer as a region of a guest's memory. The region includes the padding to the buffer's
/// rounded length.
#[derive(Debug)]
pub struct GuestRegion {
    buffer: Buffer,
    start: GuestAddress,
}

/// A region that would end past the last 64-bit guest address. Returns the buffer.
#[derive(thiserror::Error)]
#[error("a region of {len} bytes at guest address {start:#x} ends past the last address", len = .buffer.len())]
pub struct PastEnd {
    /// The buffer.
    pub buffer: Buffer,
    /// The requested start.
    pub start: u64,
}

impl fmt::Debug for PastEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PastEnd").field("start", &self.start).finish_non_exhaustive()
    }
}

impl GuestRegion {
    /// Creates the region of a buffer at guest address `start`. Its contents are kept: allocate it
    /// by [`alloc_zeroed`](crate::ArenaMemory::alloc_zeroed) if the guest must not see earlier
    /// ones.
    ///
    /// # Errors
    /// [`PastEnd`], with the buffer.
    pub fn new(buffer: Buffer, start: GuestAddress) -> Result<Self, PastEnd> {
        // A buffer has at least one byte, so this is the address of its last one.
        match start.checked_add(buffer.len() as u64 - 1) {
            Some(_) => Ok(Self { buffer, start }),
            None => Err(PastEnd { buffer, start: start.raw_value() }),
        }
    }

    /// Returns the I/O virtual address of the first byte in the domain of `arena`, if the arena is
    /// mapped whole; the rest follows linearly.
    pub fn iova(&self, arena: &Arena) -> Option<Iova> {
        arena.iova_of(&self.buffer)
    }

    /// Returns the buffer.
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

impl GuestMemoryRegion for GuestRegion {
    type B = ();

    fn len(&self) -> GuestUsize {
        self.buffer.len() as u64
    }

    fn start_addr(&self) -> GuestAddress {
        self.start
    }

    fn bitmap(&self) -> BS<'_, Self::B> {}

    fn get_host_address(&self, addr: MemoryRegionAddress) -> GuestResult<*mut u8> {
        Ok(self.get_slice(addr, 1)?.ptr_guard_mut().as_ptr())
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> GuestResult<VolatileSlice<'_, BS<'_, Self::B>>> {
        let outside = GuestMemoryError::InvalidBackendAddress;
        let offset = usize::try_from(offset.raw_value()).map_err(|_| outside)?;
        let outside = GuestMemoryError::InvalidBackendAddress;
        let memory = self.buffer.memory().part(offset, count).map_err(|_| outside)?;
        // SAFETY: `part` proved that the bytes lie in the buffer's memory, which stays where it is
        // while the buffer, that is, `self`, is borrowed. No reference into it exists: that takes
        // an exclusive borrow of the buffer, and it is private here. Others reach it only where the
        // domain maps it: a device, which is outside of the program, as volatile accesses expect;
        // or the port of a software IOMMU, a thread of this process, whose accesses are relaxed
        // atomics of one byte each (`DmaMemory`) and make no reference. That the two do not access
        // the same bytes at the same time is the caller's part, stated at the module: the order of
        // the rings' indices keeps it.
        Ok(unsafe { VolatileSlice::new(memory.as_ptr().as_ptr(), memory.len()) })
    }

    fn is_hugetlbfs(&self) -> Option<bool> {
        let source = self.buffer.arena().report().source;
        (source != Source::Caller).then(|| source.is_hugetlb())
    }
}

impl GuestMemoryRegionBytes for GuestRegion {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Domain, MappingPolicy};
    use ::vm_memory::{Bytes, GuestMemory, GuestMemoryBackend};
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    const GIB: u64 = 1 << 30;

    fn guest(mapping_policy: MappingPolicy) -> (Arena, Domain, GuestArena) {
        let domain = Domain::soft().unwrap();
        let arena =
            Arena::builder().size(4 << 20).mapping_policy(mapping_policy).build(&domain).unwrap();
        // As on a PC: one part low, the other above the hole at 4 GiB.
        let low = GuestRegion::new(arena.alloc_zeroed(1 << 20).unwrap(), GuestAddress(0)).unwrap();
        let high =
            GuestRegion::new(arena.alloc_zeroed(2 << 20).unwrap(), GuestAddress(4 * GIB)).unwrap();
        (arena, domain, GuestArena::from_regions(vec![low, high]).unwrap())
    }

    #[test]
    fn guest_memory_reads_what_was_written_and_ends_at_its_bounds() {
        let (_arena, _domain, memory) = guest(MappingPolicy::PerUse);
        memory.write_slice(b"boot", GuestAddress(0x7c00)).unwrap();
        memory.write_obj(0x1234_5678_u32, GuestAddress(4 * GIB + (2 << 20) - 4)).unwrap();
        let mut back = [0; 4];
        memory.read_slice(&mut back, GuestAddress(0x7c00)).unwrap();
        assert_eq!(&back, b"boot");
        assert_eq!(
            memory.read_obj::<u32>(GuestAddress(4 * GIB + (2 << 20) - 4)).unwrap(),
            0x1234_5678
        );
        memory.store(7_u64, GuestAddress(4 * GIB), Ordering::Release).unwrap();
        assert_eq!(memory.load::<u64>(GuestAddress(4 * GIB), Ordering::Acquire).unwrap(), 7);
        // The hole, the last byte and what crosses it.
        memory.write_obj(1_u8, GuestAddress(1 << 20)).unwrap_err();
        memory.write_obj(1_u64, GuestAddress(4 * GIB + (2 << 20) - 4)).unwrap_err();
        memory.read_obj::<u8>(GuestAddress(u64::MAX)).unwrap_err();
    }

    #[test]
    fn slices_outside_of_a_region_are_refused() {
        let (_arena, _domain, memory) = guest(MappingPolicy::PerUse);
        let region = memory.find_region(GuestAddress(0)).unwrap();
        let (len, at) = (1 << 20, MemoryRegionAddress);
        assert_eq!(region.get_slice(at(0), len).unwrap().len(), len);
        assert_eq!(region.get_slice(at(len as u64), 0).unwrap().len(), 0);
        for (offset, count) in [(0, len + 1), (len as u64, 1), (u64::MAX, 1), (1, usize::MAX)] {
            assert!(region.get_slice(at(offset), count).is_err(), "{offset} {count}");
        }
        assert!(region.get_host_address(at(len as u64)).is_err());
        let first = region.as_volatile_slice().unwrap().ptr_guard().as_ptr();
        assert_eq!(region.get_host_address(at(5)).unwrap().addr(), first.addr() + 5);
    }

    #[test]
    fn a_region_past_the_last_address_returns_the_buffer() {
        let domain = Domain::soft().unwrap();
        let arena = Arena::builder().size(1 << 20).build(&domain).unwrap();
        let refused = GuestRegion::new(arena.alloc(8192).unwrap(), GuestAddress(u64::MAX - 4096))
            .unwrap_err();
        assert_eq!(refused.buffer.len(), 8192);
        let last = GuestRegion::new(refused.buffer, GuestAddress(u64::MAX - 8191)).unwrap();
        assert_eq!(last.last_addr(), GuestAddress(u64::MAX));
        drop(last.into_buffer());
        assert_eq!(arena.stats().frames_in_use, 0);
    }

    #[test]
    fn a_device_reaches_guest_memory_only_if_it_is_mapped_whole() {
        let (arena, domain, memory) = guest(MappingPolicy::Whole);
        let region = memory.find_region(GuestAddress(4 * GIB)).unwrap();
        let at = region.iova(&arena).unwrap().checked_add(0x2000).unwrap();
        domain.port().unwrap().write(at, b"packet").unwrap();
        let mut back = [0; 6];
        memory.read_slice(&mut back, GuestAddress(4 * GIB + 0x2000)).unwrap();
        assert_eq!(&back, b"packet");

        let (arena, _domain, memory) = guest(MappingPolicy::PerUse);
        assert_eq!(memory.find_region(GuestAddress(0)).unwrap().iova(&arena), None);
    }

    #[test]
    fn guest_memory_implements_the_traits_of_the_crate() {
        fn is_guest_memory(_: &impl GuestMemory) {}
        fn is_shared<T: Send + Sync>() {}
        let (_arena, _domain, memory) = guest(MappingPolicy::PerUse);
        is_guest_memory(&memory);
        is_shared::<Arc<GuestArena>>();
    }
}
