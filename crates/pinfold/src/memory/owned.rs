//! Memory that the program already has, passed by value so that devices may reach it.

#[cfg(test)]
mod tests;

use super::attachment::{Attachments, DomainOps, Fixed, MappingPolicy, count_quarantined};
use super::claim::{Claim, ClaimedFor, InUse};
use crate::domain::Domain;
use crate::folios::{Folios, MemoryError, PinError, PinnedFolios, Survey};
use pinfold_core::addr::Iova;
use pinfold_core::domain::{BackendError, DomainId, Pinned};
use pinfold_core::mem::DmaMemory;
use std::any::{Any, type_name};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

const PAGE: usize = 4096;

/// Memory of the program, of any origin, that devices may reach: the whole pages of it.
///
/// The program passes the memory by value, and [`reclaim`](Self::reclaim) returns it when no device
/// can reach it: meanwhile it can be neither freed nor sliced. [`map_into`](Self::map_into)
/// registers it with a domain; [`take`](Self::take) returns all of it as an [`OwnedPiece`], which
/// can be split, mapped, and passed to queues. Memory that is not whole pages is passed to
/// [`sharing_pages`](Self::sharing_pages), or [bounced](super::bounce). [`fixed`](Self::fixed)
/// registers it with a ring, so that files are read into its pieces without the kernel pinning them
/// each time. [`survey`](Self::survey) tells what its pages are and what a registration is charged,
/// [`folios`](Self::folios) where they are physically: see [`folios`](crate::folios).
///
/// A handle: a clone is the same memory. If it cannot be unmapped when the last handle and piece
/// are dropped, it is quarantined: leaked, and [counted](super::quarantined_bytes).
///
/// ```
/// use pinfold::{Domain, FromDevice, MappingPolicy, OwnedMemory};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = OwnedMemory::from_vec(vec![0u8; 1 << 20])?; // wherever it came from
/// let domain = Domain::soft()?;
/// memory.map_into(&domain, MappingPolicy::PerUse)?;
/// let mut piece = memory.take().ok_or("taken")?;
/// let rest = piece.split_off(8192)?; // pieces of whole pages, each a payload of its own
/// let mapping = domain.map(piece, FromDevice)?; // the device may write here ...
/// # domain.port().ok_or("no device")?.write(mapping.iova().start(), b"from the device")?;
/// let piece = mapping.unmap()?; // ... until here
/// let start = piece.offset();
/// drop((piece, rest));
/// let bytes: Vec<u8> = memory.reclaim()?;
/// assert_eq!(&bytes[start..start + 15], b"from the device");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct OwnedMemory(Arc<State>);

/// Memory that was not accepted, with its owner.
#[derive(thiserror::Error)]
#[error(
    "cannot use bytes {}..{} of {len} bytes at {addr:#x} for devices: {}",
    bytes.start, bytes.end,
    match in_use {
        Some(in_use) => in_use.to_string(),
        None if bytes.is_empty() => "they are empty; pass at least a page of 4096 bytes".to_owned(),
        None => "they contain no whole page of 4096 bytes, or are not inside whole pages; align the \
                 memory to pages, or bounce it (BouncePool)".to_owned(),
    }
)]
pub struct OwnedMemoryError<K = Vec<u8>> {
    /// The address of the memory.
    pub addr: usize,
    /// Its length in bytes.
    pub len: usize,
    /// The bytes to be transferred: all of them, except with
    /// [`sharing_pages`](OwnedMemory::sharing_pages).
    pub bytes: Range<usize>,
    /// The other owner of part of the memory, if that is the reason.
    pub in_use: Option<InUse>,
    /// The owner that was passed.
    pub owner: K,
}

impl<K> OwnedMemoryError<K> {
    #[cold]
    fn in_use(in_use: InUse, owner: K) -> Self {
        let InUse { addr, len, .. } = in_use;
        Self { addr, len, bytes: 0..len, in_use: Some(in_use), owner }
    }
}

impl<K> fmt::Debug for OwnedMemoryError<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedMemoryError")
            .field("addr", &self.addr)
            .field("len", &self.len)
            .field("bytes", &self.bytes)
            .field("in_use", &self.in_use)
            .finish_non_exhaustive()
    }
}

