//! Buffers registered with a program's own ring: Pinfold has the memory and the table, the program has the ring.
//!
//! A [`RingBuffers`] takes any ring by its descriptor, whichever library it is driven with, registers memory with it, and
//! says which number names which memory ([`RingBuffers::index_of`]): what `READ_FIXED` and `WRITE_FIXED` want to know.
//!
//! ```
//! use io_uring::{IoUring, opcode, types};
//! use pinfold::uring::RingBuffers;
//! use pinfold::{Arena, Domain};
//! use std::os::fd::AsRawFd;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(mut ring) = IoUring::new(8) else { return Ok(()) };
//! # let file = std::fs::File::open("/proc/self/exe")?;
//! let arena = Arena::builder().size(4 << 20).build(&Domain::soft()?)?;
//! let table = RingBuffers::register(&ring, &[arena.fixed()])?;
//! let buffer = arena.alloc(64 << 10)?;
//! let index = table.index_of(buffer.memory()).ok_or("registered above")?;
//!
//! let at = buffer.memory().as_ptr().as_ptr();
//! let read = opcode::ReadFixed::new(types::Fd(file.as_raw_fd()), at, 4096, index.get()).build();
//! // SAFETY: file and buffer live until the completion, and nobody reaches the buffer meanwhile.
//! unsafe { ring.submission().push(&read)? };
//! ring.submit_and_wait(1)?;
//! assert_eq!(ring.completion().next().map(|over| over.result()), Some(4096));
//! # Ok(())
//! # }
//! ```
//!
//! | what | first in Linux | without it |
//! | --- | --- | --- |
//! | a table registered whole | 5.1 | [`RegisterError::NoRing`] |
//! | tags, a table whose places change ([`RingBuffers::set`], [`RingBuffers::clear`]) | 5.13 | [`RegisterError::Unsupported`] |
//! | vacant places without a list of them | 5.19 | a list of them, which 5.13 takes |
//! | a table that a second ring shares ([`RingBuffers::share_with`]) | 6.12 | registered, and pinned, once more |

mod error;
pub(super) mod places;

pub use error::RegisterError;

use crate::memory::Fixed;
use crate::sys::{Errno, uring};
use pinfold_core::mem::DmaMemory;
use pinfold_core::registered::BufferIndex;
use places::Places;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};

/// Memory that is registered with a ring, until this is dropped.
///
/// It borrows the memory, which is known to the ring's users by its addresses, and keeps a duplicate of the ring's
/// descriptor, so that the ring is there for it to unregister. A transfer that is under way when memory is
/// unregistered, replaced or cleared still has it: the kernel holds the pages until its completion.
#[derive(Debug)]
pub struct RingBuffers<'m> {
    ring: OwnedFd,
    places: Places,
    /// It has not been given up yet.
    here: bool,
    lent: PhantomData<DmaMemory<'m>>,
}

/// How a second ring came by a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// The kernel shares the one that there is: nothing is pinned or charged again.
    Shared,
    /// It was registered once more, for this reason.
    Again(Errno),
}

impl<'m> RingBuffers<'m> {
    /// Registers the memory with a ring that has no table yet. Memory of more than 1 GiB takes several places.
    ///
    /// Linear in the pages; Linux 5.1.
    ///
    /// # Errors
    /// [`RegisterError`]; the ring has no table then, as before.
    pub fn register(ring: impl AsFd, memory: &[Fixed<'m>]) -> Result<Self, RegisterError> {
        let places = Places::of(memory.iter().map(|memory| (memory.addr, memory.len)))?;
        let ring = duplicate(&ring)?;
        uring::register(ring.as_fd(), &places.vectors())
            .map_err(|errno| RegisterError::at_first(&ring, errno, places.bytes()))?;
        Ok(Self { ring, places, here: true, lent: PhantomData })
    }

    /// A table of `capacity` vacant places, to be filled by [`set`](Self::set). Linux 5.13.
    ///
    /// # Errors
    /// [`RegisterError`]; the ring has no table then, as before.
    pub fn sparse(ring: impl AsFd, capacity: usize) -> Result<Self, RegisterError> {
        let places = Places::vacant(capacity)?;
        let ring = duplicate(&ring)?;
        let count = u32::try_from(capacity).unwrap_or(u32::MAX);
        uring::register_sparse(ring.as_fd(), count).map_err(|errno| match errno.raw() {
            libc::EINVAL | libc::ENOSYS => RegisterError::unsupported(errno, "vacant places", "5.13"),
            _ => RegisterError::at_first(&ring, errno, 0),
        })?;
        Ok(Self { ring, places, here: true, lent: PhantomData })
    }

    /// Puts memory, at most 1 GiB, in a place, and takes out what was there. Linux 5.13.
    ///
    /// Where `tag` is not 0, the ring will get a completion with this user data when the memory has left the table and
    /// the last transfer with it is over.
    ///
    /// # Errors
    /// [`RegisterError`]; what was in the place still is.
    pub fn set(&mut self, index: BufferIndex, memory: Fixed<'m>, tag: u64) -> Result<(), RegisterError> {
        let range = (memory.addr, memory.len);
        self.places.check(index, range)?;
        self.update(index, Some(range), tag)?;
        self.places.put(index, range);
        Ok(())
    }

    /// Puts memory in the first vacant place, and says which: [`set`](Self::set). Linear in the places.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn add(&mut self, memory: Fixed<'m>, tag: u64) -> Result<BufferIndex, RegisterError> {
        let full = RegisterError::Full { capacity: self.places.capacity() };
        let index = self.places.first_vacant().ok_or(full)?;
        self.set(index, memory, tag)?;
        Ok(index)
    }

