//! [`Rings`]: the places in tables of io_urings of the program that have an arena or a registration.

use crate::failure::{Failure, fail};
use pinfold::memory::Fixed;
use pinfold::uring::{BufferIndex, RegisterError, set_place};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The places that have one memory.
#[derive(Default)]
pub(crate) struct Rings(Mutex<Vec<Ring>>);

/// A place in a ring's table.
struct Ring {
    /// The number of the descriptor that the program passed.
    fd: c_int,
    place: Place,
    /// A duplicate of it: the number may become another file's.
    ring: OwnedFd,
    /// Other memory has the place now.
    replaced: Arc<AtomicBool>,
}

/// A place of any ring: the numbers of its file, and the index. The numbers of descriptors do not
/// tell rings apart: one ring may have several, and one may become another ring's while the first
/// ring lives. Each ring has a file number of its own, since Linux 5.12.
type Place = (u64, u64, u16);

/// The flag of a place's owner, which becomes true when the place is replaced.
type Holder = Option<Arc<AtomicBool>>;

/// The places that have memory, or are being changed.
static PLACES: Mutex<BTreeMap<Place, Arc<Mutex<Holder>>>> = Mutex::new(BTreeMap::new());

/// Locked for a look-up only.
fn places() -> MutexGuard<'static, BTreeMap<Place, Arc<Mutex<Holder>>>> {
    PLACES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `change` with the place locked, after the list of a memory's rings. The kernel may pin
/// memory meanwhile, for as long as that takes: other places are not locked.
fn change_place<R>(place: Place, change: impl FnOnce(&mut Holder) -> R) -> R {
    let lock = Arc::clone(places().entry(place).or_default());
    let changed = change(&mut lock.lock().unwrap_or_else(PoisonError::into_inner));
    let mut places = places();
    // Two: that of the table and this one. No other thread can get it now.
    if Arc::strong_count(&lock) == 2
        && lock.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    {
        places.remove(&place);
    }
    changed
}

impl Rings {
    /// Locks the list, without the places that have other memory now.
    fn lock(&self) -> MutexGuard<'_, Vec<Ring>> {
        let mut rings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        rings.retain(|ring| !ring.replaced.load(Ordering::Relaxed));
        rings
    }

    /// Returns how many places have the memory.
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    /// Puts the memory in a place.
    ///
    /// # Errors
    /// As `pf_uring_register`: nothing has changed.
    pub(crate) fn register(
        &self,
        memory: Fixed<'_>,
        ring_fd: c_int,
        index: c_uint,
    ) -> Result<(), Failure> {
        let index = u16::try_from(index)
            .map_err(|_| fail!(EINVAL, "place {index}: a ring's table has 16,384"))?;
        let ring = duplicate(ring_fd)?;
        let place = place(ring.as_fd(), index)?;
        let mut rings = self.lock();
        let replaced = change_place(place, |holder| {
            set_place(&ring, BufferIndex::new(index), Some(memory))
                .map_err(|error| refused(&error))?;
            let replaced = Arc::<AtomicBool>::default();
            if let Some(before) = holder.replace(Arc::clone(&replaced)) {
                before.store(true, Ordering::Relaxed);
            }
            Ok::<_, Failure>(replaced)
        })?;
        rings.retain(|other| !other.replaced.load(Ordering::Relaxed));
        rings.push(Ring { fd: ring_fd, place, ring, replaced });
        Ok(())
    }

    /// Removes the memory at a place.
    ///
    /// # Errors
    /// As `pf_uring_unregister`.
    pub(crate) fn unregister(&self, ring_fd: c_int, index: c_uint) -> Result<(), Failure> {
        let mut rings = self.lock();
        let at = |ring: &Ring| c_uint::from(ring.place.2) == index;
        // The ring that has the number now; else the one that had it, and was closed.
        let now = u16::try_from(index).ok().and_then(|index| {
            let ring = duplicate(ring_fd).ok()?;
            place(ring.as_fd(), index).ok()
        });
        let found = rings
            .iter()
            .position(|ring| Some(ring.place) == now)
            .or_else(|| rings.iter().position(|ring| ring.fd == ring_fd && at(ring)));
        let absent = || {
            fail!(
                ENOENT,
                "the memory is not at place {index} of ring {ring_fd}: pass what pf_uring_register got"
            )
        };
        let (at, ring) = found.and_then(|at| Some((at, rings.get(at)?))).ok_or_else(absent)?;
        change_place(ring.place, |holder| {
            // Other memory may have got it before the place was locked.
            if ring.replaced.load(Ordering::Relaxed) {
                return Err(absent());
            }
            match set_place(&ring.ring, BufferIndex::new(ring.place.2), None) {
                Ok(()) | Err(RegisterError::NoTable | RegisterError::NoPlace { .. }) => {}
                Err(error) => return Err(refused(&error)),
            }
            *holder = None;
            Ok(())
        })?;
        rings.swap_remove(at);
        Ok(())
    }
}

fn place(ring: BorrowedFd<'_>, index: u16) -> Result<Place, Failure> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the descriptor is open, and the kernel writes to the struct, which outlives the call.
    if unsafe { libc::fstat(ring.as_raw_fd(), stat.as_mut_ptr()) } != 0 {
        let error = io::Error::last_os_error();
        let errno = error.raw_os_error().unwrap_or(libc::EBADF);
        return Err(Failure::new(errno, format!("cannot tell the ring from others: {error}")));
    }
    // SAFETY: the kernel has written it.
    let stat = unsafe { stat.assume_init() };
    Ok((stat.st_dev, stat.st_ino, index))
}

fn duplicate(fd: c_int) -> Result<OwnedFd, Failure> {
    // SAFETY: the call takes no pointer, and refuses a number that is no open file's.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        let error = io::Error::last_os_error();
        let errno = error.raw_os_error().unwrap_or(libc::EBADF);
        return Err(Failure::new(errno, format!("descriptor {fd} is no ring: {error}")));
    }
    // SAFETY: a new descriptor, which is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

#[cold]
fn refused(error: &RegisterError) -> Failure {
    match error {
        RegisterError::NoTable => fail!(
            ENXIO,
            "the ring has no table of buffers: call io_uring_register_buffers_sparse first"
        ),
        error => Failure::from(error),
    }
}

#[cfg(all(test, not(handle_model)))]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// No file has this device number.
    fn place(index: u16) -> Place {
        (u64::MAX, 1, index)
    }

    fn is_known(place: Place) -> bool {
        places().contains_key(&place)
    }

    /// The kernel pins memory of any size while a place is changed.
    #[test]
    fn a_place_that_is_being_changed_holds_up_no_other() {
        let (begun, begins) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let slow = scope.spawn(move || {
                change_place(place(1), |holder| {
                    begun.send(()).unwrap();
                    ends.recv().unwrap();
                    *holder = Some(Arc::default());
                });
            });
            begins.recv().unwrap();
            // It would not return.
            assert!(change_place(place(2), |holder| holder.is_none()));
            // The same place waits for the end of the change, and sees it.
            let waits = scope.spawn(|| change_place(place(1), |holder| holder.take().is_some()));
            end.send(()).unwrap();
            assert!(waits.join().unwrap());
            slow.join().unwrap();
        });
        assert!(!is_known(place(1)) && !is_known(place(2)));
    }

    #[test]
    fn a_place_is_known_while_it_has_memory() {
        change_place(place(3), |holder| *holder = Some(Arc::default()));
        assert!(is_known(place(3)));
        assert!(change_place(place(3), |holder| holder.is_some()));
        change_place(place(3), |holder| *holder = None);
        assert!(!is_known(place(3)));
    }
}