/// Why memory was not reclaimed.
#[derive(Debug, thiserror::Error)]
pub enum Reclaim {
    /// A handle, a piece or a mapping still uses it.
    #[error(
        "{} bytes at {:p} are still in use by {users} other handles or pieces: unmap and drop them, then reclaim again",
        memory.len(), memory.0.memory.as_ptr()
    )]
    InUse {
        /// The memory, to be reclaimed later.
        memory: OwnedMemory,
        /// The number of handles and pieces, also those in mappings.
        users: usize,
    },
    /// The owner of the memory has another type than the requested one.
    #[error(
        "{} bytes at {:p} are owned by {owner}, not by {requested}: call reclaim::<{owner}>()",
        memory.len(), memory.0.memory.as_ptr()
    )]
    WrongOwner {
        /// The memory, to be reclaimed as what it is.
        memory: OwnedMemory,
        /// The type of the owner that was passed.
        owner: &'static str,
        /// The requested type.
        requested: &'static str,
    },
    /// A device may still reach it.
    #[error(
        "the memory could not be unmapped from a domain: it is quarantined until the process ends, and counted by quarantined_bytes()"
    )]
    Quarantined,
}

struct State {
    /// The offset of the first whole page in the original memory.
    start: usize,
    /// The whole pages.
    memory: DmaMemory<'static>,
    /// The bytes of them that may be transferred: at least one byte of each page.
    exact: Range<usize>,
    /// Freed only after no device reaches the memory.
    owner: ManuallyDrop<Box<dyn Any + Send>>,
    /// The type of the owner.
    owner_type: &'static str,
    /// The bytes of `exact`. Ends before the owner is dropped, and never if a device may reach them.
    claim: Option<Claim>,
    attachments: Attachments,
    /// Its physical addresses, and the pin that keeps them: unpinned before the owner is dropped, and
    /// never if devices may reach the memory.
    folios: ManuallyDrop<OnceLock<PinnedFolios>>,
    taken: AtomicBool,
}

// SAFETY: the owner is not reached through a shared reference except for its type; the rest is
// `Sync` itself.
unsafe impl Sync for State {}

impl OwnedMemory {
    /// Takes the bytes of a vector.
    ///
    /// # Errors
    /// [`OwnedMemoryError`] if it contains no whole page, or is in use by another owner. Memory that
    /// begins at a page loses none.
    pub fn from_vec(mut bytes: Vec<u8>) -> Result<Self, OwnedMemoryError> {
        let memory =
            NonNull::slice_from_raw_parts(NonNull::from(bytes.as_mut_slice()).cast(), bytes.len());
        // SAFETY: the bytes are initialized, belong to the vector, and stay where they are while it
        // is moved.
        unsafe { Self::new(memory, bytes) }
    }

