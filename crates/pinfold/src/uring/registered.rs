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
//! | tags, a table whose places change ([`RingBuffers::set`], [`RingBuffers::clear`]) | 5.13 | [`RegisterError::Unsupported`] |
//! | sparse tables without a list of vacant places | 5.19 | such a list (5.13) |
//! | a table that a second ring shares ([`RingBuffers::share_with`]) | 6.12 | registered and pinned again |

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
/// the ring's descriptor to unregister it. A transfer in flight keeps memory that is unregistered,
/// replaced or cleared: the kernel pins the pages until its completion.
#[derive(Debug)]
pub struct RingBuffers<'m> {
    ring: OwnedFd,
    places: Places,
    /// It has not been unregistered yet.
    registered: bool,
    lent: PhantomData<DmaMemory<'m>>,
}

/// The way a second ring got its table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// The kernel shares the existing one: nothing is pinned or charged again.
    Shared,
    /// It was registered again, for this reason.
    Again(Errno),
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
        Ok(Self { ring, places, registered: true, lent: PhantomData })
    }

    /// Registers a table of `capacity` vacant places, to be filled by [`set`](Self::set). Linux
    /// 5.13.
    ///
    /// # Errors
    /// [`RegisterError`]; the ring has no table then, as before.
    pub fn sparse(ring: impl AsFd, capacity: usize) -> Result<Self, RegisterError> {
        let places = Places::vacant(capacity)?;
        let ring = duplicate(&ring)?;
        let count = u32::try_from(capacity).unwrap_or(u32::MAX);
        uring::register_sparse(ring.as_fd(), count).map_err(|errno| match errno.raw() {
            libc::EINVAL | libc::ENOSYS => {
                RegisterError::unsupported(errno, "vacant places", "5.13")
            }
            _ => RegisterError::at_first(&ring, errno, || 0),
        })?;
        Ok(Self { ring, places, registered: true, lent: PhantomData })
    }

    /// Sets the memory of a place, at most 1 GiB, and replaces the previous memory. Linux 5.13.
    ///
    /// If `tag` is not 0, the ring receives a completion with this user data when the memory has
    /// left the table and the last transfer with it has completed.
    ///
    /// # Errors
    /// [`RegisterError`]; the place is unchanged then.
    pub fn set(
        &mut self,
        index: BufferIndex,
        memory: Fixed<'m>,
        tag: u64,
    ) -> Result<(), RegisterError> {
        let range = (memory.addr, memory.len);
        self.places.check(index, range)?;
        self.update(index, Some(range), tag)?;
        self.places.put(index, range);
        Ok(())
    }

    /// Vacates a place. Linux 5.13.
    ///
    /// # Errors
    /// [`RegisterError`]; the place is unchanged then.
    pub fn clear(&mut self, index: BufferIndex) -> Result<(), RegisterError> {
        self.places.exists(index)?;
        if !self.places.is_in_use(index) {
            return Err(RegisterError::Vacant { index });
        }
        self.update(index, None, 0)?;
        self.places.clear(index);
        Ok(())
    }

    fn update(
        &self,
        index: BufferIndex,
        range: Option<(usize, usize)>,
        tag: u64,
    ) -> Result<(), RegisterError> {
        let (ring, place) = (self.ring.as_fd(), index.get().into());
        let set = || uring::update(ring, place, uring::vector(range), tag);
        locking(|| charge_of(range), set).map_err(|errno| match errno.raw() {
            libc::EINVAL | libc::ENOSYS => {
                RegisterError::unsupported(errno, "places that change", "5.13")
            }
            _ => RegisterError::of(errno, || charge_of(range)),
        })
    }

    /// Registers the same buffers, with the same indices, with another ring that has no table yet;
    /// later changes affect one ring only. Shared by the kernel since Linux 6.12, else registered
    /// again.
    ///
    /// # Errors
    /// [`RegisterError`]; the other ring has no table then, as before.
    pub fn share_with(
        &self,
        other: impl AsFd,
    ) -> Result<(RingBuffers<'m>, Sharing), RegisterError> {
        let places = self.places.clone();
        let ring = duplicate(&other)?;
        let sharing = match uring::clone(ring.as_fd(), self.ring.as_fd()) {
            Ok(()) => Sharing::Shared,
            Err(errno) if [libc::EBUSY, libc::EEXIST, libc::EBADF].contains(&errno.raw()) => {
                return Err(RegisterError::of(errno, || 0));
            }
            Err(why) => {
                let vectors = places.vectors();
                let whole = places.in_use() == places.capacity();
                let again = || match whole {
                    true => uring::register(ring.as_fd(), &vectors),
                    false => {
                        uring::register_tagged(ring.as_fd(), &vectors, &vec![0; vectors.len()])
                    }
                };
                let again = locking(|| places.charge(), again);
                again.map_err(|errno| RegisterError::at_first(&ring, errno, || places.charge()))?;
                Sharing::Again(why)
            }
        };
        Ok((RingBuffers { ring, places, registered: true, lent: PhantomData }, sharing))
    }

    /// Returns the place that contains all of this memory; `None` if it is not registered, or
    /// crosses two places. Logarithmic in the number of places; no system call.
    #[inline]
    pub fn index_of(&self, memory: DmaMemory<'_>) -> Option<BufferIndex> {
        self.places.of_memory(memory.addr(), memory.len())
    }

    /// Returns the number of places in use.
    pub fn len(&self) -> usize {
        self.places.in_use()
    }

    /// Returns whether no place is in use.
    pub fn is_empty(&self) -> bool {
        self.places.in_use() == 0
    }

    /// Returns the number of registered bytes.
    pub fn bytes(&self) -> u64 {
        self.places.bytes()
    }

    /// Unregisters the table.
    ///
    /// # Errors
    /// [`StillRegistered`], with the table: with [`RegisterError::OtherThread`] the ring keeps it,
    /// and the thread that submits can unregister it.
    pub fn unregister(mut self) -> Result<(), StillRegistered<'m>> {
        match self.unregister_now() {
            Ok(()) => Ok(()),
            Err(error) => Err(StillRegistered { table: self, error }),
        }
    }

    fn unregister_now(&mut self) -> Result<(), RegisterError> {
        if self.registered {
            uring::unregister(self.ring.as_fd()).map_err(|errno| RegisterError::of(errno, || 0))?;
            self.registered = false;
        }
        Ok(())
    }
}

/// A table that could not be unregistered, and why. Dropping it tries again.
#[derive(Debug, thiserror::Error)]
#[error("cannot unregister the table of buffers: {error}")]
pub struct StillRegistered<'m> {
    /// The table.
    pub table: RingBuffers<'m>,
    /// Why it was not unregistered.
    pub error: RegisterError,
}

impl Drop for RingBuffers<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.unregister_now() {
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
    let set = || uring::update(ring, index.get().into(), uring::vector(range), 0);
    locking(|| charge_of(range), set).map_err(|errno| {
        // The kernel returns the same number for memory that it cannot pin and for a descriptor
        // that is no ring; a ring has no such place.
        let is_ring = || {
            uring::update(ring, u32::MAX - 1, uring::vector(None), 0)
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
