//! [`Rings`]: the places in tables of io_urings of the program that have an arena or a registration.

use crate::failure::{Failure, fail};
use pinfold::memory::Fixed;
use pinfold::registered::BufferIndex;
use pinfold::uring::{RegisterError, set_place};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The places that have one memory.
#[derive(Default)]
pub(crate) struct Rings(Mutex<Vec<Ring>>);

/// A place in a ring's table.
struct Ring {
    /// The number of the descriptor that the program passed.
    fd: c_int,
    index: u16,
    /// A duplicate of it: the number may become another file's.
    ring: OwnedFd,
    /// Other memory has the place now.
    replaced: Arc<AtomicBool>,
}

/// Who has each place of a ring's table: what becomes true when it is replaced.
static PLACES: Mutex<BTreeMap<(c_int, u16), Arc<AtomicBool>>> = Mutex::new(BTreeMap::new());

/// Locked while a place is changed. After the list of a memory's rings.
fn places() -> MutexGuard<'static, BTreeMap<(c_int, u16), Arc<AtomicBool>>> {
    PLACES.lock().unwrap_or_else(PoisonError::into_inner)
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
        let index = place(index)?;
        let ring = duplicate(ring_fd)?;
        let mut rings = self.lock();
        let mut places = places();
        set_place(&ring, BufferIndex::new(index), Some(memory)).map_err(|error| refused(&error))?;
        let replaced = Arc::<AtomicBool>::default();
        if let Some(before) = places.insert((ring_fd, index), Arc::clone(&replaced)) {
            before.store(true, Ordering::Relaxed);
        }
        rings.retain(|other| !other.replaced.load(Ordering::Relaxed));
        rings.push(Ring { fd: ring_fd, index, ring, replaced });
        Ok(())
    }

    /// Takes the memory out of a place.
    ///
    /// # Errors
    /// As `pf_uring_unregister`.
    pub(crate) fn unregister(&self, ring_fd: c_int, index: c_uint) -> Result<(), Failure> {
        let mut rings = self.lock();
        let mut places = places();
        // It may have been replaced before the places were locked.
        rings.retain(|ring| !ring.replaced.load(Ordering::Relaxed));
        let found =
            rings.iter().position(|ring| ring.fd == ring_fd && c_uint::from(ring.index) == index);
        let Some((at, ring)) = found.and_then(|at| rings.get(at).map(|ring| (at, ring))) else {
            return Err(fail!(
                ENOENT,
                "the memory is not at place {index} of ring {ring_fd}: pass what pf_uring_register got"
            ));
        };
        match set_place(&ring.ring, BufferIndex::new(ring.index), None) {
            Ok(()) | Err(RegisterError::NoTable | RegisterError::NoPlace { .. }) => {}
            Err(error) => return Err(refused(&error)),
        }
        places.remove(&(ring.fd, ring.index));
        rings.swap_remove(at);
        Ok(())
    }
}

fn place(index: c_uint) -> Result<u16, Failure> {
    u16::try_from(index).map_err(|_| fail!(EINVAL, "place {index}: a ring's table has 16,384"))
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
