//! [`Table`]: the objects of one kind, which a C program names by handles.
//!
//! C copies handles, keeps them after their object is gone, and mixes them up. So a handle is no
//! address: it is an index, a generation and the kind, and each use compares them with the table.
//! The bits of the generation are changed by the key of this copy of the library (`process`), so
//! that another copy in the process refuses them.
//! The value of a handle is no valid address either (bits 63 to 56 are 0x50, which no processor
//! of today translates), so that a program which follows one is stopped at once.
//!
//! A call uses an object either shared (the object is `Sync`) or exclusively (a thread's own
//! handle: a second thread is refused with `EBUSY`). An object is removed when no call uses it:
//! `EBUSY` otherwise. Each is one compare-exchange at the start of a call and one write at its
//! end. A call waits for one that only decides whether the object is removed, or reads its
//! counters: so a removal that is refused has refused no other call.
//!
//! A slot stores the handle of its object, so a call compares the whole handle; only one that
//! differs is decoded, for the message.

use crate::failure::{Failure, fail};
use crate::process::{self, Refused};
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::ptr::without_provenance_mut;
use std::sync::{Mutex, OnceLock, PoisonError};

#[cfg(not(handle_model))]
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

#[cfg(handle_model)]
use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bits 63 to 56 of every handle.
const MARK: u64 = 0x50;
const INDEX_BITS: u32 = 16;
const GENERATION_BITS: u32 = 24;
/// The highest bits of the field are 0 in a handle of this copy of the library.
const FIELD_BITS: u32 = GENERATION_BITS + 8;
const KIND_SHIFT: u32 = INDEX_BITS + FIELD_BITS;
/// The bits that the key of this copy of the library changes, so that handles of another copy
/// differ.
const KEY_BITS: u64 = ((1 << KIND_SHIFT) - 1) & !((1 << INDEX_BITS) - 1);
const MARK_SHIFT: u32 = 56;

/// Objects of one kind that can exist at a time.
pub(crate) const CAPACITY: usize = CHUNK * CHUNKS;
const CHUNK: usize = if cfg!(handle_model) { 2 } else { 256 };
const CHUNKS: usize = 256;

/// The bit of a slot's word that says that a call uses the object exclusively.
const EXCLUSIVE: u64 = 1 << 31;
/// The bit that is set beside [`EXCLUSIVE`] by a call for which others wait: it reads the object, or
/// decides whether it is removed. The bits below count the calls that share the object.
const BRIEF: u64 = 1 << 30;
/// The bits of the calls in an object.
const IN_USE: u64 = EXCLUSIVE | (EXCLUSIVE - 1);
const GENERATION_SHIFT: u32 = 32;
/// A slot whose generations are used up stays vacant, so no handle is ever valid twice. The last
/// generation is even: vacant.
const LAST_GENERATION: u64 = (1 << GENERATION_BITS) - 2;

/// One object. Its word has the generation (odd while there is an object) and the calls in it.
struct Slot<T> {
    word: AtomicU64,
    /// The handle of the object; 0 while there is none.
    name: AtomicUsize,
    object: UnsafeCell<Option<T>>,
}

// SAFETY: the object is reached by `Use`, `Exclusive` and `remove` only. Each has changed the word
// by a compare-exchange that sees the generation and excludes what must not run beside it: `Use`
// hands out `&T`, for which the table requires `T: Sync`; the others are alone. The values move
// between threads, for which the tables require `T: Send`.
unsafe impl<T: Send> Sync for Slot<T> {}

/// The objects of one kind.
pub(crate) struct Table<T> {
    kind: u8,
    /// The name of the objects in messages.
    name: &'static str,
    chunks: [OnceLock<Box<[Slot<T>]>>; CHUNKS],
    vacant: Mutex<Vacant>,
}

/// Slots without an object.
struct Vacant {
    /// Slots that were used, longest unused first: a stale handle stays recognizable longest.
    used: VecDeque<u32>,
    /// The first slot that was never used.
    next: u32,
}

