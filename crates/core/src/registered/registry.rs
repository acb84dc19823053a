//! The table of registered buffers.

use super::{OutsideBuffer, Registered, Segments};
use crate::addr::Segment;
use alloc::vec::Vec;
use core::fmt;

/// The number of a buffer in a [`Registry`]; the same number names it to a ring.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferIndex(u16);

impl BufferIndex {
    /// The index with this number.
    pub const fn new(index: u16) -> Self {
        Self(index)
    }

    /// The number of the index.
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

/// Why a buffer was not registered. Nothing has changed when one is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// All places of the table are taken.
    #[error("all {capacity} places of the buffer table are taken: unregister one first")]
    Full {
        /// How many there are.
        capacity: usize,
    },
    /// A table has a largest size.
    #[error(
        "a buffer table of {asked} places is impossible: 1 to {limit} are possible",
        limit = Registry::MAX_BUFFERS
    )]
    Capacity {
        /// How many were asked for.
        asked: usize,
    },
    /// The place is taken by another buffer.
    #[error("{index} is registered already: unregister it first")]
    Taken {
        /// Which place.
        index: BufferIndex,
    },
    /// The buffer shares memory with one that is registered.
    #[error("{len:#x} bytes at {addr:#x} overlap {with}, which is registered already")]
    Overlaps {
        /// Where the buffer starts in the process.
        addr: usize,
        /// How many bytes it has.
        len: u64,
        /// The one that it overlaps.
        with: BufferIndex,
    },
    /// The table has no such place.
    #[error(transparent)]
    Index(#[from] IndexError),
}

/// Why nothing was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The table is not that large.
    #[error("{index} does not exist: the buffer table has {capacity} places")]
    Beyond {
        /// Which place.
        index: BufferIndex,
        /// How many there are.
        capacity: usize,
    },
    /// Nothing is registered there.
    #[error("{index} is not registered")]
    Vacant {
        /// Which place.
        index: BufferIndex,
    },
    /// The range is not inside the buffer.
    #[error(transparent)]
    Outside(#[from] OutsideBuffer),
}

/// A table of registered buffers, none of which overlaps another.
///
/// It allocates when it is made and never again: what `unregister` gives up is a place in a table.
#[derive(Debug)]
pub struct Registry {
    places: Vec<Option<Registered>>,
    /// The taken places in the order of their buffers' addresses.
    order: Vec<(usize, BufferIndex)>,
}

impl Registry {
    /// The largest table, that of io_uring: 16,384 buffers.
    pub const MAX_BUFFERS: usize = 16_384;

    /// A table with `capacity` places, all vacant.
    ///
    /// # Errors
    /// [`RegisterError::Capacity`] where that is 0 or more than [`MAX_BUFFERS`](Self::MAX_BUFFERS).
    pub fn new(capacity: usize) -> Result<Self, RegisterError> {
        if capacity == 0 || capacity > Self::MAX_BUFFERS {
            return Err(RegisterError::Capacity { asked: capacity });
        }
        let places = core::iter::repeat_with(|| None).take(capacity).collect();
        Ok(Self { places, order: Vec::with_capacity(capacity) })
    }

    /// How many places there are.
    pub fn capacity(&self) -> usize {
        self.places.len()
    }

    /// How many of them are taken.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether none is taken.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Enters the buffer in the first vacant place. Linear in the number of places.
    ///
    /// # Errors
    /// [`RegisterError::Full`], [`RegisterError::Overlaps`].
    pub fn register(&mut self, buffer: Registered) -> Result<BufferIndex, RegisterError> {
        let vacant = self.places.iter().position(Option::is_none).and_then(|i| u16::try_from(i).ok());
        let index = BufferIndex(vacant.ok_or(RegisterError::Full { capacity: self.capacity() })?);
        self.register_at(index, buffer)?;
        Ok(index)
    }

    /// Enters the buffer in this place.
    ///
    /// # Errors
    /// [`RegisterError::Index`] where the table is not that large, [`RegisterError::Taken`],
    /// [`RegisterError::Overlaps`].
    pub fn register_at(&mut self, index: BufferIndex, buffer: Registered) -> Result<(), RegisterError> {
        let capacity = self.capacity();
        let at = self.order.partition_point(|&(addr, _)| addr <= buffer.addr());
        if let Some(with) = self.overlapping(at, &buffer) {
            return Err(RegisterError::Overlaps { addr: buffer.addr(), len: buffer.len(), with });
        }
        let place = self
            .places
            .get_mut(usize::from(index.0))
            .ok_or(RegisterError::Index(IndexError::Beyond { index, capacity }))?;
        if place.is_some() {
            return Err(RegisterError::Taken { index });
        }
        self.order.insert(at, (buffer.addr(), index));
        *place = Some(buffer);
        Ok(())
    }

    /// Takes the buffer out of the table. I/O that is under way on it is the caller's to wait for.
    ///
    /// # Errors
    /// [`IndexError::Beyond`], [`IndexError::Vacant`].
    pub fn unregister(&mut self, index: BufferIndex) -> Result<Registered, IndexError> {
        let capacity = self.capacity();
        let place =
            self.places.get_mut(usize::from(index.0)).ok_or(IndexError::Beyond { index, capacity })?;
        let buffer = place.take().ok_or(IndexError::Vacant { index })?;
        self.order.retain(|&(_, i)| i != index);
        Ok(buffer)
    }

    /// The buffer in this place.
    ///
    /// # Errors
    /// [`IndexError::Beyond`], [`IndexError::Vacant`].
    #[inline]
    pub fn get(&self, index: BufferIndex) -> Result<&Registered, IndexError> {
        let beyond = IndexError::Beyond { index, capacity: self.capacity() };
        self.places.get(usize::from(index.0)).ok_or(beyond)?.as_ref().ok_or(IndexError::Vacant { index })
    }

    /// Where the byte at `offset` of a buffer is for the device: [`Registered::locate`].
    ///
    /// # Errors
    /// [`IndexError`].
    #[inline]
    pub fn locate(&self, index: BufferIndex, offset: u64) -> Result<Segment, IndexError> {
        Ok(self.get(index)?.locate(offset)?)
    }

    /// A part of a buffer as the device sees it: [`Registered::segments`].
    ///
    /// # Errors
    /// [`IndexError`].
    #[inline]
    pub fn segments(&self, index: BufferIndex, offset: u64, len: u64) -> Result<Segments<'_>, IndexError> {
        Ok(self.get(index)?.segments(offset, len)?)
    }

    /// The buffer that `addr` lies in, and how far. Logarithmic in the number of buffers.
    pub fn find(&self, addr: usize) -> Option<(BufferIndex, u64)> {
        let before = self.order.partition_point(|&(start, _)| start <= addr).checked_sub(1)?;
        let &(start, index) = self.order.get(before)?;
        let offset = (addr - start) as u64;
        (offset < self.get(index).ok()?.len()).then_some((index, offset))
    }

    /// A registered buffer that shares memory with `buffer`, which belongs at `at` in the order of addresses.
    fn overlapping(&self, at: usize, buffer: &Registered) -> Option<BufferIndex> {
        let last = buffer.addr() as u64 + (buffer.len() - 1);
        let after = self.order.get(at).filter(|&&(addr, _)| addr as u64 <= last).map(|&(_, index)| index);
        // Those that are registered do not overlap, so of all that begin before only the last can reach so far.
        after.or_else(|| self.find(buffer.addr()).map(|(index, _)| index))
    }
}
