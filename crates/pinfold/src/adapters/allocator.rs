//! `Vec` and `Box` in an arena, by [`allocator_api2`], and a `Vec` as a payload of a device.
//!
//! ```
//! use allocator_api2::vec::Vec;
//! use pinfold::adapters::allocator::{ArenaAlloc, DmaVec};
//! use pinfold::{Arena, Domain};
//! use pinfold_core::access::FromDevice;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(1 << 20).build(&domain)?;
//! let mut samples = Vec::new_in(ArenaAlloc::new(&arena)?);
//! samples.resize(1000, 0_u32);
//! // From here the device may write it ...
//! let mapped = domain.map(DmaVec::new(samples)?, FromDevice)?;
//! # domain.port().ok_or("no device")?.write(mapped.iova().start(), &7_u32.to_ne_bytes())?;
//! let samples = mapped.unmap()?.into_vec(); // ... to here
//! assert_eq!((samples[0], samples.len()), (7, 1000));
//! # Ok(()) }
//! ```

use crate::arena::{ArenaMemory, NotExclusive, Run};
use allocator_api2::alloc::{AllocError, Allocator, Layout};
use allocator_api2::vec::Vec;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{DomainId, Pinned};
use pinfold_core::frame::Frame;
use pinfold_core::mem::DmaMemory;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

const FRAME: usize = 4096;
/// The largest alignment, and the largest run allocated by order.
const HUGE: usize = 2 << 20;

/// An arena as an allocator: each allocation is a run of frames of its own, so that it can be
/// mapped for a device without its neighbours. For few large allocations: each takes at least 4096
/// bytes.
///
/// Alignments up to 2 MiB are supported. An allocation that grows or shrinks within its frames does
/// not move; one that shrinks by whole frames does not move either, and frees them. A clone is the
/// same allocator, and keeps the arena.
#[derive(Clone, Debug)]
pub struct ArenaAlloc {
    arena: ArenaMemory,
}

impl ArenaAlloc {
    /// Creates an allocator over the arena.
    ///
    /// # Errors
    /// [`NotExclusive`] if a device, or another process through the arena's memfd, could write to
    /// referenced memory.
    pub fn new(arena: &ArenaMemory) -> Result<Self, NotExclusive> {
        if arena.state().is_private() {
            Ok(Self { arena: arena.clone() })
        } else {
            Err(NotExclusive)
        }
    }

    fn alloc_frames(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        let frames = frames_of(layout).ok_or(AllocError)?;
        let buffer = self.arena.alloc(frames as usize * FRAME).map_err(|_| AllocError)?;
        if !buffer.memory().addr().is_multiple_of(layout.align()) {
            return Err(AllocError); // the arena is less aligned, as memory of the caller may be
        }
        // `free_frames` frees it, from the address.
        Ok(ManuallyDrop::new(buffer).memory().as_ptr())
    }

    /// # Safety
    /// The `frames` frames from `ptr` were allocated here, are not freed, and nothing reaches them
    /// any more.
    unsafe fn free_frames(&self, ptr: NonNull<u8>, frames: u32) {
        let offset = ptr.addr().get().wrapping_sub(self.arena.addr());
        // An allocation of this allocator is a run of the arena, so this is always a frame of it.
        if let Some(first) = u32::try_from(offset / FRAME).ok().and_then(Frame::new) {
            self.arena.state().free(Run { first, frames });
        }
    }
}

/// Returns how many frames a layout takes: the same for all sizes that these frames can hold, since
/// the layout of a free may have any of them.
fn frames_of(layout: Layout) -> Option<u32> {
    let bytes = match (layout.align(), layout.size()) {
        (_, 0) => 0,
        (..=FRAME, size) => size.checked_next_multiple_of(FRAME)?,
        // Runs of 2^n frames start at multiples of their size, and longer ones than 2 MiB at
        // multiples of that.
        (align @ ..=HUGE, size @ ..=HUGE) => size.max(align).checked_next_power_of_two()?,
        (..=HUGE, size) => size.checked_next_multiple_of(FRAME)?,
        _ => return None,
    };
    u32::try_from(bytes / FRAME).ok()
}

fn whole(ptr: NonNull<u8>, frames: u32) -> NonNull<[u8]> {
    NonNull::slice_from_raw_parts(ptr, frames as usize * FRAME)
}

