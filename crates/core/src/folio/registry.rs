//! [`Registry`]: a table of registered buffers that are in use by I/O; the number of a buffer in
//! it, and why one cannot be registered or found.

use super::buffer::{Registered, Segments};
use super::error::OutsideBuffer;
use crate::addr::Segment;
use crate::sync::unique_number;
use alloc::vec::Vec;
use core::fmt;

/// I/O in flight on a registered buffer, from [`Registry::hold`] to [`Registry::release`].
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a buffer is held until its hold is released"]
pub struct Hold {
    index: BufferIndex,
    /// That of the buffer, which no other has, in this table or in another.
    generation: u64,
}

impl Hold {
    /// Returns the place that the buffer has, or had.
    pub fn index(&self) -> BufferIndex {
        self.index
    }
}

/// A hold that another table issued: nothing has changed. It contains the hold, which its own table
/// [releases](Registry::release).
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the hold on {index} was not issued by this table: release it in the table that issued it",
    index = self.0.index()
)]
pub struct NotHeld(pub Hold);

/// A buffer that was not registered, and why. The table is unchanged.
#[derive(PartialEq, Eq)]
pub struct Refused<B> {
    /// The buffer.
    pub buffer: B,
    /// Why it was refused.
    pub error: RegisterError,
}

impl<B> fmt::Debug for Refused<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> fmt::Display for Refused<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl<B> core::error::Error for Refused<B> {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        self.error.source()
    }
}

/// An unregistered buffer.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "it owns what the table owned"]
pub enum Unregistered<B> {
    /// No I/O is in flight on it.
    Free(B),
    /// The table keeps it until the last [`Hold`] is released, which then returns it.
    Held {
        /// The number of holds.
        holds: u32,
    },
}

/// A table of registered buffers, none of which overlaps another.
///
/// It is sparse: each place is filled, replaced and vacated individually. A caller that begins I/O
/// on a buffer [holds](Self::hold) it; a buffer that is unregistered or replaced meanwhile vacates
/// its place at once, and is kept until the last hold is released. `B` is a [`Registered`], or
/// contains one beside, for instance, what pins the memory.
///
/// It allocates in its constructor and when a buffer is registered, never when one is unregistered.
#[derive(Debug)]
pub struct Registry<B = Registered> {
    places: Vec<Option<Entry<B>>>,
    /// The taken places in the order of their buffers' addresses.
    order: Vec<(usize, BufferIndex)>,
    /// Buffers that have left their places and are held.
    leaving: Vec<(BufferIndex, Entry<B>)>,
    /// All places before this one are taken.
    first_vacant: usize,
}

#[derive(Debug)]
struct Entry<B> {
    buffer: B,
    generation: u64,
    holds: u32,
}

impl<B: AsRef<Registered>> Registry<B> {
    /// The largest table, that of io_uring: 16,384 buffers.
    pub const MAX_BUFFERS: usize = MAX_BUFFERS;

    /// Creates a table with `capacity` places, all vacant.
    ///
    /// # Errors
    /// [`RegisterError::Capacity`] if that is 0 or more than [`MAX_BUFFERS`](Self::MAX_BUFFERS).
    pub fn new(capacity: usize) -> Result<Self, RegisterError> {
        if capacity == 0 || capacity > MAX_BUFFERS {
            return Err(RegisterError::Capacity { asked: capacity });
        }
        let places = core::iter::repeat_with(|| None).take(capacity).collect();
        let order = Vec::with_capacity(capacity);
        Ok(Self { places, order, leaving: Vec::new(), first_vacant: 0 })
    }

    /// Returns the number of places.
    pub fn capacity(&self) -> usize {
        self.places.len()
    }

    /// Returns the number of registered buffers.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether no buffer is registered.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Returns how many unregistered buffers are still held.
    pub fn leaving(&self) -> usize {
        self.leaving.len()
    }