    /// Takes out what is in a place. Linux 5.13.
    ///
    /// # Errors
    /// [`RegisterError::Beyond`], [`RegisterError::Vacant`], and what the system said; then it is still there.
    pub fn clear(&mut self, index: BufferIndex) -> Result<(), RegisterError> {
        self.places.exists(index)?;
        if !self.places.is_taken(index) {
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
        let asked = range.map_or(0, |(_, len)| len as u64);
        uring::update(self.ring.as_fd(), index.get().into(), places::vector(range), tag).map_err(|errno| {
            match errno.raw() {
                libc::EINVAL | libc::ENOSYS => {
                    RegisterError::unsupported(errno, "places that change", "5.13")
                }
                _ => RegisterError::of(errno, asked),
            }
        })
    }

    /// Gives another ring, which has no table yet, the same buffers by the same numbers; what is changed later is
    /// changed for one ring only. Shared where the kernel can (Linux 6.12), else registered once more.
    ///
    /// # Errors
    /// [`RegisterError`]; the other ring has no table then, as before.
    pub fn share_with(&self, other: impl AsFd) -> Result<(RingBuffers<'m>, Sharing), RegisterError> {
        let places = self.places.clone();
        let ring = duplicate(&other)?;
        let sharing = match uring::clone(ring.as_fd(), self.ring.as_fd()) {
            Ok(()) => Sharing::Shared,
            Err(errno) if [libc::EBUSY, libc::EEXIST, libc::EBADF].contains(&errno.raw()) => {
                return Err(RegisterError::of(errno, 0));
            }
            Err(why) => {
                let vectors = places.vectors();
                let again = match places.taken() == places.capacity() {
                    true => uring::register(ring.as_fd(), &vectors),
                    false => uring::register_tagged(ring.as_fd(), &vectors, &vec![0; vectors.len()]),
                };
                again.map_err(|errno| RegisterError::at_first(&ring, errno, places.bytes()))?;
                Sharing::Again(why)
            }
        };
        Ok((RingBuffers { ring, places, here: true, lent: PhantomData }, sharing))
    }

    /// The place that all of this memory lies in; `None` where it is not registered, or lies across two places.
    /// Logarithmic in the number of places; no system call.
    #[inline]
    pub fn index_of(&self, memory: DmaMemory<'_>) -> Option<BufferIndex> {
        self.places.of_memory(memory.addr(), memory.len())
    }

    /// How many places the table has.
    pub fn capacity(&self) -> usize {
        self.places.capacity()
    }

    /// How many of them are taken.
    pub fn len(&self) -> usize {
        self.places.taken()
    }

    /// Whether none is taken.
    pub fn is_empty(&self) -> bool {
        self.places.taken() == 0
    }

    /// How many bytes are registered.
    pub fn bytes(&self) -> u64 {
        self.places.bytes()
    }

    /// Gives the table up, and says whether the kernel did.
    ///
    /// # Errors
    /// [`RegisterError`], of which [`RegisterError::OtherThread`] leaves the table with the ring.
    pub fn unregister(mut self) -> Result<(), RegisterError> {
        self.give_up()
    }

    fn give_up(&mut self) -> Result<(), RegisterError> {
        match std::mem::replace(&mut self.here, false) {
            true => uring::unregister(self.ring.as_fd()).map_err(|errno| RegisterError::of(errno, 0)),
            false => Ok(()),
        }
    }
}

impl Drop for RingBuffers<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.give_up() {
            tracing::debug!(%error, "a ring keeps its table of buffers until it is closed");
        }
    }
}

fn duplicate(ring: &impl AsFd) -> Result<OwnedFd, RegisterError> {
    let errno = |error: io::Error| Errno::new(error.raw_os_error().unwrap_or(0));
    ring.as_fd().try_clone_to_owned().map_err(|error| RegisterError::System { errno: errno(error) })
}