// SAFETY: an allocation is a run of frames with one owner until it is freed, in memory that is
// mapped and stays where it is as long as the arena lives, which every clone holds. The arena is
// private (`new`), so nothing but the holder of the allocation reaches it: a device does only while
// a `DmaVec`, which owns it, is mapped.
unsafe impl Allocator for ArenaAlloc {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        match frames_of(layout).ok_or(AllocError)? {
            0 => Ok(NonNull::slice_from_raw_parts(layout.dangling_ptr(), 0)),
            frames => Ok(whole(self.alloc_frames(layout)?, frames)),
        }
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
        if let Some(frames) = frames_of(layout).filter(|frames| *frames > 0) {
            // SAFETY: the caller's promise: allocated here, for a layout that fits, hence of that
            // many frames, and free.
            unsafe { self.free_frames(ptr, frames) };
        }
    }

    unsafe fn grow(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        let frames = frames_of(new).ok_or(AllocError)?;
        if frames_of(old) == Some(frames) && ptr.addr().get().is_multiple_of(new.align()) {
            return Ok(NonNull::slice_from_raw_parts(ptr, frames as usize * FRAME));
        }
        let grown = self.allocate(new)?;
        // SAFETY: the old allocation has `old.size()` bytes by the caller's promise, the new one at
        // least as many, and they are two.
        unsafe { ptr.copy_to_nonoverlapping(grown.cast(), old.size()) };
        // SAFETY: the caller's promise; the old allocation is reached no more.
        unsafe { self.deallocate(ptr, old) };
        Ok(grown)
    }

    unsafe fn shrink(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        let (had, frames) = (frames_of(old).ok_or(AllocError)?, frames_of(new).ok_or(AllocError)?);
        let stays = frames > 0 && frames <= had && ptr.addr().get().is_multiple_of(new.align());
        if !stays {
            let moved = self.allocate(new)?;
            // SAFETY: both have at least `new.size()` bytes by the caller's promise, and they are
            // two.
            unsafe { ptr.copy_to_nonoverlapping(moved.cast(), new.size()) };
            // SAFETY: the caller's promise; the old allocation is reached no more.
            unsafe { self.deallocate(ptr, old) };
            return Ok(moved);
        }
        if frames < had {
            // SAFETY: the allocation has `had` frames, so this is inside of it.
            let rest = unsafe { ptr.add(frames as usize * FRAME) };
            // SAFETY: they were allocated as the end of this allocation, which ends before them
            // from here on.
            unsafe { self.free_frames(rest, had - frames) };
        }
        Ok(whole(ptr, frames))
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Types that a device may fill, since every bit pattern is a value and there is no padding:
/// integers and floats.
pub trait Plain: sealed::Sealed + Copy + Send + 'static {}

macro_rules! plain {
    ($($ty:ty)*) => {$(
        impl sealed::Sealed for $ty {}
        impl Plain for $ty {}
    )*};
}
plain!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64);

/// A `Vec` in an arena that can be mapped: [`Domain::map`](pinfold_core::domain::Domain::map).
///
/// A device reaches all frames of the `Vec`, including those after its last element; they contain
/// nothing else. Its writes do not change the number of elements.
pub struct DmaVec<T: Plain> {
    vec: Vec<T, ArenaAlloc>,
    /// All frames of the vector, which is neither grown nor lent while this value owns it.
    memory: DmaMemory<'static>,
}

/// The `Vec` has no memory because its capacity is 0. Returns it.
#[derive(thiserror::Error)]
#[error("a vector without capacity has no memory that could be mapped: resize() it first")]
pub struct NoMemory<T: Plain>(pub Vec<T, ArenaAlloc>);

impl<T: Plain> fmt::Debug for NoMemory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NoMemory")
    }
}

impl<T: Plain> DmaVec<T> {
    /// Takes the vector, to be mapped.
    ///
    /// # Errors
    /// [`NoMemory`] if it has no capacity.
    pub fn new(mut vec: Vec<T, ArenaAlloc>) -> Result<Self, NoMemory<T>> {
        let frames = Layout::array::<T>(vec.capacity()).ok().and_then(frames_of);
        let (Some(frames @ 1..), Some(base)) = (frames, NonNull::new(vec.as_mut_ptr())) else {
            return Err(NoMemory(vec));
        };
        // SAFETY: the frames are the vector's allocation (`frames_of` is what allocated it), which
        // lives as long as the value; the value never lends the vector, so no reference into it
        // exists.
        let memory = unsafe { DmaMemory::from_raw(base.cast(), frames as usize * FRAME) };
        Ok(Self { vec, memory })
    }

    /// Returns the vector.
    pub fn into_vec(self) -> Vec<T, ArenaAlloc> {
        self.vec
    }
}

// SAFETY: the memory is the vector's allocation, which has no other owner and stays where it is
// until the value is dropped, for nothing here grows it; the value never lends the vector. The
// arena is private, so nothing is mapped.
unsafe impl<T: Plain> Pinned for DmaVec<T> {
    fn memory(&self) -> DmaMemory<'_> {
        self.memory
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

impl<T: Plain> fmt::Debug for DmaVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaVec")
            .field("elements", &self.vec.len())
            .field("bytes", &self.memory.len())
            .finish()
    }
}

#[cfg(test)]
mod tests;
