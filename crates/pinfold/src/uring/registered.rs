//! Buffers registered with a program's own ring: Pinfold owns the memory and the table, the program
//! the ring.
//!
//! A [`RingBuffers`] registers memory with any ring, by its descriptor and whatever library drives
//! it, and finds the index of memory in the ring's table ([`RingBuffers::index_of`]), which
//! `READ_FIXED` and `WRITE_FIXED` need.
//!
//! ```
//! use io_uring::{IoUring, opcode, types};
//! use pinfold::uring::RingBuffers;
//! use pinfold::Arena;
//! use std::os::fd::AsRawFd;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(mut ring) = IoUring::new(8) else { return Ok(()) };
//! # let file = std::fs::File::open("/proc/self/exe")?;
//! let arena = Arena::builder().size(4 << 20).build_unmapped()?;
//! let table = RingBuffers::register(&ring, &[arena.fixed()])?;
//! let buffer = arena.alloc(64 << 10)?;
//! let index = table.index_of(buffer.memory()).ok_or("registered above")?;
//!
//! let at = buffer.memory().as_ptr().as_ptr();
//! let read = opcode::ReadFixed::new(types::Fd(file.as_raw_fd()), at, 4096, index.get()).build();
//! // SAFETY: file and buffer live until the completion, and the buffer is not accessed meanwhile.
//! unsafe { ring.submission().push(&read)? };
//! ring.submit_and_wait(1)?;
//! assert_eq!(ring.completion().next().map(|entry| entry.result()), Some(4096));
//! # Ok(())
//! # }
//! ```
//!
//! | feature | since Linux | without it |
//! | --- | --- | --- |
//! | a table registered whole | 5.1 | [`RegisterError::NoRing`] |
//! | a place of a program's own table ([`set_place`]) | 5.13 | [`RegisterError::NoPlace`] |

use super::index::{BufferIndex, RegisterError};
use super::places::Places;
use crate::folios::{PLACE, ring_charge};
use crate::memory::Fixed;
use crate::sys::ring_memory::locking;
use crate::sys::{Errno, uring};
use pinfold_core::mem::DmaMemory;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};

/// Memory that is registered with a ring until this is dropped.
///
/// It borrows the memory, which the ring's users know by its addresses, and keeps a duplicate of
/// the ring's descriptor to unregister it. A transfer in flight keeps memory that is unregistered:
/// the kernel pins the pages until its completion. A ring that is bound to another thread than the
/// one that drops this keeps its table until it is closed.
#[derive(Debug)]
pub struct RingBuffers<'m> {
    ring: OwnedFd,
    places: Places,
    lent: PhantomData<DmaMemory<'m>>,
}

impl<'m> RingBuffers<'m> {
    /// Registers the memory with a ring that has no table yet. Memory of more than 1 GiB takes
    /// several places.
    ///
    /// Linear in the pages; Linux 5.1.
    ///
    /// # Errors
    /// [`RegisterError`]; the ring has no table then, as before.
    pub fn register(ring: impl AsFd, memory: &[Fixed<'m>]) -> Result<Self, RegisterError> {
        let places = Places::of(memory.iter().map(|memory| (memory.addr, memory.len)))?;
        let ring = duplicate(&ring)?;
        let vectors = places.vectors();
        locking(|| places.charge(), || uring::register(ring.as_fd(), &vectors))
            .map_err(|errno| RegisterError::at_first(&ring, errno, || places.charge()))?;
        Ok(Self { ring, places, lent: PhantomData })
    }

    /// Returns the place that contains all of this memory; `None` if it is not registered, or
    /// crosses two places. Logarithmic in the number of places; no system call.
    #[inline]
    pub fn index_of(&self, memory: DmaMemory<'_>) -> Option<BufferIndex> {
        self.places.of_memory(memory.addr(), memory.len())
    }

    /// Returns the number of places in use.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns whether no place is in use.
    pub fn is_empty(&self) -> bool {
        self.places.len() == 0
    }

    /// Returns the number of registered bytes.
    pub fn bytes(&self) -> u64 {
        self.places.bytes()
    }
}

impl Drop for RingBuffers<'_> {
    fn drop(&mut self) {
        if let Err(errno) = uring::unregister(self.ring.as_fd()) {
            let error = RegisterError::of(errno, || 0);
            tracing::debug!(%error, "a table of buffers stays registered until its ring is closed");
        }
    }
}

/// Sets the memory of a place in the table of a ring, at most 1 GiB, or vacates it: for a table that
/// the program has registered itself, by other means than [`RingBuffers`]. Linux 5.13.
///
/// Transfers in flight keep the previous memory: the kernel pins its pages until they complete.
///
/// # Errors
/// [`RegisterError`]; the place is unchanged then.
pub fn set_place(
    ring: impl AsFd,
    index: BufferIndex,
    memory: Option<Fixed<'_>>,
) -> Result<(), RegisterError> {
    let (ring, range) = (ring.as_fd(), memory.map(|memory| (memory.addr, memory.len)));
    if let Some((_, len)) = range.filter(|(_, len)| !(1..=PLACE).contains(len)) {
        return Err(RegisterError::Length { len, limit: PLACE });
    }
    let set = || uring::update(ring, index.get().into(), uring::vector(range));
    locking(|| charge_of(range), set).map_err(|errno| {
        // The kernel returns the same number for memory that it cannot pin and for a descriptor
        // that is no ring; a ring has no such place.
        let is_ring = || {
            uring::update(ring, u32::MAX - 1, uring::vector(None))
                != Err(Errno::new(libc::EOPNOTSUPP))
        };
        match errno.raw() {
            libc::EINVAL => RegisterError::NoPlace { index },
            libc::EOPNOTSUPP if !is_ring() => RegisterError::NoRing { errno },
            _ => RegisterError::of(errno, || charge_of(range)),
        }
    })
}

/// Returns the kernel's charge for the memory of one place.
fn charge_of(range: Option<(usize, usize)>) -> u64 {
    let bytes = range.map_or(0, |(_, len)| len as u64);
    ring_charge(range).unwrap_or(bytes)
}

fn duplicate(ring: &impl AsFd) -> Result<OwnedFd, RegisterError> {
    let errno = |error: io::Error| Errno::new(error.raw_os_error().unwrap_or(0));
    ring.as_fd().try_clone_to_owned().map_err(|error| RegisterError::System { errno: errno(error) })
}