    /// Takes memory of any origin (`mmap`, another library), and drops `owner` when it is no longer
    /// used.
    ///
    /// # Errors
    /// As [`from_vec`](Self::from_vec).
    ///
    /// # Safety
    /// Until `owner` is dropped, wherever it is moved, the memory stays mapped at these addresses,
    /// initialized, readable and writable, and is accessed only through this value.
    pub unsafe fn new<K: Send + 'static>(
        memory: NonNull<[u8]>,
        owner: K,
    ) -> Result<Self, OwnedMemoryError<K>> {
        let (base, len) = (memory.cast::<u8>(), memory.len());
        let addr = base.addr().get();
        let start = addr.next_multiple_of(PAGE) - addr;
        let bytes = len.saturating_sub(start) & !(PAGE - 1);
        if bytes == 0 {
            return Err(OwnedMemoryError { addr, len, bytes: 0..len, in_use: None, owner });
        }
        let claim = match Claim::memory(addr + start..addr + start + bytes, ClaimedFor::Owned) {
            Ok(claim) => claim,
            Err(in_use) => return Err(OwnedMemoryError::in_use(in_use, owner)),
        };
        // SAFETY: `start` is less than `len`, so it is inside.
        let base = unsafe { base.add(start) };
        // SAFETY: these are whole pages of it, and the caller upholds the same contract.
        Ok(unsafe { Self::of_pages(base, bytes, (start, 0..bytes), claim, owner) })
    }

    /// Takes whole pages that the program, in another language, keeps and uses as well, and that
    /// other values of this function may share, as the same range: one for each domain that they
    /// are registered with. They have one owner, and are returned when the last of the values has
    /// ended.
    ///
    /// # Errors
    /// [`OwnedMemoryError`] if they are not whole pages, or in use by another owner.
    ///
    /// # Safety
    /// As for [`new`](Self::new), except that others may access the pages meanwhile, as with
    /// [`DmaMemory`], and that no other value here relies on their contents.
    pub unsafe fn joint<K: Send + 'static>(
        pages: NonNull<[u8]>,
        owner: K,
    ) -> Result<Self, OwnedMemoryError<K>> {
        let (base, len) = (pages.cast::<u8>(), pages.len());
        let addr = base.addr().get();
        if len == 0 || !(addr | len).is_multiple_of(PAGE) {
            return Err(OwnedMemoryError { addr, len, bytes: 0..len, in_use: None, owner });
        }
        match Claim::memory(addr..addr.saturating_add(len), ClaimedFor::Registration) {
            // SAFETY: whole pages, and the caller upholds the contract.
            Ok(claim) => Ok(unsafe { Self::of_pages(base, len, (0, 0..len), claim, owner) }),
            Err(in_use) => Err(OwnedMemoryError::in_use(in_use, owner)),
        }
    }

    /// Takes `len` bytes of whole pages, at offset `start` of the original memory, of which `exact`
    /// is to be transferred.
    ///
    /// # Safety
    /// As for [`new`](Self::new), of the pages; others may access bytes outside `exact`, as with
    /// `DmaMemory`.
    unsafe fn of_pages<K: Send + 'static>(
        base: NonNull<u8>,
        len: usize,
        (start, exact): (usize, Range<usize>),
        claim: Claim,
        owner: K,
    ) -> Self {
        // SAFETY: the caller keeps the memory valid, and unreached by others, until `owner` is
        // dropped, which happens last, in the drop of `State`, or never.
        let memory = unsafe { DmaMemory::from_raw(base, len) };
        Self(Arc::new(State {
            start,
            memory,
            exact,
            owner: ManuallyDrop::new(Box::new(owner)),
            owner_type: type_name::<K>(),
            claim: Some(claim),
            attachments: Attachments::default(),
            folios: ManuallyDrop::default(),
            taken: AtomicBool::new(false),
        }))
    }

    /// Registers the memory with a domain, until it is reclaimed or dropped. With
    /// [`MappingPolicy::Whole`] all of it is mapped there once, and
    /// [`Domain::map`](pinfold_core::domain::Domain::map) of a piece needs no table work; with
    /// [`MappingPolicy::PerUse`] a piece is mapped while it is in a mapping. Does nothing if it is
    /// registered there already.
    ///
    /// # Errors
    /// [`BackendError`]; the memory is not in the domain then. If it
    /// [may be reached](BackendError::stays_reachable) nevertheless, it is quarantined in the end.
    pub fn map_into(&self, domain: &Domain, policy: MappingPolicy) -> Result<(), BackendError> {
        self.attach(Box::new(domain.clone()), policy)
    }

    fn attach(
        &self,
        domain: Box<dyn DomainOps>,
        policy: MappingPolicy,
    ) -> Result<(), BackendError> {
        self.0.attachments.add(domain, self.0.memory, None, policy).map(drop)
    }

    /// Returns all of the memory as one piece, the first time.
    pub fn take(&self) -> Option<OwnedPiece> {
        let first = !self.0.taken.swap(true, Ordering::Relaxed);
        first.then(|| OwnedPiece::new(&self.0, 0, self.0.memory.len()))
    }

    /// Returns all of the memory, to be registered with a ring
    /// ([`Options::fixed`](crate::uring::Options::fixed)): transfers with its pieces then use
    /// fixed buffers.
    pub fn fixed(&self) -> Fixed<'_> {
        self.0.memory.into()
    }

    /// Examines the pages of the memory: their sizes, and the charge of a registration with a ring
    /// or a domain. Covers the resident pages: others may become large ones until they are pinned.
    ///
    /// # Errors
    /// [`MemoryError`], mostly without `/proc`.
    pub fn survey(&self) -> Result<Survey, MemoryError> {
        Survey::new(self.0.memory.addr(), self.len() as u64)
    }

    /// Returns where each byte is physically: one segment for each folio at most, found by a shift and
    /// a mask. For descriptors of a device that no IOMMU translates for, and of one whose table the
    /// program writes itself.
    ///
    /// The first call pins the memory until it is reclaimed or dropped, unless a domain does that
    /// already: one of real devices in which it is mapped as a whole.
    ///
    /// ```
    /// use pinfold::OwnedMemory;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let memory = OwnedMemory::from_vec(vec![0u8; 8 << 20])?;
    /// match memory.folios() {
    ///     Ok(folios) => {
    ///         for segment in folios.segments(4096, 1 << 20)? {
    ///             println!("{} bytes at {}", segment.len, segment.iova);
    ///         }
    ///     }
    ///     Err(refused) => println!("{refused}"), // who may not see frames, or pin so much
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`PinError`]; nothing is pinned then.
    pub fn folios(&self) -> Result<&Folios, PinError> {
        if let Some(folios) = self.0.folios.get() {
            return Ok(folios.table());
        }
        let folios = PinnedFolios::new(self.0.memory, self.0.attachments.pins())?;
        // If another thread was faster, this pin ends here.
        Ok(self.0.folios.get_or_init(|| folios).table())
    }

    /// Returns the length in bytes of the whole pages.
    #[expect(clippy::len_without_is_empty, reason = "it has at least one page")]
    pub fn len(&self) -> usize {
        self.0.memory.len()
    }

    /// Unmaps the memory from all domains and returns its owner.
    ///
    /// # Errors
    /// [`Reclaim`].
    pub fn reclaim<K: 'static>(self) -> Result<K, Reclaim> {
        if !self.0.owner.is::<K>() {
            let (owner, requested) = (self.0.owner_type, type_name::<K>());
            return Err(Reclaim::WrongOwner { memory: self, owner, requested });
        }
        let mut state = Arc::try_unwrap(self.0).map_err(|state| {
            // A concurrent drop may have left this handle alone since.
            let users = Arc::strong_count(&state).saturating_sub(1);
            Reclaim::InUse { memory: Self(state), users }
        })?;
        if !state.detach() {
            state.quarantine();
            std::mem::forget(state);
            return Err(Reclaim::Quarantined);
        }
        state.claim = None;
        drop(state.folios.take());
        let mut state = ManuallyDrop::new(state);
        // SAFETY: no device reaches the memory; `state` is neither used nor dropped afterwards
        // (`detach` has emptied the list of attachments, the claim and the pin have ended: no other
        // field has a drop).
        let owner = unsafe { ManuallyDrop::take(&mut state.owner) };
        owner.downcast().map(|owner| *owner).map_err(|_| Reclaim::Quarantined)
    }
}