/// The fields of a handle.
struct Parts {
    kind: u8,
    /// Too large for one, unless this copy of the library made it.
    generation: u64,
    index: u32,
}

impl Parts {
    fn of<T>(handle: *mut T) -> Option<Self> {
        let handle = handle.addr() as u64 ^ (process::key() & KEY_BITS);
        let field = |shift: u32, bits: u32| (handle >> shift) & ((1 << bits) - 1);
        (handle >> MARK_SHIFT == MARK).then(|| Self {
            kind: u8::try_from(field(KIND_SHIFT, 8)).unwrap_or(0),
            generation: field(INDEX_BITS, FIELD_BITS),
            index: u32::try_from(field(0, INDEX_BITS)).unwrap_or(u32::MAX),
        })
    }

    fn encode<T>(&self) -> *mut T {
        let value = MARK << MARK_SHIFT
            | u64::from(self.kind) << KIND_SHIFT
            | self.generation << INDEX_BITS
            | u64::from(self.index);
        let value = value ^ (process::key() & KEY_BITS);
        #[expect(clippy::cast_possible_truncation, reason = "pointers have 64 bits")]
        without_provenance_mut(value as usize)
    }
}

/// Returns the kind that a handle says it is of, if it is one.
pub(crate) fn kind_of<T>(handle: *mut T) -> Option<u8> {
    Parts::of(handle).map(|parts| parts.kind)
}

