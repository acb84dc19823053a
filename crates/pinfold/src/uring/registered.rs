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

use crate::memory::Fixed;
use crate::sys::limits::{MemlockLimit, MemlockRefusal};
use crate::sys::release::{parse_release, release};
use crate::sys::{Errno, uring};
use pinfold_core::folio::BufferIndex;
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

/// How a second ring got its table.
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
        uring::register(ring.as_fd(), &places.vectors())
            .map_err(|errno| RegisterError::at_first(&ring, errno, places.bytes()))?;
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
            _ => RegisterError::at_first(&ring, errno, 0),
        })?;
        Ok(Self { ring, places, registered: true, lent: PhantomData })
    }

    /// Sets the memory of a place, at most 1 GiB, and replaces what was there. Linux 5.13.
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

    /// Sets the memory of the first vacant place, and returns its index: see [`set`](Self::set).
    /// Linear in the places.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn add(&mut self, memory: Fixed<'m>, tag: u64) -> Result<BufferIndex, RegisterError> {
        let full = RegisterError::Full { capacity: self.places.capacity() };
        let index = self.places.first_vacant().ok_or(full)?;
        self.set(index, memory, tag)?;
        Ok(index)
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
        let asked = range.map_or(0, |(_, len)| len as u64);
        uring::update(self.ring.as_fd(), index.get().into(), vector(range), tag).map_err(|errno| {
            match errno.raw() {
                libc::EINVAL | libc::ENOSYS => {
                    RegisterError::unsupported(errno, "places that change", "5.13")
                }
                _ => RegisterError::of(errno, asked),
            }
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
                return Err(RegisterError::of(errno, 0));
            }
            Err(why) => {
                let vectors = places.vectors();
                let again = match places.in_use() == places.capacity() {
                    true => uring::register(ring.as_fd(), &vectors),
                    false => {
                        uring::register_tagged(ring.as_fd(), &vectors, &vec![0; vectors.len()])
                    }
                };
                again.map_err(|errno| RegisterError::at_first(&ring, errno, places.bytes()))?;
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

    /// Returns the number of places.
    pub fn capacity(&self) -> usize {
        self.places.capacity()
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
            uring::unregister(self.ring.as_fd()).map_err(|errno| RegisterError::of(errno, 0))?;
            self.registered = false;
        }
        Ok(())
    }
}

/// A table that could not be unregistered, and why. Dropping it tries once more.
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
/// Transfers in flight keep what was there: the kernel pins its pages until they complete.
///
/// # Errors
/// [`RegisterError`]; the place is unchanged then.
pub fn set_place(
    ring: impl AsFd,
    index: BufferIndex,
    memory: Option<Fixed<'_>>,
) -> Result<(), RegisterError> {
    let (ring, range) = (ring.as_fd(), memory.map(|memory| (memory.addr, memory.len)));
    if let Some((_, len)) = range.filter(|(_, len)| !(1..=MOST_BYTES).contains(len)) {
        return Err(RegisterError::Length { len, limit: MOST_BYTES });
    }
    let asked = range.map_or(0, |(_, len)| len as u64);
    uring::update(ring, index.get().into(), vector(range), 0).map_err(|errno| {
        // The kernel returns the same number for memory that it cannot pin and for a descriptor
        // that is no ring; a ring has no such place.
        let is_ring = || {
            uring::update(ring, u32::MAX - 1, vector(None), 0) != Err(Errno::new(libc::EOPNOTSUPP))
        };
        match errno.raw() {
            libc::EINVAL => RegisterError::NoPlace { index },
            libc::EOPNOTSUPP if !is_ring() => RegisterError::NoRing { errno },
            _ => RegisterError::of(errno, asked),
        }
    })
}

fn duplicate(ring: &impl AsFd) -> Result<OwnedFd, RegisterError> {
    let errno = |error: io::Error| Errno::new(error.raw_os_error().unwrap_or(0));
    ring.as_fd().try_clone_to_owned().map_err(|error| RegisterError::System { errno: errno(error) })
}

// The places of a ring's table, and the memory in them.

/// The most that one place holds: 1 GiB, the kernel's own limit.
pub(super) const MOST_BYTES: usize = 1 << 30;
/// The most places that a table has (Linux 5.13; 1,024 before).
pub(super) const MOST_PLACES: usize = 16_384;