impl State {
    /// Unmaps the memory from all domains; returns whether no device reaches it.
    fn detach(&mut self) -> bool {
        self.attachments.detach_all(self.memory)
    }

    fn quarantine(&self) {
        tracing::warn!(bytes = self.memory.len(), "owned memory is quarantined");
        count_quarantined(self.memory.len() as u64);
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if !self.detach() {
            self.quarantine();
            // It stays claimed.
            std::mem::forget(self.claim.take());
            return;
        }
        // Its owner may unmap it, and other memory take the addresses.
        self.claim = None;
        drop(self.folios.take());
        // SAFETY: it is dropped here only (`reclaim` forgets the rest), in the drop of what holds
        // it; no device and no piece reaches the memory any more.
        unsafe { ManuallyDrop::drop(&mut self.owner) };
    }
}

impl fmt::Debug for OwnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedMemory")
            .field("addr", &self.0.memory.as_ptr())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// Whole pages of [`OwnedMemory`], owned by this value alone: a payload that can be mapped for a
/// device or moved into a queue. It keeps the memory.
pub struct OwnedPiece {
    state: Arc<State>,
    /// Within the whole pages.
    offset: usize,
    len: usize,
    /// The offset and the length of the bytes to transfer.
    extent: (usize, usize),
}

/// Why a piece was not split, or its extent not set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CutError {
    /// One of the two parts would have no whole page.
    #[error(
        "cannot split a piece of {len} bytes at {at}: a multiple of 4096 above 0 and below {len} is needed"
    )]
    Split {
        /// The position.
        at: usize,
        /// The length of the piece in bytes.
        len: usize,
    },
    /// The bytes are none, or some of them may not be transferred.
    #[error(
        "cannot transfer {len} bytes at {offset} of a piece: it has {bytes} bytes to transfer, from {first} on, and at least \
         one is needed"
    )]
    Extent {
        /// The offset in the piece.
        offset: usize,
        /// The length in bytes.
        len: usize,
        /// The offset of the first byte that may be transferred.
        first: usize,
        /// The number of bytes that may be transferred.
        bytes: usize,
    },
}