    /// Checks that `len` bytes at `addr` can be registered in this place (or, with `None`, in the
    /// first vacant one, which is returned), and allocates: an [`update`](Self::update) of that
    /// place with that buffer then succeeds, for instance after pinning the memory. Logarithmic;
    /// for `None` linear in the places that have been filled since.
    ///
    /// # Errors
    /// As `update`; [`RegisterError::Full`].
    pub fn prepare(
        &mut self,
        index: Option<BufferIndex>,
        addr: usize,
        len: u64,
    ) -> Result<BufferIndex, RegisterError> {
        let at = match index {
            Some(index) => index,
            None => self.vacant()?,
        };
        self.place(at)?;
        if let Some(with) = self.overlapping(addr, len, index) {
            return Err(RegisterError::Overlaps { addr, len, with });
        }
        // Room for every registered buffer, so that unregistering allocates nothing.
        let room = self.len() + 1;
        self.leaving.try_reserve(room).map_err(|_| RegisterError::NoMemory)?;
        Ok(at)
    }

    /// Registers the buffer in the first vacant place. Linear in the number of buffers that lie
    /// behind it in memory.
    ///
    /// # Errors
    /// [`Refused`], with the buffer: [`RegisterError::Full`], [`RegisterError::Overlaps`],
    /// [`RegisterError::NoMemory`].
    pub fn register(&mut self, buffer: B) -> Result<BufferIndex, Refused<B>> {
        match self.vacant() {
            Ok(index) => self.register_at(index, buffer).map(|()| index),
            Err(error) => Err(Refused { buffer, error }),
        }
    }

    /// Registers the buffer in this place, which must be vacant.
    ///
    /// # Errors
    /// [`Refused`], with the buffer: [`RegisterError::Index`] if the place is beyond the end of the
    /// table, [`RegisterError::Taken`], [`RegisterError::Overlaps`], [`RegisterError::NoMemory`].
    pub(super) fn register_at(&mut self, index: BufferIndex, buffer: B) -> Result<(), Refused<B>> {
        match self.place(index) {
            Ok(Some(_)) => Err(Refused { buffer, error: RegisterError::Taken { index } }),
            // Nothing is replaced there; what is beyond the end is refused.
            Ok(None) | Err(_) => self.update(index, buffer).map(|_| ()),
        }
    }

    /// Registers the buffer in this place and unregisters the previous one, the only one that it
    /// may overlap. Linear in the number of buffers.
    ///
    /// # Errors
    /// [`Refused`], with the buffer: [`RegisterError::Index`] if the place is beyond the end of the
    /// table, [`RegisterError::Overlaps`], [`RegisterError::NoMemory`].
    pub fn update(
        &mut self,
        index: BufferIndex,
        buffer: B,
    ) -> Result<Option<Unregistered<B>>, Refused<B>> {
        let (addr, len) = (buffer.as_ref().addr(), buffer.as_ref().len());
        if let Err(error) = self.prepare(Some(index), addr, len) {
            return Err(Refused { buffer, error });
        }
        let before = self.unregister(index).ok();
        let at = self.order.partition_point(|&(start, _)| start <= addr);
        self.order.insert(at, (addr, index));
        if let Some(place) = self.places.get_mut(usize::from(index.0)) {
            *place = Some(Entry { buffer, generation: unique_number(), holds: 0 });
        }
        Ok(before)
    }

    /// Unregisters the buffer. Its place is vacant at once; the table keeps the buffer while I/O is
    /// in flight on it. Linear in the number of buffers; allocates nothing.
    ///
    /// # Errors
    /// [`IndexError::Beyond`], [`IndexError::Vacant`].
    pub fn unregister(&mut self, index: BufferIndex) -> Result<Unregistered<B>, IndexError> {
        let capacity = self.capacity();
        let place = self
            .places
            .get_mut(usize::from(index.0))
            .ok_or(IndexError::Beyond { index, capacity })?;
        let entry = place.take().ok_or(IndexError::Vacant { index })?;
        self.first_vacant = self.first_vacant.min(usize::from(index.0));
        self.order.retain(|&(_, i)| i != index);
        if entry.holds == 0 {
            return Ok(Unregistered::Free(entry.buffer));
        }
        let holds = entry.holds;
        self.leaving.push((index, entry));
        Ok(Unregistered::Held { holds })
    }