/// The memory of a place: its address and its length.
type Range = (usize, usize);

/// The places of a table.
#[derive(Clone, Debug)]
pub(super) struct Places {
    places: Vec<Option<Range>>,
    /// The places in use, by address; no two overlap.
    order: Vec<(Range, u16)>,
}

impl Places {
    /// Returns `capacity` vacant places.
    pub(super) fn vacant(capacity: usize) -> Result<Self, RegisterError> {
        if capacity == 0 || capacity > MOST_PLACES {
            return Err(RegisterError::Capacity { requested: capacity, limit: MOST_PLACES });
        }
        Ok(Self { places: vec![None; capacity], order: Vec::with_capacity(capacity) })
    }

    /// Returns places for these pieces of memory, in order, each in as many places as its length
    /// needs.
    pub(super) fn of(memory: impl IntoIterator<Item = Range>) -> Result<Self, RegisterError> {
        let mut pieces: Vec<Range> = Vec::new();
        for (addr, len) in memory {
            let starts = (0..len).step_by(MOST_BYTES);
            pieces.extend(starts.map(|at| (addr + at, MOST_BYTES.min(len - at))));
        }
        let mut places = Self::vacant(pieces.len())?;
        for (index, piece) in pieces.into_iter().enumerate() {
            let index = BufferIndex::new(u16::try_from(index).unwrap_or(u16::MAX));
            places.check(index, piece)?;
            places.put(index, piece);
        }
        Ok(places)
    }

    pub(super) fn capacity(&self) -> usize {
        self.places.len()
    }

    pub(super) fn in_use(&self) -> usize {
        self.order.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.order.iter().map(|&((_, len), _)| len as u64).sum()
    }

    pub(super) fn vectors(&self) -> Vec<libc::iovec> {
        self.places.iter().map(|place| vector(*place)).collect()
    }

    /// Returns the place that contains all of the memory. Logarithmic in the number of places.
    #[inline]
    pub(super) fn of_memory(&self, addr: usize, len: usize) -> Option<BufferIndex> {
        let before = self.order.partition_point(|&((start, _), _)| start <= addr).checked_sub(1)?;
        let &((start, size), index) = self.order.get(before)?;
        let inside = (addr - start).checked_add(len)? <= size;
        inside.then_some(BufferIndex::new(index))
    }

    /// Checks that the memory may be set in this place, whatever is there now.
    pub(super) fn check(
        &self,
        index: BufferIndex,
        (addr, len): Range,
    ) -> Result<(), RegisterError> {
        self.exists(index)?;
        if len == 0 || len > MOST_BYTES {
            return Err(RegisterError::Length { len, limit: MOST_BYTES });
        }
        let end = addr.checked_add(len).ok_or(RegisterError::Length { len, limit: MOST_BYTES })?;
        let at = self.order.partition_point(|&((start, _), _)| start < end);
        // The places do not overlap one another, so if one overlaps the memory, it is among the
        // last two that begin before its end (one of which may be the place to be replaced).
        let before = self.order.get(at.saturating_sub(2)..at).unwrap_or_default();
        let hit = before
            .iter()
            .find(|&&((start, size), other)| other != index.get() && start + size > addr);
        match hit {
            Some(&(_, with)) => {
                Err(RegisterError::Overlaps { addr, len, with: BufferIndex::new(with) })
            }
            None => Ok(()),
        }
    }

    pub(super) fn exists(&self, index: BufferIndex) -> Result<(), RegisterError> {
        let capacity = self.capacity();
        if usize::from(index.get()) < capacity {
            Ok(())
        } else {
            Err(RegisterError::Beyond { index, capacity })
        }
    }

    pub(super) fn is_in_use(&self, index: BufferIndex) -> bool {
        self.places.get(usize::from(index.get())).is_some_and(Option::is_some)
    }

    /// Returns the first vacant place.
    pub(super) fn first_vacant(&self) -> Option<BufferIndex> {
        let place = self.places.iter().position(Option::is_none)?;
        u16::try_from(place).ok().map(BufferIndex::new)
    }

    /// Sets the memory of a place, which [`check`](Self::check) has accepted.
    pub(super) fn put(&mut self, index: BufferIndex, range: Range) {
        self.clear(index);
        if let Some(place) = self.places.get_mut(usize::from(index.get())) {
            *place = Some(range);
            let at = self.order.partition_point(|&(other, _)| other < range);
            self.order.insert(at, (range, index.get()));
        }
    }

