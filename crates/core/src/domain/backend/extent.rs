//! The translation of this process's memory to physical memory: its source, and a cache of answers.

use super::super::error::BackendError;
use crate::addr::{PhysAddr, PhysRange};
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Ordering, unique_number};

/// Translates memory of this process to physical addresses.
///
/// The addresses are trusted: they become leaves of a table, and devices access the memory there.
/// So they must be those of the requested memory, and remain so while it is registered.
pub trait PhysTranslator: Send + Sync {
    /// Allows the memory to be given to devices.
    ///
    /// # Errors
    /// As for [`Backend::register_memory`](super::Backend::register_memory).
    ///
    /// # Safety
    /// As there.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// Forgets the memory, of which the table maps nothing unless this
    /// [overrules](Self::overrules_table) it: after this returns no device reaches it, and
    /// [`generation`](Self::generation) has changed.
    ///
    /// # Errors
    /// As for [`Backend::unregister_memory`](super::Backend::unregister_memory).
    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// Returns whether no device reaches memory that was unregistered, regardless of the table: a
    /// model can refuse such an access, and hardware cannot. Without it, the default, the table
    /// backend refuses to unregister memory while its table maps any of it.
    fn overrules_table(&self) -> bool {
        false
    }

    /// Returns the largest registered, physically contiguous extent that contains the start of
    /// `memory`. It may begin before `memory`, and end before or after it.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`] if any part of `memory` is not registered.
    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError>;

    /// Returns what changes when memory is unregistered, the [current](Generations::current) one of
    /// its own [`Generations`]. An extent that was found after it was read is valid for as long as
    /// it stays the same: a table backend keeps the last one of each window for so long.
    fn generation(&self) -> Generation;

    /// Returns the physically contiguous run at the start of `memory`: a multiple of 4096 bytes, at
    /// most its length.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`].
    fn run(&self, memory: DmaMemory) -> Result<PhysRange, BackendError> {
        run_in(self.extent(memory)?, memory)
    }
}

/// One state of the registrations of one [`PhysTranslator`]. It is unique among translators and
/// over time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Generation(u64);

/// The generations of one [`PhysTranslator`].
#[derive(Debug)]
pub struct Generations(AtomicU64);

impl Generations {
    /// Begins with one that no other has had.
    pub fn new() -> Self {
        Self(AtomicU64::new(unique_number()))
    }

    /// Returns the current one.
    #[inline(always)]
    pub fn current(&self) -> Generation {
        Generation(self.0.load(Ordering::Acquire))
    }

    /// Begins the next one, when memory has been unregistered.
    pub fn advance(&self) {
        self.0.store(unique_number(), Ordering::Release);
    }
}

impl Default for Generations {
    fn default() -> Self {
        Self::new()
    }
}

/// Registered memory of this process that is physically contiguous: whole pages of 4096 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PhysExtent {
    addr: usize,
    phys: PhysRange,
}

impl PhysExtent {
    /// Creates the extent of the process addresses `addr..addr + phys.len()`, whose physical
    /// addresses are `phys`.
    pub const fn new(addr: usize, phys: PhysRange) -> Self {
        Self { addr, phys }
    }

    /// Returns the part of the extent at the start of `memory`, at most its length; `None` if the
    /// extent does not contain that address.
    #[inline]
    pub(super) fn run(&self, memory: DmaMemory) -> Option<PhysRange> {
        let offset = memory.addr().checked_sub(self.addr)? as u64;
        let rest = self.phys.len().checked_sub(offset)?;
        self.phys.part(offset, rest.min(memory.len() as u64))
    }
}

/// The extent that was found last, which any thread may read and replace: it translates memory in
/// it by a few loads, without a lock or a read-modify-write.
///
/// A version that is odd while a thread writes guards the words. A reader that meets a writer finds
/// nothing, and a writer that meets another one writes nothing: both ask the translator.
#[derive(Debug)]
pub(super) struct LastExtent {
    version: AtomicU64,
    generation: AtomicU64,
    addr: AtomicU64,
    phys: AtomicU64,
    len: AtomicU64,
}

impl LastExtent {
    /// Creates one without an extent.
    pub(super) fn new() -> Self {
        let [version, generation, addr, phys, len] = [0; 5].map(AtomicU64::new);
        Self { version, generation, addr, phys, len }
    }

    /// Returns what [`PhysTranslator::run`] returns for `memory`, from the extent found last if
    /// that contains it, was found by the same translator, and nothing has been unregistered since.
    ///
    /// The caller keeps `memory` registered during the call: if it is unregistered meanwhile, this
    /// may return the physical addresses that it had.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`].
    #[inline]
    pub(super) fn run(
        &self,
        translator: &(impl PhysTranslator + ?Sized),
        memory: DmaMemory,
    ) -> Result<PhysRange, BackendError> {
        // Read before the extent is looked up: one that is unregistered in between is then not used
        // again.
        let generation = translator.generation();
        if let Some(run) = self.load(generation).and_then(|extent| extent.run(memory)) {
            return Ok(run);
        }
        let extent = translator.extent(memory)?;
        self.store(generation, extent);
        run_in(extent, memory)
    }

    /// Returns the extent, if it was found in `generation`.
    #[inline]
    pub(super) fn load(&self, generation: Generation) -> Option<PhysExtent> {
        let version = self.version.load(Ordering::Acquire);
        // Acquire: a thread that reads a word of a later write sees the later version below.
        let [found, addr, phys, len] = [&self.generation, &self.addr, &self.phys, &self.len]
            .map(|word| word.load(Ordering::Acquire));
        let is_whole = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        if version == 0 || !is_whole || Generation(found) != generation {
            return None;
        }
        let phys = PhysRange::new(PhysAddr::new(phys), len).ok()?;
        Some(PhysExtent { addr: usize::try_from(addr).ok()?, phys })
    }

    #[cold]
    pub(super) fn store(&self, Generation(generation): Generation, extent: PhysExtent) {
        let before = self.version.load(Ordering::Relaxed);
        let begun = before.is_multiple_of(2)
            && self
                .version
                .compare_exchange(before, before + 1, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        if !begun {
            return;
        }
        let words = [generation, extent.addr as u64, extent.phys.start().raw(), extent.phys.len()];
        let places = [&self.generation, &self.addr, &self.phys, &self.len];
        for (place, word) in places.into_iter().zip(words) {
            place.store(word, Ordering::Release);
        }
        self.version.store(before + 2, Ordering::Release);
    }
}

fn run_in(extent: PhysExtent, memory: DmaMemory) -> Result<PhysRange, BackendError> {
    extent.run(memory).ok_or(BackendError::NotRegistered { addr: memory.addr(), len: memory.len() })
}