impl<T: Send + 'static> Table<T> {
    /// Creates an empty table. Each kind has one number.
    pub(crate) const fn new(kind: u8, name: &'static str) -> Self {
        Self {
            kind,
            name,
            chunks: [const { OnceLock::new() }; CHUNKS],
            vacant: Mutex::new(Vacant { used: VecDeque::new(), next: 0 }),
        }
    }

    /// Returns the number of the kind.
    pub(crate) fn kind(&self) -> u8 {
        self.kind
    }

    /// Moves an object into the table. Takes a lock; allocates once in 256 objects.
    ///
    /// # Errors
    /// `ENFILE` at [`CAPACITY`] objects; `ENOMEM`; those of [`process::enter`].
    pub(crate) fn insert(&self, object: T) -> Result<*mut T, Failure> {
        process::enter().map_err(|Refused(errno, message)| Failure::new(errno, message))?;
        let index = {
            let mut vacant = self.vacant.lock().unwrap_or_else(PoisonError::into_inner);
            match vacant.used.pop_front() {
                Some(index) => index,
                None if (vacant.next as usize) < CAPACITY => {
                    vacant.next += 1;
                    vacant.next - 1
                }
                None => {
                    let name = self.name;
                    return Err(fail!(
                        ENFILE,
                        "{CAPACITY} handles of {name}s exist, the most: destroy some"
                    ));
                }
            }
        };
        let Some(slot) = self.slot_or_made(index) else {
            let mut vacant = self.vacant.lock().unwrap_or_else(PoisonError::into_inner);
            vacant.used.push_front(index);
            let name = self.name;
            return Err(fail!(
                ENOMEM,
                "cannot allocate the table of {CHUNK} more handles of {name}s"
            ));
        };
        let generation = (slot.word.load(Ordering::Relaxed) >> GENERATION_SHIFT) + 1;
        // SAFETY: the slot is vacant (its generation is even, so no call enters it), and its index
        // was taken from the list of vacant ones by this thread alone.
        unsafe { *slot.object.get() = Some(object) };
        let handle: *mut T = Parts { kind: self.kind, generation, index }.encode();
        slot.name.store(handle.addr(), Ordering::Relaxed);
        // Release: whoever sees the generation sees the object and its name.
        slot.word.store(generation << GENERATION_SHIFT, Ordering::Release);
        Ok(handle)
    }

    /// Returns a slot below the capacity, whose chunk is made where there is none; `None` if there is
    /// no memory for it.
    fn slot_or_made(&self, index: u32) -> Option<&Slot<T>> {
        let chunk = self.chunks.get(index as usize / CHUNK)?;
        if chunk.get().is_none() {
            let vacant = || Slot {
                word: AtomicU64::new(0),
                name: AtomicUsize::new(0),
                object: UnsafeCell::new(None),
            };
            let mut made = Vec::new();
            made.try_reserve_exact(CHUNK).ok()?;
            made.extend(std::iter::repeat_with(vacant).take(CHUNK));
            // Else another thread was first.
            let _ = chunk.set(made.into());
        }
        chunk.get()?.get(index as usize % CHUNK)
    }

    /// Returns the object for use beside other threads.
    ///
    /// # Errors
    /// `EBADF`: no such object. `EBUSY`: another call uses it alone.
    #[inline(always)]
    pub(crate) fn get(&self, handle: *mut T) -> Result<Use<'_, T>, Failure>
    where
        T: Sync,
    {
        if let Some((slot, word)) = self.named(handle)
            && word & EXCLUSIVE == 0
            // Acquire: as below.
            && slot
                .word
                .compare_exchange(word, word + 1, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
        {
            return self.entered(slot, word >> GENERATION_SHIFT);
        }
        self.get_slowly(handle)
    }

    /// Returns the object of a slot, in whose word this call is counted.
    #[inline(always)]
    fn entered<'t>(&self, slot: &'t Slot<T>, generation: u64) -> Result<Use<'t, T>, Failure> {
        // SAFETY: the slot has this generation and no exclusive user, and none enters before the
        // `Use` has left, which holds a count. So there is an object.
        match unsafe { &*slot.object.get() } {
            Some(object) => Ok(Use { slot, object }),
            None => {
                slot.word.fetch_sub(1, Ordering::Release);
                Err(self.stale(generation))
            }
        }
    }

    /// Like [`get`](Self::get), with a message where it fails.
    #[cold]
    fn get_slowly(&self, handle: *mut T) -> Result<Use<'_, T>, Failure>
    where
        T: Sync,
    {
        let (slot, generation) = self.find(handle)?;
        self.change(slot, generation, EXCLUSIVE, |word| word + 1)?;
        self.entered(slot, generation)
    }

    /// Changes the word of an object that no other call uses as these bits say. Waits for one that
    /// has it [briefly](Self::get_briefly).
    ///
    /// # Errors
    /// `EBADF`: no such object. `EBUSY`: one of the bits of `others` is set.
    fn change(
        &self,
        slot: &Slot<T>,
        generation: u64,
        others: u64,
        enter: impl Fn(u64) -> u64,
    ) -> Result<(), Failure> {
        let (mut word, mut waited) = (slot.word.load(Ordering::Relaxed), 0_u32);
        loop {
            self.check(word, generation)?;
            if word & BRIEF != 0 {
                pause(waited);
                waited = waited.saturating_add(1);
                word = slot.word.load(Ordering::Relaxed);
                continue;
            }
            if word & others != 0 {
                return Err(self.busy());
            }
            // Acquire: what earlier calls did with the object, and its creation, come before.
            match slot.word.compare_exchange_weak(
                word,
                enter(word),
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(()),
                Err(now) => word = now,
            }
        }
    }

    /// Returns the object for use by this call alone.
    ///
    /// # Errors
    /// `EBADF`: no such object. `EBUSY`: another call uses it.
    #[inline(always)]
    pub(crate) fn get_mut(&self, handle: *mut T) -> Result<Exclusive<'_, T>, Failure> {
        let (slot, generation) = match self.named(handle) {
            // Acquire: what earlier calls did with the object comes before.
            Some((slot, word))
                if word & IN_USE == 0
                    && slot
                        .word
                        .compare_exchange(
                            word,
                            word | EXCLUSIVE,
                            Ordering::Acquire,
                            Ordering::Relaxed,
                        )
                        .is_ok() =>
            {
                (slot, word >> GENERATION_SHIFT)
            }
            _ => self.lock_slowly(handle, EXCLUSIVE)?,
        };
        self.locked(slot, generation)
    }

    /// Returns the object of a slot whose word says that this call has it alone.
    #[inline(always)]
    fn locked<'t>(&self, slot: &'t Slot<T>, generation: u64) -> Result<Exclusive<'t, T>, Failure> {
        // SAFETY: the change of the word, in `get_mut` or `lock_slowly`, has excluded all others
        // until the `Exclusive` leaves.
        match unsafe { &mut *slot.object.get() } {
            Some(object) => Ok(Exclusive { slot, object, generation }),
            None => {
                unlock(slot, generation);
                Err(self.stale(generation))
            }
        }
    }

    /// Like [`get_mut`](Self::get_mut), to read the object: other calls with it wait meanwhile.
    ///
    /// # Errors
    /// `EBADF`: no such object. `EBUSY`: another call uses it.
    pub(crate) fn get_briefly(&self, handle: *mut T) -> Result<Exclusive<'_, T>, Failure> {
        let (slot, generation) = self.lock_slowly(handle, EXCLUSIVE | BRIEF)?;
        self.locked(slot, generation)
    }

    /// Removes the object if `check` allows it. Other calls with the object wait for the check,
    /// which is therefore short, or was made [before](Self::get) where it is likely to refuse.
    ///
    /// # Errors
    /// `EBADF`: no such object. `EBUSY`: another call uses it. Those of `check`; the object is as
    /// before then.
    pub(crate) fn remove(
        &self,
        handle: *mut T,
        check: impl FnOnce(&mut T) -> Result<(), Failure>,
    ) -> Result<T, Failure> {
        let mut object = self.get_briefly(handle)?;
        check(&mut object)?;
        let (slot, generation) = (object.slot, object.generation);
        // Its drop would make the slot usable again.
        std::mem::forget(object);
        // SAFETY: still excluded from `lock_slowly` on.
        let removed = unsafe { (*slot.object.get()).take() };
        let next = generation + 1;
        slot.name.store(0, Ordering::Relaxed);
        slot.word.store(next << GENERATION_SHIFT, Ordering::Release);
        if next < LAST_GENERATION
            && let Some(Parts { index, .. }) = Parts::of(handle)
        {
            self.vacant.lock().unwrap_or_else(PoisonError::into_inner).used.push_back(index);
        }
        removed.ok_or_else(|| self.stale(generation))
    }

    /// Returns the slot whose object has this handle, and its word. A change of that word means that
    /// the object may be another one: the name that was read belongs to it, or to a later word.
    #[inline(always)]
    fn named(&self, handle: *mut T) -> Option<(&Slot<T>, u64)> {
        let index = handle.addr() & ((1 << INDEX_BITS) - 1);
        let slot = self.chunks.get(index / CHUNK)?.get()?.get(index % CHUNK)?;
        // Acquire: the name was stored before.
        let word = slot.word.load(Ordering::Acquire);
        // A vacant slot has the name of a null handle.
        let is_vacant = word >> GENERATION_SHIFT & 1 == 0;
        let is_named = slot.name.load(Ordering::Relaxed) == handle.addr();
        (is_named && !is_vacant).then_some((slot, word))
    }

    /// Excludes all others from the object, as these bits of its word say, with a message where that
    /// fails.
    #[cold]
    fn lock_slowly(&self, handle: *mut T, bits: u64) -> Result<(&Slot<T>, u64), Failure> {
        let (slot, generation) = self.find(handle)?;
        self.change(slot, generation, IN_USE, |word| word | bits)?;
        Ok((slot, generation))
    }

    fn find(&self, handle: *mut T) -> Result<(&Slot<T>, u64), Failure> {
        let Some(parts) = Parts::of(handle) else {
            let (name, value) = (article(self.name), handle.addr());
            return Err(fail!(
                EBADF,
                "{value:#x} is no handle of {name}: pass what its create function stored"
            ));
        };
        let slot = self.chunks.get(parts.index as usize / CHUNK).and_then(OnceLock::get);
        match slot.and_then(|chunk| chunk.get(parts.index as usize % CHUNK)) {
            Some(slot) if parts.kind == self.kind => Ok((slot, parts.generation)),
            _ if parts.kind == self.kind => Err(self.stale(parts.generation)),
            _ => {
                let (name, value) = (article(self.name), handle.addr());
                Err(fail!(EBADF, "{value:#x} is a handle, but not of {name}"))
            }
        }
    }

    /// Checks that the slot has this generation, and an object.
    fn check(&self, word: u64, generation: u64) -> Result<(), Failure> {
        let valid = word >> GENERATION_SHIFT == generation && generation % 2 == 1;
        if valid { Ok(()) } else { Err(self.stale(generation)) }
    }

    #[cold]
    fn stale(&self, generation: u64) -> Failure {
        if generation > LAST_GENERATION {
            let name = article(self.name);
            return fail!(
                EBADF,
                "no handle of {name}, or one of another copy of libpinfold in this process: link it once"
            );
        }
        fail!(EBADF, "the {} has been destroyed: this handle is of an earlier one", self.name)
    }

    #[cold]
    fn busy(&self) -> Failure {
        fail!(
            EBUSY,
            "a call with this {} has not ended: one of another thread, or one whose hook makes this call; wait for it, or \
             use a handle for each thread",
            self.name
        )
    }
}