    pub(super) fn clear(&mut self, index: BufferIndex) {
        if self.places.get_mut(usize::from(index.get())).is_some_and(|place| place.take().is_some())
        {
            self.order.retain(|&(_, other)| other != index.get());
        }
    }
}

/// Returns a place in the kernel's form.
pub(super) fn vector(place: Option<Range>) -> libc::iovec {
    let (addr, len) = place.unwrap_or((0, 0));
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(addr), iov_len: len }
}

// Why buffers were not registered with a ring.

/// Why memory was not registered with a ring. Earlier registrations are unchanged.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The descriptor is not a usable io_uring.
    #[error("the descriptor is not a usable io_uring ({errno})")]
    NoRing {
        /// The error.
        errno: Errno,
    },
    /// A ring has one table.
    #[error("the ring has a table of buffers already: unregister it first")]
    HasTable,
    /// The table was unregistered by other means.
    #[error("the ring has no table: it was unregistered by other means")]
    NoTable,
    /// The ring is bound to another thread (`IORING_SETUP_SINGLE_ISSUER`).
    #[error(
        "the ring is bound to another thread: register and unregister from the one that submits"
    )]
    OtherThread,
    /// The process may not pin that much.
    #[error(
        "{}; fix: {}",
        MemlockRefusal { requested: *requested, limit: limit.soft.unwrap_or(u64::MAX) },
        limit.raise_command_for_user(*requested)
    )]
    Memlock {
        /// The number of bytes to be pinned.
        requested: u64,
        /// The limit of the process.
        limit: MemlockLimit,
    },
    /// The kernel has no memory of its own for the table, or none to fault the buffers in.
    #[error(
        "the kernel has no memory to register {requested} bytes with the ring: free memory of the machine, or of the \
         control group if that has a limit, or register less"
    )]
    NoMemory {
        /// The number of bytes to be pinned.
        requested: u64,
    },
    /// The memory cannot be pinned: unmapped, not readable and writable, or a device's.
    #[error(
        "the kernel cannot pin that memory ({errno}): it must be mapped, writable, and no device's"
    )]
    Memory {
        /// The error.
        errno: Errno,
    },
    /// The capacity is out of range.
    #[error("a table of {requested} places: 1 to {limit} are possible (1 GiB each)")]
    Capacity {
        /// The requested number.
        requested: usize,
        /// The largest number.
        limit: usize,
    },
    /// The memory does not fit one place.
    #[error("{len} bytes in one place: 1 to {limit} are possible")]
    Length {
        /// Its length in bytes.
        len: usize,
        /// The largest length.
        limit: usize,
    },
    /// The place does not exist.
    #[error("{index} does not exist: the table has {capacity} places")]
    Beyond {
        /// The place.
        index: BufferIndex,
        /// The number of places.
        capacity: usize,
    },
    /// The ring's table, which the program made, has no such place.
    #[error(
        "the ring's table has no {index}: register a longer one (before Linux 5.13 its places cannot change)"
    )]
    NoPlace {
        /// The place.
        index: BufferIndex,
    },
    /// The place is vacant.
    #[error("{index} is vacant: set it first")]
    Vacant {
        /// The place.
        index: BufferIndex,
    },
    /// No place is vacant.
    #[error("all {capacity} places of the table are in use: clear one first")]
    Full {
        /// The number of places.
        capacity: usize,
    },
    /// The memory overlaps another place: an address would have two indices.
    #[error(
        "{len:#x} bytes at {addr:#x} overlap {with}: clear that place first, or register the rest"
    )]
    Overlaps {
        /// The address of the memory.
        addr: usize,
        /// Its length in bytes.
        len: usize,
        /// The place that it overlaps.
        with: BufferIndex,
    },
    /// The kernel is too old.
    #[error("{}", unsupported(what, since, *errno))]
    Unsupported {
        /// The missing feature.
        what: &'static str,
        /// The first kernel that has it.
        since: &'static str,
        /// The error.
        errno: Errno,
    },
    /// Another error.
    #[error("io_uring_register: {errno}")]
    System {
        /// The error.
        errno: Errno,
    },
}