    /// Begins I/O on the buffer. Constant time, no atomics.
    ///
    /// # Errors
    /// [`IndexError::Beyond`], [`IndexError::Vacant`], [`IndexError::TooManyHolds`].
    #[inline]
    pub fn hold(&mut self, index: BufferIndex) -> Result<Hold, IndexError> {
        let capacity = self.capacity();
        let place = self
            .places
            .get_mut(usize::from(index.0))
            .ok_or(IndexError::Beyond { index, capacity })?;
        let entry = place.as_mut().ok_or(IndexError::Vacant { index })?;
        entry.holds = entry.holds.checked_add(1).ok_or(IndexError::TooManyHolds { index })?;
        Ok(Hold { index, generation: entry.generation })
    }

    /// Ends I/O. Returns the buffer if that is unregistered and this was the last hold on it.
    /// Constant time; for an unregistered buffer, linear in the number of those.
    ///
    /// # Errors
    /// [`NotHeld`], with the hold, if another table issued it.
    #[inline]
    pub fn release(&mut self, hold: Hold) -> Result<Option<B>, NotHeld> {
        let Hold { index, generation } = hold;
        let place = self.places.get_mut(usize::from(index.0)).and_then(Option::as_mut);
        if let Some(entry) = place.filter(|entry| entry.generation == generation) {
            // Never 0 before: a hold is issued with a count, and consumed with it.
            entry.holds = entry.holds.saturating_sub(1);
            return Ok(None);
        }
        self.release_leaving(index, generation).ok_or(NotHeld(hold))
    }

    #[cold]
    fn release_leaving(&mut self, index: BufferIndex, generation: u64) -> Option<Option<B>> {
        let mut leaving = self.leaving.iter();
        let at = leaving.position(|(i, entry)| *i == index && entry.generation == generation)?;
        let (_, entry) = self.leaving.get_mut(at)?;
        // Never 0 before: a buffer is removed with its last hold.
        entry.holds -= 1;
        let is_last = entry.holds == 0;
        Some(is_last.then(|| self.leaving.swap_remove(at).1.buffer))
    }

    /// Returns the number of holds on the buffer in this place.
    ///
    /// # Errors
    /// [`IndexError::Beyond`], [`IndexError::Vacant`].
    pub fn holds(&self, index: BufferIndex) -> Result<u32, IndexError> {
        self.place(index)?.as_ref().map(|entry| entry.holds).ok_or(IndexError::Vacant { index })
    }

    /// Returns the buffer in this place.
    ///
    /// # Errors
    /// [`IndexError::Beyond`], [`IndexError::Vacant`].
    #[inline]
    pub fn get(&self, index: BufferIndex) -> Result<&B, IndexError> {
        self.place(index)?.as_ref().map(|entry| &entry.buffer).ok_or(IndexError::Vacant { index })
    }

    /// Yields the buffers and their places, in the order of the places.
    pub fn iter(&self) -> impl Iterator<Item = (BufferIndex, &B)> {
        (0..)
            .map(BufferIndex)
            .zip(&self.places)
            .filter_map(|(i, place)| Some((i, &place.as_ref()?.buffer)))
    }

    /// Returns where the device finds the byte at `offset` of a buffer: [`Registered::locate`].
    ///
    /// # Errors
    /// [`IndexError`].
    #[inline]
    pub fn locate(&self, index: BufferIndex, offset: u64) -> Result<Segment, IndexError> {
        Ok(self.get(index)?.as_ref().locate(offset)?)
    }