/// Returns the name of a kind with its article.
#[cold]
fn article(name: &str) -> String {
    let article = if name.starts_with(['a', 'e', 'i', 'o']) { "an" } else { "a" };
    format!("{article} {name}")
}

/// Waits for a call that has the object briefly.
fn pause(attempts: u32) {
    let _ = attempts;
    #[cfg(not(handle_model))]
    {
        // A sleep would be a cancellation point, also in calls that have no other.
        let _uncancelled = process::Uncancelled::new();
        pinfold::core::sync::relax(attempts);
    }
    #[cfg(handle_model)]
    loom::thread::yield_now();
}

/// Ends an exclusive use. Nobody else has changed the word meanwhile.
fn unlock<T>(slot: &Slot<T>, generation: u64) {
    slot.word.store(generation << GENERATION_SHIFT, Ordering::Release);
}

/// An object in use, beside other threads.
pub(crate) struct Use<'t, T> {
    slot: &'t Slot<T>,
    object: &'t T,
}

impl<T> Deref for Use<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.object
    }
}

impl<T> Drop for Use<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: what this call did comes before its destruction.
        self.slot.word.fetch_sub(1, Ordering::Release);
    }
}

/// An object in use by one call alone.
pub(crate) struct Exclusive<'t, T> {
    slot: &'t Slot<T>,
    object: &'t mut T,
    generation: u64,
}