/// Names the release only to a kernel that is older.
fn unsupported(what: &str, since: &str, errno: Errno) -> String {
    let release = release();
    match (parse_release(since), parse_release(&release)) {
        (Some(since), Some(has)) if has >= since => {
            format!(
                "{what}: refused ({errno}), although Linux {release} has them: look for a seccomp filter"
            )
        }
        _ => format!("{what} need Linux {since}, and this is {release} ({errno})"),
    }
}

impl RegisterError {
    /// Explains `errno` of a registration of `requested` bytes.
    fn of(errno: Errno, requested: u64) -> Self {
        match errno.raw() {
            libc::ENXIO => Self::NoTable,
            libc::EBADF | libc::EBADFD => Self::NoRing { errno },
            libc::EBUSY => Self::HasTable,
            libc::EEXIST => Self::OtherThread,
            libc::ENOMEM if MemlockRefusal::of(errno, requested).is_some() => {
                Self::Memlock { requested, limit: MemlockLimit::here() }
            }
            libc::ENOMEM => Self::NoMemory { requested },
            libc::EFAULT | libc::EOPNOTSUPP => Self::Memory { errno },
            _ => Self::System { errno },
        }
    }

    /// Explains `errno` of the first registration with a descriptor, which may not be a ring.
    fn at_first(ring: &OwnedFd, errno: Errno, requested: u64) -> Self {
        // The kernel returns the same number for memory that cannot be pinned and for a descriptor
        // that is no ring; for a ring without a table, unregistering returns another errno.
        let not_a_ring = || uring::unregister(ring.as_fd()) == Err(Errno::new(libc::EOPNOTSUPP));
        match errno.raw() {
            libc::EOPNOTSUPP if not_a_ring() => Self::NoRing { errno },
            _ => Self::of(errno, requested),
        }
    }

    fn unsupported(errno: Errno, what: &'static str, since: &'static str) -> Self {
        Self::Unsupported { what, since, errno }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn memory_takes_as_many_places_as_its_length_asks_for() {
        let places = Places::of([(1 << 40, (2 << 30) + 5), (0x1000, 0x1000)]).unwrap();
        assert_eq!(
            (places.capacity(), places.in_use(), places.bytes()),
            (4, 4, (2 << 30) + 0x1005)
        );
        let index = |addr, len| places.of_memory(addr, len).map(BufferIndex::get);
        assert_eq!(index(0x1fff, 1), Some(3));
        assert_eq!(index(0x1fff, 2), None);
        assert_eq!(index((1 << 40) + (1 << 30), 1 << 30), Some(1));
        assert_eq!(index((1 << 40) + (1 << 30) - 1, 2), None, "across two places");
        assert!(matches!(Places::of([]), Err(RegisterError::Capacity { requested: 0, .. })));
        assert!(matches!(
            Places::of([(0, 8), (4, 8)]),
            Err(RegisterError::Overlaps { addr: 4, .. })
        ));
    }

    proptest! {
        #[test]
        fn places_agree_with_a_list(
            steps in prop::collection::vec((0u16..10, 0usize..100, 0usize..20, any::<bool>()), 1..200),
            addr in 0usize..110, len in 1usize..10,
        ) {
            let mut places = Places::vacant(8).unwrap();
            let mut model: [Option<Range>; 8] = [None; 8];
            for (place, start, size, put) in steps {
                let index = BufferIndex::new(place);
                if !put {
                    places.clear(index);
                    if let Some(slot) = model.get_mut(usize::from(place)) { *slot = None }
                    continue;
                }
                let clash = model.iter().enumerate().any(|(i, other)| {
                    i != usize::from(place) && other.is_some_and(|(a, l)| a < start + size && start < a + l)
                });
                let good = place < 8 && size > 0 && !clash;
                prop_assert_eq!(places.check(index, (start, size)).is_ok(), good);
                if good {
                    places.put(index, (start, size));
                    model[usize::from(place)] = Some((start, size));
                }
                prop_assert_eq!(places.in_use(), model.iter().flatten().count());
                let inside = model.iter().position(|p| p.is_some_and(|(a, l)| a <= addr && addr + len <= a + l));
                prop_assert_eq!(places.of_memory(addr, len).map(|i| usize::from(i.get())), inside);
                prop_assert_eq!(places.first_vacant().map(|i| usize::from(i.get())), model.iter().position(Option::is_none));
            }
        }
    }
}