impl OwnedPiece {
    fn new(state: &Arc<State>, offset: usize, len: usize) -> Self {
        let mut piece = Self { state: Arc::clone(state), offset, len, extent: (0, len) };
        piece.extent = piece.exact();
        piece
    }

    /// Returns offset and length of what may be transferred of the piece.
    fn exact(&self) -> (usize, usize) {
        let Range { start, end } = self.state.exact;
        let start = start.max(self.offset);
        (start - self.offset, end.min(self.offset + self.len).saturating_sub(start))
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it has at least one page")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the offset of the piece in the original memory.
    pub fn offset(&self) -> usize {
        self.state.start + self.offset
    }

    /// Returns the bytes for access by copies.
    pub fn memory(&self) -> DmaMemory<'_> {
        // The piece lies in the memory, so the part is always inside.
        self.state.memory.part(self.offset, self.len).unwrap_or(DmaMemory::EMPTY)
    }

    /// Splits the piece at `at` bytes, a multiple of 4096, and returns the second part. The
    /// extent of each part is then all of it that may be transferred.
    ///
    /// # Errors
    /// [`CutError::Split`] if one of the parts would have no whole page.
    pub fn split_off(&mut self, at: usize) -> Result<Self, CutError> {
        if at == 0 || at >= self.len || !at.is_multiple_of(PAGE) {
            return Err(CutError::Split { at, len: self.len });
        }
        let rest = Self::new(&self.state, self.offset + at, self.len - at);
        self.len = at;
        self.extent = self.exact();
        Ok(rest)
    }

    /// Sets which bytes are transferred; by default all (of
    /// [pages that are shared](OwnedMemory::sharing_pages) the bytes that are not). The device can
    /// reach the whole pages around them.
    ///
    /// # Errors
    /// [`CutError::Extent`] if they are none, or not among those.
    pub fn set_extent(&mut self, offset: usize, len: usize) -> Result<(), CutError> {
        let (first, bytes) = self.exact();
        let end = offset
            .checked_add(len)
            .filter(|&end| len > 0 && first <= offset && end <= first + bytes);
        end.ok_or(CutError::Extent { offset, len, first, bytes })?;
        self.extent = (offset, len);
        Ok(())
    }
}

// SAFETY: the pages are this piece's alone (`take` returns all of them once, `split_off` divides
// them), in memory that its owner, which the value keeps, leaves where it is. No reference into it
// is lent. A whole mapping lasts until the last piece is dropped (`State::drop`). `split_off` and
// `set_extent` need an exclusive borrow, which a value that is mapped does not give.
unsafe impl Pinned for OwnedPiece {
    fn memory(&self) -> DmaMemory<'_> {
        Self::memory(self)
    }
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova> {
        let attachment =
            self.state.attachments.find(domain).filter(|attachment| attachment.is_whole())?;
        Some(attachment.iova_of(self.offset as u64, self.len as u64)?.start())
    }
    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        (index == 0).then_some((self.extent.0 as u64, self.extent.1 as u64))
    }
}

impl fmt::Debug for OwnedPiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedPiece")
            .field("offset", &self.offset())
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

// Several pieces as one payload.

/// Several pieces, of the same memory or of different ones, as one payload: a scattered transfer.
///
/// They are mapped at consecutive addresses; their extents are transferred in order.
#[derive(Debug)]
pub struct OwnedPieces(Vec<OwnedPiece>);

impl OwnedPieces {
    /// Joins the pieces. Returns `None` if there is none.
    pub fn new(pieces: Vec<OwnedPiece>) -> Option<Self> {
        (!pieces.is_empty()).then_some(Self(pieces))
    }

