//! Scatter/gather lists: the other description of a command's memory in NVMe.
//!
//! NVM Express Base Specification 2.0, section 4.1.2. Each contiguous piece is one 16-byte data
//! block descriptor, of any length up to 4 GiB less a byte, so hugepages stay whole on the way to
//! the controller too: 8 MiB on four of 2 MiB are four descriptors, where PRP takes 2,048 entries.
//! A transfer of one piece has its descriptor in the command itself. For others the command has the
//! descriptor of a *segment*, an array of descriptors. If that is full, its last entry is the
//! descriptor of the next segment; the descriptor of the last segment has a type of its own. A
//! segment that is exactly full does not chain.
//!
//! Segments of descriptors are blocks of a [`DmaPool`](crate::dma_pool::DmaPool), as the pages of
//! PRP lists are. What the controller accepts is described by a [`Profile`]: the most descriptors
//! (`MSDBD` of its Identify data), and an alignment of 4 if its field `SGLS` requires dwords.

use super::LayoutError;
use super::list::{Held, ListPage, ListPages};
use super::profile::{GatherError, Profile};
use crate::addr::{Iova, Segment};
use crate::mem::DmaMemory;
use core::fmt;

/// The size of a descriptor in bytes.
pub const DESCRIPTOR_BYTES: usize = 16;

/// The kind of memory that a descriptor describes (figure "SGL Descriptor Type", with the sub type
/// "address").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// A contiguous piece of the data.
    DataBlock = 0x0,
    /// An array of descriptors that is followed by another.
    Segment = 0x2,
    /// The last array of descriptors.
    LastSegment = 0x3,
}

/// An SGL descriptor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    kind: Kind,
    iova: Iova,
    len: u32,
}

impl Descriptor {
    /// Returns what it describes.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the address of what it describes.
    pub const fn iova(&self) -> Iova {
        self.iova
    }

    /// Returns the length of what it describes, in bytes.
    #[expect(clippy::len_without_is_empty, reason = "what is described is never empty")]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Returns the descriptor as two words: bytes 0 to 7 (the address) and 8 to 15 (length,
    /// reserved, type). In memory each is little-endian.
    #[inline]
    pub const fn words(&self) -> [u64; 2] {
        [self.iova.raw(), self.len as u64 | (self.kind as u64) << 60]
    }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({}, {:#x})", self.kind, self.iova, self.len)
    }
}

/// The SGL field of a command, and the list pages behind it.
///
/// `LISTS` is the capacity for list pages: 8 of 4 KiB hold 2,041 descriptors. Dropping it without
/// [`release`](Self::release) quarantines the pages: right for a command that may still be in
/// flight.
#[derive(Debug)]
#[must_use = "list pages are released by `release`"]
pub struct Sgl<P: ListPage, const LISTS: usize = 8> {
    sgl1: Descriptor,
    data_blocks: u64,
    held: Held<P, LISTS>,
}

impl<P: ListPage, const LISTS: usize> Sgl<P, LISTS> {
    /// Lays out the segments, in order, for a controller with this profile.
    ///
    /// Linear in the number of descriptors. Allocates nothing but list pages, and no more of them
    /// than needed.
    ///
    /// # Errors
    /// [`LayoutError`]; the list pages acquired until then have been released.
    pub fn new<L: ListPages<Page = P>>(
        profile: &Profile,
        segments: impl IntoIterator<Item = Segment>,
        pages: &mut L,
    ) -> Result<Self, LayoutError<L::TakeError>> {
        let longest = profile.max_segment_bytes.min(u64::from(u32::MAX));
        let profile = Profile::new(profile.max_segments, longest, profile.boundary, profile.align)?;
        let mut blocks = profile.gather(segments).map(|piece| piece.map(data_block));
        let sgl1 = blocks.next().ok_or(LayoutError::Empty)??;
        let mut sgl = Self { sgl1, data_blocks: 1, held: Held::none() };
        match sgl.list(blocks, pages) {
            Ok(()) => Ok(sgl),
            Err(error) => {
                sgl.release(pages);
                Err(error)
            }
        }
    }