    /// Returns part of a buffer as the device sees it: [`Registered::segments`].
    ///
    /// # Errors
    /// [`IndexError`].
    #[inline]
    pub fn segments(
        &self,
        index: BufferIndex,
        offset: u64,
        len: u64,
    ) -> Result<Segments<'_>, IndexError> {
        Ok(self.get(index)?.as_ref().segments(offset, len)?)
    }

    /// Returns the buffer that contains `addr`, and the offset. Logarithmic in the number of
    /// buffers.
    pub fn find(&self, addr: usize) -> Option<(BufferIndex, u64)> {
        let before = self.order.partition_point(|&(start, _)| start <= addr).checked_sub(1)?;
        let &(start, index) = self.order.get(before)?;
        let offset = (addr - start) as u64;
        (offset < self.get(index).ok()?.as_ref().len()).then_some((index, offset))
    }

    #[inline]
    fn place(&self, index: BufferIndex) -> Result<&Option<Entry<B>>, IndexError> {
        let beyond = IndexError::Beyond { index, capacity: self.capacity() };
        self.places.get(usize::from(index.0)).ok_or(beyond)
    }

    fn vacant(&mut self) -> Result<BufferIndex, RegisterError> {
        let rest = self.places.get(self.first_vacant..).unwrap_or(&[]);
        let vacant = rest.iter().position(Option::is_none).map(|after| self.first_vacant + after);
        self.first_vacant = vacant.unwrap_or(self.capacity());
        let index = vacant.and_then(|index| u16::try_from(index).ok());
        index.map(BufferIndex).ok_or(RegisterError::Full { capacity: self.capacity() })
    }

    /// A registered buffer, other than `except`, that shares memory with `len` bytes at `addr`.
    fn overlapping(
        &self,
        addr: usize,
        len: u64,
        except: Option<BufferIndex>,
    ) -> Option<BufferIndex> {
        let last = (addr as u64).saturating_add(len.saturating_sub(1));
        let after = self.order.partition_point(|&(start, _)| start as u64 <= last);
        let touching = |&&(start, index): &&(usize, BufferIndex)| {
            let len = self.get(index).map_or(0, |buffer| buffer.as_ref().len());
            start as u64 + len.saturating_sub(1) >= addr as u64
        };
        // Registered buffers do not overlap: if one ends before `addr`, so do all that begin before
        // it.
        let touched = self.order.get(..after)?.iter().rev().take_while(touching);
        touched.map(|&(_, index)| index).find(|&index| Some(index) != except)
    }
}

/// The largest table, that of io_uring.
const MAX_BUFFERS: usize = 16_384;

/// The number of a buffer in a [`Registry`]; the same number names it to a ring.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferIndex(u16);

impl BufferIndex {
    /// Creates the index with this number.
    pub const fn new(index: u16) -> Self {
        Self(index)
    }

    /// Returns the number.
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for BufferIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "buffer:{}", self.0)
    }
}

impl fmt::Debug for BufferIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a buffer cannot be registered. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// All places of the table are taken.
    #[error("all {capacity} places of the buffer table are taken: unregister one first")]
    Full {
        /// The number of places.
        capacity: usize,
    },
    /// A table has a largest size.
    #[error(
        "cannot create a buffer table of {asked} places: 1 to {limit} are supported",
        limit = MAX_BUFFERS
    )]
    Capacity {
        /// The requested number.
        asked: usize,
    },
    /// The place is taken by another buffer.
    #[error("{index} is registered already: unregister it first")]
    Taken {
        /// The place.
        index: BufferIndex,
    },
    /// The buffer shares memory with one that is registered.
    #[error("{len:#x} bytes at {addr:#x} overlap {with}, which is registered already")]
    Overlaps {
        /// The buffer's address.
        addr: usize,
        /// Its length in bytes.
        len: u64,
        /// The registered buffer that it overlaps.
        with: BufferIndex,
    },
    /// The table could not grow.
    #[error("no memory for another entry of the buffer table")]
    NoMemory,
    /// The place is beyond the end of the table.
    #[error(transparent)]
    Index(#[from] IndexError),
}

/// Why a buffer cannot be found or used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The place is beyond the end of the table.
    #[error("{index} does not exist: the buffer table has {capacity} places")]
    Beyond {
        /// The place.
        index: BufferIndex,
        /// The number of places.
        capacity: usize,
    },
    /// Nothing is registered there.
    #[error("{index} is not registered")]
    Vacant {
        /// The place.
        index: BufferIndex,
    },
    /// The count of I/O in flight is at its limit.
    #[error("{index} is held {limit} times, which is the limit", limit = u32::MAX)]
    TooManyHolds {
        /// The place.
        index: BufferIndex,
    },
    /// The range is not inside the buffer.
    #[error(transparent)]
    Outside(#[from] OutsideBuffer),
}