    /// Returns the pieces.
    pub fn into_pieces(self) -> Vec<OwnedPiece> {
        self.0
    }
}

// SAFETY: as for each of the pieces; they are not lent for changes.
unsafe impl Pinned for OwnedPieces {
    fn memory(&self) -> DmaMemory<'_> {
        self.0.first().map_or(DmaMemory::EMPTY, OwnedPiece::memory)
    }
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova> {
        match &*self.0 {
            [one] => one.fixed_iova(domain),
            _ => None,
        }
    }
    fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        self.0.get(index).map(OwnedPiece::memory)
    }
    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        let (before, rest) = self.0.split_at_checked(index)?;
        let start: usize = before.iter().map(OwnedPiece::len).sum();
        let (offset, len) = rest.first()?.extent;
        Some(((start + offset) as u64, len as u64))
    }
}

// Memory that is not whole pages, whose owner declares the rest of its pages shareable.

impl OwnedMemory {
    /// Takes `bytes` of `pages`, and declares the rest of the pages that they are in shareable: a
    /// device that the bytes are mapped for can read and write all of these pages, but is told to
    /// transfer the bytes only (the extents of the pieces). [`folios`](Self::folios), and copies
    /// through the memory of a piece, reach whole pages.
    ///
    /// For a payload whose neighbours on the page are not used. A page is registered with a domain
    /// once: of two payloads on one page, only one can be mapped into a domain at a time. Without
    /// the declaration a payload is [bounced](crate::memory::bounce).
    ///
    /// ```
    /// use pinfold::OwnedMemory;
    /// use pinfold::core::domain::Pinned;
    /// use std::ptr::NonNull;
    ///
    /// #[repr(align(4096))]
    /// struct Slots([u8; 8192]);
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let slots = Box::leak(Box::new(Slots([7; 8192])));
    /// let pages = NonNull::from(&mut slots.0 as &mut [u8]);
    /// // SAFETY: both pages are leaked, and not used otherwise.
    /// let memory = unsafe { OwnedMemory::sharing_pages(pages, 4608..5120, ()) }?;
    /// let piece = memory.take().ok_or("taken")?;
    /// assert_eq!((piece.len(), piece.extent(0)), (4096, Some((512, 512))));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`OwnedMemoryError`] if `bytes` is empty, not inside `pages`, or those are not whole pages;
    /// or if a part of `bytes` is in use by another owner.
    ///
    /// # Safety
    /// As for [`new`](Self::new), of all pages that contain one of `bytes`, except that others may
    /// access the rest of these pages meanwhile, where they do so as with
    /// [`DmaMemory`] (by atomics of one byte, without references),
    /// and rely on none of its contents: a device may change it at any time, and learn it.
    pub unsafe fn sharing_pages<K: Send + 'static>(
        pages: NonNull<[u8]>,
        bytes: Range<usize>,
        owner: K,
    ) -> Result<Self, OwnedMemoryError<K>> {
        let (base, len) = (pages.cast::<u8>(), pages.len());
        let addr = base.addr().get();
        let whole = (addr | len).is_multiple_of(PAGE);
        if !whole || bytes.is_empty() || bytes.end > len {
            return Err(OwnedMemoryError { addr, len, bytes, in_use: None, owner });
        }
        // Of a shared page, only the bytes are claimed.
        let claim = match Claim::memory(addr + bytes.start..addr + bytes.end, ClaimedFor::Owned) {
            Ok(claim) => claim,
            Err(in_use) => return Err(OwnedMemoryError::in_use(in_use, owner)),
        };
        // `len` is a multiple of a page and `bytes.end` at most that, so this does not overflow.
        let (start, end) = (bytes.start & !(PAGE - 1), bytes.end.next_multiple_of(PAGE));
        // SAFETY: `start` is less than `len`.
        let first = unsafe { base.add(start) };
        // SAFETY: the caller keeps these pages valid until `owner` is dropped, and has no reference
        // into them.
        Ok(unsafe {
            let exact = bytes.start - start..bytes.end - start;
            Self::of_pages(first, end - start, (start, exact), claim, owner)
        })
    }
}