    /// Writes the descriptors into list pages, if there are more than the one in the command.
    fn list<L: ListPages<Page = P>>(
        &mut self,
        mut blocks: impl Iterator<Item = Result<Descriptor, GatherError>>,
        pages: &mut L,
    ) -> Result<(), LayoutError<L::TakeError>> {
        let Some(second) = blocks.next() else { return Ok(()) };
        let mut array = Array::start(self.sgl1, None, &mut self.held, pages)?;
        for block in core::iter::once(second).chain(blocks) {
            let block = block?;
            if array.used == array.room {
                // Another array is needed: the last descriptor of this one moves there and is
                // replaced by its descriptor.
                let place = Some((array.at, array.room - 1));
                let next = Array::start(array.last, place, &mut self.held, pages)?;
                self.link(&array, Kind::Segment)?;
                array = next;
            }
            array.append(&self.held, block)?;
            self.data_blocks += 1;
        }
        self.link(&array, Kind::LastSegment)
    }

    /// Writes the descriptor of a finished array into the command or to the end of the previous
    /// array.
    fn link<E>(&mut self, array: &Array, kind: Kind) -> Result<(), LayoutError<E>> {
        let len = u32::try_from(array.used * DESCRIPTOR_BYTES).unwrap_or(u32::MAX);
        let descriptor = Descriptor { kind, iova: array.iova, len };
        match array.from {
            None => self.sgl1 = descriptor,
            Some((page, at)) => write(self.held.memory(page), at, descriptor)?,
        }
        Ok(())
    }

    /// Returns the field SGL1 of the command (bytes 24 to 39, section 3.3.3.1), with `PSDT` = 01b.
    pub fn sgl1(&self) -> Descriptor {
        self.sgl1
    }

    /// Returns how many data block descriptors there are.
    pub fn data_blocks(&self) -> u64 {
        self.data_blocks
    }

    /// Returns how many list pages it holds.
    pub fn list_pages(&self) -> usize {
        self.held.count()
    }

    /// Releases the list pages to `pages`, the source that they are of. The command must have
    /// completed: the controller reads them until then.
    pub fn release<L: ListPages<Page = P>>(self, pages: &mut L) {
        self.held.give(pages);
    }
}

fn data_block(piece: Segment) -> Descriptor {
    // The profile's longest piece fits in 32 bits.
    let len = u32::try_from(piece.len).unwrap_or(u32::MAX);
    Descriptor { kind: Kind::DataBlock, iova: piece.iova, len }
}

/// The array of descriptors that is being written.
struct Array {
    /// The number of the list page, among those that the command holds.
    at: usize,
    iova: Iova,
    room: usize,
    used: usize,
    /// A copy of the last descriptor: memory that the controller can write is not read back.
    last: Descriptor,
    /// The place of its descriptor: a page and the index in it; `None` for the command.
    from: Option<(usize, usize)>,
}

impl Array {
    fn start<L: ListPages, const LISTS: usize>(
        first: Descriptor,
        from: Option<(usize, usize)>,
        held: &mut Held<L::Page, LISTS>,
        pages: &mut L,
    ) -> Result<Self, LayoutError<L::TakeError>> {
        let (at, iova, bytes) = held.take(pages)?;
        // The length in a descriptor has 32 bits.
        let room = bytes.min(1 << 31) / DESCRIPTOR_BYTES;
        if room < 2 || !iova.is_aligned(8) {
            let needed = 2 * DESCRIPTOR_BYTES as u64;
            return Err(LayoutError::ListPage { iova, bytes, needed, align: 8 });
        }
        let mut array = Self { at, iova, room, used: 0, last: first, from };
        array.append(held, first)?;
        Ok(array)
    }

    #[inline]
    fn append<E, P: ListPage, const LISTS: usize>(
        &mut self,
        held: &Held<P, LISTS>,
        descriptor: Descriptor,
    ) -> Result<(), LayoutError<E>> {
        write(held.memory(self.at), self.used, descriptor)?;
        (self.used, self.last) = (self.used + 1, descriptor);
        Ok(())
    }
}

#[inline]
fn write<E>(
    memory: DmaMemory<'_>,
    at: usize,
    descriptor: Descriptor,
) -> Result<(), LayoutError<E>> {
    let at = at * DESCRIPTOR_BYTES;
    let [address, rest] = descriptor.words();
    memory.write_u64(at, address.to_le()).map_err(LayoutError::Memory)?;
    memory.write_u64(at + 8, rest.to_le()).map_err(LayoutError::Memory)
}