impl<T> Deref for Exclusive<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.object
    }
}

impl<T> DerefMut for Exclusive<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.object
    }
}

impl<T> Drop for Exclusive<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        unlock(self.slot, self.generation);
    }
}

#[cfg(all(test, handle_model))]
mod model;

#[cfg(all(test, not(handle_model)))]
mod tests {
    use super::*;

    const REFUSED_AFTER: std::time::Duration = std::time::Duration::from_millis(500);

    /// Runs `other` while it is decided whether an object is removed, which is refused afterwards.
    #[expect(clippy::unwrap_used, reason = "of tests")]
    fn beside_a_refused_removal<R: Send>(
        other: impl FnOnce(&Table<u32>, *mut u32) -> R + Send,
    ) -> (R, Table<u32>, *mut u32) {
        let table: Table<u32> = Table::new(1, "number");
        let handle = table.insert(7).unwrap();
        // A handle is `Send` as a number.
        let same = handle.addr();
        let deciding = std::sync::Barrier::new(2);
        let result = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                deciding.wait();
                other(&table, without_provenance_mut(same))
            });
            let refused = table.remove(handle, |_| {
                deciding.wait();
                std::thread::sleep(REFUSED_AFTER);
                Err(fail!(EBUSY, "in use"))
            });
            assert_eq!(refused.err().unwrap().errno(), libc::EBUSY);
            other.join().unwrap()
        });
        (result, table, handle)
    }

    #[test]
    fn a_cancelled_thread_waits_for_a_removal() {
        let get = |table: &Table<u32>, handle| {
            process::tests::with_cancel_pending(|| table.get(handle).map(|number| *number).unwrap())
        };
        assert_eq!(beside_a_refused_removal(get).0, 7);
    }

    #[test]
    fn a_handle_is_valid_until_its_object_is_removed_and_never_again() {
        let table: Table<u32> = Table::new(1, "number");
        let first = table.insert(7).unwrap();
        assert_eq!(*table.get(first).unwrap(), 7);
        assert_eq!(table.remove(first, |_| Ok(())).unwrap(), 7);
        assert_eq!(table.get(first).err().unwrap().errno(), libc::EBADF);
        // The same slot, which the old handle does not reach.
        let second = table.insert(8).unwrap();
        assert_ne!(first, second);
        assert_eq!(first.addr() & 0xffff, second.addr() & 0xffff);
        assert_eq!(table.get_mut(first).err().unwrap().errno(), libc::EBADF);
        assert_eq!(table.remove(first, |_| Ok(())).err().unwrap().errno(), libc::EBADF);
        assert_eq!(*table.get(second).unwrap(), 8);
    }

    /// Its name is that of the slots that have no object.
    #[test]
    fn a_null_handle_is_none_of_a_vacant_slot() {
        let table: Table<u32> = Table::new(1, "number");
        let null = std::ptr::null_mut();
        let refused = |table: &Table<u32>| {
            assert!(table.named(null).is_none());
            assert_eq!(table.get(null).err().unwrap().errno(), libc::EBADF);
            assert_eq!(table.get_mut(null).err().unwrap().errno(), libc::EBADF);
        };
        refused(&table);
        let first = table.insert(7).unwrap();
        refused(&table);
        assert!(table.named(first).is_some());
        table.remove(first, |_| Ok(())).unwrap();
        assert!(table.named(first).is_none());
        refused(&table);
        assert_eq!(*table.get(table.insert(8).unwrap()).unwrap(), 8);
    }

    #[test]
    fn calls_share_an_object_or_one_has_it_alone() {
        let table: Table<u32> = Table::new(1, "number");
        let handle = table.insert(7).unwrap();
        let (one, two) = (table.get(handle).unwrap(), table.get(handle).unwrap());
        assert_eq!(table.get_mut(handle).err().unwrap().errno(), libc::EBUSY);
        drop(one);
        assert_eq!(table.remove(handle, |_| Ok(())).err().unwrap().errno(), libc::EBUSY);
        drop(two);
        let alone = table.get_mut(handle).unwrap();
        assert_eq!(table.get(handle).err().unwrap().errno(), libc::EBUSY);
        drop(alone);
        let refused = table.remove(handle, |_| Err(fail!(EBUSY, "in use")));
        assert_eq!(refused.err().unwrap().errno(), libc::EBUSY);
        assert_eq!(*table.get(handle).unwrap(), 7);
    }

    #[test]
    fn no_call_is_refused_for_a_removal_that_is() {
        let shared = |table: &Table<u32>, handle| table.get(handle).map(|number| *number);
        let alone = |table: &Table<u32>, handle| table.get_mut(handle).map(|number| *number);
        let removes = |table: &Table<u32>, handle| table.remove(handle, |_| Ok(()));
        assert_eq!(beside_a_refused_removal(shared).0.unwrap(), 7);
        assert_eq!(beside_a_refused_removal(alone).0.unwrap(), 7);
        let (removed, table, handle) = beside_a_refused_removal(removes);
        assert_eq!(removed.unwrap(), 7);
        assert_eq!(table.get(handle).err().unwrap().errno(), libc::EBADF);
    }

    /// A thread that only yielded would have the processor to itself under SCHED_FIFO, where the
    /// thread that it waits for may need it.
    #[test]
    fn a_call_that_waits_leaves_the_processor_to_others() {
        let used = || {
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the struct is this thread's and outlives the call.
            let got = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
            assert_eq!(got, 0);
            let (seconds, nanoseconds) = (time.tv_sec.try_into(), time.tv_nsec.try_into());
            std::time::Duration::new(seconds.unwrap(), nanoseconds.unwrap())
        };
        let took = |table: &Table<u32>, handle| {
            let before = used();
            assert_eq!(*table.get(handle).unwrap(), 7);
            used() - before
        };
        let (took, ..) = beside_a_refused_removal(took);
        assert!(took < REFUSED_AFTER / 2, "{took:?}");
    }

    #[test]
    fn values_that_are_no_handles_of_the_kind_are_refused() {
        let (table, other): (Table<u32>, Table<u32>) =
            (Table::new(1, "number"), Table::new(2, "digit"));
        let handle = table.insert(7).unwrap();
        let valid = handle.addr();
        for value in [0, 1, usize::MAX, valid ^ (1 << 63), valid + 1, valid + CHUNK] {
            let result = table.get(without_provenance_mut(value));
            assert_eq!(result.err().unwrap().errno(), libc::EBADF, "{value:#x}");
        }
        assert_eq!(other.get(handle).err().unwrap().errno(), libc::EBADF);
    }

    #[test]
    fn the_slot_that_is_vacant_for_longest_is_used_first() {
        let table: Table<u32> = Table::new(1, "number");
        let handles: Vec<_> = (0..3).map(|value| table.insert(value).unwrap()).collect();
        for at in [1, 0, 2] {
            table.remove(handles[at], |_| Ok(())).unwrap();
        }
        let next = |_| table.insert(9).unwrap().addr() & 0xffff;
        assert_eq!([0, 1, 2].map(next), [1, 0, 2]);
    }

    #[test]
    fn a_full_table_refuses_and_takes_again_after_a_removal() {
        let table: Table<u8> = Table::new(1, "byte");
        let handles: Vec<_> = (0..CAPACITY).map(|_| table.insert(0).unwrap()).collect();
        assert_eq!(table.insert(0).err().unwrap().errno(), libc::ENFILE);
        table.remove(handles[1234], |_| Ok(())).unwrap();
        let again = table.insert(1).unwrap();
        assert_eq!(*table.get(again).unwrap(), 1);
    }

    #[test]
    fn a_slot_is_retired_before_its_generations_repeat() {
        let table: Table<u8> = Table::new(1, "byte");
        let handle = table.insert(0).unwrap();
        let (slot, _) = table.find(handle).unwrap();
        slot.word.store((LAST_GENERATION - 1) << GENERATION_SHIFT, Ordering::Relaxed);
        let last = Parts { kind: 1, generation: LAST_GENERATION - 1, index: 0 }.encode();
        table.remove(last, |_| Ok(())).unwrap();
        let next = table.insert(1).unwrap();
        assert_eq!(next.addr() & 0xffff, 1);
    }

    #[test]
    fn threads_that_use_and_destroy_one_object_meet_no_other() {
        let table: &'static Table<u64> = Box::leak(Box::new(Table::new(1, "number")));
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                scope.spawn(move || {
                    for round in 0..5_000 {
                        let value = thread << 32 | round;
                        let handle = table.insert(value).unwrap();
                        let name = handle.expose_provenance();
                        let user = scope.spawn(move || {
                            let handle = without_provenance_mut(name);
                            table.get(handle).map_or(value, |object| *object)
                        });
                        let removed = loop {
                            match table.remove(handle, |_| Ok(())) {
                                Ok(removed) => break removed,
                                Err(failure) => assert_eq!(failure.errno(), libc::EBUSY),
                            }
                        };
                        assert_eq!((removed, user.join().unwrap()), (value, value));
                    }
                });
            }
        });
    }
}
